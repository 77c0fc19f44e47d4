"""Effects as people read them: one try of one touch of the world, with what the log says became of it."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from perdure.clock import to_datetime
from perdure.errors import Corrupt
from perdure.ports.ledger import EffectRow
from perdure.ports.store import Store, Transaction
from perdure.projections.models import Charged, charged, seen
from perdure.projections.reading import RESTORE, batches, needle
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
from perdure.records.parts import NO_CHARGE, NO_EVIDENCE, Charge, Evidence, Failure, TextPart
from perdure.records.run import (
    ModelCallFailed,
    ModelCallPrepared,
    ModelCallResolved,
    ModelCallUnknown,
    ModelResponseRecorded,
)
from perdure.records.thread import SubmissionSettled
from perdure.rules.lifecycle import EffectStatus
from perdure.rules.plans import is_model_call


class Effect(msgspec.Struct, frozen=True):
    """One try of one touch of the outside world.

    Attributes:
        id: id of the effect. run, call, step: where it belongs; ``step`` only for a ``once`` step inside a call.
        operation: name of the tool, or of the model. kind, effect_class, risk: what it was declared as.
        key: the idempotency key that was given to the outside.
        status: ``started``, ``confirmed``, ``refused`` or ``unknown``.
        verdict: the verdict given on its unknown outcome, ``declared`` where its class let another try follow, or None.
        tries: which try of the call it is, from 1.
        started_at, ended_at: UTC; ``ended_at`` is None while it is in flight.
        arguments: what the call was given, as JSON value; empty for a step, whose arguments are not recorded. Of a model
            call its turn and the digest of its request.
        result: JSON value of the result of a confirmed effect; the text that a model answered. error: why it was refused.
        reason: why its outcome is unknown; once there is a verdict, what its author said.
        by: who gave the verdict. evidence: what convinced them, a JSON value.
        thread, submission: whose work it is.
        held: a body of unknown outcome still runs in a worker's thread, so no verdict is accepted.
        decided: a verdict was given; the next owner of its thread takes it into the log.
        wire: what the wire showed of a model call, to find it at the provider; None when nothing was seen.
        charged: what an unknown model call counts against the budgets; None for nothing.
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
    wire: Evidence | None = None
    charged: Charged | None = None

    @property
    def open(self) -> bool:
        """Whether it waits for a verdict."""
        return self.status == EffectStatus.UNKNOWN and self.verdict is None and not self.decided

    @property
    def of_model(self) -> bool:
        """Whether it is a model call: its result is text, and refused it fails its run."""
        return is_model_call(self.call)

    @property
    def resolve(self) -> str | None:
        """The command that gives the verdict it waits for; None when it waits for none."""
        return reconcile_command(self.id) if self.open else None


def decisions(tx: Transaction, thread: int) -> set[str]:
    """The effects and requests of a thread that a verdict or a decision was given for, which no owner has taken yet."""
    found = (intent for intent in tx.ledger.intents(thread) if intent.kind != "cancel")
    return {intent.subject.partition("#")[0] for intent in found}


def question(operation: str, call: str, step: str | None = None) -> str:
    """What nobody knows of an effect of unknown outcome, to follow the word *whether*."""
    if is_model_call(call):
        return f"model {operation!r} served the call of turn {call.partition('.')[0]}"
    return f"{operation!r}{f' step {step!r}' if step is not None else ''} took place"


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
    wire: Evidence = NO_EVIDENCE
    charge: Charge = NO_CHARGE
    started: bool = False
    done: bool = False


async def read_effect(store: Store, row: EffectRow) -> Effect:
    """One effect with its arguments, result, reason and verdict read back from the log.

    Reads from the started record on, and no further than to what the row says happened.

    Raises:
        Corrupt: the log does not hold its started record where the row says.
    """
    found = _Found()
    wanted = needle(row.run)
    async for stored in batches(store, row.thread, row.sequence):
        if wanted not in stored.body:
            continue
        batch = codec.decode(stored.body, stored.apart)
        for record in batch.records:
            _take(found, record, row)
        if not found.started:
            break
        if found.done or row.status == EffectStatus.STARTED:
            break
    if not found.started:
        raise Corrupt(f"The log does not hold the start of effect {row.id!r} at record {row.sequence}.", help=RESTORE)
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
        decided=decided, wire=seen(found.wire), charged=charged(found.charge),
    )  # fmt: skip


def _take(found: _Found, record: codec.Record, row: EffectRow) -> None:
    """Take what one record says about the effect of a row."""
    if isinstance(record, SubmissionSettled) and record.run == row.run:
        found.done = row.verdict in (None, "declared")  # of a settled run only verdicts may follow
    if getattr(record, "effect", None) == row.id and not found.done:
        _take_model(found, record, row)
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


def _take_model(found: _Found, record: codec.Record, row: EffectRow) -> None:
    """Take what one record says about the model call of a row, if it is about one."""
    match record:
        case ModelCallPrepared():
            found.started = True
            found.arguments = {"turn": record.turn, "request": record.request_digest}
        case ModelResponseRecorded():
            found.result = "".join(part.text for part in record.parts if isinstance(part, TextPart))
            found.wire, found.done = record.evidence, True
        case ModelCallFailed():
            found.error, found.wire, found.done = record.failure, record.evidence, True
        case ModelCallUnknown():
            found.reason, found.wire, found.charge = record.reason, record.evidence, record.charged
            found.done = row.status == EffectStatus.UNKNOWN and row.verdict is None
        case ModelCallResolved():
            found.reason, found.by, found.error = record.reason, record.by, record.failure
            found.evidence = msgspec.json.decode(record.evidence)
            if record.verdict == "applied":
                found.result = msgspec.json.decode(record.result)
            if record.verdict in ("not_applied", "refused"):
                found.charge = NO_CHARGE
            found.done = True
        case _:
            pass


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
