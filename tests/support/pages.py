"""Markdown pages as tests read them: fenced blocks with what is said about them, and console sessions that are run.

What is said stands in a comment on the lines before the block: ``<!-- file: NAME -->`` writes it to a file (``NAME
(append)`` adds to one), ``<!-- wait: COMMAND -->`` waits until a command succeeds, ``<!-- not run: WHY -->`` leaves it.
In a console block lines after ``$`` are commands, the others what they print; ``…`` stands for anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECONDS_MAX = 100
_REAPED = re.compile(r"^bash: line \d+: +\d+ (Killed|Terminated) .*\n", re.MULTILINE)  # what a shell says of its jobs
_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAID = re.compile(r"<!-- (file|wait|not run): (.+?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block, or a wait that stands alone. ``said`` is the comment before it, as (word, rest)."""

    language: str
    text: str
    said: tuple[str, str] | None = None


def blocks(page: str) -> Iterator[Block]:
    """Every fenced block in order, and every wait between them."""
    end = 0
    for found in _BLOCK.finditer(page):
        between = page[end : found.start()]
        end = found.end()
        for wait in re.findall(r"<!-- wait: (.+?) -->", between):
            yield Block("", "", ("wait", wait))
        said = _SAID.search(between)
        yield Block(found[1], found[2], (said[1], said[2]) if said and said[1] != "wait" else None)


@dataclass(frozen=True)
class Command:
    """A command of a console block and the pattern of what it prints; ``expected`` None is not compared."""

    line: str
    expected: str | None


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block."""
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, _, printed = part.partition("\n")
        yield Command(line, printed)


def play(page: str, folder: Path) -> list[tuple[Command, str]]:
    """Write the files of a page into ``folder``, run its sessions there in one shell, and say what each printed."""
    todo: list[Command] = []
    for number, block in enumerate(blocks(page)):
        match block.said:
            case ("not run", _):
                continue
            case ("wait", command):
                todo.append(Command(f"until {command}; do sleep 0.1; done", None))
            case ("file", name):
                source = folder / f".block-{number}"
                source.write_text(block.text)
                target, append = name.removesuffix(" (append)"), name.endswith("(append)")
                todo.append(Command(f"cat {source} {'>>' if append else '>'} {target}", None))
            case _ if block.language == "console":
                todo += commands(block)
            case _:
                raise AssertionError(f"nothing runs this block: {block.text[:80]}")
    script = "\n".join(f"{command.line}\nprintf '\\n@@{number}@@\\n'" for number, command in enumerate(todo))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1"}
    with (folder / ".printed").open("w+b") as out:  # a file: what a session leaves running holds no pipe of ours
        shell = subprocess.Popen(
            ["bash", "-c", script], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.wait(SECONDS_MAX)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
        text = _REAPED.sub("", (folder / ".printed").read_text())
        printed = re.split(r"\n@@\d+@@\n", text)
    return list(zip(todo, printed, strict=False))


def matches(expected: str, printed: str) -> bool:
    """Whether text fits a pattern in which ``…`` stands for anything."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("…"))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None
