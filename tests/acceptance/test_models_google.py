"""Gemini over real HTTP on loopback: thought signatures that go back, arguments as objects, refused prompts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from perdure.definitions.tool import Secret
from perdure.errors import Invalid
from perdure.ports.provider import (
    AssistantMessage,
    Delta,
    FileContent,
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
    profile_of,
)
from perdure.providers.google import GeminiModel
from perdure.providers.scripted import Item, call, calls, say
from perdure.providers.setup import setup_of
from perdure.records.parts import CallPart, ReasoningPart, TextPart, Usage
from perdure.testing.conformance.provider import provider_suite
from support.fake_models import FakeModels, Raw, Status

pytest.importorskip("perdure.providers._google", reason="needs perdure[models]")

KEY_NAME = "PERDURE_TEST_KEY"
WEATHER = ToolSpec("weather", "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
ASK: tuple[Message, ...] = (SystemMessage("Be brief."), UserMessage("Weather in Oslo?"))
THOUGHTFUL = Response(
    (
        ReasoningPart("Oslo is in Norway."),
        TextPart("I look."),
        CallPart("weather", '{"city":"Oslo"}', "c-1"),
        CallPart("weather", '{"city":"Rome"}', "c-2"),
    ),
    "tool_calls",
    "",
)
RESULTS = ToolMessage(
    (ToolResult("c-1", "weather", '{"sky":"clear"}'), ToolResult("c-2", "weather", "It timed out.", failed=True))
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sky": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["sky", "degrees"],
}
DUMMY = "c2tpcF90aG91Z2h0X3NpZ25hdHVyZV92YWxpZGF0b3I="  # base64 of what the provider documents: skip the validator

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
both_generations = pytest.mark.parametrize("name", ["gemini-2.5-flash", "gemini-3-pro"])


@pytest.fixture(scope="module")
def running() -> Iterator[FakeModels]:
    with FakeModels() as server:
        yield server


@pytest.fixture
def server(running: FakeModels, monkeypatch: pytest.MonkeyPatch) -> FakeModels:
    monkeypatch.setenv(KEY_NAME, "google-key")
    return running.play()


def model_at(server: FakeModels, name: str = "gemini-3-pro", **fields: Any) -> GeminiModel:
    return GeminiModel(name, server.address("google"), Secret.env(KEY_NAME), **fields)


def ask(
    model: Model,
    messages: Sequence[Message] = ASK,
    *,
    stream: bool = False,
    emit: Callable[[Delta], None] | None = None,
    **fields: Any,
) -> Response:
    fields = {"tools": (WEATHER,), "timeout": 20.0} | fields
    request = Request("clerk", "run-1", 1, list(messages), **fields)

    async def main() -> Response:
        return await model.respond(request, emit or ([].append if stream else None))

    return asyncio.run(main())


def after(response: Response, *messages: Message, author: str = "") -> tuple[Message, ...]:
    return (*ASK, AssistantMessage(response.parts, author or response.model, response.continuation), *messages)


CASES = [name for name, _ in provider_suite(lambda _: GeminiModel("gemini"), argument_text=False)]


@pytest.mark.parametrize("case", CASES)
def test_it_does_what_a_provider_must(server: FakeModels, case: str) -> None:
    """The public suite: each of its models has a server of its own."""
    servers: list[FakeModels] = []

    def make(script: Sequence[Item]) -> Model:
        own = FakeModels().__enter__()
        servers.append(own)
        own.play(*script)
        return model_at(own)

    run: Callable[[], Awaitable[None]] = dict(provider_suite(make, argument_text=False))[case]
    try:
        asyncio.run(run())  # type: ignore[arg-type]
    finally:
        for own in servers:
            own.__exit__()


@both_ways
@both_generations
def test_thought_signatures_go_back_with_their_part(server: FakeModels, name: str, stream: bool) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server, name)
    deltas: list[Delta] = []
    first = ask(model, stream=stream, emit=deltas.append if stream else None)
    assert first.parts == THOUGHTFUL.parts
    assert first.finish == "tool_calls"
    told = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    assert told == ("Oslo is in Norway." if stream else "")
    assert ask(model, after(first, RESULTS), stream=stream).parts == (TextPart("Sunny."),)
    thought, text, one, two = server.requests[1].body["contents"][1]["parts"]
    assert thought == {"text": "Oslo is in Norway.", "thought": True}
    signed = one if name.startswith("gemini-3") else text
    assert signed["thoughtSignature"].startswith("RS1n")
    assert "thoughtSignature" not in two
    assert (one["functionCall"]["id"], two["functionCall"]["id"]) == ("c-1", "c-2")


@pytest.mark.parametrize("author", ["google:gemini-2.5-pro", "anthropic:claude-opus-5", "unknown"])
def test_thoughts_and_signatures_of_another_model_stay_away(server: FakeModels, author: str) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    first = ask(model_at(server))
    assert ask(model_at(server), after(first, RESULTS, author=author)).parts == (TextPart("Sunny."),)
    text, one, two = server.requests[1].body["contents"][1]["parts"]
    assert text == {"text": "I look."}
    assert one["thoughtSignature"].rstrip("=").replace("-", "+") == DUMMY.rstrip("=")
    assert "thoughtSignature" not in two


@both_ways
def test_a_signature_that_the_provider_no_longer_accepts(server: FakeModels, stream: bool) -> None:
    server.play(THOUGHTFUL, Status(400, "invalid", message="Thought signature is not valid."), say("Sunny."))
    model = model_at(server)
    history = after(ask(model), RESULTS)
    with pytest.raises(ModelError) as caught:
        ask(model, history, stream=stream)
    assert (caught.value.kind, caught.value.dispatched, caught.value.retryable) == ("model.continuation", "yes", False)
    assert ask(model, history, stream=stream, use_continuation=False).parts == (TextPart("Sunny."),)
    parts = server.requests[2].body["contents"][1]["parts"]
    assert [part.get("thought") for part in parts] == [None, None, None]
    assert not any(str(part.get("thoughtSignature", "")).startswith("RS1n") for part in parts)
    assert len(server.requests) == 3


def test_results_are_objects_and_say_whether_they_failed(server: FakeModels) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server)
    ask(model, after(ask(model), RESULTS))
    results = [part["functionResponse"] for part in server.requests[1].body["contents"][2]["parts"]]
    assert [result["response"] for result in results] == [{"sky": "clear"}, {"error": "It timed out."}]
    assert [result["id"] for result in results] == ["c-1", "c-2"]


@both_ways
def test_usage_counts_thoughts_and_caches(server: FakeModels, stream: bool) -> None:
    usage = Usage(input=110, output=30, cache_read=60, reasoning=10)
    server.play(Response((TextPart("Sunny."),), "stop", "", usage))
    assert ask(model_at(server), stream=stream).usage == usage


def test_what_is_sent(server: FakeModels) -> None:
    ask(model_at(server, settings={"temperature": 0.5, "max_tokens": 70}), settings={"max_tokens": 60})
    seen = server.requests[0]
    assert seen.headers["x-goog-api-key"] == "google-key"
    assert "key" not in seen.query
    config = seen.body["generationConfig"]
    assert (config["temperature"], config["maxOutputTokens"]) == (0.5, 60)
    assert seen.body["systemInstruction"]["parts"] == [{"text": "Be brief."}]
    assert seen.path == "/v1beta/models/gemini-3-pro:generateContent"


def test_a_last_answer_without_tools_lists_them_all_the_same(server: FakeModels) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server)
    ask(model, after(ask(model), RESULTS), tools_allowed=False)
    body = server.requests[1].body
    assert body["toolConfig"]["functionCallingConfig"]["mode"] == "NONE"
    assert [one["name"] for tool in body["tools"] for one in tool["functionDeclarations"]] == ["weather"]


def test_the_provider_holds_the_answer_to_a_schema(server: FakeModels) -> None:
    server.play(say({"sky": "clear", "degrees": 21}), say({"sky": "clear", "degrees": 21}))
    ask(model_at(server), output_schema=SCHEMA)
    ask(model_at(server, "gemini-2.5-flash"), output_schema=SCHEMA, tools=())
    for seen in server.requests:
        config = seen.body["generationConfig"]
        assert config["responseMimeType"] == "application/json"
        assert config["responseJsonSchema"]["properties"].keys() == SCHEMA["properties"].keys()


def test_a_schema_that_the_model_cannot_be_held_to_is_asked_for_in_words(server: FakeModels) -> None:
    server.play(say('"clear"'), say("{}"))
    ask(model_at(server), output_schema={"type": "string"})
    ask(model_at(server, "gemini-2.5-flash"), output_schema=SCHEMA)  # beside tools
    for seen in server.requests:
        assert "responseJsonSchema" not in seen.body["generationConfig"]
        assert "JSON Schema" in str(seen.body["systemInstruction"])


@pytest.mark.parametrize(
    ("name", "effort", "config"),
    [
        ("gemini-3-pro", "high", {"include_thoughts": True, "thinking_level": "HIGH"}),
        ("gemini-2.5-flash", "low", {"include_thoughts": True, "thinking_budget": 2048}),
        ("gemini-2.5-flash", "none", {"thinking_budget": 0}),
    ],
)
def test_effort(server: FakeModels, name: str, effort: str, config: dict[str, Any]) -> None:
    ask(model_at(server, name), settings={"reasoning_effort": effort})
    sent = server.requests[0].body["generationConfig"]["thinkingConfig"]
    assert {key: value.upper() if isinstance(value, str) else value for key, value in sent.items()} == config


def test_files_stand_beside_the_text(server: FakeModels) -> None:
    files = (FileContent("image/png", b"\x89PNG"), FileContent("application/pdf", b"%PDF"))
    ask(model_at(server), [UserMessage("What is this?", files)])
    text, image, document = server.requests[0].body["contents"][0]["parts"]
    assert text == {"text": "What is this?"}
    assert image["inlineData"]["mime_type"] == "image/png"
    assert document["inlineData"]["mime_type"] == "application/pdf"


def test_a_call_without_an_id_gets_one(server: FakeModels) -> None:
    """Gemini before 3 names no calls; the answer to one must still find it."""
    server.play(calls(call("weather", city="Oslo"), call("weather", city="Rome")))
    body = (
        b'{"candidates":[{"content":{"role":"model","parts":[{"functionCall":{"name":"weather","args":{}}},'
        b'{"functionCall":{"name":"weather","args":{}}}]},"finishReason":"STOP"}]}'
    )
    server.play(Raw(body))
    one, two = ask(model_at(server)).parts
    assert isinstance(one, CallPart)
    assert isinstance(two, CallPart)
    assert one.provider_id
    assert two.provider_id
    assert one.provider_id != two.provider_id


CONTINUED = (
    b'data: {"candidates":[{"content":{"role":"model","parts":[{"text":"It is"}]},"continuationToken":"dG9rZW4="}],'
    b'"responseId":"g-1"}\n\n'
)


def test_the_library_sends_no_second_request(server: FakeModels) -> None:
    """It would go on with a cut stream by itself; that is the engine's decision."""
    server.play(Raw(CONTINUED, "text/event-stream"), say("Never asked."))
    with pytest.raises(ModelError) as caught:
        ask(model_at(server), stream=True)
    assert (caught.value.dispatched, caught.value.retryable) == ("unknown", True)
    assert "has no end" in str(caught.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("STOP", "stop"),
        ("MAX_TOKENS", "length"),
        ("SAFETY", "refusal"),
        ("RECITATION", "refusal"),
        ("PROHIBITED_CONTENT", "refusal"),
        ("UNHEARD_OF", "other"),
    ],
)
@both_ways
@pytest.mark.filterwarnings("ignore:UNHEARD_OF is not a valid")
def test_finish_reasons(server: FakeModels, stream: bool, reason: str, finish: str) -> None:
    server.play(finished(reason, stream))
    response = ask(model_at(server), stream=stream)
    assert (response.finish, response.parts) == (finish, (TextPart("It"),))


def finished(reason: str, stream: bool) -> Raw:
    content = {"role": "model", "parts": [{"text": "It"}]}
    body = json.dumps({"candidates": [{"content": content, "finishReason": reason}]})
    return Raw(f"data: {body}\n\n".encode(), "text/event-stream") if stream else Raw(body.encode())


@both_ways
def test_a_call_that_gemini_could_not_write_is_a_failure_it_tells(server: FakeModels, stream: bool) -> None:
    server.play(finished("MALFORMED_FUNCTION_CALL", stream))
    with pytest.raises(ModelError) as caught:
        ask(model_at(server), stream=stream)
    assert (caught.value.dispatched, caught.value.retryable) == ("yes", True)


def test_a_setting_that_the_model_has_not_is_refused_before_dispatch(server: FakeModels) -> None:
    for settings in ({"temprature": 1}, {"max_retries": 2}, {"google_cached_content": "x"}):
        with pytest.raises(ModelError) as caught:
            ask(model_at(server), settings=settings)
        assert (caught.value.dispatched, caught.value.retryable) == ("no", False)
    assert server.requests == []


def test_calls_and_their_results_over_many_turns(server: FakeModels) -> None:
    script: list[Item] = [calls(say("I look."), call("weather", city=str(n), id=f"c-{n}")) for n in range(6)]
    server.script([*script, say("Done.")])
    model = model_at(server)
    messages: list[Message] = list(ASK)
    for n in range(7):
        response = ask(model, messages, stream=bool(n % 2))
        messages.append(AssistantMessage(response.parts, response.model, response.continuation))
        messages.append(ToolMessage((ToolResult(f"c-{n}", "weather", "ok"),)))
    assert response.parts == (TextPart("Done."),)
    assert len(server.requests) == 7


def test_no_bound_of_time(server: FakeModels) -> None:
    assert ask(model_at(server), timeout=None).finish == "tool_calls"


def test_where_it_goes_and_what_it_costs(server: FakeModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A price is the provider's own: another server may ask for another."""
    monkeypatch.delenv("GOOGLE_GEMINI_BASE_URL", raising=False)
    assert setup_of(GeminiModel("gemini-3-pro-preview")).host == "generativelanguage.googleapis.com"
    assert profile_of(GeminiModel("gemini-3-pro-preview")).price is not None
    monkeypatch.setenv("GOOGLE_GEMINI_BASE_URL", server.address("google"))
    model = GeminiModel("gemini-3-pro-preview", api_key=Secret.env(KEY_NAME))
    assert setup_of(model).host == f"127.0.0.1:{server.port}"
    assert profile_of(model).price is None
    ask(model)
    assert len(server.requests) == 1


def test_it_is_named_and_declares_itself() -> None:
    model = GeminiModel("gemini-3-pro")
    assert model.name == "google:gemini-3-pro"
    assert {"tools", "parallel_tools", "reasoning", "streaming", "images", "files", "usage"} <= (
        profile_of(model).capabilities or frozenset()
    )
    assert profile_of(GeminiModel("gemini", settings={"max_tokens": 7})).max_output_tokens == 7


@pytest.mark.parametrize(
    "fields", [{"name": " "}, {"base_url": "ftp://x"}, {"base_url": "http://a:b@x"}, {"api_key": "k"}]
)
def test_what_cannot_be_a_model_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        GeminiModel(**{"name": "gemini"} | fields)


def test_importing_and_constructing_loads_no_library() -> None:
    program = """
import sys
from perdure.providers.google import GeminiModel
print(GeminiModel("gemini").name, sorted({"pydantic_ai", "google", "httpx2", "pydantic"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "google:gemini []"


def test_nothing_but_the_provider_fetches_an_address(server: FakeModels) -> None:
    """The library would download it on its own, outside every bound and trace."""
    elsewhere = UserMessage("What is it?", (FileContent("image/png", url="http://127.0.0.1:1/picture.png"),))
    with pytest.raises(ModelError, match="cannot fetch") as refused:
        ask(model_at(server), [elsewhere])
    assert (refused.value.dispatched, refused.value.kind) == ("no", "model.setup")
    assert server.requests == []
    uploaded = "https://generativelanguage.googleapis.com/v1beta/files/abc"
    server.play(say("A cat."))
    assert ask(model_at(server), [UserMessage("And this?", (FileContent("image/png", url=uploaded),))]).parts
