"""Where a secret can be: the environment, a file, what a program prints. Reading one blocks, and nothing is kept.

What is read is never shown: not by a ``repr``, not by an error, not by the cause of one. Definitions hold only these
places.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import stat
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from perdure.errors import Invalid
from perdure.limits import (
    SECRET_ARGUMENT_BYTES_MAX,
    SECRET_ARGUMENTS_MAX,
    SECRET_FILE_BYTES_MAX,
    SECRET_OUTPUT_BYTES_MAX,
    SECRET_PROCESS_SECONDS_MAX,
)

_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEPT_ENVIRONMENT = ("HOME", "PATH")
_BY_HAND = "Run it by hand to see why; what it writes to stderr is never shown here, because it may hold the secret."


class Source(Protocol):
    """A place a secret is read from. Equal places are equal."""

    def read(self) -> str:
        """The secret as it is now.

        Raises:
            Invalid: it cannot be had; says where it should be, never what it is.
        """
        ...


@dataclass(frozen=True, slots=True, repr=False)
class Environment:
    """The environment variable ``name``."""

    name: Any

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _ENVIRONMENT.fullmatch(self.name):
            # what was given may be the secret itself: it is not repeated
            raise Invalid(
                "A Secret names no environment variable.",
                help='Use Secret.env("NAME"): letters, digits and `_`, not beginning with a digit.',
            )

    def __repr__(self) -> str:
        return f"env:{self.name}"

    def read(self) -> str:
        """The value of the variable."""
        value = os.environ.get(self.name)
        if not value:
            raise Invalid(
                f"The environment variable {self.name} is not set.", help="Set it where this process is started."
            )
        return value


@dataclass(frozen=True, slots=True, repr=False)
class SecretFile:
    """The regular file ``path``."""

    path: Any

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path.isprintable() or not self.path.strip():
            raise Invalid("A Secret names no file.", help='Use Secret.file("/run/secrets/NAME").')

    def __repr__(self) -> str:
        return f"file:{self.path}"

    def read(self) -> str:
        """The text of the file."""
        what = f"The secret file {self.path}"
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not hold us up
            try:
                mode = os.fstat(file).st_mode
                raw = b""
                while stat.S_ISREG(mode) and (piece := os.read(file, SECRET_FILE_BYTES_MAX + 1 - len(raw))):
                    raw += piece
            finally:
                os.close(file)
        except OSError as error:
            raise Invalid(f"{what} cannot be read: {error.strerror}.") from error
        if not stat.S_ISREG(mode):
            raise Invalid(f"{what} is no regular file.")
        if mode & stat.S_IWOTH:
            raise Invalid(f"{what} can be written by everybody.", help="Take that right away: chmod o-w.")
        return _text(raw, SECRET_FILE_BYTES_MAX, what)


@dataclass(frozen=True, slots=True, repr=False)
class Process:
    """What the program ``argv[0]`` prints when it is started with the rest of ``argv``."""

    argv: tuple[str, ...]
    seconds: float = field(compare=False)

    def __post_init__(self) -> None:
        if not all(_is_argument(word) for word in self.argv) or not self.argv[0]:
            raise Invalid(
                "A Secret's process has a word that cannot be passed to a program.",
                help=f"Each is text of at most {SECRET_ARGUMENT_BYTES_MAX:,} bytes without NUL, the first a program.",
            )
        if len(self.argv) > SECRET_ARGUMENTS_MAX + 1:
            raise Invalid(
                f"A Secret's process has {len(self.argv) - 1} arguments; the limit is {SECRET_ARGUMENTS_MAX}."
            )
        if self.seconds > SECRET_PROCESS_SECONDS_MAX:
            raise Invalid(
                f"The timeout of a Secret's process is {self.seconds:g} s; the limit is {SECRET_PROCESS_SECONDS_MAX:g} s."
            )

    def __repr__(self) -> str:
        return f"process:{self._program}"

    @property
    def _program(self) -> str:
        return Path(self.argv[0]).name  # the arguments may say more than is to be shown

    def read(self) -> str:
        """What the program prints."""
        what = f"The secret process {self._program}"
        environment = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
        try:
            child = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise Invalid(f"{what} cannot be started: {error.strerror}.") from error
        try:
            raw = self._output(child, what)
        except BaseException:
            if child.returncode is None:  # not reaped yet, so the number is still its own
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            raise
        finally:
            assert child.stdout is not None
            child.stdout.close()
        if child.returncode:
            how = f"exited with status {child.returncode}"
            if child.returncode < 0:
                how = f"was ended by signal {-child.returncode}"
            raise Invalid(f"{what} {how}.", help=_BY_HAND)
        return _text(raw, SECRET_OUTPUT_BYTES_MAX, what)

    def _output(self, child: subprocess.Popen[bytes], what: str) -> bytes:
        """All it prints until it ends, at most one byte over the limit."""
        assert child.stdout is not None
        out = child.stdout.fileno()
        late = Invalid(f"{what} did not end within {self.seconds:g} s and was killed.", help=_BY_HAND)
        until = time.monotonic() + self.seconds
        raw = b""
        with selectors.DefaultSelector() as ready:
            ready.register(out, selectors.EVENT_READ)
            while True:
                if not ready.select(max(0.0, until - time.monotonic())):
                    raise late
                piece = os.read(out, SECRET_OUTPUT_BYTES_MAX + 1 - len(raw))
                raw += piece
                if len(raw) > SECRET_OUTPUT_BYTES_MAX:
                    raise _too_large(what, SECRET_OUTPUT_BYTES_MAX)
                if not piece:
                    break
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise late from None  # its own message repeats the arguments
        return raw


def _is_argument(word: Any) -> bool:
    if not isinstance(word, str) or "\0" in word:
        return False
    return len(word.encode("utf-8", "surrogateescape")) <= SECRET_ARGUMENT_BYTES_MAX


def _text(raw: bytes, limit: int, what: str) -> str:
    if len(raw) > limit:
        raise _too_large(what, limit)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = None  # and raised below, because that error holds all the bytes
    if text is None:
        raise Invalid(f"{what} holds bytes that are no UTF-8 text.")
    text = text.removesuffix("\r\n" if text.endswith("\r\n") else "\n")
    if not text:
        raise Invalid(f"{what} holds nothing.")
    return text


def _too_large(what: str, limit: int) -> Invalid:
    return Invalid(f"{what} holds more than the limit of {limit:,} bytes.")
