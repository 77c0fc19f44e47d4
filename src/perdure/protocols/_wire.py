"""HTTP for protocol clients: to one judged address only, watched, bounded; for both HTTP libraries their SDKs use.

The name is judged and resolved once and the connection is to that address, as for every request of a workflow. No
redirect, no proxy, no compression. What is known of a request that must not be repeated stands in a :class:`Sent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from perdure.definitions.workflow import Policy
from perdure.executors import network
from perdure.executors.network import Resolve, Target
from perdure.executors.secret_values import reveal
from perdure.ports.executor import Workspace

_BUSY = (429, 503)
_NOT_HANDLED = (307, 308)  # redirects that say: ask again there
_TIMED_OUT, _GONE = 408, 404
_PORTS = {"http": 80, "https": 443}


@dataclass
class Sent:
    """What is known of one message that matters: whether it may have left, and what came back.

    Attributes:
        marker: bytes that tell it from others sent for the same purpose; empty: every one counts.
        left: its bytes may have begun to leave. status: of the HTTP answer; 0: none, or no HTTP.
        media: the answer's media type. problem: what broke, in words.
        retry_after: seconds the remote asked to be left alone.
    """

    marker: bytes = b""
    left: bool = False
    status: int = 0
    media: str = ""
    problem: str = ""
    retry_after: float | None = None

    @property
    def busy(self) -> bool:
        """Whether the remote asked to be left alone."""
        return self.status in _BUSY

    @property
    def forgotten(self) -> bool:
        """Whether the remote knows nothing of the session the message belongs to."""
        return self.status == _GONE

    @property
    def refused(self) -> bool:
        """Whether the status says that the message was not acted upon."""
        client = 400 <= self.status < 500 and self.status != _TIMED_OUT
        return client or self.busy or self.status in _NOT_HANDLED


watching: ContextVar[Sent | None] = ContextVar("watching", default=None)
"""The message that whoever sends now wants to know about."""


def client(
    library: Any,
    target: Target,
    policy: Policy,
    workspace: Workspace,
    headers: Mapping[str, str],
    *,
    soft: bool = False,
) -> Any:
    """An ``AsyncClient`` of ``httpx`` or ``httpx2`` that reaches one resolved target and nothing else. Blocks for secrets.

    Args:
        soft: a connection that breaks is an answer 502, or the early end of one: for a client that shares one
            connection among requests and would give up all of them.
    """
    context = ssl.create_default_context()
    if policy.network.custom_ca is not None:
        context.load_verify_locations(cadata=reveal(policy.network.custom_ca, policy, workspace.root))
    inner = library.AsyncHTTPTransport(verify=context, trust_env=False, retries=0)
    pinned = _Pinned(library, target, inner, policy.network.max_response_bytes, soft=soft)
    return library.AsyncClient(
        transport=pinned,
        headers={**headers, "Accept-Encoding": "identity"},
        timeout=library.Timeout(None, connect=float(policy.network.connect_timeout_seconds)),
        follow_redirects=False,
        trust_env=False,
    )


async def resolved(url: str, policy: Policy, resolver: Resolve = network.system_resolve) -> Target:
    """Judge a URL by the policy and resolve it once.

    Raises:
        Denied: it may not be reached. Unavailable: its name has no address.
    """
    target = network.judge(url, policy)
    return await asyncio.to_thread(network.resolve, target, policy, resolver)


class _Pinned:
    """Sends every request to one address, whatever the name says meanwhile."""

    def __init__(self, library: Any, target: Target, inner: Any, limit: int, *, soft: bool) -> None:
        self._library = library
        self._target = target
        self._inner = inner
        self._limit = limit
        self._soft = soft

    async def __aenter__(self) -> _Pinned:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._inner.__aexit__(*raised)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._inner.aclose()

    async def handle_async_request(self, request: Any) -> Any:
        """Send one request; the library's own errors are raised."""
        sent = self._watched(request)
        try:
            return await self._handle(request, sent)
        except self._library.TransportError as error:
            sent.problem = str(error) or type(error).__name__
            if not self._soft:
                raise
            return self._library.Response(502)

    def _watched(self, request: Any) -> Sent:
        """Where what happens to this request is written down."""
        sent = watching.get()
        if sent is None:
            return Sent()
        try:
            body: bytes = request.content
        except self._library.RequestNotRead:  # the same message, sent again to where a redirect of its own host led
            return sent
        return sent if sent.marker in body else Sent()

    async def _handle(self, request: Any, sent: Sent) -> Any:
        url, target = request.url, self._target
        if (url.scheme, url.host.lower(), url.port or _PORTS[url.scheme]) != (
            target.scheme, target.host.lower(), target.port,
        ):  # fmt: skip
            raise self._library.ConnectError(f"{url.scheme}://{url.host} is not {target.scheme}://{target.host}")

        async def trace(event: str, info: Mapping[str, Any]) -> None:
            if event.endswith("send_request_headers.started"):
                sent.left = True

        told = {**request.extensions, "trace": trace, "sni_hostname": target.host}
        there = self._library.Request(
            request.method, url.copy_with(host=target.address), headers=request.headers, stream=request.stream,
            extensions=told,
        )  # fmt: skip
        response = await self._inner.handle_async_request(there)
        sent.status = response.status_code
        sent.media = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        with contextlib.suppress(ValueError):
            sent.retry_after = max(0.0, float(response.headers.get("retry-after", "")))
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            await response.aclose()
            raise self._library.RemoteProtocolError("the answer is compressed, which was not asked for")
        stream = _bounded(self._library, response.stream, self._limit, sent, self._soft)
        return self._library.Response(
            response.status_code, headers=response.headers, stream=stream, extensions=response.extensions
        )


def _bounded(library: Any, inner: Any, limit: int, sent: Sent, soft: bool) -> Any:
    """The body of an answer, up to its limit."""

    async def pieces() -> AsyncIterator[bytes]:
        seen = 0
        try:
            async for piece in inner:
                seen += len(piece)
                if seen > limit:
                    raise library.ReadError(f"the answer has more than {limit:,} bytes")
                yield piece
        except library.TransportError as error:
            sent.problem = str(error) or type(error).__name__
            if not soft:
                raise

    class Body(library.AsyncByteStream):  # type: ignore[misc]
        def __aiter__(self) -> AsyncIterator[bytes]:
            return pieces()

        async def aclose(self) -> None:
            await inner.aclose()

    return Body()
