"""Settlements, effects, approvals, outputs and runs, read back from a store that holds one of everything."""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from perdure.clock import to_datetime
from perdure.errors import Corrupt, Invalid
from perdure.ports.ledger import EffectRow, Submission
from perdure.projections import approval, effect, run
from perdure.records.effect import ToolCallSettled
from perdure.records.parts import Failure, Usage
from perdure.stores.sqlite.store import SqliteStore, open_store
from support.written import LEASE, Script, Written, end, everything, operation, prepared, put, response

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = open_store(tmp_path / "work.db")
    yield opened
    await opened.close()


@pytest.fixture
async def written(store: SqliteStore) -> Written:
    return await everything(store)


def fresh(store: SqliteStore, row: Submission) -> Submission:
    found = store.read(lambda tx: tx.ledger.submission(row.id))
    assert found is not None
    return found


async def effect_of(store: SqliteStore, row: EffectRow) -> effect.Effect:
    found = store.read(lambda tx: tx.ledger.effect(row.id))
    assert found is not None
    return await effect.read_effect(store, found)


# -- settlement -------------------------------------------------------------------------------------------------------


async def test_a_settlement_is_what_the_row_holds(store: SqliteStore, written: Written) -> None:
    row = fresh(store, written.done)
    assert row.settled_at is not None
    assert run.settlement(row) == run.Settlement(
        row.id, row.run, "completed", None, "paid", to_datetime(row.settled_at)
    )
    assert run.settlement(row).settled_at.tzinfo is dt.UTC
    failed = run.settlement(fresh(store, written.failed))
    assert (failed.status, failed.failure) == ("failed", Failure("policy.duration", "The run reached its deadline."))
    assert run.settlement(fresh(store, written.cancelled)).status == "cancelled"


async def test_what_is_not_settled_has_no_settlement(store: SqliteStore, written: Written) -> None:
    with pytest.raises(Invalid, match="suspended, not settled"):
        run.settlement(fresh(store, written.suspended))


@pytest.mark.parametrize("change", [{"outcome": None}, {"settled_at": None}, {"failure": b"{"}])
async def test_a_row_that_says_half_is_corrupt(store: SqliteStore, written: Written, change: dict[str, object]) -> None:
    row = msgspec.structs.replace(fresh(store, written.failed), **change)
    with pytest.raises(Corrupt):
        run.settlement(row)


# -- effects ----------------------------------------------------------------------------------------------------------


async def test_a_confirmed_effect_has_arguments_and_result(store: SqliteStore, written: Written) -> None:
    found = await effect_of(store, written.effects["1.0"])
    assert (found.status, found.verdict, found.arguments, found.result) == (
        "confirmed", None, {"cents": 5}, {"receipt": "r1"},
    )  # fmt: skip
    assert (found.thread, found.submission, found.run) == ("shop", written.done.id, written.done.run)
    assert (found.operation, found.kind, found.effect_class, found.risk) == ("pay", "external_mutate", "once", "medium")
    assert (found.error, found.reason, found.by, found.held) == (None, "", None, False)
    assert (found.open, found.resolve) == (False, None)
    assert found.ended_at is not None
    assert found.started_at < found.ended_at


async def test_a_refused_effect_says_why(store: SqliteStore, written: Written) -> None:
    found = await effect_of(store, written.effects["1.1"])
    assert (found.status, found.error, found.result) == ("refused", Failure("refused", "no such order"), None)


async def test_an_open_unknown_says_why_and_names_its_command(store: SqliteStore, written: Written) -> None:
    found = await effect_of(store, written.lost)
    assert (found.status, found.verdict, found.reason) == ("unknown", None, "the line went dead")
    assert found.open
    assert found.resolve == f"perdure effects reconcile {written.lost.id} --verdict … --reason …"


async def test_a_verdict_has_author_reason_and_evidence(store: SqliteStore, written: Written) -> None:
    found = await effect_of(store, written.step)
    assert (found.step, found.status, found.verdict, found.result) == ("announce", "confirmed", "applied", "sent")
    assert (found.by, found.reason, found.evidence, found.tries) == ("bob", "seen", {"row": 3}, 2)
    assert (found.open, found.resolve) == (False, None)
    first = await effect_of(store, written.effects["announce/1"])
    assert (first.status, first.error, first.arguments) == ("refused", Failure("refused", "closed"), {})


async def test_a_verdict_after_the_settlement_is_found(store: SqliteStore, written: Written) -> None:
    found = await effect_of(store, written.late)
    assert (found.status, found.verdict, found.by, found.reason) == ("refused", "refused", "bob", "no row")


async def test_a_try_that_another_followed_has_no_outcome(store: SqliteStore, written: Written) -> None:
    for place in ("1.6/1", "1.4/1"):
        found = await effect_of(store, written.effects[place])
        assert (found.status, found.verdict, found.result, found.error, found.open) == (
            "unknown", "declared", None, None, False,
        )  # fmt: skip
    assert (await effect_of(store, written.effects["1.4"])).result == 7


async def test_an_effect_that_is_not_where_its_row_says_is_corrupt(store: SqliteStore, written: Written) -> None:
    row = msgspec.structs.replace(written.lost, sequence=1)
    with pytest.raises(Corrupt, match=r"does not hold the start of effect .* at record 1"):
        await effect.read_effect(store, row)


async def test_a_started_effect_reads_its_own_batch_only(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    s, rows = await long_run(store, turns=40)
    reads: list[int] = []
    scan = store.scan

    async def counted(unit):  # type: ignore[no-untyped-def]
        reads.append(1)
        return await scan(unit)

    monkeypatch.setattr(store, "scan", counted)
    started = s.store.read(lambda tx: tx.ledger.effect(rows[0].id))
    assert started is not None
    found = await effect.read_effect(store, msgspec.structs.replace(started, status="started"))
    assert found.arguments == {"cents": 5}
    assert (await effect_of(store, rows[1])).result == 1
    assert reads == [], "both ends stand in the first batches that are read"


async def test_an_outcome_far_behind_its_start_is_found(store: SqliteStore) -> None:
    s = Script(store, "long")
    row = await s.admit("k1")
    await s.claim()
    await s.begin(row)
    slow = s.effect(row, "1.0", "slow", at=1)
    calls = [operation(f"1.{n}", "find", "observe") for n in range(1, 1000)]
    await s.append([response(row, 1, operation("1.0", "slow"), *calls), prepared(slow)], put(slow))
    for call in calls:
        await s.append([ToolCallSettled(row.run, call.call, msgspec.Raw(b"1"))])
    await s.append([ToolCallSettled(row.run, "1.0", msgspec.Raw(b'"at last"'))], end(slow, "confirmed"))
    assert (await effect_of(store, slow)).result == "at last"


async def long_run(store: SqliteStore, turns: int) -> tuple[Script, list[EffectRow]]:
    s = Script(store, "long")
    row = await s.admit("k1")
    await s.claim()
    await s.begin(row)
    rows = []
    for turn in range(1, turns + 1):
        pay = s.effect(row, f"{turn}.0", "pay", at=1)
        rows.append(pay)
        await s.append([response(row, turn, operation(f"{turn}.0", "pay")), prepared(pay)], put(pay))
        result = msgspec.Raw(str(turn - 1).encode())
        await s.append([ToolCallSettled(row.run, f"{turn}.0", result)], end(pay, "confirmed"))
    return s, rows


async def test_a_held_effect_says_so(store: SqliteStore, written: Written) -> None:
    s = Script(store, "shop")
    await s.do(lambda tx: tx.ledger.hold_effect(written.lost.id, "w_1", s.now() + LEASE))
    assert (await effect_of(store, written.lost)).held


# -- approvals --------------------------------------------------------------------------------------------------------


async def test_an_approval_is_what_the_row_holds(store: SqliteStore, written: Written) -> None:
    row = store.read(lambda tx: tx.ledger.approval(written.approved.id))
    assert row is not None
    found = approval.approval(row, "shop")
    assert (found.tool, found.arguments, found.status, found.by, found.decision_reason) == (
        "big", {"cents": 5, "pin": "***"}, "approved", "ada", "fine",
    )  # fmt: skip
    assert (found.thread, found.submission, found.run, found.call) == ("shop", row.submission, row.run, "1.5")
    assert found.decided_at is not None
    assert (found.asked_at, found.resolve) == (to_datetime(row.asked_at), None)
    pending = approval.approval(written.asked)
    assert pending.resolve == f"perdure approvals approve {written.asked.id} --reason …"
    assert (pending.by, pending.decided_at) == (None, None)


# -- output -----------------------------------------------------------------------------------------------------------


async def test_the_output_is_the_recorded_bytes(store: SqliteStore, written: Written) -> None:
    """Of a run in the middle of its thread, and of one at its end."""
    assert await run.read_output(store, fresh(store, written.done)) == b'{"paid": true}'
    s = Script(store, "fresh")
    await s.claim()
    await s.begin(written.fresh)
    await s.settle(written.fresh, "completed", response(written.fresh, 1, text="1"), output=b"1")
    assert await run.read_output(store, fresh(store, written.fresh)) == b"1"


async def test_a_run_without_output_has_none(store: SqliteStore, written: Written) -> None:
    for row, state in ((written.failed, "failed"), (written.queued, "ready"), (written.cancelled, "cancelled")):
        with pytest.raises(Invalid, match=f"it is {state}"):
            await run.read_output(store, fresh(store, row))


async def test_an_output_that_is_missing_or_another_is_corrupt(store: SqliteStore, written: Written) -> None:
    row = fresh(store, written.done)
    write = store.connection.execute
    [(thread, first, body)] = write(
        "SELECT thread, first, body FROM batch WHERE instr(body, CAST('RunCompleted/1' AS BLOB)) AND thread = ?",
        (row.thread_number,),
    ).fetchall()
    for other, says in ((b'{"paid": null}', "not the one its digest covers"), (None, "does not hold the output")):
        new = body.replace(b'{"paid": true}', other) if other else body.replace(row.run.encode(), b"run_x")
        write("UPDATE batch SET body = ? WHERE thread = ? AND first = ?", (new, thread, first))
        with pytest.raises(Corrupt, match=says):
            await run.read_output(store, row)


# -- runs -------------------------------------------------------------------------------------------------------------


async def test_runs_come_in_order_of_admission(store: SqliteStore, written: Written) -> None:
    found = await run.runs(store)
    w = written
    assert [view.submission for view in found] == [
        row.id for row in (w.done, w.parked, w.cancelled, w.suspended, w.queued, w.failed, w.fresh)
    ]
    first = found[0]
    assert (first.agent, first.thread, first.position, first.input) == ("bank", "shop", 1, {"order": "o1"})
    assert (first.state, first.status, first.disposition, first.key) == ("settled", "completed", "paid", "k1")
    assert (first.turns, first.usage, first.output, first.deadline) == ((), Usage(), None, None)


@pytest.mark.parametrize(
    ("state", "expected"),
    [("settled", 3), ("completed", 1), ("failed", 1), ("cancelled", 1), ("unknown", 1), ("suspended", 1), ("ready", 2)],
)
async def test_runs_of_one_state(store: SqliteStore, written: Written, state: str, expected: int) -> None:
    found = await run.runs(store, state=state)
    assert len(found) == expected
    assert {view.status if state in ("completed", "failed", "cancelled") else view.state for view in found} == {state}


async def test_runs_of_one_program(store: SqliteStore, written: Written) -> None:
    await Script(store, "other", "mailer").admit("k1")
    assert [view.agent for view in await run.runs(store, program="mailer")] == ["mailer"]
    assert await run.runs(store, program="nobody") == []


async def test_a_state_that_does_not_exist_is_refused(store: SqliteStore) -> None:
    with pytest.raises(Invalid, match=r"no state 'done'.*completed"):
        await run.runs(store, state="done")


async def test_runs_are_read_in_pages(store: SqliteStore, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = await run.runs(store)
    monkeypatch.setattr(run, "PAGE_ROWS_MAX", 2)
    assert await run.runs(store) == everyone
    assert await run.runs(store, state="settled") == [view for view in everyone if view.state == "settled"]


# -- one run ----------------------------------------------------------------------------------------------------------


async def test_inspect_tells_a_whole_run(store: SqliteStore, written: Written) -> None:
    found = await run.inspect(store, fresh(store, written.done))
    assert (found.status, found.output, found.disposition) == ("completed", {"paid": True}, "paid")
    assert found.usage == Usage(30, 15)
    assert found.deadline is not None
    assert [(t.turn, t.finish, t.text, len(t.calls)) for t in found.turns] == [
        (1, "tool_calls", "I will.", 7), (2, "stop", "12", 0), (3, "stop", '{"paid": true}', 0),
    ]  # fmt: skip
    assert found.turns[1].rejected == Failure("output", "expected an object")
    calls = {call.call: call for call in found.turns[0].calls}
    assert {id: call.status for id, call in calls.items()} == {
        "1.0": "confirmed", "1.1": "refused", "1.2": "confirmed", "1.3": "withdrawn", "1.4": "confirmed",
        "1.5": "confirmed", "1.6": "confirmed",
    }  # fmt: skip
    pay = calls["1.0"]
    assert (pay.tool, pay.arguments, pay.result, pay.tries) == ("pay", {"cents": 5}, {"receipt": "r1"}, 1)
    assert (pay.effect, pay.approval) == (written.effects["1.0"].id, None)
    assert calls["1.1"].error == Failure("refused", "no such order")
    assert (calls["1.2"].result, calls["1.2"].effect, calls["1.2"].tries) == (42, None, 0)
    assert calls["1.3"].error == Failure("unknown_tool", "There is no tool 'nope'.")
    assert calls["1.5"].approval == written.approved.id
    assert (calls["1.6"].tries, calls["1.6"].effect) == (2, written.effects["1.6"].id)
    assert calls["1.4"].steps == (
        run.StepView("upload", "confirmed", "s3://x", 0, None),
        run.StepView("announce", "confirmed", "sent", 2, written.step.id),
    )


async def test_inspect_tells_what_is_open(store: SqliteStore, written: Written) -> None:
    parked = await run.inspect(store, fresh(store, written.parked))
    assert (parked.state, parked.status, parked.settled_at, parked.output) == ("unknown", None, None, None)
    assert [call.status for turn in parked.turns for call in turn.calls] == ["unknown"]
    suspended = await run.inspect(store, fresh(store, written.suspended))
    [call] = suspended.turns[0].calls
    assert (call.status, call.approval, call.effect, call.result) == ("waiting", written.asked.id, None, None)


async def test_inspect_finds_a_verdict_after_the_end(store: SqliteStore, written: Written) -> None:
    found = await run.inspect(store, fresh(store, written.cancelled))
    assert [(call.status, call.tries) for call in found.turns[0].calls] == [("refused", 1), ("withdrawn", 0)]


async def test_inspect_of_a_run_without_records(store: SqliteStore, written: Written) -> None:
    found = await run.inspect(store, fresh(store, written.queued))
    assert (found.state, found.turns, found.deadline, found.input) == ("ready", (), None, {"order": "o1"})


async def test_inspect_reads_a_long_run_in_pages(store: SqliteStore) -> None:
    s, _ = await long_run(store, turns=300)
    await Script(store, "long").admit("k2")
    found = await run.inspect(store, s.store.read(lambda tx: tx.ledger.submissions(limit=1)[0]))  # type: ignore[attr-defined]
    assert len(found.turns) == 300
    assert found.usage == Usage(3000, 1500)


async def test_arguments_that_are_no_json_are_shown_as_written(store: SqliteStore) -> None:
    s = Script(store, "odd")
    row = await s.admit("k1")
    await s.claim()
    await s.begin(row)
    declared = response(row, 1, operation("1.0", "find", "observe"))
    part = msgspec.structs.replace(declared.parts[0], arguments='{"cents": ')
    await s.append([msgspec.structs.replace(declared, parts=(part,))])
    found = await run.inspect(store, fresh(store, row))
    assert (found.turns[0].calls[0].arguments, found.turns[0].calls[0].status) == ('{"cents": ', "requested")
