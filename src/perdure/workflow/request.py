"""What a run of a workflow is asked for: the input of its submission, as it is recorded."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from perdure.clock import seconds
from perdure.errors import Invalid
from perdure.limits import DURATION_WAITING_SECONDS
from perdure.workflow.plan import Plan

_UNITS = (
    "provider_requests", "turns", "tool_calls", "input_tokens", "output_tokens", "total_tokens", "wall_time_seconds",
    "process_output_bytes", "artifact_bytes", "tasks", "expansion_items", "loop_iterations", "cost_microusd",
)  # fmt: skip


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"):
    """The input of a workflow's submission.

    Attributes:
        plan: digest of the plan. inputs: over the plan's defaults.
        workspace: absolute path of the folder it may see.
        mode: ``check`` changes nothing and predicts. diff: whether results hold a diff of changed text.
        lineage, generation: of a run that was derived from another.
    """

    workflow: str
    plan: str
    workspace: str
    inputs: dict[str, Any] = {}
    mode: Literal["execute", "check"] = "execute"
    diff: bool = True
    lineage: str = ""
    generation: int = 0

    def deadline(self, plan: Plan, created_at: int) -> int:
        """When the run must have ended, from its creation; waiting does not extend it."""
        wall = plan.budget.limits.max_wall_time_seconds
        return created_at + seconds(float(wall) if wall is not None else DURATION_WAITING_SECONDS)

    @staticmethod
    def limits(plan: Plan) -> dict[str, int]:
        """Unit to limit, of the units that are limited."""
        budgets = plan.budget.limits
        found = {unit: getattr(budgets, "max_" + unit) for unit in _UNITS}
        return {unit: limit for unit, limit in found.items() if limit is not None}


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Request)


def encode(request: Request) -> bytes:
    """The input as it is admitted."""
    return _encoder.encode(request)


def decode(raw: bytes) -> Request:
    """The request of a recorded input.

    Raises:
        Invalid: it is none.
    """
    try:
        return _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise Invalid(f"The stored input of a workflow run cannot be read: {error}.") from error
