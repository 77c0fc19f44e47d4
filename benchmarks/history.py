"""A settled history of a given size, encoded and chained as the engine does: runs with one once call each."""

from __future__ import annotations

import msgspec

from perdure import canonical, ids
from perdure.records import codec, effect, parts, run, thread
from perdure.rules.recovery import result_digest

_LIMITS = run.AcceptedLimits(16, 64, 1_800_000_000, 4, 3, 51_200)
_RESULT = msgspec.Raw(b'{"ok":true,"n":1,"text":"' + b"x" * 40 + b'"}')


def _run(number: int) -> list[list[codec.Record]]:
    submission = ids.derive("sub", number)
    name = ids.run_id(submission)
    digest = canonical.digest({"number": number})
    call = parts.CallPart("once", '{"number":1}', "call_1_0")
    output = msgspec.Raw(b'"done"')
    operation = run.ToolOperation("1.0", "once", "once", False, digest)
    covered = result_digest(output, None)
    return [
        [
            thread.UserInputRecorded(submission, name, msgspec.Raw(b'"go"')),
            run.RunStarted(name, submission, "agent", digest, 2_000_000_000, _LIMITS),
        ],
        [
            run.ModelResponseRecorded(
                name, 1, "scripted", (call,), "tool_calls", parts.Usage(10, 5), (operation,), 1, msgspec.Raw(b"null")
            ),
            effect.ToolCallPrepared(
                name, "1.0", ids.derive("eff", number), "once", "once", digest, ids.derive("key", number),
                msgspec.Raw(b'{"number":1}'), digest,
            ),
        ],
        [effect.ToolCallSettled(name, "1.0", _RESULT)],
        [
            run.ModelResponseRecorded(
                name, 2, "scripted", (parts.TextPart("done"),), "stop", parts.Usage(20, 1), (), 1, msgspec.Raw(b"null")
            )
        ],
        [
            run.RunCompleted(name, output, covered),
            thread.SubmissionSettled(submission, name, "completed", None, covered),
        ],
    ]  # fmt: skip


def settled_history(name: str, size: int) -> list[bytes]:
    """Bodies of the batches of thread ``name``: at least ``size`` records, all runs settled."""
    bodies: list[bytes] = []
    sequence, number = 0, 0
    first: list[list[codec.Record]] = [[thread.ThreadCreated("agent")]]
    while sequence < size:
        for records in [*first, *_run(number)]:
            batch = codec.Batch(1, name, sequence + 1, 1, "w_bench", 1_700_000_000_000_000, tuple(records))
            bodies.append(codec.encode(batch))
            sequence += len(records)
        first = []
        number += 1
    return bodies
