"""What is known of the files that tasks left: who refers to them, and what keeps them meanwhile."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from perdure.ports.ledger import ArtifactRow
from perdure.records.artifact import ArtifactRef
from perdure.stores.sqlite.rows import Rows

_LIST = """SELECT a.digest, a.size, a.created_at, a.verified_at, coalesce(r.run, ''), coalesce(r.task, ''),
 coalesce(r.path, ''), coalesce(r.name, ''), coalesce(r.media_type, ''),
 (SELECT max(until) FROM artifact_lease l WHERE l.digest = a.digest)
 FROM artifact a LEFT JOIN artifact_ref r ON r.digest = a.digest """
_LOOSE = """NOT EXISTS (SELECT 1 FROM artifact_ref r WHERE r.digest = a.digest)
 AND NOT EXISTS (SELECT 1 FROM artifact_lease l WHERE l.digest = a.digest AND l.until > ?1)"""


class ArtifactRows(Rows):
    """The verbs of artifacts; see ``ports.ledger.Ledger``."""

    def _blobs(self, refs: Sequence[ArtifactRef], now: int) -> None:
        for ref in refs:
            self._execute(
                "INSERT INTO artifact (digest, size, created_at) VALUES (?, ?, ?) ON CONFLICT (digest) DO NOTHING",
                (ref.digest, ref.size, now),
            )

    def lease_artifacts(self, run: str, task: str, refs: Sequence[ArtifactRef], now: int, until: int) -> None:
        """See ``ports.ledger.Ledger.lease_artifacts``."""
        self._blobs(refs, now)
        for ref in refs:
            self._execute(
                """INSERT INTO artifact_lease (run, task, digest, until) VALUES (?, ?, ?, ?)
                   ON CONFLICT DO UPDATE SET until = excluded.until""",
                (run, task, ref.digest, until),
            )

    def keep_artifacts(self, run: str, task: str, refs: Sequence[ArtifactRef], now: int) -> None:
        """See ``ports.ledger.Ledger.keep_artifacts``."""
        self._blobs(refs, now)
        for ref in refs:
            self._execute(
                """INSERT INTO artifact_ref (run, task, path, digest, name, media_type) VALUES (?, ?, ?, ?, ?, ?)
                   ON CONFLICT DO UPDATE SET digest = excluded.digest, name = excluded.name,
                   media_type = excluded.media_type""",
                (run, task, ref.path, ref.digest, ref.name, ref.media_type),
            )
        self._execute("DELETE FROM artifact_lease WHERE run = ? AND task = ?", (run, task))

    def artifacts(
        self, *, run: str | None = None, task: str | None = None, digest: str | None = None, limit: int = 1000
    ) -> list[ArtifactRow]:
        """See ``ports.ledger.Ledger.artifacts``."""
        rows = self._rows(
            _LIST
            + "WHERE (?1 IS NULL OR r.run = ?1) AND (?2 IS NULL OR r.task = ?2) AND (?3 IS NULL OR a.digest = ?3)"
            + " ORDER BY r.run, r.task, r.path, a.digest LIMIT ?4",
            run, task, digest, limit,
        )  # fmt: skip
        return [ArtifactRow(*row) for row in rows]

    def verified_artifact(self, digest: str, now: int) -> None:
        """See ``ports.ledger.Ledger.verified_artifact``."""
        self._execute("UPDATE artifact SET verified_at = ? WHERE digest = ?", (now, digest))

    def loose_artifacts(self, before: int, now: int) -> list[tuple[str, int]]:
        """See ``ports.ledger.Ledger.loose_artifacts``."""
        rows = self._rows(f"SELECT digest, size FROM artifact a WHERE created_at < ?2 AND {_LOOSE}", now, before)
        return [(digest, size) for digest, size in rows]

    def drop_artifacts(self, digests: Collection[str], now: int) -> list[str]:
        """See ``ports.ledger.Ledger.drop_artifacts``."""
        wanted = json.dumps(list(digests))
        which = f"digest IN (SELECT value FROM json_each(?2)) AND {_LOOSE}"
        found = [row[0] for row in self._rows(f"SELECT digest FROM artifact a WHERE {which}", now, wanted)]
        for digest in found:
            self._execute("DELETE FROM artifact_lease WHERE digest = ?", (digest,))
            self._execute("DELETE FROM artifact WHERE digest = ?", (digest,))
        return found
