"""Commands on their way into a log, and what a decision wakes."""

from __future__ import annotations

from perdure.ports.ledger import Intent
from perdure.records.task import PROGRAM
from perdure.stores.sqlite.rows import Rows

_INTENT = "SELECT number, thread, submission, kind, subject, body, by, reason, at, applied_at FROM intent "


class Intents(Rows):
    """The verbs of intents; see ``ports.ledger.Ledger``."""

    def add_intent(self, intent: Intent) -> tuple[Intent, bool]:
        """See ``ports.ledger.Ledger.add_intent``."""
        stored = self._row(_INTENT + "WHERE kind = ? AND subject = ?", intent.kind, intent.subject)
        if stored is not None:
            return Intent(*stored), False
        i = intent
        self._execute(
            """INSERT INTO intent (thread, submission, kind, subject, body, by, reason, at)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?)""",
            (i.thread, i.submission, i.kind, i.subject, i.body, i.by, i.reason, i.at),
        )
        if i.submission is not None:
            self._wake(i.submission, i.kind, i.at)
        self._refresh(i.thread, i.at)
        row = self._row(_INTENT + "WHERE kind = ? AND subject = ?", i.kind, i.subject)
        assert row is not None
        return Intent(*row), True

    def _wake(self, submission: str, kind: str, now: int) -> None:
        run = "run_" + submission[4:]
        row = self._row("SELECT program FROM submission WHERE id = ?", submission)
        whole = row is not None and row[0] != PROGRAM  # the branches of a workflow go on by themselves
        if whole and kind == "verdict" and self._undecided_effects(run):
            return
        if whole and kind == "approval" and self._undecided_approvals(run):
            return
        self._execute(
            "UPDATE submission SET wake_at = ?2, not_before = 0 WHERE id = ?1 AND state IN ('suspended', 'unknown')",
            (submission, now),
        )
        if kind == "cancel":  # it ends a backoff too, also the one that only an operator ends
            self._execute("UPDATE submission SET not_before = 0 WHERE id = ? AND state <> 'settled'", (submission,))

    def intents(self, thread: int, *, pending: bool = True) -> list[Intent]:
        """See ``ports.ledger.Ledger.intents``."""
        only = "AND applied_at IS NULL " if pending else ""
        return [Intent(*row) for row in self._rows(_INTENT + f"WHERE thread = ? {only}ORDER BY number", thread)]

    def pending_intents(self, limit: int = 1000) -> list[Intent]:
        """See ``ports.ledger.Ledger.pending_intents``."""
        rows = self._rows(
            _INTENT.replace("FROM intent", "FROM intent INDEXED BY intent_pending")
            + "WHERE applied_at IS NULL ORDER BY number LIMIT ?", limit,
        )  # fmt: skip
        return [Intent(*row) for row in rows]

    def mark_applied(self, intent: int, now: int) -> None:
        """See ``ports.ledger.Ledger.mark_applied``."""
        rows = self._rows(
            "UPDATE intent SET applied_at = ? WHERE number = ? AND applied_at IS NULL RETURNING thread", now, intent
        )
        for (thread,) in rows:
            self._refresh(thread, now)  # a thread that was due for this alone is due no more

    def _undecided_effects(self, run: str) -> int:
        return int(
            self._rows(
                """SELECT count(*) FROM effect e WHERE run = ? AND status = 'unknown' AND verdict IS NULL AND NOT EXISTS
                   (SELECT 1 FROM intent i WHERE i.kind = 'verdict' AND i.applied_at IS NULL
                    AND i.subject >= e.id AND i.subject < e.id || '$')""",
                run,
            )[0][0]
        )

    def _undecided_approvals(self, run: str) -> int:
        return int(
            self._rows(
                """SELECT count(*) FROM approval a WHERE run = ? AND status = 'pending' AND NOT EXISTS
                   (SELECT 1 FROM intent i WHERE i.kind = 'approval' AND i.subject = a.id)""",
                run,
            )[0][0]
        )
