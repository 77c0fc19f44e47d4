"""What the server can be told to do, the same in every wire format."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Literal

from perdure.ports.provider import Response
from perdure.providers.scripted import Call, Calls, Fail, Hang, Item, Say
from perdure.records.parts import CallPart, Part, TextPart, Usage

USAGE = Usage(input=110, output=30, cache_read=60, reasoning=10)
LONG_TEXT = "It is sunny in Oslo and it will stay so until the evening, when clouds come in from the sea."
HUGE_BYTES = 50_000_000

Format = Literal["chat", "responses", "azure", "anthropic", "google"]
FORMATS: tuple[Format, ...] = ("chat", "responses", "azure", "anthropic", "google")


@dataclass(frozen=True)
class Asked:
    """What a request asks for, whatever its format.

    Attributes:
        turn: answers in its history, plus one.
        tools: names of the tools it offers.
        question: the first text of the user: names the conversation.
        answered: whether it ends with a tool's result.
    """

    turn: int
    model: str
    stream: bool
    tools: tuple[str, ...]
    question: str
    answered: bool


@dataclass(frozen=True)
class Status:
    """An HTTP error, in the provider's own words for ``why``; ``message`` given: in these."""

    code: int
    why: str
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""


@dataclass(frozen=True)
class Raw:
    """A body as it stands, with status 200 unless told otherwise."""

    body: bytes
    media_type: str = "application/json"
    code: int = 200


@dataclass(frozen=True)
class Break:
    """The connection ends instead of an answer, or within it.

    Attributes:
        where: ``accept``: nothing of the request is read but its first byte; ``read``: all of it is, and nothing is
            answered; ``middle``: half of the answer is sent.
        how: by a TCP reset, an orderly close, an end of the body that is well formed though too early, silence, or an
            error that the provider sends in its stream.
    """

    where: Literal["accept", "read", "middle"]
    how: Literal["reset", "close", "end", "silence", "error"] = "reset"


@dataclass(frozen=True)
class Odd:
    """A complete answer that is not as it should be."""

    kind: Literal["cut_arguments", "bad_arguments", "unknown_tool", "same_ids", "empty", "huge", "refusal"]


@dataclass(frozen=True)
class Nowhere:
    """Not played by the server but by its address: see ``FakeModels.address``."""

    kind: Literal["refused", "dns", "tls"]


Fault = Status | Raw | Break | Odd | Nowhere
Answer = Item | Fault

HTML = b"<html><body><h1>502 Bad Gateway</h1><p>The upstream closed.</p></body></html>"

FAULTS: dict[str, Fault] = {
    "refused": Nowhere("refused"),
    "dns": Nowhere("dns"),
    "tls": Nowhere("tls"),
    "400": Status(400, "invalid"),
    "401": Status(401, "key"),
    "bad key": Status(0, "key"),  # with the status that the provider uses: Google says 400
    "403": Status(403, "forbidden"),
    "404": Status(404, "model"),
    "429": Status(429, "rate"),
    "429 after seconds": Status(429, "rate", {"retry-after": "7"}),
    "429 after date": Status(429, "rate", {"retry-after": "DATE+7"}),
    "500": Status(500, "server"),
    "502": Raw(HTML, "text/html", 502),
    "503": Status(503, "overloaded", {"retry-after": "7"}),
    "529": Status(529, "overloaded"),
    "context": Status(400, "context"),
    "prompt refused": Status(400, "refused"),
    "session": Status(400, "session"),
    "reset unread": Break("accept"),
    "reset": Break("read"),
    "closed": Break("read", "close"),
    "hang": Break("read", "silence"),
    "cut": Break("middle", "close"),
    "cut by reset": Break("middle", "reset"),
    "cut in form": Break("middle", "end"),
    "stalled": Break("middle", "silence"),
    "error within": Break("middle", "error"),
    "malformed": Raw(b'{"id": "1", "model'),
    "wrong type": Raw(HTML, "text/html"),
    "huge": Odd("huge"),
    "empty": Odd("empty"),
    "cut arguments": Odd("cut_arguments"),
    "bad arguments": Odd("bad_arguments"),
    "unknown tool": Odd("unknown_tool"),
    "same ids": Odd("same_ids"),
    "refusal": Odd("refusal"),
}
"""Every fault by its name."""


def response_of(item: Item | Odd, asked: Asked) -> Response:
    """The answer that an item says, with ids derived from its place."""
    match item:
        case Response():
            return item if item.usage != Usage() else Response(item.parts, item.finish, item.model, USAGE)
        case Odd(kind):
            return _odd(kind, asked)
        case Say(text):
            return Response((TextPart(text),), "stop", asked.model, USAGE)
        case Call():
            return response_of(Calls((item,)), asked)
        case Calls(items):
            parts: list[Part] = []
            for position, part in enumerate(items):
                if isinstance(part, Say):
                    parts.append(TextPart(part.text))
                else:
                    parts.append(CallPart(part.name, part.arguments, part.id or f"call_{asked.turn}_{position}"))
            calls = any(isinstance(part, CallPart) for part in parts)
            return Response(tuple(parts), "tool_calls" if calls else "stop", asked.model, USAGE)
        case Fail() | Hang():
            raise AssertionError("played as a fault")


def _odd(kind: str, asked: Asked) -> Response:
    tool = asked.tools[0] if asked.tools else "weather"
    name = asked.model
    match kind:
        case "cut_arguments":
            return Response((CallPart(tool, '{"ci', "call_cut"),), "length", name, USAGE)
        case "bad_arguments":
            return Response((CallPart(tool, '{"city":{"not":"text"}}', "call_bad"),), "tool_calls", name, USAGE)
        case "unknown_tool":
            return Response((CallPart("no_such_tool", "{}", "call_odd"),), "tool_calls", name, USAGE)
        case "same_ids":
            twice = (CallPart(tool, '{"city":"Oslo"}', "same"), CallPart(tool, '{"city":"Rome"}', "same"))
            return Response(twice, "tool_calls", name, USAGE)
        case "huge":
            return Response((TextPart("x" * HUGE_BYTES),), "stop", name, USAGE)
        case "refusal":
            return Response((TextPart("I cannot help with that."),), "refusal", name, USAGE)
        case _:
            return Response((), "stop", name, USAGE)


def object_of(arguments: str) -> dict[str, object]:
    """Arguments where a format carries them as an object; what is none becomes an empty one."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def split(text: str, least: int = 7) -> list[str]:
    """Pieces of a text, as a stream tells it: small ones, but never more than some hundred."""
    size = max(least, len(text) // 500)
    return [text[at : at + size] for at in range(0, len(text), size)]


def sse(value: object, event: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()
