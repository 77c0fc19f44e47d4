"""From authored tasks to the tasks of a plan: sub-workflows, loops, foreach and matrix become ordinary tasks.

Every child has an id of its own that its binding names, so it is the same in every compilation; what a child of a
sub-workflow refers to is renamed on the parsed expression, never in text.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import canonical
from perdure.definitions.workflow import Case, Compensate, Json, Retry, Route, Spec, Subworkflow, Task
from perdure.workflow import templates
from perdure.workflow.diagnostics import Diagnostics, nearest
from perdure.workflow.expressions import ExpressionError, Reference, Rename
from perdure.workflow.plan import TaskKind

_DIGITS = 12  # of a digest in an id
MEMORY_KINDS = ("builtin.memory.read", "builtin.memory.write", "builtin.long_term_memory.promote")
LONG_TERM_KINDS = (
    "builtin.long_term_memory.read", "builtin.long_term_memory.search", "builtin.long_term_memory.write",
    "builtin.long_term_memory.reindex",
)  # fmt: skip


class Draft(msgspec.Struct):
    """A task of the plan while it is being made. ``path`` is where it was authored; ``template_path`` of its ``with``."""

    id: str
    kind: TaskKind
    uses: str
    path: str
    target: str = ""
    needs: list[str] = msgspec.field(default_factory=list)
    vars: dict[str, Json] = msgspec.field(default_factory=dict)
    vars_files: tuple[str, ...] = ()
    with_: dict[str, Json] = msgspec.field(default_factory=dict)
    when: str | None = None
    retry: Retry = Retry()
    timeout_seconds: int | None = None
    failure: Any = "stop"
    output_schema: Json = None
    memory_writes: tuple[str, ...] | None = None
    route: Route | None = None
    children: tuple[str, ...] = ()
    guard: str | None = None
    previous: str = ""
    input_schema: Json = None
    outputs: dict[str, Json] | None = None
    namespace: str = ""
    compensate: Compensate | None = None


class _Frame(msgspec.Struct, frozen=True):
    """Where tasks are expanded: at the top, or inside an invocation.

    Attributes:
        prefix: of ids. boundary: the task whose output the inputs are; empty at the top.
        stack: names of the sub-workflows around.
    """

    prefix: str = ""
    boundary: str = ""
    stack: tuple[str, ...] = ()

    def rename(self, reference: Reference) -> Reference:
        """A reference inside an invocation as one of the plan."""
        match reference.root:
            case "inputs" if self.boundary:
                return Reference("tasks", (self.boundary, "output", *reference.path))
            case "memory" if self.prefix and reference.path:
                return Reference("memory", (self.prefix + reference.path[0], *reference.path[1:]))
            case "tasks" if self.prefix:
                return Reference("tasks", (self.prefix + reference.path[0], *reference.path[1:]))
            case _:
                return reference


def digest_id(value: Any) -> str:
    """The part of an id that names a binding."""
    return canonical.digest(value)[:_DIGITS]


class Expansion:
    """Expands the tasks of a document.

    Attributes:
        drafts: the result, in order. counted: children of foreach and matrix; iterations of loops.
    """

    def __init__(self, spec: Spec, found: Diagnostics) -> None:
        self._spec = spec
        self._found = found
        self.drafts: list[Draft] = []
        self.items = 0
        self.iterations = 0

    def run(self) -> list[Draft]:
        """Expand everything."""
        self._tasks(self._spec.tasks, "spec.tasks", _Frame())
        return self.drafts

    def _tasks(self, tasks: tuple[Task, ...], path: str, frame: _Frame) -> list[str]:
        """Expand a list of tasks; ids of all that came of it."""
        before = len(self.drafts)
        local = {task.id for task in tasks}
        seen: set[str] = set()
        for index, task in enumerate(tasks):
            at = f"{path}[{index}]"
            if task.id in seen:
                self._found.add("duplicate_task", f"{at}.id", f"The task id `{task.id}` is used twice.")
                continue
            seen.add(task.id)
            for place, need in enumerate(task.needs):
                if need not in local:
                    said = f"Task `{task.id}` needs `{need}`, which does not exist."
                    self._found.add("missing_reference", f"{at}.needs[{place}]", said, help=nearest(need, local))
            needs = [frame.prefix + need for need in task.needs if need in local]
            if frame.boundary:
                needs.append(frame.boundary)
            self._task(task, at, frame, needs)
        return [draft.id for draft in self.drafts[before:]]

    # -- one task -------------------------------------------------------------------------------------------------------
    def _task(self, task: Task, path: str, frame: _Frame, needs: list[str]) -> None:
        self._exclusive(task, path)
        id = frame.prefix + task.id
        if task.loop is not None:
            self._loop(task, path, frame, id, needs)
        elif task.foreach is not None or task.matrix is not None:
            self._each(task, path, frame, id, needs)
        else:
            self._single(task, path, frame, id, needs)

    def _exclusive(self, task: Task, path: str) -> None:
        used = [name for name in ("foreach", "matrix", "loop", "route") if getattr(task, name) is not None]
        if len(used) > 1:
            self._found.add(
                "schema_violation", f"{path}.{used[1]}", f"Task `{task.id}` has {' and '.join(used)}; only one can be."
            )
        if task.loop is not None and task.when is not None:
            self._found.add(
                "schema_violation",
                f"{path}.when",
                f"Task `{task.id}` has `loop` and `when`; the loop has its own condition.",
            )
        if (task.uses == "router") != (task.route is not None):
            said = "has no `route`" if task.route is None else f"has a `route` and uses `{task.uses}`"
            self._found.add(
                "schema_violation",
                f"{path}.route",
                f"Task `{task.id}` {said}.",
                help="A router uses `router` and has `route`.",
            )

    def _bindings(self, task: Task, path: str) -> Iterator[dict[str, Json]]:
        if task.foreach is not None:
            count, most, place = len(task.foreach.items), task.foreach.max_items, f"{path}.foreach"
            self._reserve(task, path, [task.foreach.as_, "foreachIndex"])
            bindings: Iterator[dict[str, Json]] = (
                {task.foreach.as_: item, "foreachIndex": index} for index, item in enumerate(task.foreach.items)
            )
        else:
            assert task.matrix is not None
            axes = sorted(task.matrix.axes)
            count, most, place = 1, task.matrix.max_items, f"{path}.matrix"
            for axis in axes:
                count *= len(task.matrix.axes[axis])
            self._reserve(task, path, ["matrix", "matrixIndex"])
            combined = itertools.product(*(task.matrix.axes[axis] for axis in axes))
            bindings = (
                {"matrix": dict(zip(axes, values, strict=True)), "matrixIndex": index}
                for index, values in enumerate(combined)
            )
        if count > most:
            self._found.add(
                "schema_violation", place, f"Task `{task.id}` expands to {count:,} tasks; maxItems is {most}."
            )
            return
        self.items += count
        yield from bindings

    def _reserve(self, task: Task, path: str, names: list[str]) -> None:
        for name in names:
            if name in task.vars:
                self._found.add(
                    "schema_violation",
                    f"{path}.vars.{name}",
                    f"The variable `{name}` is bound by the expansion of `{task.id}`.",
                )

    def _each(self, task: Task, path: str, frame: _Frame, id: str, needs: list[str]) -> None:
        children = []
        for index, binding in enumerate(self._bindings(task, path)):
            child = f"{id}--{index:04d}-{digest_id(binding)}"
            children.append(child)
            bare = replace(task, foreach=None, matrix=None, vars={**task.vars, **binding})
            self._single(bare, path, frame, child, needs)
        self._aggregate(task, path, frame, id, "aggregate", children, needs)

    def _loop(self, task: Task, path: str, frame: _Frame, id: str, needs: list[str]) -> None:
        assert task.loop is not None
        loop = task.loop
        self._reserve(task, path, ["loopIndex", "loopPrevious"])
        self.iterations += loop.max_iterations
        children: list[str] = []
        for index in range(loop.max_iterations):
            child = f"{id}--{index:04d}-{digest_id({'loopIndex': index})}"
            bound: dict[str, Json] = {"loopIndex": index}
            if not children:
                bound["loopPrevious"] = loop.initial
            bare = replace(task, loop=None, when=loop.while_, vars={**task.vars, **bound})
            previous = children[-1] if children else ""
            self._single(bare, path, frame, child, [*needs, *children[-1:]], previous=previous)
            children.append(child)
        draft = self._aggregate(task, path, frame, id, "loop", children, needs)
        draft.guard = self._renamed_text(loop.while_, f"{path}.loop.while", frame)

    def _aggregate(
        self, task: Task, path: str, frame: _Frame, id: str, kind: TaskKind, children: list[str], needs: list[str]
    ) -> Draft:
        draft = Draft(
            id, kind, task.uses, path, needs=[*children, *(need for need in needs if need not in children)],
            vars=task.vars, vars_files=task.vars_files, children=tuple(children), failure=task.failure,
            output_schema=task.output_schema,
        )  # fmt: skip
        self.drafts.append(draft)
        return draft

    def _single(self, task: Task, path: str, frame: _Frame, id: str, needs: list[str], *, previous: str = "") -> None:
        kind, _, target = task.uses.partition(":")
        if kind == "workflow":
            self._invoke(task, path, frame, id, needs, target)
            return
        if kind == "team":
            self._found.add("unsupported_capability", f"{path}.uses", "`team:` is not supported.",
                            help="Write agents as tasks, with a typed hand-over between them.")  # fmt: skip
        draft = Draft(
            id, "router" if task.uses == "router" else ("agent" if kind == "agent" else "action"), task.uses, path,
            target=target, needs=needs, vars=task.vars, vars_files=task.vars_files,
            with_=self._renamed(task.with_, f"{path}.with", frame),
            when=None if task.when is None else self._renamed_text(task.when, self._guard_path(task, path), frame),
            retry=task.retry, timeout_seconds=task.timeout_seconds, failure=task.failure, output_schema=task.output_schema,
            memory_writes=task.memory_writes, previous=previous, namespace=frame.prefix,
            compensate=self._compensate(task, path, frame), route=self._route(task, path, frame),
        )  # fmt: skip
        self._memory_keys(draft, frame)
        self.drafts.append(draft)

    @staticmethod
    def _guard_path(task: Task, path: str) -> str:
        return f"{path}.when"

    def _route(self, task: Task, path: str, frame: _Frame) -> Route | None:
        if task.route is None:
            return None
        cases = tuple(
            Case(equals=case.equals, tasks=tuple(frame.prefix + id for id in case.tasks)) for case in task.route.cases
        )
        default = tuple(frame.prefix + id for id in task.route.default)
        return Route(
            select=self._renamed_template(task.route.select, f"{path}.route.select", frame),
            cases=cases,
            default=default,
        )

    def _compensate(self, task: Task, path: str, frame: _Frame) -> Compensate | None:
        if task.compensate is None:
            return None
        return replace(task.compensate, with_=self._renamed(task.compensate.with_, f"{path}.compensate.with", frame))

    # -- sub-workflows ----------------------------------------------------------------------------------------------------
    def _invoke(self, task: Task, path: str, frame: _Frame, id: str, needs: list[str], name: str) -> None:
        definition = self._spec.subworkflows.get(name)
        if definition is None:
            self._found.add("missing_reference", f"{path}.uses", f"There is no sub-workflow `{name}`.",
                            help=nearest(name, self._spec.subworkflows))  # fmt: skip
            return
        if name in frame.stack:
            around = " -> ".join((*frame.stack, name))
            self._found.add("dependency_cycle", f"{path}.uses", f"Sub-workflows use each other in a circle: {around}.")
            return
        boundary = f"{id}--inputs-{digest_id(msgspec.json.decode(msgspec.json.encode(definition)))}"
        given = {**definition.inputs, **self._renamed(task.with_, f"{path}.with", frame)}
        when = None if task.when is None else self._renamed_text(task.when, f"{path}.when", frame)
        self.drafts.append(
            Draft(boundary, "inputs", task.uses, path, needs=needs, vars=task.vars, vars_files=task.vars_files, with_=given,
                  when=when, failure=task.failure, input_schema=definition.input_schema)
        )  # fmt: skip
        inner = _Frame(f"{id}--", boundary, (*frame.stack, name))
        at = f"spec.subworkflows.{name}"
        children = self._tasks(definition.tasks, f"{at}.tasks", inner)
        self.drafts.append(
            Draft(id, "outputs", task.uses, path, needs=[boundary, *children], failure=task.failure,
                  outputs=self._renamed(definition.outputs, f"{at}.outputs", inner), output_schema=_both(definition, task))
        )  # fmt: skip

    def _memory_keys(self, draft: Draft, frame: _Frame) -> None:
        """Keys of working memory and namespaces of long-term memory inside a sub-workflow are those of its invocation."""
        action = self._spec.actions.get(draft.target) if draft.kind == "action" else None
        if action is None or not frame.prefix:
            return
        if draft.memory_writes is not None:
            draft.memory_writes = tuple(frame.prefix + key for key in draft.memory_writes)
        field = "key" if action.kind in MEMORY_KINDS else ("namespace" if action.kind in LONG_TERM_KINDS else "")
        value = draft.with_.get(field, action.with_.get(field)) if field else None
        if not isinstance(value, str):
            return
        if "${{" in value:
            self._found.add(
                "invalid_template",
                f"{draft.path}.with.{field}",
                f"Inside a sub-workflow `{field}` is a literal, no template.",
            )
        else:
            draft.with_ = {**draft.with_, field: frame.prefix + value}

    # -- renaming ---------------------------------------------------------------------------------------------------------
    def _renamed(self, value: dict[str, Json], path: str, frame: _Frame) -> dict[str, Json]:
        if not frame.prefix:
            return value
        found: dict[str, Json] = self._try(
            lambda rename: templates.parse(value).renamed(rename).source, path, frame, value
        )
        return found

    def _renamed_template(self, text: str, path: str, frame: _Frame) -> str:
        found: str = self._try(lambda rename: templates.parse(text).renamed(rename).source, path, frame, text)
        return found if frame.prefix else text

    def _renamed_text(self, text: str, path: str, frame: _Frame) -> str:
        """A condition in its canonical form, over the plan's names."""
        found: str = self._try(lambda rename: templates.condition(text).renamed(rename).text, path, frame, text)
        return found

    def _try(self, make: Callable[[Rename], Any], path: str, frame: _Frame, instead: Any) -> Any:
        try:
            return make(frame.rename)
        except ExpressionError as error:
            place = getattr(error, "place", "")
            self._found.add("invalid_template", f"{path}.{place}" if place else path, error.message, help=error.help)
            return instead


def _both(definition: Subworkflow, task: Task) -> Json:
    """The schema of a sub-workflow's outputs, and that of the task that uses it."""
    schemas = [schema for schema in (definition.output_schema, task.output_schema) if schema is not None]
    return {"allOf": schemas} if len(schemas) > 1 else (schemas[0] if schemas else None)
