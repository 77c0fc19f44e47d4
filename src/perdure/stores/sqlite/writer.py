"""The writer: one connection, one unit at a time, many units a COMMIT.

Callers enqueue units on the loop's thread. At the end of the loop's turn the queue becomes one group: on a fast disk a
small one runs right there (a thread hop is a third of a lonely commit, and a writer thread that shares the interpreter
with a busy loop waits for it after every statement), a large or slow one goes to the writer thread. While that commits,
the next group gathers. The order of calls is the order of units.

One COMMIT makes a group durable; then its futures resolve in one wake-up of the loop. A unit that raises is rolled back
alone: the group is rolled back and run again unit by unit. If SQLite itself ended the transaction (full disk, I/O
error) every unit of the group fails ``Unavailable``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar, cast

import apsw

from perdure.errors import Error, Unavailable
from perdure.limits import (
    GROUP_MILLISECONDS_MAX,
    GROUP_UNITS_MAX,
    INLINE_COMMIT_SECONDS_MAX,
    INLINE_GROUP_SECONDS_MAX,
    INLINE_UNITS_MAX,
)
from perdure.ports.failpoints import Boundary, Failpoint
from perdure.ports.store import Transaction, Unit
from perdure.stores.sqlite.connection import BusyPolicy, translate

T = TypeVar("T")
log = logging.getLogger("perdure")

_EAGER_SECONDS = 0.002  # how long lone units may run without giving the loop a turn
_LONE_TURNS = 2  # turns of the loop with one unit each before units run eagerly
_INLINE_PATIENCE_SECONDS = 0.005  # waiting for another process on the loop's thread, before handing over


class Job:
    """One unit with its future and, once run, its result."""

    __slots__ = ("boundary", "error", "future", "on_error", "result", "single", "unit")

    def __init__(
        self,
        boundary: Boundary,
        unit: Unit[Any],
        future: asyncio.Future[Any] | None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> None:
        self.on_error = on_error
        self.single = False
        self.boundary = boundary
        self.unit = unit
        self.future = future
        self.result: Any = None
        self.error: BaseException | None = None

    def resolve(self) -> None:
        """Tell the caller, if anybody still listens."""
        future = self.future
        if self.error is not None and self.on_error is not None:
            try:
                self.on_error(self.error)
            except Exception:  # the others of the group must hear of theirs
                log.exception("a listener to a failed write failed")
        if future is None or future.done():
            return
        if self.error is None:
            future.set_result(self.result)
            return
        error = self.error
        if isinstance(error, StopIteration):  # no future can carry it
            error = RuntimeError("A unit of work raised StopIteration.")
            error.__cause__ = self.error
        future.set_exception(error)
        future.exception()  # whoever stopped listening must not be blamed for it


class Writer:
    """Runs units on the write connection. Every method but the thread's own is called on the loop's thread.

    Args:
        connection: the write connection, owned from now on.
        transaction: what units may touch, on that connection.
        threaded: False runs everything inline (simulation, and ``memory:`` stores).
    """

    def __init__(
        self,
        connection: apsw.Connection,
        transaction: Transaction,
        busy: BusyPolicy,
        path: str,
        *,
        threaded: bool = True,
    ) -> None:
        self.failpoint: Failpoint | None = None
        self.lock = threading.Lock()  # held while the connection is in use
        self.groups = 0
        self.units = 0
        self._connection = connection
        self._transaction = transaction
        self._busy_policy = busy
        self._path = path
        self._threaded = threaded
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: deque[Job] = deque()
        self._handed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._thread_has_work = False
        self._closing = False  # nothing more is taken
        self._stopping = False  # the thread is to end
        self._flush_scheduled = False
        self._lone = 0
        self._eager_until = 0.0
        self._commit_seconds = 0.0  # moving average
        self._every: tuple[float, Callable[[], Job | None]] | None = None

    # -- loop side ------------------------------------------------------------------------------------------------
    def submit(
        self,
        boundary: Boundary,
        unit: Unit[T],
        on_error: Callable[[BaseException], None] | None = None,
        *,
        single: bool = False,
    ) -> asyncio.Future[T]:
        """Enqueue a unit; see ``ports.store.Store.write``."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        job = Job(boundary, unit, future, on_error)
        job.single = single
        if self._closing:
            job.error = Unavailable("The store is closed.", help="Open it again.")
            job.resolve()
            return future
        if self._eager_until and not self._queue and not self._thread_has_work and loop.time() < self._eager_until:
            self._inline(job)
            return future
        self._queue.append(job)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            loop.call_soon(self._flush)
        return future

    def _flush(self) -> None:
        self._flush_scheduled = False
        with self._handed:  # the thread decides under this lock that nothing is left for it
            if self._thread_has_work or not self._queue:
                return
        if not self._threaded:
            if len(self._queue) == 1:
                self._inline(self._queue.popleft())
            while self._queue:
                self._run_group([self._queue.popleft() for _ in range(min(len(self._queue), GROUP_UNITS_MAX))])
            return
        if len(self._queue) == 1 and self._commit_seconds <= INLINE_COMMIT_SECONDS_MAX:
            self._lone += 1
            if self._lone >= _LONE_TURNS:
                assert self._loop is not None
                self._eager_until = self._loop.time() + _EAGER_SECONDS
            self._inline(self._queue.popleft())
            return
        self._lone, self._eager_until = 0, 0.0
        if len(self._queue) <= INLINE_UNITS_MAX and self._commit_seconds <= INLINE_GROUP_SECONDS_MAX:
            self._inline_group()
        else:
            self._hand_over()

    def _inline_group(self) -> None:
        """Run the whole queue here as one group; if another process holds the file, let the thread wait for it."""
        if not self.lock.acquire(blocking=False):
            self._hand_over()
            return
        group = list(self._queue)
        self._queue.clear()
        patience = self._busy_policy.patience
        try:
            self._busy_policy.patience = _INLINE_PATIENCE_SECONDS
            rest = self._commit(group)
        finally:
            self._busy_policy.patience = patience
            self.lock.release()
        if rest:
            del group[-len(rest) :]
        if group and all(job.error is not None and _busy(job.error) for job in group):
            for job in group:
                job.error = None
            rest, group = [*group, *rest], []
        _resolve_all(group)
        if rest:
            self._queue.extendleft(reversed(rest))
            self._hand_over()

    def _inline(self, job: Job) -> None:
        """Run one unit here; if another process holds the file, let the thread wait for it."""
        if not self._threaded:
            with self.lock:
                self._commit_alone(job)
            job.resolve()
            return
        if not self.lock.acquire(blocking=False):
            self._queue.appendleft(job)
            self._hand_over()
            return
        patience = self._busy_policy.patience
        try:
            self._busy_policy.patience = _INLINE_PATIENCE_SECONDS
            self._commit_alone(job)
        finally:
            self._busy_policy.patience = patience
            self.lock.release()
        if job.error is None:
            job.resolve()
        elif _busy(job.error):
            job.error = None
            self._queue.appendleft(job)
            self._hand_over()
        else:
            job.resolve()

    def _hand_over(self) -> None:
        if self._thread is None:
            self._start()
        with self._handed:
            self._thread_has_work = True
            self._handed.notify()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._work, name="perdure-writer", daemon=True)
        self._thread.start()

    def every(self, seconds: float, make: Callable[[], Job | None]) -> None:
        """Run a job from the thread every ``seconds``, whatever the loop does (lease renewal)."""
        self._every = (seconds, make)
        if self._thread is None:
            self._start()
        else:
            with self._handed:
                self._handed.notify()

    def attempt(self, action: Callable[[apsw.Connection], T]) -> T | None:
        """Run a short read on the write connection now, or return None if it is in use."""
        if not self.lock.acquire(blocking=False):
            return None
        try:
            return action(self._connection)
        finally:
            self.lock.release()

    async def close(self) -> None:
        """Take nothing more, commit what is queued, stop the thread, close the connection. May be called again."""
        self._closing = True
        while self._queue or self._thread_has_work:  # noqa: ASYNC110 - the thread has no other word for the loop
            await asyncio.sleep(0.001)
        self._stopping = True
        if self._thread is not None:
            with self._handed:
                self._handed.notify()
            await asyncio.to_thread(self._thread.join)
        with self.lock:
            self._connection.close()

    # -- thread side ----------------------------------------------------------------------------------------------
    def _work(self) -> None:
        next_run = time.monotonic()
        while True:
            with self._handed:
                while not self._thread_has_work and not self._stopping:
                    wait = None if self._every is None else next_run - time.monotonic()
                    if wait is not None and wait <= 0:
                        break
                    self._handed.wait(wait)
                if self._stopping and not self._thread_has_work:
                    return
            if self._every is not None and time.monotonic() >= next_run:  # before the queue, however long that is
                next_run = time.monotonic() + self._every[0]
                self._run_periodic(self._every[1])
            if self._thread_has_work:
                self._run_next_group()

    def _run_periodic(self, make: Callable[[], Job | None]) -> None:
        try:
            job = make()
        except Exception:  # the queue must go on whatever a periodic job does
            log.exception("a periodic job of the store failed")
            return
        if job is not None:
            self._run_group([job])

    def _run_next_group(self) -> None:
        group: list[Job] = []
        while self._queue and len(group) < GROUP_UNITS_MAX:
            group.append(self._queue.popleft())
        if group:
            self._run_group(group)
            return
        with self._handed:
            if not self._queue:
                self._thread_has_work = False

    def _run_group(self, group: list[Job]) -> None:
        with self.lock:
            rest = self._commit(group)
        if rest:  # what was too much for one transaction is first in the next
            self._queue.extendleft(reversed(rest))
            del group[-len(rest) :]
        if threading.current_thread() is self._thread:
            loop = self._loop
            try:
                if loop is not None:
                    loop.call_soon_threadsafe(_resolve_all, group)
            except RuntimeError:
                pass  # the loop is gone, and with it everybody who waited
        else:
            _resolve_all(group)

    # -- the transaction --------------------------------------------------------------------------------------------
    def _commit_alone(self, job: Job) -> None:
        """:meth:`_commit` of one unit: what a sequence of steps pays. A single verb is its own transaction.

        A failpoint needs a place between the writing and the commit, so with one there is always a transaction.
        """
        began = time.perf_counter()
        failpoint = self.failpoint
        try:
            if failpoint is not None:
                failpoint(job.boundary, "before")
            elif job.single:
                job.result = job.unit(self._transaction)
                self._count(1, time.perf_counter() - began)
                return
            execute = self._connection.execute
            execute("BEGIN IMMEDIATE")
            job.result = job.unit(self._transaction)
            if failpoint is not None:
                failpoint(job.boundary, "inside")
            execute("COMMIT")
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who waits for the unit
            self._failed([job], [], error)
            return
        self._count(1, time.perf_counter() - began)
        self._after([job])

    def _count(self, units: int, seconds: float) -> None:
        self._commit_seconds += 0.2 * (seconds - self._commit_seconds)
        self.groups += 1
        self.units += units

    def _after(self, done: list[Job]) -> None:
        if self.failpoint is None:
            return
        for job in done:
            try:
                self.failpoint(job.boundary, "after")
            except BaseException as error:  # noqa: BLE001 - committed, and the caller is not told so
                job.error = error

    def _commit(self, group: list[Job]) -> list[Job]:
        """Run a group in one transaction and set results. Returns what was left for the next transaction."""
        began = time.perf_counter()
        done: list[Job] = []
        execute = self._connection.execute
        failpoint = self.failpoint
        try:
            if failpoint is not None:
                for job in group:
                    failpoint(job.boundary, "before")
            execute("BEGIN IMMEDIATE")
            limit = began + GROUP_MILLISECONDS_MAX / 1000
            for job in group:
                job.result = job.unit(self._transaction)
                done.append(job)
                if failpoint is not None:
                    failpoint(job.boundary, "inside")
                if len(group) > 1 and time.perf_counter() > limit:
                    break
            execute("COMMIT")
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who waits for the unit
            return self._failed(group, done, error)
        self._count(len(done), time.perf_counter() - began)
        self._after(done)
        return group[len(done) :]

    def _failed(self, group: list[Job], done: list[Job], error: BaseException) -> list[Job]:
        """A unit raised, or SQLite did. Roll back and decide who fails."""
        ended_by_sqlite = not self._connection.in_transaction
        if not ended_by_sqlite:
            try:
                self._connection.execute("ROLLBACK")
            except apsw.Error:
                ended_by_sqlite = True
        if isinstance(error, apsw.Error):
            error = self._explain(error)
        if len(group) == 1 or ended_by_sqlite or len(done) == len(group):
            for job in group:
                job.result, job.error = None, error
            return []
        for job in group:  # run again, one by one: only the unit that raises fails
            job.result = None
        for job in group:
            self._commit([job])
        return []

    def _explain(self, error: apsw.Error) -> Error:
        explained = translate(error, self._path)
        explained.__cause__ = error
        return explained


def _busy(error: BaseException) -> bool:
    """Whether another process held the file for too long; nothing of the transaction took place."""
    return isinstance(error, Unavailable) and isinstance(error.__cause__, apsw.BusyError)


def _resolve_all(group: list[Job]) -> None:
    for job in group:
        job.resolve()


def as_transaction(log: Any, ledger: Any) -> Transaction:
    """A transaction of the two ports on one connection."""
    return cast(Transaction, _Pair(log, ledger))


class _Pair:
    __slots__ = ("ledger", "log")

    def __init__(self, log: Any, ledger: Any) -> None:
        self.log = log
        self.ledger = ledger
