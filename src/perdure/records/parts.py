"""What a model said, in our own versioned form. A provider library's types never become records."""

from __future__ import annotations

import msgspec


class TextPart(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True, gc=False):
    """Text the model wrote."""

    text: str


class ReasoningPart(
    msgspec.Struct, frozen=True, tag="reasoning", forbid_unknown_fields=True, gc=False, omit_defaults=True
):
    """Reasoning the model showed. ``signature`` and ``id`` are the provider's, given back unread."""

    text: str
    id: str | None = None
    signature: str | None = None


class CallPart(msgspec.Struct, frozen=True, tag="call", forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """A tool call as the model wrote it.

    Attributes:
        name: the tool's name as written; it may not exist.
        arguments: raw text of the arguments, exactly as received; it may not be JSON.
        provider_id: the provider's id, needed to answer it; never an identity of ours.
    """

    name: str
    arguments: str
    provider_id: str = ""


Part = TextPart | ReasoningPart | CallPart


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """Tokens of one model response. ``input`` includes cache reads and writes; ``output`` includes reasoning."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0
    reasoning: int = 0


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """What the wire showed of one model call, so that it can be found at the provider.

    Attributes:
        request: hex SHA-256 of the request's body as it was sent; empty when nothing was or nobody saw it.
        response: hex SHA-256 of the response's body as far as it was received.
        request_id: the provider's name for the call, from its response headers.
        status: the HTTP status, None when none came.
    """

    request: str = ""
    response: str = ""
    request_id: str = ""
    status: int | None = None


NO_EVIDENCE = Evidence()  # the one default: a field that holds it is left out of the stored bytes


class Charge(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """What a model call of unknown outcome is charged until somebody knows better: its reservation.

    Attributes:
        input: estimated tokens of the prompt. output: the most tokens the answer may have.
        cost: micro-USD at the worst rate, rounded up; None without a price.
        prices: version of the price.
    """

    input: int = 0
    output: int = 0
    cost: int | None = None
    prices: str = ""


NO_CHARGE = Charge()


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Why something failed: a stable ``kind`` and a bounded message. No stack, no payload.

    Kinds in use: ``tool``, ``refused``, ``unavailable``, ``arguments``, ``unknown_tool``, ``rejected``, ``cancelled``,
    ``model``, ``output``, ``result`` (it took effect; what it returned cannot be stored), ``input``, ``policy.turns``,
    ``policy.tool_calls``, ``policy.duration``, ``policy.tokens``, ``policy.cost``, ``policy.model_tries``,
    ``policy.repeated_failures``; a model's failure is ``model`` or one of ``model.authentication``,
    ``model.context_length``, ``model.rate_limit``, ``model.refused``, ``model.continuation``, ``model.setup``.
    """

    kind: str
    message: str
