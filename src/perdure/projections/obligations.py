"""What is owed, for the person on duty: every open submission, what it waits for, and the one command that helps."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby
from typing import Literal

import msgspec

from perdure.clock import MICROSECONDS, Instant
from perdure.limits import ATTEMPTS_WITHOUT_PROGRESS_MAX, PAGE_ROWS_MAX
from perdure.ports.ledger import Fault, Submission, ThreadRow, WorkItem
from perdure.ports.store import Store, Transaction
from perdure.projections.approval import approve_command
from perdure.projections.effect import decisions, question, reconcile_command
from perdure.rules.lifecycle import SubmissionState as State

BlockedOn = Literal["unknown", "approval", "blocked", "stuck", "running", "ready"]
Severity = Literal["ok", "aging", "overdue"]
WORKER = "perdure worker --app MODULE:NAME"
_FAR = 10 * 365 * 24 * 3600 * MICROSECONDS  # a backoff beyond this waits for an operator


class Obligation(msgspec.Struct, frozen=True):
    """One owed submission.

    Attributes:
        submission, run, thread: their ids. agent: name of its program.
        state: of the submission in the ledger.
        blocked_on: what it waits for. ``unknown``: a verdict on an effect; ``approval``: a person's decision;
            ``blocked``: its thread cannot be read; ``stuck``: attempts made no progress; ``running``: a live worker
            has it; ``ready``: the next free worker takes it; None: its turn on its thread.
        age_seconds: how long it has been owed.
        severity: ``ok``, ``aging`` or ``overdue``, by its age.
        detail: one sentence for a person.
        command: the command that helps; None when there is nothing to do.
    """

    submission: str
    run: str
    thread: str
    agent: str
    state: str
    blocked_on: BlockedOn | None
    age_seconds: float
    severity: Severity
    detail: str
    command: str | None


class Waiting(msgspec.Struct, frozen=True):
    """What one submission waits for, and the command that helps."""

    on: BlockedOn | None
    detail: str
    command: str | None = None


async def obligations(store: Store, now: Instant, aging: float, overdue: float) -> list[Obligation]:
    """Every owed submission, by thread and position, also those in good order.

    Args:
        now: the instant ages are counted to.
        aging, overdue: seconds after which an obligation is called so.
    """
    found: list[Obligation] = []
    after = 0
    while True:

        def page(tx: Transaction, after: int = after) -> list[tuple[WorkItem, Waiting]]:
            return _page(tx, after, now)

        rows = await store.scan(page)
        found.extend(_obligation(item, waiting, now, aging, overdue) for item, waiting in rows)
        if len(rows) < PAGE_ROWS_MAX:
            return found
        after = rows[-1][0].thread_number


def _obligation(item: WorkItem, waiting: Waiting, now: Instant, aging: float, overdue: float) -> Obligation:
    age = max(0.0, (now - item.created_at) / MICROSECONDS)
    severity: Severity = "overdue" if age >= overdue else "aging" if age >= aging else "ok"
    run = "run_" + item.submission[4:]
    return Obligation(
        item.submission, run, item.thread, item.program, item.state, waiting.on, age, severity, waiting.detail,
        waiting.command,
    )  # fmt: skip


def _page(tx: Transaction, after: int, now: Instant) -> list[tuple[WorkItem, Waiting]]:
    faults = {fault.thread: fault for fault in tx.ledger.faults()}
    work = tx.ledger.open_work(after=after, limit=PAGE_ROWS_MAX)  # never ends inside a thread
    found: list[tuple[WorkItem, Waiting]] = []
    for number, items in groupby(work, lambda item: item.thread_number):
        found += waiting_on(tx, number, list(items), faults.get(number), now)
    return found


def waiting_on(
    tx: Transaction, thread: int, items: Sequence[WorkItem], fault: Fault | None, now: Instant
) -> list[tuple[WorkItem, Waiting]]:
    """What each open submission of one thread waits for, in order of position."""
    row = tx.ledger.thread(thread)
    assert row is not None
    found: list[tuple[WorkItem, Waiting]] = []
    ahead: WorkItem | None = None
    for item in items:
        waiting = _waits_for(tx, item.submission, row, fault, ahead, now)
        found.append((item, waiting))
        if ahead is None and waiting.on != "unknown":  # what is parked may be passed; anything else comes first
            ahead = item
    return found


def _waits_for(
    tx: Transaction, submission: str, thread: ThreadRow, fault: Fault | None, ahead: WorkItem | None, now: Instant
) -> Waiting:
    """What an open submission waits for. ``ahead`` is the one before it on its thread that it may not pass."""
    name = shlex.quote(thread.id)
    if fault is not None:
        help = f"perdure recover --thread {name}"
        return Waiting("blocked", f"its thread cannot be read ({fault.kind}: {fault.message})", help)
    if ahead is not None:
        return Waiting(None, f"waits for its turn behind {ahead.submission}")
    row = tx.ledger.submission(submission)
    assert row is not None
    owned = thread.owner is not None and thread.lease_until is not None and thread.lease_until > now
    if row.state in (State.UNKNOWN, State.SUSPENDED):
        decision = _decision(tx, row)
        if decision is not None:
            return decision
    elif owned:
        return Waiting("running", f"worker {thread.owner} has it")
    elif row.attempts > ATTEMPTS_WITHOUT_PROGRESS_MAX or row.not_before > now + _FAR:
        help = f"perdure redrive {row.id}"
        return Waiting("stuck", f"{row.attempts} attempts in a row made no progress", help)
    if thread.owner is not None and not owned:
        return Waiting("ready", "its worker is gone; the next one takes it over", WORKER)
    if row.not_before > now:
        wait = (row.not_before - now) / MICROSECONDS
        return Waiting("ready", f"is tried again in {wait:.1f} s, attempt {row.attempts + 1}", WORKER)
    return Waiting("ready", "the next free worker takes it", WORKER)


def _decision(tx: Transaction, row: Submission) -> Waiting | None:
    """The decision of a person that a waiting submission lacks; None when all are given."""
    intents = tx.ledger.intents(row.thread_number)
    if any(intent.kind == "cancel" and intent.subject == row.id for intent in intents):
        return None
    given = decisions(tx, row.thread_number)
    unknown = [e for e in tx.ledger.effects(status="unknown", run=row.run) if e.id not in given]
    if unknown:
        first = unknown[0]
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        what = question(first.operation, first.call, first.step)
        return Waiting("unknown", f"nobody knows whether {what}{more}", reconcile_command(first.id))
    asked = [a for a in tx.ledger.approvals(status="pending", run=row.run) if a.id not in given]
    if asked:
        more = f" and {len(asked) - 1} more" if len(asked) > 1 else ""
        return Waiting("approval", f"{asked[0].tool!r} asks a person{more}", approve_command(asked[0].id))
    return None
