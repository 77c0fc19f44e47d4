"""One definition and one script, run in memory, on a kept thread and durably: the same output, the same events."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

import perdure as p
from perdure.agent import events
from perdure.ports.provider import UserMessage
from perdure.providers.scripted import Scripted, call, calls, fail, say
from support.place import Place, until
from support.puppets import once, play, puppet

pytestmark = pytest.mark.anyio


class Verdict(pydantic.BaseModel):
    refunded: bool
    note: str


@dataclasses.dataclass
class Ticket:
    order: str
    cents: int


class Answer(msgspec.Struct):
    refunded: bool
    note: str


def support(place: Place, output: Any = Verdict, **options: Any) -> p.Agent:
    @p.tool(effect="observe")
    async def find(order: str) -> dict[str, int]:
        """Look an order up.

        Args:
            order: its number.
        """
        return {"cents": len(order) * 100}

    @p.tool
    def refund(ctx: p.ToolContext, order: str, cents: int) -> str:
        """Refund an order."""
        place.world.touch("refund", key=ctx.key, order=order)
        ctx.progress("half")
        return f"refunded {cents} of {order}"

    script = Scripted(
        [
            call("find", order="o-1"),
            calls(say("I refund it."), call("refund", order="o-1", cents=300), call("nothing")),
            say({"refunded": True, "note": "done"}),
        ]
    )
    return p.Agent(
        "support", input=Ticket, output=output, instructions=lambda t: f"Settle {t.order}.", tools=[find, refund],
        model=script, **options,
    )  # fmt: skip


TICKET = Ticket("o-1", 300)


@pytest.mark.parametrize("output", [Verdict, Answer, dict])
async def test_every_mode_gives_the_same_output(tmp_path: Path, output: Any) -> None:
    place = Place(tmp_path)
    agent = support(place, output)
    ephemeral = await agent.run(TICKET)
    streamed = [event async for event in agent.stream(TICKET)]
    in_thread = await asyncio.to_thread(agent.run_sync, TICKET)
    async with p.open("memory:", agents=[agent]) as memory:
        in_memory = await memory.output(await memory.submit(agent, TICKET), timeout=20)
    async with place.app(agent) as app:
        receipt = await app.submit(agent, TICKET)
        durable = await app.output(receipt, timeout=20)
        persistent = await app.run(agent, TICKET, thread="kept")
        view = await app.inspect(receipt)
    assert ephemeral.output == in_thread.output == in_memory == durable == persistent.output
    assert isinstance(durable, output)
    for result in (in_thread, persistent):
        assert (result.turns, result.usage, result.finish_reason) == (3, ephemeral.usage, "stop")
    assert view.usage == ephemeral.usage
    assert isinstance(streamed[-1], events.RunEnded)
    assert place.world.count("refund") == 6


async def test_events_come_in_order_and_end_once(tmp_path: Path) -> None:
    agent = support(Place(tmp_path))
    found = [event async for event in agent.stream(TICKET)]
    names = [type(event).__name__ for event in found if not isinstance(event, events.TextDelta)]
    assert names == [
        "RunStarted",
        "TurnStarted", "TurnCompleted", "ToolCallStarted", "ToolCallEnded",
        "TurnStarted", "TurnCompleted", "ToolCallStarted", "ToolCallProgress", "ToolCallEnded",
        "TurnStarted", "TurnCompleted",
        "RunEnded",
    ]  # fmt: skip
    assert [event.outcome for event in found if isinstance(event, events.ToolCallEnded)] == ["confirmed", "confirmed"]
    started = next(event for event in found if isinstance(event, events.ToolCallStarted) and event.tool == "refund")
    assert started.arguments == {"order": "o-1", "cents": 300}
    text = "".join(event.text for event in found if isinstance(event, events.TextDelta) and event.turn == 2)
    assert text == "I refund it."


async def test_leaving_a_stream_cancels_its_run(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = puppet(place)
    before = asyncio.all_tasks()
    stream = agent.stream(play([once(gate="g")], "done"))
    async for event in stream:
        if isinstance(event, events.ToolCallStarted):
            break
    await stream.aclose()
    assert asyncio.all_tasks() == before
    assert place.world.count() <= 1


async def test_run_sync_inside_a_loop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(p.Invalid, match="inside a running event loop"):
        support(Place(tmp_path)).run_sync(TICKET)


async def test_approve_answers_at_once(tmp_path: Path) -> None:
    place, asked = Place(tmp_path), []
    agent = puppet(place)
    script = play([once("yes", tool="asks"), once("no", tool="asks")], "done")

    async def approve(request: events.ApprovalRequested) -> bool:
        asked.append(request.arguments["name"])
        return request.arguments["name"] == "yes"

    assert (await agent.run(script, approve=approve)).output == "done"
    assert asked == ["yes", "no"]
    assert [e.name for e in place.world.entries()] == ["yes"]
    assert (await agent.run(script, approve=lambda r: True)).output == "done"
    with pytest.raises(p.Denied, match="nobody to ask"):
        await agent.run(script)
    async with place.app(agent) as app:
        assert (await app.run(agent, script, approve=approve)).output == "done"
        with pytest.raises(p.Denied, match="nobody to ask"):
            await app.run(agent, script, thread="denied")
        # the thread is not stuck with what nobody may answer
        assert (await app.run(agent, play("next"), thread="denied")).output == "next"
        assert await app.verify()


async def test_an_unknown_outcome_of_an_ephemeral_run_is_a_typed_failure(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with pytest.raises(p.RunFailed) as failed:
        await puppet(place).run(play([once(do="timeout"), once("b")], "done"))
    assert failed.value.kind == "unknown"
    assert len(failed.value.unknown) == 1
    assert "once" in str(failed.value)
    assert place.world.count() == 2
    with pytest.raises(p.RunFailed) as failed:
        async for _ in puppet(place).stream(play([once(do="unknown")], "done")):
            pass
    assert len(failed.value.unknown) == 1


async def test_a_kept_thread_has_its_history_and_refuses_when_work_is_owed(tmp_path: Path) -> None:
    place, seen = Place(tmp_path), []

    def watch(request: Any) -> None:
        seen.append([m.text for m in request.messages if isinstance(m, UserMessage)])

    agent = puppet(place, watch=watch)
    async with place.app(agent) as app:
        for name in ("one", "two", "three"):
            assert (await app.run(agent, play(name), thread="kept")).output == name
        assert [len(texts) for texts in seen] == [1, 2, 3]
        receipt = await app.submit(agent, play([once(gate="g")], "done"), thread="kept")
        await until(lambda: place.waiting("g"), "the body")
        with pytest.raises(p.Conflict, match="owed"):
            await app.run(agent, play("four"), thread="kept")
        place.open_gate("g")
        await app.settlement(receipt, timeout=20)
        assert (await app.run(agent, play("five"), thread="kept")).output == "five"
        assert len(await app.obligations()) == 0
        assert await app.verify()
    async with place.app(agent) as app:  # and after a restart
        assert (await app.run(agent, play("six"), thread="kept")).output == "six"
        assert len(seen[-1]) == 6


async def test_a_kept_run_that_fails_leaves_the_thread_usable(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = puppet(place)
    async with place.app(agent) as app:
        with pytest.raises(p.RunFailed) as failed:
            await app.run(agent, play([once(do="unknown")], "done"), thread="kept")
        assert len(failed.value.unknown) == 1
        assert (await app.run(agent, play("next"), thread="kept")).output == "next"
        assert await app.verify()


async def test_a_cancelled_kept_run_leaves_the_thread_usable(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = puppet(place)
    async with place.app(agent) as app:
        task = asyncio.ensure_future(app.run(agent, play([once(gate="g")], "done"), thread="kept"))
        await until(lambda: place.waiting("g"), "the body")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await app.run(agent, play("next"), thread="kept")).output == "next"
        assert await app.verify()


async def test_memory_keeps_history_across_runs_of_one_app(tmp_path: Path) -> None:
    seen: list[int] = []
    agent = puppet(Place(tmp_path), watch=lambda r: seen.append(len(r.messages)))
    async with p.open("memory:", agents=[agent]) as app:
        for name in ("one", "two"):
            receipt = await app.submit(agent, play(name), thread="t")
            assert await app.output(receipt, timeout=20) == name
        receipt = await app.submit(agent, play([once(do="unknown")], "done"), thread="t")
        [effect] = await until(lambda: app.effects(status="unknown"), "the unknown")
        await app.reconcile(effect, p.Applied("r"), by="alice")
        assert await app.output(receipt, timeout=20) == "done"
        assert await app.verify()
    assert seen[0] < seen[1] < seen[2]


async def test_observe_gives_every_record_once_and_resumes_exactly(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = puppet(place)
    async with place.app(agent) as app:
        receipt = await app.submit(agent, play([once("a"), once("b", gate="g")], "done"), thread="t")
        found, cursor = [], 0
        async for view in app.observe(receipt):
            found.append((view.sequence, view.kind))
            cursor = view.sequence
            if view.kind == "ToolCallSettled":
                break
        place.open_gate("g")
        found += [(view.sequence, view.kind) async for view in app.observe(receipt, after=cursor)]
        assert [sequence for sequence, _ in found] == list(range(1, len(found) + 1))
        assert [kind for _, kind in found] == place.kinds("t")


async def test_waiting_for_a_settlement_detaches_without_cancelling(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play([once(gate="g")], "done"))
        with pytest.raises(TimeoutError):
            await app.settlement(receipt, timeout=0.1)
        waiting = asyncio.ensure_future(app.output(receipt))
        await asyncio.sleep(0)
        waiting.cancel()
        place.open_gate("g")
        assert await app.output(receipt, timeout=20) == "done"


async def test_a_failing_model_is_a_typed_failure_and_a_retryable_one_is_asked_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    asked: list[int] = []

    def flaky(request: Any) -> Any:
        asked.append(request.turn)
        return fail("overloaded") if len(asked) < 3 else say("fine")

    async with place.app(p.Agent("flaky", model=Scripted(flaky)), p.Agent("dead", model=Scripted([]))) as app:
        assert await app.output(await app.submit("flaky", "go"), timeout=20) == "fine"
        assert asked == [1, 1, 1]
        with pytest.raises(p.RunFailed) as failed:
            await app.output(await app.submit("dead", "go"), timeout=20)
        assert failed.value.kind == "model"


async def test_disposition_and_output_are_what_the_log_holds(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = support(place, disposition=lambda v: "paid" if v.refunded else "refused")
    async with place.app(agent) as app:
        receipt = await app.submit(agent, TICKET)
        settled = await app.settlement(receipt, timeout=20)
        assert (settled.status, settled.disposition) == ("completed", "paid")
    async with place.client() as app:  # without the definition: plain JSON
        assert await app.output(receipt) == {"refunded": True, "note": "done"}
