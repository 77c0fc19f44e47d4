"""Compilation: what is wrong is said with its place; order, digests and fingerprints are of what they claim to be of."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import Invalid
from perdure.workflow import document
from perdure.workflow import plan as plans
from perdure.workflow.compile import compile_source, in_order
from perdure.workflow.diagnostics import DocumentInvalid
from perdure.workflow.dsl import Workflow
from perdure.workflow.expand import Draft
from perdure.workflow.plan import Plan
from perdure.workflow.variables import Given
from support.flows import HEAD, flow

HERE = Path(__file__).parent
BROKEN = sorted((HERE / "broken_compile").glob("*.yaml"))
GOLDEN = HERE / "golden"
EXAMPLES = HERE.parents[1] / "examples" / "workflows"
GOLDEN_SOURCES = [HERE / "good" / "nightly.yaml", *(GOLDEN.glob("*.yaml"))]
SET = "actions: {set: {kind: builtin.assign}, put: {kind: builtin.memory.write}}\n"


def compiled(spec: str) -> Plan:
    return flow(spec, HERE).compile()


def errors(spec: str) -> list[str]:
    with pytest.raises(DocumentInvalid) as caught:
        compiled(spec)
    return [one.message for one in caught.value.diagnostics if one.severity == "error"]


# -- findings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BROKEN, ids=[path.stem for path in BROKEN])
def test_a_document_that_does_not_compile_says_what_and_where(path: Path) -> None:
    data = path.read_bytes()
    expected = [tuple(line.split()[2:]) for line in data.decode().splitlines() if line.startswith("# expect: ")]
    assert expected
    with pytest.raises(DocumentInvalid) as caught:
        compile_source(document.read(data, path.name, path.parent))
    found = [one for one in caught.value.diagnostics if one.severity == "error"]
    assert [(one.code, f"{one.line}:{one.column}") for one in found] == expected
    for one in found:
        assert "--" not in one.message or "twice after expansion" in one.message, "it speaks of what was authored"


def test_a_finding_is_one_line_with_place_code_message_and_help() -> None:
    with pytest.raises(DocumentInvalid) as caught:
        compiled("actions: {set: {kind: builtin.assign}}\ntasks: [{id: a, uses: 'action:sit'}]")
    [one] = caught.value.diagnostics
    assert str(one) == "flow.yaml:6:19: error missing_reference: There is no action `sit`. (Did you mean `set`?)"


def test_a_field_of_an_invocation_that_does_nothing_is_a_warning() -> None:
    made = flow(
        SET + "subworkflows: {s: {version: 1.0.0, tasks: [{id: one, uses: 'action:set'}]}}\n"
        "tasks: [{id: a, uses: 'workflow:s', retry: {maxAttempts: 2}, timeoutSeconds: 5}]",
        HERE,
    )
    assert [(one.code, one.path) for one in made.compiled().warnings] == [
        ("ignored_field", "spec.tasks[0].retry"),
        ("ignored_field", "spec.tasks[0].timeoutSeconds"),
    ]


def test_policy_alone_is_policy(tmp_path: Path) -> None:
    """The twin of the corpus' denials: with the clause gone, the same document compiles."""
    denied = (HERE / "broken_compile" / "denied_action.yaml").read_text()
    allowed = denied.replace("[filesystem.write, builtin.http]", "[]")
    assert compile_source(document.read(allowed.encode(), "x.yaml", tmp_path)).plan.order == ("a", "b")
    nowhere = (HERE / "broken_compile" / "nowhere_to_write.yaml").read_text()
    somewhere = nowhere.replace("spec:\n", "spec:\n  policy: {writableRoots: [.]}\n")
    assert compile_source(document.read(somewhere.encode(), "x.yaml", tmp_path)).plan.order == ("a",)


# -- order ----------------------------------------------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> list[Draft]:
    """Tasks in any order of declaration that need each other without a circle."""
    count = draw(st.integers(1, 24))
    names = [f"t{n}" for n in range(count)]
    drafts = []
    for n, name in enumerate(names):
        needs = draw(st.lists(st.sampled_from(names[:n]), max_size=4)) if n else []
        drafts.append(Draft(name, "action", "action:set", "", needs=needs))
    return draw(st.permutations(drafts))


def refuse(circle: list[Draft]) -> None:
    raise AssertionError(f"there is no circle: {circle}")


@given(graphs())
def test_the_order_is_that_of_needs_and_then_that_of_declaration(drafts: list[Draft]) -> None:
    order = in_order(drafts, refuse)
    assert sorted(order) == sorted(draft.id for draft in drafts)
    declared = {draft.id: place for place, draft in enumerate(drafts)}
    needs = {draft.id: set(draft.needs) for draft in drafts}
    done: set[str] = set()
    for id in order:
        ready = [one for one in declared if one not in done and needs[one] <= done]
        assert id == min(ready, key=declared.__getitem__), "the first declared of those that may begin"
        done.add(id)


@given(graphs(), st.data())
def test_every_circle_is_told_once_and_what_it_names_is_one(drafts: list[Draft], data: st.DataObject) -> None:
    ids = [draft.id for draft in drafts]
    for _ in range(data.draw(st.integers(1, 3))):
        after, before = data.draw(st.sampled_from(drafts)), data.draw(st.sampled_from(ids))
        after.needs.append(before)
    told: list[list[Draft]] = []
    order = in_order(drafts, told.append)
    members = [draft.id for circle in told for draft in circle]
    assert len(members) == len(set(members))
    assert sorted([*order, *members]) == sorted(ids)
    for circle in told:
        for draft, following in zip(circle, [*circle[1:], circle[0]], strict=True):
            assert following.id in draft.needs


# -- conflicts of memory ----------------------------------------------------------------------------------------------------


@given(graphs())
def test_a_conflict_is_two_writers_without_an_order(drafts: list[Draft]) -> None:
    made = Workflow("w", runtime={"maxConcurrency": 8})
    use = made.action("put", "builtin.memory.write")
    for place, draft in enumerate(drafts):
        made.task(draft.id, use, needs=draft.needs, with_={"key": f"k{place % 2}", "value": 1})
    before: dict[str, set[str]] = {}
    for id in in_order(drafts, refuse):
        needs = next(draft.needs for draft in drafts if draft.id == id)
        before[id] = set(needs).union(*(before[need] for need in needs))
    writers = [[draft.id for draft in drafts[parity::2]] for parity in (0, 1)]
    pairs = [(one, other) for ids in writers for one in ids for other in ids if one < other]
    if any(one not in before[other] and other not in before[one] for one, other in pairs):
        with pytest.raises(DocumentInvalid, match="may run side by side"):
            made.compile()
    else:
        made.compile()


def test_one_at_a_time_nothing_conflicts() -> None:
    tasks = "tasks: [{id: a, uses: 'action:put', with: {key: k, value: 1}}, {id: b, uses: 'action:put', with: {key: k, value: 2}}]"
    assert compiled(SET + tasks).order == ("a", "b")
    assert errors(SET + "runtime: {maxConcurrency: 2}\n" + tasks)


# -- size -----------------------------------------------------------------------------------------------------------------


def large(count: int, width: int = 64) -> Workflow:
    made = Workflow("large", runtime={"maxConcurrency": 64})
    use, put = made.action("set", "builtin.assign"), made.action("put", "builtin.memory.write")
    for n in range(count):
        needs = [f"t{n - width - more}" for more in (0, 1) if n - width - more >= 0]
        with_: dict[str, Any] = {"v": list(range(20))}
        if n % 4 == 0:
            with_ = {"key": f"k{n % width}", "value": n}
        elif needs:
            with_["before"] = f"${{{{ tasks.{needs[0]}.output }}}}"
        made.task(f"t{n}", use if n % 4 else put, needs=needs, with_=with_)
    return made


def test_thousands_of_tasks_compile_in_a_time_that_grows_with_them() -> None:
    """2,000 take well under a second; the bound here leaves room for a slow machine, the growth is what matters."""
    took = []
    for count in (1000, 4000):
        made = large(count)
        before = time.process_time()
        plan = made.compile()
        took.append(time.process_time() - before)
        assert len(plan.order) == count
        assert plans.decode(plans.encode(plan)) == plan
    assert took[1] < 6.0
    assert took[1] < 4 * 3 * took[0], took


def test_two_thousand_writers_of_one_key_are_told_in_a_moment() -> None:
    made = Workflow("w", runtime={"maxConcurrency": 64})
    use = made.action("put", "builtin.memory.write")
    for n in range(2000):
        made.task(f"t{n}", use, with_={"key": "k", "value": n})
    before = time.process_time()
    with pytest.raises(DocumentInvalid) as caught:
        made.compile()
    assert len(caught.value.diagnostics) == 1999
    assert time.process_time() - before < 3.0


# -- digests and fingerprints -------------------------------------------------------------------------------------------------

BASE = """
inputs: {x: 1}
vars: {used: 1, unused: 1}
memory: {working: {k: 1, other: 1}}
policy: {approval: never, writableRoots: [out], processAllowlist: [echo, cat], networkAllowlist: [a.example]}
providers: {p: {kind: fake}, q: {kind: fake}}
tools:
  read: {kind: builtin.workspace.read, inputSchema: {type: object, properties: {path: {type: string}}, required: [path], additionalProperties: false}, capability: filesystem.read, risk: low, effectClass: observe, idempotency: idempotent}
  echo: {kind: builtin.echo, inputSchema: {type: object, properties: {}, required: [], additionalProperties: false}, capability: internal, risk: low, effectClass: pure, idempotency: pure}
agents:
  w: {provider: p, model: m, instructions: "Go.", tools: [read]}
  z: {provider: q, model: m, instructions: "Stay.", tools: [echo]}
actions:
  set: {kind: builtin.assign}
  save: {kind: builtin.write}
  say: {kind: builtin.shell.exec, command: echo}
  ask: {kind: builtin.http, url: "http://a.example/"}
  inverse: {kind: builtin.python, call: "m:undo"}
tasks:
  - {id: plain, uses: "action:set", with: {v: "${{ vars.used }}", k: "${{ memory.k }}"}}
  - {id: save, uses: "action:save", with: {path: out/x, content: y}, compensate: {uses: "action:inverse"}}
  - {id: say, uses: "action:say"}
  - {id: ask, uses: "action:ask"}
  - {id: write, uses: "agent:w"}
  - {id: stay, uses: "agent:z"}
  - {id: each, uses: "action:set", foreach: {items: [1]}}
"""
TOOLS = "filesystem.read, filesystem.write, process.exec, network.http, internal, python.call"
CHANGES: list[tuple[str, str, set[str]]] = [
    ("unused: 1", "unused: 2", set()),
    ("used: 1, unused", "used: 2, unused", {"plain"}),
    ("other: 1", "other: 2", set()),
    ("inputs: {x: 1}", "inputs: {x: 2, y: 3}", set()),
    ("processAllowlist: [echo, cat]", "processAllowlist: [echo]", set()),
    ("networkAllowlist: [a.example]", "networkAllowlist: [a.example, b.example]", {"ask"}),
    ("writableRoots: [out]", "writableRoots: [out, more]", {"save"}),
    ("approval: never", "approval: never, toolsDeny: [mcp.call]", set()),
    ("approval: never", f"approval: never, toolsAllow: [{TOOLS}]", set()),
    ("approval: never", "approval: mutations", {"save", "say"}),
    ("approval: never", "approval: never, secretFileRoots: [s]", set()),
    ("approval: never", "approval: never, nonInteractive: fail", set()),
    ("command: echo", "command: echo, description: says", set()),
    ("command: echo", "command: echo, args: [hello]", {"say"}),
    ('instructions: "Go."', 'instructions: "Come."', {"write"}),
    ("p: {kind: fake}", 'p: {kind: fake, endpoint: "http://a.example/"}', {"write"}),
    ("q: {kind: fake}", "q: {kind: fake}, r: {kind: fake}", set()),
    ("capability: internal, risk: low", "capability: internal, risk: high", {"stay"}),
    ('call: "m:undo"', 'call: "m:other"', {"save"}),
    ("items: [1]", "items: [1, 2]", {"each", "each--0001"}),
    ("with: {path: out/x", "timeoutSeconds: 7, with: {path: out/x", {"save"}),
    ("tasks:\n", 'tasks:\n  - {id: new, uses: "action:set"}\n', {"new"}),
]


def prints(plan: Plan) -> dict[str, str]:
    """Task to fingerprint; a child without the digest of its binding."""
    return {id[:10] if "--" in id else id: task.definition for id, task in plan.tasks.items()}


@pytest.mark.parametrize(("old", "new", "changed"), CHANGES, ids=[f"{n}-{c[1][:30]}" for n, c in enumerate(CHANGES)])
def test_a_fingerprint_changes_with_what_governs_the_task_and_with_nothing_else(
    old: str, new: str, changed: set[str]
) -> None:
    assert BASE.count(old) == 1
    before, after = prints(compiled(BASE)), prints(compiled(BASE.replace(old, new)))
    assert {id for id in before.keys() | after.keys() if before.get(id) != after.get(id)} == changed


def test_a_fingerprint_says_its_version() -> None:
    plan = compiled(BASE)
    for task in plan.tasks.values():
        assert task.definition.startswith("sha256:v1:")
        assert len(task.definition) == len(task.contract) == len("sha256:v1:") + 64
    assert len(plan.digest) == len(plan.document) == 64


def test_a_contract_is_what_the_output_must_be() -> None:
    def contract(more: str = "", agent: str = "", action: str = "") -> dict[str, str]:
        plan = compiled(
            f"providers: {{p: {{kind: fake}}}}\nagents: {{w: {{provider: p, model: m, instructions: go{agent}}}}}\n"
            f"actions: {{set: {{kind: builtin.assign{action}}}}}\n"
            f"tasks: [{{id: a, uses: 'agent:w'{more}}}, {{id: b, uses: 'action:set'}}, {{id: c, uses: 'action:set', foreach: {{items: [1]}}}}]"
        )
        return {id: task.contract for id, task in plan.tasks.items() if "--" not in id}

    usual = contract()
    assert len(set(usual.values())) == 3
    schema, other = "{type: object, required: [v]}", "{type: object, required: [w]}"
    structured = contract(agent=f", structuredOutput: {schema}")["a"]
    assert structured != usual["a"]
    assert contract(more=f", outputSchema: {schema}")["a"] == structured
    assert contract(f", outputSchema: {schema}", f", structuredOutput: {other}")["a"] == structured
    assert contract(action=f", outputSchema: {schema}")["b"] == structured
    assert contract(action=", timeoutSeconds: 5") == usual


def test_the_digest_is_of_the_document_and_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text("a: 1\n")
    spec = "  varsFiles: [v.yaml]\n  actions: {set: {kind: builtin.assign}}\n  tasks: [{id: a, uses: 'action:set'}]\n"
    text = (HEAD + spec).encode()
    one = compile_source(document.read(text, "x.yaml", tmp_path)).plan
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "v.yaml").write_text("a: 1\n")
    assert plans.encode(compile_source(document.read(text + b"# a comment\n", "y.yaml", other)).plan) == plans.encode(
        one
    )
    (tmp_path / "v.yaml").write_text("a: 1  # told\n")
    two = compile_source(document.read(text, "x.yaml", tmp_path)).plan
    assert (two.document, two.digest) != (one.document, one.digest)
    assert two.tasks["a"].definition == one.tasks["a"].definition


def test_what_the_caller_gives_is_in_the_plan_where_it_is_read() -> None:
    source = (
        SET
        + "vars: {a: 1}\ntasks: [{id: t, uses: 'action:set', with: {v: '${{ vars.a }}'}}, {id: u, uses: 'action:set'}]"
    )
    made = flow(source, HERE)
    made._given = Given(values={"a": 2})
    usual, changed = compiled(source), made.compile()
    assert changed.tasks["t"].vars == {"a": 2}
    assert changed.tasks["t"].definition != usual.tasks["t"].definition
    assert changed.tasks["u"] == usual.tasks["u"]


# -- what a run will need -----------------------------------------------------------------------------------------------------


def test_requirements_name_every_effect_with_its_class_and_whether_it_asks() -> None:
    plan = compiled(BASE.replace("approval: never", "approval: mutations"))
    needs = [(n.task, n.operation, n.kind, n.effect_class, n.approval_possible) for n in plan.requirements.effects]
    assert needs == [
        ("save", "builtin.write", "workspace_mutate", "idempotent", True),
        ("say", "builtin.shell.exec", "process_execution", "once", True),
        ("ask", "builtin.http", "network", "observe", False),
        ("write", "model", "model", "once", False),
        ("write", "read", "observe", "idempotent", False),
        ("stay", "model", "model", "once", False),
    ]
    assert [(p.name, p.kind, p.agents) for p in plan.requirements.providers] == [
        ("p", "fake", ("w",)),
        ("q", "fake", ("z",)),
    ]
    assert plan.requirements.providers[0].capabilities == (
        "cancellation",
        "continuation",
        "function_tools",
        "text",
        "usage",
    )
    assert (plan.requirements.tools, plan.requirements.processes) == (("echo", "read"), ("echo",))
    assert {id: task.predictability for id, task in plan.tasks.items() if "--" not in id} == {
        "plain": "fully", "save": "partially", "say": "requires_execution", "ask": "requires_execution",
        "write": "requires_execution", "stay": "requires_execution", "each": "fully",
    }  # fmt: skip
    assert plan.predictability == "requires_execution"
    assert (plan.budget.planned_tasks, plan.budget.planned_expansion_items) == (8, 1)


def test_what_is_read_of_memory() -> None:
    plan = compiled(
        """
        vars: {which: k}
        actions:
          set: {kind: builtin.assign}
          told: {kind: builtin.assign, with: {d: "${{ memory.default }}"}}
          put: {kind: builtin.memory.write}
          get: {kind: builtin.memory.read}
        tasks:
          - {id: none, uses: "action:set"}
          - {id: paths, uses: "action:set", with: {a: "${{ memory.a.deep }}"}, when: "memory.b == 1 && memory['c d'] == 2"}
          - {id: whole, uses: "action:set", with: {a: "${{ memory }}"}}
          - {id: told, uses: "action:told"}
          - {id: get, uses: "action:get", with: {key: g}}
          - {id: any, uses: "action:get", with: {key: "${{ vars.which }}"}}
          - {id: put, uses: "action:put", with: {key: p, value: "${{ memory.v }}"}}
          - {id: some, uses: "action:put", memoryWrites: [q, r], with: {key: "${{ vars.which }}", value: 1}}
        """
    )
    reads = {id: task.memory_reads for id, task in plan.tasks.items()}
    assert reads == {
        "none": (), "paths": ("a", "b", "c d"), "whole": None, "told": ("default",), "get": ("g",), "any": None,
        "put": ("p", "v"), "some": ("q", "r"),
    }  # fmt: skip


# -- golden plans -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN_SOURCES, ids=[path.stem for path in GOLDEN_SOURCES])
def test_a_document_gives_the_plan_it_has_always_given(path: Path) -> None:
    """The bytes of a plan are its identity. If this fails on purpose, the plan's format has changed: see ``FORMAT_VERSION``."""
    held = GOLDEN / f"{path.stem}.plan.json"
    plan = Workflow.load(path).compile()
    assert msgspec.json.format(plans.encode(plan), indent=1) + b"\n" == held.read_bytes()


def test_a_plan_that_is_too_large_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "PLAN_BYTES_MAX", 1000)
    with pytest.raises(Invalid, match="PLAN_BYTES_MAX"):
        plans.encode(large(50).compile())
