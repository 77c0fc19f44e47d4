"""Processes die around model calls, over real HTTP in every wire format: the server's journal is the witness."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.providers.scripted import call, say
from perdure.records.run import ModelCallFailed, ModelCallUnknown, ModelResponseInterrupted
from support.cli import perdure
from support.fake_models import FORMATS, FakeModels, Format, journal_of
from support.models_worker import agent_of
from support.place import LEASE, TESTS, Place, until
from support.remote import KEY, KEY_NAME

pytest.importorskip("perdure.providers._pydantic_ai", reason="needs perdure[models]")
pytestmark = pytest.mark.anyio

SCRIPT = [call("weather", city="Oslo"), say("Sunny.")]
both = pytest.mark.parametrize("mode", ["repeat", "once"])


@pytest.fixture(scope="module")
def running() -> Iterator[FakeModels]:
    with FakeModels(key=KEY) as server:
        yield server


@pytest.fixture
def server(running: FakeModels, monkeypatch: pytest.MonkeyPatch) -> FakeModels:
    monkeypatch.setenv(KEY_NAME, KEY)
    return running.play()


@contextlib.contextmanager
def worker(place: Place, server: FakeModels, wire: str, mode: str, die: str = "", **options: Any) -> Iterator[Any]:
    """A worker process that is ready; killed when the block ends."""
    command = [sys.executable, "-m", "support.models_worker", str(place.folder), wire, server.address(wire), mode, die]  # type: ignore[arg-type]
    process = subprocess.Popen([*command, json.dumps(options)], cwd=TESTS, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def served(server: FakeModels) -> int:
    """Requests that reached the server since it was told its script."""
    return len(server.requests)


async def watched(app: p.App, receipt: p.Receipt) -> Any:
    """Follow a submission, so that its worker streams; cancel the task to stop."""

    async def follow() -> None:
        async for _ in app.events(receipt):
            pass

    following = asyncio.ensure_future(follow())
    await until(lambda: app.store.read(lambda tx: tx.ledger.watched_events("nobody", 0)), "a watcher")
    return following


async def lose(server: FakeModels, place: Place, wire: Format, mode: str, point: str) -> p.Receipt:
    """Kill a worker at a point around its first model call."""
    agent = agent_of(place, mode)
    faults = {"request": ["hang"], "stream": ["stalled"]}.get(point, [])
    server.script(SCRIPT, {1: faults})
    async with place.client([agent]) as app:
        receipt = await app.submit(agent, "Weather in Oslo?", thread="t")
        following = await watched(app, receipt) if point == "stream" else None
        died = point if ":" in point else ""
        with worker(place, server, wire, mode, died) as process:
            if died:
                await until(lambda: process.poll() is not None, "its death", 60)
                assert process.returncode == -signal.SIGKILL
            else:
                await until(lambda: served(server) == 1, "the request", 60)
                if point == "stream":
                    await until(lambda: server.requests[0].sent, "the beginning of the stream")
                process.kill()
        if following is not None:
            following.cancel()
    return receipt


POINTS = ["request", "stream", "response:after"]
MORE = ["model-call:after", "response:before", "response:inside"]
STARTS = ["model-started:before", "model-started:inside", "model-started:after"]


def cells(*more: str) -> Any:
    """Every format at the points that matter most; the others by one format, and by all where there is time."""
    found = []
    for wire in FORMATS:
        for point in (*POINTS, *more):
            short = wire == "chat" or (point in POINTS and wire != "azure")  # Azure's is Chat's
            found.append(pytest.param(wire, point, marks=[] if short else pytest.mark.long))
    return pytest.mark.parametrize(("wire", "point"), found)


@cells(*MORE)
async def test_a_repeat_call_is_made_again_and_its_double_charge_is_shown(
    server: FakeModels, place: Place, wire: Format, point: str
) -> None:
    receipt = await lose(server, place, wire, "repeat", point)
    before = served(server)
    assert before == 1
    agent = agent_of(place, "repeat")
    with worker(place, server, wire, "repeat"):
        async with place.client([agent]) as app:
            assert await app.output(receipt, timeout=60) == "Sunny."
            assert await app.verify()
            view = await app.inspect(receipt.run)
    lost = point != "response:after"  # then its answer was recorded, though nobody was told
    assert served(server) == (3 if lost else 2)
    interrupted = [record for record in place.records("t") if isinstance(record, ModelResponseInterrupted)]
    assert len(interrupted) == lost
    if lost:
        assert interrupted[0].charged.input > 0
        assert view.charged is not None
        shown = perdure("inspect", receipt.run, "--db", str(place.db), cwd=place.folder).stdout
        assert "charge" in shown
    assert place.world.count("asked") == 1


@cells(*MORE, *STARTS)
async def test_a_once_call_is_never_made_again_by_itself(
    server: FakeModels, place: Place, wire: Format, point: str
) -> None:
    receipt = await lose(server, place, wire, "once", point)
    unsent = point.startswith("model-started")
    assert served(server) == (0 if unsent else 1)  # nothing leaves before its started record is durable
    free = point in ("model-started:before", "model-started:inside")  # rolled back: nothing was ever begun
    kept = point == "response:after"
    agent = agent_of(place, "once")
    with worker(place, server, wire, "once"):
        async with place.client([agent]) as app:
            if not free and not kept:
                await until(lambda: app.effects(status="unknown"), "the unknown", 60)
                [effect] = await app.effects(status="unknown")
                assert (effect.kind, effect.effect_class) == ("model", "once")
                await until(lambda: parked(app), "the waiting")
                assert served(server) == (0 if unsent else 1)
                other = await app.submit(agent, "And in Rome?", thread="other")  # everything else goes on
                assert await app.output(other, timeout=60) == "Sunny."
                sent = served(server)
                listed = perdure("effects", "list", "--status", "unknown", "--db", str(place.db), cwd=place.folder)
                assert effect.id[:12] in listed.stdout
                done = perdure(
                    "effects", "reconcile", effect.id, "--verdict", "not-applied" if unsent else "safe-to-retry",
                    "--reason", "looked it up", "--by", "ann", "--db", str(place.db), cwd=place.folder,
                )  # fmt: skip
                assert done.returncode == 0
                assert await app.output(receipt, timeout=60) == "Sunny."
                assert served(server) == sent + 2
                [lost] = [record for record in place.records("t") if isinstance(record, ModelCallUnknown)]
                assert lost.effect == effect.id
            else:
                assert await app.output(receipt, timeout=60) == "Sunny."
                assert served(server) == 2
            assert await app.verify()


async def parked(app: p.App) -> list[Any]:
    return [owed for owed in await app.obligations() if owed.blocked_on == "unknown"]


@pytest.mark.parametrize("verdict", ["refused", "applied", "cancel-run"])
async def test_a_verdict_from_another_process_leads_on(server: FakeModels, place: Place, verdict: str) -> None:
    receipt = await lose(server, place, "chat", "once", "request")
    agent = agent_of(place, "once")
    answer = place.folder / "answer.json"
    answer.write_text('"It was sunny."')
    given = ["--result-file", str(answer)] if verdict == "applied" else []
    with worker(place, server, "chat", "once"):
        async with place.client([agent]) as app:
            await until(lambda: app.effects(status="unknown"), "the unknown", 60)
            [effect] = await app.effects(status="unknown")
            perdure(
                "effects", "reconcile", effect.id, "--verdict", verdict, "--reason", "their log", *given,
                "--db", str(place.db), cwd=place.folder,
            )  # fmt: skip
            settled = await app.settlement(receipt, timeout=60)
            assert await app.verify()
            if verdict == "applied":
                assert await app.output(receipt) == "It was sunny."
    assert settled.status == {"refused": "failed", "applied": "completed", "cancel-run": "cancelled"}[verdict]
    assert served(server) == 1


async def test_without_the_started_record_a_second_call_is_made_that_nobody_permitted(
    server: FakeModels, place: Place
) -> None:
    """The twin: what the tests above would see if the protection were off."""
    agent = agent_of(place, "once")
    server.script(SCRIPT, {1: ["hang"]})
    async with place.client([agent]) as app:
        await app.submit(agent, "Weather in Oslo?", thread="t")
        with worker(place, server, "chat", "once", unprotected=True) as process:
            await until(lambda: served(server) == 1, "the request", 60)
            process.kill()
        with worker(place, server, "chat", "once", unprotected=True):
            await until(lambda: served(server) >= 2, "a second dispatch", 60)
            assert await app.effects(status="unknown") == []


@both
async def test_orderly_stops_in_the_middle_of_a_call(server: FakeModels, place: Place, mode: str) -> None:
    agent = agent_of(place, mode)
    restarts = 6 if mode == "repeat" else 1  # more than the tries of a turn
    server.script(SCRIPT, {1: ["hang"] * restarts})
    async with place.client([agent]) as app:
        receipt = await app.submit(agent, "Weather in Oslo?", thread="t")
        for number in range(restarts):
            with worker(place, server, "chat", mode) as process:
                await until(lambda number=number: served(server) == number + 1, "the request", 60)  # type: ignore[misc]
                process.send_signal(signal.SIGTERM)
                await until(lambda: process.poll() is not None, "its end", 30)
                assert process.returncode == 0
        with worker(place, server, "chat", mode):
            if mode == "once":
                await until(lambda: app.effects(status="unknown"), "the unknown", 60)
                assert served(server) == 1
            else:
                assert await app.output(receipt, timeout=60) == "Sunny."
                assert served(server) == restarts + 2
                tries = [record for record in place.records("t") if isinstance(record, ModelCallFailed)]
                assert [record.failure.kind for record in tries] == ["cancelled"] * restarts
                assert all(record.charged.input > 0 for record in tries)
        assert await app.verify()


async def test_a_frozen_owner_comes_back_with_an_answer_that_nobody_takes(server: FakeModels, place: Place) -> None:
    agent = agent_of(place, "repeat")
    server.script([say("Sunny.")], {1: ["hang"]})
    async with place.client([agent]) as app:
        receipt = await app.submit(agent, "Weather in Oslo?", thread="t")
        with worker(place, server, "chat", "repeat") as frozen:
            await until(lambda: served(server) == 1, "the request", 60)
            os.kill(frozen.pid, signal.SIGSTOP)
            with worker(place, server, "chat", "repeat"):
                assert await app.output(receipt, timeout=60) == "Sunny."
                os.kill(frozen.pid, signal.SIGCONT)
                other = await app.submit(agent, "And in Rome?", thread="other")
                assert await app.output(other, timeout=60) == "Sunny."
        assert place.kinds("t").count("SubmissionSettled") == 1
        assert place.kinds("t").count("ModelResponseRecorded") == 1
        assert await app.verify()


async def test_a_cancel_from_another_process_closes_the_stream(server: FakeModels, place: Place) -> None:
    agent = agent_of(place, "repeat")
    server.script(SCRIPT, {1: ["stalled"]})
    async with place.client([agent]) as app:
        receipt = await app.submit(agent, "Weather in Oslo?", thread="t")
        following = await watched(app, receipt)
        with worker(place, server, "chat", "repeat"):
            await until(lambda: served(server) == 1 and server.requests[0].sent, "the stream", 60)
            began = time.monotonic()
            await app.cancel(receipt, by="ann", reason="enough")
            await asyncio.to_thread(server.gone.wait, 10)
            assert time.monotonic() - began < 1
            assert (await app.settlement(receipt, timeout=20)).status == "cancelled"
        following.cancel()
        assert await app.verify()


async def test_two_processes_keep_one_rate(server: FakeModels, place: Place) -> None:
    agent = agent_of(place, "repeat")
    server.script([say("Sunny.")])
    since = len(journal_of(server.journal))
    async with place.client([agent]) as app:
        with worker(place, server, "chat", "repeat", rate=5), worker(place, server, "chat", "repeat", rate=5):
            for number in range(12):
                await app.submit(agent, f"City {number}?", thread=f"t{number}")
            await until(lambda: served(server) == 5, "five calls", 60)
            await asyncio.sleep(3)  # the sixth may come after 12 seconds
    assert len(journal_of(server.journal)) - since == 5


@pytest.fixture
def place(tmp_path: Path) -> Place:
    assert LEASE
    return Place(tmp_path)
