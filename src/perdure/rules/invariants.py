"""What must hold of every history, checked from stored bytes alone, and of a ledger beside it. Pure.

Each check is independent of the others, so that one broken law is one failed check. Nothing is repaired here, and a
batch is judged by the bytes that were appended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Protocol

import msgspec

from perdure import ids
from perdure.canonical import digest_raw
from perdure.errors import Corrupt, Error, Invalid
from perdure.records import codec, effect, run, thread
from perdure.records.parts import Failure
from perdure.rules import fold
from perdure.rules.lifecycle import ApprovalStatus, EffectClass, EffectStatus
from perdure.rules.recovery import result_digest

Status = Literal["passed", "failed", "skipped"]
Stored = tuple[int, int, int, bytes, bytes]
"""A stored batch: first, last, epoch, tail digest after it, body."""

BYTES_CHECKS = {
    "sequence-contiguity": "Batches follow each other from record 1 without gap or overlap.",
    "digest-chain": "Each tail digest is SHA-256 of the one before and the stored bytes.",
    "epoch-order": "The epoch of writers never decreases along the log.",
    "schema-round-trip": "Every batch decodes, and decodes to the same again.",
    "record-identity": "Envelopes name their own place; ids of runs and calls are the derived ones.",
}
TRACE_CHECKS = {
    "thread-created": "ThreadCreated is the first record and the only one of its kind.",
    "input-first": "The input of a submission is recorded once, before any other record of its run.",
    "one-settlement": "A submission is settled at most once.",
    "nothing-after-settlement": "After its settlement a run receives verdicts and repair notes, nothing else.",
    "deadline-constant": "A run keeps the deadline it was started with.",
    "turn-order": "Each response is of the turn after the one before.",
    "batch-complete": "No response follows while a call of the batch before it has no result.",
    "calls-declared": "Records of a call follow its declaration, and none starts or asks for a closed call.",
    "one-result": "A call has one result.",
    "steps-inside": "Steps are recorded only inside a started call.",
    "one-step-result": "A step has one result.",
    "decided-before-prepared": "A call that a person was asked about starts only after an approval of that request.",
    "once-dispatch": "An effect of class once is dispatched again only after not_applied, safe_to_retry or a refusal.",
    "key-stable": "Every try of a call or step gives the outside the same key.",
    "unknown-of-started": "Only a started effect without outcome becomes unknown.",
    "verdict-of-unknown": "A verdict is given on an effect that is unknown at that time, once.",
    "cancel-requested": "A cancelled settlement follows a cancel request.",
    "ends-known": "At settlement every started effect has an outcome or is unknown; what never started is withdrawn.",
    "unknown-listed": "A settlement lists exactly the effects that are unknown when it is made.",
    "output-agrees": "A completed settlement repeats digest and disposition of the recorded output, and only it does.",
    "folds": "Every record can follow what came before it.",
}
LEDGER_CHECKS = {
    "fifo-input-order": "Inputs enter the log in order of admission; only parked work is passed.",
    "ledger-input": "The ledger's rows and input markers are those of the log.",
    "ledger-settlement": "The ledger is settled where the log is, with the same outcome.",
    "ledger-effects": "The ledger's effects are those of the log, with the same status and verdict.",
    "ledger-approvals": "The ledger's approvals are those of the log, with the same status.",
}
CHECKS: dict[str, str] = BYTES_CHECKS | TRACE_CHECKS | LEDGER_CHECKS
"""Every check by name, with what it says."""

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
_UNSTORED = "result"  # the failure of a call that took effect and whose result could not be stored
_AUDIT = (effect.ToolCallResolved, thread.RepairAnnotated)


class SubmissionRow(Protocol):
    """What is compared of a ledger row; ``ports.ledger.Submission`` fits."""

    @property
    def id(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def position(self) -> int: ...
    @property
    def program(self) -> str: ...
    @property
    def input_digest(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def input_sequence(self) -> int | None: ...
    @property
    def outcome(self) -> str | None: ...
    @property
    def failure(self) -> bytes | None: ...
    @property
    def disposition(self) -> str | None: ...


class EffectRow(Protocol):
    """What is compared of an effect's row; ``ports.ledger.EffectRow`` fits."""

    @property
    def id(self) -> str: ...
    @property
    def submission(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def call(self) -> str: ...
    @property
    def step(self) -> str | None: ...
    @property
    def operation(self) -> str: ...
    @property
    def effect_class(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def business_key(self) -> str | None: ...
    @property
    def status(self) -> str: ...
    @property
    def verdict(self) -> str | None: ...
    @property
    def tries(self) -> int: ...
    @property
    def sequence(self) -> int: ...


class ApprovalRow(Protocol):
    """What is compared of an approval's row; ``ports.ledger.ApprovalRow`` fits."""

    @property
    def id(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def call(self) -> str: ...
    @property
    def tool(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def status(self) -> str: ...


class Ledger(msgspec.Struct, frozen=True):
    """The ledger's rows of one thread. They are read after the last batch.

    ``positions`` is how many places of its queue were given out. Where each has its row, a submission of the log
    without one is a run that nobody owes (persistent mode); without ``positions`` every submission needs a row.
    """

    submissions: Iterable[SubmissionRow] = ()
    effects: Iterable[EffectRow] = ()
    approvals: Iterable[ApprovalRow] = ()
    positions: int | None = None


class Check(msgspec.Struct, frozen=True):
    """One law and how this history stands to it. ``detail``: the first place that breaks it, or why it is skipped."""

    name: str
    status: Status
    detail: str = ""


class Report(msgspec.Struct, frozen=True):
    """Every check of one thread. True when none failed."""

    thread: str
    checks: tuple[Check, ...]

    def __bool__(self) -> bool:
        return not self.failed

    def __iter__(self) -> Iterator[Check]:
        return iter(self.checks)

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")


# -- what the trace remembers -----------------------------------------------------------------------------------------


class _Effect(msgspec.Struct):
    """One started effect, as the log tells it."""

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

    @property
    def in_doubt(self) -> bool:
        return self.status is EffectStatus.UNKNOWN and self.verdict is None

    @property
    def free(self) -> bool:
        """Whether another try may follow although nothing is promised."""
        return self.verdict in _FREEING or (self.status is EffectStatus.REFUSED and self.step is not None)


class _Call(msgspec.Struct):
    operation: run.ToolOperation
    asked: effect.ToolApprovalRequested | None = None
    decision: str | None = None
    newest: _Effect | None = None
    steps: dict[str, _Effect] = msgspec.field(default_factory=dict)
    done: set[str] = msgspec.field(default_factory=set)  # steps with a result
    closed: bool = False

    @property
    def once(self) -> bool:
        return self.operation.effect not in _REPEATABLE and not self.operation.steps

    def effects(self) -> Iterator[_Effect]:
        if self.newest is not None:
            yield self.newest
        yield from self.steps.values()


_REPEATABLE = frozenset({EffectClass.PURE, EffectClass.OBSERVE, EffectClass.IDEMPOTENT, EffectClass.KEYED})


class _Run(msgspec.Struct):
    submission: str
    sequence: int
    input: msgspec.Raw
    deadline: int | None = None
    turn: int = 0
    batch: tuple[str, ...] = ()
    calls: dict[str, _Call] = msgspec.field(default_factory=dict)
    completed: run.RunCompleted | None = None
    settled: bool = False
    doubted: bool = False  # an effect was unknown at some time: it may have been parked

    def open_calls(self) -> Iterator[str]:
        return (id for id in self.batch if not self.calls[id].closed)


class _Findings:
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


class _Trace:
    """One pass over the records, remembering only what the laws speak of."""

    def __init__(self, findings: _Findings) -> None:
        self._fail = findings.fail
        self.sequence = 0
        self.program: str | None = None
        self.runs: dict[str, _Run] = {}
        self.open: dict[str, _Run] = {}  # runs without settlement
        self.order: list[str] = []  # submissions, as their inputs came
        self.waiting: list[tuple[str, str]] = []  # (submission, one before it that was neither settled nor ever parked)
        self.settlements: dict[str, thread.SubmissionSettled] = {}
        self.cancels: set[str] = set()
        self.effects: dict[str, _Effect] = {}
        self.approvals: dict[str, tuple[effect.ToolApprovalRequested, _Call]] = {}

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
        if r.run != ids.run_id(r.submission):
            self.fail("record-identity", f"run {r.run!r} is not the run of submission {r.submission!r}")
        if r.run in self.runs:
            self.fail("input-first", f"run {r.run!r} has a second input")
            return
        if r.submission in self.settlements:
            self.fail("nothing-after-settlement", f"input of settled submission {r.submission!r}")
        self.waiting.extend((r.submission, other.submission) for other in self.open.values() if not other.doubted)
        self.order.append(r.submission)
        self.open[r.run] = self.runs[r.run] = _Run(r.submission, self.sequence, r.input.copy())  # not the whole batch

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
        if owner is not None:
            owner.settled = True
        self._end_known(r, owner)
        self._output(r, owner)
        if owner is not None:
            owner.completed = None  # compared; its output would be kept for nothing

    def _end_known(self, r: thread.SubmissionSettled, owner: _Run | None) -> None:
        calls = {} if owner is None else owner.calls
        doubt = set()
        for id, call in calls.items():
            if call.newest is None and not call.closed:
                self.fail("ends-known", f"call {id} never started and is not withdrawn")
            for found in call.effects():
                if found.in_doubt:
                    doubt.add(found.id)
                elif found.status is EffectStatus.STARTED:
                    self.fail("ends-known", f"effect {found.id} of call {id} has neither an outcome nor is it unknown")
        if set(r.unknown) != doubt or len(r.unknown) != len(doubt):
            self.fail("unknown-listed", f"the settlement lists {list(r.unknown)}; unknown are {sorted(doubt)}")

    def _output(self, r: thread.SubmissionSettled, owner: _Run | None) -> None:
        completed = None if owner is None else owner.completed
        if completed is None:
            if r.outcome == "completed":
                self.fail("output-agrees", f"submission {r.submission!r} is completed without a recorded output")
        elif r.outcome != "completed":
            self.fail("output-agrees", f"submission {r.submission!r} has a recorded output and is {r.outcome}")
        elif (r.output_digest, r.disposition) != (completed.result_digest, completed.disposition):
            self.fail("output-agrees", f"submission {r.submission!r} does not repeat its recorded output")

    # -- run ----------------------------------------------------------------------------------------------------------
    def _run(self, r: Any) -> _Run | None:
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

    def about_run(self, r: Any) -> None:
        self._run(r)

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
            owner.calls[operation.call] = _Call(operation)
        owner.turn, owner.batch = r.turn, tuple(o.call for o in r.operations)

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
    def _call(self, r: Any, *, opens: bool = False) -> tuple[_Run, _Call] | None:
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
            _Effect(
                r.effect, r.run, r.call, None, r.tool, r.effect_class, r.key, r.business_key, r.attempt, self.sequence
            ),
            once=call.once,
        )

    def _start(self, before: _Effect | None, new: _Effect, *, once: bool) -> _Effect:
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
            new = _Effect(r.effect, r.run, r.call, r.step, None, None, r.key, None, r.attempt, self.sequence)
            call.steps[r.step] = self._start(call.steps.get(r.step), new, once=True)

    def _step_of(self, r: Any) -> tuple[_Run, _Call] | None:
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
    def _outcome(found: _Effect | None, status: EffectStatus) -> None:
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


# safe_to_retry on changed code falls back to unknown: its effect was resolved and is doubted again.
_DOUBTABLE = (EffectStatus.STARTED, EffectStatus.UNKNOWN)

_TAKE: dict[type, Callable[[_Trace, Any], None]] = {
    thread.ThreadCreated: _Trace.created,
    thread.UserInputRecorded: _Trace.input,
    thread.CancelRequested: _Trace.cancel,
    thread.RepairAnnotated: _Trace.repair,
    thread.SubmissionSettled: _Trace.settled,
    run.RunStarted: _Trace.started,
    run.ModelCallPrepared: _Trace.about_run,
    run.ModelResponseRecorded: _Trace.response,
    run.ModelResponseInterrupted: _Trace.about_run,
    run.OutputRejected: _Trace.about_run,
    run.RunCompleted: _Trace.completed,
    effect.ToolApprovalRequested: _Trace.asked,
    effect.ToolApprovalDecided: _Trace.decided,
    effect.ToolCallPrepared: _Trace.prepared,
    effect.ToolStepPrepared: _Trace.step_prepared,
    effect.ToolStepSettled: _Trace.step_settled,
    effect.ToolStepRefused: _Trace.step_refused,
    effect.ToolCallSettled: _Trace.call_settled,
    effect.ToolCallWithdrawn: _Trace.call_withdrawn,
    effect.ToolCallUnknown: _Trace.unknown,
    effect.ToolCallResolved: _Trace.resolved,
}


# -- the ledger beside the log ----------------------------------------------------------------------------------------

_failure = msgspec.json.Decoder(Failure)


def _decoded(raw: bytes | None) -> Failure | str | None:
    if raw is None:
        return None
    try:
        return _failure.decode(raw)
    except msgspec.MsgspecError as error:
        return f"not a failure ({error})"


def _compare_submissions(
    trace: _Trace, rows: list[SubmissionRow], positions: int | None, fail: Callable[[str, str], None]
) -> None:
    position = {row.id: row.position for row in rows}
    if positions is not None and sorted(position.values()) != list(range(1, positions + 1)):
        fail("ledger-input", f"{positions} places of the queue were given out and {len(position)} rows hold one")
        positions = None
    known = {**dict.fromkeys(trace.order), **dict.fromkeys(trace.settlements)}
    for id in known:
        if id not in position and positions is None:
            fail("ledger-input", f"submission {id!r} is in the log and not in the ledger")
    last = 0
    for id in trace.order:
        if position.get(id, last + 1) <= last:
            fail("fifo-input-order", f"the input of {id!r} entered after that of a later submission")
        last = max(last, position.get(id, last))
    for id, other in trace.waiting:
        fail("fifo-input-order", f"the input of {id!r} entered while {other!r} was neither settled nor ever parked")
    for row in rows:
        _compare_input(trace, row, fail)
        settled = trace.settlements.get(row.id)
        if (settled is not None) != (row.state == "settled"):
            fail("ledger-settlement", f"{row.id!r} is {row.state} in the ledger; the log says {settled and 'settled'}")
        elif settled is not None:
            here = (row.outcome, row.disposition, _decoded(row.failure))
            if here != (settled.outcome, settled.disposition, settled.failure):
                fail("ledger-settlement", f"{row.id!r} settled otherwise in the ledger: {here}")
        elif row.outcome is not None:
            fail("ledger-settlement", f"{row.id!r} is not settled and has the outcome {row.outcome}")


def _digest(raw: msgspec.Raw) -> str:
    try:
        return digest_raw(raw)
    except Invalid as error:
        return f"none ({error.message})"


def _compare_input(trace: _Trace, row: SubmissionRow, fail: Callable[[str, str], None]) -> None:
    owner = trace.runs.get(row.run)
    if row.run != ids.run_id(row.id):
        fail("ledger-input", f"{row.id!r} has run {row.run!r}")
    if row.input_sequence != (None if owner is None else owner.sequence):
        at = "nowhere" if owner is None else f"at {owner.sequence}"
        fail("ledger-input", f"the ledger marks the input of {row.id!r} at {row.input_sequence}; the log holds it {at}")
    elif owner is not None and (owner.submission != row.id or _digest(owner.input) != row.input_digest):
        fail("ledger-input", f"the input of {row.id!r} in the log is not the admitted one")


def _compare_effects(trace: _Trace, rows: list[EffectRow], fail: Callable[[str, str], None]) -> None:
    found = {row.id: row for row in rows}
    for id in found.keys() - trace.effects.keys():
        fail("ledger-effects", f"effect {id!r} is in the ledger and was never started")
    for want in trace.effects.values():
        row = found.get(want.id)
        if row is None:
            fail("ledger-effects", f"effect {want.id!r} was started and is not in the ledger")
            continue
        place = (row.run, row.call, row.step, row.key, row.sequence, row.tries)
        if place != (want.run, want.call, want.step, want.key, want.sequence, want.attempt):
            fail("ledger-effects", f"effect {want.id!r} has another place in the ledger: {place}")
        if row.submission != ids.submission_of(want.run):
            fail("ledger-effects", f"effect {want.id!r} belongs to {row.submission!r} in the ledger")
        if want.operation is not None:
            declared = (row.operation, row.effect_class, row.business_key)
            if declared != (want.operation, want.effect_class, want.business_key):
                fail("ledger-effects", f"effect {want.id!r} is declared otherwise in the ledger: {declared}")
        if want.superseded:  # its row says how it was given up; only a result would be invented
            if row.status == EffectStatus.CONFIRMED:
                fail("ledger-effects", f"effect {want.id!r} is confirmed in the ledger; another try followed it")
        elif (row.status, row.verdict) != (want.status, want.verdict):
            says = f"{row.status} ({row.verdict}) in the ledger, {want.status} ({want.verdict}) in the log"
            fail("ledger-effects", f"effect {want.id!r} is {says}")


def _compare_approvals(trace: _Trace, rows: list[ApprovalRow], fail: Callable[[str, str], None]) -> None:
    found = {row.id: row for row in rows}
    for id in found.keys() - trace.approvals.keys():
        fail("ledger-approvals", f"approval {id!r} is in the ledger and was never asked")
    for id, (asked, call) in trace.approvals.items():
        row = found.get(id)
        if row is None:
            fail("ledger-approvals", f"approval {id!r} was asked and is not in the ledger")
            continue
        if (row.run, row.call, row.tool, row.digest) != (asked.run, asked.call, asked.tool, asked.digest):
            fail("ledger-approvals", f"approval {id!r} is about something else in the ledger")
        allowed = {call.decision or ApprovalStatus.PENDING}
        if call.decision is None and trace.runs[asked.run].settled:  # nobody can decide it any more
            allowed = {ApprovalStatus.REJECTED, ApprovalStatus.EXPIRED}
        if row.status not in allowed:
            fail("ledger-approvals", f"approval {id!r} is {row.status} in the ledger, {'/'.join(allowed)} in the log")


# -- all of it --------------------------------------------------------------------------------------------------------


class _Bytes:
    """The checks that look at stored bytes and their places."""

    def __init__(self, thread_id: str, findings: _Findings) -> None:
        self.thread = thread_id
        self.last, self.epoch, self.tail = 0, 0, codec.EMPTY_TAIL
        self._fail = findings.fail

    def take(self, stored: Stored) -> codec.Batch | None:
        first, last, epoch, tail, body = stored
        if first != self.last + 1 or last < first:
            self._fail("sequence-contiguity", f"the batch {first}..{last} follows record {self.last}")
        if codec.chain(self.tail, body) != tail:
            self._fail("digest-chain", f"the bytes of the batch at {first} are not those that were chained")
        if epoch < self.epoch:
            self._fail("epoch-order", f"the batch at {first} was written in epoch {epoch} after epoch {self.epoch}")
        self.last, self.epoch, self.tail = last, epoch, tail
        try:
            batch = codec.decode(body)
            if codec.decode(codec.encode(batch)) != batch:
                self._fail("schema-round-trip", f"the batch at {first} decodes otherwise when encoded again")
        except Error as error:
            self._fail("schema-round-trip", f"the batch at {first}: {error.message}")
            return None
        place = (batch.thread, batch.first, batch.last, batch.epoch)
        if place != (self.thread, first, last, epoch):
            self._fail("record-identity", f"the batch stored at {first}..{last} says {place}")
        return batch


def _forget(state: fold.Thread, record: codec.Record) -> None:
    """Drop what a settled run holds, unless a verdict may still come: a long thread is not kept in memory whole."""
    if isinstance(record, thread.SubmissionSettled) and not record.unknown and record.run in state.runs:
        owner = state.runs[record.run]
        owner.turns, owner.calls = [], {}


def check(thread_id: str, batches: Iterable[Stored], ledger: Ledger | None = None) -> Report:
    """Judge one thread: its stored batches in order of place, and its ledger rows (None: only the log is judged)."""
    findings = _Findings()
    fail = findings.fail
    raw = _Bytes(thread_id, findings)
    trace = _Trace(findings)
    state = fold.Thread(thread_id)
    unreadable = ""
    broken: Corrupt | None = None
    for stored in batches:
        batch = raw.take(stored)
        if batch is None:
            unreadable = f"a batch at {stored[0]} cannot be read"
        if unreadable or batch is None:
            continue
        for record in batch.records:
            trace.take(record)
            if broken is None:
                try:
                    fold.apply(state, record)
                    _forget(state, record)
                except Corrupt as error:
                    broken = error
    if ledger is not None and not unreadable:
        _compare_submissions(trace, list(ledger.submissions), ledger.positions, fail)
        _compare_effects(trace, list(ledger.effects), fail)
        _compare_approvals(trace, list(ledger.approvals), fail)
    skipped = {} if ledger is not None else dict.fromkeys(LEDGER_CHECKS, "no ledger was given")
    if unreadable:
        skipped |= dict.fromkeys([*TRACE_CHECKS, *LEDGER_CHECKS], unreadable)
    elif findings.first:
        skipped["folds"] = "other checks failed"
    elif broken is not None:
        fail("folds", broken.message)
    return Report(thread_id, tuple(_judged(name, findings, skipped) for name in CHECKS))


def _judged(name: str, findings: _Findings, skipped: dict[str, str]) -> Check:
    if name in findings.first:
        return Check(name, "failed", findings.detail(name))
    if name in skipped:
        return Check(name, "skipped", skipped[name])
    return Check(name, "passed")
