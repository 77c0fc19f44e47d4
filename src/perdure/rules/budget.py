"""What a run has used of its limits, and whether it may make another model call. Pure: the fold in, a name out."""

from __future__ import annotations

from typing import Literal

from perdure.limits import BUDGET_WARNING_PERCENT
from perdure.records.parts import Charge, Failure
from perdure.records.run import AcceptedLimits
from perdure.rules import fold

_SPENT = "The run used {used} of its budget of {budget}; no call fits in what is left."

Limit = Literal["turns", "tool_calls", "tokens", "cost"]


def exhausted(run: fold.Run, limits: AcceptedLimits, needed: Charge) -> Limit | None:
    """The limit that leaves no room for another model call, or None.

    Args:
        needed: what that call needs at least; equality with what is left is enough.
    """
    if len(run.turns) >= limits.max_turns:
        return "turns"
    if run.tool_calls > limits.max_tool_calls:
        return "tool_calls"
    if limits.token_budget is not None and run.tokens + needed.input + needed.output > limits.token_budget:
        return "tokens"
    if limits.cost_budget is not None and run.spent + (needed.cost or 0) > limits.cost_budget:
        return "cost"
    return None


def failure(run: fold.Run, limits: AcceptedLimits, limit: Limit) -> Failure:
    """The failure of a run that used up a limit."""
    match limit:
        case "turns":
            return Failure("policy.turns", f"The run used all of its {limits.max_turns} turns.")
        case "tool_calls":
            most = limits.max_tool_calls
            return Failure("policy.tool_calls", f"The run may make {most} tool calls; its last batch went over.")
        case "tokens":
            used, budget = f"{run.tokens:,}", f"{limits.token_budget:,} tokens"
            return Failure("policy.tokens", _SPENT.format(used=used, budget=budget))
        case "cost":
            used, budget = f"${run.spent / 1_000_000:.6f}", f"${(limits.cost_budget or 0) / 1_000_000:.6f}"
            return Failure("policy.cost", _SPENT.format(used=used, budget=budget))


def shares(run: fold.Run, limits: AcceptedLimits, now: int) -> dict[str, tuple[int, int]]:
    """Limit to (used, allowed) for every limit the run has: counts, tokens, micro-USD, and seconds of its time."""
    found = {"turns": (len(run.turns), limits.max_turns), "tool_calls": (run.tool_calls, limits.max_tool_calls)}
    if limits.token_budget is not None:
        found["tokens"] = (run.tokens, limits.token_budget)
    if limits.cost_budget is not None:
        found["cost"] = (run.spent, limits.cost_budget)
    if run.started is not None:
        left = max(0, run.started.deadline - now)
        found["duration"] = ((limits.max_duration - left) // 1_000_000, limits.max_duration // 1_000_000)
    return found


def warned(used: int, allowed: int) -> bool:
    """Whether so much of a limit is used that somebody should be told."""
    return used * 100 >= allowed * BUDGET_WARNING_PERCENT and used > 0
