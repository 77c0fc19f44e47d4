"""Tasks that touch nothing outside: values in, a value out. Nothing is recorded before them; their end is the record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from perdure.errors import Invalid
from perdure.records.parts import Failure
from perdure.workflow import expressions, templates
from perdure.workflow.outcomes import Broken, Done, Outcome
from perdure.workflow.plan import PlannedTask
from perdure.workflow.schemas import problem
from perdure.workflow.values import Values

_sorted = msgspec.json.Encoder(order="sorted").encode


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are the same: 1 is not "1", and not true."""
    return bool(_sorted(left) == _sorted(right))


def result(output: Any, **more: Any) -> dict[str, Any]:
    """The common shape of what an action gives."""
    return {"status": "succeeded", "changed": False, **more, "output": output}


def assign(given: dict[str, Any]) -> Outcome:
    """``builtin.assign``: its input is its output."""
    return Done(
        {
            "status": "succeeded",
            "changed": False,
            "before": None,
            "after": None,
            "diff": None,
            "output": given,
            "predictability": "fully",
        }
    )


def check(given: dict[str, Any]) -> Outcome:
    """``builtin.assert``: fails unless ``that`` is true."""
    that = given.get("that")
    if not isinstance(that, bool):
        shown = type(that).__name__
        return Broken(Failure("input", f"builtin.assert needs `that` to be true or false; it is {shown}."))
    if not that:
        message = str(given.get("message") or "the assertion does not hold")
        return Broken(
            Failure("assertion", message), {"status": "failed", "changed": False, "passed": False}, "assertion"
        )
    return Done({"status": "succeeded", "changed": False, "passed": True})


def memory_read(given: dict[str, Any], memory: Mapping[str, Any]) -> Outcome:
    """``builtin.memory.read``: the value of a key; a missing one is a failure."""
    key = given.get("key")
    if not isinstance(key, str):
        return Broken(Failure("input", "builtin.memory.read needs a text `key`."))
    if key not in memory:
        return Broken(Failure("input", f"Working memory has no key {key!r}."))
    return Done({"status": "succeeded", "changed": False, "value": memory[key]})


def memory_write(task: PlannedTask, given: dict[str, Any], memory: Mapping[str, Any]) -> Outcome:
    """``builtin.memory.write``: a key gets a value when the task's batch is committed."""
    key, value = given.get("key"), given.get("value")
    if not isinstance(key, str) or "value" not in given:
        return Broken(Failure("input", "It needs a text `key` and a `value`."))
    if key not in (task.memory_writes or ()):
        declared = ", ".join(task.memory_writes or ()) or "none"
        return Broken(Failure("input", f"Task {task.id!r} may not write the key {key!r}; declared are: {declared}."))
    before = memory.get(key)
    changed = key not in memory or not same(before, value)
    output = {"status": "succeeded", "changed": changed, "before": before, "after": value, "key": key}
    return Done(output, put={key: value})


def route(task: PlannedTask, values: Values, scope: expressions.Scope) -> Outcome:
    """A router: the destinations of the case that equals the selected value, or the default's."""
    assert task.route is not None
    selected = templates.parse(task.route.select, "route.select").render(scope)
    for case in task.route.cases:
        if same(case.equals, selected):
            return _routed(selected, True, list(case.tasks))
    return _routed(selected, False, list(task.route.default))


def _routed(selected: Any, matched: bool, destinations: list[str]) -> Done:
    output = {"selected": selected, "matched": matched, "destinations": destinations}
    return Done(output, decision={"route": output})


def _items(task: PlannedTask, values: Values) -> list[dict[str, Any]]:
    items = []
    for index, child in enumerate(task.children):
        end = values.ended(child)
        failure = end.failure if end is not None else None
        items.append(
            {
                "index": index,
                "taskId": child,
                "state": "pending" if end is None else end.end,
                "output": values.outputs.get(child),
                "error": None if failure is None else failure.message,
            }
        )
    return items


def aggregate(task: PlannedTask, values: Values, scope: expressions.Scope) -> Outcome:
    """The parent of foreach or matrix children: what became of each, in the order of expansion."""
    return Done({"items": _items(task, values)})


def loop(task: PlannedTask, values: Values, scope: expressions.Scope) -> Outcome:
    """The end of a loop: how often it ran. A guard that is still true after the last is a failure."""
    items = _items(task, values)
    ran = [item for item in items if item["state"] != "skipped"]
    output = {"iterations": len(ran), "items": items}
    if any(item["state"] not in ("succeeded", "skipped") for item in items):
        return Broken(Failure("loop", f"An iteration of loop {task.id!r} did not succeed."), output)
    if task.guard is not None and len(ran) == len(items):
        last = {"loopIndex": len(items), "loopPrevious": items[-1]["output"]}
        again = scope._replace(vars={**scope.vars, **last})
        if expressions.truth(templates.condition(task.guard).evaluate(again)):
            said = f"Loop {task.id!r} ran {len(items)} times, the most it may, and its condition is still true."
            return Broken(Failure("loop", said), output)
    return Done(output)


def inputs(task: PlannedTask, values: Values, scope: expressions.Scope) -> Outcome:
    """The way into a sub-workflow: its inputs, rendered once and checked."""
    given = templates.parse(task.with_, "with").render(scope)
    if task.input_schema is not None and (wrong := problem(task.input_schema, given)):
        return Broken(Failure("input", f"The inputs of {task.id!r} do not fit its inputSchema: {wrong}."), given)
    return Done(given)


def outputs(task: PlannedTask, values: Values, scope: expressions.Scope) -> Outcome:
    """The way out of a sub-workflow: its outputs, rendered."""
    return Done(templates.parse(task.outputs or {}, "outputs").render(scope))


BODIES: dict[str, Callable[[PlannedTask, Values, expressions.Scope], Outcome]] = {
    "router": route,
    "aggregate": aggregate,
    "loop": loop,
    "inputs": inputs,
    "outputs": outputs,
}


def act(task: PlannedTask, kind: str, given: dict[str, Any], memory: Mapping[str, Any]) -> Outcome:
    """A pure action by its kind.

    Raises:
        Invalid: there is none of this kind.
    """
    match kind:
        case "builtin.assign":
            return assign(given)
        case "builtin.assert":
            return check(given)
        case "builtin.memory.read":
            return memory_read(given, memory)
        case "builtin.memory.write" | "builtin.long_term_memory.promote":
            return memory_write(task, given, memory)
        case _:
            raise Invalid(f"No action is of the kind {kind!r}.")


PURE = frozenset({"builtin.assign", "builtin.assert", "builtin.memory.read"})
"""Kinds whose end is all there is to record."""
WRITES_MEMORY = frozenset({"builtin.memory.write", "builtin.long_term_memory.promote"})
