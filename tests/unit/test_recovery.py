"""The recovery tables, row by row, from literals: records folded into evidence, one decision out."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from perdure.errors import Corrupt
from perdure.limits import ATTEMPTS_WITHOUT_PROGRESS_MAX
from perdure.records.codec import Record
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
from perdure.records.parts import CallPart, Charge, Failure, TextPart
from perdure.records.parts import Evidence as Wire
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
from perdure.records.thread import CancelRequested, SubmissionSettled, ThreadCreated, UserInputRecorded
from perdure.rules import fold
from perdure.rules import plans as plans_
from perdure.rules.lifecycle import EffectClass
from perdure.rules.lifecycle import SubmissionState as State
from perdure.rules.plans import (
    MISSING,
    AwaitBinding,
    AwaitDecision,
    AwaitVerdict,
    Doubt,
    Inject,
    NeedsProbe,
    Rerun,
    RetireUnavailable,
    Reuse,
    Run,
    Withdraw,
    batch_plan,
    call_plan,
    doubts,
    lost_model_call,
    model_doubts,
)
from perdure.rules.plans import unknown as unknown_record
from perdure.rules.recovery import (
    AnswerFromVerdict,
    AppendIntents,
    AppendReservedSettlement,
    ApplyInput,
    AwaitApprovalDecision,
    AwaitClaim,
    AwaitUnknownResolution,
    Blocked,
    CompleteFromHistory,
    CompleteMaterialization,
    Decision,
    Evidence,
    FailDuration,
    FailFromVerdict,
    FinalizeLedgerFromHistory,
    FinalizeReserved,
    FinishFromResponse,
    MarkUnknown,
    NoAction,
    Poisoned,
    RepairInputMarker,
    RepairReadiness,
    ResumeFromTurnBoundary,
    ResumePendingBatch,
    SettleCancelled,
    classify,
    gather,
    result_digest,
)

R, S = "run_1", "sub_1"
LIMITS = AcceptedLimits(16, 64, 1, 4, 3, 51_200)
CREATED = ThreadCreated("bank")
INPUT = UserInputRecorded(S, R, Raw(b'"pay"'))
STARTED = RunStarted(R, S, "bank", "d", 1_000, LIMITS)
BEGUN: tuple[Record, ...] = (CREATED, INPUT, STARTED)
MARKER = 2
TOOLS = {kind.value: f"contract-{kind.value}" for kind in EffectClass} | {"steps": "contract-steps"}
CHANGED = dict.fromkeys(TOOLS, "contract-new")
NONE_LEFT: dict[str, str] = {}


def operation(position: int, tool: str, turn: int = 1, **more: Any) -> ToolOperation:
    kind = "once" if tool == "steps" else tool
    return ToolOperation(f"{turn}.{position}", tool, kind, tool == "steps", f"contract-{tool}", **more)


def response(*tools: str | ToolOperation, turn: int = 1) -> ModelResponseRecorded:
    found = tuple(t if isinstance(t, ToolOperation) else operation(i, t, turn) for i, t in enumerate(tools))
    parts = tuple(CallPart(o.tool, "{}") for o in found) or (TextPart("Paid."),)
    return ModelResponseRecorded(R, turn, "m", parts, "tool_calls" if found else "stop", operations=found)


def prepared(call: str, tool: str = "once", attempt: int = 1, **more: Any) -> ToolCallPrepared:
    contract = more.pop("contract", f"contract-{tool}")
    return ToolCallPrepared(R, call, f"e{call}/{attempt}", tool, tool, contract, "k", Raw(b"{}"), "a", attempt)


def unknown(call: str, attempt: int = 1, step: str | None = None) -> ToolCallUnknown:
    effect = f"e{call}/{attempt}" if step is None else f"e{call}/{step}"
    return ToolCallUnknown(R, call, effect, "once", "its owner vanished", step)


def verdict(call: str, said: Any, attempt: int = 1, step: str | None = None, **more: Any) -> ToolCallResolved:
    effect = f"e{call}/{attempt}" if step is None else f"e{call}/{step}"
    return ToolCallResolved(R, call, effect, said, "ada", "looked", step, **more)


def step_prepared(name: str, attempt: int = 1) -> ToolStepPrepared:
    return ToolStepPrepared(R, "1.0", name, f"e1.0/{name}", "k", attempt)


def asked(call: str) -> ToolApprovalRequested:
    return ToolApprovalRequested(R, call, f"apr{call}", "once", "digest", "moves money")


def decided(call: str, said: Any) -> ToolApprovalDecided:
    return ToolApprovalDecided(R, call, f"apr{call}", said, "ada", "because")


def settled(call: str, value: bytes = b"1") -> ToolCallSettled:
    return ToolCallSettled(R, call, Raw(value))


def completed(output: bytes = b'"paid"', disposition: str | None = "paid") -> RunCompleted:
    return RunCompleted(R, Raw(output), result_digest(output, disposition), disposition)


SETTLED = SubmissionSettled(S, R, "completed", None, result_digest(b'"paid"', "paid"), "paid")


def folded(*records: Record) -> fold.Thread:
    state = fold.Thread("t")
    for record in records:
        fold.apply(state, record)
    return state


def see(*records: Record, state: State = State.INPUT_APPLIED, **more: Any) -> Evidence:
    """Evidence after these records; the ledger agrees unless the test says otherwise."""
    thread = folded(*records)
    run = thread.runs.get(R)
    more.setdefault("input_marker", None if run is None else run.input_sequence)
    return gather(thread, S, R, state, **more)


def decide(*records: Record, state: State = State.INPUT_APPLIED, **more: Any) -> Decision:
    return classify(see(*records, state=state, **more))


def plans(*records: Record, contracts: Mapping[str, str] | None = TOOLS) -> tuple[plans_.CallPlan, ...]:
    turn = folded(*records).runs[R].open_turn()
    assert turn is not None
    return batch_plan(turn, contracts)


RESERVED = Charge(1_000, 4_096, 15_000, "2026-11")


def model_prepared(turn: int = 1, attempt: int = 1) -> ModelCallPrepared:
    return ModelCallPrepared(R, turn, attempt, "q" * 64, f"m{turn}/{attempt}", "gpt", "k", RESERVED)


def model_failed(turn: int = 1, attempt: int = 1, dispatched: Any = "yes") -> ModelCallFailed:
    failure = Failure("model.rate_limit", "busy")
    return ModelCallFailed(
        R, turn, attempt, "gpt", dispatched, failure, Wire(status=429), effect=f"m{turn}/{attempt}"
    )  # fmt: skip


def model_unknown(turn: int = 1, attempt: int = 1) -> ModelCallUnknown:
    return ModelCallUnknown(R, turn, f"m{turn}/{attempt}", "gpt", "its owner vanished", RESERVED)


def model_verdict(said: Any, turn: int = 1, attempt: int = 1, **more: Any) -> ModelCallResolved:
    return ModelCallResolved(R, turn, f"m{turn}/{attempt}", said, "ada", "looked", **more)


LOST_CALL = Doubt("1.model", "m1/1", "gpt", plans_._LOST)
LOST = Doubt("1.0", "e1.0/1", "once", plans_._LOST)


# -- the seed's table: last committed boundary -> recovery ----------------------------------------------------------


class TestSeedTable:
    def test_admission_without_readiness_finishes_materialization_and_readiness(self) -> None:
        assert classify(gather(None, S, R, State.ADMITTED, thread_created=False)) == CompleteMaterialization()
        assert classify(gather(None, S, R, State.ADMITTED)) == RepairReadiness()

    def test_ready_input_with_no_attempted_execution_is_left_to_the_normal_worker_claim(self) -> None:
        assert classify(gather(None, S, R, State.READY)) == AwaitClaim()

    def test_input_appended_without_its_ledger_marker_repairs_the_marker(self) -> None:
        assert decide(CREATED, INPUT, state=State.RUNNING, input_marker=None) == RepairInputMarker(2)

    def test_run_started_preserves_the_original_deadline(self) -> None:
        evidence = see(*BEGUN)
        assert classify(evidence) == ResumeFromTurnBoundary(1, started=True)
        assert evidence.run is not None
        assert evidence.run.started is not None
        assert evidence.run.started.deadline == 1_000
        with pytest.raises(Corrupt):
            folded(*BEGUN, RunStarted(R, S, "bank", "d", 2_000, LIMITS))

    def test_incomplete_model_response_retries_inference(self) -> None:
        assert decide(*BEGUN) == ResumeFromTurnBoundary(1, started=True)
        assert decide(*BEGUN, ModelResponseInterrupted(R, 1, 1)) == ResumeFromTurnBoundary(1, started=True)

    def test_complete_tool_declaration_without_preparation_checks_the_original_contract(self) -> None:
        found = decide(*BEGUN, response("once", "once"), contracts={"once": "contract-once"})
        assert found == ResumePendingBatch(1, (Run("1.0"), Run("1.1")))
        gone = decide(*BEGUN, response("once", "observe"), contracts=NONE_LEFT)
        assert gone == ResumePendingBatch(
            1, (RetireUnavailable("1.0", "not-executed"), RetireUnavailable("1.1", "unavailable"))
        )

    def test_ordinary_tool_prepared_without_a_result_is_reconciled_or_unknown(self) -> None:
        assert decide(*BEGUN, response("once"), prepared("1.0"), contracts=TOOLS) == MarkUnknown((LOST,))
        assert decide(*BEGUN, response("once"), prepared("1.0")) == MarkUnknown((LOST,))

    def test_canonical_tool_or_step_result_is_reused(self) -> None:
        records = (*BEGUN, response("once", "observe"), prepared("1.0"), settled("1.0"))
        assert plans(*records) == (Reuse("1.0"), Run("1.1"))
        stepped = (*BEGUN, response("steps"), prepared("1.0", "steps"), ToolStepSettled(R, "1.0", "a", Raw(b"1")))
        assert plans(*stepped) == (Rerun("1.0", "steps", steps=True),)

    def test_run_completed_preserves_output_and_disposition_and_validates_the_digest(self) -> None:
        assert decide(*BEGUN, response(), completed()) == CompleteFromHistory(R)
        forged = RunCompleted(R, Raw(b'"paid"'), result_digest(b'"other"', "paid"), "paid")
        assert isinstance(decide(*BEGUN, response(), forged), Blocked)

    def test_reserved_settlement_is_appended_then_the_ledger_finalized(self) -> None:
        assert decide(*BEGUN, state=State.TERMINALIZING, reservation=True) == AppendReservedSettlement()
        records = (*BEGUN, response(), completed(), SETTLED)
        assert decide(*records, state=State.TERMINALIZING, reservation=True) == FinalizeReserved(SETTLED)

    def test_canonical_settlement_without_ledger_finalization_finalizes_from_history(self) -> None:
        records = (*BEGUN, response(), completed(), SETTLED)
        assert decide(*records, state=State.INPUT_APPLIED) == FinalizeLedgerFromHistory(SETTLED)

    def test_approval_must_be_canonical_before_work_resumes(self) -> None:
        records = (*BEGUN, response("once"), asked("1.0"))
        waiting = see(*records, state=State.SUSPENDED, contracts=TOOLS, approval_intents={"apr1.0"})
        assert classify(waiting) == AppendIntents(approvals=("apr1.0",))

    def test_cancel_preserves_evidence_and_cannot_replace_a_settlement_that_won(self) -> None:
        cancel = CancelRequested(S, "ada", "enough")
        records = (*BEGUN, response("once"), prepared("1.0"), cancel)
        ended = Doubt("1.0", "e1.0/1", "once", plans_._ENDED)
        assert decide(*records) == SettleCancelled((ended,), requested=True)
        assert decide(*records, state=State.TERMINALIZING, reservation=True) == AppendReservedSettlement()


# -- the specification's table, rows 1 to 31 without subagents, joining and compaction ------------------------------


class TestSpecificationTable:
    def test_row_01_nothing(self) -> None:
        """Nothing durable is no evidence: a submission without a ledger state cannot even be asked about."""
        with pytest.raises(ValueError, match="nothing"):
            gather(None, S, R, "nothing")

    def test_row_02_admitted_and_the_thread_is_missing(self) -> None:
        evidence = gather(None, S, R, State.ADMITTED, thread_created=False)
        assert classify(evidence) == CompleteMaterialization()

    def test_row_03_admitted_and_the_thread_exists(self) -> None:
        assert decide(CREATED, state=State.ADMITTED) == RepairReadiness()

    def test_row_04_ready_and_never_attempted(self) -> None:
        assert decide(CREATED, state=State.READY) == AwaitClaim()

    def test_row_05_running_and_expired_without_input(self) -> None:
        assert decide(CREATED, state=State.RUNNING) == ApplyInput()

    def test_row_06_input_canonical_and_no_marker(self) -> None:
        for state in (State.RUNNING, State.READY, State.ADMITTED, State.INPUT_APPLIED):
            assert decide(*BEGUN, state=state, input_marker=None) == RepairInputMarker(MARKER)

    def test_row_06_marker_present_and_state_behind(self) -> None:
        assert decide(*BEGUN, state=State.READY) == RepairInputMarker(MARKER)

    def test_row_07_run_started(self) -> None:
        assert decide(*BEGUN) == ResumeFromTurnBoundary(1, started=True)

    def test_row_07_input_without_run_started_of_a_split_store(self) -> None:
        assert decide(CREATED, INPUT) == ResumeFromTurnBoundary(1, started=False)

    def test_row_08_model_call_in_flight(self) -> None:
        records = (*BEGUN, response("observe"), settled("1.0"))
        assert decide(*records) == ResumeFromTurnBoundary(2, started=True)

    def test_row_08_model_call_of_class_once_in_flight_is_unknown_and_never_repeated(self) -> None:
        for contracts in (TOOLS, CHANGED, NONE_LEFT, None):
            assert decide(*BEGUN, model_prepared(), contracts=contracts) == MarkUnknown((LOST_CALL,))
        later = (*BEGUN, response("observe"), settled("1.0"), model_prepared(2))
        assert decide(*later) == MarkUnknown((Doubt("2.model", "m2/1", "gpt", plans_._LOST),))

    def test_row_08_model_call_of_class_once_that_definitely_failed_may_be_made_again(self) -> None:
        records = (*BEGUN, model_prepared(), model_failed())
        assert decide(*records) == ResumeFromTurnBoundary(1, started=True)
        assert decide(*records, model_prepared(attempt=2)) == MarkUnknown(
            (Doubt("1.model", "m1/2", "gpt", plans_._LOST),)
        )

    @pytest.mark.parametrize("dispatched", ["no", "yes", "unknown"])
    def test_row_08_a_failed_try_of_a_repeatable_model_call_is_followed_by_another(self, dispatched: Any) -> None:
        failed = ModelCallFailed(R, 1, 1, "gpt", dispatched, Failure("model", "cut off"), charged=RESERVED)
        assert decide(*BEGUN, failed) == ResumeFromTurnBoundary(1, started=True)

    def test_row_08_model_call_of_unknown_outcome_waits_for_its_verdict(self) -> None:
        records = (*BEGUN, model_prepared(), model_unknown())
        for state in (State.RUNNING, State.INPUT_APPLIED, State.SUSPENDED, State.UNKNOWN):
            for contracts in (TOOLS, CHANGED, None):
                assert decide(*records, state=state, contracts=contracts) == AwaitUnknownResolution(("m1/1",))

    def test_row_08_its_verdict_is_taken_in_first(self) -> None:
        records = (*BEGUN, model_prepared(), model_unknown())
        found = decide(*records, state=State.UNKNOWN, verdict_intents={"m1/1": "applied"})
        assert found == AppendIntents(verdicts=("m1/1",))

    def test_row_08_a_verdict_on_a_model_call_in_flight_waits_until_that_is_recorded_unknown(self) -> None:
        records = (*BEGUN, model_prepared())
        assert decide(*records, verdict_intents={"m1/1": "applied"}) == MarkUnknown((LOST_CALL,))

    def test_row_08_a_second_verdict_on_a_model_call_has_nothing_to_decide(self) -> None:
        records = (*BEGUN, model_prepared(), model_unknown(), model_verdict("not_applied"))
        assert decide(*records, verdict_intents={"m1/1": "applied"}) == AppendIntents(moot=("m1/1",))

    @pytest.mark.parametrize("said", ["not_applied", "safe_to_retry", "compensated"])
    def test_row_08_a_verdict_that_frees_it_lets_the_same_turn_be_asked_again(self, said: str) -> None:
        records = (*BEGUN, model_prepared(), model_unknown(), model_verdict(said))
        for state in (State.UNKNOWN, State.INPUT_APPLIED):
            assert decide(*records, state=state) == ResumeFromTurnBoundary(1, started=True)

    def test_row_08_what_a_verdict_leaves_charged(self) -> None:
        charged = {
            said: folded(*BEGUN, model_prepared(), model_unknown(), model_verdict(said)).runs[R].charged
            for said in ("applied", "safe_to_retry", "not_applied", "refused")
        }
        free = Charge()
        assert charged == {
            "applied": Charge(1_000, 4_096, 15_000), "safe_to_retry": Charge(1_000, 4_096, 15_000),
            "not_applied": free, "refused": free,
        }  # fmt: skip

    def test_row_08_a_verdict_that_gives_the_answer_is_the_response(self) -> None:
        records = (*BEGUN, model_prepared(), model_unknown(), model_verdict("applied", result=Raw(b'"Paid."')))
        for contracts in (TOOLS, CHANGED, None):
            assert decide(*records, state=State.UNKNOWN, contracts=contracts) == AnswerFromVerdict(1, "m1/1")
        answered = msgspec.structs.replace(response(), effect="m1/1")
        assert decide(*records, answered) == FinishFromResponse(1)

    def test_row_08_a_verdict_that_refuses_it_fails_the_run(self) -> None:
        why = Failure("model", "the account was closed")
        records = (*BEGUN, model_prepared(), model_unknown())
        assert decide(*records, model_verdict("refused", failure=why)) == FailFromVerdict(why)
        bare = decide(*records, model_verdict("refused"))
        assert isinstance(bare, FailFromVerdict)
        assert bare.failure.kind == "model"

    def test_row_08_a_verdict_on_it_that_cancels_is_a_cancel_even_alone(self) -> None:
        records = (*BEGUN, model_prepared(), model_unknown(), model_verdict("cancel_run"))
        assert decide(*records) == SettleCancelled((), requested=False)

    def test_row_08_a_second_loss_is_unknown_again(self) -> None:
        records = (*BEGUN, model_prepared(), model_unknown(), model_verdict("safe_to_retry"), model_prepared(attempt=2))
        assert decide(*records) == MarkUnknown((Doubt("1.model", "m1/2", "gpt", plans_._LOST),))
        again = decide(*records, model_unknown(attempt=2), state=State.UNKNOWN)
        assert again == AwaitUnknownResolution(("m1/2",))

    def test_row_09_response_complete_without_tools(self) -> None:
        assert decide(*BEGUN, response()) == FinishFromResponse(1)

    def test_row_09_a_rejected_output_goes_back_to_the_model(self) -> None:
        rejected = OutputRejected(R, 1, Failure("output", "not an object"))
        assert decide(*BEGUN, response(), rejected) == ResumeFromTurnBoundary(2, started=True)

    def test_row_10_declared_and_nothing_prepared_with_the_same_contract(self) -> None:
        names = list(TOOLS)
        found = decide(*BEGUN, response(*names), contracts=TOOLS)
        assert found == ResumePendingBatch(1, tuple(Run(f"1.{i}") for i in range(len(names))))

    @pytest.mark.parametrize("contracts", [CHANGED, NONE_LEFT], ids=["changed", "absent"])
    def test_row_10_declared_and_nothing_prepared_with_another_contract(self, contracts: Mapping[str, str]) -> None:
        names = list(TOOLS)
        retired = {"pure": "unavailable", "observe": "unavailable"}
        assert plans(*BEGUN, response(*names), contracts=contracts) == tuple(
            RetireUnavailable(f"1.{i}", typing.cast("Any", retired.get(name, "not-executed")))
            for i, name in enumerate(names)
        )

    def test_row_11_approval_requested_and_undecided(self) -> None:
        records = (*BEGUN, response("once"), asked("1.0"))
        for state in (State.INPUT_APPLIED, State.SUSPENDED):
            assert decide(*records, state=state, contracts=TOOLS) == AwaitApprovalDecision(("apr1.0",))

    def test_row_11_free_siblings_run_before_the_suspension(self) -> None:
        records = (*BEGUN, response("once", "observe"), asked("1.0"))
        found = decide(*records, contracts=TOOLS)
        assert found == ResumePendingBatch(1, (AwaitDecision("1.0", "apr1.0"), Run("1.1")))

    def test_row_12_decision_recorded_and_not_canonical(self) -> None:
        records = (*BEGUN, response("once", "once"), asked("1.0"), asked("1.1"))
        found = decide(*records, state=State.SUSPENDED, approval_intents=["apr1.1"], contracts=TOOLS)
        assert found == AppendIntents(approvals=("apr1.1",))

    def test_row_12_decision_canonical_then_resume(self) -> None:
        records = (*BEGUN, response("once"), asked("1.0"), decided("1.0", "approved"))
        assert decide(*records, state=State.SUSPENDED, contracts=TOOLS) == ResumePendingBatch(1, (Run("1.0"),))

    @pytest.mark.parametrize("said", ["rejected", "expired"])
    def test_row_12_rejection_canonical_then_withdrawn(self, said: str) -> None:
        records = (*BEGUN, response("once"), asked("1.0"), decided("1.0", said))
        [plan] = plans(*records)
        assert plan == Withdraw("1.0", Failure("rejected", f"Approval {said} by ada: because"))

    def test_row_12_approved_and_the_tool_is_gone(self) -> None:
        records = (*BEGUN, response("once"), asked("1.0"), decided("1.0", "approved"))
        assert plans(*records, contracts=NONE_LEFT) == (RetireUnavailable("1.0", "not-executed"),)

    def test_row_13_prepared_without_result_of_class_once(self) -> None:
        records = (*BEGUN, response("once"), prepared("1.0"))
        for contracts in (TOOLS, CHANGED, NONE_LEFT, None):
            assert decide(*records, contracts=contracts) == MarkUnknown((LOST,))
            assert plans(*records, contracts=contracts) == (NeedsProbe("1.0", (LOST,)),)

    @pytest.mark.parametrize("tool", ["idempotent", "keyed"])
    def test_row_14_prepared_without_result_of_a_repeatable_class(self, tool: Any) -> None:
        records = (*BEGUN, response(tool), prepared("1.0", tool))
        assert decide(*records, contracts=TOOLS) == ResumePendingBatch(1, (Rerun("1.0", tool),))
        doubt = Doubt("1.0", "e1.0/1", tool, plans_._CHANGED)
        assert decide(*records, contracts=CHANGED) == MarkUnknown((doubt,))
        assert decide(*records, contracts=NONE_LEFT) == MarkUnknown((doubt,))
        assert decide(*records) == ResumePendingBatch(1, (AwaitBinding("1.0"),))

    @pytest.mark.parametrize("tool", ["pure", "observe"])
    def test_row_15_readonly_call_without_result(self, tool: Any) -> None:
        assert plans(*BEGUN, response(tool)) == (Run("1.0"),)
        assert plans(*BEGUN, response(tool), prepared("1.0", tool)) == (Rerun("1.0", tool),)
        for started in ((), (prepared("1.0", tool),)):
            found = plans(*BEGUN, response(tool), *started, contracts=CHANGED)
            assert found == (RetireUnavailable("1.0", "unavailable"),)

    def test_row_16_prepared_and_some_steps_recorded(self) -> None:
        records = (*BEGUN, response("steps"), prepared("1.0", "steps"))
        reenter = ResumePendingBatch(1, (Rerun("1.0", "steps", steps=True),))
        assert decide(*records, contracts=TOOLS) == reenter  # also with no step recorded
        assert decide(*records, ToolStepSettled(R, "1.0", "a", Raw(b"1")), contracts=TOOLS) == reenter
        changed = Doubt("1.0", "e1.0/1", "steps", plans_._CHANGED)
        assert decide(*records, contracts=CHANGED) == MarkUnknown((changed,))

    def test_row_16_once_step_in_flight(self) -> None:
        records = (*BEGUN, response("steps"), prepared("1.0", "steps"), step_prepared("pay"))
        doubt = Doubt("1.0", "e1.0/pay", "steps", plans_._LOST, "pay")
        assert decide(*records, contracts=TOOLS) == MarkUnknown((doubt,))
        assert decide(*records, unknown("1.0", step="pay"), contracts=TOOLS) == AwaitUnknownResolution(("e1.0/pay",))
        freed = (*records, unknown("1.0", step="pay"), verdict("1.0", "not_applied", step="pay"))
        assert plans(*freed) == (Rerun("1.0", "steps", steps=True),)
        refused = (*records, ToolStepRefused(R, "1.0", "pay", Failure("refused", "closed")))
        assert plans(*refused) == (Rerun("1.0", "steps", steps=True),)

    def test_row_17_some_siblings_settled(self) -> None:
        records = (
            *BEGUN,
            response("once", "keyed", "observe"),
            prepared("1.0"),
            prepared("1.1", "keyed"),
            settled("1.0"),
        )
        assert decide(*records, contracts=TOOLS) == ResumePendingBatch(
            1, (Reuse("1.0"), Rerun("1.1", "keyed"), Run("1.2"))
        )

    def test_row_18_tool_result_canonical(self) -> None:
        records = (*BEGUN, response("once"), prepared("1.0"), settled("1.0"))
        assert decide(*records, contracts=CHANGED) == ResumeFromTurnBoundary(2, started=True)

    def test_row_19_unknown_recorded_and_no_resolution(self) -> None:
        records = (*BEGUN, response("once"), prepared("1.0"), unknown("1.0"))
        for state, contracts in itertools.product(State, (TOOLS, CHANGED, None)):
            if state in (State.RUNNING, State.INPUT_APPLIED, State.SUSPENDED, State.UNKNOWN):
                assert decide(*records, state=state, contracts=contracts) == AwaitUnknownResolution(("e1.0/1",))

    def test_row_19_siblings_that_never_started_still_run(self) -> None:
        records = (*BEGUN, response("once", "observe"), prepared("1.0"), unknown("1.0"))
        found = decide(*records, contracts=TOOLS)
        assert found == ResumePendingBatch(1, (AwaitVerdict("1.0", ("e1.0/1",)), Run("1.1")))
        assert decide(*records, state=State.UNKNOWN, contracts=TOOLS) == AwaitUnknownResolution(("e1.0/1",))

    def test_row_20_resolutions_are_taken_in_and_reopen_only_when_every_call_is_covered(self) -> None:
        records = [*BEGUN, response("once", "once"), prepared("1.0"), prepared("1.1"), unknown("1.0"), unknown("1.1")]
        waiting = see(*records, state=State.UNKNOWN, verdict_intents={"e1.0/1": "not_applied"}, contracts=TOOLS)
        assert classify(waiting) == AppendIntents(verdicts=("e1.0/1",))
        records.append(verdict("1.0", "not_applied"))
        for state in (State.UNKNOWN, State.INPUT_APPLIED):
            assert decide(*records, state=state, contracts=TOOLS) == AwaitUnknownResolution(("e1.1/1",))
        records.append(verdict("1.1", "safe_to_retry"))
        assert decide(*records, state=State.INPUT_APPLIED, contracts=TOOLS) == ResumePendingBatch(
            1, (Rerun("1.0", "not_applied"), Rerun("1.1", "safe_to_retry"))
        )

    @pytest.mark.parametrize("said", ["applied", "refused", "compensated"])
    def test_row_20_a_verdict_that_decides_the_result_is_injected(self, said: str) -> None:
        said_so = verdict("1.0", said, result=Raw(b'"ok"'))
        records = (*BEGUN, response("once"), prepared("1.0"), unknown("1.0"), said_so)
        for contracts in (TOOLS, CHANGED, None):
            assert plans(*records, contracts=contracts) == (Inject("1.0", said_so),)

    def test_row_22_run_completed(self) -> None:
        records = (*BEGUN, response(), completed())
        for contracts in (TOOLS, CHANGED, None):
            assert decide(*records, contracts=contracts) == CompleteFromHistory(R)
        assert decide(*records, past_deadline=True, cancel_intent=True) == CompleteFromHistory(R)

    def test_row_23_reservation_not_canonical(self) -> None:
        records = (*BEGUN, response("once"), prepared("1.0"))
        assert decide(*records, state=State.TERMINALIZING, reservation=True) == AppendReservedSettlement()

    def test_row_23_terminalizing_without_a_reservation_is_a_contradiction(self) -> None:
        assert isinstance(decide(*BEGUN, state=State.TERMINALIZING), Blocked)

    @pytest.mark.parametrize("state", [s for s in State if s is not State.SETTLED])
    def test_row_24_settlement_canonical_and_ledger_open(self, state: State) -> None:
        records = (*BEGUN, response(), completed(), SETTLED)
        assert decide(*records, state=state) == FinalizeLedgerFromHistory(SETTLED)

    def test_row_24_of_a_submission_that_never_had_a_run(self) -> None:
        ended = SubmissionSettled(S, R, "cancelled")
        records = (CREATED, CancelRequested(S, "ada", "no"), ended)
        assert decide(*records, state=State.READY) == FinalizeLedgerFromHistory(ended)

    def test_row_29_cancel_intent_is_taken_in_first(self) -> None:
        records = (*BEGUN, response("once"), prepared("1.0"))
        assert decide(*records, cancel_intent=True) == AppendIntents(cancel=True)

    def test_row_29_cancelled_in_every_open_state(self) -> None:
        cancel = CancelRequested(S, "ada", "enough")
        queued = decide(CREATED, cancel, state=State.READY)
        assert queued == SettleCancelled((), requested=True)
        parked = (*BEGUN, response("once", "observe"), prepared("1.0"), unknown("1.0"), cancel)
        for state in (State.UNKNOWN, State.SUSPENDED, State.INPUT_APPLIED, State.RUNNING):
            assert decide(*parked, state=state, contracts=TOOLS) == SettleCancelled((), requested=True)

    def test_row_29_records_every_started_effect_unknown(self) -> None:
        records = (
            *BEGUN, response("steps", "keyed", "once"), prepared("1.0", "steps"), step_prepared("pay"),
            prepared("1.1", "keyed"), CancelRequested(S, "ada", "enough"),
        )  # fmt: skip
        found = decide(*records, contracts=TOOLS)
        assert isinstance(found, SettleCancelled)
        assert [(d.call, d.step) for d in found.doubts] == [("1.0", None), ("1.0", "pay"), ("1.1", None)]

    def test_row_29_records_a_started_model_call_unknown(self) -> None:
        records = (*BEGUN, model_prepared(), CancelRequested(S, "ada", "enough"))
        ended = Doubt("1.model", "m1/1", "gpt", plans_._ENDED)
        assert decide(*records) == SettleCancelled((ended,), requested=True)
        parked = (*BEGUN, model_prepared(), model_unknown(), CancelRequested(S, "ada", "enough"))
        assert decide(*parked, state=State.UNKNOWN) == SettleCancelled((), requested=True)

    def test_row_29_a_verdict_that_cancels_is_a_cancel_even_alone(self) -> None:
        records = (*BEGUN, response("once"), prepared("1.0"), unknown("1.0"), verdict("1.0", "cancel_run"))
        assert decide(*records, contracts=TOOLS) == SettleCancelled((), requested=False)
        assert plans(*records) == (AwaitVerdict("1.0", ("e1.0/1",)),)
        stepped = (*BEGUN, response("steps"), prepared("1.0", "steps"), step_prepared("pay"))
        given_up = (*stepped, unknown("1.0", step="pay"), verdict("1.0", "cancel_run", step="pay"))
        assert isinstance(decide(*given_up, contracts=TOOLS), SettleCancelled)

    def test_row_29_a_verdict_and_its_cancel_enter_together(self) -> None:
        records = (*BEGUN, response("once"), prepared("1.0"), unknown("1.0"))
        found = decide(*records, state=State.UNKNOWN, cancel_intent=True, verdict_intents={"e1.0/1": "cancel_run"})
        assert found == AppendIntents(verdicts=("e1.0/1",), cancel=True)

    def test_row_30_cancel_against_a_reserved_outcome(self) -> None:
        records = (*BEGUN, CancelRequested(S, "ada", "late"))
        found = decide(*records, state=State.TERMINALIZING, reservation=True, cancel_intent=True)
        assert found == AppendReservedSettlement()

    def test_row_31_past_the_deadline(self) -> None:
        assert decide(*BEGUN, past_deadline=True) == FailDuration(())
        records = (*BEGUN, response("once", "observe"), prepared("1.0"))
        ended = Doubt("1.0", "e1.0/1", "once", plans_._ENDED)
        for state in (State.INPUT_APPLIED, State.SUSPENDED, State.UNKNOWN):
            assert decide(*records, state=state, past_deadline=True, contracts=TOOLS) == FailDuration((ended,))
        asked = decide(*BEGUN, model_prepared(), past_deadline=True)
        assert asked == FailDuration((Doubt("1.model", "m1/1", "gpt", plans_._ENDED),))

    def test_row_31_the_deadline_of_a_run_that_never_started_does_not_exist(self) -> None:
        assert decide(CREATED, state=State.READY, past_deadline=True) == AwaitClaim()
        assert decide(CREATED, INPUT, past_deadline=True) == ResumeFromTurnBoundary(1, started=False)


# -- one call ---------------------------------------------------------------------------------------------------------


def call(*records: Record) -> fold.Call:
    return folded(*BEGUN, *records).runs[R].calls["1.0"]


class TestCallPlan:
    def test_without_a_binding_nothing_is_ever_authorized_to_run(self) -> None:
        for tool in TOOLS:
            for started in ((), (prepared("1.0", tool),)):
                found = call_plan(call(response(tool), *started), None)
                assert not isinstance(found, Run | Rerun)

    def test_none_is_no_binding_and_missing_is_a_tool_that_is_gone(self) -> None:
        assert call_plan(call(response("once")), None) == AwaitBinding("1.0")
        assert call_plan(call(response("once")), MISSING) == RetireUnavailable("1.0", "not-executed")

    def test_an_operation_without_recorded_contract_authorizes_nothing(self) -> None:
        bare = ToolOperation("1.0", "keyed", "keyed")
        assert call_plan(call(response(bare)), "") == RetireUnavailable("1.0", "not-executed")
        assert isinstance(call_plan(call(response(bare), prepared("1.0", "keyed", contract="")), ""), NeedsProbe)

    def test_what_was_started_under_another_contract_than_declared_is_changed(self) -> None:
        found = call(response("keyed"), prepared("1.0", "keyed", contract="contract-between"))
        assert isinstance(call_plan(found, "contract-keyed"), NeedsProbe)

    @pytest.mark.parametrize("kind", list(EffectClass))
    def test_a_call_in_steps_is_always_preceded_by_a_started_record(self, kind: EffectClass) -> None:
        stepped = ToolOperation("1.0", "load", kind, steps=True, contract="c")
        assert call_plan(call(response(stepped)), MISSING) == RetireUnavailable("1.0", "not-executed")
        started = call(response(stepped), prepared("1.0", "load", contract="c"))
        assert call_plan(started, "c") == Rerun("1.0", "steps", steps=True)
        assert isinstance(call_plan(started, MISSING), NeedsProbe)

    def test_a_class_this_release_does_not_know_promises_nothing(self) -> None:
        odd = ToolOperation("1.0", "odd", "twice", contract="contract-odd")
        assert isinstance(call_plan(call(response(odd), prepared("1.0", "odd")), "contract-odd"), NeedsProbe)

    def test_a_call_refused_at_preflight_is_withdrawn_with_its_reason(self) -> None:
        why = Failure("unknown_tool", "There is no tool 'nope'.")
        nope = ToolOperation("1.0", "nope", rejected=why)
        for contract in (None, MISSING, "x"):
            assert call_plan(call(response(nope)), contract) == Withdraw("1.0", why)

    def test_safe_to_retry_does_not_authorize_changed_code(self) -> None:
        freed = call(response("once"), prepared("1.0"), unknown("1.0"), verdict("1.0", "safe_to_retry"))
        assert call_plan(freed, "contract-once") == Rerun("1.0", "safe_to_retry")
        doubt = Doubt("1.0", "e1.0/1", "once", plans_._CHANGED)
        assert call_plan(freed, "contract-new") == NeedsProbe("1.0", (doubt,))
        assert call_plan(freed, MISSING) == NeedsProbe("1.0", (doubt,))
        assert call_plan(freed, None) == AwaitBinding("1.0")

    def test_not_applied_retires_a_call_whose_tool_is_gone_or_changed(self) -> None:
        freed = call(response("once"), prepared("1.0"), unknown("1.0"), verdict("1.0", "not_applied"))
        assert call_plan(freed, "contract-once") == Rerun("1.0", "not_applied")
        assert call_plan(freed, "contract-new") == RetireUnavailable("1.0", "not-executed")
        assert call_plan(freed, MISSING) == RetireUnavailable("1.0", "not-executed")
        assert call_plan(freed, None) == AwaitBinding("1.0")

    def test_a_second_loss_of_a_once_call_is_unknown_again(self) -> None:
        again = (
            response("once"),
            prepared("1.0"),
            unknown("1.0"),
            verdict("1.0", "not_applied"),
            prepared("1.0", attempt=2),
        )
        found = call_plan(call(*again), "contract-once")
        assert found == NeedsProbe("1.0", (Doubt("1.0", "e1.0/2", "once", plans_._LOST),))

    @pytest.mark.parametrize("tool", ["idempotent", "keyed", "steps"])
    def test_a_call_that_never_comes_to_an_outcome_becomes_unknown(self, tool: str) -> None:
        tries: list[Record] = [prepared("1.0", tool, n) for n in range(1, ATTEMPTS_WITHOUT_PROGRESS_MAX + 1)]
        assert isinstance(call_plan(call(response(tool), *tries[:-1]), f"contract-{tool}"), Rerun)
        doubt = Doubt("1.0", f"e1.0/{len(tries)}", tool, plans_._WORN)
        for contract in (f"contract-{tool}", None):
            assert call_plan(call(response(tool), *tries), contract) == NeedsProbe("1.0", (doubt,))

    def test_a_recorded_step_is_progress(self) -> None:
        tries: list[Record] = [prepared("1.0", "steps", n) for n in range(1, ATTEMPTS_WITHOUT_PROGRESS_MAX + 1)]
        moved = [*tries, ToolStepSettled(R, "1.0", "a", Raw(b"1"))]
        assert call_plan(call(response("steps"), *moved), "contract-steps") == Rerun("1.0", "steps", steps=True)

    def test_withdrawn_is_reused(self) -> None:
        gone = call(response("once"), ToolCallWithdrawn(R, "1.0", Failure("rejected", "no")))
        assert call_plan(gone, "contract-once") == Reuse("1.0")
        assert doubts(gone) == ()

    @pytest.mark.parametrize("said", ["not_applied", "safe_to_retry"])
    def test_a_freed_call_is_held_while_a_sibling_is_unknown(self, said: str) -> None:
        records = (
            *BEGUN, response("once", "once", "observe"), prepared("1.0"), prepared("1.1"),
            unknown("1.0"), unknown("1.1"), verdict("1.0", said),
        )  # fmt: skip
        for contracts in (TOOLS, CHANGED):
            first, second, third = plans(*records, contracts=contracts)
            assert first == AwaitVerdict("1.0", ("e1.1/1",))
            assert second == AwaitVerdict("1.1", ("e1.1/1",))
            assert isinstance(third, Run | RetireUnavailable)


class TestModelCall:
    def run_of(self, *records: Record) -> fold.Run:
        return folded(*BEGUN, *records).runs[R]

    def test_only_a_call_in_flight_is_in_doubt(self) -> None:
        assert model_doubts(None) == ()
        assert model_doubts(self.run_of()) == ()
        assert lost_model_call(self.run_of(model_prepared())) == (LOST_CALL,)
        for ended in (model_failed(), model_unknown(), msgspec.structs.replace(response(), effect="m1/1")):
            assert model_doubts(self.run_of(model_prepared(), ended)) == ()

    def test_a_doubt_is_recorded_as_what_it_is_about(self) -> None:
        started = self.run_of(model_prepared())
        assert unknown_record(started, LOST_CALL) == ModelCallUnknown(R, 1, "m1/1", "gpt", plans_._LOST, RESERVED)
        tool = self.run_of(response("once"), prepared("1.0"))
        assert unknown_record(tool, LOST) == ToolCallUnknown(R, "1.0", "e1.0/1", "once", plans_._LOST)


# -- one submission ---------------------------------------------------------------------------------------------------


def test_poisoned_work_runs_nothing_until_it_is_redriven() -> None:
    worn = {"attempts": ATTEMPTS_WITHOUT_PROGRESS_MAX, "contracts": TOOLS}
    stopped = Poisoned(ATTEMPTS_WITHOUT_PROGRESS_MAX)
    assert decide(*BEGUN, **worn) == stopped
    assert decide(*BEGUN, response(), **worn) == stopped
    assert decide(*BEGUN, response("once"), **worn) == stopped
    assert decide(CREATED, state=State.RUNNING, **worn) == stopped
    for said in ("not_applied", "safe_to_retry", "applied", "refused"):
        assert decide(*BEGUN, model_prepared(), model_unknown(), model_verdict(said), **worn) == stopped
    # what must be recorded or waited for is not execution
    assert decide(*BEGUN, response("once"), prepared("1.0"), **worn) == MarkUnknown((LOST,))
    assert decide(*BEGUN, model_prepared(), **worn) == MarkUnknown((LOST_CALL,))
    assert decide(*BEGUN, model_prepared(), model_unknown(), **worn) == AwaitUnknownResolution(("m1/1",))
    assert isinstance(decide(*BEGUN, response("once"), asked("1.0"), **worn), AwaitApprovalDecision)
    assert isinstance(decide(*BEGUN, CancelRequested(S, "a", "b"), **worn), SettleCancelled)
    assert isinstance(decide(*BEGUN, past_deadline=True, **worn), FailDuration)


def test_a_ledger_that_claims_an_input_the_log_does_not_hold_is_blocked() -> None:
    assert isinstance(decide(CREATED, state=State.RUNNING, input_marker=2), Blocked)
    for state in (State.INPUT_APPLIED, State.SUSPENDED, State.UNKNOWN):
        assert isinstance(decide(CREATED, state=state), Blocked)
    assert isinstance(decide(*BEGUN, input_marker=7), Blocked)


def test_a_verdict_waits_while_its_effect_is_in_flight() -> None:
    records = (*BEGUN, response("once"), prepared("1.0"))
    assert decide(*records, verdict_intents={"e1.0/1": "applied"}) == MarkUnknown((LOST,))


def test_commands_with_nothing_left_to_decide_are_marked_and_append_nothing() -> None:
    records = (
        *BEGUN,
        response("once", "once"),
        asked("1.0"),
        decided("1.0", "approved"),
        prepared("1.0"),
        settled("1.0"),
    )
    found = decide(*records, verdict_intents={"e1.0/1": "applied"}, approval_intents=["apr1.0"])
    assert found == AppendIntents(moot=("e1.0/1", "apr1.0"))
    cancelled = decide(*records, CancelRequested(S, "a", "b"), cancel_intent=True)
    assert cancelled == AppendIntents(moot=("cancel",))


def test_a_settled_run_takes_a_verdict_on_what_stayed_unknown_and_nothing_else() -> None:
    ended = SubmissionSettled(S, R, "failed", Failure("x", "x"), unknown=("e1.0/1",))
    records = (*BEGUN, response("once", "once"), asked("1.1"), prepared("1.0"), unknown("1.0"), ended)
    found = decide(
        *records,
        state=State.SETTLED,
        verdict_intents={"e1.0/1": "applied"},
        approval_intents=["apr1.1"],
        cancel_intent=True,
    )
    assert found == AppendIntents(verdicts=("e1.0/1",), moot=("apr1.1", "cancel"))
    assert decide(*records, state=State.SETTLED) == NoAction()


def test_a_settled_run_takes_a_verdict_on_a_model_call_that_stayed_unknown() -> None:
    ended = SubmissionSettled(S, R, "failed", Failure("x", "x"), unknown=("m1/1",))
    records = (*BEGUN, model_prepared(), model_unknown(), ended)
    found = decide(*records, state=State.SETTLED, verdict_intents={"m1/1": "applied"})
    assert found == AppendIntents(verdicts=("m1/1",))
    audited = (*records, model_verdict("applied", result=Raw(b'"Paid."')))
    assert decide(*audited, state=State.SETTLED) == NoAction()


def test_a_cancel_before_the_input_reaches_the_run() -> None:
    thread = folded(CREATED, CancelRequested(S, "ada", "no"), INPUT, STARTED)
    assert thread.runs[R].cancel is not None


# -- precedence -------------------------------------------------------------------------------------------------------

STAGES = (
    "ledger settled", "log settled", "reserved", "no thread", "no marker", "completed", "cancel intent",
    "cancelled", "deadline", "in flight", "pending batch",
)  # fmt: skip
EXPECTED: dict[str, type] = {
    "ledger settled": NoAction,
    "log settled": FinalizeLedgerFromHistory,
    "reserved": AppendReservedSettlement,
    "no thread": CompleteMaterialization,
    "no marker": RepairInputMarker,
    "completed": CompleteFromHistory,
    "cancel intent": AppendIntents,
    "cancelled": SettleCancelled,
    "deadline": FailDuration,
    "in flight": MarkUnknown,
    "pending batch": ResumePendingBatch,
}


def _evidence(stages: frozenset[str]) -> Evidence:
    records: list[Record] = list(BEGUN)
    tools = [name for stage, name in (("in flight", "once"), ("pending batch", "observe")) if stage in stages]
    records.append(response(*tools))
    if "in flight" in stages:
        records.append(prepared("1.0"))
    if "completed" in stages:
        records.append(completed())
    run = folded(*records).runs[R]
    return Evidence(
        state=State.SETTLED if "ledger settled" in stages
        else State.ADMITTED if "no thread" in stages
        else State.INPUT_APPLIED,
        input_marker=None if stages & {"no marker", "no thread"} else MARKER,
        reservation="reserved" in stages,
        settlement=SETTLED if "log settled" in stages else None,
        run=run,
        cancelled="cancelled" in stages,
        cancel_intent="cancel intent" in stages,
        thread_created="no thread" not in stages,
        contracts=TOOLS,
        past_deadline="deadline" in stages,
    )  # fmt: skip


def test_every_combination_of_evidence_obeys_the_one_order() -> None:
    for bits in itertools.product((False, True), repeat=len(STAGES)):
        stages = frozenset(itertools.compress(STAGES, bits))
        expected = next((EXPECTED[stage] for stage in STAGES if stage in stages), FinishFromResponse)
        if expected is FinalizeLedgerFromHistory and "reserved" in stages:
            expected = FinalizeReserved
        if expected is NoAction and "cancel intent" in stages:
            expected = AppendIntents  # moot, so that it stops waking a worker
        assert type(classify(_evidence(stages))) is expected, sorted(stages)


def test_unknown_outranks_approval_and_both_outrank_the_rest_of_a_batch_that_cannot_go_on() -> None:
    records = (*BEGUN, response("once", "once"), prepared("1.0"), unknown("1.0"), asked("1.1"))
    assert isinstance(decide(*records, contracts=TOOLS), AwaitUnknownResolution)


def test_a_suspended_run_with_an_undecided_approval_runs_nothing() -> None:
    records = (*BEGUN, response("once", "observe"), asked("1.0"))
    assert isinstance(decide(*records, state=State.SUSPENDED, contracts=TOOLS), AwaitApprovalDecision)


# -- total and deterministic ------------------------------------------------------------------------------------------

NAMES = [*TOOLS, "nope"]
CALLS = st.sampled_from(["1.0", "1.1", "1.2", "2.0"])
VERDICTS = ("applied", "refused", "not_applied", "safe_to_retry", "compensated", "cancel_run")
TOOL = st.sampled_from(list(TOOLS))


def _nope(position: int, turn: int) -> ToolOperation:
    return ToolOperation(f"{turn}.{position}", "nope", rejected=Failure("unknown_tool", "no"))


@st.composite
def _responses(draw: st.DrawFn) -> Record:
    turn = draw(st.integers(1, 2))
    names = draw(st.lists(st.sampled_from(NAMES), max_size=3))
    return response(*(_nope(i, turn) if n == "nope" else operation(i, n, turn) for i, n in enumerate(names)), turn=turn)


RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.just(INPUT),
    st.just(STARTED),
    _responses(),
    st.builds(prepared, CALLS, TOOL, st.integers(1, 3)),
    st.builds(unknown, CALLS, st.integers(1, 2)),
    st.builds(unknown, CALLS, step=st.just("pay")),
    st.builds(verdict, CALLS, st.sampled_from(VERDICTS), st.integers(1, 2)),
    st.builds(verdict, CALLS, st.sampled_from(VERDICTS), step=st.just("pay")),
    st.builds(step_prepared, st.just("pay"), st.integers(1, 2)),
    st.builds(lambda c: ToolStepSettled(R, c, "pay", Raw(b"1")), CALLS),
    st.builds(asked, CALLS),
    st.builds(decided, CALLS, st.sampled_from(("approved", "rejected", "expired"))),
    st.builds(settled, CALLS),
    st.builds(lambda c: ToolCallWithdrawn(R, c, Failure("rejected", "no")), CALLS),
    st.just(OutputRejected(R, 1, Failure("output", "no"))),
    st.builds(model_prepared, st.integers(1, 2), st.integers(1, 2)),
    st.builds(model_failed, st.integers(1, 2), st.integers(1, 2), st.sampled_from(("no", "yes", "unknown"))),
    st.builds(model_unknown, st.integers(1, 2), st.integers(1, 2)),
    st.builds(model_verdict, st.sampled_from(VERDICTS), st.integers(1, 2), st.integers(1, 2)),
    st.just(completed()),
    st.just(CancelRequested(S, "ada", "no")),
    st.just(SETTLED),
)


@st.composite
def threads(draw: st.DrawFn) -> fold.Thread:
    """A thread of those of the drawn records that can follow each other."""
    state = folded(CREATED, *draw(st.sampled_from([(), (INPUT,), (INPUT, STARTED)])))
    for record in draw(st.lists(RECORDS, max_size=24)):
        try:
            fold.apply(state, record)
        except Corrupt:
            continue
    return state


@st.composite
def evidence(draw: st.DrawFn) -> tuple[fold.Thread, dict[str, Any]]:
    thread = draw(threads())
    effects = [f"e{c}/{n}" for c in ("1.0", "1.1", "2.0") for n in ("1", "2", "pay")] + ["m1/1", "m2/1"]
    return thread, {
        "input_marker": draw(st.sampled_from([None, 2, 2, 2, 3])),
        "reservation": draw(st.sampled_from([False, False, True])),
        "cancel_intent": draw(st.booleans()),
        "thread_created": draw(st.sampled_from([True, True, False])),
        "verdict_intents": draw(st.dictionaries(st.sampled_from(effects), st.sampled_from(VERDICTS), max_size=3)),
        "approval_intents": draw(st.lists(st.sampled_from(["apr1.0", "apr1.1"]), unique=True)),
        "contracts": draw(st.sampled_from([None, TOOLS, CHANGED, NONE_LEFT])),
        "past_deadline": draw(st.booleans()),
        "attempts": draw(st.sampled_from([0, 1, ATTEMPTS_WITHOUT_PROGRESS_MAX])),
    }


@given(evidence(), st.sampled_from(list(State)))
def test_classify_is_total_and_deterministic(given_: tuple[fold.Thread, dict[str, Any]], state: State) -> None:
    thread, more = given_
    first = classify(gather(thread, S, R, state, **more))
    assert isinstance(first, typing.get_args(Decision))
    assert classify(gather(thread, S, R, state, **more)) == first
    assert first.meaning
    assert first.disposition in ("repaired", "deferred", "none", "unknown")


@given(evidence(), st.sampled_from([State.RUNNING, State.INPUT_APPLIED, State.UNKNOWN, State.SUSPENDED]))
def test_nothing_runs_without_its_own_contract_nor_over_a_doubt(
    given_: tuple[fold.Thread, dict[str, Any]], state: State
) -> None:
    thread, more = given_
    found = classify(gather(thread, S, R, state, **more))
    if not isinstance(found, ResumePendingBatch):
        return
    contracts, run = more["contracts"] or {}, thread.runs[R]
    assert run.settled is None
    assert run.cancel is None
    for plan in found.plans:
        planned = run.calls[plan.call]
        if isinstance(plan, Run | Rerun):
            assert contracts.get(planned.operation.tool) == planned.operation.contract
            assert not planned.closed
            assert not list(planned.unknowns())
            assert planned.approval is None or (planned.decision and planned.decision.decision == "approved")
        if isinstance(plan, Run):
            assert planned.prepared is None
        if isinstance(plan, Rerun) and planned.operation.effect == "once" and not planned.operation.steps:
            assert planned.verdict is not None
            assert planned.verdict.verdict in ("not_applied", "safe_to_retry")
        if isinstance(plan, RetireUnavailable) and plan.execution == "not-executed" and planned.prepared is not None:
            assert planned.verdict is not None
            assert planned.verdict.verdict == "not_applied"
        assert isinstance(plan, Reuse) == planned.closed


def _obey(thread: fold.Thread, found: Decision, more: dict[str, Any]) -> bool:
    """Do what a recovery pass without bindings would do in the log. False when it is left to somebody else."""
    new: list[Record] = []
    match found:
        case AppendIntents(verdicts=effects, approvals=approvals, cancel=cancel):
            for u in thread.runs[R].unknowns() if R in thread.runs else ():
                if u.effect not in effects:
                    continue
                said = more["verdict_intents"][u.effect]
                if isinstance(u, ModelCallUnknown):
                    new.append(ModelCallResolved(R, u.turn, u.effect, said, "ada", ""))
                else:
                    new.append(ToolCallResolved(R, u.call, u.effect, said, "ada", "", u.step))
            new += [decided(approval[3:], "approved") for approval in approvals]
            new += [CancelRequested(S, "ada", "no")] if cancel else []
            more["verdict_intents"] = {
                effect: said for effect, said in more["verdict_intents"].items()
                if effect not in (*effects, *found.moot)
            }  # fmt: skip
            more["approval_intents"] = [a for a in more["approval_intents"] if a not in (*approvals, *found.moot)]
            more["cancel_intent"] = False
        case MarkUnknown(doubts=lost):
            new += [unknown_record(thread.runs[R], d) for d in lost]
        case SettleCancelled(doubts=lost, requested=requested):
            new += [unknown_record(thread.runs[R], d) for d in lost]
            new += [] if requested else [CancelRequested(S, "ada", "no")]
            new.append(SubmissionSettled(S, R, "cancelled"))
        case FailDuration(doubts=lost):
            new += [unknown_record(thread.runs[R], d) for d in lost]
            new.append(SubmissionSettled(S, R, "failed", Failure("policy.duration", "late")))
        case CompleteFromHistory():
            new.append(SETTLED)
        case RepairInputMarker(sequence=sequence):
            more["input_marker"] = sequence
        case _:
            return False
    for record in new:
        fold.apply(thread, record)
    return True


@given(evidence(), st.sampled_from([State.RUNNING, State.INPUT_APPLIED, State.UNKNOWN, State.SUSPENDED]))
def test_what_a_decision_asks_for_can_be_recorded_and_comes_to_rest(
    given_: tuple[fold.Thread, dict[str, Any]], state: State
) -> None:
    thread, more = given_
    for _ in range(8):
        found = classify(gather(thread, S, R, state, **more))
        if not _obey(thread, found, more):
            return
    raise AssertionError(f"never at rest: {found}")


def test_every_decision_says_what_it_means() -> None:
    for kind in typing.get_args(Decision):
        assert kind.meaning.endswith((".", ")."))
        assert kind.disposition in ("repaired", "deferred", "none", "unknown")
