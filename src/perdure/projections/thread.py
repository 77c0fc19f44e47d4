"""Threads as people read them: what exists, and every record in order. Nothing here is derived from a clock."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from perdure.clock import to_datetime
from perdure.errors import Invalid
from perdure.limits import PAGE_BATCHES_MAX, PAGE_ROWS_MAX
from perdure.ports.ledger import ThreadRow
from perdure.ports.log import StoredBatch
from perdure.ports.store import Store, Transaction
from perdure.records import codec


class RecordView(msgspec.Struct, frozen=True):
    """One committed record.

    Attributes:
        sequence: its place in the thread, from 1; the cursor after which ``observe`` goes on.
        kind: name of the record, for example ``ToolCallPrepared``.
        at: when its batch was written, UTC. Orders nothing.
        epoch, worker: under which ownership, and by whom.
        data: the record as stored, fields left out where they have their default; ``kind`` holds its version too.
    """

    sequence: int
    kind: str
    at: dt.datetime
    epoch: int
    worker: str
    data: dict[str, Any]


def records_of(batch: StoredBatch) -> tuple[RecordView, ...]:
    """The records of a stored batch.

    Raises:
        Incompatible: written by a newer release. Corrupt: not a batch.
    """
    head = codec.decode(batch.body, batch.apart)  # refuses what this release does not know
    at = to_datetime(head.at)
    stored = msgspec.json.decode(batch.body)["records"]
    return tuple(
        RecordView(head.first + index, type(record).__name__, at, head.epoch, head.worker, data)
        for index, (record, data) in enumerate(zip(head.records, stored, strict=True))
    )


def settles(view: RecordView, submission: str) -> bool:
    """Whether this record is the settlement of a submission."""
    return view.kind == "SubmissionSettled" and view.data["submission"] == submission


class ThreadView(msgspec.Struct, frozen=True):
    """One thread.

    Attributes:
        thread: its id. created_at: UTC.
        submissions: how many were ever admitted to it. open: how many of them are owed.
        records: how many its log holds. archived: whether it is hidden from listings.
        history: every record in order, where it was asked for; else empty.
    """

    thread: str
    created_at: dt.datetime
    submissions: int
    open: int
    records: int
    archived: bool
    history: tuple[RecordView, ...] = ()


async def threads(store: Store, *, archived: bool = False) -> list[ThreadView]:
    """Threads in order of creation, without their history.

    Args:
        archived: also those that were archived.
    """
    found: list[ThreadView] = []
    after = 0
    while True:

        def page(tx: Transaction, after: int = after) -> list[tuple[int, ThreadView]]:
            return [(row.number, _view(tx, row)) for row in tx.ledger.threads(after=after, limit=PAGE_ROWS_MAX)]

        views = await store.scan(page)
        found.extend(view for _, view in views if archived or not view.archived)
        if len(views) < PAGE_ROWS_MAX:
            return found
        after = views[-1][0]


def _view(tx: Transaction, row: ThreadRow) -> ThreadView:
    owed = len(tx.ledger.open_work(thread=row.number))
    tail = tx.log.tail(row.number).sequence
    return ThreadView(row.id, to_datetime(row.created_at), row.positions, owed, tail, row.archived_at is not None)


async def show(store: Store, thread: str) -> ThreadView:
    """One thread with every record of its log, up to its end at the beginning of the reading.

    Raises:
        Invalid: there is no such thread. Corrupt, Incompatible: its log cannot be read.
    """

    def head(tx: Transaction) -> tuple[ThreadRow, ThreadView] | None:
        row = tx.ledger.thread(thread)
        return None if row is None else (row, _view(tx, row))

    found = store.read(head)
    if found is None:
        raise Invalid(f"There is no thread {thread!r}.", help="List them: perdure threads")
    row, view = found
    history: list[RecordView] = []
    while len(history) < view.records:

        def page(tx: Transaction, after: int = len(history)) -> list[RecordView]:
            stored = tx.log.read(row.number, after, PAGE_BATCHES_MAX)
            return [record for batch in stored for record in records_of(batch)]

        records = await store.scan(page)
        if not records:
            break
        history.extend(records)
    return msgspec.structs.replace(view, history=tuple(history[: view.records]))
