"""One connection to an MCP server: opened once, shared by the calls of an attempt, closed by the task that opened it.

What the SDK leaves open is decided here: whether a call may have reached the server when it came to nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any

import httpx2
import mcp_types as types
import msgspec
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, KNOWN_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS
from pydantic import TypeAdapter, ValidationError

from perdure import canonical
from perdure.definitions.workflow import McpServer, Policy
from perdure.errors import Denied, Error, Invalid, Unavailable
from perdure.executors import network
from perdure.executors.network import Resolve
from perdure.executors.process import environment, folder, program
from perdure.executors.secret_values import texts, without
from perdure.limits import MCP_PAGES_MAX, MCP_TOOLS_MAX, PROTOCOL_FAREWELL_SECONDS, PROTOCOL_TEXT_CHARS_MAX
from perdure.ports.executor import Failed, InDoubt, Workspace
from perdure.protocols._child import Child
from perdure.protocols._wire import Sent, client, resolved, watching

for _name in ("mcp", "client"):  # what the SDK logs goes where the program sends it, and nowhere of itself
    logging.getLogger(_name).addHandler(logging.NullHandler())
_RAW: TypeAdapter[Any] = TypeAdapter(dict[str, Any])
_NOT_CARRIED_OUT = (
    types.INVALID_REQUEST, types.METHOD_NOT_FOUND, types.INVALID_PARAMS, types.HEADER_MISMATCH,
    types.MISSING_REQUIRED_CLIENT_CAPABILITY, types.UNSUPPORTED_PROTOCOL_VERSION,
)  # fmt: skip
_LOST = (types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT, types.PARSE_ERROR)
"""What the SDK itself says when there is no answer; a server that says it tells no more."""


class Listed(msgspec.Struct, frozen=True):
    """A tool as its server describes it. ``digest``: of its name and both schemas."""

    name: str
    description: str
    input_schema: dict[str, Any]
    output_schema: dict[str, Any] | None
    digest: str


class Connection:
    """A server that can be asked. Not reusable.

    Attributes:
        tools: what it offers, by name. version: of the protocol. info: its name and version.
    """

    def __init__(self, name: str, server: McpServer, policy: Policy, workspace: Workspace, resolver: Resolve) -> None:
        self.name = name
        self.tools: dict[str, Listed] = {}
        self.version = ""
        self.info: dict[str, Any] = {}
        self._server, self._policy, self._workspace, self._resolver = server, policy, workspace, resolver
        self._child: Child | None = None
        self._known: list[str] = []
        self._opening = Sent()
        self._session: ClientSession
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    @property
    def usable(self) -> bool:
        """Whether a call can be sent."""
        child = self._child
        return self._owner is not None and not self._owner.done() and (child is None or not child.gone)

    def clean(self, text: str) -> str:
        """A bounded text without the secrets this server was given."""
        return self.secretless(text)[:PROTOCOL_TEXT_CHARS_MAX]

    def secretless(self, text: str) -> str:
        """A text without the secrets this server was given."""
        return without(text, self._known)

    # -- its life -----------------------------------------------------------------------------------------------------
    async def open(self) -> None:
        """Connect, agree on a version and list the tools, within the server's ``timeoutSeconds``.

        Raises:
            Denied: policy forbids it. Failed: it cannot be had; nothing was called.
        """
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.ensure_future(self._own(ready))
        try:
            async with asyncio.timeout(self._server.timeout_seconds):
                await ready
        except TimeoutError:
            await self.close()
            said = f"MCP server {self.name!r} was not ready within {self._server.timeout_seconds} s."
            raise Failed(self._more(said), kind="timeout") from None
        except asyncio.CancelledError:
            await self.close()
            raise

    async def close(self) -> None:
        """Let the server go. Bounded."""
        owner = self._owner
        if owner is None:
            return
        self._closing.set()
        done, _ = await asyncio.wait([owner], timeout=PROTOCOL_FAREWELL_SECONDS)
        if not done:
            owner.cancel()
            await asyncio.wait([owner])

    async def _own(self, ready: asyncio.Future[None]) -> None:
        """Hold the connection from its beginning to its end, in one task, as its parts demand."""
        watching.set(self._opening)
        try:
            async with AsyncExitStack() as stack:
                await self._connect(stack)
                if not ready.cancelled():
                    ready.set_result(None)
                await self._closing.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - whoever waits is told
            if not ready.done():
                ready.set_exception(self._opening_error(error))
        finally:
            ready.cancel()

    async def _connect(self, stack: AsyncExitStack) -> None:
        read, write = await (self._http(stack) if self._server.url else self._process(stack))
        info = types.Implementation(name="perdure", version=version("perdure"))
        self._session = await stack.enter_async_context(ClientSession(read, write, client_info=info))
        await self._agree()
        self.version = self._session.protocol_version or ""
        told = self._session.server_info
        self.info = {} if told is None else {"name": self.clean(told.name), "version": self.clean(told.version)}
        await self._list()

    async def _http(self, stack: AsyncExitStack) -> Any:
        server, policy, workspace = self._server, self._policy, self._workspace
        assert server.url is not None
        target = await resolved(server.url, policy, self._resolver)
        headers, self._known = await asyncio.to_thread(texts, dict(server.headers), policy, workspace.root)
        made = await asyncio.to_thread(client, httpx2, target, policy, workspace, headers, soft=True)
        http: httpx2.AsyncClient = await stack.enter_async_context(made)
        return await stack.enter_async_context(streamable_http_client(server.url, http_client=http))

    async def _process(self, stack: AsyncExitStack) -> Any:
        server, policy, root = self._server, self._policy, self._workspace.root
        argv = [program(server.command or "", policy, root), *server.args]
        values, self._known = await asyncio.to_thread(texts, server.env, policy, root)
        child = Child(argv, folder(server.cwd, root), environment(policy) | values)
        await child.start()
        self._child = child
        stack.push_async_callback(child.stop)
        return child.read, child.write

    async def _agree(self) -> None:
        """Agree on a version: the document's, or what both can."""
        wanted, session = self._server.protocol_version, self._session
        if wanted in MODERN_PROTOCOL_VERSIONS:
            await session.discover()
        else:
            try:
                await session.initialize()
            except MCPError as error:
                only_newer = error.code in (types.METHOD_NOT_FOUND, types.UNSUPPORTED_PROTOCOL_VERSION)
                if wanted is not None or not only_newer or self._opening.status >= 500:
                    raise
                await session.discover()
        if wanted is not None and session.protocol_version != wanted:
            said = f"MCP server {self.name!r} speaks {session.protocol_version}, and the document wants {wanted}."
            raise Failed(said, kind="protocol")

    async def _list(self) -> None:
        cursor: str | None = None
        for _ in range(MCP_PAGES_MAX):
            params = None if cursor is None else types.PaginatedRequestParams(cursor=cursor)
            page = await self._session.list_tools(params=params)
            for tool in page.tools:
                self.tools[tool.name] = listed(tool)
            cursor = page.next_cursor
            if len(self.tools) > MCP_TOOLS_MAX:
                break
            if cursor is None:
                return
        said = f"MCP server {self.name!r} lists more than {MCP_TOOLS_MAX:,} tools or {MCP_PAGES_MAX} pages."
        raise Failed(said, kind="protocol")

    def _opening_error(self, error: BaseException) -> Error:
        """Why a server cannot be had. Nothing was called yet, so whatever happened is no doubt."""
        error = _first(error)
        sent, who = self._opening, f"MCP server {self.name!r}"
        if isinstance(error, Failed | Denied | Invalid):
            return error
        if isinstance(error, Unavailable):
            return Failed(error.message, kind="transport")
        if sent.busy:
            return Failed(f"{who} answered {sent.status}.", kind="rate_limit", retry_after=sent.retry_after)
        if isinstance(error, ValidationError | RuntimeError):
            return Failed(self._more(f"{who} does not keep to the protocol: {_line(error)}."), kind="protocol")
        if isinstance(error, MCPError) and error.code not in _LOST and not sent.problem:
            answered = f" (HTTP {sent.status})" if sent.status >= 300 else ""
            return Failed(self._more(f"{who} refused to begin{answered}: {_line(error)}."), kind="protocol")
        if isinstance(error, MCPError) and error.code == types.PARSE_ERROR:
            return Failed(self._more(f"{who} does not keep to the protocol: {_line(error)}."), kind="protocol")
        return Failed(self._more(f"{who} could not be reached: {sent.problem or _line(error)}."), kind="transport")

    def _more(self, said: str) -> str:
        """A sentence about the server, with what its process said of it."""
        child = self._child
        if child is None:
            return self.clean(said)
        if child.problem:
            said += f" {child.problem.capitalize()}."
        if child.dropped:
            said += f" It printed {child.dropped} lines that are no messages."
        if child.errors:
            said += f" It said: {child.errors}"
        return self.clean(said)

    # -- a call -------------------------------------------------------------------------------------------------------
    async def call(self, name: str, arguments: Mapping[str, Any], key: str, sent: Sent) -> dict[str, Any]:
        """Send one call and return its raw result, checked against the protocol. Cancelled, it tells the server.

        Raises:
            Failed: it did not reach the server, or the server says that it failed. InDoubt: nobody can say.
        """
        meta: Any = {"dev.perdure/idempotencyKey": key}
        params = types.CallToolRequestParams(name=name, arguments=dict(arguments), _meta=meta)
        sent.status, sent.media, sent.problem = 0, "", ""
        token = watching.set(sent)
        try:
            asking = asyncio.ensure_future(self._session.send_request(types.CallToolRequest(params=params), _RAW))
        finally:
            watching.reset(token)
        try:
            await asyncio.wait([asking])
        except asyncio.CancelledError:
            asking.cancel()  # it tells the server; whoever cancelled does not wait for a server that does not listen
            await asyncio.wait([asking], timeout=PROTOCOL_FAREWELL_SECONDS)
            asking.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        try:
            raw: dict[str, Any] = asking.result()
            return raw
        except (MCPError, ValidationError, RuntimeError, asyncio.CancelledError) as error:
            raise self._judged(name, error, sent) from error

    def _judged(self, tool: str, error: BaseException, sent: Sent) -> Failed | InDoubt:
        who = f"{self.name}.{tool}"
        why = sent.problem or _line(error)
        if not sent.left:
            return Failed(self._more(f"{who} was not called: {why}."), kind="transport")
        if sent.refused:
            kind: Any = "rate_limit" if sent.busy else "transport" if sent.forgotten else "protocol"
            said = f"{who}: the server answered {sent.status}: {why}."
            return Failed(self.clean(said), kind=kind, retry_after=sent.retry_after)
        if isinstance(error, MCPError) and self._answered(error, sent):
            said = f"{who}: the server answered with error {error.code}: {error.error.message}"
            return Failed(self.clean(said), kind="protocol" if error.code in _NOT_CARRIED_OUT else "tool")
        senseless = isinstance(error, ValidationError) or (
            isinstance(error, MCPError) and error.code == types.PARSE_ERROR
        )
        if senseless and not sent.problem:
            return InDoubt(self._more(f"{who} was called, and its answer makes no sense: {why}."), kind="protocol")
        return InDoubt(self._more(f"{who} was called, and the answer was lost: {why}."), kind="transport")

    @staticmethod
    def _answered(error: MCPError, sent: Sent) -> bool:
        """Whether an error is the server's own answer, and not what the SDK says in want of one."""
        if error.code in _LOST or sent.problem:
            return False
        if sent.status == 0:  # no HTTP
            return True
        if sent.status >= 500:
            return error.code != types.INTERNAL_ERROR
        return (
            200 <= sent.status < 300 and sent.status != 202 and sent.media in ("application/json", "text/event-stream")
        )


def listed(tool: types.Tool) -> Listed:
    """A tool with its digest.

    Raises:
        Failed: its schemas are no plain JSON.
    """
    told = {"name": tool.name, "inputSchema": tool.input_schema, "outputSchema": tool.output_schema}
    try:
        digest = canonical.digest(told)
    except Invalid as error:
        raise Failed(f"The schemas of tool {tool.name!r} cannot be used: {error.message}", kind="protocol") from error
    return Listed(tool.name, tool.description or "", tool.input_schema, tool.output_schema, digest)


def check(name: str, server: McpServer, policy: Policy, workspace: Workspace) -> None:
    """Hold a server to the policy by its words; nothing is started or resolved, and secrets are read.

    Raises:
        Denied: the policy forbids it. Invalid: it can never be had as written.
    """
    if (server.url is None) == (server.command is None):
        raise Invalid(f"MCP server {name!r} needs either a `url` or a `command`.")
    wanted = server.protocol_version
    if wanted is not None and wanted not in KNOWN_PROTOCOL_VERSIONS:
        known = ", ".join((*HANDSHAKE_PROTOCOL_VERSIONS, *MODERN_PROTOCOL_VERSIONS))
        raise Invalid(f"MCP server {name!r}: the protocol version {wanted!r} is not one of {known}.")
    if server.url is not None:
        network.judge(server.url, policy)
        texts(dict(server.headers), policy, workspace.root)
        return
    program(server.command or "", policy, workspace.root)
    folder(server.cwd, workspace.root)
    texts(server.env, policy, workspace.root)


def _first(error: BaseException) -> BaseException:
    """The first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _line(error: BaseException) -> str:
    """The beginning of what an error says."""
    text = ""
    with contextlib.suppress(Exception):
        text = error.error.message if isinstance(error, MCPError) else str(error)
    return (text.strip() or type(error).__name__).split("\n", 1)[0].rstrip(".")[:500]
