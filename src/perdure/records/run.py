"""Facts about one run: its limits, its turns, its end."""

from __future__ import annotations

import msgspec

from perdure.records.parts import Failure, Part, Usage


class AcceptedLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """The policy a run was started under. Durations in microseconds, sizes in bytes."""

    max_turns: int
    max_tool_calls: int
    max_duration: int
    concurrency: int
    repeated_failure_limit: int
    tool_result_bytes: int
    output_retries: int = 0
    token_budget: int | None = None


class RunStarted(
    msgspec.Struct,
    frozen=True,
    tag="RunStarted/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """A run began. The absolute deadline (microseconds since 1970) is frozen here, whatever attempts follow.

    ``instructions`` are the text as evaluated then; a later change of the definition does not reach a started run.
    """

    run: str
    submission: str
    program: str
    definition: str
    deadline: int
    limits: AcceptedLimits
    instructions: str = ""


class ToolOperation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """The contract one call was declared under; it governs the call however the tools change later.

    Attributes:
        call: the call's place, ``turn.position``.
        tool: tool name.
        effect: effect class; empty when the call names no usable tool.
        steps: whether the tool divides its effect into steps.
        contract: replay contract digest (name, schemas, class, kind, version).
        rejected: why this call can never run (unknown tool, broken arguments, repeated id); none for a good call.
    """

    call: str
    tool: str
    effect: str = ""
    steps: bool = False
    contract: str = ""
    rejected: Failure | None = None


class ModelCallPrepared(
    msgspec.Struct, frozen=True, tag="ModelCallPrepared/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """A model call of class ``once`` is about to be dispatched. Repeatable calls write none."""

    run: str
    turn: int
    attempt: int
    request_digest: str


class ModelResponseRecorded(
    msgspec.Struct,
    frozen=True,
    tag="ModelResponseRecorded/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """One complete response. It is usable only after this record."""

    run: str
    turn: int
    model: str
    parts: tuple[Part, ...]
    finish: str
    usage: Usage = Usage()
    operations: tuple[ToolOperation, ...] = ()
    tries: int = 1
    continuation: msgspec.Raw = msgspec.Raw()


class ModelResponseInterrupted(
    msgspec.Struct,
    frozen=True,
    tag="ModelResponseInterrupted/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
):
    """An earlier owner may have had a model call in flight; its charge may repeat."""

    run: str
    turn: int
    superseded_epoch: int


class OutputRejected(
    msgspec.Struct, frozen=True, tag="OutputRejected/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """A final answer did not decode to the output type; the model was told why."""

    run: str
    turn: int
    failure: Failure


class RunCompleted(
    msgspec.Struct,
    frozen=True,
    tag="RunCompleted/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """The output and disposition, authoritative over any later codec. ``result_digest`` covers both."""

    run: str
    output: msgspec.Raw
    result_digest: str
    disposition: str | None = None
