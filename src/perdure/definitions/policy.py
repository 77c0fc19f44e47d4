"""The bounds of a run: how long, how much, how often. Values only; the engine holds a run to them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from perdure import limits
from perdure.clock import parse_duration
from perdure.errors import Invalid

MODEL_CALLS = ("repeat", "once")
ON_EXHAUSTION = ("final-answer", "fail")
_COUNT_MAX = 1_000_000
_TOKENS_MAX = limits.CANONICAL_INTEGER_MAX

# field -> (least, most, whether None is legal)
_RANGES: dict[str, tuple[int, int, bool]] = {
    "max_turns": (1, _COUNT_MAX, False),
    "max_tool_calls": (0, _COUNT_MAX, False),
    "concurrency": (1, limits.RESPONSE_CALLS_MAX, False),
    "token_budget": (1, _TOKENS_MAX, True),
    "repeated_failure_limit": (0, _COUNT_MAX, False),
    "output_retries": (0, _COUNT_MAX, False),
    "tool_result_bytes": (limits.TOOL_RESULT_BYTES_MIN, limits.INLINE_BYTES_MAX, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What one run may use at most. Immutable; every default is finite.

    Attributes:
        max_turns: model responses, 1 to 1,000,000. Default 16.
        max_tool_calls: tool calls that run, 0 to 1,000,000. Default 64.
        max_duration: wall-clock time of the run: seconds, a ``timedelta`` or text like ``"30m"``; kept as seconds.
            None means :meth:`duration_seconds` decides.
        concurrency: tool calls of one response that run at the same time, 1 to 1,024. Default 4.
        token_budget: input and output tokens of all model calls together, at least 1; None (default) for no bound. What
            a call may need is reserved before it; a call that may have been served stays charged at its reservation.
        cost_budget: US dollars of all model calls together, kept to a millionth; None (default) for no bound. Needs a
            model whose price is known.
        model_calls: ``"repeat"`` (default): a model call whose response was lost is made again, and perhaps charged
            twice. ``"once"``: it is an effect like a tool's of that class: recorded before it starts, and unknown when
            its outcome is lost; the run waits for a verdict.
        on_exhaustion: what happens when turns, tool calls, tokens or money are used up. ``"final-answer"`` (default): the
            model is asked once more, without tools, to answer with what it has. ``"fail"``: the run fails.
        repeated_failure_limit: failed tool calls in a row that end the run, 0 switches it off. Default 3.
        output_retries: how often an answer that does not decode goes back to the model, 0 to 1,000,000. Default 2.
        tool_result_bytes: what of a tool's result the model sees, 256 to 1,048,576 bytes. Default 51,200.

    Raises:
        Invalid: a value is out of its range; names the field and the range.
    """

    max_turns: int = limits.TURNS_MAX
    max_tool_calls: int = limits.TOOL_CALLS_MAX
    max_duration: str | float | dt.timedelta | None = None
    concurrency: int = limits.CONCURRENCY
    token_budget: int | None = None
    cost_budget: float | str | Decimal | None = None
    model_calls: Literal["repeat", "once"] = "repeat"
    on_exhaustion: Literal["final-answer", "fail"] = "final-answer"
    repeated_failure_limit: int = limits.REPEATED_FAILURES_MAX
    output_retries: int = limits.OUTPUT_RETRIES_MAX
    tool_result_bytes: int = limits.TOOL_RESULT_BYTES_MAX

    def __post_init__(self) -> None:
        for name, (least, most, optional) in _RANGES.items():
            _check_count(name, getattr(self, name), least, most, optional)
        _check_choice("model_calls", self.model_calls, MODEL_CALLS)
        _check_choice("on_exhaustion", self.on_exhaustion, ON_EXHAUSTION)
        if self.cost_budget is not None:
            object.__setattr__(self, "cost_budget", _dollars(self.cost_budget))
        if self.max_duration is not None:
            object.__setattr__(self, "max_duration", positive_seconds(self.max_duration, "Policy.max_duration"))

    @property
    def cost_budget_micro_usd(self) -> int | None:
        """The cost budget in millionths of a dollar."""
        return None if self.cost_budget is None else round(Decimal(str(self.cost_budget)) * 1_000_000)

    def duration_seconds(self, *, waiting: bool) -> float:
        """Seconds a run may take.

        Args:
            waiting: whether a tool of the agent may wait for a person (it asks approval, or is of class ``once``).

        Returns:
            ``max_duration`` where given; else 7 days when ``waiting``, 30 minutes otherwise.
        """
        if isinstance(self.max_duration, float):
            return self.max_duration
        return limits.DURATION_WAITING_SECONDS if waiting else limits.DURATION_SECONDS

    def values(self) -> dict[str, Any]:
        """Field name to JSON value: what a definition's digest covers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def positive_seconds(value: str | float | dt.timedelta, what: str) -> float:
    """Seconds of a duration that is longer than nothing.

    Raises:
        Invalid: not a duration, or zero.
    """
    seconds = parse_duration(value, what)
    if seconds == 0:
        raise Invalid(f"{what} is zero.", help="Use a time above zero, or None for the default.")
    return seconds


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise Invalid(f"Policy.{name} is {value!r:.64}.", help=f"Use {' or '.join(repr(one) for one in choices)}.")


def _dollars(value: object) -> float:
    """A sum of money as whole millionths of a dollar."""
    legal = "Use dollars, for example 2.50 or '0.05': at least 0.000001, or None."
    if isinstance(value, bool) or not isinstance(value, (int, float, str, Decimal)):
        raise Invalid(f"Policy.cost_budget is {value!r:.64}.", help=legal)
    try:
        micro = Decimal(str(value)) * 1_000_000
    except InvalidOperation:
        raise Invalid(f"Policy.cost_budget is {value!r:.64}.", help=legal) from None
    if not micro.is_finite() or not 1 <= micro <= limits.CANONICAL_INTEGER_MAX:
        raise Invalid(f"Policy.cost_budget is {value!r:.64}.", help=legal)
    return round(micro) / 1_000_000


def _check_count(name: str, value: object, least: int, most: int, optional: bool) -> None:
    if value is None and optional:
        return
    legal = f"Use a whole number from {least:,} to {most:,}{', or None' if optional else ''}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(f"Policy.{name} is {value!r:.64}, not a whole number.", help=legal)
    if not least <= value <= most:
        raise Invalid(f"Policy.{name} is {value:,}.", help=legal)
