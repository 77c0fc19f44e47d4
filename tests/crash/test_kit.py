"""The kit itself: it counts what it passes, finds what is broken, and says so of a scenario that never ends."""

from __future__ import annotations

import asyncio

import pytest

from crash.scenarios import named, play_one, toucher
from perdure import Agent, Applied, Invalid
from perdure.providers.scripted import Scripted, call, say
from perdure.testing import crash
from perdure.testing.clock import ManualClock, SeededIds, ShiftedClock
from perdure.testing.crash import Expected, Scenario, Stage, kill, sweep


def test_the_same_scenario_passes_the_same_boundaries_every_time() -> None:
    first, second = (sweep(named("two parallel once tools")) for _ in range(2))
    assert (first.boundaries, first.runs, first.reached) == (second.boundaries, second.runs, second.reached)


def test_side_by_side_is_the_same_sweep() -> None:
    alone, together = sweep(named("plain answer")), sweep(named("plain answer"), processes=3)
    assert (alone.boundaries, alone.runs, alone.reached) == (together.boundaries, together.runs, together.reached)


async def open_and_close(stage: Stage) -> None:
    """A worker that finds nothing to do."""
    async with stage.open([Agent("idle", model=Scripted([]))]) as app:
        await stage.rest(app)


def test_pairs_let_the_second_incarnation_die_at_each_of_its_boundaries() -> None:
    report = sweep(Scenario("open and close", open_and_close), pairs=True, processes=2)
    assert report, str(report)
    assert report.reached == {"renew:before", "renew:inside", "renew:after"}
    assert (report.boundaries, report.pairs, report.runs) == (3, 9, 12)


async def lie(stage: Stage) -> None:
    """A person who says that it happened without looking."""
    agent = Agent("once", tools=[toucher(stage.world, "pay")], model=Scripted([call("pay", order="o1"), say("paid")]))
    await play_one(stage, agent, judge=lambda stage, effect: Applied("witness_invented"))


def test_a_result_that_the_world_never_gave_is_found() -> None:
    scenario = Scenario("lie", lie, Expected(effects={"pay": "once"}))
    report = sweep(scenario)
    assert not report
    assert any("which the world never gave" in str(violation) for violation in report.violations)


def test_what_a_scenario_does_not_expect_is_found() -> None:
    scenario = Scenario("unexpected", named("once tool").play)
    assert any("does not expect it" in str(violation) for violation in sweep(scenario).violations)


async def never(stage: Stage) -> None:
    """Nobody approves."""
    model = Scripted([call("pay", order="o1"), say("paid")])
    agent = Agent("asks", tools=[toucher(stage.world, "pay", approval=True)], model=model)
    await play_one(stage, agent, decide=None)


def test_work_that_waits_for_ever_is_found_without_waiting() -> None:
    report = sweep(Scenario("never", never), stop=lambda violation: True)
    assert "Stuck" in str(report)
    assert "has 0 settlements" in str(report)


def test_a_folder_of_a_broken_run_is_kept(tmp_path: object) -> None:
    report = sweep(Scenario("never", never), stop=lambda violation: True, folder=str(tmp_path))
    assert str(tmp_path) in str(report)


def test_kill_needs_a_scenario_that_another_process_can_find() -> None:
    with pytest.raises(Invalid, match="no scenario"):
        kill(Scenario("nowhere", never))


def test_kill_says_where_it_struck() -> None:
    assert kill(named("once tool"), "settle:inside").point == "settle:inside"
    assert kill(named("plain answer"), "park:inside").point != "park:inside"  # never passed: somewhere in the middle


def test_sweep_and_kill_are_refused_inside_a_loop() -> None:
    async def inside() -> None:
        for function in (sweep, kill):
            with pytest.raises(Invalid, match="loops of their own"):
                function(named("plain answer"))

    asyncio.run(inside())


def test_clocks_stand_or_are_ahead() -> None:
    clock = ManualClock(5)
    assert (clock.now(), clock.now()) == (5, 5)
    clock.advance("2s")
    assert clock.now() == 2_000_005
    clock.set(1)
    assert clock.now() == 1
    ahead = ShiftedClock(100)
    assert ahead.now() - ShiftedClock().now() > 99_000_000
    ahead.advance(1)
    assert ahead.now() - ShiftedClock().now() > 100_000_000


def test_seeded_ids_repeat_and_differ_between_seeds() -> None:
    first, again, other = SeededIds(1), SeededIds(1), SeededIds(2)
    drawn = [first.fresh("w") for _ in range(3)]
    assert drawn == [again.fresh("w") for _ in range(3)]
    assert len({*drawn, other.fresh("w")}) == 4
    assert all(len(id) == len("w_") + 24 for id in drawn)


def test_find_looks_into_collections() -> None:
    assert crash.find("crash.scenarios", "plain answer") is named("plain answer")
