"""What a model adapter must do. An adapter proves it by running every case of :func:`provider_suite`.

The factory makes a model whose provider plays a script, in the vocabulary of ``perdure.providers.scripted``: item *n*
is what the provider says to the n-th call, with argument text and call ids exactly as the item holds them. ``fail()``
is a definite failure that may be retried (HTTP 500), ``hang()`` an answer that never comes.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

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
from perdure.providers.scripted import Item, call, calls, fail, hang, say
from perdure.records.parts import CallPart, TextPart, Usage

MakeModel = Callable[[Sequence[Item]], Model]
Case = Callable[[MakeModel], Awaitable[None]]

TEXT = "It is sunny in Oslo, 21 °C, and it will stay so 🌞."
BROKEN = (
    "{broken",
    "",
    "[1]",
    '"bare"',
    "null",
    '{"a": 1} trailing',
    '{ "a" :\t1 }',
    '{"ø":"\\ud83c\\udf1e"}',
    '{"a":1',
)
TOOLS = (
    ToolSpec(
        "weather",
        "Weather of a city.",
        {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    ),
    ToolSpec("news", "", {"type": "object", "properties": {}}),
)


def provider_suite(
    make_model: MakeModel, *, argument_text: bool = True
) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """Every case, named by its sentence and bound to ``make_model``.

    Args:
        argument_text: False for a wire format that carries arguments as JSON objects: it cannot tell their text, which
            is then compact JSON, and carries no broken ones.
    """
    cases = CASES if argument_text else [case for case in CASES if case is not case_argument_text_is_never_repaired]
    return [(_sentence(case), _bound(case, make_model)) for case in cases]


def _sentence(case: Case) -> str:
    name: str = getattr(case, "__name__", "case")
    return name.removeprefix("case_").replace("_", " ")


def _bound(case: Case, make_model: MakeModel) -> Callable[[], Awaitable[None]]:
    return lambda: case(make_model)


def _request(turn: int = 1, messages: Sequence[Message] = (UserMessage("Weather?"),), **fields: Any) -> Request:
    return Request("clerk", "run-1", turn, list(messages), TOOLS, timeout=30.0, **fields)


def _check(condition: object, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _equal(got: object, wanted: object) -> None:
    _check(got == wanted, f"got {got!r}, wanted {wanted!r}")


async def _error(model: Model, request: Request) -> ModelError:
    try:
        response = await model.respond(request, None)
    except ModelError as error:
        return error
    raise AssertionError(f"no ModelError, but {response!r}")


def _calls(response: Response) -> list[CallPart]:
    return [part for part in response.parts if isinstance(part, CallPart)]


async def case_it_meets_the_port_and_its_name_is_stable(make_model: MakeModel) -> None:
    model = make_model([say(TEXT)])
    _check(isinstance(model, Model), f"{model!r} does not meet the Model protocol")
    name = model.name
    _check(name and name.isprintable(), "a model needs a printable name")
    await model.respond(_request(), None)
    _equal(model.name, name)


async def case_text_comes_back_as_it_was_said(make_model: MakeModel) -> None:
    model = make_model([say(TEXT)])
    response = await model.respond(_request(), None)
    _equal(response.parts, (TextPart(TEXT),))
    _equal(response.finish, "stop")
    _equal(response.model, model.name)


async def case_a_call_comes_back_with_its_id_and_arguments(make_model: MakeModel) -> None:
    response = await make_model([call("weather", city="Oslo", n=1, id="c-1")]).respond(_request(), None)
    _equal(response.parts, (CallPart("weather", '{"city":"Oslo","n":1}', "c-1"),))
    _equal(response.finish, "tool_calls")


async def case_argument_text_is_never_repaired(make_model: MakeModel) -> None:
    """E07: what the model wrote is evidence; making it valid for the next request is the engine's task."""
    model = make_model([call("weather", raw=raw, id="c-1") for raw in BROKEN] * 2)
    for turn, raw in enumerate(BROKEN * 2, 1):
        emit = None if turn <= len(BROKEN) else _ignore
        response = await model.respond(_request(turn), emit)
        _equal([part.arguments for part in _calls(response)], [raw])


def _ignore(_: Delta) -> None:
    pass


async def case_parallel_calls_keep_their_order_and_ids(make_model: MakeModel) -> None:
    script = calls(*(call("weather" if n % 2 else "news", n=n, id=f"c-{n}") for n in range(12)))
    model = make_model([script, script])
    for turn, emit in enumerate((None, _ignore), 1):
        response = await model.respond(_request(turn), emit)
        _equal([part.provider_id for part in _calls(response)], [f"c-{n}" for n in range(12)])
        _equal([part.arguments for part in _calls(response)], [f'{{"n":{n}}}' for n in range(12)])


async def case_text_beside_calls_is_kept(make_model: MakeModel) -> None:
    model = make_model([calls(say("I look."), call("weather", city="Oslo", id="c-1"))] * 2)
    for turn, emit in enumerate((None, _ignore), 1):
        response = await model.respond(_request(turn), emit)
        _equal(response.parts, (TextPart("I look."), CallPart("weather", '{"city":"Oslo"}', "c-1")))
        _equal(response.finish, "tool_calls")


async def case_unknown_tools_and_repeated_ids_pass_through(make_model: MakeModel) -> None:
    model = make_model([calls(call("no_such_tool", id="same"), call("weather", city="Oslo", id="same"))] * 2)
    for turn, emit in enumerate((None, _ignore), 1):
        response = await model.respond(_request(turn), emit)
        _equal(
            [(part.name, part.provider_id) for part in _calls(response)],
            [("no_such_tool", "same"), ("weather", "same")],
        )


async def case_streamed_and_whole_are_the_same_response(make_model: MakeModel) -> None:
    for item in (say(TEXT), call("weather", city="Oslo", id="c-1"), calls(say("Both."), call("news", id="a"))):
        model = make_model([item, item])
        whole, streamed = await model.respond(_request(1), None), await model.respond(_request(2), _ignore)
        for field in ("parts", "finish", "model", "usage"):
            _equal(getattr(streamed, field), getattr(whole, field))


async def case_deltas_join_to_the_text_and_come_before_the_end(make_model: MakeModel) -> None:
    deltas: list[Delta] = []
    response = await make_model([say(TEXT)]).respond(_request(), deltas.append)
    _check(len(deltas) > 1, "a long text arrives in several deltas")
    _equal("".join(delta.text for delta in deltas if delta.kind == "text"), TEXT)
    _equal(response.parts, (TextPart(TEXT),))


async def case_a_whole_conversation_is_accepted(make_model: MakeModel) -> None:
    """E02: results of every kind, batches, text beside calls and a later question are valid for the provider."""
    script: list[Item] = [
        calls(say("I look."), call("weather", city="Oslo", id="a"), call("news", id="b")),
        say("Sunny."),
        say("Yes."),
    ]
    model = make_model(script)
    messages: list[Message] = [SystemMessage("Be brief."), UserMessage("Weather and news?")]
    first = await model.respond(_request(1, messages), None)
    results = (ToolResult("a", "weather", '{"sky":"clear"}'), ToolResult("b", "news", "It timed out.", failed=True))
    messages += [AssistantMessage(first.parts, first.model, first.continuation), ToolMessage(results)]
    second = await model.respond(_request(2, messages), None)
    _equal(second.parts, (TextPart("Sunny."),))
    messages += [AssistantMessage(second.parts, second.model, second.continuation), UserMessage("Sure?")]
    third = await model.respond(_request(3, messages, output_schema={"type": "string"}), None)
    _equal(third.parts, (TextPart("Yes."),))


async def case_a_history_of_another_model_is_accepted(make_model: MakeModel) -> None:
    messages: list[Message] = [
        UserMessage("Weather?"),
        AssistantMessage((CallPart("removed_tool", "{}", "x-1"),), "another:model", b'{"v":99,"strange":[1]}'),
        ToolMessage((ToolResult("x-1", "removed_tool", "gone", failed=True),)),
    ]
    response = await make_model([say("Sunny.")]).respond(_request(1, messages), None)
    _equal(response.parts, (TextPart("Sunny."),))


async def case_the_request_is_left_as_it_was(make_model: MakeModel) -> None:
    request = _request(output_schema={"type": "object", "title": "T"}, settings={})
    before = copy.deepcopy(request)
    await make_model([say("{}")]).respond(request, None)
    _equal(request, before)


async def case_usage_is_counted(make_model: MakeModel) -> None:
    response = await make_model([say(TEXT)]).respond(_request(), None)
    _check(isinstance(response.usage, Usage), "usage is a Usage")
    _check(response.usage.input > 0 and response.usage.output > 0, f"{response.usage!r} counts nothing")


async def case_a_definite_failure_says_so(make_model: MakeModel) -> None:
    error = await _error(make_model([fail()]), _request())
    _equal((error.dispatched, error.retryable), ("yes", True))
    _check(str(error), "a failure needs a message")


async def case_a_failed_call_leaves_the_model_usable(make_model: MakeModel) -> None:
    model = make_model([fail(), say("Sunny.")])
    await _error(model, _request(1))
    _equal((await model.respond(_request(2), None)).parts, (TextPart("Sunny."),))


async def case_cancelling_ends_a_call_at_once_and_the_model_stays_usable(make_model: MakeModel) -> None:
    model = make_model([hang(), say("Sunny.")])
    task = asyncio.ensure_future(model.respond(_request(1), None))
    await asyncio.wait([task], timeout=0.2)
    _check(not task.done(), "the call should wait for its provider")
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    _check(done and task.cancelled(), "a cancelled call must end, as cancelled")
    _equal((await model.respond(_request(2), None)).parts, (TextPart("Sunny."),))


async def case_calls_at_once_do_not_mix(make_model: MakeModel) -> None:
    models = [make_model([say(f"answer {n}")]) for n in range(8)]
    responses = await asyncio.gather(*(model.respond(_request(), _ignore) for model in models))
    _equal([response.parts for response in responses], [(TextPart(f"answer {n}"),) for n in range(8)])


CASES: tuple[Case, ...] = tuple(value for name, value in list(globals().items()) if name.startswith("case_"))
