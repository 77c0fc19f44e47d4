"""What a person or a probe may say about an effect whose outcome is unknown."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.errors import Refused


class Applied(msgspec.Struct, frozen=True):
    """It took place. ``result`` becomes the call's result; nothing runs."""

    result: Any = None


class NotApplied(msgspec.Struct, frozen=True):
    """It did not take place. A new try follows, with the same key."""

    why: str = ""


class SafeToRetry(msgspec.Struct, frozen=True):
    """Running it again is harmless whatever happened. A new try follows, same key, same contract only."""

    why: str = ""


class CancelRun(msgspec.Struct, frozen=True):
    """Give the run up. Verdict and cancel intent are one commit; the effect stays of unknown outcome, closed."""

    why: str = ""


class StillUnknown(msgspec.Struct, frozen=True):
    """Returned by a probe that cannot tell. The effect stays listed; the probe is asked again with backoff."""

    why: str = ""


Verdict = Applied | Refused | NotApplied | SafeToRetry | CancelRun
"""Verdicts a person may give. A probe may also return ``StillUnknown``."""


class UnknownCall(msgspec.Struct, frozen=True):
    """The evidence about an unknown call, as a probe gets it.

    Attributes:
        key: idempotency key that was given to the outside.
        tool: tool name. arguments: decoded JSON object.
        thread, run, call, effect: identities.
        started_at: microseconds since 1970, when it was dispatched at the earliest.
        reason: why nobody can say.
    """

    key: str
    tool: str
    arguments: dict[str, Any]
    thread: str
    run: str
    call: str
    effect: str
    started_at: int
    reason: str
