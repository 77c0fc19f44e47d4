"""``builtin.python``: a function of an importable module, sync or async, with the class its document declares."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from perdure.definitions.workflow import Action
from perdure.errors import Invalid
from perdure.ports.executor import Call, Facts, InDoubt, Performed


class Functions:
    """Calls functions named ``module:function`` with the task's input as arguments."""

    kinds = frozenset({"builtin.python"})

    def describe(self, action: Action, input: Mapping[str, Any]) -> Facts:
        """See ``ports.executor.Executor.describe``."""
        request = {"call": action.call, "arguments": dict(input)}
        return Facts(
            "builtin.python", action.effect_kind, action.effect, action.risk or "medium", "python.call", request
        )  # fmt: skip

    async def prepare(self, call: Call) -> Performed | None:
        """See ``ports.executor.Executor.prepare``."""
        function_of(call.action)
        return None

    async def execute(self, call: Call) -> Performed:
        """See ``ports.executor.Executor.execute``."""
        function = function_of(call.action)
        arguments = dict(call.input)
        if _takes_key(function):
            arguments["perdure_key"] = call.key
        try:
            async with asyncio.timeout(call.timeout):
                if inspect.iscoroutinefunction(function):
                    return Performed(await function(**arguments))
                return Performed(await asyncio.to_thread(function, **arguments))
        except TimeoutError as error:
            raise InDoubt(f"{call.action.call} did not end within {call.timeout:g} s.", kind="timeout") from error

    async def predict(self, call: Call) -> Any:
        """See ``ports.executor.Executor.predict``."""
        if call.action.effect in ("pure", "observe"):
            return (await self.execute(call)).result
        function_of(call.action)
        return {"status": "requires_execution", "changed": False}


def _takes_key(function: Callable[..., Any]) -> bool:
    """Whether it wants the idempotency key of its effect."""
    try:
        return "perdure_key" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin tells nothing of itself
        return False


def function_of(action: Action) -> Callable[..., Any]:
    """The function that an action names.

    Raises:
        Invalid: there is none.
    """
    module, _, name = (action.call or "").partition(":")
    if not module or not name:
        raise Invalid(f"builtin.python calls {action.call!r}.", help="Write module:function.")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise Invalid(f"builtin.python cannot load {action.call!r}: {error}.") from error
    if not callable(found):
        raise Invalid(f"{action.call!r} is no function.")
    function: Callable[..., Any] = found
    return function
