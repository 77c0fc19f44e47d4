"""The ledger in SQLite. Each verb is a few statements inside the caller's unit of work.

``thread.due_at`` says when somebody should look at a thread next, and ``due_program`` for which program: null when
every worker may (intents to take in) or when the rows decide at that instant (programs are mixed). Both follow from the
rows of ``submission`` and ``intent`` (``_refresh``) and are recomputed by every verb that changes them, so claiming is
one index read. A live lease moves ``due_at`` to the lease's end: an abandoned thread becomes due by itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import apsw

from perdure.errors import Conflict, Corrupt, Invalid, OwnershipLost, Unavailable
from perdure.limits import MEMORY_THREADS_MAX
from perdure.ports.ledger import (
    Admission,
    ApprovalRow,
    Claimed,
    EffectRow,
    Fault,
    Intent,
    Submission,
    ThreadRow,
    WorkItem,
)
from perdure.ports.log import Tail
from perdure.records.codec import EMPTY_TAIL
from perdure.rules.lifecycle import EffectStatus, SubmissionEvent, SubmissionState, after, may_end
from perdure.stores.sqlite.log import SqliteLog

_SUBMISSION = """SELECT s.id, t.id, s.thread, s.position, s.principal, s.key, s.program, s.definition, s.input,
 s.input_digest, s.state, s.created_at, s.input_sequence, s.wake_at, s.not_before, s.attempts, s.attempt_tail,
 s.outcome, s.failure, s.disposition, s.settled_at FROM submission s JOIN thread t ON t.number = s.thread """
# the same order, each with an index of its own
_BY_NUMBER = ("s.number", "AND s.number > (SELECT number FROM submission WHERE id = ?3) ")
_BY_POSITION = ("s.position", "AND s.position > (SELECT position FROM submission WHERE id = ?3) ")
_INTENT = "SELECT number, thread, submission, kind, subject, body, by, reason, at, applied_at FROM intent "
_EFFECT = """SELECT id, thread, submission, run, call, step, operation, kind, effect_class, risk, key, business_key,
 status, verdict, tries, sequence, started_at, ended_at, next_probe_at, held_by, held_until FROM effect """
_OPEN_BUSINESS = "status IN ('started', 'unknown') AND verdict IS NULL"
_APPROVAL = """SELECT id, thread, submission, run, call, tool, arguments, digest, reason, asked_at, status, by,
 decision_reason, decided_at FROM approval """
_WORK = """SELECT s.id, t.id, s.thread, s.position, s.program, s.state, s.created_at
 FROM submission s INDEXED BY submission_open JOIN thread t ON t.number = s.thread
 WHERE s.state <> 'settled' AND s.thread BETWEEN ?1 AND ?2 ORDER BY s.thread, s.position LIMIT ?3"""
_THREAD = "SELECT number, id, created_at, epoch, owner, lease_until, due_at, archived_at, positions FROM thread "
_FAULT = """SELECT f.thread, t.id, f.kind, f.message, f.first_at, f.last_at, f.tries, f.next_at
 FROM fault f JOIN thread t ON t.number = f.thread """
_NEW_THREAD = """INSERT INTO thread (id, created_at, positions, due_at, due_program) VALUES (?1, ?2, 1, ?2, ?3)
 ON CONFLICT (id) DO NOTHING RETURNING number"""
_EMPTY = Tail(0, EMPTY_TAIL, 0)
# An effect's end is legal only from where the lifecycle table says; the check is in the statement that writes it.
_END_EFFECT = {
    str(
        status
    ): "UPDATE effect SET status = ?2, verdict = ?3, ended_at = coalesce(?4, ended_at) WHERE id = ?1 AND status IN ("
    + ", ".join(f"'{before}'" for before in sorted(may_end(status)))
    + ")"
    for status in (EffectStatus.CONFIRMED, EffectStatus.REFUSED, EffectStatus.UNKNOWN)
}
S = SubmissionState
V = SubmissionEvent

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


def _submission(row: tuple[Any, ...]) -> Submission:
    id, thread, number, position, *rest = row
    return Submission(id, thread, number, position, "run_" + id[4:], *rest)


class SqliteLedger:
    """Implements ``ports.ledger.Ledger`` on one connection; used inside a unit of work only."""

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
                _SUBMISSION + "WHERE s.thread = ? AND s.principal = ? AND s.key = ?", number, a.principal, a.key
            )
            if earlier is not None:
                return self._replayed(_submission(earlier), a), True
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

    def submission(self, id: str) -> Submission | None:
        """See ``ports.ledger.Ledger.submission``."""
        wanted = "sub_" + id[4:] if id.startswith("run_") else id
        row = self._row(_SUBMISSION + "WHERE s.id = ?", wanted)
        return None if row is None else _submission(row)

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
        self, thread: int, owner: str, now: int, lease_until: int, token: int, *, blocked: bool = False
    ) -> Claimed | None:
        """See ``ports.ledger.Ledger.claim_thread``."""
        row = self._row("SELECT owner, lease_until, blocked FROM thread WHERE number = ?", thread)
        if row is None or (row[0] is not None and row[1] > now) or (row[2] and not blocked):
            return None
        return self._grant(thread, owner, None, now, lease_until, token, maintenance=True)

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
        row = self._row(_SUBMISSION + "WHERE s.id = ?", id)
        assert row is not None
        found = _submission(row)
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
        return _submission(row)

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

    # -- progress -------------------------------------------------------------------------------------------------
    def apply_input(self, submission: str, sequence: int) -> None:
        """See ``ports.ledger.Ledger.apply_input``."""
        self._execute(
            """UPDATE submission SET state = 'input-applied', input_sequence = ?2
               WHERE id = ?1 AND state IN ('admitted', 'ready', 'running', 'input-applied')
                 AND coalesce(input_sequence, ?2) = ?2""",
            (submission, sequence),
        )
        if self._changes() == 1:
            return
        found = self._existing(submission)
        if found.input_sequence is None:
            after(S(found.state), V.APPLY_INPUT)  # raises: its input cannot be applied any more
        if found.input_sequence != sequence:
            raise Corrupt(
                f"The input of submission {submission!r} is marked at record {found.input_sequence}, not {sequence}."
            )

    def _existing(self, submission: str, thread: int | None = None) -> Submission:
        found = self.submission(submission)
        if found is None or thread not in (None, found.thread_number):
            raise Invalid(f"Submission {submission!r} does not exist" + ("." if thread is None else " on this thread."))
        return found

    def _wait(
        self, fence: tuple[int, int, int], submission: str, wake_at: int | None, now: int, event: SubmissionEvent
    ) -> bool:
        self._fence(*fence)
        found = self._existing(submission, fence[0])
        state = after(S(found.state), event)
        covered = self._covered(found, state)
        self._execute(
            "UPDATE submission SET state = ?2, wake_at = ?3 WHERE id = ?1",
            (submission, state, now if covered else wake_at),
        )
        self._leave(*fence, now)
        return not covered

    def suspend(self, thread: int, epoch: int, token: int, submission: str, wake_at: int | None, now: int) -> bool:
        """See ``ports.ledger.Ledger.suspend``."""
        return self._wait((thread, epoch, token), submission, wake_at, now, V.SUSPEND)

    def park(self, thread: int, epoch: int, token: int, submission: str, wake_at: int | None, now: int) -> bool:
        """See ``ports.ledger.Ledger.park``."""
        return self._wait((thread, epoch, token), submission, wake_at, now, V.PARK)

    def _covered(self, found: Submission, state: SubmissionState) -> bool:
        """Whether a decision already recorded covers what this submission is about to wait for."""
        if self._row("SELECT 1 FROM intent WHERE kind = 'cancel' AND subject = ?", found.id):
            return True  # also one that is in the log already: nobody acted on it yet
        if state is S.UNKNOWN and self._undecided_effects(found.run) == 0:
            return True
        if state is S.UNKNOWN and not self._row(
            "SELECT 1 FROM intent WHERE thread = ? AND applied_at IS NULL AND submission = ? AND kind = 'approval'",
            found.thread_number, found.id,
        ):  # fmt: skip
            return False  # parked: approvals alone wake it only by a decision the attempt has not seen
        return self._undecided_approvals(found.run) == 0

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

    def settle(
        self,
        thread: int,
        epoch: int,
        token: int,
        submission: str,
        outcome: str,
        failure: bytes | None,
        disposition: str | None,
        now: int,
        *,
        release: bool,
    ) -> None:
        """See ``ports.ledger.Ledger.settle``."""
        self._execute(
            """UPDATE submission SET state = 'settled', outcome = ?2, failure = ?3, disposition = ?4, settled_at = ?5,
               wake_at = NULL WHERE id = ?1 AND thread = ?6 AND state <> 'settled'
               AND EXISTS (SELECT 1 FROM thread WHERE number = ?6 AND epoch = ?7 AND token = ?8)""",
            (submission, outcome, failure, disposition, now, thread, epoch, token),
        )
        if self._changes() != 1:
            found = self._existing(submission, thread)
            if found.outcome is None:
                self._fence(thread, epoch, token)
            if found.outcome != outcome:
                raise Conflict(
                    f"Submission {submission!r} already settled as {found.outcome}; {outcome} does not replace it."
                )
        if release:
            self._leave(thread, epoch, token, now)
        else:
            self._refresh(thread, now)

    def settled_among(self, submissions: Collection[str]) -> list[str]:
        """See ``ports.ledger.Ledger.settled_among``."""
        wanted = json.dumps(list(submissions))
        rows = self._rows(
            "SELECT id FROM submission WHERE id IN (SELECT value FROM json_each(?)) AND state = 'settled'", wanted
        )
        return [row[0] for row in rows]

    def next_due(self, programs: Collection[str] | None, now: int) -> int | None:
        """See ``ports.ledger.Ledger.next_due``."""
        if programs is None:
            return self._row("SELECT min(due_at) FROM thread WHERE due_at IS NOT NULL AND blocked = 0")[0]  # type: ignore[no-any-return]
        names = json.dumps(sorted(programs))
        times = self._row(
            """SELECT min(due_at) FROM thread WHERE due_at IS NOT NULL AND blocked = 0
               AND due_program IN (SELECT value FROM json_each(?1))""",
            names,
        )
        mixed = self._rows(
            """SELECT number, due_at, owner IS NOT NULL AND lease_until > ?1 FROM thread
               WHERE due_at IS NOT NULL AND blocked = 0 AND due_program IS NULL""",
            now,
        )
        found = [*times, *(at if owned else self._due_for(number, programs, now) for number, at, owned in mixed)]
        return min((at for at in found if at is not None), default=None)

    def _due_for(self, thread: int, programs: Collection[str], now: int) -> int | None:
        """When an unowned thread is next due for one of ``programs``."""
        if self._row("SELECT 1 FROM intent WHERE thread = ? AND applied_at IS NULL LIMIT 1", thread):
            return now
        times = {max(now, at or 0) for *_, wake_at, not_before in self._open(thread) for at in (wake_at, not_before)}
        return next((at for at in sorted(times) if self._eligible(thread, programs, at) is not None), None)

    # -- intents --------------------------------------------------------------------------------------------------
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
        if kind == "verdict" and self._undecided_effects(run):
            return
        if kind == "approval" and self._undecided_approvals(run):
            return
        states = "state IN ('suspended', 'unknown')"
        self._execute(
            f"UPDATE submission SET wake_at = ?2, not_before = 0 WHERE id = ?1 AND {states}", (submission, now)
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

    # -- effects and approvals --------------------------------------------------------------------------------------
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
            only += "AND run = ?2 "
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
            only += "AND run = ?2 "
        rows = self._rows(_APPROVAL + f"WHERE TRUE {only}ORDER BY asked_at, id LIMIT ?3", status, run, limit)
        return [ApprovalRow(*row) for row in rows]

    # -- discovery and operation --------------------------------------------------------------------------------------
    def thread(self, id: str | int) -> ThreadRow | None:
        """See ``ports.ledger.Ledger.thread``."""
        row = self._row(_THREAD + ("WHERE number = ?" if isinstance(id, int) else "WHERE id = ?"), id)
        return None if row is None else ThreadRow(*row)

    def threads(self, *, after: int = 0, limit: int = 1000) -> list[ThreadRow]:
        """See ``ports.ledger.Ledger.threads``."""
        rows = self._rows(_THREAD + "WHERE number > ? ORDER BY number LIMIT ?", after, limit)
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
            _THREAD + "WHERE owner IS NOT NULL AND blocked = 0 AND lease_until <= ? ORDER BY lease_until LIMIT ?",
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
        rows = self._rows(_SUBMISSION + f"WHERE TRUE {only}ORDER BY {order} LIMIT ?4", thread, state, after, limit)
        return [_submission(row) for row in rows]

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
