"""Connections: how a database file is opened, checked, and how SQLite's errors become ours.

Refused before any write: an SQLite with the WAL-reset defect, a network file system, a file that is not ours, a newer
format, settings that did not take.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from perdure.clock import SystemClock
from perdure.errors import Conflict, Corrupt, Error, Incompatible, Invalid, Unavailable
from perdure.limits import BUSY_SECONDS_MAX, BUSY_WARNING_SECONDS

log = logging.getLogger("perdure")

APPLICATION_ID = 0x50455244  # "PERD"
FORMAT = 3  # user_version, the number of the newest migration; newer is refused
RELEASE = "0.1"  # written as the oldest release that may read and write this file
SQLITE_MIN = (3, 51, 3)  # older ones can lose acknowledged commits at a WAL reset with two connections
NETWORK_FILE_SYSTEMS = frozenset(
    {"9p", "afs", "ceph", "cifs", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "smb", "smb2", "smb3", "smbfs"}
    | {"fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"}
)
MEMORY = ":memory:"
_HERE = Path(__file__).parent


def file_system(path: Path) -> str:
    """Type of the file system that holds ``path`` ("" where the system does not tell)."""
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    target, best, kind = str(path.resolve()), "", ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        if (target == mount or target.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


def check_place(path: Path, *, create: bool, file_system_of: Callable[[Path], str] = file_system) -> None:
    """Refuse a place where a database cannot be kept safely.

    Raises:
        Unavailable: the folder or the file is missing, or is no file. Invalid: a network file system.
    """
    folder = path.parent
    if not folder.is_dir():
        raise Unavailable(f"The folder {str(folder)!r} of the store does not exist.", help=f"Run `mkdir -p {folder}`.")
    if path.is_dir():
        raise Unavailable(f"The store {str(path)!r} is a folder, not a file.", help="Name a file inside it.")
    if path.exists() and not path.is_file():
        raise Unavailable(f"The store {str(path)!r} is no regular file.", help="Name another file.")
    if not create and not (path.exists() and path.stat().st_size):
        raise Unavailable(f"There is no database at {str(path)!r}.", help="Check the path, or create it with a worker.")
    kind = file_system_of(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        raise Invalid(
            f"The store {str(path)!r} is on a network file system ({kind}), where SQLite's locks do not hold.",
            help="Use a local disk, or another database.",
        )


def translate(error: Exception, path: str) -> Error:
    """Our error for one of SQLite's."""
    where = f"The database {path!r}"
    match error:
        case apsw.FullError():
            return Unavailable(f"{where} is full: {error}.", help="Free disk space and try again; nothing was lost.")
        case apsw.BusyError() | apsw.LockedError():
            return Unavailable(f"{where} is locked by another process: {error}.", help="Try again.")
        case apsw.ReadOnlyError() | apsw.PermissionsError() | apsw.AuthError():
            return Unavailable(f"{where} cannot be written: {error}.", help="Check its permissions.")
        case apsw.ConstraintError():
            return Conflict(f"{where} refused what contradicts it: {error}.")
        case apsw.NotADBError():
            return Corrupt(f"{where} is not an SQLite database.", help="Name another file, or restore a backup.")
        case apsw.CorruptError() | apsw.FormatError():
            return Corrupt(f"{where} is malformed: {error}.", help="Restore it from a backup.")
        case apsw.CantOpenError():
            return Unavailable(f"{where} cannot be opened: {error}.", help="Check that path and permissions are right.")
        case apsw.IOError():
            return Unavailable(f"{where} met an I/O error: {error}.", help="Check the disk and try again.")
        case _:
            return Unavailable(f"{where} failed: {type(error).__name__}: {error}.")


class BusyPolicy:
    """How a connection waits for another process: short random sleeps, which share a file evenly.

    ``patience`` is in seconds; a lone commit on the loop's thread lowers it and hands over to the writer thread.
    """

    def __init__(self) -> None:
        self.patience = BUSY_SECONDS_MAX
        self._began = 0.0
        self._warned = False
        self._random = random.Random(os.getpid())

    def __call__(self, count: int) -> bool:
        now = time.monotonic()
        if count == 0:
            self._began, self._warned = now, False
        waited = now - self._began
        if waited >= self.patience:
            return False
        if waited > BUSY_WARNING_SECONDS and not self._warned:
            self._warned = True
            log.warning("another process has held the write lock of the database for %.0f s; waiting", waited)
        time.sleep(self._random.uniform(0.0002, 0.001))
        return True


def connect(path: str, busy: BusyPolicy | None = None, *, read_only: bool = False) -> apsw.Connection:
    """A connection with our settings, read back and checked.

    Raises:
        Unavailable, Corrupt, Incompatible: typed, before any write.
    """
    version = tuple(int(part) for part in apsw.sqlite_lib_version().split("."))
    if version < SQLITE_MIN:
        raise Incompatible(
            f"SQLite {apsw.sqlite_lib_version()} can lose acknowledged commits (WAL-reset defect).",
            help="Install apsw 3.51.3 or newer.",
        )
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    if read_only:
        flags = apsw.SQLITE_OPEN_READONLY
    try:
        connection = apsw.Connection(path, flags=flags)
    except apsw.Error as error:
        raise translate(error, path) from error
    try:
        connection.set_busy_handler(busy or BusyPolicy())
        # One plan a statement: without this, every change of a bound value compiles a join again.
        connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        if not read_only and connection.readonly("main"):
            raise apsw.ReadOnlyError("the file or its folder is read-only")
        _settings(connection, path, read_only)
    except apsw.Error as error:
        connection.close()
        raise translate(error, path) from error
    except Error:
        connection.close()
        raise
    return connection


def _settings(connection: apsw.Connection, path: str, read_only: bool) -> None:
    memory = path == MEMORY

    def pragma(name: str, value: str, expected: Any) -> None:
        connection.execute(f"PRAGMA {name}={value}").fetchall()
        actual = connection.execute(f"PRAGMA {name}").fetchall()[0][0]
        if actual != expected:
            raise Unavailable(f"The database {path!r} refused {name}={value}: it says {actual!r}.")

    if not read_only and not memory:
        _patiently(lambda: pragma("journal_mode", "WAL", "wal"))
    pragma("synchronous", "FULL", 2)
    pragma("foreign_keys", "ON", 1)
    if not read_only:
        pragma("secure_delete", "ON", 1)
    pragma("fullfsync", "ON", 1)
    pragma("checkpoint_fullfsync", "ON", 1)


def _patiently(change: Callable[[], None]) -> None:
    """Wait for other processes where SQLite does not: several may open a new file and change its journal mode at once."""
    busy, tries = BusyPolicy(), 0
    while True:
        try:
            return change()
        except apsw.BusyError:
            if not busy(tries):
                raise
        tries += 1


def pragma(connection: apsw.Connection, name: str) -> Any:
    """Value of a pragma."""
    return connection.execute(f"PRAGMA {name}").fetchall()[0][0]


def is_empty(connection: apsw.Connection) -> bool:
    """Whether the database holds nothing at all yet."""
    return not connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()


def check_format(connection: apsw.Connection, path: str) -> None:
    """Refuse a database that is not ours or of a format that :func:`migrate` cannot bring up. Reads only.

    Raises:
        Invalid: not a Perdure database. Incompatible: an unknown format, or a newer release's.
    """
    if pragma(connection, "application_id") != APPLICATION_ID:
        raise Invalid(f"{path!r} is an SQLite database, but not one of Perdure's.", help="Name another file.")
    found = pragma(connection, "user_version")
    if not 1 <= found <= FORMAT:
        age = "newer" if found > FORMAT else "older"
        raise Incompatible(
            f"{path!r} has format {found}, {age} than any of this release, which knows 1 to {FORMAT}.",
            help="Use the release that wrote it.",
        )
    rows = connection.execute("SELECT value FROM meta WHERE key = 'needs_release'").fetchall()
    needs = str(rows[0][0]) if rows else "0"
    try:
        newer = tuple(map(int, needs.split("."))) > tuple(map(int, RELEASE.split(".")))
    except ValueError:
        newer = True  # a way of counting releases that this one does not know
    if newer:
        raise Incompatible(f"{path!r} needs release {needs} or newer; this is {RELEASE}.", help="Upgrade perdure.")


def schema() -> str:
    """The statements of ``schema.sql``."""
    return (_HERE / "schema.sql").read_text()


def migrations() -> list[str]:
    """The numbered migrations, in order; applied from nothing they arrive at :func:`schema`."""
    folder = _HERE / "migrations"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [f.read_text() for f in files]


def create(connection: apsw.Connection) -> None:
    """Lay out an empty database, unless another process was first."""
    with _alone(connection):
        if is_empty(connection):
            connection.execute(schema() + f"PRAGMA application_id={APPLICATION_ID};")
            connection.execute("INSERT INTO meta VALUES ('needs_release', ?)", (RELEASE,))
            connection.execute(f"PRAGMA user_version={FORMAT}")


def migrate(connection: apsw.Connection, path: str) -> None:
    """Bring a database of an older format to :data:`FORMAT` in one transaction, unless another process was first.

    Raises:
        Unavailable: a live lease says that workers, of the older release, are at work; nothing was written.
    """
    if pragma(connection, "user_version") == FORMAT:
        return
    with _alone(connection):
        found = pragma(connection, "user_version")
        held = "SELECT count(*) FROM thread WHERE owner IS NOT NULL AND lease_until > ?"
        if found < FORMAT and (live := connection.execute(held, (SystemClock().now(),)).fetchall()[0][0]):
            raise Unavailable(
                f"{path!r} has format {found}, and workers hold {live} of its threads while it should become {FORMAT}.",
                help="Stop the workers of the older release, or wait until their leases ended, and try again.",
            )
        for script in migrations()[found:]:
            connection.execute(script)
        connection.execute("UPDATE meta SET value = ? WHERE key = 'needs_release'", (RELEASE,))
        connection.execute(f"PRAGMA user_version={FORMAT}")


@contextmanager
def _alone(connection: apsw.Connection) -> Iterator[None]:
    """A transaction during which nobody else writes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
