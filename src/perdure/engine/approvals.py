"""Decisions of people on calls that ask first: bound to the request and its exact arguments, single use."""

from __future__ import annotations

import msgspec

from perdure.engine.host import Host
from perdure.engine.intents import ApprovalBody
from perdure.errors import Conflict, Invalid
from perdure.limits import TEXT_CHARS_MAX
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import ApprovalRow, Intent
from perdure.ports.store import Transaction
from perdure.records.effect import Decision

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ApprovalBody).decode


def check_text(value: str, what: str, *, blank: bool = False) -> str:
    """An author or a reason: text without control characters but line breaks, within bounds.

    Raises:
        Invalid: it is not.
    """
    if len(value) > TEXT_CHARS_MAX:
        raise Invalid(f"{what} is not text of at most {TEXT_CHARS_MAX:,} characters.")
    if not blank and not value.strip():
        raise Invalid(f"{what} is blank.", help=f"Say {what}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Invalid(f"{what} holds a lone surrogate.") from None
    if any(not (c.isprintable() or c in "\n\t") for c in value):
        raise Invalid(f"{what} holds a control character.")
    return value


async def decide(host: Host, id: str, decision: Decision, *, by: str, reason: str) -> ApprovalRow:
    """Record a decision as an intent; the thread's next owner takes it into the log before acting on it.

    Raises:
        Invalid: no such request. Conflict: decided otherwise, or its run is over.
    """
    check_text(by, "by")
    check_text(reason, "reason", blank=True)
    now = host.clock.now()
    row = await host.store.write(Boundary.INTENT, lambda tx: _decide(tx, id, decision, by, reason, now))
    host.commanded()
    return row


def _decide(tx: Transaction, id: str, decision: Decision, by: str, reason: str, now: int) -> ApprovalRow:
    row = tx.ledger.approval(id)
    if row is None:
        raise Invalid(f"There is no approval request {id!r}.", help="List them: perdure approvals list")
    if row.status != "pending":
        if row.status == decision:
            return row
        raise Conflict(f"Approval {id!r} was already {row.status} by {row.by}; that stands.")
    body = _encode(ApprovalBody(id, row.run, row.call, decision, row.digest))
    intent, new = tx.ledger.add_intent(Intent(0, row.thread, row.submission, "approval", id, body, by, reason, now))
    if not new and _decode(intent.body).decision != decision:
        raise Conflict(f"Approval {id!r} was already {_decode(intent.body).decision} by {intent.by}; that stands.")
    return decided(row, decision, intent)


def decided(row: ApprovalRow, decision: Decision, intent: Intent) -> ApprovalRow:
    """The row as it will read once the decision is in the log."""
    return ApprovalRow(
        row.id, row.thread, row.submission, row.run, row.call, row.tool, row.arguments, row.digest, row.reason,
        row.asked_at, decision, intent.by, intent.reason, intent.at,
    )  # fmt: skip
