"""Work that must not hang: stores that fail for a moment, commands at any instant, probes, steps side by side.

Each test is a defect that a review found in the engine. A hanging run shows as a timeout of ``settled``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.engine import recovery
from perdure.engine.worker import NEVER
from perdure.ports.failpoints import Boundary
from perdure.providers.scripted import Scripted, call, hang, say
from perdure.stores.sqlite import writer
from support.place import until

pytestmark = pytest.mark.anyio

LEASE = "0.5s"


def plain() -> p.Agent:
    return p.Agent("a", model=Scripted([say("done")]))


async def settled(app: p.App, receipt: p.Receipt | str) -> str:
    return (await app.settlement(receipt, timeout=10)).status


def failing(*times: tuple[Boundary, int]) -> Callable[[Boundary, str], None]:
    """A failpoint: the nth write at a boundary finds the disk full."""
    seen: dict[Boundary, int] = {}

    def hit(boundary: Boundary, phase: str) -> None:
        if phase == "before":
            seen[boundary] = seen.get(boundary, 0) + 1
            if (boundary, seen[boundary]) in times:
                raise p.Unavailable("disk full")

    return hit


def arm(app: p.App, *times: tuple[Boundary, int]) -> None:
    app.store.failpoint = failing(*times)


# -- the worker goes on --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [p.Unavailable("busy"), p.Corrupt("a bad page"), ValueError("a defect")])
async def test_claiming_survives_a_failed_look(tmp_path: Path, error: Exception, monkeypatch: Any) -> None:
    """The look for what is due next was outside of the fault boundary: one failed read ended claiming for ever."""
    monkeypatch.setattr("perdure.engine.worker.RECOVERY_PERIOD_SECONDS", 0.05)
    async with p.open(tmp_path / "w.db", agents=[plain()]) as app:
        read, failed = app.store.read, list[int]()

        def fails_once(unit: Any) -> Any:
            if not failed and sys._getframe(1).f_code.co_name == "_until_due":
                failed.append(1)
                raise error
            return read(unit)

        monkeypatch.setattr(app.store, "read", fails_once)
        app.host.wake()
        assert await settled(app, await app.submit("a", "x")) == "completed"
        assert failed


async def test_a_thread_that_cannot_be_read_now_is_given_back(tmp_path: Path, monkeypatch: Any) -> None:
    read, reads = recovery.read_thread, []

    async def fails_once(*args: Any) -> Any:
        reads.append(1)
        if len(reads) == 1:
            raise p.Unavailable("locked")
        return await read(*args)

    monkeypatch.setattr(recovery, "read_thread", fails_once)
    async with p.open(tmp_path / "w.db", agents=[plain()], lease=LEASE) as app:
        assert await settled(app, await app.submit("a", "x")) == "completed"
        assert len(reads) == 2


async def test_a_claim_is_given_back_although_the_fault_cannot_be_written(tmp_path: Path, monkeypatch: Any) -> None:
    """Writing the fault row failed too, and the claim was renewed for ever."""
    read, reads = recovery.read_thread, []

    async def fails_once(*args: Any) -> Any:
        reads.append(1)
        if len(reads) == 1:
            raise p.Corrupt("a page came back wrong")
        return await read(*args)

    monkeypatch.setattr(recovery, "read_thread", fails_once)
    async with p.open(tmp_path / "w.db", agents=[plain()], lease=LEASE) as app:
        arm(app, (Boundary.FAULT, 1))
        assert await settled(app, await app.submit("a", "x")) == "completed"


@pytest.mark.parametrize("eager", [False, True])
async def test_a_claim_whose_release_fails_is_given_back_later(tmp_path: Path, eager: bool, monkeypatch: Any) -> None:
    """Eager: the append fails on the loop, inside the very task that its failure is to stop."""

    async def step() -> int:
        return 1

    @p.tool(steps=True)
    async def work(ctx: p.ToolContext) -> str:
        for index in range(4):
            await ctx.step(f"s{index}", step)
        return "worked"

    agent = p.Agent("a", tools=[work], model=Scripted([call("work"), say("done")]))
    if eager:
        monkeypatch.setattr(writer, "_EAGER_SECONDS", 1e9)
        monkeypatch.setattr(writer, "INLINE_COMMIT_SECONDS_MAX", 1e9)
    async with p.open(tmp_path / "w.db", agents=[agent], lease=LEASE) as app:
        arm(app, (Boundary.STEP_OUTCOME, 2), (Boundary.RELEASE, 1), (Boundary.RELEASE, 2))
        assert await settled(app, await app.submit("a", "x")) == "completed"


async def test_a_recovery_whose_release_fails_does_not_keep_the_thread(tmp_path: Path) -> None:
    async with p.open(tmp_path / "w.db", agents=[plain()], lease=LEASE) as app:
        receipt = await app.submit("a", "x")
        assert await settled(app, receipt) == "completed"
        arm(app, (Boundary.RELEASE, 1))
        await app.recover(thread=receipt.thread)
        assert await settled(app, await app.submit("a", "y", thread=receipt.thread)) == "completed"


async def test_a_claim_granted_to_a_cancelled_caller_is_given_back(tmp_path: Path) -> None:
    async with p.open(tmp_path / "w.db", agents=[plain()], lease=LEASE) as app:
        running = asyncio.ensure_future(app.run("a", "x", thread="t"))
        await asyncio.sleep(0)  # the claim is on its way
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert await settled(app, await app.submit("a", "x", thread="t")) == "completed"


# -- commands and counters -----------------------------------------------------------------------------------------------
async def test_a_cancel_ends_what_only_an_operator_would_try_again(tmp_path: Path) -> None:
    """``not_before`` kept a started submission from every claim, also after it was cancelled."""
    path = tmp_path / "w.db"
    agent = p.Agent("a", model=Scripted([hang()]))
    async with p.open(path, agents=[agent]) as app:
        receipt = await app.submit("a", "x")
        assert app.worker is not None
        attempts = app.worker.attempts
        await until(lambda: any(attempt.started for attempt in attempts.values()), "the start")
    async with p.open(path, workers=0) as app:  # as a worker leaves it that found no progress
        for not_before in [0] * 10 + [NEVER]:
            now = app.host.clock.now()
            [claimed] = await app.host.claim(lambda tx, at=now: tx.ledger.claim("w", ["a"], 1, at, at + 10**6, [1]))  # type: ignore[misc]
            await app.host.give_back(claimed.number, claimed.epoch, claimed.token, not_before)
    async with p.open(path, agents=[agent]) as app:
        [owed] = await app.obligations()
        assert owed.submission == receipt.submission
        await app.cancel(receipt)
        assert await settled(app, receipt) == "cancelled"


async def test_looking_at_work_is_no_attempt_at_it(tmp_path: Path) -> None:
    """Nine recoveries without a worker counted as nine attempts without progress."""
    path = tmp_path / "w.db"
    async with p.open(path, agents=[plain()], workers=0) as app:
        receipt = await app.submit("a", "x")
        for _ in range(10):
            await app.recover()
    async with p.open(path, agents=[plain()]) as app:
        assert await settled(app, receipt) == "completed"
