"""Responses, Azure and model objects of the library, over real HTTP on loopback: what goes back with the next turn."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from perdure.definitions.context import Secret
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
from perdure.providers.azure import AzureModel
from perdure.providers.openai import ChatModel, ResponsesModel
from perdure.providers.resolve import resolve
from perdure.providers.scripted import Item, say
from perdure.records.parts import CallPart, ReasoningPart, TextPart
from perdure.testing.conformance.provider import provider_suite
from support.fake_models import LONG_TEXT, USAGE, FakeModels, Raw, Seen, Status
from support.fake_models.script import sse

pytest.importorskip("perdure.providers._openai", reason="needs perdure[models]")

KEY_NAME = "PERDURE_TEST_KEY"
KEY = "sk-the-secret-key"
WEATHER = ToolSpec("weather", "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
ASK: tuple[Message, ...] = (SystemMessage("Be brief."), UserMessage("Weather in Oslo?"))
THOUGHTFUL = Response(
    (
        ReasoningPart("Oslo is in Norway."),
        ReasoningPart(""),  # nothing is shown of it
        TextPart("I look."),
        CallPart("weather", '{ "city": "Oslo" }', "c-1"),
        CallPart("weather", '{"city":"Rome"}', "c-2"),
    ),
    "tool_calls",
    "",
)
RESULTS = ToolMessage(
    (ToolResult("c-1", "weather", '{"sky":"clear"}'), ToolResult("c-2", "weather", "no", failed=True))
)
STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {"sky": {"type": "string"}, "degrees": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    "required": ["sky", "degrees"],
    "additionalProperties": False,
}
LOOSE: dict[str, Any] = {"type": "object", "title": "Sky", "properties": {"sky": {"type": "string", "default": "blue"}}}

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
modes = pytest.mark.parametrize("continuation", ["stateless", "stored", "none"])


@pytest.fixture(scope="module")
def running() -> Iterator[FakeModels]:
    with FakeModels() as server:
        yield server


@pytest.fixture
def server(running: FakeModels, monkeypatch: pytest.MonkeyPatch) -> FakeModels:
    monkeypatch.setenv(KEY_NAME, KEY)
    monkeypatch.delenv("OPENAI_API_VERSION", raising=False)
    return running.play()


def model_at(server: FakeModels, name: str = "gpt-5.6", **fields: Any) -> ResponsesModel:
    return ResponsesModel(name, server.address("responses"), Secret.env(KEY_NAME), **fields)


def azure_at(server: FakeModels, **fields: Any) -> AzureModel:
    return AzureModel("gpt-prod", server.address("azure"), api_key=Secret.env(KEY_NAME), **fields)


def ask(model: Model, *, stream: bool = False, messages: Sequence[Message] = ASK, **fields: Any) -> Response:
    fields.setdefault("tools", (WEATHER,))
    fields.setdefault("timeout", 20.0)
    emit: Callable[[Delta], None] | None = fields.pop("emit", [].append if stream else None)
    return asyncio.run(model.respond(Request("clerk", "run-1", 1, list(messages), **fields), emit))


def error(model: Model, **fields: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ask(model, **fields)
    return caught.value


def said(response: Response) -> AssistantMessage:
    return AssistantMessage(response.parts, response.model, response.continuation)


def kinds(seen: Seen) -> list[str]:
    return [item.get("type") or item["role"] for item in seen.body["input"]]


# the contract of every provider

MAKERS: dict[str, Callable[[FakeModels], Model]] = {
    "responses": model_at,
    "responses, stored": lambda server: model_at(server, continuation="stored"),
    "responses, none": lambda server: model_at(server, continuation="none"),
    "azure chat": azure_at,
    "azure responses": lambda server: azure_at(server, api="responses", encrypted_reasoning=True),
}


@pytest.mark.parametrize("case", [name for name, _ in provider_suite(lambda _: ResponsesModel("gpt"))])
@pytest.mark.parametrize("maker", MAKERS)
def test_it_does_what_a_provider_must(server: FakeModels, maker: str, case: str) -> None:
    """The public suite; each model of a case has a server of its own."""
    servers: list[FakeModels] = []

    def make(script: Sequence[Item]) -> Model:
        own = FakeModels().__enter__()
        servers.append(own)
        return MAKERS[maker](own.play(*script))

    run: Callable[[], Awaitable[None]] = dict(provider_suite(make))[case]
    try:
        asyncio.run(run())  # type: ignore[arg-type]
    finally:
        for own in servers:
            own.__exit__()


# what goes back with the next turn


@both_ways
def test_stateless_reasoning_comes_encrypted_and_goes_back(server: FakeModels, stream: bool) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server)
    deltas: list[Delta] = []
    first = ask(model, stream=stream, emit=deltas.append if stream else None)
    assert [type(part) for part in first.parts] == [type(part) for part in THOUGHTFUL.parts]
    assert first.parts[2:] == THOUGHTFUL.parts[2:]
    reasoning = [part for part in first.parts if isinstance(part, ReasoningPart)]
    assert [part.text for part in reasoning] == ["Oslo is in Norway.", ""]
    assert all(part.id and part.signature for part in reasoning)
    assert first.usage == USAGE
    if stream:
        assert "".join(delta.text for delta in deltas if delta.kind == "reasoning") == "Oslo is in Norway."
    sent = server.requests[0].body
    assert (sent["store"], sent["include"]) == (False, ["reasoning.encrypted_content"])
    assert "previous_response_id" not in sent
    assert ask(model, stream=stream, messages=(*ASK, said(first), RESULTS)).parts == (TextPart("Sunny."),)
    given = server.requests[1].body["input"]
    sealed = [(item["id"], item["encrypted_content"]) for item in given if item.get("type") == "reasoning"]
    assert sealed == [(part.id, part.signature) for part in reasoning]
    assert next(item["output"] for item in given if item.get("type") == "function_call_output") == '{"sky":"clear"}'


@modes
def test_reasoning_and_sessions_go_to_no_other_model(server: FakeModels, continuation: Any) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    first = ask(model_at(server, continuation=continuation))
    ask(model_at(server, "gpt-5.5", continuation=continuation), messages=(*ASK, said(first), RESULTS))
    assert "reasoning" not in kinds(server.requests[1])
    assert "previous_response_id" not in server.requests[1].body
    assert len(server.requests[1].body["input"]) == 7


def test_reasoning_without_its_encrypted_content_is_refused_before_dispatch(server: FakeModels) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    first = ask(model_at(server, continuation="none"))
    lost = AssistantMessage((ReasoningPart("Oslo.", "rs_1"), *first.parts[2:]), first.model, first.continuation)
    failure = error(model_at(server), messages=(*ASK, lost, RESULTS))
    assert (failure.dispatched, failure.kind, failure.retryable) == ("no", "model.continuation", False)
    assert 'continuation="stored"' in str(failure)
    assert len(server.requests) == 1
    again = ask(model_at(server), messages=(*ASK, lost, RESULTS), use_continuation=False)
    assert again.parts == (TextPart("Sunny."),)


@both_ways
def test_stored_names_the_last_response_and_sends_what_is_new(server: FakeModels, stream: bool) -> None:
    server.script([THOUGHTFUL, say("Sunny."), say("Yes.")])
    model = model_at(server, continuation="stored")
    first = ask(model, stream=stream)
    history: list[Message] = [*ASK, said(first), RESULTS]
    second = ask(model, stream=stream, messages=history)
    history += [said(second), UserMessage("Sure?")]
    assert ask(model, stream=stream, messages=history).parts == (TextPart("Yes."),)
    one, two, three = (seen.body for seen in server.requests)
    assert one["store"] is True
    assert "include" not in one
    assert two["previous_response_id"] == f"resp_{server.requests[0].n}"
    assert kinds(server.requests[1]) == ["function_call_output", "function_call_output"]
    assert three["previous_response_id"] == f"resp_{server.requests[1].n}"
    assert kinds(server.requests[2]) == ["user"]


@pytest.mark.parametrize(
    "change",
    [
        lambda history: [SystemMessage("Be long."), *history[1:]],
        lambda history: [history[0], UserMessage("Weather in Rome?"), *history[2:]],
        lambda history: history[1:],
    ],
    ids=["instructions", "question", "shortened"],
)
def test_stored_sends_everything_where_the_history_changed(
    server: FakeModels, change: Callable[[list[Message]], list[Message]]
) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server, continuation="stored")
    history: list[Message] = [*ASK, said(ask(model)), RESULTS]
    ask(model, messages=change(history))
    assert "previous_response_id" not in server.requests[1].body
    assert "function_call" in kinds(server.requests[1])


def test_stored_sends_everything_where_an_answer_is_shown_otherwise(server: FakeModels) -> None:
    """The engine renames a call whose id was used before: the provider knows it by the old name only."""
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server, continuation="stored")
    first = ask(model)
    shown = tuple(
        CallPart(part.name, part.arguments, f"new-{part.provider_id}") if isinstance(part, CallPart) else part
        for part in first.parts
    )
    results = ToolMessage(tuple(ToolResult(f"new-{result.provider_id}", "weather", "ok") for result in RESULTS.results))
    ask(model, messages=(*ASK, AssistantMessage(shown, first.model, first.continuation), results))
    assert "previous_response_id" not in server.requests[1].body
    assert "function_call" in kinds(server.requests[1])


@modes
def test_without_the_session_everything_is_sent_and_no_reasoning(server: FakeModels, continuation: Any) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server, continuation=continuation)
    history = (*ASK, said(ask(model)), RESULTS)
    again = ask(model, messages=history, use_continuation=False)
    assert again.parts == (TextPart("Sunny."),)
    assert "previous_response_id" not in server.requests[1].body
    assert "reasoning" not in kinds(server.requests[1])
    assert len(server.requests[1].body["input"]) == 7


def test_an_expired_session_is_told_and_the_whole_history_goes_on(server: FakeModels) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    model = model_at(server, continuation="stored")
    history = (*ASK, said(ask(model)), RESULTS)
    server.expire()
    failure = error(model, messages=history)
    assert (failure.dispatched, failure.kind, failure.retryable) == ("yes", "model.continuation", False)
    assert ask(model, messages=history, use_continuation=False).parts == (TextPart("Sunny."),)


def test_encrypted_content_that_the_provider_does_not_know_is_a_lost_session(server: FakeModels) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    first = ask(model_at(server))
    forged = tuple(
        ReasoningPart(part.text, part.id, "forged") if isinstance(part, ReasoningPart) else part for part in first.parts
    )
    failure = error(model_at(server), messages=(*ASK, AssistantMessage(forged, first.model), RESULTS))
    assert (failure.dispatched, failure.kind) == ("yes", "model.continuation")


def test_a_model_that_does_not_reason_is_asked_for_no_reasoning(server: FakeModels) -> None:
    ask(model_at(server, "gpt-4.1"))
    assert "include" not in server.requests[0].body
    ask(model_at(server, "my-own-o5", encrypted_reasoning=True))
    assert server.requests[1].body["include"] == ["reasoning.encrypted_content"]


# streams, ends and failures


def stream_of(*events: dict[str, Any]) -> Raw:
    numbered = (event | {"sequence_number": n} for n, event in enumerate(events))
    return Raw(b"".join(sse(event, event["type"]) for event in numbered), "text/event-stream")


BEGUN = {"id": "resp_1", "object": "response", "created_at": 1, "status": "in_progress", "model": "m", "output": []}
BEGUN |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
CREATED = {"type": "response.created", "response": BEGUN}
ITEM = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
AT = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
ADDED = {"type": "response.output_item.added", "output_index": 0, "item": ITEM}
TEXT = {"type": "response.output_text.delta", "delta": "response.completed", "logprobs": []} | AT
REFUSED = {"type": "response.refusal.delta", "delta": "I will not."} | AT
REFUSED_DONE = {"type": "response.refusal.done", "refusal": "I will not."} | AT


@pytest.mark.parametrize(
    "events",
    [
        (CREATED,),
        (CREATED, ADDED, TEXT),
        (CREATED, ADDED, REFUSED, REFUSED_DONE),
        (CREATED, ADDED, TEXT, {"type": "response.in_progress", "response": BEGUN}),
    ],
    ids=["created", "text", "refusal", "in progress"],
)
def test_a_stream_without_its_last_event_is_no_response(server: FakeModels, events: tuple[dict[str, Any], ...]) -> None:
    server.play(stream_of(*events))
    failure = error(model_at(server), stream=True)
    assert (failure.dispatched, failure.retryable) == ("unknown", True)
    assert failure.evidence.status == 200
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("code", "retryable", "kind"),
    [
        ("server_error", True, "model"),
        ("rate_limit_exceeded", True, "model.rate_limit"),
        ("context_length_exceeded", False, "model.context_length"),
        ("invalid_prompt", False, "model.refused"),
    ],
)
@both_ways
def test_a_response_that_failed_is_a_definite_answer(
    server: FakeModels, stream: bool, code: str, retryable: bool, kind: str
) -> None:
    failed = BEGUN | {"status": "failed", "error": {"code": code, "message": "boom"}}
    server.play(
        stream_of(CREATED, {"type": "response.failed", "response": failed})
        if stream
        else Raw(json.dumps(failed).encode())
    )
    failure = error(model_at(server), stream=stream)
    assert (failure.dispatched, failure.retryable, failure.kind) == ("yes", retryable, kind)
    assert "boom" in str(failure)


@both_ways
def test_a_response_cut_by_its_limit_says_so(server: FakeModels, stream: bool) -> None:
    server.play(Response((TextPart("It is"),), "length", ""))
    response = ask(model_at(server), stream=stream)
    assert (response.finish, response.parts) == ("length", (TextPart("It is"),))


def test_a_quota_that_is_used_up_is_not_waited_for(server: FakeModels) -> None:
    body = b'{"error":{"message":"You exceeded your current quota.","type":"insufficient_quota","code":"insufficient_quota"}}'
    server.play(Raw(body, code=429))
    failure = error(model_at(server))
    assert (failure.dispatched, failure.retryable, failure.kind) == ("yes", False, "model.rate_limit")


@both_ways
def test_evidence_is_what_the_server_saw(server: FakeModels, stream: bool) -> None:
    server.play(say(LONG_TEXT))
    evidence = ask(model_at(server), stream=stream).evidence
    seen = server.requests[0]
    assert evidence.request == seen.digest == hashlib.sha256(seen.raw).hexdigest()
    assert (evidence.response, evidence.request_id, evidence.status) == (seen.sent_digest, seen.request_id, 200)
    assert seen.headers["accept-encoding"] == "identity"


def test_a_call_never_sends_a_second_request(server: FakeModels) -> None:
    """Whatever a client library tries: here the one connection is asked twice within one call."""
    from perdure.providers import _wire as wires

    async def main() -> wires.Wire:
        wire = wires.Wire(1_000_000, {"authorization": f"Bearer {KEY}"})
        wires.current.set(wire)
        async with wires.client() as client:
            body = {"model": "m", "input": "hi"}
            headers = {"api-key": wires.PLACEHOLDER}
            await client.post(f"{server.address('responses')}/responses", json=body, headers=headers)
            with pytest.raises(AssertionError, match="second request"):
                await client.post(f"{server.address('responses')}/responses", json=body)
        return wire

    wire = asyncio.run(main())
    (seen,) = server.requests
    assert (seen.headers["authorization"], seen.headers.get("api-key")) == (f"Bearer {KEY}", None)
    assert wire.evidence().request == seen.digest


def test_a_compressed_response_is_not_read(server: FakeModels) -> None:
    """Nobody asked for it, and what it unpacks to is not bounded by what is received."""
    server.play(Status(200, "invalid", {"content-encoding": "gzip"}))
    failure = error(model_at(server))
    assert (failure.dispatched, failure.evidence.status) == ("unknown", 200)
    assert "compressed" in str(failure)


@pytest.mark.parametrize(
    ("code", "message", "kind"),
    [
        (400, "Invalid value: 'safety_identifier' must be a string.", "model"),
        (400, "Encrypted content is not supported with this model.", "model"),
        (400, "The encrypted content for item rs_1 could not be verified.", "model.continuation"),
        (404, "Previous response with id 'resp_1' not found.", "model.continuation"),
        (
            400,
            "Item 'fc_1' of type 'function_call' was provided without its required 'reasoning' item.",
            "model.continuation",
        ),
        (400, "This model's maximum context length is 128000 tokens.", "model.context_length"),
        (400, "Your prompt was flagged as potentially violating our usage policy.", "model.refused"),
        (413, "Too large.", "model.context_length"),
        (404, "The model `gpt-7` does not exist.", "model"),
    ],
)
def test_what_was_refused_is_read_from_the_words(server: FakeModels, code: int, message: str, kind: str) -> None:
    server.play(Status(code, "invalid", message=message))
    failure = error(model_at(server))
    assert (failure.dispatched, failure.retryable, failure.kind) == ("yes", False, kind)


# what is sent


def test_settings_reach_the_wire(server: FakeModels) -> None:
    settings = {"max_tokens": 9, "reasoning_effort": "max", "openai_text_verbosity": "low"}
    ask(model_at(server, settings=settings), settings={"max_tokens": 7})
    body = server.requests[0].body
    assert body["max_output_tokens"] == 7
    assert body["reasoning"]["effort"] == "max"
    assert body["text"] == {"verbosity": "low"}
    assert body["prompt_cache_key"] == "clerk"
    assert body["tools"][0]["parameters"] == WEATHER.parameters
    ask(model_at(server), settings={"openai_prompt_cache_key": "mine"})
    assert server.requests[1].body["prompt_cache_key"] == "mine"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temprature": 1}, "does not exist"),
        ({"timeout": 2}, "decided by Perdure"),
        ({"tool_choice": "none"}, "decided by Perdure"),
        ({"openai_store": True}, "does not exist"),
        ({"openai_previous_response_id": "resp_1"}, "does not exist"),
        ({"seed": 1}, "does not exist"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"temperature": 0.5}, "while it reasons"),
    ],
)
def test_a_setting_that_would_not_hold_is_refused(server: FakeModels, settings: dict[str, Any], words: str) -> None:
    failure = error(model_at(server), settings=settings)
    assert (failure.dispatched, failure.kind, failure.retryable) == ("no", "model.setup", False)
    assert words in str(failure)
    assert server.requests == []
    ask(model_at(server, "gpt-4.1"), settings={"temperature": 0.5})
    assert server.requests[0].body["temperature"] == 0.5


@pytest.mark.parametrize(
    ("schema", "sent", "strict"),
    [
        (STRICT, STRICT, True),
        (LOOSE, LOOSE, False),
        ({"$ref": "#/$defs/Sky", "$defs": {"Sky": STRICT}}, STRICT | {"$defs": {"Sky": STRICT}}, True),
    ],
    ids=["strict", "loose", "reference"],
)
def test_a_schema_is_held_by_the_provider_and_not_rewritten(
    server: FakeModels, schema: dict[str, Any], sent: dict[str, Any], strict: bool
) -> None:
    for model in (model_at(server), azure_at(server)):
        server.play(say("{}"))
        ask(model, output_schema=schema)
        body = server.requests[0].body
        form = body["text"]["format"] if "text" in body else body["response_format"]["json_schema"]
        assert (form["schema"], form["strict"]) == (sent, strict)
        asked = body.get("input") or body["messages"]
        assert [message["role"] for message in asked] == ["system", "user"]


@pytest.mark.parametrize(("fields", "schema"), [({"output": "prompted"}, STRICT), ({}, {"type": "string"})])
def test_a_schema_is_asked_for_in_words_where_it_is_not_held(
    server: FakeModels, fields: dict[str, Any], schema: dict[str, Any]
) -> None:
    server.play(say('"x"'))
    model = model_at(server, **fields)
    ask(model, output_schema=schema)
    body = server.requests[0].body
    assert "text" not in body
    assert [item["role"] for item in body["input"]] == ["system", "system", "user"]
    able = profile_of(model).capabilities
    assert able is not None
    assert ("structured_output" in able) == (not fields)


@both_ways
def test_a_last_answer_lists_tools_and_allows_none(server: FakeModels, stream: bool) -> None:
    for model in (model_at(server), azure_at(server)):
        server.play(say("Sunny."))
        ask(model, stream=stream, tools_allowed=False)
        body = server.requests[0].body
        assert (body["tool_choice"], len(body["tools"])) == ("none", 1)


def test_files_are_sent_as_they_are(server: FakeModels) -> None:
    files = (
        FileContent("image/png", b"\x89PNG", name="a.png"),
        FileContent("image/png", url="https://example.com/a.png"),
        FileContent("application/pdf", b"%PDF-1.4"),
        FileContent("application/pdf", url="https://example.com/a.pdf"),
    )
    ask(model_at(server), messages=[UserMessage("Look.", files)])
    text, inline, linked, document, fetched = server.requests[0].body["input"][0]["content"]
    assert text == {"type": "input_text", "text": "Look."}
    assert inline["image_url"] == "data:image/png;base64,iVBORw=="
    assert linked["image_url"] == "https://example.com/a.png"
    assert document["file_data"].startswith("data:application/pdf;base64,")
    assert fetched["file_url"] == "https://example.com/a.pdf"


@pytest.mark.parametrize("media_type", ["application/pdf", "audio/wav", "video/mp4", "text/plain"])
def test_an_address_that_only_this_process_could_fetch_is_refused(server: FakeModels, media_type: str) -> None:
    """Chat Completions takes addresses of images only; the library would fetch others by itself."""
    model = ChatModel("gpt-test", server.address("chat"), Secret.env(KEY_NAME))
    file = FileContent(media_type, url=f"{server.address('chat')}/file")
    failure = error(model, messages=[UserMessage("Look.", (file,))])
    assert (failure.dispatched, failure.kind) == ("no", "model.setup")
    assert "bytes" in str(failure)
    assert server.connections == 0


def test_the_key_of_a_once_call_is_an_idempotency_key(server: FakeModels) -> None:
    ask(model_at(server), key="call-7")
    ask(model_at(server))
    assert [seen.headers.get("idempotency-key") for seen in server.requests] == ["call-7", None]


# Azure


@pytest.mark.parametrize(
    ("fields", "path", "query"),
    [
        ({}, "/openai/v1/chat/completions", {}),
        ({"api": "responses"}, "/openai/v1/responses", {}),
        ({"api_version": "2026-10-01"}, "/openai/deployments/gpt-prod/chat/completions", {"api-version": "2026-10-01"}),
        ({"api": "responses", "api_version": "2026-10-01"}, "/openai/responses", {"api-version": "2026-10-01"}),
    ],
)
def test_azure_is_called_where_it_is(
    server: FakeModels, fields: dict[str, Any], path: str, query: dict[str, str]
) -> None:
    model = azure_at(server, **fields)
    response = ask(model)
    seen = server.requests[0]
    assert (seen.path, seen.query) == (path, query)
    assert seen.headers["api-key"] == KEY
    assert "authorization" not in seen.headers
    assert response.model == model.name == "azure:gpt-prod"
    assert response.evidence.request_id == seen.request_id


def test_azure_takes_its_place_from_the_environment(server: FakeModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_OPENAI_ENDPOINT", raising=False)
    with pytest.raises(Invalid, match="AZURE_OPENAI_ENDPOINT"):
        resolve("azure:gpt-prod")
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", server.address("azure"))
    monkeypatch.setenv("OPENAI_API_VERSION", "2026-10-01")
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
    ask(resolve("azure:gpt-prod"))
    assert server.requests[0].query == {"api-version": "2026-10-01"}
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", f"{server.address('azure')}/openai/v1/")
    ask(resolve("azure:gpt-prod"))
    assert (server.requests[1].path, server.requests[1].query) == ("/openai/v1/chat/completions", {})


@pytest.mark.parametrize("fields", [{}, {"api_version": "2026-10-01"}, {"api": "responses"}])
@both_ways
def test_a_prompt_that_azure_filters_is_refused(server: FakeModels, stream: bool, fields: dict[str, Any]) -> None:
    server.play("prompt refused")
    failure = error(azure_at(server, **fields), stream=stream)
    assert (failure.dispatched, failure.retryable, failure.kind) == ("yes", False, "model.refused")


def test_what_came_by_one_format_of_azure_goes_back_by_no_other(server: FakeModels) -> None:
    server.script([THOUGHTFUL, say("Sunny.")])
    first = ask(azure_at(server, api="responses", encrypted_reasoning=True))
    ask(azure_at(server), messages=(*ASK, said(first), RESULTS))
    assert "Norway" not in server.requests[1].raw.decode()


# model objects of the library


def test_a_model_object_of_the_library_is_a_model() -> None:
    from pydantic_ai import messages as their
    from pydantic_ai.models.function import FunctionModel

    asked: list[list[their.ModelMessage]] = []

    def answer(messages: list[their.ModelMessage], info: Any) -> their.ModelResponse:
        asked.append(messages)
        if len(messages) > 2:
            return their.ModelResponse([their.TextPart("Sunny.")])
        return their.ModelResponse([their.ToolCallPart(info.function_tools[0].name, {"city": "Oslo"}, "c-1")])

    model = resolve(FunctionModel(answer, model_name="mine"))
    assert (model.name, profile_of(model).capabilities) == ("pydantic-ai:function:mine", None)
    first = ask(model)
    assert (first.parts, first.finish) == ((CallPart("weather", '{"city":"Oslo"}', "c-1"),), "tool_calls")
    second = ask(model, messages=(*ASK, said(first), ToolMessage((ToolResult("c-1", "weather", "ok"),))))
    assert (second.parts, second.finish, second.model) == ((TextPart("Sunny."),), "stop", model.name)
    assert len(asked) == 2


def test_what_a_model_object_raises_is_told_as_far_as_it_is_known() -> None:
    from pydantic_ai import exceptions, messages
    from pydantic_ai.models.function import FunctionModel

    def raising(error: Exception) -> Model:
        def answer(_: list[messages.ModelMessage], info: Any) -> messages.ModelResponse:
            raise error

        return resolve(FunctionModel(answer))

    for raised, dispatched, retryable, kind in (
        (ValueError("odd"), "unknown", True, "model"),
        (exceptions.ModelHTTPError(429, "m"), "yes", True, "model.rate_limit"),
        (exceptions.ModelHTTPError(401, "m"), "yes", False, "model.authentication"),
        (exceptions.ModelHTTPError(504, "m"), "unknown", True, "model"),
        (exceptions.UserError("not so"), "no", False, "model.setup"),
    ):
        failure = error(raising(raised))
        assert (failure.dispatched, failure.retryable, failure.kind) == (dispatched, retryable, kind), raised


# what is loaded


def python(program: str, **more: str) -> str:
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | more
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_a_call_loads_its_own_format_only(server: FakeModels) -> None:
    program = f"""
import asyncio, sys
from perdure.definitions.context import Secret
from perdure.ports.provider import Request, UserMessage
from perdure.providers.openai import ResponsesModel
model = ResponsesModel("gpt-5.6", {server.address("responses")!r}, Secret.env("K"))
print(sorted({{"pydantic_ai", "openai", "httpx2", "pydantic", "genai_prices"}} & set(sys.modules)))
response = asyncio.run(model.respond(Request("a", "r", 1, [UserMessage("hi")], timeout=30), None))
print(response.parts[0].text, sorted({{"anthropic", "google.genai"}} & set(sys.modules)))
"""
    assert python(program, K=KEY).splitlines() == ["[]", "It is sunny. []"]
