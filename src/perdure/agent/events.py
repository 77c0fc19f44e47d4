"""Events of a run as it is carried out, for whoever watches it. Provisional: only records are facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The run began."""

    run: str
    thread: str


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """The model is asked for turn ``turn`` (from 1)."""

    turn: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Provisional text of the answer."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Provisional reasoning text."""

    turn: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call was dispatched."""

    call: str
    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCallProgress:
    """The tool reported progress."""

    call: str
    tool: str
    message: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """A call has an outcome: ``confirmed``, ``refused`` or ``unknown``."""

    call: str
    tool: str
    outcome: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ApprovalRequested:
    """A call waits for a person."""

    approval: str
    call: str
    tool: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class TurnCompleted:
    """A response is recorded. ``finish`` is the provider's reason."""

    turn: int
    finish: str


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The run settled: ``completed``, ``failed`` or ``cancelled``. At most one, always last."""

    outcome: str
    kind: str = ""
    message: str = ""


Event = (
    RunStarted
    | TurnStarted
    | TextDelta
    | ReasoningDelta
    | ToolCallStarted
    | ToolCallProgress
    | ToolCallEnded
    | ApprovalRequested
    | TurnCompleted
    | RunEnded
)
