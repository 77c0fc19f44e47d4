"""Everything that knows pydantic-ai, openai and httpx2. Loaded by the first call of a ``ChatModel``, in a thread.

Their message types are built from ours for one call and never kept: what is stored is ours.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import httpx2
import openai
import openai.resources.chat.completions  # loaded on first use otherwise, on the event loop
from pydantic_ai import messages as their
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIChatModelSettings
from pydantic_ai.profiles.openai import OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

from perdure.limits import RESPONSE_BYTES_MAX
from perdure.ports.provider import (
    AssistantMessage,
    Delta,
    Finish,
    ModelError,
    Request,
    Response,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from perdure.records.parts import CallPart, Part, ReasoningPart, TextPart, Usage

CONNECT_SECONDS_MAX = 10.0
STREAM_FACTOR = 32  # a streamed response is this much larger on the wire than its content, at most
CONTINUATION_VERSION = 1
DETAIL_CHARS_MAX = 2_000  # of what a server or a library says about a failure
PLACEHOLDER = "placeholder"  # the client library insists on a key
_OURS = frozenset({"max_retries", "timeout", "request_timeout", "first_event_timeout"})
_SETTINGS = OpenAIChatModelSettings.__required_keys__ | OpenAIChatModelSettings.__optional_keys__
_RETRYABLE = frozenset({408, 409, 429})
_TLS = httpx2.create_ssl_context()  # reads the system's certificates: once, here in the thread


@dataclass
class Wire:
    """What the wire showed of one call."""

    limit: int
    key: str | None = field(default=None, repr=False)
    requests: int = 0
    sent: bool = False
    status: int | None = None
    overflown: bool = False

    async def trace(self, event: str, _: Mapping[str, Any]) -> None:
        """Told by httpcore before each step; everything before the request's own bytes is still harmless."""
        if event.endswith("send_request_headers.started"):
            self.sent = True


_wire: ContextVar[Wire] = ContextVar("perdure.providers.wire")


async def _before(request: httpx2.Request) -> None:
    wire = _wire.get()
    wire.requests += 1
    if wire.requests > 1:
        raise AssertionError("the client library tried to send a second request for one call")
    request.extensions = {**request.extensions, "trace": wire.trace}
    if wire.key:
        request.headers["Authorization"] = f"Bearer {wire.key}"  # here only: no library ever holds the key
    elif request.headers.get("Authorization") == f"Bearer {PLACEHOLDER}":
        del request.headers["Authorization"]


async def _after(response: httpx2.Response) -> None:
    wire = _wire.get()
    wire.status = response.status_code
    response.stream = _Bounded(cast(httpx2.AsyncByteStream, response.stream), wire)


class _Bounded(httpx2.AsyncByteStream):
    """A response body that ends in an error when it is larger than any response may be."""

    def __init__(self, stream: httpx2.AsyncByteStream, wire: Wire) -> None:
        self._stream = stream
        self._wire = wire

    async def __aiter__(self) -> Any:
        read = 0
        async for chunk in self._stream:
            read += len(chunk)
            if read > self._wire.limit:
                self._wire.overflown = True
                raise httpx2.ReadError(f"the response is larger than {self._wire.limit:,} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()


class Connection:
    """The connections of one model in one event loop."""

    def __init__(self, model: str, base_url: str | None) -> None:
        self._http = httpx2.AsyncClient(
            verify=_TLS,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=100),
            event_hooks={"request": [_before], "response": [_after]},
        )
        client = openai.AsyncOpenAI(
            api_key=PLACEHOLDER,
            base_url=base_url,
            max_retries=0,
            http_client=self._http,
        )
        self._name = f"openai:{model}"
        self._model = OpenAIChatModel(
            model,
            provider=OpenAIProvider(openai_client=client),
            profile=cast(
                OpenAIModelProfile,
                # A stream without an end was cut; schemas are sent as the tool declares them.
                {"openai_chat_streaming_requires_finish_reason": True, "json_schema_transformer": None},
            ),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def respond(
        self, request: Request, emit: Callable[[Delta], None] | None, key: str | None, defaults: Mapping[str, Any]
    ) -> Response:
        """See ``ChatModel.respond``."""
        wire = Wire(RESPONSE_BYTES_MAX * (1 if emit is None else STREAM_FACTOR), key)
        token = _wire.set(wire)
        try:
            settings = self._settings(defaults, request)
            async with asyncio.timeout(request.timeout):
                answer = await self._ask(messages_of(request, self._name), settings, parameters_of(request), emit)
            return response_of(answer, self._name)
        except ModelError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 (whatever the libraries raise, the caller learns what is known)
            failure = failure_of(error, wire, self._name, request.timeout)
        finally:
            _wire.reset(token)
        if key:
            failure = _without(key, failure)
        # Outside the handler: the cause may show the key in a header or an echoed body, so it goes no further.
        raise failure

    async def _ask(
        self,
        messages: list[their.ModelMessage],
        settings: OpenAIChatModelSettings,
        parameters: ModelRequestParameters,
        emit: Callable[[Delta], None] | None,
    ) -> their.ModelResponse:
        if emit is None:
            return await self._model.request(messages, settings, parameters)
        async with self._model.request_stream(messages, settings, parameters) as stream:
            async for event in stream:
                if (delta := delta_of(event)) is not None:
                    emit(delta)
            return stream.get()

    def _settings(self, defaults: Mapping[str, Any], request: Request) -> OpenAIChatModelSettings:
        given = {**defaults, **request.settings}
        wrong = sorted(given.keys() - (_SETTINGS - _OURS))
        if wrong:
            why = "is decided by Perdure" if wrong[0] in _OURS else "does not exist"
            raise ModelError(
                f"Setting `{wrong[0]}` of model `{self._name}` {why}.",
                dispatched="no",
                help=f"Known are {', '.join(sorted(_SETTINGS - _OURS))}.",
            )
        connect = CONNECT_SECONDS_MAX if request.timeout is None else min(request.timeout, CONNECT_SECONDS_MAX)
        given |= {"max_retries": 0, "timeout": httpx2.Timeout(request.timeout, connect=max(connect, 0.001))}
        return cast(OpenAIChatModelSettings, given)


# to the provider


def messages_of(request: Request, name: str) -> list[their.ModelMessage]:
    """The conversation in the library's types. The output schema follows the last instructions."""
    last_system = max(
        (index for index, message in enumerate(request.messages) if isinstance(message, SystemMessage)), default=-1
    )
    out: list[their.ModelMessage] = []
    if request.output_schema is not None and last_system < 0:
        out.append(their.ModelRequest([_schema_part(request.output_schema)]))
    for index, message in enumerate(request.messages):
        match message:
            case SystemMessage(text):
                out.append(their.ModelRequest([their.SystemPromptPart(text)]))
            case UserMessage(text):
                out.append(their.ModelRequest([their.UserPromptPart(text)]))
            case ToolMessage(results):
                parts = [their.ToolReturnPart(r.name, r.content, tool_call_id=r.provider_id) for r in results]
                out.append(their.ModelRequest(parts))
            case AssistantMessage():
                out.append(_assistant(message, name))
        if request.output_schema is not None and index == last_system:
            out.append(their.ModelRequest([_schema_part(request.output_schema)]))
    return out


def _schema_part(schema: dict[str, Any]) -> their.SystemPromptPart:
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return their.SystemPromptPart(
        "Your final answer, the message without a tool call, must be one JSON value that fits this JSON Schema, and "
        f"nothing else: no other text and no Markdown fence.\n{text}"
    )


def _assistant(message: AssistantMessage, name: str) -> their.ModelResponse:
    """Reasoning goes back only to the model it came from, in the field it came in."""
    own = message.model == name
    extras = _extras(message.continuation) if own else []
    parts: list[their.ModelResponsePart] = []
    position = 0
    for part in message.parts:
        match part:
            case TextPart(text):
                parts.append(their.TextPart(text))
            case ReasoningPart(text, field_name, signature):
                if own and field_name and field_name != "content":
                    parts.append(their.ThinkingPart(text, id=field_name, signature=signature, provider_name="openai"))
            case CallPart(tool, arguments, provider_id):
                extra = extras[position] if position < len(extras) else None
                parts.append(
                    their.ToolCallPart(
                        tool,
                        arguments,
                        tool_call_id=provider_id,
                        provider_name="openai" if extra else None,
                        provider_details={"extra_content": extra} if extra else None,
                    )
                )
                position += 1
    return their.ModelResponse(parts, provider_name="openai")


def _extras(continuation: bytes) -> list[Any]:
    """What the server attached to each call and wants back (Gemini's thought signatures)."""
    try:
        value = json.loads(continuation or b"{}")
    except ValueError:
        return []
    if not isinstance(value, dict) or value.get("v") != CONTINUATION_VERSION:
        return []
    extras = value.get("calls", [])
    return extras if isinstance(extras, list) else []


def parameters_of(request: Request) -> ModelRequestParameters:
    """The tools, their schemas as they are."""
    tools = [
        ToolDefinition(
            name=tool.name, description=tool.description, parameters_json_schema=tool.parameters, strict=False
        )
        for tool in request.tools
    ]
    return ModelRequestParameters(function_tools=tools)


# from the provider


def delta_of(event: object) -> Delta | None:
    """The text that an event of the library's stream adds."""
    match event:
        case their.PartStartEvent(part=their.TextPart(content=text)) if text:
            return Delta("text", _text(text))
        case their.PartStartEvent(part=their.ThinkingPart(content=text)) if text:
            return Delta("reasoning", _text(text))
        case their.PartDeltaEvent(delta=their.TextPartDelta(content_delta=text)) if text:
            return Delta("text", _text(text))
        case their.PartDeltaEvent(delta=their.ThinkingPartDelta(content_delta=text)) if text:
            return Delta("reasoning", _text(text))
        case _:
            return None


def response_of(answer: their.ModelResponse, name: str) -> Response:
    """A complete response in our types.

    Raises:
        ModelError: what the server sent contradicts itself.
    """
    parts: list[Part] = []
    extras: list[Any] = []
    for part in answer.parts:
        match part:
            case their.TextPart(content=text) if text:
                parts.append(TextPart(_text(text)))
            case their.ThinkingPart(content=text) if text:
                parts.append(ReasoningPart(_text(text), part.id, part.signature))
            case their.ToolCallPart(tool_name=tool, args=args):
                raw = args if isinstance(args, str) else "" if args is None else json.dumps(args)
                parts.append(CallPart(_text(tool), _text(raw), _text(part.tool_call_id)))
                extras.append((part.provider_details or {}).get("extra_content"))
            case _:
                pass  # empty text, and kinds that this wire format does not have
    details = answer.provider_details or {}
    if details.get("refusal") and not parts:
        parts.append(TextPart(_text(details["refusal"])))
    if answer.finish_reason == "tool_call" and not extras:
        raise ModelError(
            f"Model `{name}` said that it calls a tool and named none.", dispatched="unknown", retryable=True
        )
    continuation: dict[str, Any] = {"v": CONTINUATION_VERSION}
    continuation |= {"id": answer.provider_response_id} if answer.provider_response_id else {}
    continuation |= {"model": answer.model_name} if answer.model_name else {}
    continuation |= {"calls": extras} if any(extras) else {}
    usage = answer.usage
    return Response(
        tuple(parts),
        _finish(answer.finish_reason, bool(extras)),
        name,
        Usage(
            input=max(usage.input_tokens, 0),
            output=max(usage.output_tokens, 0),
            cache_read=max(usage.cache_read_tokens, 0),
            cache_write=max(usage.cache_write_tokens, 0),
            reasoning=max(usage.details.get("reasoning_tokens", 0), 0),
        ),
        json.dumps(continuation, separators=(",", ":")).encode(),
    )


def _finish(reason: str | None, calls: bool) -> Finish:
    match reason:
        case "stop" | "tool_call":
            return "tool_calls" if calls else "stop"
        case "length":
            return "length"
        case "content_filter":
            return "refusal"
        case _:
            return "other"


def _text(text: str) -> str:
    """Text that can be stored: surrogate pairs that came in two pieces are joined, lone ones replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


# failures


def failure_of(error: Exception, wire: Wire, name: str, timeout: float | None) -> ModelError:
    """What is known about a call that gave no complete response."""
    status = wire.status if wire.status is not None and wire.status >= 300 else None
    if status is None and getattr(error, "in_stream", False):
        # An error object in an open stream is a definite answer; the library gives it the status it would have had.
        status = getattr(error, "status_code", 500)
    if status is not None:
        where = "in the stream" if getattr(error, "in_stream", False) else f"with HTTP {status}"
        return ModelError(
            _sentence(f"Model `{name}` failed {where}: {_said(error)}"),
            dispatched="yes",
            retryable=status >= 500 or status in _RETRYABLE,
            retry_after=getattr(error, "retry_after", None),
            help="Check the API key." if status in (401, 403) else "",
        )
    cause = _cause(error)
    what = f"{type(cause).__name__}: {_brief(str(cause))}".removesuffix(": ")
    if isinstance(error, TimeoutError) and timeout is not None:
        what = f"{timeout:g} s passed"
    if wire.sent:
        return ModelError(
            _sentence(f"Model `{name}` gave no complete answer: {what}"),
            dispatched="unknown",
            retryable=not wire.overflown,
        )
    faulty = isinstance(cause, (httpx2.UnsupportedProtocol, httpx2.LocalProtocolError))
    retryable = not faulty and isinstance(cause, (httpx2.TransportError, TimeoutError))
    return ModelError(_sentence(f"Model `{name}` was not reached: {what}"), dispatched="no", retryable=retryable)


def _said(error: Exception) -> str:
    body = getattr(error, "body", None)
    if isinstance(body, dict):
        inner = body.get("error", body)
        message = inner.get("message") if isinstance(inner, dict) else inner
        if isinstance(message, str) and message:
            return _brief(message)
    return _brief(str(body or _cause(error)))


def _brief(text: str) -> str:
    """The first line: what follows it in these libraries is payload."""
    return (text.strip().splitlines() or [""])[0][:DETAIL_CHARS_MAX]


def _cause(error: BaseException) -> BaseException:
    """The transport's error, if the libraries wrapped one, else what they raised."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, httpx2.TransportError):
            return seen
        seen = seen.__cause__ or seen.__context__
    return error


def _sentence(text: str) -> str:
    text = _text(text).strip()
    return text if text.endswith((".", "!", "?")) else text + "."


def _without(key: str, error: ModelError) -> ModelError:
    if key not in str(error):
        return error
    return ModelError(
        error.message.replace(key, "***"),
        dispatched=error.dispatched,
        retryable=error.retryable,
        retry_after=error.retry_after,
        help=error.help.replace(key, "***"),
    )


# connections by event loop

_Connections = dict[tuple[str, str | None], Connection]
_open: dict[asyncio.AbstractEventLoop, tuple[_Connections, AsyncGenerator[_Connections]]] = {}


async def connection(model: str, base_url: str | None) -> Connection:
    """The connection to a model from the running loop; models of the same name and address share it."""
    loop = asyncio.get_running_loop()
    if loop not in _open:
        for other in [other for other in _open if other.is_closed()]:
            _open.pop(other, None)
        lifetime = _lifetime(loop)
        _open[loop] = (await anext(lifetime), lifetime)  # runs to its yield without giving up control
    connections = _open[loop][0]
    if (model, base_url) not in connections:
        connections[model, base_url] = Connection(model, base_url)
    return connections[model, base_url]


async def _lifetime(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[_Connections]:
    """A loop closes its asynchronous generators before it ends: the one moment to close what belongs to it."""
    connections: _Connections = {}
    try:
        yield connections
    finally:
        _open.pop(loop, None)
        for opened in connections.values():
            await opened.aclose()


Connection("any", "http://127.0.0.1/v1")  # loads, here in the thread, what the libraries would load on the event loop
