"""Every exception a user of Perdure can meet, drawn once.

Error
 ├─ Invalid          your definition, input or command is wrong; nothing was written
 ├─ Conflict         it contradicts something already recorded (key, decision, settlement)
 ├─ OwnershipLost    another worker owns the thread now; this attempt must stop, the work stays owed
 ├─ Incompatible     the data was written by a newer or unknown format; nothing was written
 ├─ Corrupt          stored facts do not agree with themselves (digest, sequence, shape)
 ├─ Unavailable      the store or a remote cannot serve right now; retry later, nothing was lost
 ├─ Denied           the caller may not do this
 ├─ RunFailed        the run settled as failed
 ├─ RunCancelled     the run settled as cancelled
 ├─ ApprovalSuspensionError   retaining an attempt's resources before an approval wait failed
 ├─ Refused          raised by a tool: it definitely did not happen (also a verdict)
 └─ Unknown          raised by a tool: it may have happened

Signal (BaseException)      engine signals that user code must not swallow
 └─ Superseded       the attempt lost its fence while user code was running

The split is by who must act. Every message says what was wrong, where, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class Error(Exception):
    """Base of every error Perdure raises on purpose. Not raised itself.

    Args:
        message: what was wrong and where.
        help: the next thing to do, one sentence; empty when the message says it.
    """

    code = "error"

    def __init__(self, message: str = "", *, help: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.help = help

    def __str__(self) -> str:
        return f"{self.message} {self.help}".strip() if self.help else self.message


class Invalid(Error):
    """A definition, an input or a command does not fit the rules. Nothing was written."""

    code = "invalid"


class Conflict(Error):
    """The request contradicts something already recorded; the recorded fact stands."""

    code = "conflict"


class OwnershipLost(Error):
    """This worker's claim was superseded. Its attempt ends; the work stays owed to the new owner."""

    code = "ownership_lost"


class Incompatible(Error):
    """The data says it was written by a newer or unknown format. Nothing was written."""

    code = "incompatible"


class Corrupt(Error):
    """Stored facts do not agree with themselves: a digest, a sequence or a shape is wrong."""

    code = "corrupt"


class Unavailable(Error):
    """The store or a remote cannot serve now (full, locked, unreachable). Nothing was lost; retry."""

    code = "unavailable"


class Denied(Error):
    """The authorizer refused the operation."""

    code = "denied"


class RunFailed(Error):
    """The run settled as failed.

    Attributes:
        kind: name of the failure, for example ``"policy.turns"`` or ``"output"``.
        unknown: ids of effects whose outcome is unknown (ephemeral runs have nobody to ask).
    """

    code = "run_failed"

    def __init__(self, message: str = "", *, kind: str = "failed", unknown: Sequence[str] = (), help: str = "") -> None:
        super().__init__(message, help=help)
        self.kind = kind
        self.unknown = tuple(unknown)


class RunCancelled(Error):
    """The run settled as cancelled."""

    code = "run_cancelled"


class ApprovalSuspensionError(Error):
    """Retaining an attempt's resources before an approval wait failed. The cause is kept; the work stays owed."""

    code = "approval_suspension"


class Refused(Error):
    """The effect definitely did not take place. Raised by a tool, or returned as a verdict.

    Args:
        error: why, as the model and the operator will read it.
    """

    code = "refused"

    def __init__(self, error: str = "", *, help: str = "") -> None:
        super().__init__(error, help=help)
        self.error = error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refused) and other.error == self.error

    def __hash__(self) -> int:
        return hash((Refused, self.error))


class Unknown(Error):
    """The effect may have taken place; nobody can say. Only ever raised, by a tool."""

    code = "unknown"


class Signal(BaseException):
    """Base of the engine's own signals. User code must let them pass."""


class Superseded(Signal):
    """The attempt lost its fence; whatever runs in it must stop without recording anything."""


def ensure(condition: object, error: Error) -> None:
    """Raise ``error`` unless ``condition`` holds. Used on both sides of every boundary; never stripped."""
    if not condition:
        raise error
