"""Facts about a thread and the submissions on it."""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.records.parts import Failure

Outcome = Literal["completed", "failed", "cancelled"]


class ThreadCreated(
    msgspec.Struct, frozen=True, tag="ThreadCreated/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """First record of every thread."""

    program: str


class UserInputRecorded(
    msgspec.Struct, frozen=True, tag="UserInputRecorded/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """The input of a submission entered the log; exactly once per submission."""

    submission: str
    run: str
    input: msgspec.Raw


class CancelRequested(
    msgspec.Struct, frozen=True, tag="CancelRequested/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """Somebody asked for the run to end. Written before anything in flight is interrupted."""

    submission: str
    by: str
    reason: str


class RepairAnnotated(
    msgspec.Struct, frozen=True, tag="RepairAnnotated/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """Recovery carried out a decision: audit of what it did and why."""

    submission: str
    decision: str
    reason: str


class SubmissionSettled(
    msgspec.Struct,
    frozen=True,
    tag="SubmissionSettled/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """The one terminal outcome of a submission.

    ``failure`` is present exactly when ``outcome`` is ``failed``; ``output_digest`` only when it is ``completed``.
    ``exhausted`` names the limit that was used up before the answer of a completed run: it was asked for its last one.
    """

    submission: str
    run: str
    outcome: Outcome
    failure: Failure | None = None
    output_digest: str | None = None
    disposition: str | None = None
    unknown: tuple[str, ...] = ()
    exhausted: str = ""

    def __post_init__(self) -> None:
        if (self.outcome == "failed") != (self.failure is not None):
            raise ValueError("a settlement has a failure exactly when its outcome is failed")
        if self.outcome != "completed" and (self.output_digest is not None or self.disposition is not None):
            raise ValueError("only a completed settlement has an output or a disposition")
