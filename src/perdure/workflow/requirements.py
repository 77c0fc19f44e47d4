"""What a run of a plan will need of the outside: providers, tools, effects, processes. Pure."""

from __future__ import annotations

from typing import Any

from perdure.definitions.workflow import PROCESS_KINDS, Action, McpTool, Spec
from perdure.rules import authority
from perdure.workflow.plan import (
    EffectNeed,
    Plan,
    PlannedTask,
    Predictability,
    ProviderNeed,
    Requirements,
    capability_class,
)

_FULLY = ("builtin.assign", "builtin.assert", "builtin.memory.read", "builtin.memory.write",
          "builtin.long_term_memory.promote", "builtin.wait", "builtin.approval")  # fmt: skip
_PARTIALLY = ("builtin.read", "builtin.write")
_READS = ("GET", "HEAD")


def predictability_of(task: PlannedTask, spec: Spec) -> Predictability:
    """How far a task's outcome is known before it is run."""
    if task.kind == "agent":
        return "requires_execution"
    if task.kind != "action":
        return "fully"
    action = spec.actions.get(task.target)
    if action is None or action.kind in _FULLY:
        return "fully"
    return "partially" if action.kind in _PARTIALLY else "requires_execution"


def effect_of(action: Action, plan: Plan) -> tuple[str, str, str, str]:
    """The kind, class, risk and capability of an action's effect; the kind ``pure`` has none."""
    kind = action.kind
    if kind in PROCESS_KINDS:
        return "process_execution", capability_class(action.idempotency), action.risk or "high", "process.exec"
    if kind == "builtin.http":
        declared = "observe" if action.method in _READS else ("keyed" if action.idempotency_header else "once")
        return "network", declared, action.risk or "medium", "network.http"
    if kind == "builtin.python":
        return action.effect_kind, action.effect, action.risk or "medium", "python.call"
    if kind == "mcp.call":
        declared_tool = _declared(action, plan)
        if declared_tool is not None:
            return "network", declared_tool.promised, action.risk or declared_tool.risk, "mcp.call"
        return "network", capability_class(action.idempotency), action.risk or "medium", "mcp.call"
    return _EFFECTS.get(kind, ("pure", "pure", "low", kind))


def _declared(action: Action, plan: Plan) -> McpTool | None:
    """What the document declares of the MCP tool an action calls."""
    server = plan.mcp_servers.get(action.server or "")
    return None if server is None else server.tools.get(action.tool or "")


_EFFECTS: dict[str, tuple[str, str, str, str]] = {
    "builtin.read": ("observe", "observe", "low", "filesystem.read"),
    "builtin.write": ("workspace_mutate", "idempotent", "medium", "filesystem.write"),
    "builtin.memory.write": ("internal_state", "keyed", "low", "memory.write"),
    "builtin.long_term_memory.promote": ("internal_state", "keyed", "low", "memory.write"),
    "builtin.long_term_memory.read": ("observe", "observe", "low", "long_term_memory.read"),
    "builtin.long_term_memory.search": ("observe", "observe", "low", "long_term_memory.search"),
    "builtin.long_term_memory.write": ("external_mutate", "idempotent", "low", "long_term_memory.write"),
    "builtin.long_term_memory.reindex": ("internal_state", "idempotent", "low", "long_term_memory.reindex"),
    "builtin.approval": ("internal_state", "pure", "low", "approval"),
    "a2a.delegate": ("remote_agent", "once", "medium", "a2a.delegate"),
}


def requirements_of(plan: Plan) -> Requirements:
    """Everything a run of the plan will need, in a stable order."""
    effects, processes = [], set()
    agents: dict[str, set[str]] = {}
    for id in plan.order:
        task = plan.tasks[id]
        if task.kind == "agent":
            agent = plan.agents[task.target]
            agents.setdefault(agent.provider, set()).add(task.target)
            declared = "once" if agent.model_calls == "once" else "observe"
            always = plan.policy.approval == "always"
            effects.append(_need(id, "model", "model", declared, always, task.predictability))
        elif task.kind == "action":
            action = plan.actions[task.target]
            kind, effect_class, risk, capability = effect_of(action, plan)
            if kind == "pure":
                continue
            declared_tool = _declared(action, plan)
            touch = authority.Touch(
                (capability, action.kind), kind, risk, approval="policy" if declared_tool is None else declared_tool.approval,
                remote=kind == "network" and effect_class not in ("pure", "observe") and plan.dialect == "perdure.dev/v1",
            )  # fmt: skip
            policy = plan.policy
            asked = authority.decide(touch, mode=policy.approval, allow=policy.tools_allow, deny=policy.tools_deny)
            possible = isinstance(asked, authority.Asked) or action.kind == "builtin.approval"
            effects.append(_need(id, action.kind, kind, effect_class, possible, task.predictability))
            if action.kind in PROCESS_KINDS and action.command:
                processes.add(action.command)
            server = plan.mcp_servers.get(action.server or "") if action.kind == "mcp.call" else None
            if server is not None and server.command:
                processes.add(server.command)
    providers = [_provider(plan, name, sorted(used)) for name, used in sorted(agents.items())]
    tools = sorted({tool for name in plan.agents for tool in plan.agents[name].tools if _used(plan, name)})
    return Requirements(
        providers=tuple(providers), tools=tuple(tools), effects=tuple(effects), processes=tuple(sorted(processes))
    )


def _need(
    task: str, operation: str, kind: str, effect_class: str, asked: bool, predictability: Predictability
) -> EffectNeed:
    return EffectNeed(
        task=task, operation=operation, kind=kind, effect_class=effect_class, approval_possible=asked,
        predictability=predictability,
    )  # fmt: skip


def _used(plan: Plan, agent: str) -> bool:
    return any(task.kind == "agent" and task.target == agent for task in plan.tasks.values())


def _provider(plan: Plan, name: str, agents: list[str]) -> ProviderNeed:
    needs: set[str] = {"text", "usage", "cancellation"}
    for agent in agents:
        needs |= capabilities_of(plan.agents[agent])
    return ProviderNeed(
        name=name, kind=plan.providers[name].kind, agents=tuple(agents), capabilities=tuple(sorted(needs))
    )


def capabilities_of(agent: Any) -> set[str]:
    """What an agent needs its provider to be able to do."""
    needs = set()
    if agent.tools:
        needs |= {"function_tools", "continuation"}
    if agent.structured_output is not None:
        needs.add("structured_output")
    if agent.reasoning is not None:
        needs.add("reasoning_effort")
        if agent.reasoning.mode is not None:
            needs.add("reasoning_mode")
    if agent.stream:
        needs.add("streaming")
    options = agent.provider_options
    if "store" in options:
        needs.add("response_storage")
    if "promptCacheMode" in options or "promptCacheTtl" in options:
        needs.add("prompt_caching")
    return needs
