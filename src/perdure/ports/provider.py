"""The provider port: one model call. What a model adapter must do, and the values that cross.

The engine decides whether a call may be repeated; a provider never retries by itself. It must tell the truth about
dispatch: whether the request surely never left, surely failed, or may have been served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from perdure.errors import Error
from perdure.records.parts import NO_EVIDENCE, Evidence, Part, Usage
from perdure.rules.accounting import Price, Rate


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool as shown to the model: ``parameters`` is a JSON Schema object."""

    name: str
    description: str
    parameters: dict[str, Any]


class SystemMessage(msgspec.Struct, frozen=True):
    """Instructions."""

    text: str


class FileContent(msgspec.Struct, frozen=True):
    """An image, document, sound or film beside a user's text: its bytes, or an address the provider can fetch.

    Attributes:
        media_type: for example ``"image/png"``.
        data: the bytes; empty when ``url`` is given.
        url: an http(s) address; empty when ``data`` is given.
        name: file name, may be empty.
    """

    media_type: str
    data: bytes = b""
    url: str = ""
    name: str = ""


class UserMessage(msgspec.Struct, frozen=True):
    """What the user asked; JSON text of the encoded input, or plain text for ``str`` inputs.

    ``files`` are those of the input, in the order in which the text mentions them.
    """

    text: str
    files: tuple[FileContent, ...] = ()


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
        tools_allowed: False asks for an answer without a tool call; ``tools`` are listed all the same, because history
            speaks of them.
        key: stable idempotency key of a ``once`` call, the same in every try of it; empty for one that may be repeated.
            For endpoints that de-duplicate.
        use_continuation: False: do not use what ``continuation`` names at the provider, send the whole history.
    """

    agent: str
    run: str
    turn: int
    messages: list[Message]
    tools: tuple[ToolSpec, ...] = ()
    output_schema: dict[str, Any] | None = None
    timeout: float | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    tools_allowed: bool = True
    key: str = ""
    use_continuation: bool = True


Finish = Literal["stop", "tool_calls", "length", "refusal", "other"]


class Response(msgspec.Struct, frozen=True):
    """One complete response. ``finish`` ``length`` means it was cut: calls in it never run.

    Attributes:
        parts: what the model said, in its order.
        model: name of the model that answered; reasoning and ``continuation`` go back to no other.
        usage: tokens, by the provider's own count.
        continuation: versioned JSON that the same model wants back with this turn, or empty.
        evidence: digests of what went over the wire, and the provider's name for the call.
    """

    parts: tuple[Part, ...]
    finish: Finish
    model: str
    usage: Usage = Usage()
    continuation: bytes = b""
    evidence: Evidence = NO_EVIDENCE


class Delta(msgspec.Struct, frozen=True):
    """Provisional text while a response streams; only the complete response is a fact."""

    kind: Literal["text", "reasoning"]
    text: str


ModelFailure = Literal[
    "model",
    "model.authentication",
    "model.context_length",
    "model.rate_limit",
    "model.refused",
    "model.continuation",
    "model.setup",
]
"""Why a call failed: the key is not accepted; the prompt is too long; too many calls; the provider refuses the content;
it does not know what a continuation names; it cannot be made as it is configured; anything else."""


class ModelError(Error):
    """A model call that gave no complete response.

    Attributes:
        dispatched: ``"no"`` it surely never left, ``"yes"`` the provider definitely answered with a failure,
            ``"unknown"`` it was sent and nobody can say.
        retryable: whether the same request may succeed later.
        retry_after: seconds the provider asked to wait, or None.
        kind: what failed; becomes the kind of the recorded failure. After ``model.continuation`` the engine sends the same
            turn once more with ``Request.use_continuation`` False.
        evidence: what the wire showed.
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
        kind: ModelFailure = "model",
        evidence: Evidence = NO_EVIDENCE,
    ) -> None:
        super().__init__(message, help=help)
        self.dispatched = dispatched
        self.retryable = retryable
        self.retry_after = retry_after
        self.kind: ModelFailure = kind
        self.evidence = evidence


Capability = Literal[
    "tools",
    "parallel_tools",
    "structured_output",
    "reasoning",
    "reasoning_effort",
    "streaming",
    "images",
    "files",
    "prompt_caching",
    "stored_continuation",
    "stateless_continuation",
    "usage",
]
"""What a model can do. ``structured_output``: the provider itself holds the answer to a JSON Schema."""


class Profile(msgspec.Struct, frozen=True):
    """What a model declares of itself, without being called and without its library being loaded.

    Attributes:
        capabilities: what it can do; None: nobody declared it, so nothing is refused on that ground.
        price: what its tokens cost, None when unknown: then a cost budget cannot be kept and is refused.
        max_output_tokens: the most tokens it is asked for in one answer; what is reserved before a call.
        rate: how often it may be called by all processes on one database together, None for no bound of ours.
        shared: whether a provider's Retry-After holds back every process on the database.
    """

    capabilities: frozenset[Capability] | None = None
    price: Price | None = None
    max_output_tokens: int | None = None
    rate: Rate | None = None
    shared: bool = False


UNDECLARED = Profile()


def profile_of(model: Model) -> Profile:
    """The profile of a model; an adapter that declares none has an empty one."""
    declared = getattr(model, "profile", UNDECLARED)
    return declared if isinstance(declared, Profile) else UNDECLARED


@runtime_checkable
class Model(Protocol):
    """A model that can answer. Values of this type are given to agents; adapters are loaded only when used.

    An adapter may also have an attribute ``profile``, a :class:`Profile`.
    """

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
