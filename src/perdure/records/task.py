"""Facts about a run of a workflow: its start, its tasks, its budget.

What a task does to the world is recorded as any other effect, with the task's id as the place of the call: its
``ToolCallPrepared`` is the started record, and so on. An agent's turns inside a task are those of a run of their own on
the same thread, which ``TaskStarted.agent`` names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.records.artifact import ArtifactRef
from perdure.records.parts import Failure

PROGRAM = "perdure.workflow"
"""The one program that every run of a workflow belongs to: whoever can run one can run them all, by their plans."""

TaskEnd = Literal["succeeded", "failed", "skipped", "cancelled"]
Provenance = Literal["executed", "reused", "replayed"]
RunMode = Literal["execute", "check"]
BudgetUnit = Literal[
    "provider_requests",
    "turns",
    "tool_calls",
    "input_tokens",
    "output_tokens",
    "total_tokens",
    "wall_time_seconds",
    "process_output_bytes",
    "artifact_bytes",
    "tasks",
    "expansion_items",
    "loop_iterations",
    "cost_microusd",
]


class WorkflowStarted(
    msgspec.Struct,
    frozen=True,
    tag="WorkflowStarted/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """A run of a workflow began; what it goes by whatever attempts follow is frozen here.

    Attributes:
        plan: digest of the compiled plan, which the database keeps.
        deadline: microseconds since 1970.
        workspace: absolute path of the folder it may see.
        memory: initial working memory, a JSON object.
        budgets: unit to the most of it, a JSON object.
        lineage: whose keys and shared budget it uses; the run itself unless it was derived from another.
        generation: rises when the same logical effects are wanted again.
    """

    run: str
    submission: str
    workflow: str
    plan: str
    deadline: int
    workspace: str
    memory: msgspec.Raw
    budgets: msgspec.Raw = msgspec.Raw(b"{}")
    lineage: str = ""
    generation: int = 0
    mode: RunMode = "execute"


class TaskStarted(
    msgspec.Struct,
    frozen=True,
    tag="TaskStarted/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """A try of a task that may touch the world began; working memory as it is here is what the task reads.

    Attributes:
        attempt: tries of the task, from 1.
        operation: what it does, for example ``builtin.write``; ``agent`` for an agent.
        effect_class: what recovery may do with its effect; empty for an agent, whose calls have their own.
        definition: fingerprint of what governs the task; the contract of its effect.
        agent: the run of its turns, where it is an agent.
    """

    run: str
    task: str
    attempt: int
    operation: str
    effect_class: str = ""
    definition: str = ""
    agent: str = ""


class TaskRetryScheduled(
    msgspec.Struct,
    frozen=True,
    tag="TaskRetryScheduled/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """A try of a task failed definitely, and another follows at ``at`` (microseconds since 1970).

    ``printed`` are the bytes its process printed, which count against the budget.
    """

    run: str
    task: str
    attempt: int
    failure: Failure
    at: int
    printed: int = 0


class TaskWaiting(
    msgspec.Struct, frozen=True, tag="TaskWaiting/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """A task waits for an instant: a durable timer that holds no worker. Microseconds since 1970."""

    run: str
    task: str
    until: int


class TaskSettled(
    msgspec.Struct,
    frozen=True,
    tag="TaskSettled/1",
    tag_field="kind",
    forbid_unknown_fields=True,
    gc=False,
    omit_defaults=True,
):
    """A task ended. A batch of tasks is one commit, in compiled order: all of it or nothing.

    Attributes:
        attempt: tries it took; 0 for one that never ran.
        output: its output, also what is kept of a failed one.
        delta: its change of working memory, ``{"formatVersion": 1, "set": {}, "remove": []}``.
        decision: the condition or route it was decided by, with the digest of what was evaluated.
        definition: fingerprint of what governs the task. contract: of what its output must be.
        input_digest: of what it was given, resolved.
        output_digest, delta_digest: of the two values.
        artifacts: files it left in the artifact store.
        printed: bytes its process printed, which count against the budget.
        source: the run it was taken from, where it was not executed here.
    """

    run: str
    task: str
    end: TaskEnd
    attempt: int = 1
    output: msgspec.Raw = msgspec.Raw(b"null")
    failure: Failure | None = None
    delta: msgspec.Raw = msgspec.Raw()
    decision: msgspec.Raw = msgspec.Raw()
    definition: str = ""
    contract: str = ""
    input_digest: str = ""
    output_digest: str = ""
    delta_digest: str = ""
    artifacts: tuple[ArtifactRef, ...] = ()
    printed: int = 0
    provenance: Provenance = "executed"
    source: str = ""


class BudgetDenied(
    msgspec.Struct, frozen=True, tag="BudgetDenied/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """A task was refused something that its run, or its lineage, may not spend any more. Nothing was dispatched."""

    run: str
    task: str
    unit: BudgetUnit
    limit: int
    used: int
    wanted: int


class BudgetRaised(
    msgspec.Struct, frozen=True, tag="BudgetRaised/1", tag_field="kind", forbid_unknown_fields=True, gc=False
):
    """An operator raised limits of a run. ``limits``: unit to its new limit, a JSON object."""

    run: str
    by: str
    reason: str
    limits: msgspec.Raw
