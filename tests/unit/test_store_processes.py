"""Several processes on one file: nothing lost, nothing twice, no lock error; a kill keeps what was told."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import apsw
import pytest

from perdure.errors import Unavailable
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Admission
from perdure.stores.sqlite import connection as connections
from perdure.stores.sqlite.store import SqliteStore, open_store

pytestmark = pytest.mark.anyio

PROGRAM = """
import asyncio, os, signal, sys
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Admission
from perdure.rules.accounting import Rate
from perdure.rules.pace import Pace
from perdure.stores.sqlite.models import Models
from perdure.stores.sqlite.store import open_store

def admit(store, name, thread="t"):
    a = Admission("sub_" + name, thread, "run_" + name, "p", None, "agent", "d", b"x" * 200, "i", 1)
    return store.write(Boundary.ADMIT, lambda tx: tx.ledger.admit(a))

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

async def write(path, name, count):
    store = open_store(path)
    for start in range(0, count, 50):  # some in groups, some alone
        await asyncio.gather(*(admit(store, f"{name}{n}") for n in range(start, start + 40)))
        for n in range(start + 40, start + 50):
            await admit(store, f"{name}{n}")
    await store.close()

async def claim(path, name, count):
    store, token = open_store(path), 0
    say("ready")
    sys.stdin.readline()
    while True:
        tokens = list(range(token, token := token + 5))
        claims = await store.write(
            Boundary.CLAIM, lambda tx: tx.ledger.claim(name, None, 5, 10, 10**15, tokens)
        )
        if not claims:
            break
        for c in claims:
            say(c.submission.id)
            await store.write(Boundary.SETTLE, lambda tx: tx.ledger.settle(
                c.number, c.epoch, c.token, c.submission.id, "completed", None, None, 10, release=True))
    await store.close()

async def die(path, name, count):
    store, units = open_store(path), 0

    def failpoint(boundary, phase):
        nonlocal units
        units += phase == name.split("-")[0]
        if units == count:
            os.kill(os.getpid(), signal.SIGKILL)

    store.failpoint = failpoint
    start = 0
    while True:
        size = 1 if name.endswith("alone") else 7
        names = [f"{name}{n}" for n in range(start, start + size)]
        futures = [admit(store, one) for one in names]
        for one, future in zip(names, futures):
            future.add_done_callback(lambda _, one=one: say("sub_" + one))
        await asyncio.gather(*futures)
        start += size

async def stand(path, name, count):
    store = open_store(path)

    def unit(tx):
        tx.ledger.admit(Admission("sub_standing", "t", "run_standing", "p", None, "agent", "d", b"", "i", 1))
        say("inside")
        sys.stdin.readline()

    await store.write(Boundary.ADMIT, unit)
    await store.close()

async def call(path, name, count):
    # every call that the rate of `count` a minute grants in the first minute, by a clock of its own that waits for nothing
    if name.startswith("alone"):  # the twin: what is counted stays in this process
        kept = {}
        Models._pace = lambda self, model: kept.get(model, Pace())
        Models._step = lambda self, model, before, after: kept.update({model: after})
    store, now, rate = open_store(path), 0, Rate(requests=count, tokens=100 * count)
    say("ready")
    sys.stdin.readline()
    while now < 60_000_000:
        again = await store.write(
            Boundary.MODEL_RATE,
            lambda tx: tx.ledger.take_model_turn("m", 10**15 + now, 100, rate),
            single=name.startswith("torn"),  # the twin: it reads in one transaction and writes in the next
        )
        if again == 0:
            say(now)
        else:
            now = again - 10**15
    await store.close()

verb, path, name, count = sys.argv[1:]
asyncio.run(globals()[verb](path, name, int(count)))
"""


def start(verb: str, path: Path, name: str, count: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, verb, str(path), name, str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], said: str | None = None) -> list[str]:
    out, err = process.communicate(said, timeout=60)
    assert process.returncode == 0, err
    return out.split()


def at_once(processes: list[subprocess.Popen[str]]) -> list[list[str]]:
    """Let processes that said that they are ready go on together. What each of them said then."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [finish(process) for process in processes]


def admitted(store: SqliteStore) -> list[Any]:
    return store.read(lambda tx: tx.ledger.submissions(limit=100_000))


def test_two_processes_write_to_one_new_file_at_once(tmp_path: Path) -> None:
    """Also the file itself is made by both at once."""
    path = tmp_path / "store.db"
    writers = [start("write", path, name, 500) for name in "ab"]
    for writer in writers:
        finish(writer)

    async def look() -> None:
        store = open_store(path)
        rows = admitted(store)
        assert sorted(row.id for row in rows) == sorted(f"sub_{name}{n}" for name in "ab" for n in range(500))
        assert [row.position for row in rows] == list(range(1, 1001))
        for name in "ab":
            mine = [row.id for row in rows if row.id.startswith("sub_" + name)]
            assert mine == [f"sub_{name}{n}" for n in range(500)], "each process keeps its own order"
        assert await store.integrity() == []
        await store.close()

    asyncio.run(look())


def test_a_new_file_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    """SQLite refuses to change the journal mode at once, without asking for patience, while somebody writes."""
    path = tmp_path / "store.db"
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    ending = threading.Timer(0.3, lambda: other.execute("ROLLBACK"))
    ending.start()
    store = open_store(path, threaded=False)
    asyncio.run(store.close())
    ending.join()
    other.close()


def test_two_workers_claim_every_submission_once(tmp_path: Path) -> None:
    """A05."""
    path = tmp_path / "store.db"

    async def fill() -> None:
        store = open_store(path)
        for n in range(300):
            a = Admission(f"sub_{n}", f"t{n % 90}", f"run_{n}", "p", None, "agent", "d", b"", "i", 1)
            _ = store.write(Boundary.ADMIT, lambda tx, a=a: tx.ledger.admit(a))  # type: ignore[misc]
        await store.close()
        store = open_store(path)
        assert {row.state for row in admitted(store)} <= {"ready"}
        await store.close()

    asyncio.run(fill())
    claims = at_once([start("claim", path, name) for name in ("w1", "w2")])
    assert sorted(claims[0] + claims[1]) == sorted(f"sub_{n}" for n in range(300))


RATE = 40  # calls a minute: one in 1.5 s


def granted(path: Path, names: str, held: int) -> list[float]:
    """The instants (seconds) of a minute's first calls, by processes that share a model held for ``held`` seconds."""

    async def hold() -> None:
        store = open_store(path)
        await store.write(Boundary.MODEL_RATE, lambda tx: tx.ledger.hold_model("m", 10**15 + held * 1_000_000))
        await store.close()

    asyncio.run(hold())
    said = at_once([start("call", path, f"{names}{n}", RATE) for n in range(3)])
    return sorted(int(instant) / 1_000_000 for one in said for instant in one)


def check_rate(instants: list[float], held: int) -> None:
    """In each stretch of the minute no more than a minute's worth and what the stretch grants; and nothing is wasted."""
    assert instants[0] == held
    for last, instant in enumerate(instants):
        for first in range(last + 1):
            allowed = RATE + RATE * (instant - instants[first]) / 60
            assert last - first + 1 <= allowed, f"{last - first + 1} calls from {instants[first]} to {instant} s"
    assert len(instants) == RATE + RATE * (60 - held) // 60 - 1


@pytest.mark.parametrize("held", [0, 30])
def test_processes_share_the_rate_of_a_model(tmp_path: Path, held: int) -> None:
    check_rate(granted(tmp_path / "store.db", "shared", held), held)


def test_a_rate_that_each_process_keeps_for_itself_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"calls from 0\.0 to 0\.0 s"):
        check_rate(granted(tmp_path / "store.db", "alone", 0), 0)


def test_a_rate_that_is_read_and_written_apart_is_found(tmp_path: Path) -> None:
    for n in range(10):  # three processes take turns at every commit, so the first time should do
        try:
            check_rate(granted(tmp_path / f"{n}.db", "torn", 0), 0)
        except AssertionError:
            return
    pytest.fail("nobody came between")


def test_processes_that_open_an_old_file_at_once_migrate_it_once(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    connection = connections.connect(str(path))
    connection.execute(connections.migrations()[0])
    connection.execute("INSERT INTO meta VALUES ('needs_release', '0.1')")
    connection.execute(f"PRAGMA application_id={connections.APPLICATION_ID}; PRAGMA user_version=1")
    connection.close()
    at_once([start("call", path, f"shared{n}", RATE) for n in range(3)])

    async def look() -> None:
        store = open_store(path)
        assert await store.integrity() == []
        assert connections.pragma(store.connection, "user_version") == connections.FORMAT
        await store.close()

    asyncio.run(look())


@pytest.mark.parametrize("shape", ["alone", "grouped"])
@pytest.mark.parametrize(("phase", "count"), [("before", 60), ("inside", 61), ("after", 62)])
def test_a_kill_at_any_instant_loses_nothing_that_was_told(tmp_path: Path, phase: str, count: int, shape: str) -> None:
    path = tmp_path / "store.db"
    process = start("die", path, f"{phase}-{shape}", count)
    out, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, err

    async def look() -> None:
        store = open_store(path)
        rows = admitted(store)
        told = out.split()
        assert told
        assert set(told) <= {row.id for row in rows}, "what was told is durable"
        assert [row.id for row in rows][: len(told)] == told
        assert len(rows) - len(told) in range(8 if phase == "after" else 1), "what was not durable is not there"
        a = Admission("sub_next", "t", "run_next", "p", None, "agent", "d", b"", "i", 1)
        began = time.monotonic()
        await store.write(Boundary.ADMIT, lambda tx: tx.ledger.admit(a))
        assert time.monotonic() - began < 10, "the dead hold no lock"
        assert await store.integrity() == []
        await store.close()

    asyncio.run(look())


def test_killed_from_outside_at_chance_instants(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    told: list[str] = []
    for n in range(3):
        process = start("die", path, f"x{n}-grouped", 10**9)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(20 + 31 * n)]
        process.kill()
        told += "".join([*lines, process.communicate()[0]]).split()

    async def look() -> None:
        store = open_store(path)
        stored = {row.id for row in admitted(store)}
        assert set(told) <= stored
        assert [row.position for row in admitted(store)] == list(range(1, len(stored) + 1))
        assert await store.integrity() == []
        await store.close()

    asyncio.run(look())


async def test_a_process_that_stands_inside_a_transaction_holds_everybody_up_to_their_patience(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    other = start("stand", tmp_path / "store.db", "stand")
    assert other.stdout is not None
    assert other.stdout.readline() == "inside\n"
    os.kill(other.pid, signal.SIGSTOP)
    store._writer._busy_policy.patience = 0.1
    a = Admission("sub_mine", "t", "run_mine", "p", None, "agent", "d", b"", "i", 1)
    with pytest.raises(Unavailable, match="locked"):
        await store.write(Boundary.ADMIT, lambda tx: tx.ledger.admit(a))
    assert admitted(store) == [], "reading goes on"
    os.kill(other.pid, signal.SIGCONT)
    finish(other, "go\n")
    await store.write(Boundary.ADMIT, lambda tx: tx.ledger.admit(a))
    assert [row.id for row in admitted(store)] == ["sub_standing", "sub_mine"]
    await store.close()
