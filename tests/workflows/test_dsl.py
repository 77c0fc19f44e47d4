"""Workflows built in Python are those of documents: the same plan, byte for byte, the same findings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import perdure as p
from perdure.definitions.workflow import Budgets, Foreach, Policy, Retry
from perdure.workflow import plan as plans
from perdure.workflow.diagnostics import DocumentInvalid
from perdure.workflow.dsl import Workflow, camel
from perdure.workflow.yaml import load

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "workflows"
OURS = [
    path
    for path in [HERE / "golden" / "everything.yaml", *sorted(EXAMPLES.glob("*.yaml"))]
    if path.stem != "policy-denied" and b"apiVersion: perdure.dev/v1" in path.read_bytes()
]
SECTIONS = {"agents": "agent", "actions": "action", "tools": "tool", "providers": "provider",
            "subworkflows": "subworkflow", "mcpServers": "mcp_server", "a2aPeers": "a2a_peer"}  # fmt: skip


def snake(name: str) -> str:
    made = re.sub(r"([A-Z])", lambda match: "_" + match[1].lower(), name)
    return made + "_" if made in {"with", "while", "as"} else made


def arguments(fields: dict[str, Any]) -> dict[str, Any]:
    return {snake(name): value for name, value in fields.items()}


def built(path: Path) -> Workflow:
    """What a document holds, built call by call."""
    value = load(path.read_bytes())[0]
    spec, metadata = value["spec"], value["metadata"]
    plain = {name: field for name, field in spec.items() if name not in SECTIONS and name != "tasks"}
    made = Workflow(**metadata, base=path.parent, **arguments(plain))
    for section, method in SECTIONS.items():
        for name, fields in spec.get(section, {}).items():
            getattr(made, method)(name, **arguments(fields))
    for task in spec["tasks"]:
        made.task(**arguments(task))
    return made


@pytest.mark.parametrize("path", OURS, ids=[path.stem for path in OURS])
def test_built_in_python_the_plan_is_that_of_the_document(path: Path) -> None:
    python, document = built(path), p.Workflow.load(path)
    assert plans.encode(python.compile()) == plans.encode(document.compile())
    assert (python.name, python.digest) == (document.name, document.digest)


def test_by_hand() -> None:
    flow = p.Workflow("hand", version="2", inputs={"who": "ada"}, policy=Policy(writable_roots=("out",)),
                      runtime={"budgets": Budgets(max_tasks=8), "maxConcurrency": 2})  # fmt: skip
    say = flow.action("say", "builtin.assign")
    save = flow.action("save", "builtin.write", timeout_seconds=5)
    each = flow.task(
        "each", say, foreach=Foreach(items=["a", "b"]), with_={"text": "${{ vars.item }} ${{ inputs.who }}"}
    )
    flow.task(
        "save",
        save,
        needs=[each],
        retry=Retry(max_attempts=2),
        with_={"path": "out/x", "content": "${{ tasks.each.output }}"},
    )
    plan = flow.compile()
    assert plan.order[-2:] == ("each", "save")
    assert (plan.version, plan.policy.writable_roots, plan.budget.limits.max_tasks) == ("2", ("out",), 8)
    assert (plan.tasks["save"].retry.max_attempts, plan.tasks["save"].timeout_seconds) == (2, 5)


def test_a_change_is_seen_by_the_next_compilation() -> None:
    flow = p.Workflow("grows")
    say = flow.action("say", "builtin.assign")
    flow.task("a", say)
    before = flow.digest
    flow.task("b", say, needs=["a"])
    assert flow.compile().order == ("a", "b")
    assert flow.digest != before


def test_findings_are_the_same_and_have_no_line() -> None:
    flow = p.Workflow("wrong")
    flow.task("a", "action:gone", needs=["b"])
    with pytest.raises(p.Invalid) as caught:
        flow.compile()
    assert isinstance(caught.value, DocumentInvalid)
    assert [(one.code, one.file, one.line, one.path) for one in caught.value.diagnostics] == [
        ("missing_reference", "<python>", 0, "spec.tasks[0].needs[0]"),
        ("missing_reference", "<python>", 0, "spec.tasks[0].uses"),
    ]


@pytest.mark.parametrize("value", [object(), {1: 2}, float("nan"), {"a": {1, 2}}, b"x", 2**70, "\ud800"])
def test_a_value_that_is_no_json_is_refused_where_it_is_given(value: Any) -> None:
    flow = p.Workflow("w")
    say = flow.action("say", "builtin.assign")
    with pytest.raises(p.Invalid, match="task 'a' at `"):
        flow.task("a", say, with_={"v": value})
    assert flow.task("a", say, with_={"v": (1, None, [True])}) == "a"


def test_what_cannot_be_added() -> None:
    flow = p.Workflow("w")
    say = flow.action("say", "builtin.assign")
    with pytest.raises(p.Invalid, match="`say` is there already"):
        flow.action("say", "builtin.assign")
    with pytest.raises(p.Invalid, match="are a list of ids") as caught:
        flow.task("b", say, needs="a")
    assert caught.value.help == "Write needs=['a']."
    with pytest.raises(p.Invalid, match="was read from a document"):
        p.Workflow.load(EXAMPLES / "hello.yaml").task("more", "action:x")
    flow.task("a", say, nonsense=1)
    with pytest.raises(DocumentInvalid, match="`nonsense` is no field of"):
        flow.compile()


def test_names_of_fields() -> None:
    assert [camel(name) for name in ("with_", "max_attempts", "as_", "vars_files", "on")] == [
        "with",
        "maxAttempts",
        "as",
        "varsFiles",
        "on",
    ]


def test_a_plan_is_the_same_in_another_process(tmp_path: Path) -> None:
    program = (
        "import perdure as p, sys\n"
        "f = p.Workflow('w', vars={'b': 1, 'a': 2})\n"
        "f.task('t', f.action('s', 'builtin.assign'), with_={'z': '${{ vars }}', 'a': 1}, matrix={'axes': {'y': [1], 'x': [2, 3]}})\n"
        "print(f.digest)\n"
    )
    digests = set()
    for seed in ("0", "1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(ran.stdout)
    assert len(digests) == 1


def test_importing_perdure_loads_nothing_of_documents() -> None:
    program = "import perdure, sys; print([m for m in ('yaml', 'jsonschema_rs', 'cel_expr_python', 'perdure.workflow.dsl') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert msgspec.json.decode(ran.stdout.replace("'", '"')) == []
