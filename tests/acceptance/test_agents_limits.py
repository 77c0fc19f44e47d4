"""Limits of a run are typed failures, an output that does not decode goes back to the model, and nothing is endless."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.limits import TURNS_MAX
from perdure.ports.provider import Request, UserMessage
from perdure.providers.scripted import Scripted, call, say
from support.place import Place
from support.puppets import once, play, puppet

pytestmark = pytest.mark.anyio

BROKEN = [["once", "{broken"]]


async def failure(place: Place, policy: p.Policy, *turns: Any, **options: Any) -> p.RunFailed:
    """How a run fails, the same in memory and durably."""
    agent = puppet(place, policy=policy, **options)
    with pytest.raises(p.RunFailed) as ephemeral:
        await agent.run(play(*turns))
    async with place.app(agent) as app:
        receipt = await app.submit(agent, play(*turns), thread="t")
        with pytest.raises(p.RunFailed) as durable:
            await app.output(receipt, timeout=20)
        assert (durable.value.kind, str(durable.value)) == (ephemeral.value.kind, str(ephemeral.value))
        settled = await app.settlement(receipt)
        assert settled.failure is not None
        assert settled.failure.kind == durable.value.kind
        assert await app.obligations() == []
        assert await app.verify()
        # the thread is as usable as before
        after = p.Policy(max_turns=5)
        assert policy is not after
        again = await app.submit(agent, play("next" if options.get("output", str) is str else {"a": 1}), thread="t")
        await app.settlement(again, timeout=20)
    return durable.value


async def test_turns(tmp_path: Path) -> None:
    place = Place(tmp_path)
    failed = await failure(place, p.Policy(max_turns=3, on_exhaustion="fail"), [once()])
    assert failed.kind == "policy.turns"
    assert "3 turns" in str(failed)
    assert place.world.count() == 6


async def test_turns_have_a_finite_default(tmp_path: Path) -> None:
    place = Place(tmp_path)
    failed = await failure(place, p.Policy(on_exhaustion="fail"), [once()])
    assert failed.kind == "policy.turns"
    assert place.world.count() == 2 * TURNS_MAX


async def test_tool_calls_are_counted_before_any_of_a_batch_runs(tmp_path: Path) -> None:
    place = Place(tmp_path)
    failed = await failure(
        place, p.Policy(max_tool_calls=3, on_exhaustion="fail"), [once(), once()], [once(), once()], "done"
    )
    assert failed.kind == "policy.tool_calls"
    assert place.world.count() == 4


async def test_no_tool_calls_at_all(tmp_path: Path) -> None:
    place = Place(tmp_path)
    policy = p.Policy(max_tool_calls=0, on_exhaustion="fail")
    assert (await failure(place, policy, [once()], "done")).kind == "policy.tool_calls"
    assert place.world.count() == 0


async def test_tokens(tmp_path: Path) -> None:
    policy = p.Policy(token_budget=1_500, on_exhaustion="fail")
    failed = await failure(Place(tmp_path), policy, *[[once()]] * 12, "done")
    assert failed.kind == "policy.tokens"


async def test_a_prompt_that_does_not_fit_is_never_sent(tmp_path: Path) -> None:
    seen: list[Any] = []
    agent = puppet(Place(tmp_path), policy=p.Policy(token_budget=10), watch=seen.append)
    with pytest.raises(p.RunFailed) as failed:
        await agent.run(play("done"))
    assert failed.value.kind == "policy.tokens"
    assert seen == []


async def landing(place: Place, policy: p.Policy, *turns: Any) -> tuple[Any, list[Any]]:
    """How a run that used up a limit ends: its settlement and the requests its model saw."""
    seen: list[Any] = []
    agent = puppet(place, policy=policy, watch=seen.append)
    async with place.app(agent) as app:
        receipt = await app.submit(agent, play(*turns), thread="t")
        settled = await app.settlement(receipt, timeout=20)
        assert await app.verify()
    return settled, seen


async def test_after_the_last_turn_comes_one_without_tools(tmp_path: Path) -> None:
    place = Place(tmp_path)
    settled, seen = await landing(place, p.Policy(max_turns=2), [once("a")], [once("b")], "all I know")
    assert settled.status == "completed"
    assert [request.tools_allowed for request in seen] == [True, True, False]
    assert "turns" in seen[-1].messages[-1].text
    assert place.world.count() == 2


async def test_a_batch_that_goes_over_is_told_so_and_the_next_answer_is_the_last(tmp_path: Path) -> None:
    place = Place(tmp_path)
    settled, seen = await landing(place, p.Policy(max_tool_calls=1), [once("a"), once("b")], "without them")
    assert settled.status == "completed"
    assert place.world.count() == 0
    assert [request.tools_allowed for request in seen] == [True, False]
    assert all("policy.tool_calls" in result.content for result in seen[-1].messages[-2].results)


async def test_when_the_tokens_are_used_up_the_next_answer_is_the_last() -> None:
    @p.tool(effect="pure")
    def look() -> str:
        return "nothing " * 50

    asked: list[bool] = []

    def answer(request: Request) -> Any:
        asked.append(request.tools_allowed)
        return call("look") if request.tools_allowed else say("enough")

    policy = p.Policy(token_budget=2_000, max_turns=100)
    result = await p.Agent("a", tools=[look], model=Scripted(answer), policy=policy).run("go")
    assert result.output == "enough"
    assert asked[-1] is False
    assert all(asked[:-1])
    assert 3 < len(asked) < 12
    assert result.usage.input + result.usage.output < 3_000


async def test_there_is_never_a_second_last_answer(tmp_path: Path) -> None:
    place = Place(tmp_path)
    settled, seen = await landing(place, p.Policy(max_turns=1), [once("a")], [once("b")])
    assert settled.status == "failed"
    assert settled.failure.kind == "policy.turns"
    assert "called a tool" in settled.failure.message
    assert len(seen) == 2
    assert place.world.count() == 1


async def test_a_last_answer_has_no_disposition_and_says_what_was_used_up(tmp_path: Path) -> None:
    place = Place(tmp_path)

    @p.tool(effect="pure")
    def look() -> int:
        return 1

    model = Scripted([call("look"), say("fine")])
    agent = p.Agent("a", tools=[look], model=model, policy=p.Policy(max_turns=1), disposition=lambda _: "done")
    assert (await agent.run("go")).disposition is None
    async with place.app(agent) as app:
        receipt = await app.submit(agent, "go", thread="t")
        assert (await app.settlement(receipt, timeout=20)).disposition is None
        last = [view.data async for view in app.observe(receipt)][-1]
        assert last["exhausted"] == "turns"


async def test_an_answer_that_is_there_is_taken_whatever_it_used(tmp_path: Path) -> None:
    agent = p.Agent("a", model=Scripted([say("x" * 4_000)]), policy=p.Policy(token_budget=500, max_turns=1))
    assert (await agent.run("go")).output == "x" * 4_000


@pytest.mark.parametrize("turn", [BROKEN, [["nothing", {}]], [once(do="refuse")], [once(do="raise")]])
async def test_repeated_failures(tmp_path: Path, turn: Any) -> None:
    failed = await failure(Place(tmp_path), p.Policy(repeated_failure_limit=4), turn, turn, turn, turn, "never")
    assert failed.kind == "policy.repeated_failures"


async def test_a_success_between_failures_counts_from_the_beginning(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = puppet(place, policy=p.Policy(repeated_failure_limit=2))
    assert (await agent.run(play(BROKEN, [once()], BROKEN, [once()], BROKEN, "done"))).output == "done"


async def test_a_vital_tool_that_fails_fails_the_run(tmp_path: Path) -> None:
    place = Place(tmp_path)
    failed = await failure(place, p.Policy(), [once(tool="vital", do="refuse"), once("b")], "never")
    assert failed.kind == "refused"
    assert "no money" in str(failed)


async def test_an_output_that_does_not_decode_goes_back_to_the_model(tmp_path: Path) -> None:
    place, seen = Place(tmp_path), []
    agent = puppet(place, output=dict[str, int], watch=lambda r: seen.append(r.messages[-1]))
    assert (await agent.run(play("no JSON", {"a": "b"}, {"a": 1}))).output == {"a": 1}
    assert len(seen) == 3
    assert all(isinstance(m, UserMessage) and "not accepted" in m.text for m in seen[1:])
    async with place.app(agent) as app:
        receipt = await app.submit(agent, play("no JSON", {"a": "b"}, {"a": 1}), thread="t")
        assert await app.output(receipt, timeout=20) == {"a": 1}
        assert place.kinds("t").count("OutputRejected") == 2
        assert await app.verify()


async def test_output_retries_end_in_a_failure_of_kind_output(tmp_path: Path) -> None:
    failed = await failure(Place(tmp_path), p.Policy(output_retries=2), "no JSON", output=dict[str, int])
    assert failed.kind == "output"


async def test_a_fenced_answer_decodes(tmp_path: Path) -> None:
    agent = puppet(Place(tmp_path), output=dict[str, int])
    assert (await agent.run(play('```json\n{"a": 1}\n```'))).output == {"a": 1}


async def test_a_cut_answer_of_text_is_an_answer_and_its_calls_never_run(tmp_path: Path) -> None:
    agent = puppet(Place(tmp_path))
    assert (await agent.run(play("<cut>"))).finish_reason == "length"


async def test_results_beyond_the_limit_are_cut_with_their_size(tmp_path: Path) -> None:
    place = Place(tmp_path)
    seen: list[Any] = []

    @p.tool(effect="observe")
    async def read() -> str:
        return "x" * 10_000

    agent = puppet(
        place, tools=[read], policy=p.Policy(tool_result_bytes=512), watch=lambda r: seen.append(r.messages[-1])
    )
    assert (await agent.run(play([["read", {}]], "done"))).output == "done"
    content = seen[-1].results[0].content
    assert len(content) < 600
    assert "10002" in content


async def test_the_limits_of_a_run_are_those_it_started_with(tmp_path: Path) -> None:
    """A deploy with another policy does not reach a run that was started."""
    place = Place(tmp_path)
    async with place.app(puppet(place, policy=p.Policy(max_turns=5))) as app:
        receipt = await app.submit("puppet", play([once(tool="asks")], [once()], [once()], "done"), thread="t")
        from support.place import until

        [asked] = await until(app.approvals, "the request")
    async with place.app(puppet(place, policy=p.Policy(max_turns=1))) as app:
        await app.approve(asked.id, by="alice")
        assert await app.output(receipt, timeout=20) == "done"
