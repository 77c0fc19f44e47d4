"""A model that plays a script: for tests and demos, deterministic to the last token count.

An item is chosen by the turn number of the request alone, so a run recovered in another process goes on at the right
place, and a repeated call gets the same answer again.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import canonical
from perdure.errors import Invalid
from perdure.limits import RESPONSE_CALLS_MAX
from perdure.ports.provider import (
    UNDECLARED,
    AssistantMessage,
    Delta,
    Message,
    ModelError,
    Profile,
    Request,
    Response,
    ToolMessage,
)
from perdure.records.parts import CallPart, Part, TextPart, Usage

__all__ = ["Scripted", "call", "calls", "fail", "hang", "say"]

REQUESTS_KEPT_MAX = 1024
CHARS_PER_TOKEN = 4
_WORDS = re.compile(r"\S+\s*|\s+")


class Say(msgspec.Struct, frozen=True):
    """The model answers with text."""

    text: str


class Call(msgspec.Struct, frozen=True):
    """The model calls one tool; ``arguments`` is the raw text it writes. An empty ``id`` is derived from the place."""

    name: str
    arguments: str
    id: str = ""


class Calls(msgspec.Struct, frozen=True):
    """The model calls several tools in one response, perhaps with words between them."""

    items: tuple[Say | Call, ...]


class Fail(msgspec.Struct, frozen=True):
    """The call raises."""

    error: BaseException


class Hang(msgspec.Struct, frozen=True):
    """The call never answers."""


Item = Say | Call | Calls | Fail | Hang | Response
Script = Sequence[Item] | Callable[[Request], Item | Awaitable[Item]]


def say(content: object) -> Say:
    """An answer: text as it is, any other value as JSON (builtins, dataclasses, structs, Pydantic models).

    Raises:
        Invalid: the value has no JSON form.
    """
    return Say(content if isinstance(content, str) else _json(content, "say(...)"))


def call(
    name: str, arguments: Mapping[str, Any] | None = None, /, *, raw: str | None = None, id: str = "", **named: Any
) -> Call:
    """One tool call: ``call("refund", order="o1", cents=5)``.

    Args:
        name: the tool's name, existing or not.
        arguments: arguments as a mapping, for names that are no identifiers or clash with ``raw`` and ``id``.
        raw: argument text written as it stands, broken or not; excludes the other forms.
        id: the provider id of the call; derived from turn and position when empty.
        named: arguments by name.

    Raises:
        Invalid: ``raw`` beside arguments, or an argument without a JSON form.
    """
    if raw is not None:
        if arguments is not None or named:
            raise Invalid(f"call({name!r}, ...) has both raw text and arguments.", help="Give one of them.")
        return Call(name, raw, id)
    return Call(name, _json({**(arguments or {}), **named}, f"call({name!r}, ...)"), id)


def calls(*items: Call | Say) -> Calls:
    """Several calls in one response, in order; ``say(...)`` among them is text the model writes beside its calls.

    Raises:
        Invalid: something else is among them, or they are more than ``RESPONSE_CALLS_MAX``.
    """
    for item in items:
        if not isinstance(item, (Call, Say)):
            raise Invalid(f"calls(...) takes call(...) and say(...), not {type(item).__name__}.")
    if len(items) > RESPONSE_CALLS_MAX:
        raise Invalid(f"calls(...) has {len(items):,} items; the limit is {RESPONSE_CALLS_MAX:,} (RESPONSE_CALLS_MAX).")
    return Calls(items)


def fail(error: BaseException | str | None = None) -> Fail:
    """The call raises ``error``; by default, or with a text, a retryable ``ModelError`` that the provider answered."""
    if error is None or isinstance(error, str):
        error = ModelError(error or "The script says that this model call fails.", dispatched="yes", retryable=True)
    return Fail(error)


def hang() -> Hang:
    """The call waits until it is cancelled; ``Request.timeout`` does not end it, as with a server that ignores it."""
    return Hang()


class Scripted:
    """A model that plays one item a turn, or asks a function that sees the whole request.

    Args:
        script: items of :func:`say`, :func:`call`, :func:`calls`, :func:`fail`, :func:`hang`, or a complete
            ``Response`` for what these cannot say (reasoning, ``finish="length"``); or a function, sync or async, from
            ``Request`` to such an item. The item of turn *n* of a run is the n-th, also when the call is repeated.
        name: the model's name, recorded with each response.
        profile: what the model declares of itself (capabilities, price, rate); by default nothing.

    Running out of script is a ``ModelError`` that is not retried. Token counts are one for every 4 characters begun.
    """

    def __init__(self, script: Script, *, name: str = "scripted", profile: Profile = UNDECLARED) -> None:
        self._name = name
        self.profile = profile
        self._requests: deque[tuple[Request, int]] = deque(maxlen=REQUESTS_KEPT_MAX)
        self._counted: dict[str, tuple[int, int, Message | None]] = {}  # run: messages counted, characters, the last
        self._function: Callable[[Request], Item | Awaitable[Item]] | None = None
        self._items: tuple[Item, ...] = ()
        if callable(script):
            self._function = script
            return
        self._items = tuple(script)
        for index, item in enumerate(self._items):
            if not isinstance(item, Item):
                raise Invalid(
                    f"Item {index} of the script of model `{name}` is a {type(item).__name__}.",
                    help="Use say(...), call(...), calls(...), fail(...) or hang().",
                )

    def __repr__(self) -> str:
        script = "function" if self._function else f"{len(self._items)} items"
        return f"Scripted({script}, name={self._name!r})"

    @property
    def name(self) -> str:
        """The name given."""
        return self._name

    @property
    def requests(self) -> list[Request]:
        """The last ``REQUESTS_KEPT_MAX`` requests, oldest first: one for each call, repeated ones included."""
        return [replace(request, messages=request.messages[:length]) for request, length in self._requests]

    async def respond(self, request: Request, emit: Callable[[Delta], None] | None) -> Response:
        """The scripted response. With ``emit``, text arrives word by word.

        Raises:
            ModelError: the script ran out, its function failed, or an item of :func:`fail` says so.
        """
        self._requests.append((request, len(request.messages)))  # a conversation only grows: its length is a copy
        await asyncio.sleep(0)  # always a checkpoint, as with a real model
        item = await self._ask(self._function, request) if self._function else self._planned(request)
        match item:
            case Fail(error):
                raise error.with_traceback(None)
            case Hang():
                await asyncio.Event().wait()
                raise AssertionError("unreachable")
            case Response():
                response = item
            case Calls(items):
                response = self._response(items, request)
            case Say() | Call():
                response = self._response((item,), request)
        if emit is not None:
            for part in response.parts:
                if isinstance(part, TextPart):
                    for word in _WORDS.findall(part.text):
                        emit(Delta("text", word))
        return response

    def _prompt_chars(self, request: Request) -> int:
        """Characters of the prompt, counted on from the run's last request: a turn costs what it adds."""
        messages = request.messages
        counted, chars, last = self._counted.pop(request.run, (0, 0, None))
        if counted > len(messages) or (counted and messages[counted - 1] is not last):
            counted, chars = 0, 0
        chars += sum(_chars(messages[place]) for place in range(counted, len(messages)))
        self._counted[request.run] = (len(messages), chars, messages[-1] if messages else None)
        while len(self._counted) > REQUESTS_KEPT_MAX:
            self._counted.pop(next(iter(self._counted)))
        return chars

    def _planned(self, request: Request) -> Item:
        if 1 <= request.turn <= len(self._items):
            return self._items[request.turn - 1]
        raise ModelError(
            f"The script of model `{self._name}` has {len(self._items)} items and agent `{request.agent}` asks for "
            f"turn {request.turn} of run `{request.run}`.",
            dispatched="no",
            retryable=False,
            help="Add an item for that turn, or give the agent fewer turns.",
        )

    async def _ask(self, function: Callable[[Request], Item | Awaitable[Item]], request: Request) -> Item:
        try:
            answer = function(request)
            item = await answer if inspect.isawaitable(answer) else answer
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"The script function of model `{self._name}` raised {type(error).__name__} at turn {request.turn}: "
                f"{error}",
                dispatched="no",
            ) from error
        if not isinstance(item, Item):
            raise ModelError(
                f"The script function of model `{self._name}` returned a {type(item).__name__} at turn {request.turn}.",
                dispatched="no",
                help="Return say(...), call(...), calls(...), fail(...) or hang().",
            )
        return item

    def _response(self, items: tuple[Say | Call, ...], request: Request) -> Response:
        parts: list[Part] = []
        position = 0
        for item in items:
            if isinstance(item, Say):
                parts.append(TextPart(item.text))
            else:
                parts.append(CallPart(item.name, item.arguments, item.id or f"call_{request.turn}_{position}"))
                position += 1
        usage = Usage(input=_tokens(self._prompt_chars(request)), output=_tokens(_parts_chars(parts)))
        return Response(tuple(parts), "tool_calls" if position else "stop", self._name, usage)


def _tokens(chars: int) -> int:
    return -(-chars // CHARS_PER_TOKEN)


def _chars(message: Message) -> int:
    match message:
        case AssistantMessage(parts):
            return _parts_chars(parts)
        case ToolMessage(results):
            return sum(len(result.content) for result in results)
        case _:
            return len(message.text)


def _parts_chars(parts: Sequence[Part]) -> int:
    return sum(len(part.name) + len(part.arguments) if isinstance(part, CallPart) else len(part.text) for part in parts)


def _json(value: object, what: str) -> str:
    try:
        plain = msgspec.to_builtins(value, enc_hook=_model_dump, str_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(f"{what} holds a value without a JSON form: {error}.") from error
    return canonical.encode(plain, what).decode()


def _model_dump(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # Pydantic, without importing it
    if dump is None:
        raise TypeError(f"a {type(value).__name__}")
    return dump(mode="json")
