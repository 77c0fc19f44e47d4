"""The conversation as a model gets it: provider-valid by construction, whatever happened to the run.

Calls and results are paired here and nowhere else. A missing result becomes an explanatory one in this view only; that
settles nothing and resolves nothing. The view is built once an attempt and then extended a turn at a time.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from perdure.definitions.files import KEY as FILE
from perdure.definitions.files import File
from perdure.ports.provider import (
    AssistantMessage,
    Capability,
    FileContent,
    Message,
    Model,
    ModelError,
    Request,
    SystemMessage,
    ToolMessage,
    ToolResult,
    UserMessage,
    profile_of,
)
from perdure.records.parts import CallPart, Part
from perdure.rules import fold, plans

_PROVIDER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
CONTINUE = "Go on with this earlier request; the results it was waiting for are known now:"


def input_message(raw: bytes | msgspec.Raw) -> UserMessage:
    """A recorded input as the user's message: text as it is, anything else as JSON, its files beside it."""
    value = _decode(raw)
    if isinstance(value, str):
        return UserMessage(value)
    text = bytes(raw)
    files: list[FileContent] = []
    if FILE.encode() in text:
        text = _encode(_mentioned(value, files))
    return UserMessage(text.decode(), tuple(files))


def _mentioned(value: Any, files: list[FileContent]) -> Any:
    """A JSON value with a mention in place of each file, numbered from 1; the files are added to ``files``."""
    if isinstance(value, list):
        return [_mentioned(item, files) for item in value]
    if not isinstance(value, dict):
        return value
    if FILE not in value:
        return {key: _mentioned(item, files) for key, item in value.items()}
    file = msgspec.convert(value, File)
    files.append(FileContent(file.media_type, file.data, file.url, file.name))
    named = {"name": file.name} if file.name else {}
    sized = {"bytes": len(file.data)} if file.data else {}
    return {FILE: len(files), "media_type": file.media_type, **named, **sized}


def needs(request: Request) -> frozenset[Capability]:
    """What a model must be able to do to answer a request: call tools, see images, read other files."""
    found: set[Capability] = {"tools"} if request.tools else set()
    for message in request.messages:
        if isinstance(message, UserMessage):
            found.update("images" if file.media_type.startswith("image/") else "files" for file in message.files)
    return frozenset(found)


def check_needs(model: Model, request: Request) -> None:
    """Raise unless a model can do what a request needs; one that declares nothing is taken at its word.

    Raises:
        ModelError: it cannot; nothing was sent.
    """
    able = profile_of(model).capabilities
    lacking = sorted(needs(request) - able) if able is not None else []
    if lacking:
        raise ModelError(
            f"Model `{model.name}` cannot take what this run gives it: {', '.join(lacking)}.",
            dispatched="no",
            kind="model.setup",
            help="Choose a model that declares it, or leave it out.",
        )


def explain(kind: str, message: str, **more: str) -> str:
    """Content of a failed or explanatory result."""
    return _encode({"error": {"kind": kind, "message": message, **more}}).decode()


def result_of(call: fold.Call) -> tuple[str, bool]:
    """Content of a call's result and whether it is a failure. Never invents an outcome."""
    if call.failure is not None:
        return explain(call.failure.kind, call.failure.message), True
    if call.closed and call.result is not None:
        return bytes(call.result).decode(), False
    if call.verdict is not None and call.verdict.verdict == "applied":
        return bytes(call.verdict.result).decode(), False
    started = call.prepared is not None or any(call.unknowns()) or bool(call.steps)
    if plans.requires_preparation(call) and not started:
        return explain("unavailable", "This call was not executed.", execution="not-executed"), True
    return explain(
        "unknown", "The outcome of this call is unknown. Do not assume that it failed; do not repeat it."
    ), True


class PromptView:
    """Messages for one run of a thread.

    Args:
        thread: the folded thread.
        run: id of the run that asks; its open turn is left out until :meth:`extend`.
        alone: whether other runs of the thread are none of its business.
    """

    def __init__(self, thread: fold.Thread, run: str, *, alone: bool = False) -> None:
        self.messages: list[Message] = []
        self._ids: set[str] = set()
        own = thread.runs[run]
        if own.started is not None and own.started.instructions:
            self.messages.append(SystemMessage(own.started.instructions))
        places: list[tuple[int, fold.Run, fold.Turn | None]] = []
        for other in [own] if alone else thread.runs.values():
            places.append((other.input_sequence, other, None))
            places.extend((turn.sequence, other, turn) for turn in other.turns)
        places.sort(key=lambda place: place[0])
        last = own
        for _, other, turn in places:
            if turn is None:
                self.messages.append(input_message(other.input))
            elif other is own and turn.open:
                continue
            else:
                self.extend(turn)
            last = other
        self._passed = last is not own  # later requests went on while this one waited
        self._input = input_message(own.input)

    def extend(self, turn: fold.Turn) -> None:
        """Add a turn with the results of its batch."""
        parts, calls = self._valid_parts(turn)
        if parts:
            response = turn.response
            self.messages.append(AssistantMessage(parts, response.model, bytes(response.continuation)))
        if calls:
            results = []
            for part, call in calls:
                content, failed = result_of(call)
                results.append(ToolResult(part.provider_id, part.name, content, failed))
            self.messages.append(ToolMessage(tuple(results)))
        if turn.rejected is not None:
            self.messages.append(UserMessage(f"That answer was not accepted: {turn.rejected.message}. Answer again."))

    def for_model(self) -> list[Message]:
        """The messages to send. The last is about this run's request, and never an answer of the model's own."""
        last = self.messages[-1] if self.messages else None
        if self._passed or isinstance(last, AssistantMessage):
            self._passed = False
            self.messages.append(UserMessage(f"{CONTINUE}\n\n{self._input.text}", self._input.files))
        return self.messages

    def _valid_parts(self, turn: fold.Turn) -> tuple[tuple[Part, ...], list[tuple[CallPart, fold.Call]]]:
        """Parts with legal names, unique ids and object arguments; raw text stays in the record as evidence."""
        parts: list[Part] = []
        calls: list[tuple[CallPart, fold.Call]] = []
        waiting = iter(turn.calls)
        for part in turn.response.parts:
            if not isinstance(part, CallPart):
                parts.append(part)
                continue
            call = next(waiting)
            name = part.name if _PROVIDER_ID.match(part.name) else "unknown_tool"
            valid = CallPart(name, _object_text(part.arguments), self._unique(part.provider_id, turn, call))
            parts.append(valid)
            calls.append((valid, call))
        return tuple(parts), calls

    def _unique(self, provider_id: str, turn: fold.Turn, call: fold.Call) -> str:
        chosen = provider_id
        if not _PROVIDER_ID.match(chosen) or chosen in self._ids:
            chosen = f"call_{turn.sequence}_{call.position}"
        self._ids.add(chosen)
        return chosen


def _object_text(arguments: str) -> str:
    """The arguments if they are a JSON object, else an empty one: a provider accepts nothing else."""
    try:
        return arguments if isinstance(_decode(arguments.encode()), dict) else "{}"
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return "{}"
