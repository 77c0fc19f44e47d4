"""The log in SQLite: one row a batch, one statement an append, the fence inside it."""

from __future__ import annotations

import re
from typing import Any, cast

import apsw

from perdure.errors import Conflict, Invalid, OwnershipLost, Unavailable
from perdure.limits import BATCH_RECORDS_MAX, MEMORY_BYTES_MAX, MEMORY_THREAD_BYTES_MAX
from perdure.ports.log import StoredBatch, Tail
from perdure.records.blobs import MARK, NONE, Blobs
from perdure.records.codec import EMPTY_TAIL

# The batch before must be there and end where this one begins; a batch already in this place is left alone. Looking the
# neighbour up by its key keeps the statement from materialising a scan of the table it writes (40 of 60 microseconds).
_APPEND = """
INSERT OR IGNORE INTO batch (thread, first, last, epoch, tail, body)
SELECT ?1, ?2, ?3, ?4, ?5, ?6 FROM thread
WHERE number = ?1 AND epoch = ?4 AND token = ?7
  AND (?2 = 1 OR EXISTS (SELECT 1 FROM batch WHERE thread = ?1 AND first = ?8 AND last = ?2 - 1 AND tail = ?9))
"""


_SIZES = """SELECT thread, sum(size) FROM (SELECT thread, length(body) AS size FROM batch
            UNION ALL SELECT thread, length(body) FROM blob) GROUP BY thread"""
_NAMED = re.compile(rb'\{"\$blob":"(sha256:[0-9a-f]{64})"')


class SqliteLog:
    """Implements ``ports.log.Log`` on one connection; used inside a unit of work only."""

    def __init__(self, connection: apsw.Connection, *, memory: bool = False) -> None:
        self._connection = connection
        self._execute = connection.execute
        self._changes = connection.changes
        self._memory = memory
        self._sizes: dict[int, int] = {}

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
        """See ``ports.log.Log.append``."""
        if not 1 <= count <= BATCH_RECORDS_MAX:
            raise Invalid(f"A batch holds 1 to {BATCH_RECORDS_MAX} records (BATCH_RECORDS_MAX), not {count}.")
        first = expected.sequence + 1
        self._execute(
            _APPEND,
            (thread, first, first + count - 1, epoch, tail, body, token, expected.batch, expected.digest),
        )
        if self._changes() != 1:
            self._refuse(thread, epoch, token, (first, first + count - 1), body)
        elif self._memory:
            self._count(thread, len(body) + sum(map(len, apart.values())))
        for digest, payload in apart.items():
            self._execute(
                "INSERT OR IGNORE INTO blob (thread, digest, body) VALUES (?, ?, ?)", (thread, digest, payload)
            )

    def _refuse(self, thread: int, epoch: int, token: int, place: tuple[int, int], body: bytes) -> None:
        rows = self._execute("SELECT id, epoch, token FROM thread WHERE number = ?", (thread,)).fetchall()
        if not rows:
            raise Invalid(f"Thread number {thread} does not exist.", help="Admit work to it first.")
        name, actual, holder = rows[0]
        if (actual, holder) != (epoch, token):
            raise OwnershipLost(f"Thread {name!r} is at epoch {actual}; this append was for epoch {epoch}.")
        stored = self._execute(
            "SELECT body FROM batch WHERE thread = ? AND first = ? AND last = ?", (thread, *place)
        ).fetchall()
        if stored and stored[0][0] == body:
            return  # an identical replay: already there
        end = self.tail(thread)
        raise Conflict(f"Thread {name!r} ends at record {end.sequence}; the append expected {place[0] - 1}.")

    def _count(self, thread: int, size: int) -> None:
        """Keep to the limits of a store in memory. Units that were rolled back count too, until a limit is met."""
        sizes = self._sizes
        sizes[thread] = sizes.get(thread, 0) + size
        if sizes[thread] > MEMORY_THREAD_BYTES_MAX or sum(sizes.values()) > MEMORY_BYTES_MAX:
            sizes.clear()
            rows = self._execute(_SIZES).fetchall()
            sizes.update(cast("list[tuple[int, int]]", rows))
        if sizes[thread] > MEMORY_THREAD_BYTES_MAX:
            raise Unavailable(
                f"An in-memory thread holds at most {MEMORY_THREAD_BYTES_MAX:,} bytes (MEMORY_THREAD_BYTES_MAX).",
                help="Use a database file.",
            )
        if sum(self._sizes.values()) > MEMORY_BYTES_MAX:
            raise Unavailable(
                f"An in-memory store holds at most {MEMORY_BYTES_MAX:,} bytes (MEMORY_BYTES_MAX).",
                help="Use a database file.",
            )

    def tail(self, thread: int) -> Tail:
        """See ``ports.log.Log.tail``."""
        rows = self._execute(
            "SELECT last, tail, first FROM batch WHERE thread = ? ORDER BY first DESC LIMIT 1", (thread,)
        ).fetchall()
        if not rows:
            return Tail(0, EMPTY_TAIL, 0)
        last, digest, first = cast("tuple[int, bytes, int]", rows[0])
        return Tail(last, digest, first)

    def read(self, thread: int, after: int, limit: int) -> list[StoredBatch]:
        """See ``ports.log.Log.read``."""
        rows = self._execute(
            "SELECT first, last, epoch, tail, body FROM batch WHERE thread = ? AND first > ? ORDER BY first LIMIT ?",
            (thread, after, limit),
        )
        return self._stored(thread, rows.fetchall())

    def read_from(self, thread: int, sequence: int, limit: int) -> list[StoredBatch]:
        """See ``ports.log.Log.read_from``."""
        rows = self._execute(
            """SELECT first, last, epoch, tail, body FROM batch WHERE thread = ?1 AND first >=
               coalesce((SELECT max(first) FROM batch WHERE thread = ?1 AND first <= ?2), ?2) AND last >= ?2
               ORDER BY first LIMIT ?3""",
            (thread, sequence, limit),
        )
        return self._stored(thread, rows.fetchall())

    def _stored(self, thread: int, rows: list[tuple[Any, ...]]) -> list[StoredBatch]:
        """Batches of rows (first, last, epoch, tail, body), with their payloads."""
        return [
            StoredBatch(first, last, epoch, tail, body, self._apart(thread, body) if MARK in body else NONE)
            for first, last, epoch, tail, body in rows
        ]

    def _apart(self, thread: int, body: bytes) -> Blobs:
        found: dict[str, bytes] = {}
        for digest in {name.decode() for name in _NAMED.findall(body)}:
            query = "SELECT body FROM blob WHERE thread = ? AND digest = ?"
            for (payload,) in self._execute(query, (thread, digest)).fetchall():
                found[digest] = cast("bytes", payload)
        return found
