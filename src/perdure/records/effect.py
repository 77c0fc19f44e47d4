"""Facts about touches of the world: tool calls, their steps, approvals and verdicts.

ToolCallPrepared is the effect's *started* record, ToolCallSettled its *confirmed* or *refused*, ToolCallUnknown its
*unknown*, ToolCallWithdrawn says it was never dispatched, ToolCallResolved is a *verdict*. ``step`` on the last two
names a ``once`` step inside the call.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.records.parts import Failure

Verdict = Literal["applied", "refused", "not_applied", "safe_to_retry", "compensated", "cancel_run"]
Decision = Literal["approved", "rejected", "expired"]


class ToolApprovalRequested(
    msgspec.Struct, frozen=True, tag="ToolApprovalRequested/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """A person is asked; the whole footprint of a suspension. ``digest`` covers the exact arguments."""

    run: str
    call: str
    approval: str
    tool: str
    digest: str
    reason: str


class ToolApprovalDecided(
    msgspec.Struct, frozen=True, tag="ToolApprovalDecided/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """The decision, canonical before work resumes."""

    run: str
    call: str
    approval: str
    decision: Decision
    by: str
    reason: str


class ToolCallPrepared(
    msgspec.Struct,
    frozen=True,
    tag="ToolCallPrepared/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """A call is about to be dispatched. ``attempt`` counts tries from 1; ``key`` is given to the outside."""

    run: str
    call: str
    effect: str
    tool: str
    effect_class: str
    contract: str
    key: str
    arguments: msgspec.Raw
    arguments_digest: str
    attempt: int = 1
    business_key: str | None = None


class ToolStepPrepared(
    msgspec.Struct, frozen=True, tag="ToolStepPrepared/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """A ``once`` step is about to be dispatched."""

    run: str
    call: str
    step: str
    effect: str
    key: str
    attempt: int


REMOTE_NOTE = "remote"
"""The step in which a workflow's effect names the work elsewhere it became: then it may be gone on with, by asking."""


class ToolStepSettled(
    msgspec.Struct, frozen=True, tag="ToolStepSettled/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """A step succeeded; recorded once, read ever after."""

    run: str
    call: str
    step: str
    result: msgspec.Raw


class ToolStepRefused(
    msgspec.Struct, frozen=True, tag="ToolStepRefused/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """A ``once`` step definitely did not take place; it may be tried again."""

    run: str
    call: str
    step: str
    failure: Failure


class ToolCallSettled(
    msgspec.Struct,
    frozen=True,
    tag="ToolCallSettled/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """The terminal result of a call: a value, or a failure the model may read."""

    run: str
    call: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None


class ToolCallWithdrawn(
    msgspec.Struct, frozen=True, tag="ToolCallWithdrawn/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """The call was never dispatched (rejected, cancelled before start, tool gone, limit)."""

    run: str
    call: str
    failure: Failure


class ToolCallUnknown(
    msgspec.Struct,
    frozen=True,
    tag="ToolCallUnknown/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """Nobody can say whether the effect took place. It does not close the call."""

    run: str
    call: str
    effect: str
    tool: str
    reason: str
    step: str | None = None


class ToolCallResolved(
    msgspec.Struct,
    frozen=True,
    tag="ToolCallResolved/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """A verdict on an unknown, by a person or a probe. Appended; it rewrites nothing."""

    run: str
    call: str
    effect: str
    verdict: Verdict
    by: str
    reason: str
    step: str | None = None
    result: msgspec.Raw = msgspec.Raw(b"null")
    evidence: msgspec.Raw = msgspec.Raw(b"null")
