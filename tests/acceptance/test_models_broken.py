"""Every wire format against every fault, through whole runs: what is recorded is what the server saw, cell by cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.providers.scripted import call, say
from perdure.records.run import ModelCallFailed, ModelCallUnknown, ModelResponseRecorded
from perdure.testing.world import World
from support.fake_models import FAULTS, FORMATS, FakeModels, Format, Status, journal_of
from support.place import Place, until
from support.remote import KEY, KEY_NAME, app_with, calls, hidden, model_at, quick

pytest.importorskip("perdure.providers._pydantic_ai", reason="needs perdure[models]")
pytestmark = pytest.mark.anyio

WITNESS: list[World] = []


@p.tool(effect="once")
async def weather(city: str) -> str:
    """Ask for the weather, for money.

    Args:
        city: where.
    """
    return WITNESS[-1].touch("asked", city=city)


SCRIPT = [call("weather", city="Oslo"), say("Sunny.")]

# how the run ends: None, it completes; else the kind of its failure
ENDS: dict[str, str | None] = {
    "refused": "model",
    "dns": "model",
    "tls": "model",
    "401": "model.authentication",
    "404": "model",
    "429": None,
    "429 after seconds": None,
    "429 after date": None,
    "500": None,
    "529": None,
    "reset unread": None,
    "reset": None,
    "cut": None,
    "stalled": "policy.duration",
    "malformed": None,
    "cut arguments": None,
    "bad arguments": None,
    "unknown tool": None,
    "same ids": None,
    "empty": None,
    "context": "model.context_length",
    "wrong type": None,
    "huge": "model",
}
SOONER = {  # the same faults, so that a test need not wait
    "429": Status(429, "rate", {"retry-after-ms": "20"}),
    "429 after seconds": Status(429, "rate", {"retry-after": "1"}),
    "429 after date": Status(429, "rate", {"retry-after": "DATE+1"}),
}
NOWHERE = frozenset({"refused", "dns", "tls"})
COMPLETE = frozenset({"empty", "cut arguments", "bad arguments", "unknown tool", "same ids"})  # responses, if odd ones
TABLE: defaultdict[str, dict[str, str]] = defaultdict(dict)

cells = pytest.mark.parametrize(("wire", "fault"), [(wire, fault) for fault in ENDS for wire in FORMATS])


@pytest.fixture(scope="module")
def running() -> Iterator[FakeModels]:
    with FakeModels(key=KEY) as server:
        yield server


@pytest.fixture
def server(running: FakeModels, monkeypatch: pytest.MonkeyPatch) -> FakeModels:
    monkeypatch.setenv(KEY_NAME, KEY)
    quick(monkeypatch)
    return running.play()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    WITNESS.append(made.world)
    yield made
    WITNESS.pop()


def clerk(fault: str, **more: Any) -> p.Agent:
    duration = "1s" if fault == "stalled" else "2m"
    return p.Agent("clerk", tools=[weather], policy=p.Policy(max_duration=duration, **more))


def break_first(server: FakeModels, fault: str) -> None:
    """The first request of the first turn meets the fault; at an address that leads nowhere, every one does."""
    server.script(SCRIPT, {} if fault in NOWHERE else {1: [SOONER.get(fault, fault)]})


@cells
async def test_what_is_recorded_is_what_the_server_saw(
    server: FakeModels, place: Place, wire: Format, fault: str
) -> None:
    agent, since = clerk(fault), len(journal_of(server.journal))
    break_first(server, fault)
    async with app_with(place, agent, model_at(server, wire, fault)) as app:
        receipt = await app.submit(agent, "Weather in Oslo?", thread="t")
        settled = await app.settlement(receipt, timeout=60)
        assert await app.verify()
        assert await app.obligations() == []
        output = await app.output(receipt) if settled.status == "completed" else None
    seen = len(journal_of(server.journal)) - since  # a connection that was reset unread is in it, as the witness has it
    recorded = calls(place.records("t"))
    tries = [record for record in recorded if isinstance(record, ModelCallFailed)]
    answers = [record for record in recorded if isinstance(record, ModelResponseRecorded)]
    told = sum(record.dispatched != "no" for record in tries) + len(answers)
    end = settled.failure.kind if settled.failure else "completed"
    TABLE[fault][wire] = f"{seen}/{told} {end}"
    assert told == seen
    assert end == (ENDS[fault] or "completed")
    assert output in (None, "Sunny.")
    assert place.world.count("asked") <= 1 + (fault == "same ids")  # no half answer was acted on
    if fault in NOWHERE:
        assert seen == 0
        assert [record.dispatched for record in tries] == ["no"] * 4
    elif fault in COMPLETE:
        assert tries == []
    else:
        assert len(tries) == 1
        assert (tries[0].charged.input > 0) is (tries[0].dispatched == "unknown")
    for record in tries:
        assert KEY not in record.failure.message
    assert hidden(place)


def test_the_table_of_all_cells(tmp_path: Path, record_property: Any) -> None:
    """What the server saw, what is recorded, and how the run ended: written where people can read it."""
    if len(TABLE) < len(ENDS):
        pytest.skip("only some cells ran")
    lines = [f"{'fault':20}" + "".join(f"{wire:28}" for wire in FORMATS)]
    lines += [f"{fault:20}" + "".join(f"{cells[wire]:28}" for wire in FORMATS) for fault, cells in TABLE.items()]
    file = tmp_path / "broken-models.txt"
    file.write_text("\n".join(lines) + "\n")
    count = sum(len(cells) for cells in TABLE.values())
    record_property("notice", f"broken models: {count} cells, in each the records say what the server saw ({file})")
    assert count == len(ENDS) * len(FORMATS)


UNKNOWN = ("reset unread", "reset", "cut", "malformed", "wrong type", "huge")


@pytest.mark.parametrize(("wire", "fault"), [(wire, fault) for fault in UNKNOWN for wire in FORMATS])
async def test_a_once_call_of_unknown_outcome_waits_for_a_verdict(
    server: FakeModels, place: Place, wire: Format, fault: str
) -> None:
    agent, since = clerk(fault, model_calls="once"), len(journal_of(server.journal))
    break_first(server, fault)
    async with app_with(place, agent, model_at(server, wire, fault)) as app:
        receipt = await app.submit(agent, "Weather in Oslo?", thread="t")
        await until(lambda: app.effects(status="unknown"), "the unknown")
        [effect] = await app.effects(status="unknown")
        assert effect.kind == "model"
        assert len(journal_of(server.journal)) - since == 1
        [lost] = [record for record in place.records("t") if isinstance(record, ModelCallUnknown)]
        assert lost.effect == effect.id
        await app.reconcile(effect.id, p.SafeToRetry(), by="ann", reason="twice is fine")
        assert await app.output(receipt, timeout=30) == "Sunny."
        assert await app.verify()
    assert len(journal_of(server.journal)) - since == 3
    assert place.world.count("asked") == 1
    assert {*ENDS} < {*FAULTS}
