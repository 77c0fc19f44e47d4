"""The log port: what happened. Append-only, fenced, hash-chained.

All verbs run inside a unit of work of the store (``ports.store``), in the writer, synchronously.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from perdure.records.blobs import NONE, Blobs


class Tail(NamedTuple):
    """Where a log ends.

    Attributes:
        sequence: of its last record, 0 when empty.
        digest: the 32-byte chain digest there.
        batch: sequence of the first record of its last batch, 0 when empty: the place of that batch.
    """

    sequence: int
    digest: bytes
    batch: int


class StoredBatch(msgspec.Struct, frozen=True):
    """A batch as stored: its place, the digest after it, the bytes as appended, and the payloads that stand beside them."""

    first: int
    last: int
    epoch: int
    tail: bytes
    body: bytes
    apart: Blobs = NONE


class Log(Protocol):
    """Append and read one thread's batches. ``thread`` is the store's number for it (``ledger.Claimed.number``)."""

    def append(
        self,
        thread: int,
        epoch: int,
        token: int,
        expected: Tail,
        count: int,
        body: bytes,
        tail: bytes,
        apart: Blobs = NONE,
    ) -> None:
        """Append one batch of ``count`` records (1..256) after ``expected``; ``tail`` is the digest after it.

        ``apart`` are the payloads that its bytes name by digest; they are kept with the thread.

        Atomic with the unit. The epoch and token are checked in the same statement as the write.
        Idempotent: the same bytes at the same place again change nothing.

        Raises:
            OwnershipLost: epoch or token are not the thread's current ones, older or newer.
            Conflict: the log does not end at ``expected`` and what follows is not this batch.
        """
        ...

    def tail(self, thread: int) -> Tail:
        """Where the log ends. Strongly consistent."""
        ...

    def read(self, thread: int, after: int, limit: int) -> list[StoredBatch]:
        """At most ``limit`` batches whose first record comes after sequence ``after``, in order, without gaps."""
        ...

    def read_from(self, thread: int, sequence: int, limit: int) -> list[StoredBatch]:
        """At most ``limit`` batches from the one that holds ``sequence`` on, in order, without gaps."""
        ...
