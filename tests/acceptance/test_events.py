"""Live events of durable runs: here, and from another process on the store; provisional, and never in the way."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.agent import events
from perdure.providers.scripted import Scripted, call, say
from support.place import Place, until

pytestmark = pytest.mark.anyio


class Gated:
    """A scripted model that waits until somebody watches; remembers whether it was asked to stream."""

    name = "gated"

    def __init__(self, *items: Any) -> None:
        self.inner = Scripted(list(items))
        self.open = asyncio.Event()
        self.streamed: list[bool] = []

    async def respond(self, request: Any, emit: Any) -> Any:
        await self.open.wait()
        self.streamed.append(emit is not None)
        return await self.inner.respond(request, emit)


async def everything(app: p.App, receipt: p.Receipt) -> list[Any]:
    """All events until the end."""
    return [event async for event in app.events(receipt)]


def agent_of(model: Any) -> p.Agent:
    @p.tool(effect="pure")
    def look() -> str:
        return "seen"

    return p.Agent("a", tools=[look], model=model)


async def test_what_happens_is_told_as_it_happens(tmp_path: Path) -> None:
    model = Gated(call("look"), say("one two three"))
    agent = agent_of(model)
    async with Place(tmp_path).app(agent) as app:
        receipt = await app.submit(agent, "go")
        following = asyncio.ensure_future(everything(app, receipt))
        await until(lambda: app._live.wanted(receipt.submission), "a watcher")
        model.open.set()
        told = await asyncio.wait_for(following, 20)
        assert [type(event).__name__ for event in told if not isinstance(event, events.TextDelta)][-6:] == [
            "TurnCompleted", "ToolCallStarted", "ToolCallEnded", "TurnStarted", "TurnCompleted", "RunEnded",
        ]  # fmt: skip
        assert "".join(event.text for event in told if isinstance(event, events.TextDelta)) == "one two three"
        assert told[-1] == events.RunEnded("completed")
        assert not app._live.wanted(receipt.submission)


async def test_nothing_is_streamed_while_nobody_watches(tmp_path: Path) -> None:
    model = Gated(say("one two three"))
    model.open.set()
    agent = agent_of(model)
    async with Place(tmp_path).app(agent) as app:
        receipt = await app.submit(agent, "go")
        assert await app.output(receipt, timeout=20) == "one two three"
        assert model.streamed == [False]
        assert await everything(app, receipt) == [events.RunEnded("completed")]  # after the fact


async def test_a_failure_is_told_as_it_was_settled(tmp_path: Path) -> None:
    agent = agent_of(Scripted([]))
    async with Place(tmp_path).app(agent) as app:
        receipt = await app.submit(agent, "go")
        await app.settlement(receipt, timeout=20)
        [end] = await everything(app, receipt)
        assert isinstance(end, events.RunEnded)
        assert (end.outcome, end.kind) == ("failed", "model")
        with pytest.raises(p.Invalid, match="no submission"):
            await anext(app.events("sub_nothing"))


WORKER = """
import asyncio, sys
import perdure as p
from perdure.providers.scripted import Scripted, say

async def main():
    agent = p.Agent("a", model=Scripted([say("one two three")]))
    async with p.open(sys.argv[1], agents=[agent], lease="1s"):
        await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_another_process_hears_it_too(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = p.Agent("a", model=Scripted([say("unused")]))
    async with place.client([agent]) as app:
        receipt = await app.submit(agent, "go")
        following = asyncio.ensure_future(everything(app, receipt))
        await until(lambda: app.store.read(lambda tx: tx.ledger.watched_events("nobody", 0)), "a watcher")
        worker = await asyncio.create_subprocess_exec(sys.executable, "-c", WORKER, str(place.db))
        try:
            told = await asyncio.wait_for(following, 30)
        finally:
            worker.kill()
            await worker.wait()
        assert "".join(event.text for event in told if isinstance(event, events.TextDelta)) == "one two three"
        assert told[-1] == events.RunEnded("completed")
        assert await app.verify()


async def test_a_watcher_that_does_not_listen_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.agent.live.LIVE_EVENTS_MAX", 10)
    model = Gated(say("word " * 1_000))
    agent = agent_of(model)
    async with Place(tmp_path).app(agent) as app:
        receipt = await app.submit(agent, "go")
        watching = app.events(receipt)
        first = asyncio.ensure_future(anext(watching))
        await until(lambda: app._live.wanted(receipt.submission), "a watcher")
        model.open.set()
        await first
        assert await app.output(receipt, timeout=20) == "word " * 1_000
        rest = [event async for event in watching]
        assert len(rest) <= 11
        assert rest[-1] == events.RunEnded("completed")
