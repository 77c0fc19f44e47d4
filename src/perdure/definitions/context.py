"""What a tool is given besides its arguments: secrets by their place, and what it may know and do about its call.

The engine extends ``ToolContext`` with one that works; this one stands in tests and in annotations.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, NoReturn

from perdure.definitions.policy import positive_seconds
from perdure.errors import Invalid
from perdure.limits import SECRET_PROCESS_SECONDS
from perdure.secrets import Environment, Process, SecretFile, Source


class Secret:
    """A secret a tool or a model needs: where it is, not what it is. Only the place is ever stored, shown or sent.

    A tool's parameter of this type is not shown to the model; its default, a ``Secret``, supplies it::

        @tool
        async def charge(cents: int, token: Secret = Secret.env("BANK_TOKEN")) -> str: ...

    Made by :meth:`env`, :meth:`file` or :meth:`process`. Two of the same place are equal.
    """

    __slots__ = ("_source",)

    _source: Source

    def __init__(self, name: Any) -> None:
        self._source = name if isinstance(name, SecretFile | Process) else Environment(name)

    @classmethod
    def env(cls, name: str) -> Secret:
        """The secret in environment variable ``name``, read at each :meth:`reveal`.

        Raises:
            Invalid: ``name`` is no name of an environment variable.
        """
        return cls(name)

    @classmethod
    def file(cls, path: str | os.PathLike[str]) -> Secret:
        """The secret in a file, read at each :meth:`reveal`: UTF-8, at most 64 KiB, without one newline at its end.

        It must be a regular file, directly or through links. One that everybody may write is refused. One that others
        may read is not: container platforms mount secrets that way.

        Args:
            path: absolute, or from the working directory of the process that reads it.

        Raises:
            Invalid: ``path`` is no path.
        """
        return cls(SecretFile(os.fspath(path) if isinstance(path, os.PathLike) else path))

    @classmethod
    def process(cls, command: str, *args: str, timeout: str | float | timedelta = SECRET_PROCESS_SECONDS) -> Secret:
        """The secret a program prints, started at each :meth:`reveal`: UTF-8, at most 16 KiB, without one newline.

        The program is started directly, never through a shell, with nothing of the environment but ``PATH`` and
        ``HOME``, nothing to read, and in a session of its own, which is killed when the time is over. It must end with
        status 0 and close its output. What it writes to stderr is dropped.

        Args:
            command: a program on the ``PATH``, or its path.
            args: at most 64, each of at most 4,096 bytes. Other processes of the machine can see them: no secrets here.
            timeout: seconds, a ``timedelta`` or text like ``"5s"``; at most 60 s. Default 5 s.

        Raises:
            Invalid: a word or the timeout is out of bounds.
        """
        return cls(Process((command, *args), positive_seconds(timeout, "The timeout of a Secret's process")))

    def reveal(self) -> str:
        """The secret itself, as it is now. Do not store or print it.

        May block: on a file, or until a program ends. In a coroutine use ``await asyncio.to_thread(secret.reveal)``.

        Raises:
            Invalid: it cannot be had: not set, not there, empty, too large, no text, or the program failed. The message
                says where it should be.
        """
        return self._source.read()

    @property
    def blocks(self) -> bool:
        """Whether :meth:`reveal` may take a while, so that a coroutine should call it in a thread."""
        return not isinstance(self._source, Environment)

    def __repr__(self) -> str:
        return f"Secret({self._source!r})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._source == self._source

    def __hash__(self) -> int:
        return hash((Secret, self._source))


class ToolContext:
    """What a running tool knows about its call. A tool gets it by annotating a parameter with this type.

    Make one with keywords to call a tool in a test.

    Attributes:
        key: the stable idempotency key of this call: the same after a crash, a retry or a verdict. Give it to the
            outside.
        thread: id of the thread.
        run: id of the run.
        call: the call's place within the run, ``"turn.position"``.
        services: what the registration's services made for this attempt, or None.
    """

    key: str
    thread: str
    run: str
    call: str
    services: Any
    _until: datetime | None = None

    def __init__(
        self,
        *,
        key: str = "",
        thread: str = "",
        run: str = "",
        call: str = "",
        deadline: datetime | None = None,
        services: Any = None,
    ) -> None:
        self.key = key
        self.thread = thread
        self.run = run
        self.call = call
        self.services = services
        self._until = deadline

    @property
    def deadline(self) -> datetime | None:
        """When the run ends at the latest, as an aware UTC datetime; None where there is no bound."""
        return self._until

    def progress(self, message: str) -> None:
        """Tell whoever watches the run how far the call is. Recorded nowhere; nobody may watch."""

    async def step(self, name: str, fn: Callable[..., Any], *args: Any, effect: str | None = None) -> Any:
        """Run ``fn(*args)`` as a named durable step and return its recorded value.

        A step that is recorded returns its value without running. One that is not may execute again after a crash;
        ``effect="once"`` makes it unknown instead.

        Args:
            name: unique within the call.
            fn: function, sync or async.
            effect: None or ``"once"``.

        Raises:
            Invalid: not in a ``steps=True`` tool, a repeated name, a result that does not round-trip.
        """
        _no_steps("step")

    def step_key(self, name: str) -> str:
        """The idempotency key of the step ``name`` of this call: stable, to be given to the outside.

        Raises:
            Invalid: not in a ``steps=True`` tool.
        """
        _no_steps("step_key")


def _no_steps(what: str) -> NoReturn:
    raise Invalid(
        f"ctx.{what} exists only in a `steps=True` tool.",
        help="Declare it with @tool(steps=True); its body is then entered again after a crash.",
    )
