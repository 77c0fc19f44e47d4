"""The executor port: one action of a workflow task. What an executor must do, and the values that cross.

The engine records an effect before :meth:`Executor.execute` is called and its outcome afterwards; whether it may be called
again is judged by the class that :meth:`Executor.describe` declares. An executor never repeats anything by itself, and it
tells the truth about what it does not know: :class:`Failed` means that the action definitely did not succeed,
:class:`InDoubt` that nobody can say whether it took place.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from perdure.definitions.workflow import Action, Policy
from perdure.errors import Refused
from perdure.errors import Unknown as UnknownError

EffectKind = Literal[
    "pure",
    "internal_state",
    "observe",
    "workspace_mutate",
    "external_mutate",
    "process_execution",
    "network",
    "model",
    "remote_agent",
]
EffectClass = Literal["pure", "observe", "idempotent", "keyed", "once"]
Risk = Literal["low", "medium", "high", "critical"]
FailureKind = Literal["tool", "timeout", "transport", "rate_limit", "exit", "assertion", "protocol", "output"]


class Facts(msgspec.Struct, frozen=True):
    """What an action is, before it is run: what policy, approval, recovery and people read.

    Attributes:
        operation: the name of the operation in records, for example ``builtin.write``.
        kind: what it touches. effect_class: what recovery may do. risk: as declared.
        capability: the name policies allow or deny, for example ``filesystem.write``.
        request: the JSON value that is stored as the request of the effect: never a secret; large content as a digest.
        approval: what the document demands for this very thing, whatever the mode: ``always`` asks, nothing takes away.
    """

    operation: str
    kind: EffectKind
    effect_class: EffectClass
    risk: Risk
    capability: str
    request: Any
    approval: Literal["policy", "never", "always"] = "policy"


class Workspace(msgspec.Struct, frozen=True):
    """The folder a run may see and the folders under which it may write, absolute and resolved."""

    root: Path
    writable: tuple[Path, ...] = ()


class Produced(msgspec.Struct, frozen=True):
    """A file an action produced, to be kept as an artifact: a path in the workspace, or bytes.

    Attributes:
        name: the logical name: the path relative to the workspace, or the remote's name.
    """

    name: str
    path: Path | None = None
    data: bytes = b""
    media_type: str = ""


class Performed(msgspec.Struct, frozen=True):
    """An action that took place: its result (JSON values) and the files it left."""

    result: Any
    produced: tuple[Produced, ...] = ()


Note = Callable[[str, Any], Awaitable[None]]


class Call(msgspec.Struct, frozen=True):
    """One action to be performed.

    Attributes:
        run, task, attempt: where it stands; attempts count from 1.
        effect: id of the effect. key: the idempotency key to give to the outside, the same in every attempt.
        action: the authored action. input: its rendered input (defaults overlaid by the task's ``with``).
        timeout: seconds the executor may take; it enforces them.
        diff: whether a diff of changed text is wanted in the result.
        notes: what an earlier process of this very effect noted durably, by name.
        note: record something durably now, in the middle of the effect (a remote id before it is polled).
        goes_on: asked when the executor is cancelled: whether another process will go on with this effect (this one stops,
            or lost it), so that what works elsewhere is left to work.
    """

    run: str
    task: str
    attempt: int
    effect: str
    key: str
    action: Action
    input: Mapping[str, Any]
    workspace: Workspace
    policy: Policy
    timeout: float
    note: Note
    notes: Mapping[str, Any] = {}
    diff: bool = True
    goes_on: Callable[[], bool] = lambda: False


class Executor(Protocol):
    """Performs the actions of some kinds. One object serves many runs at once on one loop."""

    kinds: frozenset[str]

    def describe(self, action: Action, input: Mapping[str, Any]) -> Facts:
        """The facts of one action with this input. Pure: it opens nothing.

        Raises:
            Invalid: the input does not fit the action.
        """
        ...

    async def prepare(self, call: Call) -> Performed | None:
        """Look before an effect is recorded. May read the outside, never changes it.

        Returns:
            the result if nothing needs to be done (a file that already has this content); then no effect is recorded.

        Raises:
            Denied: policy or workspace rules forbid it. Invalid: it can never run as written (no such executable).
        """
        ...

    async def execute(self, call: Call) -> Performed:
        """Perform it once. Cancellation stops it within a second and lets the ``CancelledError`` pass.

        Raises:
            Failed: it definitely did not succeed. InDoubt: it may have taken place. Denied: refused before dispatch.
            Any other exception is in doubt for class ``once`` and a failure for every other class.
        """
        ...

    async def predict(self, call: Call) -> Any:
        """Check mode: what it would do, as the result to show; nothing is changed, no process and no model is started."""
        ...


class Failed(Refused):
    """The action definitely did not succeed.

    Args:
        kind: what retry policies name; ``output`` means that it took effect and what it returned cannot be used.
        output: what is kept of it for people and templates (exit code, what it printed), JSON values.
        retry_after: seconds the remote asked to be left alone, if it did.
    """

    def __init__(
        self, error: str, *, kind: FailureKind = "tool", output: Any = None, retry_after: float | None = None
    ) -> None:
        super().__init__(error)
        self.kind = kind
        self.output = output
        self.retry_after = retry_after


class InDoubt(UnknownError):
    """The action may have taken place; nobody can say. ``kind`` and ``output`` as in :class:`Failed`."""

    def __init__(self, error: str, *, kind: FailureKind = "transport", output: Any = None) -> None:
        super().__init__(error)
        self.kind = kind
        self.output = output
