"""Events of a run as it is carried out, for whoever watches it. Provisional: only records are facts."""

from __future__ import annotations

from typing import Any

import msgspec


class RunStarted(msgspec.Struct, frozen=True, tag=True):
    """The run began."""

    run: str
    thread: str


class TurnStarted(msgspec.Struct, frozen=True, tag=True):
    """The model is asked for turn ``turn`` (from 1)."""

    turn: int


class TextDelta(msgspec.Struct, frozen=True, tag=True):
    """Provisional text of the answer."""

    turn: int
    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, tag=True):
    """Provisional reasoning text."""

    turn: int
    text: str


class ModelCallFailed(msgspec.Struct, frozen=True, tag=True):
    """A try of a model call gave no response. ``dispatched``: ``no``, ``yes`` or ``unknown``.

    ``retry_in`` is in seconds; None: it is not tried again.
    """

    turn: int
    attempt: int
    dispatched: str
    message: str
    retry_in: float | None = None


class BudgetWarning(msgspec.Struct, frozen=True, tag=True):
    """80 % of a limit are used: ``turns``, ``tool_calls``, ``tokens``, ``cost`` (micro-USD) or ``duration`` (seconds).

    Told once for each limit.
    """

    limit: str
    used: int
    allowed: int


class ToolCallStarted(msgspec.Struct, frozen=True, tag=True):
    """A call was dispatched."""

    call: str
    tool: str
    arguments: dict[str, Any]


class ToolCallProgress(msgspec.Struct, frozen=True, tag=True):
    """The tool reported progress."""

    call: str
    tool: str
    message: str


class ToolCallEnded(msgspec.Struct, frozen=True, tag=True):
    """A call has an outcome: ``confirmed``, ``refused`` or ``unknown``."""

    call: str
    tool: str
    outcome: str
    message: str = ""


class ApprovalRequested(msgspec.Struct, frozen=True, tag=True):
    """A call waits for a person."""

    approval: str
    call: str
    tool: str
    arguments: dict[str, Any]


class TurnCompleted(msgspec.Struct, frozen=True, tag=True):
    """A response is recorded. ``finish`` is the provider's reason."""

    turn: int
    finish: str


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """The run settled: ``completed``, ``failed`` or ``cancelled``. At most one, always last."""

    outcome: str
    kind: str = ""
    message: str = ""


Event = (
    RunStarted
    | TurnStarted
    | TextDelta
    | ReasoningDelta
    | ModelCallFailed
    | BudgetWarning
    | ToolCallStarted
    | ToolCallProgress
    | ToolCallEnded
    | ApprovalRequested
    | TurnCompleted
    | RunEnded
)
