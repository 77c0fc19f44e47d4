"""Unversioned playbooks, the form before documents had a version: translated, with a warning where they are read."""

from __future__ import annotations

from typing import Any

_AGENT_KINDS: dict[str, str] = {"heuristic": "fake", "fake": "fake", "openai": "openai", "azure_openai": "azure_openai",
                "anthropic": "anthropic", "google": "google"}  # fmt: skip


def translate(value: dict[str, Any]) -> dict[str, Any]:
    """A playbook as a document. What it cannot mean there is left as it is, and judged like any other field."""
    agents, providers = _agents(value.get("agents") or {})
    spec: dict[str, Any] = {
        "actions": value.get("modules") or value.get("actions") or {},
        "agents": agents,
        "providers": {**providers, **(value.get("providers") or {})},
        "tasks": [_task(task) for task in value.get("tasks") or []],
    }
    for field in ("inputs", "vars", "outputs", "tools", "memory"):
        if field in value:
            spec[field] = value[field]
    policy = dict(value.get("policy") or {})
    if "approvalMode" in policy:
        policy["approval"] = policy.pop("approvalMode")
    if "approvalMode" in value:
        policy["approval"] = value["approvalMode"]
    if policy:
        spec["policy"] = policy
    named = value.get("playbook")
    name = named.get("name") if isinstance(named, dict) else named
    return {
        "apiVersion": "agentctl.dev/v1",
        "kind": "Workflow",
        "metadata": {"name": name or "playbook"},
        "spec": {key: item for key, item in spec.items() if item},
    }


def _agents(given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    agents: dict[str, Any] = {}
    providers: dict[str, Any] = {}
    for name, agent in given.items() if isinstance(given, dict) else ():
        fields = dict(agent) if isinstance(agent, dict) else {}
        kind = _AGENT_KINDS.get(str(fields.pop("kind", "openai")), "openai")
        fields.setdefault("provider", kind)
        providers.setdefault(str(fields["provider"]), {"kind": kind})
        fields.setdefault("model", "default")
        agents[name] = fields
    return agents, providers


def _task(task: Any) -> Any:
    if not isinstance(task, dict):
        return task
    fields = dict(task)
    uses = fields.pop("module", fields.get("uses"))
    if isinstance(uses, str):
        fields["uses"] = (
            "action:" + uses.removeprefix("module:") if ":" not in uses or uses.startswith("module:") else uses
        )
    return fields
