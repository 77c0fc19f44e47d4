"""What must hold of the expanded tasks of a document: each finding with its place, none hides another.

A task that was expanded is spoken of as it was authored, so that one fault is one finding however often it was copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from perdure.definitions.workflow import Action, Compensate
from perdure.rules import authority
from perdure.workflow import templates
from perdure.workflow.diagnostics import Diagnostics, nearest
from perdure.workflow.document import OWN, Source
from perdure.workflow.expand import Draft, Expansion, inner_place, joined
from perdure.workflow.expressions import ExpressionError, Reference
from perdure.workflow.reads import rendered_fields
from perdure.workflow.requirements import asked, effect_of, touch_of

_sorted = msgspec.json.Encoder(order="sorted").encode
_WRITERS = ("builtin.memory.write", "builtin.long_term_memory.promote")
_REQUIRED: dict[str, tuple[str, ...]] = {
    "builtin.assert": ("that",), "builtin.read": ("path",), "builtin.write": ("path", "content"),
    "builtin.memory.read": ("key",), "builtin.memory.write": ("key", "value"),
    "builtin.long_term_memory.promote": ("key", "value"), "builtin.long_term_memory.read": ("key",),
    "builtin.long_term_memory.search": ("query",), "builtin.long_term_memory.write": ("key",),
}  # fmt: skip
_EITHER: dict[str, tuple[str, ...]] = {"builtin.http": ("url",), "builtin.wait": ("seconds", "until")}
"""What an action of a kind must be given: in ``with``; or one of them, in ``with`` or as a field of the action."""


class Checks:
    """The checks of one list of expanded tasks."""

    def __init__(self, source: Source, expansion: Expansion, drafts: list[Draft]) -> None:
        self._spec = source.document.spec
        self._found: Diagnostics = source.diagnostics
        self._own = source.dialect == OWN
        self._actions = expansion.actions
        self._agents = expansion.agents
        self._instructions = expansion.instructions
        self._drafts = drafts
        self._by_id = {draft.id: draft for draft in drafts}
        self._needs = {draft.id: frozenset(draft.needs) for draft in drafts}
        self._looked: set[str] = set()  # actions that policy was asked about

    def run(self) -> None:
        """Everything but what needs the order of tasks."""
        if len(self._by_id) < len(self._drafts):
            seen: set[str] = set()
            for draft in self._drafts:
                if draft.id in seen:
                    self._found.add("duplicate_task", f"{draft.path}.id",
                                    f"The task id `{draft.id}` is used twice after expansion.")  # fmt: skip
                seen.add(draft.id)
        for draft in self._drafts:
            self._draft(draft)

    # -- tasks ------------------------------------------------------------------------------------------------------------
    def _draft(self, draft: Draft) -> None:
        self._templates(draft)
        if draft.kind in ("action", "agent", "router"):
            self._uses(draft)
            self._given(draft)
            self._writes(draft)
            self._compensation(draft)
            self._allowed(draft)
        if draft.route is not None:
            self._route(draft)

    def _action_of(self, draft: Draft) -> Action | None:
        return self._actions.get(draft.target) if draft.kind == "action" else None

    def _uses(self, draft: Draft) -> None:
        kind, _, name = draft.uses.partition(":")
        path = f"{draft.path}.uses"
        if draft.kind not in ("action", "agent"):
            return
        known: Iterable[str]
        if kind == "action":
            known = self._spec.actions
        elif kind == "agent":
            known = self._spec.agents
        else:
            if kind != "team":
                self._found.add("schema_violation", path, f"Task `{draft.name}` uses `{draft.uses}`.",
                                help="Write action:NAME, agent:NAME, workflow:NAME or router.")  # fmt: skip
            return
        if name not in known:
            self._found.add("missing_reference", path, f"There is no {kind} `{name}`.", help=nearest(name, known))

    def _given(self, draft: Draft) -> None:
        action = self._action_of(draft)
        if action is not None:
            self._required(action, draft.with_, draft.path, f"Task `{draft.name}`")

    def _required(self, action: Action, given: dict[str, Any], path: str, who: str) -> None:
        for field in _REQUIRED.get(action.kind, ()):
            if field not in given:
                self._found.add("schema_violation", f"{path}.with", f"{who} is {action.kind}, and has no `{field}`.",
                                help=f"Write it into `with`, or into that of the action: {field}: ...")  # fmt: skip
        either = _EITHER.get(action.kind, ())
        if either and not any(field in given or getattr(action, field) is not None for field in either):
            said = f"{who} is {action.kind}, and has no {' and no '.join(f'`{field}`' for field in either)}."
            self._found.add("schema_violation", f"{path}.with", said, help="Write it into `with`, or at the action.")

    def _templates(self, draft: Draft) -> None:
        path = draft.path
        for key, value in draft.with_.items():
            at = f"{path}.with"
            if key not in draft.own:  # a default
                at = (
                    f"spec.subworkflows.{draft.used}.inputs"
                    if draft.kind == "inputs"
                    else f"spec.actions.{draft.used}.with"
                )
            self._template(draft, f"{at}.{key}", value, "value")
        if draft.when is not None:
            self._template(draft, draft.when_path, draft.when, "condition")
        if draft.guard is not None:
            self._template(draft, f"{path}.loop.while", draft.guard, "condition")
        if draft.route is not None:
            self._template(draft, f"{path}.route.select", draft.route.select, "exact")
        if draft.outputs is not None:
            self._template(draft, draft.outputs_path, draft.outputs, "value")
        if draft.kind == "agent":
            text = self._instructions.get(draft.target, "")
            self._template(draft, f"spec.agents.{draft.used}.instructions", text, "value")
        action = self._action_of(draft)
        if action is not None:
            for field, value in rendered_fields(action).items():
                self._template(draft, f"spec.actions.{draft.used}.{field}", value, "value")

    def _template(self, draft: Draft, path: str, value: Any, shape: str) -> None:
        try:
            if shape == "condition":
                references = templates.condition(value).references
            elif shape == "exact":
                exact = templates.exact(value)
                if exact is None:
                    said = f"{path.rpartition('.')[2]} of `{draft.name}` is not exactly one template."
                    self._found.add("invalid_template", path, said)
                    return
                references = exact.references
            else:
                references = templates.parse(value).references
        except ExpressionError as error:
            self._found.add(
                "invalid_template", joined(path, getattr(error, "place", "")), error.message, help=error.help
            )
            return
        for reference in sorted(references):
            self._reference(draft, path, reference, value)

    def _reference(self, draft: Draft, path: str, reference: Reference, value: Any) -> None:
        if reference.root == "tasks":
            id = reference.path[0]
            shown = draft.shown(reference)
            name = id.removeprefix(draft.prefix)
            if id not in self._by_id:
                known = [one.removeprefix(draft.prefix) for one in self._by_id if one.startswith(draft.prefix)]
                told = nearest(name, known)
                if draft.prefix and name in self._by_id:
                    told = "A sub-workflow reads what it is given: pass it in `with`, and read `inputs`."
                self._found.add("missing_reference", inner_place(path, reference, value),
                                f"`{shown}`: there is no task `{name}`.", help=told)  # fmt: skip
            elif id not in self._needs[draft.id]:
                self._found.add("missing_reference", inner_place(path, reference, value),
                                f"Task `{draft.name}` reads `{name}` and does not need it.",
                                help=f"Add `{name}` to its needs.")  # fmt: skip
        elif reference.root == "vars" and reference.path and not self._has_variable(draft, reference.path[0]):
            name = reference.path[0]
            self._found.add("missing_reference", inner_place(path, reference, value),
                            f"`{reference}`: task `{draft.name}` has no variable `{name}`.",
                            help=nearest(name, draft.vars))  # fmt: skip

    @staticmethod
    def _has_variable(draft: Draft, name: str) -> bool:
        if name in draft.vars or (name == "loopPrevious" and draft.previous):
            return True
        return draft.guard is not None and name in ("loopIndex", "loopPrevious")

    def _writes(self, draft: Draft) -> None:
        action = self._action_of(draft)
        writer = action is not None and action.kind in _WRITERS
        path = f"{draft.path}.memoryWrites"
        if not writer:
            if draft.memory_writes:
                self._found.add("schema_violation", path, f"Task `{draft.name}` writes no working memory.")
            draft.memory_writes = None
            return
        key = draft.with_.get("key")
        declared = draft.memory_writes
        if declared is not None and (len(set(declared)) < len(declared) or not declared):
            said = f"The memoryWrites of `{draft.name}` are empty or hold a key twice."
            self._found.add("schema_violation", path, said)
        if key is None:
            return  # that it has none is a finding of its own
        if not isinstance(key, str):
            self._found.add(
                "schema_violation", f"{draft.path}.with.key", f"The `key` of task `{draft.name}` is no text."
            )
        elif "${{" in key:
            if not declared:
                said = f"The key of `{draft.name}` is a template; memoryWrites must name what it may be."
                self._found.add("schema_violation", path, said)
        elif declared is None:
            draft.memory_writes = (key,)
        elif key not in declared:
            said = f"The memoryWrites of `{draft.name}` do not hold its key `{key.removeprefix(draft.prefix)}`."
            self._found.add("schema_violation", path, said)

    def _compensation(self, draft: Draft) -> None:
        inverse = draft.compensate
        if inverse is None:
            return
        path = f"{draft.path}.compensate"
        kind, _, name = inverse.uses.partition(":")
        action = self._actions.get(name) if kind == "action" else None
        shown = f"{kind}:{name.removeprefix(draft.prefix)}"
        if action is None:
            said = f"`{shown}` is no action."
            self._found.add("missing_reference", f"{path}.uses", said, help=nearest(name, self._spec.actions))
        elif not self._mutates(action):
            self._found.add("schema_violation", f"{path}.uses", f"`{shown}` changes nothing, so it undoes nothing.")
        else:
            self._required(action, inverse.with_, path, f"The inverse of task `{draft.name}`")
        if not self._may_mutate(draft):
            said = f"Task `{draft.name}` changes nothing, so there is nothing to undo."
            self._found.add("schema_violation", path, said)
        self._inverse_reads(draft, inverse, f"{path}.with")

    def _inverse_reads(self, draft: Draft, inverse: Compensate, path: str) -> None:
        """An inverse may read the output of any task of the run, also of its own."""
        try:
            references = templates.parse(inverse.with_).references
        except ExpressionError as error:
            self._found.add(
                "invalid_template", joined(path, getattr(error, "place", "")), error.message, help=error.help
            )
            return
        for reference in sorted(references):
            if reference.root == "tasks" and reference.path[0] not in self._by_id:
                said = f"`{draft.shown(reference)}`: there is no task `{reference.path[0].removeprefix(draft.prefix)}`."
                self._found.add("missing_reference", inner_place(path, reference, inverse.with_), said)
            elif reference.root == "vars" and reference.path and not self._has_variable(draft, reference.path[0]):
                said = f"`{reference}`: task `{draft.name}` has no variable `{reference.path[0]}`."
                self._found.add("missing_reference", inner_place(path, reference, inverse.with_), said)

    def _mutates(self, action: Action) -> bool:
        """Whether an action of the document can change something."""
        kind, effect_class, _, _ = effect_of(action, self._spec.mcp_servers)
        return action.kind != "builtin.approval" and kind != "pure" and effect_class not in ("pure", "observe")

    def _may_mutate(self, draft: Draft) -> bool:
        if draft.kind == "action":
            action = self._action_of(draft)
            return action is None or self._mutates(action)
        if draft.kind == "agent":
            agent = self._agents.get(draft.target)
            tools = [self._spec.tools[name] for name in (agent.tools if agent else ()) if name in self._spec.tools]
            return any(tool.effect_class not in ("pure", "observe", "model") for tool in tools)
        return False

    def _allowed(self, draft: Draft) -> None:
        """What policy forbids whatever the input is: a name that is denied, a file that may be written nowhere."""
        self._judged(self._action_of(draft), draft.used, f"{draft.path}.uses")
        if draft.compensate is not None:
            kind, _, target = draft.compensate.uses.partition(":")
            action = self._actions.get(target) if kind == "action" else None
            self._judged(action, target.removeprefix(draft.prefix), f"{draft.path}.compensate.uses")

    def _judged(self, action: Action | None, name: str, path: str) -> None:
        policy = self._spec.policy
        if action is None or name in self._looked:
            return
        self._looked.add(name)
        judged = asked(touch_of(action, self._spec.mcp_servers, own=self._own), policy)
        if isinstance(judged, authority.Refused):
            self._found.add("policy_denied", path, f"Action `{name}` is denied: {judged.reason}.")
        if action.kind == "builtin.write" and not policy.writable_roots:
            said = f"Action `{name}` writes files, and no folder may be written."
            self._found.add("policy_denied", path, said, help="Add one to spec.policy.writableRoots.")

    # -- routers ----------------------------------------------------------------------------------------------------------
    def _route(self, draft: Draft) -> None:
        assert draft.route is not None
        path = f"{draft.path}.route"
        seen: set[str] = set()
        values: set[bytes] = set()  # JSON, because 1 is not "1" and not true
        for index, case in enumerate(draft.route.cases):
            value = _sorted(case.equals)
            if value in values:
                said = f"Router `{draft.name}` has a case twice."
                self._found.add("schema_violation", f"{path}.cases[{index}].equals", said)
            values.add(value)
            self._destinations(draft, f"{path}.cases[{index}].tasks", case.tasks, seen)
        self._destinations(draft, f"{path}.default", draft.route.default, seen)

    def _destinations(self, draft: Draft, path: str, tasks: tuple[str, ...], seen: set[str]) -> None:
        for index, id in enumerate(tasks):
            at = f"{path}[{index}]"
            target, name = self._by_id.get(id), id.removeprefix(draft.prefix)
            if id in seen:
                self._found.add("schema_violation", at, f"Router `{draft.name}` leads to `{name}` twice.")
            seen.add(id)
            if target is None:
                known = [one.removeprefix(draft.prefix) for one in self._by_id if one.startswith(draft.prefix)]
                said = f"Router `{draft.name}` leads to `{name}`, which does not exist."
                self._found.add("missing_reference", at, said, help=nearest(name, known))
            elif draft.id not in target.asks:
                said = f"`{name}` is a destination of `{draft.name}` and does not need it."
                self._found.add("missing_reference", at, said, help=f"Add `{draft.name}` to the needs of `{name}`.")

    # -- the graph --------------------------------------------------------------------------------------------------------
    def cycle(self, circle: list[Draft]) -> None:
        """A circle of needs was found."""
        names: list[str] = []
        for draft in [*reversed(circle), circle[-1]]:
            if not names or names[-1] != draft.name or len(circle) == 1:
                names.append(draft.name)
        said = f"Tasks need each other in a circle: {' -> '.join(names)}."
        self._found.add("dependency_cycle", f"{circle[0].path}.needs", said)

    def memory_conflicts(self, order: list[str]) -> None:
        """Tasks that may run side by side and write the same key of working memory."""
        if self._spec.runtime.max_concurrency == 1 or len(order) < len(self._drafts):
            return
        place = {id: index for index, id in enumerate(order)}
        writers: dict[str, list[int]] = {}
        for id in order:
            for key in self._by_id[id].memory_writes or ():
                writers.setdefault(key, []).append(place[id])
        shared = {key: places for key, places in writers.items() if len(places) > 1}
        if not shared:
            return
        before: list[int] = []  # of each task, one bit for each that must have ended
        for id in order:
            mask = 0
            for need in self._needs[id]:
                mask |= before[place[need]] | 1 << place[need]
            before.append(mask)
        for key, places in shared.items():
            others = 0
            for at in places:
                if free := others & ~before[at]:
                    first = self._by_id[order[(free & -free).bit_length() - 1]]
                    self._conflict(self._by_id[order[at]], first, key)
                others |= 1 << at

    def _conflict(self, one: Draft, other: Draft, key: str) -> None:
        key = key.removeprefix(one.prefix)
        if one.path == other.path:
            said = f"Children of `{one.name}` may run side by side and write the same key `{key}`."
            told = "Let each write a key of its own, named in memoryWrites."
        else:
            said = f"`{other.name}` and `{one.name}` may run side by side and both write `{key}`."
            told = "Let one need the other, or write other keys."
        self._found.add("memory_conflict", f"{one.path}.memoryWrites", said, help=told)

    def budgets(self, expansion: Expansion, tasks: int) -> None:
        """Limits that the plan itself goes over."""
        limits = self._spec.runtime.budgets
        for name, limit, count in (
            ("maxTasks", limits.max_tasks, tasks),
            ("maxExpansionItems", limits.max_expansion_items, expansion.items),
            ("maxLoopIterations", limits.max_loop_iterations, expansion.iterations),
        ):
            if limit is not None and count > limit:
                self._found.add(
                    "budget_exceeded",
                    f"spec.runtime.budgets.{name}",
                    f"The workflow has {count:,}; {name} is {limit:,}.",
                )
        if limits.max_cost_microusd is not None or any(
            agent.usage_limit and agent.usage_limit.max_cost_usd for agent in self._spec.agents.values()
        ):
            self._prices(limits.max_cost_microusd is not None)

    def _prices(self, whole: bool) -> None:
        pricing = self._spec.runtime.pricing
        for name, agent in self._spec.agents.items():
            limited = whole or (agent.usage_limit is not None and agent.usage_limit.max_cost_usd is not None)
            if limited and (pricing is None or f"{agent.provider}/{agent.model}" not in pricing.models):
                self._found.add("unsupported_capability", f"spec.agents.{name}",
                                f"A cost limit needs a price for `{agent.provider}/{agent.model}`.",
                                help="Add it to spec.runtime.pricing.models.")  # fmt: skip

    def outputs(self, variables: dict[str, Any]) -> None:
        """What the outputs of the workflow read. ``variables``: those outside of tasks."""
        outputs = self._spec.outputs
        try:
            references = templates.parse(outputs).references
        except ExpressionError as error:
            at = joined("spec.outputs", getattr(error, "place", ""))
            self._found.add("invalid_template", at, error.message, help=error.help)
            return
        for reference in sorted(references):
            name = reference.path[0] if reference.path else ""
            if reference.root == "tasks" and name not in self._by_id:
                at = inner_place("spec.outputs", reference, outputs)
                said = f"`{reference}`: there is no task `{name}`."
                self._found.add("missing_reference", at, said, help=nearest(name, self._by_id))
            elif reference.root == "vars" and name and name not in variables:
                at = inner_place("spec.outputs", reference, outputs)
                said = f"`{reference}`: the workflow has no variable `{name}`."
                self._found.add("missing_reference", at, said, help=nearest(name, variables))
