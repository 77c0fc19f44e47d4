"""One process on a store: its clock, ids and incarnation, and who in it waits for what.

Wakes are hints: losing every one costs latency, never work. Whoever waits subscribes, reads once, then parks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from perdure.clock import Clock, ForwardClock, Ids, RandomIds, SystemClock, seconds
from perdure.errors import Unavailable
from perdure.limits import LEASE_SECONDS, MISSED_WAKE_SECONDS_MAX, STORE_RETRY_SECONDS
from perdure.ports.failpoints import Boundary, Phase
from perdure.ports.ledger import Claimed
from perdure.ports.store import Store, Transaction, Unit

T = TypeVar("T")
log = logging.getLogger("perdure")


class Host:
    """What every part of the engine in one process shares.

    Args:
        store: where logs and ledger are.
        lease_seconds: how long a claim lives without renewal; a liveness hint, never a proof.
    """

    def __init__(
        self, store: Store, *, clock: Clock | None = None, ids: Ids | None = None, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        self.store = store
        self.clock: Clock = ForwardClock(clock or SystemClock())
        self.ids: Ids = ids or RandomIds()
        self.owner = self.ids.fresh("w")  # this incarnation; never used again
        self.lease_seconds = lease_seconds
        self.due = asyncio.Event()  # something may be claimable
        self.foreign: list[Callable[[], None]] = []  # called after another process committed
        self.local_intents: list[Callable[[], None]] = []  # called after this process recorded an intent
        self._settled: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._progress: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._holding = False  # claims of this process are being renewed
        self._unsubscribe: Callable[[], None] | None = None
        self._pulse: asyncio.TimerHandle | None = None
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin to notice other processes' commits."""
        self._unsubscribe = self.store.subscribe(self._on_foreign_change)
        self._beat(asyncio.get_running_loop())

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look once in a while although nothing was heard: a lost wake must cost latency, never work."""
        self._pulse = loop.call_later(MISSED_WAKE_SECONDS_MAX, self._beat_again, loop)

    def _beat_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat(loop)
        self._on_foreign_change()

    def stop(self) -> None:
        """Stop noticing and whatever runs in the background; release threads of sync bodies."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        if self._pulse is not None:
            self._pulse.cancel()
        if self._unsubscribe is not None:
            self._unsubscribe()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def executor(self) -> concurrent.futures.ThreadPoolExecutor:
        """Threads for synchronous bodies."""
        if self._executor is None:
            self._executor = concurrent.futures.ThreadPoolExecutor(
                max_workers=max(32, (os.cpu_count() or 1) * 4), thread_name_prefix="perdure-body"
            )
        return self._executor

    def lease_until(self) -> int:
        """When a claim taken now lapses."""
        return self.clock.now() + seconds(self.lease_seconds)

    def new_token(self) -> int:
        """A claim's token: 62 random bits, so that no stale owner can hold it by chance."""
        return int.from_bytes(os.urandom(8)) >> 2

    def hit(self, boundary: Boundary, phase: Phase) -> None:
        """Pass a failpoint around the outside world, if a test armed one."""
        failpoint = self.store.failpoint
        if failpoint is not None:
            failpoint(boundary, phase)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something beside everything else, strongly held until it ends; its failure is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a background task failed", exc_info=task.exception())

    def hold(self) -> None:
        """Keep what this process claims alive, a worker's claims and a client's alike. Idempotent."""
        if not self._holding:
            self._holding = True
            self.store.hold(self.owner, self.lease_seconds, self.clock.now)

    # -- claims -----------------------------------------------------------------------------------------------------
    async def claim(self, unit: Unit[T]) -> T:
        """Run a unit that claims. What nobody is told of is given back: the caller was cancelled, the commit is unclear."""
        found: list[Any] = []  # what the newest run of the unit granted, also if its commit then failed

        def remembering(tx: Transaction) -> T:
            granted = unit(tx)
            found[:] = granted if isinstance(granted, list) else [granted]
            return granted

        def give_back(_: object = None) -> None:
            for claimed in found:
                if isinstance(claimed, Claimed) and self._took_place(claimed):
                    _ = self._release(claimed.number, claimed.epoch, claimed.token, 0)

        self.hold()
        granted = self.store.write(Boundary.CLAIM, remembering)
        try:
            return await asyncio.shield(granted)
        except asyncio.CancelledError:
            granted.add_done_callback(give_back)
            raise
        except Exception:
            give_back()
            raise

    def _took_place(self, claimed: Claimed) -> bool:
        try:
            row = self.store.read(lambda tx: tx.ledger.thread(claimed.number))
        except Unavailable:
            return True  # nobody can say; giving back is fenced, so it is harmless if it was rolled back
        return row is not None and (row.epoch, row.owner) == (claimed.epoch, self.owner)

    async def give_back(self, number: int, epoch: int, token: int, not_before: int = 0) -> None:
        """End a claim; the work stays owed. Harmless when the fence is lost.

        If the store cannot write now it is done as soon as it can: renewal would hold the thread for ever.
        """
        with contextlib.suppress(Unavailable):
            await self._release(number, epoch, token, not_before)
        self.wake()

    def _release(self, number: int, epoch: int, token: int, not_before: int) -> asyncio.Future[None]:
        now = self.clock.now()

        def unit(tx: Transaction) -> None:
            tx.ledger.release(number, epoch, token, now, not_before=not_before)

        def failed(error: BaseException) -> None:  # called whoever listens
            if not self._stopped:
                log.warning("the claim on thread number %s is given back later: %s", number, error)
                _ = self.spawn(self.persist(Boundary.RELEASE, unit))

        return self.store.write(Boundary.RELEASE, unit, failed)

    async def persist(self, boundary: Boundary, unit: Unit[T]) -> T:
        """Write as soon as the store can: for what nobody would do again. Ends with the host.

        Raises:
            Unavailable: the host stopped.
        """
        while True:
            try:
                return await self.store.write(boundary, unit)
            except Unavailable:
                if self._stopped:
                    raise
                await asyncio.sleep(STORE_RETRY_SECONDS)

    # -- wakes ------------------------------------------------------------------------------------------------------
    def wake(self) -> None:
        """Something may be claimable."""
        self.due.set()

    def commanded(self) -> None:
        """An intent was recorded in this process: its thread may be claimable, or is being worked on here."""
        self.wake()
        for call in self.local_intents:
            call()

    def settled(self, submission: str) -> None:
        """A submission settled. Whoever waits for it reads the ledger."""
        for future in self._settled.pop(submission, ()):
            if not future.done():
                future.set_result(None)

    def progressed(self, thread: str) -> None:
        """Records were appended to a thread in this process."""
        for future in self._progress.pop(thread, ()):
            if not future.done():
                future.set_result(None)

    def watched(self, thread: str) -> bool:
        """Whether anybody here waits for a thread's next append."""
        return thread in self._progress

    def until_settled(self, submission: str) -> asyncio.Future[None]:
        """Subscribe to one settlement. Read the ledger after this, then wait. Cancel the future to detach."""
        return self._wait(self._settled, submission)

    def until_progress(self, thread: str) -> asyncio.Future[None]:
        """Subscribe to a thread's next append."""
        return self._wait(self._progress, thread)

    @staticmethod
    def _wait(table: defaultdict[str, list[asyncio.Future[None]]], topic: str) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        table[topic].append(future)

        def forget(done: asyncio.Future[None]) -> None:
            waiting = table.get(topic)
            if waiting and done in waiting:
                waiting.remove(done)
                if not waiting:
                    del table[topic]

        future.add_done_callback(forget)
        return future

    def _on_foreign_change(self) -> None:
        self.due.set()
        if self._settled:
            waiting = list(self._settled)
            for submission in self.store.read(lambda tx: tx.ledger.settled_among(waiting)):
                self.settled(submission)
        for thread in list(self._progress):
            self.progressed(thread)
        for call in self.foreign:
            call()
