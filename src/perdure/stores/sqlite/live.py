"""Live events on their way from the process that works to those that watch. Provisional: gone within a minute."""

from __future__ import annotations

from typing import cast

from perdure.clock import seconds
from perdure.limits import LIVE_EVENTS_SECONDS, PAGE_ROWS_MAX
from perdure.stores.sqlite.rows import Rows

_WATCH = """INSERT INTO watcher (submission, watcher, until) VALUES (?, ?, ?)
 ON CONFLICT (submission, watcher) DO UPDATE SET until = excluded.until"""
_READ = """SELECT number, body FROM live WHERE submission = ? AND number > ? AND producer <> ?
 ORDER BY number LIMIT ?"""


class Live(Rows):
    """The verbs of live events; see ``ports.ledger.Ledger``."""

    def watch_events(self, submission: str, watcher: str, until: int) -> None:
        """See ``ports.ledger.Ledger.watch_events``."""
        if until:
            self._execute(_WATCH, (submission, watcher, until))
        else:
            self._execute("DELETE FROM watcher WHERE submission = ? AND watcher = ?", (submission, watcher))

    def watched_events(self, watcher: str, now: int) -> list[str]:
        """See ``ports.ledger.Ledger.watched_events``."""
        rows = self._execute(
            "SELECT DISTINCT submission FROM watcher WHERE watcher <> ? AND until > ?", (watcher, now)
        ).fetchall()
        return [str(row[0]) for row in rows]

    def put_events(self, submission: str, producer: str, body: bytes, now: int) -> None:
        """See ``ports.ledger.Ledger.put_events``."""
        self._execute("DELETE FROM live WHERE at < ?", (now - seconds(LIVE_EVENTS_SECONDS),))
        self._execute("DELETE FROM watcher WHERE until < ?", (now - seconds(LIVE_EVENTS_SECONDS),))
        self._execute(
            "INSERT INTO live (submission, producer, at, body) VALUES (?, ?, ?, ?)", (submission, producer, now, body)
        )

    def events_after(self, submission: str, reader: str, after: int) -> list[tuple[int, bytes]]:
        """See ``ports.ledger.Ledger.events_after``."""
        rows = self._execute(_READ, (submission, after, reader, PAGE_ROWS_MAX)).fetchall()
        return cast("list[tuple[int, bytes]]", rows)
