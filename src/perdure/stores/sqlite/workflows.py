"""Compiled plans, and what the runs of a lineage were charged together."""

from __future__ import annotations

from collections.abc import Mapping

from perdure.stores.sqlite.rows import Rows


class Workflows(Rows):
    """The verbs of workflows; see ``ports.ledger.Ledger``."""

    def put_plan(self, digest: str, body: bytes) -> None:
        """See ``ports.ledger.Ledger.put_plan``."""
        self._execute("INSERT INTO plan (digest, body) VALUES (?, ?) ON CONFLICT (digest) DO NOTHING", (digest, body))

    def plan(self, digest: str) -> bytes | None:
        """See ``ports.ledger.Ledger.plan``."""
        row = self._row("SELECT body FROM plan WHERE digest = ?", digest)
        return None if row is None else bytes(row[0])

    def charge_lineage(
        self, lineage: str, effect: str, amounts: Mapping[str, int], limits: Mapping[str, int]
    ) -> tuple[str, int] | None:
        """See ``ports.ledger.Ledger.charge_lineage``."""
        if self._row("SELECT 1 FROM lineage_charge WHERE lineage = ? AND effect = ? LIMIT 1", lineage, effect):
            return None
        for unit, limit in limits.items():
            amount = amounts.get(unit, 0)
            used = self._charged(lineage, unit)
            if amount and used + amount > limit:
                return unit, used
        self._put(lineage, effect, amounts)
        return None

    def correct_lineage(self, lineage: str, effect: str, amounts: Mapping[str, int]) -> None:
        """See ``ports.ledger.Ledger.correct_lineage``."""
        self._execute("DELETE FROM lineage_charge WHERE lineage = ? AND effect = ?", (lineage, effect))
        self._put(lineage, effect, amounts)

    def _charged(self, lineage: str, unit: str) -> int:
        row = self._row("SELECT total(amount) FROM lineage_charge WHERE lineage = ? AND unit = ?", lineage, unit)
        return int(row[0])

    def _put(self, lineage: str, effect: str, amounts: Mapping[str, int]) -> None:
        for unit, amount in amounts.items():
            self._execute(
                "INSERT INTO lineage_charge (lineage, unit, effect, amount) VALUES (?, ?, ?, ?)",
                (lineage, unit, effect, amount),
            )
