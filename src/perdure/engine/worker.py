"""Workers: claim what is due, recover it, hand it to its driver, and survive whatever a thread brings along.

One bad thread becomes a row of the fault table and is blocked; it never stops the sweep and never settles work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from perdure.clock import seconds
from perdure.engine import recovery
from perdure.engine.attempt import Attempt, Ended, Parked, Settled, Suspended, Yielded
from perdure.engine.driver import Driver
from perdure.engine.host import Host, log
from perdure.engine.reconciliation import Encode, Probe, ask_due
from perdure.errors import OwnershipLost, Superseded, Unavailable
from perdure.limits import (
    ATTEMPT_BACKOFF_SECONDS_MAX,
    ATTEMPTS_WITHOUT_PROGRESS_MAX,
    DRAIN_SECONDS_MAX,
    RECOVERY_PERIOD_SECONDS,
    RECOVERY_SECONDS_MAX,
    STOP_SECONDS_MAX,
    STORE_RETRY_SECONDS,
)
from perdure.ports.ledger import Claimed, EffectRow
from perdure.ports.store import Transaction

NEVER = 2**62  # a submission that waits for an operator


class Worker:
    """Runs attempts of the registered programs, up to ``slots`` at once.

    Args:
        drivers: program name to its driver. Only their submissions are claimed; intents of any thread are taken in.
        only: the number of the one thread it works on; None: every thread.
    """

    def __init__(
        self,
        host: Host,
        drivers: Mapping[str, Driver],
        slots: int,
        *,
        recover: bool = True,
        recovery_seconds: float = RECOVERY_SECONDS_MAX,
        only: int | None = None,
    ) -> None:
        self.host = host
        self._only = only
        self.drivers = drivers
        self.slots = slots
        self.attempts: dict[int, Attempt] = {}
        self._recover = recover
        self._recovery_seconds = recovery_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[Any]] = []
        self._free = asyncio.Event()
        self._noticed = 0  # how often commands were looked for
        self._looked = 0.0  # loop time of the last look for work
        self._stopping = False

    # -- life ---------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        """Begin to claim."""
        host = self.host
        host.hold()
        host.foreign.append(self.notice)
        host.local_intents.append(self.notice)
        loop = asyncio.get_running_loop()
        self._loops.append(loop.create_task(self._claiming(), name="perdure-claims"))
        if self._recover:
            self._loops.append(loop.create_task(self._recovering(), name="perdure-recovery"))

    async def drain(self, timeout: float = DRAIN_SECONDS_MAX) -> bool:
        """Stop claiming and let running attempts go on. Whether all ended within ``timeout`` seconds."""
        self._stopping = True
        self.host.wake()
        self._free.set()
        ending = {*self._loops[:1], *self._tasks}  # a claim on its way may be granted yet: it is given back
        if ending:
            await asyncio.wait(ending, timeout=timeout)
        return not self._tasks and all(loop.done() for loop in self._loops[:1])

    async def stop(self) -> None:
        """Stop claiming, cancel calls in flight, give claims back. The work stays owed."""
        self._stopping = True
        for loop in self._loops:
            loop.cancel()
        for attempt in list(self.attempts.values()):
            attempt.interrupt("shutdown")
        waiting = {*self._loops, *self._tasks}
        if waiting:
            _, stubborn = await asyncio.wait(waiting, timeout=STOP_SECONDS_MAX)
            if stubborn:
                log.warning(
                    "%d attempts did not stop in %.0f s; their work stays owed", len(stubborn), STOP_SECONDS_MAX
                )
        for calls in (self.host.foreign, self.host.local_intents):
            if self.notice in calls:
                calls.remove(self.notice)

    @property
    def busy(self) -> int:
        """Attempts that run now."""
        return len(self._tasks)

    # -- claiming -----------------------------------------------------------------------------------------------------
    async def _claiming(self) -> None:
        host = self.host
        while not self._draining():
            host.due.clear()
            self._free.clear()
            free = self.slots - len(self._tasks)
            try:
                noticed = self._noticed
                granted = await self._claim(free) if free > 0 else []
                for claimed in granted:
                    if self._draining():
                        await host.give_back(claimed.number, claimed.epoch, claimed.token)
                    else:
                        self._begin(claimed, noticed)
                if free > 0 and len(granted) < free:
                    await self._until_due()
                elif len(self._tasks) >= self.slots:
                    await self._free.wait()
            except Unavailable as error:
                log.warning("claiming failed, trying again: %s", error)
                await asyncio.sleep(STORE_RETRY_SECONDS)
            except Exception:  # a worker that claims no more looks alive and is not
                log.exception("claiming failed, trying again")
                await asyncio.sleep(RECOVERY_PERIOD_SECONDS)

    def _draining(self) -> bool:
        return self._stopping

    async def _claim(self, limit: int) -> list[Claimed]:
        host, programs, only = self.host, list(self.drivers), self._only
        now, until = host.clock.now(), host.lease_until()
        due = self._next_due(now)
        if due is None or due > now:
            return []  # a look costs no commit
        tokens = [host.new_token() for _ in range(limit)]
        seen, self._looked = self._looked, asyncio.get_running_loop().time()
        stalled = bool(self.attempts) and self._looked - seen > host.lease_seconds / 2

        def unit(tx: Transaction) -> list[Claimed]:
            if stalled:  # the loop was deaf for a while: what nobody took meanwhile is still ours
                tx.ledger.renew(host.owner, until)
            if only is not None:
                one = tx.ledger.claim_thread(only, host.owner, now, until, tokens[0], work=True)
                return [] if one is None else [one]
            return tx.ledger.claim(host.owner, programs, limit, now, until, tokens)

        return await host.claim(unit)

    def _next_due(self, now: int) -> int | None:
        """When something this worker may claim is due."""
        programs, only = list(self.drivers), self._only
        if only is None:
            return self.host.store.read(lambda tx: tx.ledger.next_due(programs, now))
        row = self.host.store.read(lambda tx: tx.ledger.thread(only))
        return None if row is None else row.due_at

    async def _until_due(self) -> None:
        """Wait for a wake, or for the next instant at which something becomes due by itself."""
        host = self.host
        now = host.clock.now()
        due = self._next_due(now)
        delay = RECOVERY_PERIOD_SECONDS
        if due is not None:
            delay = min(delay, max(0.005, (due - now) / 1_000_000))
        try:
            async with asyncio.timeout(delay):
                await host.due.wait()
        except TimeoutError:
            pass

    def _begin(self, claimed: Claimed, noticed: int) -> None:
        task = asyncio.get_running_loop().create_task(self._attempt(claimed, noticed))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._free.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("an attempt failed unexpectedly; its work stays owed", exc_info=task.exception())

    # -- one attempt ----------------------------------------------------------------------------------------------------
    async def _attempt(self, claimed: Claimed, noticed: int) -> None:
        attempt: Attempt | None = None
        try:
            state = await recovery.read_thread(self.host, claimed)
            attempt = Attempt(self.host, claimed, state)
            self.attempts[claimed.number] = attempt
            ended = await self._advance(attempt, claimed, noticed)
            if isinstance(ended, Yielded):
                await attempt.release(ended.not_before)
            elif isinstance(ended, (Settled, Suspended, Parked)):
                self.host.wake()
        except (OwnershipLost, Superseded) as error:
            await self._broken(attempt, claimed, error)
        except asyncio.CancelledError:
            if attempt is not None and attempt.broken is not None:
                await self._broken(attempt, claimed, attempt.broken)
                return
            await self._give_back(attempt, claimed, 0)
            if attempt is None or attempt.interrupted is None:
                raise
        except Exception as error:
            await self._failed(attempt, claimed, error)
        finally:
            if self.attempts.get(claimed.number) is attempt:
                self.attempts.pop(claimed.number, None)

    async def _advance(self, attempt: Attempt, claimed: Claimed, noticed: int) -> Ended:
        await recovery.take_in(attempt, claimed.intents)
        if self._noticed != noticed:  # a command may have come between the claim and this attempt's registration
            await recovery.take_in(attempt, self.host.store.read(lambda tx: tx.ledger.intents(claimed.number)))
        submission = claimed.submission
        if submission is None:
            return Yielded()
        settled = await recovery.settle_from_history(attempt)
        if settled is not None:
            return settled
        if submission.id in attempt.state.cancels:
            return await attempt.settle("cancelled")
        if submission.attempts > ATTEMPTS_WITHOUT_PROGRESS_MAX:
            log.error("submission %s made no progress in %d attempts", submission.id, submission.attempts - 1)
            return Yielded(NEVER)
        attempt.task = asyncio.current_task()  # from here on it can be interrupted
        return await self.drivers[submission.program].advance(attempt)

    async def _broken(self, attempt: Attempt | None, claimed: Claimed, error: BaseException) -> None:
        """An append failed. A lost fence belongs to its new owner; anything else is given back to be tried again."""
        cause = attempt.broken if attempt is not None and attempt.broken is not None else error
        if isinstance(cause, OwnershipLost):
            if attempt is not None:
                attempt.abandon()
            self.host.wake()
            return
        log.warning("an attempt on thread %s ended, its work stays owed: %s", claimed.thread, cause)
        await self._give_back(attempt, claimed, self._backoff(claimed))

    @staticmethod
    def _backoff(claimed: Claimed) -> float:
        tries = claimed.submission.attempts if claimed.submission is not None else 1
        return min(ATTEMPT_BACKOFF_SECONDS_MAX, 0.1 * 2.0**tries)

    async def _failed(self, attempt: Attempt | None, claimed: Claimed, error: Exception) -> None:
        """Our own failure, or the store's. Never a failed run: the work stays owed."""
        try:
            if recovery.is_fault(error) or (attempt is None and not isinstance(error, Unavailable)):
                log.error("thread %s is blocked: %s", claimed.thread, error)
                await recovery.block(self.host, claimed.number, claimed.thread, error)
            else:
                log.error("an attempt on %s failed; its work stays owed", claimed.thread, exc_info=error)
        finally:  # also if the fault cannot be written now: the next claim finds it again
            await self._give_back(attempt, claimed, self._backoff(claimed))

    async def _give_back(self, attempt: Attempt | None, claimed: Claimed, delay: float) -> None:
        if delay and claimed.intents:  # commands make a thread due at once, whatever its backoff
            await asyncio.sleep(STORE_RETRY_SECONDS)
        not_before = self.host.clock.now() + seconds(delay) if delay else 0
        if attempt is not None:
            await attempt.release(not_before)
        else:
            await self.host.give_back(claimed.number, claimed.epoch, claimed.token, not_before)

    # -- watching -------------------------------------------------------------------------------------------------------
    def notice(self) -> None:
        """Take pending intents of threads that are being worked on here into their logs."""
        self._noticed += 1
        if not self.attempts:
            return
        mine = list(self.attempts)
        for intent in self.host.store.read(lambda tx: [i for number in mine for i in tx.ledger.intents(number)]):
            attempt = self.attempts.get(intent.thread)
            if attempt is None:
                continue
            try:
                attempt.take_in([intent])
            except LookupError:
                log.debug(
                    "intent %s is about what another owner of %s wrote; that one takes it in", intent.id, intent.thread
                )

    async def _recovering(self) -> None:
        """Recover blocked threads with backoff and ask due probes, for ever; never in the way of fresh work."""
        while not self._stopping:
            try:
                await recovery.sweep(self.host, self.drivers, bound=self._recovery_seconds)
                await ask_due(self.host, self._probe_of)
            except Unavailable as error:
                log.warning("recovery cannot read the store now: %s", error)
            except Exception:
                log.exception("a recovery sweep failed")
            await asyncio.sleep(min(RECOVERY_PERIOD_SECONDS, self.host.lease_seconds / 2))

    def _probe_of(self, row: EffectRow) -> tuple[Probe, Encode] | None:
        submission = self.host.store.read(lambda tx: tx.ledger.submission(row.submission))
        driver = self.drivers.get(submission.program) if submission is not None else None
        return None if driver is None else driver.probe(row.operation)
