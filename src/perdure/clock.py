"""Time and chance as arguments. The only module that asks the machine for either.

An instant is an ``int``: microseconds since 1970-01-01 UTC. Ordering never depends on it; epochs and sequences order.
"""

from __future__ import annotations

import base64
import datetime as dt
import os
import time
from typing import Protocol

from perdure.errors import Invalid

Instant = int
MICROSECONDS = 1_000_000


class Clock(Protocol):
    """Where the engine reads time. Replace it in tests; it may stand still or run backwards."""

    def now(self) -> Instant:
        """Wall-clock microseconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> Instant:
        """Wall-clock microseconds since 1970-01-01 UTC."""
        return time.time_ns() // 1000


class Ids(Protocol):
    """Where the engine draws identities for what is truly new. Everything else is derived (``ids.derive``)."""

    def fresh(self, kind: str) -> str:
        """A new identity, ``kind`` + ``_`` + 24 characters, never given before."""
        ...


class RandomIds:
    """120 random bits from the operating system per identity."""

    def fresh(self, kind: str) -> str:
        """A new identity, ``kind`` + ``_`` + 24 characters."""
        return kind + "_" + base64.b32encode(os.urandom(15)).decode().lower()


class ForwardClock:
    """A clock that never runs backwards within a process: it stands still until the one beneath has caught up.

    So a wall clock that is set back delays nothing that was due.
    """

    def __init__(self, clock: Clock) -> None:
        self._read = clock.now
        self._latest = 0

    def now(self) -> Instant:
        """Wall-clock microseconds since 1970-01-01 UTC, at least as late as the last answer."""
        now = self._read()
        self._latest = max(self._latest, now)
        return self._latest


def seconds(value: float) -> int:
    """Seconds to the microseconds instants are counted in."""
    return int(value * MICROSECONDS)


def to_datetime(instant: Instant) -> dt.datetime:
    """An instant as an aware UTC datetime."""
    return dt.datetime.fromtimestamp(instant / MICROSECONDS, tz=dt.UTC)


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_instant(text: str, what: str = "instant") -> Instant:
    """Microseconds since 1970 of an ISO 8601 date and time with its offset from UTC, for example ``2026-01-01T09:00:00Z``.

    Raises:
        Invalid: it is none, or says no offset.
    """
    help = "Write it like 2026-01-01T09:00:00Z, with its offset from UTC."
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError as error:
        raise Invalid(f"{what} is {text[:64]!r}, no instant.", help=help) from error
    if found.tzinfo is None:
        raise Invalid(f"{what} is {text[:64]!r}, without its offset from UTC.", help=help)
    return int((found - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) / dt.timedelta(microseconds=1))


def parse_duration(value: str | float | dt.timedelta, what: str = "duration") -> float:
    """Seconds of a duration: a number of seconds, a ``timedelta``, or text like ``"250ms"``, ``"30s"``, ``"2h"``.

    Raises:
        Invalid: not a duration, not finite, or negative.
    """
    help = "Use seconds as a number or text such as '250ms', '30s', '10m', '2h', '7d'."
    result: float
    if isinstance(value, dt.timedelta):
        result = value.total_seconds()
    elif isinstance(value, bool):
        raise Invalid(f"{what} is {value!r}, not a duration.", help=help)
    elif isinstance(value, (int, float)):
        result = float(value) if -1e10 < value < 1e10 else float("inf")  # an int may be too large for a float
    elif isinstance(value, str):
        text = value.strip()
        unit = next((u for u in ("ms", "s", "m", "h", "d") if text.endswith(u)), "")
        try:
            result = float(text[: len(text) - len(unit)]) * _UNITS.get(unit, 1.0)
        except ValueError:
            raise Invalid(f"{what} {value!r} is not a duration.", help=help) from None
    else:
        raise Invalid(f"{what} is a {type(value).__name__}, not a duration.", help=help)
    if not 0 <= result < 1e10:
        raise Invalid(f"{what} {value!r} is out of range.", help=help)
    return result
