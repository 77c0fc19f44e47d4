"""One traced HTTP client for every wire format: what the wire showed of one call, and never two requests for it.

The libraries hold a placeholder for a key; the real one is set on the request as it leaves, and nowhere else.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Any, cast

import httpx2

from perdure.limits import ID_CHARS_MAX
from perdure.records.parts import Evidence

PLACEHOLDER = "placeholder"  # the client libraries insist on a key
CONNECT_SECONDS_MAX = 10.0
CONNECT_SECONDS_MIN = 0.001
KEEPALIVE_CONNECTIONS_MAX = 100
REQUEST_ID_HEADERS = ("x-request-id", "request-id", "x-goog-request-id", "apim-request-id", "x-ms-request-id")
_TLS = httpx2.create_ssl_context()  # reads the system's certificates: once, in the thread that loads this


@dataclass
class Wire:
    """What the wire showed of one call.

    Attributes:
        limit: bytes that a response may have.
        headers: set on the request as it leaves: the key, in whatever header the format wants it.
        requests: how many the client library tried to send.
        sent: whether any byte of the request may have been written.
        status, overflown: of the response; None and False while there is none.
        request_digest, received, answer: what was asked, a running digest of the response, and its headers.
        response: the response, while it may be open.
    """

    limit: int
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    requests: int = 0
    sent: bool = False
    status: int | None = None
    overflown: bool = False
    request_digest: str = ""
    received: Any = field(default_factory=hashlib.sha256, repr=False)
    answer: httpx2.Headers = field(default_factory=httpx2.Headers, repr=False)
    response: httpx2.Response | None = field(default=None, repr=False)

    async def trace(self, event: str, _: Mapping[str, Any]) -> None:
        """Told by httpcore before each step; everything before the request's own bytes is still harmless."""
        if event.endswith("send_request_headers.started"):
            self.sent = True

    async def aclose(self) -> None:
        """End the response, if it is still open: not every library does when a call is given up."""
        if self.response is not None:
            await self.response.aclose()

    def evidence(self) -> Evidence:
        """What can be recorded of the call."""
        if not self.sent:
            return Evidence()
        received = "" if self.status is None else self.received.hexdigest()
        return Evidence(self.request_digest, received, self.request_id(), self.status)

    def request_id(self) -> str:
        """The provider's name for the call, from the headers of its response; may be empty."""
        found = next((self.answer[name] for name in REQUEST_ID_HEADERS if name in self.answer), "")
        return found if found.isascii() and found.isprintable() and len(found) <= ID_CHARS_MAX else ""

    def retry_after(self) -> float | None:
        """Seconds the provider asked to wait, from ``retry-after-ms`` or ``retry-after`` (seconds or a date)."""
        text = self.answer.get("retry-after-ms")
        if text is not None and (milliseconds := _number(text)) is not None:
            return milliseconds / 1000
        text = self.answer.get("retry-after")
        if text is None:
            return None
        if (seconds := _number(text)) is not None:
            return seconds
        try:
            return max(parsedate_to_datetime(text).timestamp() - time.time(), 0.0)
        except (ValueError, OverflowError):
            return None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) and value >= 0 else None


current: ContextVar[Wire] = ContextVar("perdure.providers.wire")


def client() -> httpx2.AsyncClient:
    """A client whose every request belongs to the call in :data:`current`. One for each model and event loop."""
    return httpx2.AsyncClient(
        verify=_TLS,
        headers={"accept-encoding": "identity"},  # what is bounded and digested is what is read
        timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS_MAX),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=KEEPALIVE_CONNECTIONS_MAX),
        event_hooks={"request": [_before], "response": [_after]},
    )


def timeout(seconds: float | None) -> httpx2.Timeout:
    """For one call that may take this long; None: only connecting is bounded."""
    connect = CONNECT_SECONDS_MAX if seconds is None else min(seconds, CONNECT_SECONDS_MAX)
    return httpx2.Timeout(seconds, connect=max(connect, CONNECT_SECONDS_MIN))


async def _before(request: httpx2.Request) -> None:
    wire = current.get()
    wire.requests += 1
    if wire.requests > 1:
        raise AssertionError("the client library tried to send a second request for one call")
    wire.request_digest = hashlib.sha256(await request.aread()).hexdigest()
    request.extensions = {**request.extensions, "trace": wire.trace}
    for name in [name for name, value in request.headers.items() if PLACEHOLDER in value]:
        del request.headers[name]
    request.headers["accept-encoding"] = "identity"
    request.headers.update(wire.headers)  # here only: no library ever holds the key


async def _after(response: httpx2.Response) -> None:
    wire = current.get()
    wire.status = response.status_code
    wire.answer = response.headers
    wire.response = response
    response.stream = _Bounded(cast(httpx2.AsyncByteStream, response.stream), wire)
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise httpx2.DecodingError("the response is compressed, which nobody asked for")


class _Bounded(httpx2.AsyncByteStream):
    """A response body that is digested as it comes, and ends in an error when it is larger than any may be."""

    def __init__(self, stream: httpx2.AsyncByteStream, wire: Wire) -> None:
        self._stream = stream
        self._wire = wire

    async def __aiter__(self) -> AsyncIterator[bytes]:
        read = 0
        async for chunk in self._stream:
            read += len(chunk)
            self._wire.received.update(chunk)
            if read > self._wire.limit:
                self._wire.overflown = True
                raise httpx2.ReadError(f"the response is larger than {self._wire.limit:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
