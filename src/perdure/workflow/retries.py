"""Whether a failed try is followed by another, and when. Pure but for the jitter, which is an argument."""

from __future__ import annotations

from perdure.definitions.workflow import Retry
from perdure.limits import RETRY_AFTER_SECONDS_MAX
from perdure.workflow.outcomes import Broken


def next_try(retry: Retry, attempt: int, broken: Broken, chance: float) -> float | None:
    """Seconds after which the next try follows; None when there is none.

    Args:
        attempt: the try that failed, from 1.
        chance: from 0 to 1, spreads tries where the policy asks for jitter.
    """
    if attempt >= retry.max_attempts or not broken.retry or broken.retry not in retry.on:
        return None
    delay = retry.backoff_ms / 1000
    if retry.backoff == "exponential":
        delay *= 2.0 ** (attempt - 1)
    delay = min(delay, retry.max_backoff_ms / 1000)
    if retry.jitter:
        delay *= 0.5 + chance / 2
    if broken.retry_after is not None:
        if broken.retry_after > RETRY_AFTER_SECONDS_MAX:
            return None
        delay = max(delay, broken.retry_after)
    return delay
