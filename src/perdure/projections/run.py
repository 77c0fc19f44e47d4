"""Runs as people ask about them: settlement, output, and one run with its turns.

Rows of the ledger give what is listed; what they do not repeat is read back from the log, a page at a time.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import msgspec

from perdure.clock import to_datetime
from perdure.engine.intents import STATUS
from perdure.errors import Corrupt, Invalid
from perdure.limits import PAGE_ROWS_MAX
from perdure.ports.ledger import Submission
from perdure.ports.log import StoredBatch
from perdure.ports.store import Store, Transaction
from perdure.projections.models import Charged, ModelTry, Tries, charged, dollars, outstanding, seen
from perdure.projections.reading import RESTORE, batches, json_value, needle
from perdure.records import codec
from perdure.records.parts import Evidence, Failure, TextPart, Usage
from perdure.records.run import RunCompleted
from perdure.records.task import PROGRAM
from perdure.records.thread import CancelRequested, Outcome
from perdure.rules import fold
from perdure.rules.lifecycle import EffectStatus, SubmissionState
from perdure.rules.recovery import result_digest

_failure = msgspec.json.Decoder(Failure).decode


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
        raise Corrupt(f"Submission {row.id!r} is settled without an outcome.", help=RESTORE)
    return Settlement(row.id, row.run, row.outcome, _failure_of(row), row.disposition, to_datetime(row.settled_at))


def _failure_of(row: Submission) -> Failure | None:
    if row.failure is None:
        return None
    try:
        return _failure(row.failure)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"The stored failure of {row.id!r} is malformed: {error}.", help=RESTORE) from error


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
        raise Corrupt(f"The log does not hold the output of run {row.run!r}.", help=RESTORE)
    try:
        covered = result_digest(completed.output, completed.disposition)
    except Invalid:
        covered = ""
    if completed.result_digest != covered:
        raise Corrupt(f"The stored output of run {row.run!r} is not the one its digest covers.", help=RESTORE)
    return bytes(completed.output)


async def _completed(store: Store, row: Submission) -> RunCompleted | None:
    # a run that settled last on its thread has its output in the last batch; else it is looked for from its input on
    def newest(tx: Transaction) -> list[StoredBatch]:
        tail = tx.log.tail(row.thread_number)
        return tx.log.read_from(row.thread_number, tail.sequence, 1) if tail.sequence else []

    wanted = needle(row.run)

    def find(stored: StoredBatch) -> RunCompleted | None:
        if wanted not in stored.body or b'"RunCompleted/' not in stored.body:
            return None
        records = codec.decode(stored.body, stored.apart).records
        return next((r for r in records if isinstance(r, RunCompleted) and r.run == row.run), None)

    for stored in store.read(newest):
        if (found := find(stored)) is not None:
            return found
    async for stored in batches(store, row.thread_number, row.input_sequence or 1):
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
    """One response of the model and its calls.

    Attributes:
        usage: tokens by the provider's own count; ``input`` includes the cache's, ``output`` the reasoning.
        rejected: why its output was refused, if it was.
        tries: the tries before it that gave no response.
        evidence: digests of what went over the wire, the provider's name for the call, HTTP status; None when unseen.
        cost: US dollars by that usage and the price of version ``prices``; None without a price.
        charged: its reservation, where the provider told no usage.
        effect: id of its effect, None for a call that may be repeated.
        final: the limit that was used up before it: it was asked for as the last answer. Empty otherwise.
    """

    turn: int
    model: str
    finish: str
    text: str
    usage: Usage
    calls: tuple[CallView, ...]
    rejected: Failure | None = None
    tries: tuple[ModelTry, ...] = ()
    evidence: Evidence | None = None
    cost: float | None = None
    prices: str = ""
    charged: Charged | None = None
    effect: str | None = None
    final: str = ""


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
        tries: tries of the turn that has no response yet, or never got one.
        cost: US dollars of all responses that had a price.
        charged: reservations of calls that may have been served, which count against the budgets; None for none.
        unpriced: responses and reservations without a price.
        exhausted: the limit that was used up before the answer of a completed run; empty otherwise.
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
    tries: tuple[ModelTry, ...] = ()
    cost: float = 0.0
    charged: Charged | None = None
    unpriced: int = 0
    exhausted: str = ""


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
            _view(row, None, _NO_TRIES)
            for row in rows
            if (outcome is None or row.outcome == outcome) and (program is None or name_of(row) == program)
        ]
        if len(rows) < PAGE_ROWS_MAX:
            return found
        after = rows[-1].id


async def inspect(store: Store, row: Submission) -> RunView:
    """One run with its turns, calls and steps, folded from its own records.

    Raises:
        Corrupt: its records cannot follow each other. Incompatible: written by a newer release.
    """
    state, tries = fold.Thread(row.thread), Tries()
    needles = (needle(row.run), needle(row.id))
    if row.input_sequence is not None:
        async for stored in batches(store, row.thread_number, row.input_sequence):
            if any(mention in stored.body for mention in needles):
                for sequence, record in _own(stored, row):
                    state.tail = sequence - 1
                    fold.apply(state, record)
                    tries.take(record)
            settled = state.settlements.get(row.id)
            if settled is not None and not settled.unknown:
                break  # only verdicts on what stayed unknown may follow
    return _view(row, state.runs.get(row.run), tries)


def _own(stored: StoredBatch, row: Submission) -> Iterator[tuple[int, codec.Record]]:
    """Records of a batch that are about this run, with their sequences."""
    for sequence, record in enumerate(codec.decode(stored.body, stored.apart).records, stored.first):
        own = getattr(record, "run", None) == row.run
        if own or (isinstance(record, CancelRequested) and record.submission == row.id):
            yield sequence, record


def _view(row: Submission, run: fold.Run | None, tries: Tries) -> RunView:
    started = None if run is None else run.started
    completed = None if run is None else run.completed
    return RunView(
        run=row.run, submission=row.id, thread=row.thread, position=row.position, agent=name_of(row), state=row.state,
        created_at=to_datetime(row.created_at), input=json_value(row.input),
        settled_at=None if row.settled_at is None else to_datetime(row.settled_at), status=row.outcome,
        failure=_failure_of(row), disposition=row.disposition,
        turns=() if run is None else tuple(_turn(turn, tries, over=run.settled is not None) for turn in run.turns),
        usage=Usage() if run is None else run.usage,
        deadline=None if started is None else to_datetime(started.deadline),
        output=None if completed is None else json_value(completed.output), key=row.key, principal=row.principal,
        tries=() if run is None else tries.of(len(run.turns) + 1),
        cost=0.0 if run is None else run.cost / 1_000_000,
        charged=None if run is None else outstanding(run.charged), unpriced=0 if run is None else run.unpriced,
        exhausted="" if run is None or run.settled is None else run.settled.exhausted,
    )  # fmt: skip


def name_of(row: Submission) -> str:
    """The name people know a submission's program by: of a workflow its own."""
    return row.definition.rpartition("@")[0] if row.program == PROGRAM else row.program


_NO_TRIES = Tries()


def _turn(turn: fold.Turn, tries: Tries, *, over: bool) -> TurnView:
    response = turn.response
    text = "".join(part.text for part in response.parts if isinstance(part, TextPart))
    calls = tuple(_call(call, over=over) for call in turn.calls)
    return TurnView(
        turn.number, response.model, response.finish, text, response.usage, calls, turn.rejected,
        tries=tries.of(turn.number), evidence=seen(response.evidence), cost=dollars(response.cost),
        prices=response.prices, charged=charged(response.charged), effect=response.effect or None, final=response.final,
    )  # fmt: skip


def _call(call: fold.Call, *, over: bool) -> CallView:
    status = _call_status(call, over=over)
    result = call.result if call.closed or call.verdict is None else call.verdict.result
    confirmed = status == EffectStatus.CONFIRMED
    return CallView(
        call=call.id,
        tool=call.part.name,
        arguments=_arguments(call),
        status=status,
        result=json_value(result) if confirmed and result is not None else None,
        error=call.failure,
        steps=tuple(_step_view(name, step) for name, step in call.steps.items()),
        tries=call.tries,
        effect=None if call.prepared is None else call.prepared.effect,
        approval=None if call.approval is None else call.approval.approval,
    )


def _arguments(call: fold.Call) -> Any:
    if call.prepared is not None:
        return json_value(call.prepared.arguments)
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
    result = None if step.result is None else json_value(step.result)
    return StepView(name, status.value, result, step.tries, None if about is None else about.effect)
