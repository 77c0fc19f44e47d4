"""What a run has used of its limits, and whether it may make another model call. Pure: the fold in, a name out."""

from __future__ import annotations

from typing import Literal

from perdure.limits import ANSWER_TOKENS_MIN, BUDGET_WARNING_PERCENT
from perdure.records.parts import Failure
from perdure.records.run import AcceptedLimits
from perdure.rules import accounting, fold
from perdure.rules.accounting import Price

_SPENT = "The run used {used} of its budget of {budget}; no call fits in what is left."

Limit = Literal["turns", "tool_calls", "tokens", "cost"]


def room(run: fold.Run, limits: AcceptedLimits, prompt: int, price: Price | None) -> tuple[int, Limit] | None:
    """The most tokens of an answer that the budgets leave for a prompt of so many tokens, and the limit that says so.

    None: no budget bounds it. Below zero: the prompt alone does not fit.
    """
    found: list[tuple[int, Limit]] = []
    if limits.token_budget is not None:
        found.append((limits.token_budget - run.tokens - prompt, "tokens"))
    if limits.cost_budget is not None and price is not None:
        found.append((accounting.answer_for(limits.cost_budget - run.spent, prompt, price), "cost"))
    return min(found, default=None)


def exhausted(run: fold.Run, limits: AcceptedLimits, left: tuple[int, Limit] | None, most: int) -> Limit | None:
    """The limit that leaves no room for another model call, or None.

    Args:
        left: what :func:`room` says. most: the most tokens the answer is wanted to have; room for
            ``ANSWER_TOKENS_MIN`` of them is enough.
    """
    if len(run.turns) >= limits.max_turns:
        return "turns"
    if run.tool_calls > limits.max_tool_calls:
        return "tool_calls"
    if left is not None and left[0] < min(most, ANSWER_TOKENS_MIN):
        return left[1]
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
