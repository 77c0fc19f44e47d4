"""What a thread's records say, in one pass, and the laws that they keep among themselves. Pure.

It is judged independently of ``fold``: what a law speaks of is remembered here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from perdure import ids
from perdure.canonical import decode, digest
from perdure.errors import Invalid
from perdure.records import codec, effect, run, task, thread
from perdure.records.parts import NO_CHARGE, Charge, Usage
from perdure.rules.lifecycle import EffectClass, EffectStatus
from perdure.rules.recovery import result_digest

# What a verdict makes of the effect it is about.
_VERDICT_STATUS: dict[str, EffectStatus] = {
    "applied": EffectStatus.CONFIRMED,
    "refused": EffectStatus.REFUSED,
    "not_applied": EffectStatus.REFUSED,
    "safe_to_retry": EffectStatus.UNKNOWN,
    "cancel_run": EffectStatus.UNKNOWN,
    "compensated": EffectStatus.CONFIRMED,
}
_FREEING = ("not_applied", "safe_to_retry")
_FREEING_MODEL = (*_FREEING, "compensated")
_UNSTORED = "result"  # the failure of a call that took effect and whose result could not be stored
_AUDIT = (effect.ToolCallResolved, run.ModelCallResolved, thread.RepairAnnotated)


class Effect(msgspec.Struct):
    """One started effect, as the log tells it. ``reserved`` is what a model call is charged while it is unknown."""

    id: str
    run: str
    call: str
    step: str | None
    operation: str | None
    effect_class: str | None
    key: str
    business_key: str | None
    attempt: int
    sequence: int
    status: EffectStatus = EffectStatus.STARTED
    verdict: str | None = None
    superseded: bool = False  # another try followed without an outcome, as its class permits
    kind: str | None = None  # where the log says it: of a model call
    reserved: Charge = NO_CHARGE

    @property
    def in_doubt(self) -> bool:
        return self.status is EffectStatus.UNKNOWN and self.verdict is None

    @property
    def free(self) -> bool:
        """Whether another try may follow although nothing is promised."""
        return self.verdict in _FREEING or (self.status is EffectStatus.REFUSED and self.step is not None)


class Call(msgspec.Struct):
    operation: run.ToolOperation
    asked: effect.ToolApprovalRequested | None = None
    decision: str | None = None
    newest: Effect | None = None
    steps: dict[str, Effect] = msgspec.field(default_factory=dict)
    done: set[str] = msgspec.field(default_factory=set)  # steps with a result
    closed: bool = False

    @property
    def once(self) -> bool:
        return self.operation.effect not in _REPEATABLE and not self.operation.steps

    def effects(self) -> Iterator[Effect]:
        if self.newest is not None:
            yield self.newest
        yield from self.steps.values()


_REPEATABLE = frozenset({EffectClass.PURE, EffectClass.OBSERVE, EffectClass.IDEMPOTENT, EffectClass.KEYED})


class Run(msgspec.Struct):
    submission: str
    sequence: int
    input: msgspec.Raw
    deadline: int | None = None
    once: bool = False  # its model calls
    turn: int = 0
    batch: tuple[str, ...] = ()
    calls: dict[str, Call] = msgspec.field(default_factory=dict)
    completed: run.RunCompleted | None = None
    settled: bool = False
    doubted: bool = False  # an effect was unknown at some time: it may have been parked
    model: Effect | None = None  # the newest once model call, until a response or a definite failure ends it
    tasks: dict[str, bool] = msgspec.field(default_factory=dict)  # of a workflow: task to whether it has ended
    workflow: bool = False
    parts: list[str] = msgspec.field(default_factory=list)  # runs of agents' turns inside its tasks

    def open_calls(self) -> Iterator[str]:
        return (id for id in self.batch if not self.calls[id].closed)


class Findings:
    """The first violation of each check."""

    def __init__(self) -> None:
        self.first: dict[str, str] = {}
        self.count: dict[str, int] = {}

    def fail(self, name: str, detail: str) -> None:
        self.first.setdefault(name, detail)
        self.count[name] = self.count.get(name, 0) + 1

    def detail(self, name: str) -> str:
        more = self.count[name] - 1
        return self.first[name] + (f" (and {more} more)" if more else "")


class Trace:
    """One pass over the records, remembering only what the laws speak of."""

    def __init__(self, findings: Findings) -> None:
        self._fail = findings.fail
        self.sequence = 0
        self.program: str | None = None
        self.runs: dict[str, Run] = {}
        self.open: dict[str, Run] = {}  # runs without settlement
        self.order: list[str] = []  # submissions, as their inputs came
        self.waiting: list[tuple[str, str]] = []  # (submission, one before it that was neither settled nor ever parked)
        self.settlements: dict[str, thread.SubmissionSettled] = {}
        self.cancels: set[str] = set()
        self.effects: dict[str, Effect] = {}
        self.approvals: dict[str, tuple[effect.ToolApprovalRequested, Call]] = {}

    def take(self, record: codec.Record) -> None:
        self.sequence += 1
        if (self.sequence == 1) != isinstance(record, thread.ThreadCreated):
            self.fail("thread-created", "ThreadCreated is missing as the first record or stands elsewhere")
        _TAKE[type(record)](self, record)

    def fail(self, name: str, detail: str) -> None:
        self._fail(name, f"record {self.sequence}: {detail}")

    # -- thread -------------------------------------------------------------------------------------------------------
    def created(self, r: thread.ThreadCreated) -> None:
        self.program = r.program

    def input(self, r: thread.UserInputRecorded) -> None:
        whole = self.runs.get(ids.run_id(r.submission))
        if whole is not None and r.run in whole.parts and r.run not in self.runs:
            self.runs[r.run] = Run(r.submission, self.sequence, msgspec.Raw(b"null"))
            return
        if r.run != ids.run_id(r.submission):
            self.fail("record-identity", f"run {r.run!r} is not the run of submission {r.submission!r}")
        if r.run in self.runs:
            self.fail("input-first", f"run {r.run!r} has a second input")
            return
        if r.submission in self.settlements:
            self.fail("nothing-after-settlement", f"input of settled submission {r.submission!r}")
        self.waiting.extend((r.submission, other.submission) for other in self.open.values() if not other.doubted)
        self.order.append(r.submission)
        self.open[r.run] = self.runs[r.run] = Run(r.submission, self.sequence, r.input.copy())  # not the whole batch

    def cancel(self, r: thread.CancelRequested) -> None:
        if r.submission in self.settlements:
            self.fail("nothing-after-settlement", f"cancel of settled submission {r.submission!r}")
        self.cancels.add(r.submission)

    def repair(self, r: thread.RepairAnnotated) -> None:
        """Audit; says nothing about a run."""

    def settled(self, r: thread.SubmissionSettled) -> None:
        if r.run != ids.run_id(r.submission):
            self.fail("record-identity", f"run {r.run!r} is not the run of submission {r.submission!r}")
        if r.submission in self.settlements:
            self.fail("one-settlement", f"submission {r.submission!r} is settled a second time")
            return
        self.settlements[r.submission] = r
        if r.outcome == "cancelled" and r.submission not in self.cancels:
            self.fail("cancel-requested", f"submission {r.submission!r} is cancelled and nobody asked for it")
        owner = self.open.pop(r.run, None)
        parts = [] if owner is None else [self.runs[id] for id in owner.parts if id in self.runs]
        for one in parts if owner is None else (owner, *parts):
            one.settled = True
        self._end_known(r, owner, parts)
        self._output(r, owner)
        if owner is not None:
            owner.completed = None  # compared; its output would be kept for nothing

    def _end_known(self, r: thread.SubmissionSettled, owner: Run | None, parts: list[Run]) -> None:
        doubt = set()
        for one in () if owner is None else (owner, *parts):
            doubt |= self._ends(one)
        if owner is not None and not all(owner.tasks.values()):
            left = [id for id, ended in owner.tasks.items() if not ended]
            self.fail("tasks-ended", f"tasks {left} began and have no end")
        if set(r.unknown) != doubt or len(r.unknown) != len(doubt):
            self.fail("unknown-listed", f"the settlement lists {list(r.unknown)}; unknown are {sorted(doubt)}")

    def _ends(self, owner: Run) -> set[str]:
        """Effects of a run that are unknown at its end; what is neither known nor unknown is a violation."""
        doubt = set()
        for id, call in owner.calls.items():
            if call.newest is None and not call.closed and not owner.tasks.get(id):
                self.fail("ends-known", f"call {id} never started and is not withdrawn")
            for found in call.effects():
                if found.in_doubt:
                    doubt.add(found.id)
                elif found.status is EffectStatus.STARTED and not found.superseded:
                    self.fail("ends-known", f"effect {found.id} of call {id} has neither an outcome nor is it unknown")
        model = owner.model
        if model is not None and model.in_doubt:
            doubt.add(model.id)
        elif model is not None and model.status is EffectStatus.STARTED:
            self.fail("ends-known", f"model call {model.id} has neither an outcome nor is it unknown")
        return doubt

    def _output(self, r: thread.SubmissionSettled, owner: Run | None) -> None:
        completed = None if owner is None else owner.completed
        if completed is None:
            if r.outcome == "completed":
                self.fail("output-agrees", f"submission {r.submission!r} is completed without a recorded output")
        elif r.outcome != "completed":
            self.fail("output-agrees", f"submission {r.submission!r} has a recorded output and is {r.outcome}")
        elif (r.output_digest, r.disposition) != (completed.result_digest, completed.disposition):
            self.fail("output-agrees", f"submission {r.submission!r} does not repeat its recorded output")

    # -- run ----------------------------------------------------------------------------------------------------------
    def _run(self, r: Any) -> Run | None:
        owner = self.runs.get(r.run)
        if owner is None:
            self.fail("input-first", f"{type(r).__name__} of run {r.run!r}, whose input is not recorded")
        elif owner.settled and not isinstance(r, _AUDIT):
            self.fail("nothing-after-settlement", f"{type(r).__name__} of settled run {r.run!r}")
            return None
        return owner

    def started(self, r: run.RunStarted) -> None:
        owner = self._run(r)
        if owner is None:
            return
        if owner.deadline is not None and owner.deadline != r.deadline:
            self.fail("deadline-constant", f"run {r.run!r} moves its deadline from {owner.deadline} to {r.deadline}")
        owner.deadline = r.deadline
        owner.once = r.limits.model_calls == "once"

    def about_run(self, r: Any) -> None:
        self._run(r)

    # -- model calls --------------------------------------------------------------------------------------------------
    def _next_turn(self, r: Any) -> Run | None:
        """The run of a record about the model call that comes next."""
        owner = self._run(r)
        if owner is not None and r.turn != owner.turn + 1:
            self.fail("turn-order", f"{type(r).__name__} of turn {r.turn} of run {r.run!r} follows turn {owner.turn}")
        return owner

    def model_interrupted(self, r: run.ModelResponseInterrupted) -> None:
        self._next_turn(r)

    def model_prepared(self, r: run.ModelCallPrepared) -> None:
        owner = self._next_turn(r)
        if owner is None or not r.effect:
            return
        if missing := list(owner.open_calls()):
            self.fail("batch-complete", f"turn {r.turn} of run {r.run!r} is asked for while {missing} have no result")
        before, place = owner.model, run.model_place(r.turn)
        if before is not None:
            if before.verdict not in _FREEING_MODEL:
                said = before.verdict or before.status
                self.fail("one-model-call", f"{place} of run {r.run!r} starts again; its try before is {said}")
            if before.key != r.key:
                self.fail("key-stable", f"{place} changes its key from {before.key} to {r.key}")
        owner.model = self.effects[r.effect] = Effect(
            r.effect, r.run, place, None, r.model, EffectClass.ONCE, r.key, None, r.attempt, self.sequence,
            kind="model", reserved=r.reserved,
        )  # fmt: skip

    def model_failed(self, r: run.ModelCallFailed) -> None:
        owner = self._next_turn(r)
        if owner is None:
            return
        if r.charged != NO_CHARGE and r.dispatched != "unknown":
            self.fail("model-charges", f"a try of turn {r.turn} is charged; it was dispatched: {r.dispatched}")
        self._model_ends(owner, r, EffectStatus.REFUSED)
        if r.effect and r.dispatched == "unknown":
            self.fail("model-outcome", f"model call {r.effect!r} is refused and may have been served")

    def _model_ends(self, owner: Run, r: Any, status: EffectStatus) -> None:
        """A response or a failure belongs to the once call in flight, or there is none."""
        model = owner.model
        ends = model is not None and model.status is EffectStatus.STARTED
        answers = model is not None and model.verdict == "applied" and status is EffectStatus.CONFIRMED
        named = model.id if model is not None and (ends or answers) else ""
        if r.effect != named:
            self.fail("model-outcome", f"{type(r).__name__} names model call {r.effect!r}; in flight is {named!r}")
        if model is None:
            if owner.once and status is EffectStatus.CONFIRMED:
                self.fail("model-outcome", f"turn {r.turn} of run {r.run!r} has a response and no started record")
            return
        if status is EffectStatus.CONFIRMED and not ends and not answers:
            said = model.verdict or model.status
            self.fail("model-outcome", f"turn {r.turn} has a response although its model call {model.id!r} is {said}")
        if ends:
            model.status = status
        if ends or status is EffectStatus.CONFIRMED:
            owner.model = None

    def model_unknown(self, r: run.ModelCallUnknown) -> None:
        owner = self._run(r)
        if owner is None:
            return
        model = owner.model
        if model is None or (model.id, model.call) != (r.effect, r.call) or model.status is not EffectStatus.STARTED:
            self.fail("unknown-of-started", f"model call {r.effect!r} of turn {r.turn} is not started without outcome")
            return
        if r.charged != model.reserved:
            self.fail("model-charges", f"model call {r.effect!r} is charged otherwise than was reserved for it")
        owner.doubted = True
        model.status = EffectStatus.UNKNOWN

    def model_resolved(self, r: run.ModelCallResolved) -> None:
        owner = self._run(r)
        if owner is None:
            return
        model = owner.model
        if model is None or model.id != r.effect or not model.in_doubt:
            self.fail("verdict-of-unknown", f"{r.verdict} on model call {r.effect!r}, which is not unknown")
            return
        model.status, model.verdict = _VERDICT_STATUS[r.verdict], r.verdict

    def response(self, r: run.ModelResponseRecorded) -> None:
        owner = self._run(r)
        if owner is None:
            return
        if r.turn != owner.turn + 1:
            self.fail("turn-order", f"turn {r.turn} of run {r.run!r} follows turn {owner.turn}")
        if missing := list(owner.open_calls()):
            self.fail("batch-complete", f"turn {r.turn} of run {r.run!r} comes while {missing} have no result")
        for position, operation in enumerate(r.operations):
            if operation.call != ids.call_id(r.turn, position):
                self.fail("record-identity", f"call {operation.call!r} stands at {r.turn}.{position}")
            owner.calls[operation.call] = Call(operation)
        owner.turn, owner.batch = r.turn, tuple(o.call for o in r.operations)
        self._charged(owner, r)
        self._model_ends(owner, r, EffectStatus.CONFIRMED)

    def _charged(self, owner: Run, r: run.ModelResponseRecorded) -> None:
        """A response costs what it used; a reservation stands in only where nobody told that, and only once."""
        if (r.cost is None) != (not r.prices):
            self.fail("model-charges", f"turn {r.turn} costs {r.cost} by the prices {r.prices!r}")
        if r.charged == NO_CHARGE:
            return
        if r.usage != _NO_USAGE:
            self.fail("model-charges", f"turn {r.turn} is charged its reservation beside the usage that was told")
        if owner.model is not None and owner.model.status is not EffectStatus.STARTED:
            self.fail("model-charges", f"turn {r.turn} is charged a second time; its unknown call is charged already")

    def completed(self, r: run.RunCompleted) -> None:
        owner = self._run(r)
        if owner is None:
            return
        try:
            covered = result_digest(r.output, r.disposition)
        except Invalid as error:
            covered = f"none ({error.message})"
        if r.result_digest != covered:
            self.fail("output-agrees", f"the result digest of run {r.run!r} is not that of its output")
        owner.completed = r

    # -- calls --------------------------------------------------------------------------------------------------------
    def _call(self, r: Any, *, opens: bool = False) -> tuple[Run, Call] | None:
        """The call a record is about. ``opens``: the record may not come once the call is closed."""
        owner = self._run(r)
        if owner is None:
            return None
        call = owner.calls.get(r.call)
        if call is None:
            self.fail("calls-declared", f"{type(r).__name__} of call {r.call!r}, which no response declared")
            return None
        if opens and call.closed:
            self.fail("calls-declared", f"{type(r).__name__} of call {r.call!r}, which has a result")
            return None
        return owner, call

    def asked(self, r: effect.ToolApprovalRequested) -> None:
        if found := self._call(r, opens=True):
            _, call = found
            if call.newest is not None:
                self.fail("decided-before-prepared", f"call {r.call} is asked about after it was started")
            call.asked = r
            self.approvals[r.approval] = (r, call)

    def decided(self, r: effect.ToolApprovalDecided) -> None:
        if found := self._call(r, opens=True):
            _, call = found
            if call.asked is None or call.asked.approval != r.approval or call.decision is not None:
                self.fail("decided-before-prepared", f"approval {r.approval!r} decides nothing that is asked")
            call.decision = r.decision

    def prepared(self, r: effect.ToolCallPrepared) -> None:
        if not (found := self._call(r, opens=True)):
            return
        _, call = found
        if call.asked is not None and call.decision != "approved":
            self.fail("decided-before-prepared", f"call {r.call} starts; its approval is {call.decision or 'pending'}")
        call.newest = self._start(
            call.newest,
            Effect(
                r.effect, r.run, r.call, None, r.tool, r.effect_class, r.key, r.business_key, r.attempt, self.sequence
            ),
            once=call.once and effect.REMOTE_NOTE not in call.done,
        )

    def _start(self, before: Effect | None, new: Effect, *, once: bool) -> Effect:
        where = new.call if new.step is None else f"{new.call} step {new.step!r}"
        if before is not None:
            if before.key != new.key:
                self.fail("key-stable", f"{where} changes its key from {before.key} to {new.key}")
            if (once or before.in_doubt or before.verdict is not None) and not before.free:
                self.fail("once-dispatch", f"{where} is dispatched again; its try before is {before.status}")
            before.superseded = before.status is EffectStatus.STARTED
        self.effects[new.id] = new
        return new

    def step_prepared(self, r: effect.ToolStepPrepared) -> None:
        if found := self._step_of(r):
            _, call = found
            new = Effect(r.effect, r.run, r.call, r.step, None, None, r.key, None, r.attempt, self.sequence)
            call.steps[r.step] = self._start(call.steps.get(r.step), new, once=True)

    def _step_of(self, r: Any) -> tuple[Run, Call] | None:
        found = self._call(r, opens=True)
        if found and found[1].newest is None:
            self.fail("steps-inside", f"{type(r).__name__} {r.step!r} of call {r.call}, which was not started")
        return found

    def step_settled(self, r: effect.ToolStepSettled) -> None:
        if not (found := self._step_of(r)):
            return
        _, call = found
        if r.step in call.done:
            self.fail("one-step-result", f"step {r.step!r} of call {r.call} has a second result")
            return
        call.done.add(r.step)
        self._outcome(call.steps.get(r.step), EffectStatus.CONFIRMED)

    def step_refused(self, r: effect.ToolStepRefused) -> None:
        if found := self._call(r, opens=True):
            _, call = found
            if r.step in call.done:
                self.fail("one-step-result", f"step {r.step!r} of call {r.call} has a result and is refused")
                return
            self._outcome(call.steps.get(r.step), EffectStatus.REFUSED)

    @staticmethod
    def _outcome(found: Effect | None, status: EffectStatus) -> None:
        if found is not None and (found.status is EffectStatus.STARTED or found.in_doubt):
            found.status = status

    def _close(self, r: Any, status: EffectStatus | None) -> None:
        if not (found := self._call(r)):
            return
        _, call = found
        if call.closed:
            self.fail("one-result", f"call {r.call} of run {r.run!r} has a second result")
            return
        call.closed = True
        if status is not None:
            self._outcome(call.newest, status)

    def call_settled(self, r: effect.ToolCallSettled) -> None:
        took_place = r.failure is None or r.failure.kind == _UNSTORED
        self._close(r, EffectStatus.CONFIRMED if took_place else EffectStatus.REFUSED)

    def call_withdrawn(self, r: effect.ToolCallWithdrawn) -> None:
        self._close(r, None)

    def unknown(self, r: effect.ToolCallUnknown) -> None:
        if not (found := self._call(r, opens=True)):
            return
        owner, call = found
        about = call.newest if r.step is None else call.steps.get(r.step)
        if about is None or about.id != r.effect or about.status not in _DOUBTABLE:
            self.fail("unknown-of-started", f"effect {r.effect!r} of call {r.call} is not started without outcome")
            return
        owner.doubted = True
        about.status, about.verdict = EffectStatus.UNKNOWN, None

    def resolved(self, r: effect.ToolCallResolved) -> None:
        if not (found := self._call(r)):
            return
        _, call = found
        about = call.newest if r.step is None else call.steps.get(r.step)
        if about is None or about.id != r.effect or not about.in_doubt:
            self.fail(
                "verdict-of-unknown", f"{r.verdict} on effect {r.effect!r} of call {r.call}, which is not unknown"
            )
            return
        about.status, about.verdict = _VERDICT_STATUS[r.verdict], r.verdict

    # -- tasks of a workflow ------------------------------------------------------------------------------------------
    def workflow_started(self, r: task.WorkflowStarted) -> None:
        owner = self._run(r)
        if owner is None:
            return
        if owner.workflow:
            self.fail("deadline-constant", f"run {r.run!r} starts a second time")
        owner.workflow, owner.deadline = True, r.deadline

    def _workflow(self, r: Any) -> Run | None:
        owner = self._run(r)
        if owner is not None and not owner.workflow:
            self.fail("tasks-once", f"{type(r).__name__} of run {r.run!r}, which is no workflow")
            return None
        return owner

    def task_started(self, r: task.TaskStarted) -> None:
        owner = self._workflow(r)
        if owner is None:
            return
        if owner.tasks.get(r.task):
            self.fail("tasks-once", f"task {r.task!r} begins again after its end")
        owner.tasks[r.task] = False
        if r.agent:
            owner.parts.append(r.agent)
            return
        earlier = owner.calls.get(r.task)
        call = Call(run.ToolOperation(r.task, r.operation, r.effect_class, contract=r.definition))
        if earlier is not None and earlier.newest is not None:
            if earlier.once and not earlier.closed:
                self.fail("once-dispatch", f"task {r.task!r} begins again; its effect is {earlier.newest.status}")
            earlier.newest.superseded |= earlier.newest.status is EffectStatus.STARTED
        owner.calls[r.task] = call

    def about_task(self, r: Any) -> None:
        owner = self._workflow(r)
        if owner is not None and owner.tasks.get(r.task, True):
            self.fail("tasks-once", f"{type(r).__name__} of task {r.task!r}, which does not run")

    def task_retry(self, r: task.TaskRetryScheduled) -> None:
        self.about_task(r)
        owner = self.runs.get(r.run)
        call = None if owner is None else owner.calls.get(r.task)
        if call is not None and call.newest is not None and call.newest.status is EffectStatus.STARTED:
            call.newest.superseded = True  # its class can bear another try

    def task_settled(self, r: task.TaskSettled) -> None:
        owner = self._workflow(r)
        if owner is None:
            return
        if owner.tasks.get(r.task):
            self.fail("tasks-once", f"task {r.task!r} ends a second time")
        owner.tasks[r.task] = True
        for name, raw, found in (("output", r.output, r.output_digest), ("delta", r.delta, r.delta_digest)):
            if found and found != digest(decode(raw)):
                self.fail("task-digests", f"the {name} of task {r.task!r} is not that of its digest")
            if raw and not found and name == "delta":
                self.fail("task-digests", f"the delta of task {r.task!r} has no digest")

    def budget(self, r: Any) -> None:
        self._workflow(r)


_NO_USAGE = Usage()

# safe_to_retry on changed code falls back to unknown: its effect was resolved and is doubted again.
_DOUBTABLE = (EffectStatus.STARTED, EffectStatus.UNKNOWN)

_TAKE: dict[type, Callable[[Trace, Any], None]] = {
    thread.ThreadCreated: Trace.created,
    thread.UserInputRecorded: Trace.input,
    thread.CancelRequested: Trace.cancel,
    thread.RepairAnnotated: Trace.repair,
    thread.SubmissionSettled: Trace.settled,
    run.RunStarted: Trace.started,
    run.ModelCallPrepared: Trace.model_prepared,
    run.ModelCallFailed: Trace.model_failed,
    run.ModelCallUnknown: Trace.model_unknown,
    run.ModelCallResolved: Trace.model_resolved,
    run.ModelResponseRecorded: Trace.response,
    run.ModelResponseInterrupted: Trace.model_interrupted,
    run.OutputRejected: Trace.about_run,
    run.RunCompleted: Trace.completed,
    effect.ToolApprovalRequested: Trace.asked,
    effect.ToolApprovalDecided: Trace.decided,
    effect.ToolCallPrepared: Trace.prepared,
    effect.ToolStepPrepared: Trace.step_prepared,
    effect.ToolStepSettled: Trace.step_settled,
    effect.ToolStepRefused: Trace.step_refused,
    effect.ToolCallSettled: Trace.call_settled,
    effect.ToolCallWithdrawn: Trace.call_withdrawn,
    effect.ToolCallUnknown: Trace.unknown,
    effect.ToolCallResolved: Trace.resolved,
    task.WorkflowStarted: Trace.workflow_started,
    task.TaskStarted: Trace.task_started,
    task.TaskRetryScheduled: Trace.task_retry,
    task.TaskWaiting: Trace.about_task,
    task.TaskSettled: Trace.task_settled,
    task.BudgetDenied: Trace.budget,
    task.BudgetRaised: Trace.budget,
}
