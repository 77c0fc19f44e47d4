"""Facts about one run: its limits, its turns, its end."""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.records.effect import Verdict
from perdure.records.parts import NO_CHARGE, NO_EVIDENCE, Charge, Evidence, Failure, Part, Usage

Dispatched = Literal["no", "yes", "unknown"]
"""Whether a model call surely never left, surely failed at the provider, or may have been served."""


class AcceptedLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """The policy a run was started under. Durations in microseconds, sizes in bytes, cost in micro-USD."""

    max_turns: int
    max_tool_calls: int
    max_duration: int
    concurrency: int
    repeated_failure_limit: int
    tool_result_bytes: int
    output_retries: int = 0
    token_budget: int | None = None
    cost_budget: int | None = None
    on_exhaustion: Literal["fail", "final-answer"] = "fail"
    model_calls: Literal["repeat", "once"] = "repeat"


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
    msgspec.Struct,
    frozen=True,
    tag="ModelCallPrepared/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """A model call of class ``once`` is about to be dispatched. Repeatable calls write none.

    ``attempt`` counts the tries of the turn from 1; ``key`` is given to the outside and the same for each of them;
    ``reserved`` is charged while the outcome is unknown.
    """

    run: str
    turn: int
    attempt: int
    request_digest: str
    effect: str = ""
    model: str = ""
    key: str = ""
    reserved: Charge = NO_CHARGE


class ModelResponseRecorded(
    msgspec.Struct,
    frozen=True,
    tag="ModelResponseRecorded/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """One complete response. It is usable only after this record.

    Attributes:
        cost: micro-USD by real usage at the price of version ``prices``; None without a price.
        effect: the effect it confirms, where the call was ``once``.
        final: the model was asked for its last answer, without tools, because ``final`` was used up.
        charged: its reservation, where the provider told no usage.
    """

    run: str
    turn: int
    model: str
    parts: tuple[Part, ...]
    finish: str
    usage: Usage = Usage()
    operations: tuple[ToolOperation, ...] = ()
    tries: int = 1
    continuation: msgspec.Raw = msgspec.Raw()
    evidence: Evidence = NO_EVIDENCE
    cost: int | None = None
    prices: str = ""
    effect: str = ""
    final: str = ""
    charged: Charge = NO_CHARGE


class ModelCallFailed(
    msgspec.Struct,
    frozen=True,
    tag="ModelCallFailed/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """One try of a model call gave no complete response.

    Attributes:
        attempt: tries of this turn, from 1.
        dispatched: ``no`` it never left, ``yes`` the provider answered with a failure, ``unknown`` it may have been
            served: then ``charged`` counts against the budgets.
        effect: the effect it refuses, where the call was ``once`` and the failure definite.
    """

    run: str
    turn: int
    attempt: int
    model: str
    dispatched: Dispatched
    failure: Failure
    evidence: Evidence = NO_EVIDENCE
    charged: Charge = NO_CHARGE
    effect: str = ""


class ModelCallUnknown(
    msgspec.Struct,
    frozen=True,
    tag="ModelCallUnknown/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """Nobody can say whether a ``once`` model call was served. The run waits for a verdict."""

    run: str
    turn: int
    effect: str
    model: str
    reason: str
    charged: Charge = NO_CHARGE
    evidence: Evidence = NO_EVIDENCE

    @property
    def call(self) -> str:
        """The place of the call, as effects name it."""
        return model_place(self.turn)

    @property
    def tool(self) -> str:
        """What was called."""
        return self.model

    @property
    def step(self) -> None:
        """A model call has no steps."""
        return


class ModelCallResolved(
    msgspec.Struct,
    frozen=True,
    tag="ModelCallResolved/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """A verdict on an unknown model call, by a person. ``result`` of ``applied`` is the text it answered."""

    run: str
    turn: int
    effect: str
    verdict: Verdict
    by: str
    reason: str
    result: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
    evidence: msgspec.Raw = msgspec.Raw(b"null")


class ModelResponseInterrupted(
    msgspec.Struct,
    frozen=True,
    tag="ModelResponseInterrupted/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """An earlier owner may have had a model call in flight; its charge may repeat. ``charged`` counts against budgets."""

    run: str
    turn: int
    superseded_epoch: int
    charged: Charge = NO_CHARGE


def model_place(turn: int) -> str:
    """Where the model call of a turn stands among a run's effects; no tool call has such a place."""
    return f"{turn}.model"


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
