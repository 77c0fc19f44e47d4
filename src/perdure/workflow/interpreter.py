"""The interpreter of workflows: stable bounded batches of tasks, each committed as one, until all have ended.

It reads the fold and appends records, so an attempt that takes over from a dead one enters it in the middle. A batch is
opened (what touches the world is recorded first), carried out side by side, and closed in compiled order by one commit;
an outcome is durable as soon as it is known, and rides on the closing commit where nothing else is awaited. A task that
waits leaves its batch.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec

from perdure import canonical
from perdure.engine.attempt import Attempt, Ended, Settled
from perdure.engine.intents import Op
from perdure.errors import Invalid
from perdure.limits import FAILURE_MESSAGE_CHARS_MAX, TASKS_UNCOMMITTED_MAX, TIMER_SECONDS_MAX
from perdure.ports.failpoints import Boundary
from perdure.ports.store import Transaction
from perdure.records.codec import Record
from perdure.records.parts import Failure
from perdure.records.run import RunCompleted
from perdure.records.task import TaskEnd, TaskSettled, WorkflowStarted
from perdure.records.thread import ThreadCreated, UserInputRecorded
from perdure.rules import recovery
from perdure.rules.flow import Flow
from perdure.workflow import templates
from perdure.workflow.acting import commit
from perdure.workflow.expressions import ExpressionError, Scope
from perdure.workflow.members import Member, Members
from perdure.workflow.outcomes import Left
from perdure.workflow.plan import Plan
from perdure.workflow.request import Request
from perdure.workflow.scheduler import Scheduler
from perdure.workflow.values import Values

_DEADLINE = Failure("policy.duration", "The run reached its deadline.")


class _RunFailure(Exception):
    """The run fails with this; raised inside the loop only."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Interpreter:
    """Advances one attempt of one workflow run.

    Args:
        plan: what the run was started with. request: what it was asked for.
        make: the members of batches, once the run has begun.
    """

    def __init__(self, attempt: Attempt, plan: Plan, request: Request, make: Any) -> None:
        self.attempt = attempt
        self.plan = plan
        self.request = request
        self._make = make
        self._members: Members
        self._place = {id: place for place, id in enumerate(plan.order)}
        self._batch: list[Member] = []
        self._waiting: set[str] = set()
        self._unsure: list[asyncio.Future[None]] = []

    async def advance(self) -> Ended:
        """Go on until the run settles or waits."""
        try:
            return await self._advance()
        except _RunFailure as failed:
            return await self._fail(failed.failure)
        except asyncio.CancelledError:
            attempt, task = self.attempt, asyncio.current_task()
            if attempt.broken is not None or attempt.interrupted in (None, "shutdown") or task is None:
                raise
            while task.cancelling():
                task.uncancel()
            return await self._interrupted()

    async def _interrupted(self) -> Ended:
        if self.attempt.run.completed is not None:
            return await self.attempt.settle("completed")
        finished = [member for member in self._batch if member.outcome is not None]
        if finished:  # what its siblings have done is kept
            await self._close(finished)
        if self.attempt.interrupted == "cancel":
            why = Failure("cancelled", "The run was cancelled.")
            return await self.attempt.settle("cancelled", records=self._abandon(why))
        return await self._fail(_DEADLINE)

    async def _fail(self, failure: Failure) -> Settled:
        return await self.attempt.settle("failed", failure=failure, records=self._abandon(failure))

    def _abandon(self, why: Failure) -> list[Record]:
        """The end of every task that has none: what had begun, and what was never reached."""
        flow = self._flow()
        said = Failure("cancelled", f"Not finished: {why.message}"[:FAILURE_MESSAGE_CHARS_MAX])
        end: TaskEnd = "cancelled"
        records: list[Record] = []
        for id in self.plan.order:
            task = flow.tasks.get(id)
            if task is None or task.settled is None:
                attempts = 0 if task is None else task.attempt
                records.append(TaskSettled(self.attempt.run.id, id, end, attempts, failure=said))
        return records

    def _flow(self) -> Flow:
        flow = self.attempt.run.flow
        assert flow is not None
        return flow

    # -- the loop -----------------------------------------------------------------------------------------------------
    async def _advance(self) -> Ended:
        attempt = self.attempt
        if not attempt.started:
            self._begin()
        run, flow = attempt.run, self._flow()
        if run.completed is not None:
            return await attempt.settle("completed")
        if run.cancel is not None:
            attempt.interrupted = "cancel"
            return await self._interrupted()
        if flow.started.deadline <= attempt.host.clock.now():
            raise _RunFailure(_DEADLINE)
        attempt.watch_deadline(flow.started.deadline)
        values = Values(self.plan, run, {**self.plan.inputs, **self.request.inputs})
        self._members = self._make(attempt, self.plan, self.request, values)
        ended = {id for id, task in flow.tasks.items() if task.settled is not None}
        self._waiting = {id for id in flow.tasks if id not in ended}
        needs = {id: task.needs for id, task in self.plan.tasks.items()}
        scheduler = Scheduler(self.plan.order, needs, ended=ended, taken=self._waiting)
        fresh = True
        while True:
            if attempt.interrupted is not None:
                raise asyncio.CancelledError
            self._check_stopped(flow)
            due = self._due(fresh=fresh)
            fresh = False
            self._batch = await self._open(scheduler, values, due)
            if self._batch:
                await self._carry_out(scheduler, values)
            elif not scheduler.left:
                return await self._complete(values)
            elif (waits := await self._wait(flow)) is not None:
                return waits

    def _begin(self) -> None:
        """Record input and what the run goes by: one commit, not awaited: whatever is recorded next follows it."""
        attempt, plan, request = self.attempt, self.plan, self.request
        submission = attempt.submission
        assert submission is not None
        records: list[Record] = [] if attempt.state.tail else [ThreadCreated(submission.program)]
        sequence = attempt.state.tail + len(records) + 1
        records.append(UserInputRecorded(submission.id, submission.run, msgspec.Raw(submission.input)))
        records.append(
            WorkflowStarted(
                submission.run, submission.id, plan.name, request.plan, request.deadline(plan, submission.created_at),
                request.workspace, msgspec.Raw(canonical.encode(plan.memory.working, "initial memory")),
                msgspec.Raw(canonical.encode(request.limits(plan), "budgets")), request.lineage, request.generation,
                request.mode,
            )
        )  # fmt: skip
        id = submission.id

        def applied(tx: Transaction) -> None:
            tx.ledger.apply_input(id, sequence)

        _ = attempt.append(Boundary.INPUT, records, (applied,))

    def _check_stopped(self, flow: Flow) -> None:
        """A failed task whose failure stops the run does so also if an earlier owner recorded it."""
        for id, failure in flow.failures.items():
            if self.plan.tasks[id].failure == "stop":
                said = f"Task {id!r} failed: {failure.message}"
                raise _RunFailure(Failure(failure.kind, said[:FAILURE_MESSAGE_CHARS_MAX]))

    def _due(self, *, fresh: bool) -> list[str]:
        """Tasks that have begun and can go on now, in compiled order."""
        if not self._waiting:
            return []
        now = self.attempt.host.clock.now()
        due = [id for id in self._waiting if self._members.due(id, now, fresh=fresh)]
        return sorted(due, key=self._place.__getitem__)

    # -- a batch ------------------------------------------------------------------------------------------------------
    async def _open(self, scheduler: Scheduler, values: Values, due: list[str]) -> list[Member]:
        """The members of the next batch: what can go on, then what may begin, until it is full."""
        batch: list[Member] = []
        most = self.plan.max_concurrency
        for id in due:
            if len(batch) == most:
                break
            self._waiting.discard(id)
            batch.append(await self._members.resume(id))
        while len(batch) < most and (next_one := scheduler.next()) is not None:
            skipped = self._members.skip(next_one)
            if skipped is not None:
                self._append(Boundary.TASKS_SETTLED, [skipped], [])
                values.settled(skipped, canonical.decode(skipped.output))
                scheduler.end(next_one)
                continue
            batch.append(await self._members.begin(next_one))
        return batch

    def _append(self, boundary: Boundary, records: list[Record], ops: list[Op]) -> None:
        """Append, without waiting: the order of the log is that of the calls."""
        self._unsure.append(commit(self.attempt, boundary, records, ops))

    async def _sure(self) -> None:
        """Wait until all that was appended is durable."""
        unsure, self._unsure = self._unsure, []
        for future in unsure:
            await future

    async def _carry_out(self, scheduler: Scheduler, values: Values) -> None:
        batch = self._batch
        records = [record for member in batch for record in member.records]
        if records:
            ops = [op for member in batch for op in member.ops]
            self._append(Boundary.TASKS_STARTED, records, ops)
            for member in batch:
                member.records, member.ops = [], []
        bodies = [member for member in batch if member.body is not None]
        if any(member.durable for member in bodies):
            await self._sure()
        if bodies:
            await self._run(bodies)
        await self._close(batch, scheduler, values)
        self._batch = []
        if len(self._unsure) >= TASKS_UNCOMMITTED_MAX:
            await self._sure()
            await asyncio.sleep(0)

    async def _run(self, bodies: list[Member]) -> None:
        """Carry bodies out side by side. Each outcome is recorded at once, the last with the batch."""
        left = len(bodies)

        async def one(member: Member) -> None:
            nonlocal left
            assert member.body is not None
            acted = await member.body()
            member.records, member.ops, member.boundary = acted.records, acted.ops, acted.boundary
            left -= 1
            if left and acted.records:
                self._flush(member)
            member.outcome = acted.outcome

        if len(bodies) == 1:
            await one(bodies[0])
            return
        tasks = [asyncio.ensure_future(one(member)) for member in bodies]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                with contextlib.suppress(BaseException):
                    task.result()

    def _flush(self, member: Member) -> None:
        self._append(member.boundary, member.records, member.ops)
        member.records, member.ops = [], []

    async def _close(
        self, batch: list[Member], scheduler: Scheduler | None = None, values: Values | None = None
    ) -> None:
        """End the members of a batch in compiled order, in one commit, and let go those that wait."""
        records: list[Record] = []
        ops: list[Op] = []
        ended: list[tuple[TaskSettled, Any]] = []
        boundary = Boundary.TASKS_SETTLED
        for member in sorted(batch, key=lambda member: self._place[member.task.id]):
            records += member.records
            ops += member.ops
            member.records, member.ops = [], []
            if isinstance(member.outcome, Left):
                self._waiting.add(member.task.id)
                boundary = member.boundary if len(batch) == 1 else boundary
                continue
            closing = await self._members.close(member)
            records += closing.records
            ops += closing.ops
            if closing.settled is not None:
                ended.append((closing.settled, closing.output))
            else:
                self._waiting.add(member.task.id)
                boundary = Boundary.TASK_RETRY if len(batch) == 1 else boundary
        if records:
            self._append(boundary, records, ops)
        elif ops:
            raise AssertionError("a change of the ledger without a record")
        for settled, output in ended:
            if values is not None and scheduler is not None:
                values.settled(settled, output)
                scheduler.end(settled.task)

    # -- waiting and ending -------------------------------------------------------------------------------------------
    async def _wait(self, flow: Flow) -> Ended | None:
        """Nothing can go on now: a short timer is waited for here, anything else without a worker."""
        await self._sure()
        attempt = self.attempt
        now = attempt.host.clock.now()
        until = min((t.until for id, t in flow.tasks.items() if id in self._waiting and t.until > now), default=0)
        if self._due(fresh=False):
            return None
        if until and until - now <= TIMER_SECONDS_MAX * 1_000_000:
            progress = attempt.host.until_progress(attempt.thread)
            try:
                await asyncio.wait([progress], timeout=(until - now) / 1_000_000 + 0.001)
            finally:
                progress.cancel()
            return None
        parts = (attempt.run, *recovery.parts(attempt.state, attempt.run.id))
        if any(run.unknowns() for run in parts):
            return await attempt.park(until)
        return await attempt.suspend(until)

    async def _complete(self, values: Values) -> Ended:
        """Every task has ended: the run completes with its outputs, or fails with what failed."""
        flow = self._flow()
        await self._sure()
        if flow.failures:
            id, failure = next(iter(flow.failures.items()))
            more = f" (and {len(flow.failures) - 1} more)" if len(flow.failures) > 1 else ""
            said = f"Task {id!r} failed{more}: {failure.message}"
            return await self._fail(Failure(failure.kind, said[:FAILURE_MESSAGE_CHARS_MAX]))
        try:
            scope = Scope(values.inputs, self.plan.vars, flow.memory, values.outputs)
            output = (
                templates.parse(self.plan.outputs, "outputs").render(scope) if self.plan.outputs else values.outputs
            )
            raw = canonical.encode(output, "output")
        except (ExpressionError, Invalid) as error:
            return await self._fail(Failure("output", str(error)[:FAILURE_MESSAGE_CHARS_MAX]))
        completed = RunCompleted(self.attempt.run.id, msgspec.Raw(raw), recovery.result_digest(raw, None))
        return await self.attempt.settle("completed", completed=completed)
