"""One adapter over pydantic-ai's models for every wire format; what differs between formats is a :class:`Format`.

Loaded by the first call of a model, in a thread. The library's message types are built from ours for one call and never
kept: what is stored is ours.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import httpx2
from pydantic_ai import messages as their
from pydantic_ai.models import Model as LibraryModel
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.output import OutputObjectDefinition
from pydantic_ai.settings import ModelSettings
from pydantic_ai.tools import ToolDefinition

from perdure.limits import RESPONSE_BYTES_MAX
from perdure.ports.provider import (
    AssistantMessage,
    Delta,
    FileContent,
    Finish,
    Message,
    ModelError,
    Request,
    Response,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from perdure.providers import _failures as failures
from perdure.providers import _wire as wires
from perdure.providers._target import EFFORTS, Target
from perdure.records.parts import NO_EVIDENCE, CallPart, Evidence, Part, ReasoningPart, TextPart, Usage

STREAM_FACTOR = 32  # a streamed response is this much larger on the wire than its content, at most
CONTINUATION_VERSION = 1
OUTPUT_NAME = "answer"  # what the schema of the final answer is called, where it needs a name
OURS = frozenset({"max_retries", "timeout", "request_timeout", "first_event_timeout", "tool_choice", "thinking"})


class Format:
    """What one wire format does in its own way. One object for each model and event loop.

    A subclass makes ``self.model`` in ``__init__(self, target, http)`` from the library's provider, given ``http`` (a
    client of :func:`wires.client`), ``wires.PLACEHOLDER`` as key and no retries.

    Attributes:
        model: the library's model.
        system: the library's ``provider_name`` of it, which marks what goes back to where it came from.
        api: which of a provider's formats: what came by one goes back by no other.
        settings_known: names of settings that a user may give.
        effort_setting: the library's setting for ``reasoning_effort``; empty when the format has none.
        details_kept: keys of a part's ``provider_details`` that the same model wants back.
        urls: what the provider fetches by itself: kinds of media ("image", "audio", "video") or "document".
        streams: whether every answer is streamed over the wire, also where nobody follows it.
        native: whether the provider is asked to hold the answer to its schema; else the prompt asks for it.
    """

    model: LibraryModel[Any]
    system: str
    api: str = ""
    settings_known: ClassVar[frozenset[str]] = frozenset()
    effort_setting: ClassVar[str] = ""
    details_kept: ClassVar[frozenset[str]] = frozenset()
    urls: ClassVar[frozenset[str]] = frozenset()
    streams: ClassVar[bool] = False
    native: bool = False

    def auth(self, key: str) -> dict[str, str]:
        """The header that carries the key."""
        return {"authorization": f"Bearer {key}"}

    def knows(self, setting: str) -> bool:
        """Whether a user may give a setting of this name."""
        return setting in self.settings_known

    def settings(self, given: dict[str, Any], request: Request) -> dict[str, Any]:
        """The library's settings from the user's, which are known ones; ``reasoning_effort`` is already translated."""
        return given

    def messages(self, request: Request, name: str) -> tuple[list[their.ModelMessage], dict[str, Any]]:
        """The conversation, and settings that belong to it.

        Raises:
            ModelError: it cannot be sent in this format; nothing was.
        """
        return [made for message in self._with_schema(request) for made in self.message(message, request, name)], {}

    def parameters(self, request: Request) -> ModelRequestParameters:
        """The tools and the schema of the answer, as they are."""
        tools = [
            ToolDefinition(
                name=tool.name, description=tool.description, parameters_json_schema=tool.parameters, strict=False
            )
            for tool in request.tools
        ]
        schema = self.native_schema(request)
        if schema is None:
            return ModelRequestParameters(function_tools=tools)
        answer = OutputObjectDefinition(json_schema=schema, name=OUTPUT_NAME, strict=self.strict(schema))
        return ModelRequestParameters(function_tools=tools, output_mode="native", output_object=answer)

    def native_schema(self, request: Request) -> dict[str, Any] | None:
        """The schema as the provider itself is given it, None where the prompt asks for it instead."""
        return rooted(request.output_schema) if self.native and request.output_schema is not None else None

    def strict(self, schema: dict[str, Any]) -> bool | None:
        """Whether the provider can hold an answer to every word of this schema."""
        return None

    def incomplete(self, answer: their.ModelResponse) -> str:
        """Why the library's answer is no complete response; empty when it is one."""
        return ""

    def finish(self, answer: their.ModelResponse, calls: bool) -> Finish:
        """Why the model stopped."""
        match answer.finish_reason:
            case "stop" | "tool_call":
                return "tool_calls" if calls else "stop"
            case "length":
                return "length"
            case "content_filter":
                return "refusal"
            case _:
                return "other"

    def continuation(self, request: Request, parts: tuple[Part, ...]) -> dict[str, Any]:
        """What more the same model wants back with this turn, beside ids and the details of its parts."""
        return {}

    # to the provider

    def _with_schema(self, request: Request) -> list[Message]:
        """The messages; a schema that the prompt must ask for follows the last instructions."""
        if request.output_schema is None or self.native_schema(request) is not None:
            return request.messages
        last = max((n for n, message in enumerate(request.messages) if isinstance(message, SystemMessage)), default=-1)
        asked = SystemMessage(schema_text(request.output_schema))
        return [*request.messages[: last + 1], asked, *request.messages[last + 1 :]]

    def message(self, message: Message, request: Request, name: str) -> Sequence[their.ModelMessage]:
        """One message in the library's types."""
        match message:
            case SystemMessage(text):
                return [their.ModelRequest([their.SystemPromptPart(text)])]
            case UserMessage(text, files):
                content = [text, *(self._file(file, name) for file in files)] if files else text
                return [their.ModelRequest([their.UserPromptPart(content)])]
            case ToolMessage(results):
                parts = [
                    their.ToolReturnPart(
                        result.name,
                        result.content,
                        tool_call_id=result.provider_id,
                        outcome="failed" if result.failed else "success",
                    )
                    for result in results
                ]
                return [their.ModelRequest(parts)]
            case AssistantMessage():
                made = self.assistant(message, request, name)
                return [their.ModelResponse(made, provider_name=self.system)] if made else []

    def assistant(self, message: AssistantMessage, request: Request, name: str) -> list[their.ModelResponsePart]:
        """Reasoning and details go back only to the model they came from, and only where its continuation is used."""
        own = self.owns(message, request, name)
        details = details_of(message) if own else [None] * len(message.parts)
        parts: list[their.ModelResponsePart] = []
        for part, detail in zip(message.parts, details, strict=True):
            system = self.system if detail else None
            match part:
                case TextPart(text):
                    parts.append(their.TextPart(text, provider_name=system, provider_details=detail))
                case ReasoningPart():
                    parts.extend(self.reasoning(part, detail) if own else [])
                case CallPart(tool, arguments, provider_id):
                    parts.append(
                        their.ToolCallPart(
                            tool, arguments, tool_call_id=provider_id, provider_name=system, provider_details=detail
                        )
                    )
        return parts

    def owns(self, message: AssistantMessage, request: Request, name: str) -> bool:
        """Whether what the provider attached to an answer goes back with it."""
        came_by = record_of(message.continuation).get("api", self.api)
        return message.model == name and request.use_continuation and came_by == self.api

    def reasoning(self, part: ReasoningPart, detail: dict[str, Any] | None) -> list[their.ModelResponsePart]:
        """Reasoning of this very model, as it wants it back."""
        return [
            their.ThinkingPart(
                part.text,
                id=part.id,
                signature=part.signature,
                provider_name=self.system,
                provider_details=detail,
            )
        ]

    def fetches(self, kind: str, url: str) -> bool:
        """Whether the provider itself fetches a file of a kind by this address; the library must not do it instead."""
        return kind in self.urls

    def _file(self, file: FileContent, name: str) -> their.UserContent:
        kind = file.media_type.partition("/")[0]
        kind = kind if kind in _URLS else "document"
        if not file.url:
            return their.BinaryContent(file.data, media_type=file.media_type)
        if not self.fetches(kind, file.url):
            raise ModelError(
                f"Model `{name}` cannot fetch a file of type `{file.media_type}` by its address.",
                dispatched="no",
                kind="model.setup",
                help="Give the bytes of the file instead of its address.",
            )
        return _URLS[kind](file.url, media_type=file.media_type)


_URLS: dict[str, Callable[..., their.UserContent]] = {
    "image": their.ImageUrl,
    "audio": their.AudioUrl,
    "video": their.VideoUrl,
    "document": their.DocumentUrl,
}


def schema_text(schema: dict[str, Any]) -> str:
    """Instructions that ask for an answer of this schema."""
    return (
        "Your final answer, the message without a tool call, must be one JSON value that fits this JSON Schema, and "
        f"nothing else: no other text and no Markdown fence.\n{_compact(schema)}"
    )


def rooted(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The schema with an object at its root, which providers insist on; None if its root is no object."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/") and set(schema) <= {"$ref", "$defs", "$schema"}:
        definitions = schema.get("$defs", {})
        found = definitions.get(reference.removeprefix("#/$defs/"))
        if isinstance(found, dict) and found.get("type") == "object":
            return {**found, "$defs": definitions}
    return schema if schema.get("type") == "object" else None


def record_of(continuation: bytes) -> dict[str, Any]:
    """A continuation that this version wrote; empty for any other."""
    try:
        value = json.loads(continuation or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) and value.get("v") == CONTINUATION_VERSION else {}


def details_of(message: AssistantMessage) -> list[dict[str, Any] | None]:
    """What the provider attached to each part and wants back (Gemini's thought signatures, OpenAI's phases)."""
    found = record_of(message.continuation).get("parts")
    if not isinstance(found, list) or len(found) != len(message.parts):
        return [None] * len(message.parts)
    return [detail if isinstance(detail, dict) and detail else None for detail in found]


# from the provider


def delta_of(event: object) -> Delta | None:
    """The text that an event of the library's stream adds."""
    match event:
        case their.PartStartEvent(part=their.TextPart(content=text)) if text:
            return Delta("text", storable(text))
        case their.PartStartEvent(part=their.ThinkingPart(content=text)) if text:
            return Delta("reasoning", storable(text))
        case their.PartDeltaEvent(delta=their.TextPartDelta(content_delta=text)) if text:
            return Delta("text", storable(text))
        case their.PartDeltaEvent(delta=their.ThinkingPartDelta(content_delta=text)) if text:
            return Delta("reasoning", storable(text))
        case _:
            return None


def response_of(
    form: Format, request: Request, answer: their.ModelResponse, name: str, evidence: Evidence = NO_EVIDENCE
) -> Response:
    """A complete response in our types.

    Raises:
        ModelError: it is not complete, or what the server sent contradicts itself.
    """
    if why := form.incomplete(answer):
        raise ModelError(f"Model `{name}` gave no complete answer: {why}.", dispatched="unknown", retryable=True)
    if answer.finish_reason == "error":
        raise ModelError(f"Model `{name}` says that it failed.", dispatched="yes", retryable=True)
    parts: list[Part] = []
    details: list[dict[str, Any]] = []
    for part in answer.parts:
        kept = _kept(form, part)
        match part:
            case their.TextPart(content=text) if text or kept:
                parts.append(TextPart(storable(text)))
            case their.ThinkingPart(content=text) if text or part.signature or kept:
                parts.append(ReasoningPart(storable(text), part.id, part.signature))
            case their.ToolCallPart(tool_name=tool, args=args):
                raw = args if isinstance(args, str) else "" if args is None else _compact(args)
                parts.append(CallPart(storable(tool), storable(raw), storable(part.tool_call_id)))
            case _:
                continue  # empty text, and kinds that nobody asked for
        details.append(kept)
    if sum(map(_size, parts)) > RESPONSE_BYTES_MAX:
        raise _too_large(name)
    calls = any(isinstance(part, CallPart) for part in parts)
    refusal = (answer.provider_details or {}).get("refusal")
    if refusal and not parts:
        parts.append(TextPart(storable(refusal)))
        details.append({})
    if answer.finish_reason == "tool_call" and not calls:
        raise ModelError(
            f"Model `{name}` said that it calls a tool and named none.", dispatched="unknown", retryable=True
        )
    record: dict[str, Any] = {"v": CONTINUATION_VERSION}
    record |= {"id": answer.provider_response_id} if answer.provider_response_id else {}
    record |= {"model": answer.model_name} if answer.model_name else {}
    record |= {"api": form.api} if form.api else {}
    record |= {"parts": details} if any(details) else {}
    record |= form.continuation(request, tuple(parts))
    usage = answer.usage
    return Response(
        tuple(parts),
        form.finish(answer, calls),
        name,
        Usage(
            input=max(usage.input_tokens, 0),
            output=max(usage.output_tokens, 0),
            cache_read=max(usage.cache_read_tokens, 0),
            cache_write=max(usage.cache_write_tokens, 0),
            reasoning=max(usage.output_reasoning_tokens or usage.details.get("reasoning_tokens", 0), 0),
        ),
        json.dumps(record, separators=(",", ":")).encode(),  # in ASCII: what is attached may be no Unicode
        evidence,
    )


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _too_large(name: str) -> ModelError:
    return ModelError(
        f"Model `{name}` gave an answer that is larger than {RESPONSE_BYTES_MAX:,} bytes.", dispatched="unknown"
    )


def _size(part: Part) -> int:
    return len(part.arguments if isinstance(part, CallPart) else part.text)


def _kept(form: Format, part: their.ModelResponsePart) -> dict[str, Any]:
    details = getattr(part, "provider_details", None) or {}
    return {key: details[key] for key in details if key in form.details_kept and details[key] is not None}


def storable(text: str) -> str:
    """Text that can be stored: surrogate pairs that came in two pieces are joined, lone ones replaced."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


# calls


async def ask(
    form: Format,
    request: Request,
    settings: Mapping[str, Any],
    emit: Callable[[Delta], None] | None,
    name: str,
) -> their.ModelResponse:
    """One call of the library's model; streamed if ``emit`` is given."""
    messages, more = form.messages(request, name)
    given = cast(ModelSettings, {**settings, **more})
    if not request.tools_allowed and request.tools:
        given["tool_choice"] = "none"
    parameters = form.parameters(request)
    if emit is None:
        return await form.model.request(messages, given, parameters)
    async with form.model.request_stream(messages, given, parameters) as stream:
        said = 0
        async for event in stream:
            if (delta := delta_of(event)) is not None:
                said += len(delta.text)
                if said > RESPONSE_BYTES_MAX:
                    raise _too_large(name)
                emit(delta)
        return stream.get()


def settings_for(form: Format, defaults: Mapping[str, Any], request: Request, name: str) -> dict[str, Any]:
    """The library's settings from a model's and an agent's.

    Raises:
        ModelError: one is unknown or has no such value; nothing was sent.
    """
    given = {**defaults, **request.settings}
    wrong = sorted(name for name in given if name in OURS or not (name == "reasoning_effort" or form.knows(name)))
    wrong += ["reasoning_effort"] if "reasoning_effort" in given and not form.effort_setting else []
    if wrong:
        why = "is decided by Perdure" if wrong[0] in OURS else "does not exist"
        known = form.settings_known - OURS | ({"reasoning_effort"} if form.effort_setting else set())
        raise ModelError(
            f"Setting `{wrong[0]}` of model `{name}` {why}.",
            dispatched="no",
            kind="model.setup",
            help=f"Known are {', '.join(sorted(known))}.",
        )
    if (effort := given.pop("reasoning_effort", None)) is not None:
        if effort not in EFFORTS:
            raise ModelError(
                f"Setting `reasoning_effort` of model `{name}` is {effort!r:.64}.",
                dispatched="no",
                kind="model.setup",
                help=f"Known are {', '.join(EFFORTS)}.",
            )
        given[form.effort_setting] = effort
    return form.settings(given, request)


class Connection:
    """The connections of one model in one event loop."""

    def __init__(self, target: Target, make: Callable[[Target, httpx2.AsyncClient], Format]) -> None:
        self._http = wires.client()
        self._name = target.name
        self.format = make(target, self._http)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def respond(
        self, request: Request, emit: Callable[[Delta], None] | None, key: str | None, defaults: Mapping[str, Any]
    ) -> Response:
        """One HTTP request, one complete response. See ``Model.respond``."""
        headers = self.format.auth(key) if key else {}
        headers |= {"idempotency-key": request.key} if request.key else {}
        streamed = emit is not None or self.format.streams
        wire = wires.Wire(RESPONSE_BYTES_MAX * (STREAM_FACTOR if streamed else 1), headers)
        token = wires.current.set(wire)
        try:
            settings = settings_for(self.format, defaults, request, self._name)
            settings |= {"timeout": wires.timeout(request.timeout), "max_retries": 0}
            async with asyncio.timeout(request.timeout):
                answer = await ask(self.format, request, settings, emit, self._name)
            if wire.status is not None and wire.status >= 400:  # the library made an answer of the refusal of a prompt
                raise ModelError(
                    f"Model `{self._name}` refuses the prompt with HTTP {wire.status}.",
                    dispatched="yes",
                    kind="model.refused",
                )
            return response_of(self.format, request, answer, self._name, wire.evidence())
        except ModelError as error:
            failure = failures.with_evidence(error, wire.evidence())
        except Exception as error:  # noqa: BLE001 (whatever the libraries raise, the caller learns what is known)
            failure = failures.of_wire(error, wire, self._name, request.timeout)
        finally:
            wires.current.reset(token)
            await wire.aclose()
        if key:
            failure = failures.without(key, failure)
        # Outside the handler: the cause may show the key in a header or an echoed body, so it goes no further.
        raise failure


# connections by event loop

_Connections = dict[Target, Connection]
_open: dict[asyncio.AbstractEventLoop, tuple[_Connections, AsyncGenerator[_Connections]]] = {}


async def connection(target: Target, make: Callable[[Target, httpx2.AsyncClient], Format]) -> Connection:
    """The connection to a model from the running loop; models of the same target share it."""
    loop = asyncio.get_running_loop()
    if loop not in _open:
        for other in [other for other in _open if other.is_closed()]:
            _open.pop(other, None)
        lifetime = _lifetime(loop)
        _open[loop] = (await anext(lifetime), lifetime)  # runs to its yield without giving up control
    connections = _open[loop][0]
    if target not in connections:
        connections[target] = Connection(target, make)
    return connections[target]


async def _lifetime(loop: asyncio.AbstractEventLoop) -> AsyncGenerator[_Connections]:
    """A loop closes its asynchronous generators before it ends: the one moment to close what belongs to it."""
    connections: _Connections = {}
    try:
        yield connections
    finally:
        _open.pop(loop, None)
        for opened in connections.values():
            await opened.aclose()
