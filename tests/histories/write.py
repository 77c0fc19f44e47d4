"""Write a stored history of this release: `python tests/histories/write.py NAME > tests/histories/0.1/NAME.hex`.

A history that a release has written is never written again: a new format gets a new folder, and every reader stays.
Each line is one batch body in hex. ``every_kind`` holds the kinds of the first day, two handovers and every way to
settle; ``model_calls`` holds what became of model calls since then, ``workflow`` a run of a workflow: together they hold
every kind.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec import Raw
from msgspec.structs import replace

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
from perdure.records.parts import (
    NO_CHARGE,
    NO_EVIDENCE,
    CallPart,
    Charge,
    Evidence,
    Failure,
    ReasoningPart,
    TextPart,
    Usage,
)
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
from perdure.rules.recovery import result_digest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support import flow_records

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


# -- model calls ------------------------------------------------------------------------------------------------------

MODEL = "openai:gpt-5.6"
PRICES = "2026-11"
RESERVED = Charge(1_200, 4_096, 43_960, PRICES)
BUSY = Failure("model.rate_limit", "Rate limit reached.")
GONE = "it was started, and its owner vanished before an outcome was recorded"
SEEN = Evidence("c" * 64, "d" * 64, "req_011", 200)


def ask(run: str, turn: int, attempt: int = 1) -> ModelCallPrepared:
    place = f"{turn}.model"
    return ModelCallPrepared(
        f"run_{run}", turn, attempt, "b" * 64, f"eff_{run}_{place}_{attempt}", MODEL, f"key_{run}_{place}", RESERVED
    )  # fmt: skip


def lost(asked: ModelCallPrepared, reason: str = GONE, seen: Evidence = NO_EVIDENCE) -> ModelCallUnknown:
    return ModelCallUnknown(asked.run, asked.turn, asked.effect, asked.model, reason, asked.reserved, seen)


def failed(asked: ModelCallPrepared) -> ModelCallFailed:
    seen = Evidence("c" * 64, "e" * 64, "req_010", 429)
    return ModelCallFailed(asked.run, asked.turn, asked.attempt, MODEL, "yes", BUSY, seen, effect=asked.effect)


def verdict(asked: ModelCallPrepared, said: str, **more: object) -> ModelCallResolved:
    return ModelCallResolved(asked.run, asked.turn, asked.effect, said, "ada", "the provider's log", **more)  # type: ignore[arg-type]


def answered(record: ModelResponseRecorded, **more: object) -> ModelResponseRecorded:
    told = {"model": MODEL, "usage": Usage(1_100, 80, 1_000, 50, 30), "evidence": SEEN, "cost": 5_090, "prices": PRICES}
    return replace(record, **{**told, **more})


def ended(run: str, turn: int, output: bytes, exhausted: str = "", **more: object) -> list[codec.Record]:
    response, completed, settled = finish(run, turn, output)
    assert isinstance(response, ModelResponseRecorded)
    assert isinstance(settled, SubmissionSettled)
    return [answered(response, **more), completed, replace(settled, exhausted=exhausted)]


def once(run: str) -> list[codec.Record]:
    received, started = begin(run)
    assert isinstance(started, RunStarted)
    limits = replace(started.limits, model_calls="once", cost_budget=1_000_000, on_exhaustion="final-answer")
    return [received, replace(started, limits=limits)]


def model_calls() -> list[tuple[int, list[codec.Record]]]:
    charge = operation("1.0", "charge", "once")
    first, second, third, fourth = ask("g", 1), ask("g", 2), ask("g", 2, 2), ask("g", 2, 3)
    i, j, k, again, given_up = ask("i", 1), ask("j", 1), ask("k", 1), ask("k", 1, 2), ask("l", 1)
    unsure = ModelCallFailed(
        "run_h", 1, 1, MODEL, "unknown", Failure("model", "The connection was lost."), Evidence("c" * 64), RESERVED
    )  # fmt: skip
    stale = replace(
        unsure, attempt=2, dispatched="no", failure=Failure("model.continuation", "No such response."), charged=NO_CHARGE
    )  # fmt: skip
    stopped = replace(unsure, attempt=3, failure=Failure("cancelled", "The call was interrupted."))
    return [
        (1, [ThreadCreated("bank"), *once("g"), first]),
        (1, [answered(response("g", 1, charge), effect=first.effect), prepared("g", "1.0", "charge", "once")]),
        (1, [ToolCallSettled("run_g", "1.0", Raw(b"7")), second]),
        (1, [failed(second), third]),
        (2, [lost(third), RepairAnnotated("sub_g", "MarkUnknown", "its model call was in flight")]),
        (3, [*begin("h"), unsure, stale, stopped]),
        (4, [ModelResponseInterrupted("run_h", 1, 3, RESERVED), *ended("h", 1, b'"h"', "turns", final="turns")]),
        (5, [verdict(third, "safe_to_retry"), fourth]),
        (5, [lost(fourth, "ReadTimeout", Evidence("c" * 64, status=200))]),
        (6, [*once("i"), i]),
        (6, [lost(i)]),
        (7, [verdict(i, "refused", failure=Failure("model", "the account was closed"))]),
        (7, [SubmissionSettled("sub_i", "run_i", "failed", Failure("model", "the account was closed"))]),
        (7, [*once("j"), j]),
        (
            7,
            [
                CancelRequested("sub_j", "ada", "enough"),
                lost(j, "its run ended while it was in flight"),
                SubmissionSettled("sub_j", "run_j", "cancelled", unknown=(j.effect,)),
            ],
        ),
        (7, [verdict(j, "applied", result=Raw(b'"too late"'), evidence=Raw(b'{"invoice":3}'))]),
        (7, [*once("k"), k]),
        (7, [lost(k), verdict(k, "not_applied"), again]),
        (7, ended("k", 1, b'"k"', effect=again.effect, usage=Usage(), cost=None, prices="", charged=RESERVED)),
        (7, [*once("l"), given_up]),
        (7, [lost(given_up), verdict(given_up, "cancel_run"), CancelRequested("sub_l", "ada", "give up")]),
        (7, [SubmissionSettled("sub_l", "run_l", "cancelled")]),
        (8, [verdict(fourth, "applied", result=Raw(b'"Done."'))]),
        (
            8,
            ended(
                "g",
                2,
                b'"Done."',
                effect=fourth.effect,
                usage=Usage(),
                cost=None,
                prices="",
                evidence=NO_EVIDENCE,
                tries=0,
            ),
        ),
    ]


HISTORIES = {
    "every_kind": (THREAD, lambda: first_run() + other_runs()),
    "model_calls": ("thread_models", model_calls),
    "workflow": (flow_records.THREAD, lambda: [(1, list(batch)) for batch in flow_records.BATCHES]),
}


def bodies(name: str) -> list[bytes]:
    thread, batches = HISTORIES[name]
    found: list[bytes] = []
    first = 1
    for epoch, records in batches():
        at = 1_790_000_000_000_000 + first
        found.append(codec.encode(codec.Batch(1, thread, first, epoch, f"w_{epoch}", at, tuple(records))))
        first += len(records)
    return found


if __name__ == "__main__":
    for body in bodies(sys.argv[1]):
        print(body.hex())
