"""Several worker processes on one SQLite file: nothing is lost or run twice; the slow and the bad harm nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.engine import recovery
from perdure.testing.world import repeated
from support.place import Place, until, workers
from support.puppets import once, play, puppet, trivial

pytestmark = pytest.mark.anyio


async def run_many(place: Place, processes: int, count: int, **options: Any) -> None:
    """Admit ``count`` submissions, let ``processes`` workers settle them, and judge by the world."""
    async with place.client([trivial(place)]) as app:
        receipts = await asyncio.gather(*(app.submit("trivial", "go", key=f"k{i}") for i in range(count)))
        with workers(place, processes, "trivial", **options) as running:
            settlements = await asyncio.gather(*(app.settlement(r, timeout=90) for r in receipts))
            errors = [worker.errors for worker in running]
        assert {s.status for s in settlements} == {"completed"}
        assert len({s.submission for s in settlements}) == count
        assert Counter(e.name for e in place.world.entries()) == Counter(r.run for r in receipts)
        effects = await app.effects()
        assert not repeated(place.world.entries(), dict.fromkeys({e.key for e in place.world.entries()}, 1))
        assert len(effects) == min(count, 1000)
        assert errors == [""] * processes, errors
        assert not any("lock" in text.lower() for text in errors)
        [(batches,)] = place.rows("SELECT count(*) FROM batch WHERE instr(body, 'SubmissionSettled') > 0")
        assert batches == count


async def test_case_A05_a_thousand_runs_on_four_workers_execute_a_thousand_times(tmp_path: Path) -> None:  # noqa: N802
    await run_many(Place(tmp_path), 4, 1000)


@pytest.mark.parametrize("processes", [2, 8])
async def test_case_A05_with_other_numbers_of_workers(tmp_path: Path, processes: int) -> None:  # noqa: N802
    await run_many(Place(tmp_path), processes, 200, workers=4)


async def test_case_A07_a_stopped_worker_is_fenced(tmp_path: Path) -> None:  # noqa: N802
    """SIGSTOP inside a tool body, takeover, SIGCONT: one writer per epoch, and the late one writes nothing."""
    place = Place(tmp_path)
    with place.worker() as slow:
        async with place.client([puppet(place)]) as app:
            receipt = await app.submit("puppet", play([["keyed", {"gate": "g"}]], "done"), thread="t")
            await until(lambda: place.waiting("g"), "the body")
            slow.stop()
            with place.worker():
                await until(lambda: place.world.count("keyed") == 2, "the second worker's try")
                place.open_gate("g")
                assert await app.output(receipt, timeout=20) == "done"
            before, rows = place.log("t"), place.dump()["submission"]
            slow.go_on()
            # it goes on, learns that its fence is gone, and takes new work like any other: nobody else is there
            own = await app.submit("puppet", play([once("own")], "done"), thread="u")
            await app.settlement(own, timeout=20)
            assert [entry.process for entry in place.world.entries() if entry.name == "own"] == [slow.pid]
            assert place.log("t") == before
            assert [row for row in place.dump()["submission"] if row in rows] == rows
            epochs = [epoch for (epoch,) in place.rows("SELECT epoch FROM batch WHERE thread = 1 ORDER BY first")]
            assert epochs == sorted(epochs)
            assert len(set(epochs)) == 2
            assert place.world.count("keyed") == 2
            assert len({e.key for e in place.world.entries()}) == 2
            assert await app.verify()


async def test_case_A07_calls_in_flight_end_without_a_word_when_one_finds_the_thread_lost(tmp_path: Path) -> None:  # noqa: N802
    """Three bodies run when the first of them finds the fence gone: the others are stopped, and that is no error."""
    place, names = Place(tmp_path), ["a", "b", "c"]
    with place.worker() as slow:
        async with place.client([puppet(place)]) as app:
            receipt = await app.submit("puppet", play([["keyed", {"name": n, "gate": n}] for n in names], "done"))
            await until(lambda: all(place.waiting(n) for n in names), "the bodies")
            slow.stop()
            with place.worker():
                await until(lambda: place.world.count() == 6, "the second worker's tries")
                slow.go_on()
                place.open_gate("a")

                async def back() -> bool:
                    await app.settlement(await app.submit("puppet", play([once("own")], "done")), timeout=20)
                    return any(e.name == "own" and e.process == slow.pid for e in place.world.entries())

                await until(back, "work of the slow one's own")
                place.open_gate("b")
                place.open_gate("c")
                assert await app.output(receipt, timeout=20) == "done"
            assert slow.errors == ""
            assert await app.verify()


async def test_case_A07_a_late_append_is_refused(tmp_path: Path) -> None:  # noqa: N802
    """The same in one process, where what the late owner tries can be seen: its append is refused, its body stopped."""
    assert await late_append(Place(tmp_path)) == []


async def test_case_A07_a_late_append_is_refused_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: N802
    """Protection off: the log takes any epoch."""
    from perdure.stores.sqlite import log as logs

    fence = "AND epoch = ?4 AND token = ?7"
    assert fence in logs._APPEND
    monkeypatch.setattr(logs, "_APPEND", logs._APPEND.replace(fence, "AND ?4 = ?4 AND ?7 = ?7"))
    assert await late_append(Place(tmp_path)) != []


async def late_append(place: Place) -> list[str]:
    """What an attempt wrote after its thread was given to another."""
    from perdure.engine.attempt import Attempt
    from perdure.ports.failpoints import Boundary
    from perdure.records.thread import RepairAnnotated

    async with place.client([puppet(place)]) as app:
        receipt = await app.submit("puppet", play("done"), thread="t")
        host = app.host
        now = host.clock.now()
        first = await host.store.write(
            Boundary.CLAIM, lambda tx: tx.ledger.claim("w_old", ["puppet"], 1, now, now + 1, [1])
        )
        old = Attempt(host, first[0], await recovery.read_thread(host, first[0]))
        later = now + 10
        second = await host.store.write(
            Boundary.CLAIM, lambda tx: tx.ledger.claim("w_new", ["puppet"], 1, later, later + 10**9, [2])
        )
        assert second[0].epoch == first[0].epoch + 1
        before = place.log("t")
        with contextlib.suppress(p.OwnershipLost):
            await old.append(Boundary.REPAIR, [RepairAnnotated(receipt.submission, "late", "late")])
        return place.kinds("t")[len(before) :]


async def test_case_A07_a_worker_that_lost_its_thread_takes_no_command_from_the_new_owner(tmp_path: Path) -> None:  # noqa: N802
    """The stopped worker goes on and still believes in its attempt: a verdict that arrives is none of its business."""
    place = Place(tmp_path)
    with place.worker() as slow:
        async with place.client([puppet(place)]) as app:
            receipt = await app.submit("puppet", play([once(gate="g")], "done"), thread="t")
            await until(lambda: place.waiting("g"), "the body")
            slow.stop()
            with place.worker() as quick:
                [effect] = await until(lambda: app.effects(status="unknown"), "the unknown")
                other = await app.submit("puppet", play([once("other", tool="asks")], "done"), thread="t")
                [asked] = await until(app.approvals, "the request")
                quick.kill()
                slow.go_on()
                own = await app.submit("puppet", play("mine"), thread="u")
                await app.settlement(own, timeout=20)  # the slow one is back, and hears everything
                await app.reconcile(effect, p.Applied("r"), by="alice")
                await app.approve(asked.id, by="alice")
                assert await app.output(receipt, timeout=20) == "done"
                assert await app.output(other, timeout=20) == "done"
            kinds = place.kinds("t")
            assert kinds.count("ToolCallResolved") == kinds.count("ToolApprovalDecided") == 1
            assert place.world.count("pay") == 1
            assert await app.verify()


async def test_a_corrupt_thread_is_blocked_and_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        good = await app.submit("puppet", play("one"), thread="bad")
        await app.settlement(good, timeout=20)
        assert await app.verify()
        [(thread, first, body)] = place.rows("SELECT thread, first, body FROM batch ORDER BY first LIMIT 1")
        broken = bytes(body).replace(b"one", b"two")
        assert broken != bytes(body)
        place.change("UPDATE batch SET body = ? WHERE thread = ? AND first = ?", broken, thread, first)
        assert not await app.verify()
        assert not await app.verify("bad")

        stuck = await app.submit("puppet", play("next"), thread="bad")

        async def blocked() -> bool:
            return [o.blocked_on for o in await app.obligations()] == ["blocked"]

        await until(blocked, "the fault")
        [owed] = await app.obligations()
        assert owed.submission == stuck.submission
        assert "recover" in (owed.command or "")
        for index in range(5):
            other = await app.submit("puppet", play("fine"), thread=f"other-{index}")
            assert await app.output(other, timeout=20) == "fine"

        # recovery tries again by itself, less and less often, and settles nothing
        await until(lambda: place.rows("SELECT tries FROM fault")[0][0] >= 2, "the second try")
        [(_first_at, last_at, tries, next_at)] = place.rows("SELECT first_at, last_at, tries, next_at FROM fault")
        assert next_at - last_at >= 0.5e6 * 2 ** (tries - 1)
        assert await app.verify("other-0")
        assert [o.submission for o in await app.obligations()] == [stuck.submission]

        place.change("UPDATE batch SET body = ? WHERE thread = ? AND first = ?", bytes(body), thread, first)
        await app.recover(thread="bad")
        assert await app.output(stuck, timeout=20) == "next"
        assert place.rows("SELECT * FROM fault") == []
        assert await app.verify()


async def test_lost_wakes_cost_latency_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told anything: no watcher, no wake from an admission, no news of a settlement."""
    from perdure.engine import host, worker
    from perdure.stores.sqlite.store import SqliteStore

    monkeypatch.setattr(SqliteStore, "subscribe", lambda self, on_change: lambda: None)
    monkeypatch.setattr(host.Host, "wake", lambda self: None)
    monkeypatch.setattr(worker, "RECOVERY_PERIOD_SECONDS", 0.2)
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app, place.client([puppet(place)]) as client:
        receipts = [await client.submit("puppet", play([once(f"w{i}")], "done"), thread=f"t{i % 2}") for i in range(6)]
        cancelled = await client.submit("puppet", play("<hang>"), thread="hang")

        async def done() -> bool:
            states = {(await app.inspect(r)).state for r in receipts}
            return states == {"settled"}

        await until(done, "the settlements")
        assert {e.name for e in place.world.entries()} == {f"w{i}" for i in range(6)}
        assert place.world.count() == 6
        await client.cancel(cancelled, by="alice")


async def test_a_waiting_client_hears_of_a_settlement_even_when_no_wake_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perdure.engine import host
    from perdure.stores.sqlite.store import SqliteStore

    monkeypatch.setattr(SqliteStore, "subscribe", lambda self, on_change: lambda: None)
    monkeypatch.setattr(host, "MISSED_WAKE_SECONDS_MAX", 0.2)
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as client:
        receipt = await client.submit("puppet", play("done"))
        waiting = asyncio.ensure_future(client.settlement(receipt, timeout=20))
        with place.worker():
            assert (await waiting).status == "completed"


async def test_killing_workers_at_random_moments_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Three rounds of SIGKILL under load: unknowns may arise; double dispatches and lost submissions may not."""
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        receipts = [
            await app.submit("puppet", play([once(f"a{i}")], [once(f"b{i}")], "done"), thread=f"t{i}")
            for i in range(60)
        ]

        async def judged() -> None:
            """Somebody looks at the world and gives a verdict on everything unknown."""
            for effect in await app.effects(status="unknown"):
                found = [e for e in place.world.entries() if e.key == effect.key]
                verdict = p.Applied(found[0].receipt) if found else p.NotApplied()
                with contextlib.suppress(p.Conflict):  # it has one that its worker has not taken in yet
                    await app.reconcile(effect, verdict, by="alice")

        async def touched(goal: int) -> bool:
            await judged()
            return place.world.count() >= goal

        async def quiet() -> bool:
            await judged()
            return not await app.obligations()

        for goal in (15, 50, 90):
            with place.worker(workers=16) as worker:
                await until(lambda goal=goal: touched(goal), "some work")
                worker.kill()
        with place.worker():
            await until(quiet, "every settlement")
        assert {(await app.settlement(r)).status for r in receipts} == {"completed"}
        assert Counter(e.name for e in place.world.entries()) == Counter(f"{k}{i}" for k in "ab" for i in range(60))
        assert await app.verify()
