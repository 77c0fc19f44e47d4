"""Write the stored history of this release: `python tests/histories/write.py > tests/histories/0.1/every_kind.hex`.

A history that a release has written is never written again: a new format gets a new folder, and every reader stays.
Each line is one batch body in hex. Together they hold every record kind, two handovers and every way to settle.
"""

from __future__ import annotations

from msgspec import Raw

from perdure.records import codec
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
from perdure.records.parts import CallPart, Failure, ReasoningPart, TextPart, Usage
from perdure.records.run import (
    AcceptedLimits,
    ModelCallPrepared,
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
from perdure.rules.recovery import result_digest

THREAD = "thread_golden"
DEADLINE = 1_800_000_000_000_000
ARGUMENTS = Raw(b'{"amount":"12.30","note":"caf\xc3\xa9"}')


def begin(run: str) -> list[codec.Record]:
    limits = AcceptedLimits(16, 64, 1_800_000_000, 4, 3, 51_200, output_retries=2, token_budget=100_000)
    return [
        UserInputRecorded(f"sub_{run}", f"run_{run}", Raw(b'{"text":"pay %b"}' % run.encode())),
        RunStarted(f"run_{run}", f"sub_{run}", "bank", "d" * 64, DEADLINE, limits, "You are a bank."),
    ]


def operation(call: str, tool: str, effect: str, **more: object) -> ToolOperation:
    return ToolOperation(call, tool, effect, contract=f"contract-{tool}", **more)  # type: ignore[arg-type]


def prepared(
    run: str, call: str, tool: str, effect: str, attempt: int = 1, business: str | None = None
) -> ToolCallPrepared:
    return ToolCallPrepared(
        f"run_{run}", call, f"eff_{run}_{call}_{attempt}", tool, effect, f"contract-{tool}", f"key_{run}_{call}",
        ARGUMENTS, "a" * 64, attempt, business,
    )  # fmt: skip


def unknown(run: str, call: str, tool: str) -> ToolCallUnknown:
    return ToolCallUnknown(f"run_{run}", call, f"eff_{run}_{call}_1", tool, "its owner vanished")


def response(run: str, turn: int, *operations: ToolOperation, text: str = "") -> ModelResponseRecorded:
    calls = tuple(CallPart(o.tool, '{"amount":"12.30"}', f"toolu_{o.call}") for o in operations)
    parts = (TextPart(text), *calls) if text else calls
    finish = "tool_calls" if operations else "stop"
    return ModelResponseRecorded(f"run_{run}", turn, "scripted:bank", parts, finish, Usage(10, 5), operations)


def finish(run: str, turn: int, output: bytes, disposition: str | None = None) -> list[codec.Record]:
    covers = result_digest(output, disposition)
    return [
        response(run, turn, text="Done."),
        RunCompleted(f"run_{run}", Raw(output), covers, disposition),
        SubmissionSettled(f"sub_{run}", f"run_{run}", "completed", None, covers, disposition),
    ]


def first_run() -> list[tuple[int, list[codec.Record]]]:
    a = "run_a"
    declared = ModelResponseRecorded(
        a,
        1,
        "scripted:bank",
        (
            ReasoningPart("Think.", "rs_1", "sig"),
            TextPart("I will pay."),
            CallPart("transfer", '{"amount":"12.30"}', "toolu_0"),
            CallPart("balance", "{}", "toolu_1"),
            CallPart("nope", "{", "toolu_2"),
            CallPart("notify", "{}", "toolu_3"),
            CallPart("load", "{}", "toolu_4"),
            CallPart("charge", "{}", "toolu_5"),
        ),
        "tool_calls",
        Usage(100, 20, 50, 10, 5),
        (
            operation("1.0", "transfer", "once"),
            operation("1.1", "balance", "observe"),
            ToolOperation("1.2", "nope", rejected=Failure("unknown_tool", "There is no tool 'nope'.")),
            operation("1.3", "notify", "keyed"),
            operation("1.4", "load", "once", steps=True),
            operation("1.5", "charge", "once"),
        ),
        2,
        Raw(b'{"kind":"response/1","id":"resp_1"}'),
    )
    return [
        (1, [ThreadCreated("bank"), *begin("a")]),
        (
            1,
            [
                declared,
                ToolApprovalRequested(a, "1.0", "apr_a", "transfer", "a" * 64, "moves money"),
                ToolCallWithdrawn(a, "1.2", Failure("unknown_tool", "There is no tool 'nope'.")),
            ],
        ),
        (
            1,
            [
                ToolCallSettled(a, "1.1", Raw(b"42")),
                prepared("a", "1.3", "notify", "keyed"),
                prepared("a", "1.4", "load", "once"),
                prepared("a", "1.5", "charge", "once", business="invoice-7"),
            ],
        ),
        (1, [ToolStepPrepared(a, "1.4", "upload", "eff_a_1.4_upload_1", "key_a_1.4_upload", 1)]),
        (1, [ToolStepRefused(a, "1.4", "upload", Failure("refused", "closed on Sundays"))]),
        (
            2,
            [
                RepairAnnotated("sub_a", "MarkUnknown", "charge was in flight"),
                unknown("a", "1.5", "charge"),
                ToolApprovalDecided(a, "1.0", "apr_a", "approved", "ada", "fine"),
            ],
        ),
        (2, [prepared("a", "1.3", "notify", "keyed", 2), prepared("a", "1.4", "load", "once", 2)]),
        (
            2,
            [
                prepared("a", "1.0", "transfer", "once"),
                ToolStepPrepared(a, "1.4", "upload", "eff_a_1.4_upload_2", "key_a_1.4_upload", 2),
            ],
        ),
        (
            2,
            [
                ToolCallSettled(a, "1.0", Raw(b'{"receipt":9007199254740993}')),
                ToolStepSettled(a, "1.4", "upload", Raw(b'"s3://x"')),
                ToolStepSettled(a, "1.4", "count", Raw(b"7")),
                ToolCallSettled(a, "1.4", Raw(b"7")),
                ToolCallSettled(a, "1.3", failure=Failure("refused", "no such address")),
            ],
        ),
        (
            2,
            [
                ToolCallResolved(
                    a,
                    "1.5",
                    "eff_a_1.5_1",
                    "applied",
                    "ada",
                    "in the books",
                    None,
                    Raw(b'"ok"'),
                    Raw(b'{"row":3}'),
                ),
                ToolCallSettled(a, "1.5", Raw(b'"ok"')),
            ],
        ),
        (2, [ModelCallPrepared(a, 2, 1, "b" * 64)]),
        (2, [response("a", 2, text="12"), OutputRejected(a, 2, Failure("output", "expected an object"))]),
        (3, [ModelResponseInterrupted(a, 3, 2), *finish("a", 3, b'{"paid":true}', "paid")]),
    ]


def other_runs() -> list[tuple[int, list[codec.Record]]]:
    charge = operation("1.0", "charge", "once")
    return [
        (3, [*begin("b"), response("b", 1, charge), prepared("b", "1.0", "charge", "once")]),
        (3, [unknown("b", "1.0", "charge")]),
        (4, [CancelRequested("sub_d", "ada", "not needed"), SubmissionSettled("sub_d", "run_d", "cancelled")]),
        (4, [*begin("c"), *finish("c", 1, b'"hello"')]),
        (
            4,
            [
                ToolCallResolved("run_b", "1.0", "eff_b_1.0_1", "not_applied", "probe", "no row"),
                prepared("b", "1.0", "charge", "once", 2),
            ],
        ),
        (4, [ToolCallSettled("run_b", "1.0", Raw(b"null")), *finish("b", 2, b"null")]),
        (4, [*begin("e"), response("e", 1, charge, operation("1.1", "balance", "observe"))]),
        (4, [prepared("e", "1.0", "charge", "once")]),
        (
            4,
            [
                CancelRequested("sub_e", "ada", "enough"),
                unknown("e", "1.0", "charge"),
                ToolCallWithdrawn("run_e", "1.1", Failure("cancelled", "The run was cancelled.")),
                SubmissionSettled("sub_e", "run_e", "cancelled", unknown=("eff_e_1.0_1",)),
            ],
        ),
        (
            4,
            [
                ToolCallResolved("run_e", "1.0", "eff_e_1.0_1", "refused", "ada", "never arrived"),
                RepairAnnotated("sub_e", "AppendIntents", "a verdict after the end"),
            ],
        ),
        (5, [*begin("f"), SubmissionSettled("sub_f", "run_f", "failed", Failure("policy.duration", "Too late."))]),
    ]


def bodies() -> list[bytes]:
    found: list[bytes] = []
    first = 1
    for epoch, records in first_run() + other_runs():
        at = 1_790_000_000_000_000 + first
        found.append(codec.encode(codec.Batch(1, THREAD, first, epoch, f"w_{epoch}", at, tuple(records))))
        first += len(records)
    return found


if __name__ == "__main__":
    for body in bodies():
        print(body.hex())
