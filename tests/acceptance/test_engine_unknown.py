"""A ``once`` effect whose outcome nobody recorded: dispatched once, shown as unknown, passed by, led on by a verdict.

Workers are real processes and die by SIGKILL; what happened is asked of the world, never of our records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.rules import plans
from perdure.testing.world import check_laws
from support.place import LEASE, Place, until
from support.puppets import once, play, puppet

pytestmark = pytest.mark.anyio

VERDICTS = {
    "applied": p.Applied,
    "refused": lambda receipt: p.Refused("the bank said no"),
    "not_applied": lambda receipt: p.NotApplied("no such booking"),
    "safe_to_retry": lambda receipt: p.SafeToRetry("harmless"),
    "cancel_run": lambda receipt: p.CancelRun("give up"),
}


async def kill_inside(place: Place, input: dict[str, Any], *gates: str, thread: str = "t") -> p.Receipt:
    """Submit, wait until bodies stand before their gates in a real worker, and kill it there."""
    with place.worker() as worker:
        async with place.client([puppet(place)]) as app:
            receipt = await app.submit("puppet", input, thread=thread)
        await until(lambda: all(place.waiting(gate) for gate in gates), "every body at its gate")
        worker.kill()
    for gate in gates:
        place.open_gate(gate)
    return receipt


async def unknowns(app: p.App) -> list[p.Effect]:
    return await app.effects(status="unknown")


async def parked(app: p.App) -> list[Any]:
    return [owed for owed in await app.obligations() if owed.blocked_on == "unknown"]


async def raised(place: Place, input: dict[str, Any], thread: str = "t") -> p.Receipt:
    """The same unknown by a TimeoutError after dispatch, in a worker that lives."""
    with place.worker():
        async with place.client([puppet(place)]) as app:
            receipt = await app.submit("puppet", input, thread=thread)
            await until(lambda: unknowns(app), "the unknown")
    return receipt


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def origins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Place, p.Receipt]]:
    """Two stores, each with one unknown, made once and copied for every verdict."""
    made = {}
    for way in ("killed", "timeout"):
        place = Place(tmp_path_factory.mktemp(way))
        if way == "killed":
            receipt = await kill_inside(place, play([once(gate="g")], "done"), "g")
        else:
            # the body is told apart by the gate: it raises while the gate file is missing
            receipt = await raised(place, play([once(do="timeout")], "done"))
        made[way] = (place, receipt)
    return made


@pytest.mark.parametrize("verdict", VERDICTS)
@pytest.mark.parametrize("way", ["killed", "timeout"])
async def test_each_verdict_leads_where_it_says(
    origins: dict[str, tuple[Place, p.Receipt]], way: str, verdict: str, tmp_path: Path
) -> None:
    origin, receipt = origins[way]
    place = origin.copy(tmp_path / "copy")
    assert place.world.count("pay") == 1
    [entry] = place.world.entries()
    # Two processes: a worker, and this one, which only administers.
    with place.worker():
        async with place.client([puppet(place)]) as app:
            [effect] = await until(lambda: unknowns(app), "the unknown")
            assert effect.operation == "once"
            assert effect.key == entry.key
            assert effect.reason
            assert effect.resolve
            assert effect.id in effect.resolve
            assert "reconcile" in effect.resolve
            [owed] = await until(lambda: parked(app), "the end of the attempt")
            assert owed.command == effect.resolve

            # later input on the same thread runs meanwhile
            later = await app.submit("puppet", play([once(name="later")], "later"), thread="t")
            assert (await app.settlement(later, timeout=20)).status == "completed"
            assert [e.id for e in await unknowns(app)] == [effect.id]
            assert place.world.count("pay") == 1

            await app.reconcile(effect, VERDICTS[verdict](entry.receipt), by="alice", reason="I looked", evidence=[1])
            again = way == "timeout" and verdict in ("not_applied", "safe_to_retry")
            if again:  # the new try raises TimeoutError as the first did: unknown again, a try of its own, same key
                await until(lambda: place.world.count("pay") == 2, "the new try")
                [second] = await until(lambda: unknowns(app), "the second unknown")
                assert second.id != effect.id
                assert second.key == effect.key
                assert second.tries == 2
                await app.reconcile(second, p.Applied(place.world.entries()[-1].receipt), by="alice")
            settled = await app.settlement(receipt, timeout=20)

            expected = "cancelled" if verdict == "cancel_run" else "completed"
            assert settled.status == expected
            if expected == "completed":
                assert await app.output(receipt) == "done"
            count = {"not_applied": 2, "safe_to_retry": 2}.get(verdict, 1)
            assert place.world.count("pay") == count
            assert {e.key for e in place.world.entries() if e.name == "pay"} == {entry.key}
            assert await unknowns(app) == []

            first = await app.effect(effect.id)
            assert (first.verdict, first.by, first.evidence) == (verdict, "alice", [1])
            if verdict == "applied":
                assert first.status == "confirmed"
                assert first.result == entry.receipt
            if verdict == "refused":
                assert first.status == "refused"
            await laws(place, app)


async def laws(place: Place, app: p.App) -> None:
    """The three laws, judged by the world; and the log agrees with itself."""
    effects = await app.effects()
    confirmed = [(e.id, e.key, e.result) for e in effects if e.status == "confirmed"]
    permitted: dict[str, int | None] = {}
    for effect in effects:
        freed = effect.verdict in ("not_applied", "safe_to_retry")
        permitted[effect.key] = (permitted.get(effect.key) or 1) + freed
    owed = dict.fromkeys((run.submission for run in await app.runs()), 0)
    for body in place.rows("SELECT id FROM thread"):
        for record in place.records(body[0]):
            if type(record).__name__ == "SubmissionSettled":
                owed[record.submission] += 1
    assert check_laws(place.world, confirmed, permitted, owed) == []
    report = await app.verify()
    assert report, report


async def test_of_two_parallel_calls_only_the_killed_one_is_unknown(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with place.worker() as worker:
        async with place.client([puppet(place)]) as app:
            receipt = await app.submit("puppet", play([once("quick"), once("slow", gate="g")], "done"), thread="t")
            await until(lambda: place.waiting("g"), "the slow body")
            await until(lambda: "ToolCallSettled" in place.kinds("t"), "the quick outcome")
            worker.kill()
            with place.worker():
                [effect] = await until(lambda: unknowns(app), "the unknown")
                assert effect.arguments["name"] == "slow"
                statuses = {e.arguments["name"]: e.status for e in await app.effects()}
                assert statuses == {"quick": "confirmed", "slow": "unknown"}
                slow = next(e for e in place.world.entries() if e.name == "slow")
                await app.reconcile(effect, p.Applied(slow.receipt), by="alice")
                assert await app.output(receipt, timeout=20) == "done"
                assert place.world.count("quick") == place.world.count("slow") == 1
                await laws(place, app)


async def recovered(place: Place) -> int:
    """Kill inside a ``once`` body, recover in this process; how often it was dispatched."""
    receipt = await kill_inside(place, play([once(gate="g")], "done"), "g")
    async with place.app(puppet(place)) as app:

        async def over() -> bool:
            return bool(await unknowns(app)) or (await app.inspect(receipt)).state == "settled"

        await until(over, "the end of recovery")
        effects = await app.effects()
        [violation] = check_laws(place.world, [], {e.key: 1 for e in effects}, {}) or [""]
        assert not violation, violation
    return place.world.count("pay")


async def test_a_killed_once_call_is_never_run_again(tmp_path: Path) -> None:
    assert await recovered(Place(tmp_path)) == 1


async def test_a_killed_once_call_is_never_run_again_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protection off: recovery takes every started call for an idempotent one."""
    monkeypatch.setattr(plans, "_lost", lambda call, prepared, contract: plans.Rerun(call.id, "idempotent"))
    with pytest.raises(AssertionError, match="took place 2 times"):
        await recovered(Place(tmp_path))


@pytest.mark.parametrize(
    ("do", "tool", "status"),
    [
        ("timeout", "once", "unknown"),
        ("connection", "once", "unknown"),
        ("unknown", "once", "unknown"),
        ("refuse", "once", "refused"),
        ("raise", "once", "refused"),
        ("raise", "strict", "unknown"),
        ("refuse", "strict", "refused"),
    ],
)
async def test_what_an_exception_means(tmp_path: Path, do: str, tool: str, status: str) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play([once(do=do, tool=tool)], "done"))

        async def effect() -> Any:
            return [e for e in await app.effects() if e.status != "started"]

        [found] = await until(effect, "an outcome")
        assert found.status == status
        if status == "refused":
            assert await app.output(receipt, timeout=20) == "done"
            assert found.error is not None
    assert place.world.count("pay") == 1


async def test_a_verdict_is_refused_while_the_effect_is_in_flight_or_has_an_outcome(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app, place.client([puppet(place)]) as client:
        receipt = await app.submit("puppet", play([once(gate="g")], "done"))
        await until(lambda: place.waiting("g"), "the body")
        [effect] = await client.effects()
        with pytest.raises(p.Conflict, match="in flight"):
            await client.reconcile(effect, p.Applied("x"), by="alice")
        place.open_gate("g")
        await app.settlement(receipt, timeout=20)
        with pytest.raises(p.Conflict, match="confirmed"):
            await client.reconcile(effect, p.NotApplied(), by="alice")


async def test_a_verdict_twice_is_one_and_another_is_a_conflict(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as client:
        async with place.app(puppet(place)) as app:
            await app.submit("puppet", play([once(do="unknown")], "done"))
            [effect] = await until(lambda: unknowns(app), "the unknown")
        await client.reconcile(effect, p.Applied("r"), by="alice")
        await client.reconcile(effect, p.Applied("r"), by="bob")
        with pytest.raises(p.Conflict, match="stands"):
            await client.reconcile(effect, p.NotApplied(), by="bob")
        assert len(place.rows("SELECT 1 FROM intent")) == 1


async def test_an_unknown_stays_unknown_however_much_time_passes(tmp_path: Path) -> None:
    """K02's rule: no sweep turns doubt into failure. A clock a year ahead changes nothing but the deadline."""
    place = Place(tmp_path)
    agent = puppet(place, policy=p.Policy(max_duration="1000d"))

    class Ahead:
        def __init__(self) -> None:
            self.by = 0

        def now(self) -> int:
            import time

            return time.time_ns() // 1000 + self.by

    clock = Ahead()
    async with p.open(place.db, agents=[agent], lease=LEASE, clock=clock) as app:
        await app.submit(agent, play([once(do="unknown")], "done"))
        [effect] = await until(lambda: unknowns(app), "the unknown")
        clock.by = 365 * 24 * 3600 * 1_000_000
        await app.recover()
        assert [e.id for e in await unknowns(app)] == [effect.id]
        assert place.world.count("pay") == 1
