"""The limit: one 300-byte row a COMMIT, WAL, synchronous=FULL, through the same driver, on the same disk."""

from __future__ import annotations

import os
import tempfile
import time

import apsw


def commits_per_second(folder: str, seconds: float = 0.5) -> float:
    """Raw one-row commits a second, right now."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        connection = apsw.Connection(os.path.join(place, "raw.db"))
        connection.execute("PRAGMA journal_mode=WAL").fetchall()
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("CREATE TABLE row (id INTEGER PRIMARY KEY, run TEXT, seq INTEGER, body TEXT)")
        body, count = "p" * 300, 0
        began = time.perf_counter()
        while True:
            connection.execute("INSERT INTO row (run, seq, body) VALUES ('run', ?, ?)", (count, body))
            count += 1
            took = time.perf_counter() - began
            if took >= seconds:
                connection.close()
                return count / took
