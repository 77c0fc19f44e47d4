"""Three worker processes on one database file; one of them is killed in the middle, and every run settles.

The tool is of class ``keyed``: the outside takes a second request under the same key for the first one. So the calls
that were in flight in the killed worker are run again by another one, under the same key, and nobody has to be asked.

    python examples/several_workers.py
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import perdure as p
from perdure.providers.scripted import Scripted, call, say

RUNS = 24
WORKERS = 3


def agent_of(folder: Path) -> p.Agent:
    @p.tool(effect="keyed")
    async def pack(ctx: p.ToolContext, run: str) -> str:
        """Have a parcel packed; the packing station de-duplicates on the key."""
        with (folder / "station.txt").open("a") as file:
            file.write(f"{ctx.key} {os.getpid()}\n")
        await asyncio.sleep(0.1)
        return "packed"

    model = Scripted(lambda request: call("pack", run=request.run) if request.turn == 1 else say("packed"))
    return p.Agent("packer", tools=[pack], model=model)


def client(folder: Path) -> p.App:
    return p.open(folder / "shop.db", agents=[agent_of(folder)], workers=0)


async def work(folder: Path) -> None:
    """A worker process: it works until it is killed. (`perdure worker` also knows how to stop in order.)"""
    async with p.open(folder / "shop.db", agents=[agent_of(folder)], workers=4, lease="1s"):
        await asyncio.Event().wait()


async def submit(folder: Path) -> list[p.Receipt]:
    async with client(folder) as app:
        return [await app.submit("packer", f"parcel {n}", key=f"parcel-{n}") for n in range(RUNS)]


async def settle(folder: Path, receipts: list[p.Receipt]) -> None:
    async with client(folder) as app:
        settled = await asyncio.gather(*[app.settlement(receipt) for receipt in receipts])
        print("settled:", len(settled), "of", RUNS, {one.status for one in settled})
        print("verified:", bool(await app.verify()))


def packed(folder: Path) -> list[list[str]]:
    station = folder / "station.txt"
    return [line.split() for line in station.read_text().splitlines()] if station.exists() else []


def main(folder: Path) -> None:
    receipts = asyncio.run(submit(folder))
    workers = [subprocess.Popen([sys.executable, __file__, str(folder)]) for _ in range(WORKERS)]
    try:
        while len(packed(folder)) < RUNS // 3:
            time.sleep(0.01)
        first = int(packed(folder)[0][1])
        next(
            worker for worker in workers if worker.pid == first
        ).kill()  # SIGKILL: all it leaves is a lease that lapses
        asyncio.run(settle(folder, receipts))
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    print("parcels by key:", len({key for key, _ in packed(folder)}))
    print("workers that packed:", "two or more" if len({pid for _, pid in packed(folder)}) > 1 else "one")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(work(Path(sys.argv[1])))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
