"""Commands on their way into a log: what each becomes there, and what the ledger changes in the same commit.

Approve, reject, reconcile and cancel are recorded first as intents that need no fence; whoever owns the thread takes
them into the log before acting on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from perdure import canonical
from perdure.clock import seconds
from perdure.limits import PROBE_BACKOFF_SECONDS_MIN
from perdure.ports.ledger import EffectRow, Intent
from perdure.ports.store import Transaction
from perdure.records.codec import Record
from perdure.records.effect import (
    Decision,
    ToolApprovalDecided,
    ToolCallPrepared,
    ToolCallResolved,
    ToolCallSettled,
    ToolStepRefused,
    ToolStepSettled,
    Verdict,
)
from perdure.records.parts import Failure
from perdure.records.run import ModelCallResolved, ModelCallUnknown
from perdure.records.thread import CancelRequested, SubmissionSettled
from perdure.rules import fold, plans
from perdure.rules.lifecycle import EffectStatus

Op = Callable[[Transaction], None]


class VerdictBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of a verdict intent. ``result`` belongs to ``applied``, ``failure`` to ``refused``."""

    effect: str
    run: str
    call: str
    verdict: Verdict
    step: str | None = None
    result: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
    evidence: msgspec.Raw = msgspec.Raw(b"null")


class ApprovalBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of an approval intent: bound to the request and the exact arguments."""

    approval: str
    run: str
    call: str
    decision: Decision
    digest: str


_verdict = msgspec.json.Decoder(VerdictBody)
_approval = msgspec.json.Decoder(ApprovalBody)

# What a verdict makes of the effect's row. Another try of the call is another effect.
STATUS: dict[Verdict, EffectStatus] = {
    "applied": EffectStatus.CONFIRMED,
    "refused": EffectStatus.REFUSED,
    "not_applied": EffectStatus.REFUSED,
    "safe_to_retry": EffectStatus.UNKNOWN,
    "cancel_run": EffectStatus.UNKNOWN,
    "compensated": EffectStatus.CONFIRMED,
}


def doubt(run: fold.Run, doubts: Iterable[plans.Doubt], now: int) -> tuple[list[Record], list[Op]]:
    """Records and ledger changes that make started effects of a run open unknowns."""
    records: list[Record] = []
    ops: list[Op] = []
    for found in doubts:
        record = plans.unknown(run, found)
        records.append(record)
        ops.append(_lose_model(found.effect, now) if isinstance(record, ModelCallUnknown) else lose(found.effect, now))
    return records, ops


def _lose_model(effect: str, now: int) -> Op:
    """Of a model call; there is no probe to ask about one."""
    return lambda tx: tx.ledger.end_effect(effect, "unknown", None, now)


def lose(effect: str, now: int) -> Op:
    """Make an effect's row an open unknown. Its probe, if its tool has one, is asked soon by whoever sweeps."""
    at = now + seconds(PROBE_BACKOFF_SECONDS_MIN)

    def op(tx: Transaction) -> None:
        tx.ledger.end_effect(effect, "unknown", None, now)
        tx.ledger.schedule_probe(effect, at)

    return op


def take_in(state: fold.Thread, intent: Intent, now: int) -> tuple[list[Record], list[Op]]:
    """Records an intent becomes in this log, and the ledger changes that commit with them. Pure but for its closures."""

    def applied(tx: Transaction) -> None:
        tx.ledger.mark_applied(intent.id, now)

    match intent.kind:
        case "cancel":
            records, ops = _cancel(state, intent, now)
        case "approval":
            records, ops = _approve(state, intent, now)
        case "verdict":
            records, ops = _resolve(state, intent, now)
    return records, [*ops, applied]


def _cancel(state: fold.Thread, intent: Intent, now: int) -> tuple[list[Record], list[Op]]:
    submission = intent.subject
    if submission in state.cancels or submission in state.settlements:
        return [], []
    return [CancelRequested(submission, intent.by, intent.reason)], []


def settle_queued(submission: str, run: str, number: int, epoch: int, token: int, now: int) -> tuple[Record, Op]:
    """A cancelled submission that never ran settles at once, wherever it stands in its queue."""

    def settle(tx: Transaction) -> None:
        tx.ledger.settle(number, epoch, token, submission, "cancelled", None, None, now, release=False)

    return SubmissionSettled(submission, run, "cancelled"), settle


def _approve(state: fold.Thread, intent: Intent, now: int) -> tuple[list[Record], list[Op]]:
    body = _approval.decode(intent.body)
    run = state.runs[body.run]
    call = run.calls[body.call]

    def decide(tx: Transaction) -> None:
        tx.ledger.decide_approval(body.approval, body.decision, intent.by, intent.reason, now)

    asked = call.approval is not None and call.approval.approval == body.approval
    if not asked or call.decision is not None or call.closed or run.settled is not None:
        return [], [decide]
    decided = ToolApprovalDecided(body.run, body.call, body.approval, body.decision, intent.by, intent.reason)
    return [decided], [decide]


def decode_verdict(raw: bytes) -> VerdictBody:
    """The body of a stored verdict intent."""
    return _verdict.decode(raw)


def _resolve(state: fold.Thread, intent: Intent, now: int) -> tuple[list[Record], list[Op]]:
    return resolve(state, _verdict.decode(intent.body), intent.by, intent.reason, now)


def resolve(state: fold.Thread, body: VerdictBody, by: str, reason: str, now: int) -> tuple[list[Record], list[Op]]:
    """Records and ledger changes of a verdict; nothing if the effect is not of open unknown outcome any more."""
    run = state.runs[body.run]

    def end(tx: Transaction) -> None:
        tx.ledger.end_effect(body.effect, STATUS[body.verdict], body.verdict, now)

    model = run.model_unknown
    if model is not None and model.effect == body.effect:
        return [_resolved_model(model, body, by, reason)], [end]
    call = run.calls.get(body.call)
    if call is None:  # the place of a model call that has its verdict
        return [], []
    unknown = call.unknown if body.step is None else fold_step(call, body.step).unknown
    if unknown is None or unknown.effect != body.effect:
        return [], []
    records: list[Record] = [
        ToolCallResolved(
            body.run, body.call, body.effect, body.verdict, by, reason, body.step, body.result, body.evidence
        )
    ]
    if run.settled is None:  # a settled run takes the verdict as audit; it resumes nothing
        records.extend(_outcome(body))
    return records, [end]


def _resolved_model(unknown: ModelCallUnknown, body: VerdictBody, by: str, reason: str) -> ModelCallResolved:
    """What the verdict says is all there is: whoever drives the run takes its answer or its failure from this record."""
    failure = None if body.failure is None else Failure("model", body.failure.message)
    return ModelCallResolved(
        body.run, unknown.turn, body.effect, body.verdict, by, reason, body.result, failure, body.evidence
    )  # fmt: skip


def arguments_of(batch: Sequence[Record], row: EffectRow) -> tuple[dict[str, Any], str]:
    """Arguments of the call an effect belongs to, from the batch of its started record, and why it is unknown."""
    for record in batch:
        if isinstance(record, ToolCallPrepared) and record.effect == row.id:
            return canonical.decode(record.arguments), "its outcome was not recorded"
    return {}, f"step {row.step!r} was started and its outcome was not recorded"


def fold_step(call: fold.Call, name: str) -> fold.Step:
    """The step of a call, empty if nothing is recorded of it."""
    return call.steps.get(name) or fold.Step()


def _outcome(body: VerdictBody) -> list[Record]:
    failure = body.failure or Failure("refused", "refused by verdict")
    match body.verdict, body.step:
        case "applied", None:
            return [ToolCallSettled(body.run, body.call, body.result)]
        case "applied", str() as step:
            return [ToolStepSettled(body.run, body.call, step, body.result)]
        case "refused", None:
            return [ToolCallSettled(body.run, body.call, failure=failure)]
        case "refused", str() as step:
            return [ToolStepRefused(body.run, body.call, step, failure)]
        case _:
            return []
