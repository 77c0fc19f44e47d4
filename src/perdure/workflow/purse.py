"""The budget of a run, shared by its tasks that run side by side: reserved before dispatch, in one process, by one loop.

A run has one owner at a time, so what its own tasks have in flight is counted in memory; what is in the log is counted
from the log. What a lineage shares is counted in the database, because its runs may have owners elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from perdure.engine.attempt import Attempt
from perdure.engine.inference import CallFailed
from perdure.ports.failpoints import Boundary
from perdure.records.parts import Charge, Failure
from perdure.records.task import BudgetDenied, BudgetUnit
from perdure.rules import spending
from perdure.rules.spending import Excess


class BudgetPurse:
    """Implements ``engine.inference.Purse`` for one task of a run, and what processes and artifacts reserve.

    Args:
        reserved: what tasks of this attempt have in flight: one dict, shared by all of them.
        lineage: whose budget is shared, or empty.
    """

    def __init__(self, attempt: Attempt, task: str, reserved: dict[str, int], lineage: str = "") -> None:
        self._attempt = attempt
        self._task = task
        self._reserved = reserved
        self._lineage = lineage

    async def take(self, place: str, charge: Charge) -> Callable[[], None]:
        """See ``engine.inference.Purse.take``."""
        wanted = spending.model_call(charge)
        over = await self.reserve(place, wanted)
        if over is not None:
            failure = Failure("budget", f"{over}.")
            raise CallFailed(failure, [self.denied(over)])
        return lambda: self.release(wanted)

    async def reserve(self, place: str, wanted: Mapping[str, int]) -> Excess | None:
        """Reserve amounts, all or none. What would go over, if anything."""
        flow = self._attempt.run.flow
        assert flow is not None
        runs = [self._attempt.state.runs[id] for id in flow.agents if id in self._attempt.state.runs]
        over = spending.excess(flow.budgets, spending.used(flow, runs), self._reserved, wanted)
        if over is not None:
            return over
        for unit, amount in wanted.items():
            self._reserved[unit] = self._reserved.get(unit, 0) + amount
        if self._lineage:
            over = await self._of_lineage(place, wanted)
            if over is not None:
                self.release(wanted)
        return over

    async def _of_lineage(self, place: str, wanted: Mapping[str, int]) -> Excess | None:
        flow = self._attempt.run.flow
        assert flow is not None
        limits = {unit: limit for unit, limit in flow.budgets.items() if unit in spending.SHARED}
        lineage = self._lineage
        found = await self._attempt.host.store.write(
            Boundary.BUDGET, lambda tx: tx.ledger.charge_lineage(lineage, place, dict(wanted), limits)
        )
        if found is None:
            return None
        unit, used = found
        return Excess(cast(BudgetUnit, unit), limits[unit], used, wanted[unit])

    def release(self, wanted: Mapping[str, int]) -> None:
        """End a reservation: what became of it is in the log."""
        for unit, amount in wanted.items():
            self._reserved[unit] = self._reserved.get(unit, 0) - amount

    def denied(self, over: Excess) -> BudgetDenied:
        """The denial, as it is recorded."""
        return BudgetDenied(self._attempt.run.id, self._task, over.unit, over.limit, over.used, over.wanted)
