"""Every pair of state and event, asserted; what is not in a table is illegal and changes nothing."""

from __future__ import annotations

import itertools

import pytest

from perdure.errors import Invalid
from perdure.rules.lifecycle import (
    APPROVAL,
    EFFECT,
    SUBMISSION,
    ApprovalStatus,
    EffectClass,
    EffectEvent,
    EffectStatus,
    SubmissionEvent,
    SubmissionState,
    after,
)

# One row a state, one column an event; "." is illegal. Written out again, so that a slip in the table is seen.
SUBMISSION_TABLE = """
                 mark-ready claim          release        apply-input    suspend   park    wake          reserve-settlement settle
admitted         ready      admitted       .              input-applied  .         .       .             terminalizing      .
ready            .          running        .              .              .         .       .             terminalizing      settled
running          .          running        ready          input-applied  suspended unknown .             terminalizing      settled
input-applied    .          input-applied  input-applied  input-applied  suspended unknown .             terminalizing      settled
suspended        .          .              .              .              .         unknown input-applied .                  .
unknown          .          .              .              .              .         unknown input-applied .                  .
terminalizing    .          terminalizing  terminalizing  .              .         .       .             .                  settled
settled          .          .              .              .              .         .       .             .                  .
"""  # noqa: E501
EFFECT_TABLE = """
                 start    confirm    refuse   lose     withdraw
requested        started  .          .        .        withdrawn
started          .        confirmed  refused  unknown  .
unknown          .        confirmed  refused  unknown  .
confirmed        .        .          .        .        .
refused          .        .          .        .        .
withdrawn        .        .          .        .        .
"""


def table(text: str) -> dict[tuple[str, str], str]:
    """(state, event) to what the table says, "." included."""
    lines = [line.split() for line in text.strip("\n").splitlines()]
    return {(state, event): to for state, *row in lines[1:] for event, to in zip(lines[0], row, strict=True)}


SUBMISSIONS, EFFECTS = table(SUBMISSION_TABLE), table(EFFECT_TABLE)


def test_the_tables_speak_of_every_pair() -> None:
    assert set(SUBMISSIONS) == set(itertools.product(SubmissionState, SubmissionEvent))
    assert set(EFFECTS) == set(itertools.product(EffectStatus, EffectEvent))
    assert set(SUBMISSION) == set(SubmissionState)
    assert set(EFFECT) == set(EffectStatus)
    assert set(APPROVAL) == set(ApprovalStatus)


@pytest.mark.parametrize(("state", "event"), sorted(SUBMISSIONS))
def test_submission(state: str, event: str) -> None:
    expected = SUBMISSIONS[state, event]
    before = {key: dict(row) for key, row in SUBMISSION.items()}
    if expected == ".":
        with pytest.raises(Invalid, match=f"A submission that is {state} cannot {event}"):
            after(SubmissionState(state), SubmissionEvent(event))
    else:
        assert after(SubmissionState(state), SubmissionEvent(event)) == expected
    assert before == SUBMISSION


@pytest.mark.parametrize(("status", "event"), sorted(EFFECTS))
def test_effect(status: str, event: str) -> None:
    assert EFFECT[EffectStatus(status)].get(EffectEvent(event), ".") == EFFECTS[status, event]


def test_an_approval_is_decided_once() -> None:
    decided = {ApprovalStatus.APPROVED, ApprovalStatus.REJECTED, ApprovalStatus.EXPIRED}
    assert {state for state in ApprovalStatus if not APPROVAL[state]} == decided
    assert APPROVAL[ApprovalStatus.PENDING] == decided


def test_settled_is_reached_from_everywhere_and_never_left() -> None:
    for start in SubmissionState:
        seen, todo = {start}, [start]
        while todo:
            for to in SUBMISSION[todo.pop()].values():
                if to not in seen:
                    seen.add(to)
                    todo.append(to)
        assert SubmissionState.SETTLED in seen
    assert SUBMISSION[SubmissionState.SETTLED] == {}


def test_nothing_known_of_an_effect_is_ever_forgotten() -> None:
    for status in (EffectStatus.CONFIRMED, EffectStatus.REFUSED, EffectStatus.WITHDRAWN):
        assert EFFECT[status] == {}
    reached = {to for row in EFFECT.values() for to in row.values()}
    assert EffectStatus.REQUESTED not in reached


def test_only_classes_without_outside_world_or_reading_it_need_no_started_record() -> None:
    assert {kind for kind in EffectClass if not kind.prepared} == {EffectClass.PURE, EffectClass.OBSERVE}
