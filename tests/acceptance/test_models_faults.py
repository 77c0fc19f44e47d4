"""Every wire format against every fault, by real HTTP: what a model says of a failed call is what its server saw."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlencode

import pytest

from perdure.definitions.tool import Secret
from perdure.ports.provider import (
    AssistantMessage,
    Delta,
    Message,
    Model,
    ModelError,
    Request,
    Response,
    SystemMessage,
    ToolMessage,
    ToolResult,
    ToolSpec,
    UserMessage,
)
from perdure.providers.anthropic import MessagesModel
from perdure.providers.azure import AzureModel
from perdure.providers.google import GeminiModel
from perdure.providers.openai import ChatModel, ResponsesModel
from perdure.providers.scripted import call, calls, say
from perdure.records.parts import CallPart, TextPart
from support.fake_models import FAULTS, USAGE, FakeModels, Format, Seen, journal_of

pytest.importorskip("perdure.providers._pydantic_ai", reason="needs perdure[models]")

KEY = "the-secret-key"
KEY_NAME = "PERDURE_TEST_KEY"
WEATHER = ToolSpec("weather", "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
ASK: tuple[Message, ...] = (SystemMessage("Be brief."), UserMessage("Weather in Oslo?"))
PATIENCE_SECONDS = 0.3  # for servers that say nothing


MAKE: dict[Format, Callable[..., Model]] = {
    "chat": lambda url, **fields: ChatModel("gpt-test", url, **fields),
    "responses": lambda url, **fields: ResponsesModel("gpt-test", url, **fields),
    "azure": lambda url, **fields: AzureModel("gpt-test", url, "2024-10-21", **fields),
    "anthropic": lambda url, **fields: MessagesModel("claude-test", url, **fields),
    "google": lambda url, **fields: GeminiModel("gemini-test", url, **fields),
}

every_wire = pytest.mark.parametrize("wire", MAKE)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@dataclass(frozen=True)
class Told:
    """What a failed call should say. ``reached``: requests the server read, as its journal shows."""

    dispatched: Literal["no", "yes", "unknown"]
    retryable: bool
    kind: str = "model"
    retry_after: float | None = None
    reached: int = 1


NO = Told("no", True, reached=0)
UNKNOWN = Told("unknown", True)

TOLD: dict[str, Told] = {
    "refused": NO,
    "dns": NO,
    "tls": NO,
    "400": Told("yes", False),
    "401": Told("yes", False, "model.authentication"),
    "bad key": Told("yes", False, "model.authentication"),
    "403": Told("yes", False, "model.authentication"),
    "404": Told("yes", False),
    "429": Told("yes", True, "model.rate_limit"),
    "429 after seconds": Told("yes", True, "model.rate_limit", 7.0),
    "429 after date": Told("yes", True, "model.rate_limit", 7.0),
    "500": Told("yes", True),
    "502": UNKNOWN,  # a gateway does not know what became of the request
    "503": Told("yes", True, retry_after=7.0),
    "529": Told("yes", True),
    "context": Told("yes", False, "model.context_length"),
    "prompt refused": Told("yes", False, "model.refused"),
    "session": Told("yes", False, "model.continuation"),
    "reset unread": Told("unknown", True, reached=0),
    "reset": UNKNOWN,
    "closed": UNKNOWN,
    "hang": UNKNOWN,
    "cut": UNKNOWN,
    "cut by reset": UNKNOWN,
    "cut in form": UNKNOWN,
    "stalled": UNKNOWN,
    "error within": Told("yes", True),
    "malformed": UNKNOWN,
    "wrong type": UNKNOWN,
    "huge": Told("unknown", False),
}
SPECIAL: dict[tuple[str, Format], Told] = {
    ("429", "google"): Told("yes", True, "model.rate_limit", 7.0),  # the body says it, where there is no header
}
ONLY: dict[str, Format] = {"session": "responses"}
SILENT = frozenset({"hang", "stalled"})
COMPLETE = frozenset({"empty", "cut arguments", "bad arguments", "unknown tool", "same ids", "refusal"})


@pytest.fixture(scope="module")
def running() -> Iterator[FakeModels]:
    with FakeModels() as server:
        yield server


@pytest.fixture
def server(running: FakeModels, monkeypatch: pytest.MonkeyPatch) -> FakeModels:
    monkeypatch.setenv(KEY_NAME, KEY)
    return running.play()


def model_at(server: FakeModels, wire: Format, fault: str = "") -> Model:
    return MAKE[wire](server.address(wire, fault), api_key=Secret.env(KEY_NAME))


def ask(model: Model, *, stream: bool, timeout: float = 20.0) -> tuple[Response, list[Delta]]:
    deltas: list[Delta] = []
    request = Request("clerk", "run-1", 1, list(ASK), (WEATHER,), timeout=timeout)

    async def main() -> Response:
        return await model.respond(request, deltas.append if stream else None)

    return asyncio.run(main()), deltas


def reached(server: FakeModels, since: int) -> list[dict[str, Any]]:
    return [line for line in journal_of(server.journal)[since:] if line["read"]]


def test_every_fault_has_its_place() -> None:
    assert TOLD.keys() | COMPLETE == FAULTS.keys()


@both_ways
@pytest.mark.parametrize(("wire", "fault"), [(w, fault) for w in MAKE for fault in TOLD if ONLY.get(fault, w) == w])
def test_a_failed_call_says_what_the_server_saw(server: FakeModels, wire: Format, fault: str, stream: bool) -> None:
    before = len(journal_of(server.journal))
    if FAULTS[fault].__class__.__name__ != "Nowhere":
        server.play(fault)
    started = time.monotonic()
    with pytest.raises(ModelError) as caught:
        ask(model_at(server, wire, fault), stream=stream, timeout=PATIENCE_SECONDS if fault in SILENT else 20.0)
    error, told = caught.value, SPECIAL.get((fault, wire), TOLD[fault])
    assert (error.dispatched, error.retryable, error.kind) == (told.dispatched, told.retryable, told.kind), str(error)
    if "date" in fault:
        assert error.retry_after is not None
        assert 4 < error.retry_after <= 7
    else:
        assert error.retry_after == told.retry_after
    assert len(reached(server, before)) == told.reached
    assert KEY not in str(error)
    assert KEY not in repr(error.__cause__) + repr(error.__context__)
    assert error.message
    assert time.monotonic() - started < 10
    if told.reached:
        seen = server.requests[0]
        assert error.evidence.request == seen.digest == reached(server, before)[0]["request"]
        whole_answer = told.dispatched == "yes" or fault in ("502", "cut in form", "malformed", "wrong type")
        if fault == "huge":
            assert (len(error.evidence.response), error.evidence.status) == (64, 200)
        elif whole_answer:
            assert error.evidence.response == seen.sent_digest
            assert error.evidence.request_id == seen.request_id
        elif fault in ("reset", "closed", "hang"):
            assert (error.evidence.response, error.evidence.status) == ("", None)
        else:
            assert error.evidence.response in prefixes(seen.sent)
            assert error.evidence.status == 200
    else:
        assert error.evidence.response == ""
        assert error.evidence.status is None


def prefixes(sent: bytes) -> set[str]:
    digests, running = set(), hashlib.sha256()
    for byte in sent:
        running.update(bytes([byte]))
        digests.add(running.hexdigest())
    return digests


@both_ways
@pytest.mark.parametrize("fault", sorted(COMPLETE))
@every_wire
def test_an_odd_answer_is_told_as_it_is(server: FakeModels, wire: Format, fault: str, stream: bool) -> None:
    server.play(fault)
    before = len(journal_of(server.journal))
    response, deltas = ask(model_at(server, wire), stream=stream)
    match fault:
        case "empty":
            assert (response.parts, response.finish) == ((), "stop")
        case "cut arguments":
            (call,) = response.parts
            assert isinstance(call, CallPart)
            assert (call.arguments, response.finish) == ("{}" if wire == "google" else '{"ci', "length")
        case "bad arguments":
            (call,) = response.parts
            assert isinstance(call, CallPart)
            assert call.arguments.replace(" ", "") == '{"city":{"not":"text"}}'
            assert response.finish == "tool_calls"
        case "unknown tool":
            assert [part.name for part in response.parts if isinstance(part, CallPart)] == ["no_such_tool"]
        case "same ids":
            assert [part.provider_id for part in response.parts if isinstance(part, CallPart)] == ["same", "same"]
        case "refusal":
            assert (response.parts, response.finish) == ((TextPart("I cannot help with that."),), "refusal")
    said = "".join(part.text for part in response.parts if isinstance(part, TextPart))
    assert "".join(delta.text for delta in deltas) in ((said, "") if fault == "refusal" else (said if stream else "",))
    assert response.usage == USAGE
    assert len(reached(server, before)) == 1
    seen = server.requests[0]
    assert (response.evidence.request, response.evidence.response) == (seen.digest, seen.sent_digest)
    assert (response.evidence.request_id, response.evidence.status) == (seen.request_id, 200)


@every_wire
def test_the_key_reaches_the_server_and_no_other_place(server: FakeModels, wire: Format) -> None:
    model = model_at(server, wire)
    response, _ = ask(model, stream=False)
    seen = server.requests[0]
    assert seen.key == KEY
    assert KEY not in seen.path + str(seen.query) + repr(model) + repr(response) + seen.raw.decode()


@every_wire
def test_a_key_is_read_at_each_call(wire: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeModels(key="new-key") as server:
        model = model_at(server, wire)
        monkeypatch.setenv(KEY_NAME, "old-key")
        with pytest.raises(ModelError) as caught:
            ask(model, stream=False)
        assert (caught.value.dispatched, caught.value.kind) == ("yes", "model.authentication")
        monkeypatch.setenv(KEY_NAME, "new-key")
        assert ask(model, stream=False)[0].finish == "tool_calls"
        assert [seen.key for seen in server.requests] == ["old-key", "new-key"]


@every_wire
def test_after_every_fault_the_same_model_answers(server: FakeModels, wire: Format) -> None:
    model = model_at(server, wire)
    faults = ("500", "reset", "reset unread", "cut by reset", "malformed", "429")

    async def main() -> None:
        for fault in faults:
            for emit in (None, [].append):
                server.play(fault)
                request = Request("clerk", "run-1", 1, list(ASK), (WEATHER,), timeout=20.0)
                with pytest.raises(ModelError):
                    await model.respond(request, emit)
                response = await model.respond(request, emit)
                assert response.finish == "tool_calls"

    asyncio.run(main())


@both_ways
@every_wire
def test_cancelling_closes_the_connection_at_whatever_moment(server: FakeModels, wire: Format, stream: bool) -> None:
    async def main(model: Model, delay: float) -> None:
        server.play("stalled" if stream else "hang")
        request = Request("clerk", "run-1", 1, list(ASK), (WEATHER,))
        task = asyncio.create_task(model.respond(request, [].append if stream else None))
        while not server.requests:  # noqa: ASYNC110 (the server is another thread)
            await asyncio.sleep(0.001)
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.gone.wait, 10)

    model = model_at(server, wire)
    for place in range(6):
        asyncio.run(main(model, place / 1000))


def conversation(server: FakeModels, wire: Format) -> dict[str, Any]:
    """The body of a second turn, in which the results of two calls go to the provider; as the adapter sent it."""
    twice = calls(call("weather", city="Oslo", id="c-1"), call("weather", city="Rome", id="c-2"))
    server.script([twice, say("Sunny."), say("Yes.")])
    model = model_at(server, wire)

    async def main() -> None:
        messages = list(ASK)
        for _ in range(2):
            request = Request("clerk", "run-1", 1, list(messages), (WEATHER,), timeout=20.0)
            response = await model.respond(request, None)
            results = tuple(ToolResult(id, "weather", "ok") for id in ("c-1", "c-2"))
            messages += [AssistantMessage(response.parts, response.model, response.continuation), ToolMessage(results)]

    asyncio.run(main())
    return copy.deepcopy(server.requests[1].body)


def without_a_result(wire: Format, body: dict[str, Any]) -> None:
    match wire:
        case "anthropic":
            body["messages"][-1]["content"].pop()
        case "google":
            body["contents"][-1]["parts"].pop()
        case "responses":
            body["input"].pop()
        case _:
            body["messages"].pop()


def without_the_calls(wire: Format, body: dict[str, Any]) -> None:
    match wire:
        case "anthropic":
            body["messages"][1]["content"] = [{"type": "text", "text": "I look."}]
        case "google":
            body["contents"][1]["parts"] = [{"text": "I look."}]
        case "responses":
            body["input"] = [item for item in body["input"] if item.get("type") != "function_call"]
        case _:
            body["messages"] = [message for message in body["messages"] if message["role"] != "assistant"]


def with_an_unknown_role(wire: Format, body: dict[str, Any]) -> None:
    place = {"google": "contents", "responses": "input"}.get(wire, "messages")
    body[place][0]["role"] = "narrator"


def with_no_schema(wire: Format, body: dict[str, Any]) -> None:
    tool = body["tools"][0]
    match wire:
        case "anthropic":
            tool["input_schema"] = {}
        case "google":
            tool["functionDeclarations"][0]["parameters_json_schema"] = {"type": "string"}
        case "responses":
            tool["parameters"] = {}
        case _:
            tool["function"]["parameters"] = {}


def with_arguments_that_are_no_object(wire: Format, body: dict[str, Any]) -> None:
    match wire:
        case "anthropic":
            body["messages"][1]["content"][0]["input"] = "Oslo"
        case "google":
            body["contents"][1]["parts"][0]["functionCall"]["args"] = "Oslo"
        case "responses":
            next(item for item in body["input"] if item.get("type") == "function_call")["arguments"] = "Oslo"
        case _:
            called = next(message for message in body["messages"] if message["role"] == "assistant")
            called["tool_calls"][0]["function"]["arguments"] = "Oslo"


@pytest.mark.parametrize(
    "spoil",
    [without_a_result, without_the_calls, with_an_unknown_role, with_no_schema, with_arguments_that_are_no_object],
    ids=lambda spoil: spoil.__name__,
)
@every_wire
def test_the_server_refuses_what_the_real_ones_refuse(
    server: FakeModels, wire: Format, spoil: Callable[[Format, dict[str, Any]], None]
) -> None:
    """That every other test is accepted says something only if this is not."""
    body = conversation(server, wire)
    seen = server.requests[1]
    assert post(server, seen, body)[0] == 200
    spoil(wire, body)
    status, said = post(server, seen, body)
    assert (status, "error" in said) == (400, True), said


def post(server: FakeModels, seen: Seen, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    query = urlencode(seen.query)
    headers = {"anthropic-version": "2023-06-01", "content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        body = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        connection.request("POST", f"{seen.path}?{query}" if query else seen.path, json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_the_server_runs_as_a_process_of_its_own_and_outlives_its_clients(tmp_path: Path) -> None:
    journal, script = tmp_path / "journal", tmp_path / "script.json"
    script.write_text(json.dumps([{"call": "weather", "arguments": {"city": "Oslo"}}, "Sunny.", {"fault": "hang"}]))
    command = [sys.executable, "-m", "support.fake_models", "--journal", str(journal), "--script", str(script)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        history: list[dict[str, Any]] = []
        for said in (
            {"role": "user", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "user", "content": "c"},
        ):
            history.append(said)
            client = socket.create_connection(("127.0.0.1", port), timeout=10)
            body = json.dumps({"model": "gpt-test", "messages": history}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            client.recv(0 if len(history) == 5 else 1)  # the last is never answered: its client just goes away
            client.close()
            history.append({"role": "assistant", "content": "x"})
        while len(lines := journal_of(journal)) < 3:
            time.sleep(0.01)
    finally:
        server.kill()
        server.communicate()
    assert [(line["turn"], line["answer"], line["question"]) for line in lines] == [
        (1, "Call", "a"),
        (2, "Say", "a"),
        (3, "hang", "a"),
    ]
