"""Folding rebuilds state from records, and refuses a record that cannot follow what came before."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from perdure.errors import Corrupt, Incompatible
from perdure.records import codec
from perdure.records.codec import Batch, Record
from perdure.records.effect import (
    ToolApprovalDecided,
    ToolApprovalRequested,
    ToolCallPrepared,
    ToolCallResolved,
    ToolCallSettled,
    ToolCallUnknown,
    ToolCallWithdrawn,
    ToolStepPrepared,
    ToolStepRefused,
    ToolStepSettled,
)
from perdure.records.parts import CallPart, Charge, Failure, TextPart, Usage
from perdure.records.run import (
    AcceptedLimits,
    ModelCallFailed,
    ModelCallPrepared,
    ModelCallResolved,
    ModelCallUnknown,
    ModelResponseInterrupted,
    ModelResponseRecorded,
    OutputRejected,
    RunCompleted,
    RunStarted,
    ToolOperation,
)
from perdure.records.thread import (
    CancelRequested,
    RepairAnnotated,
    SubmissionSettled,
    ThreadCreated,
    UserInputRecorded,
)
from perdure.rules import fold

R = "run_1"
NO = Failure("refused", "no")
CREATED = ThreadCreated("bank")
INPUT = UserInputRecorded("sub_1", R, Raw(b"1"))
STARTED = RunStarted(R, "sub_1", "bank", "d", 9, AcceptedLimits(1, 1, 1, 1, 1, 1))
OPERATION = ToolOperation("1.0", "pay", "once", contract="c")
RESPONSE = ModelResponseRecorded(R, 1, "m", (CallPart("pay", "{}"),), "tool_calls", operations=(OPERATION,))
FINAL = ModelResponseRecorded(R, 2, "m", (TextPart("Done."),), "stop", Usage(3, 2, 1, 1, 1))
RESERVED = Charge(1_000, 4_096, 15_000, "2026-11")
ASKING = ModelCallPrepared(R, 1, 1, "q", "m1", "gpt", "k", RESERVED)
MODEL_FAILED = ModelCallFailed(R, 1, 1, "gpt", "yes", Failure("model", "busy"), effect="m1")
MODEL_UNKNOWN = ModelCallUnknown(R, 1, "m1", "gpt", "?", RESERVED)
MODEL_RESOLVED = ModelCallResolved(R, 1, "m1", "not_applied", "ada", "")
PREPARED = ToolCallPrepared(R, "1.0", "e1", "pay", "once", "c", "k", Raw(b"{}"), "a")
AGAIN = msgspec.structs.replace(PREPARED, attempt=2, effect="e2")
SETTLED = ToolCallSettled(R, "1.0", Raw(b"1"))
WITHDRAWN = ToolCallWithdrawn(R, "1.0", NO)
UNKNOWN = ToolCallUnknown(R, "1.0", "e1", "pay", "?")
RESOLVED = ToolCallResolved(R, "1.0", "e1", "not_applied", "ada", "")
ASKED = ToolApprovalRequested(R, "1.0", "apr_1", "pay", "d", "")
DECIDED = ToolApprovalDecided(R, "1.0", "apr_1", "approved", "ada", "")
STEP = ToolStepPrepared(R, "1.0", "upload", "s1", "k", 1)
STEP_DONE = ToolStepSettled(R, "1.0", "upload", Raw(b"2"))
STEP_REFUSED = ToolStepRefused(R, "1.0", "upload", NO)
STEP_UNKNOWN = ToolCallUnknown(R, "1.0", "s1", "pay", "?", "upload")
STEP_RESOLVED = ToolCallResolved(R, "1.0", "s1", "not_applied", "ada", "", "upload")
REJECTED = OutputRejected(R, 2, NO)
COMPLETED = RunCompleted(R, Raw(b"1"), "r")
ENDED = SubmissionSettled("sub_1", R, "completed", None, "r")

BEGUN: tuple[Record, ...] = (CREATED, INPUT, STARTED)
DECLARED: tuple[Record, ...] = (*BEGUN, RESPONSE)
IN_FLIGHT: tuple[Record, ...] = (*DECLARED, PREPARED)


def folded(*records: Record) -> fold.Thread:
    state = fold.Thread("t")
    for record in records:
        fold.apply(state, record)
    return state


def the_run(*records: Record) -> fold.Run:
    return folded(*records).runs[R]


def the_call(*records: Record) -> fold.Call:
    return the_run(*records).calls["1.0"]


def edit(record: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(record, **fields)


# -- what cannot follow -----------------------------------------------------------------------------------------------

ABOUT_RUN: list[Record] = [
    STARTED, ASKING, RESPONSE, ModelResponseInterrupted(R, 1, 1), REJECTED, COMPLETED, MODEL_FAILED, MODEL_UNKNOWN,
    MODEL_RESOLVED,
]  # fmt: skip
ABOUT_CALL: list[Record] = [
    ASKED, DECIDED, PREPARED, STEP, STEP_DONE, STEP_REFUSED, SETTLED, WITHDRAWN, UNKNOWN, STEP_UNKNOWN, RESOLVED,
    STEP_RESOLVED,
]  # fmt: skip
CANNOT_FOLLOW: list[tuple[str, tuple[Record, ...], Record, str]] = [
    ("thread created twice", BEGUN, CREATED, "is not the first record"),
    ("input twice", BEGUN, INPUT, "records the same input twice"),
    ("run started twice", BEGUN, edit(STARTED, deadline=10), "starts a run twice"),
    ("first turn is not 1", BEGUN, edit(RESPONSE, turn=2), "is turn 2 after turn 0"),
    ("turn repeated", (*DECLARED, SETTLED), RESPONSE, "is turn 1 after turn 1"),
    ("turn skipped", (*DECLARED, SETTLED), edit(FINAL, turn=3), "is turn 3 after turn 1"),
    ("turn while its batch is open", DECLARED, FINAL, "is turn 2 after turn 1"),
    ("operations without calls", BEGUN, edit(RESPONSE, parts=(TextPart("x"),)), "one operation for each call"),
    ("model asked twice", (*BEGUN, ASKING), edit(ASKING, attempt=2, effect="m2"), "whose try before has no outcome"),
    (
        "model asked while unknown",
        (*BEGUN, ASKING, MODEL_UNKNOWN),
        edit(ASKING, attempt=2),
        "try before has no outcome",
    ),
    ("model failed at another turn", BEGUN, edit(MODEL_FAILED, turn=2), "is about turn 2 after turn 0"),
    ("model failed at an old turn", (*DECLARED, SETTLED), MODEL_FAILED, "is about turn 1 after turn 1"),
    ("model doubted and not asked", BEGUN, MODEL_UNKNOWN, "doubts a model call that was not started"),
    ("model doubted after it failed", (*BEGUN, ASKING, MODEL_FAILED), MODEL_UNKNOWN, "that was not started"),
    ("another model call doubted", (*BEGUN, ASKING), edit(MODEL_UNKNOWN, effect="m2"), "that was not started"),
    ("model resolved and not unknown", (*BEGUN, ASKING), MODEL_RESOLVED, "resolves a model call that is not unknown"),
    ("model resolved twice", (*BEGUN, ASKING, MODEL_UNKNOWN, MODEL_RESOLVED), MODEL_RESOLVED, "that is not unknown"),
    (
        "another model call resolved",
        (*BEGUN, ASKING, MODEL_UNKNOWN),
        edit(MODEL_RESOLVED, effect="m2"),
        "that is not unknown",
    ),
    ("output rejected without a turn", BEGUN, edit(REJECTED, turn=1), "is not about the newest turn"),
    (
        "output of an older turn rejected",
        (*DECLARED, SETTLED, FINAL),
        edit(REJECTED, turn=1),
        "not about the newest turn",
    ),
    ("completed twice", (*BEGUN, COMPLETED), COMPLETED, "completes a run twice"),
    ("asked after dispatch", IN_FLIGHT, ASKED, "asks for a call that was already dispatched"),
    ("asked after its end", (*DECLARED, WITHDRAWN), ASKED, "asks for a call that was already dispatched"),
    ("decided unasked", DECLARED, DECIDED, "decides nothing that was asked"),
    ("another request decided", (*DECLARED, ASKED), edit(DECIDED, approval="apr_2"), "decides nothing that was asked"),
    ("decided twice", (*DECLARED, ASKED, DECIDED), DECIDED, "decides nothing that was asked"),
    ("started after its end", (*IN_FLIGHT, SETTLED), AGAIN, "starts a call that cannot start"),
    ("started while unknown", (*IN_FLIGHT, UNKNOWN), AGAIN, "starts a call that cannot start"),
    ("first try is not 1", DECLARED, AGAIN, "starts a call that cannot start"),
    ("try repeated", IN_FLIGHT, PREPARED, "starts a call that cannot start"),
    ("step before its call", DECLARED, STEP, "starts a step that cannot start"),
    ("step after its result", (*IN_FLIGHT, STEP, STEP_DONE), edit(STEP, attempt=2), "starts a step that cannot start"),
    ("step after its call", (*IN_FLIGHT, SETTLED), STEP, "starts a step that cannot start"),
    ("step in flight", (*IN_FLIGHT, STEP), edit(STEP, attempt=2), "whose try before has no outcome"),
    ("step unknown", (*IN_FLIGHT, STEP, STEP_UNKNOWN), edit(STEP, attempt=2), "whose try before has no outcome"),
    ("first try of a step is not 1", IN_FLIGHT, edit(STEP, attempt=2), "is try 2 of a step that was tried 0 times"),
    ("try of a step repeated", (*IN_FLIGHT, STEP, STEP_REFUSED), STEP, "is try 1 of a step that was tried 1 times"),
    ("step settled twice", (*IN_FLIGHT, STEP_DONE), STEP_DONE, "records a step twice"),
    ("step settled outside", DECLARED, STEP_DONE, "outside a started call"),
    ("step settled after its call", (*IN_FLIGHT, SETTLED), STEP_DONE, "outside a started call"),
    ("step refused unstarted", IN_FLIGHT, STEP_REFUSED, "refuses a step that was not started"),
    ("step refused after its result", (*IN_FLIGHT, STEP, STEP_DONE), STEP_REFUSED, "refuses a step"),
    ("step refused after its call", (*IN_FLIGHT, STEP, SETTLED), STEP_REFUSED, "refuses a step"),
    ("settled twice", (*IN_FLIGHT, SETTLED), SETTLED, "settles a call twice"),
    ("settled and withdrawn", (*DECLARED, WITHDRAWN), SETTLED, "settles a call twice"),
    ("withdrawn after its result", (*IN_FLIGHT, SETTLED), WITHDRAWN, "withdraws a call that has a result"),
    ("doubted after its result", (*IN_FLIGHT, SETTLED), UNKNOWN, "doubts a call that has a result"),
    ("step doubted after its result", (*IN_FLIGHT, STEP, STEP_DONE), STEP_UNKNOWN, "doubts a step that has a result"),
    ("resolved and not unknown", IN_FLIGHT, RESOLVED, "resolves a call that is not unknown"),
    ("resolved twice", (*IN_FLIGHT, UNKNOWN, RESOLVED), RESOLVED, "resolves a call that is not unknown"),
    ("step resolved and not unknown", (*IN_FLIGHT, STEP), STEP_RESOLVED, "resolves a step that is not unknown"),
    ("submission settled twice", (*BEGUN, ENDED), ENDED, "settles submission 'sub_1' twice"),
    *((f"{type(r).__name__} without input", (CREATED,), r, "which has no input") for r in (*ABOUT_RUN, *ABOUT_CALL)),
    *((f"{type(r).__name__} undeclared", BEGUN, r, "which no response declared") for r in ABOUT_CALL),
]


@pytest.mark.parametrize(
    ("before", "record", "says"), [case[1:] for case in CANNOT_FOLLOW], ids=[case[0] for case in CANNOT_FOLLOW]
)
def test_a_record_that_cannot_follow_is_corrupt_and_named(
    before: tuple[Record, ...], record: Record, says: str
) -> None:
    state = folded(*before)
    with pytest.raises(Corrupt) as refused:
        fold.apply(state, record)
    assert says in str(refused.value)
    assert f"Thread 't' record {len(before) + 1} ({type(record).__name__})" in str(refused.value)
    assert state.tail == len(before)


def test_every_handler_that_can_refuse_has_a_case() -> None:
    never = {CancelRequested, RepairAnnotated}  # they may stand anywhere
    elsewhere = {kind for kind in codec.Record.__args__ if kind.__module__ == "perdure.records.task"}  # test_flow.py
    assert {type(case[2]) for case in CANNOT_FOLLOW} | never | elsewhere == set(codec.Record.__args__)


# -- what it remembers ------------------------------------------------------------------------------------------------


def test_a_run_from_its_start_to_its_end() -> None:
    state = folded(*IN_FLIGHT, SETTLED, FINAL, COMPLETED, ENDED)
    run = state.runs[R]
    assert (state.program, state.tail, run.input_sequence) == ("bank", 9, 2)
    assert (run.started, run.completed, run.settled) == (STARTED, COMPLETED, ENDED)
    assert state.settlements == {"sub_1": ENDED}
    assert [turn.number for turn in run.turns] == [1, 2]
    assert run.open_turn() is None
    assert run.usage == Usage(3, 2, 1, 1, 1)
    assert (run.tool_calls, run.model_tries) == (1, 2)


def test_a_batch_is_open_until_its_last_call_has_a_result() -> None:
    operations = tuple(edit(OPERATION, call=f"1.{i}") for i in range(2))
    both = edit(RESPONSE, parts=RESPONSE.parts * 2, operations=operations)
    run = the_run(*BEGUN, both, WITHDRAWN)
    turn = run.open_turn()
    assert turn is run.turns[0]
    assert [(call.id, call.position, call.closed) for call in run.turns[0].calls] == [
        ("1.0", 0, True),
        ("1.1", 1, False),
    ]
    assert the_run(*BEGUN, both, WITHDRAWN, edit(SETTLED, call="1.1")).open_turn() is None


def test_in_flight_is_started_and_neither_ended_unknown_nor_freed() -> None:
    assert not the_call(*DECLARED).in_flight
    assert the_call(*IN_FLIGHT).in_flight
    assert not the_call(*IN_FLIGHT, SETTLED).in_flight
    assert not the_call(*IN_FLIGHT, UNKNOWN).in_flight
    assert not the_call(*IN_FLIGHT, UNKNOWN, RESOLVED).in_flight
    assert the_call(*IN_FLIGHT, UNKNOWN, RESOLVED, AGAIN).in_flight


def test_unknown_and_verdict_replace_each_other() -> None:
    assert the_run(*IN_FLIGHT, UNKNOWN).unknowns() == [UNKNOWN]
    resolved = the_call(*IN_FLIGHT, UNKNOWN, RESOLVED)
    assert (resolved.unknown, resolved.verdict) == (None, RESOLVED)
    doubted = the_call(*IN_FLIGHT, UNKNOWN, RESOLVED, UNKNOWN)
    assert (doubted.unknown, doubted.verdict) == (UNKNOWN, None)
    again = the_call(*IN_FLIGHT, UNKNOWN, RESOLVED, AGAIN)
    assert (again.tries, again.verdict, again.prepared) == (2, None, AGAIN)
    assert the_run(*IN_FLIGHT, UNKNOWN, SETTLED).unknowns() == []


def test_steps() -> None:
    step = the_call(*IN_FLIGHT, STEP).steps["upload"]
    assert (step.prepared, step.tries, step.result) == (STEP, 1, None)
    unknown = the_call(*IN_FLIGHT, STEP, STEP_UNKNOWN)
    assert list(unknown.unknowns()) == [STEP_UNKNOWN]
    assert unknown.steps["upload"].prepared is None
    freed = the_call(*IN_FLIGHT, STEP, STEP_UNKNOWN, STEP_RESOLVED).steps["upload"]
    assert (freed.unknown, freed.verdict) == (None, STEP_RESOLVED)
    refused = the_call(*IN_FLIGHT, STEP, STEP_UNKNOWN, edit(STEP_RESOLVED, verdict="refused"), STEP_REFUSED)
    assert refused.steps["upload"].prepared is None
    second = the_call(*IN_FLIGHT, STEP, STEP_REFUSED, edit(STEP, attempt=2)).steps["upload"]
    assert (second.tries, second.verdict) == (2, None)
    done = the_call(*IN_FLIGHT, STEP, STEP_DONE)
    assert bytes(done.steps["upload"].result or b"") == b"2"
    assert done.steps["upload"].prepared is None


def test_steps_belong_to_their_call() -> None:
    operations = tuple(edit(OPERATION, call=f"1.{i}") for i in range(2))
    both = edit(RESPONSE, parts=RESPONSE.parts * 2, operations=operations)
    run = the_run(*BEGUN, both, PREPARED, STEP_DONE)
    assert (list(run.calls["1.0"].steps), list(run.calls["1.1"].steps)) == (["upload"], [])
    assert dict(fold._NO_STEPS) == {}


def test_a_recorded_step_is_progress_of_its_call() -> None:
    call = the_call(*IN_FLIGHT, AGAIN, STEP_DONE, edit(AGAIN, attempt=3))
    assert (call.tries, call.tries_at_progress) == (3, 2)


def test_failures_in_a_row_are_counted_and_a_success_ends_the_row() -> None:
    operations = tuple(edit(OPERATION, call=f"1.{i}") for i in range(4))
    wide = edit(RESPONSE, parts=RESPONSE.parts * 4, operations=operations)
    ends = [
        edit(SETTLED, failure=NO), edit(WITHDRAWN, call="1.1"), edit(SETTLED, call="1.2"), edit(WITHDRAWN, call="1.3"),
    ]  # fmt: skip
    assert [the_run(*BEGUN, wide, *ends[:n]).failure_streak for n in range(5)] == [0, 1, 2, 0, 1]


def test_model_tries_and_rejections() -> None:
    assert the_run(*BEGUN, ASKING).model_prepared == ASKING
    answered = the_run(*BEGUN, ASKING, ModelResponseInterrupted(R, 1, 1), edit(RESPONSE, tries=3))
    assert (answered.model_prepared, answered.model_tries) == (None, 4)
    rejected = the_run(*DECLARED, SETTLED, FINAL, REJECTED)
    assert (rejected.output_rejections, rejected.turns[-1].rejected) == (1, NO)


def test_an_unknown_model_call_stays_charged_until_a_verdict_says_that_it_was_not_served() -> None:
    lost = the_run(*BEGUN, ASKING, MODEL_UNKNOWN)
    assert (lost.model_prepared, lost.unknowns(), lost.tokens, lost.spent) == (None, [MODEL_UNKNOWN], 5_096, 15_000)
    assert (MODEL_UNKNOWN.call, MODEL_UNKNOWN.tool, MODEL_UNKNOWN.step) == ("1.model", "gpt", None)
    for said, left in (("not_applied", 0), ("refused", 0), ("safe_to_retry", 5_096), ("applied", 5_096)):
        resolved = edit(MODEL_RESOLVED, verdict=said)
        run = the_run(*BEGUN, ASKING, MODEL_UNKNOWN, resolved)
        assert (run.unknowns(), run.model_verdict, run.tokens) == ([], resolved, left)
    again = the_run(*BEGUN, ASKING, MODEL_UNKNOWN, MODEL_RESOLVED, edit(ASKING, attempt=2, effect="m2"))
    assert (again.model_verdict, again.model_tries, again.turn_tries) == (None, 1, 1)


def test_failed_tries_are_counted_for_the_turn_and_the_run() -> None:
    unsure = edit(MODEL_FAILED, dispatched="unknown", effect="", charged=RESERVED)
    cancelled = edit(unsure, failure=Failure("cancelled", "interrupted"))
    run = the_run(*BEGUN, unsure, cancelled)
    assert (run.model_tries, run.turn_tries, run.model_failures, run.turn_failures) == (2, 2, 1, 1)
    assert run.charged == Charge(2_000, 8_192, 30_000)
    answered = the_run(*BEGUN, unsure, cancelled, RESPONSE)
    assert (answered.model_failures, answered.turn_tries, answered.turn_failures) == (1, 0, 0)
    assert answered.charged == run.charged
    refused = the_run(*BEGUN, ASKING, MODEL_FAILED)
    assert (refused.model_prepared, refused.charged) == (None, Charge())


def test_costs_are_of_responses_that_had_a_price() -> None:
    priced = edit(RESPONSE, usage=Usage(10, 5), cost=70, prices="2026-11")
    run = the_run(*BEGUN, priced, SETTLED, FINAL)
    assert (run.cost, run.unpriced, run.spent) == (70, 1, 70)
    untold = the_run(*BEGUN, edit(RESPONSE, charged=edit(RESERVED, cost=None)))
    assert (untold.cost, untold.unpriced, untold.tokens) == (0, 1, 5_096)


def test_a_session_that_was_lost_is_remembered_until_the_next_response() -> None:
    lost = edit(MODEL_FAILED, failure=Failure("model.continuation", "expired"))
    assert the_run(*BEGUN, lost).continuation_lost
    assert the_run(*BEGUN, lost, edit(MODEL_FAILED, attempt=2)).continuation_lost
    assert not the_run(*BEGUN, lost, RESPONSE).continuation_lost


def test_a_cancel_reaches_its_run_before_and_after_the_input() -> None:
    cancel = CancelRequested("sub_1", "ada", "")
    assert the_run(CREATED, cancel, INPUT).cancel == cancel
    assert the_run(*BEGUN, cancel).cancel == cancel
    assert folded(CREATED, cancel).cancels == {"sub_1": cancel}


def test_a_submission_may_settle_without_a_run() -> None:
    ended = SubmissionSettled("sub_2", "run_2", "cancelled")
    state = folded(CREATED, ended)
    assert (state.settlements, state.runs) == ({"sub_2": ended}, {})


def test_repairs_are_kept() -> None:
    note = RepairAnnotated("sub_1", "MarkUnknown", "why")
    assert folded(*BEGUN, note).repairs == [note]


# -- batches ----------------------------------------------------------------------------------------------------------


def batches(*groups: tuple[int, tuple[Record, ...]], thread: str = "t") -> list[bytes]:
    firsts = itertools.accumulate((len(records) for _, records in groups), initial=1)
    return [
        codec.encode(Batch(1, thread, first, epoch, "w", 0, records))
        for first, (epoch, records) in zip(firsts, groups, strict=False)
    ]


def test_batches_are_chained_from_the_first() -> None:
    bodies = batches((1, BEGUN), (1, (RESPONSE,)), (4, (PREPARED, SETTLED)))
    state = fold.fold("t", bodies)
    expected = codec.EMPTY_TAIL
    for body in bodies:
        expected = codec.chain(expected, body)
    assert (state.tail, state.epoch, state.digest) == (6, 4, expected)
    assert fold.fold("t", []) == fold.Thread("t")


def test_how_records_are_batched_does_not_matter_to_what_they_say() -> None:
    one = fold.fold("t", batches((1, (*IN_FLIGHT, SETTLED))))
    many = fold.fold("t", batches(*((1, (record,)) for record in (*IN_FLIGHT, SETTLED))))
    assert one.runs == many.runs
    assert one.digest != many.digest


@pytest.mark.parametrize(
    ("bodies", "says"),
    [
        (batches((1, BEGUN), (1, (RESPONSE,)))[1:], "has a gap"),
        (batches((1, BEGUN), (1, (RESPONSE,)))[:1] * 2, "has a gap"),
        (batches((1, BEGUN), thread="other"), "has a gap"),
        (batches((2, BEGUN), (1, (RESPONSE,))), "superseded epoch"),
        ([b"{"], "not JSON"),
    ],
    ids=["gap", "repeated", "another thread", "epoch falls", "garbage"],
)
def test_batches_that_do_not_continue_the_state_are_corrupt(bodies: list[bytes], says: str) -> None:
    with pytest.raises(Corrupt, match=says):
        fold.fold("t", bodies)


def test_a_newer_batch_is_incompatible_and_changes_nothing() -> None:
    state = folded(*BEGUN)
    newer = batches((1, BEGUN), (1, (RESPONSE,)))[1].replace(b'"v":1', b'"v":2')
    with pytest.raises(Incompatible):
        fold.apply_batch(state, newer)
    assert state == folded(*BEGUN)
