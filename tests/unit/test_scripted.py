"""A scripted model answers by turn number alone, and is loud when it cannot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from perdure.errors import Invalid
from perdure.ports.provider import (
    AssistantMessage,
    Delta,
    Model,
    ModelError,
    Request,
    Response,
    SystemMessage,
    ToolMessage,
    ToolResult,
    UserMessage,
)
from perdure.providers.scripted import Scripted, call, calls, fail, hang, say
from perdure.records.parts import CallPart, ReasoningPart, TextPart, Usage


def ask(model: Scripted, turn: int = 1, emit: Callable[[Delta], None] | None = None, **fields: Any) -> Response:
    request = Request("clerk", "run-1", turn, fields.pop("messages", [UserMessage("hello")]), **fields)
    return asyncio.run(model.respond(request, emit))


def test_it_is_a_model() -> None:
    assert isinstance(Scripted([]), Model)
    assert Scripted([]).name == "scripted"
    assert Scripted([], name="other").name == "other"
    assert repr(Scripted([say("x")])) == "Scripted(1 items, name='scripted')"


def test_the_turn_number_chooses_the_item_whatever_was_asked_before() -> None:
    script = [say("one"), say("two"), say("three")]
    assert ask(Scripted(script), 2).parts == (TextPart("two"),)
    model = Scripted(script)
    assert [ask(model, turn).parts[0] for turn in (3, 1, 3)] == [TextPart("three"), TextPart("one"), TextPart("three")]
    assert ask(model, 1) == ask(Scripted(script), 1)


def test_changing_the_list_afterwards_changes_nothing() -> None:
    script = [say("one")]
    model = Scripted(script)
    script[0] = say("other")
    assert ask(model).parts == (TextPart("one"),)


@pytest.mark.parametrize("turn", [0, 3])
def test_running_out_names_turn_and_length_and_is_not_retried(turn: int) -> None:
    with pytest.raises(ModelError) as caught:
        ask(Scripted([say("a"), say("b")]), turn)
    assert (caught.value.dispatched, caught.value.retryable) == ("no", False)
    assert f"turn {turn}" in str(caught.value)
    assert "2 items" in str(caught.value)


def test_text_stays_text_and_values_become_json() -> None:
    @dataclass
    class Note:
        refunded: bool
        why: str

    assert ask(Scripted([say("plain")])).parts == (TextPart("plain"),)
    assert ask(Scripted([say({"a": [1, None]})])).parts == (TextPart('{"a":[1,null]}'),)
    assert ask(Scripted([say(None)])).parts == (TextPart("null"),)
    assert ask(Scripted([say(Note(True, "ø"))])).parts == (TextPart('{"refunded":true,"why":"ø"}'),)


def test_a_pydantic_model_becomes_json() -> None:
    pydantic = pytest.importorskip("pydantic")
    verdict = pydantic.create_model("Verdict", refunded=(bool, ...))
    assert say({"inner": verdict(refunded=True)}).text == '{"inner":{"refunded":true}}'
    assert say(verdict(refunded=False)).text == '{"refunded":false}'


@pytest.mark.parametrize("value", [object(), {"a": object()}, float("nan"), 2**70])
def test_a_value_without_json_is_invalid_at_once(value: object) -> None:
    with pytest.raises(Invalid):
        say(value)
    with pytest.raises(Invalid):
        call("tool", value=value)


def test_one_call() -> None:
    response = ask(Scripted([call("refund", order="o1", cents=5)]))
    assert response.finish == "tool_calls"
    assert response.model == "scripted"
    assert response.parts == (CallPart("refund", '{"order":"o1","cents":5}', "call_1_0"),)


def test_a_batch_of_calls_has_ids_of_turn_and_position() -> None:
    response = ask(Scripted([say(""), calls(say("both:"), call("a", n=1), call("b"))]), 2)
    assert response.parts == (TextPart("both:"), CallPart("a", '{"n":1}', "call_2_0"), CallPart("b", "{}", "call_2_1"))
    assert response.finish == "tool_calls"


def test_broken_forms_are_passed_as_written() -> None:
    response = ask(Scripted([calls(call("a", raw="{broken", id="same"), call("b", raw="", id="same"))]))
    assert response.parts == (CallPart("a", "{broken", "same"), CallPart("b", "", "same"))


def test_arguments_named_like_our_own_go_in_a_mapping() -> None:
    part = ask(Scripted([call("find", {"id": 7, "raw": True, "name": "n"}, also=1)])).parts[0]
    assert isinstance(part, CallPart)
    assert json.loads(part.arguments) == {"id": 7, "raw": True, "name": "n", "also": 1}
    assert call("find", name="n").arguments == '{"name":"n"}'


def test_raw_beside_arguments_is_invalid() -> None:
    with pytest.raises(Invalid, match="raw"):
        call("a", raw="{}", x=1)


def test_calls_takes_calls_and_text_only() -> None:
    with pytest.raises(Invalid, match="Hang"):
        calls(hang())  # type: ignore[arg-type]


def test_a_foreign_item_is_invalid_at_construction() -> None:
    with pytest.raises(Invalid, match=r"Item 1 .* str"):
        Scripted([say("a"), "b"])  # type: ignore[list-item]


def test_fail_raises_what_it_was_given() -> None:
    error = KeyError("x")
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            ask(Scripted([fail(error)]))
        assert caught.value is error


def test_fail_is_retryable_by_default() -> None:
    with pytest.raises(ModelError, match="overloaded") as caught:
        ask(Scripted([fail("overloaded")]))
    assert (caught.value.dispatched, caught.value.retryable) == ("yes", True)
    with pytest.raises(ModelError) as caught:
        ask(Scripted([fail()]))
    assert caught.value.retryable


def test_hang_waits_until_cancelled() -> None:
    async def main() -> None:
        task = asyncio.create_task(Scripted([hang()]).respond(Request("a", "r", 1, []), None))
        done, _ = await asyncio.wait([task], timeout=0.02)
        assert not done
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_complete_response_is_an_item() -> None:
    cut = Response((ReasoningPart("hm"), CallPart("a", '{"x', "id")), "length", "m", Usage(1, 2))
    assert ask(Scripted([cut])) is cut


def test_deltas_are_words_that_join_to_the_text() -> None:
    deltas: list[Delta] = []
    response = ask(Scripted([calls(say("It is  sunny,\n today."), call("a"))]), emit=deltas.append)
    assert [delta.text for delta in deltas] == ["It ", "is  ", "sunny,\n ", "today."]
    assert response.parts[0] == TextPart("".join(delta.text for delta in deltas))
    assert {delta.kind for delta in deltas} == {"text"}


def test_a_function_sees_the_whole_request() -> None:
    def answer(request: Request) -> Any:
        return say(f"{request.turn}:{request.messages[-1]}")

    async def later(request: Request) -> Any:
        await asyncio.sleep(0)
        return answer(request)

    expected = (TextPart("4:UserMessage(text='hello', files=())"),)
    assert ask(Scripted(answer), 4).parts == ask(Scripted(later), 4).parts == expected
    assert repr(Scripted(answer)) == "Scripted(function, name='scripted')"


def test_a_function_may_return_fail_and_raise_a_model_error() -> None:
    def raises(request: Request) -> Any:
        raise ModelError("busy", retryable=True)

    with pytest.raises(ModelError, match="busy"):
        ask(Scripted(raises))
    with pytest.raises(PermissionError):
        ask(Scripted(lambda request: fail(PermissionError())))


def test_a_faulty_function_is_loud_and_not_retried() -> None:
    faults: list[tuple[Any, str]] = [(lambda _: 1 / 0, "ZeroDivisionError"), (lambda _: "text", "returned a str")]
    for function, words in faults:
        with pytest.raises(ModelError, match=words) as caught:
            ask(Scripted(function), 7)
        assert (caught.value.dispatched, caught.value.retryable) == ("no", False)
        assert "turn 7" in str(caught.value)


def test_usage_is_counted_from_characters() -> None:
    messages = [
        SystemMessage("12345678"),
        UserMessage("1234"),
        AssistantMessage((TextPart("12"), CallPart("ab", "{}", "id"))),
        ToolMessage((ToolResult("id", "ab", "123"),)),
    ]
    assert ask(Scripted([say("12345")]), messages=messages).usage == Usage(input=6, output=2)
    assert ask(Scripted([call("ab")]), messages=[]).usage == Usage(input=0, output=1)


def test_requests_are_kept_as_they_were_and_only_the_last() -> None:
    model = Scripted(lambda request: say("x"))
    messages: list[Any] = [UserMessage("one")]
    ask(model, messages=messages)
    messages.append(UserMessage("two"))
    assert model.requests == [Request("clerk", "run-1", 1, [UserMessage("one")])]

    async def many() -> None:
        request = model.requests[0]
        for turn in range(1, 1026):
            await model.respond(replace(request, turn=turn), None)

    asyncio.run(many())
    assert [model.requests[0].turn, model.requests[-1].turn, len(model.requests)] == [2, 1025, 1024]
