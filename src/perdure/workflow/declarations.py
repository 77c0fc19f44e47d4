"""What must hold of the things that tasks use: actions, tools, agents, providers, servers, sub-workflows, each by itself."""

from __future__ import annotations

import re
from typing import Any

from perdure.definitions.workflow import PROCESS_KINDS, Action, Agent, McpServer, Spec, Subworkflow, Task, ToolContract
from perdure.limits import MIB
from perdure.rules import authority
from perdure.workflow.diagnostics import Diagnostics, nearest
from perdure.workflow.requirements import asked, capabilities_of, tool_touch
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
_PROCESS_FIELDS = ("command", "args", "cwd", "stdin", "container")
_PROCESS_LIMITS: dict[str, Any] = {
    "stdout_limit_bytes": 1 * MIB, "stderr_limit_bytes": 1 * MIB, "combined_output_limit_bytes": 2 * MIB,
    "isolation": "process",
}  # fmt: skip
_NEEDED: dict[str, tuple[str, ...]] = {
    "builtin.shell.exec": ("command",), "extension.process": ("command", "input_schema", "output_schema"),
    "builtin.python": ("call",), "mcp.call": ("server", "tool"), "a2a.delegate": ("peer",),
}  # fmt: skip
_PROTECTED = ("PATH", "HOME")
_PROTECTED_PREFIXES = ("DOCKER_", "CONTAINER_", "TMP", "XDG_")

_SEMVER = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?"
)


class Declarations:
    """The checks of everything a document declares for its tasks to use."""

    def __init__(self, spec: Spec, found: Diagnostics) -> None:
        self._spec = spec
        self._found = found

    def run(self) -> None:
        """Check all of it."""
        spec = self._spec
        for name, action in spec.actions.items():
            self._action(name, action)
        for name, tool in spec.tools.items():
            self._tool(name, tool)
        for name, server in spec.mcp_servers.items():
            self._server(name, server)
        for name, agent in spec.agents.items():
            self._agent(name, agent)
        for name, provider in spec.providers.items():
            if provider.kind == "azure_openai" and not provider.endpoint:
                self._found.add("schema_violation", f"spec.providers.{name}", f"Provider `{name}` needs an endpoint.")
        for name, definition in spec.subworkflows.items():
            self._subworkflow(name, definition)
        self._output_schemas(spec.tasks, "spec.tasks")
        self._packs()

    def _schema(self, schema: Any, path: str, what: str) -> bool:
        """Whether a schema is one; a finding if not. None is no schema, and fine."""
        wrong = None if schema is None else check_schema(schema)
        if wrong:
            self._found.add("invalid_schema", path, f"{what} is no JSON Schema: {wrong}.")
        return not wrong

    def _output_schemas(self, tasks: tuple[Task, ...], at: str) -> None:
        for index, task in enumerate(tasks):
            self._schema(task.output_schema, f"{at}[{index}].outputSchema", f"The outputSchema of `{task.id}`")

    def _subworkflow(self, name: str, definition: Subworkflow) -> None:
        path = f"spec.subworkflows.{name}"
        if not _SEMVER.fullmatch(definition.version):
            said = f"The version of sub-workflow `{name}` is `{definition.version[:64]}`, which is no semantic version."
            self._found.add("schema_violation", f"{path}.version", said, help="For example 1.0.0.")
        self._schema(definition.input_schema, f"{path}.inputSchema", f"The inputSchema of `{name}`")
        self._schema(definition.output_schema, f"{path}.outputSchema", f"The outputSchema of `{name}`")
        self._output_schemas(definition.tasks, f"{path}.tasks")

    def _action(self, name: str, action: Action) -> None:
        path = f"spec.actions.{name}"
        process = action.kind in PROCESS_KINDS
        for field in () if process else _PROCESS_FIELDS:
            if getattr(action, field):
                self._found.add(
                    "schema_violation", f"{path}.{field}", f"Action `{name}` is no process, and has `{field}`."
                )
        for field, usual in () if process else _PROCESS_LIMITS.items():
            if getattr(action, field) != usual:
                said = f"Action `{name}` is no process, and has `{_camel(field)}`."
                self._found.add("schema_violation", f"{path}.{_camel(field)}", said)
        if action.idempotency is not None and action.kind not in ("mcp.call", "extension.process"):
            self._found.add(
                "schema_violation", f"{path}.idempotency", "Only mcp.call and extension.process declare idempotency."
            )
        for field in _NEEDED.get(action.kind, ()):
            if not getattr(action, field):
                said = f"Action `{name}` is {action.kind} and has no `{_camel(field)}`."
                self._found.add("schema_violation", path, said)
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
        self._schema(action.input_schema, f"{path}.inputSchema", f"The inputSchema of action `{name}`")
        self._schema(action.output_schema, f"{path}.outputSchema", f"The outputSchema of action `{name}`")

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
        self._schema(tool.output_schema, f"{path}.outputSchema", f"The outputSchema of tool `{name}`")
        sound = self._schema(tool.input_schema, f"{path}.inputSchema", f"The inputSchema of tool `{name}`")
        if sound and not _is_strict(tool.input_schema):
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
        self._schema(agent.structured_output, f"{path}.structuredOutput", f"structuredOutput of agent `{name}`")
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
        judged = asked(tool_touch(name, tool), policy)
        if isinstance(judged, authority.Refused):
            self._found.add("policy_denied", f"{path}.tools[{index}]", f"Tool `{name}` is denied: {judged.reason}.")
        elif tool.kind == "builtin.workspace.write" and not policy.writable_roots:
            said = f"Tool `{name}` writes files, and no folder may be written."
            self._found.add(
                "policy_denied", f"{path}.tools[{index}]", said, help="Add one to spec.policy.writableRoots."
            )

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


def _camel(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(word.capitalize() for word in rest)
