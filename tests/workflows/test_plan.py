"""Plans as bytes: canonical, of a stated format, refused when they are of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.errors import Incompatible, Invalid
from perdure.workflow import plan as plans
from perdure.workflow.dsl import Workflow
from perdure.workflow.plan import Plan

NIGHTLY = Path(__file__).parent / "good" / "nightly.yaml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Workflow.load(NIGHTLY).compile()


def changed(plan: Plan, **fields: Any) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(plans.encode(plan)), **fields})


def test_bytes_give_the_plan_back(plan: Plan) -> None:
    raw = plans.encode(plan)
    again = plans.decode(raw)
    assert again == plan
    assert plans.encode(again) == raw
    assert again.digest == plan.digest


def test_the_bytes_are_sorted_and_hold_no_place_of_this_machine(plan: Plan) -> None:
    raw = plans.encode(plan)
    assert raw == msgspec.json.encode(msgspec.json.decode(raw), order="sorted")
    assert str(NIGHTLY.parent) not in raw.decode()


def test_the_format_is_in_the_bytes_although_it_is_the_usual_one(plan: Plan) -> None:
    assert msgspec.json.decode(plans.encode(plan))["formatVersion"] == plans.FORMAT_VERSION


@pytest.mark.parametrize("version", [0, plans.FORMAT_VERSION + 1, "1", None, [1]])
def test_a_plan_of_another_format_is_refused_even_if_its_fields_fit(plan: Plan, version: object) -> None:
    with pytest.raises(Incompatible, match=r"has format .*; this release knows format 1") as caught:
        plans.decode(changed(plan, formatVersion=version))
    assert "release that compiled it" in caught.value.help


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "cannot be read"), (b"\xff", "cannot be read"), (b"[]", "does not know"), (b"{}", "has format None"),
        (b'{"formatVersion":1}', "does not know"), (b"", "cannot be read"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_plan_are_refused(raw: bytes, says: str) -> None:
    with pytest.raises(Incompatible, match=says):
        plans.decode(raw)


def test_a_field_of_the_future_is_refused(plan: Plan) -> None:
    with pytest.raises(Incompatible, match="content this release does not know"):
        plans.decode(changed(plan, handlers=[]))


def test_a_plan_that_is_too_large_says_so(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PLAN_BYTES_MAX", 100)
    with pytest.raises(Invalid, match="PLAN_BYTES_MAX"):
        plans.encode(plan)
