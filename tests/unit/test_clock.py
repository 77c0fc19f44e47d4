"""Time and chance are arguments."""

from __future__ import annotations

import datetime as dt
import re

import pytest

from perdure.clock import RandomIds, SystemClock, parse_duration, seconds, to_datetime
from perdure.errors import Invalid


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250ms", 0.25), ("30s", 30.0), ("10m", 600.0), ("2h", 7200.0), ("7d", 604_800.0), ("1.5h", 5400.0),
        (" 5 s ", 5.0), ("12", 12.0), (0, 0.0), (2.5, 2.5), (dt.timedelta(minutes=1), 60.0),
    ],
)  # fmt: skip
def test_a_duration_is_seconds_a_timedelta_or_text(text: str | float | dt.timedelta, expected: float) -> None:
    assert parse_duration(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "bad",
    ["", "s", "five", "-1s", "1w", "nan", "inf", "1e99", True, -1, float("nan"), None, [], dt.timedelta(-1), 10**400],
)
def test_what_is_no_duration_is_refused_by_name(bad: object) -> None:
    with pytest.raises(Invalid, match="timeout"):
        parse_duration(bad, "timeout")  # type: ignore[arg-type]


def test_instants_are_microseconds() -> None:
    assert seconds(1.5) == 1_500_000
    assert to_datetime(1_500_000) == dt.datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=dt.UTC)
    assert abs(to_datetime(SystemClock().now()) - dt.datetime.now(dt.UTC)) < dt.timedelta(minutes=1)


def test_drawn_ids_have_the_form_of_derived_ones_and_do_not_repeat() -> None:
    drawn = {RandomIds().fresh("sub") for _ in range(1_000)}
    assert len(drawn) == 1_000
    assert all(re.fullmatch(r"sub_[a-z2-7]{24}", id) for id in drawn)
