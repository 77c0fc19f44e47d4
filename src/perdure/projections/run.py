"""Runs as people ask about them: settlement, output, effects, approvals, and one run with its turns.

Rows of the ledger give what is listed; what they do not repeat is read back from the log, a page at a time.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from perdure import canonical
from perdure.clock import to_datetime
from perdure.engine.intents import STATUS
from perdure.errors import Corrupt, Invalid
from perdure.limits import PAGE_BATCHES_MAX, PAGE_ROWS_MAX, PEEK_BATCHES
from perdure.ports.ledger import ApprovalRow, EffectRow, Submission
from perdure.ports.log import StoredBatch
from perdure.ports.store import Store, Transaction
from perdure.records import codec
from perdure.records.effect import (
    ToolCallPrepared,
    ToolCallResolved,
    ToolCallSettled,
    ToolCallUnknown,
    ToolCallWithdrawn,
    ToolStepPrepared,
    ToolStepRefused,
    ToolStepSettled,
)
from perdure.records.parts import Failure, TextPart, Usage
from perdure.records.run import RunCompleted
from perdure.records.thread import CancelRequested, Outcome, SubmissionSettled
from perdure.rules import fold
from perdure.rules.lifecycle import EffectStatus, SubmissionState
from perdure.rules.recovery import result_digest

_failure = msgspec.json.Decoder(Failure).decode
_RESTORE = "Run `perdure verify` and restore the database from a backup."


# -- settlement -------------------------------------------------------------------------------------------------------


class Settlement(msgspec.Struct, frozen=True):
    """The one terminal outcome of a submission.

    Attributes:
        submission: id of the submission. run: id of its run.
        status: ``completed``, ``failed`` or ``cancelled``.
        failure: why it failed; present exactly when ``status`` is ``failed``.
        disposition: the application's tag on a completed run, if any.
        settled_at: when it became terminal, UTC.
    """

    submission: str
    run: str
    status: str
    failure: Failure | None
    disposition: str | None
    settled_at: dt.datetime


def settlement(row: Submission) -> Settlement:
    """The settlement a ledger row holds.

    Raises:
        Invalid: it is not settled yet. Corrupt: the row is settled and says not how.
    """
    if row.state != SubmissionState.SETTLED:
        help = f"Wait for it: perdure settlement {row.id} --wait"
        raise Invalid(f"Submission {row.id!r} is {row.state}, not settled.", help=help)
    if row.outcome is None or row.settled_at is None:
        raise Corrupt(f"Submission {row.id!r} is settled without an outcome.", help=_RESTORE)
    return Settlement(row.id, row.run, row.outcome, _failure_of(row), row.disposition, to_datetime(row.settled_at))


def _failure_of(row: Submission) -> Failure | None:
    if row.failure is None:
        return None
    try:
        return _failure(row.failure)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"The stored failure of {row.id!r} is malformed: {error}.", help=_RESTORE) from error


# -- reading the log --------------------------------------------------------------------------------------------------


def _needle(id: str) -> bytes:
    """How an id reads inside a stored batch: a batch without it has no record about it."""
    return msgspec.json.encode(id)


async def _batches(store: Store, thread: int, sequence: int) -> AsyncIterator[StoredBatch]:
    """Stored batches from the one that holds ``sequence`` on: a few inline, the rest in pages off the loop."""
    page = store.read(lambda tx: tx.log.read_from(thread, sequence, PEEK_BATCHES))
    limit = PEEK_BATCHES
    while page:
        for batch in page:
            yield batch
        if len(page) < limit:
            return
        after, limit = page[-1].last, PAGE_BATCHES_MAX
        page = await store.scan(lambda tx, after=after: tx.log.read(thread, after, PAGE_BATCHES_MAX))  # type: ignore[misc]


# -- effects ----------------------------------------------------------------------------------------------------------


class Effect(msgspec.Struct, frozen=True):
    """One try of one touch of the outside world.

    Attributes:
        id: id of the effect. run, call, step: where it belongs; ``step`` only for a ``once`` step inside a call.
        operation: name of the tool. kind, effect_class, risk: what it was declared as.
        key: the idempotency key that was given to the outside.
        status: ``started``, ``confirmed``, ``refused`` or ``unknown``.
        verdict: the verdict given on its unknown outcome, ``declared`` where its class let another try follow, or None.
        tries: which try of the call it is, from 1.
        started_at, ended_at: UTC; ``ended_at`` is None while it is in flight.
        arguments: what the call was given, as JSON value; empty for a step, whose arguments are not recorded.
        result: JSON value of the result of a confirmed effect. error: why it was refused.
        reason: why its outcome is unknown; once there is a verdict, what its author said.
        by: who gave the verdict. evidence: what convinced them, a JSON value.
        thread, submission: whose work it is.
        held: a body of unknown outcome still runs in a worker's thread, so no verdict is accepted.
        decided: a verdict was given; the next owner of its thread takes it into the log.
    """

    id: str
    run: str
    call: str
    step: str | None
    operation: str
    kind: str
    effect_class: str
    risk: str
    key: str
    status: str
    verdict: str | None
    tries: int
    started_at: dt.datetime
    ended_at: dt.datetime | None
    arguments: Any
    result: Any
    error: Failure | None
    reason: str
    thread: str
    submission: str
    held: bool
    by: str | None = None
    evidence: Any = None
    decided: bool = False

    @property
    def open(self) -> bool:
        """Whether it waits for a verdict."""
        return self.status == EffectStatus.UNKNOWN and self.verdict is None and not self.decided

    @property
    def resolve(self) -> str | None:
        """The command that gives the verdict it waits for; None when it waits for none."""
        return reconcile_command(self.id) if self.open else None


def decisions(tx: Transaction, thread: int) -> set[str]:
    """The effects and requests of a thread that a verdict or a decision was given for, which no owner has taken yet."""
    found = (intent for intent in tx.ledger.intents(thread) if intent.kind != "cancel")
    return {intent.subject.partition("#")[0] for intent in found}


def reconcile_command(effect: str) -> str:
    """The command that gives a verdict on an effect of unknown outcome."""
    return f"perdure effects reconcile {effect} --verdict … --reason …"


class _Found(msgspec.Struct):
    """What the log says about one effect, as far as it was read."""

    arguments: Any = None
    result: Any = None
    error: Failure | None = None
    reason: str = ""
    by: str | None = None
    evidence: Any = None
    started: bool = False
    done: bool = False


async def read_effect(store: Store, row: EffectRow) -> Effect:
    """One effect with its arguments, result, reason and verdict read back from the log.

    Reads from the started record on, and no further than to what the row says happened.

    Raises:
        Corrupt: the log does not hold its started record where the row says.
    """
    found = _Found()
    needle = _needle(row.run)
    async for stored in _batches(store, row.thread, row.sequence):
        if needle not in stored.body:
            continue
        batch = codec.decode(stored.body)
        for record in batch.records:
            _take(found, record, row)
        if not found.started:
            break
        if found.done or row.status == EffectStatus.STARTED:
            break
    if not found.started:
        raise Corrupt(f"The log does not hold the start of effect {row.id!r} at record {row.sequence}.", help=_RESTORE)
    waits = row.status == EffectStatus.UNKNOWN and row.verdict is None
    thread, decided = store.read(
        lambda tx: (tx.ledger.thread(row.thread), waits and row.id in decisions(tx, row.thread))
    )
    return Effect(
        id=row.id, run=row.run, call=row.call, step=row.step, operation=row.operation, kind=row.kind,
        effect_class=row.effect_class, risk=row.risk, key=row.key, status=row.status, verdict=row.verdict,
        tries=row.tries, started_at=to_datetime(row.started_at),
        ended_at=None if row.ended_at is None else to_datetime(row.ended_at), arguments=found.arguments,
        result=found.result, error=found.error, reason=found.reason, thread="" if thread is None else thread.id,
        submission=row.submission, held=row.held_by is not None, by=found.by, evidence=found.evidence,
        decided=decided,
    )  # fmt: skip


def _take(found: _Found, record: codec.Record, row: EffectRow) -> None:
    """Take what one record says about the effect of a row."""
    if isinstance(record, SubmissionSettled) and record.run == row.run:
        found.done = row.verdict in (None, "declared")  # of a settled run only verdicts may follow
    if getattr(record, "run", None) != row.run or getattr(record, "call", None) != row.call or found.done:
        return
    match record:
        case ToolCallPrepared(effect=row.id):
            found.started, found.arguments = True, msgspec.json.decode(record.arguments)
        case ToolStepPrepared(effect=row.id):
            found.started, found.arguments = True, {}
        case ToolCallPrepared() | ToolStepPrepared() if found.started:
            # another try of the same: nobody learnt how this one ended; a step of a call says nothing about the call
            found.done = isinstance(record, ToolStepPrepared) == (row.step is not None) and _step(record) == row.step
        case ToolCallUnknown(effect=row.id):
            found.reason = record.reason
            found.done = row.status == EffectStatus.UNKNOWN and row.verdict is None
        case ToolCallResolved(effect=row.id):
            found.reason, found.by = record.reason, record.by
            found.evidence = msgspec.json.decode(record.evidence)
            if record.verdict == "applied":
                found.result = msgspec.json.decode(record.result)
            # the outcome that follows a refusal holds the error, in the same commit
            found.done = record.verdict == row.verdict != "refused"
        case _:
            if found.started:
                _outcome(found, record, row)


def _step(record: codec.Record) -> str | None:
    return getattr(record, "step", None)


def _outcome(found: _Found, record: codec.Record, row: EffectRow) -> None:
    """The result or the error that ended the effect, if this record is that."""
    match record:
        case ToolCallSettled() if row.step is None:
            found.error = record.failure
            if record.failure is None:
                found.result = msgspec.json.decode(record.result)
            found.done = True
        case ToolCallWithdrawn() if row.step is None:
            found.error, found.done = record.failure, True
        case ToolStepSettled(step=row.step):
            found.result, found.done = msgspec.json.decode(record.result), True
        case ToolStepRefused(step=row.step):
            found.error, found.done = record.failure, True
        case _:
            pass


# -- approvals --------------------------------------------------------------------------------------------------------


class Approval(msgspec.Struct, frozen=True):
    """One request for approval.

    Attributes:
        id: id of the request. run, call, thread, submission: where it belongs.
        tool: name of the tool. arguments: what it would be called with, secrets redacted, as JSON value.
        digest: covers the exact arguments; the decision holds for them alone.
        reason: why it asks. asked_at: UTC.
        status: ``pending``, ``approved``, ``rejected`` or ``expired``.
        by, decision_reason, decided_at: who decided, why and when; None while it is pending.
        decided: a decision was given; while it is pending, the next owner of its thread takes it into the log.
    """

    id: str
    run: str
    tool: str
    arguments: Any
    digest: str
    reason: str
    asked_at: dt.datetime
    status: str
    by: str | None
    decision_reason: str | None
    decided_at: dt.datetime | None
    thread: str
    submission: str
    call: str
    decided: bool = False

    @property
    def resolve(self) -> str | None:
        """The command that approves it; None when it is decided."""
        return approve_command(self.id) if self.status == "pending" and not self.decided else None


def approve_command(approval: str) -> str:
    """The command that approves one request (``reject`` in its place rejects it)."""
    return f"perdure approvals approve {approval} --reason …"


def approval(row: ApprovalRow, thread: str = "", *, decided: bool = False) -> Approval:
    """The view of one row. ``thread`` is the id of its thread, where the caller knows it."""
    return Approval(
        id=row.id, run=row.run, tool=row.tool, arguments=canonical.decode(row.arguments, "stored arguments"),
        digest=row.digest, reason=row.reason, asked_at=to_datetime(row.asked_at), status=row.status, by=row.by,
        decision_reason=row.decision_reason,
        decided_at=None if row.decided_at is None else to_datetime(row.decided_at), thread=thread,
        submission=row.submission, call=row.call, decided=decided or row.status != "pending",
    )  # fmt: skip


# -- output -----------------------------------------------------------------------------------------------------------


async def read_output(store: Store, row: Submission) -> bytes:
    """The recorded output of a completed run, as JSON bytes, proven against its digest.

    Raises:
        Invalid: the run did not complete. Corrupt: the log does not hold its output, or not the one its digest covers.
    """
    if row.outcome != "completed":
        raise Invalid(f"Run {row.run!r} has no output: it is {row.outcome or row.state}.")
    completed = await _completed(store, row)
    if completed is None:
        raise Corrupt(f"The log does not hold the output of run {row.run!r}.", help=_RESTORE)
    try:
        covered = result_digest(completed.output, completed.disposition)
    except Invalid:
        covered = ""
    if completed.result_digest != covered:
        raise Corrupt(f"The stored output of run {row.run!r} is not the one its digest covers.", help=_RESTORE)
    return bytes(completed.output)


async def _completed(store: Store, row: Submission) -> RunCompleted | None:
    # a run that settled last on its thread has its output in the last batch; else it is looked for from its input on
    def newest(tx: Transaction) -> list[StoredBatch]:
        tail = tx.log.tail(row.thread_number)
        return tx.log.read_from(row.thread_number, tail.sequence, 1) if tail.sequence else []

    needle = _needle(row.run)

    def find(stored: StoredBatch) -> RunCompleted | None:
        if needle not in stored.body or b'"RunCompleted/' not in stored.body:
            return None
        records = codec.decode(stored.body).records
        return next((r for r in records if isinstance(r, RunCompleted) and r.run == row.run), None)

    for stored in store.read(newest):
        if (found := find(stored)) is not None:
            return found
    async for stored in _batches(store, row.thread_number, row.input_sequence or 1):
        if (found := find(stored)) is not None:
            return found
    return None


# -- one run ----------------------------------------------------------------------------------------------------------


class StepView(msgspec.Struct, frozen=True):
    """One named step of a call: ``status`` is ``confirmed``, ``started``, ``unknown`` or ``refused``."""

    name: str
    status: str
    result: Any
    tries: int
    effect: str | None


class CallView(msgspec.Struct, frozen=True):
    """One tool call.

    Attributes:
        call: its place, ``turn.position``. tool: the name the model wrote.
        arguments: as JSON value; text as the model wrote it where that is no JSON.
        status: ``requested`` (not started), ``waiting`` (for an approval), ``started``, ``unknown``, ``confirmed``,
            ``refused`` (it definitely failed) or ``withdrawn`` (never dispatched).
        result: JSON value when it is confirmed. error: why it failed or was withdrawn.
        steps: its recorded steps. tries: how often it was started.
        effect: id of its newest try, None if it never had a started record. approval: id of its request, if it asked.
    """

    call: str
    tool: str
    arguments: Any
    status: str
    result: Any
    error: Failure | None
    steps: tuple[StepView, ...]
    tries: int
    effect: str | None
    approval: str | None


class TurnView(msgspec.Struct, frozen=True):
    """One response of the model and its calls. ``rejected`` says why its output was refused, if it was."""

    turn: int
    model: str
    finish: str
    text: str
    usage: Usage
    calls: tuple[CallView, ...]
    rejected: Failure | None = None


class RunView(msgspec.Struct, frozen=True):
    """One run.

    Attributes:
        run, submission, thread: their ids. position: place in the thread's queue, from 1.
        agent: name of the program.
        state: of the submission: ``ready``, ``running``, ``input-applied``, ``suspended``, ``unknown`` or ``settled``.
        created_at: when it was admitted, UTC. input: JSON value.
        settled_at, status, failure, disposition: its settlement; None while it is owed.
        turns: responses and calls in order; empty in a listing.
        usage: tokens of all turns. deadline: when it fails by itself, UTC; None before it started.
        output: JSON value of a completed run, as the log holds it; None in a listing.
        key, principal: what it was admitted under.
    """

    run: str
    submission: str
    thread: str
    position: int
    agent: str
    state: str
    created_at: dt.datetime
    input: Any
    settled_at: dt.datetime | None
    status: str | None
    failure: Failure | None
    disposition: str | None = None
    turns: tuple[TurnView, ...] = ()
    usage: Usage = msgspec.field(default_factory=Usage)
    deadline: dt.datetime | None = None
    output: Any = None
    key: str | None = None
    principal: str = ""


_OUTCOMES: tuple[Outcome, ...] = ("completed", "failed", "cancelled")


async def runs(store: Store, state: str | None = None, program: str | None = None) -> list[RunView]:
    """Runs in order of admission, without their turns.

    Args:
        state: a state of the ledger (``ready`` … ``settled``) or an outcome (``completed``, ``failed``, ``cancelled``).
        program: only runs of this agent.

    Raises:
        Invalid: there is no such state.
    """
    legal = [str(s) for s in SubmissionState] + list(_OUTCOMES)
    if state is not None and state not in legal:
        raise Invalid(f"There is no state {state!r}.", help=f"Use one of {', '.join(legal)}.")
    outcome = state if state in _OUTCOMES else None
    wanted = SubmissionState.SETTLED.value if outcome is not None else state
    found: list[RunView] = []
    after = ""
    while True:

        def page(tx: Transaction, after: str = after) -> list[Submission]:
            return tx.ledger.submissions(state=wanted, after=after, limit=PAGE_ROWS_MAX)

        rows = await store.scan(page)
        found += [
            _view(row, None)
            for row in rows
            if (outcome is None or row.outcome == outcome) and (program is None or row.program == program)
        ]
        if len(rows) < PAGE_ROWS_MAX:
            return found
        after = rows[-1].id


async def inspect(store: Store, row: Submission) -> RunView:
    """One run with its turns, calls and steps, folded from its own records.

    Raises:
        Corrupt: its records cannot follow each other. Incompatible: written by a newer release.
    """
    state = fold.Thread(row.thread)
    needles = (_needle(row.run), _needle(row.id))
    if row.input_sequence is not None:
        async for stored in _batches(store, row.thread_number, row.input_sequence):
            if any(needle in stored.body for needle in needles):
                for sequence, record in _own(stored, row):
                    state.tail = sequence - 1
                    fold.apply(state, record)
            settled = state.settlements.get(row.id)
            if settled is not None and not settled.unknown:
                break  # only verdicts on what stayed unknown may follow
    return _view(row, state.runs.get(row.run))


def _own(stored: StoredBatch, row: Submission) -> Iterator[tuple[int, codec.Record]]:
    """Records of a batch that are about this run, with their sequences."""
    for sequence, record in enumerate(codec.decode(stored.body).records, stored.first):
        own = getattr(record, "run", None) == row.run
        if own or (isinstance(record, CancelRequested) and record.submission == row.id):
            yield sequence, record


def _view(row: Submission, run: fold.Run | None) -> RunView:
    started = None if run is None else run.started
    completed = None if run is None else run.completed
    return RunView(
        run=row.run, submission=row.id, thread=row.thread, position=row.position, agent=row.program, state=row.state,
        created_at=to_datetime(row.created_at), input=_json(row.input),
        settled_at=None if row.settled_at is None else to_datetime(row.settled_at), status=row.outcome,
        failure=_failure_of(row), disposition=row.disposition,
        turns=() if run is None else tuple(_turn(turn, over=run.settled is not None) for turn in run.turns),
        usage=Usage() if run is None else run.usage,
        deadline=None if started is None else to_datetime(started.deadline),
        output=None if completed is None else _json(completed.output), key=row.key, principal=row.principal,
    )  # fmt: skip


def _json(raw: bytes | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise Corrupt(f"A stored value is not JSON: {error}.", help=_RESTORE) from error


def _turn(turn: fold.Turn, *, over: bool) -> TurnView:
    response = turn.response
    text = "".join(part.text for part in response.parts if isinstance(part, TextPart))
    calls = tuple(_call(call, over=over) for call in turn.calls)
    return TurnView(turn.number, response.model, response.finish, text, response.usage, calls, turn.rejected)


def _call(call: fold.Call, *, over: bool) -> CallView:
    status = _call_status(call, over=over)
    result = call.result if call.closed or call.verdict is None else call.verdict.result
    confirmed = status == EffectStatus.CONFIRMED
    return CallView(
        call=call.id,
        tool=call.part.name,
        arguments=_arguments(call),
        status=status,
        result=_json(result) if confirmed and result is not None else None,
        error=call.failure,
        steps=tuple(_step_view(name, step) for name, step in call.steps.items()),
        tries=call.tries,
        effect=None if call.prepared is None else call.prepared.effect,
        approval=None if call.approval is None else call.approval.approval,
    )


def _arguments(call: fold.Call) -> Any:
    if call.prepared is not None:
        return _json(call.prepared.arguments)
    try:
        return msgspec.json.decode(call.part.arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return call.part.arguments


def _call_status(call: fold.Call, *, over: bool) -> str:
    if call.withdrawn:
        return EffectStatus.WITHDRAWN.value
    if call.closed:
        return (EffectStatus.CONFIRMED if call.failure is None else EffectStatus.REFUSED).value
    if any(True for _ in call.unknowns()):
        return EffectStatus.UNKNOWN.value
    if call.verdict is not None and over:  # it came after the end: nothing follows from it
        return STATUS[call.verdict.verdict].value
    if call.approval is not None and call.decision is None:
        return "waiting"
    return (EffectStatus.STARTED if call.in_flight else EffectStatus.REQUESTED).value


def _step_view(name: str, step: fold.Step) -> StepView:
    about = step.prepared or step.unknown or step.verdict
    if step.result is not None:
        status = EffectStatus.CONFIRMED
    elif step.unknown is not None:
        status = EffectStatus.UNKNOWN
    elif step.prepared is not None:
        status = EffectStatus.STARTED
    else:
        status = EffectStatus.REFUSED
    result = None if step.result is None else _json(step.result)
    return StepView(name, status.value, result, step.tries, None if about is None else about.effect)
