"""Discovery and operation: listings, blocked threads, what an operator does."""

from __future__ import annotations

from perdure.errors import Conflict
from perdure.ports.ledger import Fault, Submission, ThreadRow, WorkItem
from perdure.rules.lifecycle import SubmissionState as S
from perdure.stores.sqlite.rows import SUBMISSION, THREAD, Rows, submission_of

# the same order, each with an index of its own
_BY_NUMBER = ("s.number", "AND s.number > (SELECT number FROM submission WHERE id = ?3) ")
_BY_POSITION = ("s.position", "AND s.position > (SELECT position FROM submission WHERE id = ?3) ")
_WORK = """SELECT s.id, t.id, s.thread, s.position, s.program, s.state, s.created_at
 FROM submission s INDEXED BY submission_open JOIN thread t ON t.number = s.thread
 WHERE s.state <> 'settled' AND s.thread BETWEEN ?1 AND ?2 ORDER BY s.thread, s.position LIMIT ?3"""
_FAULT = """SELECT f.thread, t.id, f.kind, f.message, f.first_at, f.last_at, f.tries, f.next_at
 FROM fault f JOIN thread t ON t.number = f.thread """


class Lists(Rows):
    """The verbs of discovery and operation; see ``ports.ledger.Ledger``."""

    def threads(self, *, after: int = 0, limit: int = 1000) -> list[ThreadRow]:
        """See ``ports.ledger.Ledger.threads``."""
        rows = self._rows(THREAD + "WHERE number > ? ORDER BY number LIMIT ?", after, limit)
        return [ThreadRow(*row) for row in rows]

    def open_work(self, *, after: int = 0, limit: int = 1000, thread: int | None = None) -> list[WorkItem]:
        """See ``ports.ledger.Ledger.open_work``."""
        first, last = (after + 1, 1 << 62) if thread is None else (max(thread, after + 1), thread)
        rows = self._rows(_WORK, first, last, limit)
        if len(rows) == limit:  # a page never ends inside a thread, or the next one would miss the rest
            number, position = rows[-1][2], rows[-1][3]
            rows += [row for row in self._rows(_WORK, number, number, -1) if row[3] > position]
        return [WorkItem(*row) for row in rows]

    def abandoned(self, now: int, limit: int = 100) -> list[ThreadRow]:
        """See ``ports.ledger.Ledger.abandoned``."""
        rows = self._rows(
            THREAD + "WHERE owner IS NOT NULL AND blocked = 0 AND lease_until <= ? ORDER BY lease_until LIMIT ?",
            now, limit,
        )  # fmt: skip
        return [ThreadRow(*row) for row in rows]

    def submissions(
        self, *, thread: int | None = None, state: str | None = None, after: str = "", limit: int = 1000
    ) -> list[Submission]:
        """See ``ports.ledger.Ledger.submissions``."""
        order, later = _BY_NUMBER if thread is None else _BY_POSITION
        only = "" if thread is None else "AND s.thread = ?1 "
        if state is not None:
            only += "AND s.state = ?2 "
        if after:
            only += later
        rows = self._rows(SUBMISSION + f"WHERE TRUE {only}ORDER BY {order} LIMIT ?4", thread, state, after, limit)
        return [submission_of(row) for row in rows]

    def put_fault(self, fault: Fault) -> None:
        """See ``ports.ledger.Ledger.put_fault``."""
        f = fault
        self._execute(
            """INSERT INTO fault VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (thread) DO UPDATE SET kind = excluded.kind,
               message = excluded.message, last_at = excluded.last_at, tries = fault.tries + 1,
               next_at = excluded.next_at""",
            (f.thread, f.kind, f.message, f.first_at, f.last_at, f.tries, f.next_at),
        )
        self._execute("UPDATE thread SET blocked = 1 WHERE number = ?", (f.thread,))

    def clear_fault(self, thread: int, now: int) -> None:
        """See ``ports.ledger.Ledger.clear_fault``."""
        self._execute("DELETE FROM fault WHERE thread = ?", (thread,))
        self._execute("UPDATE thread SET blocked = 0 WHERE number = ?", (thread,))
        self._refresh(thread, now)

    def faults(self) -> list[Fault]:
        """See ``ports.ledger.Ledger.faults``."""
        return [Fault(*row) for row in self._rows(_FAULT + "ORDER BY f.first_at, f.thread")]

    def redrive(self, submission: str, now: int) -> bool:
        """See ``ports.ledger.Ledger.redrive``."""
        found = self.submission(submission)
        if found is None or found.state == S.SETTLED:
            return False
        row = self._row("SELECT owner, lease_until FROM thread WHERE number = ?", found.thread_number)
        if row is not None and row[0] is not None and row[1] > now:
            return False
        self._execute(
            """UPDATE submission SET not_before = 0, attempts = 0, attempt_tail = -1,
               wake_at = CASE WHEN state IN ('suspended', 'unknown') THEN ?2 ELSE wake_at END WHERE id = ?1""",
            (found.id, now),
        )
        self._refresh(found.thread_number, now)
        return True

    def archive(self, thread: int, now: int) -> None:
        """See ``ports.ledger.Ledger.archive``."""
        if next(self._open(thread), None) is not None:
            raise Conflict("The thread has open work.", help="Settle or cancel it first: perdure obligations")
        self._execute("UPDATE thread SET archived_at = ? WHERE number = ?", (now, thread))
