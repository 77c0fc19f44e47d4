"""A store that cannot serve says so in a typed error, before it writes, and works again when it can."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.errors import Conflict, Corrupt, Error, Incompatible, Invalid, Unavailable
from perdure.limits import MEMORY_THREAD_BYTES_MAX, MEMORY_THREADS_MAX
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Admission
from perdure.ports.log import Tail
from perdure.ports.store import Transaction
from perdure.records.codec import EMPTY_TAIL
from perdure.stores.sqlite import connection as connections
from perdure.stores.sqlite.store import SqliteStore, open_store, parse_url
from perdure.testing.conformance.given import Given, tail_after

pytestmark = pytest.mark.anyio


def admission(n: int, size: int = 2) -> Admission:
    return Admission(f"sub_{n}", f"t{n}", f"run_{n}", "p", None, "agent", "d", b"x" * size, "i", 1)


def admit(store: SqliteStore, n: int, size: int = 2) -> asyncio.Future[Any]:
    return store.write(Boundary.ADMIT, lambda tx: tx.ledger.admit(admission(n, size)))


def admitted(store: SqliteStore) -> set[str]:
    return {row.id for row in store.read(lambda tx: tx.ledger.submissions())}


async def filled(path: Path, count: int = 50) -> None:
    store = open_store(path)
    await asyncio.gather(*(admit(store, n, 500) for n in range(count)))
    await store.close()


def database(path: Path, *statements: str) -> None:
    connection = apsw.Connection(str(path))
    for statement in statements:
        connection.execute(statement)
    connection.close()


def run(*command: str) -> None:
    """Do something that only root may, or skip."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"not permitted here: {' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def mounted(place: Path, size: str = "4m") -> Iterator[Path]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a file system of its own needs root on Linux")
    place.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


# -- places -----------------------------------------------------------------------------------------------------------


def test_a_missing_folder_is_unavailable_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="mkdir -p"):
        open_store(tmp_path / "missing" / "store.db")
    assert list(tmp_path.iterdir()) == []


async def test_a_folder_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="folder"):
        open_store(tmp_path)


async def test_a_special_file_is_no_store(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(Unavailable, match="no regular file"):
            open_store(path)


@pytest.mark.parametrize("empty", [False, True])
def test_without_leave_to_create_there_must_be_a_database(tmp_path: Path, empty: bool) -> None:
    path = tmp_path / "store.db"
    if empty:
        path.touch()
    with pytest.raises(Unavailable, match="no database"):
        open_store(path, create=False)
    assert path.exists() == empty
    asyncio.run(filled(path))
    open_store(path, create=False).connection.close()


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "fuse.sshfs"])
def test_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(Invalid, match=f"network file system \\({kind}\\)"):
        connections.check_place(tmp_path / "store.db", create=True, file_system_of=lambda _: kind)
    assert list(tmp_path.iterdir()) == []


def test_the_file_system_of_a_place_is_known(tmp_path: Path) -> None:
    if sys.platform != "linux":
        assert connections.file_system(tmp_path) == ""
        return
    assert connections.file_system(Path("/proc/self")) == "proc"
    assert connections.file_system(tmp_path) not in connections.NETWORK_FILE_SYSTEMS | {""}


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("memory:", ":memory:"),
        (":memory:", ":memory:"),
        ("a/b.db", "a/b.db"),
        (Path("a/b.db"), "a/b.db"),
        ("sqlite:///a/b.db", "a/b.db"),
        ("sqlite:////a/b%20c.db", "/a/b c.db"),
        ("", None),
        ("  ", None),
        ("a\0b", None),
        ("sqlite://host/a.db", None),
        ("sqlite:///", None),
        ("sqlite:shop.db", None),
        ("sqlite:/shop.db", None),
        ("sqlite:///%20", None),
        ("sqlite:///a%00b", None),
        ("sqlite:///a.db?mode=ro", None),
        ("sqlite:///a.db#b", None),
        ("sqlite:///a%3Fb%23.db", "a?b#.db"),
        ("postgresql://host/name", None),
    ],
)
def test_what_an_address_names(url: str | Path, path: str | None) -> None:
    if path is None:
        with pytest.raises(Invalid):
            parse_url(url)
    else:
        assert parse_url(url) == path


# -- files that are not ours ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"short", b"# a text file\n" * 400, b"SQLite format 3\x00" + b"\xff" * 5000])
async def test_what_is_no_database_is_corrupt_and_stays_as_it_is(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "store.db"
    path.write_bytes(content)
    with pytest.raises(Corrupt):
        open_store(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("statements", "error"),
    [
        (["CREATE TABLE theirs (a)"], Invalid),
        (["PRAGMA application_id=7"], Invalid),
        (["PRAGMA application_id=7", "PRAGMA journal_mode=WAL", "CREATE TABLE theirs (a)"], Invalid),
    ],
    ids=["no application id", "empty but another's", "another's in WAL"],
)
async def test_a_foreign_database_is_refused_and_stays_as_it_is(
    tmp_path: Path, statements: list[str], error: type[Error]
) -> None:
    path = tmp_path / "store.db"
    database(path, *statements)
    before = path.read_bytes()
    with pytest.raises(error, match="not one of Perdure's"):
        open_store(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("statement", "match"),
    [
        (f"PRAGMA user_version={connections.FORMAT + 1}", "newer"),
        ("PRAGMA user_version=0", "older"),
        ("UPDATE meta SET value = '99.0' WHERE key = 'needs_release'", "99.0"),
        ("UPDATE meta SET value = 'two' WHERE key = 'needs_release'", "two"),
    ],
)
async def test_another_format_is_refused_and_stays_as_it_is(tmp_path: Path, statement: str, match: str) -> None:
    path = tmp_path / "store.db"
    await filled(path)
    database(path, statement)
    before = path.read_bytes()
    with pytest.raises(Incompatible, match=match):
        open_store(path)
    assert path.read_bytes() == before


async def test_damage_is_corrupt_when_opened_or_when_met(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await filled(path, 400)
    whole = path.read_bytes()
    found = set()
    for name, content in {
        "cut after its header": whole[:100],
        "cut in the schema": whole[:3000],
        "cut in half": whole[: len(whole) // 2],
        "schema overwritten": whole[:100] + b"\xab" * 3000 + whole[3100:],
        "rows overwritten": whole[: len(whole) // 2] + b"\xab" * 40_000 + whole[len(whole) // 2 + 40_000 :],
    }.items():
        path.write_bytes(content)
        try:
            store = open_store(path)
        except Error as error:
            found.add((name, "open", type(error)))
            continue
        try:
            complaints = await store.integrity()
            assert complaints, name
        except Error as error:
            found.add((name, "check", type(error)))
        try:
            store.read(lambda tx: tx.ledger.submissions())
            await store.scan(lambda tx: [tx.ledger.submission(f"sub_{n}") for n in range(400)])
        except Error as error:
            found.add((name, "read", type(error)))
        await store.close()
    assert {error for *_, error in found} == {Corrupt}, found
    assert {name for name, *_ in found} >= {"cut after its header", "cut in the schema", "cut in half"}, found


async def test_a_healthy_store_has_no_complaints(tmp_path: Path) -> None:
    await filled(tmp_path / "store.db")
    store = open_store(tmp_path / "store.db")
    assert await store.integrity() == []
    await store.close()


# -- read-only --------------------------------------------------------------------------------------------------------


async def test_a_file_that_cannot_be_changed_is_unavailable_when_opened(tmp_path: Path) -> None:
    """Root may write whatever its mode is, so the file is made immutable."""
    path = tmp_path / "store.db"
    await filled(path)
    path.chmod(0o400)
    if os.geteuid() == 0:
        run("chattr", "+i", str(path))
    try:
        with pytest.raises(Unavailable, match="cannot be written"):
            open_store(path)
    finally:
        if os.geteuid() == 0:
            run("chattr", "-i", str(path))
    path.chmod(0o600)
    await open_store(path).close()


async def test_a_folder_that_cannot_be_changed_is_unavailable_when_opened(tmp_path: Path) -> None:
    with mounted(tmp_path / "place") as place:
        await filled(place / "store.db")
        run("mount", "-o", "remount,ro", str(place))
        for name in ("store.db", "new.db"):
            with pytest.raises(Unavailable):
                open_store(place / name)
        run("mount", "-o", "remount,rw", str(place))
        store = open_store(place / "store.db")
        assert len(admitted(store)) == 50
        await store.close()


# -- full -------------------------------------------------------------------------------------------------------------


async def _fill_and_go_on(store: SqliteStore, make_room: Any) -> None:
    kept: set[str] = set()
    failure: BaseException | None = None
    for start in range(0, 4000, 16):
        results = await asyncio.gather(
            *(admit(store, n, 4000) for n in range(start, start + 16)), return_exceptions=True
        )
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            failure = failures[0]
            assert len(failures) == 16, "every unit of the group fails"
            break
        kept |= {f"sub_{n}" for n in range(start, start + 16)}
    assert isinstance(failure, Unavailable), failure
    assert "full" in str(failure)
    assert admitted(store) == kept, "nothing half written"
    make_room()
    await admit(store, 9999, 4000)
    assert admitted(store) == kept | {"sub_9999"}
    assert await store.integrity() == []


async def test_a_full_database_fails_whole_groups_and_works_again_with_room(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    store.connection.execute("PRAGMA max_page_count=400")
    await _fill_and_go_on(store, lambda: store.connection.execute("PRAGMA max_page_count=100000"))
    await store.close()


async def test_a_full_disk_fails_whole_groups_and_works_again_with_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "place", "2m") as place:
        store = open_store(place / "store.db")
        await _fill_and_go_on(store, lambda: run("mount", "-o", "remount,size=8m", str(place)))
        await store.close()


async def test_a_disk_too_full_to_create_a_store_is_unavailable(tmp_path: Path) -> None:
    with mounted(tmp_path / "place", "64k") as place:
        (place / "ballast").write_bytes(b"x" * 60_000)
        with pytest.raises(Unavailable):
            open_store(place / "store.db")
        run("mount", "-o", "remount,size=8m", str(place))
        await open_store(place / "store.db").close()


async def test_a_store_in_memory_has_limits_and_says_which(tmp_path: Path) -> None:
    store = open_store("memory:")
    given = Given(store)
    row, claimed = await given.running()
    tail, body = Tail(0, EMPTY_TAIL, 0), b"x" * (MEMORY_THREAD_BYTES_MAX // 4)

    def regretted(tx: Transaction) -> None:
        tx.log.append(row.thread_number, claimed.epoch, claimed.token, tail, 1, body, tail_after(tail, body).digest)
        raise Conflict("regretted")

    for _ in range(10):  # what was rolled back takes no room
        with pytest.raises(Conflict):
            await given.do(regretted)
    for _ in range(4):
        tail = await given.append(claimed, tail, body)
    with pytest.raises(Unavailable, match="MEMORY_THREAD_BYTES_MAX"):
        await given.append(claimed, tail, b"y")
    assert given.tail(row.thread_number) == tail
    for n in range(1, MEMORY_THREADS_MAX):
        await given.admit(f"t{n}")
    with pytest.raises(Unavailable, match="MEMORY_THREADS_MAX"):
        await given.admit("one too many")
    await store.close()


# -- locked -----------------------------------------------------------------------------------------------------------


async def test_a_lock_beyond_patience_is_unavailable_and_the_next_try_works(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    other = apsw.Connection(store.path)
    other.execute("BEGIN IMMEDIATE")
    store._writer._busy_policy.patience = 0.05
    results = await asyncio.gather(*(admit(store, n) for n in range(5)), return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable] * 5, results
    assert "locked" in str(results[0])
    with pytest.raises(Unavailable, match="locked"):  # alone, it is tried on the loop first
        await admit(store, 5)
    assert admitted(store) == set(), "reading waits for nobody"
    other.execute("ROLLBACK")
    await admit(store, 6)
    assert admitted(store) == {"sub_6"}
    other.close()
    await store.close()


async def test_a_short_lock_is_waited_for(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    other = apsw.Connection(store.path)
    other.execute("BEGIN IMMEDIATE")
    futures = [admit(store, n) for n in range(3)]
    await asyncio.sleep(0.05)
    assert not any(future.done() for future in futures)
    other.execute("ROLLBACK")
    await asyncio.gather(*futures)
    other.close()
    await store.close()


# -- settings ---------------------------------------------------------------------------------------------------------


async def test_settings_are_as_the_design_says(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    wanted = {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "secure_delete": 1,
        "fullfsync": 1,
        "checkpoint_fullfsync": 1,
        "application_id": connections.APPLICATION_ID,
        "user_version": connections.FORMAT,
    }
    assert {name: connections.pragma(store.connection, name) for name in wanted} == wanted
    await store.close()


def test_a_setting_that_does_not_take_is_refused() -> None:
    class Stubborn:
        def execute(self, sql: str) -> Any:
            return apsw.Connection(":memory:").execute(sql if "journal_mode" in sql else "SELECT 0")

    with pytest.raises(Unavailable, match="journal_mode=WAL"):
        connections._settings(Stubborn(), "store.db", read_only=False)  # type: ignore[arg-type]


def test_an_sqlite_that_can_lose_commits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.50.4")
    with pytest.raises(Incompatible, match=r"3\.50\.4"):
        open_store(tmp_path / "store.db")
    assert list(tmp_path.iterdir()) == []


def test_the_sqlite_of_the_standard_library_is_never_loaded() -> None:
    """Two copies in one process drop each other's locks."""
    program = (
        "import sys, perdure, perdure.stores.sqlite.store, perdure.testing.split, perdure.testing.conformance.ledger;"
        "print(sorted({'sqlite3', '_sqlite3'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_migrations_arrive_at_the_schema() -> None:
    def dump(*scripts: str) -> list[Any]:
        connection = apsw.Connection(":memory:")
        for script in scripts:
            connection.execute(script)
        return connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY 1, 2").fetchall()

    assert connections.migrations()
    assert dump(*connections.migrations()) == dump(connections.schema())
