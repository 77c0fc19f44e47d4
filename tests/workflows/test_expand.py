"""Expansion: what sub-workflows, loops, foreach and matrix compile to, and that it runs so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import perdure as p
from perdure.limits import PLANNED_TASKS_MAX
from perdure.workflow import templates
from perdure.workflow.diagnostics import DocumentInvalid
from perdure.workflow.expressions import Reference
from perdure.workflow.plan import Plan, PlannedTask
from perdure.workflow.variables import Given
from support.flows import Flows, flow, opened, outputs, states

SET = "actions: {set: {kind: builtin.assign}, put: {kind: builtin.memory.write}, get: {kind: builtin.memory.read}}\n"
INNER = "{version: 1.0.0, tasks: [{id: one, uses: 'action:set', with: {x: '${{ inputs.x }}'}}], outputs: {x: '${{ tasks.one.output.output.x }}'}}"


def plan_of(spec: str, given: Given | None = None) -> Plan:
    made = flow(SET + spec, Path.cwd())
    made._given = given or Given()
    return made.compile()


def found(spec: str) -> list[tuple[str, str]]:
    with pytest.raises(DocumentInvalid) as caught:
        plan_of(spec)
    return [(one.code, one.path) for one in caught.value.diagnostics if one.severity == "error"]


def only(plan: Plan, prefix: str) -> PlannedTask:
    [task] = [task for id, task in plan.tasks.items() if id.startswith(prefix)]
    return task


@pytest.fixture
async def flows(tmp_path: Path) -> AsyncIterator[Flows]:
    async with opened(tmp_path) as made:
        yield made


# -- foreach and matrix ---------------------------------------------------------------------------------------------------


def test_foreach_is_a_child_for_each_item_and_an_aggregate() -> None:
    plan = plan_of(
        "tasks: [{id: a, uses: 'action:set', foreach: {items: [x, y], as: letter}, retry: {maxAttempts: 3}}]"
    )
    first, second, parent = (plan.tasks[id] for id in plan.order)
    assert [first.id[:8], second.id[:8], parent.id] == ["a--0000-", "a--0001-", "a"]
    assert len(first.id) == len("a--0000-") + 12
    assert [first.vars, second.vars] == [{"letter": "x", "foreachIndex": 0}, {"letter": "y", "foreachIndex": 1}]
    assert (parent.kind, parent.children, parent.needs) == ("aggregate", (first.id, second.id), (first.id, second.id))
    assert first.retry.max_attempts == 3
    assert parent.retry.max_attempts == 1


def test_matrix_goes_through_axes_by_name_and_values_as_written() -> None:
    plan = plan_of("tasks: [{id: a, uses: 'action:set', matrix: {axes: {z: [2, 1], b: [t, f]}}}]")
    bound = [plan.tasks[id].vars["matrix"] for id in plan.order[:-1]]
    assert bound == [{"b": "t", "z": 2}, {"b": "t", "z": 1}, {"b": "f", "z": 2}, {"b": "f", "z": 1}]
    assert [plan.tasks[id].vars["matrixIndex"] for id in plan.order[:-1]] == [0, 1, 2, 3]


def test_an_id_names_its_binding_and_nothing_else() -> None:
    before = plan_of("tasks: [{id: a, uses: 'action:set', foreach: {items: [x, y]}}]")
    after = plan_of(
        "tasks: [{id: b, uses: 'action:set'}, {id: a, uses: 'action:get', with: {key: k}, foreach: {items: [x, z]}}]"
    )
    assert before.order[0] in after.tasks
    assert before.order[1] not in after.tasks


def test_an_empty_axis_is_an_empty_aggregate() -> None:
    plan = plan_of("tasks: [{id: a, uses: 'action:set', matrix: {axes: {x: [], y: [1]}}}]")
    assert plan.order == ("a",)
    assert plan.tasks["a"].children == ()


def test_what_an_expansion_binds_no_layer_changes(tmp_path: Path) -> None:
    spec = (
        "vars: {item: low}\ntasks: [{id: a, uses: 'action:set', foreach: {items: [x]}, with: {v: '${{ vars.item }}'}}]"
    )
    plan = plan_of(spec, Given(({"item": "file"},), {"item": "caller"}))
    assert only(plan, "a--").vars == {"item": "x", "foreachIndex": 0}
    assert plan.vars == {"item": "caller"}


def test_an_output_schema_is_of_the_children() -> None:
    plan = plan_of(
        "tasks: [{id: a, uses: 'action:set', foreach: {items: [x]}, outputSchema: {type: object, required: [output]}}]"
    )
    assert only(plan, "a--").output_schema == {"type": "object", "required": ["output"]}
    assert plan.tasks["a"].output_schema is None


@pytest.mark.anyio
async def test_children_that_fit_the_output_schema_make_an_aggregate(flows: Flows) -> None:
    spec = """
    tasks:
      - id: a
        uses: "action:set"
        foreach: {items: [x, y]}
        with: {v: "${{ vars.item }}"}
        outputSchema: {type: object, required: [output]}
    outputs: {a: "${{ tasks.a.output.items }}"}
    """
    view = await flows.run(SET + spec.replace("\n    ", "\n"))
    assert [item["output"]["output"]["v"] for item in view.output["a"]] == ["x", "y"]


# -- loops ----------------------------------------------------------------------------------------------------------------


def test_a_loop_is_a_chain_and_an_aggregate_with_its_guard() -> None:
    plan = plan_of(
        "tasks: [{id: l, uses: 'action:set', loop: {maxIterations: 3, while: '${{ vars.loopIndex < 2 }}', initial: {n: 0}}}]"
    )
    chain, parent = [plan.tasks[id] for id in plan.order[:-1]], plan.tasks["l"]
    assert [task.needs for task in chain] == [(), (chain[0].id,), (chain[1].id,)]
    assert [task.previous for task in chain] == ["", chain[0].id, chain[1].id]
    assert [task.vars["loopIndex"] for task in chain] == [0, 1, 2]
    assert chain[0].vars["loopPrevious"] == {"n": 0}
    assert {task.when for task in chain} == {"vars.loopIndex < 2"}
    assert (parent.kind, parent.guard, plan.budget.planned_loop_iterations) == ("loop", "vars.loopIndex < 2", 3)


@pytest.mark.anyio
async def test_a_sub_workflow_in_a_loop_is_given_what_the_last_gave(flows: Flows) -> None:
    spec = """
    subworkflows:
      step:
        version: 1.0.0
        tasks: [{id: add, uses: "action:set", with: {n: "${{ inputs.before + 1 }}"}}]
        outputs: {n: "${{ tasks.add.output.output.n }}"}
    tasks:
      - id: l
        uses: "workflow:step"
        loop: {maxIterations: 5, while: "vars.loopPrevious.n < 3", initial: {n: 0}}
        with: {before: "${{ loop.output.n }}"}
    outputs: {n: "${{ tasks.l.output.iterations }}", items: "${{ tasks.l.output.items }}"}
    """
    view = await flows.run(SET + spec.replace("\n    ", "\n"))
    assert view.state == "completed", view.failure
    assert view.output["n"] == 3
    assert [item["output"]["n"] for item in view.output["items"][:3]] == [1, 2, 3]
    assert [item["state"] for item in view.output["items"]] == ["succeeded"] * 3 + ["skipped"] * 2


# -- sub-workflows --------------------------------------------------------------------------------------------------------


def test_an_invocation_is_a_way_in_its_tasks_and_a_way_out() -> None:
    plan = plan_of(
        f"subworkflows: {{s: {INNER}}}\ntasks: [{{id: inv, uses: 'workflow:s', with: {{x: 1}}, outputSchema: {{type: object}}}}]"
    )
    way_in, inner, way_out = (plan.tasks[id] for id in plan.order)
    assert [way_in.kind, inner.kind, way_out.kind] == ["inputs", "action", "outputs"]
    assert way_in.id.startswith("inv--inputs-")
    assert (way_in.with_, inner.id, way_out.id) == ({"x": 1}, "inv--one", "inv")
    assert inner.needs == (way_in.id,)
    assert inner.with_ == {"x": f"${{{{ tasks.{way_in.id}.output.x }}}}"}
    assert way_out.outputs == {"x": "${{ tasks.inv--one.output.output.x }}"}


def test_the_way_in_is_named_by_what_it_takes_and_not_by_what_is_done_inside() -> None:
    one = plan_of(f"subworkflows: {{s: {INNER}}}\ntasks: [{{id: inv, uses: 'workflow:s', with: {{x: 1}}}}]")
    changed = INNER.replace("tasks: [", "tasks: [{id: more, uses: 'action:set'}, ")
    two = plan_of(f"subworkflows: {{s: {changed}}}\ntasks: [{{id: inv, uses: 'workflow:s', with: {{x: 1}}}}]")
    assert one.tasks["inv--one"].definition == two.tasks["inv--one"].definition
    third = plan_of(
        f"subworkflows: {{s: {INNER.replace('tasks:', 'inputs: {y: 1}, tasks:', 1)}}}\ntasks: [{{id: inv, uses: 'workflow:s', with: {{x: 1}}}}]"
    )
    assert third.order[0] != one.order[0]


def test_nested_invocations_name_each_level() -> None:
    plan = plan_of(
        f"subworkflows: {{s: {INNER}, outer: {{version: 1.0.0, tasks: [{{id: mid, uses: 'workflow:s', with: {{x: '${{{{ inputs.y }}}}'}}}}]}}}}\n"
        "tasks: [{id: a, uses: 'workflow:outer', with: {y: 1}}, {id: b, uses: 'workflow:outer', with: {y: 2}}]"
    )
    outer, inner = plan.order[0], plan.order[1]
    assert inner.startswith("a--mid--inputs-")
    assert plan.tasks[inner].with_ == {"x": f"${{{{ tasks.{outer}.output.y }}}}"}
    assert {"a--mid--one", "b--mid--one", "a--mid", "a", "b"} <= set(plan.tasks)


@pytest.mark.anyio
async def test_memory_and_defaults_and_instructions_read_the_names_of_their_invocation(flows: Flows) -> None:
    spec = """
    inputs: {x: top}
    memory: {working: {k: top}}
    providers: {p: {kind: fake}}
    agents: {w: {provider: p, model: m, instructions: "Say ${{ inputs.x }}."}}
    actions:
      set: {kind: builtin.assign}
      told: {kind: builtin.assign, with: {x: "${{ inputs.x }}", k: "${{ memory.k }}"}}
      put: {kind: builtin.memory.write, with: {key: k}}
      get: {kind: builtin.memory.read}
    subworkflows:
      s:
        version: 1.0.0
        tasks:
          - {id: put, uses: "action:put", with: {value: "${{ inputs.x }}"}}
          - {id: told, uses: "action:told", needs: [put]}
          - {id: say, uses: "agent:w", needs: [put]}
          - {id: get, uses: "action:get", needs: [put], with: {key: k}}
          - {id: cel, uses: "action:set", needs: [put], when: "has(memory.k) && memory.k == inputs.x", with: {saw: true}}
        outputs: {told: "${{ tasks.told.output.output }}", got: "${{ tasks.get.output.value }}", saw: "${{ tasks.cel.output.output.saw }}"}
    tasks:
      - {id: top, uses: "action:told"}
      - {id: a, uses: "workflow:s", with: {x: one}}
      - {id: b, uses: "workflow:s", with: {x: two}}
    outputs: {top: "${{ tasks.top.output.output }}", a: "${{ tasks.a.output }}", b: "${{ tasks.b.output }}"}
    """
    made = flow(spec, flows.folder)
    plan = made.compile()
    assert plan.tasks["a--told"].memory_reads == ("a--k",)
    assert plan.tasks["top"].memory_reads == ("k",)
    assert plan.instructions["w"] == "Say ${{ inputs.x }}."
    assert plan.instructions[plan.tasks["a--say"].target].startswith("Say ${{ tasks.a--inputs-")
    assert plan.tasks["a--say"].uses == "agent:w"
    assert plan.requirements.providers[0].agents == ("w",)
    view = await flows.run(spec)
    assert view.state == "completed", view.failure
    assert view.output["top"] == {"x": "top", "k": "top"}
    assert view.output["a"] == {"told": {"x": "one", "k": "one"}, "got": "one", "saw": True}
    assert view.output["b"] == {"told": {"x": "two", "k": "two"}, "got": "two", "saw": True}


@pytest.mark.anyio
async def test_arguments_of_a_command_read_the_inputs_of_the_invocation_that_uses_it(flows: Flows) -> None:
    spec = """
    policy: {approval: never, processAllowlist: [echo]}
    actions: {say: {kind: builtin.shell.exec, command: echo, args: ["${{ inputs.word }}"]}}
    subworkflows:
      s: {version: 1.0.0, tasks: [{id: say, uses: "action:say"}], outputs: {said: "${{ tasks.say.output.stdout }}"}}
    tasks: [{id: each, uses: "workflow:s", foreach: {items: [red, blue]}, with: {word: "${{ vars.item }}"}}]
    outputs: {all: "${{ tasks.each.output.items }}"}
    """
    view = await flows.run(spec)
    assert view.state == "completed", view.failure
    assert [item["output"]["said"] for item in view.output["all"]] == ["red\n", "blue\n"]


def test_an_authored_name_that_looks_like_one_of_an_invocation_keeps_its_meaning() -> None:
    plan = flow(
        """
        actions:
          say: {kind: builtin.http, url: "http://a.example/${{ inputs.x }}"}
          inv--say: {kind: builtin.http, url: "http://other.example/"}
        subworkflows: {s: {version: 1.0.0, tasks: [{id: say, uses: "action:say"}, {id: other, uses: "action:inv--say"}]}}
        tasks: [{id: inv, uses: "workflow:s"}]
        """,
        Path.cwd(),
    ).compile()
    said, other = (plan.actions[plan.tasks[id].target].url for id in ("inv--say", "inv--other"))
    assert other == "http://other.example/"
    assert said is not None
    assert said.startswith("http://a.example/${{ tasks.inv--inputs-")


def test_a_default_is_laid_under_what_the_task_gives() -> None:
    plan = plan_of("tasks: [{id: a, uses: 'action:set'}]")
    assert plan.tasks["a"].with_ == {}
    plan = flow(
        "actions: {set: {kind: builtin.assign, with: {a: 1, b: {c: 1}}}}\ntasks: [{id: a, uses: 'action:set', with: {b: {d: 2}}}]",
        Path.cwd(),
    ).compile()
    assert plan.tasks["a"].with_ == {"a": 1, "b": {"d": 2}}


@pytest.mark.anyio
async def test_a_default_that_is_overlaid_is_not_even_looked_at(flows: Flows) -> None:
    view = await flows.run(
        "actions: {set: {kind: builtin.assign, with: {a: '${{ inputs.gone }}'}}}\ntasks: [{id: a, uses: 'action:set', with: {a: 1}}]"
    )
    assert outputs(view)["a"]["output"] == {"a": 1}


# -- routers into what is expanded ------------------------------------------------------------------------------------------

ROUTED = f"""
subworkflows: {{s: {INNER}}}
tasks:
  - {{id: r, uses: router, route: {{select: "${{{{ inputs.to }}}}", cases: [{{equals: sub, tasks: [sub]}}, {{equals: each, tasks: [each]}}, {{equals: loop, tasks: [loop]}}]}}}}
  - {{id: sub, uses: "workflow:s", needs: [r], with: {{x: 1}}}}
  - {{id: each, uses: "action:set", needs: [r], foreach: {{items: [1, 2]}}}}
  - {{id: loop, uses: "action:set", needs: [r], loop: {{maxIterations: 2, while: "vars.loopIndex < 2"}}}}
"""


@pytest.mark.anyio
@pytest.mark.parametrize("to", ["sub", "each", "loop", "nowhere"])
async def test_a_router_leads_into_what_is_expanded_and_past_the_rest(flows: Flows, to: str) -> None:
    view = await flows.run(SET + ROUTED, {"to": to})
    assert view.state == "completed", view.failure
    for id, state in states(view).items():
        if id == "r":
            assert state == "succeeded"
        else:
            assert state == ("succeeded" if id.split("--")[0] == to else "skipped"), id
    assert outputs(view)["r"]["destinations"] == ([] if to == "nowhere" else [to])
    skipped = {id: output for id, output in outputs(view).items() if id in {"sub", "each", "loop"} - {to}}
    assert {output["reason"] for output in skipped.values()} == {"route not selected"}


# -- what cannot be expanded ------------------------------------------------------------------------------------------------


def test_a_bomb_of_sub_workflows_is_refused_before_it_is_large() -> None:
    levels = ", ".join(
        f"s{n}: {{version: 1.0.0, tasks: [{{id: t, uses: '{'workflow:s' + str(n + 1) if n < 8 else 'action:set'}', foreach: {{items: [0, 1, 2, 3, 4, 5, 6, 7]}}}}]}}"
        for n in range(9)
    )
    findings = found(f"subworkflows: {{{levels}}}\ntasks: [{{id: a, uses: 'workflow:s0'}}]")
    assert [code for code, _ in findings] == ["schema_violation"]


def test_as_many_tasks_as_a_plan_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PLANNED_TASKS_MAX >= 2_000
    monkeypatch.setattr("perdure.workflow.expand.PLANNED_TASKS_MAX", 4)
    assert len(plan_of("tasks: [{id: a, uses: 'action:set', foreach: {items: [1, 2, 3]}}]").order) == 4
    assert found("tasks: [{id: a, uses: 'action:set', foreach: {items: [1, 2, 3, 4]}}]") == [
        ("schema_violation", "spec.tasks[0]")
    ]


def test_sub_workflows_nested_too_deep() -> None:
    def nested(levels: int) -> str:
        inner = ", ".join(
            f"s{n}: {{version: 1.0.0, tasks: [{{id: t, uses: '{f'workflow:s{n + 1}' if n + 1 < levels else 'action:set'}'}}]}}"
            for n in range(levels)
        )
        return f"subworkflows: {{{inner}}}\ntasks: [{{id: a, uses: 'workflow:s0'}}]"

    assert len(plan_of(nested(32)).order) == 65
    assert ("schema_violation", "spec.subworkflows.s31.tasks[0].uses") in found(nested(33))


def test_an_id_that_grows_too_long() -> None:
    name = "x" * 150
    findings = found(
        f"subworkflows: {{s: {{version: 1.0.0, tasks: [{{id: {name}, uses: 'action:set'}}]}}}}\ntasks: [{{id: {name}, uses: 'workflow:s'}}]"
    )
    assert ("schema_violation", "spec.subworkflows.s.tasks[0].id") in findings


# -- renaming -------------------------------------------------------------------------------------------------------------

NAME = st.from_regex(r"[a-z][a-z0-9_-]{0,6}", fullmatch=True)
PART = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True).filter(
    lambda part: part not in {"in", "as", "if", "for", "let", "var"}
)
PATHS = st.one_of(
    st.builds(lambda parts: ".".join(["inputs", *parts]), st.lists(PART, min_size=1, max_size=3)),
    st.builds(lambda parts: ".".join(["memory", *parts]), st.lists(PART, min_size=1, max_size=2)),
    st.builds(lambda id, parts: ".".join(["tasks", id, "output", *parts]), NAME, st.lists(PART, max_size=2)),
    st.builds(lambda part: f"vars.{part}", PART),
)
EXPRESSIONS = st.one_of(
    PATHS,
    st.builds(lambda path: f"not {path}", PATHS),
    st.builds(lambda path, number: f"{path} == {number}", PATHS, st.integers(0, 9)),
    st.builds(lambda one, two: f"{one} == {two} && size('tasks.a.output memory.k') > 0", PATHS, PATHS),
    st.builds(lambda path: f"{path} == 'inputs.x' || {path} == 2", PATHS),
)


def rename(reference: Reference) -> Reference:
    match reference.root:
        case "inputs":
            return Reference("tasks", ("inv--inputs-0a", "output", *reference.path))
        case "memory" | "tasks":
            return Reference(reference.root, ("inv--" + reference.path[0], *reference.path[1:]))
        case _:
            return reference


@given(st.lists(EXPRESSIONS, min_size=1, max_size=3), st.text("ab ${}", max_size=5))
def test_renaming_changes_every_reference_and_nothing_else(expressions: list[str], text: str) -> None:
    plain = text.replace("${{", "").replace("$", "").replace("}}", "")
    source = plain.join(f"${{{{ {expression} }}}}" for expression in expressions)
    template = templates.parse(source)
    renamed = template.renamed(rename)
    assert renamed.references == {rename(reference) for reference in template.references}
    assert renamed.renamed(lambda reference: reference).source == renamed.source, "what is written is read the same"
    assert source.count("'") == str(renamed.source).count("'"), "text in an expression is no reference"


@given(st.lists(st.sampled_from([0, 1, 1.0, "1", True, None, [], {}, [1], {"a": 1}]), min_size=1, max_size=10))
def test_children_of_any_items_have_ids_of_their_own(items: list[Any]) -> None:
    made = p.Workflow("w")
    made.task("a", made.action("set", "builtin.assign"), foreach={"items": items})
    plan = made.compile()
    assert len(set(plan.order)) == len(items) + 1
    assert [plan.tasks[id].vars["item"] for id in plan.tasks["a"].children] == items
