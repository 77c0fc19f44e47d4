"""Requests for approval as people read them."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from perdure import canonical
from perdure.clock import to_datetime
from perdure.ports.ledger import ApprovalRow


class Approval(msgspec.Struct, frozen=True):
    """One request for approval.

    Attributes:
        id: id of the request. run, call, thread, submission: where it belongs.
        tool: name of the tool. arguments: what it would be called with, secrets redacted, as JSON value.
        digest: covers the exact arguments; the decision holds for them alone.
        reason: why it asks. asked_at: UTC.
        status: ``pending``, ``approved``, ``rejected`` or ``expired``.
        by, decision_reason, decided_at: who decided, why and when; None while it is pending.
        decided: a decision was given; while it is pending, the next owner of its thread takes it into the log.
    """

    id: str
    run: str
    tool: str
    arguments: Any
    digest: str
    reason: str
    asked_at: dt.datetime
    status: str
    by: str | None
    decision_reason: str | None
    decided_at: dt.datetime | None
    thread: str
    submission: str
    call: str
    decided: bool = False

    @property
    def resolve(self) -> str | None:
        """The command that approves it; None when it is decided."""
        return approve_command(self.id) if self.status == "pending" and not self.decided else None


def approve_command(approval: str) -> str:
    """The command that approves one request (``reject`` in its place rejects it)."""
    return f"perdure approvals approve {approval} --reason …"


def approval(row: ApprovalRow, thread: str = "", *, decided: bool = False) -> Approval:
    """The view of one row. ``thread`` is the id of its thread, where the caller knows it."""
    return Approval(
        id=row.id, run=row.run, tool=row.tool, arguments=canonical.decode(row.arguments, "stored arguments"),
        digest=row.digest, reason=row.reason, asked_at=to_datetime(row.asked_at), status=row.status, by=row.by,
        decision_reason=row.decision_reason,
        decided_at=None if row.decided_at is None else to_datetime(row.decided_at), thread=thread,
        submission=row.submission, call=row.call, decided=decided or row.status != "pending",
    )  # fmt: skip
