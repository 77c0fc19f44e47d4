"""Each law has a twin: a history that breaks it, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from perdure.canonical import digest_raw
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
from perdure.records.parts import NO_CHARGE, Charge, Failure
from perdure.records.run import (
    ModelCallFailed,
    ModelCallPrepared,
    ModelCallResolved,
    ModelCallUnknown,
    ModelResponseInterrupted,
    ModelResponseRecorded,
    OutputRejected,
    RunCompleted,
    RunStarted,
)
from perdure.records.thread import CancelRequested, RepairAnnotated, SubmissionSettled, ThreadCreated, UserInputRecorded
from perdure.rules.invariants import BYTES_CHECKS, CHECKS, LEDGER_CHECKS, TRACE_CHECKS, Ledger, Report, Stored, check

GOLDEN = Path(__file__).resolve().parents[1] / "histories" / "0.1"
THREAD, MODELS = "thread_golden", "thread_models"


def bodies(name: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in (GOLDEN / f"{name}.hex").read_text(encoding="ascii").split()]


BODIES, MODEL_BODIES = bodies("every_kind"), bodies("model_calls")


# -- a history to break -----------------------------------------------------------------------------------------------


class History:
    """The healthy history as lists, so that a test can change one thing and chain it again."""

    def __init__(self, thread: str = THREAD, bodies: Sequence[bytes] = BODIES) -> None:
        self.thread = thread
        batches = [codec.decode(body) for body in bodies]
        self.epochs = [batch.epoch for batch in batches]
        self.records: list[list[Record]] = [list(batch.records) for batch in batches]

    def find(self, kind: type, **fields: Any) -> tuple[int, int]:
        """Where the first record of a kind with these fields is."""
        for b, records in enumerate(self.records):
            for i, record in enumerate(records):
                if type(record) is kind and all(getattr(record, name) == value for name, value in fields.items()):
                    return b, i
        raise LookupError((kind, fields))

    def change(self, kind: type, match: dict[str, Any], **fields: Any) -> None:
        b, i = self.find(kind, **match)
        self.records[b][i] = msgspec.structs.replace(self.records[b][i], **fields)

    def drop(self, kind: type, **fields: Any) -> Record:
        b, i = self.find(kind, **fields)
        return self.records[b].pop(i)

    def after(self, kind: type, match: dict[str, Any], *new: Record) -> None:
        b, i = self.find(kind, **match)
        self.records[b][i + 1 : i + 1] = new

    def before(self, kind: type, match: dict[str, Any], *new: Record) -> None:
        b, i = self.find(kind, **match)
        self.records[b][i:i] = new

    def stored(self) -> list[Stored]:
        found: list[Stored] = []
        first, tail = 1, codec.EMPTY_TAIL
        for epoch, records in zip(self.epochs, self.records, strict=True):
            body = codec.encode(Batch(1, self.thread, first, epoch, f"w_{epoch}", first, tuple(records)))
            tail = codec.chain(tail, body)
            found.append((first, first + len(records) - 1, epoch, tail, body, {}))
            first += len(records)
        return found


def stored(bodies: list[bytes]) -> list[Stored]:
    found: list[Stored] = []
    tail = codec.EMPTY_TAIL
    for body in bodies:
        batch, tail = codec.decode(body), codec.chain(tail, body)
        found.append((batch.first, batch.last, batch.epoch, tail, body, {}))
    return found


@dataclass(frozen=True)
class Submission:
    id: str
    position: int
    input_sequence: int | None
    outcome: str | None
    disposition: str | None = None
    failure: bytes | None = None
    state: str = "settled"
    program: str = "bank"

    @property
    def run(self) -> str:
        return "run_" + self.id[4:]

    @property
    def input_digest(self) -> str:
        return digest_raw(b'{"text":"pay %b"}' % self.run.encode()[4:])


@dataclass(frozen=True)
class Effect:
    id: str
    run: str
    call: str
    operation: str
    effect_class: str
    key: str
    status: str
    sequence: int
    tries: int = 1
    verdict: str | None = None
    step: str | None = None
    business_key: str | None = None
    kind: str = "external_mutate"

    @property
    def submission(self) -> str:
        return "sub_" + self.run[4:]


@dataclass(frozen=True)
class Approval:
    id: str
    run: str
    call: str
    tool: str
    digest: str
    status: str


FAILED = json.dumps({"kind": "policy.duration", "message": "Too late."}).encode()
SUBMISSIONS = {
    row.id: row
    for row in (
        Submission("sub_a", 1, 2, "completed", "paid"),
        Submission("sub_b", 2, 34, "completed"),
        Submission("sub_c", 3, 41, "completed"),
        Submission("sub_d", 4, None, "cancelled"),
        Submission("sub_e", 5, 52, "cancelled"),
        Submission("sub_f", 6, 62, "failed", failure=FAILED),
    )
}
EFFECTS = {
    row.id: row
    for row in (
        Effect("eff_a_1.0_1", "run_a", "1.0", "transfer", "once", "key_a_1.0", "confirmed", 18),
        Effect("eff_a_1.3_1", "run_a", "1.3", "notify", "keyed", "key_a_1.3", "unknown", 8, verdict="declared"),
        Effect("eff_a_1.3_2", "run_a", "1.3", "notify", "keyed", "key_a_1.3", "refused", 16, 2),
        Effect("eff_a_1.4_1", "run_a", "1.4", "load", "once", "key_a_1.4", "started", 9),
        Effect("eff_a_1.4_2", "run_a", "1.4", "load", "once", "key_a_1.4", "confirmed", 17, 2),
        Effect("eff_a_1.4_upload_1", "run_a", "1.4", "load", "once", "key_a_1.4_upload", "refused", 11, step="upload"),
        Effect(
            "eff_a_1.4_upload_2", "run_a", "1.4", "load", "once", "key_a_1.4_upload", "confirmed", 19, 2, step="upload"
        ),
        Effect(
            "eff_a_1.5_1", "run_a", "1.5", "charge", "once", "key_a_1.5", "confirmed", 10, verdict="applied",
            business_key="invoice-7",
        ),
        Effect("eff_b_1.0_1", "run_b", "1.0", "charge", "once", "key_b_1.0", "refused", 37, verdict="not_applied"),
        Effect("eff_b_1.0_2", "run_b", "1.0", "charge", "once", "key_b_1.0", "confirmed", 47, 2),
        Effect("eff_e_1.0_1", "run_e", "1.0", "charge", "once", "key_e_1.0", "refused", 55, verdict="refused"),
    )
}  # fmt: skip
APPROVALS = {"apr_a": Approval("apr_a", "run_a", "1.0", "transfer", "a" * 64, "approved")}


def ledger(
    submissions: dict[str, Submission] = SUBMISSIONS,
    effects: dict[str, Effect] = EFFECTS,
    approvals: dict[str, Approval] = APPROVALS,
) -> Ledger:
    return Ledger(submissions.values(), effects.values(), approvals.values())


def statuses(report: Report) -> dict[str, str]:
    return {entry.name: entry.status for entry in report}


def failed(report: Report) -> list[str]:
    return [entry.name for entry in report.failed]


# -- healthy ----------------------------------------------------------------------------------------------------------


def test_a_healthy_history_passes_every_check() -> None:
    report = check(THREAD, stored(BODIES), ledger())
    assert [(c.name, c.detail) for c in report.failed] == []
    assert report
    assert statuses(report) == dict.fromkeys(CHECKS, "passed")


def test_without_a_ledger_its_checks_are_skipped_and_say_so() -> None:
    report = check(THREAD, stored(BODIES))
    assert report
    assert [(c.name, c.detail) for c in report if c.status == "skipped"] == [
        (name, "no ledger was given") for name in LEDGER_CHECKS
    ]


def test_an_empty_log_passes() -> None:
    assert check("t", [])
    assert check(
        "t",
        [],
        Ledger([replace(SUBMISSIONS["sub_a"], state="ready", outcome=None, disposition=None, input_sequence=None)]),
    )


def test_the_helper_of_this_file_changes_nothing_by_itself() -> None:
    assert check(THREAD, History().stored())


# -- one twin for each law of the log ---------------------------------------------------------------------------------

A = "run_a"


def _thread_created(h: History) -> None:
    h.after(RunStarted, {"run": A}, ThreadCreated("bank"))


def _no_thread_created(h: History) -> None:
    h.drop(ThreadCreated)


def _input_twice(h: History) -> None:
    h.after(RunStarted, {"run": A}, UserInputRecorded("sub_a", A, Raw(b"1")))


def _input_late(h: History) -> None:
    started = h.drop(RunStarted, run="run_f")
    h.before(UserInputRecorded, {"run": "run_f"}, started)


def _settled_twice(h: History) -> None:
    h.after(
        SubmissionSettled, {"submission": "sub_c"}, SubmissionSettled("sub_c", "run_c", "failed", Failure("x", "x"))
    )


def _after_settlement(h: History) -> None:
    h.after(SubmissionSettled, {"submission": "sub_c"}, OutputRejected("run_c", 1, Failure("output", "late")))


def _result_after_settlement(h: History) -> None:
    h.after(
        ToolCallResolved, {"run": "run_e"}, ToolCallSettled("run_e", "1.0", failure=Failure("refused", "never arrived"))
    )


def _cancel_after_settlement(h: History) -> None:
    h.after(SubmissionSettled, {"submission": "sub_c"}, CancelRequested("sub_c", "ada", "late"))


def _deadline_moves(h: History) -> None:
    b, i = h.find(RunStarted, run=A)
    h.after(RunStarted, {"run": A}, msgspec.structs.replace(h.records[b][i], deadline=1))


def _turn_skipped(h: History) -> None:
    h.change(ModelResponseRecorded, {"run": "run_b", "turn": 2}, turn=3)


def _next_turn_too_early(h: History) -> None:
    settled = h.drop(ToolCallSettled, run=A, call="1.1")
    h.after(ModelResponseRecorded, {"run": A, "turn": 2}, settled)


def _prepared_undeclared(h: History) -> None:
    b, i = h.find(ToolCallPrepared, run=A, call="1.5")
    h.after(ToolCallPrepared, {"run": A, "call": "1.5"}, msgspec.structs.replace(h.records[b][i], call="1.9"))


def _prepared_closed(h: History) -> None:
    b, i = h.find(ToolCallPrepared, run=A, call="1.3", attempt=2)
    h.after(ToolCallSettled, {"run": A, "call": "1.3"}, msgspec.structs.replace(h.records[b][i], attempt=3))


def _two_results(h: History) -> None:
    h.after(ToolCallSettled, {"run": A, "call": "1.3"}, ToolCallSettled(A, "1.3", Raw(b"1")))


def _result_and_withdrawal(h: History) -> None:
    h.after(ToolCallSettled, {"run": A, "call": "1.1"}, ToolCallWithdrawn(A, "1.1", Failure("cancelled", "no")))


def _step_twice(h: History) -> None:
    h.after(ToolStepSettled, {"run": A, "step": "count"}, ToolStepSettled(A, "1.4", "count", Raw(b"8")))


def _step_outside(h: History) -> None:
    h.before(ToolCallPrepared, {"run": A, "call": "1.4"}, ToolStepSettled(A, "1.4", "early", Raw(b"1")))


def _step_refused_late(h: History) -> None:
    h.after(ToolStepSettled, {"run": A, "step": "upload"}, ToolStepRefused(A, "1.4", "upload", Failure("x", "x")))


def _undecided(h: History) -> None:
    h.drop(ToolApprovalDecided)


def _rejected_and_run(h: History) -> None:
    h.change(ToolApprovalDecided, {}, decision="rejected")


def _decided_unasked(h: History) -> None:
    h.drop(ToolApprovalRequested)


def _asked_after_start(h: History) -> None:
    asked, decided = h.drop(ToolApprovalRequested), h.drop(ToolApprovalDecided)
    h.after(ToolCallPrepared, {"run": A, "call": "1.0"}, asked, decided)


def _once_twice(h: History) -> None:
    b, i = h.find(ToolCallPrepared, run=A, call="1.0")
    again = msgspec.structs.replace(h.records[b][i], attempt=2, effect="eff_a_1.0_2")
    h.after(ToolCallPrepared, {"run": A, "call": "1.0"}, again)


def _once_without_verdict(h: History) -> None:
    h.drop(ToolCallResolved, run="run_b")


def _once_after_applied(h: History) -> None:
    h.change(ToolCallResolved, {"run": "run_b"}, verdict="applied")


def _keyed_over_unknown(h: History) -> None:
    h.after(
        ToolCallPrepared,
        {"run": A, "call": "1.3", "attempt": 1},
        ToolCallUnknown(A, "1.3", "eff_a_1.3_1", "notify", "vanished"),
    )


def _step_once_twice(h: History) -> None:
    b, i = h.find(ToolStepRefused)
    h.records[b][i] = RepairAnnotated("sub_a", "none", "instead of the refusal")


def _key_changes(h: History) -> None:
    h.change(ToolCallPrepared, {"run": A, "call": "1.3", "attempt": 2}, key="key_new")


def _step_key_changes(h: History) -> None:
    h.change(ToolStepPrepared, {"run": A, "attempt": 2}, key="key_new")


def _unknown_unstarted(h: History) -> None:
    h.after(ModelResponseRecorded, {"run": A, "turn": 1}, ToolCallUnknown(A, "1.0", "eff_a_1.0_1", "transfer", "?"))


def _unknown_of_another_try(h: History) -> None:
    h.after(
        ToolCallPrepared,
        {"run": A, "call": "1.3", "attempt": 2},
        ToolCallUnknown(A, "1.3", "eff_a_1.3_1", "notify", "?"),
    )


def _verdict_unasked(h: History) -> None:
    h.after(
        ToolCallPrepared,
        {"run": A, "call": "1.3", "attempt": 2},
        ToolCallResolved(A, "1.3", "eff_a_1.3_2", "applied", "ada", "guess"),
    )


def _verdict_twice(h: History) -> None:
    b, i = h.find(ToolCallResolved, run="run_e")
    h.after(ToolCallResolved, {"run": "run_e"}, msgspec.structs.replace(h.records[b][i], verdict="applied"))


def _cancelled_unasked(h: History) -> None:
    h.drop(CancelRequested, submission="sub_e")


def _in_flight_at_the_end(h: History) -> None:
    h.drop(ToolCallUnknown, run="run_e")
    h.drop(ToolCallResolved, run="run_e")
    h.change(SubmissionSettled, {"submission": "sub_e"}, unknown=())


def _not_withdrawn(h: History) -> None:
    h.drop(ToolCallWithdrawn, run="run_e")


def _unknown_not_listed(h: History) -> None:
    h.change(SubmissionSettled, {"submission": "sub_e"}, unknown=())


def _listed_and_known(h: History) -> None:
    h.change(SubmissionSettled, {"submission": "sub_c"}, unknown=("eff_c_1.0_1",))


def _output_digest(h: History) -> None:
    h.change(SubmissionSettled, {"submission": "sub_c"}, output_digest="0" * 64)


def _disposition(h: History) -> None:
    h.change(SubmissionSettled, {"submission": "sub_a"}, disposition="refunded")


def _result_digest(h: History) -> None:
    h.change(RunCompleted, {"run": "run_c"}, output=Raw(b'"other"'))


def _completed_without_output(h: History) -> None:
    h.drop(RunCompleted, run="run_c")


def _failed_with_output(h: History) -> None:
    h.change(
        SubmissionSettled, {"submission": "sub_c"}, outcome="failed", failure=Failure("x", "x"), output_digest=None
    )


def _only_the_fold_refuses(h: History) -> None:
    h.change(OutputRejected, {"run": A}, turn=1)


def _epoch_falls(h: History) -> None:
    h.epochs[-1] = 3


def _run_not_derived(h: History) -> None:
    for kind in (UserInputRecorded, RunStarted, SubmissionSettled):
        h.change(kind, {"run": "run_f"}, run="run_other")


def _call_not_derived(h: History) -> None:
    b, i = h.find(ModelResponseRecorded, run="run_b", turn=1)
    response = h.records[b][i]
    assert isinstance(response, ModelResponseRecorded)
    moved = msgspec.structs.replace(response.operations[0], call="toolu_1")
    h.records[b][i] = msgspec.structs.replace(response, operations=(moved,))
    for records in h.records:
        for j, record in enumerate(records):
            if getattr(record, "run", "") == "run_b" and hasattr(record, "call"):
                records[j] = msgspec.structs.replace(record, call="toolu_1")


TWINS: list[tuple[str, Callable[[History], None]]] = [
    ("epoch-order", _epoch_falls),
    ("record-identity", _run_not_derived),
    ("record-identity", _call_not_derived),
    ("thread-created", _thread_created),
    ("thread-created", _no_thread_created),
    ("input-first", _input_twice),
    ("input-first", _input_late),
    ("one-settlement", _settled_twice),
    ("nothing-after-settlement", _after_settlement),
    ("nothing-after-settlement", _result_after_settlement),
    ("nothing-after-settlement", _cancel_after_settlement),
    ("deadline-constant", _deadline_moves),
    ("turn-order", _turn_skipped),
    ("batch-complete", _next_turn_too_early),
    ("calls-declared", _prepared_undeclared),
    ("calls-declared", _prepared_closed),
    ("one-result", _two_results),
    ("one-result", _result_and_withdrawal),
    ("steps-inside", _step_outside),
    ("one-step-result", _step_twice),
    ("one-step-result", _step_refused_late),
    ("decided-before-prepared", _undecided),
    ("decided-before-prepared", _rejected_and_run),
    ("decided-before-prepared", _decided_unasked),
    ("decided-before-prepared", _asked_after_start),
    ("once-dispatch", _once_twice),
    ("once-dispatch", _once_without_verdict),
    ("once-dispatch", _once_after_applied),
    ("once-dispatch", _keyed_over_unknown),
    ("once-dispatch", _step_once_twice),
    ("key-stable", _key_changes),
    ("key-stable", _step_key_changes),
    ("unknown-of-started", _unknown_unstarted),
    ("unknown-of-started", _unknown_of_another_try),
    ("verdict-of-unknown", _verdict_unasked),
    ("verdict-of-unknown", _verdict_twice),
    ("cancel-requested", _cancelled_unasked),
    ("ends-known", _in_flight_at_the_end),
    ("ends-known", _not_withdrawn),
    ("unknown-listed", _unknown_not_listed),
    ("unknown-listed", _listed_and_known),
    ("output-agrees", _output_digest),
    ("output-agrees", _disposition),
    ("output-agrees", _result_digest),
    ("output-agrees", _completed_without_output),
    ("output-agrees", _failed_with_output),
    ("folds", _only_the_fold_refuses),
]


# -- model calls ------------------------------------------------------------------------------------------------------

G, H = "run_g", "run_h"


def _model(h: History, run: str, turn: int) -> ModelCallPrepared:
    b, i = h.find(ModelCallPrepared, run=run, turn=turn)
    record = h.records[b][i]
    assert isinstance(record, ModelCallPrepared)
    return record


def _again(h: History, run: str, turn: int) -> ModelCallPrepared:
    return msgspec.structs.replace(_model(h, run, turn), effect="eff_again", attempt=2)


def _asked_while_in_flight(h: History) -> None:
    h.before(ModelCallPrepared, {"run": G, "turn": 1}, _again(h, G, 1))


def _asked_while_unknown(h: History) -> None:
    h.drop(ModelCallResolved, run="run_k")


def _asked_after_applied(h: History) -> None:
    h.change(ModelCallResolved, {"run": "run_k"}, verdict="applied")


def _asked_over_an_open_batch(h: History) -> None:
    settled = h.drop(ToolCallSettled, run=G)
    h.after(ModelCallPrepared, {"run": G, "turn": 2}, settled)


def _asked_for_another_turn(h: History) -> None:
    h.change(ModelCallPrepared, {"run": "run_k", "attempt": 2}, turn=2)


def _failed_at_another_turn(h: History) -> None:
    h.change(ModelCallFailed, {"run": H, "attempt": 1}, turn=2)


def _interrupted_at_another_turn(h: History) -> None:
    h.change(ModelResponseInterrupted, {"run": H}, turn=2)


def _model_key_changes(h: History) -> None:
    h.change(ModelCallPrepared, {"run": "run_k", "attempt": 2}, key="key_new")


def _response_of_another_call(h: History) -> None:
    h.change(ModelResponseRecorded, {"run": G, "turn": 1}, effect="eff_other")


def _response_without_its_call(h: History) -> None:
    h.change(ModelResponseRecorded, {"run": G, "turn": 1}, effect="")


def _response_never_asked_for(h: History) -> None:
    h.drop(ModelCallPrepared, run=G, turn=1)
    h.change(ModelResponseRecorded, {"run": G, "turn": 1}, effect="")


def _repeatable_response_with_an_effect(h: History) -> None:
    h.change(ModelResponseRecorded, {"run": H}, effect="eff_h_1.model_1")


def _response_over_an_unknown(h: History) -> None:
    h.change(ModelCallResolved, {"run": G, "verdict": "applied"}, verdict="safe_to_retry")


def _failure_of_another_call(h: History) -> None:
    h.change(ModelCallFailed, {"run": G}, effect="eff_g_1.model_1")


def _unknown_failure_of_a_once_call(h: History) -> None:
    h.change(ModelCallFailed, {"run": G}, dispatched="unknown")


def _definite_failure_charged(h: History) -> None:
    h.change(ModelCallFailed, {"run": H, "attempt": 2}, charged=Charge(1, 1))


def _unknown_charged_less(h: History) -> None:
    h.change(ModelCallUnknown, {"run": "run_j"}, charged=NO_CHARGE)


def _charged_beside_its_usage(h: History) -> None:
    h.change(ModelResponseRecorded, {"run": H}, charged=Charge(1, 1))


def _charged_twice(h: History) -> None:
    h.change(ModelResponseRecorded, {"run": G, "turn": 2}, charged=Charge(1, 1))


def _cost_without_prices(h: History) -> None:
    h.change(ModelResponseRecorded, {"run": H}, prices="")


def _doubted_twice(h: History) -> None:
    b, i = h.find(ModelCallUnknown, run="run_i")
    h.after(ModelCallUnknown, {"run": "run_i"}, h.records[b][i])


def _doubted_another_call(h: History) -> None:
    h.before(ModelCallUnknown, {"run": "run_i"}, ModelCallUnknown("run_i", 1, "eff_other", "gpt", "?"))


def _doubted_at_another_turn(h: History) -> None:
    h.before(ModelCallUnknown, {"run": "run_i"}, ModelCallUnknown("run_i", 2, "eff_i_1.model_1", "gpt", "?"))


def _verdict_on_a_call_in_flight(h: History) -> None:
    h.before(ModelCallUnknown, {"run": "run_j"}, ModelCallResolved("run_j", 1, "eff_j_1.model_1", "applied", "a", ""))


def _second_verdict_on_a_call(h: History) -> None:
    b, i = h.find(ModelCallResolved, run="run_j")
    h.after(ModelCallResolved, {"run": "run_j"}, h.records[b][i])


def _model_call_in_flight_at_the_end(h: History) -> None:
    h.drop(ModelCallUnknown, run="run_j")
    b, i = h.find(ModelCallResolved, run="run_j")
    h.records[b][i] = RepairAnnotated("sub_j", "none", "instead of the verdict")
    h.change(SubmissionSettled, {"submission": "sub_j"}, unknown=())


def _unknown_model_call_not_listed(h: History) -> None:
    h.change(SubmissionSettled, {"submission": "sub_j"}, unknown=())


def _model_call_after_settlement(h: History) -> None:
    h.after(ModelCallResolved, {"run": "run_j"}, _again(h, "run_j", 1))


def _failure_after_settlement(h: History) -> None:
    failed = ModelCallFailed("run_j", 1, 2, "gpt", "no", Failure("model", "late"))
    h.after(ModelCallResolved, {"run": "run_j"}, failed)


MODEL_TWINS: list[tuple[str, Callable[[History], None]]] = [
    ("one-model-call", _asked_while_in_flight),
    ("one-model-call", _asked_while_unknown),
    ("one-model-call", _asked_after_applied),
    ("batch-complete", _asked_over_an_open_batch),
    ("turn-order", _asked_for_another_turn),
    ("turn-order", _failed_at_another_turn),
    ("turn-order", _interrupted_at_another_turn),
    ("key-stable", _model_key_changes),
    ("model-outcome", _response_of_another_call),
    ("model-outcome", _response_without_its_call),
    ("model-outcome", _response_never_asked_for),
    ("model-outcome", _repeatable_response_with_an_effect),
    ("model-outcome", _response_over_an_unknown),
    ("model-outcome", _failure_of_another_call),
    ("model-outcome", _unknown_failure_of_a_once_call),
    ("model-charges", _definite_failure_charged),
    ("model-charges", _unknown_charged_less),
    ("model-charges", _charged_beside_its_usage),
    ("model-charges", _charged_twice),
    ("model-charges", _cost_without_prices),
    ("unknown-of-started", _doubted_twice),
    ("unknown-of-started", _doubted_another_call),
    ("unknown-of-started", _doubted_at_another_turn),
    ("verdict-of-unknown", _verdict_on_a_call_in_flight),
    ("verdict-of-unknown", _second_verdict_on_a_call),
    ("ends-known", _model_call_in_flight_at_the_end),
    ("unknown-listed", _unknown_model_call_not_listed),
    ("nothing-after-settlement", _model_call_after_settlement),
    ("nothing-after-settlement", _failure_after_settlement),
]


@pytest.mark.parametrize(("name", "twin"), MODEL_TWINS, ids=[twin.__name__.strip("_") for _, twin in MODEL_TWINS])
def test_the_twin_of_a_law_of_model_calls_fails_that_law_and_no_other(
    name: str, twin: Callable[[History], None]
) -> None:
    history = History(MODELS, MODEL_BODIES)
    twin(history)
    report = check(MODELS, history.stored())
    assert [(c.name, c.detail) for c in report.failed if c.name != name] == []
    assert failed(report) == [name]


@pytest.mark.parametrize(("name", "twin"), TWINS, ids=[twin.__name__.strip("_") for _, twin in TWINS])
def test_the_twin_of_a_law_fails_that_law_and_no_other(name: str, twin: Callable[[History], None]) -> None:
    history = History()
    twin(history)
    report = check(THREAD, history.stored())
    assert failed(report) == [name]
    assert not report
    assert next(c.detail for c in report.failed)


# -- the bytes --------------------------------------------------------------------------------------------------------


def _gap(found: list[Stored]) -> None:
    first, last, epoch, _, body, _ = found[-1]
    moved = codec.encode(msgspec.structs.replace(codec.decode(body), first=first + 1))
    found[-1] = (first + 1, last + 1, epoch, codec.chain(found[-2][3], moved), moved, {})


def _rechained(found: list[Stored], at: int, body: bytes) -> None:
    first, last, epoch, _, _, _ = found[at]
    found[at] = (first, last, epoch, codec.chain(found[at - 1][3], body), body, {})


def _tail_altered(found: list[Stored]) -> None:
    first, last, epoch, tail, body, _ = found[4]
    found[4] = (first, last, epoch, tail[:-1] + bytes([tail[-1] ^ 1]), body, {})


def _unknown_kind(found: list[Stored]) -> None:
    _rechained(found, -1, found[-1][4].replace(b'"RunStarted/1"', b'"RunStarted/2"'))


def _other_thread(found: list[Stored]) -> None:
    _rechained(found, -1, codec.encode(msgspec.structs.replace(codec.decode(found[-1][4]), thread="thread_other")))


def _other_epoch_in_the_row(found: list[Stored]) -> None:
    first, last, epoch, tail, body, _ = found[-1]
    found[-1] = (first, last, epoch + 1, tail, body, {})


BYTE_TWINS: list[tuple[str, Callable[[list[Stored]], None]]] = [
    ("sequence-contiguity", _gap),
    ("digest-chain", _tail_altered),
    ("schema-round-trip", _unknown_kind),
    ("record-identity", _other_thread),
    ("record-identity", _other_epoch_in_the_row),
]


@pytest.mark.parametrize(("name", "twin"), BYTE_TWINS, ids=[twin.__name__.strip("_") for _, twin in BYTE_TWINS])
def test_the_twin_of_a_law_of_bytes_fails_that_law_and_no_other(
    name: str, twin: Callable[[list[Stored]], None]
) -> None:
    found = stored(BODIES)
    twin(found)
    report = check(THREAD, found, ledger())
    assert failed(report) == [name]


def test_what_cannot_be_read_is_not_judged() -> None:
    found = stored(BODIES)
    _unknown_kind(found)
    seen = statuses(check(THREAD, found, ledger()))
    assert {seen[name] for name in (*TRACE_CHECKS, *LEDGER_CHECKS)} == {"skipped"}


@given(st.integers(0, len(BODIES) - 1), st.integers(0, 10**6), st.integers(1, 255))
def test_no_byte_can_change_unseen(batch: int, offset: int, mask: int) -> None:
    found = stored(BODIES)
    first, last, epoch, tail, body, _ = found[batch]
    at = offset % len(body)
    found[batch] = (first, last, epoch, tail, body[:at] + bytes([body[at] ^ mask]) + body[at + 1 :], {})
    assert not check(THREAD, found, ledger())


def test_every_byte_of_a_batch_counts() -> None:
    found = stored(BODIES)[:2]
    first, last, epoch, tail, body, _ = found[1]
    for at in range(len(body)):
        found[1] = (first, last, epoch, tail, body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :], {})
        assert not check(THREAD, found)


@given(st.integers(0, len(BODIES) - 2), st.sampled_from(["drop", "swap", "repeat"]))
def test_no_batch_can_move_unseen(at: int, how: str) -> None:
    found = stored(BODIES)
    if how == "drop":
        del found[at]
    elif how == "swap":
        found[at], found[at + 1] = found[at + 1], found[at]
    else:
        found.insert(at, found[at])
    assert not check(THREAD, found)


# -- the ledger beside it ---------------------------------------------------------------------------------------------


def _row(table: dict[str, Any], id: str, **fields: Any) -> dict[str, Any]:
    return {**table, id: replace(table[id], **fields)}


def _without(table: dict[str, Any], id: str) -> dict[str, Any]:
    return {key: row for key, row in table.items() if key != id}


SUBMISSION_TWINS: list[tuple[str, str, dict[str, Submission]]] = [
    ("ledger-input", "marker elsewhere", _row(SUBMISSIONS, "sub_a", input_sequence=3)),
    ("ledger-input", "marker missing", _row(SUBMISSIONS, "sub_a", input_sequence=None)),
    ("ledger-input", "marker of nothing", _row(SUBMISSIONS, "sub_d", input_sequence=40)),
    ("ledger-input", "row missing", _without(SUBMISSIONS, "sub_d")),
    ("ledger-settlement", "still open", _row(SUBMISSIONS, "sub_a", state="running", outcome=None)),
    ("ledger-settlement", "other outcome", _row(SUBMISSIONS, "sub_f", outcome="cancelled", failure=None)),
    ("ledger-settlement", "other disposition", _row(SUBMISSIONS, "sub_a", disposition=None)),
    ("ledger-settlement", "other failure", _row(SUBMISSIONS, "sub_f", failure=b'{"kind":"model","message":"x"}')),
    ("ledger-settlement", "failure unreadable", _row(SUBMISSIONS, "sub_f", failure=b"{")),
    (
        "ledger-settlement",
        "settled by the ledger alone",
        {**SUBMISSIONS, "sub_g": Submission("sub_g", 7, None, "completed")},
    ),
    (
        "ledger-settlement",
        "outcome while open",
        {**SUBMISSIONS, "sub_g": Submission("sub_g", 7, None, "completed", state="ready")},
    ),
    ("fifo-input-order", "order", _row(_row(SUBMISSIONS, "sub_e", position=6), "sub_f", position=5)),
]


@pytest.mark.parametrize(
    ("name", "rows"), [(n, rows) for n, _, rows in SUBMISSION_TWINS], ids=[what for _, what, _ in SUBMISSION_TWINS]
)
def test_a_submission_row_that_disagrees(name: str, rows: dict[str, Submission]) -> None:
    assert failed(check(THREAD, stored(BODIES), ledger(submissions=rows))) == [name]


def test_a_run_that_nobody_owes_needs_no_row_while_every_place_of_the_queue_has_one() -> None:
    """The run of a persistent thread is in its log only."""
    renumbered = [replace(row, position=n) for n, row in enumerate(_without(SUBMISSIONS, "sub_c").values(), 1)]
    assert check(THREAD, stored(BODIES), Ledger(renumbered, EFFECTS.values(), APPROVALS.values(), 5))
    assert check(THREAD, stored(BODIES), Ledger(SUBMISSIONS.values(), EFFECTS.values(), APPROVALS.values(), 6))
    without = Ledger(_without(SUBMISSIONS, "sub_c").values(), EFFECTS.values(), APPROVALS.values(), 6)
    assert failed(check(THREAD, stored(BODIES), without)) == ["ledger-input"]


def test_an_input_may_only_pass_parked_work() -> None:
    history = History()
    history.drop(ToolCallUnknown, run="run_b")
    history.drop(ToolCallResolved, run="run_b")
    history.drop(ToolCallPrepared, run="run_b", attempt=2)
    report = check(THREAD, history.stored(), Ledger(SUBMISSIONS.values()))
    assert next(c.status for c in report if c.name == "fifo-input-order") == "failed"


def test_the_input_admitted_is_the_input_recorded() -> None:
    history = History()
    history.change(UserInputRecorded, {"run": "run_f"}, input=Raw(b'{"text":"pay g"}'))
    assert failed(check(THREAD, history.stored(), ledger())) == ["ledger-input"]


EFFECT_TWINS: list[tuple[str, dict[str, Effect]]] = [
    ("missing", _without(EFFECTS, "eff_a_1.0_1")),
    ("invented", {**EFFECTS, "eff_x": Effect("eff_x", A, "1.0", "transfer", "once", "k", "started", 1)}),
    ("other status", _row(EFFECTS, "eff_a_1.0_1", status="refused")),
    ("verdict lost", _row(EFFECTS, "eff_e_1.0_1", verdict=None)),
    ("unknown forgotten", _row(EFFECTS, "eff_b_1.0_1", status="unknown", verdict=None)),
    ("other key", _row(EFFECTS, "eff_a_1.0_1", key="k")),
    ("other place", _row(EFFECTS, "eff_a_1.0_1", sequence=17)),
    ("other call", _row(EFFECTS, "eff_a_1.0_1", call="1.1")),
    ("other run", _row(EFFECTS, "eff_b_1.0_2", run="run_c")),
    ("other class", _row(EFFECTS, "eff_a_1.0_1", effect_class="keyed")),
    ("other business key", _row(EFFECTS, "eff_a_1.5_1", business_key=None)),
    ("other try", _row(EFFECTS, "eff_a_1.3_2", tries=1)),
    ("step lost", _row(EFFECTS, "eff_a_1.4_upload_2", step=None)),
    ("superseded and confirmed", _row(EFFECTS, "eff_a_1.3_1", status="confirmed")),
]


@pytest.mark.parametrize("rows", [rows for _, rows in EFFECT_TWINS], ids=[what for what, _ in EFFECT_TWINS])
def test_an_effect_row_that_disagrees(rows: dict[str, Effect]) -> None:
    assert failed(check(THREAD, stored(BODIES), ledger(effects=rows))) == ["ledger-effects"]


def model_effect(run: str, turn: int, attempt: int, status: str, sequence: int, verdict: str | None = None) -> Effect:
    place = f"{turn}.model"
    return Effect(
        f"eff_{run}_{place}_{attempt}", f"run_{run}", place, "openai:gpt-5.6", "once", f"key_{run}_{place}", status,
        sequence, attempt, verdict, kind="model",
    )  # fmt: skip


MODEL_EFFECTS = {
    row.id: row
    for row in (
        model_effect("g", 1, 1, "confirmed", 4),
        replace(EFFECTS["eff_b_1.0_2"], id="eff_g_1.0_1", run="run_g", key="key_g_1.0", sequence=6, tries=1),
        model_effect("g", 2, 1, "refused", 8),
        model_effect("g", 2, 2, "unknown", 10, "safe_to_retry"),
        model_effect("g", 2, 3, "confirmed", 23, "applied"),
        model_effect("i", 1, 1, "refused", 27, "refused"),
        model_effect("j", 1, 1, "confirmed", 33, "applied"),
        model_effect("k", 1, 1, "refused", 40, "not_applied"),
        model_effect("k", 1, 2, "confirmed", 43),
        model_effect("l", 1, 1, "unknown", 49, "cancel_run"),
    )
}
MODEL_SUBMISSIONS = {
    row.id: row
    for row in (
        Submission("sub_g", 1, 2, "completed"),
        Submission("sub_h", 2, 13, "completed"),
        Submission("sub_i", 3, 25, "failed", failure=b'{"kind":"model","message":"the account was closed"}'),
        Submission("sub_j", 4, 31, "cancelled"),
        Submission("sub_k", 5, 38, "completed"),
        Submission("sub_l", 6, 47, "cancelled"),
    )
}
MODEL_EFFECT_TWINS: list[tuple[str, dict[str, Effect]]] = [
    ("missing", _without(MODEL_EFFECTS, "eff_g_1.model_1")),
    ("of a repeatable call", {**MODEL_EFFECTS, "eff_h": replace(model_effect("h", 1, 1, "unknown", 15), id="eff_h")}),
    ("confirmed by nobody", _row(MODEL_EFFECTS, "eff_g_2.model_2", status="confirmed", verdict=None)),
    ("refusal forgotten", _row(MODEL_EFFECTS, "eff_g_2.model_1", status="unknown")),
    ("verdict lost", _row(MODEL_EFFECTS, "eff_j_1.model_1", status="unknown", verdict=None)),
    ("another model", _row(MODEL_EFFECTS, "eff_g_1.model_1", operation="other")),
    ("another class", _row(MODEL_EFFECTS, "eff_g_1.model_1", effect_class="idempotent")),
    ("another kind", _row(MODEL_EFFECTS, "eff_g_1.model_1", kind="network")),
    ("another place", _row(MODEL_EFFECTS, "eff_g_1.model_1", call="2.model")),
    ("another key", _row(MODEL_EFFECTS, "eff_g_1.model_1", key="key")),
    ("another try", _row(MODEL_EFFECTS, "eff_g_2.model_3", tries=1)),
]


def test_healthy_model_calls_pass_every_check() -> None:
    report = check(MODELS, stored(MODEL_BODIES), ledger(MODEL_SUBMISSIONS, MODEL_EFFECTS, {}))
    assert [(c.name, c.detail) for c in report.failed] == []
    assert statuses(report) == dict.fromkeys(CHECKS, "passed")


@pytest.mark.parametrize("rows", [rows for _, rows in MODEL_EFFECT_TWINS], ids=[what for what, _ in MODEL_EFFECT_TWINS])
def test_a_row_of_a_model_call_that_disagrees(rows: dict[str, Effect]) -> None:
    report = check(MODELS, stored(MODEL_BODIES), ledger(MODEL_SUBMISSIONS, rows, {}))
    assert failed(report) == ["ledger-effects"]


APPROVAL_TWINS: list[tuple[str, dict[str, Approval]]] = [
    ("missing", {}),
    ("invented", {**APPROVALS, "apr_x": replace(APPROVALS["apr_a"], id="apr_x")}),
    ("undecided", _row(APPROVALS, "apr_a", status="pending")),
    ("rejected", _row(APPROVALS, "apr_a", status="rejected")),
    ("other arguments", _row(APPROVALS, "apr_a", digest="b" * 64)),
]


@pytest.mark.parametrize("rows", [rows for _, rows in APPROVAL_TWINS], ids=[what for what, _ in APPROVAL_TWINS])
def test_an_approval_row_that_disagrees(rows: dict[str, Approval]) -> None:
    assert failed(check(THREAD, stored(BODIES), ledger(approvals=rows))) == ["ledger-approvals"]


def test_an_approval_that_nobody_can_decide_any_more_is_closed_in_the_ledger() -> None:
    history = History()
    asked = ToolApprovalRequested("run_e", "1.1", "apr_e", "balance", "c" * 64, "why")
    history.before(ToolCallPrepared, {"run": "run_e"}, asked)
    rows = {**APPROVALS, "apr_e": Approval("apr_e", "run_e", "1.1", "balance", "c" * 64, "rejected")}
    effects = {
        id: replace(row, sequence=row.sequence + 1) if row.run == "run_e" else row for id, row in EFFECTS.items()
    }
    submissions = _row(SUBMISSIONS, "sub_f", input_sequence=63)
    assert check(THREAD, history.stored(), ledger(submissions, effects, rows))
    open_still = _row(rows, "apr_e", status="pending")
    assert failed(check(THREAD, history.stored(), ledger(submissions, effects, open_still))) == ["ledger-approvals"]


# -- nothing is left without a twin -----------------------------------------------------------------------------------


def test_every_check_has_a_twin() -> None:
    twinned = (
        {name for name, _ in TWINS + MODEL_TWINS}
        | {name for name, _ in BYTE_TWINS}
        | {n for n, _, _ in SUBMISSION_TWINS}
    )
    elsewhere = {"tasks-once", "tasks-ended", "task-digests"}  # tests/workflows/test_flow.py
    assert twinned | elsewhere | {"ledger-effects", "ledger-approvals"} == set(CHECKS)
    assert set(CHECKS) == set(BYTES_CHECKS) | set(TRACE_CHECKS) | set(LEDGER_CHECKS)


def test_the_detail_names_the_place_and_counts_the_rest() -> None:
    history = History()
    _two_results(history)
    history.after(ToolCallSettled, {"run": A, "call": "1.1"}, ToolCallSettled(A, "1.1", Raw(b"1")))
    [found] = check(THREAD, history.stored()).failed
    assert found.detail == "record 8: call 1.1 of run 'run_a' has a second result (and 1 more)"
