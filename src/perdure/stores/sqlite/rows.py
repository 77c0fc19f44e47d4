"""What every part of the ledger stands on: its connection, a row by its name, and when a thread is due by its rows.

``thread.due_at`` says when somebody should look at a thread next, and ``due_program`` for which program: null when
every worker may (intents to take in) or when the rows decide at that instant (programs are mixed). Both follow from the
rows of ``submission`` and ``intent`` (``_refresh``) and are recomputed by every verb that changes them, so claiming is
one index read. A live lease moves ``due_at`` to the lease's end: an abandoned thread becomes due by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apsw

from perdure.ports.ledger import Submission, ThreadRow
from perdure.rules.lifecycle import SubmissionState as S
from perdure.stores.sqlite.log import SqliteLog

SUBMISSION = """SELECT s.id, t.id, s.thread, s.position, s.principal, s.key, s.program, s.definition, s.input,
 s.input_digest, s.state, s.created_at, s.input_sequence, s.wake_at, s.not_before, s.attempts, s.attempt_tail,
 s.outcome, s.failure, s.disposition, s.settled_at FROM submission s JOIN thread t ON t.number = s.thread """
THREAD = "SELECT number, id, created_at, epoch, owner, lease_until, due_at, archived_at, positions FROM thread "


def submission_of(row: tuple[Any, ...]) -> Submission:
    """The submission of a row of ``SUBMISSION``."""
    id, thread, number, position, *rest = row
    return Submission(id, thread, number, position, "run_" + id[4:], *rest)


class Rows:
    """A connection in short words; used inside a unit of work only."""

    def __init__(self, connection: apsw.Connection, log: SqliteLog, *, memory: bool = False) -> None:
        self._execute = connection.execute
        self._changes = connection.changes
        self._log = log
        self._memory = memory

    def _rows(self, sql: str, *params: Any) -> list[Any]:
        return self._execute(sql, params).fetchall()

    def _row(self, sql: str, *params: Any) -> Any:
        rows = self._execute(sql, params).fetchall()
        return rows[0] if rows else None

    def submission(self, id: str) -> Submission | None:
        """See ``ports.ledger.Ledger.submission``."""
        wanted = "sub_" + id[4:] if id.startswith("run_") else id
        row = self._row(SUBMISSION + "WHERE s.id = ?", wanted)
        return None if row is None else submission_of(row)

    def thread(self, id: str | int) -> ThreadRow | None:
        """See ``ports.ledger.Ledger.thread``."""
        row = self._row(THREAD + ("WHERE number = ?" if isinstance(id, int) else "WHERE id = ?"), id)
        return None if row is None else ThreadRow(*row)

    # -- when a thread is due ---------------------------------------------------------------------------------------
    def _open(self, thread: int) -> Iterator[Any]:
        """Open submissions in order: id, state, program, wake_at, not_before. Lazy: most threads need one row."""
        return iter(
            self._execute(
                "SELECT id, state, program, wake_at, not_before FROM submission"
                " WHERE thread = ? AND state <> 'settled' ORDER BY position",
                (thread,),
            )
        )

    def _due(self, thread: int, now: int) -> tuple[int | None, str | None]:
        if self._row("SELECT 1 FROM intent WHERE thread = ? AND applied_at IS NULL LIMIT 1", thread):
            return now, None
        times, programs = [], set()
        for _, state, program, wake_at, not_before in self._open(thread):
            at = wake_at if state in (S.UNKNOWN, S.SUSPENDED) else max(not_before, now)
            if at is not None:
                times.append(at)
                programs.add(program)
            if state != S.UNKNOWN or (at is not None and at <= now):
                break
        return (min(times), programs.pop() if len(programs) == 1 else None) if times else (None, None)

    def _refresh(self, thread: int, now: int) -> None:
        """Recompute when an unowned thread is due. An owned one is due when its lease ends, if that is to come."""
        due_at, program = self._due(thread, now)
        self._execute(
            """UPDATE thread SET due_program = ?3,
               due_at = CASE WHEN owner IS NULL OR lease_until <= ?4 THEN ?2 ELSE lease_until END WHERE number = ?1""",
            (thread, due_at, program, now),
        )

    def repair_due(self, thread: int, now: int) -> None:
        """See ``ports.ledger.Ledger.repair_due``."""
        self._refresh(thread, now)
