"""The writer: order, groups, failures of one unit and of a whole group, renewals, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from perdure.errors import Invalid, Unavailable
from perdure.limits import GROUP_UNITS_MAX
from perdure.ports.failpoints import Boundary, Phase
from perdure.ports.ledger import Admission
from perdure.ports.store import Transaction
from perdure.stores.sqlite import writer as writers
from perdure.stores.sqlite.store import SqliteStore, open_store
from perdure.testing.conformance.given import Given

pytestmark = pytest.mark.anyio

HOUR = 3_600_000_000


def now() -> int:
    return time.time_ns() // 1000


def admission(n: int, thread: str = "t") -> Admission:
    return Admission(f"sub_{n}", thread, f"run_{n}", "p", None, "agent", "d", b"{}", "i", 1)


def admit(store: SqliteStore, n: int, boundary: Boundary = Boundary.ADMIT) -> asyncio.Future[Any]:
    return store.write(boundary, lambda tx: tx.ledger.admit(admission(n)))


def admitted(store: SqliteStore) -> list[int]:
    """Numbers of the admitted, in the order in which their units ran."""
    return [int(row.id[4:]) for row in store.read(lambda tx: tx.ledger.submissions(limit=100_000))]


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.005)


class Failing:
    """A connection on which one statement fails, as often as asked."""

    def __init__(self, connection: apsw.Connection, statement: str, error: apsw.Error, times: int, ends: bool) -> None:
        self.inner, self.statement, self.error, self.times, self.ends = connection, statement, error, times, ends

    @property
    def in_transaction(self) -> bool:
        return self.inner.in_transaction

    def execute(self, sql: str, *params: Any) -> Any:
        if sql.startswith(self.statement) and self.times:
            self.times -= 1
            if self.ends and self.inner.in_transaction:
                self.inner.execute("ROLLBACK")  # SQLite ends a transaction by itself on some errors
            raise self.error
        return self.inner.execute(sql, *params)

    def close(self) -> None:
        self.inner.close()


# -- order ------------------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("burst"), st.sampled_from([1, 1, 1, 2, 5, GROUP_UNITS_MAX + 3])),
        st.tuples(st.just("failing"), st.sampled_from([1, 2])),
        st.tuples(st.just("turns"), st.integers(1, 4)),
        st.tuples(st.just("sleep"), st.integers(1, 3)),
        st.tuples(st.just("await"), st.just(0)),
        st.tuples(st.just("forget"), st.just(0)),
        st.tuples(st.just("hurry"), st.sampled_from([0, 1])),
    ),
    max_size=25,
)


@given(scripts=st.lists(STEPS, min_size=1, max_size=4), threaded=st.booleans())
@settings(max_examples=60)
def test_units_run_in_the_order_of_their_calls(
    tmp_path_factory: pytest.TempPathFactory, scripts: list[list[tuple[str, int]]], threaded: bool
) -> None:
    """Alone and inline, alone and eager, in groups on the thread, beside units that raise: whatever path they take."""
    path = tmp_path_factory.mktemp("order") / "store.db"
    wanted: list[int] = []
    count = 0

    async def play(store: SqliteStore, script: list[tuple[str, int]]) -> None:
        nonlocal count
        last: asyncio.Future[Any] | None = None
        for step, amount in script:
            match step:
                case "burst":
                    for _ in range(amount):
                        wanted.append(count)
                        last = admit(store, count)
                        count += 1
                case "failing":
                    for _ in range(amount):
                        last = store.write(Boundary.REPAIR, failing)
                case "turns":
                    for _ in range(amount):
                        await asyncio.sleep(0)
                case "sleep":
                    await asyncio.sleep(amount / 1000)
                case "await" if last is not None:
                    await asyncio.wait([last])
                case "forget" if last is not None:
                    last.cancel()
                case "hurry":  # a slow disk sends lone units to the thread as well
                    store._writer._commit_seconds = float(amount)

    def failing(tx: Transaction) -> None:
        tx.ledger.admit(admission(-1))
        raise Invalid("no")

    async def main() -> None:
        store = open_store(path, threaded=threaded)
        await asyncio.gather(*(play(store, script) for script in scripts))
        await store.close()
        store = open_store(path)
        assert admitted(store) == wanted
        await store.close()

    asyncio.run(main())


async def test_a_group_is_one_transaction_and_lone_units_are_one_each(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    await asyncio.gather(*(admit(store, n) for n in range(100)))
    assert store.statistics == {"groups": 1, "units": 100}
    for n in range(100, 110):
        await admit(store, n)
    assert store.statistics == {"groups": 11, "units": 110}
    await store.close()


async def test_a_group_is_bounded_in_units_and_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "store.db")
    monkeypatch.setattr(writers, "GROUP_MILLISECONDS_MAX", 60_000)
    await asyncio.gather(*(admit(store, n) for n in range(GROUP_UNITS_MAX * 2 + 1)))
    assert store.statistics["groups"] == 3
    monkeypatch.setattr(writers, "GROUP_MILLISECONDS_MAX", 0)
    done: list[int] = []
    futures = [admit(store, n) for n in range(5000, 5010)]
    for n, future in enumerate(futures):
        future.add_done_callback(lambda _, n=n: done.append(n))  # type: ignore[misc]
    await asyncio.gather(*futures)
    assert store.statistics["groups"] == 13
    assert done == list(range(10))
    assert admitted(store)[-10:] == list(range(5000, 5010))
    await store.close()


async def test_lone_units_leave_the_loop_its_turns(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    ticks, stop = 0, False

    async def ticker() -> None:
        nonlocal ticks
        while not stop:
            ticks += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(ticker())
    for n in range(400):
        await admit(store, n)
    stop = True
    await task
    assert store.statistics["groups"] == 400
    assert ticks > 10, "400 commits take much longer than the loop may be kept from its other tasks"
    await store.close()


# -- failures of one --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [Invalid("no"), ValueError("no"), KeyError(1), StopIteration(1), KeyboardInterrupt()])
async def test_a_unit_that_raises_fails_alone(tmp_path: Path, error: BaseException) -> None:
    store = open_store(tmp_path / "store.db")

    def failing(tx: Transaction) -> None:
        tx.ledger.admit(admission(99))
        raise error

    futures = [admit(store, 0), store.write(Boundary.REPAIR, failing), admit(store, 1)]
    await asyncio.wait(futures)
    found = futures[1].exception()
    assert found is error or (isinstance(error, StopIteration) and isinstance(found, RuntimeError))
    assert [futures[0].exception(), futures[2].exception()] == [None, None]
    alone = store.write(Boundary.REPAIR, failing)
    await asyncio.wait([alone])
    assert type(alone.exception()) is type(found)
    assert admitted(store) == [0, 1]
    await store.close()


async def test_listeners_hear_of_failures_once_and_harm_nobody(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    heard: list[BaseException] = []

    def failing(tx: Transaction) -> None:
        raise Invalid("no")

    def listen(error: BaseException) -> None:
        heard.append(error)
        raise ValueError("a bad listener")

    futures = [
        store.write(Boundary.REPAIR, failing, listen),
        admit(store, 0),
        store.write(Boundary.REPAIR, failing, listen),
    ]
    futures[0].cancel()
    await asyncio.wait(futures)
    assert [str(error) for error in heard] == ["no", "no"]
    assert admitted(store) == [0]
    await store.close()
    await asyncio.wait([store.write(Boundary.REPAIR, failing, listen)])
    assert isinstance(heard[2], Unavailable)


# -- failures of all --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [False, True], ids=["transaction kept", "transaction ended"])
@pytest.mark.parametrize("statement", ["BEGIN", "COMMIT"])
@pytest.mark.parametrize("count", [1, 20])
async def test_a_failing_commit_fails_every_unit_of_its_group(
    tmp_path: Path, statement: str, ends: bool, count: int
) -> None:
    store = open_store(tmp_path / "store.db")
    await admit(store, 1000)
    writer = store._writer
    failing: Any = Failing(store.connection, statement, apsw.IOError("disk I/O error"), 1, ends)
    writer._connection = failing
    results = await asyncio.gather(*(admit(store, n) for n in range(count)), return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * count
    assert "I/O" in str(results[0])
    assert admitted(store) == [1000]
    await asyncio.gather(*(admit(store, n) for n in range(count)))
    assert admitted(store) == [1000, *range(count)]
    await store.close()


@pytest.mark.parametrize("phase", ["before", "inside", "after"])
@pytest.mark.parametrize("count", [1, 8])
async def test_a_failpoint_that_raises_is_heard_and_strands_nobody(tmp_path: Path, phase: Phase, count: int) -> None:
    class CrashError(BaseException):
        pass

    def failpoint(boundary: Boundary, found: Phase) -> None:
        hits.append((boundary, found))
        if (boundary, found) == (Boundary.SETTLE, phase):
            raise CrashError

    hits: list[tuple[Boundary, Phase]] = []
    store = open_store(tmp_path / "store.db")
    store.failpoint = failpoint
    futures = [admit(store, n, Boundary.SETTLE if n == count // 2 else Boundary.ADMIT) for n in range(count)]
    await asyncio.wait(futures, timeout=20)
    assert all(future.done() for future in futures)
    assert isinstance(futures[count // 2].exception(), CrashError)
    stored = admitted(store)
    assert (count // 2 in stored) == (phase == "after"), "nobody was told, but it is durable"
    assert all(n in stored for n, future in enumerate(futures) if future.exception() is None)
    store.failpoint = None
    await admit(store, 99)
    await asyncio.gather(*(admit(store, n) for n in range(100, 110)))
    await store.close()


async def test_every_write_passes_its_failpoint_in_order(tmp_path: Path) -> None:
    hits: list[tuple[Boundary, Phase]] = []
    store = open_store(tmp_path / "store.db")
    store.failpoint = lambda boundary, phase: hits.append((boundary, phase))
    await admit(store, 0)
    assert hits == [(Boundary.ADMIT, phase) for phase in ("before", "inside", "after")]
    await store.close()
    assert len(hits) == 3, "closing writes nothing"


# -- renewal ----------------------------------------------------------------------------------------------------------


async def _lease(store: SqliteStore, owner: str, seconds: float) -> Callable[[], int]:
    given = Given(store)
    await given.admit("held", at=now())
    until = now() + int(seconds * 1_000_000)
    await given.do(lambda tx: tx.ledger.claim(owner, None, 1, now(), until, [1]))

    def lease_until() -> int:
        thread = store.read(lambda tx: tx.ledger.thread("held"))
        assert thread is not None
        return thread.lease_until or 0

    return lease_until


@pytest.mark.parametrize("kind", ["file", "inline", "memory"])
async def test_claims_are_kept_alive(tmp_path: Path, kind: str) -> None:
    store = open_store("memory:" if kind == "memory" else tmp_path / "store.db", threaded=kind == "file")
    lease_until = await _lease(store, "w", 0.3)
    first = lease_until()
    store.hold("w", 0.3, now)
    await until(lambda: now() > first + 300_000)
    assert lease_until() > first
    await store.close()


async def test_renewals_go_before_a_queue_that_never_ends(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    lease_until = await _lease(store, "w", 0.1)
    renewals = 0

    def failpoint(boundary: Boundary, phase: Phase) -> None:
        nonlocal renewals
        renewals += (boundary, phase) == (Boundary.RENEW, "after")

    store.failpoint = failpoint
    store.hold("w", 0.1, now)
    first, begun, last = lease_until(), 0, None

    def unit(tx: Transaction) -> None:
        nonlocal begun
        begun += 1
        time.sleep(0.001)

    async def feed() -> None:  # while a group runs, the next one is there
        nonlocal last
        submitted = 0
        while renewals < 10:
            for _ in range(60 - (submitted - begun)):
                last = store.write(Boundary.REPAIR, unit)
                submitted += 1
            await asyncio.sleep(0.001)

    await asyncio.wait_for(feed(), 20)
    assert last is not None
    await last
    assert lease_until() > first
    await store.close()


async def test_a_deaf_worker_loses_its_lease_and_may_have_it_back(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    lease_until = await _lease(store, "w", 0.4)
    store.hold("w", 0.4, now)
    await asyncio.sleep(0.2)
    time.sleep(1.5)  # noqa: ASYNC251 - the loop is deaf
    assert lease_until() < now(), "the last renewal was before the loop was deaf for half a lease"
    await until(lambda: lease_until() > now())
    await store.close()


async def test_a_periodic_job_that_raises_does_not_end_the_writer(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    calls = 0

    def make() -> Any:
        nonlocal calls
        calls += 1
        raise ValueError("a clock without hands")

    store._writer.every(0.01, make)
    await until(lambda: calls >= 3)
    await asyncio.gather(*(admit(store, n) for n in range(20)))
    await store.close()


# -- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2000])
async def test_closing_finishes_what_is_queued_and_takes_nothing_more(
    tmp_path: Path, threaded: bool, count: int
) -> None:
    store = open_store(tmp_path / "store.db", threaded=threaded)
    store.hold("w", 10.0, now)
    futures = [admit(store, n) for n in range(count)]
    closing = [asyncio.ensure_future(store.close()) for _ in range(2)]
    await asyncio.sleep(0)
    late = admit(store, 10**6)
    await asyncio.gather(*closing)
    assert all(future.done() and future.exception() is None for future in futures)
    assert isinstance(late.exception(), Unavailable)
    with pytest.raises(Unavailable):
        store.read(lambda tx: tx.ledger.threads())
    with pytest.raises(Unavailable):
        await store.scan(lambda tx: tx.ledger.threads())
    with pytest.raises(Unavailable):
        await admit(store, 10**6)
    await store.close()
    assert not any(thread.name == "perdure-writer" for thread in threading.enumerate())
    store = open_store(tmp_path / "store.db")
    assert admitted(store) == list(range(count))
    await store.close()


async def test_closing_can_be_cancelled_and_done_again(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    store._writer._commit_seconds = 1.0  # as on a slow disk: the thread commits
    hold = threading.Event()
    first = store.write(Boundary.REPAIR, lambda tx: hold.wait(20))
    second = admit(store, 1)
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0.02)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    hold.set()
    await store.close()
    assert first.done()
    assert second.exception() is None


def test_a_loop_that_ends_first_takes_nobody_along(tmp_path: Path) -> None:
    """Futures of a dead loop are nobody's; the queue is still committed, and the file is free for the next."""
    path = tmp_path / "store.db"
    stores = []

    async def first() -> None:
        store = open_store(path)
        stores.append(store)
        for n in range(300):
            admit(store, n).cancel()
        await asyncio.sleep(0)

    async def second() -> None:
        store = open_store(path)
        await until(lambda: len(admitted(store)) == 300)
        await admit(store, 300)
        await store.close()

    asyncio.run(first())
    asyncio.run(second())
    writer = stores[0]._writer
    assert writer._thread is not None
    assert writer._thread.is_alive(), "idle, not dead: a closed loop must not kill it"
    writer._stopping = True
    with writer._handed:
        writer._handed.notify()
    writer._thread.join(20)
    stores[0].connection.close()


# -- noticing others --------------------------------------------------------------------------------------------------


async def test_subscribers_notice_another_process_and_harm_each_other_not(tmp_path: Path) -> None:
    store, other = open_store(tmp_path / "store.db"), open_store(tmp_path / "store.db")
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    calls = {"bad": 0, "good": 0, "gone": 0}

    def bad() -> None:
        calls["bad"] += 1
        raise ValueError("a bad subscriber")

    stop_bad = store.subscribe(bad)
    store.subscribe(lambda: calls.update(good=calls["good"] + 1))
    store.subscribe(lambda: calls.update(gone=calls["gone"] + 1))()
    for n in range(1, 4):
        await admit(other, n)
        await until(lambda n=n: calls["good"] >= n)  # type: ignore[misc]
    assert calls["bad"] >= 3
    assert calls["gone"] == 0
    assert {type(context["exception"]) for context in errors} == {ValueError}
    stop_bad()
    seen = calls["good"]
    await admit(store, 10)
    await asyncio.sleep(0.1)
    assert calls["good"] == seen, "our own commits are no news"
    await store.close()
    await other.close()


async def test_a_failing_look_for_others_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = open_store(tmp_path / "store.db"), open_store(tmp_path / "store.db")
    calls: list[None] = []
    store.subscribe(lambda: calls.append(None))
    failures = 3
    attempt = store._writer.attempt

    def failing(action: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise apsw.IOError("disk I/O error")
        return attempt(action)

    monkeypatch.setattr(store._writer, "attempt", failing)
    await admit(other, 1)
    await until(lambda: bool(calls))
    assert failures == 0
    await store.close()
    await other.close()
