"""What to do with one owed submission: evidence in, exactly one decision out. Pure.

Leases are no evidence: the fenced claim decides who acts. The order in which evidence is weighed is the tuple
``_PRECEDENCE`` and nothing else. A decision names what to do; ``engine`` does it, then classifies again. What becomes of
the calls of an open batch is judged in ``plans``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import ClassVar, Literal

import msgspec

from perdure.canonical import decode, digest
from perdure.errors import Invalid
from perdure.limits import ATTEMPTS_WITHOUT_PROGRESS_MAX
from perdure.records.parts import Failure
from perdure.records.thread import SubmissionSettled
from perdure.rules import fold
from perdure.rules.lifecycle import SubmissionState as State
from perdure.rules.plans import (
    Advancing,
    AwaitDecision,
    CallPlan,
    Doubt,
    NeedsProbe,
    batch_plan,
    doubts,
    lost_model_call,
    model_doubts,
    task_plan,
)

Disposition = Literal["repaired", "deferred", "none", "unknown"]


def result_digest(output: msgspec.Raw | bytes, disposition: str | None) -> str:
    """Digest over output and disposition: ``RunCompleted.result_digest``, which the settlement repeats."""
    return digest(["result", 1, decode(output, "output"), disposition])


class Evidence(msgspec.Struct, frozen=True):
    """Everything a decision may rest on.

    Attributes:
        state: the ledger's state of the submission.
        input_marker: where the ledger says the input stands in the log.
        reservation: an exact settlement is reserved (split store only).
        settlement: the canonical settlement of this submission, also of one that never had a run.
        run: the folded run, None while its input is not canonical.
        parts: runs of agents' turns inside tasks of a workflow's run that have not ended.
        cancelled: a CancelRequested of this submission is canonical.
        cancel_intent: a cancel is recorded and not yet in the log.
        thread_created: the thread exists (its row; on a split store its first record).
        verdict_intents: effect id to verdict name, recorded and not yet in the log.
        approval_intents: approval ids decided and not yet in the log.
        contracts: tool name to today's replay contract; None: no binding at hand, so nothing is authorized to run.
        past_deadline: the deadline that RunStarted froze has passed.
        attempts: attempts in a row that made no progress.
    """

    state: State
    input_marker: int | None = None
    reservation: bool = False
    settlement: SubmissionSettled | None = None
    run: fold.Run | None = None
    parts: tuple[fold.Run, ...] = ()
    cancelled: bool = False
    cancel_intent: bool = False
    thread_created: bool = True
    verdict_intents: Mapping[str, str] = msgspec.field(default_factory=dict)
    approval_intents: Collection[str] = ()
    contracts: Mapping[str, str] | None = None
    past_deadline: bool = False
    attempts: int = 0

    @property
    def ledger_settled(self) -> bool:
        """Whether the ledger calls the submission settled."""
        return self.state is State.SETTLED


def gather(
    thread: fold.Thread | None,
    submission: str,
    run: str,
    state: State | str,
    *,
    input_marker: int | None = None,
    reservation: bool = False,
    cancel_intent: bool = False,
    thread_created: bool = True,
    verdict_intents: Mapping[str, str] | None = None,
    approval_intents: Collection[str] = (),
    contracts: Mapping[str, str] | None = None,
    past_deadline: bool = False,
    attempts: int = 0,
) -> Evidence:
    """Evidence about one submission from its thread's fold and plain values of its ledger row."""
    return Evidence(
        state=State(state),
        input_marker=input_marker,
        reservation=reservation,
        settlement=None if thread is None else thread.settlements.get(submission),
        run=None if thread is None else thread.runs.get(run),
        parts=() if thread is None else parts(thread, run),
        cancelled=thread is not None and submission in thread.cancels,
        cancel_intent=cancel_intent,
        thread_created=thread_created,
        verdict_intents=verdict_intents or {},
        approval_intents=approval_intents,
        contracts=contracts,
        past_deadline=past_deadline,
        attempts=attempts,
    )


def parts(thread: fold.Thread, run: str) -> tuple[fold.Run, ...]:
    """Runs of agents' turns inside tasks of this run that have not ended."""
    found = thread.runs.get(run)
    if found is None or found.flow is None:
        return ()
    tasks = found.flow.tasks.values()
    return tuple(thread.runs[task.agent] for task in tasks if task.running and task.agent in thread.runs)


class NoAction(msgspec.Struct, frozen=True):
    """Settled in the ledger, and no command waits."""

    disposition: ClassVar[Disposition] = "none"
    meaning: ClassVar[str] = "The submission is settled; nothing is owed."


class CompleteMaterialization(msgspec.Struct, frozen=True):
    """Create the thread, then make the submission ready."""

    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "It was admitted before its thread existed; the thread is created and it becomes ready."


class RepairReadiness(msgspec.Struct, frozen=True):
    """Make the submission ready."""

    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "It was admitted and never became ready; it becomes ready."


class AwaitClaim(msgspec.Struct, frozen=True):
    """Leave it to a worker's claim."""

    disposition: ClassVar[Disposition] = "none"
    meaning: ClassVar[str] = "It is ready and was never attempted; the next free worker takes it."


class ApplyInput(msgspec.Struct, frozen=True):
    """The next claim applies the input, once."""

    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "It was claimed and its input is not in the log; the next claim applies it once."


class RepairInputMarker(msgspec.Struct, frozen=True):
    """Set the ledger's marker to where the input stands; append nothing."""

    sequence: int
    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "Its input is in the log and the ledger does not say so; the ledger is corrected."


class FinalizeLedgerFromHistory(msgspec.Struct, frozen=True):
    """Make the ledger agree with the canonical settlement."""

    settlement: SubmissionSettled
    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "The log holds its settlement; the ledger is closed from it."


class FinalizeReserved(msgspec.Struct, frozen=True):
    """The reserved settlement is canonical: close ledger and reservation from it."""

    settlement: SubmissionSettled
    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "Its reserved settlement reached the log; reservation and ledger are closed from it."


class AppendReservedSettlement(msgspec.Struct, frozen=True):
    """Append exactly the reserved record, then finalize. It wins over a later cancel."""

    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "Its settlement was reserved and did not reach the log; exactly that one is appended."


class CompleteFromHistory(msgspec.Struct, frozen=True):
    """Settle as completed with the recorded output and disposition; decode and project nothing again."""

    run: str
    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "Its output is recorded; it is settled with that output and disposition."


class AppendIntents(msgspec.Struct, frozen=True):
    """Take commands into the log (same unit: mark them applied), then classify again.

    Attributes:
        verdicts: effect ids whose verdict can be appended now.
        approvals: approval ids whose decision can be appended now.
        cancel: append CancelRequested.
        moot: subjects that no longer have anything to decide (``cancel`` for a cancel): mark applied, append nothing.
    """

    verdicts: tuple[str, ...] = ()
    approvals: tuple[str, ...] = ()
    cancel: bool = False
    moot: tuple[str, ...] = ()
    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "Commands were given that the log does not hold yet; they are taken in before they count."


class SettleCancelled(msgspec.Struct, frozen=True):
    """Record each doubt unknown, then settle as cancelled. ``requested``: CancelRequested is already canonical."""

    doubts: tuple[Doubt, ...]
    requested: bool
    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "It was cancelled; what was in flight is recorded unknown and it is settled as cancelled."


class FailDuration(msgspec.Struct, frozen=True):
    """Record each doubt unknown, then settle as failed (``policy.duration``). Nothing is started any more."""

    doubts: tuple[Doubt, ...]
    disposition: ClassVar[Disposition] = "repaired"
    meaning: ClassVar[str] = "Its deadline passed; what was in flight is recorded unknown and it is settled as failed."


class MarkUnknown(msgspec.Struct, frozen=True):
    """Ask a declared probe about each doubt where one is at hand; record the rest unknown."""

    doubts: tuple[Doubt, ...]
    disposition: ClassVar[Disposition] = "unknown"
    meaning: ClassVar[str] = "Effects were started and have no outcome; they are reconciled or recorded unknown."


class AwaitUnknownResolution(msgspec.Struct, frozen=True):
    """Stay parked until every one of these effects has a verdict."""

    effects: tuple[str, ...]
    disposition: ClassVar[Disposition] = "unknown"
    meaning: ClassVar[str] = (
        "The outcome of effects is unknown; it waits for a verdict on each (perdure effects reconcile)."
    )


class AwaitApprovalDecision(msgspec.Struct, frozen=True):
    """Stay suspended until these approvals are decided."""

    approvals: tuple[str, ...]
    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "It waits for a person to approve or reject (perdure approvals approve)."


class ResumePendingBatch(msgspec.Struct, frozen=True):
    """Carry out one plan for each call of the open batch."""

    turn: int
    plans: tuple[CallPlan, ...]
    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "A batch of tool calls is incomplete; a worker goes on with what is not yet settled."


class ResumeTasks(msgspec.Struct, frozen=True):
    """Go on with the tasks of a workflow that have not ended."""

    open: tuple[str, ...]
    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "Tasks of its workflow have not ended; a worker goes on with them when they are due."


class FinishFromResponse(msgspec.Struct, frozen=True):
    """The newest response is final: complete from it, without a model call."""

    turn: int
    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "Its final answer is recorded; a worker completes it from that."


class AnswerFromVerdict(msgspec.Struct, frozen=True):
    """A verdict says what the ``once`` model call of ``turn`` answered: record its text as that turn's response."""

    turn: int
    effect: str
    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "A verdict says what its model answered; a worker takes that as the response."


class FailFromVerdict(msgspec.Struct, frozen=True):
    """A verdict refused the ``once`` model call of a turn: settle as failed with that. The model is not asked again."""

    failure: Failure
    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "A verdict refused its model call; a worker settles it as failed with that."


class ResumeFromTurnBoundary(msgspec.Struct, frozen=True):
    """Make model call ``turn``. An earlier owner may have made it too: its charge may repeat, and that is recorded.

    A ``once`` model call comes here only if it was never started, definitely failed, or a verdict freed it.
    """

    turn: int
    started: bool
    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "It stands between turns; a worker asks the model for the next one."


class Poisoned(msgspec.Struct, frozen=True):
    """Attempts made no progress: run nothing until an operator redrives or cancels it."""

    attempts: int
    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "Its attempts made no progress and it stopped; look into it, then redrive or cancel it."


class Blocked(msgspec.Struct, frozen=True):
    """The evidence contradicts itself or cannot be decided by this release: a fault of the thread."""

    reason: str
    disposition: ClassVar[Disposition] = "deferred"
    meaning: ClassVar[str] = "The evidence contradicts itself; nothing runs until that is repaired (perdure verify)."


Decision = (
    NoAction
    | CompleteMaterialization
    | RepairReadiness
    | AwaitClaim
    | ApplyInput
    | RepairInputMarker
    | FinalizeLedgerFromHistory
    | FinalizeReserved
    | AppendReservedSettlement
    | CompleteFromHistory
    | AppendIntents
    | SettleCancelled
    | FailDuration
    | MarkUnknown
    | AwaitUnknownResolution
    | AwaitApprovalDecision
    | ResumePendingBatch
    | ResumeTasks
    | FinishFromResponse
    | AnswerFromVerdict
    | FailFromVerdict
    | ResumeFromTurnBoundary
    | Poisoned
    | Blocked
)


def _ledger_settled(e: Evidence) -> Decision | None:
    if not e.ledger_settled:
        return None
    return _intents(e) or NoAction()


def _log_settled(e: Evidence) -> Decision | None:
    if e.settlement is None:
        return None
    return FinalizeReserved(e.settlement) if e.reservation else FinalizeLedgerFromHistory(e.settlement)


def _reserved(e: Evidence) -> Decision | None:
    if e.reservation:
        return AppendReservedSettlement()
    if e.state is State.TERMINALIZING:
        return Blocked("The ledger says a settlement was reserved, and there is none.")
    return None


def _materialized(e: Evidence) -> Decision | None:
    if e.state is State.ADMITTED and not e.thread_created:
        return CompleteMaterialization()
    return None


def _input(e: Evidence) -> Decision | None:
    if e.run is None:
        if e.input_marker is not None or e.state in (State.INPUT_APPLIED, State.SUSPENDED, State.UNKNOWN):
            return Blocked("The ledger says its input is in the log, and the log does not hold it.")
        return None
    sequence = e.run.input_sequence
    if e.input_marker is None or (e.input_marker == sequence and e.state in (State.ADMITTED, State.READY)):
        return RepairInputMarker(sequence)
    if e.input_marker != sequence:
        return Blocked(f"The ledger says its input is record {e.input_marker}; the log holds it at {sequence}.")
    return None


def _completed(e: Evidence) -> Decision | None:
    if e.run is None or e.run.completed is None:
        return None
    completed = e.run.completed
    try:
        covered = result_digest(completed.output, completed.disposition)
    except Invalid as error:
        return Blocked(f"The recorded output cannot be read: {error.message}")
    if completed.result_digest != covered:
        return Blocked("The recorded output and disposition are not those that their digest covers.")
    return CompleteFromHistory(e.run.id)


def _runs(e: Evidence) -> tuple[fold.Run, ...]:
    return e.parts if e.run is None else (e.run, *e.parts)


def _newest(e: Evidence) -> list[fold.Call]:
    """The calls that may still be open: a response is recorded only once every call before it is closed."""
    return [call for run in _runs(e) for call in run.open_calls()]


def _unknowns(e: Evidence) -> Iterator[fold.Unknown]:
    """Every open unknown that a verdict may be about."""
    for call in _newest(e):
        yield from call.unknowns()
    for run in _runs(e):
        if run.model_unknown is not None:
            yield run.model_unknown


def _intents(e: Evidence) -> Decision | None:
    """Commands the log can take now. A verdict on an effect in flight waits until that is recorded unknown."""
    if not (e.cancel_intent or e.verdict_intents or e.approval_intents):
        return None
    calls = _newest(e)
    unknown = {u.effect for u in _unknowns(e)}
    flying = {d.effect for d in _in_flight(e)}
    asked = {
        call.approval.approval
        for call in calls
        if call.approval is not None and call.decision is None and not call.closed and not e.ledger_settled
    }
    over = e.cancelled or e.ledger_settled
    verdicts = tuple(effect for effect in e.verdict_intents if effect in unknown)
    approvals = tuple(approval for approval in e.approval_intents if approval in asked)
    moot = (
        *(effect for effect in e.verdict_intents if effect not in unknown and effect not in flying),
        *(approval for approval in e.approval_intents if approval not in asked),
        *(("cancel",) if e.cancel_intent and over else ()),
    )
    cancel = e.cancel_intent and not over
    if verdicts or approvals or cancel or moot:
        return AppendIntents(verdicts, approvals, cancel, moot)
    return None


def _in_flight(e: Evidence) -> tuple[Doubt, ...]:
    calls = tuple(d for call in _newest(e) for d in doubts(call))
    return calls + tuple(d for run in _runs(e) for d in model_doubts(run))


def _given_up(e: Evidence) -> bool:
    """A verdict that cancels is a cancel, even if only the verdict became canonical."""
    given = {v.verdict for call in _newest(e) for v in (call.verdict, *(s.verdict for s in call.steps.values())) if v}
    given |= {run.model_verdict.verdict for run in _runs(e) if run.model_verdict is not None}
    return "cancel_run" in given


def _cancelled(e: Evidence) -> Decision | None:
    if e.cancelled or _given_up(e):
        return SettleCancelled(_in_flight(e), requested=e.cancelled)
    return None


def _deadline(e: Evidence) -> Decision | None:
    if e.past_deadline and e.run is not None and (e.run.started is not None or e.run.flow is not None):
        return FailDuration(_in_flight(e))
    return None


def _plans(run: fold.Run, contracts: Mapping[str, str] | None) -> tuple[CallPlan, ...]:
    """What becomes of the open calls of a run; none where no batch is open."""
    if run.flow is not None:
        return tuple(task_plan(call) for call in run.open_calls())
    turn = run.open_turn()
    return () if turn is None else batch_plan(turn, contracts)


def _started(e: Evidence) -> Decision | None:
    found = [plan for run in _runs(e) for plan in _plans(run, e.contracts)]
    lost = tuple(d for plan in found if isinstance(plan, NeedsProbe) for d in plan.doubts)
    lost += tuple(d for run in _runs(e) for d in lost_model_call(run))
    return MarkUnknown(lost) if lost else None


def _resume(e: Evidence, decision: Decision) -> Decision:
    return Poisoned(e.attempts) if e.attempts >= ATTEMPTS_WITHOUT_PROGRESS_MAX else decision


def _tasks(e: Evidence) -> Decision | None:
    if e.run is None or e.run.flow is None:
        return None
    unknown = tuple(u.effect for u in _unknowns(e))
    if unknown and e.state is State.UNKNOWN:
        return AwaitUnknownResolution(unknown)
    asked = tuple(c.approval.approval for c in _newest(e) if c.approval and c.decision is None and not c.closed)
    if asked and e.state is State.SUSPENDED:
        return AwaitApprovalDecision(asked)
    return _resume(e, ResumeTasks(tuple(task.id for task in e.run.flow.tasks.values() if task.settled is None)))


def _batch(e: Evidence) -> Decision | None:
    turn = None if e.run is None else e.run.open_turn()
    if e.run is None or turn is None:
        return None
    plans = _plans(e.run, e.contracts)
    unknown = tuple(u.effect for call in turn.calls for u in call.unknowns())
    asked = tuple(plan.approval for plan in plans if isinstance(plan, AwaitDecision))
    advancing = any(isinstance(plan, Advancing) for plan in plans)
    if unknown and (e.state is State.UNKNOWN or not advancing):
        return AwaitUnknownResolution(unknown)
    if asked and (e.state is State.SUSPENDED or not advancing):
        return AwaitApprovalDecision(asked)
    return _resume(e, ResumePendingBatch(turn.number, plans))


def _without_input(e: Evidence) -> Decision | None:
    if e.run is not None:
        return None
    if e.state is State.ADMITTED:
        return RepairReadiness()
    if e.state is State.READY:
        return AwaitClaim()
    return _resume(e, ApplyInput())


def _boundary(e: Evidence) -> Decision | None:
    if e.run is None:
        return None
    if e.run.model_unknown is not None:
        return AwaitUnknownResolution((e.run.model_unknown.effect,))
    turns = e.run.turns
    if turns and not turns[-1].calls and turns[-1].rejected is None:
        return _resume(e, FinishFromResponse(turns[-1].number))
    return _resume(e, _by_verdict(e.run) or ResumeFromTurnBoundary(len(turns) + 1, e.run.started is not None))


def _by_verdict(run: fold.Run) -> Decision | None:
    """What the verdict on a ``once`` model call makes of its turn. None: it may be asked again."""
    verdict = run.model_verdict
    if verdict is None:
        return None
    match verdict.verdict:
        case "applied":
            return AnswerFromVerdict(verdict.turn, verdict.effect)
        case "refused":
            return FailFromVerdict(verdict.failure or Failure("model", "The model call was refused by verdict."))
        case _:
            return None


_PRECEDENCE: tuple[Callable[[Evidence], Decision | None], ...] = (
    _ledger_settled,  # nothing is owed; only verdicts on what stayed unknown may still enter the log
    _log_settled,  # the log wins over the ledger
    _reserved,  # the settlement that won stands, also against a later cancel
    _materialized,  # without a thread nothing can be appended
    _input,  # the ledger is repaired before it is trusted
    _completed,  # a recorded output stands, also against a later cancel or deadline
    _intents,  # commands count once they are canonical
    _cancelled,
    _deadline,
    _started,  # what may have happened, before anything else happens
    _tasks,
    _batch,
    _without_input,
    _boundary,
)


def classify(evidence: Evidence) -> Decision:
    """Exactly one decision: the first of ``_PRECEDENCE`` that the evidence calls for. Total and deterministic."""
    for rule in _PRECEDENCE:
        decision = rule(evidence)
        if decision is not None:
            return decision
    raise AssertionError("the last two rules cover every submission")  # pragma: no cover
