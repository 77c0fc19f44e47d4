"""Fingerprints of tasks: over what governs each, and over nothing else, so that nothing else makes it another task.

A task's own definition, the action or agent it uses, an agent's tools, provider and instructions, and what the clauses of
policy say of these very things. Another name in an allow-list, another task, a variable or a key of memory that it does
not read change nothing here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from perdure import canonical
from perdure.definitions.workflow import PROCESS_KINDS, Action, LongTerm, SecretRef
from perdure.rules import authority
from perdure.workflow.document import OWN
from perdure.workflow.expand import LONG_TERM_KINDS
from perdure.workflow.plan import Plan, PlannedTask
from perdure.workflow.requirements import asked, tool_touch, touch_of

VERSION = 1
_ITEMS = {"type": "array", "items": {"type": "object", "required": ["index", "taskId", "state", "output", "error"]}}
_SHAPES: dict[str, Any] = {
    "action": {"type": "object"},
    "agent": {},
    "aggregate": {"type": "object", "required": ["items"], "properties": {"items": _ITEMS}},
    "loop": {"type": "object", "required": ["iterations", "items"],
             "properties": {"iterations": {"type": "integer"}, "items": _ITEMS}},
    "router": {"type": "object", "required": ["selected", "matched", "destinations"]},
    "inputs": {"type": "object"},
    "outputs": {"type": "object"},
}  # fmt: skip
_sorted = msgspec.json.Encoder(order="sorted").encode


def _digest(value: Any) -> str:
    return f"sha256:v{VERSION}:" + canonical.sha256(_sorted(value))


class Fingerprints:
    """The fingerprints of the tasks of one plan. What several tasks use is digested once."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._used: dict[tuple[str, str], str] = {}

    def definition(self, task: PlannedTask) -> str:
        """The fingerprint of a task's definition, ``sha256:v1:`` and hex."""
        own = msgspec.structs.replace(task, definition="", contract="")
        inverse = "" if task.compensate is None else self._of("action", task.compensate.uses.partition(":")[2])
        return _digest(["task", VERSION, own, self._of(task.kind, task.target), inverse])

    def contract(self, task: PlannedTask) -> str:
        """The fingerprint of what a task's output must be."""
        return _digest(["contract", VERSION, self._schema(task)])

    def _schema(self, task: PlannedTask) -> Any:
        if task.output_schema is not None:
            return task.output_schema
        declared = None
        if task.kind == "agent":
            declared = self._plan.agents[task.target].structured_output
        elif task.kind == "action":
            declared = self._plan.actions[task.target].output_schema
        return _SHAPES[task.kind] if declared is None else declared

    def _of(self, kind: str, name: str) -> str:
        """Digest of what an action or agent is, with all it uses."""
        key = (kind, name)
        if key not in self._used:
            value: Any = None
            if kind == "action":
                value = self._action(self._plan.actions[name])
            elif kind == "agent":
                value = self._agent(name)
            self._used[key] = _digest(value)
        return self._used[key]

    def _action(self, action: Action) -> dict[str, Any]:
        plan, policy = self._plan, self._plan.policy
        touch = touch_of(action, plan.mcp_servers, own=plan.dialect == OWN)
        found: dict[str, Any] = {
            "action": msgspec.structs.replace(action, description=""),
            "authority": self._authority(touch),
        }
        if action.kind in {"builtin.read", "builtin.write", *PROCESS_KINDS} or action.artifacts:
            found["workspace"] = [policy.workspace_root]
            if action.kind == "builtin.write":
                found["workspace"] += policy.writable_roots
        if action.kind in PROCESS_KINDS:
            found["process"] = (action.command or "").rpartition("/")[2] in policy.process_allowlist
        found["secrets"] = self._secrets([*action.env.values(), *action.headers.values()])
        if action.kind == "builtin.http":
            found["network"] = [policy.network, sorted(policy.network_allowlist)]
        if action.kind == "mcp.call" and action.server in plan.mcp_servers:
            server = plan.mcp_servers[action.server]
            declared = {action.tool: server.tools[action.tool]} if action.tool in server.tools else {}
            found["server"] = msgspec.structs.replace(server, tools=declared)
            found["network"] = [policy.network, sorted(policy.network_allowlist)] if server.url else []
        if action.kind == "a2a.delegate" and action.peer in plan.a2a_peers:
            found["peer"] = plan.a2a_peers[action.peer]
            found["network"] = [policy.network, sorted(policy.network_allowlist)]
        if action.kind in LONG_TERM_KINDS:
            found["memory"] = plan.memory.long_term or LongTerm()
        return found

    def _agent(self, name: str) -> dict[str, Any]:
        plan = self._plan
        agent, policy = plan.agents[name], plan.policy
        tools = {
            tool: [plan.tools[tool], self._authority(tool_touch(tool, plan.tools[tool]))]
            for tool in sorted(agent.tools)
        }
        kinds = {plan.tools[tool].kind for tool in agent.tools}
        return {
            "agent": msgspec.structs.replace(agent, vars={}, vars_files=(), instructions=None, instructions_file=None),
            "tools": tools, "provider": plan.providers[agent.provider],
            "instructions": canonical.sha256(plan.instructions.get(name, "").encode()),
            "asks": policy.approval == "always",
            "workspace": [policy.workspace_root] if any(kind.startswith("builtin.workspace") for kind in kinds) else [],
            "writable": policy.writable_roots if "builtin.workspace.write" in kinds else [],
        }  # fmt: skip

    def _authority(self, touch: authority.Touch | None) -> list[str]:
        """What policy says of a touch, and what follows if it asks."""
        judged = asked(touch, self._plan.policy)
        ask = isinstance(judged, authority.Asked)
        return [type(judged).__name__.lower(), self._plan.policy.non_interactive if ask else ""]

    def _secrets(self, values: list[SecretRef | str]) -> list[Any]:
        """The roots of policy that secrets can come from, of the kinds of secrets there are."""
        policy = self._plan.policy
        refs = [value for value in values if isinstance(value, SecretRef)]
        return [policy.secret_file_roots if any(ref.file is not None for ref in refs) else []]
