"""What a workflow run has used of its budgets, and whether it may have more. Pure: the fold in, numbers out.

A call of a model counts as one request whatever became of it; its tokens count as they were told, and a call that may
have been served stays charged at its reservation. Equality with a limit is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import msgspec

from perdure.records.parts import Charge
from perdure.records.task import BudgetUnit
from perdure.rules import fold
from perdure.rules.flow import Flow

Amounts = Mapping[str, int]

SHARED: tuple[str, ...] = (
    "provider_requests",
    "turns",
    "tool_calls",
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "process_output_bytes",
    "artifact_bytes",
    "cost_microusd",
)
"""Units that a lineage may share: what is spent. Time and counts of a plan belong to each run."""


class Excess(msgspec.Struct, frozen=True):
    """What would go over: the unit, its limit, what is used or reserved of it, and what was wanted beside that."""

    unit: BudgetUnit
    limit: int
    used: int
    wanted: int

    def __str__(self) -> str:
        """One sentence for people."""
        return f"{self.unit} may be {self.limit:,} in all; {self.used:,} are used or reserved and {self.wanted:,} were wanted"


def used(flow: Flow, runs: Iterable[fold.Run]) -> dict[str, int]:
    """What a run has used, from its own records and those of its agents' runs. What is in flight is reserved elsewhere."""
    total: dict[str, int] = dict.fromkeys(SHARED, 0)
    for run in runs:
        total["provider_requests"] += run.model_tries
        total["turns"] += len(run.turns)
        total["tool_calls"] += run.tool_calls
        total["input_tokens"] += run.usage.input + run.charged.input
        total["output_tokens"] += run.usage.output + run.charged.output
        total["total_tokens"] += run.tokens
        total["cost_microusd"] += run.spent
    total["process_output_bytes"] = flow.printed
    total["artifact_bytes"] = flow.artifact_bytes
    return total


def model_call(charge: Charge) -> dict[str, int]:
    """What one request to a model may use at most."""
    return {
        "provider_requests": 1,
        "turns": 1,
        "input_tokens": charge.input,
        "output_tokens": charge.output,
        "total_tokens": charge.input + charge.output,
        "cost_microusd": charge.cost or 0,
    }


def excess(limits: Mapping[str, int], spent: Amounts, reserved: Amounts, wanted: Amounts) -> Excess | None:
    """The first unit that would go over its limit if so much more were spent, or None."""
    for unit, amount in wanted.items():
        limit = limits.get(unit)
        if limit is None:
            continue
        taken = spent.get(unit, 0) + reserved.get(unit, 0)
        if amount and taken + amount > limit:
            return Excess(cast(BudgetUnit, unit), limit, taken, amount)
    return None


def exceeded(limits: Mapping[str, int], spent: Amounts) -> Excess | None:
    """A unit of which more was used than its limit: real use may overrun what was reserved."""
    for unit, amount in spent.items():
        limit = limits.get(unit)
        if limit is not None and amount > limit:
            return Excess(cast(BudgetUnit, unit), limit, amount, 0)
    return None
