"""Model calls are told as they were: what was dispatched, what it may have cost, and what may be done again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.agent import events
from perdure.ports.provider import ModelError, Profile, Request
from perdure.providers.scripted import Scripted, call, fail, say
from perdure.records.parts import Evidence
from perdure.rules.accounting import Price, Rate
from support.place import Place, until

pytestmark = pytest.mark.anyio

ONCE = p.Policy(model_calls="once")
LOST = fail(
    ModelError(
        "The connection was reset.", dispatched="unknown", retryable=True, evidence=Evidence("aa", "bb", "req-7")
    )
)
REFUSED = fail(ModelError("Overloaded.", dispatched="yes", retryable=True, evidence=Evidence("aa", "bb", "req-8", 529)))
UNSENT = fail(ModelError("No route.", dispatched="no", retryable=True))


def playing(*items: Any, **more: Any) -> tuple[Scripted, list[Request]]:
    """A model that plays one item a call, whatever the turn, and the requests it saw."""
    waiting, seen = list(items), []

    def play(request: Request) -> Any:
        seen.append(request)
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return Scripted(play, **more), seen


async def records(app: p.App, thread: str = "t") -> list[tuple[str, dict[str, Any]]]:
    """Every record about model calls."""
    found = []
    async for view in app.observe(thread):
        if view.kind.startswith("Model"):
            found.append((view.kind, view.data))
        if view.kind == "SubmissionSettled":
            return found
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("item", "dispatched", "charged"), [(LOST, "unknown", True), (REFUSED, "yes", False), (UNSENT, "no", False)]
)
async def test_each_failed_try_is_a_record(tmp_path: Path, item: Any, dispatched: str, charged: bool) -> None:
    model, seen = playing(item, item, say("here"))
    agent = p.Agent("a", model=model)
    place = Place(tmp_path)
    async with place.app(agent) as app:
        receipt = await app.submit(agent, "go", thread="t")
        assert await app.output(receipt, timeout=20) == "here"
        found = await records(app)
        assert [kind for kind, _ in found] == ["ModelCallFailed", "ModelCallFailed", "ModelResponseRecorded"]
        assert [data["dispatched"] for _, data in found[:2]] == [dispatched] * 2
        assert [data["attempt"] for _, data in found[:2]] == [1, 2]
        assert all(("charged" in data) is charged for _, data in found[:2])
        if dispatched != "no":
            assert found[0][1]["evidence"]["request_id"].startswith("req-")
        assert await app.verify()
    assert len(seen) == 3


async def test_tries_are_counted_and_end(tmp_path: Path) -> None:
    model, seen = playing(REFUSED)
    agent = p.Agent("a", model=model)
    async with Place(tmp_path).app(agent) as app:
        receipt = await app.submit(agent, "go", thread="t")
        settled = await app.settlement(receipt, timeout=30)
        assert settled.failure is not None
        assert settled.failure.kind == "model"
        assert len(await records(app)) == len(seen) == 4
        assert await app.verify()


async def test_what_is_not_retryable_is_asked_once(tmp_path: Path) -> None:
    model, seen = playing(fail(ModelError("Too long.", dispatched="yes", kind="model.context_length")))
    agent = p.Agent("a", model=model)
    async with Place(tmp_path).app(agent) as app:
        settled = await app.settlement(await app.submit(agent, "go", thread="t"), timeout=20)
        assert settled.failure is not None
        assert settled.failure.kind == "model.context_length"
        assert len(await records(app)) == len(seen) == 1


async def test_a_lost_session_is_asked_again_with_the_whole_history(tmp_path: Path) -> None:
    expired = fail(ModelError("No such response.", dispatched="yes", kind="model.continuation"))
    model, seen = playing(expired, say("here"))
    agent = p.Agent("a", model=model)
    async with Place(tmp_path).app(agent) as app:
        assert await app.output(await app.submit(agent, "go", thread="t"), timeout=20) == "here"
        assert [request.use_continuation for request in seen] == [True, False]
    model, seen = playing(expired)
    with pytest.raises(p.RunFailed) as failed:
        await p.Agent("a", model=model).run("go")
    assert failed.value.kind == "model.continuation"
    assert len(seen) == 2


# -- once ---------------------------------------------------------------------------------------------------------------


async def unknown(app: p.App, agent: p.Agent) -> tuple[p.Receipt, Any]:
    """Submit, and wait until its model call is of unknown outcome."""
    receipt = await app.submit(agent, "go", thread="t")
    await until(lambda: app.effects(status="unknown"), "the unknown")
    return receipt, (await app.effects(status="unknown"))[0]


async def test_a_once_call_that_was_lost_is_not_made_again_by_itself(tmp_path: Path) -> None:
    model, seen = playing(LOST, say("never"))
    agent = p.Agent("a", model=model, policy=ONCE)
    async with Place(tmp_path).app(agent) as app:
        receipt, effect = await unknown(app, agent)
        assert (effect.kind, effect.effect_class, effect.operation) == ("model", "once", "scripted")
        with pytest.raises(TimeoutError):
            await app.settlement(receipt, timeout=0.5)
        assert len(seen) == 1
        # later input passes it
        other, _ = playing(say("other"))
        quick = p.Agent("quick", model=other)
        del quick
        assert await app.verify()


@pytest.mark.parametrize(
    ("verdict", "status", "calls"),
    [
        (p.SafeToRetry(), "completed", 2),
        (p.NotApplied(), "completed", 2),
        (p.Refused("the provider says no"), "failed", 1),
        (p.Applied("what it said"), "completed", 1),
        (p.CancelRun(), "cancelled", 1),
    ],
)
async def test_a_verdict_decides_what_becomes_of_a_lost_call(
    tmp_path: Path, verdict: Any, status: str, calls: int
) -> None:
    model, seen = playing(LOST, say("again"))
    agent = p.Agent("a", model=model, policy=ONCE)
    async with Place(tmp_path).app(agent) as app:
        receipt, effect = await unknown(app, agent)
        await app.reconcile(effect.id, verdict, by="ann", reason="looked it up")
        settled = await app.settlement(receipt, timeout=20)
        assert settled.status == status
        assert len(seen) == calls
        if status == "completed":
            assert await app.output(receipt) == ("again" if calls == 2 else "what it said")
        if status == "failed":
            assert "the provider says no" in settled.failure.message
        found = await records(app)
        assert [kind for kind, _ in found][:3] == ["ModelCallPrepared", "ModelCallUnknown", "ModelCallResolved"]
        assert await app.verify()
        assert await app.obligations() == []


async def test_a_definite_failure_of_a_once_call_may_be_tried_again(tmp_path: Path) -> None:
    model, seen = playing(REFUSED, UNSENT, call("look"), say("here"))

    @p.tool(effect="pure")
    def look() -> int:
        return 1

    agent = p.Agent("a", tools=[look], model=model, policy=ONCE)
    async with Place(tmp_path).app(agent) as app:
        receipt = await app.submit(agent, "go", thread="t")
        assert await app.output(receipt, timeout=20) == "here"
        rows = await app.effects(kind="model") if False else [e for e in await app.effects() if e.kind == "model"]
        assert sorted(row.status for row in rows) == ["confirmed", "confirmed", "refused", "refused"]
        assert await app.verify()
    assert len(seen) == 4


async def test_a_cancelled_once_call_stays_unknown_and_listed(tmp_path: Path) -> None:
    from perdure.providers.scripted import hang

    model, seen = playing(hang())
    agent = p.Agent("a", model=model, policy=ONCE)
    async with Place(tmp_path).app(agent) as app:
        receipt = await app.submit(agent, "go", thread="t")
        await until(lambda: seen, "the call")
        await app.cancel(receipt, by="ann", reason="enough")
        assert (await app.settlement(receipt, timeout=20)).status == "cancelled"
        assert [effect.kind for effect in await app.effects(status="unknown")] == ["model"]
        assert await app.verify()


async def test_a_once_call_in_memory_fails_with_what_is_unknown() -> None:
    model, seen = playing(LOST)
    with pytest.raises(p.RunFailed) as failed:
        await p.Agent("a", model=model, policy=ONCE).run("go")
    assert len(failed.value.unknown) == 1
    assert len(seen) == 1


# -- money --------------------------------------------------------------------------------------------------------------

DEAR = Profile(price=Price(input=1_000_000, output=10_000_000, version="test-1"))


async def test_a_response_is_charged_by_its_real_usage(tmp_path: Path) -> None:
    model, _ = playing(say("here"), profile=DEAR)
    agent = p.Agent("a", model=model)
    result = await agent.run("go")
    assert result.cost == (result.usage.input + 10 * result.usage.output) / 1_000_000
    async with Place(tmp_path).app(agent) as app:
        await app.output(await app.submit(agent, "go", thread="t"), timeout=20)
        [(_, response)] = await records(app)
        assert response["prices"] == "test-1"
        assert response["cost"] == result.cost * 1_000_000


async def test_a_cost_budget_lands_softly(tmp_path: Path) -> None:
    @p.tool(effect="pure")
    def look() -> str:
        return "nothing " * 50

    model = Scripted(lambda r: call("look") if r.tools_allowed else say("enough"), profile=DEAR)
    result = await p.Agent("a", tools=[look], model=model, policy=p.Policy(cost_budget="0.003", max_turns=99)).run("go")
    assert result.output == "enough"
    assert result.exhausted == "cost"
    assert result.cost is not None
    assert result.cost < 0.004


async def test_an_answer_is_bounded_by_what_its_budget_leaves() -> None:
    model, seen = playing(say("here"), profile=DEAR)
    await p.Agent("a", model=model).run("go")
    assert "max_tokens" not in seen[-1].settings
    await p.Agent("a", model=model, policy=p.Policy(token_budget=1_000)).run("go")
    assert 900 < seen[-1].settings["max_tokens"] < 1_000
    await p.Agent("a", model=model, policy=p.Policy(cost_budget="0.01")).run("go")  # 10 micro-USD a token
    assert 900 < seen[-1].settings["max_tokens"] < 1_000
    await p.Agent("a", model=model, policy=p.Policy(token_budget=100_000), settings={"max_tokens": 50}).run("go")
    assert seen[-1].settings["max_tokens"] == 50
    await p.Agent("a", model=model, policy=p.Policy(token_budget=100_000)).run("go")
    assert seen[-1].settings["max_tokens"] == 4_096


async def test_a_lost_call_counts_against_the_budget_until_it_is_known(tmp_path: Path) -> None:
    model, _ = playing(LOST, say("again"), profile=DEAR)
    agent = p.Agent("a", model=model, policy=p.Policy(token_budget=1_000, model_calls="once", on_exhaustion="fail"))
    async with Place(tmp_path).app(agent) as app:
        receipt, effect = await unknown(app, agent)
        await app.reconcile(effect.id, p.SafeToRetry(), by="ann", reason="twice is fine")
        settled = await app.settlement(receipt, timeout=20)
        assert settled.failure is not None
        assert settled.failure.kind == "policy.tokens"  # 4,096 tokens of the lost answer are reserved
    model, _ = playing(LOST, say("again"), profile=DEAR)
    agent = p.Agent("b", model=model, policy=p.Policy(token_budget=1_000, model_calls="once", on_exhaustion="fail"))
    async with Place(tmp_path).app(agent) as app:
        receipt = await app.submit(agent, "go", thread="u")
        await until(lambda: app.effects(run=receipt.run, status="unknown"), "the unknown")
        [lost] = await app.effects(run=receipt.run, status="unknown")
        await app.reconcile(lost.id, p.NotApplied(), by="ann", reason="their log has no such request")
        assert (await app.settlement(receipt, timeout=20)).status == "completed"


def test_a_cost_budget_needs_a_price(tmp_path: Path) -> None:
    agent = p.Agent("a", model=Scripted([say("x")]), policy=p.Policy(cost_budget=1))
    with pytest.raises(p.Invalid, match="nobody knows what model"):
        agent.run_sync("go")


def test_what_a_model_cannot_do_is_said_before_a_run() -> None:
    @p.tool(effect="pure")
    def look() -> int:
        return 1

    mute = Scripted([say("x")], profile=Profile(capabilities=frozenset({"usage"})))
    with pytest.raises(p.Invalid, match="has tools"):
        p.Agent("a", model=mute, tools=[look]).run_sync("go")
    with pytest.raises(p.Invalid, match="reasoning effort"):
        p.Agent("a", model=mute, settings={"reasoning_effort": "high"}).run_sync("go")


async def test_a_warning_comes_once_at_80_percent() -> None:
    @p.tool(effect="pure")
    def look() -> int:
        return 1

    model = Scripted(lambda r: call("look") if r.turn < 10 else say("done"))
    agent = p.Agent("a", tools=[look], model=model, policy=p.Policy(max_turns=10, max_tool_calls=1000))
    told = [event async for event in agent.stream("go") if isinstance(event, events.BudgetWarning)]
    assert [(event.limit, event.used, event.allowed) for event in told] == [("turns", 8, 10)]


async def test_tries_are_told_as_they_fail() -> None:
    model, _ = playing(REFUSED, say("here"))
    told = [
        event async for event in p.Agent("a", model=model).stream("go") if isinstance(event, events.ModelCallFailed)
    ]
    assert [(event.turn, event.attempt, event.dispatched) for event in told] == [(1, 1, "yes")]
    assert told[0].retry_in is not None


# -- rates --------------------------------------------------------------------------------------------------------------


async def test_a_rate_holds_calls_back_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.rules.accounting.RATE_WINDOW_SECONDS", 0.5)
    model, seen = playing(say("here"), profile=Profile(rate=Rate(requests=2)))
    agent = p.Agent("a", model=model)
    async with Place(tmp_path).app(agent) as app:
        began = time.monotonic()
        receipts = [await app.submit(agent, "go") for _ in range(4)]
        for receipt in receipts:
            assert await app.output(receipt, timeout=20) == "here"
        assert time.monotonic() - began >= 0.5  # two at once, then one each quarter of a second
    assert len(seen) == 4


async def test_retry_after_holds_back_every_run_of_the_model(tmp_path: Path) -> None:
    busy = fail(ModelError("Slow down.", dispatched="yes", retryable=True, retry_after=0.5, kind="model.rate_limit"))
    model, seen = playing(busy, say("here"), profile=Profile(shared=True))
    agent = p.Agent("a", model=model)
    async with Place(tmp_path).app(agent) as app:
        first = await app.submit(agent, "go")
        await until(lambda: seen, "the call")
        began = time.monotonic()
        assert await app.output(await app.submit(agent, "go"), timeout=20) == "here"
        assert time.monotonic() - began > 0.3
        assert await app.output(first, timeout=20) == "here"


async def test_a_call_that_would_come_after_the_deadline_is_never_made(tmp_path: Path) -> None:
    model, seen = playing(say("here"), profile=Profile(rate=Rate(requests=1)))
    agent = p.Agent("a", model=model, policy=p.Policy(max_duration="5s"))
    async with Place(tmp_path).app(agent) as app:
        assert await app.output(await app.submit(agent, "go"), timeout=20) == "here"
        settled = await app.settlement(await app.submit(agent, "go", thread="t"), timeout=4)
        assert settled.failure is not None
        assert settled.failure.kind == "model.rate_limit"
        [(kind, data)] = await records(app)
        assert (kind, data["dispatched"]) == ("ModelCallFailed", "no")
        assert await app.verify()
    assert len(seen) == 1


async def test_tokens_that_were_reserved_and_not_used_are_given_back(tmp_path: Path) -> None:
    model, _ = playing(say("here"), profile=Profile(rate=Rate(tokens=10_000), max_output_tokens=8_000))
    agent = p.Agent("a", model=model)
    async with Place(tmp_path).app(agent) as app:
        for _ in range(4):  # 8,000 are reserved each time; a second would have to wait for most of a minute
            assert await app.output(await app.submit(agent, "go"), timeout=10) == "here"


async def test_files_that_a_model_cannot_see_are_never_sent() -> None:
    model, seen = playing(say("here"), profile=Profile(capabilities=frozenset({"usage"})))
    agent = p.Agent("a", input=p.File, model=model)
    with pytest.raises(p.RunFailed, match="images") as failed:
        await agent.run(p.File(data=b"png", media_type="image/png"))
    assert failed.value.kind == "model.setup"
    assert seen == []
