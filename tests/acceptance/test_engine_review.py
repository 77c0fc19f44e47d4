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
from perdure.providers.scripted import Scripted, call, calls, hang, say
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
            if not failed and sys._getframe(1).f_code.co_name == "_next_due":
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


async def test_a_claim_whose_commit_is_unclear_is_given_back(tmp_path: Path) -> None:
    """It was committed and the worker was told that it failed: nobody knew its token, and renewal kept it alive."""
    failed: list[Boundary] = []

    def unclear(boundary: Boundary, phase: str) -> None:
        if boundary is Boundary.CLAIM and phase == "after" and not failed:
            failed.append(boundary)
            raise p.Unavailable("an I/O error while committing")

    async with p.open(tmp_path / "w.db", agents=[plain()], lease=LEASE) as app:
        app.store.failpoint = unclear
        assert await settled(app, await app.submit("a", "x")) == "completed"
        assert failed


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


# -- probes ----------------------------------------------------------------------------------------------------------------
def paying(body: Callable[..., Any], verdict: object, *, version: str = "1") -> tuple[p.Agent, list[str]]:
    """An agent with one ``once`` tool and its probe, and what happened to them in order."""
    seen: list[str] = []

    @p.tool(version=version)
    async def pay() -> str:
        seen.append("pay")
        return str(await body())

    @pay.probe
    async def ask(call: p.UnknownCall) -> Any:
        seen.append("probe")
        return verdict

    return p.Agent("a", tools=[pay], model=Scripted([call("pay"), say("done")])), seen


async def down() -> str:
    raise ConnectionError("down")


async def for_ever() -> str:
    await asyncio.Event().wait()
    return ""


async def blocked(app: p.App) -> bool:
    return [owed.blocked_on for owed in await app.obligations()] == ["unknown"]


async def test_not_applied_again_and_again_is_no_hot_loop(tmp_path: Path) -> None:
    """The remote is down and the probe is right: a hundred tries a second, each with records of its own."""
    agent, seen = paying(down, p.NotApplied("not there"))
    async with p.open(tmp_path / "w.db", agents=[agent]) as app:
        receipt = await app.submit("a", "x")
        await until(lambda: app.effects(status="unknown"), "the unknown")
        await until(lambda: seen.count("pay") >= 4, "the tries that are made at once")
        before = seen.count("pay")
        await asyncio.sleep(0.5)
        assert seen.count("pay") - before <= 1  # a hot loop makes dozens
        await until(lambda: blocked(app), "nothing runs: it waits for the next asking")
        await app.cancel(receipt)
        assert await settled(app, receipt) == "cancelled"
        assert await app.verify()


async def test_a_probe_that_lets_changed_code_run_is_no_hot_loop(tmp_path: Path) -> None:
    path = tmp_path / "w.db"
    old, _ = paying(for_ever, p.StillUnknown())
    async with p.open(path, agents=[old]) as app:
        receipt = await app.submit("a", "x")
        assert app.worker is not None
        await until(lambda: app.effects(status="started"), "the call")
    agent, seen = paying(for_ever, p.SafeToRetry("harmless"), version="2")
    async with p.open(path, agents=[agent]) as app:
        [effect] = await app.effects(status="unknown")
        await until(lambda: "probe" in seen, "the probe")
        await asyncio.sleep(0.3)
        assert seen == ["probe"] * len(seen)
        assert len(seen) <= 3
        assert [e.id for e in await app.effects(status="unknown")] == [effect.id]
        assert await app.verify()
        await app.cancel(receipt)
        assert await settled(app, receipt) == "cancelled"


async def test_the_probe_of_a_call_that_a_stopped_worker_left_is_asked(tmp_path: Path) -> None:
    """A kill led to the probe, an orderly stop did not: the run waited for a person."""
    path = tmp_path / "w.db"
    agent, seen = paying(for_ever, p.Applied("receipt"))
    async with p.open(path, agents=[agent], lease="1s") as app:
        receipt = await app.submit("a", "x")
        await until(lambda: seen == ["pay"], "the call")
    async with p.open(path, agents=[agent], lease="1s") as app:
        assert await settled(app, receipt) == "completed"
        assert seen == ["pay", "probe"]
        assert await app.verify()


async def test_the_probe_of_a_step_without_an_outcome_is_asked(tmp_path: Path) -> None:
    @p.tool(steps=True)
    async def pay(ctx: p.ToolContext) -> int:
        return int(await ctx.step("send", down, effect="once"))

    @pay.probe
    async def ask(call: p.UnknownCall) -> p.Applied:
        return p.Applied("7")

    agent = p.Agent("a", tools=[pay], model=Scripted([call("pay"), say("done")]))
    async with p.open(tmp_path / "w.db", agents=[agent]) as app:
        assert await settled(app, await app.submit("a", "x")) == "completed"
        assert await app.verify()


# -- bodies ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("known", [True, False])
async def test_a_call_is_not_over_while_a_step_of_it_runs(tmp_path: Path, known: bool) -> None:
    """``gather`` leaves the others running when one raises: the call settled, and a started effect got no outcome."""
    go = asyncio.Event()

    async def refused() -> None:
        raise p.Refused("no")

    async def slow() -> int:
        await go.wait()
        if not known:
            raise ConnectionError("lost")
        return 1

    @p.tool(steps=True)
    async def work(ctx: p.ToolContext) -> str:
        await asyncio.gather(ctx.step("slow", slow, effect="once"), ctx.step("no", refused, effect="once"))
        return ""

    agent = p.Agent("a", tools=[work], model=Scripted([call("work"), say("done")]))
    async with p.open(tmp_path / "w.db", agents=[agent]) as app:
        receipt = await app.submit("a", "x")
        await until(lambda: app.effects(status="refused"), "the refusal")
        assert len(await app.effects(status="started")) == 2
        go.set()
        if known:
            assert await settled(app, receipt) == "completed"
        else:
            await until(app.obligations, "the obligation")
            await until(lambda: app.effects(status="unknown"), "the unknown")
            await app.cancel(receipt)
            assert await settled(app, receipt) == "cancelled"
        by_step = {effect.step: effect.status for effect in await app.effects()}
        assert by_step["slow"] == ("confirmed" if known else "unknown")
        assert await app.verify()


@pytest.mark.parametrize("effect", ["once", "observe"])
async def test_a_cancellation_inside_a_body_is_not_the_runs(tmp_path: Path, effect: str) -> None:
    """What a body waited for was cancelled; the run was not, and a reading tool poisoned it."""

    @p.tool(effect=effect)
    async def look() -> str:
        waiting = asyncio.get_running_loop().create_future()
        waiting.cancel()
        return str(await waiting)

    agent = p.Agent("a", tools=[look], model=Scripted([call("look"), say("done")]))
    async with p.open(tmp_path / "w.db", agents=[agent]) as app:
        receipt = await app.submit("a", "x")
        if effect == "observe":
            assert await settled(app, receipt) == "completed"
            assert (await agent.run("x")).output == "done"
        else:
            await until(lambda: app.effects(status="unknown"), "the unknown")
            with pytest.raises(p.RunFailed):
                await agent.run("x")


# -- commits ---------------------------------------------------------------------------------------------------------------
async def test_records_of_more_than_one_batch_are_one_commit(tmp_path: Path) -> None:
    """A crash between two batches left requests for approval in the log that nobody could decide."""

    @p.tool(approval=True)
    async def pay(n: int) -> int:
        return n

    many = calls(*(call("pay", n=n) for n in range(300)))
    agent = p.Agent("a", tools=[pay], model=Scripted([many, say("done")]), policy=p.Policy(max_tool_calls=300))
    async with p.open(tmp_path / "w.db", agents=[agent]) as app:
        committed: list[int] = []
        write = app.store.write

        def count(boundary: Boundary, *args: Any, **options: Any) -> Any:
            committed.extend([1] if boundary is Boundary.RESPONSE else [])
            return write(boundary, *args, **options)

        app.store.write = count  # type: ignore[method-assign]
        receipt = await app.submit("a", "x")
        await until(app.approvals, "the requests")
        assert (len(await app.approvals()), len(committed)) == (300, 1)
        assert await app.verify()
        await app.cancel(receipt)
        assert await settled(app, receipt) == "cancelled"


async def test_an_unknown_of_a_run_in_persistent_mode_takes_a_verdict(tmp_path: Path) -> None:
    agent, _ = paying(down, p.StillUnknown())
    async with p.open(tmp_path / "w.db", agents=[agent]) as app:
        with pytest.raises(p.RunFailed) as failed:
            await app.run("a", "x", thread="t")
        await app.reconcile(failed.value.unknown[0], p.Applied("receipt"))
        await until(lambda: _none_unknown(app), "the verdict")


async def _none_unknown(app: p.App) -> bool:
    return not await app.effects(status="unknown")
