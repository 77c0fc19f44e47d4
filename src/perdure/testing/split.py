"""A store whose log and ledger are two databases, so that a crash can fall between the two commits of one unit.

Not for work: it exists to reach the states that only a split store can be left in. A unit's log writes are committed
first, then ``between`` is called once for each unit of the group, then the ledger's writes are committed. The log keeps
a copy of the fence of its own, written by the claim and taken back when ownership ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import apsw

from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Claimed
from perdure.ports.store import Transaction, Unit
from perdure.stores.sqlite import connection as connections
from perdure.stores.sqlite.ledger import SqliteLedger
from perdure.stores.sqlite.log import SqliteLog
from perdure.stores.sqlite.store import SqliteStore
from perdure.stores.sqlite.writer import as_transaction

__all__ = ["SplitStore", "open_split"]

T = TypeVar("T")

_FENCE = """INSERT INTO thread (number, id, created_at, epoch, token) VALUES (?1, ?2, 0, ?3, ?4)
 ON CONFLICT (number) DO UPDATE SET epoch = ?3, token = ?4 WHERE epoch <= ?3"""


class SplitLedger(SqliteLedger):
    """The ledger of one database, which tells the log of another who may append."""

    def __init__(self, connection: apsw.Connection, log: SqliteLog, log_connection: apsw.Connection) -> None:
        super().__init__(connection, log)
        self._log_execute = log_connection.execute

    def _grant(self, *args: Any, **options: Any) -> Claimed | None:
        claimed = super()._grant(*args, **options)
        if claimed is not None:
            self._log_execute(_FENCE, (claimed.number, claimed.thread, claimed.epoch, claimed.token))
        return claimed

    def _leave(self, thread: int, epoch: int, token: int, now: int) -> bool:
        left = super()._leave(thread, epoch, token, now)
        if left:
            self._log_execute("UPDATE thread SET token = NULL WHERE number = ? AND epoch = ?", (thread, epoch))
        return left


class _Two:
    """Two connections as one: transactions span both, the log's first; everything else is the ledger's."""

    def __init__(self, log: apsw.Connection, ledger: apsw.Connection) -> None:
        self.log = log
        self.ledger = ledger
        self.units: list[Boundary] = []
        self.between: Callable[[Boundary], None] | None = None

    @property
    def in_transaction(self) -> bool:
        return self.log.in_transaction or self.ledger.in_transaction

    def execute(self, sql: str, *params: Any) -> Any:
        if sql.startswith("BEGIN"):
            self.units.clear()
            self.log.execute(sql)
            return self.ledger.execute(sql)
        if sql == "COMMIT":
            self.log.execute(sql)
            if self.between is not None:
                for boundary in self.units:
                    self.between(boundary)
            return self.ledger.execute(sql)
        if sql == "ROLLBACK":
            for connection in (self.log, self.ledger):
                if connection.in_transaction:
                    connection.execute(sql)
            return None
        return self.ledger.execute(sql, *params)

    def close(self) -> None:
        self.log.close()
        self.ledger.close()


class SplitStore(SqliteStore):
    """Implements ``ports.store.Store`` over ``log.db`` and ``ledger.db`` in one folder; see :func:`open_split`.

    Attributes:
        between: called when the log's part of a group is durable and the ledger's is not, once for each of its units;
            it may end the process or raise.
    """

    def __init__(self, folder: str, *, threaded: bool = True) -> None:
        self._folder = Path(folder)
        super().__init__(str(self._folder / "ledger.db"), threaded=threaded)

    @property
    def between(self) -> Callable[[Boundary], None] | None:
        """Called between the two commits."""
        return self._two.between

    @between.setter
    def between(self, value: Callable[[Boundary], None] | None) -> None:
        self._two.between = value

    @property
    def _two(self) -> _Two:
        return cast(_Two, self._write_connection)

    def _connect(
        self, busy: connections.BusyPolicy | None = None, *, read_only: bool = False
    ) -> tuple[apsw.Connection, Transaction]:
        parts = []
        for name in ("log.db", "ledger.db"):
            part = connections.connect(str(self._folder / name), busy, read_only=read_only)
            if not read_only and connections.is_empty(part):
                connections.create(part)
            parts.append(part)
        log = SqliteLog(parts[0])
        pair = as_transaction(log, SplitLedger(parts[1], log, parts[0]))
        return cast(apsw.Connection, _Two(*parts)), pair

    def write(
        self,
        boundary: Boundary,
        unit: Unit[T],
        on_error: Callable[[BaseException], None] | None = None,
        *,
        single: bool = False,
    ) -> asyncio.Future[T]:
        """See ``ports.store.Store.write``."""

        def noted(tx: Transaction) -> T:
            result = unit(tx)
            self._two.units.append(boundary)
            return result

        return super().write(boundary, noted, on_error)


def open_split(folder: str | Path, *, threaded: bool = True) -> SplitStore:
    """Open or create a split store in a folder that exists."""
    return SplitStore(str(folder), threaded=threaded)
