"""What must hold of the expanded tasks of a document: each finding with its place, none hides another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from perdure.definitions.workflow import PROCESS_KINDS, RENDERED_FIELDS, Action, Agent, McpServer, ToolContract
from perdure.rules import authority
from perdure.workflow import templates
from perdure.workflow.diagnostics import nearest
from perdure.workflow.document import OWN, Source
from perdure.workflow.expand import Draft, Expansion
from perdure.workflow.expressions import ExpressionError, Reference
from perdure.workflow.requirements import capabilities_of
from perdure.workflow.schemas import check_schema

_COMMON = {"text", "usage", "cancellation", "function_tools", "structured_output", "continuation"}
_OPENAI = _COMMON | {
    "reasoning_effort", "reasoning_mode", "persisted_reasoning", "prompt_caching", "multiple_function_calls",
    "response_storage", "streaming",
}  # fmt: skip
_ABLE = {
    "fake": _COMMON | {"streaming"}, "openai": _OPENAI, "azure_openai": _OPENAI,
    "anthropic": _COMMON | {"reasoning_effort", "streaming"}, "google": _COMMON | {"reasoning_effort", "streaming"},
}  # fmt: skip
_OPENAI_OPTIONS: dict[str, Any] = {
    "store": bool, "reasoningContext": ("auto", "current_turn", "all_turns"), "promptCacheMode": ("implicit", "explicit"),
    "promptCacheTtl": ("30m",), "parallelToolCalls": bool, "safetyIdentifier": str,
}  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {
    "fake": {"toolInput": dict, "finalText": str, "delayMs": int, "failFirst": int},
    "openai": _OPENAI_OPTIONS, "azure_openai": _OPENAI_OPTIONS, "anthropic": {}, "google": {},
}  # fmt: skip
_TOOL_CONTRACTS = {
    "builtin.workspace.read": ("filesystem.read", "observe", ("idempotent",)),
    "builtin.workspace.write": ("filesystem.write", "workspace_mutate", ("idempotent", "keyed")),
    "builtin.echo": ("internal", "pure", ("pure",)),
}
_WRITERS = ("builtin.memory.write", "builtin.long_term_memory.promote")
_MUTATING = (
    "builtin.write", "builtin.shell.exec", "extension.process", "builtin.memory.write", "builtin.http", "builtin.python",
    "builtin.long_term_memory.write", "builtin.long_term_memory.promote", "mcp.call", "a2a.delegate",
)  # fmt: skip
_PROCESS_FIELDS = ("command", "args", "cwd", "stdin", "container")
_NEEDED: dict[str, tuple[str, ...]] = {
    "builtin.shell.exec": ("command",), "extension.process": ("command", "input_schema", "output_schema"),
    "builtin.http": (), "builtin.python": ("call",), "mcp.call": ("server", "tool"), "a2a.delegate": ("peer",),
}  # fmt: skip
_PROTECTED = ("PATH", "HOME")
_PROTECTED_PREFIXES = ("DOCKER_", "CONTAINER_", "TMP", "XDG_")


class Checks:
    """The checks of one document."""

    def __init__(self, source: Source, drafts: list[Draft], instructions: dict[str, str]) -> None:
        self._spec = source.document.spec
        self._found = source.diagnostics
        self._own = source.dialect == OWN
        self._drafts = drafts
        self._by_id = {draft.id: draft for draft in drafts}
        self._instructions = instructions

    def run(self) -> None:
        """Everything but what needs the order of tasks."""
        if len(self._by_id) < len(self._drafts):
            seen: set[str] = set()
            for draft in self._drafts:
                if draft.id in seen:
                    self._found.add(
                        "duplicate_task", draft.path, f"The task id `{draft.id}` is used twice after expansion."
                    )
                seen.add(draft.id)
        for name, action in self._spec.actions.items():
            self._action(name, action)
        for name, tool in self._spec.tools.items():
            self._tool(name, tool)
        for name, server in self._spec.mcp_servers.items():
            self._server(name, server)
        for name, agent in self._spec.agents.items():
            self._agent(name, agent)
        for name, provider in self._spec.providers.items():
            if provider.kind == "azure_openai" and not provider.endpoint:
                self._found.add("schema_violation", f"spec.providers.{name}", f"Provider `{name}` needs an endpoint.")
        for draft in self._drafts:
            self._draft(draft)
        self._outputs()
        self._packs()

    # -- tasks ------------------------------------------------------------------------------------------------------------
    def _draft(self, draft: Draft) -> None:
        self._uses(draft)
        self._templates(draft)
        self._writes(draft)
        self._compensation(draft)
        if draft.route is not None:
            self._route(draft)
        for name, schema in (("outputSchema", draft.output_schema), ("inputSchema", draft.input_schema)):
            if schema is not None and (wrong := check_schema(schema)):
                self._found.add(
                    "invalid_schema", f"{draft.path}.{name}", f"The {name} of `{draft.id}` is no JSON Schema: {wrong}."
                )

    def _uses(self, draft: Draft) -> None:
        kind, _, name = draft.uses.partition(":")
        path = f"{draft.path}.uses"
        if draft.kind not in ("action", "agent"):
            return
        known: Iterable[str]
        if kind == "action":
            known = self._spec.actions
        elif kind == "agent":
            known = self._spec.agents
        else:
            if kind != "team":
                self._found.add("schema_violation", path, f"Task `{draft.id}` uses `{draft.uses}`.",
                                help="Write action:NAME, agent:NAME, workflow:NAME or router.")  # fmt: skip
            return
        if name not in known:
            self._found.add("missing_reference", path, f"There is no {kind} `{name}`.", help=nearest(name, known))

    def _templates(self, draft: Draft) -> None:
        places: list[tuple[str, Any, str]] = [("with", draft.with_, "value"), ("when", draft.when, "condition")]
        places.append(("loop.while", draft.guard, "condition"))
        if draft.route is not None:
            places.append(("route.select", draft.route.select, "exact"))
        places.append(("outputs", draft.outputs, "value"))
        for name, value, shape in places:
            if value is not None:
                self._template(draft, f"{draft.path}.{name}", value, shape)
        if draft.kind == "agent":
            text = self._instructions.get(draft.target, "")
            self._template(draft, f"spec.agents.{draft.target}.instructions", text, "value")
        if draft.kind == "action" and draft.target in self._spec.actions:
            action = self._spec.actions[draft.target]
            self._template(draft, f"spec.actions.{draft.target}.with", action.with_, "value")
            for field in RENDERED_FIELDS:
                value = getattr(action, field)
                if value:
                    plain = msgspec.json.decode(msgspec.json.encode(value))
                    self._template(draft, f"spec.actions.{draft.target}.{field}", plain, "value")

    def _template(self, draft: Draft, path: str, value: Any, shape: str) -> None:
        try:
            if shape == "condition":
                references = templates.condition(value).references
            elif shape == "exact":
                exact = templates.exact(value)
                if exact is None:
                    self._found.add(
                        "invalid_template",
                        path,
                        f"{path.rpartition('.')[2]} of `{draft.id}` is not exactly one template.",
                    )
                    return
                references = exact.references
            else:
                references = templates.parse(value).references
        except ExpressionError as error:
            place = getattr(error, "place", "")
            full = (
                (path + place if place.startswith("[") else f"{path}.{place}") if place and place != "value" else path
            )
            self._found.add("invalid_template", full, error.message, help=error.help)
            return
        for reference in sorted(references):
            self._reference(draft, path, reference, value)

    def _reference(self, draft: Draft, path: str, reference: Reference, value: Any) -> None:
        at = self._inner_place(path, reference, value)
        if reference.root == "tasks":
            id = reference.path[0] if reference.path else ""
            if id not in self._by_id:
                self._found.add(
                    "missing_reference", at, f"`{reference}`: there is no task `{id}`.", help=nearest(id, self._by_id)
                )
            elif id not in draft.needs:
                self._found.add("missing_reference", at, f"Task `{draft.id}` reads `{id}` and does not need it.",
                                help=f"Add `{id}` to its needs.")  # fmt: skip
        elif reference.root == "vars" and reference.path:
            name = reference.path[0]
            if (
                name not in draft.vars
                and not (name == "loopPrevious" and draft.previous)
                and not (draft.guard is not None and name in ("loopIndex", "loopPrevious"))
            ):
                self._found.add("missing_reference", at, f"`{reference}`: task `{draft.id}` has no variable `{name}`.",
                                help=nearest(name, draft.vars))  # fmt: skip

    def _inner_place(self, path: str, reference: Reference, value: Any) -> str:
        """The place of the string in which a reference stands."""
        if isinstance(value, str):
            return path
        try:
            for place, text in templates.strings(value):
                if "${{" in text and reference in templates.parse(text).references:
                    return path + (place if place.startswith("[") else f".{place}")
        except ExpressionError:
            pass
        return path

    def _writes(self, draft: Draft) -> None:
        action = self._spec.actions.get(draft.target) if draft.kind == "action" else None
        writer = action is not None and action.kind in _WRITERS
        path = f"{draft.path}.memoryWrites"
        if not writer:
            if draft.memory_writes:
                self._found.add("schema_violation", path, f"Task `{draft.id}` writes no working memory.")
            draft.memory_writes = None
            return
        assert action is not None
        key = draft.with_.get("key", action.with_.get("key"))
        declared = draft.memory_writes
        if declared is not None and (len(set(declared)) < len(declared) or not declared):
            self._found.add(
                "schema_violation", path, f"The memoryWrites of `{draft.id}` are empty or hold a key twice."
            )
        if not isinstance(key, str):
            self._found.add("schema_violation", f"{draft.path}.with", f"Task `{draft.id}` needs a `key`.")
        elif "${{" in key:
            if not declared:
                self._found.add(
                    "schema_violation",
                    path,
                    f"The key of `{draft.id}` is a template; memoryWrites must name what it may be.",
                )
        elif declared is None:
            draft.memory_writes = (key,)
        elif key not in declared:
            self._found.add("schema_violation", path, f"The memoryWrites of `{draft.id}` do not hold its key `{key}`.")

    def _compensation(self, draft: Draft) -> None:
        inverse = draft.compensate
        if inverse is None:
            return
        path = f"{draft.path}.compensate"
        kind, _, name = inverse.uses.partition(":")
        action = self._spec.actions.get(name) if kind == "action" else None
        if action is None:
            self._found.add(
                "missing_reference",
                f"{path}.uses",
                f"`{inverse.uses}` is no action.",
                help=nearest(name, self._spec.actions),
            )
        elif action.kind not in _MUTATING:
            self._found.add(
                "schema_violation", f"{path}.uses", f"`{inverse.uses}` changes nothing, so it undoes nothing."
            )
        if not self._may_mutate(draft):
            self._found.add(
                "schema_violation", path, f"Task `{draft.id}` changes nothing, so there is nothing to undo."
            )
        try:
            for reference in sorted(templates.parse(inverse.with_).references):
                if reference.root == "tasks" and reference.path[0] not in self._by_id:
                    self._found.add(
                        "missing_reference", f"{path}.with", f"`{reference}`: there is no task `{reference.path[0]}`."
                    )
        except ExpressionError as error:
            self._found.add("invalid_template", f"{path}.with", error.message, help=error.help)

    def _may_mutate(self, draft: Draft) -> bool:
        if draft.kind == "action":
            action = self._spec.actions.get(draft.target)
            return action is None or action.kind in _MUTATING
        if draft.kind == "agent":
            agent = self._spec.agents.get(draft.target)
            tools = [self._spec.tools[name] for name in (agent.tools if agent else ()) if name in self._spec.tools]
            return any(tool.effect_class not in ("pure", "observe", "model") for tool in tools)
        return False

    def _route(self, draft: Draft) -> None:
        assert draft.route is not None
        path = f"{draft.path}.route"
        seen: dict[str, str] = {}
        values: list[Any] = []
        for index, case in enumerate(draft.route.cases):
            if any(type(case.equals) is type(value) and case.equals == value for value in values):
                self._found.add(
                    "schema_violation", f"{path}.cases[{index}].equals", f"Router `{draft.id}` has a case twice."
                )
            values.append(case.equals)
            self._destinations(draft, f"{path}.cases[{index}].tasks", case.tasks, seen)
        self._destinations(draft, f"{path}.default", draft.route.default, seen)

    def _destinations(self, draft: Draft, path: str, tasks: tuple[str, ...], seen: dict[str, str]) -> None:
        for index, id in enumerate(tasks):
            at = f"{path}[{index}]"
            target = self._by_id.get(id)
            if id in seen:
                self._found.add("schema_violation", at, f"Router `{draft.id}` leads to `{id}` twice.")
            seen[id] = at
            if target is None:
                self._found.add("missing_reference", at, f"Router `{draft.id}` leads to `{id}`, which does not exist.",
                                help=nearest(id, self._by_id))  # fmt: skip
            elif draft.id not in target.needs and not any(draft.id in self._by_id[c].needs for c in target.children):
                self._found.add("missing_reference", at, f"`{id}` is a destination of `{draft.id}` and does not need it.",
                                help=f"Add `{draft.id}` to the needs of `{id}`.")  # fmt: skip

    def cycle(self, circle: list[Draft]) -> None:
        """A circle of needs was found."""
        names = " -> ".join([draft.id for draft in reversed(circle)] + [circle[-1].id])
        self._found.add("dependency_cycle", f"{circle[0].path}.needs", f"Tasks need each other in a circle: {names}.")

    def memory_conflicts(self, order: list[str]) -> None:
        """Tasks that may run side by side and write the same key of working memory."""
        if self._spec.runtime.max_concurrency == 1 or len(order) < len(self._drafts):
            return
        writers: dict[str, list[Draft]] = {}
        for draft in self._drafts:
            for key in draft.memory_writes or ():
                writers.setdefault(key, []).append(draft)
        shared = {key: drafts for key, drafts in writers.items() if len(drafts) > 1}
        if not shared:
            return
        bit = {id: 1 << place for place, id in enumerate(order)}
        before: dict[str, int] = {}
        for id in order:
            mask = 0
            for need in self._by_id[id].needs:
                mask |= before[need] | bit[need]
            before[id] = mask
        for key, drafts in shared.items():
            for index, one in enumerate(drafts):
                for other in drafts[index + 1 :]:
                    if not (before[one.id] & bit[other.id] or before[other.id] & bit[one.id]):
                        self._found.add("memory_conflict", f"{other.path}.memoryWrites",
                                        f"`{one.id}` and `{other.id}` may run side by side and both write `{key}`.",
                                        help="Let one need the other, or write other keys.")  # fmt: skip

    def budgets(self, expansion: Expansion, tasks: int) -> None:
        """Limits that the plan itself goes over."""
        limits = self._spec.runtime.budgets
        for name, limit, count in (
            ("maxTasks", limits.max_tasks, tasks),
            ("maxExpansionItems", limits.max_expansion_items, expansion.items),
            ("maxLoopIterations", limits.max_loop_iterations, expansion.iterations),
        ):
            if limit is not None and count > limit:
                self._found.add(
                    "budget_exceeded",
                    f"spec.runtime.budgets.{name}",
                    f"The workflow has {count:,}; {name} is {limit:,}.",
                )
        if limits.max_cost_microusd is not None or any(
            agent.usage_limit and agent.usage_limit.max_cost_usd for agent in self._spec.agents.values()
        ):
            self._prices(limits.max_cost_microusd is not None)

    def _prices(self, whole: bool) -> None:
        pricing = self._spec.runtime.pricing
        for name, agent in self._spec.agents.items():
            limited = whole or (agent.usage_limit is not None and agent.usage_limit.max_cost_usd is not None)
            if limited and (pricing is None or f"{agent.provider}/{agent.model}" not in pricing.models):
                self._found.add("unsupported_capability", f"spec.agents.{name}",
                                f"A cost limit needs a price for `{agent.provider}/{agent.model}`.",
                                help="Add it to spec.runtime.pricing.models.")  # fmt: skip

    # -- what tasks use -----------------------------------------------------------------------------------------------------
    def _action(self, name: str, action: Action) -> None:
        path = f"spec.actions.{name}"
        process = action.kind in PROCESS_KINDS
        for field in () if process else _PROCESS_FIELDS:
            if getattr(action, field):
                self._found.add(
                    "schema_violation", f"{path}.{field}", f"Action `{name}` is no process, and has `{field}`."
                )
        if action.idempotency is not None and action.kind not in ("mcp.call", "extension.process"):
            self._found.add(
                "schema_violation", f"{path}.idempotency", "Only mcp.call and extension.process declare idempotency."
            )
        for field in _NEEDED.get(action.kind, ()):
            if not getattr(action, field):
                words = field.partition("_")
                camel = words[0] + words[2].capitalize()
                self._found.add("schema_violation", path, f"Action `{name}` is {action.kind} and has no `{camel}`.")
        if action.isolation == "container" and action.container is None:
            self._found.add("schema_violation", f"{path}.isolation", f"Action `{name}` needs a container block.")
        for key in action.env:
            if key in _PROTECTED or key.startswith(_PROTECTED_PREFIXES):
                self._found.add("schema_violation", f"{path}.env.{key}", f"Action `{name}` may not set `{key}`.")
        if action.server is not None and action.server not in self._spec.mcp_servers:
            self._found.add("missing_reference", f"{path}.server", f"There is no MCP server `{action.server}`.",
                            help=nearest(action.server, self._spec.mcp_servers))  # fmt: skip
        if action.peer is not None and action.peer not in self._spec.a2a_peers:
            self._found.add("missing_reference", f"{path}.peer", f"There is no A2A peer `{action.peer}`.",
                            help=nearest(action.peer, self._spec.a2a_peers))  # fmt: skip
        if process and action.command and action.command.rpartition("/")[2] not in self._spec.policy.process_allowlist:
            self._found.add("policy_denied", f"{path}.command", f"processAllowlist does not name `{action.command}`.",
                            help="Add it to spec.policy.processAllowlist.")  # fmt: skip
        for field in ("input_schema", "output_schema"):
            schema = getattr(action, field)
            if schema is not None and (wrong := check_schema(schema)):
                self._found.add("invalid_schema", path, f"A schema of action `{name}` is none: {wrong}.")

    def _server(self, name: str, server: McpServer) -> None:
        path = f"spec.mcpServers.{name}"
        if (server.url is None) == (server.command is None):
            self._found.add("schema_violation", path, f"MCP server `{name}` needs either a url or a command.")
        allowed = self._spec.policy.process_allowlist
        if server.command is not None and server.command.rpartition("/")[2] not in allowed:
            self._found.add("policy_denied", f"{path}.command", f"processAllowlist does not name `{server.command}`.",
                            help="Add it to spec.policy.processAllowlist.")  # fmt: skip
        for field in ("args", "cwd", "env") if server.command is None else ("headers",):
            if getattr(server, field):
                by = "a url" if server.command is None else "a command"
                self._found.add("schema_violation", f"{path}.{field}", f"MCP server `{name}` has {by}, and `{field}`.")

    def _tool(self, name: str, tool: ToolContract) -> None:
        path = f"spec.tools.{name}"
        capability, effect, idempotency = _TOOL_CONTRACTS[tool.kind]
        for field, value, wanted in (
            ("capability", tool.capability, (capability,)),
            ("effectClass", tool.effect_class, (effect,)),
            ("idempotency", tool.idempotency, idempotency),
        ):
            if value not in wanted:
                self._found.add(
                    "schema_violation",
                    f"{path}.{field}",
                    f"Tool `{name}` is {tool.kind}; its {field} is {' or '.join(wanted)}.",
                )
        if tool.secrets or tool.network:
            self._found.add("schema_violation", path, f"Tool `{name}` is built in; it has no secrets and no network.")
        schema = tool.input_schema
        if wrong := check_schema(schema):
            self._found.add("invalid_schema", f"{path}.inputSchema", f"The inputSchema of `{name}` is none: {wrong}.")
        elif not _is_strict(schema):
            self._found.add("invalid_schema", f"{path}.inputSchema", f"The inputSchema of `{name}` is not strict.",
                            help="type: object, additionalProperties: false, every property in required.")  # fmt: skip

    def _agent(self, name: str, agent: Agent) -> None:
        path = f"spec.agents.{name}"
        provider = self._spec.providers.get(agent.provider)
        for index, tool in enumerate(agent.tools):
            if tool not in self._spec.tools:
                self._found.add("missing_reference", f"{path}.tools[{index}]", f"There is no tool `{tool}`.",
                                help=nearest(tool, self._spec.tools))  # fmt: skip
            else:
                self._tool_allowed(path, index, tool)
        if agent.structured_output is not None and (wrong := check_schema(agent.structured_output)):
            self._found.add(
                "invalid_schema",
                f"{path}.structuredOutput",
                f"structuredOutput of `{name}` is no JSON Schema: {wrong}.",
            )
        if provider is None:
            self._found.add("missing_reference", f"{path}.provider", f"There is no provider `{agent.provider}`.",
                            help=nearest(agent.provider, self._spec.providers))  # fmt: skip
            return
        policy = self._spec.policy
        if policy.providers and agent.provider not in policy.providers:
            self._found.add("policy_denied", f"{path}.provider", f"policy.providers does not name `{agent.provider}`.")
        for need in sorted(capabilities_of(agent) - _ABLE[provider.kind]):
            self._found.add(
                "unsupported_capability",
                path,
                f"Provider `{agent.provider}` ({provider.kind}) has no {need}, which `{name}` needs.",
            )
        known = _OPTIONS[provider.kind]
        for option, value in agent.provider_options.items():
            at = f"{path}.providerOptions.{option}"
            if option not in known:
                self._found.add(
                    "unsupported_capability",
                    at,
                    f"`{option}` is no option of {provider.kind}.",
                    help=nearest(option, known),
                )
            elif not _fits(value, known[option]):
                self._found.add("schema_violation", at, f"`{option}` of {provider.kind} may not be {value!r:.60}.")

    def _tool_allowed(self, path: str, index: int, name: str) -> None:
        tool, policy = self._spec.tools[name], self._spec.policy
        touch = authority.Touch(
            (name, tool.capability, tool.kind), tool.effect_class, tool.risk, approval=tool.approval
        )
        judged = authority.decide(touch, mode=policy.approval, allow=policy.tools_allow, deny=policy.tools_deny)
        if isinstance(judged, authority.Refused):
            self._found.add("policy_denied", f"{path}.tools[{index}]", f"Tool `{name}` is denied: {judged.reason}.")

    def _outputs(self) -> None:
        try:
            references = templates.parse(self._spec.outputs).references
        except ExpressionError as error:
            place = getattr(error, "place", "")
            self._found.add(
                "invalid_template", f"spec.outputs.{place}" if place else "spec.outputs", error.message, help=error.help
            )
            return
        for reference in sorted(references):
            if reference.root == "tasks" and reference.path[0] not in self._by_id:
                at = self._inner_place("spec.outputs", reference, self._spec.outputs)
                self._found.add("missing_reference", at, f"`{reference}`: there is no task `{reference.path[0]}`.",
                                help=nearest(reference.path[0], self._by_id))  # fmt: skip

    def _packs(self) -> None:
        if self._spec.packs:
            self._found.add("unsupported_capability", "spec.packs", "Packs are not supported by this release.",
                            help="Write their items into the document.")  # fmt: skip
        memory = self._spec.memory.long_term
        if memory is not None and memory.embedding.provider != "local_hash":
            self._found.add("unsupported_capability", "spec.memory.longTerm.embedding.provider",
                            "This release embeds with `local_hash` only.")  # fmt: skip


def _is_strict(schema: Any) -> bool:
    if (
        not isinstance(schema, dict)
        or schema.get("type") != "object"
        or schema.get("additionalProperties") is not False
    ):
        return False
    return set(schema.get("properties", {})) == set(schema.get("required", []))


def _fits(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        return value in wanted
    return isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
