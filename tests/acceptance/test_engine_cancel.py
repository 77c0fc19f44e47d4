"""Cancelling in every state, from another process; deadlines; and the thread stays usable afterwards.

The puppets' model refuses every conversation that a provider would refuse, so each "next input" below is also a test of
the prompt after the cancel.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import perdure as p
from perdure.engine import recovery
from perdure.records.run import AcceptedLimits, RunStarted
from perdure.records.thread import ThreadCreated, UserInputRecorded
from perdure.stores.sqlite.ledger import SqliteLedger
from support.place import Place, until
from support.puppets import once, play, puppet, trivial

pytestmark = pytest.mark.anyio

ABOUT_A_SECOND = 3.0  # a machine that runs other tests beside this one


async def cancel(app: p.App, receipt: p.Receipt) -> p.Settlement:
    """Cancel, and be told of it within about a second."""
    began = time.monotonic()
    await app.cancel(receipt, by="alice", reason="changed my mind")
    settled = await app.settlement(receipt, timeout=ABOUT_A_SECOND)
    assert settled.status == "cancelled"
    assert time.monotonic() - began < ABOUT_A_SECOND
    return settled


async def usable(app: p.App, thread: str) -> None:
    """The next input works at once."""
    receipt = await app.submit("puppet", play("next"), thread=thread)
    assert await app.output(receipt, timeout=ABOUT_A_SECOND) == "next"


@pytest.mark.parametrize("parallel", [1, 2, 3, 4])
async def test_case_E01_cancel_before_during_and_after_parallel_tools(  # noqa: N802
    tmp_path: Path, parallel: int
) -> None:
    place = Place(tmp_path)
    with place.worker():
        async with place.client([puppet(place)]) as app:
            for finished in range(parallel + 1):
                thread = f"t{finished}"
                batch = [once(f"{thread}-{i}", gate="" if i < finished else f"g-{thread}-{i}") for i in range(parallel)]
                receipt = await app.submit("puppet", play(batch, "<hang>"), thread=thread)
                names = [f"{thread}-{i}" for i in range(parallel)]
                await until(lambda names=names: all(place.world.count(n) for n in names), "every body")
                await until(lambda t=thread, n=finished: place.kinds(t).count("ToolCallSettled") == n, "the outcomes")
                await cancel(app, receipt)
                statuses = [e.status for e in await app.effects(run=receipt.run)]
                assert sorted(statuses) == ["confirmed"] * finished + ["unknown"] * (parallel - finished)
                assert not any("Withdrawn" in kind for kind in place.kinds(thread))
                await usable(app, thread)
                assert all(place.world.count(name) == 1 for name in names)
            assert await app.obligations() == []
            assert await app.verify()


async def test_case_E01_a_call_that_never_started_is_withdrawn(tmp_path: Path) -> None:  # noqa: N802
    """Six calls, four at a time: two never start, and the record says so."""
    place = Place(tmp_path)
    with place.worker():
        async with place.client([puppet(place)]) as app:
            batch = [once(f"n{i}", gate=f"g{i}") for i in range(6)]
            receipt = await app.submit("puppet", play(batch, "done"), thread="t")
            await until(lambda: place.world.count() == 4, "four bodies")
            await cancel(app, receipt)
            view = await app.inspect(receipt)
            assert [call.status for call in view.turns[0].calls] == ["unknown"] * 4 + ["withdrawn"] * 2
            assert len(await app.effects(status="unknown")) == 4  # a plain cancel leaves them listed
            await usable(app, "t")
            assert place.world.count() == 4


async def test_in_a_model_call(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with place.worker():
        async with place.client([puppet(place)]) as app:
            receipt = await app.submit("puppet", play("<hang>"), thread="t")
            await until(lambda: "RunStarted" in place.kinds("t"), "the run")
            await cancel(app, receipt)
            await usable(app, "t")


async def test_ready_and_queued(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        ready = await app.submit("puppet", play([once()], "done"), thread="ready")
        await app.cancel(ready, by="alice")
        await app.cancel(ready, by="bob", reason="again")  # idempotent, the first stands
        with place.worker():
            assert (await app.settlement(ready, timeout=10)).status == "cancelled"
            assert place.world.count() == 0
            running = await app.submit("puppet", play([once("run", gate="g")], "done"), thread="t")
            queued = [await app.submit("puppet", play([once(f"q{i}")], "done"), thread="t") for i in range(3)]
            await until(lambda: place.waiting("g"), "the running one")
            await cancel(app, queued[1])  # while the first goes on
            assert (await app.inspect(running)).state != "settled"
            place.open_gate("g")
            outcomes = [(await app.settlement(r, timeout=10)).status for r in (running, *queued)]
            assert outcomes == ["completed", "completed", "cancelled", "completed"]
            assert [e.name for e in place.world.entries()] == ["run", "q0", "q2"]
            with pytest.raises(p.RunCancelled):
                await app.output(queued[1])
            assert await app.verify()


async def test_suspended_and_unknown(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with place.worker():
        async with place.client([puppet(place)]) as app:
            suspended = await app.submit("puppet", play([once(tool="asks")], "done"), thread="s")
            await until(app.approvals, "the request")
            await cancel(app, suspended)
            assert await app.approvals() == []
            [asked] = await app.approvals(status=None)
            assert asked.status == "rejected"
            with pytest.raises(p.Conflict):
                await app.approve(asked.id, by="alice")
            await usable(app, "s")

            parked = await app.submit("puppet", play([once(do="unknown")], "done"), thread="u")
            [effect] = await until(lambda: app.effects(status="unknown"), "the unknown")
            await cancel(app, parked)
            assert [e.id for e in await app.effects(status="unknown")] == [effect.id]
            await usable(app, "u")
            # it stays reconcilable, and the verdict resumes nothing
            await app.reconcile(effect, p.Applied("r"), by="alice")
            await until(lambda: "ToolCallResolved" in place.kinds("u"), "the verdict in the log")
            assert (await app.settlement(parked)).status == "cancelled"
            assert place.world.count("pay") == 1
            assert await app.verify()


async def test_a_settlement_that_won_stands(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play("done"))
        await app.settlement(receipt, timeout=10)
        with pytest.raises(p.Conflict, match="stands"):
            await app.cancel(receipt, by="alice")
        with pytest.raises(p.Invalid):
            await app.cancel("sub_nothing", by="alice")


async def test_a_tool_that_swallows_the_cancel_is_confirmed_and_the_run_is_cancelled(tmp_path: Path) -> None:
    place = Place(tmp_path)

    @p.tool
    async def stubborn(ctx: p.ToolContext) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await place.pass_gate("g")
        return place.world.touch("late", key=ctx.key)

    agent = puppet(place, tools=[stubborn])
    async with place.app(agent) as app:
        receipt = await app.submit(agent, play([["stubborn", {}]], "done"), thread="t")
        await until(lambda: place.waiting("g"), "the body")
        await cancel(app, receipt)
        [effect] = await app.effects()
        assert effect.status == "confirmed"
        assert place.world.has_receipt(effect.result)
        await usable(app, "t")


# -- case B13 ---------------------------------------------------------------------------------------------------------


async def test_case_B13_cancel_against_completion_leaves_exactly_one_settlement(tmp_path: Path) -> None:  # noqa: N802
    """Cancels at every moment around the end: the loser adopts what won, and what ran is still on record."""
    place, chance = Place(tmp_path), random.Random(13)
    with place.worker():
        async with place.client([puppet(place)]) as app:
            receipts = [await app.submit("puppet", play([once(f"n{i}")], "done")) for i in range(120)]

            async def hit(receipt: p.Receipt) -> str:
                await asyncio.sleep(chance.random() * 0.3)
                try:
                    await app.cancel(receipt, by="alice")
                except p.Conflict:
                    return "late"
                return "asked"

            answers = await asyncio.gather(*(hit(r) for r in receipts))
            settlements = [await app.settlement(r, timeout=20) for r in receipts]
            for receipt, answer, settled in zip(receipts, answers, settlements, strict=True):
                recorded = [r for r in place.records(receipt.thread) if type(r).__name__ == "SubmissionSettled"]
                assert [r.outcome for r in recorded] == [settled.status]
                if answer == "late":
                    assert settled.status == "completed"
            touched = {entry.key for entry in place.world.entries()}
            assert touched <= {effect.key for effect in await app.effects()}
            assert await app.verify()


async def test_case_B13_a_second_settlement_is_refused_by_the_ledger_and_the_log(tmp_path: Path) -> None:  # noqa: N802
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        assert await overwritten(app) == "completed"


async def test_case_B13_a_second_settlement_is_refused_twin(  # noqa: N802
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protection off: the settlement's condition is gone from the statement, as in the engine of the report."""
    from perdure.stores.sqlite import ledger

    def settle(
        self: Any, thread: int, epoch: int, token: int, submission: str, outcome: str, *_: Any, **__: Any
    ) -> None:
        self._execute("UPDATE submission SET state = 'settled', outcome = ? WHERE id = ?", (outcome, submission))

    monkeypatch.setattr(ledger.SqliteLedger, "settle", settle)
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        assert await overwritten(app) == "cancelled"


async def overwritten(app: p.App) -> str | None:
    """Settle as completed, then as cancelled; what the ledger says in the end."""
    from perdure.ports.failpoints import Boundary

    receipt = await app.submit("puppet", play("done"))
    now = app.host.clock.now()
    [claimed] = await app.store.write(
        Boundary.CLAIM, lambda tx: tx.ledger.claim("w", ["puppet"], 1, now, now + 10**9, [1])
    )
    await app.store.write(Boundary.INPUT, lambda tx: tx.ledger.apply_input(receipt.submission, 1))
    fence = (claimed.number, claimed.epoch, claimed.token)
    for outcome in ("completed", "cancelled"):

        def settle(tx: Any, outcome: str = outcome) -> None:
            tx.ledger.settle(*fence, receipt.submission, outcome, None, None, now, release=False)

        with contextlib.suppress(p.Conflict):
            await app.store.write(Boundary.SETTLE, settle)
    row = app.store.read(lambda tx: tx.ledger.submission(receipt.submission))
    assert row is not None
    return row.outcome


async def lost_by_the_wait(place: Place) -> str | None:
    """Take a cancel into the log in the moment before the run parks; how the run stands afterwards."""
    from perdure.engine.attempt import Attempt
    from perdure.ports.failpoints import Boundary

    async with place.client([puppet(place)]) as app:
        host = app.host
        receipt = await app.submit("puppet", play([once()], "done"), thread="t")
        now = host.clock.now()
        [claimed] = await app.store.write(
            Boundary.CLAIM, lambda tx: tx.ledger.claim("w", ["puppet"], 1, now, now + 10**9, [1])
        )
        attempt = Attempt(host, claimed, await recovery.read_thread(host, claimed))
        records = [
            ThreadCreated("puppet"), UserInputRecorded(receipt.submission, receipt.run, msgspec.Raw(b"{}")),
            RunStarted(receipt.run, receipt.submission, "puppet", "d", now + 10**12, AcceptedLimits(9, 9, 9, 9, 9, 9)),
        ]  # fmt: skip
        await attempt.append(Boundary.INPUT, records, [lambda tx: tx.ledger.apply_input(receipt.submission, 2)])
        await app.cancel(receipt, by="alice")
        taken = attempt.take_in(app.store.read(lambda tx: tx.ledger.pending_intents()))
        await attempt.suspend()  # its commit comes after the one of the cancel
        await asyncio.gather(*taken)
        due = app.store.read(lambda tx: tx.ledger.next_due(["puppet"], host.clock.now()))
        return None if due is None or due > host.clock.now() else "claimable"


async def test_a_cancel_that_comes_with_the_suspension_is_heard(tmp_path: Path) -> None:
    assert await lost_by_the_wait(Place(tmp_path)) == "claimable"


async def test_a_cancel_that_comes_with_the_suspension_is_heard_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protection off: the wait does not look for cancels."""
    monkeypatch.setattr(SqliteLedger, "_covered", lambda *_: False)
    assert await lost_by_the_wait(Place(tmp_path)) is None


# -- case B07 ---------------------------------------------------------------------------------------------------------


async def test_case_B07_many_runs_cancelled_in_all_states_leave_no_timer_behind(tmp_path: Path) -> None:  # noqa: N802
    place = Place(tmp_path)
    inputs = {
        "model": play("<hang>"),
        "tool": play([once(gate="never")], "done"),
        "suspended": play([once(tool="asks")], "done"),
        "unknown": play([once(do="unknown")], "done"),
        "plain": play("done"),
    }
    async with place.client([puppet(place)]) as app:
        receipts = [
            await app.submit("puppet", input, thread=f"{state}-{i}")
            for i in range(60)
            for state, input in inputs.items()
        ]
        with place.worker(workers=32):
            await until(lambda: place.rows("SELECT count(*) FROM effect WHERE status = 'unknown'")[0][0], "some work")
            for receipt in receipts:
                try:
                    await app.cancel(receipt, by="alice", reason="all of them")
                except p.Conflict:
                    assert (await app.settlement(receipt)).status == "completed"
            settled = [(await app.settlement(r, timeout=20)).status for r in receipts]
            assert set(settled) <= {"cancelled", "completed"}
            assert await app.obligations() == []
            await until(
                lambda: not place.rows("SELECT 1 FROM thread WHERE due_at IS NOT NULL OR owner IS NOT NULL"),
                "every thread at rest",
            )
            assert place.rows("SELECT * FROM intent WHERE applied_at IS NULL") == []
            assert place.rows("SELECT * FROM fault") == []
            # deleting the history of a live run is no operation of ours; archiving it is refused
            live = await app.submit("puppet", play("<hang>"), thread="live")
            with pytest.raises(p.Conflict):
                await app.archive("live")
            await cancel(app, live)


# -- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "turn",
    ["<hang>", [once(gate="never")], [once(tool="asks")], [once(do="unknown")]],
    ids=["model", "tool", "suspended", "parked"],
)
async def test_the_deadline_ends_a_run_in_every_state(tmp_path: Path, turn: Any) -> None:
    place = Place(tmp_path)
    agent = puppet(place, policy=p.Policy(max_duration="600ms"))
    async with place.app(agent) as app:
        receipt = await app.submit(agent, play(turn, "done"), thread="t")
        with pytest.raises(p.RunFailed) as failed:
            await app.output(receipt, timeout=10)
        assert failed.value.kind == "policy.duration"
        assert await app.approvals() == []
        assert len(await app.effects(status="unknown")) == (place.world.count() if turn != "<hang>" else 0)
        await usable(app, "t")


async def test_time_in_the_queue_does_not_count(tmp_path: Path) -> None:
    place = Place(tmp_path)
    agent = trivial(place)
    agent = p.Agent("trivial", tools=agent.tools, model=agent.model, policy=p.Policy(max_duration="300ms"))
    async with place.client([agent]) as client:
        receipt = await client.submit(agent, "go")
        row = place.rows("SELECT created_at FROM submission")[0][0]
        await until(lambda: time.time_ns() // 1000 - row > 400_000, "a time longer than the deadline")
        async with place.app(agent) as app:
            assert await app.output(receipt, timeout=10) == "done"
