"""Admission and ownership: what is owed, and who may work on its thread."""

from __future__ import annotations

import json
from collections.abc import Collection

from perdure.errors import Conflict, OwnershipLost, Unavailable
from perdure.limits import MEMORY_THREADS_MAX
from perdure.ports.ledger import Admission, Claimed, Submission, ThreadRow
from perdure.ports.log import Tail
from perdure.records.codec import EMPTY_TAIL
from perdure.rules.lifecycle import SubmissionEvent as V
from perdure.rules.lifecycle import SubmissionState as S
from perdure.rules.lifecycle import after
from perdure.stores.sqlite.intents import Intents
from perdure.stores.sqlite.rows import SUBMISSION, submission_of

_NEW_THREAD = """INSERT INTO thread (id, created_at, positions, due_at, due_program) VALUES (?1, ?2, 1, ?2, ?3)
 ON CONFLICT (id) DO NOTHING RETURNING number"""
_EMPTY = Tail(0, EMPTY_TAIL, 0)

# Whether a due thread is due for one of ?4 at the instant ?1: the program that comes first there, parked work without a
# due wake passed over. Only threads on which programs are mixed are looked into.
_FOR_PROGRAMS = """(due_program IN (SELECT value FROM json_each(?4)) OR (due_program IS NULL AND (
  EXISTS (SELECT 1 FROM intent i WHERE i.thread = thread.number AND applied_at IS NULL)
  OR (SELECT program FROM submission s WHERE s.thread = thread.number AND state <> 'settled'
        AND NOT (state = 'unknown' AND (wake_at IS NULL OR wake_at > ?1)) ORDER BY position LIMIT 1)
     IN (SELECT value FROM json_each(?4)))))"""
_CLAIMABLE = """SELECT number FROM thread WHERE due_at <= ?1 AND blocked = 0 AND (owner IS NULL OR lease_until <= ?2)
 {} ORDER BY due_at LIMIT ?3"""
_CLAIM_ANY, _CLAIM_PROGRAMS = _CLAIMABLE.format(""), _CLAIMABLE.format("AND " + _FOR_PROGRAMS)


class Claims(Intents):
    """The verbs of admission and ownership; see ``ports.ledger.Ledger``."""

    # -- admission ------------------------------------------------------------------------------------------------
    def admit(self, admission: Admission) -> tuple[Submission, bool]:
        """See ``ports.ledger.Ledger.admit``."""
        a = admission
        self._check_capacity(a.thread)
        number = self._row(_NEW_THREAD, a.thread, a.at, a.program)
        if number is not None:
            return self._queue(a, number[0], 1), False
        number, archived = self._row("SELECT number, archived_at FROM thread WHERE id = ?", a.thread)
        if a.key is not None:
            earlier = self._row(
                SUBMISSION + "WHERE s.thread = ? AND s.principal = ? AND s.key = ?", number, a.principal, a.key
            )
            if earlier is not None:
                return self._replayed(submission_of(earlier), a), True
        if archived is not None:
            self._execute("UPDATE thread SET archived_at = NULL WHERE number = ?", (number,))
        [(position,)] = self._rows(
            "UPDATE thread SET positions = positions + 1 WHERE number = ? RETURNING positions", number
        )
        created = self._queue(a, number, position)
        self._refresh(number, a.at)
        return created, False

    def _queue(self, a: Admission, number: int, position: int) -> Submission:
        self._execute(
            """INSERT INTO submission (id, thread, position, principal, key, program, definition, input, input_digest,
               state, created_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, 'ready', ?)""",
            (
                a.submission,
                number,
                position,
                a.principal,
                a.key,
                a.program,
                a.definition,
                a.input,
                a.input_digest,
                a.at,
            ),
        )
        return Submission(
            a.submission, a.thread, number, position, a.run, a.principal, a.key, a.program, a.definition,
            a.input, a.input_digest, "ready", a.at, None, None, 0, 0, -1, None, None, None, None,
        )  # fmt: skip

    def open_thread(self, thread: str, now: int) -> ThreadRow:
        """See ``ports.ledger.Ledger.open_thread``."""
        found = self.thread(thread)
        if found is None:
            self._check_capacity(thread)
            self._execute("INSERT INTO thread (id, created_at) VALUES (?, ?)", (thread, now))
            found = self.thread(thread)
        assert found is not None
        return found

    def _check_capacity(self, thread: str) -> None:
        """An in-memory store takes no more than so many threads."""
        if self._memory and self._rows("SELECT count(*) FROM thread WHERE id <> ?", thread)[0][0] >= MEMORY_THREADS_MAX:
            raise Unavailable(
                f"An in-memory store holds at most {MEMORY_THREADS_MAX} threads (MEMORY_THREADS_MAX).",
                help="Use a database file.",
            )

    def _replayed(self, earlier: Submission, a: Admission) -> Submission:
        if earlier.program == a.program and earlier.input_digest == a.input_digest:
            return earlier
        raise Conflict(
            f"Key {a.key!r} on thread {a.thread!r} already admitted {earlier.program!r} with input"
            f" {earlier.input_digest[:12]}; this is {a.program!r} with input {a.input_digest[:12]}.",
            help="Use another key for other work; the first submission is untouched.",
        )

    def _eligible(self, thread: int, programs: Collection[str] | None, now: int) -> str | None:
        for id, state, program, wake_at, not_before in self._open(thread):
            waits = state in (S.UNKNOWN, S.SUSPENDED)
            ready = (wake_at is not None and wake_at <= now) if waits else not_before <= now
            if ready and (programs is None or program in programs):
                return str(id)
            if state != S.UNKNOWN or ready:
                return None
        return None

    # -- ownership ------------------------------------------------------------------------------------------------
    def claim(
        self, owner: str, programs: Collection[str] | None, limit: int, now: int, lease_until: int, tokens: list[int]
    ) -> list[Claimed]:
        """See ``ports.ledger.Ledger.claim``."""
        granted: list[Claimed] = []
        limit = min(limit, len(tokens))
        while len(granted) < limit:
            wanted = limit - len(granted)
            if programs is None:
                due = self._rows(_CLAIM_ANY, now, now, wanted)
            else:
                due = self._rows(_CLAIM_PROGRAMS, now, now, wanted, json.dumps(sorted(programs)))
            for (number,) in due:
                claimed = self._grant(number, owner, programs, now, lease_until, tokens[len(granted)])
                if claimed is None:
                    self._refresh(number, now)  # it was not due after all: say when it is, and look at the next
                else:
                    granted.append(claimed)
            if len(due) < wanted or len(granted) == limit:
                break
        return granted

    def claim_thread(
        self,
        thread: int,
        owner: str,
        now: int,
        lease_until: int,
        token: int,
        *,
        blocked: bool = False,
        work: bool = False,
    ) -> Claimed | None:
        """See ``ports.ledger.Ledger.claim_thread``."""
        row = self._row("SELECT owner, lease_until, blocked FROM thread WHERE number = ?", thread)
        if row is None or (row[0] is not None and row[1] > now) or (row[2] and not blocked):
            return None
        return self._grant(thread, owner, None, now, lease_until, token, maintenance=not work)

    def _grant(
        self,
        number: int,
        owner: str,
        programs: Collection[str] | None,
        now: int,
        lease_until: int,
        token: int,
        *,
        maintenance: bool = False,
    ) -> Claimed | None:
        # recovery's own claim tries no submission: looking at it must not count as an attempt without progress
        chosen = None if maintenance else self._eligible(number, programs, now)
        pending = self.intents(number)
        if chosen is None and not pending and not maintenance:
            return None
        [(superseded, fresh)] = self._rows("SELECT owner IS NOT NULL, epoch = 0 FROM thread WHERE number = ?", number)
        rows = self._rows(
            """UPDATE thread SET epoch = epoch + 1, token = ?2, owner = ?3, lease_until = ?4, due_at = ?4
               WHERE number = ?1 AND (owner IS NULL OR lease_until <= ?5) RETURNING id, epoch""",
            number, token, owner, lease_until, now,
        )  # fmt: skip
        if len(rows) != 1:
            return None
        thread, epoch = rows[0]
        tail = _EMPTY if fresh else self._log.tail(number)
        submission = None if chosen is None else self._start(chosen, tail)
        return Claimed(number, thread, epoch, token, tail, submission, tuple(pending), lease_until, bool(superseded))

    def _start(self, id: str, tail: Tail) -> Submission:
        row = self._row(SUBMISSION + "WHERE s.id = ?", id)
        assert row is not None
        found = submission_of(row)
        state = S(found.state)
        if state in (S.SUSPENDED, S.UNKNOWN):
            state = after(state, V.WAKE)
        state = after(state, V.CLAIM)
        attempts = found.attempts + 1 if found.attempt_tail == tail.sequence else 1
        self._execute(
            "UPDATE submission SET state = ?2, wake_at = NULL, attempts = ?3, attempt_tail = ?4 WHERE id = ?1",
            (id, state, attempts, tail.sequence),
        )
        row = (*row[:10], str(state), *row[11:13], None, row[14], attempts, tail.sequence, *row[17:])
        return submission_of(row)

    def renew(self, owner: str, lease_until: int) -> int:
        """See ``ports.ledger.Ledger.renew``."""
        self._execute("UPDATE effect SET held_until = ?2 WHERE held_by = ?1", (owner, lease_until))
        self._execute("UPDATE thread SET lease_until = ?2, due_at = ?2 WHERE owner = ?1", (owner, lease_until))
        return int(self._changes())

    def _leave(self, thread: int, epoch: int, token: int, now: int) -> bool:
        """End ownership and recompute when the thread is due. False if the fence is lost."""
        due_at, program = self._due(thread, now)
        self._execute(
            """UPDATE thread SET owner = NULL, token = NULL, lease_until = NULL, due_at = ?4, due_program = ?5
               WHERE number = ?1 AND epoch = ?2 AND token = ?3""",
            (thread, epoch, token, due_at, program),
        )
        return self._changes() == 1

    def _fence(self, thread: int, epoch: int, token: int) -> None:
        row = self._row("SELECT id, epoch, token FROM thread WHERE number = ?", thread)
        if row is None or row[1:] != (epoch, token):
            name, actual = (row[0], row[1]) if row else (thread, "none")
            raise OwnershipLost(f"Thread {name!r} is at epoch {actual}; this write was for epoch {epoch}.")

    def release(self, thread: int, epoch: int, token: int, now: int, *, not_before: int = 0) -> None:
        """See ``ports.ledger.Ledger.release``."""
        row = self._row("SELECT epoch, token FROM thread WHERE number = ?", thread)
        if row != (epoch, token):
            return
        self._execute(
            "UPDATE submission SET state = 'ready' WHERE thread = ? AND state = 'running' AND input_sequence IS NULL",
            (thread,),
        )
        if not_before:
            head = next((id for id, state, *_ in self._open(thread) if state not in (S.UNKNOWN, S.SUSPENDED)), None)
            self._execute("UPDATE submission SET not_before = ? WHERE id = ?", (not_before, head))
        self._leave(thread, epoch, token, now)
