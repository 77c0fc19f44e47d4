"""The fold of workflow records, and the laws they keep: what cannot follow is refused, what lies is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw
from msgspec.structs import replace

from perdure.canonical import digest
from perdure.errors import Corrupt
from perdure.records import codec
from perdure.records.codec import Record
from perdure.records.task import TaskSettled, TaskStarted
from perdure.rules import fold
from perdure.rules.invariants import check
from support import flow_records as r

BEGUN: tuple[Record, ...] = (r.CREATED, r.INPUT, r.STARTED)
RUNS: tuple[Record, ...] = (*BEGUN, r.SAVE)


def folded(*records: Record) -> fold.Thread:
    state = fold.Thread(r.THREAD)
    for record in records:
        fold.apply(state, record)
    return state


CANNOT_FOLLOW: list[tuple[str, tuple[Record, ...], Record, str]] = [
    ("started without input", (r.CREATED,), r.STARTED, "which has no input"),
    ("started twice", BEGUN, r.STARTED, "starts a run twice"),
    ("memory no object", BEGUN[:2], replace(r.STARTED, memory=Raw(b"[]")), "is no object"),
    ("budgets no numbers", BEGUN[:2], replace(r.STARTED, budgets=Raw(b'{"turns":"x"}')), "cannot be read"),
    ("task of no workflow", BEGUN[:2], r.SAVE, "is about a run that is no workflow"),
    ("task begun twice", RUNS, r.SAVE, "ended or runs already"),
    ("task begun after its end", (*BEGUN, r.SKIPPED), replace(r.SAVE, task="no"), "ended or runs already"),
    ("first try is not 1", BEGUN, r.SAVE_AGAIN, "is try 2 of a task that was tried 0 times"),
    ("retry of what does not run", BEGUN, r.RETRY, "after one that does not run"),
    ("retry of another try", RUNS, replace(r.RETRY, attempt=2), "after one that does not run"),
    ("waits and does not run", BEGUN, r.WAITING, "waits for a task that does not run"),
    ("ended twice", (*BEGUN, r.SKIPPED), r.SKIPPED, "ends a task twice"),
    ("delta of a newer format", BEGUN, replace(r.MARK, delta=Raw(b'{"formatVersion":2}')), "of format 2"),
    ("delta that is none", BEGUN, replace(r.MARK, delta=Raw(b'{"sets":{}}')), "cannot be read"),
    ("denied nowhere", BEGUN[:2], r.DENIED, "no workflow"),
    ("raised nowhere", BEGUN[:2], r.RAISED, "no workflow"),
]


@pytest.mark.parametrize(
    ("before", "record", "says"), [c[1:] for c in CANNOT_FOLLOW], ids=[c[0] for c in CANNOT_FOLLOW]
)
def test_a_record_that_cannot_follow_is_corrupt(before: tuple[Record, ...], record: Record, says: str) -> None:
    state = folded(*before)
    with pytest.raises(Corrupt, match=says):
        fold.apply(state, record)
    assert state.tail == len(before)


def test_every_kind_of_record_has_a_case() -> None:
    kinds = {kind for kind in get_args(codec.Record) if kind.__module__ == "perdure.records.task"}
    assert {type(record) for _, _, record, _ in CANNOT_FOLLOW} == kinds


def test_a_run_from_its_start_to_its_end() -> None:
    state = folded(*r.RECORDS)
    run, part = state.runs[r.RUN], state.runs[r.PART]
    flow = run.flow
    assert flow is not None
    assert flow.memory == {"seen": 1}
    assert {id: task.settled.end for id, task in flow.tasks.items() if task.settled} == {
        "no": "skipped", "save": "succeeded", "wait": "succeeded", "judge": "succeeded", "more": "failed",
    }  # fmt: skip
    assert (flow.printed, flow.artifact_bytes, flow.budgets) == (15, 3, {"provider_requests": 4})
    assert (part.completed, part.settled, run.settled) == (r.PART_DONE, r.ENDED, r.ENDED)
    assert list(flow.failures) == ["more"]
    assert run.deadline == r.DEADLINE


def test_a_try_reads_memory_as_it_was_when_it_began() -> None:
    state = folded(*RUNS, r.MARK)
    flow = state.runs[r.RUN].flow
    assert flow is not None
    assert flow.tasks["save"].snapshot == {"seen": 0, "old": True}
    assert flow.memory == {"seen": 1}


def _edit(at: Record, **fields: object) -> tuple[Record, ...]:
    return tuple(replace(record, **fields) if record is at else record for record in r.RECORDS)


def _insert(before: Record, *records: Record) -> tuple[Record, ...]:
    place = next(i for i, record in enumerate(r.RECORDS) if record is before)
    return (*r.RECORDS[:place], *records, *r.RECORDS[place:])


TWINS: list[tuple[str, Callable[[], tuple[Record, ...]]]] = [
    ("tasks-once", lambda: _insert(r.DONE, r.SKIPPED)),
    ("tasks-once", lambda: _insert(r.DONE, replace(r.SAVE, attempt=3))),
    ("tasks-once", lambda: _insert(r.DONE, replace(r.WAITING, task="never"))),
    ("tasks-ended", lambda: _insert(r.DONE, replace(r.SAVE, task="late", attempt=1))),
    ("task-digests", lambda: _edit(r.SAVED, output=Raw(b'{"path":"y"}'))),
    ("task-digests", lambda: _edit(r.MARK, delta=Raw(b'{"formatVersion":1,"set":{"seen":2},"remove":[]}'))),
    ("task-digests", lambda: _edit(r.MARK, delta_digest="")),
    ("input-first", lambda: tuple(record for record in r.RECORDS if record is not r.PART_INPUT)),
    ("decided-before-prepared", lambda: tuple(record for record in r.RECORDS if record is not r.DECIDED)),
    ("ends-known", lambda: tuple(record for record in r.RECORDS if record is not r.WROTE)),
    ("deadline-constant", lambda: _insert(r.SKIPPED, r.STARTED)),
]


def _stored(records: tuple[Record, ...]) -> list[tuple[int, int, int, bytes, bytes]]:
    tail, found = codec.EMPTY_TAIL, []
    for sequence, record in enumerate(records, 1):
        body = codec.encode(codec.Batch(1, r.THREAD, sequence, 1, "w_1", 0, (record,)))
        tail = codec.chain(tail, body)
        found.append((sequence, sequence, 1, tail, body, {}))
    return found


def test_a_good_history_breaks_no_law() -> None:
    assert [one.name for one in check(r.THREAD, _stored(r.RECORDS)).failed] == []


@pytest.mark.parametrize(("law", "broken"), TWINS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(TWINS)])
def test_a_history_that_lies_is_found(law: str, broken: Callable[[], tuple[Record, ...]]) -> None:
    assert law in [one.name for one in check(r.THREAD, _stored(broken())).failed]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5),
            st.dictionaries(st.sampled_from("abc"), st.integers(-9, 9)),
            st.sets(st.sampled_from("abc")),
        ),
        max_size=30,
    )
)
def test_memory_is_what_the_deltas_in_order_make_of_it(writes: list[tuple[int, dict[str, int], set[str]]]) -> None:
    state, expected = folded(*BEGUN), {"seen": 0, "old": True}
    for place, (_, put, gone) in enumerate(writes):
        delta = {"formatVersion": 1, "set": put, "remove": sorted(gone)}
        raw = Raw(msgspec.json.encode(delta))
        fold.apply(state, TaskStarted(r.RUN, f"t{place}", 1, "pure", "pure"))
        fold.apply(state, TaskSettled(r.RUN, f"t{place}", "succeeded", 1, delta=raw, delta_digest=digest(delta)))
        expected = {key: value for key, value in {**expected, **put}.items() if key not in gone}
    flow = state.runs[r.RUN].flow
    assert flow is not None
    assert flow.memory == expected
