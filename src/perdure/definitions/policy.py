"""The bounds of a run: how long, how much, how often. Values only; the engine holds a run to them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, fields
from typing import Any, Literal

from perdure import limits
from perdure.clock import parse_duration
from perdure.errors import Invalid

MODEL_CALLS = ("repeat",)  # "once" needs an effect of its own for each model call, which is not built yet
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
        token_budget: input and output tokens of all model calls together, at least 1; None (default) for no bound.
        model_calls: ``"repeat"``: a model call whose response was lost is made again, and charged again. The stricter
            ``"once"`` is refused until it is built.
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
    model_calls: Literal["repeat"] = "repeat"
    repeated_failure_limit: int = limits.REPEATED_FAILURES_MAX
    output_retries: int = limits.OUTPUT_RETRIES_MAX
    tool_result_bytes: int = limits.TOOL_RESULT_BYTES_MAX

    def __post_init__(self) -> None:
        for name, (least, most, optional) in _RANGES.items():
            _check_count(name, getattr(self, name), least, most, optional)
        if self.model_calls not in MODEL_CALLS:
            raise Invalid(f"Policy.model_calls is {self.model_calls!r}.", help="Use 'repeat'; 'once' is not built yet.")
        if self.max_duration is not None:
            object.__setattr__(self, "max_duration", positive_seconds(self.max_duration, "Policy.max_duration"))

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


def _check_count(name: str, value: object, least: int, most: int, optional: bool) -> None:
    if value is None and optional:
        return
    legal = f"Use a whole number from {least:,} to {most:,}{', or None' if optional else ''}."
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(f"Policy.{name} is {value!r:.64}, not a whole number.", help=legal)
    if not least <= value <= most:
        raise Invalid(f"Policy.{name} is {value:,}.", help=legal)
