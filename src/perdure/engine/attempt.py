"""One fenced ownership period of a thread: what a driver may do, and how it ends.

An attempt owns the log's end: it encodes, folds and chains in the loop and hands bytes to the writer, so the order of its
calls is the order of its records. What it appends it folds at once; what depends on durability awaits the future.
Cancellation is treated as process loss, except where the attempt itself interrupts its task for a reason it names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from perdure.engine import intents
from perdure.engine.host import Host
from perdure.engine.intents import Op
from perdure.errors import OwnershipLost, Superseded
from perdure.limits import BATCH_RECORDS_MAX
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Claimed, Intent, Submission
from perdure.ports.log import Tail
from perdure.ports.store import Transaction
from perdure.records import codec
from perdure.records.blobs import Blobs
from perdure.records.codec import Batch, Record
from perdure.records.effect import ToolCallUnknown, ToolCallWithdrawn
from perdure.records.parts import Failure
from perdure.records.run import ModelCallFailed, ModelCallUnknown, ModelResponseRecorded, RunCompleted
from perdure.records.thread import Outcome as SettledOutcome
from perdure.records.thread import SubmissionSettled, ThreadCreated
from perdure.rules import fold, plans, recovery

Interruption = Literal["cancel", "deadline", "shutdown"]
_failure_encoder = msgspec.json.Encoder()


class Settled(msgspec.Struct, frozen=True):
    """The run ended."""

    outcome: SettledOutcome


class Suspended(msgspec.Struct, frozen=True):
    """The run waits for decisions, as a barrier on its thread."""


class Parked(msgspec.Struct, frozen=True):
    """The run waits for verdicts; later input may pass it."""


class Yielded(msgspec.Struct, frozen=True):
    """The attempt gives the claim back; the work stays owed."""

    not_before: int = 0


Ended = Settled | Suspended | Parked | Yielded


class Attempt:
    """What a driver gets. Lives on one loop; not thread-safe.

    Attributes:
        state: the folded thread, going on in memory.
        submission: the claimed ledger row; None in a maintenance claim.
        superseded: an earlier owner never gave the claim back.
        interrupted: why the attempt cancelled its own task, or None.
        owed: False where history is kept and the ledger knows nothing of the run (persistent mode).
    """

    def __init__(self, host: Host, claimed: Claimed, state: fold.Thread, *, owed: bool = True) -> None:
        self.host = host
        self.number = claimed.number
        self.thread = claimed.thread
        self.epoch = claimed.epoch
        self.token = claimed.token
        self.submission: Submission | None = claimed.submission
        self.superseded = claimed.superseded
        self.state = state
        self.interrupted: Interruption | None = None
        self.task: asyncio.Task[Any] | None = None
        self.owed = owed
        self._tail = Tail(state.tail, state.digest, claimed.tail.batch)
        self._taken: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._broken: BaseException | None = None

    @property
    def run(self) -> fold.Run:
        """The run of the claimed submission. Valid once its input is recorded."""
        assert self.submission is not None
        return self.state.runs[self.submission.run]

    @property
    def alone(self) -> bool:
        """Whether the run knows nothing of others on its thread."""
        return False

    @property
    def lineage(self) -> str:
        """Whose idempotency keys this run's calls use: what survives of it in a run derived from it."""
        assert self.submission is not None
        return self.submission.run

    @property
    def started(self) -> bool:
        """Whether the claimed submission's input is in the log."""
        return self.submission is not None and self.submission.run in self.state.runs

    # -- appending --------------------------------------------------------------------------------------------------
    def append(self, boundary: Boundary, records: Sequence[Record], then: Sequence[Op] = ()) -> asyncio.Future[None]:
        """Append records and change the ledger with them, in one commit. Enqueued at once; await it for durability.

        Raises (through the future): OwnershipLost when the claim was superseded; Unavailable when the store failed.
        """
        if self._broken is not None:
            raise Superseded(str(self._broken))
        if not self.state.tail and not isinstance(records[0], ThreadCreated):
            records = [ThreadCreated(self._program()), *records]
        number, epoch, token = self.number, self.epoch, self.token
        if len(records) <= BATCH_RECORDS_MAX:
            batches = [self._batch(records)]
        else:
            parts = range(0, len(records), BATCH_RECORDS_MAX)
            batches = [self._batch(records[start : start + BATCH_RECORDS_MAX]) for start in parts]

        def unit(tx: Transaction) -> None:
            for expected, count, body, digest, apart in batches:
                tx.log.append(number, epoch, token, expected, count, body, digest, apart)
            for op in then:
                op(tx)

        single = not then and len(batches) == 1 and not batches[0][4]
        future = self.host.store.write(boundary, unit, self._failed, single=single)
        if self.host.watched(self.thread):
            future.add_done_callback(self._appended)
        return future

    def _batch(self, records: Sequence[Record]) -> tuple[Tail, int, bytes, bytes, Blobs]:
        """Encode and fold one batch: the tail it follows, its number of records, its bytes, the digest after it, payloads."""
        state, expected = self.state, self._tail
        first = expected.sequence + 1
        batch = Batch(1, self.thread, first, self.epoch, self.host.owner, self.host.clock.now(), tuple(records))
        body, apart = codec.encode_apart(batch)
        digest = codec.chain(expected.digest, body)
        for record in records:
            fold.apply(state, record)
        state.digest = digest
        state.epoch = self.epoch
        self._tail = Tail(state.tail, digest, first)
        return expected, len(records), body, digest, apart

    def _program(self) -> str:
        """The program of the thread's first submission."""
        if self.submission is not None:
            return self.submission.program
        number = self.number
        return self.host.store.read(lambda tx: tx.ledger.submissions(thread=number, limit=1))[0].program

    def _appended(self, future: asyncio.Future[None]) -> None:
        self.host.progressed(self.thread)

    def _failed(self, error: BaseException) -> None:
        """An append failed: nothing this attempt does can be recorded any more, so whatever it runs is stopped."""
        if self._broken is None:
            self._broken = error
            # not at once: this may be that very task, in a commit on the loop, about to be told by the future
            asyncio.get_running_loop().call_soon(self._stop)

    def _stop(self) -> None:
        if self.task is not None:
            self.task.cancel()

    @property
    def broken(self) -> BaseException | None:
        """Why nothing can be appended any more, if so."""
        return self._broken

    # -- interruption -------------------------------------------------------------------------------------------------
    def watch_deadline(self, deadline: int) -> None:
        """Interrupt the attempt at an instant: one timer, whatever the number of steps."""
        if self._timer is None:
            delay = max(0.0, (deadline - self.host.clock.now()) / 1_000_000)
            self._timer = asyncio.get_running_loop().call_later(min(delay, 1e7), self.interrupt, "deadline")

    def interrupt(self, why: Interruption) -> None:
        """Cancel what runs in this attempt. The first reason stands."""
        if self.interrupted is None and self.task is not None:
            self.interrupted = why
            self.task.cancel()

    def take_in(self, pending: Iterable[Intent]) -> list[asyncio.Future[None]]:
        """Take intents of this thread into the log. A cancel of the claimed run interrupts it once durable.

        Raises:
            LookupError: an intent is about what this attempt's state does not hold.
        """
        futures = []
        for intent in pending:
            if intent.id in self._taken or intent.thread != self.number or self._broken is not None:
                continue
            self._taken.add(intent.id)
            now = self.host.clock.now()
            records, ops = intents.take_in(self.state, intent, now)
            own = self.submission is not None and intent.subject == self.submission.id
            queued = intent.kind == "cancel" and not own and self._queued(intent.subject)
            if queued:
                settlement, op = intents.settle_queued(
                    intent.subject, "run_" + intent.subject[4:], self.number, self.epoch, self.token, now
                )
                records, ops = [*records, settlement], [*ops, op]
            future = self._take(records, ops)
            futures.append(future)
            if intent.kind == "cancel" and own:
                future.add_done_callback(self._cancel_durable)
            elif queued:
                future.add_done_callback(lambda done, s=intent.subject: self.host.settled(s))  # type: ignore[misc]
        return futures

    def _cancel_durable(self, done: asyncio.Future[None]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.interrupt("cancel")

    def _queued(self, submission: str) -> bool:
        if submission in self.state.settlements or any(r.submission == submission for r in self.state.runs.values()):
            return False
        row = self.host.store.read(lambda tx: tx.ledger.submission(submission))
        return row is not None and row.state != "settled"

    def _take(self, records: Sequence[Record], ops: Sequence[Op]) -> asyncio.Future[None]:
        if records:
            return self.append(Boundary.INTENT_APPLIED, records, ops)

        number, epoch = self.number, self.epoch

        def unit(tx: Transaction) -> None:
            row = tx.ledger.thread(number)
            if row is None or row.epoch != epoch:  # what is moot by an old state may decide something by the newest
                raise OwnershipLost(f"Thread {self.thread!r} has another owner since epoch {epoch}.")
            for op in ops:
                op(tx)

        return self.host.store.write(Boundary.INTENT_APPLIED, unit, self._failed)

    # -- ends ---------------------------------------------------------------------------------------------------------
    def _end(self) -> None:
        self.task = None
        if self._timer is not None:
            self._timer.cancel()

    async def settle(
        self,
        outcome: SettledOutcome,
        *,
        failure: Failure | None = None,
        completed: RunCompleted | None = None,
        records: Sequence[Record] = (),
        then: Sequence[Op] = (),
        exhausted: str = "",
    ) -> Settled:
        """Record the one settlement and end the claim, in one commit.

        ``completed`` is the run's result, recorded here if it is not yet. Calls that were started and have no outcome,
        neither in the log nor in ``records``, are recorded unknown first, and calls that never started are withdrawn.
        """
        assert self.submission is not None
        submission, now = self.submission.id, self.host.clock.now()
        before, ops = (list(records), list(then))
        if self.started:
            why = failure or Failure("cancelled", "The run was cancelled.")
            for run in self._runs():
                closing, closing_ops = _close_calls(run, why, now, ended=before)
                before += closing
                ops += closing_ops
        result = completed or (self.run.completed if self.started else None)
        if completed is not None and self.run.completed is None:
            before.append(completed)
        unknown = {r.effect for r in before if isinstance(r, ToolCallUnknown | ModelCallUnknown)}
        if self.started:
            unknown |= {u.effect for run in self._runs() for u in run.unknowns()}
        settled = SubmissionSettled(
            submission,
            self.submission.run,
            outcome,
            failure,
            result.result_digest if outcome == "completed" and result else None,
            result.disposition if outcome == "completed" and result else None,
            tuple(sorted(unknown)),
            exhausted if outcome == "completed" else "",
        )
        encoded = None if failure is None else _failure_encoder.encode(failure)
        number, epoch, token = self.number, self.epoch, self.token

        def op(tx: Transaction) -> None:
            tx.ledger.settle(number, epoch, token, submission, outcome, encoded, settled.disposition, now, release=True)

        self._end()  # from here on the settlement wins: nothing interrupts it any more
        await self.append(Boundary.SETTLE, [*before, settled], [*ops, op] if self.owed else ops)
        self.host.settled(submission)
        return Settled(outcome)

    def _runs(self) -> tuple[fold.Run, ...]:
        """The run, and those of agents' turns inside its tasks that have not ended."""
        return (self.run, *recovery.parts(self.state, self.run.id))

    async def close_abandoned(self) -> None:
        """Close runs that nobody owes (persistent mode) and whose process died: their calls in flight are unknown."""
        now = self.host.clock.now()
        for run in list(self.state.runs.values()):
            if run.settled is not None or (self.submission is not None and run.submission == self.submission.id):
                continue
            submission = run.submission
            if self.host.store.read(lambda tx, id=submission: tx.ledger.submission(id)) is not None:  # type: ignore[misc]
                continue
            failure = Failure("interrupted", "The process ended before the run did.")
            closing, ops = _close_calls(run, failure, now)
            unknown = {r.effect for r in closing if isinstance(r, ToolCallUnknown | ModelCallUnknown)}
            unknown |= {u.effect for u in run.unknowns()}
            settled = SubmissionSettled(submission, run.id, "failed", failure, unknown=tuple(sorted(unknown)))
            await self.append(Boundary.REPAIR, [*closing, settled], ops)

    async def park(self, until: int = 0) -> Parked | Yielded:
        """End the claim with an unknown open. Later input may pass; the run's deadline stays armed, and ``until``."""
        return Parked() if await self._wait(Boundary.PARK, until) else Yielded()

    async def suspend(self, until: int = 0) -> Suspended | Yielded:
        """End the claim and wait, as a barrier: for decisions, or for the instant ``until``."""
        return Suspended() if await self._wait(Boundary.SUSPEND, until) else Yielded()

    async def _wait(self, boundary: Boundary, until: int) -> bool:
        """Whether the submission waits now; False when what it waits for was decided meanwhile."""
        assert self.submission is not None
        if not self.owed:
            return False
        submission, now = self.submission.id, self.host.clock.now()
        wake_at = min((instant for instant in (until, self.run.deadline) if instant), default=None)
        number, epoch, token, seen = self.number, self.epoch, self.token, self.state.tail

        def unit(tx: Transaction) -> bool:
            verb = tx.ledger.park if boundary is Boundary.PARK else tx.ledger.suspend
            if tx.log.tail(number).sequence != seen:  # a decision was taken in since this attempt looked
                verb(number, epoch, token, submission, now, now)
                return False
            return verb(number, epoch, token, submission, wake_at, now)

        self.task = None  # a cancel that comes now is found by the verb, and by the next claim
        waits = await self.host.store.write(boundary, unit)
        self._end()
        self.host.wake()
        self.host.progressed(self.thread)
        return waits

    async def release(self, not_before: int = 0) -> None:
        """Give the claim back; the work stays owed. Harmless when the fence is lost."""
        self._end()
        await self.host.give_back(self.number, self.epoch, self.token, not_before)

    def abandon(self) -> None:
        """Stop without a word: the fence is lost, somebody else owns the thread."""
        self._end()


class Part(Attempt):
    """A run of an agent's turns inside a task of a workflow: on the same thread, under the same claim.

    It owes nothing of its own: it ends by records, and what it waits for is waited for by the whole.

    Args:
        whole: the attempt of the workflow.
        submission: as the turns see it: the run of their own, their program and their input.
        lineage: what the idempotency keys of its calls derive from.
    """

    def __init__(self, whole: Attempt, submission: Submission, lineage: str) -> None:
        tail = Tail(whole.state.tail, whole.state.digest, 0)  # of no use: the whole appends
        claimed = Claimed(
            whole.number, whole.thread, whole.epoch, whole.token, tail, submission, (), 0, whole.superseded
        )
        super().__init__(whole.host, claimed, whole.state, owed=False)
        self._whole = whole
        self._lineage = lineage
        self.ended: SettledOutcome | None = None
        self.failure: Failure | None = None

    @property
    def lineage(self) -> str:
        """See :attr:`Attempt.lineage`."""
        return self._lineage

    @property
    def alone(self) -> bool:
        """Whether the run knows nothing of others on its thread."""
        return True

    @property
    def interrupted(self) -> Interruption | None:
        """Why the whole was interrupted, if it was."""
        return self._whole.interrupted

    @interrupted.setter
    def interrupted(self, why: Interruption | None) -> None:
        """Only the whole is interrupted."""

    @property
    def broken(self) -> BaseException | None:
        """Why the whole cannot append any more, if so."""
        return self._whole.broken

    def append(self, boundary: Boundary, records: Sequence[Record], then: Sequence[Op] = ()) -> asyncio.Future[None]:
        """See :meth:`Attempt.append`."""
        return self._whole.append(boundary, records, then)

    def watch_deadline(self, deadline: int) -> None:
        """The whole watches its own, which is no later."""

    async def settle(
        self,
        outcome: SettledOutcome,
        *,
        failure: Failure | None = None,
        completed: RunCompleted | None = None,
        records: Sequence[Record] = (),
        then: Sequence[Op] = (),
        exhausted: str = "",
    ) -> Settled:
        """The turns are over: what is open is closed and their result is recorded. The task's end follows."""
        before, ops = list(records), list(then)
        if self.started:
            why = failure or Failure("cancelled", "The task was cancelled.")
            closing, closing_ops = _close_calls(self.run, why, self.host.clock.now(), ended=before)
            before, ops = before + closing, ops + closing_ops
            if completed is not None and self.run.completed is None:
                before.append(completed)
        if before:
            await self.append(Boundary.TURNS_ENDED, before, ops)
        self.ended, self.failure = outcome, failure
        return Settled(outcome)

    async def park(self, until: int = 0) -> Parked | Yielded:
        """Leave the wait to the whole."""
        return Parked()

    async def suspend(self, until: int = 0) -> Suspended | Yielded:
        """Leave the wait to the whole."""
        return Suspended()


_MODEL_ENDS = (ModelResponseRecorded, ModelCallFailed, ModelCallUnknown)


def _close_calls(
    run: fold.Run, failure: Failure, now: int, *, ended: Sequence[Record] = ()
) -> tuple[list[Record], list[Op]]:
    """Give every open call of a run an explicit end, so that its thread stays usable whatever happened.

    ``ended`` are records of the same commit; a model call that they end is not in doubt.
    """
    in_doubt = () if any(isinstance(record, _MODEL_ENDS) for record in ended) else plans.model_doubts(run)
    records, ops = intents.doubt(run, in_doubt, now)
    for call in run.open_calls():
        if call.closed:
            continue
        lost, lost_ops = intents.doubt(run, plans.doubts(call), now)
        records += lost
        ops += lost_ops
        if call.prepared is None:
            records.append(ToolCallWithdrawn(run.id, call.id, Failure("cancelled", failure.message)))
        if call.approval is not None and call.decision is None:
            ops.append(_reject_op(call.approval.approval, failure.message, now))
    return records, ops


def _reject_op(approval: str, reason: str, now: int) -> Op:
    return lambda tx: tx.ledger.decide_approval(approval, "rejected", "perdure", reason, now)
