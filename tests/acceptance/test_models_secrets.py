"""A key is used and never shown: sentinels by every way of naming one, and every byte that was written is searched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.providers.scripted import call, say
from support.cli import perdure
from support.fake_models import FakeModels, Format, Status
from support.place import TESTS

pytest.importorskip("perdure.providers._pydantic_ai", reason="needs perdure[models]")

SENTINEL = "sk-sentinel-9f3a7c51"

PROGRAM = """
import asyncio, logging, sys, traceback
import perdure as p
from support.remote import MODELS

way, wire, url, leak = sys.argv[1:5]
secret = {
    "env": lambda: p.Secret.env("SENTINEL_KEY"),
    "file": lambda: p.Secret.file("key.txt"),
    "process": lambda: p.Secret.process(sys.executable, "print_key.py"),
}[way]()
logging.basicConfig(level=logging.DEBUG)

@p.tool(effect="keyed")
async def pay(cents: int, key: p.Secret = secret) -> str:
    '''Pay.'''
    assert key.reveal().startswith("sk-")
    if leak == "leak":
        return key.reveal()
    if cents == 13:
        raise RuntimeError(f"refused for {key}")
    return "paid"

async def main():
    model = MODELS[wire](url, api_key=secret)
    agent = p.Agent("clerk", tools=[pay], model=model, policy=p.Policy(repeated_failure_limit=0))
    print(repr(model), str(model), repr(agent), repr(secret), f"{secret}", vars(agent) if hasattr(agent, "__dict__") else "")
    async with p.open("work.db", agents=[agent]) as app:
        for question in ("Pay.", "Pay again."):
            receipt = await app.submit(agent, question)
            async for event in app.events(receipt):
                print(event)
            async for record in app.observe(receipt):
                print(record)
            try:
                print(await app.output(receipt))
            except p.Error:
                traceback.print_exc()
            print(await app.inspect(receipt.run))
    try:
        await agent.run("In memory.")
    except p.Error as error:
        traceback.print_exc()
        print(repr(error), vars(error))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def running() -> Iterator[FakeModels]:
    with FakeModels(key=SENTINEL) as server:
        yield server


def written(server: FakeModels, folder: Path, way: str, wire: Format, leak: str = "") -> bytes:
    """Everything that a program wrote which used the key, whose provider repeats it in its errors."""
    (folder / "key.txt").write_text(SENTINEL + "\n")
    (folder / "print_key.py").write_text(f"print({SENTINEL!r})\n")
    (folder / "key.txt").chmod(0o600)
    echo = Status(401, "key", message=f"Incorrect API key provided: {SENTINEL}. Use another than {SENTINEL}.")
    busy = Status(500, "server", message=f"Failed for {SENTINEL}")
    server.play(busy, call("pay", cents=13), call("pay", cents=5), say("Done."), echo, busy, echo)
    command = [sys.executable, "-c", PROGRAM, way, wire, server.address(wire), leak]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    environment.pop("SENTINEL_KEY", None)
    if way == "env":
        environment["SENTINEL_KEY"] = SENTINEL
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert all(seen.key == SENTINEL for seen in server.requests)  # it was really used
    assert len(server.requests) >= 6
    shown = perdure("effects", "list", "--db", "work.db", "--verbose", "--output", "json", cwd=folder)
    parts = [done.stdout, done.stderr, shown.stdout.encode(), shown.stderr.encode()]
    for name in ("key.txt", "print_key.py"):
        (folder / name).unlink()
    parts += [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    return b"\n".join(parts)


@pytest.mark.parametrize("wire", ["chat", "anthropic", "google"])
@pytest.mark.parametrize("way", ["env", "file", "process"])
def test_no_byte_that_is_written_shows_the_key(running: FakeModels, tmp_path: Path, way: str, wire: Format) -> None:
    found = written(running, tmp_path, way, wire)
    assert b"Secret(" in found
    assert b"model.authentication" in found
    assert SENTINEL.encode() not in found


def test_a_key_that_a_tool_returns_is_found(running: FakeModels, tmp_path: Path) -> None:
    """The twin: what the test above would see of a key that was stored."""
    assert SENTINEL.encode() in written(running, tmp_path, "env", "chat", "leak")
