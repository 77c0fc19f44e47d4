"""From what a client library raised and what the wire showed to what is known about a call that gave no response."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx2
from pydantic_ai import exceptions as their

from perdure.ports.provider import ModelError, ModelFailure
from perdure.providers._wire import Wire
from perdure.records.parts import NO_EVIDENCE, Evidence

DETAIL_CHARS_MAX = 2_000  # of what a server or a library says about a failure
GATEWAY = frozenset({408, 502, 504})  # a gateway's answer: it does not know what became of the request
RETRYABLE = frozenset({409, 425, 429})
_CONTEXT = re.compile(
    r"context_length_exceeded|maximum context length|reduce the length of the messages|context window"
    r"|prompt is too long|input is too long|request_too_large"
    r"|input token count|number of tokens allowed|maximum number of tokens",
    re.IGNORECASE,
)
_REFUSED = re.compile(
    r"content[ _-]?(policy|filter|management)|responsible ?ai|invalid_prompt|usage polic|moderation_blocked|flagged"
    r"|(cyber|bio)_policy|prohibited[ _]content|safety (system|filter|reason|setting)",
    re.IGNORECASE,
)
_SESSION = re.compile(
    r"previous.?response|invalid_encrypted_content|encrypted content.{0,80}(could not|verif|decrypt|invalid|belong)"
    r"|reasoning.{0,40}(not found|following item)|required 'reasoning' item|item with id"
    r"|thought[ _]?signature|invalid `?signature|signature.{0,40}(invalid|thinking)"
    r"|thinking.{0,60}(cannot be modified|signature)|thinking_blocks_modified|bound to a different",
    re.IGNORECASE,
)


def of_wire(error: Exception, wire: Wire, name: str, timeout: float | None) -> ModelError:
    """What is known about a call over a traced wire."""
    status = wire.status if wire.status is not None and wire.status >= 300 else None
    if status is not None or _told(error):
        return _with(_answered(error, status, name, wire.retry_after()), wire.evidence())
    cause = _cause(error)
    what = f"{type(cause).__name__}: {_brief(str(cause))}".removesuffix(": ")
    if isinstance(error, TimeoutError) and timeout is not None:
        what = f"{timeout:g} s passed"
    if wire.sent:
        return ModelError(
            _sentence(f"Model `{name}` gave no complete answer: {what}"),
            dispatched="unknown",
            retryable=not wire.overflown,
            evidence=wire.evidence(),
        )
    faulty = isinstance(cause, (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError))
    transport = isinstance(cause, (httpx2.TransportError, TimeoutError))
    reachable = transport and not faulty
    return ModelError(
        _sentence(f"Model `{name}` was not {'reached' if transport else 'called'}: {what}"),
        dispatched="no",
        retryable=reachable,
        kind="model" if reachable else "model.setup",
    )


def of_library(error: Exception, name: str, timeout: float | None) -> ModelError:
    """What is known about a call of somebody's model object: only what it raised, no wire."""
    status = error.status_code if isinstance(error, their.ModelHTTPError) else None
    if status is not None or _told(error):
        return _answered(error, status, name, None)
    if isinstance(error, their.UserError):
        return ModelError(
            _sentence(f"Model `{name}` was not called: {_brief(str(error))}"), dispatched="no", kind="model.setup"
        )
    if isinstance(error, their.ModelConnectionError) and error.phase in ("pool", "connect"):
        return ModelError(
            _sentence(f"Model `{name}` was not reached: {_brief(str(error))}"), dispatched="no", retryable=True
        )
    what = f"{type(error).__name__}: {_brief(str(error))}".removesuffix(": ")
    if isinstance(error, TimeoutError) and timeout is not None:
        what = f"{timeout:g} s passed"
    return ModelError(
        _sentence(f"Model `{name}` gave no complete answer: {what}"), dispatched="unknown", retryable=True
    )


def _told(error: Exception) -> bool:
    """Whether it is the provider's own word of a failure, sent with status 200: a definite answer."""
    if not isinstance(error, their.ModelAPIError):
        return False
    return bool(error.in_stream or error.provider_error_code or error.provider_error_type)


def _answered(error: Exception, status: int | None, name: str, retry_after: float | None) -> ModelError:
    """The provider said that it failed. Without an HTTP status it said so in the answer itself."""
    said = "\n".join(_words(error))  # a pattern stays within one
    inner = getattr(error, "status_code", None) if status is None else status
    kind = _kind(error, inner, said)
    where = "in the stream" if getattr(error, "in_stream", False) else f"with HTTP {status}" if status else "it says"
    hopeless = kind in ("model.context_length", "model.refused", "model.continuation", "model.authentication")
    hopeless |= isinstance(error, their.ModelQuotaExceededError)
    if status is None:
        rejected = isinstance(error, their.ModelRequestRejectedError) or (inner or 500) in range(400, 409)
        retryable = not hopeless and not rejected
    else:
        retryable = not hopeless and (status >= 500 or status in RETRYABLE or status in GATEWAY)
    if retry_after is None:
        retry_after = getattr(error, "retry_after", None)
    return ModelError(
        _sentence(f"Model `{name}` failed {where}: {_said(error)}"),
        dispatched="unknown" if status in GATEWAY else "yes",
        retryable=retryable,
        retry_after=retry_after if retryable else None,
        kind=kind,
        help=_HELP.get(kind, ""),
    )


_HELP: dict[ModelFailure, str] = {
    "model.authentication": "Check the API key.",
    "model.context_length": "Shorten the thread or choose a model with a larger context.",
}


def _kind(error: Exception, status: int | None, said: str) -> ModelFailure:
    if isinstance(error, their.ModelContextWindowExceededError) or status == 413:
        return "model.context_length"
    if status is None or status in (400, 403, 404, 422):
        for pattern, kind in _KINDS:
            if pattern.search(said):
                return kind
    if status in (401, 403) or isinstance(error, their.ModelAuthenticationError):
        return "model.authentication"
    if status == 429 or isinstance(error, (their.ModelRateLimitError, their.ModelQuotaExceededError)):
        return "model.rate_limit"
    return "model"


_KINDS: tuple[tuple[re.Pattern[str], ModelFailure], ...] = (
    (_CONTEXT, "model.context_length"),
    (_SESSION, "model.continuation"),
    (_REFUSED, "model.refused"),
)


def _words(error: Exception) -> Iterator[str]:
    """Codes, types and messages of an error."""
    inner = _inner(error)
    own = ("provider_error_code", "provider_error_type", *(() if inner else ("message",)))  # else it repeats the body
    for name in own:
        value = getattr(error, name, None)
        if isinstance(value, str):
            yield value[:DETAIL_CHARS_MAX]
    for name in ("code", "type", "param", "status", "message"):
        value = inner.get(name)
        if isinstance(value, str):
            yield value[:DETAIL_CHARS_MAX]


def _inner(error: Exception) -> dict[str, Any]:
    body = getattr(error, "body", None)
    if isinstance(body, list) and body:
        body = body[0]
    if not isinstance(body, dict):
        return {}
    inner = body.get("error", body)
    return inner if isinstance(inner, dict) else {"message": inner}


def _said(error: Exception) -> str:
    message = _inner(error).get("message")
    if isinstance(message, str) and message:
        return _brief(message)
    body = getattr(error, "body", None)
    return _brief(str(body or _cause(error)))


def _brief(text: str) -> str:
    """The first line: what follows it in these libraries is payload."""
    return (text.strip().splitlines() or [""])[0][:DETAIL_CHARS_MAX]


def _cause(error: BaseException) -> BaseException:
    """The transport's error, if the libraries wrapped one, else what they raised."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, httpx2.RequestError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error


def _sentence(text: str) -> str:
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").strip()
    return text if text.endswith((".", "!", "?")) else text + "."


def with_evidence(error: ModelError, evidence: Evidence) -> ModelError:
    """An error of ours, with what the wire showed."""
    return error if evidence == NO_EVIDENCE or error.dispatched == "no" else _with(error, evidence)


def without(key: str, error: ModelError) -> ModelError:
    """The error with every occurrence of the key blotted out."""
    if key not in f"{error.message}{error.help}{error.evidence.request_id}":
        return error
    evidence = error.evidence
    if key in evidence.request_id:
        evidence = Evidence(evidence.request, evidence.response, "", evidence.status)
    return _with(error, evidence, error.message.replace(key, "***"), error.help.replace(key, "***"))


def _with(error: ModelError, evidence: Evidence, message: str = "", help: str = "") -> ModelError:
    return ModelError(
        message or error.message,
        dispatched=error.dispatched,
        retryable=error.retryable,
        retry_after=error.retry_after,
        help=help or error.help,
        kind=error.kind,
        evidence=evidence,
    )
