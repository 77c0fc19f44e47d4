"""Failure cases about recovery: B01 and B11. (B07 and B13 stand in ``test_engine_cancel``.)"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.engine import recovery
from perdure.engine.attempt import Attempt
from perdure.engine.host import Host
from perdure.stores.sqlite import ledger
from support.place import Place, until
from support.puppets import once, play, puppet

pytestmark = pytest.mark.anyio


async def two_sweeps(place: Place, monkeypatch: pytest.MonkeyPatch) -> tuple[int, p.App, p.Receipt]:
    """Two recoverers list the same orphan, stop, and go on together; how many of them worked on it."""
    async with place.client([puppet(place)]) as app:
        with place.worker() as worker:
            receipt = await app.submit("puppet", play([once(gate="g")], "done"), thread="t")
            await until(lambda: place.waiting("g"), "the body")
            worker.kill()
        place.open_gate("g")
        await until(lambda: _lapsed(place), "the end of the lease")

        listed = asyncio.Barrier(2)
        original = recovery.recover_thread

        async def paused(host: Host, drivers: Any, number: int, **options: Any) -> recovery.Recovered:
            await listed.wait()  # both have their list now
            return await original(host, drivers, number, **options)

        monkeypatch.setattr(recovery, "recover_thread", paused)
        async with place.client([puppet(place)]) as other:
            done = await asyncio.gather(app.recover(), other.recover())
        monkeypatch.undo()
        worked = sum(report.decision == "MarkUnknown" for one in done for report in one.reports)
    return worked, app, receipt


def _lapsed(place: Place) -> bool:
    import time

    [(until_,)] = place.rows("SELECT lease_until FROM thread")
    return bool(until_ < time.time_ns() // 1000)


async def test_case_B01_a_stale_list_executes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    place = Place(tmp_path)
    worked, _, receipt = await two_sweeps(place, monkeypatch)
    assert worked == 1
    kinds = place.kinds("t")
    assert kinds.count("ToolCallUnknown") == kinds.count("RepairAnnotated") == 1
    async with place.app(puppet(place)) as app:
        [effect] = await app.effects(status="unknown")
        await app.reconcile(effect, p.Applied("r"), by="alice")
        assert await app.output(receipt, timeout=20) == "done"
        assert await app.verify()
    assert place.world.count() == 1


async def test_case_B01_a_stale_list_executes_nothing_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    """Protection off: whoever lost the compare-and-set goes on as if it had won; only the fence is left to stop it."""
    grant = ledger.SqliteLedger.claim_thread
    granted: list[Any] = []

    def claim(self: Any, *args: Any, **options: Any) -> Any:
        granted.append(grant(self, *args, **options) or granted[-1])
        return granted[-1]

    monkeypatch.setattr(ledger.SqliteLedger, "claim_thread", claim)
    both = asyncio.Barrier(2)
    original, append = recovery._recover_claimed, Attempt.append
    appended: list[str] = []

    async def together(*args: Any) -> Any:
        await both.wait()
        return await original(*args)

    def noted(self: Any, boundary: Any, records: Any, then: Any = ()) -> Any:
        appended.extend(type(record).__name__ for record in records)
        return append(self, boundary, records, then)

    monkeypatch.setattr(recovery, "_recover_claimed", together)
    monkeypatch.setattr(Attempt, "append", noted)
    with contextlib.suppress(p.Error):
        await two_sweeps(Place(tmp_path), monkeypatch)
    assert appended.count("ToolCallUnknown") == 2


async def test_case_B01_two_workers_take_over_one_orphan(tmp_path: Path) -> None:  # noqa: N802
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        with place.worker() as worker:
            receipt = await app.submit(
                "puppet", play([once("k", tool="keyed", gate="g")], [once("n")], "done"), thread="t"
            )
            await until(lambda: place.waiting("g"), "the body")
            worker.kill()
        place.open_gate("g")
        async with place.app(puppet(place)), place.app(puppet(place)), place.app(puppet(place)):
            assert await app.output(receipt, timeout=20) == "done"
        assert place.world.count("k") == 2  # the killed try and exactly one more
        assert place.world.count("n") == 1


async def test_case_B11_engine_tasks_are_held_strongly(tmp_path: Path) -> None:  # noqa: N802
    """A run that waits on a future that only its own frame knows survives every garbage collection."""
    place = Place(tmp_path)
    seen: list[asyncio.Future[None]] = []

    @p.tool
    async def bare(ctx: p.ToolContext) -> str:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.3, future.set_result, None)
        seen.append(future)
        await future
        return place.world.touch("bare", key=ctx.key)

    @p.tool
    async def orphan(ctx: p.ToolContext) -> str:
        """Its future is reachable from nothing but its frame and a file that a test writes."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def look(waiting: asyncio.Future[None] = future) -> None:
            if (place.folder / "g.open").exists():
                if not waiting.done():
                    waiting.set_result(None)
            else:
                asyncio.get_running_loop().call_later(0.01, look)

        look()
        await future
        return place.world.touch("orphan", key=ctx.key)

    agent = puppet(place, tools=[bare, orphan])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with place.app(agent) as app:
            receipts = [await app.submit(agent, play([["bare", {}], ["orphan", {}]], "done")) for _ in range(10)]
            await until(lambda: len(seen) == 10, "every body")
            for _ in range(30):
                gc.collect()
                await asyncio.sleep(0.002)
            place.open_gate("g")
            assert [await app.output(r, timeout=20) for r in receipts] == ["done"] * 10
    gc.collect()
    assert place.world.count() == 20
