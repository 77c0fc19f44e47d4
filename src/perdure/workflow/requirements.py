"""What a run of a plan will need of the outside: providers, tools, effects, processes. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from perdure.definitions.workflow import PROCESS_KINDS, Action, Agent, McpServer, McpTool, Policy, ToolContract
from perdure.rules import authority
from perdure.workflow.document import OWN
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


def predictability_of(task: PlannedTask, actions: Mapping[str, Action]) -> Predictability:
    """How far a task's outcome is known before it is run."""
    if task.kind == "agent":
        return "requires_execution"
    if task.kind != "action":
        return "fully"
    action = actions.get(task.target)
    if action is None or action.kind in _FULLY:
        return "fully"
    return "partially" if action.kind in _PARTIALLY else "requires_execution"


def effect_of(action: Action, servers: Mapping[str, McpServer]) -> tuple[str, str, str, str]:
    """The kind, class, risk and capability of an action's effect; the kind ``pure`` has none.

    Args:
        servers: of MCP, by name: a document declares there what a tool promises.
    """
    kind = action.kind
    if kind in PROCESS_KINDS:
        return "process_execution", capability_class(action.idempotency), action.risk or "high", "process.exec"
    if kind == "builtin.http":
        declared = "observe" if action.method in _READS else ("keyed" if action.idempotency_header else "once")
        return "network", declared, action.risk or "medium", "network.http"
    if kind == "builtin.python":
        return action.effect_kind, action.effect, action.risk or "medium", "python.call"
    if kind == "mcp.call":
        declared_tool = _declared(action, servers)
        if declared_tool is not None:
            return "network", declared_tool.promised, action.risk or declared_tool.risk, "mcp.call"
        return "network", capability_class(action.idempotency), action.risk or "medium", "mcp.call"
    return _EFFECTS.get(kind, ("pure", "pure", "low", kind))


def _declared(action: Action, servers: Mapping[str, McpServer]) -> McpTool | None:
    """What the document declares of the MCP tool an action calls."""
    server = servers.get(action.server or "") if action.kind == "mcp.call" else None
    return None if server is None else server.tools.get(action.tool or "")


def touch_of(action: Action, servers: Mapping[str, McpServer], *, own: bool) -> authority.Touch | None:
    """What policy judges of an action before its input is known; None: nothing is judged.

    Args:
        own: whether the document is of our own dialect, in which a protocol call is a mutation unless declared otherwise.
    """
    kind, effect_class, risk, capability = effect_of(action, servers)
    if kind == "pure" or action.kind == "builtin.approval":
        return None
    operation: str = action.kind
    if action.kind == "mcp.call":
        operation = f"mcp.call:{action.server}.{action.tool}"
    elif action.kind == "a2a.delegate":
        operation = f"a2a.delegate:{action.peer}"
    declared = _declared(action, servers)
    return authority.Touch(
        (capability, operation), kind, risk, approval="policy" if declared is None else declared.approval,
        remote=own and kind == "network" and effect_class not in ("pure", "observe"),
    )  # fmt: skip


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


def asked(touch: authority.Touch | None, policy: Policy) -> authority.Authority:
    """What a policy says of a touch."""
    if touch is None:
        return authority.Allowed()
    return authority.decide(
        touch, mode=policy.approval, allow=policy.tools_allow, deny=policy.tools_deny, providers=policy.providers
    )


def tool_touch(name: str, tool: ToolContract) -> authority.Touch:
    """What policy judges of a tool that a model calls."""
    return authority.Touch((name, tool.capability, tool.kind), tool.effect_class, tool.risk, approval=tool.approval)


def requirements_of(plan: Plan) -> Requirements:
    """Everything a run of the plan will need, in a stable order."""
    effects: list[EffectNeed] = []
    processes: set[str] = set()
    agents: dict[str, set[str]] = {}
    tools: set[str] = set()
    for id in plan.order:
        task = plan.tasks[id]
        if task.kind == "agent":
            agent = plan.agents[task.target]
            agents.setdefault(agent.provider, set()).add(task.uses.partition(":")[2])
            tools.update(agent.tools)
            effects += _agent_needs(task, agent, plan)
        elif task.kind == "action":
            action = plan.actions[task.target]
            kind, effect_class, _, _ = effect_of(action, plan.mcp_servers)
            if kind == "pure":
                continue
            touch = touch_of(action, plan.mcp_servers, own=plan.dialect == OWN)
            possible = isinstance(asked(touch, plan.policy), authority.Asked) or action.kind == "builtin.approval"
            effects.append(_need(id, action.kind, kind, effect_class, possible, task.predictability))
            processes.update(_processes(action, plan))
    providers = [_provider(plan, name, sorted(used)) for name, used in sorted(agents.items())]
    return Requirements(
        providers=tuple(providers),
        tools=tuple(sorted(tools)),
        effects=tuple(effects),
        processes=tuple(sorted(processes)),
    )


def _agent_needs(task: PlannedTask, agent: Agent, plan: Plan) -> list[EffectNeed]:
    """The calls of its model, and of each tool it may call."""
    declared = "once" if agent.model_calls == "once" else "observe"
    always = plan.policy.approval == "always"
    found = [_need(task.id, "model", "model", declared, always, task.predictability)]
    for name in agent.tools:
        tool = plan.tools[name]
        if tool.effect_class != "pure":
            possible = isinstance(asked(tool_touch(name, tool), plan.policy), authority.Asked)
            promised = capability_class(tool.idempotency)
            found.append(_need(task.id, name, tool.effect_class, promised, possible, task.predictability))
    return found


def _processes(action: Action, plan: Plan) -> list[str]:
    server = plan.mcp_servers.get(action.server or "") if action.kind == "mcp.call" else None
    commands = [action.command if action.kind in PROCESS_KINDS else None, server.command if server else None]
    return [command for command in commands if command]


def _need(
    task: str, operation: str, kind: str, effect_class: str, asked: bool, predictability: Predictability
) -> EffectNeed:
    return EffectNeed(
        task=task, operation=operation, kind=kind, effect_class=effect_class, approval_possible=asked,
        predictability=predictability,
    )  # fmt: skip


def _provider(plan: Plan, name: str, agents: list[str]) -> ProviderNeed:
    needs: set[str] = {"text", "usage", "cancellation"}
    for agent in agents:
        needs |= capabilities_of(plan.agents[agent])
    return ProviderNeed(
        name=name, kind=plan.providers[name].kind, agents=tuple(agents), capabilities=tuple(sorted(needs))
    )


def capabilities_of(agent: Agent) -> set[str]:
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
    if "reasoningContext" in options:
        needs.add("persisted_reasoning")
    if "parallelToolCalls" in options:
        needs.add("multiple_function_calls")
    if "store" in options:
        needs.add("response_storage")
    if "promptCacheMode" in options or "promptCacheTtl" in options:
        needs.add("prompt_caching")
    return needs
