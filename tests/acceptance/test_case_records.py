"""Failure cases about determinism and records: C01, C04, C05, C08."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import decimal
import logging
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

import perdure as p
from perdure.ports.failpoints import Boundary
from perdure.testing.world import World
from support.place import Place, until
from support.puppets import play, puppet

pytestmark = pytest.mark.anyio


# -- C01 --------------------------------------------------------------------------------------------------------------


def gathering(place: Place, chance: random.Random, entries: list[int]) -> Any:
    @p.tool(steps=True)
    async def publish(ctx: p.ToolContext) -> list[str]:
        entries.append(1)

        async def body(name: str) -> str:
            await asyncio.sleep(chance.random() * 0.004)
            return place.world.touch(name, key=ctx.step_key(name))

        names = [f"s{i}" for i in range(6)]
        chance.shuffle(names)  # the order in which the loop starts them
        found = dict(zip(names, await asyncio.gather(*(ctx.step(n, body, n) for n in names)), strict=True))
        return [found[n] for n in sorted(found)]

    return publish


async def test_case_C01_step_identity_does_not_depend_on_scheduling(tmp_path: Path) -> None:  # noqa: N802
    """A fan-out with random delays, its worker dropped again and again: never a mismatch, recorded steps stay."""
    place, chance, entries = Place(tmp_path), random.Random(1), []
    agent = puppet(place, tools=[gathering(place, chance, entries)])
    async with place.client([agent]) as client:
        receipts = [await client.submit(agent, play([["publish", {}]], "done"), thread=f"t{i}") for i in range(24)]

    async def over(app: p.App) -> bool:
        owed = await app.obligations()
        for one in owed:
            if one.blocked_on == "stuck":  # nine workers vanished before its first step: an operator says go on
                await app.redrive(one.submission, by="alice")
        return not owed

    for _ in range(60):
        async with place.app(agent) as app:
            if await over(app):
                break
            await asyncio.sleep(chance.random() * 0.05)  # the moment at which the worker vanishes
    async with place.app(agent) as app:
        await until(lambda: over(app), "every settlement")
    assert len(entries) > 24  # some were entered again
    async with place.client([agent]) as app:
        for receipt in receipts:
            assert await app.output(receipt, timeout=1) == "done"
            recorded = [r for r in place.records(receipt.thread) if type(r).__name__ == "ToolStepSettled"]
            assert sorted(r.step for r in recorded) == [f"s{i}" for i in range(6)]
            [settled] = [r for r in place.records(receipt.thread) if type(r).__name__ == "ToolCallSettled"]
            expected = [msgspec.json.decode(r.result) for r in sorted(recorded, key=lambda r: r.step)]
            assert msgspec.json.decode(settled.result) == expected
            assert all(place.world.has_receipt(one) for one in expected)
        assert await app.verify()


async def test_case_C01_a_name_used_twice_is_refused_with_the_name(tmp_path: Path) -> None:  # noqa: N802
    place = Place(tmp_path)

    @p.tool(steps=True)
    async def twice(ctx: p.ToolContext) -> list[str]:
        async def body() -> str:
            return "x"

        return [await ctx.step("same", body), await ctx.step("same", body)]

    async with place.app(puppet(place, tools=[twice])) as app:
        receipt = await app.submit("puppet", play([["twice", {}]], "done"))
        assert await app.output(receipt, timeout=20) == "done"
        [call] = (await app.inspect(receipt)).turns[0].calls
        assert call.error is not None
        assert "'same'" in call.error.message
        assert "twice" in call.error.message


# -- C04 --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Point:
    x: int
    y: tuple[int, int]


class Row(msgspec.Struct):
    when: dt.datetime
    tags: set[str]


ZONE = dt.timezone(dt.timedelta(hours=5, minutes=30))


def annotated() -> dict[str, Any]:
    def pair() -> tuple[int, str]:
        return (1, "a")

    def money() -> decimal.Decimal:
        return decimal.Decimal("0.10")

    def when() -> dt.datetime:
        return dt.datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=ZONE)

    def some() -> set[int]:
        return {3, 1, 2}

    def point() -> Point:
        return Point(1, (2, 3))

    def row() -> Row:
        return Row(dt.datetime(2026, 1, 2, tzinfo=dt.UTC), {"a", "b"})

    def raw() -> bytes:
        return b"\x00\xff"

    def plain():  # type: ignore[no-untyped-def]
        return {"a": [1, 2.5, None, True]}

    async def late() -> frozenset[str]:
        return frozenset({"x"})

    return {f.__name__: f for f in (pair, money, when, some, point, row, raw, plain, late)}


def unannotated() -> dict[str, Any]:
    return {
        "tuple": lambda: (1, 2),
        "decimal": lambda: {"a": [decimal.Decimal("0.1")]},
        "datetime": lambda: dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "set": lambda: {"deep": {1, 2}},
        "object": object,
        "int keys": lambda: {1: "a"},
        "nan": lambda: float("nan"),
        "big": lambda: 2**70,
    }


async def test_case_C04_a_step_gives_the_decoded_value_also_the_first_time(tmp_path: Path) -> None:  # noqa: N802
    place, seen = Place(tmp_path), []

    @p.tool(steps=True)
    async def collect(ctx: p.ToolContext) -> str:
        values = {name: await ctx.step(name, fn) for name, fn in annotated().items()}
        seen.append(values)
        if len(seen) == 1:
            await place.pass_gate("g")
        return "ok"

    agent = puppet(place, tools=[collect])
    async with place.client([agent]) as client:
        receipt = await client.submit(agent, play([["collect", {}]], "done"))
        async with place.app(agent):
            await until(lambda: place.waiting("g"), "the first entry")
        async with place.app(agent):
            assert await client.output(receipt, timeout=20) == "done"
    first, second = seen
    assert first == second
    assert {n: type(v) for n, v in first.items()} == {n: type(v) for n, v in second.items()}
    assert first["pair"] == (1, "a")
    assert first["money"] == decimal.Decimal("0.10")
    assert first["when"].utcoffset() is not None
    assert first["point"] == Point(1, (2, 3))


@pytest.mark.parametrize("kind", unannotated())
async def test_case_C04_what_does_not_round_trip_is_refused_at_the_step_with_its_path(  # noqa: N802
    tmp_path: Path, kind: str
) -> None:
    place = Place(tmp_path)

    @p.tool(steps=True)
    async def collect(ctx: p.ToolContext) -> str:
        await ctx.step("odd", unannotated()[kind])
        return "never"

    async with place.app(puppet(place, tools=[collect])) as app:
        receipt = await app.submit("puppet", play([["collect", {}]], "done"))
        assert await app.output(receipt, timeout=20) == "done"
        [call] = (await app.inspect(receipt)).turns[0].calls
        assert call.status == "refused"
        assert call.error is not None
        assert "'odd'" in call.error.message
        if kind in ("decimal", "set"):
            assert "$." in call.error.message
        assert call.steps == ()


# -- C05 --------------------------------------------------------------------------------------------------------------


def stepping(world: World) -> Any:
    @p.tool(steps=True)
    async def five(ctx: p.ToolContext) -> str:
        async def body(name: str) -> str:
            return world.touch(name, key=ctx.step_key(name))

        for index in range(5):
            await ctx.step(f"s{index}", body, f"s{index}", effect="once" if index == 2 else None)
        return world.touch("end", key=ctx.key)

    return five


class Fault:
    """Fails the nth durable write once, as a store that cannot serve for a moment."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self.hit: tuple[Boundary, str] | None = None

    def __call__(self, boundary: Boundary, phase: str) -> None:
        if boundary in (Boundary.RENEW, Boundary.DISPATCH, Boundary.MODEL_CALL, Boundary.ADMIT) or phase == "after":
            return
        self.left -= 1
        if self.left == 0:
            self.hit = (boundary, phase)
            raise p.Unavailable("the disk is away for a moment")


async def five_steps(place: Place, nth: int) -> tuple[set[tuple[Any, ...]], Any]:
    fault = Fault(nth)
    agent = puppet(place, tools=[stepping(place.world)])
    async with place.app(agent, lease="500ms") as app:
        app.store.failpoint = fault
        receipt = await app.submit(agent, play([["five", {}]], "done"), thread="t", key="k")

        async def over() -> bool:
            for effect in await app.effects(status="unknown"):
                touched = [e for e in place.world.entries() if e.key == effect.key]
                with contextlib.suppress(p.Conflict):
                    await app.reconcile(
                        effect, p.Applied(touched[0].receipt) if touched else p.NotApplied(), by="alice"
                    )
            return not await app.obligations()

        await until(over, f"the end in spite of a fault at {fault.hit}")
        assert (await app.settlement(receipt)).status == "completed"
        assert await app.verify()
    names = {(e.name, e.key) for e in place.world.entries()}
    records = place.records("t")
    steps = {r.step for r in records if type(r).__name__ in ("ToolStepSettled",)}
    assert steps == {f"s{i}" for i in range(5)}
    assert place.world.count("s2") == 1
    return names, fault.hit


async def test_case_C05_a_transient_store_fault_uses_up_no_identity(  # noqa: N802
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    reference, hit = await five_steps(Place.make(tmp_path / "reference"), 10**6)
    assert hit is None
    found = await asyncio.gather(*(five_steps(Place.make(tmp_path / f"fault-{n}"), n) for n in range(1, 33)))
    hits = {hit for _, hit in found if hit is not None}
    assert {boundary for boundary, _ in hits} >= {
        Boundary.CLAIM, Boundary.INPUT, Boundary.RESPONSE, Boundary.STEP_OUTCOME, Boundary.STEP_STARTED, Boundary.SETTLE,
    }  # fmt: skip
    for names, hit in found:
        assert names == reference, hit


# -- C08 --------------------------------------------------------------------------------------------------------------


def odd_results() -> dict[str, Any]:
    return {
        "object": object(),
        "17 MB": "x" * 17_000_000,
        "surrogate": "\ud800",
        "nan": [float("nan")],
        "big": {"n": 2**64},
        "deep": _deep(80),
        "set": {"a": {1}},
        "bytes keys": {b"a": 1},
    }


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("kind", odd_results())
async def test_case_C08_a_result_that_cannot_be_stored_fails_its_call_once(tmp_path: Path, kind: str) -> None:  # noqa: N802
    place = Place(tmp_path)

    @p.tool
    async def odd(ctx: p.ToolContext) -> Any:
        place.world.touch("odd", key=ctx.key)
        return odd_results()[kind]

    async with place.app(puppet(place, tools=[odd])) as app:
        receipt = await app.submit("puppet", play([["odd", {}]], "done"), thread="t")
        assert await app.output(receipt, timeout=20) == "done"
        [call] = (await app.inspect(receipt)).turns[0].calls
        assert call.error is not None
        assert call.error.kind == "result"
        assert "took effect" in call.error.message
        assert "'odd'" in call.error.message
        assert place.world.count() == 1
        assert place.rows("SELECT attempts FROM submission") == [(1,)]
        assert await app.verify()


async def test_case_C08_an_input_that_cannot_be_stored_is_refused_and_nothing_is_written(tmp_path: Path) -> None:  # noqa: N802
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        before = place.dump()
        for kind, value in odd_results().items():
            with pytest.raises(p.Invalid) as refused:
                await app.submit("puppet", {"turns": [value]}, thread="t")
            assert "puppet" in str(refused.value), kind
        assert place.dump() == before


async def test_case_C08_instructions_that_raise_fail_the_run_once(tmp_path: Path) -> None:  # noqa: N802
    place, asked = Place(tmp_path), []

    def instructions(input: str) -> str:
        asked.append(input)
        raise LookupError("no such template")

    agent = p.Agent("broken", instructions=instructions, model=puppet(place).model)
    async with place.app(agent) as app:
        receipt = await app.submit(agent, "go")
        with pytest.raises(p.RunFailed, match="no such template"):
            await app.output(receipt, timeout=20)
        assert asked == ["go"]
