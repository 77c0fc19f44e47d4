"""Effects and approvals, as the ledger lists them."""

from __future__ import annotations

import apsw

from perdure.errors import Conflict
from perdure.ports.ledger import ApprovalRow, EffectRow
from perdure.rules.lifecycle import EffectStatus, may_end
from perdure.stores.sqlite.rows import Rows

_EFFECT = """SELECT id, thread, submission, run, call, step, operation, kind, effect_class, risk, key, business_key,
 status, verdict, tries, sequence, started_at, ended_at, next_probe_at, held_by, held_until FROM effect """
_OPEN_BUSINESS = "status IN ('started', 'unknown') AND verdict IS NULL"
_APPROVAL = """SELECT id, thread, submission, run, call, tool, arguments, digest, reason, asked_at, status, by,
 decision_reason, decided_at FROM approval """
# An effect's end is legal only from where the lifecycle table says; the check is in the statement that writes it.
_END_EFFECT = {
    str(
        status
    ): "UPDATE effect SET status = ?2, verdict = ?3, ended_at = coalesce(?4, ended_at) WHERE id = ?1 AND status IN ("
    + ", ".join(f"'{before}'" for before in sorted(may_end(status)))
    + ")"
    for status in (EffectStatus.CONFIRMED, EffectStatus.REFUSED, EffectStatus.UNKNOWN)
}


class Effects(Rows):
    """The verbs of effects and approvals; see ``ports.ledger.Ledger``."""

    def put_effect(self, row: EffectRow) -> None:
        """See ``ports.ledger.Ledger.put_effect``."""
        e = row
        values = (
            e.id, e.thread, e.submission, e.run, e.call, e.step, e.operation, e.kind, e.effect_class, e.risk, e.key,
            e.business_key, e.status, e.verdict, e.tries, e.sequence, e.started_at, e.ended_at, e.next_probe_at,
            e.held_by, e.held_until,
        )  # fmt: skip
        try:
            self._execute(
                "INSERT INTO effect VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values
            )
        except apsw.ConstraintError:
            other = None if e.business_key is None else self.open_business_key(e.operation, e.business_key)
            if other is None:
                raise Conflict(f"Effect {e.id!r} is already in the ledger.") from None
            raise Conflict(
                f"{e.operation!r} on {e.business_key!r} is {other.status} as effect {other.id!r} of run {other.run!r}.",
                help="Wait for its outcome, or reconcile it.",
            ) from None

    def end_effect(self, id: str, status: str, verdict: str | None, now: int | None) -> None:
        """See ``ports.ledger.Ledger.end_effect``."""
        self._execute(_END_EFFECT[status], (id, status, verdict, now))
        if self._changes() != 1:
            row = self.effect(id)
            known = "does not exist" if row is None else f"is {row.status}"
            raise Conflict(f"Effect {id!r} {known}; it cannot become {status}.")

    def effect(self, id: str) -> EffectRow | None:
        """See ``ports.ledger.Ledger.effect``."""
        row = self._row(_EFFECT + "WHERE id = ?", id)
        return None if row is None else EffectRow(*row)

    def effects(
        self, *, status: str | None = None, run: str | None = None, limit: int = 1000, after: str = ""
    ) -> list[EffectRow]:
        """See ``ports.ledger.Ledger.effects``."""
        only = {None: "", "unknown": "AND status = 'unknown' AND verdict IS NULL "}.get(status, "AND status = ?1 ")
        if run is not None:
            only += "AND (run = ?2 OR (run > ?2 || '.' AND run < ?2 || '/')) "
        if after:  # the id of the last row of the page before
            only += "AND (started_at, id) > (SELECT started_at, id FROM effect WHERE id = ?3) "
        rows = self._rows(_EFFECT + f"WHERE TRUE {only}ORDER BY started_at, id LIMIT ?4", status, run, after, limit)
        return [EffectRow(*row) for row in rows]

    def open_business_key(self, operation: str, business_key: str) -> EffectRow | None:
        """See ``ports.ledger.Ledger.open_business_key``."""
        row = self._row(
            _EFFECT + "WHERE operation = ? AND business_key = ? AND " + _OPEN_BUSINESS, operation, business_key
        )
        return None if row is None else EffectRow(*row)

    def hold_effect(self, id: str, owner: str | None, until: int | None) -> None:
        """See ``ports.ledger.Ledger.hold_effect``."""
        self._execute("UPDATE effect SET held_by = ?, held_until = ? WHERE id = ?", (owner, until, id))

    def due_probes(self, now: int, limit: int = 100) -> list[EffectRow]:
        """See ``ports.ledger.Ledger.due_probes``."""
        due = "WHERE status = 'unknown' AND verdict IS NULL AND next_probe_at <= ? ORDER BY next_probe_at, id LIMIT ?"
        rows = self._rows(_EFFECT + due, now, limit)
        return [EffectRow(*row) for row in rows]

    def schedule_probe(self, id: str, at: int) -> None:
        """See ``ports.ledger.Ledger.schedule_probe``."""
        self._execute("UPDATE effect SET next_probe_at = ? WHERE id = ?", (at, id))

    def put_approval(self, row: ApprovalRow) -> None:
        """See ``ports.ledger.Ledger.put_approval``."""
        a = row
        self._execute(
            "INSERT OR IGNORE INTO approval VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (a.id, a.thread, a.submission, a.run, a.call, a.tool, a.arguments, a.digest, a.reason, a.asked_at,
             a.status, a.by, a.decision_reason, a.decided_at),
        )  # fmt: skip

    def decide_approval(self, id: str, status: str, by: str, reason: str, now: int) -> None:
        """See ``ports.ledger.Ledger.decide_approval``."""
        self._execute(
            """UPDATE approval SET status = ?, by = ?, decision_reason = ?, decided_at = ?
               WHERE id = ? AND status = 'pending'""",
            (status, by, reason, now, id),
        )

    def approval(self, id: str) -> ApprovalRow | None:
        """See ``ports.ledger.Ledger.approval``."""
        row = self._row(_APPROVAL + "WHERE id = ?", id)
        return None if row is None else ApprovalRow(*row)

    def approvals(self, *, status: str | None = None, run: str | None = None, limit: int = 1000) -> list[ApprovalRow]:
        """See ``ports.ledger.Ledger.approvals``."""
        only = "" if status is None else "AND status = ?1 "
        if run is not None:
            only += "AND (run = ?2 OR (run > ?2 || '.' AND run < ?2 || '/')) "
        rows = self._rows(_APPROVAL + f"WHERE TRUE {only}ORDER BY asked_at, id LIMIT ?3", status, run, limit)
        return [ApprovalRow(*row) for row in rows]
