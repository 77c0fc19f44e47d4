"""Whatever happened, the conversation that the model gets is one that every provider accepts (cases E02, E07)."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import perdure as p
from perdure.agent.prompt import PromptView
from perdure.ports.provider import AssistantMessage, ToolMessage
from perdure.records.codec import decode as decode_batch
from perdure.records.parts import CallPart
from perdure.rules import fold
from support.place import Place, until
from support.puppets import SURROGATE, once, play, puppet, wide
from support.validity import faults

pytestmark = pytest.mark.anyio

# -- random histories -------------------------------------------------------------------------------------------------

NAMES = ["once", "strict", "look", "keyed", "asks", "business", "hasty", "nothing", "bad name!", "", "x" * 80]
DOS = ["", "", "", "timeout", "unknown", "refuse", "raise", "surrogate"]
RAW = [
    "",
    "{",
    '"text"',
    "[1]",
    "null",
    "17",
    '{"name": 5}',
    '{"name": "\\ud800"}',
    "{}{}",
    '{"a":' * 70 + "1" + "}" * 70,
]
IDS = ["", "", "", "same", "same", "bad id", "x" * 100, SURROGATE]

good_arguments = st.builds(
    lambda do, gate, number: {"name": f"n{number}", "do": do, "gate": gate},
    st.sampled_from(DOS), st.sampled_from(["", "", "", "never"]), st.integers(0, 3),
)  # fmt: skip
call = st.builds(
    lambda name, arguments, id: [name, arguments, {"id": id}],
    st.sampled_from(NAMES), st.one_of(good_arguments, good_arguments, st.sampled_from(RAW)), st.sampled_from(IDS),
)  # fmt: skip
turn = st.one_of(st.lists(call, min_size=1, max_size=5), st.just("<hang>"), st.just("words"), st.just(""))
ends = st.sampled_from(["cancel", "drop", "drop bare", "approve", "reject", "verdicts"])
histories = st.lists(
    st.tuples(st.lists(turn, min_size=1, max_size=2), st.lists(ends, max_size=3)), min_size=1, max_size=3
)


async def live_through(place: Place, history: list[tuple[list[Any], list[str]]]) -> None:
    """Play a history: each run is disturbed in its own ways, then cancelled if it still goes on; the next comes."""
    bare = puppet(place, without="once", policy=p.Policy(repeated_failure_limit=0))
    agents = {"drop": wide(place), "drop bare": bare}
    app = await place.app(wide(place), lease="300ms").__aenter__()
    try:
        for turns, disturbances in history:
            receipt = await app.submit("puppet", play(*turns, "done"), thread="t")
            for what in [*disturbances, "cancel"]:
                await settled_or_waiting(app, place, receipt)
                if what in agents:
                    await app.close()
                    app = await place.app(agents[what], lease="300ms").__aenter__()
                else:
                    await disturb(app, what, receipt)
            assert (await app.settlement(receipt, timeout=10)).status in ("completed", "cancelled", "failed")
        last = await app.submit("puppet", play("next"), thread="t")
        assert await app.output(last, timeout=10) == "next"
        report = await app.verify()
        assert report, report
    finally:
        await app.close()


async def disturb(app: p.App, what: str, receipt: p.Receipt) -> None:
    match what:
        case "cancel":
            try:
                await app.cancel(receipt, by="alice")
            except p.Conflict:
                return
        case "approve" | "reject":
            for asked in await app.approvals():
                try:
                    await (app.approve if what == "approve" else app.reject)(asked.id, by="alice")
                except p.Conflict:
                    continue
        case _:
            verdicts: list[Any] = [p.Applied("r"), p.Refused("no"), p.NotApplied(), p.SafeToRetry()]
            for index, effect in enumerate(await app.effects(status="unknown")):
                try:
                    await app.reconcile(effect, verdicts[index % 4], by="alice")
                except p.Conflict:
                    continue


async def settled_or_waiting(app: p.App, place: Place, receipt: p.Receipt) -> None:
    """Until the run is over, waits for somebody, or stands in a body or a model call."""

    async def still() -> bool:
        state = (await app.inspect(receipt)).state
        return (
            state in ("settled", "suspended", "unknown") or place.waiting("never") or "RunStarted" in place.kinds("t")
        )

    await until(still, "something")


def views(place: Place, thread: str = "t") -> list[PromptView]:
    """The conversation as each run of a thread would be shown it now, folded from the stored bytes."""
    state = fold.Thread(thread)
    for body in place.log(thread):
        fold.apply_batch(state, body)
    return [PromptView(state, run) for run in state.runs]


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(histories)
def test_case_E02_the_prompt_is_valid_after_any_history(history: list[tuple[list[Any], list[str]]]) -> None:  # noqa: N802
    """The puppets' model refuses an invalid conversation in every turn; here every run's view is judged once more."""
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        asyncio.run(live_through(place, history))
        for view in views(place):
            assert faults(view.for_model()) == []
        for record in (record for body in place.log("t") for record in decode_batch(body).records):
            if type(record).__name__ == "SubmissionSettled" and record.failure is not None:
                assert "provider" not in record.failure.message
                assert record.failure.kind != "model", record.failure


def test_case_E02_the_prompt_is_valid_after_any_history_twin(monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    """Protection off: results of open calls are not explained in the view, as in the reports."""
    from perdure.agent import prompt

    extend = prompt.PromptView.extend

    def as_reported(self: Any, turn_: Any) -> None:
        extend(self, turn_)
        if any(not call_.closed for call_ in turn_.calls):
            self.messages = [m for m in self.messages if m is not self.messages[-1] or not isinstance(m, ToolMessage)]

    monkeypatch.setattr(prompt.PromptView, "extend", as_reported)
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        with pytest.raises(p.RunFailed, match="calls without results"):
            asyncio.run(live_through(place, [([[once(gate="never")]], ["cancel"])]))


# -- the reports ------------------------------------------------------------------------------------------------------


async def test_case_E02_killed_inside_a_slow_tool_every_later_turn_is_accepted(tmp_path: Path) -> None:  # noqa: N802
    place, prompts = Place(tmp_path), []
    with place.worker() as worker:
        async with place.client([puppet(place)]) as app:
            await app.submit("puppet", play([once("slow", gate="g"), once("quick")], "done"), thread="t")
            await until(lambda: place.waiting("g"), "the body")
            await until(lambda: "ToolCallSettled" in place.kinds("t"), "the quick one's outcome")
            worker.kill()
    async with place.app(puppet(place, watch=lambda r: prompts.append(list(r.messages)))) as app:
        for index in range(3):
            receipt = await app.submit("puppet", play(f"answer {index}"), thread="t")
            assert await app.output(receipt, timeout=20) == f"answer {index}"
        for messages in prompts:
            assert faults(messages) == []
            [results] = [m for m in messages if isinstance(m, ToolMessage)]
            slow, quick = results.results
            assert slow.failed
            assert json.loads(slow.content)["error"]["kind"] == "unknown"  # never failed, and not told to repeat
            assert "do not repeat" in slow.content
            assert not quick.failed
        # the view settles nothing: it is still unknown, without an outcome on record
        assert len(await app.effects(status="unknown")) == 1
        assert place.kinds("t").count("ToolCallSettled") == 1


@settings(max_examples=150)
@given(st.one_of(st.text(max_size=40), st.sampled_from(RAW), st.binary(max_size=20).map(lambda b: b.decode("latin-1"))))
def test_case_E07_any_argument_text_is_survived(raw: str) -> None:  # noqa: N802
    """Fuzzed argument text: the call gets an error result, the model a valid placeholder, the run goes on."""
    with tempfile.TemporaryDirectory() as folder:
        place, prompts = Place(Path(folder)), []
        agent = puppet(place, watch=lambda r: prompts.append(list(r.messages)))
        result = asyncio.run(agent.run(play([["once", raw]], "done")))
        assert result.output == "done"
        assert faults(prompts[-1]) == []


@pytest.mark.parametrize("raw", RAW[1:], ids=range(1, len(RAW)))
async def test_case_E07_malformed_arguments_stay_as_evidence(tmp_path: Path, raw: str) -> None:  # noqa: N802
    place, prompts = Place(tmp_path), []
    async with place.app(puppet(place, watch=lambda r: prompts.append(list(r.messages)))) as app:
        receipt = await app.submit("puppet", play([["once", raw], once("good")], "done"), thread="t")
        assert await app.output(receipt, timeout=20) == "done"
        [response, _] = [r for r in place.records("t") if type(r).__name__ == "ModelResponseRecorded"]
        assert response.parts[0].arguments == raw.replace(SURROGATE, "?")
        assert [e.name for e in place.world.entries()] == ["good"]
        shown = next(m for m in prompts[-1] if isinstance(m, AssistantMessage))
        part = shown.parts[0]
        assert isinstance(part, CallPart)
        assert isinstance(json.loads(part.arguments), dict)
        [results] = [m for m in prompts[-1] if isinstance(m, ToolMessage)]
        assert [r.failed for r in results.results] == [True, False]
        assert await app.verify()


async def test_repeated_and_illegal_ids_get_their_own(tmp_path: Path) -> None:
    place, prompts = Place(tmp_path), []
    async with place.app(puppet(place, watch=lambda r: prompts.append(list(r.messages)))) as app:
        batch = [[*once(f"n{i}"), {"id": id}] for i, id in enumerate(["same", "same", "other", "bad id", "same"])]
        receipt = await app.submit("puppet", play(batch, [[*once("later"), {"id": "same"}]], "done"), thread="t")
        assert await app.output(receipt, timeout=20) == "done"
        assert {e.name for e in place.world.entries()} == {"n0", "n2", "n3", "later"}
        assert len({e.key for e in place.world.entries()}) == 4
        assert faults(prompts[-1]) == []
        first = next(m for m in prompts[-1] if isinstance(m, ToolMessage))
        assert [r.failed for r in first.results] == [False, True, False, False, True]


async def test_truncated_calls_never_run(tmp_path: Path) -> None:
    from perdure.ports.provider import Response
    from perdure.providers.scripted import Scripted, say
    from perdure.records.parts import Usage

    place = Place(tmp_path)
    cut = Response((CallPart("once", '{"name": "cu', "a"), CallPart("once", "{}", "b")), "length", "m", Usage())
    agent = p.Agent("cut", tools=puppet(place).tools, model=Scripted([cut, say("done")]))
    async with place.app(agent) as app:
        assert await app.output(await app.submit(agent, "go"), timeout=20) == "done"
    assert place.world.count() == 0
    assert (await agent.run("go")).output == "done"


async def test_a_long_thread_with_every_ending_stays_valid(tmp_path: Path) -> None:
    """Fifty runs on one thread, each ended in another way, the prompt judged at each turn by the model."""
    place = Place(tmp_path)
    turns: list[Any] = [
        [once(do="timeout"), once("ok")], [once(do="refuse")], [["nothing", {}]], [["once", "{"]], [once(tool="asks")],
        [once(gate="never")], "<hang>", "words", [once("a"), once("b"), once("c"), once("d")], [["look", {}]],
    ]  # fmt: skip
    async with place.app(wide(place)) as app:
        for index in range(50):
            receipt = await app.submit("puppet", play(turns[index % len(turns)], f"answer {index}"), thread="t")
            if turns[index % len(turns)] in (turns[0], turns[4], turns[5], turns[6]):
                await until(lambda n=index: place.kinds("t").count("RunStarted") == n + 1, "the run")
                await app.cancel(receipt, by="alice")
            assert (await app.settlement(receipt, timeout=20)).status in ("completed", "cancelled")
        assert await app.verify()
    assert all(faults(view.for_model()) == [] for view in views(place))
