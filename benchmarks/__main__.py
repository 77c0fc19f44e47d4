"""``python -m benchmarks [NAME…] [--rounds N] [--dir FOLDER] [--json FILE]``: run them and print one table."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import perdure as p
from benchmarks import work
from benchmarks.history import settled_history
from benchmarks.raw import commits_per_second
from perdure.records import codec
from perdure.rules import fold

Row = dict[str, Any]


async def run_many(folder: str, agent: p.Agent, count: int = 1) -> float:
    """Seconds from the first submit to the last settlement of ``count`` runs."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        async with p.open(os.path.join(place, "work.db"), agents=[agent]) as app:
            began = time.perf_counter()
            receipts = await asyncio.gather(*[app.submit(agent, "go") for _ in range(count)])
            settled = await asyncio.gather(*[app.settlement(receipt) for receipt in receipts])
            took = time.perf_counter() - began
        assert all(one.status == "completed" for one in settled)
        return took


def beside_raw(folder: str, measure: Callable[[], float], units: int) -> Row:
    """Units a second, beside the raw commit rate before and after."""
    before = commits_per_second(folder)
    rate = units / measure()
    after = commits_per_second(folder)
    raw = (before + after) / 2
    return {"per_second": rate, "raw_before": before, "raw_after": after, "ratio": rate / raw}


def sequential(make: Callable[[int], p.Agent], count: int) -> Callable[[str], Row]:
    """A benchmark of ``count`` units one after another."""
    return lambda folder: beside_raw(folder, lambda: asyncio.run(run_many(folder, make(count))), count)


def concurrent(folder: str, runs: int = 1000, steps: int = 5) -> Row:
    """1,000 runs of 5 steps at once; the rate counts steps."""
    return beside_raw(folder, lambda: asyncio.run(run_many(folder, work.stepper(steps), runs)), runs * steps)


def turns(folder: str, count: int = 2000) -> Row:
    """Turn 20 against turn 2,000 of one run: records, bytes and commit time a turn."""
    return asyncio.run(_turns(folder, count))


async def _turns(folder: str, count: int) -> Row:
    agent = work.talker(count)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        path = os.path.join(place, "work.db")
        async with p.open(path, agents=[agent]) as app:
            await app.settlement(await app.submit(agent, "go", thread="t"))
            number = app.store.read(lambda tx: tx.ledger.thread("t")).number
            bodies = await app.store.scan(lambda tx: tx.log.read(number, 0, 100_000))
        size = os.path.getsize(path)
    at: list[int] = []
    sizes: list[int] = []
    records: list[int] = []
    for stored in bodies:
        batch = codec.decode(stored.body)
        if any(type(record).__name__ == "ModelResponseRecorded" for record in batch.records):
            at.append(batch.at)
            sizes.append(0)
            records.append(0)
        if at:
            sizes[-1] += len(stored.body)
            records[-1] += len(batch.records)

    def around(turn: int, values: list[int]) -> float:
        return statistics.median(values[max(1, turn - 15) : turn + 15])

    spent = [after - before for before, after in itertools.pairwise(at)]
    early, late = around(20, spent), around(count - 20, spent)
    return {
        "microseconds_turn_20": early, f"microseconds_turn_{count}": late, "ratio": late / early,
        "bytes_turn_20": around(20, sizes), f"bytes_turn_{count}": around(count - 20, sizes),
        "records_turn_20": around(20, records), f"records_turn_{count}": around(count - 20, records),
        "database_bytes": size,
    }  # fmt: skip


def folding(folder: str, sizes: tuple[int, ...] = (1_000, 10_000, 100_000)) -> Row:
    """Microseconds a record to decode, verify the chain and fold, at three sizes of settled history."""
    row: Row = {}
    for size in sizes:
        bodies = settled_history("t", size)
        best = min(_fold_seconds(bodies) for _ in range(3))
        row[f"microseconds_a_record_{size}"] = best / size * 1e6
    row["ratio"] = row[f"microseconds_a_record_{sizes[-1]}"] / row[f"microseconds_a_record_{sizes[0]}"]
    return row


def _fold_seconds(bodies: list[bytes]) -> float:
    began = time.perf_counter()
    fold.fold("t", bodies)
    return time.perf_counter() - began


_START = """
import time; began = time.perf_counter()
import asyncio, os, sys, perdure as p
from perdure.providers.scripted import Scripted, say
agent = p.Agent("hello", model=Scripted([say("hi")]))
async def main():
    async with p.open(sys.argv[1], agents=[agent]) as app:
        await app.settlement(await app.submit(agent, "go"))
asyncio.run(main())
print(time.perf_counter() - began)
"""


def start(folder: str) -> Row:
    """Seconds of a fresh process: import, open, first settlement; and what ``--help`` takes over a bare interpreter."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        spent = []
        for number in range(5):
            path = os.path.join(place, f"{number}.db")
            done = subprocess.run([sys.executable, "-c", _START, path], capture_output=True, text=True, check=True)
            spent.append(float(done.stdout))
    bare = min(_process(["-c", "pass"]) for _ in range(5))
    help = min(_process(["-m", "perdure.cli.main", "--help"]) for _ in range(5))
    return {"first_settlement_seconds": statistics.median(spent), "help_seconds_over_bare": help - bare}


def _process(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


BENCHMARKS: dict[str, Callable[[str], Row]] = {
    "sequential-steps": sequential(work.stepper, 1000),
    "sequential-once-calls": sequential(work.once_batch, 1000),
    "sequential-once-turns": sequential(work.once_turns, 1000),
    "sequential-once-steps": sequential(work.once_stepper, 1000),
    "concurrent-1000x5": concurrent,
    "turn-20-against-2000": turns,
    "fold": folding,
    "start": start,
}


def median(rows: list[Row]) -> Row:
    """The median of every figure over rounds."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    """Run the benchmarks named on the command line, or all of them."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=None, help="folder on the disk to measure; default: a temporary one")
    parser.add_argument("--json", default=None, help="write all rounds to this file")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no benchmark named {', '.join(sorted(unknown))}")
    names = options.names or list(BENCHMARKS)
    rounds: dict[str, list[Row]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for _ in range(options.rounds):
            for name in names:
                rounds[name].append(BENCHMARKS[name](folder))
                print(f"  {name}: " + show(rounds[name][-1]), file=sys.stderr, flush=True)
    print(f"median of {options.rounds} rounds")
    for name in names:
        print(f"{name:24} {show(median(rounds[name]))}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rounds, file, indent=1)


def show(row: Row) -> str:
    """One line of figures."""
    return "  ".join(f"{key} {value:,.3f}" if value < 100 else f"{key} {value:,.0f}" for key, value in row.items())


if __name__ == "__main__":
    main()
