"""One agent, unchanged, by each wire format over real HTTP: the same output, the same effects, and evidence of it all."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.agent import events
from perdure.ports.provider import Response
from perdure.providers.scripted import call, say
from perdure.records.parts import CallPart, ReasoningPart, TextPart
from perdure.records.run import ModelResponseRecorded
from perdure.testing.world import World
from support.fake_models import FORMATS, USAGE, FakeModels, Format
from support.place import Place
from support.remote import KEY, KEY_NAME, app_with, calls, hidden, model_at, read, watched

pytest.importorskip("perdure.providers._pydantic_ai", reason="needs perdure[models]")
pytestmark = pytest.mark.anyio

PICTURE = b"\x89PNG\r\n\x1a\n not really"
PAPER = b"%PDF-1.7 not really"
WITNESS: list[World] = []  # the world of the test that runs


@dataclass
class Ask:
    question: str
    files: list[p.File]


@dataclass
class Booked:
    city: str
    degrees: int
    receipt: str


@p.tool(effect="once")
async def book(city: str) -> str:
    """Book a room.

    Args:
        city: where.
    """
    return WITNESS[-1].touch("booked", city=city)


@p.tool(effect="observe")
async def look(city: str) -> dict[str, Any]:
    """Look at the weather of a city."""
    WITNESS[-1].touch("looked", city=city)
    return {"city": city, "degrees": 21, "sky": "klar ☀"}


AGENT = p.Agent(
    "clerk",
    instructions="Look, then book.",
    input=Ask,
    output=Booked,
    tools=[look, book],
)
ASK = Ask(
    "A room in Tromsø?",
    [p.File(media_type="image/png", data=PICTURE, name="view.png")],
)
PDF = p.File(media_type="application/pdf", data=PAPER, name="terms.pdf")
ADDRESS = p.File.at("https://files.example/view.png", media_type="image/png")
ANSWER = '{"city": "Tromsø", "degrees": 21, "receipt": "by post"}'
SCRIPT = [
    Response(
        (
            ReasoningPart("Tromsø lies in the north."),
            TextPart("I look and book."),
            CallPart("look", '{"city":"Tromsø"}', "c-1"),
            CallPart("book", '{"city":"Tromsø"}', "c-2"),
        ),
        "tool_calls",
        "",
    ),
    say(ANSWER),
]

every_wire = pytest.mark.parametrize("wire", FORMATS)


@pytest.fixture(scope="module")
def running() -> Iterator[FakeModels]:
    with FakeModels(key=KEY) as server:
        yield server


@pytest.fixture
def server(running: FakeModels, monkeypatch: pytest.MonkeyPatch) -> FakeModels:
    monkeypatch.setenv(KEY_NAME, KEY)
    return running.play()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    WITNESS.append(made.world)
    yield made
    WITNESS.pop()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@every_wire
async def test_one_agent_does_the_same_by_every_format(
    server: FakeModels, place: Place, wire: Format, stream: bool
) -> None:
    server.script(SCRIPT)
    before = len(read(server))
    told: list[events.Event] = []
    if stream:
        told, output = await watched(place, AGENT, model_at(server, wire), ASK)
    else:
        async with app_with(place, AGENT, model_at(server, wire)) as app:
            output = await app.output(await app.submit(AGENT, ASK, thread="t"), timeout=30)
            assert await app.verify()
    assert output == Booked("Tromsø", 21, "by post")
    assert [entry.name for entry in sorted(place.world.entries(), key=lambda e: e.name)] == ["booked", "looked"]

    first, second = server.requests
    assert len(read(server)) - before == 2
    recorded = calls(place.records("t"))
    assert [type(record) for record in recorded] == [ModelResponseRecorded] * 2
    for record, seen in zip(recorded, (first, second), strict=True):
        assert isinstance(record, ModelResponseRecorded)
        assert record.usage == USAGE
        assert record.usage.cache_read == 60
        assert record.usage.reasoning == 10
        assert record.evidence.request == seen.digest
        assert record.evidence.response == seen.sent_digest
        assert (record.evidence.request_id, record.evidence.status) == (seen.request_id, 200)
        assert seen.key == KEY
        assert seen.asked.stream is (stream or wire == "anthropic")
    if wire == "google":  # it names a call in the body of its answer, so that is where it is kept
        assert f'"id":"google-{second.n}"'.encode() in bytes(recorded[1].continuation)
    assert hidden(place)

    text = "".join(event.text for event in told if isinstance(event, events.TextDelta) and event.turn == 2)
    thought = "".join(event.text for event in told if isinstance(event, events.ReasoningDelta))
    assert (text, thought) == ((ANSWER, "Tromsø lies in the north.") if stream else ("", ""))


@every_wire
async def test_files_reach_the_server_in_the_shape_of_its_format(
    server: FakeModels, place: Place, wire: Format
) -> None:
    server.script(SCRIPT)
    files = [*ASK.files, *([] if wire == "azure" else [PDF]), *([] if wire == "google" else [ADDRESS])]
    async with app_with(place, AGENT, model_at(server, wire)) as app:
        await app.output(await app.submit(AGENT, Ask("A room?", files), thread="t"), timeout=30)
    picture, paper = (base64.b64encode(data).decode() for data in (PICTURE, PAPER))
    url = ADDRESS.url
    for seen in server.requests:  # with every turn, as it was with the first
        body = seen.body
        found: list[Any]
        match wire:
            case "anthropic":
                parts = next(m for m in body["messages"] if m["role"] == "user")["content"][1:]
                found = [(part["type"], part["source"].get("data") or part["source"]["url"]) for part in parts]
                assert found == [("image", picture), ("document", paper), ("image", url)]
            case "google":
                parts = next(m for m in body["contents"] if m["role"] == "user")["parts"][1:]
                found = [part["inlineData"] for part in parts]
                kinds = [one.get("mimeType") or one["mime_type"] for one in found]
                assert kinds == ["image/png", "application/pdf"]
                plain = [one["data"].replace("-", "+").replace("_", "/") for one in found]
                assert plain == [picture, paper]
            case "responses":
                parts = next(m for m in body["input"] if m.get("role") == "user")["content"][1:]
                assert [part["type"] for part in parts] == ["input_image", "input_file", "input_image"]
                found = [part.get("image_url") or part["file_data"] for part in parts]
                assert found == [
                    f"data:image/png;base64,{picture}",
                    f"data:application/pdf;base64,{paper}",
                    url,
                ]
            case "azure":
                parts = next(m for m in body["messages"] if m["role"] == "user")["content"][1:]
                assert [part["image_url"]["url"] for part in parts] == [f"data:image/png;base64,{picture}", url]
            case _:
                parts = next(m for m in body["messages"] if m["role"] == "user")["content"][1:]
                assert [part["type"] for part in parts] == ["image_url", "file", "image_url"]
                found = [(part.get("image_url") or {}).get("url") or part["file"]["file_data"] for part in parts]
                assert found == [
                    f"data:image/png;base64,{picture}",
                    f"data:application/pdf;base64,{paper}",
                    url,
                ]


@every_wire
async def test_the_same_agent_streams_without_a_store(server: FakeModels, place: Place, wire: Format) -> None:
    server.script(SCRIPT)
    told = [event async for event in AGENT.stream(ASK, model=model_at(server, wire))]
    text = "".join(event.text for event in told if isinstance(event, events.TextDelta) and event.turn == 2)
    assert text == ANSWER
    assert any(isinstance(event, events.ReasoningDelta) for event in told)
    assert told[-1] == events.RunEnded("completed")
    assert sorted(event.tool for event in told if isinstance(event, events.ToolCallStarted)) == ["book", "look"]
    assert [entry.name for entry in place.world.entries()].count("booked") == 1
    result = await AGENT.run(ASK, model=model_at(server, wire))
    assert result.output == Booked("Tromsø", 21, "by post")


@every_wire
async def test_an_answer_that_does_not_fit_goes_back_and_is_given_again(
    server: FakeModels, place: Place, wire: Format
) -> None:
    server.script([call("look", city="Oslo"), say("It is 21 degrees."), say(ANSWER)])
    async with app_with(place, AGENT, model_at(server, wire)) as app:
        output = await app.output(await app.submit(AGENT, ASK, thread="t"), timeout=30)
        assert await app.verify()
    assert output.city == "Tromsø"
    assert len(server.requests) == 3
    assert place.kinds("t").count("OutputRejected") == 1
