"""From a document to its plan, or to everything that is wrong with it. Dispatches nothing, reads nothing more.

Expansion first; then every task is checked by itself and against the graph; then order, fingerprints and what a run will
need are fixed.
"""

from __future__ import annotations

import heapq
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import canonical
from perdure.definitions.workflow import Spec
from perdure.workflow import fingerprints, templates
from perdure.workflow.checks import Checks
from perdure.workflow.document import Source
from perdure.workflow.expand import Draft, Expansion
from perdure.workflow.expressions import ExpressionError, Reference
from perdure.workflow.plan import FORMAT_VERSION, BudgetPlan, Plan, PlannedTask, Predictability, Requirements
from perdure.workflow.requirements import predictability_of, requirements_of
from perdure.workflow.variables import Given, Variables

_RANK: dict[Predictability, int] = {"fully": 0, "partially": 1, "requires_execution": 2}


class Compiled(msgspec.Struct):
    """A plan and what people ask about it.

    Attributes:
        layers: task id to the winning layer (from 1) of each of its variables. warnings: findings that stop nothing.
    """

    plan: Plan
    layers: dict[str, dict[str, int]]
    warnings: list[Any]


def compile_source(source: Source, given: Given | None = None) -> Compiled:
    """Compile a document that was read.

    Args:
        given: the caller's variables.

    Raises:
        DocumentInvalid: with every finding, each with its place.
    """
    found, spec = source.diagnostics, source.document.spec
    caller = given or Given()
    for name in caller.reserved():
        found.add("invalid_variables", "spec.vars", f"The variable name `{name}` is reserved.")
    expansion = Expansion(spec, found)
    drafts = expansion.run()
    found.raise_errors()
    variables = Variables(spec, source.files, caller)
    layers: dict[str, dict[str, int]] = {}
    for draft in drafts:
        agent = spec.agents.get(draft.target) if draft.kind == "agent" else None
        bound = draft.vars
        draft.vars, layers[draft.id] = variables.winners(agent, draft.vars_files, bound)
        for name in ("loopIndex", "loopPrevious", "foreachIndex", "matrix", "matrixIndex"):
            if name in bound:  # what the expansion binds is no layer's to change
                draft.vars[name] = bound[name]
    instructions = _instructions(source)
    checks = Checks(source, drafts, instructions)
    checks.run()
    order = _order(drafts, checks)
    checks.memory_conflicts(order)
    checks.budgets(expansion, len(drafts))
    found.raise_errors()
    plan = _plan(source, spec, drafts, order, variables.winners()[0], instructions, expansion)
    return Compiled(plan, layers, [one for one in found.ordered() if one.severity == "warning"])


def _instructions(source: Source) -> dict[str, str]:
    texts = {}
    for name, agent in source.document.spec.agents.items():
        place = f"spec.agents.{name}"
        if (agent.instructions is None) == (agent.instructions_file is None):
            source.diagnostics.add(
                "schema_violation", place, f"Agent `{name}` needs exactly one of instructions and instructionsFile."
            )
        elif agent.instructions is not None:
            texts[name] = agent.instructions
        else:
            texts[name] = source.files.texts.get(agent.instructions_file or "", "")
    return texts


def _order(drafts: list[Draft], checks: Checks) -> list[str]:
    """Tasks in the order in which they are begun: by needs, then as declared. A circle is a finding that names it."""
    place = {draft.id: index for index, draft in enumerate(drafts)}
    following: dict[str, list[str]] = {draft.id: [] for draft in drafts}
    missing: dict[str, int] = {}
    for draft in drafts:
        known = [need for need in dict.fromkeys(draft.needs) if need in place]
        missing[draft.id] = len(known)
        for need in known:
            following[need].append(draft.id)
    ready = [place[id] for id, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        id = drafts[heapq.heappop(ready)].id
        order.append(id)
        for after in following[id]:
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, place[after])
    if len(order) < len(drafts):
        left = {draft.id: draft for draft in drafts}.keys() - set(order)
        checks.cycle(_circle([draft for draft in drafts if draft.id in left]))
    return order


def _circle(drafts: list[Draft]) -> list[Draft]:
    """One circle among tasks that all need something that is left."""
    by_id = {draft.id: draft for draft in drafts}
    path: list[str] = [drafts[0].id]
    seen = {drafts[0].id: 0}
    while True:
        following = next(need for need in by_id[path[-1]].needs if need in by_id)
        if following in seen:
            return [by_id[id] for id in path[seen[following] :]]
        seen[following] = len(path)
        path.append(following)


def _reads(draft: Draft, instructions: dict[str, str]) -> tuple[str, ...] | None:
    """Keys of working memory that a task's expressions read; None: all of it."""
    keys: set[str] = set()
    for reference in _references(draft, instructions):
        if reference.root == "memory":
            if not reference.path:
                return None
            keys.add(reference.path[0])
    return tuple(sorted(keys))


def _references(draft: Draft, instructions: dict[str, str]) -> set[Reference]:
    found: set[Reference] = set()
    try:
        found |= templates.parse(draft.with_).references
        found |= templates.parse(draft.outputs or {}).references
        for text in (draft.when, draft.guard):
            if text is not None:
                found |= templates.condition(text).references
        if draft.route is not None:
            found |= templates.parse(draft.route.select).references
        if draft.kind == "agent":
            found |= templates.parse(instructions.get(draft.target, "")).references
    except ExpressionError:
        pass  # it has its finding
    return found


def _plan(
    source: Source, spec: Spec, drafts: list[Draft], order: list[str], variables: dict[str, Any],
    instructions: dict[str, str], expansion: Expansion,
) -> Plan:  # fmt: skip
    default = spec.runtime.default_timeout_seconds
    tasks: dict[str, PlannedTask] = {}
    for draft in drafts:
        action = spec.actions.get(draft.target) if draft.kind == "action" else None
        reads = _reads(draft, instructions)
        key = draft.with_.get("key", action.with_.get("key")) if action is not None else None
        if action is not None and action.kind == "builtin.memory.read" and reads is not None:
            reads = tuple(sorted({*reads, key})) if isinstance(key, str) and "${{" not in key else None
        planned = PlannedTask(
            id=draft.id, kind=draft.kind, uses=draft.uses, target=draft.target, needs=tuple(dict.fromkeys(draft.needs)),
            vars=draft.vars, with_=draft.with_, when=draft.when, retry=draft.retry,
            timeout_seconds=draft.timeout_seconds or (action.timeout_seconds if action else None) or default,
            failure=draft.failure, output_schema=draft.output_schema, memory_reads=reads,
            memory_writes=draft.memory_writes, route=draft.route, children=draft.children, guard=draft.guard,
            previous=draft.previous, input_schema=draft.input_schema, outputs=draft.outputs, namespace=draft.namespace,
            compensate=draft.compensate,
        )  # fmt: skip
        tasks[draft.id] = replace(planned, predictability=predictability_of(planned, spec))
    budget = BudgetPlan(
        limits=spec.runtime.budgets, pricing=spec.runtime.pricing, planned_tasks=len(drafts),
        planned_expansion_items=expansion.items, planned_loop_iterations=expansion.iterations,
    )  # fmt: skip
    metadata = source.document.metadata
    bare = Plan(
        format_version=FORMAT_VERSION, name=metadata.name, version=metadata.version, labels=metadata.labels,
        dialect=source.dialect,
        document=_document_digest(source, tasks), order=tuple(order), max_concurrency=spec.runtime.max_concurrency,
        tasks=tasks, actions=spec.actions, agents=spec.agents, tools=spec.tools, providers=spec.providers,
        mcp_servers=spec.mcp_servers, a2a_peers=spec.a2a_peers, policy=spec.policy, memory=spec.memory,
        compensation=spec.compensation, output=spec.output, instructions=instructions, files=source.files.digests,
        vars=variables, inputs=spec.inputs, outputs=spec.outputs,
        predictability=max((task.predictability for task in tasks.values()), key=_RANK.__getitem__), budget=budget,
    )  # fmt: skip
    printed = {
        id: replace(task, definition=fingerprints.definition(task, bare), contract=fingerprints.contract(task, bare))
        for id, task in tasks.items()
    }
    requirements: Requirements = requirements_of(bare)
    return replace(bare, tasks={id: printed[id] for id in order}, requirements=requirements)


def _document_digest(source: Source, tasks: dict[str, PlannedTask]) -> str:
    """Over the document, its captured files and what it was expanded to."""
    whole = [source.document, sorted(source.files.digests.items()), sorted(tasks.items())]
    return canonical.digest(msgspec.json.decode(msgspec.json.encode(whole)))
