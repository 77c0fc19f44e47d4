"""What to do with one call of a run that goes on: its records and today's contract of its tool in, one plan out. Pure.

Nothing here authorizes execution unless today's replay contract of a tool is the one its call was declared under.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Literal

import msgspec

from perdure.limits import ATTEMPTS_WITHOUT_PROGRESS_MAX
from perdure.records.effect import REMOTE_NOTE, ToolCallPrepared, ToolCallResolved, ToolCallUnknown
from perdure.records.parts import Failure
from perdure.records.run import ModelCallUnknown, model_place
from perdure.rules import fold
from perdure.rules.lifecycle import EffectClass

Execution = Literal["not-executed", "unavailable"]


class Missing(Enum):
    """The contract of a tool that today's definition does not have."""

    MISSING = "missing"


MISSING = Missing.MISSING
Contract = str | Missing | None
"""Today's replay contract of a call's tool; ``MISSING`` when the tool is gone; None when no binding is at hand."""


class Doubt(msgspec.Struct, frozen=True):
    """A started effect without outcome, as it is to be recorded unknown unless a probe answers."""

    call: str
    effect: str
    tool: str
    reason: str
    step: str | None = None


class Run(msgspec.Struct, frozen=True):
    """No try is recorded and the contract is the same: dispatch. For pure and observe that proves no absence of one."""

    call: str


class Rerun(msgspec.Struct, frozen=True):
    """A try is recorded and another is authorized, with the same key. ``steps``: re-enter, recorded steps are read."""

    call: str
    why: Literal["pure", "observe", "idempotent", "keyed", "steps", "not_applied", "safe_to_retry"]
    steps: bool = False


class Reuse(msgspec.Struct, frozen=True):
    """It has a canonical result or was withdrawn: nothing to do."""

    call: str


class Inject(msgspec.Struct, frozen=True):
    """A canonical verdict decides the result (applied, refused, compensated): settle with it, run nothing."""

    call: str
    verdict: ToolCallResolved


class Withdraw(msgspec.Struct, frozen=True):
    """It may never be dispatched (refused at preflight, approval not given): record that, run nothing."""

    call: str
    failure: Failure


class RetireUnavailable(msgspec.Struct, frozen=True):
    """Its tool is gone or changed: answer it as unavailable, run nothing.

    ``not-executed`` is proven (its class requires a started record and there is none, or a verdict says not applied);
    ``unavailable`` claims nothing.
    """

    call: str
    execution: Execution


class NeedsProbe(msgspec.Struct, frozen=True):
    """Started, and nobody may say what happened: ask the probe if there is one, else record each doubt unknown."""

    call: str
    doubts: tuple[Doubt, ...]


class AwaitDecision(msgspec.Struct, frozen=True):
    """Its approval was asked and is not decided in the log."""

    call: str
    approval: str


class AwaitVerdict(msgspec.Struct, frozen=True):
    """Of recorded unknown outcome, or held until every unknown of its batch has a verdict."""

    call: str
    effects: tuple[str, ...]


class AwaitBinding(msgspec.Struct, frozen=True):
    """It may go on, but only where its tool is at hand: leave it to a worker."""

    call: str


CallPlan = (
    Run
    | Rerun
    | Reuse
    | Inject
    | Withdraw
    | RetireUnavailable
    | NeedsProbe
    | AwaitDecision
    | AwaitVerdict
    | AwaitBinding
)
Advancing = Run | Rerun | Inject | Withdraw | RetireUnavailable | AwaitBinding

_CHANGED = "its tool was started under another contract than today's, or is gone"
_LOST = "it was started, and its owner vanished before an outcome was recorded"
_WORN = f"it was tried {ATTEMPTS_WITHOUT_PROGRESS_MAX} times and never came to an outcome"
_ENDED = "its run ended while it was in flight"


def effect_class(call: fold.Call) -> EffectClass:
    """The class a call was declared under; anything unreadable promises nothing."""
    try:
        return EffectClass(call.operation.effect)
    except ValueError:
        return EffectClass.ONCE


def requires_preparation(call: fold.Call) -> bool:
    """Whether dispatch of this call is always preceded by a started record: every effect of a workflow's task is."""
    return not call.turn or call.operation.steps or effect_class(call).prepared


def _same_contract(call: fold.Call, contract: Contract) -> bool:
    declared = call.operation.contract
    started = call.prepared is None or call.prepared.contract == declared
    return bool(declared) and contract == declared and started


def _step_doubts(call: fold.Call, reason: str) -> tuple[Doubt, ...]:
    return tuple(
        Doubt(call.id, step.prepared.effect, call.operation.tool, reason, name)
        for name, step in call.steps.items()
        if step.prepared is not None and step.unknown is None
    )


def doubts(call: fold.Call, reason: str = _ENDED) -> tuple[Doubt, ...]:
    """Every started effect of a call that has neither outcome nor unknown: what a settlement must record first."""
    if call.closed:
        return ()
    own: tuple[Doubt, ...] = ()
    if call.in_flight and call.prepared is not None:
        own = (Doubt(call.id, call.prepared.effect, call.operation.tool, reason),)
    return own + _step_doubts(call, reason)


def call_plan(call: fold.Call, contract: Contract) -> CallPlan:
    """What to do with one call of a run that goes on, by its records and today's contract of its tool.

    Siblings are not looked at: :func:`batch_plan` also holds what must wait for the rest of the batch.
    """
    if call.closed:
        return Reuse(call.id)
    return _by_record(call) or _by_contract(call, contract)


def _by_record(call: fold.Call) -> CallPlan | None:
    """The plans that the records alone decide, whatever the tools are today."""
    if lost := _step_doubts(call, _LOST):
        return NeedsProbe(call.id, lost)
    if unknown := tuple(u.effect for u in call.unknowns()):
        return AwaitVerdict(call.id, unknown)
    if call.verdict is not None:
        if call.verdict.verdict == "cancel_run":
            return AwaitVerdict(call.id, (call.verdict.effect,))
        if call.verdict.verdict not in ("not_applied", "safe_to_retry"):
            return Inject(call.id, call.verdict)
    if call.prepared is None:
        if call.operation.rejected is not None:
            return Withdraw(call.id, call.operation.rejected)
        if call.approval is not None and call.decision is None:
            return AwaitDecision(call.id, call.approval.approval)
        if call.decision is not None and call.decision.decision != "approved":
            said = f"Approval {call.decision.decision} by {call.decision.by}: {call.decision.reason}".rstrip(": ")
            return Withdraw(call.id, Failure("rejected", said))
    return None


def _by_contract(call: fold.Call, contract: Contract) -> CallPlan:
    """The plans that also depend on whether today's tool is the one the call was declared under."""
    if call.prepared is None or not requires_preparation(call):
        if contract is None:
            return AwaitBinding(call.id)
        if not _same_contract(call, contract):
            return RetireUnavailable(call.id, "not-executed" if requires_preparation(call) else "unavailable")
        if call.prepared is None:
            return Run(call.id)
        return Rerun(call.id, "pure" if effect_class(call) is EffectClass.PURE else "observe")
    if call.verdict is not None:
        return _freed(call, call.prepared, call.verdict, contract)
    return _lost(call, call.prepared, contract)


def _doubt(call: fold.Call, prepared: ToolCallPrepared, reason: str) -> NeedsProbe:
    return NeedsProbe(call.id, (Doubt(call.id, prepared.effect, call.operation.tool, reason),))


def _freed(call: fold.Call, prepared: ToolCallPrepared, verdict: ToolCallResolved, contract: Contract) -> CallPlan:
    """A verdict allows another try: of the same code. ``safe_to_retry`` says nothing about changed code."""
    if contract is None:
        return AwaitBinding(call.id)
    same = _same_contract(call, contract)
    if verdict.verdict == "not_applied":
        if same:
            return Rerun(call.id, "not_applied", call.operation.steps)
        return RetireUnavailable(call.id, "not-executed")
    if same:
        return Rerun(call.id, "safe_to_retry", call.operation.steps)
    return _doubt(call, prepared, _CHANGED)


def _lost(call: fold.Call, prepared: ToolCallPrepared, contract: Contract) -> CallPlan:
    """Started, and neither an outcome nor a verdict: only the declared class permits another try."""
    kind, steps = effect_class(call), call.operation.steps
    if kind is EffectClass.ONCE and not steps:
        return _doubt(call, prepared, _LOST)
    if call.tries - call.tries_at_progress >= ATTEMPTS_WITHOUT_PROGRESS_MAX:
        return _doubt(call, prepared, _WORN)
    if contract is None:
        return AwaitBinding(call.id)
    if not _same_contract(call, contract):
        return _doubt(call, prepared, _CHANGED)
    if steps:
        return Rerun(call.id, "steps", steps=True)
    return Rerun(call.id, _AGAIN[kind])


_AGAIN: dict[EffectClass, Literal["pure", "observe", "idempotent", "keyed"]] = {
    EffectClass.PURE: "pure",
    EffectClass.OBSERVE: "observe",
    EffectClass.IDEMPOTENT: "idempotent",
    EffectClass.KEYED: "keyed",
}


def contract_of(contracts: Mapping[str, str] | None, tool: str) -> Contract:
    """Today's contract of a tool by name, as :func:`call_plan` wants it."""
    return None if contracts is None else contracts.get(tool, MISSING)


def batch_plan(turn: fold.Turn, contracts: Mapping[str, str] | None) -> tuple[CallPlan, ...]:
    """One plan for each call of a batch, in order of declaration.

    While any call is unknown, siblings that were never started go on, but a call that a verdict freed for another try
    is held until every unknown of the batch has its verdict: a batch is not reopened in part.
    """
    plans = tuple(call_plan(call, contract_of(contracts, call.operation.tool)) for call in turn.calls)
    open_effects = tuple(u.effect for call in turn.calls for u in call.unknowns())
    if not open_effects:
        return plans
    return tuple(
        AwaitVerdict(call.id, open_effects)
        if call.verdict is not None and isinstance(plan, Rerun | RetireUnavailable | AwaitBinding | NeedsProbe)
        else plan
        for call, plan in zip(turn.calls, plans, strict=True)
    )


def task_plan(call: fold.Call) -> CallPlan:
    """One plan for the effect of a workflow's task. Its plan cannot change: today's contract is the declared one.

    Work elsewhere that has a name is gone on with: whoever does so asks about it and starts nothing.
    """
    plan = call_plan(call, call.operation.contract)
    if isinstance(plan, NeedsProbe) and _named_elsewhere(call):
        return Rerun(call.id, "steps", steps=True)
    return plan


def _named_elsewhere(call: fold.Call) -> bool:
    noted = call.steps.get(REMOTE_NOTE)
    worn = call.tries - call.tries_at_progress >= ATTEMPTS_WITHOUT_PROGRESS_MAX
    return noted is not None and noted.result is not None and call.unknown is None and not worn


# -- the model call of a run ------------------------------------------------------------------------------------------


def is_model_call(place: str) -> bool:
    """Whether an effect stands where the model call of a turn does."""
    return place.endswith(".model")


def model_doubts(run: fold.Run | None, reason: str = _ENDED) -> tuple[Doubt, ...]:
    """The started ``once`` model call of a run that has no outcome, if there is one."""
    prepared = None if run is None else run.model_prepared
    if prepared is None:
        return ()
    return (Doubt(model_place(prepared.turn), prepared.effect, prepared.model, reason),)


def lost_model_call(run: fold.Run | None) -> tuple[Doubt, ...]:
    """The same, of an owner that vanished: the contract of a model promises nothing, so there is no other plan."""
    return model_doubts(run, _LOST)


def unknown(run: fold.Run, doubt: Doubt) -> ToolCallUnknown | ModelCallUnknown:
    """A doubt as it is recorded. A model call is charged what was reserved for it until somebody knows better."""
    prepared = run.model_prepared
    if prepared is not None and prepared.effect == doubt.effect:
        return ModelCallUnknown(
            run.id, prepared.turn, prepared.effect, prepared.model, doubt.reason, prepared.reserved
        )  # fmt: skip
    return ToolCallUnknown(run.id, doubt.call, doubt.effect, doubt.tool, doubt.reason, doubt.step)
