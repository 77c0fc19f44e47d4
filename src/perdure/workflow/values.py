"""What a task is given: its inputs, variables, memory and the outputs of what it needs, as values and as digests."""

from __future__ import annotations

from typing import Any

import msgspec

from perdure import canonical
from perdure.records.task import TaskSettled
from perdure.rules import fold
from perdure.rules.flow import Flow
from perdure.workflow import expressions, templates
from perdure.workflow.expressions import Decision, Scope
from perdure.workflow.plan import Plan, PlannedTask

FORMAT_VERSION = 1


class Given(msgspec.Struct, frozen=True):
    """The resolved input of one try.

    Attributes:
        value: ``with``, rendered, over the defaults of the action.
        digest: of everything the task can have read.
    """

    value: dict[str, Any]
    digest: str


class Values:
    """The values of one run, kept up with its log.

    Args:
        run: the folded run; its input names the inputs it was started with.
    """

    def __init__(self, plan: Plan, run: fold.Run, inputs: dict[str, Any]) -> None:
        assert run.flow is not None
        self.plan = plan
        self.inputs = inputs
        self.flow: Flow = run.flow
        self.outputs: dict[str, Any] = {}
        for id, task in self.flow.tasks.items():
            if task.settled is not None:
                self.outputs[id] = canonical.decode(task.settled.output)

    def settled(self, record: TaskSettled, output: Any) -> None:
        """A task ended with this output."""
        self.outputs[record.task] = output

    def ended(self, id: str) -> TaskSettled | None:
        """How a task ended, if it did."""
        task = self.flow.tasks.get(id)
        return None if task is None else task.settled

    def scope(self, task: PlannedTask, memory: dict[str, Any], extra: dict[str, Any] | None = None) -> Scope:
        """What the expressions of a task read."""
        return Scope(self.inputs, {**task.vars, **extra} if extra else task.vars, memory, self.outputs)

    def memory(self, id: str) -> dict[str, Any]:
        """Working memory as a task reads it: the snapshot of its try that runs, else as it is now."""
        task = self.flow.tasks.get(id)
        return task.snapshot if task is not None and task.running else self.flow.memory

    def given(self, task: PlannedTask, scope: Scope, defaults: dict[str, Any] | None = None) -> Given:
        """The rendered input of a task and its digest. Of ``defaults``, what its plan lays over them is not looked at.

        Raises:
            ExpressionError: a template cannot be rendered.
        """
        rendered = templates.parse(task.with_, "with").render(scope)
        defaults = {key: value for key, value in (defaults or {}).items() if key not in task.with_}
        if defaults:
            rendered = {**templates.parse(defaults, "with").render(scope), **rendered}
        return Given(rendered, self.digest(task, scope, rendered))

    def digest(self, task: PlannedTask, scope: Scope, rendered: Any) -> str:
        """Over what the task was given and what it can have read of memory: nothing else, so that nothing else matters."""
        memory = scope.memory
        if task.memory_reads is not None:
            memory = {key: memory[key] for key in task.memory_reads if key in memory}
        needs = {}
        for need in task.needs:
            end = self.ended(need)
            needs[need] = "" if end is None else end.output_digest
        return canonical.digest([FORMAT_VERSION, rendered, task.vars, memory, needs])

    def decide(self, text: str, scope: Scope) -> Decision:
        """A condition, decided and kept with the digest of what it was decided on.

        Raises:
            ExpressionError: it cannot be evaluated.
        """
        result = expressions.truth(templates.condition(text).evaluate(scope))
        return Decision(text, expressions.context_digest(scope), result)
