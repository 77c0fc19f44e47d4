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


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Why something failed: a stable ``kind`` and a bounded message. No stack, no payload.

    Kinds in use: ``tool``, ``refused``, ``unavailable``, ``arguments``, ``unknown_tool``, ``rejected``, ``cancelled``,
    ``model``, ``output``, ``result`` (it took effect; what it returned cannot be stored), ``input``, ``policy.turns``,
    ``policy.tool_calls``, ``policy.duration``, ``policy.tokens``, ``policy.repeated_failures``.
    """

    kind: str
    message: str
