"""What the global options say, for every command. Imports nothing, so that ``perdure --help`` stays quick."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

DEFAULT_DB = ".perdure/perdure.db"
_COMMANDS = r"\bperdure (?=(?:approvals|effects|obligations|recover|redrive|runs|threads|verify)\b)"


class Settings:
    """The global options, wherever on the line they stood.

    Attributes:
        db: the store named by ``--db``, or None.
        output: ``human``, ``json`` or ``jsonl``.
        color: ``auto``, ``always`` or ``never``.
        verbose: whether to show log lines and tracebacks.
    """

    def __init__(self) -> None:
        self.db: str | None = None
        self.output = "human"
        self.color = "auto"
        self.verbose = False

    @property
    def named(self) -> str | None:
        """The store that the user named, by ``--db`` or ``PERDURE_DB``; None leaves the default."""
        return self.db if self.db is not None else os.environ.get("PERDURE_DB") or None

    @property
    def human(self) -> bool:
        """Whether people read it."""
        return self.output == "human"

    def colored(self, stream: TextIO) -> bool:
        """Whether ``stream`` gets colour: by ``--color``, else on a terminal that did not ask for none."""
        if self.color != "auto":
            return self.color == "always"
        return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def command(self, *words: str, db: str | None = None) -> str:
        """A command line that does something with the same store, ready to be pasted.

        Args:
            db: the store, where it is not the one the user named.
        """
        import shlex

        chosen = db if db is not None else self.db
        return shlex.join(["perdure", *(["--db", chosen] if chosen is not None else []), *words])

    def located(self, command: str) -> str:
        """A command line that names no store, for the same store as this one."""
        return command if self.db is None else f"{self.command()} {command.removeprefix('perdure ')}"

    def pointed(self, text: str) -> str:
        """Advice whose commands are about the same store as this one, where ``--db`` named it."""
        import re

        if self.db is None:
            return text
        return re.sub(_COMMANDS, lambda found: f"{self.command()} ", text)


def scan_output(arguments: list[str]) -> str:
    """The ``--output`` of a line that could not be understood, so that its error has the right form."""
    found = "human"
    for index, word in enumerate(arguments):
        value = word.partition("=")[2] if word.startswith("--output=") else ""
        if word == "--output" and index + 1 < len(arguments):
            value = arguments[index + 1]
        found = value if value in ("human", "json", "jsonl") else found
    return found


def calm(stream: object) -> None:
    """Never fail to print a character: what the encoding lacks is written as an escape."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")


def fill_streams() -> None:
    """Where the caller closed stdout or stderr, what is printed goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), "utf-8"))


def silence_stdout() -> None:
    """The reader of stdout went away: let nothing fail on it any more, at exit neither."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
