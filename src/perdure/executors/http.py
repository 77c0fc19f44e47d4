"""``builtin.http``: one request to an allowed address, its answer as a value. No redirects, no proxy, no retry of its own."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec

from perdure.definitions.workflow import Action
from perdure.errors import Invalid, Unavailable
from perdure.executors import network
from perdure.executors.network import Resolve, Target
from perdure.executors.secret_values import reveal, shown, texts, without
from perdure.limits import HTTP_BODY_KEPT_BYTES
from perdure.ports.executor import Call, Facts, Failed, InDoubt, Performed

_READS = ("GET", "HEAD")
_BUSY = (429, 503)


class _Sent(Exception):
    """Something went wrong after the request began to leave."""


class Http:
    """Sends requests.

    Args:
        resolver: asked for the addresses of a name.
    """

    kinds = frozenset({"builtin.http"})

    def __init__(self, resolver: Resolve = network.system_resolve) -> None:
        self._resolve = resolver

    def describe(self, action: Action, input: Mapping[str, Any]) -> Facts:
        """See ``ports.executor.Executor.describe``."""
        reads = action.method in _READS
        declared: Any = "observe" if reads else ("keyed" if action.idempotency_header else "once")
        request = {"method": action.method, "url": _url(action, input), "headers": shown(action.headers)}
        body, _ = _body(action, input)
        if body:
            request["body"] = body.decode("utf-8", "replace")
        return Facts("builtin.http", "network", declared, action.risk or "medium", "network.http", request)

    async def prepare(self, call: Call) -> Performed | None:
        """See ``ports.executor.Executor.prepare``."""
        network.judge(_url(call.action, call.input), call.policy)
        texts(call.action.headers, call.policy, call.workspace.root)
        return None

    async def execute(self, call: Call) -> Performed:
        """See ``ports.executor.Executor.execute``."""
        action = call.action
        headers, known = texts(action.headers, call.policy, call.workspace.root)
        body, media = _body(action, call.input)
        if media and not any(name.lower() == "content-type" for name in headers):
            headers["Content-Type"] = media
        if action.idempotency_header:
            headers[action.idempotency_header] = call.key
        target = network.judge(_url(action, call.input), call.policy)
        try:
            target = await asyncio.to_thread(network.resolve, target, call.policy, self._resolve)
        except Unavailable as error:
            raise Failed(error.message, kind="transport") from error
        status, answered, raw = await self._exchange(call, target, headers, body)
        told = {"status": status, "headers": answered, "body": _value(raw, answered, known)}
        expected = action.expect_status or range(200, 300)
        if status not in expected:
            kept = {**told, "body": without(raw[:HTTP_BODY_KEPT_BYTES].decode("utf-8", "replace"), known)}
            wait = _retry_after(answered) if status in _BUSY else None
            kind: Any = "rate_limit" if status in _BUSY else "tool"
            raise Failed(f"{action.method} {target.host} answered {status}.", kind=kind, output=kept, retry_after=wait)
        return Performed({"changed": action.method not in _READS, **told})

    async def _exchange(
        self, call: Call, target: Target, headers: dict[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        connection = _connection(call, target)
        said = f"{call.action.method} {target.host}"
        exchange = asyncio.ensure_future(asyncio.to_thread(_talk, connection, call, target, headers, body))
        try:
            return await asyncio.wait_for(asyncio.shield(exchange), call.timeout)
        except _Sent as error:
            raise InDoubt(f"{said}: {error}", kind="transport") from error
        except TimeoutError as error:
            raise InDoubt(f"{said} did not answer within {call.timeout:g} s.", kind="timeout") from error
        except (OSError, http.client.HTTPException) as error:
            raise Failed(f"{said} could not be reached: {error}", kind="transport") from error
        finally:
            if not exchange.done():
                if connection.sock is not None:  # whoever reads is woken, and the thread ends
                    with contextlib.suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)
                exchange.add_done_callback(lambda done: done.cancelled() or done.exception())
            connection.close()

    async def predict(self, call: Call) -> Any:
        """See ``ports.executor.Executor.predict``: what only reads is read."""
        if call.action.method in _READS:
            return (await self.execute(call)).result
        await self.prepare(call)
        return {"status": "requires_execution", "changed": False}


class _Pinned(http.client.HTTPConnection):
    """A connection to one address, whatever the name says meanwhile."""

    def __init__(self, target: Target, timeout: float, context: ssl.SSLContext | None) -> None:
        super().__init__(target.host, target.port, timeout=timeout)
        self._target = target
        self._context = context

    def connect(self) -> None:
        """Connect to the address that was judged; TLS is with the name."""
        sock = socket.create_connection((self._target.address, self._target.port), self.timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            sock = self._context.wrap_socket(sock, server_hostname=self._target.host)
        self.sock = sock


def _connection(call: Call, target: Target) -> _Pinned:
    rules = call.policy.network
    context = None
    if target.scheme == "https":
        context = ssl.create_default_context()
        if rules.custom_ca is not None:
            context.load_verify_locations(cadata=reveal(rules.custom_ca, call.policy, call.workspace.root))
    return _Pinned(target, float(rules.connect_timeout_seconds), context)


def _talk(
    connection: _Pinned, call: Call, target: Target, headers: dict[str, str], body: bytes
) -> tuple[int, dict[str, str], bytes]:
    """Send and receive. Blocks; runs in a thread of its own."""
    connection.connect()
    assert connection.sock is not None
    connection.sock.settimeout(call.timeout)
    try:
        connection.request(call.action.method, target.path, body or None, headers)
        with contextlib.closing(connection.getresponse()) as response:
            limit = call.policy.network.max_response_bytes
            raw = response.read(limit + 1)
            left = response.length
        if len(raw) > limit:
            raise _Sent(f"the answer has more than {limit:,} bytes")
        if left:
            raise _Sent(f"the answer ended {left:,} bytes early")
        return response.status, {name.lower(): value for name, value in response.getheaders()}, raw
    except (OSError, http.client.HTTPException) as error:
        raise _Sent(f"the connection was lost after the request began to leave: {error}") from error
    finally:
        connection.close()


def _url(action: Action, input: Mapping[str, Any]) -> str:
    url = input.get("url", action.url)
    if not isinstance(url, str) or not url:
        raise Invalid("builtin.http needs a `url`.")
    query = {**action.query, **(input.get("query") or {})}
    if not query:
        return url
    return url + ("&" if "?" in url else "?") + urlencode({name: str(value) for name, value in query.items()})


def _body(action: Action, input: Mapping[str, Any]) -> tuple[bytes, str]:
    """The body that is sent and its media type."""
    text, value = input.get("body", action.body), input.get("json", action.json)
    if text is not None and value is not None:
        raise Invalid("builtin.http has both `body` and `json`.", help="Give one of them.")
    if text is not None:
        return str(text).encode(), "text/plain; charset=utf-8"
    if value is not None:
        return msgspec.json.encode(value), "application/json"
    return b"", ""


def _value(raw: bytes, headers: Mapping[str, str], known: list[str]) -> Any:
    text = without(raw.decode("utf-8", "replace"), known)
    if "json" in headers.get("content-type", ""):
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text)
    return text


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None
