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


def test_the_first_history_holds_every_record_kind() -> None:
    held = {type(record) for body in bodies("0.1/every_kind") for record in codec.decode(body).records}
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
