"""Where one scenario happens: a database, a witness, gates, and real worker processes that can be killed.

A gate is a file. A body that blocks says so by making ``NAME.waiting`` and goes on when ``NAME.open`` appears, in
whatever process it runs; so tests wait for facts and never for time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw

import perdure as p
from perdure.records import codec
from perdure.testing.world import World

TESTS = Path(__file__).resolve().parents[1]
PATIENCE = 30.0
LEASE = "1s"


class Place:
    """A folder in which a scenario plays, shared by every process of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.db = folder / "work.db"
        self.world = World(folder / "world.jsonl")

    @classmethod
    def make(cls, folder: Path) -> Place:
        """A place in a new folder."""
        folder.mkdir()
        return cls(folder)

    def copy(self, folder: Path) -> Place:
        """The same state in another folder; no process may be using this one."""
        shutil.copytree(self.folder, folder, dirs_exist_ok=True)
        return Place(folder)

    # -- gates ------------------------------------------------------------------------------------------------------
    def waiting(self, gate: str) -> bool:
        """Whether a body stands before the gate."""
        return (self.folder / f"{gate}.waiting").exists()

    def open_gate(self, gate: str) -> None:
        """Let everybody through, from now on."""
        (self.folder / f"{gate}.open").touch()

    async def pass_gate(self, gate: str) -> None:
        """Stand before the gate until it is open."""
        if gate:
            (self.folder / f"{gate}.waiting").touch()
            while not (self.folder / f"{gate}.open").exists():  # noqa: ASYNC110 - another process opens it
                await asyncio.sleep(0.005)

    def pass_gate_sync(self, gate: str) -> None:
        """The same in a thread."""
        if gate:
            (self.folder / f"{gate}.waiting").touch()
            while not (self.folder / f"{gate}.open").exists():
                time.sleep(0.005)

    # -- apps -------------------------------------------------------------------------------------------------------
    def client(self, agents: Any = ()) -> p.App:
        """An app that runs nothing."""
        return p.open(self.db, workers=0, agents=agents)

    def app(self, *agents: Any, **options: Any) -> p.App:
        """An app that works here."""
        return p.open(self.db, **{"agents": agents, "lease": LEASE, **options})

    def worker(self, program: str = "puppet", **options: Any) -> Worker:
        """Start a worker process; see :class:`Worker`."""
        return Worker(self, program, options)

    # -- what is stored -----------------------------------------------------------------------------------------------
    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of the database, read behind everybody's back."""
        connection = apsw.Connection(str(self.db), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            connection.set_busy_timeout(5000)
            return list(connection.execute(sql, values))
        finally:
            connection.close()

    def change(self, sql: str, *values: Any) -> None:
        """Change the database behind everybody's back."""
        connection = apsw.Connection(str(self.db))
        try:
            connection.set_busy_timeout(5000)
            connection.execute(sql, values)
        finally:
            connection.close()

    def log(self, thread: str) -> list[bytes]:
        """The bodies of a thread's batches as stored."""
        found = self.rows(
            "SELECT body FROM batch b JOIN thread t ON t.number = b.thread WHERE t.id = ? ORDER BY first", thread
        )
        return [bytes(body) for (body,) in found]

    def records(self, thread: str) -> list[Any]:
        """The records of a thread in order."""
        return [record for body in self.log(thread) for record in codec.decode(body).records]

    def dump(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table."""
        tables = [name for (name,) in self.rows("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
        return {table: sorted(self.rows(f"SELECT * FROM {table}"), key=repr) for table in tables}

    def kinds(self, thread: str) -> list[str]:
        """Names of a thread's records in order."""
        return [type(record).__name__ for record in self.records(thread)]


class Worker:
    """A worker process: ``python -m support.worker``. Ready when constructed, killed when its block ends."""

    def __init__(self, place: Place, program: str, options: dict[str, Any]) -> None:
        self._place = place
        self._errors = (place.folder / f"stderr-{time.monotonic_ns()}.txt").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.worker", str(place.folder), program, json.dumps(options)],
            cwd=TESTS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            self.kill()
            errors = self.errors
            self._errors.close()
            raise AssertionError(f"the worker did not start:\n{errors}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def errors(self) -> str:
        """What it wrote to stderr so far."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def stop(self) -> None:
        """SIGSTOP, but not inside a transaction: SQLite's write lock would stop with it, and everybody else."""
        while True:
            self.process.send_signal(signal.SIGSTOP)
            connection = apsw.Connection(str(self._place.db))
            try:
                connection.set_busy_timeout(100)
                connection.execute("BEGIN IMMEDIATE; ROLLBACK")
                return
            except apsw.BusyError:
                self.process.send_signal(signal.SIGCONT)
            finally:
                connection.close()

    def go_on(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        self._errors.close()


@contextlib.contextmanager
def workers(place: Place, count: int, program: str = "puppet", **options: Any) -> Iterator[list[Worker]]:
    """Several worker processes at once."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(place.worker(program, **options)) for _ in range(count)]


async def until(fact: Callable[[], Any], what: str = "it", within: float = PATIENCE) -> Any:
    """Wait for a fact: ``fact()`` true, or awaited true. Fails when it does not come within ``within`` seconds."""
    deadline = time.monotonic() + within
    while True:
        found = fact()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {within:g} s")
        await asyncio.sleep(0.01)
