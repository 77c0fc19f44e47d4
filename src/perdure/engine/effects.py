"""One door out: the only place where code of the user's that touches the world is called.

Whatever a body does, its outcome is one of three values, matched exhaustively; nothing may turn unknown into failed.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from perdure.engine.host import Host
from perdure.errors import Error, Invalid, Refused, Unknown
from perdure.limits import FAILURE_MESSAGE_CHARS_MAX
from perdure.ports.failpoints import Boundary
from perdure.records.parts import Failure


class Confirmed(msgspec.Struct, frozen=True):
    """It took place and gave this value."""

    value: Any


class RefusedOutcome(msgspec.Struct, frozen=True):
    """It definitely did not take place, or definitely failed. ``cause`` is what the body raised."""

    failure: Failure
    cause: BaseException | None = None


class UnknownOutcome(msgspec.Struct, frozen=True):
    """It may have taken place. ``cause`` is what hid the outcome."""

    reason: str
    cause: BaseException | None = None


Outcome = Confirmed | RefusedOutcome | UnknownOutcome

# Types of common clients that mean "sent, and nobody can say", by the root module and name of any class they derive from.
# By name: the libraries are not imported for it.
TRANSPORT_ERRORS = frozenset(
    {
        ("httpx", "TransportError"),
        ("httpx2", "TransportError"),
        ("httpcore", "NetworkError"),
        ("httpcore", "TimeoutException"),
        ("httpcore", "ProtocolError"),
        ("httpcore2", "NetworkError"),
        ("httpcore2", "TimeoutException"),
        ("httpcore2", "ProtocolError"),
        ("requests", "ConnectionError"),
        ("requests", "Timeout"),
        ("requests", "ChunkedEncodingError"),
        ("urllib3", "HTTPError"),
        ("aiohttp", "ClientConnectionError"),
        ("aiohttp", "ClientPayloadError"),
        ("http", "HTTPException"),
        ("urllib", "URLError"),
        ("grpc", "RpcError"),
        ("botocore", "HTTPClientError"),
        ("botocore", "ConnectionError"),
        ("google", "RetryError"),
        ("google", "ServiceUnavailable"),
        ("google", "DeadlineExceeded"),
        ("azure", "ServiceRequestError"),
        ("azure", "ServiceResponseError"),
        ("redis", "ConnectionError"),
        ("redis", "TimeoutError"),
        ("psycopg", "OperationalError"),
        ("pymongo", "AutoReconnect"),
        ("smtplib", "SMTPServerDisconnected"),
        ("websockets", "ConnectionClosed"),
        ("openai", "APIConnectionError"),
        ("anthropic", "APIConnectionError"),
    }
)


def hides_outcome(error: BaseException) -> bool:
    """Whether an exception leaves open what happened: timeouts, cancellation, lost connections, broken replies."""
    if isinstance(error, (Unknown, TimeoutError, ConnectionError, asyncio.CancelledError, EOFError)):
        return True
    if isinstance(error, BaseExceptionGroup):
        return any(hides_outcome(inner) for inner in error.exceptions)
    if _http_status_error(error):
        return False
    return any((cls.__module__.split(".", 1)[0], cls.__name__) in TRANSPORT_ERRORS for cls in type(error).__mro__)


def _http_status_error(error: BaseException) -> bool:
    """urllib's HTTPError is an answer, though it derives from URLError."""
    return type(error).__module__ == "urllib.error" and type(error).__name__ == "HTTPError"


def failure_of(error: BaseException, kind: str = "tool") -> Failure:
    """A bounded failure of an exception: its type and message, no stack and no payload."""
    if isinstance(error, Refused):
        return Failure("refused", error.error[:FAILURE_MESSAGE_CHARS_MAX] or "refused")
    text = str(error).encode("utf-8", "replace").decode()
    name = "" if isinstance(error, Error) else type(error).__name__
    message = f"{name}: {text}" if name and text else (text or name)
    return Failure(kind, message[:FAILURE_MESSAGE_CHARS_MAX])


def judge(
    error: BaseException, *, unknown_by_default: bool = False, refusals: tuple[type[BaseException], ...] = ()
) -> Outcome:
    """What an exception raised by a dispatched body means.

    ``refusals`` are types the tool declares as definite; ``unknown_by_default`` is ``on_exception="unknown"``.
    """
    if isinstance(error, Refused) or (refusals and isinstance(error, refusals)):
        return RefusedOutcome(failure_of(error), error)
    if hides_outcome(error):
        return UnknownOutcome(_reason(error), error)
    if isinstance(error, Invalid) or not unknown_by_default:
        return RefusedOutcome(failure_of(error), error)
    return UnknownOutcome(_reason(error), error)


def _reason(error: BaseException) -> str:
    text = str(error).encode("utf-8", "replace").decode()
    if isinstance(error, asyncio.CancelledError):
        return "interrupted after dispatch"
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:FAILURE_MESSAGE_CHARS_MAX]


async def dispatch(
    host: Host,
    body: Callable[[], Awaitable[Any] | Any],
    *,
    is_async: bool,
    timeout: float | None,
    unknown_by_default: bool = False,
    refusals: tuple[type[BaseException], ...] = (),
) -> Outcome:
    """Call a body whose started record is durable, and say what is known afterwards.

    A cancelled call gives ``UnknownOutcome`` with the cancellation as its cause: record it, then raise the cause.
    Signals of the engine pass through. A synchronous body runs in a thread and is waited for also past its timeout,
    because what it returns then is still the truth; ``timeout`` (seconds) ends asynchronous bodies.
    """
    if host.store.failpoint is not None:
        host.hit(Boundary.DISPATCH, "before")
    try:
        if is_async:
            if timeout is None:
                value = await body()
            else:
                async with asyncio.timeout(timeout):
                    value = await body()
        else:
            value = await in_thread(host, body)
    except Exception as error:
        return judge(error, unknown_by_default=unknown_by_default, refusals=refusals)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and not task.cancelling():  # nobody cancelled this call: something inside it was
            return UnknownOutcome("something the body waited for was cancelled")
        return UnknownOutcome(_reason(error), error)
    finally:
        if host.store.failpoint is not None:
            host.hit(Boundary.DISPATCH, "after")
    return Confirmed(value)


class StillRunning(asyncio.CancelledError):
    """The caller was cancelled while a synchronous body goes on in its thread."""

    def __init__(self, future: asyncio.Future[Any]) -> None:
        super().__init__("interrupted; the body still runs in its thread")
        self.future = future


async def in_thread(host: Host, body: Callable[[], Any]) -> Any:
    """Run a synchronous body in a thread with the caller's context variables.

    Raises:
        StillRunning: the caller was cancelled; the body cannot be stopped and goes on.
    """
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(host.executor, context.run, body)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if future.done():
            raise
        raise StillRunning(future) from None
