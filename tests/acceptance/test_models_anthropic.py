"""Anthropic Messages over real HTTP on loopback: thinking that goes back, caches, schemas, what belongs to others."""

from __future__ import annotations

import asyncio
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
from perdure.providers.anthropic import MessagesModel
from perdure.providers.scripted import Item, call, calls, say
from perdure.providers.setup import setup_of
from perdure.records.parts import CallPart, ReasoningPart, TextPart, Usage
from perdure.testing.conformance.provider import provider_suite
from support.fake_models import FakeModels, Status

pytest.importorskip("perdure.providers._anthropic", reason="needs perdure[models]")

KEY_NAME = "PERDURE_TEST_KEY"
WEATHER = ToolSpec("weather", "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
ASK: tuple[Message, ...] = (SystemMessage("Be brief."), UserMessage("Weather in Oslo?"))
THOUGHTFUL = Response(
    (
        ReasoningPart("Oslo is in Norway."),
        ReasoningPart(""),  # redacted
        TextPart("I look."),
        CallPart("weather", '{ "city": "Oslo" }', "c-1"),
        CallPart("weather", '{"city":"Rome"}', "c-2"),
    ),
    "tool_calls",
    "",
)
RESULTS = ToolMessage(
    (ToolResult("c-1", "weather", '{"sky":"clear"}'), ToolResult("c-2", "weather", "It timed out.", failed=True))
)
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["sky", "degrees"],
    "additionalProperties": False,
}

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def running() -> Iterator[FakeModels]:
    with FakeModels() as server:
        yield server


@pytest.fixture
def server(running: FakeModels, monkeypatch: pytest.MonkeyPatch) -> FakeModels:
    monkeypatch.setenv(KEY_NAME, "sk-ant-key")
    return running.play()


def model_at(server: FakeModels, name: str = "claude-opus-5", **fields: Any) -> MessagesModel:
    return MessagesModel(name, server.address("anthropic"), Secret.env(KEY_NAME), **fields)


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


@pytest.mark.parametrize("case", [name for name, _ in provider_suite(lambda _: MessagesModel("claude"))])
def test_it_does_what_a_provider_must(server: FakeModels, case: str) -> None:
    """The public suite; models of one case share one server, so each gets a server of its own."""
    servers: list[FakeModels] = []

    def make(script: Sequence[Item]) -> Model:
        own = FakeModels().__enter__()
        servers.append(own)
        own.play(*script)
        return model_at(own)

    run: Callable[[], Awaitable[None]] = dict(provider_suite(make))[case]
    try:
        asyncio.run(run())  # type: ignore[arg-type]
    finally:
        for own in servers:
            own.__exit__()


@both_ways
def test_thinking_goes_back_signed_as_it_came(server: FakeModels, stream: bool) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server, "claude-3", settings={"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}})
    deltas: list[Delta] = []
    first = ask(model, stream=stream, emit=deltas.append if stream else None)
    assert [type(part) for part in first.parts] == [type(part) for part in THOUGHTFUL.parts]
    thought, redacted, _, one, _ = first.parts
    assert isinstance(thought, ReasoningPart)
    assert isinstance(redacted, ReasoningPart)
    assert isinstance(one, CallPart)
    assert thought.text == "Oslo is in Norway."
    assert thought.signature
    assert (redacted.text, bool(redacted.signature)) == ("", True)
    assert one.arguments == '{ "city": "Oslo" }'
    told = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    assert told == ("Oslo is in Norway." if stream else "")
    second = ask(model, after(first, RESULTS), stream=stream)
    assert second.parts == (TextPart("Sunny."),)
    said = server.requests[1].body["messages"][1]["content"]
    assert [block["type"] for block in said] == ["thinking", "redacted_thinking", "text", "tool_use", "tool_use"]
    assert said[0] == {"type": "thinking", "thinking": thought.text, "signature": thought.signature}
    assert said[1] == {"type": "redacted_thinking", "data": redacted.signature}


def test_results_say_whether_they_failed(server: FakeModels) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server)
    ask(model, after(ask(model), RESULTS))
    results = server.requests[1].body["messages"][2]["content"]
    assert [result["is_error"] for result in results] == [False, True]
    assert [result["tool_use_id"] for result in results] == ["c-1", "c-2"]


@pytest.mark.parametrize("author", ["anthropic:claude-other", "google:gemini-3-pro", "scripted", ""])
def test_thinking_of_another_model_stays_away(server: FakeModels, author: str) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    first = ask(model_at(server))
    ask(model_at(server, "claude-sonnet-5"), after(first, RESULTS, author=author or "unknown"))
    said = server.requests[1].body["messages"][1]["content"]
    assert [block["type"] for block in said] == ["text", "tool_use", "tool_use"]


@pytest.mark.parametrize("fields", [{"author": "google:gemini-3-pro"}, {}])
def test_where_thinking_must_lead_a_turn_and_did_not_it_is_left_out(server: FakeModels, fields: dict[str, str]) -> None:
    """With a budget for it, results are refused unless the calls they answer came with thinking of this model."""
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server, "claude-3", settings={"anthropic_thinking": {"type": "enabled", "budget_tokens": 1024}})
    history = after(ask(model), RESULTS, **fields)
    assert ask(model, history, use_continuation=bool(fields)).parts == (TextPart("Sunny."),)
    assert ["thinking" in seen.body for seen in server.requests] == [True, False]


def test_instructions_stay_at_the_top(server: FakeModels) -> None:
    history: list[Message] = [UserMessage("a"), AssistantMessage((TextPart("One."),), "scripted")]
    ask(model_at(server), [*history, SystemMessage("Be brief."), UserMessage("b")])
    body = server.requests[0].body
    assert "Be brief." in str(body["system"])
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]


def test_a_turn_of_nothing_but_thinking_of_others_is_no_empty_message(server: FakeModels) -> None:
    server.script([say("One."), say("Two.")])
    history: list[Message] = [UserMessage("a"), AssistantMessage((ReasoningPart("hm", signature="x"),), "other:model")]
    ask(model_at(server), [*history, UserMessage("b")])
    assert all(message["content"] for message in server.requests[0].body["messages"])


@both_ways
def test_thinking_that_the_provider_no_longer_accepts(server: FakeModels, stream: bool) -> None:
    """One request, and the truth: the engine decides whether the turn is sent again without it."""
    server.play(
        THOUGHTFUL,
        Status(400, "invalid request", message="messages.1.content.0: Invalid `signature` in `thinking` block"),
        say("Sunny."),
    )
    model = model_at(server)
    history = after(ask(model), RESULTS)
    with pytest.raises(ModelError) as caught:
        ask(model, history, stream=stream)
    assert (caught.value.kind, caught.value.dispatched, caught.value.retryable) == ("model.continuation", "yes", False)
    assert ask(model, history, stream=stream, use_continuation=False).parts == (TextPart("Sunny."),)
    said = server.requests[2].body["messages"][1]["content"]
    assert [block["type"] for block in said] == ["text", "tool_use", "tool_use"]
    assert len(server.requests) == 3


BOUND = (
    "messages.1.content.0: The block is bound to a different conversation. Thinking blocks must be sent back unchanged "
    "in the conversation they come from."
)


@pytest.mark.parametrize("name", ["claude-opus-5", "claude-fable-5-2", "claude-haiku-5-5"])
def test_the_library_sends_no_second_request(server: FakeModels, name: str) -> None:
    """It repeats a request whose thinking is bound to another conversation; that is the engine's decision."""
    server.play(THOUGHTFUL, Status(400, "invalid request", message=BOUND), say("Never asked."))
    model = model_at(server, name)
    history = after(ask(model), RESULTS)
    with pytest.raises(ModelError) as caught:
        ask(model, history)
    assert (caught.value.kind, caught.value.dispatched) == ("model.continuation", "yes")
    assert "bound to a different conversation" in str(caught.value)
    assert len(server.requests) == 2


@both_ways
def test_usage_counts_caches_as_input(server: FakeModels, stream: bool) -> None:
    usage = Usage(input=110, output=30, cache_read=60, cache_write=20, reasoning=10)
    server.play(Response((TextPart("Sunny."),), "stop", "", usage))
    assert ask(model_at(server), stream=stream).usage == usage


def test_what_is_sent(server: FakeModels) -> None:
    ask(
        model_at(server, "claude-3", settings={"temperature": 0.5, "anthropic_cache_instructions": True}),
        settings={"anthropic_cache_tool_definitions": "1h", "max_tokens": 70},
    )
    seen = server.requests[0]
    assert seen.headers["x-api-key"] == "sk-ant-key"
    assert "authorization" not in seen.headers
    assert (seen.body["model"], seen.body["max_tokens"], seen.body["temperature"]) == ("claude-3", 70, 0.5)
    assert seen.body["system"][-1]["cache_control"]["type"] == "ephemeral"
    assert seen.body["tools"][-1]["cache_control"]["ttl"] == "1h"
    assert seen.body["tools"][0]["input_schema"] == WEATHER.parameters
    assert seen.body["tool_choice"]["type"] == "auto"


def test_the_most_tokens_of_an_answer(server: FakeModels) -> None:
    ask(model_at(server, settings={"max_tokens": 900}))
    ask(model_at(server, settings={"max_tokens": 900}), settings={"max_tokens": 70})
    ask(model_at(server))
    first, second, third = (seen.body["max_tokens"] for seen in server.requests)
    assert (first, second) == (900, 70)
    assert third >= 1024


def test_a_last_answer_without_tools_lists_them_all_the_same(server: FakeModels) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server)
    ask(model, after(ask(model), RESULTS), tools_allowed=False)
    body = server.requests[1].body
    assert body["tool_choice"] == {"type": "none"}
    assert [tool["name"] for tool in body["tools"]] == ["weather"]


def test_the_provider_holds_the_answer_to_a_schema(server: FakeModels) -> None:
    server.play(say({"sky": "clear", "degrees": 21}))
    ask(model_at(server), output_schema=SCHEMA)
    wanted = server.requests[0].body["output_config"]["format"]
    assert wanted["type"] == "json_schema"
    assert wanted["schema"]["properties"].keys() == SCHEMA["properties"].keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "array", "items": {"type": "string"}}])
def test_a_schema_that_is_no_object_is_asked_for_in_words(server: FakeModels, schema: dict[str, Any]) -> None:
    server.play(say('"clear"'))
    ask(model_at(server), output_schema=schema)
    body = server.requests[0].body
    assert "format" not in (body.get("output_config") or {})
    assert "JSON Schema" in str(body["system"])


def test_effort(server: FakeModels) -> None:
    ask(model_at(server), settings={"reasoning_effort": "high"})
    body = server.requests[0].body
    assert body["output_config"]["effort"] == "high"
    assert body["thinking"]["type"] in ("enabled", "adaptive")


def test_files_stand_beside_the_text(server: FakeModels) -> None:
    files = (FileContent("image/png", b"\x89PNG"), FileContent("application/pdf", url="https://example.org/a.pdf"))
    ask(model_at(server), [UserMessage("What is this?", files)])
    text, image, document = server.requests[0].body["messages"][0]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    assert (image["type"], image["source"]["media_type"]) == ("image", "image/png")
    assert (document["type"], document["source"]["url"]) == ("document", "https://example.org/a.pdf")


def test_a_result_and_what_the_user_adds_are_one_message(server: FakeModels) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server)
    ask(model, after(ask(model), RESULTS, UserMessage("Be quick.")))
    assert [message["role"] for message in server.requests[1].body["messages"]] == ["user", "assistant", "user"]


def test_a_setting_that_the_model_has_not_is_refused_before_dispatch(server: FakeModels) -> None:
    for settings in ({"temprature": 1}, {"max_retries": 2}, {"openai_store": True}, {"temperature": 0.5}):
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


def test_where_it_goes_and_what_it_costs(server: FakeModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A price is the provider's own: another server may ask for another."""
    monkeypatch.delenv("ANTHROPIC_BASE_URL", raising=False)
    assert setup_of(MessagesModel("claude-opus-5")).host == "api.anthropic.com"
    assert profile_of(MessagesModel("claude-opus-5")).price is not None
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.address("anthropic"))
    model = MessagesModel("claude-opus-5", api_key=Secret.env(KEY_NAME))
    assert setup_of(model).host == f"127.0.0.1:{server.port}"
    assert profile_of(model).price is None
    ask(model)
    assert len(server.requests) == 1


def test_it_is_named_and_declares_itself() -> None:
    model = MessagesModel("claude-opus-5")
    assert model.name == "anthropic:claude-opus-5"
    assert {"tools", "parallel_tools", "reasoning", "streaming", "images", "files", "prompt_caching", "usage"} <= (
        profile_of(model).capabilities or frozenset()
    )
    assert profile_of(MessagesModel("claude", settings={"max_tokens": 7})).max_output_tokens == 7


@pytest.mark.parametrize(
    "fields", [{"name": " "}, {"base_url": "ftp://x"}, {"base_url": "http://a:b@x"}, {"api_key": "k"}]
)
def test_what_cannot_be_a_model_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        MessagesModel(**{"name": "claude"} | fields)


def test_importing_and_constructing_loads_no_library() -> None:
    program = """
import sys
from perdure.providers.anthropic import MessagesModel
print(MessagesModel("claude").name, sorted({"pydantic_ai", "anthropic", "httpx2", "pydantic"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "anthropic:claude []"
