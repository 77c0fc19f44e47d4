"""The witness counts what happened, from any process, and each law has a twin that breaks it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from perdure.errors import Corrupt, Invalid, Unavailable
from perdure.testing.world import World, check_laws, repeated, unproduced, unsettled


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world")


class Counted:
    """Ids as a simulation passes them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def fresh(self, kind: str) -> str:
        return f"{kind}_{next(self._numbers)}"


def test_nothing_has_happened_before_the_first_touch(world: World) -> None:
    assert world.entries() == []
    assert world.count() == 0
    assert not world.has_receipt("witness_x")


def test_a_touch_is_counted_and_has_a_receipt_of_its_own(world: World) -> None:
    first = world.touch("refund", key="k1", cents=5, who={"name": "Ä"}, tags=["a", 1.5, None])
    second = world.touch("refund", key="k1", cents=5)
    third = world.touch("mail")
    assert len({first, second, third}) == 3
    assert all(world.has_receipt(receipt) for receipt in (first, second, third))
    assert [entry.receipt for entry in world.entries()] == [first, second, third]
    assert world.entries()[0].facts == {"cents": 5, "who": {"name": "Ä"}, "tags": ["a", 1.5, None]}
    assert [world.count(), world.count("refund"), world.count(key="k1"), world.count("mail", "k1")] == [3, 2, 2, 0]
    assert World(world.path).entries() == world.entries()


def test_given_ids_make_the_same_receipts(tmp_path: Path) -> None:
    receipts = [[World(tmp_path / name, ids=Counted()).touch("a", x=1) for _ in range(1)] for name in ("1", "2")]
    assert receipts[0] == receipts[1]


@pytest.mark.parametrize("facts", [{"x": {1}}, {"x": (1,)}, {"x": float("nan")}, {"x": 2**64}, {"x": "\ud800"}])
def test_facts_are_json(facts: dict[str, Any], world: World) -> None:
    with pytest.raises(Invalid):
        world.touch("a", **facts)
    assert world.count() == 0


def test_names_and_keys_are_ids(world: World) -> None:
    with pytest.raises(Invalid, match="name is empty"):
        world.touch("")
    with pytest.raises(Invalid, match="key is empty"):
        world.touch("a", key="")
    world.touch("a", name="a fact may have any name", path=1)


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be written"):
        World(tmp_path / "nowhere" / "world").touch("a")
    with pytest.raises(Unavailable, match="cannot be read"):
        World(tmp_path).entries()


def test_a_torn_line_is_no_occurrence_and_harms_none(world: World) -> None:
    first = world.touch("a")
    whole = world.path.read_bytes()
    with world.path.open("ab") as file:
        file.write(whole[: len(whole) // 2])
    second = world.touch("a")
    assert [entry.receipt for entry in world.entries()] == [first, second]


@pytest.mark.parametrize("line", [b"{}", b"7", b'{"receipt":"witness_x","name":"a","key":null,"process":1,"mark":"m"}'])
def test_a_foreign_line_is_not_believed(line: bytes, world: World) -> None:
    world.touch("a")
    with world.path.open("ab") as file:
        file.write(b"\n" + line + b"\n")
    with pytest.raises(Corrupt, match="not what a touch wrote"):
        world.entries()


def test_a_changed_fact_shows(world: World) -> None:
    world.touch("a", cents=5)
    world.path.write_bytes(world.path.read_bytes().replace(b'"cents":5', b'"cents":6'))
    with pytest.raises(Corrupt, match="Line 2 "):
        world.entries()


def test_many_processes_at_once_lose_nothing(world: World) -> None:
    program = (
        "import sys; from perdure.testing.world import World\n"
        "for n in range(40): World(sys.argv[1]).touch('a', key=sys.argv[2], pad='x' * 5000)"
    )
    keys = ["k1", "k2", "k3"]
    running = [subprocess.Popen([sys.executable, "-c", program, str(world.path), key]) for key in keys]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert [world.count("a", key) for key in keys] == [40, 40, 40]
    assert len({entry.receipt for entry in world.entries()}) == 120
    assert len({entry.process for entry in world.entries()}) == 3


def test_a_lawful_history_has_no_violation(world: World) -> None:
    once = world.touch("refund", key="k1")
    world.touch("refund", key="k2")
    again = world.touch("refund", key="k2")
    for _ in range(3):
        seen = world.touch("look", key="k3")
    world.touch("no key: not judged")
    confirmed = [("e1", "k1", once), ("e2", "k2", {"receipts": [again]}), ("e3", "k3", seen), ("e4", None, once)]
    assert check_laws(world, confirmed, {"k1": 1, "k2": 2, "k3": None, "k4": 1}, {"s1": 1, "s2": 1}) == []


def test_the_three_laws_are_judged_together(world: World) -> None:
    world.touch("refund", key="k1")
    world.touch("refund", key="k1")
    assert len(check_laws(world, [("e1", "k1", "witness_no")], {"k1": 1}, {"s1": 0})) == 3


# law 1


def test_a_fabricated_result_is_reported(world: World) -> None:
    world.touch("refund", key="k1")
    assert unproduced(world.entries(), [("e1", "k1", "witness_made_up")]) == [
        "Effect e1 is confirmed with witness_made_up, which the world never gave."
    ]


@pytest.mark.parametrize("result", [None, True, "done", {"ok": True}, []])
def test_a_result_without_a_receipt_is_reported(result: object, world: World) -> None:
    world.touch("refund", key="k1")
    assert "no receipt" in unproduced(world.entries(), [("e1", "k1", result)])[0]


def test_a_fabricated_receipt_beside_a_real_one_is_reported(world: World) -> None:
    real = world.touch("refund", key="k1")
    assert len(unproduced(world.entries(), [("e1", "k1", [real, "witness_made_up"])])) == 1


def test_the_receipt_of_another_effect_is_reported(world: World) -> None:
    other = world.touch("refund", key="k2")
    assert "given under key k2" in unproduced(world.entries(), [("e1", "k1", other)])[0]


# law 2


def test_a_doubled_dispatch_is_reported(world: World) -> None:
    world.touch("refund", key="k1")
    assert repeated(world.entries(), {"k1": 1}) == []
    world.touch("refund", key="k1")
    assert repeated(world.entries(), {"k1": 1}) == ["refund took place 2 times under key k1; 1 permitted."]
    assert repeated(world.entries(), {"k1": 2}) == []


def test_a_dispatch_that_nobody_recorded_is_reported(world: World) -> None:
    world.touch("refund", key="drawn anew")
    assert len(repeated(world.entries(), {"k1": 1})) == 1


def test_two_touches_of_one_dispatch_are_two_names(world: World) -> None:
    world.touch("debit", key="k1")
    world.touch("mail", key="k1")
    assert repeated(world.entries(), {"k1": 1}) == []


# law 3


@pytest.mark.parametrize("count", [0, 2])
def test_a_missing_and_a_doubled_settlement_are_reported(count: int) -> None:
    assert unsettled({"s1": 1}) == []
    assert unsettled({"s1": 1, "s2": count}) == [
        f"Submission s2 has {count} settlements; accepted work is owed exactly one."
    ]
