"""A database of an older format becomes one of this release when it is opened, whole or not at all."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.errors import Conflict, Incompatible, Unavailable
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Fault
from perdure.ports.log import Tail
from perdure.records.codec import EMPTY_TAIL
from perdure.rules.accounting import Rate
from perdure.stores.sqlite import connection as connections
from perdure.stores.sqlite.store import SqliteStore, open_store
from perdure.testing.conformance.given import Given

pytestmark = pytest.mark.anyio

OLDER = range(1, connections.FORMAT)


def lay_out(path: Path, number: int) -> None:
    """An empty database as the release of format ``number`` made it."""
    connection = connections.connect(str(path))
    for script in connections.migrations()[:number]:
        connection.execute(script)
    connection.execute("INSERT INTO meta VALUES ('needs_release', '0.0')")
    connection.execute(f"PRAGMA application_id={connections.APPLICATION_ID}; PRAGMA user_version={number}")
    connection.close()


async def worked(path: Path, number: int, *, now: int = 10) -> None:
    """A database of format ``number`` in which every table has rows: work settled, waiting, owned and blocked."""
    lay_out(path, number)
    store = SqliteStore(str(path))
    given = Given(store)
    waiting = None
    for thread in ("settled", "waiting", "owned"):
        row, claimed = await given.running(thread, now=now)
        await given.append(claimed, Tail(0, EMPTY_TAIL, 0), thread.encode())
        if thread == "settled":
            await given.settle(claimed, now=now)
        if thread == "waiting":
            await given.effect(row, status="unknown")
            await given.approval(row)
            await given.park(claimed, now=now)
            waiting = row
    assert waiting is not None
    await given.intend(waiting, "cancel", at=now)
    blocked = Fault(waiting.thread_number, "waiting", "corrupt", "", now, now, 1, now)
    await given.do(lambda tx: tx.ledger.put_fault(blocked))
    await store.close()
    if number >= 2:
        with contextlib.closing(apsw.Connection(str(path))) as connection:
            connection.execute("""INSERT INTO model VALUES ('gpt', 1, 1, 1); INSERT INTO watcher VALUES ('sub', 'w', 1);
                INSERT INTO live (submission, producer, at, body) VALUES ('sub', 'w', 1, x'00')""")


def contents(path: Path) -> dict[str, list[Any]]:
    """Every row of every table but the one of versions."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY 1")]
    found = {name: connection.execute(f"SELECT * FROM {name}").fetchall() for name in tables if name != "meta"}
    connection.close()
    return found


def layout(path: Path) -> tuple[int, Any, list[Any]]:
    """Format, oldest release, statements."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    statements = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY 1, 2").fetchall()
    [(release,)] = connection.execute("SELECT value FROM meta").fetchall()
    found = connections.pragma(connection, "user_version"), release, statements
    connection.close()
    return found


def test_every_format_has_its_migration() -> None:
    assert len(connections.migrations()) == connections.FORMAT


@pytest.mark.parametrize("number", OLDER)
async def test_an_older_database_is_brought_up_and_keeps_every_row(tmp_path: Path, number: int) -> None:
    path, fresh = tmp_path / "store.db", tmp_path / "fresh.db"
    await worked(path, number)
    before = contents(path)
    assert all(before.values()), "every table is in use"
    assert len(before) >= 7
    assert layout(path)[:2] == (number, "0.0")
    store = open_store(path, create=False)
    await open_store(fresh).close()
    assert layout(path) == layout(fresh)
    after = contents(path)
    assert {name: after[name] for name in before} == before
    assert {row for name in after.keys() - before.keys() for row in after[name]} == set()
    given = Given(store)
    await given.do(lambda tx: tx.ledger.clear_fault(2, 10))
    assert {c.thread for c in await given.claims("w2", now=10**6)} == {"waiting", "owned"}
    rate = Rate(requests=1)
    taken = [
        await store.write(Boundary.MODEL_RATE, lambda tx: tx.ledger.take_model_turn("m", 1, 0, rate)) for _ in range(2)
    ]
    assert taken == [0, 60_000_001]
    assert await store.integrity() == []
    await store.close()
    await open_store(path).close()
    assert layout(path) == layout(fresh)


@pytest.mark.parametrize("number", OLDER)
async def test_an_older_database_that_live_workers_use_is_refused_and_stays_as_it_is(
    tmp_path: Path, number: int
) -> None:
    path = tmp_path / "store.db"
    await worked(path, number, now=time.time_ns() // 1000 + 3_600_000_000)
    before = path.read_bytes(), layout(path)
    with pytest.raises(Unavailable, match=rf"format {number}, and workers hold 1 of its threads.*Stop the workers"):
        open_store(path)
    assert (path.read_bytes(), layout(path)) == before
    connection = apsw.Connection(str(path))
    connection.execute("UPDATE thread SET lease_until = ? WHERE owner IS NOT NULL", (time.time_ns() // 1000,))
    connection.close()
    await open_store(path).close()
    assert layout(path)[0] == connections.FORMAT


@pytest.mark.parametrize("number", OLDER)
async def test_a_migration_that_fails_leaves_the_older_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = tmp_path / "store.db"
    await worked(path, number)
    before = layout(path), contents(path)
    scripts = connections.migrations()
    with monkeypatch.context() as patch:
        patch.setattr(connections, "migrations", lambda: [*scripts, "INSERT INTO meta VALUES ('needs_release', '2')"])
        with pytest.raises(Conflict, match=r"meta\.key"):
            open_store(path)
    assert (layout(path), contents(path)) == before
    await open_store(path).close()
    assert layout(path)[0] == connections.FORMAT


async def test_a_database_of_this_format_is_not_migrated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live workers of this release hinder nobody, and nothing is locked."""
    store = open_store(tmp_path / "store.db")
    given = Given(store)
    await given.running(now=time.time_ns() // 1000 + 3_600_000_000)
    monkeypatch.setattr(connections, "migrations", lambda: ["this is no statement"] * connections.FORMAT)
    other = apsw.Connection(store.path)
    other.execute("BEGIN IMMEDIATE")
    await open_store(store.path).close()
    other.execute("ROLLBACK")
    other.close()
    await store.close()


async def test_whoever_waited_for_another_process_finds_it_done(tmp_path: Path) -> None:
    """Both saw the old format; the second one migrates nothing, and what it does not know it refuses."""
    path = tmp_path / "store.db"
    lay_out(path, 1)
    connection = connections.connect(str(path))
    seen: list[str] = []

    class Late:
        """Another process is first, between the look at the format and the lock."""

        in_transaction = property(lambda self: connection.in_transaction)

        def execute(self, sql: str, *params: Any) -> Any:
            if sql == "BEGIN IMMEDIATE":
                other = connections.connect(str(path))
                connections.migrate(other, str(path))
                other.close()
            seen.append(sql)
            return connection.execute(sql, *params)

    connections.migrate(Late(), str(path))  # type: ignore[arg-type]
    assert "COMMIT" in seen
    assert not [sql for sql in seen if sql.startswith(("CREATE", "--"))]
    assert layout(path)[0] == connections.FORMAT
    connection.execute("PRAGMA user_version=77")
    connection.close()
    with pytest.raises(Incompatible, match="newer"):
        open_store(path)
