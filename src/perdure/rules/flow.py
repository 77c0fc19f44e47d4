"""The state of one run of a workflow, as far as its records say. Folding runs nothing and needs no plan. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure.canonical import decode
from perdure.errors import Invalid
from perdure.records import task as records
from perdure.records.parts import Failure

_NOTHING: dict[str, Any] = {}
_limits = msgspec.json.Decoder(dict[str, int])
DELTA_VERSION = 1


class Delta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A change of working memory: keys that get a value, keys that go."""

    format_version: int = DELTA_VERSION
    set: dict[str, Any] = {}
    remove: tuple[str, ...] = ()


_delta = msgspec.json.Decoder(Delta)


class Task(msgspec.Struct):
    """One task, as far as its records say. A task without a record has not begun.

    Attributes:
        attempt: tries begun.
        running: a try has begun and has not ended. snapshot: working memory as that try reads it.
        agent: the run of the newest try's turns.
        until: the instant it waits for, of a timer or before its next try; 0 for none.
        failure: of the newest try, if another follows.
    """

    id: str
    attempt: int = 0
    running: bool = False
    snapshot: dict[str, Any] = _NOTHING
    agent: str = ""
    until: int = 0
    failure: Failure | None = None
    settled: records.TaskSettled | None = None


class Flow(msgspec.Struct):
    """What the records of a workflow run add up to.

    Attributes:
        memory: working memory now. It is never changed in place: a snapshot is a reference to it.
        settled: how many tasks have ended.
        agents: runs of agents' turns, of every try.
        printed, artifact_bytes: what processes printed and artifacts hold, of every try.
    """

    started: records.WorkflowStarted
    memory: dict[str, Any]
    budgets: dict[str, int]
    tasks: dict[str, Task] = msgspec.field(default_factory=dict)
    agents: list[str] = msgspec.field(default_factory=list)
    settled: int = 0
    failures: dict[str, Failure] = msgspec.field(default_factory=dict)  # of tasks that failed, in the order they did
    printed: int = 0
    artifact_bytes: int = 0
    denied: records.BudgetDenied | None = None

    def task(self, id: str) -> Task:
        """A task by id, made if nothing is recorded of it yet."""
        found = self.tasks.get(id)
        if found is None:
            found = self.tasks[id] = Task(id)
        return found


def begin(record: records.WorkflowStarted) -> Flow:
    """The state of a run that began.

    Raises:
        Invalid: its memory or budgets are not what they must be.
    """
    memory = decode(record.memory, "initial memory")
    if not isinstance(memory, dict):
        raise Invalid("The initial memory is no object.")
    return Flow(record, memory, _limits.decode(record.budgets))


def limits(record: records.BudgetRaised) -> dict[str, int]:
    """The limits that somebody raised."""
    return _limits.decode(record.limits)


def start(flow: Flow, record: records.TaskStarted) -> str | None:
    """A try began. Returns what is wrong with the record, if anything is."""
    task = flow.task(record.task)
    if task.settled is not None or task.running:
        return "starts a task that has ended or runs already"
    if record.attempt != task.attempt + 1:
        return f"is try {record.attempt} of a task that was tried {task.attempt} times"
    task.attempt = record.attempt
    task.running = True
    task.snapshot = flow.memory
    task.until = 0
    task.agent = record.agent
    if record.agent:
        flow.agents.append(record.agent)
    return None


def retry(flow: Flow, record: records.TaskRetryScheduled) -> str | None:
    """A try failed and another follows."""
    task = flow.task(record.task)
    if not task.running or record.attempt != task.attempt:
        return "schedules a try after one that does not run"
    task.running = False
    task.until = record.at
    task.failure = record.failure
    flow.printed += record.printed
    return None


def wait(flow: Flow, record: records.TaskWaiting) -> str | None:
    """A task waits for an instant."""
    task = flow.task(record.task)
    if task.settled is not None or not task.running:
        return "waits for a task that does not run"
    task.until = record.until
    return None


def settle(flow: Flow, record: records.TaskSettled) -> str | None:
    """A task ended; its change of memory is applied."""
    task = flow.task(record.task)
    if task.settled is not None:
        return "ends a task twice"
    task.settled = record
    task.running = False
    task.until = 0
    task.snapshot = _NOTHING
    flow.settled += 1
    if record.end == "failed":
        flow.failures[record.task] = record.failure or Failure("failed", "It failed.")
    flow.printed += record.printed
    for artifact in record.artifacts:
        flow.artifact_bytes += artifact.size
    if record.delta:
        try:
            delta = _delta.decode(record.delta)
        except msgspec.MsgspecError as error:
            return f"has a change of memory that cannot be read ({error})"
        if delta.format_version != DELTA_VERSION:
            return f"has a change of memory of format {delta.format_version}"
        memory = {**flow.memory, **delta.set}
        for key in delta.remove:
            memory.pop(key, None)
        flow.memory = memory
    return None
