"""What may follow what. Legal behaviour is a table; a missing key is illegal and changes nothing.

The diagrams in docs/ are printed from these tables.
"""

from __future__ import annotations

from enum import StrEnum

from perdure.errors import Invalid


class SubmissionState(StrEnum):
    """Where an owed submission stands. ``admitted`` and ``terminalizing`` are reached on a split store only."""

    ADMITTED = "admitted"  # the ledger row exists; the thread may not
    READY = "ready"  # receipt valid, never attempted or given back before input
    RUNNING = "running"  # claimed
    INPUT_APPLIED = "input-applied"  # input canonical; also where woken work returns to
    SUSPENDED = "suspended"  # waits for a decision; a barrier on its thread
    UNKNOWN = "unknown"  # parked: an outcome is unknown; later work may pass
    TERMINALIZING = "terminalizing"  # exact settlement reserved
    SETTLED = "settled"  # terminal


class SubmissionEvent(StrEnum):
    """What can happen to a submission."""

    MARK_READY = "mark-ready"
    CLAIM = "claim"
    RELEASE = "release"
    APPLY_INPUT = "apply-input"
    SUSPEND = "suspend"
    PARK = "park"
    WAKE = "wake"
    RESERVE = "reserve-settlement"
    SETTLE = "settle"


S, V = SubmissionState, SubmissionEvent

SUBMISSION: dict[SubmissionState, dict[SubmissionEvent, SubmissionState]] = {
    S.ADMITTED: {
        V.MARK_READY: S.READY,
        V.CLAIM: S.ADMITTED,
        V.APPLY_INPUT: S.INPUT_APPLIED,
        V.RESERVE: S.TERMINALIZING,
    },
    S.READY: {V.CLAIM: S.RUNNING, V.RESERVE: S.TERMINALIZING, V.SETTLE: S.SETTLED},
    S.RUNNING: {
        V.CLAIM: S.RUNNING,
        V.RELEASE: S.READY,
        V.APPLY_INPUT: S.INPUT_APPLIED,
        V.SUSPEND: S.SUSPENDED,
        V.PARK: S.UNKNOWN,
        V.RESERVE: S.TERMINALIZING,
        V.SETTLE: S.SETTLED,
    },
    S.INPUT_APPLIED: {
        V.CLAIM: S.INPUT_APPLIED,
        V.RELEASE: S.INPUT_APPLIED,
        V.APPLY_INPUT: S.INPUT_APPLIED,
        V.SUSPEND: S.SUSPENDED,
        V.PARK: S.UNKNOWN,
        V.RESERVE: S.TERMINALIZING,
        V.SETTLE: S.SETTLED,
    },
    S.SUSPENDED: {V.WAKE: S.INPUT_APPLIED, V.PARK: S.UNKNOWN},
    S.UNKNOWN: {V.WAKE: S.INPUT_APPLIED, V.PARK: S.UNKNOWN},
    S.TERMINALIZING: {V.CLAIM: S.TERMINALIZING, V.RELEASE: S.TERMINALIZING, V.SETTLE: S.SETTLED},
    S.SETTLED: {},
}


class EffectStatus(StrEnum):
    """What is known of one try of an effect; another try is another effect.

    ``withdrawn`` was never dispatched; ``refused`` definitely did not take place.
    """

    REQUESTED = "requested"
    STARTED = "started"
    CONFIRMED = "confirmed"
    REFUSED = "refused"
    UNKNOWN = "unknown"
    WITHDRAWN = "withdrawn"


class EffectEvent(StrEnum):
    """What can happen to an effect."""

    START = "start"
    CONFIRM = "confirm"
    REFUSE = "refuse"
    LOSE = "lose"
    WITHDRAW = "withdraw"


F, E = EffectStatus, EffectEvent

EFFECT: dict[EffectStatus, dict[EffectEvent, EffectStatus]] = {
    F.REQUESTED: {E.START: F.STARTED, E.WITHDRAW: F.WITHDRAWN},
    F.STARTED: {E.CONFIRM: F.CONFIRMED, E.REFUSE: F.REFUSED, E.LOSE: F.UNKNOWN},
    F.UNKNOWN: {E.CONFIRM: F.CONFIRMED, E.REFUSE: F.REFUSED, E.LOSE: F.UNKNOWN},
    F.CONFIRMED: {},
    F.REFUSED: {},
    F.WITHDRAWN: {},
}


EFFECT_ENDS: dict[EffectStatus, EffectEvent] = {
    F.CONFIRMED: E.CONFIRM,
    F.REFUSED: E.REFUSE,
    F.UNKNOWN: E.LOSE,
    F.WITHDRAWN: E.WITHDRAW,
}


def may_end(status: str) -> frozenset[EffectStatus]:
    """The statuses from which an effect may come to ``status``; an unknown one stays so while a verdict is noted."""
    event = EFFECT_ENDS[EffectStatus(status)]
    return frozenset(before for before, events in EFFECT.items() if event in events)


class ApprovalStatus(StrEnum):
    """Where an approval request stands."""

    PENDING = "pending"
    APPROVED = "approved"
    REJECTED = "rejected"
    EXPIRED = "expired"


APPROVAL: dict[ApprovalStatus, frozenset[ApprovalStatus]] = {
    ApprovalStatus.PENDING: frozenset({ApprovalStatus.APPROVED, ApprovalStatus.REJECTED, ApprovalStatus.EXPIRED}),
    ApprovalStatus.APPROVED: frozenset(),
    ApprovalStatus.REJECTED: frozenset(),
    ApprovalStatus.EXPIRED: frozenset(),
}


def after(state: SubmissionState, event: SubmissionEvent) -> SubmissionState:
    """The state a submission is in after ``event``.

    Raises:
        Invalid: the event is illegal in this state; nothing changes.
    """
    try:
        return SUBMISSION[state][event]
    except KeyError:
        raise Invalid(f"A submission that is {state} cannot {event}.") from None


class EffectClass(StrEnum):
    """What recovery may do with an effect that was started and has no outcome."""

    PURE = "pure"  # no outside world: run again
    OBSERVE = "observe"  # reads only: run again
    IDEMPOTENT = "idempotent"  # same input again is harmless: run again, same contract only
    KEYED = "keyed"  # the remote de-duplicates on our key: run again with it, same contract only
    ONCE = "once"  # nothing is promised: ask a probe, else unknown

    @property
    def prepared(self) -> bool:
        """Whether a call of this class always has a started record."""
        return self not in (EffectClass.PURE, EffectClass.OBSERVE)
