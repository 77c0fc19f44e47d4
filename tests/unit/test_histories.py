"""Logs written by earlier releases fold to what they folded to then, for ever."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.records import codec
from perdure.rules import fold

HISTORIES = Path(__file__).resolve().parents[1] / "histories"
PINNED = {
    "0.1/every_kind": ("thread_golden", 64, "08e171ffd9172a5b40885e56f626f38dabee10beddf1b17d8595861ee78199ab"),
    "0.1/model_calls": ("thread_models", 57, "f6ef79de68cd9265bf0ba84d1ee9e310d031f21152edf7fe1f77442111f9dcff"),
    "0.1/workflow": ("thread_flow", 31, "9eb6487593f4298148ce0c923e287012c21cb58a6be765aafc77e10c001bbc9b"),
}


def bodies(name: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (HISTORIES / f"{name}.hex").read_text(encoding="ascii").split()]


def stored() -> Iterator[str]:
    for path in sorted(HISTORIES.rglob("*.hex")):
        yield str(path.relative_to(HISTORIES).with_suffix(""))


def test_every_stored_history_is_pinned() -> None:
    assert sorted(stored()) == sorted(PINNED)


@pytest.mark.parametrize("name", PINNED)
def test_a_stored_history_folds_to_its_pinned_tail(name: str) -> None:
    thread, tail, digest = PINNED[name]
    state = fold.fold(thread, bodies(name))
    assert (state.tail, state.digest.hex()) == (tail, digest)


@pytest.mark.parametrize("name", PINNED)
def test_this_release_would_write_the_same_bytes(name: str) -> None:
    """True of the format this release writes; an older format only has to be read."""
    assert [codec.encode(codec.decode(body)) for body in bodies(name)] == bodies(name)


def test_the_stored_histories_hold_every_record_kind() -> None:
    held = {type(record) for name in PINNED for body in bodies(name) for record in codec.decode(body).records}
    assert held == set(typing.get_args(codec.Record))


def test_what_the_first_history_says() -> None:
    state = fold.fold("thread_golden", bodies("0.1/every_kind"))
    assert {id: s.outcome for id, s in state.settlements.items()} == {
        "sub_a": "completed",
        "sub_d": "cancelled",
        "sub_c": "completed",
        "sub_b": "completed",
        "sub_e": "cancelled",
        "sub_f": "failed",
    }
    assert (state.epoch, state.program, len(state.repairs)) == (5, "bank", 2)
    a = state.runs["run_a"]
    assert [call.id for call in a.calls.values() if call.withdrawn] == ["1.2"]
    assert {call.id: call.tries for call in a.calls.values()} == {
        "1.0": 1, "1.1": 0, "1.2": 0, "1.3": 2, "1.4": 2, "1.5": 1,
    }  # fmt: skip
    assert {name: bytes(step.result or b"") for name, step in a.calls["1.4"].steps.items()} == {
        "upload": b'"s3://x"',
        "count": b"7",
    }
    assert (a.usage.input, a.usage.output, a.model_tries, a.output_rejections) == (120, 30, 5, 1)
    assert a.completed is not None
    assert a.completed.disposition == "paid"
    e = state.runs["run_e"]
    assert e.settled is not None
    assert e.settled.unknown == ("eff_e_1.0_1",)
    assert e.calls["1.0"].verdict is not None  # reconciled after the end, as audit


def test_what_the_history_of_model_calls_says() -> None:
    state = fold.fold("thread_models", bodies("0.1/model_calls"))
    ends = {run.id: (run.settled and run.settled.outcome, run.spent, run.tokens) for run in state.runs.values()}
    assert ends == {
        "run_g": ("completed", 93_010, 11_772),  # two calls that may have been served, and one that told its usage
        "run_h": ("completed", 136_970, 17_068),
        "run_i": ("failed", 0, 0),  # refused by a verdict: nothing stays charged
        "run_j": ("cancelled", 43_960, 5_296),
        "run_k": ("completed", 43_960, 5_296),
        "run_l": ("cancelled", 43_960, 5_296),
    }
    assert [(run.model_tries, run.model_failures) for run in state.runs.values()] == [
        (4, 1), (5, 2), (1, 0), (1, 0), (2, 0), (1, 0),
    ]  # fmt: skip
    h = state.runs["run_h"]
    assert h.settled is not None
    assert (h.settled.exhausted, h.turns[0].response.final) == ("turns", "turns")
    assert h.turns[0].response.evidence.request_id == "req_011"
    j = state.runs["run_j"]
    assert j.settled is not None
    assert j.settled.unknown == ("eff_j_1.model_1",)
    assert j.model_verdict is not None  # reconciled after the end, as audit
    assert [run.model_unknown or run.model_prepared for run in state.runs.values()] == [None] * 6
