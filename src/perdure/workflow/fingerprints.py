"""Fingerprints of tasks: over what governs each, and over nothing else, so that nothing else makes it another task.

A task's own definition, the action or agent it uses, an agent's tools, provider and instructions, and the clauses of policy
it can come up against. Another task's host in an allow-list changes nothing here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perdure import canonical
from perdure.definitions.workflow import PROCESS_KINDS, Action, Policy
from perdure.workflow.plan import Plan, PlannedTask

VERSION = 1
_FILES = ("builtin.read", "builtin.write")
_OBJECT = {"type": "object"}


def _digest(value: Any) -> str:
    return canonical.digest(msgspec.json.decode(msgspec.json.encode(value)))


def _policy_of(action: Action, policy: Policy) -> dict[str, Any]:
    """The clauses of a policy that an action can come up against."""
    found: dict[str, Any] = {
        "toolsAllow": policy.tools_allow,
        "toolsDeny": policy.tools_deny,
        "approval": policy.approval,
    }
    if action.kind in _FILES or action.artifacts:
        found |= {"workspaceRoot": policy.workspace_root, "writableRoots": policy.writable_roots}
    if action.kind in PROCESS_KINDS:
        name = (action.command or "").rpartition("/")[2]
        found |= {"workspaceRoot": policy.workspace_root, "process": name in policy.process_allowlist,
                  "environment": policy.environment_allowlist}  # fmt: skip
    if action.kind == "builtin.http":
        found |= {"network": msgspec.to_builtins(policy.network)}
    return found


def _governing(task: PlannedTask, plan: Plan) -> dict[str, Any]:
    if task.kind == "action":
        action = plan.actions[task.target]
        used: dict[str, Any] = {"action": msgspec.to_builtins(action), "policy": _policy_of(action, plan.policy)}
        if action.server is not None and action.server in plan.mcp_servers:
            used["server"] = msgspec.to_builtins(plan.mcp_servers[action.server])
        if action.peer is not None and action.peer in plan.a2a_peers:
            used["peer"] = msgspec.to_builtins(plan.a2a_peers[action.peer])
        return used
    if task.kind == "agent":
        agent = plan.agents[task.target]
        tools = {name: msgspec.to_builtins(plan.tools[name]) for name in agent.tools if name in plan.tools}
        provider = plan.providers.get(agent.provider)
        policy = plan.policy
        return {
            "agent": msgspec.to_builtins(agent), "tools": tools,
            "provider": None if provider is None else msgspec.to_builtins(provider),
            "instructions": canonical.digest(plan.instructions.get(task.target, agent.instructions or "")),
            "policy": {"toolsAllow": policy.tools_allow, "toolsDeny": policy.tools_deny, "approval": policy.approval},
        }  # fmt: skip
    return {}


def definition(task: PlannedTask, plan: Plan) -> str:
    """The fingerprint of a task's definition, ``sha256:v1:`` and hex."""
    own = msgspec.to_builtins(msgspec.structs.replace(task, definition="", contract=""))
    return f"sha256:v{VERSION}:" + _digest(["task", VERSION, own, _governing(task, plan)])


def contract(task: PlannedTask, plan: Plan) -> str:
    """The fingerprint of what a task's output must be."""
    return f"sha256:v{VERSION}:" + _digest(["contract", VERSION, _schema(task, plan)])


def _schema(task: PlannedTask, plan: Plan) -> Any:
    if task.output_schema is not None:
        return task.output_schema
    if task.kind == "agent" and plan.agents[task.target].structured_output is not None:
        return plan.agents[task.target].structured_output
    return _OBJECT if task.kind != "agent" else {}
