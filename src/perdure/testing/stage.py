"""What a crash scenario plays on: one incarnation of a process, with a witness of the world and one of people.

A scenario is played from its beginning by every incarnation, so what it does must be safe to do again: work is
submitted under a key, and what a person has said and been told is kept outside the store, by :class:`People`, who
forget nothing when a process dies. So neither the world nor people are believed through records of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

import perdure
from perdure.app import App
from perdure.definitions.agent import AgentDefinition
from perdure.definitions.registry import Registration
from perdure.definitions.verdicts import Applied, NotApplied, SafeToRetry, Verdict
from perdure.engine.admission import Receipt
from perdure.errors import Conflict, Unavailable
from perdure.limits import LEASE_SECONDS
from perdure.ports.failpoints import Failpoint
from perdure.ports.ledger import EffectRow, Submission
from perdure.ports.store import Transaction
from perdure.stores.sqlite.store import SqliteStore, open_store
from perdure.testing.clock import SeededIds, ShiftedClock
from perdure.testing.split import SplitStore, open_split
from perdure.testing.world import World

__all__ = ["LEASE_SHIFT_SECONDS", "PATIENCE_SECONDS", "Judge", "People", "Stage", "Stuck", "open_at"]

PATIENCE_SECONDS = 20.0  # nothing a scenario waits for takes longer
LEASE_SHIFT_SECONDS = LEASE_SECONDS + 1.0  # each incarnation's clock is so far ahead of the one before
_WAIT_SECONDS_MAX = 4 * LEASE_SECONDS  # a time that is due so soon is jumped to; a run's deadline never is
_LOOK_SECONDS = 0.0005

Judge = Callable[["Stage", EffectRow], Verdict | None]
"""What a person says about an effect of unknown outcome; None says nothing yet."""


class Stuck(Exception):
    """Work is owed, nothing is due and nobody is asked: it would wait for ever."""


class People:
    """What people said and were told, in a file of its own.

    Args:
        path: the file; a ``World`` that only people touch.
    """

    def __init__(self, path: Path) -> None:
        self._file = World(path)

    def note(self, what: str, key: str, **facts: Any) -> None:
        """Remember something for ever."""
        self._file.touch(what, key=key, **facts)

    def noted(self, what: str, key: str | None = None) -> list[dict[str, Any]]:
        """What was remembered of this kind, oldest first: the facts, with the key among them."""
        return [{"key": e.key, **e.facts} for e in self._file.entries() if e.name == what and key in (None, e.key)]


def honest(stage: Stage, effect: EffectRow) -> Verdict:
    """The verdict of somebody who looks into the world: applied if it happened, else not applied."""
    found = [entry for entry in stage.world.entries() if entry.key == effect.key]
    return Applied(found[-1].receipt) if found else NotApplied("the world does not know it")


class Stage:
    """One incarnation.

    Args:
        folder: where store, world and people are, the same for every incarnation of one run.
        incarnation: 0 for the first.
        failpoint: called at every boundary of every store that is opened here.
        threaded: commit from a writer thread, as in production; False commits on the loop, the same way every time.
        split: keep log and ledger in two files, so that a death can fall between their commits.

    Attributes:
        world: the outside witness; tools touch it. people: the witness of what was said.
    """

    def __init__(
        self,
        folder: Path,
        incarnation: int = 0,
        *,
        failpoint: Failpoint | None = None,
        threaded: bool = False,
        split: bool = False,
    ) -> None:
        self.folder = folder
        self.incarnation = incarnation
        self.world = World(folder / "world")
        self.people = People(folder / "people")
        self.clock = ShiftedClock(incarnation * LEASE_SHIFT_SECONDS)
        self._failpoint = failpoint
        self._threaded = threaded
        self._split = split
        self._opened = 0

    @contextlib.asynccontextmanager
    async def open(
        self,
        agents: Iterable[AgentDefinition | Registration],
        *,
        ahead: float = 0.0,
        recover: bool = False,
        **options: Any,
    ) -> AsyncIterator[App]:
        """The app of this incarnation, its failpoint armed.

        Args:
            agents, options: as for ``perdure.open``.
            ahead: seconds by which this app's clock is ahead of the stage's (a second owner, after the lease).
            recover: also sweep in the background; off by default, so that every run passes the same boundaries.
        """
        self._opened += 1
        store = open_at(self.folder, threaded=self._threaded, split=self._split)
        store.failpoint = self._failpoint
        if isinstance(store, SplitStore) and self._failpoint is not None:
            store.between = lambda boundary: self._failpoint(boundary, "between")  # type: ignore[misc,arg-type]
        clock: Any = _Ahead(self.clock, ahead) if ahead else self.clock
        ids = SeededIds(f"{self.incarnation}/{self._opened}")
        async with perdure.open(store, agents=agents, clock=clock, ids=ids, recover=recover, **options) as app:
            yield app

    # -- people -------------------------------------------------------------------------------------------------------
    async def submit(
        self, app: App, agent: AgentDefinition | str, input: Any, *, key: str = "work", thread: str | None = None
    ) -> Receipt:
        """Submit under a key. From the receipt on people rely on it: they keep it and do not submit again."""
        for noted in self.people.noted("accepted"):
            if (noted["work"], noted["wanted"]) == (key, thread):
                return msgspec.convert(noted["receipt"], Receipt)
        receipt = await app.submit(agent, input, key=key, thread=thread)
        self.people.note("accepted", receipt.submission, work=key, wanted=thread, receipt=msgspec.to_builtins(receipt))
        return receipt

    async def cancel(self, app: App, receipt: Receipt) -> None:
        """Cancel, once: when the command was accepted, people rely on it and do not repeat it."""
        if self.people.noted("cancelled", receipt.submission) or self.people.noted("settled", receipt.submission):
            return
        await app.cancel(receipt, by="ann", reason="changed my mind")
        self.people.note("cancelled", receipt.submission)

    async def decide(self, app: App, decision: Literal["approved", "rejected"]) -> None:
        """Decide every pending request."""
        for row in app.store.read(lambda tx: tx.ledger.approvals(status="pending")):
            if decision == "approved":
                self.people.note("approved", row.id, run=row.run, tool=row.tool)
                await app.approve(row.id, by="ann")
            else:
                await app.reject(row.id, by="ann", reason="too much")

    async def judge(self, app: App, judge: Judge = honest) -> bool:
        """Give verdicts on what is unknown and open. Whether there was one to give."""
        given = False
        for row in app.store.read(lambda tx: tx.ledger.effects(status="unknown")):
            if row.verdict is not None:
                continue
            verdict = judge(self, row)
            if verdict is None:
                continue
            if isinstance(verdict, (NotApplied, SafeToRetry)):
                self.people.note("permitted", row.key, effect=row.id)
            if isinstance(verdict, perdure.Refused):
                self.people.note("refused", row.key, effect=row.id)
            with contextlib.suppress(Conflict):  # the run's owner, or a probe, was quicker
                await app.reconcile(row.id, verdict, by="ann", reason="looked into it")
                given = True
        return given

    async def once(self, what: str, action: Callable[[], Any]) -> None:
        """Await an action unless it is remembered as done."""
        if not self.people.noted("done", what):
            await action()
            self.people.note("done", what)

    # -- waiting ------------------------------------------------------------------------------------------------------
    async def rest(self, app: App) -> None:
        """Wait until nothing runs here and nothing is due."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.sleep(_LOOK_SECONDS)  # what was begun just now gets its turn
            while not self.resting(app):  # noqa: ASYNC110 - nobody announces that nothing happens
                await asyncio.sleep(_LOOK_SECONDS)

    def resting(self, app: App) -> bool:
        """Whether nothing runs in this app and nothing is due for it."""
        worker = app.worker
        assert worker is not None
        if worker.busy:
            return False
        programs, now, owner = list(worker.drivers), app.host.clock.now(), app.host.owner

        def read(tx: Transaction) -> bool:
            if any(row.owner == owner for row in tx.ledger.threads()):
                return False  # claimed a moment ago, and the worker does not know yet
            due = tx.ledger.next_due(programs, now)
            return due is None or due > now

        return app.store.read(read)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that another task of this loop brings about."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 - it may look at the world, which announces nothing
                await asyncio.sleep(_LOOK_SECONDS)

    def row(self, app: App, receipt: Receipt) -> Submission:
        """Where a submission stands in the ledger."""
        row = app.store.read(lambda tx: tx.ledger.submission(receipt.submission))
        if row is None:
            raise Unavailable(f"Submission {receipt.submission} was accepted and is gone.")
        return row

    async def finish(
        self,
        app: App,
        *receipts: Receipt,
        decide: Literal["approved", "rejected"] | None = "approved",
        judge: Judge | None = honest,
    ) -> None:
        """Let workers work and people decide until every receipt is settled, and let people see how.

        Raises:
            Stuck: work is owed and nothing can ever move it.
        """
        while True:
            await self.rest(app)
            rows = [self.row(app, receipt) for receipt in receipts]
            if all(row.state == "settled" for row in rows):
                for row in rows:
                    self.see(row)
                return
            if not await self._nudge(app, decide, judge):
                states = ", ".join(f"{row.id} is {row.state}" for row in rows)
                raise Stuck(f"Nothing runs, nothing is due, nobody is asked, and {states}.")

    def see(self, row: Submission) -> None:
        """People are told an outcome, and remember it."""
        if row.state == "settled":
            self.people.note("settled", row.id, outcome=row.outcome)

    async def _nudge(self, app: App, decide: Literal["approved", "rejected"] | None, judge: Judge | None) -> bool:
        """Do what a resting store waits for: a decision, a verdict, or time. False if there is nothing to do."""
        if decide is not None and app.store.read(lambda tx: tx.ledger.approvals(status="pending")):
            await self.decide(app, decide)
            return True
        if judge is not None and await self.judge(app, judge):
            return True
        assert app.worker is not None
        programs, now = list(app.worker.drivers), app.host.clock.now()
        due = app.store.read(lambda tx: tx.ledger.next_due(programs, now))
        if due is not None and due - now < _WAIT_SECONDS_MAX * 1_000_000:
            self.clock.advance(max(0.0, (due - now) / 1_000_000) + 0.001)
            app.host.wake()
            return True
        return not self.resting(app)


class _Ahead:
    def __init__(self, clock: ShiftedClock, seconds: float) -> None:
        self._clock = clock
        self._ahead = int(seconds * 1_000_000)

    def now(self) -> int:
        return self._clock.now() + self._ahead


def open_at(folder: Path, *, threaded: bool = False, split: bool = False) -> SqliteStore:
    """The store of a run's folder."""
    if not split:
        return open_store(folder / "store.db", threaded=threaded)
    place = folder / "store"
    with contextlib.suppress(FileExistsError):
        os.mkdir(place)  # noqa: PTH102 - one call, atomic
    return open_split(place, threaded=threaded)
