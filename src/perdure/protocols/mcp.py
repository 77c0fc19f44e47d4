"""``mcp.call``: tools of MCP servers, over HTTP or as child processes, through the official SDK.

What a tool promises is declared by our own document; what a server says of itself never authorises anything, and an
undeclared tool is of class ``once``. Arguments are held to the tool's schema before anything is sent. A call that may have
reached its server and came to nothing is in doubt; it is sent once more only if its class can bear it and its server still
describes it by the same schemas.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from perdure.definitions.workflow import Action, Approval, McpServer, McpTool, Policy
from perdure.errors import Invalid
from perdure.executors import network
from perdure.executors.network import Resolve
from perdure.executors.secret_values import shown
from perdure.limits import INLINE_BYTES_MAX
from perdure.ports.executor import Call, EffectClass, Facts, Failed, InDoubt, Performed, Produced, Risk, Workspace
from perdure.protocols._session import Connection, Listed, check
from perdure.protocols._wire import Sent
from perdure.workflow.schemas import problem

_PROMISES: dict[str, EffectClass] = {"pure": "pure", "idempotent": "idempotent", "keyed": "keyed"}
_BINARY = ("image", "audio")
_encode = msgspec.json.Encoder().encode

Told = Callable[[Mapping[str, Any]], Awaitable[None]]
"""Told durably what a tool is, before it is called."""


class Offered(msgspec.Struct, frozen=True):
    """A tool of a server as an agent may be given it.

    Attributes:
        description, input_schema, output_schema: what the server says. digest: of its name and schemas.
        effect, risk, approval: what our document declares; nothing of it is the server's.
    """

    server: str
    name: str
    description: str
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None
    digest: str
    effect: EffectClass
    risk: Risk
    approval: Approval


class Mcp:
    """The servers of one attempt. Each is connected to, or started, when it is first used.

    Args:
        servers: by name. policy, workspace: what they may reach, read and start.
        resolver: asked for the addresses of a name.
    """

    kinds = frozenset({"mcp.call"})

    def __init__(
        self,
        servers: Mapping[str, McpServer],
        policy: Policy,
        workspace: Workspace,
        resolver: Resolve = network.system_resolve,
    ) -> None:
        self._servers = servers
        self._policy = policy
        self._workspace = workspace
        self._resolver = resolver
        self._connections: dict[str, Connection] = {}
        self._retired: list[Connection] = []
        self._locks: dict[str, asyncio.Lock] = {}

    async def close(self) -> None:
        """Let every server go: connections are closed, processes end. Bounded."""
        connections = [*self._connections.values(), *self._retired]
        self._connections, self._retired = {}, []
        if connections:
            await asyncio.gather(*(connection.close() for connection in connections))

    # -- as an executor -----------------------------------------------------------------------------------------------
    def describe(self, action: Action, input: Mapping[str, Any]) -> Facts:
        """See ``ports.executor.Executor.describe``."""
        name, server, tool = self._named(action)
        declared = server.tools.get(tool)
        promised = _PROMISES.get(action.idempotency or "", "once") if declared is None else declared.promised
        risk = action.risk or (declared.risk if declared is not None else "medium")
        request: dict[str, Any] = {"server": name, "tool": tool, "arguments": dict(_arguments(input))}
        if server.url is not None:
            request |= {"url": server.url, "headers": shown(dict(server.headers))}
        else:
            request |= {"command": server.command, "args": list(server.args), "env": shown(server.env)}
        approval = "policy" if declared is None else declared.approval
        return Facts(f"mcp.call:{name}.{tool}", "network", promised, risk, "mcp.call", request, approval)

    async def prepare(self, call: Call) -> Performed | None:
        """See ``ports.executor.Executor.prepare``: by words only, nothing is started."""
        name, server, _ = self._named(call.action)
        _arguments(call.input)
        await asyncio.to_thread(check, name, server, self._policy, self._workspace)
        return None

    async def execute(self, call: Call) -> Performed:
        """See ``ports.executor.Executor.execute``."""
        name, _, tool = self._named(call.action)
        noted = call.notes.get("tool")
        facts = self.describe(call.action, call.input)

        async def told(what: Mapping[str, Any]) -> None:
            if noted is None:
                await call.note("tool", dict(what))

        earlier = noted.get("digest") if isinstance(noted, dict) else None
        return await self.call(
            name, tool, _arguments(call.input), effect=facts.effect_class, key=call.key, timeout=call.timeout,
            digest=earlier, told=told, output_schema=call.action.output_schema,
        )  # fmt: skip

    async def predict(self, call: Call) -> Any:
        """See ``ports.executor.Executor.predict``: nothing is started."""
        await self.prepare(call)
        return {"status": "requires_execution", "changed": False}

    def _named(self, action: Action) -> tuple[str, McpServer, str]:
        if not action.server or not action.tool:
            raise Invalid("mcp.call needs a `server` and a `tool`.")
        return action.server, self._server(action.server), action.tool

    def _server(self, name: str) -> McpServer:
        found = self._servers.get(name)
        if found is None:
            raise Invalid(f"There is no MCP server {name!r}.", help="Add it to spec.mcpServers.")
        return found

    # -- as tools of agents -------------------------------------------------------------------------------------------
    async def tools(self, server: str) -> tuple[Offered, ...]:
        """What a server offers, with what our document declares of it. Connects to it if need be.

        Raises:
            Denied: policy forbids it. Failed: it cannot be had. Invalid: it can never be had as written.
        """
        definition = self._server(server)
        connection = await self._connection(server, definition)
        found = []
        for tool in connection.tools.values():
            declared = definition.tools.get(tool.name, McpTool())
            found.append(
                Offered(
                    server, tool.name, tool.description, tool.input_schema, tool.output_schema, tool.digest,
                    declared.promised, declared.risk, declared.approval,
                )
            )  # fmt: skip
        return tuple(found)

    async def call(
        self,
        server: str,
        name: str,
        arguments: Mapping[str, Any],
        *,
        effect: EffectClass | None = None,
        key: str = "",
        timeout: float | None = None,
        digest: str | None = None,
        told: Told | None = None,
        output_schema: Any = None,
    ) -> Performed:
        """Call a tool once; once more if the connection broke and its class can bear it.

        Args:
            effect: its class; by default what our document declares.
            key: the idempotency key, given to the server in ``_meta``.
            timeout: seconds for all of it; by default the server's.
            digest: of the schemas that an earlier try of this very call was made by.
            told: called with what the tool is before it is called.
            output_schema: of our own, beside the server's.

        Raises:
            Denied, Invalid: it may not or can never be called. Failed: it did not succeed. InDoubt: nobody can say.
        """
        definition = self._server(server)
        promised = effect or definition.tools.get(name, McpTool()).promised
        limit = float(definition.timeout_seconds) if timeout is None else timeout
        asked = _Asked(server, name, arguments, key, promised != "once", Sent(b'"tools/call"'), digest)
        try:
            async with asyncio.timeout(limit):
                tool, connection, raw = await self._called(asked, definition, told)
        except TimeoutError:
            said = f"{server}.{name} did not answer within {limit:g} s."
            if asked.sent.left:
                raise InDoubt(said, kind="timeout") from None
            raise Failed(f"{said} It was not called.", kind="timeout") from None
        return _performed(connection, tool, raw, promised, output_schema)

    async def _called(
        self, asked: _Asked, definition: McpServer, told: Told | None
    ) -> tuple[Listed, Connection, dict[str, Any]]:
        """The raw answer of a tool, over a second connection if the first broke."""
        while True:
            try:
                connection = await self._connection(asked.server, definition)
            except Failed as failed:
                raise (asked.lost if asked.lost is not None and asked.sent.left else failed) from failed
            tool = connection.tools.get(asked.name)
            if asked.digest is not None and (tool is None or tool.digest != asked.digest):
                raise _changed(asked)
            if tool is None:
                offered = ", ".join(sorted(connection.tools)[:20]) or "nothing"
                said = f"MCP server {asked.server!r} has no tool {asked.name!r}; it offers {offered}."
                raise Failed(connection.clean(said), kind="protocol")
            if asked.lost is None:
                _hold(f"{asked.server}.{asked.name}", tool.input_schema, asked.arguments)
                if told is not None:
                    await told({"digest": tool.digest, "protocol": connection.version, "server": connection.info})
            try:
                return tool, connection, await connection.call(asked.name, asked.arguments, asked.key, asked.sent)
            except (Failed, InDoubt) as error:
                if asked.sent.forgotten:
                    await self._let_go(asked.server, connection)
                if isinstance(asked.lost, InDoubt) and error.kind != "tool":
                    raise asked.lost from error
                if error.kind != "transport" or not asked.repeatable or asked.lost is not None:
                    raise
                asked.lost, asked.digest = error, tool.digest
                await self._let_go(asked.server, connection)

    async def _connection(self, name: str, server: McpServer) -> Connection:
        """The connection to a server: the one there is, or a new one."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            found = self._connections.get(name)
            if found is not None and found.usable:
                return found
            if found is not None:
                del self._connections[name]
                await found.close()
            await asyncio.to_thread(check, name, server, self._policy, self._workspace)
            made = Connection(name, server, self._policy, self._workspace, self._resolver)
            await made.open()
            self._connections[name] = made
            return made

    async def _let_go(self, name: str, connection: Connection) -> None:
        """Use a connection for no other call. What others still wait for over it, they get."""
        if self._connections.get(name) is connection:
            del self._connections[name]
        if connection.usable:
            self._retired.append(connection)
        else:
            await connection.close()


@dataclass
class _Asked:
    """One call. ``lost``: how its first try broke."""

    server: str
    name: str
    arguments: Mapping[str, Any]
    key: str
    repeatable: bool
    sent: Sent
    digest: str | None
    lost: Failed | InDoubt | None = None


def _arguments(input: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of the tool.

    Raises:
        Invalid: they are none.
    """
    found = input.get("arguments", {})
    if other := sorted(input.keys() - {"arguments"}):
        raise Invalid(f"mcp.call takes `arguments` and no {other[0]!r}.", help="Put it under `arguments`.")
    if not isinstance(found, Mapping):
        raise Invalid("The `arguments` of mcp.call are no object.")
    return found


def _hold(who: str, schema: Any, arguments: Mapping[str, Any]) -> None:
    """Hold arguments to the server's schema before anything is sent."""
    try:
        wrong = problem(schema, arguments)
    except Invalid as error:
        raise Failed(f"{who}: its schema cannot be used: {error.message}", kind="protocol") from error
    if wrong:
        raise Failed(f"The arguments do not fit {who}: {wrong}.", kind="protocol")


def _changed(asked: _Asked) -> Failed | InDoubt:
    """The server describes the tool otherwise than when it was called; it is not called again."""
    said = f"MCP server {asked.server!r} describes {asked.name!r} otherwise than when it was called before."
    if asked.lost is None:  # an earlier process called it
        return InDoubt(said, kind="protocol")
    if not asked.sent.left:
        return Failed(f"{asked.lost} {said}", kind="protocol")
    return InDoubt(f"{asked.lost} {said}", kind="protocol")


# -- results -------------------------------------------------------------------------------------------------------------
def _performed(
    connection: Connection, tool: Listed, raw: Mapping[str, Any], effect: EffectClass, output_schema: Any
) -> Performed:
    """The result of a call that was answered: its text, its value, and what is neither; bytes become files."""
    who = f"{connection.name}.{tool.name}"
    if raw.get("resultType", "complete") != "complete" or "content" not in raw:
        raise Failed(f"{who} asks for more input, and there is nobody to give it.", kind="protocol")
    produced: list[Produced] = []
    content = [_kept(part, tool.name, place, produced) for place, part in enumerate(raw["content"])]
    text = "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    content = [part for part in content if part.get("type") != "text"]
    structured = raw.get("structuredContent")
    told: dict[str, Any] = {
        "status": "succeeded", "changed": effect not in ("pure", "observe"), "text": text, "content": content,
        "structured": structured,
    }  # fmt: skip
    told = _clean(told, connection)
    if raw.get("isError"):
        said = f"{who} failed: {text.strip() or 'it says no more'}"
        raise Failed(connection.clean(said), kind="tool", output=_small({**told, "status": "failed"}))
    if tool.output_schema is not None:
        _usable(who, "the server's own schema", tool.output_schema, structured)
    if output_schema is not None:
        _usable(who, "outputSchema", output_schema, structured if structured is not None else _value(text))
    return Performed(told, tuple(produced))


def _usable(who: str, what: str, schema: Any, value: Any) -> None:
    try:
        wrong = problem(schema, value)
    except Invalid as error:
        wrong = error.message
    if wrong:
        raise Failed(f"{who} was called, and what it returned does not fit {what}: {wrong}.", kind="output")


def _kept(part: Mapping[str, Any], tool: str, place: int, produced: list[Produced]) -> dict[str, Any]:
    """A part of a result as it is kept: bytes become a file, named by its digest."""
    found = dict(part)
    holder, field = found, "data"
    if found.get("type") == "resource":
        holder = found["resource"] = dict(found.get("resource") or {})
        field = "blob"
    elif found.get("type") not in _BINARY:
        return found
    if field not in holder:
        return found
    try:
        data = base64.b64decode(str(holder.pop(field)), validate=True)
    except ValueError as error:
        raise Failed(f"{tool} was called, and part {place + 1} of its result is no base64.", kind="output") from error
    holder |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    produced.append(Produced(f"{tool}-{place + 1}", data=data, media_type=str(holder.get("mimeType", ""))))
    return found


def _clean(value: Any, connection: Connection) -> Any:
    """A value without the secrets its server was given."""
    match value:
        case str():
            return connection.secretless(value)
        case list():
            return [_clean(item, connection) for item in value]
        case dict():
            return {connection.secretless(name): _clean(item, connection) for name, item in value.items()}
        case _:
            return value


def _small(told: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a failure: all of it, or its beginning."""
    if len(_encode(told)) <= INLINE_BYTES_MAX:
        return told
    return {"status": told["status"], "text": told["text"][:1000]}


def _value(text: str) -> Any:
    """A text as the JSON it is, or as itself."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
