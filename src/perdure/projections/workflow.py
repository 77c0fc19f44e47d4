"""A workflow run as people read it: every task in plan order, its state, what it gave, what it waits for, what was spent."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

import msgspec

from perdure.canonical import decode
from perdure.clock import to_datetime
from perdure.errors import Corrupt, Invalid
from perdure.limits import PAGE_BATCHES_MAX
from perdure.ports.ledger import Submission
from perdure.ports.store import Store
from perdure.projections.run import name_of
from perdure.records.artifact import ArtifactRef
from perdure.records.parts import Failure
from perdure.records.task import PROGRAM
from perdure.rules import fold, spending
from perdure.rules.flow import Task
from perdure.workflow import plan as plans
from perdure.workflow.plan import Plan

State = Literal[
    "pending", "running", "waiting_for_approval", "waiting_for_effect", "waiting", "retry_scheduled", "succeeded",
    "failed", "skipped", "cancelled",
]  # fmt: skip


class TaskView(msgspec.Struct, frozen=True):
    """One task.

    Attributes:
        attempt: tries begun. output: JSON value. decision: the condition or route it was decided by.
        delta: its change of working memory. until: the instant it waits for, UTC.
        effect, approval: what a person must decide, if anything.
    """

    id: str
    kind: str
    uses: str
    state: State
    attempt: int = 0
    output: Any = None
    failure: Failure | None = None
    decision: Any = None
    delta: Any = None
    until: dt.datetime | None = None
    artifacts: tuple[ArtifactRef, ...] = ()
    effect: str | None = None
    approval: str | None = None
    provenance: str = "executed"
    definition: str = ""
    input_digest: str = ""
    output_digest: str = ""


class BudgetView(msgspec.Struct, frozen=True):
    """One unit of a budget: what is used, and the limit if there is one."""

    unit: str
    used: int
    limit: int | None = None


class WorkflowView(msgspec.Struct, frozen=True):
    """One run of a workflow, whole.

    Attributes:
        state: of the ledger, or the outcome. mode: ``execute`` or ``check``.
        memory: working memory now. deadline: UTC, None before it began.
    """

    run: str
    submission: str
    workflow: str
    plan: str
    state: str
    mode: str
    tasks: tuple[TaskView, ...]
    memory: Any
    budgets: tuple[BudgetView, ...]
    deadline: dt.datetime | None
    failure: Failure | None
    output: Any
    created_at: dt.datetime
    settled_at: dt.datetime | None
    workspace: str


def is_workflow(row: Submission) -> bool:
    """Whether a submission is a workflow's."""
    return row.program == PROGRAM


def plan_of(store: Store, row: Submission) -> Plan:
    """The plan of a workflow's submission.

    Raises:
        Corrupt: the database does not hold it.
    """
    digest = row.definition.rpartition("@")[2]
    raw = store.read(lambda tx: tx.ledger.plan(digest))
    if raw is None:
        raise Corrupt(f"The database does not hold the plan {digest} of {row.id}.", help="Restore it from a backup.")
    return plans.decode(raw)


async def folded(store: Store, row: Submission) -> fold.Thread:
    """The state of a submission's thread."""
    state, after = fold.Thread(row.thread), 0
    while True:
        number, start = row.thread_number, after
        stored = await store.scan(lambda tx, number=number, start=start: tx.log.read(number, start, PAGE_BATCHES_MAX))  # type: ignore[misc]
        if not stored:
            return state
        for batch in stored:
            fold.apply_batch(state, batch.body, batch.apart)
            after = batch.last


async def view(store: Store, row: Submission) -> WorkflowView:
    """A workflow's run, folded from its records.

    Raises:
        Invalid: it is no workflow's. Corrupt: its records or its plan are not whole.
    """
    if not is_workflow(row):
        raise Invalid(f"{row.id} is no run of a workflow.", help="See it: perdure inspect " + row.run)
    return of_state(await folded(store, row), row, plan_of(store, row))


def of_state(state: fold.Thread, row: Submission, plan: Plan) -> WorkflowView:
    """A workflow's run from its folded thread."""
    run = state.runs.get(row.run)
    flow = None if run is None else run.flow
    given = decode(row.input)
    tasks = tuple(_task(state, run, plan, id) for id in plan.order)
    limits = {} if flow is None else flow.budgets
    runs = [] if flow is None else [state.runs[id] for id in flow.agents if id in state.runs]
    used = {} if flow is None else spending.used(flow, runs)
    units = dict.fromkeys([*(unit for unit, amount in used.items() if amount), *limits])
    failure = None if row.failure is None else msgspec.json.decode(row.failure, type=Failure)
    completed = None if run is None else run.completed
    return WorkflowView(
        run=row.run, submission=row.id, workflow=name_of(row), plan=row.definition.rpartition("@")[2],
        state=row.outcome or row.state, mode=given.get("mode", "execute"), tasks=tasks,
        memory=None if flow is None else flow.memory,
        budgets=tuple(BudgetView(unit, used.get(unit, 0), limits.get(unit)) for unit in units),
        deadline=None if flow is None else to_datetime(flow.started.deadline), failure=failure,
        output=None if completed is None else decode(completed.output), created_at=to_datetime(row.created_at),
        settled_at=None if row.settled_at is None else to_datetime(row.settled_at), workspace=given.get("workspace", ""),
    )  # fmt: skip


def _task(state: fold.Thread, run: fold.Run | None, plan: Plan, id: str) -> TaskView:
    planned = plan.tasks[id]
    flow = None if run is None else run.flow
    task = None if flow is None else flow.tasks.get(id)
    if task is None or run is None:
        return TaskView(id, planned.kind, planned.uses, "pending")
    end = task.settled
    if end is None:
        return _open(state, run, planned, task)
    return TaskView(
        id, planned.kind, planned.uses, end.end, end.attempt, decode(end.output), end.failure,
        decode(end.decision) if end.decision else None, decode(end.delta) if end.delta else None,
        artifacts=end.artifacts, provenance=end.provenance, definition=end.definition, input_digest=end.input_digest,
        output_digest=end.output_digest,
    )  # fmt: skip


def _open(state: fold.Thread, run: fold.Run, planned: plans.PlannedTask, task: Task) -> TaskView:
    until = to_datetime(task.until) if task.until else None
    if not task.running:
        shown: State = "retry_scheduled" if task.until else "pending"
        return TaskView(task.id, planned.kind, planned.uses, shown, task.attempt, failure=task.failure, until=until)
    inner = state.runs.get(task.agent) if task.agent else None
    calls = inner.open_calls() if inner is not None else [c for c in run.open_calls() if c.id == task.id]
    unknown = [u.effect for call in calls for u in call.unknowns()]
    if inner is not None and inner.model_unknown is not None:
        unknown.append(inner.model_unknown.effect)
    asked = [c.approval.approval for c in calls if c.approval is not None and c.decision is None and not c.closed]
    found: State = "waiting_for_effect" if unknown else "waiting_for_approval" if asked else "running"
    if found == "running" and task.until:
        found = "waiting"
    return TaskView(
        task.id, planned.kind, planned.uses, found, task.attempt, until=until, effect=unknown[0] if unknown else None,
        approval=asked[0] if asked else None,
    )  # fmt: skip
