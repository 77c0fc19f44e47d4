"""A long tool divided into named durable steps: after a crash it goes on, it does not begin again.

The worker process is ended by SIGKILL after the second of three steps. The next process enters the tool's body again;
recorded steps return their recorded values without running, so the upload happens once.

    python examples/durable_steps.py
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import perdure as p
from perdure.providers.scripted import Scripted, call, say


def agent_of(folder: Path, *, dies: bool) -> p.Agent:
    def did(what: str) -> None:
        with (folder / "done.txt").open("a") as file:
            file.write(what + "\n")

    def upload(document: str) -> str:
        did("upload")
        return f"https://example.org/{document}"

    def index(url: str) -> int:
        did("index")
        return len(url)

    def announce(url: str, key: str) -> None:
        did(f"announce {url} under {key[:4]}…")

    @p.tool(steps=True)
    async def publish(ctx: p.ToolContext, document: str) -> str:
        """Upload a document, index it and tell everybody."""
        url = await ctx.step("upload", upload, document)
        await ctx.step("index", index, url)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        # effect="once": a started record goes before it, so a crash inside is unknown instead of repeated
        await ctx.step("announce", announce, url, ctx.step_key("announce"), effect="once")
        return url

    model = Scripted([call("publish", document="report"), say("Published.")])
    return p.Agent("publisher", tools=[publish], model=model)


async def work(folder: Path, *, dies: bool) -> None:
    agent = agent_of(folder, dies=dies)
    async with p.open(folder / "shop.db", agents=[agent], lease="1s") as app:
        receipt = await app.submit(agent, "Publish the report.", key="report-1")
        print("answer:", await app.output(receipt))
        [publish] = (await app.inspect(receipt)).turns[0].calls
        print("steps:", ", ".join(f"{step.name} {step.status}" for step in publish.steps))
    for line in (folder / "done.txt").read_text().splitlines():
        print("done:", line)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        killed = subprocess.run([sys.executable, __file__, name], check=False)
        print("the first worker ended with", killed.returncode)
        asyncio.run(work(Path(name), dies=False))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(work(Path(sys.argv[1]), dies=True))
    else:
        main()
