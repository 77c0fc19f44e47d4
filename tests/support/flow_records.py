"""Records of a workflow's thread from literals: tests take them apart, and a stored history is made of them."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from perdure.canonical import digest
from perdure.ids import effect_id, run_id
from perdure.records.artifact import ArtifactRef
from perdure.records.codec import Record
from perdure.records.effect import ToolApprovalDecided, ToolApprovalRequested, ToolCallPrepared, ToolCallSettled
from perdure.records.parts import Failure, TextPart, Usage
from perdure.records.run import AcceptedLimits, ModelCallPrepared, ModelResponseRecorded, RunCompleted, RunStarted
from perdure.records.task import (
    PROGRAM,
    BudgetDenied,
    BudgetRaised,
    TaskRetryScheduled,
    TaskSettled,
    TaskStarted,
    TaskWaiting,
    WorkflowStarted,
)
from perdure.records.thread import SubmissionSettled, ThreadCreated, UserInputRecorded
from perdure.rules.recovery import result_digest

THREAD = "thread_flow"
SUB = "sub_flow"
RUN = run_id(SUB)
PART = f"{RUN}.judge.1"
DEADLINE = 1_800_000_000_000_000
OUTPUT = Raw(b'{"verdict":"ok"}')
DELTA = Raw(b'{"formatVersion":1,"set":{"seen":1},"remove":["old"]}')
NO = Failure("exit", "cat exited with 1.")


def _digest(raw: Raw) -> str:
    return digest(msgspec.json.decode(raw))


def prepared(attempt: int) -> ToolCallPrepared:
    """A try of the effect of task ``save``."""
    effect = effect_id(RUN, "save", attempt, 1, "builtin.write", "a" * 64)
    return ToolCallPrepared(
        RUN,
        "save",
        effect,
        "builtin.write",
        "idempotent",
        "f" * 64,
        "key_save",
        Raw(b'{"path":"x"}'),
        "a" * 64,
        attempt,
    )


CREATED = ThreadCreated(PROGRAM)
INPUT = UserInputRecorded(SUB, RUN, Raw(b'{"workflow":"flow","plan":"p","workspace":"/w"}'))
STARTED = WorkflowStarted(
    RUN,
    SUB,
    "flow",
    "p" * 64,
    DEADLINE,
    "/w",
    Raw(b'{"seen":0,"old":true}'),
    Raw(b'{"provider_requests":2}'),
    "run_first",
    1,
)
SKIPPED = TaskSettled(
    RUN, "no", "skipped", 0, Raw(b'{"reason":"when condition was false"}'), decision=Raw(b'{"result":false}'),
    output_digest=_digest(Raw(b'{"reason":"when condition was false"}')),
)  # fmt: skip
ASKED = ToolApprovalRequested(RUN, "save", "apr_save", "builtin.write", "a" * 64, "approval: mutations")
DECIDED = ToolApprovalDecided(RUN, "save", "apr_save", "approved", "ada", "good")
SAVE = TaskStarted(RUN, "save", 1, "builtin.write", "idempotent", "f" * 64)
FAILED = ToolCallSettled(RUN, "save", failure=NO)
RETRY = TaskRetryScheduled(RUN, "save", 1, NO, 5, 12)
SAVE_AGAIN = TaskStarted(RUN, "save", 2, "builtin.write", "idempotent", "f" * 64)
WROTE = ToolCallSettled(RUN, "save", Raw(b'{"path":"x"}'))
SAVED = TaskSettled(
    RUN, "save", "succeeded", 2, Raw(b'{"path":"x"}'), definition="f" * 64, contract="c" * 64, input_digest="i" * 64,
    output_digest=_digest(Raw(b'{"path":"x"}')), artifacts=(ArtifactRef("x", "sha256:" + "0" * 64, 3, "text/plain", "x"),),
    printed=3,
)  # fmt: skip
WAIT = TaskStarted(RUN, "wait", 1, "builtin.wait", "pure")
WAITING = TaskWaiting(RUN, "wait", 77)
WAITED = ToolCallSettled(RUN, "wait")
MARK = TaskSettled(
    RUN,
    "wait",
    "succeeded",
    1,
    Raw(b"null"),
    delta=DELTA,
    delta_digest=_digest(DELTA),
    output_digest=_digest(Raw(b"null")),
)
JUDGE = TaskStarted(RUN, "judge", 1, "agent", definition="g" * 64, agent=PART)
PART_INPUT = UserInputRecorded(SUB, PART, Raw(b'"judge it"'))
PART_STARTED = RunStarted(
    PART, SUB, "writer", "d" * 64, DEADLINE, AcceptedLimits(8, 16, 1, 1, 0, 51_200, model_calls="once"), "Be brief."
)
PART_ASKED = ModelCallPrepared(PART, 1, 1, "q" * 64, "eff_model", "fake:m", "key_model")
PART_SAID = ModelResponseRecorded(
    PART, 1, "fake:m", (TextPart('{"verdict":"ok"}'),), "stop", Usage(3, 2), effect="eff_model"
)
PART_DONE = RunCompleted(PART, OUTPUT, result_digest(OUTPUT, None))
JUDGED = TaskSettled(RUN, "judge", "succeeded", 1, OUTPUT, output_digest=_digest(OUTPUT))
DENIED = BudgetDenied(RUN, "more", "provider_requests", 2, 2, 1)
RAISED = BudgetRaised(RUN, "ada", "it is worth it", Raw(b'{"provider_requests":4}'))
BAD = TaskSettled(RUN, "more", "failed", 1, failure=Failure("budget", "provider_requests"))
DONE = RunCompleted(RUN, OUTPUT, result_digest(OUTPUT, None))
ENDED = SubmissionSettled(SUB, RUN, "completed", None, result_digest(OUTPUT, None))

BATCHES: tuple[tuple[Record, ...], ...] = (
    (CREATED, INPUT, STARTED),
    (SKIPPED,),
    (SAVE, ASKED),
    (DECIDED,),
    (prepared(1),),
    (FAILED, RETRY),
    (SAVE_AGAIN, prepared(2)),
    (WROTE, SAVED, WAIT, WAITING),
    (WAITED, MARK, JUDGE),
    (PART_INPUT, PART_STARTED, PART_ASKED),
    (PART_SAID, PART_DONE),
    (JUDGED,),
    (TaskStarted(RUN, "more", 1, "agent", agent=f"{RUN}.more.1"), DENIED, RAISED, BAD),
    (DONE, ENDED),
)
RECORDS: tuple[Record, ...] = tuple(record for batch in BATCHES for record in batch)
