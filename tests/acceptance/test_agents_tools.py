"""Tools in trouble: probes, business keys, synchronous bodies, and definitions that changed between two attempts."""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.agent import batch
from support.place import Place, until
from support.puppets import ask_world, once, play, puppet, tools

pytestmark = pytest.mark.anyio


async def unknowns(app: p.App) -> list[p.Effect]:
    return await app.effects(status="unknown")


# -- probes -----------------------------------------------------------------------------------------------------------


async def test_a_probe_is_asked_at_once_in_a_live_process(tmp_path: Path) -> None:
    place, asked = Place(tmp_path), []

    def probe(unknown: p.UnknownCall) -> Any:
        asked.append(unknown)
        return ask_world(place, unknown)

    async with place.app(p.Registration(puppet(place), probe=probe)) as app:
        receipt = await app.submit("puppet", play([once(do="timeout")], "done"), thread="t")
        assert await app.output(receipt, timeout=20) == "done"
        [effect] = await app.effects()
        [entry] = place.world.entries()
        assert (effect.status, effect.verdict, effect.by) == ("confirmed", "applied", "probe")
        assert effect.result == entry.receipt
        [unknown] = asked
        assert (unknown.key, unknown.tool, unknown.thread, unknown.run) == (entry.key, "once", "t", receipt.run)
        assert (unknown.call, unknown.effect, unknown.arguments["do"]) == ("1.0", effect.id, "timeout")
        assert "no answer" in unknown.reason
        assert place.kinds("t").count("ToolCallUnknown") == 1
        assert await app.verify()


async def test_a_probe_is_asked_after_a_crash(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        with place.worker() as worker:
            receipt = await app.submit("puppet", play([once(gate="g")], "done"), thread="t")
            await until(lambda: place.waiting("g"), "the body")
            worker.kill()
        with place.worker("probed"):
            assert await app.output(receipt, timeout=20) == "done"
        [effect] = await app.effects()
        assert (effect.status, effect.verdict) == ("confirmed", "applied")
        assert place.world.has_receipt(effect.result)
        assert place.world.count() == 1
        assert await app.verify()


def lossy(place: Place, keys: list[str]) -> Any:
    """A tool whose first try is lost before it touched anything."""

    @p.tool
    async def lossy_tool(ctx: p.ToolContext) -> str:
        keys.append(ctx.key)
        if len(keys) == 1:
            raise ConnectionResetError
        return place.world.touch("pay", key=ctx.key)

    return lossy_tool


async def test_not_applied_leads_to_a_new_try_with_the_same_key(tmp_path: Path) -> None:
    place, keys = Place(tmp_path), []
    tool = lossy(place, keys)

    @tool.probe
    async def _(unknown: p.UnknownCall) -> Any:
        return ask_world(place, unknown)

    async with place.app(puppet(place, tools=[tool])) as app:
        receipt = await app.submit("puppet", play([["lossy_tool", {}]], "done"))
        assert await app.output(receipt, timeout=20) == "done"
        assert len(keys) == 2
        assert keys[0] == keys[1]
        assert place.world.count("pay", keys[0]) == 1
        first, second = sorted(await app.effects(), key=lambda e: e.tries)
        assert (first.status, first.verdict, second.status) == ("refused", "not_applied", "confirmed")
        assert await app.verify()


@pytest.mark.parametrize("answer", ["still", "raises", "nonsense", "unstorable"])
async def test_a_probe_that_cannot_tell_leaves_it_listed_and_is_asked_again(tmp_path: Path, answer: str) -> None:
    place, asked = Place(tmp_path), []

    async def probe(unknown: p.UnknownCall) -> Any:
        asked.append(time.monotonic())
        if len(asked) > 1:
            return ask_world(place, unknown)
        match answer:
            case "still":
                return p.StillUnknown("the bank is closed")
            case "raises":
                raise RuntimeError("no route to the bank")
            case "nonsense":
                return True
            case _:
                return p.Applied(object())

    async with place.app(p.Registration(puppet(place), probe=probe)) as app:
        receipt = await app.submit("puppet", play([once(do="timeout")], "done"))
        [effect] = await until(lambda: unknowns(app), "the unknown")
        assert effect.verdict is None
        assert await app.output(receipt, timeout=20) == "done"
        assert len(asked) == 2
        assert asked[1] - asked[0] >= 0.9  # with backoff
        assert place.world.count() == 1


async def test_a_person_may_decide_what_a_probe_cannot_tell(tmp_path: Path) -> None:
    place = Place(tmp_path)
    registration = p.Registration(puppet(place), probe=lambda u: p.StillUnknown())
    async with place.app(registration) as app:
        receipt = await app.submit("puppet", play([once(do="timeout")], "done"))
        [effect] = await until(lambda: unknowns(app), "the unknown")
        await app.reconcile(effect, p.Refused("the bank has no trace"), by="alice")
        assert await app.output(receipt, timeout=20) == "done"


# -- business keys ----------------------------------------------------------------------------------------------------


def business(name: str, **more: Any) -> list[Any]:
    return once(name, tool="business", **more)


async def second_use(place: Place) -> tuple[int, list[Any]]:
    """Use a business object whose first use is unresolved; how often it was touched, what the model was told."""
    told: list[Any] = []
    agent = puppet(place, watch=lambda r: told.append(r.messages[-1]))
    async with place.app(agent) as app:
        first = await app.submit(agent, play([business("order-1", do="unknown")], "done"), thread="a")
        [effect] = await until(lambda: unknowns(app), "the unknown")
        second = await app.submit(agent, play([business("order-1"), business("order-2")], "done"), thread="b")
        assert await app.output(second, timeout=20) == "done"
        results = told[-1].results
        count = place.world.count("order-1")
        await app.reconcile(effect, p.Applied("r"), by="alice")
        assert await app.output(first, timeout=20) == "done"
        third = await app.submit(agent, play([business("order-1")], "done"), thread="b")
        assert await app.output(third, timeout=20) == "done"
        assert place.world.count("order-1") == count + 1
        assert place.world.count("order-2") == 1
        assert await app.verify()
    return count, results


async def test_a_second_call_on_an_unresolved_business_object_is_refused(tmp_path: Path) -> None:
    count, (refused, free) = await second_use(Place(tmp_path))
    assert count == 1
    assert refused.failed
    assert "not known yet" in refused.content
    assert "Do not repeat" in refused.content
    assert not free.failed


async def test_a_second_call_on_an_unresolved_business_object_is_refused_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protection off: neither the look-up nor the index that holds it."""
    monkeypatch.setattr(batch.Batch, "_may_use", lambda *_: True)
    monkeypatch.setattr(batch, "business_key", lambda tool, arguments: None)
    count, (refused, _) = await second_use(Place(tmp_path))
    assert count == 2
    assert not refused.failed


async def test_a_business_object_in_flight_elsewhere_is_refused_too(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        first = await app.submit("puppet", play([business("o", gate="g")], "one"), thread="a")
        await until(lambda: place.waiting("g"), "the body")
        second = await app.submit("puppet", play([business("o")], "two"), thread="b")
        assert await app.output(second, timeout=20) == "two"
        assert place.world.count("o") == 1
        place.open_gate("g")
        assert await app.output(first, timeout=20) == "one"


async def test_twice_in_one_batch_comes_one_after_the_other(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play([business("o"), business("o"), business("o")], "done"))
        assert await app.output(receipt, timeout=20) == "done"
        assert place.world.count("o") == 3
        assert len({e.key for e in place.world.entries()}) == 3


async def test_many_threads_race_for_one_business_object(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipts = [await app.submit("puppet", play([business("o")], "done"), thread=f"t{i}") for i in range(20)]
        assert {await app.output(r, timeout=30) for r in receipts} == {"done"}
        effects = await app.effects()
        assert len(effects) == place.world.count("o") >= 1
        spans = sorted((e.started_at, e.ended_at) for e in effects)
        assert all(ended is not None and ended <= start for (_, ended), (start, _) in itertools.pairwise(spans))
        assert await app.verify()


async def test_a_key_that_cannot_be_told_is_a_failed_result(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play([business(" "), business("x\n")], "done"))
        assert await app.output(receipt, timeout=20) == "done"
        assert place.world.count() == 0


# -- synchronous bodies -----------------------------------------------------------------------------------------------

REQUEST: contextvars.ContextVar[str] = contextvars.ContextVar("REQUEST", default="")


async def test_a_sync_body_runs_in_a_thread_with_its_context(tmp_path: Path) -> None:
    place, seen = Place(tmp_path), {}

    @p.tool(effect="observe")
    def where(ctx: p.ToolContext, fast: bool = True) -> str:
        seen.update(thread=threading.current_thread(), request=REQUEST.get(), run=ctx.run)
        return "here"

    REQUEST.set("r-1")
    result = await puppet(place, tools=[where]).run(play([["where", {}]], "done"))
    assert seen["thread"] is not threading.main_thread()
    assert (seen["request"], seen["run"]) == ("r-1", result.run)


async def test_many_sync_bodies_do_not_stop_the_loop(tmp_path: Path) -> None:
    """B05: user code that fills the thread pool delays no renewal and no other thread's work."""
    place = Place(tmp_path)
    async with place.app(puppet(place), lease="400ms") as app:
        slow = [
            await app.submit("puppet", play([once(f"s{i}", tool="threaded", gate="g")], "slow"), thread=f"s{i}")
            for i in range(40)
        ]
        await until(lambda: place.world.count() >= 30, "a full pool")
        quick = await app.submit("puppet", play([once("quick")], "quick"))
        assert await app.output(quick, timeout=5) == "quick"
        await until(lambda: _renewed(place), "renewals beyond the first lease")
        place.open_gate("g")
        assert {await app.output(r, timeout=30) for r in slow} == {"slow"}
        assert place.world.count() == 41
        assert {epoch for (epoch,) in place.rows("SELECT epoch FROM thread")} == {1}


def _renewed(place: Place) -> bool:
    [(first,)] = place.rows("SELECT min(started_at) FROM effect")
    [(lease,)] = place.rows("SELECT max(lease_until) FROM thread WHERE owner IS NOT NULL")
    return bool(lease > first + 1_500_000)


async def test_a_sync_body_past_its_timeout_is_waited_for(tmp_path: Path) -> None:
    """What it returns then is still the truth."""
    place = Place(tmp_path)

    @p.tool(timeout=0.01)
    def late(ctx: p.ToolContext) -> str:
        time.sleep(0.1)
        return place.world.touch("late", key=ctx.key)

    async with place.app(puppet(place, tools=[late])) as app:
        receipt = await app.submit("puppet", play([["late", {}]], "done"))
        assert await app.output(receipt, timeout=20) == "done"
        [effect] = await app.effects()
        assert effect.status == "confirmed"


async def test_an_async_body_past_its_timeout_is_unknown(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        await app.submit("puppet", play([once(tool="hasty", gate="never")], "done"))
        [effect] = await until(lambda: unknowns(app), "the unknown")
        assert "Timeout" in effect.reason


@pytest.mark.parametrize(("do", "status", "verdict"), [("", "confirmed", "applied"), ("refuse", "refused", "refused")])
async def test_a_cancelled_sync_body_holds_its_effect_until_it_ends(
    tmp_path: Path, do: str, status: str, verdict: str
) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play([once(tool="threaded", gate="g", do=do)], "done"), thread="t")
        await until(lambda: place.waiting("g"), "the body")
        await app.cancel(receipt, by="alice")
        assert (await app.settlement(receipt, timeout=5)).status == "cancelled"
        [effect] = await unknowns(app)
        assert effect.held
        with pytest.raises(p.Conflict, match="still runs in a thread"):
            await app.reconcile(effect, p.NotApplied(), by="alice")
        nxt = await app.submit("puppet", play("next"), thread="t")
        assert await app.output(nxt, timeout=5) == "next"
        place.open_gate("g")

        async def judged() -> bool:
            return (await app.effect(effect.id)).status == status

        await until(judged, "the late verdict")
        found = await app.effect(effect.id)
        assert (found.verdict, found.by, found.held) == (verdict, "worker", False)
        if status == "confirmed":
            assert place.world.has_receipt(found.result)
        await until(lambda: "ToolCallResolved" in place.kinds("t"), "the verdict in the log")
        assert (await app.settlement(receipt)).status == "cancelled"
        assert await app.verify()


async def test_a_cancelled_sync_body_holds_its_effect_until_it_ends_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protection off: nobody is held, so a verdict can be given that the body then contradicts."""
    monkeypatch.setattr(batch.Batch, "_hold", lambda *_: lambda tx: None)
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play([once(tool="threaded", gate="g")], "done"), thread="t")
        await until(lambda: place.waiting("g"), "the body")
        await app.cancel(receipt, by="alice")
        await app.settlement(receipt, timeout=5)
        [effect] = await unknowns(app)
        await app.reconcile(effect, p.NotApplied(), by="alice")
        place.open_gate("g")
        assert place.world.count() == 1  # it did take place


async def test_a_held_effect_is_free_when_its_process_is_gone(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        with place.worker() as worker:
            receipt = await app.submit("puppet", play([once(tool="threaded", gate="g")], "done"), thread="t")
            await until(lambda: place.waiting("g"), "the body")
            await app.cancel(receipt, by="alice")
            await app.settlement(receipt, timeout=5)
            [effect] = await unknowns(app)
            with pytest.raises(p.Conflict):
                await app.reconcile(effect, p.NotApplied(), by="alice")
            worker.kill()

        async def accepted() -> bool:
            try:
                await app.reconcile(effect, p.NotApplied(), by="alice")
            except p.Conflict:
                return False
            return True

        await until(accepted, "the end of the dead worker's lease")


# -- definitions that changed -----------------------------------------------------------------------------------------


async def killed_with(place: Place, app: p.App, *batch_: list[Any], gates: tuple[str, ...]) -> p.Receipt:
    with place.worker() as worker:
        receipt = await app.submit("puppet", play(list(batch_), "done"), thread="t")
        await until(lambda: all(place.waiting(gate) for gate in gates), "the bodies")
        worker.kill()
    for gate in gates:
        place.open_gate(gate)
    return receipt


@pytest.mark.parametrize("deploy", ["bare", "changed"])
async def test_an_undispatched_once_call_of_a_gone_or_changed_tool_is_not_executed(tmp_path: Path, deploy: str) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        looks = [once(f"look{i}", tool="look", gate=f"g{i}") for i in range(4)]
        receipt = await killed_with(place, app, *looks, once(), gates=("g0", "g1", "g2", "g3"))
        with place.worker(deploy):
            assert await app.output(receipt, timeout=20) == "done"
        assert place.world.count("pay") == 0
        *_, call = (await app.inspect(receipt)).turns[0].calls
        assert call.status == "withdrawn"
        assert call.error is not None
        assert (call.error.kind, "not-executed" in call.error.message) == ("unavailable", True)
        assert await app.verify()


@pytest.mark.parametrize("deploy", ["bare", "changed"])
async def test_a_prepared_once_call_of_a_gone_or_changed_tool_is_unknown(tmp_path: Path, deploy: str) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        receipt = await killed_with(place, app, once(gate="g"), gates=("g",))
        with place.worker(deploy):
            [effect] = await until(lambda: unknowns(app), "the unknown")
            # a verdict that allows another try never allows it to other code
            await app.reconcile(effect, p.SafeToRetry("harmless"), by="alice")
            [again] = await until(lambda: open_again(app, place), "the doubt again")
            assert place.world.count("pay") == 1
            [entry] = place.world.entries()
            await app.reconcile(again, p.Applied(entry.receipt), by="alice")
            assert await app.output(receipt, timeout=20) == "done"
        assert place.world.count("pay") == 1
        assert await app.verify()


async def open_again(app: p.App, place: Place) -> list[p.Effect]:
    return await unknowns(app) if place.kinds("t").count("ToolCallUnknown") == 2 else []


@pytest.mark.parametrize("deploy", ["bare", "changed"])
async def test_not_applied_with_changed_code_is_not_executed(tmp_path: Path, deploy: str) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        receipt = await killed_with(place, app, once(gate="g"), gates=("g",))
        with place.worker(deploy):
            [effect] = await until(lambda: unknowns(app), "the unknown")
            await app.reconcile(effect, p.NotApplied("no such booking"), by="alice")
            assert await app.output(receipt, timeout=20) == "done"
        assert place.world.count("pay") == 1
        [call] = (await app.inspect(receipt)).turns[0].calls
        assert call.error is not None
        assert call.error.kind == "unavailable"
        assert await app.verify()


async def test_an_approved_call_whose_tool_is_gone_is_not_executed(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play([once(tool="asks")], "done"))
        [asked] = await until(app.approvals, "the request")
    async with place.app(puppet(place, without="asks")) as app:
        await app.approve(asked.id, by="alice")
        assert await app.output(receipt, timeout=20) == "done"
        assert place.world.count() == 0


async def test_a_keyed_call_is_tried_again_with_its_key_and_an_observing_one_freely(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        batch_ = [once("k", tool="keyed", gate="g"), once("l", tool="look", gate="h")]
        receipt = await killed_with(place, app, *batch_, gates=("g", "h"))
        with place.worker():
            assert await app.output(receipt, timeout=20) == "done"
        assert (place.world.count("k"), place.world.count("l")) == (2, 2)
        assert len({e.key for e in place.world.entries() if e.name == "k"}) == 1
        assert await app.verify()


async def test_a_run_goes_on_in_another_process_built_anew(tmp_path: Path) -> None:
    """Two processes build the definition anew: the same digest, the same contracts."""
    place = Place(tmp_path)
    first, second = puppet(place), puppet(place)
    assert first.digest == second.digest
    assert [t.contract for t in first.tools] == [t.contract for t in second.tools]
    assert set(tools(place)) == {t.name for t in first.tools}
