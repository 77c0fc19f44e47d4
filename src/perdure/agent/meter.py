"""How many tokens the next prompt has: counted by the provider as far as it answered, estimated by size after that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from perdure.ports.provider import AssistantMessage, Message, ToolMessage, ToolSpec
from perdure.records.parts import CallPart, Part, Usage
from perdure.rules import accounting

_encode = msgspec.json.Encoder().encode
_FILE_TOKENS = 1_500  # what providers count for an image or a page, about


class Meter:
    """Costs what the conversation has grown since it was asked last.

    Args:
        tools: shown with every request. output_schema: of the answer, or None.
    """

    def __init__(self, tools: Sequence[ToolSpec], output_schema: dict[str, Any] | None) -> None:
        self._fixed = accounting.estimate(len(_encode([list(tools), output_schema])), 0)
        self._known = 0  # messages whose tokens are in _tokens
        self._tokens = 0

    def prompt(self, messages: Sequence[Message]) -> int:
        """Tokens of a request with these messages: those of an earlier call, and whatever follows."""
        if self._known > len(messages):
            self._known = self._tokens = 0
        if not self._known:
            self._tokens = self._fixed
        for place in range(self._known, len(messages)):
            self._tokens += accounting.estimate(_size(messages[place])) + _files(messages[place])
        self._known = len(messages)
        return self._tokens

    def counted(self, messages: int, usage: Usage) -> None:
        """The provider counted a prompt of so many messages, and its answer, which is the message after them."""
        if usage.input:
            self._known, self._tokens = messages + 1, usage.input + usage.output


def _size(message: Message) -> int:
    match message:
        case AssistantMessage(parts):
            return sum(_part_size(part) for part in parts)
        case ToolMessage(results):
            return sum(len(result.content.encode("utf-8", "replace")) + len(result.name) for result in results)
        case _:
            return len(message.text.encode("utf-8", "replace"))


def _part_size(part: Part) -> int:
    return len(part.name) + len(part.arguments) if isinstance(part, CallPart) else len(part.text)


def _files(message: Message) -> int:
    return _FILE_TOKENS * len(getattr(message, "files", ()))
