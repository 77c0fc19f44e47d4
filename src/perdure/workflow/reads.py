"""What the expressions of a task read: of working memory, of variables, of other tasks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from perdure.definitions.workflow import RENDERED_FIELDS, Action
from perdure.workflow import templates
from perdure.workflow.expand import MEMORY_KINDS, Draft
from perdure.workflow.expressions import ExpressionError, Reference

_encode = msgspec.json.Encoder().encode


def rendered_fields(action: Action) -> dict[str, Any]:
    """Fields of an action that may hold templates, as JSON values."""
    return {name: msgspec.json.decode(_encode(value)) for name in RENDERED_FIELDS if (value := getattr(action, name))}


def of_action(action: Action) -> frozenset[Reference]:
    """What the templates of an action itself read; nothing of one that cannot be read, which has its finding."""
    return _of_value(rendered_fields(action))


def of_text(text: str) -> frozenset[Reference]:
    """What the instructions of an agent read."""
    return _of_value(text)


def _of_value(value: Any) -> frozenset[Reference]:
    try:
        return templates.parse(value).references
    except ExpressionError:
        return frozenset()


def _of_condition(text: str | None) -> frozenset[Reference]:
    try:
        return frozenset() if text is None else templates.condition(text).references
    except ExpressionError:
        return frozenset()


class Reads:
    """What tasks read. What an action or agent reads is looked up once.

    Args:
        actions, instructions: by the names that drafts refer to.
    """

    def __init__(self, actions: Mapping[str, Action], instructions: Mapping[str, str]) -> None:
        self._actions = actions
        self._instructions = instructions
        self._of: dict[tuple[str, str], frozenset[Reference]] = {}

    def references(self, draft: Draft) -> set[Reference]:
        """Everything that a task reads before or while it runs."""
        found = {*_of_value(draft.with_), *_of_condition(draft.when), *_of_condition(draft.guard), *self._shared(draft)}
        if draft.outputs:
            found |= _of_value(draft.outputs)
        if draft.route is not None:
            found |= _of_value(draft.route.select)
        return found

    def _shared(self, draft: Draft) -> frozenset[Reference]:
        key = (draft.kind, draft.target)
        if key not in self._of:
            self._of[key] = frozenset()
            if draft.kind == "agent":
                self._of[key] = of_text(self._instructions.get(draft.target, ""))
            elif draft.kind == "action" and draft.target in self._actions:
                self._of[key] = of_action(self._actions[draft.target])
        return self._of[key]

    def memory(self, draft: Draft) -> tuple[str, ...] | None:
        """Keys of working memory that a task can read; None: all of it."""
        keys: set[str] = set()
        for reference in self.references(draft):
            if reference.root == "memory":
                if not reference.path:
                    return None
                keys.add(reference.path[0])
        action = self._actions.get(draft.target) if draft.kind == "action" else None
        if action is not None and action.kind in MEMORY_KINDS:
            key = draft.with_.get("key")
            if isinstance(key, str) and "${{" not in key:
                keys.add(key)
            elif draft.memory_writes is None:
                return None
            else:  # what was there before is a part of what a write gives
                keys.update(draft.memory_writes)
        return tuple(sorted(keys))

    def variables(self, draft: Draft) -> dict[str, Any]:
        """The variables of a task that it, or its inverse, can read, and those that its expansion gives it."""
        references = self.references(draft)
        if draft.compensate is not None:
            references |= _of_value(draft.compensate.with_)
            action = self._actions.get(draft.compensate.uses.partition(":")[2])
            references |= frozenset() if action is None else of_action(action)
        names = {reference.path[0] if reference.path else "" for reference in references if reference.root == "vars"}
        if "" in names:
            return draft.vars
        return {name: value for name, value in draft.vars.items() if name in names or name in draft.bound}
