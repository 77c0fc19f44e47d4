"""What a tool is given besides its arguments: secrets by name, and what it may know and do about its call.

The engine extends ``ToolContext`` with one that works; this one stands in tests and in annotations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from perdure.errors import Invalid

_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Secret:
    """A secret a tool or a model needs: where it is, not what it is. Only the name is ever stored, shown or sent.

    A tool's parameter of this type is not shown to the model; its default, a ``Secret``, supplies it::

        @tool
        async def charge(cents: int, token: Secret = Secret.env("BANK_TOKEN")) -> str: ...
    """

    __slots__ = ("_name",)

    def __init__(self, name: Any) -> None:
        if not isinstance(name, str) or not _ENVIRONMENT.fullmatch(name):
            # what was given may be the secret itself: it is not repeated
            raise Invalid(
                "A Secret names no environment variable.",
                help='Use Secret.env("NAME"): letters, digits and `_`, not beginning with a digit.',
            )
        self._name = name

    @classmethod
    def env(cls, name: str) -> Secret:
        """The secret in environment variable ``name``, read at each :meth:`reveal`.

        Raises:
            Invalid: ``name`` is no name of an environment variable.
        """
        return cls(name)

    def reveal(self) -> str:
        """The secret itself, as it is now. Do not store or print it.

        Raises:
            Invalid: the environment variable is not set or empty.
        """
        value = os.environ.get(self._name)
        if not value:
            raise Invalid(
                f"The environment variable {self._name} is not set.", help="Set it where this process is started."
            )
        return value

    def __repr__(self) -> str:
        return f"Secret(env:{self._name})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._name == self._name

    def __hash__(self) -> int:
        return hash((Secret, self._name))


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
