"""Fold a thread's records into its state. Folding runs no tool and no model; anything it builds can be built again.

``apply`` changes the state it is given, because an attempt goes on folding what it appends; nothing else about it is
impure. A record that cannot follow what came before is ``Corrupt``: the log is not ours to interpret freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import msgspec

from perdure.errors import Corrupt, Invalid
from perdure.records import codec, effect, run, task, thread
from perdure.records.blobs import NONE, Blobs
from perdure.records.parts import NO_CHARGE, CallPart, Charge, Failure, Usage
from perdure.rules import flow

Unknown = effect.ToolCallUnknown | run.ModelCallUnknown
"""An open unknown of a run: both kinds have ``effect``, ``call``, ``tool``, ``step`` and ``reason``."""


class Step(msgspec.Struct):
    """One named step of a call."""

    result: msgspec.Raw | None = None
    prepared: effect.ToolStepPrepared | None = None  # a `once` step that has no outcome yet
    tries: int = 0
    unknown: effect.ToolCallUnknown | None = None
    verdict: effect.ToolCallResolved | None = None  # the newest verdict on it
    refusal: Failure | None = None  # a `once` step that definitely did not take place


_NO_STEPS: Mapping[str, Step] = MappingProxyType({})  # shared: most calls have none, and a dict each costs the fold


def _no_steps() -> Mapping[str, Step]:
    return _NO_STEPS


class Call(msgspec.Struct):
    """One tool call of a run, with everything that happened to it. ``turn`` 0: the effect of a workflow's task."""

    id: str
    turn: int
    position: int
    part: CallPart
    operation: run.ToolOperation
    approval: effect.ToolApprovalRequested | None = None
    decision: effect.ToolApprovalDecided | None = None
    prepared: effect.ToolCallPrepared | None = None  # the newest try
    tries: int = 0
    tries_at_progress: int = 0  # tries when its newest step was recorded
    unknown: effect.ToolCallUnknown | None = None  # open unknown of the call itself
    verdict: effect.ToolCallResolved | None = None  # the newest verdict on it
    steps: Mapping[str, Step] = msgspec.field(default_factory=_no_steps)
    result: msgspec.Raw | None = None
    failure: Failure | None = None
    closed: bool = False
    withdrawn: bool = False

    @property
    def in_flight(self) -> bool:
        """Started, and neither closed nor unknown nor freed by a verdict for another try."""
        return self.prepared is not None and not self.closed and self.unknown is None and self.verdict is None

    def unknowns(self) -> Iterator[effect.ToolCallUnknown]:
        """Open unknowns: of the call and of its steps."""
        if self.unknown is not None:
            yield self.unknown
        for step in self.steps.values():
            if step.unknown is not None:
                yield step.unknown


class Turn(msgspec.Struct):
    """One model response and its batch of calls."""

    number: int
    response: run.ModelResponseRecorded
    sequence: int  # of the response
    calls: list[Call] = msgspec.field(default_factory=list)
    rejected: Failure | None = None  # the output did not decode
    unclosed: int = 0  # calls without a result

    @property
    def open(self) -> bool:
        """Whether a call of the batch has no result yet."""
        return self.unclosed > 0


class Run(msgspec.Struct):
    """One run, as far as its records say."""

    id: str
    submission: str
    input: msgspec.Raw
    input_sequence: int
    started: run.RunStarted | None = None
    turns: list[Turn] = msgspec.field(default_factory=list)
    calls: dict[str, Call] = msgspec.field(default_factory=dict)
    usage: Usage = msgspec.field(default_factory=Usage)
    cost: int = 0  # micro-USD of responses that had a price
    unpriced: int = 0  # responses and charges that had none
    charged: Charge = msgspec.field(default_factory=Charge)  # reservations of calls that may have been served
    model_tries: int = 0
    model_failures: int = 0  # tries that gave no response
    turn_tries: int = 0  # of the turn that comes next, whatever became of them
    turn_failures: int = 0  # those of them that gave no response though nobody interrupted them
    continuation_lost: bool = False  # the provider refused what a continuation named; newer responses have their own
    model_prepared: run.ModelCallPrepared | None = None  # a `once` model call that has no outcome yet
    model_unknown: run.ModelCallUnknown | None = None
    model_verdict: run.ModelCallResolved | None = None  # on the newest unknown, until a response follows
    tool_calls: int = 0
    failure_streak: int = 0
    output_rejections: int = 0
    cancel: thread.CancelRequested | None = None
    completed: run.RunCompleted | None = None
    settled: thread.SubmissionSettled | None = None
    flow: flow.Flow | None = None  # of a workflow; its calls are the effects of its tasks, of turn 0

    @property
    def deadline(self) -> int | None:
        """When it must have ended, microseconds since 1970; None before it began."""
        began = self.started or (self.flow.started if self.flow is not None else None)
        return None if began is None else began.deadline

    def open_calls(self) -> list[Call]:
        """The calls that may still be open: those of the newest turn, or the effects of a workflow's tasks."""
        if self.flow is not None:
            return [call for call in self.calls.values() if not call.closed]
        return self.turns[-1].calls if self.turns else []

    def open_turn(self) -> Turn | None:
        """The newest turn if its batch is incomplete."""
        if self.turns and self.turns[-1].open:
            return self.turns[-1]
        return None

    def unknowns(self) -> list[Unknown]:
        """Every open unknown, in order of the calls; that of a model call is the last."""
        found: list[Unknown] = [u for call in self.calls.values() for u in call.unknowns()]
        if self.model_unknown is not None:
            found.append(self.model_unknown)
        return found

    @property
    def tokens(self) -> int:
        """Tokens that count against the budget: real usage, and reservations of calls that may have been served."""
        return self.usage.input + self.usage.output + self.charged.input + self.charged.output

    @property
    def spent(self) -> int:
        """Micro-USD that count against the budget."""
        return self.cost + (self.charged.cost or 0)


class Thread(msgspec.Struct):
    """A thread's state at ``tail``."""

    id: str
    tail: int = 0
    digest: bytes = codec.EMPTY_TAIL
    epoch: int = 0
    program: str | None = None
    runs: dict[str, Run] = msgspec.field(default_factory=dict)
    settlements: dict[str, thread.SubmissionSettled] = msgspec.field(default_factory=dict)
    cancels: dict[str, thread.CancelRequested] = msgspec.field(default_factory=dict)
    repairs: list[thread.RepairAnnotated] = msgspec.field(default_factory=list)


def _fail(state: Thread, record: object, why: str) -> Corrupt:
    return Corrupt(
        f"Thread {state.id!r} record {state.tail + 1} ({type(record).__name__}) {why}.",
        help="Run `perdure verify` and restore the database from a backup.",
    )


def _run(state: Thread, record: Any) -> Run:
    found = state.runs.get(record.run)
    if found is None:
        raise _fail(state, record, f"names run {record.run!r}, which has no input")
    return found


def _call(state: Thread, record: Any) -> tuple[Run, Call]:
    owner = _run(state, record)
    found = owner.calls.get(record.call)
    if found is None:
        raise _fail(state, record, f"names call {record.call!r}, which no response declared")
    return owner, found


def _thread_created(state: Thread, record: thread.ThreadCreated) -> None:
    if state.tail != 0:
        raise _fail(state, record, "is not the first record")
    state.program = record.program


def _input(state: Thread, record: thread.UserInputRecorded) -> None:
    if record.run in state.runs:
        raise _fail(state, record, "records the same input twice")
    owner = Run(record.run, record.submission, record.input, state.tail + 1)
    owner.cancel = state.cancels.get(record.submission)
    state.runs[record.run] = owner


def _started(state: Thread, record: run.RunStarted) -> None:
    owner = _run(state, record)
    if owner.started is not None:
        raise _fail(state, record, "starts a run twice")
    owner.started = record


def _model_prepared(state: Thread, record: run.ModelCallPrepared) -> None:
    owner = _run(state, record)
    if owner.model_prepared is not None or owner.model_unknown is not None:
        raise _fail(state, record, "starts a model call whose try before has no outcome")
    owner.model_prepared = record
    owner.model_verdict = None


def _charge(owner: Run, charge: Charge, sign: int = 1) -> None:
    """Add a reservation to what a run is charged, or take it off."""
    if charge == NO_CHARGE:
        return
    total = owner.charged
    cost = (total.cost or 0) + sign * (charge.cost or 0)
    owner.charged = Charge(total.input + sign * charge.input, total.output + sign * charge.output, cost or None)
    if charge.cost is None:
        owner.unpriced += sign


def _model_failed(state: Thread, record: run.ModelCallFailed) -> None:
    owner = _run(state, record)
    if record.turn != len(owner.turns) + 1:
        raise _fail(state, record, f"is about turn {record.turn} after turn {len(owner.turns)}")
    owner.model_prepared = None
    owner.model_tries += 1
    owner.turn_tries += 1
    if record.failure.kind != "cancelled":
        owner.model_failures += 1
        owner.turn_failures += 1
    owner.continuation_lost = owner.continuation_lost or record.failure.kind == "model.continuation"
    _charge(owner, record.charged)


def _model_unknown(state: Thread, record: run.ModelCallUnknown) -> None:
    owner = _run(state, record)
    if owner.model_prepared is None or owner.model_prepared.effect != record.effect:
        raise _fail(state, record, "doubts a model call that was not started")
    owner.model_prepared = None
    owner.model_unknown = record
    owner.model_tries += 1
    owner.turn_tries += 1
    _charge(owner, record.charged)


def _model_resolved(state: Thread, record: run.ModelCallResolved) -> None:
    owner = _run(state, record)
    unknown = owner.model_unknown
    if unknown is None or unknown.effect != record.effect:
        raise _fail(state, record, "resolves a model call that is not unknown")
    owner.model_unknown = None
    owner.model_verdict = record
    if record.verdict in ("not_applied", "refused"):  # nothing was served: nothing is charged
        _charge(owner, unknown.charged, -1)


def _response(state: Thread, record: run.ModelResponseRecorded) -> None:
    owner = _run(state, record)
    turns = owner.turns
    if record.turn != len(turns) + 1 or (turns and turns[-1].unclosed):
        raise _fail(state, record, f"is turn {record.turn} after turn {len(owner.turns)}")
    turn = Turn(record.turn, record, state.tail + 1)
    if record.operations:
        parts = [part for part in record.parts if isinstance(part, CallPart)]
        if len(parts) != len(record.operations):
            raise _fail(state, record, "does not declare one operation for each call")
        for position, (part, operation) in enumerate(zip(parts, record.operations, strict=True)):
            call = Call(operation.call, record.turn, position, part, operation)
            turn.calls.append(call)
            owner.calls[call.id] = call
        turn.unclosed = len(parts)
        owner.tool_calls += len(parts)
    turns.append(turn)
    owner.model_tries += record.tries
    owner.model_prepared = owner.model_verdict = None
    owner.turn_tries = owner.turn_failures = 0
    owner.continuation_lost = False
    _charge(owner, record.charged)
    if record.cost is not None:
        owner.cost += record.cost
    elif record.usage != _NO_USAGE:
        owner.unpriced += 1
    used = record.usage
    if used.input or used.output:
        total = owner.usage
        owner.usage = Usage(
            total.input + used.input,
            total.output + used.output,
            total.cache_read + used.cache_read,
            total.cache_write + used.cache_write,
            total.reasoning + used.reasoning,
        )


_NO_USAGE = Usage()


def _interrupted(state: Thread, record: run.ModelResponseInterrupted) -> None:
    owner = _run(state, record)
    owner.model_tries += 1
    owner.turn_tries += 1
    _charge(owner, record.charged)


def _output_rejected(state: Thread, record: run.OutputRejected) -> None:
    owner = _run(state, record)
    if not owner.turns or owner.turns[-1].number != record.turn:
        raise _fail(state, record, "is not about the newest turn")
    owner.turns[-1].rejected = record.failure
    owner.output_rejections += 1


def _completed(state: Thread, record: run.RunCompleted) -> None:
    owner = _run(state, record)
    if owner.completed is not None:
        raise _fail(state, record, "completes a run twice")
    owner.completed = record


def _approval_requested(state: Thread, record: effect.ToolApprovalRequested) -> None:
    _, call = _call(state, record)
    if call.prepared is not None or call.closed:
        raise _fail(state, record, "asks for a call that was already dispatched")
    call.approval = record


def _approval_decided(state: Thread, record: effect.ToolApprovalDecided) -> None:
    _, call = _call(state, record)
    if call.approval is None or call.approval.approval != record.approval or call.decision is not None:
        raise _fail(state, record, "decides nothing that was asked")
    call.decision = record


def _prepared(state: Thread, record: effect.ToolCallPrepared) -> None:
    _, call = _call(state, record)
    if call.closed or call.unknown is not None or record.attempt != call.tries + 1:
        raise _fail(state, record, "starts a call that cannot start")
    call.prepared = record
    call.tries = record.attempt
    call.verdict = None


def _step(call: Call, name: str) -> Step:
    found = call.steps.get(name)
    if found is None:
        if call.steps is _NO_STEPS:
            call.steps = {}
        found = cast("dict[str, Step]", call.steps)[name] = Step()
    return found


def _step_prepared(state: Thread, record: effect.ToolStepPrepared) -> None:
    _, call = _call(state, record)
    step = _step(call, record.step)
    if call.prepared is None or call.closed or step.result is not None:
        raise _fail(state, record, "starts a step that cannot start")
    if step.unknown is not None or step.prepared is not None:
        raise _fail(state, record, "starts a step whose try before has no outcome")
    if record.attempt != step.tries + 1:
        raise _fail(state, record, f"is try {record.attempt} of a step that was tried {step.tries} times")
    step.prepared = record
    step.tries = record.attempt
    step.verdict = None


def _step_settled(state: Thread, record: effect.ToolStepSettled) -> None:
    _, call = _call(state, record)
    step = _step(call, record.step)
    if call.prepared is None or call.closed or step.result is not None:
        raise _fail(state, record, "records a step twice, or outside a started call")
    step.result = record.result
    step.prepared = None
    step.unknown = None
    call.tries_at_progress = call.tries


def _step_refused(state: Thread, record: effect.ToolStepRefused) -> None:
    _, call = _call(state, record)
    step = _step(call, record.step)
    if call.closed or step.result is not None or (step.prepared is None and step.unknown is None and not step.tries):
        raise _fail(state, record, "refuses a step that was not started")
    step.prepared = None
    step.unknown = None
    step.refusal = record.failure


def _close(owner: Run, call: Call, failure: Failure | None) -> None:
    call.closed = True
    if call.turn:
        owner.turns[call.turn - 1].unclosed -= 1
    call.failure = failure
    call.unknown = None
    if failure is None:
        owner.failure_streak = 0
    elif failure.kind != "policy.tool_calls":  # not the call's fault
        owner.failure_streak += 1


def _call_settled(state: Thread, record: effect.ToolCallSettled) -> None:
    owner, call = _call(state, record)
    if call.closed:
        raise _fail(state, record, "settles a call twice")
    call.result = record.result
    _close(owner, call, record.failure)


def _call_withdrawn(state: Thread, record: effect.ToolCallWithdrawn) -> None:
    owner, call = _call(state, record)
    if call.closed:
        raise _fail(state, record, "withdraws a call that has a result")
    call.withdrawn = True
    _close(owner, call, record.failure)


def _call_unknown(state: Thread, record: effect.ToolCallUnknown) -> None:
    _, call = _call(state, record)
    if call.closed:
        raise _fail(state, record, "doubts a call that has a result")
    if record.step is not None:
        step = _step(call, record.step)
        if step.result is not None:
            raise _fail(state, record, "doubts a step that has a result")
        step.unknown, step.prepared = record, None
        step.verdict = None
    else:
        call.unknown = record
        call.verdict = None


def _call_resolved(state: Thread, record: effect.ToolCallResolved) -> None:
    _, call = _call(state, record)
    if record.step is not None:
        step = _step(call, record.step)
        if step.unknown is None:
            raise _fail(state, record, "resolves a step that is not unknown")
        step.unknown = None
        step.verdict = record
    elif call.unknown is None:
        raise _fail(state, record, "resolves a call that is not unknown")
    else:
        call.unknown = None
        call.verdict = record


def _cancel(state: Thread, record: thread.CancelRequested) -> None:
    state.cancels[record.submission] = record
    for owner in state.runs.values():
        if owner.submission == record.submission:
            owner.cancel = record


def _settled(state: Thread, record: thread.SubmissionSettled) -> None:
    if record.submission in state.settlements:
        raise _fail(state, record, f"settles submission {record.submission!r} twice")
    state.settlements[record.submission] = record
    owner = state.runs.get(record.run)
    if owner is None:
        return
    owner.settled = record
    for agent in owner.flow.agents if owner.flow is not None else ():
        if agent in state.runs:
            state.runs[agent].settled = record


def _flow(state: Thread, record: Any) -> tuple[Run, flow.Flow]:
    owner = _run(state, record)
    if owner.flow is None:
        raise _fail(state, record, "is about a run that is no workflow")
    return owner, owner.flow


def _workflow_started(state: Thread, record: task.WorkflowStarted) -> None:
    owner = _run(state, record)
    if owner.flow is not None or owner.started is not None:
        raise _fail(state, record, "starts a run twice")
    try:
        owner.flow = flow.begin(record)
    except (Invalid, msgspec.MsgspecError) as error:
        raise _fail(state, record, f"cannot be read: {error}") from error


def _task_started(state: Thread, record: task.TaskStarted) -> None:
    owner, found = _flow(state, record)
    if wrong := flow.start(found, record):
        raise _fail(state, record, wrong)
    if record.agent:
        return
    earlier = owner.calls.get(record.task)
    operation = run.ToolOperation(record.task, record.operation, record.effect_class, contract=record.definition)
    call = Call(record.task, 0, 0, CallPart(record.operation, ""), operation)
    call.tries = call.tries_at_progress = earlier.tries if earlier is not None else 0
    owner.calls[record.task] = call


def _of_task(apply_to: Callable[[flow.Flow, Any], str | None]) -> Callable[[Thread, Any], None]:
    def handler(state: Thread, record: Any) -> None:
        if wrong := apply_to(_flow(state, record)[1], record):
            raise _fail(state, record, wrong)

    return handler


def _budget_denied(state: Thread, record: task.BudgetDenied) -> None:
    _flow(state, record)[1].denied = record


def _budget_raised(state: Thread, record: task.BudgetRaised) -> None:
    found = _flow(state, record)[1]
    found.budgets = {**found.budgets, **flow.limits(record)}
    found.denied = None


def _repair(state: Thread, record: thread.RepairAnnotated) -> None:
    state.repairs.append(record)


_APPLY: dict[type, Callable[[Thread, Any], None]] = {
    thread.ThreadCreated: _thread_created,
    thread.UserInputRecorded: _input,
    thread.CancelRequested: _cancel,
    thread.SubmissionSettled: _settled,
    thread.RepairAnnotated: _repair,
    run.RunStarted: _started,
    run.ModelCallPrepared: _model_prepared,
    run.ModelResponseRecorded: _response,
    run.ModelResponseInterrupted: _interrupted,
    run.ModelCallFailed: _model_failed,
    run.ModelCallUnknown: _model_unknown,
    run.ModelCallResolved: _model_resolved,
    run.OutputRejected: _output_rejected,
    run.RunCompleted: _completed,
    effect.ToolApprovalRequested: _approval_requested,
    effect.ToolApprovalDecided: _approval_decided,
    effect.ToolCallPrepared: _prepared,
    effect.ToolStepPrepared: _step_prepared,
    effect.ToolStepSettled: _step_settled,
    effect.ToolStepRefused: _step_refused,
    effect.ToolCallSettled: _call_settled,
    effect.ToolCallWithdrawn: _call_withdrawn,
    effect.ToolCallUnknown: _call_unknown,
    effect.ToolCallResolved: _call_resolved,
    task.WorkflowStarted: _workflow_started,
    task.TaskStarted: _task_started,
    task.TaskRetryScheduled: _of_task(flow.retry),
    task.TaskWaiting: _of_task(flow.wait),
    task.TaskSettled: _of_task(flow.settle),
    task.BudgetDenied: _budget_denied,
    task.BudgetRaised: _budget_raised,
}


def apply(state: Thread, record: codec.Record) -> None:
    """Take one record, the next in sequence, into the state.

    Raises:
        Corrupt: the record cannot follow what came before.
    """
    _APPLY[type(record)](state, record)
    state.tail += 1


def apply_batch(state: Thread, body: bytes, apart: Blobs = NONE) -> codec.Batch:
    """Take one stored batch into the state, verifying place, epoch order and chain.

    Raises:
        Corrupt: it does not continue the state. Incompatible: this release cannot read it.
    """
    batch = codec.decode(body, apart)
    if batch.first != state.tail + 1 or batch.thread != state.id:
        raise Corrupt(f"Thread {state.id!r} has a gap: batch at {batch.first} follows record {state.tail}.")
    if batch.epoch < state.epoch:
        raise Corrupt(f"Thread {state.id!r} batch at {batch.first} was written under a superseded epoch.")
    state.epoch = batch.epoch
    handlers = _APPLY
    for record in batch.records:
        handlers[type(record)](state, record)
        state.tail += 1
    state.digest = codec.chain(state.digest, body)
    return batch


def fold(thread_id: str, bodies: Iterable[bytes]) -> Thread:
    """The state of a thread from the bytes of all its batches, from the first."""
    state = Thread(thread_id)
    for body in bodies:
        apply_batch(state, body)
    return state
