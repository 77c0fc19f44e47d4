"""The ledger as a page of dicts: what every store must do, without a database, a cache or a clock.

Nothing here is stored that could be worked out, so there is nothing to go stale. Drive it beside a real store and
compare; see ``tests/properties``. Order among threads is left open: a store says which due threads it granted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from perdure.errors import Conflict, Corrupt, Invalid, OwnershipLost
from perdure.limits import RATE_WINDOW_SECONDS
from perdure.ports.ledger import Admission, ApprovalRow, EffectRow, Intent
from perdure.rules.accounting import Rate
from perdure.rules.lifecycle import SubmissionEvent as Event
from perdure.rules.lifecycle import SubmissionState as State
from perdure.rules.lifecycle import after

__all__ = ["Reference"]

Row = dict[str, Any]
Fence = tuple[str, int, int]
"""Thread id, epoch, token."""

_MINUTE = int(RATE_WINDOW_SECONDS) * 1_000_000
_WAITING = (State.SUSPENDED, State.UNKNOWN)


class Reference:
    """Threads, work, intents, effects and approvals, each a dict of dicts. Threads go by their ids.

    Of a model there is every call that was granted and every hold, in order: what they come to is worked out.
    """

    def __init__(self) -> None:
        self.threads: dict[str, Row] = {}
        self.work: dict[str, Row] = {}
        self.intents: dict[tuple[str, str], Row] = {}
        self.effects: dict[str, Row] = {}
        self.approvals: dict[str, Row] = {}
        self.calls: dict[str, list[tuple[int, int, int]]] = {}
        self.holds: dict[str, list[int]] = {}

    # -- what follows from the rows -----------------------------------------------------------------------------------
    def open(self, thread: str) -> list[Row]:
        """What is not settled on a thread, in order."""
        return [w for w in self.work.values() if w["thread"] == thread and w["state"] != State.SETTLED]

    def pending(self, thread: str) -> list[Row]:
        """Commands that are not in the log."""
        return [i for i in self.intents.values() if i["thread"] == thread and i["applied_at"] is None]

    def eligible(self, thread: str, programs: Collection[str] | None, now: int) -> Row | None:
        """The work that a claim takes: the first in line, past parked work whose time has not come."""
        for work in self.open(thread):
            if work["state"] in _WAITING:
                ready = work["wake_at"] is not None and work["wake_at"] <= now
            else:
                ready = work["not_before"] <= now
            if ready:
                return work if programs is None or work["program"] in programs else None
            if work["state"] != State.UNKNOWN:
                return None
        return None

    def held(self, thread: str, now: int) -> bool:
        """Whether a live lease holds a thread."""
        row = self.threads[thread]
        return row["owner"] is not None and bool(row["lease_until"] > now)

    def grantable(self, programs: Collection[str] | None, now: int) -> set[str]:
        """The threads that a claim may be granted now."""
        return {
            thread
            for thread, row in self.threads.items()
            if not row["blocked"] and not self.held(thread, now)
            if self.pending(thread) or self.eligible(thread, programs, now) is not None
        }

    def next_due(self, programs: Collection[str] | None, now: int) -> int | None:
        """The next instant at which something is grantable, if nobody does anything until then."""
        instants = {now} | {row["lease_until"] for row in self.threads.values() if row["owner"] is not None}
        instants |= {at for w in self.work.values() for at in (w["wake_at"], w["not_before"]) if at is not None}
        return next((at for at in sorted(instants) if at >= now and self.grantable(programs, at)), None)

    def _undecided(self, rows: dict[str, Row], run: str, status: str, kind: str) -> bool:
        return any(
            row["run"] == run and row["status"] == status and row.get("verdict") is None
            for id, row in rows.items()
            if (kind, id) not in self.intents
        )

    def covered(self, work: Row, state: State) -> bool:
        """Whether what a submission is about to wait for is decided already."""
        if ("cancel", work["id"]) in self.intents:
            return True
        approvals = self._undecided(self.approvals, work["run"], "pending", "approval")
        if state is State.SUSPENDED:
            return not approvals
        news = any(i["kind"] == "approval" and i["submission"] == work["id"] for i in self.pending(work["thread"]))
        return not self._undecided(self.effects, work["run"], "unknown", "verdict") or (news and not approvals)

    # -- admission and ownership --------------------------------------------------------------------------------------
    def admit(self, a: Admission) -> tuple[str, bool]:
        """See ``Ledger.admit``."""
        for work in self.work.values():
            if a.key is not None and (work["thread"], work["principal"], work["key"]) == (a.thread, a.principal, a.key):
                if (work["program"], work["input_digest"]) != (a.program, a.input_digest):
                    raise Conflict("another input or program")
                return work["id"], True
        thread = self.threads.setdefault(
            a.thread,
            {"epoch": 0, "token": None, "owner": None, "lease_until": None, "blocked": False, "archived": False},
        )
        thread["archived"] = False
        thread.setdefault("log", [])
        self.work[a.submission] = {
            "id": a.submission, "thread": a.thread, "run": a.run, "principal": a.principal, "key": a.key,
            "program": a.program, "input_digest": a.input_digest, "state": State.READY, "wake_at": None,
            "not_before": 0, "attempts": 0, "attempt_tail": -1, "input_sequence": None, "outcome": None,
        }  # fmt: skip
        return a.submission, False

    def grant(
        self,
        thread: str,
        owner: str,
        programs: Collection[str] | None,
        now: int,
        lease_until: int,
        token: int,
        *,
        maintenance: bool = False,
    ) -> tuple[int, str | None, int]:
        """One granted thread: its epoch, the submission, how many commands are to be taken in."""
        row, work = self.threads[thread], None if maintenance else self.eligible(thread, programs, now)
        row.update(epoch=row["epoch"] + 1, token=token, owner=owner, lease_until=lease_until)
        if work is not None:
            tail = self.tail(thread)
            state = State(work["state"])
            state = after(after(state, Event.WAKE) if state in _WAITING else state, Event.CLAIM)
            attempts = work["attempts"] + 1 if work["attempt_tail"] == tail else 1
            work.update(state=state, wake_at=None, attempts=attempts, attempt_tail=tail)
        return row["epoch"], None if work is None else work["id"], len(self.pending(thread))

    def may_claim_thread(self, thread: str, now: int, *, blocked: bool) -> bool:
        """Whether ``Ledger.claim_thread`` is granted."""
        return not self.held(thread, now) and (blocked or not self.threads[thread]["blocked"])

    def renew(self, owner: str, lease_until: int) -> int:
        """See ``Ledger.renew``."""
        held = [row for row in self.threads.values() if row["owner"] == owner]
        for row in held:
            row["lease_until"] = lease_until
        for effect in self.effects.values():
            if effect["held_by"] == owner:
                effect["held_until"] = lease_until
        return len(held)

    def _owns(self, fence: Fence) -> bool:
        row = self.threads[fence[0]]
        return (row["epoch"], row["token"]) == fence[1:]

    def _check(self, fence: Fence) -> None:
        if not self._owns(fence):
            raise OwnershipLost("superseded")

    def _leave(self, thread: str) -> None:
        self.threads[thread].update(owner=None, token=None, lease_until=None)

    def release(self, fence: Fence, not_before: int) -> None:
        """See ``Ledger.release``."""
        if not self._owns(fence):
            return
        for work in self.open(fence[0]):
            if work["state"] == State.RUNNING:
                work["state"] = State.READY
        if not_before:
            next(iter(w for w in self.open(fence[0]) if w["state"] not in _WAITING), {})["not_before"] = not_before
        self._leave(fence[0])

    # -- progress -----------------------------------------------------------------------------------------------------
    def _of(self, submission: str, thread: str) -> Row:
        work = self.work[submission]
        if work["thread"] != thread:
            raise Invalid("not on this thread")
        return work

    def apply_input(self, submission: str, sequence: int) -> None:
        """See ``Ledger.apply_input``."""
        work = self.work[submission]
        if work["input_sequence"] is None:
            if work["state"] != State.READY:
                after(State(work["state"]), Event.APPLY_INPUT)
            work.update(state=State.INPUT_APPLIED, input_sequence=sequence)
        elif work["input_sequence"] != sequence:
            raise Corrupt("marked at another place")

    def wait(self, fence: Fence, submission: str, wake_at: int | None, now: int, event: Event) -> bool:
        """See ``Ledger.suspend`` and ``Ledger.park``."""
        self._check(fence)
        work = self._of(submission, fence[0])
        state = after(State(work["state"]), event)
        covered = self.covered(work, state)
        work.update(state=state, wake_at=now if covered else wake_at)
        self._leave(fence[0])
        return not covered

    def settle(self, fence: Fence, submission: str, outcome: str, *, release: bool) -> None:
        """See ``Ledger.settle``."""
        work = self._of(submission, fence[0])
        if work["outcome"] is None:
            self._check(fence)
        elif work["outcome"] != outcome:
            raise Conflict("settled otherwise")
        work.update(state=State.SETTLED, outcome=outcome, wake_at=None)
        if release and self._owns(fence):
            self._leave(fence[0])

    # -- decisions ----------------------------------------------------------------------------------------------------
    def add_intent(self, intent: Intent, thread: str) -> bool:
        """See ``Ledger.add_intent``."""
        key = (intent.kind, intent.subject)
        if key in self.intents:
            return False
        self.intents[key] = {
            "kind": intent.kind, "subject": intent.subject, "submission": intent.submission, "thread": thread,
            "applied_at": None,
        }  # fmt: skip
        work = self.work[intent.submission] if intent.submission is not None else None
        if work is not None and intent.kind == "cancel" and work["state"] != State.SETTLED:
            work["not_before"] = 0
        if work is None or work["state"] not in _WAITING:
            return True
        waits: dict[str, Callable[[], bool]] = {
            "cancel": lambda: False,
            "approval": lambda: self._undecided(self.approvals, work["run"], "pending", "approval"),
            "verdict": lambda: self._undecided(self.effects, work["run"], "unknown", "verdict"),
        }
        if not waits[intent.kind]():
            work.update(wake_at=intent.at, not_before=0)
        return True

    def mark_applied(self, kind: str, subject: str, now: int) -> None:
        """See ``Ledger.mark_applied``."""
        intent = self.intents[(kind, subject)]
        intent["applied_at"] = now if intent["applied_at"] is None else intent["applied_at"]

    def put_effect(self, row: EffectRow) -> None:
        """See ``Ledger.put_effect``."""
        key = (row.operation, row.business_key)
        if row.business_key is not None and key in self._open_business_keys():
            raise Conflict("open elsewhere")
        self.effects[row.id] = {
            "run": row.run, "status": row.status, "verdict": row.verdict, "key": key,
            "held_by": row.held_by, "held_until": row.held_until,
        }  # fmt: skip

    def _open_business_keys(self) -> Iterator[tuple[str, str | None]]:
        return (e["key"] for e in self.effects.values() if e["status"] in ("started", "unknown") and not e["verdict"])

    def end_effect(self, id: str, status: str, verdict: str | None) -> None:
        """See ``Ledger.end_effect``."""
        self.effects[id].update(status=status, verdict=verdict)

    def put_approval(self, row: ApprovalRow) -> None:
        """See ``Ledger.put_approval``."""
        self.approvals.setdefault(row.id, {"run": row.run, "status": row.status})

    def decide_approval(self, id: str, status: str) -> None:
        """See ``Ledger.decide_approval``."""
        if self.approvals[id]["status"] == "pending":
            self.approvals[id]["status"] = status

    # -- models -------------------------------------------------------------------------------------------------------
    def _filled(self, model: str, limit: int) -> int:
        """Up to which instant calls fill one of the limits: each fills some time behind those before it."""
        at = 0
        for now, *fills in self.calls.get(model, []):
            at = max(now, max(at, now) + fills[limit])
        return at

    def take_model_turn(self, model: str, now: int, tokens: int, rate: Rate) -> int:
        """See ``Ledger.take_model_turn``."""
        fills = (_fill(1, rate.requests), _fill(tokens, rate.tokens))
        waits = [self.model_held_until(model)]
        for limit, bound in enumerate((rate.requests, rate.tokens)):
            if bound is not None:
                waits.append(max(self._filled(model, limit), now) + fills[limit] - _MINUTE)
        if max(waits) > now:
            return max(waits)
        self.calls.setdefault(model, []).append((now, *fills))
        return 0

    def correct_model_turn(self, model: str, now: int, reserved: int, used: int, rate: Rate) -> None:
        """See ``Ledger.correct_model_turn``."""
        more = _fill(used, rate.tokens) - _fill(reserved, rate.tokens)
        self.calls.setdefault(model, []).append((now, 0, more))

    def hold_model(self, model: str, until: int) -> None:
        """See ``Ledger.hold_model``."""
        self.holds.setdefault(model, []).append(until)

    def model_held_until(self, model: str) -> int:
        """See ``Ledger.model_held_until``."""
        return max(self.holds.get(model, []), default=0)

    # -- the log ------------------------------------------------------------------------------------------------------
    def tail(self, thread: str) -> int:
        """Sequence of the last record."""
        log = self.threads[thread]["log"]
        return log[-1][0] if log else 0

    def append(self, fence: Fence, expected: int, count: int, body: bytes) -> None:
        """See ``Log.append``."""
        self._check(fence)
        log = self.threads[fence[0]]["log"]
        if (expected + count, body) in log:
            return
        if self.tail(fence[0]) != expected:
            raise Conflict("ends elsewhere")
        log.append((expected + count, body))

    # -- operation ----------------------------------------------------------------------------------------------------
    def redrive(self, submission: str, now: int) -> bool:
        """See ``Ledger.redrive``."""
        work = self.work[submission]
        if work["state"] == State.SETTLED or self.held(work["thread"], now):
            return False
        work.update(not_before=0, attempts=0, attempt_tail=-1)
        if work["state"] in _WAITING:
            work["wake_at"] = now
        return True

    def block(self, thread: str, *, blocked: bool) -> None:
        """See ``Ledger.put_fault`` and ``Ledger.clear_fault``."""
        self.threads[thread]["blocked"] = blocked

    def archive(self, thread: str) -> None:
        """See ``Ledger.archive``."""
        if self.open(thread):
            raise Conflict("open work")
        self.threads[thread]["archived"] = True


def _fill(amount: int, a_minute: int | None) -> int:
    """The microseconds that so much fills of a minute that has room for ``a_minute``."""
    return 0 if a_minute is None else -(-min(amount, a_minute) * _MINUTE // a_minute)
