"""Cancelling a run: a durable, idempotent command that ends it in every state and never replaces a settlement."""

from __future__ import annotations

from perdure.engine.approvals import check_text
from perdure.engine.host import Host
from perdure.errors import Conflict, Invalid
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Intent
from perdure.ports.store import Transaction


async def cancel(host: Host, submission: str, *, by: str, reason: str) -> Intent:
    """Record the wish that a submission ends. The first one stands and is returned on repeat.

    Raises:
        Invalid: no such submission. Conflict: it is settled and was not cancelled.
    """
    check_text(by, "by")
    check_text(reason, "reason", blank=True)
    now = host.clock.now()
    intent = await host.store.write(Boundary.INTENT, lambda tx: _cancel(tx, submission, by, reason, now))
    host.commanded()
    return intent


def _cancel(tx: Transaction, submission: str, by: str, reason: str, now: int) -> Intent:
    row = tx.ledger.submission(submission)
    if row is None:
        raise Invalid(f"There is no submission {submission!r}.", help="List them: perdure obligations")
    intent = Intent(0, row.thread_number, row.id, "cancel", row.id, b"{}", by, reason, now)
    if row.state == "settled" and row.outcome != "cancelled":
        raise Conflict(f"Submission {row.id!r} already settled as {row.outcome}; that stands.")
    return tx.ledger.add_intent(intent)[0]
