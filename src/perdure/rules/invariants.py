"""What must hold of every history, checked from stored bytes alone, and of a ledger beside it. Pure.

Each check is independent of the others, so that one broken law is one failed check. Nothing is repaired here, and a
batch is judged by the bytes that were appended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, Protocol

import msgspec

from perdure import ids
from perdure.canonical import digest_raw
from perdure.errors import Corrupt, Error, Invalid
from perdure.records import codec, thread
from perdure.records.blobs import Blobs
from perdure.records.parts import Failure
from perdure.rules import fold
from perdure.rules.lifecycle import ApprovalStatus, EffectStatus
from perdure.rules.trace import Findings, Trace

Status = Literal["passed", "failed", "skipped"]
Stored = tuple[int, int, int, bytes, bytes, Blobs]
"""A stored batch: first, last, epoch, tail digest after it, body, payloads beside it."""

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
    "once-dispatch": "An effect of class once is dispatched again only after not_applied, safe_to_retry or a refusal, or when"
    " the work elsewhere that it became has a name.",
    "key-stable": "Every try of a call, a step or a once model call gives the outside the same key.",
    "one-model-call": "A once model call starts only where none of its run is in flight, unknown or decided otherwise.",
    "model-outcome": "A response or failure of a once run names its call in flight, a response also one that applied.",
    "model-charges": "What may have been served is charged its reservation, once; what told its usage costs that.",
    "unknown-of-started": "Only a started effect without outcome becomes unknown.",
    "verdict-of-unknown": "A verdict is given on an effect that is unknown at that time, once.",
    "cancel-requested": "A cancelled settlement follows a cancel request.",
    "tasks-once": "A task of a workflow ends once, and nothing of it begins after that.",
    "tasks-ended": "When a workflow settles, every task that began has its end.",
    "task-digests": "Outputs and changes of memory are those of the digests recorded with them.",
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
    def kind(self) -> str: ...
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
    trace: Trace, rows: list[SubmissionRow], positions: int | None, fail: Callable[[str, str], None]
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


def _compare_input(trace: Trace, row: SubmissionRow, fail: Callable[[str, str], None]) -> None:
    owner = trace.runs.get(row.run)
    if row.run != ids.run_id(row.id):
        fail("ledger-input", f"{row.id!r} has run {row.run!r}")
    if row.input_sequence != (None if owner is None else owner.sequence):
        at = "nowhere" if owner is None else f"at {owner.sequence}"
        fail("ledger-input", f"the ledger marks the input of {row.id!r} at {row.input_sequence}; the log holds it {at}")
    elif owner is not None and (owner.submission != row.id or _digest(owner.input) != row.input_digest):
        fail("ledger-input", f"the input of {row.id!r} in the log is not the admitted one")


def _compare_effects(trace: Trace, rows: list[EffectRow], fail: Callable[[str, str], None]) -> None:
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
        if want.kind is not None and row.kind != want.kind:
            fail(
                "ledger-effects", f"effect {want.id!r} is of kind {row.kind!r} in the ledger, {want.kind!r} in the log"
            )
        if want.superseded:  # its row says how it was given up; only a result would be invented
            if row.status == EffectStatus.CONFIRMED:
                fail("ledger-effects", f"effect {want.id!r} is confirmed in the ledger; another try followed it")
        elif (row.status, row.verdict) != (want.status, want.verdict):
            says = f"{row.status} ({row.verdict}) in the ledger, {want.status} ({want.verdict}) in the log"
            fail("ledger-effects", f"effect {want.id!r} is {says}")


def _compare_approvals(trace: Trace, rows: list[ApprovalRow], fail: Callable[[str, str], None]) -> None:
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

    def __init__(self, thread_id: str, findings: Findings) -> None:
        self.thread = thread_id
        self.last, self.epoch, self.tail = 0, 0, codec.EMPTY_TAIL
        self._fail = findings.fail

    def take(self, stored: Stored) -> codec.Batch | None:
        first, last, epoch, tail, body, apart = stored
        if first != self.last + 1 or last < first:
            self._fail("sequence-contiguity", f"the batch {first}..{last} follows record {self.last}")
        if codec.chain(self.tail, body) != tail:
            self._fail("digest-chain", f"the bytes of the batch at {first} are not those that were chained")
        if epoch < self.epoch:
            self._fail("epoch-order", f"the batch at {first} was written in epoch {epoch} after epoch {self.epoch}")
        self.last, self.epoch, self.tail = last, epoch, tail
        try:
            batch = codec.decode(body, apart)
            if codec.decode(*codec.encode_apart(batch)) != batch:
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
    findings = Findings()
    fail = findings.fail
    raw = _Bytes(thread_id, findings)
    trace = Trace(findings)
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


def _judged(name: str, findings: Findings, skipped: dict[str, str]) -> Check:
    if name in findings.first:
        return Check(name, "failed", findings.detail(name))
    if name in skipped:
        return Check(name, "skipped", skipped[name])
    return Check(name, "passed")
