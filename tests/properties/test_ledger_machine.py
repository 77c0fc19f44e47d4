"""The SQLite store beside a page of dicts, through any sequence of verbs and crashes. Planted faults must be found."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from perdure.errors import Error
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Admission, ApprovalRow, Claimed, EffectRow, Fault, Intent
from perdure.ports.log import Tail
from perdure.ports.store import Transaction
from perdure.records.codec import EMPTY_TAIL, chain
from perdure.rules.accounting import Rate
from perdure.rules.lifecycle import SubmissionEvent, SubmissionState
from perdure.rules.pace import Pace
from perdure.stores.sqlite import connection as connections
from perdure.stores.sqlite.ledger import SqliteLedger
from perdure.stores.sqlite.log import SqliteLog
from perdure.stores.sqlite.store import SqliteStore, open_store
from perdure.stores.sqlite.writer import as_transaction
from perdure.testing.reference import Reference

LEASE = 10
THREADS = st.sampled_from(["t1", "t2"])
OWNERS = st.sampled_from(["w1", "w2"])
PROGRAMS = st.sampled_from([None, ("p",), ("q",), ("p", "q")])
RECENT = st.sampled_from([0, 0, 0, 0, 1, 2, 4])
MODELS = st.sampled_from(["m1", "m1", "m2"])
RATES = st.sampled_from([Rate(), Rate(requests=2), Rate(requests=2, tokens=50), Rate(tokens=70)])
TOKENS = st.sampled_from([0, 7, 40, 500])
PHASES = st.sampled_from(["before", "inside", "after"])


class CrashError(BaseException):
    """The process is gone."""


class LedgerMachine(RuleBasedStateMachine):
    """Every verb runs on both; after every step both say the same."""

    ledger: type[SqliteLedger] = SqliteLedger
    log: type[SqliteLog] = SqliteLog

    @initialize()
    def begin(self) -> None:
        shm = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
        self.loop = asyncio.new_event_loop()
        self.model = Reference()
        self.claims: list[Claimed] = []
        self.bodies: dict[str, list[tuple[Tail, int, bytes]]] = {}
        self.subjects: list[Intent] = []
        self.now, self.count, self.generation = 100, 0, 0
        self.armed: str | None = None
        self.open()

    def open(self) -> None:
        path = self.folder / f"{self.generation}.db"
        self.store = open_store(path, threaded=False)
        self._plant(self.store)

    def _plant(self, store: SqliteStore) -> None:
        """Give the store the ledger and log under test."""

        def pair(connection: Any) -> Transaction:
            log = self.log(connection)
            return as_transaction(log, self.ledger(connection, log))

        def connect(busy: connections.BusyPolicy | None = None, *, read_only: bool = False) -> Any:
            connection = connections.connect(store.path, busy, read_only=read_only)
            return connection, pair(connection)

        store._connect = connect  # type: ignore[method-assign]
        store._pair = store._writer._transaction = pair(store.connection)

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self.store.close())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
            shutil.rmtree(self.folder)

    def fresh(self, kind: str) -> str:
        self.count += 1
        return f"{kind}_{self.count:06d}"

    def token(self) -> int:
        self.count += 1
        return self.count

    # -- both sides -------------------------------------------------------------------------------------------------
    def both(self, real: Callable[[Transaction], Any], model: Callable[[], Any]) -> Any:
        """Run a verb on both sides. An armed crash takes the store away around its commit."""
        phase, self.armed = self.armed, None
        if phase is not None:
            self._crash(real, phase)
            if phase == "after":
                self._outcome(model)
            return None
        got = self._outcome(lambda: self._write(real))
        wanted = self._outcome(model)
        assert got == wanted, f"the store says {got!r}, the page says {wanted!r}"
        return got[1] if got[0] == "value" else None

    def _write(self, unit: Callable[[Transaction], Any]) -> Any:
        async def run() -> Any:
            return await self.store.write(Boundary.REPAIR, unit)

        return self.loop.run_until_complete(run())

    @staticmethod
    def _outcome(action: Callable[[], Any]) -> tuple[str, Any]:
        try:
            return "value", action()
        except Error as error:
            return "error", type(error).__name__

    def _crash(self, real: Callable[[Transaction], Any], phase: str) -> None:
        """Keep what is on the disk at that instant, and go on with that."""
        old = self.folder / f"{self.generation}.db"
        self.generation += 1

        def failpoint(boundary: Boundary, found: str) -> None:
            if found == phase:
                for suffix in ("", "-wal"):
                    if Path(f"{old}{suffix}").exists():
                        shutil.copy(f"{old}{suffix}", self.folder / f"{self.generation}.db{suffix}")
                raise CrashError

        self.store.failpoint = failpoint
        try:
            self._write(real)
        except CrashError:
            pass
        except Error:  # it was refused before the crash could come
            failpoint_missed = not (self.folder / f"{self.generation}.db").exists()
            assert failpoint_missed
            self.generation -= 1
            self.store.failpoint = None
            return
        self.loop.run_until_complete(self.store.close())
        self.open()

    def fence(self, claimed: Claimed) -> tuple[str, int, int]:
        return claimed.thread, claimed.epoch, claimed.token

    def recent(self, index: int) -> Claimed:
        return self.claims[max(0, len(self.claims) - 1 - index)]

    def work(self, index: int) -> dict[str, Any]:
        rows = list(self.model.work.values())
        return rows[index % len(rows)]

    def number(self, thread: str) -> int:
        found = self.store.read(lambda tx: tx.ledger.thread(thread))
        assert found is not None
        return found.number

    # -- rules: admission and ownership -------------------------------------------------------------------------------
    @rule(phase=PHASES)
    def crash_and_reopen(self, phase: str) -> None:
        self.armed = phase

    @rule(seconds=st.sampled_from([1, 3, LEASE, 5 * LEASE]))
    def clock_moves(self, seconds: int) -> None:
        self.now += seconds

    @rule(
        thread=THREADS,
        key=st.sampled_from([None, None, "k1", "k2"]),
        program=st.sampled_from("ppq"),
        text=st.sampled_from("xy"),
    )
    def admit(self, thread: str, key: str | None, program: str, text: str) -> None:
        id = self.fresh("sub")
        a = Admission(id, thread, "run_" + id[4:], "ann", key, program, "d", text.encode(), text, self.now)

        def real(tx: Transaction) -> tuple[str, bool]:
            row, replayed = tx.ledger.admit(a)
            return row.id, replayed

        self.both(real, lambda: self.model.admit(a))

    @rule(owner=OWNERS, programs=PROGRAMS, limit=st.sampled_from([1, 4]))
    def claim(self, owner: str, programs: Collection[str] | None, limit: int) -> None:
        self.armed = None if self.armed == "after" else self.armed  # who is granted what is the store's to say
        tokens, until = [self.token() for _ in range(limit)], self.now + LEASE
        may = self.model.grantable(programs, self.now)
        granted: list[Claimed] | None = self.both_claims(
            lambda tx: tx.ledger.claim(owner, programs, limit, self.now, until, tokens)
        )
        if granted is None:
            return
        names = [claimed.thread for claimed in granted]
        assert len(set(names)) == len(names)
        assert set(names) <= may, f"granted {names}, but only {may} may be"
        assert len(names) == min(limit, len(may)), f"granted {names} of {may}"
        for claimed in granted:
            self.adopt(claimed, owner, programs, until)
        if programs is None and len(may) <= limit:
            due = self.store.read(lambda tx: tx.ledger.next_due(None, self.now))
            assert due is None or due > self.now, "everything was granted, so nothing is due: looking again is in vain"

    def both_claims(self, real: Callable[[Transaction], Any]) -> Any:
        phase, self.armed = self.armed, None
        if phase is None:
            return self._write(real)
        self._crash(real, phase)
        return None

    def adopt(
        self,
        claimed: Claimed,
        owner: str,
        programs: Collection[str] | None,
        until: int,
        *,
        maintenance: bool = False,
    ) -> None:
        got = (claimed.epoch, claimed.submission and claimed.submission.id, len(claimed.intents))
        superseded = self.model.threads[claimed.thread]["owner"] is not None
        wanted = self.model.grant(
            claimed.thread, owner, programs, self.now, until, claimed.token, maintenance=maintenance
        )
        assert got == wanted, f"the store says {got!r}, the page says {wanted!r}"
        assert claimed.superseded == superseded
        assert claimed.tail.sequence == self.model.tail(claimed.thread)
        self.claims.append(claimed)

    @precondition(lambda self: self.model.threads)
    @rule(thread=THREADS, owner=OWNERS, blocked=st.booleans())
    def claim_thread(self, thread: str, owner: str, blocked: bool) -> None:
        if thread not in self.model.threads:
            return
        self.armed = None if self.armed == "after" else self.armed
        number, token, until = self.number(thread), self.token(), self.now + LEASE
        may = self.model.may_claim_thread(thread, self.now, blocked=blocked)
        if self.armed is not None:
            self.both_claims(lambda tx: tx.ledger.claim_thread(number, owner, self.now, until, token, blocked=blocked))
            return
        claimed = self._write(lambda tx: tx.ledger.claim_thread(number, owner, self.now, until, token, blocked=blocked))
        assert (claimed is not None) == may
        if claimed is not None:
            self.adopt(claimed, owner, None, until, maintenance=True)

    @rule(owner=OWNERS)
    def renew(self, owner: str) -> None:
        until = self.now + LEASE
        self.both(lambda tx: tx.ledger.renew(owner, until), lambda: self.model.renew(owner, until))

    @precondition(lambda self: self.claims)
    @rule(index=RECENT, delay=st.sampled_from([0, 0, 5]))
    def release(self, index: int, delay: int) -> None:
        c, at = self.recent(index), self.now + delay if delay else 0
        self.both(
            lambda tx: tx.ledger.release(c.number, c.epoch, c.token, self.now, not_before=at),
            lambda: self.model.release(self.fence(c), at),
        )

    # -- rules: progress ----------------------------------------------------------------------------------------------
    @precondition(lambda self: self.claims)
    @rule(index=RECENT, sequence=st.sampled_from([1, 1, 1, 2]))
    def apply_input(self, index: int, sequence: int) -> None:
        c = self.recent(index)
        if c.submission is not None:
            id = c.submission.id
            self.both(lambda tx: tx.ledger.apply_input(id, sequence), lambda: self.model.apply_input(id, sequence))

    @precondition(lambda self: self.claims)
    @rule(index=RECENT, back=st.sampled_from([0, 0, 0, 1]), count=st.integers(1, 3), text=st.sampled_from([b"x", b"y"]))
    def append(self, index: int, back: int, count: int, text: bytes) -> None:
        c = self.recent(index)
        history = self.bodies.setdefault(c.thread, [])
        place = max(0, len(history) - back)
        expected = history[place - 1][0] if place else Tail(0, EMPTY_TAIL, 0)
        digest = chain(expected.digest, text)
        self.both(
            lambda tx: tx.log.append(c.number, c.epoch, c.token, expected, count, text, digest),
            lambda: self.model.append(self.fence(c), expected.sequence, count, text),
        )
        log = self.model.threads[c.thread]["log"]
        if len(log) > len(history):
            history.append((Tail(expected.sequence + count, digest, expected.sequence + 1), count, text))

    @precondition(lambda self: self.claims)
    @rule(index=RECENT, park=st.booleans(), timer=st.sampled_from([None, None, 4, 30]))
    def wait(self, index: int, park: bool, timer: int | None) -> None:
        c = self.recent(index)
        if c.submission is None:
            return
        id, wake_at = c.submission.id, None if timer is None else self.now + timer

        def real(tx: Transaction) -> bool:
            verb = tx.ledger.park if park else tx.ledger.suspend
            return verb(c.number, c.epoch, c.token, id, wake_at, self.now)

        event = SubmissionEvent.PARK if park else SubmissionEvent.SUSPEND
        self.both(real, lambda: self.model.wait(self.fence(c), id, wake_at, self.now, event))

    @precondition(lambda self: self.claims)
    @rule(park=st.booleans(), both=st.booleans(), timer=st.sampled_from([None, 4, 30]))
    def wait_for_a_decision(self, park: bool, both: bool, timer: int | None) -> None:
        if park or both:
            self.start_effect(0, None, True)
        if not park or both:
            self.ask_approval(0)
        self.wait(0, park, timer)

    @precondition(lambda self: self.claims)
    @rule(index=RECENT, outcome=st.sampled_from(["completed", "completed", "failed"]), release=st.booleans())
    def settle(self, index: int, outcome: str, release: bool) -> None:
        c = self.recent(index)
        if c.submission is not None:
            self._settle(c, c.submission.id, outcome, release)

    @precondition(lambda self: self.claims)
    @rule(index=RECENT, other=st.integers(0, 7))
    def settle_behind(self, index: int, other: int) -> None:
        work = self.work(other)
        if work["state"] in ("ready", "settled"):
            self._settle(self.recent(index), work["id"], "cancelled", False)

    def _settle(self, c: Claimed, id: str, outcome: str, release: bool) -> None:
        self.both(
            lambda tx: tx.ledger.settle(c.number, c.epoch, c.token, id, outcome, None, None, self.now, release=release),
            lambda: self.model.settle(self.fence(c), id, outcome, release=release),
        )

    # -- rules: decisions -------------------------------------------------------------------------------------------
    @precondition(lambda self: self.claims)
    @rule(index=RECENT, business=st.sampled_from([None, None, "order"]), unknown=st.booleans())
    def start_effect(self, index: int, business: str | None, unknown: bool) -> None:
        c = self.recent(index)
        if c.submission is None:
            return
        status = "unknown" if unknown else "started"
        row = EffectRow(
            self.fresh("eff"), c.number, c.submission.id, c.submission.run, "call", None, "pay", "tool", "once", "high",
            "k", business, status, None, 1, 1, self.now, None, None, "w1" if unknown else None, self.now,
        )  # fmt: skip
        self.both(lambda tx: tx.ledger.put_effect(row), lambda: self.model.put_effect(row))
        if row.id in self.model.effects:
            self.subjects.append(Intent(0, c.number, row.submission, "verdict", row.id, b"{}", "ops", "", 0))

    @precondition(lambda self: self.claims)
    @rule(index=RECENT)
    def ask_approval(self, index: int) -> None:
        c = self.recent(index)
        if c.submission is None:
            return
        id, run = c.submission.id, c.submission.run
        row = ApprovalRow(self.fresh("apr"), c.number, id, run, "call", "pay", b"{}", "d", "risk", self.now, "pending")
        self.both(lambda tx: tx.ledger.put_approval(row), lambda: self.model.put_approval(row))
        if row.id in self.model.approvals:
            self.subjects.append(Intent(0, c.number, id, "approval", row.id, b"{}", "ops", "", 0))

    @precondition(lambda self: self.subjects)
    @rule(index=st.integers(0, 5))
    def decide_or_reconcile(self, index: int) -> None:
        self._intend(self.subjects[max(0, len(self.subjects) - 1 - index)])

    @precondition(lambda self: self.model.work)
    @rule(index=st.integers(0, 7))
    def cancel(self, index: int) -> None:
        work = self.work(index)
        self._intend(Intent(0, self.number(work["thread"]), work["id"], "cancel", work["id"], b"{}", "ops", "", 0))

    def _intend(self, draft: Intent) -> None:
        i = draft
        intent = Intent(0, i.thread, i.submission, i.kind, i.subject, i.body, i.by, i.reason, self.now)
        assert i.submission is not None
        thread = self.model.work[i.submission]["thread"]
        self.both(lambda tx: tx.ledger.add_intent(intent)[1], lambda: self.model.add_intent(intent, thread))

    @precondition(lambda self: any(i["applied_at"] is None for i in self.model.intents.values()))
    @rule(index=st.integers(0, 3), verdict=st.sampled_from(["applied", "safe_to_retry"]))
    def take_in(self, index: int, verdict: str) -> None:
        pending = [i for i in self.model.intents.values() if i["applied_at"] is None]
        chosen = pending[index % len(pending)]
        kind, subject, number = chosen["kind"], chosen["subject"], self.number(chosen["thread"])
        status = "confirmed" if verdict == "applied" else "unknown"

        def real(tx: Transaction) -> None:
            found = next(i for i in tx.ledger.intents(number) if (i.kind, i.subject) == (kind, subject))
            tx.ledger.mark_applied(found.id, self.now)
            if kind == "verdict":
                tx.ledger.end_effect(subject, status, verdict, self.now)
            if kind == "approval":
                tx.ledger.decide_approval(subject, "approved", "ops", "", self.now)

        def model() -> None:
            self.model.mark_applied(kind, subject, self.now)
            if kind == "verdict":
                self.model.end_effect(subject, status, verdict)
            if kind == "approval":
                self.model.decide_approval(subject, "approved")

        self.both(real, model)

    # -- rules: models ----------------------------------------------------------------------------------------------
    @property
    def instant(self) -> int:
        """Rates count by the minute, so one tick of this machine is a second of theirs."""
        return self.now * 1_000_000

    @rule(model=MODELS, tokens=TOKENS, rate=RATES)
    def call_model(self, model: str, tokens: int, rate: Rate) -> None:
        at = self.instant
        again = self.both(
            lambda tx: tx.ledger.take_model_turn(model, at, tokens, rate),
            lambda: self.model.take_model_turn(model, at, tokens, rate),
        )
        assert not again or again > at, "asking again at once would be in vain"

    @rule(model=MODELS, reserved=TOKENS, used=TOKENS, rate=RATES)
    def correct_call(self, model: str, reserved: int, used: int, rate: Rate) -> None:
        at = self.instant
        self.both(
            lambda tx: tx.ledger.correct_model_turn(model, at, reserved, used, rate),
            lambda: self.model.correct_model_turn(model, at, reserved, used, rate),
        )

    @rule(model=MODELS, seconds=st.sampled_from([-1, 5, 20]))
    def hold_model(self, model: str, seconds: int) -> None:
        until = self.instant + seconds * 1_000_000
        self.both(lambda tx: tx.ledger.hold_model(model, until), lambda: self.model.hold_model(model, until))

    # -- rules: operation -------------------------------------------------------------------------------------------
    @precondition(lambda self: self.model.work)
    @rule(index=st.integers(0, 7))
    def redrive(self, index: int) -> None:
        id = self.work(index)["id"]
        self.both(lambda tx: tx.ledger.redrive(id, self.now), lambda: self.model.redrive(id, self.now))

    @precondition(lambda self: self.model.threads)
    @rule(thread=THREADS, what=st.sampled_from(["block", "clear", "clear", "archive", "repair"]))
    def operate(self, thread: str, what: str) -> None:
        if thread not in self.model.threads:
            return
        number = self.number(thread)

        def real(tx: Transaction) -> None:
            if what == "block":
                tx.ledger.put_fault(Fault(number, thread, "corrupt", "", self.now, self.now, 1, self.now))
            elif what == "clear":
                tx.ledger.clear_fault(number, self.now)
            elif what == "archive":
                tx.ledger.archive(number, self.now)
            else:
                tx.ledger.repair_due(number, self.now)

        def model() -> None:
            if what in ("block", "clear"):
                self.model.block(thread, blocked=what == "block")
            elif what == "archive":
                self.model.archive(thread)

        self.both(real, model)

    # -- what must hold after every step ----------------------------------------------------------------------------
    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.read(self._compare)

    def _compare(self, tx: Transaction) -> None:
        model = self.model
        rows = {
            row.id: (row.thread, row.state, row.wake_at, row.not_before, row.attempts, row.input_sequence, row.outcome)
            for row in tx.ledger.submissions()
        }
        wanted = {
            w["id"]: (
                w["thread"], str(w["state"]), w["wake_at"], w["not_before"], w["attempts"], w["input_sequence"],
                w["outcome"],
            )
            for w in model.work.values()
        }  # fmt: skip
        assert rows == wanted
        threads = {t.id: (t.epoch, t.owner, t.lease_until, t.archived_at is not None) for t in tx.ledger.threads()}
        assert threads == {
            id: (t["epoch"], t["owner"], t["lease_until"], t["archived"]) for id, t in model.threads.items()
        }
        intents = {(i.kind, i.subject) for i in tx.ledger.pending_intents()}
        assert intents == {key for key, i in model.intents.items() if i["applied_at"] is None}
        effects = {e.id: (e.status, e.verdict, e.held_until if e.held_by else None) for e in tx.ledger.effects()}
        assert effects == {
            id: (e["status"], e["verdict"], e["held_until"] if e["held_by"] else None)
            for id, e in model.effects.items()
        }
        for name in ("m1", "m2"):
            assert tx.ledger.model_held_until(name) == model.model_held_until(name)
        for thread in tx.ledger.threads():
            batches = [(batch.last, batch.body) for batch in tx.log.read(thread.number, 0, 1000)]
            assert batches == model.threads[thread.id]["log"]
        for programs in (None, ("p",), ("q",)):
            due, latest = tx.ledger.next_due(programs, self.now), model.next_due(programs, self.now)
            assert latest is None or (due is not None and due <= latest), f"{programs} is due at {latest}, not {due}"
        for work in model.work.values():
            assert work["state"] != SubmissionState.RUNNING or model.threads[work["thread"]]["owner"] is not None


def run(machine: type[LedgerMachine], examples: int, **overrides: Any) -> None:
    """As many histories as asked for in the gate, more in proportion when exploring."""
    scaled = examples * settings().max_examples // 100
    options = settings(
        max_examples=scaled,
        stateful_step_count=40,
        database=None,
        suppress_health_check=list(HealthCheck),
        **overrides,
    )
    run_state_machine_as_test(machine, settings=options)


def test_the_store_does_what_the_page_of_dicts_does() -> None:
    run(LedgerMachine, 60)


# -- the twin: a fault that the machine must find ---------------------------------------------------------------------


class LastInFirstOut(SqliteLedger):
    def _open(self, thread: int) -> Any:
        return reversed(list(super()._open(thread)))


class NoFence(SqliteLedger):
    def settle(self, thread: int, epoch: int, token: int, *args: Any, **options: Any) -> None:
        current = self._row("SELECT epoch, token FROM thread WHERE number = ?", thread)
        super().settle(thread, *current, *args, **options)


class LastSettlementWins(SqliteLedger):
    def settle(self, thread: int, epoch: int, token: int, submission: str, *args: Any, **options: Any) -> None:
        self._execute("UPDATE submission SET state = 'running', outcome = NULL WHERE id = ?", (submission,))
        super().settle(thread, epoch, token, submission, *args, **options)


class DeafToEarlierDecisions(SqliteLedger):
    def _covered(self, *args: Any) -> bool:
        return False


class TakesLiveThreads(SqliteLedger):
    def claim_thread(self, thread: int, owner: str, now: int, *args: Any, **options: Any) -> Claimed | None:
        self._execute("UPDATE thread SET lease_until = 0 WHERE number = ? AND owner IS NOT NULL", (thread,))
        return super().claim_thread(thread, owner, now, *args, **options)


class ForgetsTimers(SqliteLedger):
    def _refresh(self, thread: int, now: int) -> None:
        super()._refresh(thread, now)
        self._execute("UPDATE thread SET due_at = NULL WHERE number = ? AND due_at > ?", (thread, now))


class RatePerProcess(SqliteLedger):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: dict[str, Pace] = {}

    def _pace(self, model: str) -> Pace:
        kept = self._kept.get(model, Pace())
        return Pace(kept.requests_at, kept.tokens_at, super()._pace(model).held_until)

    def _step(self, model: str, before: Pace, after: Pace) -> None:
        self._kept[model] = after
        super()._step(model, before, after)


class CountsWhatItRefuses(SqliteLedger):
    def take_model_turn(self, model: str, now: int, tokens: int, rate: Rate) -> int:
        again = super().take_model_turn(model, now, 0, Rate(requests=rate.requests))
        return again or super().take_model_turn(model, now, tokens, Rate(tokens=rate.tokens))


class BringsHoldsForward(SqliteLedger):
    def hold_model(self, model: str, until: int) -> None:
        pace = self._pace(model)
        self._step(model, pace, Pace(pace.requests_at, pace.tokens_at, until))


class AppendsWithoutFence(SqliteLog):
    def append(self, thread: int, epoch: int, token: int, *args: Any) -> None:
        rows = self._execute("SELECT epoch, coalesce(token, 0) FROM thread WHERE number = ?", (thread,)).fetchall()
        self._execute("UPDATE thread SET token = ? WHERE number = ?", (rows[0][1], thread))
        super().append(thread, *rows[0], *args)


@pytest.mark.parametrize(
    "fault",
    [
        LastInFirstOut,
        NoFence,
        LastSettlementWins,
        DeafToEarlierDecisions,
        TakesLiveThreads,
        ForgetsTimers,
        RatePerProcess,
        CountsWhatItRefuses,
        BringsHoldsForward,
        AppendsWithoutFence,
    ],
)
def test_a_planted_fault_is_found(fault: type) -> None:
    machine = type("Planted", (LedgerMachine,), {"log" if issubclass(fault, SqliteLog) else "ledger": fault})
    with pytest.raises(AssertionError):
        run(machine, 300, phases=[Phase.generate], verbosity=Verbosity.quiet)
