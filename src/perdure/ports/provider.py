"""The provider port: one model call. What a model adapter must do, and the values that cross.

The engine decides whether a call may be repeated; a provider never retries by itself. It must tell the truth about
dispatch: whether the request surely never left, surely failed, or may have been served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from perdure.errors import Error
from perdure.records.parts import Part, Usage


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool as shown to the model: ``parameters`` is a JSON Schema object."""

    name: str
    description: str
    parameters: dict[str, Any]


class SystemMessage(msgspec.Struct, frozen=True):
    """Instructions."""

    text: str


class UserMessage(msgspec.Struct, frozen=True):
    """What the user asked; JSON text of the encoded input, or plain text for ``str`` inputs."""

    text: str


class AssistantMessage(msgspec.Struct, frozen=True):
    """An earlier response. Every call in ``parts`` is answered by the ``ToolMessage`` that follows, in order.

    ``CallPart.arguments`` is always a JSON object here, and ``CallPart.provider_id`` unique and non-empty.
    ``continuation`` is JSON bytes the same provider stored with the response, or empty.
    """

    parts: tuple[Part, ...]
    model: str = ""
    continuation: bytes = b""


class ToolResult(msgspec.Struct, frozen=True):
    """The answer to one call: JSON or plain text; ``failed`` marks failures and explanatory results."""

    provider_id: str
    name: str
    content: str
    failed: bool = False


class ToolMessage(msgspec.Struct, frozen=True):
    """Results of one batch, in the order the calls were declared; complete by construction."""

    results: tuple[ToolResult, ...]


Message = SystemMessage | UserMessage | AssistantMessage | ToolMessage


class Request(msgspec.Struct, frozen=True):
    """Everything a model needs for one response.

    Attributes:
        agent: name of the agent that asks.
        run: run id; the same again when an attempt repeats the call.
        turn: turn number within the run, from 1.
        messages: provider-valid conversation, oldest first. Do not keep or change the list.
        tools: tools it may call; empty when none.
        output_schema: JSON Schema of the final answer, None for plain text.
        timeout: seconds left, None for no bound.
        settings: model settings of the agent (temperature and the like), passed through.
    """

    agent: str
    run: str
    turn: int
    messages: list[Message]
    tools: tuple[ToolSpec, ...] = ()
    output_schema: dict[str, Any] | None = None
    timeout: float | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)


Finish = Literal["stop", "tool_calls", "length", "refusal", "other"]


class Response(msgspec.Struct, frozen=True):
    """One complete response. ``finish`` ``length`` means it was cut: calls in it never run."""

    parts: tuple[Part, ...]
    finish: Finish
    model: str
    usage: Usage = Usage()
    continuation: bytes = b""


class Delta(msgspec.Struct, frozen=True):
    """Provisional text while a response streams; only the complete response is a fact."""

    kind: Literal["text", "reasoning"]
    text: str


class ModelError(Error):
    """A model call that gave no complete response.

    Attributes:
        dispatched: ``"no"`` it surely never left, ``"yes"`` the provider definitely answered with a failure,
            ``"unknown"`` it was sent and nobody can say.
        retryable: whether the same request may succeed later.
        retry_after: seconds the provider asked to wait, or None.
    """

    code = "model"

    def __init__(
        self,
        message: str = "",
        *,
        dispatched: Literal["no", "yes", "unknown"] = "unknown",
        retryable: bool = False,
        retry_after: float | None = None,
        help: str = "",
    ) -> None:
        super().__init__(message, help=help)
        self.dispatched = dispatched
        self.retryable = retryable
        self.retry_after = retry_after


@runtime_checkable
class Model(Protocol):
    """A model that can answer. Values of this type are given to agents; adapters are loaded only when used."""

    @property
    def name(self) -> str:
        """Stable name, for example ``"openai:gpt-5.6"``; recorded with each response."""
        ...

    async def respond(self, request: Request, emit: Callable[[Delta], None] | None) -> Response:
        """One dispatch, one complete response. ``emit`` given: stream and pass on deltas as they arrive.

        Cancelling the call closes the connection.

        Raises:
            ModelError: no complete response; says what is known about dispatch.
        """
        ...
