"""Judging what is stored: where one submission stands and why, and whether log, chain and ledger agree.

Both write nothing. ``explain`` asks the same rules that recovery obeys; ``verify`` stands in ``verification``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from perdure.clock import Instant
from perdure.engine.intents import decode_verdict
from perdure.errors import Corrupt, Error, Incompatible, Invalid
from perdure.ports.ledger import Fault, Intent, Submission, ThreadRow
from perdure.ports.store import Store, Transaction
from perdure.projections.obligations import Waiting, waiting_on
from perdure.projections.verification import ThreadCheck, Verification, stored_batches, verify
from perdure.records.run import ModelCallPrepared, ModelCallResolved, ModelCallUnknown
from perdure.rules import fold, recovery
from perdure.rules.lifecycle import SubmissionState

__all__ = ["Explanation", "ThreadCheck", "Verification", "explain", "verify"]


class Explanation(msgspec.Struct, frozen=True):
    """Where a submission stands and what recovery would do with it.

    Attributes:
        submission, state, thread, position: what the ledger says.
        decision: name of the one decision the evidence calls for. meaning: the same in words.
        disposition: ``repaired``, ``deferred``, ``unknown`` or ``none``: what recovery makes of it.
        evidence: what the decision rests on, as plain JSON values.
        waits_for: one sentence for a person; empty when it waits for nothing.
        command: the command that helps; None when there is nothing to do.
    """

    submission: str
    state: str
    thread: str
    position: int
    decision: str
    meaning: str
    disposition: str
    evidence: dict[str, Any]
    waits_for: str
    command: str | None


class _Situation(msgspec.Struct, frozen=True):
    """What one snapshot says about a submission."""

    row: Submission
    thread: ThreadRow
    state: fold.Thread
    unreadable: Error | None
    intents: tuple[Intent, ...]
    fault: Fault | None
    waiting: Waiting


async def explain(
    store: Store, row: Submission, contracts_by_agent: Mapping[str, Mapping[str, str]], now: Instant
) -> Explanation:
    """Where a submission stands, by which evidence, and what recovery would do. Writes nothing.

    Args:
        contracts_by_agent: agent to tool to today's replay contract. An agent that is not in it has no binding here, so
            nothing of it is authorized to run.
        now: the instant deadlines and leases are compared with.
    """
    found = await store.scan(lambda tx: _situation(tx, row.id, now))
    contracts = contracts_by_agent.get(row.program)
    decision: recovery.Decision
    if found.unreadable is not None:
        decision = recovery.Blocked(found.unreadable.message)
    else:
        decision = recovery.classify(_evidence(found, contracts, now))
    meaning = decision.meaning
    if isinstance(decision, recovery.Blocked):
        meaning = f"{meaning} {decision.reason}"
    return Explanation(
        submission=found.row.id, state=found.row.state, thread=found.row.thread, position=found.row.position,
        decision=type(decision).__name__, meaning=meaning, disposition=decision.disposition,
        evidence=_shown(found, decision, contracts, now), waits_for=found.waiting.detail, command=found.waiting.command,
    )  # fmt: skip


def _situation(tx: Transaction, submission: str, now: Instant) -> _Situation:
    row = tx.ledger.submission(submission)
    if row is None:
        raise Invalid(f"There is no submission {submission!r}.", help="List them: perdure obligations, perdure threads")
    thread = tx.ledger.thread(row.thread_number)
    assert thread is not None
    state, unreadable = fold.Thread(row.thread), None
    try:
        for first, _, _, tail, body, apart in stored_batches(tx, row.thread_number):
            fold.apply_batch(state, body, apart)
            if state.digest != tail:
                raise Corrupt(f"The batch at record {first} of thread {row.thread!r} is not the one that was appended.")
    except (Corrupt, Incompatible) as error:
        unreadable = error
    fault = next((f for f in tx.ledger.faults() if f.thread == row.thread_number), None)
    waiting = Waiting(None, "")
    if row.state != SubmissionState.SETTLED:
        items = tx.ledger.open_work(thread=row.thread_number)
        waiting = next(
            found for item, found in waiting_on(tx, row.thread_number, items, fault, now) if item.submission == row.id
        )
    return _Situation(row, thread, state, unreadable, tuple(tx.ledger.intents(row.thread_number)), fault, waiting)


def _deadline(found: _Situation) -> int | None:
    run = found.state.runs.get(found.row.run)
    return None if run is None else run.deadline


def _evidence(found: _Situation, contracts: Mapping[str, str] | None, now: Instant) -> recovery.Evidence:
    row, deadline = found.row, _deadline(found)
    own = [intent for intent in found.intents if intent.submission == row.id]
    return recovery.gather(
        found.state,
        row.id,
        row.run,
        row.state,
        input_marker=row.input_sequence,
        cancel_intent=any(intent.kind == "cancel" for intent in own),
        verdict_intents={i.subject: decode_verdict(i.body).verdict for i in own if i.kind == "verdict"},
        approval_intents=[intent.subject for intent in own if intent.kind == "approval"],
        contracts=contracts,
        past_deadline=deadline is not None and deadline <= now,
        attempts=row.attempts,
    )


def _shown(
    found: _Situation, decision: recovery.Decision, contracts: Mapping[str, str] | None, now: Instant
) -> dict[str, Any]:
    row, state = found.row, found.state
    run, deadline = state.runs.get(row.run), _deadline(found)
    settled = state.settlements.get(row.id)
    plans = decision.plans if isinstance(decision, recovery.ResumePendingBatch) else ()
    calls = [] if run is None else [call for call in run.calls.values() if not call.closed]
    own = [intent for intent in found.intents if intent.submission == row.id]
    owned = found.thread.owner is not None and (found.thread.lease_until or 0) > now
    return {
        "records": state.tail,
        "inputMarker": row.input_sequence,
        "inputInLog": None if run is None else run.input_sequence,
        "started": run is not None and run.started is not None,
        "turns": 0 if run is None else len(run.turns),
        "openCalls": [{"call": call.id, "tool": call.part.name, "tries": call.tries} for call in calls],
        "changed": []
        if contracts is None
        else [c.id for c in calls if c.operation.contract != contracts.get(c.part.name)],
        "plans": {plan.call: type(plan).__name__ for plan in plans},
        "unknown": [] if run is None else [unknown.effect for unknown in run.unknowns()],
        "modelCall": _model_call(run),
        "approvals": [c.approval.approval for c in calls if c.approval is not None and c.decision is None],
        "intents": [{"kind": i.kind, "subject": i.subject, "by": i.by} for i in own],
        "cancelled": row.id in state.cancels,
        "output": run is not None and run.completed is not None,
        "settlement": None if settled is None else settled.outcome,
        "deadline": deadline,
        "pastDeadline": deadline is not None and deadline <= now,
        "attempts": row.attempts,
        "owner": found.thread.owner if owned else None,
        "epoch": found.thread.epoch,
        "binding": contracts is not None,
        "fault": None if found.fault is None else {"kind": found.fault.kind, "message": found.fault.message},
    }


def _model_call(run: fold.Run | None) -> dict[str, Any] | None:
    """Where the model call of the turn that comes next stands; None before its first try."""
    if run is None:
        return None
    about = run.model_prepared or run.model_unknown or run.model_verdict
    if about is None and not run.turn_tries:
        return None
    status = "failed"
    if about is not None:
        status = {ModelCallPrepared: "started", ModelCallUnknown: "unknown", ModelCallResolved: "resolved"}[type(about)]
    return {
        "turn": len(run.turns) + 1,
        "tries": run.turn_tries + (run.model_prepared is not None),
        "status": status,
        "effect": None if about is None else about.effect,
        "verdict": None if run.model_verdict is None else run.model_verdict.verdict,
    }
