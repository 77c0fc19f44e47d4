"""The SQLite store: one file (or one in-memory connection), a writer, a reading connection, a watcher.

Several processes may open one file. Each looks at ``PRAGMA data_version`` of its write connection some forty times a
second, which changes only when another process committed; tables are read only then.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import apsw

from perdure.errors import Corrupt, Invalid, Unavailable
from perdure.limits import LOOP_STALL_SECONDS_MAX, RENEWALS_PER_LEASE, WATCH_SECONDS
from perdure.ports.failpoints import Boundary, Failpoint
from perdure.ports.store import Transaction, Unit
from perdure.stores.sqlite import connection as connections
from perdure.stores.sqlite.ledger import SqliteLedger
from perdure.stores.sqlite.log import SqliteLog
from perdure.stores.sqlite.writer import Job, Writer, as_transaction

T = TypeVar("T")
log = logging.getLogger("perdure")


def parse_url(url: str | Path) -> str:
    """The file path (or ``:memory:``) that a store argument names: a path, ``sqlite:///path`` or ``memory:``.

    Raises:
        Invalid: another scheme, or nothing.
    """
    text = str(url)
    if text in ("memory:", connections.MEMORY):
        return connections.MEMORY
    if not text.strip() or "\0" in text:
        raise Invalid(f"The store {text!r} names no file.", help="Give a path, sqlite:///path or memory:.")
    if text.startswith("sqlite:"):
        parts = urlsplit(text)
        path = unquote(parts.path[1:])
        if not text.startswith("sqlite:///") or not path.strip("/ ") or "\0" in path:
            raise Invalid(f"{text!r} is not a store address.", help="Write sqlite:///relative or sqlite:////absolute.")
        if "?" in text or "#" in text:
            raise Invalid(
                f"{text!r} has options, and a store address takes none.",
                help="Write `?` as %3F and `#` as %23 in names.",
            )
        return path
    if "://" in text:
        scheme = text.split("://", 1)[0]
        raise Invalid(f"No store is known for {scheme!r} addresses.", help="Give a path, sqlite:///path or memory:.")
    return text


class SqliteStore:
    """Implements ``ports.store.Store``. Open it with :func:`open_store`, on the loop that will use it."""

    def __init__(self, path: str, *, threaded: bool = True) -> None:
        self.path = path
        self._memory = path == connections.MEMORY
        self._threaded = threaded and not self._memory
        busy = connections.BusyPolicy()
        self._write_connection, self._pair = self._connect(busy)
        self._writer = Writer(self._write_connection, self._pair, busy, path, threaded=self._threaded)
        self._read_connection: apsw.Connection | None = None
        self._read_pair: Transaction | None = None
        self._scan_lock = threading.Lock()
        self._watcher: asyncio.TimerHandle | None = None
        self._seen_version = 0
        self._subscribers: dict[object, Callable[[], None]] = {}
        self._ticked = time.monotonic()
        self._ticker: asyncio.TimerHandle | None = None
        self._renewer: asyncio.TimerHandle | None = None
        self._closed = False

    def _connect(
        self, busy: connections.BusyPolicy | None = None, *, read_only: bool = False
    ) -> tuple[apsw.Connection, Transaction]:
        """A connection and what units may touch on it."""
        connection = connections.connect(self.path, busy, read_only=read_only)
        log = SqliteLog(connection, memory=self._memory)
        return connection, as_transaction(log, SqliteLedger(connection, log, memory=self._memory))

    @property
    def failpoint(self) -> Failpoint | None:
        """Called around every durable write when a test set one."""
        return self._writer.failpoint

    @failpoint.setter
    def failpoint(self, value: Failpoint | None) -> None:
        self._writer.failpoint = value

    @property
    def connection(self) -> apsw.Connection:
        """The write connection. It is the writer's; nobody else uses it once the first unit is written."""
        return self._write_connection

    @property
    def statistics(self) -> dict[str, int]:
        """Transactions committed and units in them, by this process."""
        return {"groups": self._writer.groups, "units": self._writer.units}

    def write(
        self,
        boundary: Boundary,
        unit: Unit[T],
        on_error: Callable[[BaseException], None] | None = None,
        *,
        single: bool = False,
    ) -> asyncio.Future[T]:
        """See ``ports.store.Store.write``."""
        return self._writer.submit(boundary, unit, on_error, single=single)

    def read(self, unit: Unit[T]) -> T:
        """See ``ports.store.Store.read``."""
        self._check_open()
        if self._memory:
            with self._writer.lock:
                return self._snapshot(self._write_connection, self._pair, unit)
        if self._read_connection is None:
            self._read_connection, self._read_pair = self._connect(read_only=True)
        assert self._read_pair is not None
        return self._snapshot(self._read_connection, self._read_pair, unit)

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("The store is closed.", help="Open it again.")

    def _snapshot(self, connection: apsw.Connection, pair: Transaction, unit: Unit[T]) -> T:
        try:
            connection.execute("BEGIN")
            try:
                return unit(pair)
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")  # reading changes nothing, in memory neither
        except apsw.Error as error:
            raise connections.translate(error, self.path) from error

    async def scan(self, unit: Unit[T]) -> T:
        """See ``ports.store.Store.scan``."""
        self._check_open()
        if self._memory:
            return self.read(unit)
        return await asyncio.to_thread(self._scan, unit)

    def _scan(self, unit: Unit[T]) -> T:
        with self._scan_lock:
            connection, pair = self._connect(read_only=True)
            try:
                return self._snapshot(connection, pair, unit)
            finally:
                connection.close()

    # -- leases -----------------------------------------------------------------------------------------------------
    def hold(self, owner: str, lease_seconds: float, now: Callable[[], int]) -> None:
        """See ``ports.store.Store.hold``."""
        loop = asyncio.get_running_loop()
        if not self._threaded:  # all of it runs on the loop: nobody can be deaf and alive
            self._renew_inline(loop, owner, lease_seconds, now)
            return
        stall = min(LOOP_STALL_SECONDS_MAX, lease_seconds / 2)
        self._tick(loop, stall / 4)

        def make() -> Job | None:
            if time.monotonic() - self._ticked > stall:
                return None  # a deaf worker must lose its lease
            until = now() + int(lease_seconds * 1_000_000)
            return Job(Boundary.RENEW, lambda tx: tx.ledger.renew(owner, until), None)

        self._writer.every(lease_seconds / RENEWALS_PER_LEASE, make)

    def _renew_inline(
        self, loop: asyncio.AbstractEventLoop, owner: str, lease_seconds: float, now: Callable[[], int]
    ) -> None:
        if self._closed:
            return
        until = now() + int(lease_seconds * 1_000_000)
        _ = self._writer.submit(Boundary.RENEW, lambda tx: tx.ledger.renew(owner, until))
        period = lease_seconds / RENEWALS_PER_LEASE
        self._renewer = loop.call_later(period, self._renew_inline, loop, owner, lease_seconds, now)

    def _tick(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._ticked = time.monotonic()
        if not self._closed:
            self._ticker = loop.call_later(seconds, self._tick, loop, seconds)

    # -- other processes ----------------------------------------------------------------------------------------------
    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """See ``ports.store.Store.subscribe``."""
        token = object()
        self._subscribers[token] = on_change
        if self._watcher is None and not self._memory:
            self._seen_version = self._version() or 0
            self._watch(asyncio.get_running_loop())

        def stop() -> None:
            self._subscribers.pop(token, None)

        return stop

    def _version(self) -> int | None:
        try:
            return self._writer.attempt(lambda c: int(connections.pragma(c, "data_version")))
        except apsw.Error as error:
            log.warning("cannot see whether another process wrote to %r: %s", self.path, error)
            return None

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._closed:
            return
        self._watcher = loop.call_later(WATCH_SECONDS, self._watch, loop)
        version = self._version()
        if version is not None and version != self._seen_version:
            self._seen_version = version
            for call in list(self._subscribers.values()):
                loop.call_soon(call)  # one that raises harms no other

    async def close(self) -> None:
        """See ``ports.store.Store.close``."""
        self._closed = True
        for timer in (self._watcher, self._ticker, self._renewer):
            if timer is not None:
                timer.cancel()
        if self._read_connection is not None:
            self._read_connection.close()  # first: the last connection to close must be one that can checkpoint
            self._read_connection = None
        await self._writer.close()

    # -- operation ----------------------------------------------------------------------------------------------------
    async def integrity(self) -> list[str]:
        """What SQLite's own integrity check finds wrong; empty when all is well."""

        def check() -> list[str]:
            connection = connections.connect(self.path, read_only=True)
            try:
                rows = connection.execute("PRAGMA integrity_check").fetchall()
                rows += [(f"foreign key broken in {row[0]}",) for row in connection.execute("PRAGMA foreign_key_check")]
                return [str(row[0]) for row in rows if row[0] != "ok"]
            except apsw.Error as error:
                raise connections.translate(error, self.path) from error
            finally:
                connection.close()

        return [] if self._memory else await asyncio.to_thread(check)


def open_store(url: str | Path, *, create: bool = True, threaded: bool = True) -> SqliteStore:
    """Open or create a store.

    Args:
        url: a path, ``sqlite:///path``, or ``memory:``.
        create: make the database if the file does not exist.
        threaded: False runs every unit inline on the loop's thread.

    Raises:
        Invalid: not an address, not our database, or a network file system.
        Incompatible: a newer format. Corrupt: not a database. Unavailable: missing, unreadable, read-only, locked, or of an
            older format that live workers use.
    """
    path = parse_url(url)
    if path != connections.MEMORY:
        place = Path(path)
        connections.check_place(place, create=create)
        existed = place.exists() and place.stat().st_size > 0
        if existed:
            _check_existing(path)
    store = SqliteStore(path, threaded=threaded)
    connection = store.connection
    try:
        if connections.is_empty(connection):
            connections.create(connection)
        connections.check_format(connection, path)
        connections.migrate(connection, path)
    except apsw.Error as error:
        connection.close()
        raise connections.translate(error, path) from error
    except BaseException:
        connection.close()
        raise
    return store


def _check_existing(path: str) -> None:
    """Refuse a foreign, newer or corrupt file on a read-only connection, before anything of ours touches it."""
    try:
        with Path(path).open("rb") as file:
            header = file.read(16)
    except OSError as error:
        raise Unavailable(f"The database {path!r} cannot be read: {error}.", help="Check its permissions.") from error
    if header != b"SQLite format 3\x00":
        raise Corrupt(f"The file {path!r} is not an SQLite database.", help="Name another file, or restore a backup.")
    try:
        connection = apsw.Connection(path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            connection.set_busy_handler(connections.BusyPolicy())
            if not connections.is_empty(connection) or connections.pragma(connection, "application_id"):
                connections.check_format(connection, path)
        finally:
            connection.close()
    except apsw.Error as error:
        raise connections.translate(error, path) from error
