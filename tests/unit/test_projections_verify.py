"""Whatever stored byte is changed, ``verify`` says so; what nobody changed passes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

from perdure.errors import Invalid
from perdure.projections.audit import Verification, verify
from perdure.projections.verification import AUDIT_CHECKS, STORE_CHECKS
from perdure.rules.invariants import CHECKS, LEDGER_CHECKS
from perdure.stores.sqlite.store import open_store
from support.written import Written, everything


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Written]:
    path = tmp_path_factory.mktemp("written") / "work.db"

    async def write() -> Written:
        store = open_store(path)
        try:
            return await everything(store)
        finally:
            await store.close()

    found = asyncio.run(write())
    look(path, "PRAGMA wal_checkpoint(TRUNCATE)")  # all of it in one file, to be copied
    return path, found


@pytest.fixture
def copy(original: tuple[Path, Written], tmp_path: Path) -> Path:
    return Path(shutil.copy(original[0], tmp_path / "work.db"))


@pytest.fixture
def written(original: tuple[Path, Written]) -> Written:
    return original[1]


def verified(path: Path, thread: str | None = None) -> Verification:
    async def read() -> Verification:
        store = open_store(path)
        try:
            return await verify(store, thread)
        finally:
            await store.close()

    return asyncio.run(read())


def change(path: Path, sql: str, *values: Any, rows: int = 1) -> None:
    """Change what is stored behind everybody's back."""
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA foreign_keys=OFF")
    connection.execute(sql, values)
    assert connection.changes() == rows, f"{sql} changed {connection.changes()} rows"
    connection.close()


def look(path: Path, sql: str, *values: Any) -> list[Any]:
    connection = apsw.Connection(str(path))
    found = connection.execute(sql, values).fetchall()
    connection.close()
    return found


def names(found: Verification) -> set[str]:
    return {check.name for check in found.failed()}


def flipped(raw: bytes, place: int, mask: int = 1) -> bytes:
    return raw[:place] + bytes([raw[place] ^ mask]) + raw[place + 1 :]


# -- nothing was changed ----------------------------------------------------------------------------------------------


def test_what_nobody_changed_passes_every_check(copy: Path) -> None:
    found = verified(copy)
    assert found
    assert found.failed() == ()
    assert {check.name: check.status for check in found.checks} == dict.fromkeys(
        [*CHECKS, *AUDIT_CHECKS, *STORE_CHECKS], "passed"
    )
    assert (found.threads, found.records) == (4, look(copy, "SELECT sum(last - first + 1) FROM batch")[0][0])


def test_verifying_writes_nothing(copy: Path) -> None:
    before = copy.read_bytes()
    assert verified(copy)
    assert copy.read_bytes() == before


def test_an_empty_store_passes(tmp_path: Path) -> None:
    found = verified(tmp_path / "empty.db")
    assert found
    assert (found.threads, found.records) == (0, 0)


def test_one_thread_is_judged_alone(copy: Path) -> None:
    change(copy, "UPDATE submission SET outcome = 'completed' WHERE outcome = 'failed'")
    assert verified(copy, "shop")
    assert not verified(copy, "late")
    assert not verified(copy)
    with pytest.raises(Invalid, match="no thread 'nowhere'"):
        verified(copy, "nowhere")


def test_a_failed_check_names_its_thread(copy: Path) -> None:
    change(copy, "UPDATE submission SET outcome = 'completed' WHERE outcome = 'failed'")
    found = verified(copy)
    assert {check.thread for check in found.failed()} == {"late"}
    passed = {check.name for check in found.checks if check.status == "passed"}
    assert passed == {*CHECKS, *AUDIT_CHECKS, *STORE_CHECKS} - names(found) - {"folds"}


def test_a_store_in_memory_is_verified_too() -> None:
    async def read() -> Verification:
        store = open_store("memory:")
        await everything(store)
        try:
            return await verify(store)
        finally:
            await store.close()

    assert asyncio.run(read())


def test_a_store_without_a_check_of_its_own_is_said_to_be_skipped() -> None:
    class Bare:
        def __init__(self, store: Any) -> None:
            self.scan = store.scan

    async def read() -> Verification:
        store = open_store("memory:")
        await everything(store)
        try:
            return await verify(Bare(store))  # type: ignore[arg-type]
        finally:
            await store.close()

    found = asyncio.run(read())
    assert found
    assert [check.name for check in found.checks if check.status == "skipped"] == ["store-integrity"]


# -- the log ----------------------------------------------------------------------------------------------------------


def all_noticed(path: Path, changes: Iterable[tuple[str, tuple[int, int], str, Any, Any]]) -> int:
    """Make each change to a batch on its own, see it noticed, undo it. How many there were."""

    async def work() -> int:
        store = open_store(path)
        threads = dict(look(path, "SELECT number, id FROM thread"))
        count = 0
        try:
            for column, at, check, old, new in changes:
                sql = f"UPDATE batch SET {column} = ? WHERE thread = ? AND first = ?"
                change(path, sql, new, *at)
                found = await verify(store, threads[at[0]])
                assert check in names(found), f"{column} of batch {at} became {new!r}: {found.failed()}"
                change(path, sql, old, at[0], new if column == "first" else at[1])
                count += 1
            assert await verify(store)
        finally:
            await store.close()
        return count

    return asyncio.run(work())


def test_any_byte_of_any_batch(copy: Path) -> None:
    """A few bytes of each; together they meet every kind of record."""
    bodies = look(copy, "SELECT thread, first, body FROM batch ORDER BY thread, first")
    places = [
        (thread, first, body, place)
        for index, (thread, first, body) in enumerate(bodies)
        for place in (0, len(body) // 3 + index, len(body) - 1 - index % 7)
    ]
    changes = (("body", (t, first), "digest-chain", body, flipped(body, at)) for t, first, body, at in places)
    assert all_noticed(copy, changes) > 60


def test_any_tail_digest_and_any_column_of_a_place(copy: Path) -> None:
    changes: list[tuple[str, tuple[int, int], str, Any, Any]] = []
    for thread, first, last, epoch, tail in look(copy, "SELECT thread, first, last, epoch, tail FROM batch"):
        at = (thread, first)
        changes += [
            ("tail", at, "digest-chain", tail, flipped(tail, first % 32)),
            ("tail", at, "digest-chain", tail, tail[:31]),
            ("last", at, "record-identity", last, last + 1),
            ("epoch", at, "record-identity", epoch, epoch + 1),
            ("epoch", at, "record-identity", epoch, epoch - 1),
            ("first", at, "record-identity", first, first + 100_000),
        ]
    assert all_noticed(copy, changes) > 120


def test_a_missing_batch(copy: Path) -> None:
    """Also the last of a thread, where the ledger repeats what it said. Of ``notes`` nobody repeats the end."""
    owed = "WHERE thread <> (SELECT number FROM thread WHERE id = 'notes')"
    for thread, first, *rest in look(copy, f"SELECT thread, first, last, epoch, tail, body FROM batch {owed}"):
        change(copy, "DELETE FROM batch WHERE thread = ? AND first = ?", thread, first)
        assert not verified(copy), f"batch {first} of thread {thread} is gone and nobody said so"
        change(copy, "INSERT INTO batch VALUES (?, ?, ?, ?, ?, ?)", thread, first, *rest)
    assert verified(copy)


def test_a_log_that_was_cut_behind_the_newest_claim(copy: Path, written: Written) -> None:
    tail = look(copy, "SELECT max(last) FROM batch WHERE thread = ?", written.queued.thread_number)[0][0]
    change(copy, "UPDATE submission SET attempt_tail = ? WHERE id = ?", tail + 1, written.queued.id)
    assert names(verified(copy)) == {"ledger-ownership"}


def test_a_batch_of_a_newer_release_skips_what_cannot_be_read(copy: Path) -> None:
    of = "thread = (SELECT number FROM thread WHERE id = 'late')"
    thread, first, body = look(copy, f"SELECT thread, first, body FROM batch WHERE {of} ORDER BY first")[0]
    newer = body.replace(b"UserInputRecorded/1", b"UserInputRecorded/9")
    change(copy, "UPDATE batch SET body = ? WHERE thread = ? AND first = ?", newer, thread, first)
    found = verified(copy, "late")
    assert {"digest-chain", "schema-round-trip"} <= names(found)
    skipped = {check.name for check in found.checks if check.status == "skipped"}
    assert {*LEDGER_CHECKS, *AUDIT_CHECKS} <= skipped


# -- what the ledger repeats ------------------------------------------------------------------------------------------

SETTLED = "state = 'settled' AND outcome = 'failed'"
DONE = "outcome = 'completed'"
CONFIRMED = "operation = 'pay' AND status = 'confirmed' AND business_key IS NOT NULL"
DECIDED = "status = 'approved'"
PENDING = "status = 'pending'"
LEDGER: list[tuple[str, str, str, str]] = [
    # table, where, change, check
    ("submission", SETTLED, "outcome = 'cancelled'", "ledger-settlement"),
    ("submission", SETTLED, "outcome = 'completed'", "ledger-settlement"),
    ("submission", SETTLED, "failure = CAST(replace(failure, 'policy', 'Policy') AS BLOB)", "ledger-settlement"),
    ("submission", SETTLED, "failure = NULL", "ledger-settlement"),
    ("submission", SETTLED, "failure = CAST('x' AS BLOB)", "ledger-settlement"),
    ("submission", SETTLED, "state = 'input-applied', outcome = NULL", "ledger-settlement"),
    ("submission", SETTLED, "settled_at = NULL", "ledger-places"),
    ("submission", SETTLED, "program = 'other'", "ledger-places"),
    ("submission", DONE, "disposition = 'unpaid'", "ledger-settlement"),
    ("submission", DONE, "disposition = NULL", "ledger-settlement"),
    ("submission", DONE, "input = CAST('{\"order\": \"o2\"}' AS BLOB)", "ledger-bytes"),
    ("submission", DONE, "input = CAST('{\"order\":\"o1\"}' AS BLOB)", "ledger-bytes"),  # the same value in other bytes
    ("submission", DONE, "input = CAST('{' AS BLOB)", "ledger-bytes"),
    ("submission", DONE, "input_digest = replace(input_digest, 'a', 'b')", "ledger-bytes"),
    ("submission", DONE, "input_sequence = input_sequence + 1", "ledger-input"),
    ("submission", DONE, "input_sequence = NULL", "ledger-input"),
    ("submission", DONE, "key = 'k9'", "ledger-places"),
    ("submission", DONE, "principal = 'mallory'", "ledger-places"),
    ("submission", DONE, "id = 'sub_other'", "ledger-input"),
    ("submission", DONE, "position = 99", "ledger-input"),
    ("submission", "state = 'ready' AND position = 5", "outcome = 'failed'", "ledger-settlement"),
    ("submission", "state = 'ready' AND position = 5", "state = 'settled', outcome = 'failed'", "ledger-settlement"),
    ("submission", "state = 'ready' AND position = 5", "state = 'running'", "ledger-ownership"),
    ("submission", "state = 'suspended'", "state = 'ready'", "ledger-places"),
    ("submission", "state = 'ready' AND position = 5", "input = CAST('1' AS BLOB)", "ledger-bytes"),
    ("effect", CONFIRMED, "status = 'refused'", "ledger-effects"),
    ("effect", CONFIRMED, "status = 'unknown'", "ledger-effects"),
    ("effect", CONFIRMED, "verdict = 'applied'", "ledger-effects"),
    ("effect", CONFIRMED, "key = 'key_other'", "ledger-effects"),
    ("effect", CONFIRMED, "sequence = sequence + 1", "ledger-effects"),
    ("effect", CONFIRMED, "tries = 2", "ledger-effects"),
    ("effect", CONFIRMED, "operation = 'refund'", "ledger-effects"),
    ("effect", CONFIRMED, "effect_class = 'observe'", "ledger-effects"),
    ("effect", CONFIRMED, "business_key = 'order-9'", "ledger-effects"),
    ("effect", CONFIRMED, "submission = 'sub_other'", "ledger-effects"),
    ("effect", CONFIRMED, "call = '1.1'", "ledger-effects"),
    ("effect", CONFIRMED, "step = 'x'", "ledger-effects"),
    ("effect", CONFIRMED, "run = 'run_other'", "ledger-effects"),
    ("effect", CONFIRMED, "thread = 99", "ledger-places"),
    ("effect", CONFIRMED, "id = 'eff_other'", "ledger-effects"),
    ("effect", "status = 'unknown' AND verdict IS NULL", "status = 'confirmed'", "ledger-effects"),
    ("effect", "status = 'unknown' AND verdict IS NULL", "verdict = 'cancel_run'", "ledger-effects"),
    ("effect", "verdict = 'declared' AND step IS NULL AND call = '1.6'", "status = 'confirmed'", "ledger-effects"),
    ("approval", DECIDED, "status = 'rejected'", "ledger-approvals"),
    ("approval", DECIDED, "tool = 'pay'", "ledger-approvals"),
    ("approval", DECIDED, "digest = 'd'", "ledger-approvals"),
    ("approval", DECIDED, "call = '1.0'", "ledger-approvals"),
    ("approval", DECIDED, "run = 'run_other'", "ledger-approvals"),
    ("approval", DECIDED, "by = 'mallory'", "ledger-decisions"),
    ("approval", DECIDED, "decision_reason = 'oops'", "ledger-decisions"),
    ("approval", DECIDED, "decided_at = NULL", "ledger-decisions"),
    ("approval", DECIDED, "arguments = CAST('{\"cents\":9}' AS BLOB)", "ledger-decisions"),
    ("approval", DECIDED, "submission = 'sub_other'", "ledger-places"),
    ("approval", DECIDED, "thread = 99", "ledger-places"),
    ("approval", PENDING, "status = 'approved'", "ledger-approvals"),
    ("approval", PENDING, "reason = 'for fun'", "ledger-decisions"),
    ("approval", PENDING, "arguments = CAST('{\"cents\":6}' AS BLOB)", "ledger-decisions"),
    ("approval", PENDING, "arguments = CAST('{' AS BLOB)", "ledger-decisions"),
    ("intent", "kind = 'cancel'", "by = 'mallory'", "ledger-commands"),
    ("intent", "kind = 'cancel'", "reason = 'oops'", "ledger-commands"),
    ("intent", "kind = 'cancel'", "applied_at = NULL", "ledger-commands"),
    ("intent", "kind = 'approval'", "body = CAST(replace(body, 'approved', 'rejected') AS BLOB)", "ledger-commands"),
    ("intent", "kind = 'approval'", "body = CAST('{' AS BLOB)", "ledger-commands"),
    ("intent", "kind = 'approval'", "applied_at = NULL", "ledger-commands"),
    ("intent", "kind = 'verdict' AND by = 'bob' AND reason = 'seen'", "by = 'mallory'", "ledger-commands"),
    ("intent", "kind = 'verdict' AND reason = 'seen'", "body = CAST(replace(body, 'applied', 'refused') AS BLOB)",
     "ledger-commands"),
    ("thread", "id = 'shop'", "epoch = 1", "ledger-ownership"),
    ("thread", "id = 'shop'", "owner = 'w_9'", "ledger-ownership"),
    ("thread", "id = 'late'", "due_at = 1", "ledger-ownership"),
    ("thread", "id = 'fresh'", "due_at = NULL", "ledger-ownership"),
    ("thread", "id = 'late'", "positions = 2", "ledger-input"),
    ("thread", "id = 'late'", "id = 'early'", "record-identity"),
]  # fmt: skip


@pytest.mark.parametrize(("table", "where", "new", "check"), LEDGER, ids=[f"{t}-{n}-{w}"[:70] for t, w, n, _ in LEDGER])
def test_what_a_row_repeats(copy: Path, table: str, where: str, new: str, check: str) -> None:
    change(copy, f"UPDATE {table} SET {new} WHERE rowid IN (SELECT rowid FROM {table} WHERE {where} LIMIT 1)"
           if table not in ("effect", "approval")
           else f"UPDATE {table} SET {new} WHERE id IN (SELECT id FROM {table} WHERE {where} LIMIT 1)")  # fmt: skip
    found = verified(copy)
    assert not found
    assert check in names(found), found.failed()


@pytest.mark.parametrize("table", ["submission", "effect", "approval", "intent"])
def test_a_missing_row(copy: Path, table: str) -> None:
    """One of each in turn: whatever the log started, asked or admitted has its row."""
    column = "number" if table in ("submission", "intent") else "id"
    for (id,) in look(copy, f"SELECT {column} FROM {table}"):
        row = look(copy, f"SELECT * FROM {table} WHERE {column} = ?", id)[0]
        change(copy, f"DELETE FROM {table} WHERE {column} = ?", id)
        if table == "intent":  # a command that is in the log is fact without its row
            assert verified(copy)
        else:
            assert not verified(copy), f"{table} {row} is gone and nobody said so"
        change(copy, f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", *row)
    assert verified(copy)


@pytest.mark.parametrize("table", ["effect", "approval"])
def test_a_row_of_no_run(copy: Path, table: str) -> None:
    row = list(look(copy, f"SELECT * FROM {table} LIMIT 1")[0])
    columns = [name for (name,) in look(copy, f"SELECT name FROM pragma_table_info('{table}')")]
    row[columns.index("id")], row[columns.index("run")] = "stray", "run_stray"
    if table == "effect":
        row[columns.index("business_key")] = None
    change(copy, f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", *row)
    found = verified(copy)
    assert [(check.name, check.thread) for check in found.failed()] == [("ledger-places", None)]


def test_a_command_is_not_marked_as_taken_in_before_the_log_holds_it(copy: Path, written: Written) -> None:
    values = (written.queued.thread_number, written.queued.id, "cancel", written.queued.id, b"{}", "ada", "", 5)
    sql = "INSERT INTO intent (thread, submission, kind, subject, body, by, reason, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    change(copy, sql, *values)
    assert verified(copy), "a command on its way is in good order"
    change(copy, "UPDATE intent SET applied_at = 6 WHERE subject = ?", written.queued.id)
    assert names(verified(copy)) == {"ledger-commands"}


def test_a_file_that_is_damaged_below_the_rows(copy: Path) -> None:
    [(page,)] = look(copy, "SELECT rootpage FROM sqlite_schema WHERE name = 'effect_run'")
    size = look(copy, "PRAGMA page_size")[0][0]
    raw = bytearray(copy.read_bytes())
    raw[(page - 1) * size + size // 2 : page * size] = b"\x07" * (size - size // 2)
    copy.write_bytes(raw)
    assert "store-integrity" in names(verified(copy))
    assert "store-integrity" in names(verified(copy, "shop"))


def test_findings_are_bounded(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.projections.verification.FINDINGS_MAX", 2)
    change(copy, "UPDATE batch SET tail = zeroblob(32)", rows=look(copy, "SELECT count(*) FROM batch")[0][0])
    found = verified(copy)
    assert not found
    assert len(found.failed()) == 3
    assert found.failed()[-1].name == "more"


def test_threads_are_read_in_several_snapshots(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perdure.projections.verification.SCAN_RECORDS_MAX", 1)
    monkeypatch.setattr("perdure.projections.verification.PAGE_ROWS_MAX", 2)
    monkeypatch.setattr("perdure.projections.verification.PAGE_BATCHES_MAX", 3)
    found = verified(copy)
    assert found
    assert found.threads == 4
    change(copy, "UPDATE submission SET outcome = 'completed' WHERE outcome = 'failed'")
    assert not verified(copy)


def test_a_verification_is_a_value(copy: Path) -> None:
    found = verified(copy)
    assert msgspec.to_builtins(found.checks[0]) == {
        "name": "sequence-contiguity", "status": "passed", "detail": "", "thread": None,
    }  # fmt: skip
