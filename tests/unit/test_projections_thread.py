"""Threads and their records as people read them; what is owed; and why a submission stands where it stands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import apsw
import msgspec
import pytest

from perdure.errors import Incompatible, Invalid
from perdure.ports.ledger import Fault, Submission
from perdure.projections import audit, thread
from perdure.projections.obligations import WORKER, Obligation, obligations
from perdure.records import codec
from perdure.stores.sqlite.store import SqliteStore, open_store
from support.written import CONTRACT, DEADLINE, LEASE, Script, Written, everything, operation, prepared, put, response

pytestmark = pytest.mark.anyio
SECOND = 1_000_000


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = open_store(tmp_path / "work.db")
    yield opened
    await opened.close()


@pytest.fixture
async def written(store: SqliteStore) -> Written:
    return await everything(store)


# -- threads ----------------------------------------------------------------------------------------------------------


async def test_threads_come_in_order_of_creation(store: SqliteStore, written: Written) -> None:
    found = await thread.threads(store)
    assert [(t.thread, t.submissions, t.open, t.archived, t.history) for t in found] == [
        ("shop", 5, 3, False, ()), ("late", 1, 0, False, ()), ("fresh", 1, 1, False, ()), ("notes", 0, 0, False, ()),
    ]  # fmt: skip
    assert [t.records > 0 for t in found] == [True, True, False, True]


async def test_an_archived_thread_is_hidden_unless_asked_for(store: SqliteStore, written: Written) -> None:
    s = Script(store, "late")
    await s.do(lambda tx: tx.ledger.archive(written.failed.thread_number, s.now()))
    assert "late" not in [t.thread for t in await thread.threads(store)]
    assert [t.archived for t in await thread.threads(store, archived=True)] == [False, True, False, False]


async def test_threads_are_read_in_pages(store: SqliteStore, written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    everyone = await thread.threads(store)
    monkeypatch.setattr(thread, "PAGE_ROWS_MAX", 1)
    assert await thread.threads(store) == everyone


async def test_a_thread_shows_every_record_once_in_order(
    store: SqliteStore, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = await thread.show(store, "shop")
    assert [view.sequence for view in shown.history] == list(range(1, shown.records + 1))
    assert shown.history[0].kind == "ThreadCreated"
    assert shown.history[0].data == {"kind": "ThreadCreated/1", "program": "bank"}
    assert {view.worker for view in shown.history} == {"w_1"}
    assert [view.epoch for view in shown.history] == sorted(view.epoch for view in shown.history)
    assert shown.history[1].data["input"] == {"order": "o1"}
    monkeypatch.setattr(thread, "PAGE_BATCHES_MAX", 2)
    assert await thread.show(store, "shop") == shown


async def test_a_thread_shows_the_same_whenever_it_is_asked(store: SqliteStore, written: Written) -> None:
    assert await thread.show(store, "notes") == await thread.show(store, "notes")


async def test_an_unknown_thread_is_refused(store: SqliteStore) -> None:
    with pytest.raises(Invalid, match="no thread 'nowhere'"):
        await thread.show(store, "nowhere")


async def test_a_thread_without_records(store: SqliteStore, written: Written) -> None:
    shown = await thread.show(store, "fresh")
    assert (shown.records, shown.history, shown.open) == (0, (), 1)


async def test_which_record_settles(store: SqliteStore, written: Written) -> None:
    shown = await thread.show(store, "shop")
    assert [v.kind for v in shown.history if thread.settles(v, written.done.id)] == ["SubmissionSettled"]
    assert not any(thread.settles(v, written.parked.id) for v in shown.history)


async def test_records_of_a_newer_release_are_refused(store: SqliteStore, written: Written) -> None:
    [stored] = store.read(lambda tx: tx.log.read(written.failed.thread_number, 0, 1))
    newer = stored.body.replace(b"RunStarted/1", b"RunStarted/2")
    with pytest.raises(Incompatible):
        thread.records_of(msgspec.structs.replace(stored, body=newer))


# -- obligations ------------------------------------------------------------------------------------------------------


async def owed(store: SqliteStore, after: float = 0.0) -> dict[str, Obligation]:
    now = Script.clock + int(after * SECOND)
    return {found.submission: found for found in await obligations(store, now, 300, 3600)}


async def test_every_owed_submission_is_listed_with_what_helps(store: SqliteStore, written: Written) -> None:
    found = await owed(store)
    w = written
    assert {id: (o.blocked_on, o.command) for id, o in found.items()} == {
        w.parked.id: ("unknown", f"perdure effects reconcile {w.lost.id} --verdict … --reason …"),
        w.suspended.id: ("approval", f"perdure approvals approve {w.asked.id} --reason …"),
        w.queued.id: (None, None),
        w.fresh.id: ("ready", WORKER),
    }
    parked = found[w.parked.id]
    assert (parked.run, parked.thread, parked.agent, parked.state) == (w.parked.run, "shop", "bank", "unknown")
    assert "'pay'" in parked.detail
    assert w.suspended.id in found[w.queued.id].detail


@pytest.mark.parametrize(("after", "severity"), [(1, "ok"), (301, "aging"), (3601, "overdue")])
async def test_severity_follows_age(store: SqliteStore, written: Written, after: float, severity: str) -> None:
    found = (await owed(store, after))[written.fresh.id]
    assert found.severity == severity
    assert found.age_seconds == pytest.approx(after, abs=0.1)


async def test_a_clock_that_runs_backwards_makes_nobody_young(store: SqliteStore, written: Written) -> None:
    assert (await owed(store, -1e6))[written.fresh.id].age_seconds == 0


async def test_a_claimed_submission_is_running_until_its_lease_lapses(store: SqliteStore, written: Written) -> None:
    await Script(store, "fresh").claim()
    found = (await owed(store))[written.fresh.id]
    assert (found.blocked_on, found.command) == ("running", None)
    found = (await owed(store, LEASE / SECOND + 1))[written.fresh.id]
    assert (found.blocked_on, found.command) == ("ready", WORKER)
    assert "gone" in found.detail


async def test_a_blocked_thread_names_its_fault(store: SqliteStore, written: Written) -> None:
    s = Script(store, "shop")
    fault = Fault(written.done.thread_number, "shop", "Corrupt", "a gap", 1, 1, 1, 9)
    await s.do(lambda tx: tx.ledger.put_fault(fault))
    found = await owed(store)
    for row in (written.parked, written.suspended, written.queued):
        assert (found[row.id].blocked_on, found[row.id].command) == ("blocked", "perdure recover --thread shop")
        assert "Corrupt: a gap" in found[row.id].detail
    assert found[written.fresh.id].blocked_on == "ready"


async def test_a_thread_with_a_space_is_quoted(store: SqliteStore) -> None:
    s = Script(store, "a b")
    row = await s.admit("k1")
    await s.do(lambda tx: tx.ledger.put_fault(Fault(row.thread_number, "a b", "Corrupt", "x", 1, 1, 1, 9)))
    assert (await owed(store))[row.id].command == "perdure recover --thread 'a b'"


async def test_work_that_makes_no_progress_is_stuck(store: SqliteStore, written: Written) -> None:
    s = Script(store, "fresh")
    for _ in range(9):
        now = s.now()
        granted = await s.do(lambda tx, now=now: tx.ledger.claim("w_1", None, 100, now, now + 10, list(range(100))))
        for one in granted:
            await s.do(lambda tx, one=one, now=now: tx.ledger.release(one.number, one.epoch, one.token, now))
    found = (await owed(store))[written.fresh.id]
    assert (found.blocked_on, found.command) == ("stuck", f"perdure redrive {written.fresh.id}")
    await s.do(lambda tx: tx.ledger.redrive(written.fresh.id, s.now()))
    assert (await owed(store))[written.fresh.id].blocked_on == "ready"


async def test_work_that_waits_for_an_operator_is_stuck(store: SqliteStore, written: Written) -> None:
    s = Script(store, "fresh")
    await s.claim()
    fence, now = s.fence, s.now()
    await s.do(lambda tx: tx.ledger.release(*fence, now, not_before=2**62))
    assert (await owed(store))[written.fresh.id].blocked_on == "stuck"


async def test_backoff_is_told(store: SqliteStore, written: Written) -> None:
    s = Script(store, "fresh")
    await s.claim()
    fence, now = s.fence, s.now()
    await s.do(lambda tx: tx.ledger.release(*fence, now, not_before=now + 7 * SECOND))
    found = (await owed(store))[written.fresh.id]
    assert found.blocked_on == "ready"
    assert "7.0 s" in found.detail


async def test_a_decision_that_was_given_frees_its_submission(store: SqliteStore, written: Written) -> None:
    s = Script(store, "shop")
    await s.command("verdict", written.lost.id, written.parked, b"{}", "ada", "")
    await s.command("cancel", written.suspended.id, written.suspended, b"{}", "ada", "")
    found = await owed(store)
    assert found[written.parked.id].blocked_on == "ready"
    assert found[written.suspended.id].blocked_on is None, "it waits behind the one that is ready to go on"


async def test_obligations_are_read_in_pages(
    store: SqliteStore, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    everyone = await owed(store)
    monkeypatch.setattr("perdure.projections.obligations.PAGE_ROWS_MAX", 1)
    assert await owed(store) == everyone


# -- explain ----------------------------------------------------------------------------------------------------------


async def why(store: SqliteStore, row: Submission, now: int | None = None, **contracts: str) -> audit.Explanation:
    return await audit.explain(store, row, {"bank": contracts} if contracts else {}, now or Script.clock)


async def test_explain_names_the_decision_that_recovery_would_take(store: SqliteStore, written: Written) -> None:
    w = written
    decisions = {
        row.id: (await why(store, row)).decision for row in (w.done, w.parked, w.suspended, w.queued, w.failed, w.fresh)
    }
    assert decisions == {
        w.done.id: "NoAction",
        w.parked.id: "AwaitUnknownResolution",
        w.suspended.id: "AwaitApprovalDecision",
        w.queued.id: "AwaitClaim",
        w.failed.id: "NoAction",
        w.fresh.id: "AwaitClaim",
    }


async def test_explain_shows_evidence_and_the_command_that_helps(store: SqliteStore, written: Written) -> None:
    found = await why(store, written.parked, pay=CONTRACT)
    assert (found.submission, found.state, found.thread, found.position) == (written.parked.id, "unknown", "shop", 2)
    assert found.disposition == "unknown"
    assert found.command == f"perdure effects reconcile {written.lost.id} --verdict … --reason …"
    assert "'pay'" in found.waits_for
    assert found.evidence["unknown"] == [written.lost.id]
    assert found.evidence["openCalls"] == [{"call": "1.0", "tool": "pay", "tries": 1}]
    assert (found.evidence["turns"], found.evidence["deadline"], found.evidence["pastDeadline"]) == (1, DEADLINE, False)
    assert (found.evidence["binding"], found.evidence["owner"], found.evidence["fault"]) == (True, None, None)
    assert msgspec.json.decode(msgspec.json.encode(found.evidence)) == found.evidence, "plain JSON values"


async def test_explain_of_a_settled_submission_waits_for_nothing(store: SqliteStore, written: Written) -> None:
    found = await why(store, written.done)
    assert (found.waits_for, found.command, found.evidence["settlement"]) == ("", None, "completed")


async def test_explain_weighs_commands_deadline_and_binding(store: SqliteStore, written: Written) -> None:
    assert (await why(store, written.suspended, now=DEADLINE)).decision == "FailDuration"
    s = Script(store, "shop")
    await s.command("cancel", written.suspended.id, written.suspended, b"{}", "ada", "")
    found = await why(store, written.suspended)
    assert found.decision == "AppendIntents"
    assert found.evidence["intents"] == [{"kind": "cancel", "subject": written.suspended.id, "by": "ada"}]


async def test_explain_without_a_binding_runs_nothing(store: SqliteStore) -> None:
    s = Script(store, "open")
    row = await s.admit("k1")
    await s.claim()
    await s.begin(row)
    note = s.effect(row, "1.0", "note", "keyed", at=1)
    await s.append([response(row, 1, operation("1.0", "note", "keyed")), prepared(note)], put(note))
    assert (await why(store, row)).evidence["plans"] == {"1.0": "AwaitBinding"}
    found = await why(store, row, note=CONTRACT)
    assert (found.decision, found.evidence["plans"]) == ("ResumePendingBatch", {"1.0": "Rerun"})
    assert found.evidence["owner"] == "w_1"
    assert (await why(store, row, note="changed")).decision == "MarkUnknown"


async def test_explain_writes_nothing(store: SqliteStore, written: Written) -> None:
    def dump() -> list[object]:
        rows: list[object] = []
        for (table,) in store.connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
            rows += store.connection.execute(f"SELECT * FROM {table}").fetchall()
        return rows

    before = dump()
    for row in (written.parked, written.suspended, written.fresh):
        await why(store, row)
    await obligations(store, Script.clock, 300, 3600)
    assert dump() == before


async def test_a_thread_that_cannot_be_read_is_blocked(store: SqliteStore, written: Written, tmp_path: Path) -> None:
    connection = apsw.Connection(str(tmp_path / "work.db"))
    sql = "UPDATE batch SET tail = zeroblob(32) WHERE thread = ? AND first = 1"
    connection.execute(sql, (written.parked.thread_number,))
    connection.close()
    found = await why(store, written.parked)
    assert found.decision == "Blocked"
    assert "not the one that was appended" in found.meaning
    assert (await why(store, written.fresh)).decision == "AwaitClaim"


async def test_explain_of_nothing(store: SqliteStore, written: Written) -> None:
    gone = msgspec.structs.replace(written.fresh, id="sub_gone")
    with pytest.raises(Invalid, match="no submission 'sub_gone'"):
        await why(store, gone)


def test_record_kinds_are_named_without_their_version() -> None:
    for record in codec.Record.__args__:  # type: ignore[attr-defined]
        assert record.__struct_config__.tag.startswith(record.__name__ + "/")
