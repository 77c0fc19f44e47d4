"""How one try of a task ends, as a value: the interpreter matches it and records what it means."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from perdure.ports.executor import Produced
from perdure.records.parts import Failure

RetryKind = Literal["", "transport", "timeout", "rate_limit", "exit", "assertion", "tool"]


class Done(msgspec.Struct, frozen=True):
    """It succeeded.

    Attributes:
        output: its output, a JSON value.
        put: keys of working memory that get a value. gone: keys that go.
        produced: files it left. printed: bytes its process printed.
        decision: what a router decided.
    """

    output: Any
    put: dict[str, Any] = {}
    gone: tuple[str, ...] = ()
    produced: tuple[Produced, ...] = ()
    printed: int = 0
    decision: Any = None


class Broken(msgspec.Struct, frozen=True):
    """It definitely failed.

    Attributes:
        output: what is kept of it for people and templates.
        retry: what a retry policy calls it; empty: never tried again.
        retry_after: seconds somebody asked to be left alone.
        fatal: the run fails with it, whatever the task's ``failure`` says.
    """

    failure: Failure
    output: Any = None
    retry: RetryKind = ""
    retry_after: float | None = None
    printed: int = 0
    fatal: bool = False


class Left(msgspec.Struct, frozen=True):
    """It leaves its batch and waits: for a decision, a verdict, or an instant; or it goes on at once (``again``)."""

    waits: Literal["approval", "unknown", "timer", "budget", "again"]


Outcome = Done | Broken | Left
