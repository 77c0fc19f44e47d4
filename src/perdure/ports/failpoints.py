"""Every place where a process may be made to die in a test, as an enumeration.

A durable write names its boundary when it is handed to the store, so a write without a failpoint cannot be expressed.
The store passes ``before`` (nothing written), ``inside`` (written, not committed) and ``after`` (committed, nobody told)
for each. Dispatch points stand around the outside world itself.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Literal

Phase = Literal["before", "inside", "after"]


class Boundary(StrEnum):
    """One durable write of the engine, or one crossing into the outside world."""

    ADMIT = "admit"
    CLAIM = "claim"
    RENEW = "renew"
    RELEASE = "release"
    INPUT = "input"
    MODEL_RATE = "model-rate"
    MODEL_STARTED = "model-started"
    MODEL_FAILED = "model-failed"
    RESPONSE = "response"
    CALL_STARTED = "call-started"
    CALL_OUTCOME = "call-outcome"
    CALL_UNKNOWN = "call-unknown"
    STEP_STARTED = "step-started"
    STEP_OUTCOME = "step-outcome"
    SUSPEND = "suspend"
    PARK = "park"
    INTENT = "intent"
    INTENT_APPLIED = "intent-applied"
    OUTPUT_REJECTED = "output-rejected"
    TASKS_STARTED = "tasks-started"
    TASKS_SETTLED = "tasks-settled"
    TASK_RETRY = "task-retry"
    TURNS_ENDED = "turns-ended"
    BUDGET = "budget"
    ARTIFACT_LEASED = "artifact-leased"
    ARTIFACTS_DROPPED = "artifacts-dropped"
    MEMORY = "memory"
    SETTLE = "settle"
    REPAIR = "repair"
    FAULT = "fault"
    REDRIVE = "redrive"
    ARCHIVE = "archive"
    LIVE = "live"
    # not writes: around the outside world
    DISPATCH = "dispatch"
    MODEL_CALL = "model-call"


DISPATCHES = frozenset({Boundary.DISPATCH, Boundary.MODEL_CALL})

Failpoint = Callable[[Boundary, Phase], None]
"""Called at each boundary and phase when a test has set one; it may end the process or raise."""
