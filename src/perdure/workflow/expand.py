"""From authored tasks to the tasks of a plan: sub-workflows, loops, foreach and matrix become ordinary tasks.

Every child has an id of its own that its binding names, so it is the same in every compilation; what a child of a
sub-workflow refers to is renamed on the parsed expression, never in text. Defaults of an action are laid under ``with``
here, so that they read the names of the task that uses them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import canonical
from perdure.definitions.workflow import (
    RENDERED_FIELDS,
    Action,
    Agent,
    Case,
    Compensate,
    Json,
    Retry,
    Route,
    Spec,
    Subworkflow,
    Task,
)
from perdure.limits import PLANNED_ID_CHARS_MAX, PLANNED_TASKS_MAX, SUBWORKFLOW_DEPTH_MAX
from perdure.workflow import templates
from perdure.workflow.diagnostics import Diagnostics, nearest
from perdure.workflow.expressions import ExpressionError, Reference
from perdure.workflow.files import RESERVED
from perdure.workflow.plan import TaskKind

_DIGITS = 12  # of a digest in an id
MEMORY_KINDS = ("builtin.memory.read", "builtin.memory.write", "builtin.long_term_memory.promote")
LONG_TERM_KINDS = (
    "builtin.long_term_memory.read", "builtin.long_term_memory.search", "builtin.long_term_memory.write",
    "builtin.long_term_memory.reindex",
)  # fmt: skip


class Draft(msgspec.Struct):
    """A task of the plan while it is being made.

    Attributes:
        name: its authored id. path: where it was authored. when_path: where its condition was.
        prefix: of the invocation it is in. asks: what it was authored to need.
        own: names of ``with`` that it was authored with; the rest are defaults of its action.
        bound: variables that the expansion gives it; no layer changes them.
    """

    id: str
    kind: TaskKind
    uses: str
    path: str
    name: str = ""
    prefix: str = ""
    target: str = ""
    needs: list[str] = msgspec.field(default_factory=list)
    asks: tuple[str, ...] = ()
    bound: dict[str, Json] = msgspec.field(default_factory=dict)
    vars: dict[str, Json] = msgspec.field(default_factory=dict)
    vars_files: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()
    with_: dict[str, Json] = msgspec.field(default_factory=dict)
    when: str | None = None
    when_path: str = ""
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
    outputs_path: str = ""
    namespace: str = ""
    compensate: Compensate | None = None

    @property
    def used(self) -> str:
        """The authored name of its action or agent."""
        return self.uses.partition(":")[2]

    def shown(self, reference: Reference) -> str:
        """A reference as it was authored."""
        if self.prefix and reference.root in ("tasks", "memory") and reference.path:
            first, *rest = reference.path
            boundary = first.startswith(f"{self.prefix}inputs-") and reference.root == "tasks"
            if boundary:
                return str(Reference("inputs", tuple(rest[1:])))
            return str(Reference(reference.root, (first.removeprefix(self.prefix), *rest)))
        return str(reference)


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


class _Child(msgspec.Struct, frozen=True):
    """How a task stands in its expansion: its id, what binds it, the iteration before it, where its condition is."""

    id: str
    needs: tuple[str, ...]
    bound: dict[str, Json] = {}
    previous: str = ""
    when_path: str = ""


class _TooMany(Exception):
    """There are more tasks than a plan may have."""


def digest_id(value: Any) -> str:
    """The part of an id that names a binding."""
    return canonical.digest(value)[:_DIGITS]


class Expansion:
    """Expands the tasks of a document.

    Args:
        instructions: agent name to its text.

    Attributes:
        drafts: the result, in order. spare: those of each sub-workflow that nothing uses, to be checked and not planned.
        items, iterations: children of foreach and matrix; iterations of loops.
        actions, agents, instructions: as authored, and as invocations see them whose names their templates read.
    """

    def __init__(self, spec: Spec, found: Diagnostics, instructions: Mapping[str, str]) -> None:
        self._spec = spec
        self._found = found
        self.drafts: list[Draft] = []
        self.spare: list[list[Draft]] = []
        self.items = 0
        self.iterations = 0
        self.actions: dict[str, Action] = dict(spec.actions)
        self.agents: dict[str, Agent] = dict(spec.agents)
        self.instructions = dict(instructions)
        self._invoked: set[str] = set()

    def run(self) -> list[Draft]:
        """Expand everything.

        Raises:
            DocumentInvalid: there are too many tasks to go on.
        """
        try:
            self._tasks(self._spec.tasks, "spec.tasks", _Frame())
            self._unused()
        except _TooMany:
            self._found.raise_errors()
        return self.drafts

    def _unused(self) -> None:
        """Look at definitions that nothing uses: what is wrong with them is said, and nothing is planned."""
        kept, counts = self.drafts, (self.items, self.iterations)
        for name, definition in self._spec.subworkflows.items():
            if name not in self._invoked:
                self.drafts = []
                at = f"spec.subworkflows.{name}"
                task = Task(id="unused", uses=f"workflow:{name}")
                self._invoke(task, at, _Frame(), _Child("unused", ()), definition, name)
                self.spare.append(self.drafts)
        self.drafts, (self.items, self.iterations) = kept, counts

    def _add(self, draft: Draft) -> Draft:
        if len(self.drafts) == PLANNED_TASKS_MAX:
            said = f"The workflow expands to more than {PLANNED_TASKS_MAX:,} tasks."
            self._found.add("schema_violation", draft.path, said, help="Let it do less in one run.")
            raise _TooMany
        if len(draft.id) > PLANNED_ID_CHARS_MAX:
            said = f"Expanded, the id of task `{draft.name}` has {len(draft.id)} characters."
            self._found.add("schema_violation", f"{draft.path}.id", said, help=f"The most are {PLANNED_ID_CHARS_MAX}.")
        self.drafts.append(draft)
        return draft

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
            self._task(task, at, frame, tuple(needs))
        return [draft.id for draft in self.drafts[before:]]

    # -- one task -------------------------------------------------------------------------------------------------------
    def _task(self, task: Task, path: str, frame: _Frame, needs: tuple[str, ...]) -> None:
        self._exclusive(task, path)
        id = frame.prefix + task.id
        if task.loop is not None:
            self._loop(task, path, frame, id, needs)
        elif task.foreach is not None or task.matrix is not None:
            self._each(task, path, frame, id, needs)
        else:
            self._single(task, path, frame, _Child(id, needs))

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
            name = task.foreach.as_
            if name in RESERVED:
                said = f"Task `{task.id}` calls its items `{name}`, which is reserved."
                self._found.add("schema_violation", f"{place}.as", said)
            self._shadow(task, path, name)
            bindings: Iterator[dict[str, Json]] = (
                {name: item, "foreachIndex": index} for index, item in enumerate(task.foreach.items)
            )
        else:
            assert task.matrix is not None
            axes = sorted(task.matrix.axes)
            count, most, place = 1, task.matrix.max_items, f"{path}.matrix"
            for axis in axes:
                count *= len(task.matrix.axes[axis])
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

    def _shadow(self, task: Task, path: str, name: str) -> None:
        if name in task.vars:
            self._found.add(
                "schema_violation",
                f"{path}.vars.{name}",
                f"The variable `{name}` is bound by the expansion of `{task.id}`.",
            )

    def _each(self, task: Task, path: str, frame: _Frame, id: str, needs: tuple[str, ...]) -> None:
        children = []
        bare = replace(task, foreach=None, matrix=None)
        for index, binding in enumerate(self._bindings(task, path)):
            child = f"{id}--{index:04d}-{digest_id(binding)}"
            children.append(child)
            self._single(bare, path, frame, _Child(child, needs, binding))
        self._aggregate(task, path, frame, _Child(id, needs), "aggregate", children)

    def _loop(self, task: Task, path: str, frame: _Frame, id: str, needs: tuple[str, ...]) -> None:
        assert task.loop is not None
        loop = task.loop
        self.iterations += loop.max_iterations
        children: list[str] = []
        at = f"{path}.loop.while"
        bare = replace(task, loop=None, when=loop.while_)
        for index in range(loop.max_iterations):
            bound: dict[str, Json] = {"loopIndex": index}
            child = f"{id}--{index:04d}-{digest_id(bound)}"
            if not children:
                bound["loopPrevious"] = loop.initial
            previous = children[-1] if children else ""
            self._single(bare, path, frame, _Child(child, (*needs, *children[-1:]), bound, previous, at))
            children.append(child)
        draft = self._aggregate(task, path, frame, _Child(id, needs), "loop", children)
        draft.guard = self._condition(loop.while_, at, frame)

    def _aggregate(
        self, task: Task, path: str, frame: _Frame, child: _Child, kind: TaskKind, children: list[str]
    ) -> Draft:
        """What stands for an expanded task. Its output has a shape of its own: ``outputSchema`` is that of the children."""
        return self._add(Draft(
            child.id, kind, task.uses, path, name=task.id, prefix=frame.prefix, needs=[*children, *child.needs],
            asks=child.needs, vars=task.vars, vars_files=task.vars_files, children=tuple(children), failure=task.failure,
        ))  # fmt: skip

    def _single(self, task: Task, path: str, frame: _Frame, child: _Child) -> None:
        kind, _, target = task.uses.partition(":")
        if kind == "workflow":
            self._invocation(task, path, frame, child, target)
            return
        if kind == "team":
            self._found.add("unsupported_capability", f"{path}.uses", "`team:` is not supported.",
                            help="Write agents as tasks, with a typed hand-over between them.")  # fmt: skip
        action = self._spec.actions.get(target) if kind == "action" else None
        draft = Draft(
            child.id, "router" if task.uses == "router" else ("agent" if kind == "agent" else "action"), task.uses, path,
            name=task.id, prefix=frame.prefix, target=self._seen(kind, target, frame), needs=list(child.needs),
            asks=child.needs, bound=child.bound, vars=task.vars, vars_files=task.vars_files, own=frozenset(task.with_),
            with_=self._given(action, target, task.with_, f"{path}.with", frame),
            when_path=child.when_path or f"{path}.when", retry=task.retry, timeout_seconds=task.timeout_seconds,
            failure=task.failure, output_schema=task.output_schema, memory_writes=task.memory_writes,
            previous=child.previous, namespace=frame.prefix, compensate=self._compensate(task, path, frame),
            route=self._route(task, path, frame),
        )  # fmt: skip
        if task.when is not None:
            draft.when = self._condition(task.when, draft.when_path, frame)
        if action is not None and frame.prefix and draft.memory_writes is not None:
            draft.memory_writes = tuple(frame.prefix + key for key in draft.memory_writes)
        self._add(draft)

    def _given(
        self, action: Action | None, name: str, given: dict[str, Json], path: str, frame: _Frame
    ) -> dict[str, Json]:
        """What a task gives its action, over the action's defaults, in the names of the plan."""
        own: dict[str, Json] = self._renamed(given, path, frame)
        if action is None:
            return own
        left = {key: value for key, value in action.with_.items() if key not in given}
        whole = {**self._renamed(left, f"spec.actions.{name}.with", frame), **own} if left else own
        return self._namespaced(action, whole, path, frame) if frame.prefix else whole

    def _route(self, task: Task, path: str, frame: _Frame) -> Route | None:
        if task.route is None:
            return None
        cases = tuple(
            Case(equals=case.equals, tasks=tuple(frame.prefix + id for id in case.tasks)) for case in task.route.cases
        )
        default = tuple(frame.prefix + id for id in task.route.default)
        select = self._renamed(task.route.select, f"{path}.route.select", frame)
        return Route(select=select, cases=cases, default=default)

    def _compensate(self, task: Task, path: str, frame: _Frame) -> Compensate | None:
        inverse = task.compensate
        if inverse is None:
            return None
        kind, _, name = inverse.uses.partition(":")
        action = self._spec.actions.get(name) if kind == "action" else None
        given = self._given(action, name, inverse.with_, f"{path}.compensate.with", frame)
        return replace(inverse, uses=f"{kind}:{self._seen(kind, name, frame)}" if action else inverse.uses, with_=given)

    # -- sub-workflows ----------------------------------------------------------------------------------------------------
    def _invocation(self, task: Task, path: str, frame: _Frame, child: _Child, name: str) -> None:
        definition = self._spec.subworkflows.get(name)
        if definition is None:
            self._found.add("missing_reference", f"{path}.uses", f"There is no sub-workflow `{name}`.",
                            help=nearest(name, self._spec.subworkflows))  # fmt: skip
        elif name in frame.stack:
            around = " -> ".join((*frame.stack[frame.stack.index(name) :], name))
            self._found.add("dependency_cycle", f"{path}.uses", f"Sub-workflows use each other in a circle: {around}.")
            self._invoked.add(name)
        elif len(frame.stack) == SUBWORKFLOW_DEPTH_MAX:
            said = f"Sub-workflows are nested deeper than {SUBWORKFLOW_DEPTH_MAX}."
            self._found.add("schema_violation", f"{path}.uses", said, help="Use fewer levels.")
        else:
            self._ignored(task, path)
            self._invoke(task, path, frame, child, definition, name)
            return
        self._add(Draft(child.id, "outputs", task.uses, path, name=task.id, prefix=frame.prefix,
                        needs=list(child.needs), asks=child.needs))  # fmt: skip

    def _ignored(self, task: Task, path: str) -> None:
        """What a task that uses a sub-workflow cannot have, or has for nothing."""
        for field, wrong in (("compensate", task.compensate), ("memoryWrites", task.memory_writes)):
            if wrong is not None:
                said = f"Task `{task.id}` uses a sub-workflow, and has `{field}`."
                self._found.add(
                    "schema_violation", f"{path}.{field}", said, help="Write it at the tasks of the sub-workflow."
                )
        for field, given in (("retry", task.retry != Retry()), ("timeoutSeconds", task.timeout_seconds is not None)):
            if given:
                said = f"Task `{task.id}` uses a sub-workflow; its `{field}` has no effect."
                self._found.warn(
                    "ignored_field", f"{path}.{field}", said, help="Write it at the tasks of the sub-workflow."
                )

    def _invoke(self, task: Task, path: str, frame: _Frame, child: _Child, definition: Subworkflow, name: str) -> None:
        self._invoked.add(name)
        id = child.id
        entry = {"workflow": name, "inputs": definition.inputs, "inputSchema": definition.input_schema}
        boundary = f"{id}--inputs-{digest_id(entry)}"
        given = {**definition.inputs, **self._renamed(task.with_, f"{path}.with", frame)}
        draft = Draft(
            boundary, "inputs", task.uses, path, name=task.id, prefix=frame.prefix, needs=list(child.needs),
            asks=child.needs, bound=child.bound, vars=task.vars, vars_files=task.vars_files, own=frozenset(task.with_),
            with_=given, when_path=child.when_path or f"{path}.when", failure=task.failure, previous=child.previous,
            input_schema=definition.input_schema,
        )  # fmt: skip
        if task.when is not None:
            draft.when = self._condition(task.when, draft.when_path, frame)
        self._add(draft)
        inner = _Frame(f"{id}--", boundary, (*frame.stack, name))
        at = f"spec.subworkflows.{name}"
        children = self._tasks(definition.tasks, f"{at}.tasks", inner)
        self._add(
            Draft(id, "outputs", task.uses, path, name=task.id, prefix=inner.prefix, needs=[boundary, *children],
                  asks=child.needs, failure=task.failure, outputs=self._renamed(definition.outputs, f"{at}.outputs", inner),
                  outputs_path=f"{at}.outputs", output_schema=_both(definition, task))
        )  # fmt: skip

    def _namespaced(self, action: Action, given: dict[str, Json], path: str, frame: _Frame) -> dict[str, Json]:
        """Keys of working memory and namespaces of long-term memory inside a sub-workflow are those of its invocation."""
        field = "key" if action.kind in MEMORY_KINDS else ("namespace" if action.kind in LONG_TERM_KINDS else "")
        value = given.get(field)
        if not isinstance(value, str):
            return given
        if "${{" in value:
            said = f"Inside a sub-workflow `{field}` is a literal, no template."
            self._found.add("invalid_template", f"{path}.{field}", said)
            return given
        return {**given, field: frame.prefix + value}

    # -- renaming ---------------------------------------------------------------------------------------------------------
    def _seen(self, kind: str, name: str, frame: _Frame) -> str:
        """The name of an action or agent as an invocation sees it: its own, unless its templates read what is renamed."""
        authored: Mapping[str, Any] = self._spec.actions if kind == "action" else self._spec.agents
        if not frame.prefix or name not in authored:
            return name
        seen = frame.prefix + name
        while seen in authored:
            seen += "_"
        if kind == "agent":
            text = self.instructions.get(name, "")
            if self._reads_renamed(text, frame):
                self.agents[seen] = authored[name]
                self.instructions[seen] = self._renamed(text, f"spec.agents.{name}.instructions", frame)
                return seen
        else:
            action = self._spec.actions[name]
            held = {field: value for field in RENDERED_FIELDS if (value := getattr(action, field))}
            plain = msgspec.json.decode(msgspec.json.encode(held))
            if self._reads_renamed(plain, frame):
                renamed = self._renamed(plain, f"spec.actions.{name}", frame)
                self.actions[seen] = msgspec.convert({**msgspec.to_builtins(action), **renamed}, Action)
                return seen
        return name

    @staticmethod
    def _reads_renamed(value: Any, frame: _Frame) -> bool:
        try:
            references = templates.parse(value).references
        except ExpressionError:
            return False  # its place says so
        return any(reference.root in ("inputs", "memory", "tasks") for reference in references)

    def _renamed(self, value: Any, path: str, frame: _Frame) -> Any:
        """A value in the names of the plan."""
        if not frame.prefix:
            return value
        try:
            template = templates.parse(value)
            self._by_key(template.references, value, path, frame)
            return template.renamed(frame.rename).source
        except ExpressionError as error:
            place = getattr(error, "place", "")
            self._found.add("invalid_template", joined(path, place), error.message, help=error.help)
            return value

    def _condition(self, text: str, path: str, frame: _Frame) -> str:
        """A condition in its canonical form, over the plan's names."""
        try:
            parsed = templates.condition(text)
            self._by_key(parsed.references, text, path, frame)
            return parsed.renamed(frame.rename).text
        except ExpressionError as error:
            self._found.add("invalid_template", path, error.message, help=error.help)
            return text

    def _by_key(self, references: Iterable[Reference], value: Any, path: str, frame: _Frame) -> None:
        whole = Reference("memory", ())
        if frame.prefix and whole in references:
            path = inner_place(path, whole, value)
            said = "Inside a sub-workflow, memory is read by key: what it holds of others is theirs."
            self._found.add("invalid_template", path, said, help="Write memory.KEY.")


def joined(path: str, place: str) -> str:
    """The path of a place inside a value."""
    if not place or place == "value":
        return path
    return path + place if place.startswith("[") else f"{path}.{place}"


def inner_place(path: str, reference: Reference, value: Any) -> str:
    """The place of the string in which a reference stands."""
    if isinstance(value, str):
        return path
    try:
        for place, text in templates.strings(value):
            if "${{" in text and reference in templates.parse(text).references:
                return joined(path, place)
    except ExpressionError:
        pass
    return path


def _both(definition: Subworkflow, task: Task) -> Json:
    """The schema of a sub-workflow's outputs, and that of the task that uses it."""
    schemas = [schema for schema in (definition.output_schema, task.output_schema) if schema is not None]
    return {"allOf": schemas} if len(schemas) > 1 else (schemas[0] if schemas else None)
