"""The command line as a user meets it: real processes in a folder of their own, and an app for them to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT_SECONDS = 30.0
PROGRAM = [sys.executable, "-m", "perdure.cli"]

APP = '''
"""An agent that does what its input says: "tool cents", or "say text"."""
import asyncio, pathlib, time
import perdure as p
from perdure.providers.scripted import Scripted, call, fail, say

@p.tool
async def pay(cents: int) -> str:
    if cents == 13:
        raise p.Unknown("the line went dead")
    return f"paid {cents}"

@p.tool(approval=True)
async def ask(cents: int) -> str:
    return "asked"

@p.tool
async def slow(cents: int) -> str:
    pathlib.Path("slow.started").touch()
    while not pathlib.Path("slow.go").exists():
        await asyncio.sleep(0.01)
    return "slow"

@p.tool
async def deaf(cents: int) -> str:
    pathlib.Path("deaf.started").touch()
    while True:
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            pass

@p.tool
async def stuck(cents: int) -> str:
    pathlib.Path("stuck.started").touch()
    while True:
        try:
            time.sleep(0.01)  # the loop stands still
        except BaseException:
            pass

def script(request):
    if request.turn > 1:
        return say("done")
    word, _, rest = request.messages[-1].text.partition(" ")
    if word == "say":
        return say(rest)
    return fail("no such thing") if word == "break" else call(word, cents=int(rest))

agent = p.Agent("payer", tools=[pay, ask, slow, deaf, stuck], model=Scripted(script))

class Nothing: pass

def app():
    return p.open("work.db", agents=[agent], lease="1s")
'''


def perdure(
    *words: str, cwd: Path, env: dict[str, str] | None = None, input: str | None = None, code: int | None = 0
) -> subprocess.CompletedProcess[str]:
    """Run one command line to its end and check its exit code (None: any)."""
    done = subprocess.run(
        [*PROGRAM, *words], cwd=cwd, env=environment(env), input=input, capture_output=True, text=True,
        timeout=WAIT_SECONDS * 2, check=False, encoding="utf-8",
    )  # fmt: skip
    if code is not None:
        assert done.returncode == code, (
            f"perdure {' '.join(words)} exited with {done.returncode}\n{done.stdout}{done.stderr}"
        )
    assert "Traceback" not in done.stderr or "--verbose" in words, done.stderr
    return done


def told(*words: str, cwd: Path, env: dict[str, str] | None = None, code: int | None = 0) -> dict[str, Any]:
    """Run one command line with ``--output json`` and return its one envelope, checked."""
    done = perdure(*words, "--output", "json", cwd=cwd, env=env, code=code)
    (line,) = done.stdout.splitlines()
    envelope: dict[str, Any] = json.loads(line)
    assert envelope["apiVersion"] == "perdure.dev/cli/v1"
    assert envelope["ok"] is (done.returncode == 0)
    assert set(envelope) == {"apiVersion", "kind", "ok", "data", "diagnostics"} | (
        {"error"} if not envelope["ok"] else set()
    )
    if not envelope["ok"]:
        assert set(envelope["error"]) == {"code", "message", "help", "exitCode", "run"}
        assert envelope["error"]["exitCode"] == done.returncode
    return envelope


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """A user's environment without what would change the command line."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PERDURE_DB", "NO_COLOR", "COLUMNS")}
    return {**kept, "COLUMNS": "80", **(extra or {})}


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something in another process."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_SECONDS:g} s for {what}"
        time.sleep(0.02)


@contextmanager
def worker(cwd: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A worker of ``module.py``'s app, ready; gone when the block ends."""
    process = subprocess.Popen(
        [*PROGRAM, "worker", "--app", "module:app", *words], cwd=cwd, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith(("Worker ready:", "{")), line + process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()
