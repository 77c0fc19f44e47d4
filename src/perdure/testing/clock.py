"""Time and identity that a test decides."""

from __future__ import annotations

import datetime as dt
import random

from perdure.clock import Instant, SystemClock, parse_duration, seconds

__all__ = ["ManualClock", "SeededIds", "ShiftedClock"]

START: Instant = 1_800_000_000_000_000  # 2027-01-15 08:00 UTC
_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


class ManualClock:
    """A clock that stands still until it is told. Implements ``perdure.clock.Clock``.

    Args:
        at: where it starts, microseconds since 1970.
    """

    def __init__(self, at: Instant = START) -> None:
        self._now = at

    def now(self) -> Instant:
        """The instant it stands at."""
        return self._now

    def advance(self, duration: str | float | dt.timedelta) -> None:
        """Move it forward: seconds, a ``timedelta``, or text like ``"30s"``."""
        self._now += seconds(parse_duration(duration))

    def set(self, at: Instant) -> None:
        """Put it anywhere, also back: a machine's clock may be corrected."""
        self._now = at


class ShiftedClock:
    """The machine's clock, moved: a process that is opened "after the lease" waits for nothing.

    Args:
        shift: seconds ahead of the machine.
    """

    def __init__(self, shift: float = 0.0) -> None:
        self._system = SystemClock()
        self._shift = seconds(shift)

    def now(self) -> Instant:
        """The machine's time and the shift."""
        return self._system.now() + self._shift

    def advance(self, duration: str | float | dt.timedelta) -> None:
        """Move it further ahead."""
        self._shift += seconds(parse_duration(duration))


class SeededIds:
    """Identities drawn from a seed: the same seed gives the same ones in the same order.

    Two incarnations must never share a seed, as two processes never share a worker's name.
    """

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)

    def fresh(self, kind: str) -> str:
        """A new identity, ``kind`` + ``_`` + 24 characters."""
        number = self._random.getrandbits(120)
        return kind + "_" + "".join(_ALPHABET[(number >> shift) & 31] for shift in range(0, 120, 5))
