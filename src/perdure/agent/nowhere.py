"""A store that keeps nothing, for runs without history or recovery. All that is shared is how often models are called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from perdure.errors import Error
from perdure.ports.failpoints import Boundary, Failpoint
from perdure.ports.store import Unit
from perdure.rules.accounting import Rate
from perdure.rules.pace import Pace

T = TypeVar("T")


class Paces:
    """The paces of models by name, for whatever threads call them."""

    def __init__(self) -> None:
        self._paces: dict[str, Pace] = {}
        self._lock = threading.Lock()

    def write(self, unit: Unit[T]) -> T:
        """Run a unit of work; what it changed stays only if it does not raise."""
        with self._lock:
            paces = dict(self._paces)
            result = self.read(unit, paces)
            self._paces = paces
            return result

    def read(self, unit: Unit[T], paces: dict[str, Pace] | None = None) -> T:
        """Run a unit that finds paces and nothing else."""
        transaction: Any = _Nothing()
        transaction.ledger = _Models(self._paces if paces is None else paces)
        transaction.log = _Nothing()
        return unit(transaction)


_OF_THIS_PROCESS = Paces()


class _Nothing:
    """Whatever is asked, the answer is None."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class _Models(_Nothing):
    """The verbs of models; see ``ports.ledger.Ledger``."""

    def __init__(self, paces: dict[str, Pace]) -> None:
        self._paces = paces

    def _pace(self, model: str) -> Pace:
        return self._paces.get(model, Pace())

    def take_model_turn(self, model: str, now: int, tokens: int, rate: Rate) -> int:
        self._paces[model], again = self._pace(model).take(now, tokens, rate)
        return again

    def correct_model_turn(self, model: str, now: int, reserved: int, used: int, rate: Rate) -> None:
        self._paces[model] = self._pace(model).correct(now, reserved, used, rate)

    def hold_model(self, model: str, until: int) -> None:
        self._paces[model] = self._pace(model).hold(until)

    def model_held_until(self, model: str) -> int:
        return self._pace(model).held_until


class NowhereStore:
    """Takes every unit as done without running it, but those about how often models are called.

    Args:
        paces: who shares them; all runs of this process by default.
    """

    failpoint: Failpoint | None = None

    def __init__(self, paces: Paces = _OF_THIS_PROCESS) -> None:
        self._paces = paces

    def write(
        self,
        boundary: Boundary,
        unit: Unit[T],
        on_error: Callable[[BaseException], None] | None = None,
        *,
        single: bool = False,
    ) -> asyncio.Future[Any]:
        """A future that is already resolved."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if boundary is not Boundary.MODEL_RATE:
            future.set_result(True)
            return future
        try:
            future.set_result(self._paces.write(unit))
        except Error as error:
            future.set_exception(error)
        return future

    def read(self, unit: Unit[T]) -> T:
        """Run a unit that finds nothing: every verb but those of models answers None."""
        return self._paces.read(unit)

    async def scan(self, unit: Unit[T]) -> T:
        """As :meth:`read`."""
        return self._paces.read(unit)

    def hold(self, owner: str, lease_seconds: float, now: Callable[[], int]) -> None:
        """Nothing to hold."""

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Nobody else is there."""
        return lambda: None

    async def close(self) -> None:
        """Nothing to close."""
