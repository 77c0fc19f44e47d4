"""Tools of an agent inside a workflow: contracts of the document, and what a protocol server offers, as tools."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from perdure import canonical
from perdure.definitions.context import ToolContext
from perdure.definitions.schema import Codec, codec_of
from perdure.definitions.tool import Tool
from perdure.definitions.workflow import Action, Policy, ToolContract
from perdure.engine.attempt import Attempt
from perdure.errors import Invalid
from perdure.ports.executor import Call, Executor, Workspace
from perdure.rules import authority
from perdure.workflow.plan import Plan, capability_class
from perdure.workflow.schemas import problem

CONTEXT = "perdure_context"
_EXECUTED_BY = {"builtin.workspace.read": "builtin.read", "builtin.workspace.write": "builtin.write"}
_encode = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, eq=False, repr=False)
class SchemaTool(Tool):
    """A tool whose arguments are described by a JSON Schema, and arrive as they are."""

    arguments: Mapping[str, Any] | None = None  # the schema

    def parameters(self) -> dict[str, Any]:
        """See :meth:`Tool.parameters`."""
        return dict(self.arguments or {})

    def decode_arguments(self, raw: str | bytes) -> dict[str, Any]:
        """See :meth:`Tool.decode_arguments`."""
        body = raw.encode("utf-8", "replace") if isinstance(raw, str) else raw
        value = canonical.decode(body if body.strip() else b"{}", f"The arguments of `{self.name}`")
        wrong = "they are no object" if not isinstance(value, dict) else problem(self.arguments, value)
        if wrong or CONTEXT in value:
            raise Invalid(f"The arguments of `{self.name}` do not fit: {wrong or 'a reserved name'}.")
        return dict(value)

    def arguments_json(self, raw: str | bytes) -> bytes:
        """See :meth:`Tool.arguments_json`."""
        return _encode(self.decode_arguments(raw))

    def _make_contract(self) -> str:
        return canonical.digest({
            "name": self.name, "parameters": self.arguments, "result": self.result_codec.schema(), "class": self.effect,
            "kind": self.kind, "version": self.version,
        })  # fmt: skip


def schema_codec(schema: Any) -> Codec:
    """The codec of values that fit a JSON Schema."""

    def read(raw: bytes) -> Any:
        value = canonical.decode(raw)
        if wrong := problem(schema, value):
            raise ValueError(wrong)
        return value

    return Codec(Any, canonical.encode, read, dict(schema), is_native=False)


def make(
    name: str,
    fn: Callable[..., Any],
    *,
    description: str,
    arguments: Mapping[str, Any],
    output: Any,
    effect: str,
    kind: str,
    risk: str,
    timeout: float | None,
    approval: bool,
    version: str = "",
) -> SchemaTool:
    """A tool from its schema. Its failure fails the task; what it raises says nothing of its own means unknown."""
    return SchemaTool(
        fn=fn, name=name, effect=effect, kind=kind, risk=risk, timeout=timeout, steps=False, approval=approval,
        version=version, key=None, on_exception="unknown" if effect == "once" else "refused", on_failure="fail",
        refusals=(), is_async=True, context_parameter=CONTEXT, secrets=frozenset(),
        result_codec=schema_codec(output) if output else codec_of(Any), _parameters=(),
        _decoder=msgspec.json.Decoder(), _description=description, arguments=arguments,
    )  # fmt: skip


class Tools:
    """The tools of the agents of one attempt."""

    def __init__(self, attempt: Attempt, plan: Plan, executors: Mapping[str, Executor], workspace: Workspace) -> None:
        self._attempt = attempt
        self._plan = plan
        self._executors = executors
        self._workspace = workspace

    def of(self, task: str, names: tuple[str, ...]) -> list[Tool]:
        """The tools an agent may call, as its policy lets it."""
        return [self._tool(task, name, self._plan.tools[name]) for name in names]

    def _tool(self, task: str, name: str, contract: ToolContract) -> Tool:
        policy: Policy = self._plan.policy
        touch = authority.Touch(
            (name, contract.capability, contract.kind), contract.effect_class, contract.risk, approval=contract.approval
        )
        allowed = authority.decide(touch, mode=policy.approval, allow=policy.tools_allow, deny=policy.tools_deny)
        if isinstance(allowed, authority.Refused):
            raise Invalid(f"Tool {name!r} is denied by policy: {allowed.reason}.")
        return make(
            name, self._body(task, contract), description=contract.description, arguments=contract.input_schema,
            output=contract.output_schema, effect=capability_class(contract.idempotency), kind=contract.effect_class,
            risk=contract.risk, timeout=float(contract.timeout_seconds or 120), approval=isinstance(allowed, authority.Asked),
        )  # fmt: skip

    def _body(self, task: str, contract: ToolContract) -> Callable[..., Any]:
        if contract.kind == "builtin.echo":

            async def echo(**arguments: Any) -> Any:
                arguments.pop(CONTEXT)
                return arguments

            return echo
        executor = self._executors.get(_EXECUTED_BY[contract.kind])
        if executor is None:
            raise Invalid(f"Nothing here performs {contract.kind!r}.")
        reads = contract.kind == "builtin.workspace.read"

        async def touch(**arguments: Any) -> Any:
            context: ToolContext = arguments.pop(CONTEXT)
            call = self._call(task, context, contract, arguments)
            found = await executor.prepare(call) or await executor.execute(call)
            text = str(found.result.get("content", "") if reads else arguments.get("content", ""))
            body = text.encode("utf-8", "replace")
            told = {"path": arguments.get("path"), "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
            return {**told, "content": text} if reads else told

        return touch

    def _call(self, task: str, context: ToolContext, contract: ToolContract, arguments: dict[str, Any]) -> Call:
        async def note(name: str, value: Any) -> None:
            raise Invalid("A tool of a workspace notes nothing.")

        kind = _EXECUTED_BY[contract.kind]
        return Call(
            run=context.run, task=task, attempt=1, effect="", key=context.key, action=Action(kind=kind),  # type: ignore[arg-type]
            input=arguments, workspace=self._workspace, policy=self._plan.policy,
            timeout=float(contract.timeout_seconds or 120), note=note, diff=False,
        )  # fmt: skip
