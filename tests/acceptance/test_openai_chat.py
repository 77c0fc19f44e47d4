"""Chat Completions over real HTTP on loopback: one request a call, the truth about dispatch, nothing half told."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from perdure.definitions.tool import Secret
from perdure.errors import Invalid
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
from perdure.providers.openai import ChatModel
from perdure.providers.resolve import resolve
from perdure.providers.scripted import Call, Calls, Fail, Hang, Item, Say, Scripted
from perdure.records.parts import CallPart, Part, ReasoningPart, TextPart, Usage
from perdure.testing.conformance.provider import provider_suite
from support.fake_llm import Answer, Broken, FakeLLM, Raw, Reply, Slow, Status

core = pytest.importorskip("perdure.providers._pydantic_ai", reason="needs perdure[models]")

KEY = "sk-the-secret-key"
WEATHER = ToolSpec("weather", "Weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
ASK: tuple[Message, ...] = (SystemMessage("Be brief."), UserMessage("Weather in Oslo?"))

both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def running() -> Iterator[FakeLLM]:
    with FakeLLM() as server:
        yield server


@pytest.fixture
def server(running: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    monkeypatch.setenv("PERDURE_TEST_KEY", KEY)
    return running.play()


def model_at(url: str, **fields: Any) -> ChatModel:
    return ChatModel("gpt-test", url, fields.pop("api_key", Secret.env("PERDURE_TEST_KEY")), **fields)


def ask(model: Model, *, stream: bool = False, messages: Sequence[Message] = ASK, **fields: Any) -> Response:
    return asyncio.run(respond(model, stream=stream, messages=messages, **fields))


async def respond(model: Model, *, stream: bool = False, messages: Sequence[Message] = ASK, **fields: Any) -> Response:
    fields.setdefault("tools", (WEATHER,))
    fields.setdefault("timeout", 20.0)
    emit: Callable[[Delta], None] | None = fields.pop("emit", [].append if stream else None)
    return await model.respond(Request("clerk", "run-1", 1, list(messages), **fields), emit)


def error(model: Model, **fields: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        ask(model, **fields)
    return caught.value


# one call, one request


@both_ways
def test_text(server: FakeLLM, stream: bool) -> None:
    server.play(Reply("It is sunny."))
    response = ask(model_at(server.url), stream=stream)
    assert response.parts == (TextPart("It is sunny."),)
    assert (response.finish, response.model) == ("stop", "openai-chat:gpt-test")
    assert response.usage == Usage(input=11, output=7)
    assert len(server.requests) == 1


@both_ways
def test_a_call_then_its_result(server: FakeLLM, stream: bool) -> None:
    model = model_at(server.url)
    first = ask(model, stream=stream)
    assert first.parts == (CallPart("weather", '{"city":"Oslo"}', "call_1"),)
    assert first.finish == "tool_calls"
    result = ToolMessage((ToolResult("call_1", "weather", '{"sky":"clear"}'),))
    history = (*ASK, AssistantMessage(first.parts, first.model, first.continuation), result)
    second = ask(model, stream=stream, messages=history)
    assert second.parts == (TextPart("It is sunny."),)
    assert len(server.requests) == 2
    assert [message["role"] for message in server.requests[1].body["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert server.requests[1].body["messages"][3]["content"] == '{"sky":"clear"}'


@both_ways
def test_parallel_calls_and_their_results(server: FakeLLM, stream: bool) -> None:
    places = [("a", "weather", '{"city":"Oslo"}'), ("b", "weather", '{"city":"Rome"}'), ("c", "news", "{}")]
    server.play(Reply("I look.", calls=tuple(places)), Reply("Done."))
    model = model_at(server.url)
    first = ask(model, stream=stream)
    assert first.parts == (TextPart("I look."), *(CallPart(name, raw, id) for id, name, raw in places))
    results = ToolMessage(tuple(ToolResult(id, name, "ok") for id, name, _ in places))
    ask(model, stream=stream, messages=(*ASK, AssistantMessage(first.parts, first.model), results))
    assert len(server.requests) == 2


@both_ways
@pytest.mark.parametrize("raw", ["{broken", "", "[1]", '"Oslo"', '{"city": "Oslo"', '{ "city" :\t1e400 }'])
def test_arguments_stay_as_written(server: FakeLLM, stream: bool, raw: str) -> None:
    server.play(Reply(calls=(("call_1", "weather", raw),)))
    assert ask(model_at(server.url), stream=stream).parts == (CallPart("weather", raw, "call_1"),)
    assert len(server.requests) == 1


@both_ways
def test_reasoning_comes_first_and_goes_back_to_its_model_only(server: FakeLLM, stream: bool) -> None:
    server.play(Reply("Sunny.", reasoning="Oslo is in Norway."))
    deltas: list[Delta] = []
    model = model_at(server.url)
    response = ask(model, emit=deltas.append if stream else None)
    assert response.parts == (ReasoningPart("Oslo is in Norway.", "reasoning_content"), TextPart("Sunny."))
    for kind, text in (("reasoning", "Oslo is in Norway."), ("text", "Sunny.")) if stream else ():
        assert "".join(delta.text for delta in deltas if delta.kind == kind) == text
    for author, sent in ((response.model, "Oslo is in Norway."), ("another:model", None)):
        history = (*ASK, AssistantMessage(response.parts, author), UserMessage("Sure?"))
        ask(model, messages=history)
        said = server.requests[-1].body["messages"][2]
        assert (said["content"], said.get("reasoning_content")) == ("Sunny.", sent)


@both_ways
def test_what_a_server_attached_to_a_call_goes_back(server: FakeLLM, stream: bool) -> None:
    extra = {"google": {"thought_signature": "c2ln"}}
    server.play(Reply(calls=(("a", "weather", "{}"), ("b", "weather", "{}")), extra=extra))
    model = model_at(server.url)
    first = ask(model, stream=stream)
    results = ToolMessage(tuple(ToolResult(id, "weather", "ok") for id in "ab"))
    for author, sent in ((first.model, extra), ("another:model", None)):
        ask(model, messages=(*ASK, AssistantMessage(first.parts, author, first.continuation), results))
        calls = server.requests[-1].body["messages"][2]["tool_calls"]
        assert [call.get("extra_content") for call in calls] == [sent, None]


@both_ways
@pytest.mark.parametrize(
    ("reply", "finish", "parts"),
    [
        (Reply("It is", finish="length"), "length", (TextPart("It is"),)),
        (Reply("", calls=(("a", "weather", '{"ci'),), finish="length"), "length", (CallPart("weather", '{"ci', "a"),)),
        (Reply("", calls=(("a", "weather", "{}"),), finish="stop"), "tool_calls", (CallPart("weather", "{}", "a"),)),
        (Reply(refusal="I will not."), "refusal", (TextPart("I will not."),)),
        (Reply("It", finish="content_filter"), "refusal", (TextPart("It"),)),
        (Reply("It", finish="out_of_money"), "other", (TextPart("It"),)),
        (Reply(""), "stop", ()),
    ],
    ids=["length", "length in a call", "stop with a call", "refusal", "filtered", "unheard of", "empty"],
)
def test_finish_reasons(server: FakeLLM, stream: bool, reply: Reply, finish: str, parts: tuple[Part, ...]) -> None:
    server.play(reply)
    response = ask(model_at(server.url), stream=stream)
    assert (response.finish, response.parts) == (finish, parts)


@both_ways
def test_usage_tells_cached_and_reasoning_tokens(server: FakeLLM, stream: bool) -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens_details": {"reasoning_tokens": 12},
    }
    server.play(Reply("Sunny.", usage=usage))
    assert ask(model_at(server.url), stream=stream).usage == Usage(100, 20, cache_read=64, reasoning=12)
    server.play(Reply("Sunny.", usage=None))
    assert ask(model_at(server.url), stream=stream).usage == Usage()


@both_ways
def test_text_that_utf8_cannot_hold_is_made_storable(server: FakeLLM, stream: bool) -> None:
    server.play(Reply("abcdef\ud83c\udf1e \ud83c"))  # in the stream, the pair comes in two pieces
    deltas: list[Delta] = []
    response = ask(model_at(server.url), emit=deltas.append if stream else None)
    assert response.parts == (TextPart("abcdef🌞 \ufffd"),)
    assert all(delta.text.encode() for delta in deltas)


def test_what_is_sent(server: FakeLLM) -> None:
    parameters = {"type": "object", "title": "Find", "properties": {"city": {"$ref": "#/$defs/C", "description": "x"}}}
    parameters |= {"$defs": {"C": {"type": "string", "default": "Oslo"}}}
    model = model_at(server.url, settings={"temperature": 0.5, "max_tokens": 9})
    ask(model, tools=(ToolSpec("find", "Find it.", parameters),), settings={"max_tokens": 7})
    body, headers = server.requests[0].body, server.requests[0].headers
    function = {"name": "find", "description": "Find it.", "parameters": parameters}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?"},
    ]
    assert (body["model"], body["temperature"], body["max_completion_tokens"]) == ("gpt-test", 0.5, 7)
    assert headers["authorization"] == f"Bearer {KEY}"


def test_the_output_schema_follows_the_last_instructions(server: FakeLLM) -> None:
    messages: list[Message] = [SystemMessage("One."), UserMessage("x"), SystemMessage("Two."), UserMessage("y")]
    schema = {"type": "object", "properties": {"größe": {"type": "integer"}}}
    ask(model_at(server.url), messages=messages, output_schema=schema, tools=())
    sent = server.requests[0].body["messages"]
    assert [message["role"] for message in sent] == ["system", "user", "system", "system", "user"]
    assert '{"type":"object","properties":{"größe":{"type":"integer"}}}' in sent[3]["content"]
    ask(model_at(server.url), messages=messages[1:2], output_schema=schema, tools=())
    assert [message["role"] for message in server.requests[1].body["messages"]] == ["system", "user"]


def test_a_server_without_keys(server: FakeLLM) -> None:
    ask(model_at(server.url, api_key=None))
    assert "authorization" not in server.requests[0].headers
    ask(model_at(server.url, api_key=None, settings={"extra_headers": {"Authorization": "Basic eA=="}}))
    assert server.requests[1].headers["authorization"] == "Basic eA=="


# failures


@both_ways
@pytest.mark.parametrize(
    ("status", "retryable", "retry_after"),
    [
        (Status(400), False, None),
        (Status(401), False, None),
        (Status(404), False, None),
        (Status(409), True, None),
        (Status(429), True, None),
        (Status(429, headers={"retry-after": "7"}), True, 7.0),
        (Status(429, headers={"retry-after-ms": "1500"}), True, 1.5),
        (Status(500), True, None),
        (Status(503, headers={"retry-after": "2"}), True, 2.0),
        (Status(529), True, None),
        (Status(307, headers={"location": "/v1/elsewhere"}), False, None),
    ],
    ids=lambda value: f"{value.code} {value.headers}" if isinstance(value, Status) else "",
)
def test_a_status_is_a_definite_answer(
    server: FakeLLM, stream: bool, status: Status, retryable: bool, retry_after: float | None
) -> None:
    server.play(status)
    failure = error(model_at(server.url), stream=stream)
    assert (failure.dispatched, failure.retryable, failure.retry_after) == ("yes", retryable, retry_after)
    assert str(status.code) in str(failure)
    assert "it failed" in str(failure)
    assert len(server.requests) == 1


@both_ways
@pytest.mark.parametrize("code", [408, 502, 504])
def test_a_gateway_does_not_know(server: FakeLLM, stream: bool, code: int) -> None:
    server.play(Status(code))
    failure = error(model_at(server.url), stream=stream)
    assert (failure.dispatched, failure.retryable, failure.evidence.status) == ("unknown", True, code)
    assert len(server.requests) == 1


def test_retry_after_may_be_a_date(server: FakeLLM) -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))
    server.play(Status(429, headers={"retry-after": date}))
    assert 50 < (error(model_at(server.url)).retry_after or 0) <= 60


@pytest.mark.parametrize(
    "answer",
    [
        Broken("reset"),
        Broken("close"),
        Broken("reset", 1),
        Broken("close", 1),
        Broken("end", 1),
        Raw(b"{}"),
        Raw(b'{"choices": []}'),
        Raw(b"[1, 2"),
        Raw(b""),
        Raw(b"\xff\xfe"),
        Raw(b"<html>busy</html>", "text/html"),
    ],
    ids=str,
)
def test_a_broken_answer_is_unknown(server: FakeLLM, answer: Answer) -> None:
    server.play(answer)
    failure = error(model_at(server.url))
    assert (failure.dispatched, failure.retryable) == ("unknown", True)
    assert len(server.requests) == 1


@pytest.mark.parametrize("reply", [Reply("It is sunny in Oslo."), Reply(calls=(("a", "weather", '{"city":"Oslo"}'),))])
@pytest.mark.parametrize("chunks", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("how", ["reset", "close", "end"])
def test_a_cut_stream_is_no_half_turn(server: FakeLLM, reply: Reply, chunks: int | None, how: Any) -> None:
    server.play(Broken(how, chunks, reply))
    failure = error(model_at(server.url), stream=True)
    assert (failure.dispatched, failure.retryable) == ("unknown", True)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"data: {broken\n\n", b"data: \xff\n\n", b"data: [DONE]\n\n", b"data: 7\n\n"]
)
def test_a_malformed_stream_is_unknown(server: FakeLLM, body: bytes) -> None:
    server.play(Raw(body, "text/event-stream"))
    failure = error(model_at(server.url), stream=True)
    assert (failure.dispatched, failure.retryable) == ("unknown", True)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("code", "retryable"), [("server_error", True), ("rate_limit_exceeded", True), ("context_length_exceeded", False)]
)
def test_an_error_in_the_stream_is_a_definite_answer(server: FakeLLM, code: str, retryable: bool) -> None:
    server.play(Raw(b'data: {"error":{"message":"boom","code":"%s"}}\n\n' % code.encode(), "text/event-stream"))
    failure = error(model_at(server.url), stream=True)
    assert (failure.dispatched, failure.retryable) == ("yes", retryable)
    assert "boom" in str(failure)


@pytest.mark.parametrize("arguments", [(), ("x",)])
def test_a_call_that_is_announced_and_never_comes_is_unknown(server: FakeLLM, arguments: tuple[str, ...]) -> None:
    server.play(Reply("".join(arguments), finish="tool_calls"))
    assert error(model_at(server.url)).dispatched == "unknown"


@both_ways
def test_a_refused_connection_was_never_dispatched(server: FakeLLM, stream: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    failure = error(model_at(f"http://127.0.0.1:{port}/v1"), stream=stream)
    assert (failure.dispatched, failure.retryable) == ("no", True)


def test_a_name_that_does_not_resolve_was_never_dispatched(server: FakeLLM) -> None:
    failure = error(model_at("http://no-such-host.invalid/v1"))
    assert (failure.dispatched, failure.retryable) == ("no", True)


def test_a_connect_timeout_was_never_dispatched(server: FakeLLM) -> None:
    """A listener with a full backlog drops the handshake, so the connection is never made."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        try:
            failure = error(model_at(f"http://127.0.0.1:{address[1]}/v1"), timeout=0.3)
        finally:
            for filler in fillers:
                filler.close()
    assert (failure.dispatched, failure.retryable) == ("no", True)


@both_ways
@pytest.mark.parametrize("chunks", [None, 1])
def test_a_timeout_after_dispatch_is_unknown_and_closes_the_connection(
    server: FakeLLM, stream: bool, chunks: int | None
) -> None:
    server.play(Slow(chunks))
    started = time.monotonic()
    failure = error(model_at(server.url), stream=stream, timeout=0.3)
    assert time.monotonic() - started < 15
    assert (failure.dispatched, failure.retryable) == ("unknown", True)
    assert server.gone.wait(10)
    assert len(server.requests) == 1


def test_no_time_left_means_not_dispatched(server: FakeLLM) -> None:
    failure = error(model_at(server.url), timeout=0.0)
    assert failure.dispatched == "no"
    assert server.requests == []


@both_ways
def test_cancelling_closes_the_connection(server: FakeLLM, stream: bool) -> None:
    async def main() -> None:
        server.play(Slow(1 if stream else None))
        task = asyncio.create_task(respond(model_at(server.url), stream=stream, timeout=None))
        while not server.requests:  # noqa: ASYNC110 (the server is another thread)
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.gone.wait, 10)

    asyncio.run(main())


@both_ways
def test_a_response_without_end_is_cut_off(server: FakeLLM, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "RESPONSE_BYTES_MAX", 1000)
    server.play(Reply("x" * 10_000))
    failure = error(model_at(server.url), stream=stream)
    assert (failure.dispatched, failure.retryable) == ("unknown", False)
    assert "larger than" in str(failure)


def test_an_unknown_setting_is_refused_before_dispatch(server: FakeLLM) -> None:
    for settings, words in (({"temprature": 1}, "does not exist"), ({"max_retries": 2}, "decided by Perdure")):
        failure = error(model_at(server.url), settings=settings)
        assert (failure.dispatched, failure.retryable) == ("no", False)
        assert words in str(failure)
    assert server.requests == []


# the key


@pytest.mark.parametrize("value", [None, "", "two words", "line\nbreak", "schlüssel"])
def test_a_missing_or_impossible_key_names_the_variable(
    server: FakeLLM, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("PERDURE_TEST_KEY")
    else:
        monkeypatch.setenv("PERDURE_TEST_KEY", value)
    failure = error(model_at(server.url))
    assert (failure.dispatched, failure.retryable) == ("no", False)
    assert "PERDURE_TEST_KEY" in str(failure)
    assert not value or value not in str(failure)
    assert server.requests == []


@both_ways
def test_the_key_is_never_shown(server: FakeLLM, stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = model_at(server.url)
    for logger in ("openai", "httpx2", "httpcore2", "pydantic_ai", "asyncio"):
        caplog.set_level(logging.DEBUG, logger)
    caplog.set_level(logging.DEBUG)
    server.play(Status(401, f"Incorrect API key: {KEY}"), Reply("Sunny."), Raw(b'{"key": "%s"}' % KEY.encode()))
    failure = error(model, stream=stream)
    shown = [
        str(failure),
        repr(failure),
        repr(model),
        repr(vars(model)),
        repr(failure.__cause__),
        repr(failure.__context__),
    ]
    ask(model, stream=stream)
    shown.append(str(error(model, stream=stream)))
    assert "***" in shown[0]
    assert not [text for text in shown if KEY in text]
    assert KEY not in caplog.text
    assert server.requests[1].headers["authorization"] == f"Bearer {KEY}"


def test_a_key_is_read_at_each_call(server: FakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = model_at(server.url)
        await respond(model)
        monkeypatch.setenv("PERDURE_TEST_KEY", "sk-rotated")
        await respond(model)

    asyncio.run(main())
    assert [seen.headers["authorization"] for seen in server.requests] == [f"Bearer {KEY}", "Bearer sk-rotated"]


# event loops and installation


def test_one_model_serves_several_loops_and_leaves_nothing_open(server: FakeLLM) -> None:
    model = model_at(server.url)
    for _ in range(3):
        server.play(Reply("Sunny."))
        assert ask(model).parts == (TextPart("Sunny."),)
        assert core._open == {}
    gc.collect()  # an unclosed socket would warn, and warnings are errors


def test_connections_are_used_again(server: FakeLLM) -> None:
    async def main() -> None:
        await asyncio.gather(*(respond(model_at(server.url)) for _ in range(5)))
        [(connections, _)] = core._open.values()
        assert len(connections) == 1

    asyncio.run(main())
    assert len(server.requests) == 5


LIBRARIES = {"pydantic_ai", "openai", "httpx2", "httpx", "pydantic"}


def python(program: str) -> str:
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module", ["perdure.providers.openai", "perdure.providers.resolve", "perdure.providers.scripted"]
)
def test_importing_and_constructing_loads_no_library(module: str) -> None:
    program = f"""
import sys, {module}
from perdure.providers.resolve import resolve
model = resolve("openai:gpt-5.6")
print(model.name, sorted({LIBRARIES!r} & set(sys.modules)))
"""
    assert python(program) == "openai:gpt-5.6 []"


def test_a_missing_library_is_one_sentence() -> None:
    program = """
import asyncio, os, sys
sys.modules["openai"] = None
os.environ["OPENAI_API_KEY"] = "sk-x"
from perdure.errors import Invalid
from perdure.ports.provider import Request
from perdure.providers.openai import ChatModel
from perdure.providers.resolve import resolve
try:
    resolve("openai-chat:gpt-5.6")
except Invalid as error:
    print(error)
try:
    asyncio.run(ChatModel("gpt-5.6").respond(Request("a", "r", 1, []), None))
except Invalid as error:
    print(error)
"""
    lines = python(program).splitlines()
    assert lines == ['Model `openai-chat:gpt-5.6` needs openai: pip install "perdure[models]"'] * 2


def test_names_are_resolved() -> None:
    scripted = Scripted([])
    assert resolve(scripted) is scripted
    model = resolve("openai-chat:ft:gpt-5.6:acme")
    assert isinstance(model, ChatModel)
    assert model.name == "openai-chat:ft:gpt-5.6:acme"
    assert repr(model) == "ChatModel('ft:gpt-5.6:acme')"


@pytest.mark.parametrize("name", ["", "gpt-5.6", "openai:", "openai: ", "nobody:gpt", ":x"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(Invalid, match='"openai:NAME"'):
        resolve(name)


@pytest.mark.parametrize("value", [None, 7, Scripted, object()])
def test_what_is_no_model_is_refused(value: object) -> None:
    with pytest.raises(Invalid, match="model is needed"):
        resolve(value)


@pytest.mark.parametrize(
    "address", ["", "ftp://x/v1", "127.0.0.1:80", "http://", "http://user:pw@host/v1", "http://[::1", "http://x:pw/v1"]
)
def test_a_wrong_address_is_refused_and_not_repeated(address: str) -> None:
    with pytest.raises(Invalid) as caught:
        ChatModel("gpt-5.6", address)
    assert "pw" not in str(caught.value)


def test_a_key_given_as_text_is_refused_and_not_repeated() -> None:
    with pytest.raises(Invalid) as caught:
        ChatModel("gpt-5.6", api_key=KEY)  # type: ignore[arg-type]
    assert KEY not in str(caught.value)


def test_a_blank_name_is_refused() -> None:
    with pytest.raises(Invalid, match="blank"):
        ChatModel(" ")


# the contract of every provider


def on_http(running: FakeLLM, items: Sequence[Item]) -> ChatModel:
    """A model whose server plays these items, told apart from others on the same server by its name."""
    name = f"gpt-{len(PLAYED)}"
    PLAYED[name] = [reply_of(item) for item in items]
    return ChatModel(name, running.url, Secret.env("PERDURE_TEST_KEY"))


PLAYED: dict[str, list[Answer]] = {}


def next_answer(body: dict[str, Any]) -> Answer:
    return PLAYED[body["model"]].pop(0)


def reply_of(item: Item) -> Answer:
    match item:
        case Say(text):
            return Reply(text)
        case Call():
            return reply_of(Calls((item,)))
        case Calls(items):
            text = "".join(part.text for part in items if isinstance(part, Say))
            return Reply(text, tuple((part.id, part.name, part.arguments) for part in items if isinstance(part, Call)))
        case Fail():
            return Status(500)
        case Hang():
            return Slow()
        case _:
            raise AssertionError(item)


SENTENCES = [sentence for sentence, _ in provider_suite(Scripted)]


@pytest.mark.anyio
@pytest.mark.parametrize("sentence", SENTENCES)
async def test_scripted_meets_the_contract(sentence: str) -> None:
    await dict(provider_suite(Scripted))[sentence]()


@pytest.mark.anyio
@pytest.mark.parametrize("sentence", SENTENCES)
async def test_chat_completions_meets_the_contract(server: FakeLLM, sentence: str) -> None:
    server.play(*[next_answer] * 64)
    await dict(provider_suite(lambda items: on_http(server, items)))[sentence]()
