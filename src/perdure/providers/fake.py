"""The ``fake`` provider of documents: says what its options say, without a network. For tests, examples and CI.

On its first turn it calls the agent's first tool with ``toolInput``, where that is given; then it answers ``finalText``.
``delayMs`` is waited before each answer; the first ``failFirst`` calls of a run fail in a way that may be tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from perdure.ports.provider import Capability, Delta, Finish, ModelError, Profile, Request, Response
from perdure.records.parts import CallPart, Part, TextPart, Usage
from perdure.rules.accounting import Price

_ABLE: frozenset[Capability] = frozenset({"tools", "structured_output"})
_CHARS_A_TOKEN = 4


class FakeModel:
    """A model that answers what it is told to.

    Args:
        name: its name. options: ``toolInput``, ``finalText``, ``delayMs``, ``failFirst``.
        price: what tokens cost, for budgets; None: unknown.
    """

    def __init__(self, name: str, options: dict[str, Any], price: Price | None = None) -> None:
        self.name = name
        self.profile = Profile(capabilities=_ABLE, price=price)
        self._options = options
        self._failed: dict[str, int] = {}

    async def respond(self, request: Request, deltas: Callable[[Delta], None] | None = None) -> Response:
        """See ``ports.provider.Model.respond``."""
        options = self._options
        if options.get("delayMs"):
            await asyncio.sleep(options["delayMs"] / 1000)
        failed = self._failed.get(request.run, 0)
        if failed < options.get("failFirst", 0):
            self._failed[request.run] = failed + 1
            raise ModelError("The fake provider fails first, as it was told to.", dispatched="yes", retryable=True)
        parts: tuple[Part, ...]
        finish: Finish
        if request.turn == 1 and "toolInput" in options and request.tools:
            arguments = msgspec.json.encode(options["toolInput"]).decode()
            parts, finish = (CallPart(request.tools[0].name, arguments, "fake_1"),), "tool_calls"
        else:
            text = str(options.get("finalText", "done"))
            if deltas is not None:
                deltas(Delta("text", text))
            parts, finish = (TextPart(text),), "stop"
        size = sum(len(str(message)) for message in request.messages)
        usage = Usage(max(1, size // _CHARS_A_TOKEN), max(1, len(str(parts)) // _CHARS_A_TOKEN))
        return Response(parts=parts, finish=finish, model=self.name, usage=usage)
