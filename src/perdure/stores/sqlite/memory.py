"""Long-term memory in SQLite: entries by namespace and key."""

from __future__ import annotations

from perdure.ports.ledger import MemoryRow
from perdure.stores.sqlite.rows import Rows

_MEMORY = "SELECT namespace, key, entry, text, vector, updated_at, expires_at FROM memory "
_ALIVE = "(expires_at IS NULL OR expires_at > ?2)"


class Memories(Rows):
    """The verbs of long-term memory; see ``ports.ledger.Ledger``."""

    def put_memory(self, row: MemoryRow) -> None:
        """See ``ports.ledger.Ledger.put_memory``."""
        self._execute(
            """INSERT INTO memory (namespace, key, entry, text, vector, updated_at, expires_at)
               VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET entry = excluded.entry, text = excluded.text,
               vector = excluded.vector, updated_at = excluded.updated_at, expires_at = excluded.expires_at""",
            (row.namespace, row.key, row.entry, row.text, row.vector, row.updated_at, row.expires_at),
        )

    def memory(self, namespace: str, key: str, now: int) -> MemoryRow | None:
        """See ``ports.ledger.Ledger.memory``."""
        row = self._row(_MEMORY + f"WHERE namespace = ?1 AND {_ALIVE} AND key = ?3", namespace, now, key)
        return None if row is None else MemoryRow(*row)

    def memories(self, namespace: str, now: int, *, after: str = "", limit: int = 1000) -> list[MemoryRow]:
        """See ``ports.ledger.Ledger.memories``."""
        rows = self._rows(
            _MEMORY + f"WHERE namespace = ?1 AND {_ALIVE} AND key > ?3 ORDER BY key LIMIT ?4",
            namespace,
            now,
            after,
            limit,
        )
        return [MemoryRow(*row) for row in rows]

    def forget_expired(self, now: int) -> int:
        """See ``ports.ledger.Ledger.forget_expired``."""
        self._execute("DELETE FROM memory WHERE expires_at <= ?", (now,))
        return int(self._changes())
