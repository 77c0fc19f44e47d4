"""Failure cases about admission and identity: A01 to A08 (A05 and A07 stand in ``test_engine_workers``)."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.ids import check_id
from perdure.providers.scripted import Scripted, call, say
from support.place import TESTS, Place, until, workers
from support.puppets import once, play, puppet, trivial

pytestmark = pytest.mark.anyio

SUBMIT = """
import asyncio, os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from support.place import Place
from support.puppets import once, play, puppet

async def main():
    place = Place(Path(sys.argv[2]))
    async with place.client([puppet(place)]) as app:
        def die(boundary, phase):
            if f"{boundary}:{phase}" == sys.argv[3]:
                os.kill(os.getpid(), signal.SIGKILL)
        app.store.failpoint = die
        receipt = await app.submit("puppet", play([once()], "done"), key="k")
        print(receipt.submission, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def submit_and_die(place: Place, moment: str) -> str:
    """Submit in a process that is killed at a moment, or right after its receipt; the receipt's submission."""
    done = subprocess.run(
        [sys.executable, "-c", SUBMIT, str(TESTS), str(place.folder), moment],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("moment", ["admit:before", "admit:inside", "admit:after", "returned"])
async def test_case_A01_a_receipt_means_that_recovery_finds_the_run(tmp_path: Path, moment: str) -> None:  # noqa: N802
    place = Place(tmp_path)
    receipt = submit_and_die(place, moment)
    assert bool(receipt) == (moment == "returned")
    async with place.app(puppet(place)) as app:
        owed = await app.runs()
        assert len(owed) == (0 if moment in ("admit:before", "admit:inside") else 1)
        if receipt:
            assert [run.submission for run in owed] == [receipt]
        # whoever got no receipt asks again with the key: the same work, or it is created now
        again = await app.submit("puppet", play([once()], "done"), key="k")
        assert receipt in ("", again.submission)
        assert await app.output(again, timeout=20) == "done"
        assert place.world.count() == 1
        assert len(await app.runs()) == 1


async def test_case_A01_resuming_what_is_not_there_is_a_typed_error(tmp_path: Path) -> None:  # noqa: N802
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        for operation in (
            lambda: app.settlement("sub_missing", timeout=1),
            lambda: app.output("run_missing", timeout=1),
            lambda: app.redrive("sub_missing"),
            lambda: app.explain("sub_missing"),
            lambda: app.inspect("sub_missing"),
            lambda: app.cancel("sub_missing"),
            lambda: app.recover(thread="missing"),
            lambda: app.archive("missing"),
            lambda: app.verify("missing"),
        ):
            with pytest.raises(p.Invalid, match=r"no (submission|thread)"):
                await operation()
        with pytest.raises(p.Invalid, match="no thread"):
            async for _ in app.observe("missing"):
                pass


BAD_IDS = ["", " ", "\t", "x" * 257, "a\0b", "a\nb", "\ud800", "e\u0301", "\u200b", "\u2028"]
GOOD_IDS = ["a", "customer-42", "x" * 256, "Größe", "日本語", "a/b:c", "'; DROP TABLE thread; --", "🦊", "a b"]


@pytest.mark.parametrize("bad", BAD_IDS, ids=ascii)
async def test_case_A02_illegal_ids_are_refused_at_every_entry(tmp_path: Path, bad: str) -> None:  # noqa: N802
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        before = place.dump()
        for options in ({"thread": bad}, {"key": bad}, {"principal": bad}, {"thread": bad, "key": "k"}):
            with pytest.raises(p.Invalid) as refused:
                await app.submit("puppet", play("done"), **options)
            assert "256" in str(refused.value)
        with pytest.raises(p.Invalid):
            await app.submit_json("puppet", b'{"turns": ["done"]}', thread=bad)
        with pytest.raises(p.Invalid):
            await app.run("puppet", play("done"), thread=bad)
        with pytest.raises(p.Invalid):
            await app.settlement(bad, timeout=1)
        with pytest.raises(p.Invalid):
            p.open(place.db, principal=bad)
        with pytest.raises(p.Invalid):
            p.Agent(bad)
        assert place.dump() == before


@pytest.mark.parametrize("good", GOOD_IDS)
async def test_case_A02_legal_ids_keep_their_identity(tmp_path: Path, good: str) -> None:  # noqa: N802
    place = Place(tmp_path)
    assert check_id(good, "id") == good
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play("done"), thread=good, key=good, principal=good)
        assert receipt.thread == good
        assert await app.output(receipt, timeout=20) == "done"
        assert [t.thread for t in await app.threads()] == [good]
        assert (await app.submit("puppet", play("done"), thread=good, key=good, principal=good)) == receipt
        assert await app.verify()


async def test_case_A02_recovery_mints_no_new_identity(tmp_path: Path) -> None:  # noqa: N802
    """The zombie of the report: a row that cannot be loaded is reported as blocked, and stays one row."""
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as client:
        await client.submit("puppet", play("done"), thread="t")
    place.change("UPDATE submission SET id = ''")
    async with place.app(puppet(place)) as app:
        for _ in range(3):
            await app.recover()
        assert place.rows("SELECT id FROM submission") == [("",)]
        assert len(await app.threads()) == 1


async def submit_at_once(place: Place, count: int) -> set[str]:
    async with place.client([puppet(place)]) as app:
        receipts = await asyncio.gather(
            *(app.submit("puppet", play([once(gate="g")], "done"), key="same") for _ in range(count))
        )
    return {receipt.submission for receipt in receipts}


async def test_case_A03_one_key_many_callers_one_execution(tmp_path: Path) -> None:  # noqa: N802
    """Ten tasks in a process, ten processes beside it, while the run is running: one execution, one result for all."""
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        first = await submit_at_once(place, 10)
        assert len(first) == 1
        await until(lambda: place.waiting("g"), "the body")
        program = SUBMIT.replace("play([once()]", 'play([once(gate="g")]').replace('"k"', '"same"')
        racers = await asyncio.gather(
            *(
                asyncio.create_subprocess_exec(
                    sys.executable, "-c", program, str(TESTS), str(place.folder), "never", stdout=subprocess.PIPE
                )
                for _ in range(4)
            )
        )
        seen = {(await racer.communicate())[0].decode().strip() for racer in racers}
        assert seen == first
        place.open_gate("g")
        outputs = await asyncio.gather(*(app.output(id, timeout=20) for id in [*first] * 10))
        assert set(outputs) == {"done"}
        assert place.world.count() == 1
        # and after it settled, for ever
        assert await submit_at_once(place, 3) == first
        assert place.world.count() == 1


async def test_case_A03_with_several_workers(tmp_path: Path) -> None:  # noqa: N802
    place = Place(tmp_path)
    async with place.client([trivial(place)]) as app:
        with workers(place, 3, "trivial"):
            receipts = await asyncio.gather(*(app.submit("trivial", "go", key="same") for _ in range(20)))
            assert len({r.submission for r in receipts}) == 1
            await asyncio.gather(*(app.settlement(r, timeout=20) for r in receipts))
    assert place.world.count() == 1


async def test_case_A04_a_key_used_for_other_work_is_a_conflict_and_changes_nothing(tmp_path: Path) -> None:  # noqa: N802
    place = Place(tmp_path)
    one, other = puppet(place), puppet(place, name="other")
    async with place.app(one, other) as app:
        receipt = await app.submit(one, play([once(gate="g")], "done"), thread="t", key="k")
        await until(lambda: place.waiting("g"), "the body")
        before, log = place.rows("SELECT * FROM submission"), place.log("t")
        with pytest.raises(p.Conflict) as refused:
            await app.submit(other, play([once(gate="g")], "done"), thread="t", key="k")
        assert "'puppet'" in str(refused.value)
        assert "'other'" in str(refused.value)
        with pytest.raises(p.Conflict) as refused:
            await app.submit(one, play("else"), thread="t", key="k")
        digests = [w for w in str(refused.value).replace(";", " ").replace(".", " ").split() if len(w) == 12]
        assert len(set(digests)) == 2
        assert place.rows("SELECT * FROM submission") == before
        assert place.log("t") == log
        assert await app.submit(one, play([once(gate="g")], "done"), thread="t", key="k") == receipt
        place.open_gate("g")
        assert await app.output(receipt, timeout=20) == "done"
        # the same key on another thread, or by another principal, is other work
        elsewhere = await app.submit(one, play("else"), thread="u", key="k")
        another = await app.submit(one, play("else"), thread="t", key="k", principal="bob")
        assert len({receipt.submission, elsewhere.submission, another.submission}) == 3


async def test_case_A06_one_thread_is_a_queue_with_one_owner(tmp_path: Path) -> None:  # noqa: N802
    """Two processes' worth of workers, thirty inputs at once on one thread: order is admission order, none is lost."""
    place = Place(tmp_path)
    with workers(place, 2):
        async with place.client([puppet(place)]) as app:
            receipts = await asyncio.gather(
                *(app.submit("puppet", play([once(f"n{i}")], f"answer {i}"), thread="chat") for i in range(30))
            )
            outputs = await asyncio.gather(*(app.output(r, timeout=30) for r in receipts))
            assert outputs == [f"answer {i}" for i in range(30)]
            by_position = [r.submission for r in sorted(receipts, key=lambda r: r.position)]
            records = place.records("chat")
            inputs = [r.submission for r in records if type(r).__name__ == "UserInputRecorded"]
            ends = [r.submission for r in records if type(r).__name__ == "SubmissionSettled"]
            assert inputs == ends == by_position
            assert [r.position for r in sorted(receipts, key=lambda r: r.position)] == list(range(1, 31))
            order = {r.submission: f"n{i}" for i, r in enumerate(receipts)}
            assert [e.name for e in place.world.entries()] == [order[s] for s in by_position]
            # nobody's history was overwritten: the last run saw every message before it
            seen: list[int] = []
            async with place.app(puppet(place, watch=lambda r: seen.append(len(r.messages)))) as working:
                await working.output(await working.submit("puppet", play("last"), thread="chat"), timeout=20)
            if seen:
                assert seen[0] == 1 + 30 * 4 + 1
            assert await app.verify()


class Odd:
    """A clock as bad as the report's: it stands still, shows whole seconds only, or is set back an hour at every tick."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.at = 1_800_000_000_000_000

    def now(self) -> int:
        return time.time_ns() // 1_000_000_000 * 1_000_000 if self.way == "whole seconds" else self.at

    def tick(self) -> None:
        if self.way == "set back":
            self.at -= 3_600_000_000


@pytest.mark.parametrize("way", ["frozen", "set back", "whole seconds"])
async def test_case_A08_no_clock_makes_a_rightful_owner_stale(tmp_path: Path, way: str) -> None:  # noqa: N802
    place = Place(tmp_path)
    clock = Odd(way)

    @p.tool
    async def tick(ctx: p.ToolContext) -> str:
        clock.tick()
        return place.world.touch("tick", key=ctx.key)

    script = [*(call("tick") for _ in range(6)), say("done")]
    agent = p.Agent("ticking", tools=[tick], model=Scripted(script))
    async with p.open(place.db, agents=[agent], clock=clock, lease="10s") as app:
        receipts = [await app.submit(agent, "go", thread=f"t{i % 3}") for i in range(9)]
        outputs = [await app.output(r, timeout=30) for r in receipts]
        assert outputs == ["done"] * 9
        assert place.world.count() == 54
        assert len({e.key for e in place.world.entries()}) == 54
        assert await app.verify()
    for thread in ("t0", "t1", "t2"):
        bodies = [json.loads(body) for body in place.log(thread)]
        expected: Any = 1
        for body in bodies:
            assert body["first"] == expected
            expected += len(body["records"])
