"""Opening the store for a command, and the values that many commands take. The CLI runs no work but in ``worker``."""

from __future__ import annotations

import asyncio
import getpass
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perdure import ids
from perdure.cli.output import Output
from perdure.cli.settings import DEFAULT_DB, Settings
from perdure.errors import Invalid
from perdure.limits import PAYLOAD_BYTES_MAX

if TYPE_CHECKING:
    from perdure.app import App


class Id(click.ParamType[str]):
    """An id or key from outside, by the one rule for all of them.

    Args:
        what: what its error calls it.
    """

    name = "text"

    def __init__(self, what: str) -> None:
        self.what = what

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The value itself.

        Raises:
            Invalid: it breaks the rule.
        """
        return ids.check_id(value, self.what)


def reason_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--reason`` and ``--by``: every decision has an author and a reason."""
    command = click.option("--by", type=Id("by"), default=author, metavar="WHO", help="Who decides. Default: you.")(
        command
    )
    return click.option("--reason", required=True, metavar="TEXT", help="Why; it is recorded.")(command)


def author() -> str:
    """The name of whoever is logged in, as far as the system knows one."""
    try:
        return ids.check_id(getpass.getuser(), "by")
    except (OSError, KeyError, Invalid):
        return "local"


def check_reason(reason: str) -> str:
    """A reason that says something.

    Raises:
        Invalid: it is blank.
    """
    if not reason.strip():
        raise Invalid("The reason is blank.", help="Say why, for those who read it later.")
    return reason


def run(work: Callable[[Output], Awaitable[int | None]]) -> int:
    """Run a command's coroutine with the settings of its context; returns its exit code."""
    settings = click.get_current_context().find_root().ensure_object(Settings)
    prepare_logging(settings)
    return asyncio.run(_awaited(work, Output(settings))) or 0


async def _awaited(work: Callable[[Output], Awaitable[int | None]], output: Output) -> int | None:
    return await work(output)


class _Brief(logging.Formatter):
    """One line a message; an exception as its type and text."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        told = f": {type(error).__name__}: {error}" if error is not None else ""
        return f"perdure: {record.getMessage()}{told}"


def prepare_logging(settings: Settings) -> None:
    """Log lines go to stderr: warnings in brief, or with ``--verbose`` everything, tracebacks included."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s") if settings.verbose else _Brief())
    logging.basicConfig(level=logging.INFO if settings.verbose else logging.WARNING, handlers=[handler], force=True)


def address(settings: Settings, *, create: bool) -> str:
    """The store that a command is about. Only the default's own folder is ever made.

    A default that does not exist yet holds nothing: then an empty store in memory answers just as well.
    """
    named = settings.named
    if named is not None:
        return named
    default = Path(DEFAULT_DB)
    if create:
        default.parent.mkdir(exist_ok=True)
    elif not default.exists():
        return "memory:"
    return DEFAULT_DB


@asynccontextmanager
async def opened(settings: Settings, *, create: bool = False) -> AsyncIterator[App]:
    """The store as a client: it reads and administers, and runs nothing."""
    from perdure import app as apps

    async with apps.open(address(settings, create=create), workers=0, create=create) as app:
        yield app


def read_value(path: str, what: str) -> bytes:
    """The bytes of a file that a command was given; ``-`` is standard input.

    Raises:
        Invalid: it cannot be read or is too large.
    """
    try:
        if path == "-":
            if sys.stdin is None:  # as the caller may close it
                raise ValueError("standard input is closed")
            raw = sys.stdin.buffer.read(PAYLOAD_BYTES_MAX + 1)
        else:
            with Path(path).open("rb") as file:
                raw = file.read(PAYLOAD_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        raise Invalid(f"The {what} {path!r} cannot be read: {getattr(error, 'strerror', None) or error}.") from error
    if len(raw) > PAYLOAD_BYTES_MAX:
        raise Invalid(f"The {what} {path!r} is over {PAYLOAD_BYTES_MAX:,} bytes.")
    return raw
