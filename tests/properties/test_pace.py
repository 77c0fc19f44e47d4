"""The law of a shared rate, over any calls, waits and corrections: what is counted in a stretch of time is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from perdure.rules.accounting import Rate
from perdure.rules.pace import Pace

MINUTE = 60_000_000
START = 10**15
# microseconds that pass, tokens reserved, the share of them that was used (None: nobody says)
STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 1_000_000, 7_000_000, 70_000_000]),
        st.integers(0, 900),
        st.none() | st.sampled_from([0.0, 0.3, 1.0, 1.5]),
    ),
    min_size=1,
    max_size=40,
)
RATES = st.builds(
    Rate, requests=st.none() | st.sampled_from([1, 7, 60]), tokens=st.none() | st.sampled_from([1, 90, 700])
)
Take = Callable[[Pace, int, int, Rate], tuple[Pace, int]]


def history(steps: list[tuple[int, int, float | None]], rate: Rate, take: Take) -> list[tuple[int, int, int]]:
    """What was counted, in order: instant, calls, tokens; what was given back is negative."""
    pace, now, counted = Pace(), START, []
    for passed, tokens, share in steps:
        now += passed
        after, again = take(pace, now, tokens, rate)
        if again:
            assert again > now
            assert after == pace, "what is refused is not counted"
            assert take(pace, again - 1, tokens, rate)[1] == again
            after, late = take(pace, again, tokens, rate)
            assert late == 0, "asked at the instant that was named it is granted"
            now = again
        pace = after
        worth = tokens if rate.tokens is None else min(tokens, rate.tokens)
        counted.append((now, 1, worth))
        if share is not None:
            used = int(tokens * share)
            pace = pace.correct(now, tokens, used, rate)
            counted.append((now, 0, (used if rate.tokens is None else min(used, rate.tokens)) - worth))
    return counted


def check(counted: list[tuple[int, int, int]], rate: Rate) -> None:
    """No stretch that ends with a granted call holds more than a minute's worth and what the stretch grants."""
    for first, (began, *_) in enumerate(counted):
        calls = tokens = 0
        for at, call, worth in counted[first:]:
            calls, tokens = calls + call, tokens + worth
            if rate.requests is not None:
                assert calls <= rate.requests * (1 + (at - began) / MINUTE) + 1e-6, "too many calls"
            if rate.tokens is not None and call:
                assert tokens <= math.ceil(rate.tokens * (1 + (at - began) / MINUTE)), "too many tokens"


@given(STEPS, RATES)
@settings(max_examples=3 * settings().max_examples)
def test_no_stretch_of_time_holds_more_than_the_rate(steps: list[tuple[int, int, float | None]], rate: Rate) -> None:
    check(history(steps, rate, Pace.take), rate)


# -- the twin


def twice_as_much(pace: Pace, now: int, tokens: int, rate: Rate) -> tuple[Pace, int]:
    after, again = pace.take(now, tokens, Rate(requests=2 * (rate.requests or 1), tokens=rate.tokens))
    return after, again


def tokens_for_free(pace: Pace, now: int, tokens: int, rate: Rate) -> tuple[Pace, int]:
    after, again = pace.take(now, tokens, rate)
    return (after, again) if again else (Pace(after.requests_at, pace.tokens_at, 0), 0)


def counts_anyway(pace: Pace, now: int, tokens: int, rate: Rate) -> tuple[Pace, int]:
    after, again = pace.take(now, tokens, rate)
    return (Pace(pace.requests_at + 1, pace.tokens_at, 0), again) if again else (after, 0)


@pytest.mark.parametrize("fault", [twice_as_much, tokens_for_free, counts_anyway])
def test_a_planted_fault_is_found(fault: Take) -> None:
    @given(STEPS, RATES)
    @settings(max_examples=500, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    def law(steps: list[tuple[int, int, float | None]], rate: Rate) -> None:
        check(history(steps, rate, fault), rate)

    with pytest.raises(AssertionError):
        law()
