"""What an owner does with a submission: its input, its waits, its settlement; and when something is due."""

from __future__ import annotations

import json
from collections.abc import Collection

from perdure.errors import Conflict, Corrupt, Invalid
from perdure.ports.ledger import Submission
from perdure.records.task import PROGRAM
from perdure.rules.lifecycle import SubmissionEvent, SubmissionState, after
from perdure.stores.sqlite.claims import Claims

S = SubmissionState
V = SubmissionEvent


class Progress(Claims):
    """The verbs of progress; see ``ports.ledger.Ledger``."""

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
        if found.program == PROGRAM:  # any decision lets a branch of a workflow go on
            waits = "SELECT 1 FROM intent WHERE thread = ? AND submission = ? AND applied_at IS NULL LIMIT 1"
            return bool(self._row(waits, found.thread_number, found.id))
        if state is S.UNKNOWN and self._undecided_effects(found.run) == 0:
            return True
        if state is S.UNKNOWN and not self._row(
            "SELECT 1 FROM intent WHERE thread = ? AND applied_at IS NULL AND submission = ? AND kind = 'approval'",
            found.thread_number, found.id,
        ):  # fmt: skip
            return False  # parked: approvals alone wake it only by a decision the attempt has not seen
        return self._undecided_approvals(found.run) == 0

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
