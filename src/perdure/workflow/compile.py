"""From a document to its plan, or to everything that is wrong with it. Dispatches nothing, reads nothing more.

Expansion first; then every task is checked by itself and against the graph; then order, fingerprints and what a run will
need are fixed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import canonical
from perdure.workflow.checks import Checks
from perdure.workflow.declarations import Declarations
from perdure.workflow.document import Source
from perdure.workflow.expand import Draft, Expansion
from perdure.workflow.fingerprints import Fingerprints
from perdure.workflow.plan import FORMAT_VERSION, BudgetPlan, Plan, PlannedTask, Predictability, Requirements
from perdure.workflow.reads import Reads
from perdure.workflow.requirements import predictability_of, requirements_of
from perdure.workflow.variables import Given, Variables

_sorted = msgspec.json.Encoder(order="sorted").encode
_RANK: dict[Predictability, int] = {"fully": 0, "partially": 1, "requires_execution": 2}


class Compiled(msgspec.Struct):
    """A plan and what people ask about it.

    Attributes:
        layers: task id to the winning layer of each of its variables: from 1, or 0 for what its expansion gives it.
        warnings: findings that stop nothing.
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
    expansion = Expansion(spec, found, _instructions(source))
    drafts = expansion.run()
    variables = Variables(spec, source.files, caller)
    outside = variables.winners()[0]
    Declarations(spec, found).run()
    layers = _resolve(source, drafts, variables)
    checks = Checks(source, expansion, drafts)
    checks.run()
    checks.outputs(outside)
    order = in_order(drafts, checks.cycle)
    checks.memory_conflicts(order)
    checks.budgets(expansion, len(drafts))
    for spare in expansion.spare:
        _resolve(source, spare, variables)
        others = Checks(source, expansion, spare)
        others.run()
        in_order(spare, others.cycle)
    found.raise_errors()
    plan = _plan(source, drafts, order, outside, expansion)
    return Compiled(plan, layers, [one for one in found.ordered() if one.severity == "warning"])


def _resolve(source: Source, drafts: list[Draft], variables: Variables) -> dict[str, dict[str, int]]:
    """Give every task the winning value of its variables; the layers they come from, 0: the expansion."""
    agents, layers = source.document.spec.agents, {}
    for draft in drafts:
        for place, file in enumerate(draft.vars_files):
            for name in sorted(draft.bound.keys() & source.files.variables.get(file, {}).keys()):
                said = f"The variable `{name}` of file {file!r} is bound by the expansion of `{draft.name}`."
                source.diagnostics.add("schema_violation", f"{draft.path}.varsFiles[{place}]", said)
        agent = agents.get(draft.used) if draft.kind == "agent" else None
        values, winning = variables.winners(agent, draft.vars_files, draft.vars)
        draft.vars = {**values, **draft.bound}
        layers[draft.id] = {**winning, **dict.fromkeys(draft.bound, 0)}
    return layers


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


def in_order(drafts: list[Draft], circle: Callable[[list[Draft]], None]) -> list[str]:
    """Tasks in the order in which they are begun: by needs, then as declared. ``circle`` is told each circle."""
    place = {draft.id: index for index, draft in enumerate(drafts)}
    following: dict[str, list[str]] = {id: [] for id in place}
    missing: dict[str, int] = {}
    for id, index in place.items():
        known = [need for need in dict.fromkeys(drafts[index].needs) if need in place]
        missing[id] = len(known)
        for need in known:
            following[need].append(id)
    ready = [place[id] for id, count in missing.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []

    def release(id: str) -> None:
        for after in following[id]:
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, place[after])

    broken: list[str] = []
    while len(order) + len(broken) < len(place):
        while ready:
            id = drafts[heapq.heappop(ready)].id
            if missing[id] == 0:
                order.append(id)
                missing[id] = -1
                release(id)
        left = [drafts[index] for id, index in place.items() if missing[id] > 0]
        if left:
            found = _circle(left)
            circle(found)
            for draft in found:
                missing[draft.id] = -1
            for draft in found:
                release(draft.id)
            broken += [draft.id for draft in found]
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


def _plan(
    source: Source, drafts: list[Draft], order: list[str], variables: dict[str, Any], expansion: Expansion
) -> Plan:
    spec = source.document.spec
    default = spec.runtime.default_timeout_seconds
    used = {draft.target for draft in drafts} | {
        draft.compensate.uses.partition(":")[2] for draft in drafts if draft.compensate is not None
    }
    actions = {name: one for name, one in expansion.actions.items() if name in spec.actions or name in used}
    agents = {name: one for name, one in expansion.agents.items() if name in spec.agents or name in used}
    reads = Reads(actions, expansion.instructions)
    tasks: dict[str, PlannedTask] = {}
    for draft in drafts:
        action = actions.get(draft.target) if draft.kind == "action" else None
        planned = PlannedTask(
            id=draft.id, kind=draft.kind, uses=draft.uses, target=draft.target, needs=tuple(dict.fromkeys(draft.needs)),
            vars=reads.variables(draft), with_=draft.with_, when=draft.when, retry=draft.retry,
            timeout_seconds=draft.timeout_seconds or (action.timeout_seconds if action else None) or default,
            failure=draft.failure, output_schema=draft.output_schema, memory_reads=reads.memory(draft),
            memory_writes=draft.memory_writes, route=draft.route, children=draft.children, guard=draft.guard,
            previous=draft.previous, input_schema=draft.input_schema, outputs=draft.outputs, namespace=draft.namespace,
            compensate=draft.compensate,
        )  # fmt: skip
        tasks[draft.id] = replace(planned, predictability=predictability_of(planned, actions))
    budget = BudgetPlan(
        limits=spec.runtime.budgets, pricing=spec.runtime.pricing, planned_tasks=len(drafts),
        planned_expansion_items=expansion.items, planned_loop_iterations=expansion.iterations,
    )  # fmt: skip
    metadata = source.document.metadata
    bare = Plan(
        format_version=FORMAT_VERSION, name=metadata.name, version=metadata.version, labels=metadata.labels,
        dialect=source.dialect, document=_document_digest(source, tasks), order=tuple(order),
        max_concurrency=spec.runtime.max_concurrency, tasks=tasks, actions=actions, agents=agents, tools=spec.tools,
        providers=spec.providers, mcp_servers=spec.mcp_servers, a2a_peers=spec.a2a_peers, policy=spec.policy,
        memory=spec.memory, compensation=spec.compensation, output=spec.output,
        instructions={name: text for name, text in expansion.instructions.items() if name in agents},
        files=source.files.digests, vars=variables, inputs=spec.inputs, outputs=spec.outputs,
        predictability=max((task.predictability for task in tasks.values()), key=_RANK.__getitem__), budget=budget,
    )  # fmt: skip
    prints = Fingerprints(bare)
    printed = {
        id: replace(task, definition=prints.definition(task), contract=prints.contract(task))
        for id, task in tasks.items()
    }
    requirements: Requirements = requirements_of(bare)
    return replace(bare, tasks={id: printed[id] for id in order}, requirements=requirements)


def _document_digest(source: Source, tasks: dict[str, PlannedTask]) -> str:
    """Over the document, its captured files and what it was expanded to."""
    whole = [source.document, sorted(source.files.digests.items()), sorted(tasks.items())]
    return canonical.sha256(_sorted(whole))
