"""Reading a thread's log for a projection: a few batches inline, the rest in pages off the loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from perdure.errors import Corrupt
from perdure.limits import PAGE_BATCHES_MAX, PEEK_BATCHES
from perdure.ports.log import StoredBatch
from perdure.ports.store import Store

RESTORE = "Run `perdure verify` and restore the database from a backup."


def needle(id: str) -> bytes:
    """How an id reads inside a stored batch: a batch without it has no record about it."""
    return msgspec.json.encode(id)


async def batches(store: Store, thread: int, sequence: int) -> AsyncIterator[StoredBatch]:
    """Stored batches from the one that holds ``sequence`` on: a few inline, the rest in pages off the loop."""
    page = store.read(lambda tx: tx.log.read_from(thread, sequence, PEEK_BATCHES))
    limit = PEEK_BATCHES
    while page:
        for batch in page:
            yield batch
        if len(page) < limit:
            return
        after, limit = page[-1].last, PAGE_BATCHES_MAX
        page = await store.scan(lambda tx, after=after: tx.log.read(thread, after, PAGE_BATCHES_MAX))  # type: ignore[misc]


def json_value(raw: bytes | msgspec.Raw) -> Any:
    """The value of stored JSON.

    Raises:
        Corrupt: it is none.
    """
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise Corrupt(f"A stored value is not JSON: {error}.", help=RESTORE) from error
