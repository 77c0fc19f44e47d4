"""Documents that are wrong say so, each finding at its place and all of them at once; good ones mean what they say."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml as library
from hypothesis import given
from hypothesis import strategies as st

from perdure.errors import Invalid
from perdure.workflow import document, schema
from perdure.workflow.compile import compile_source
from perdure.workflow.diagnostics import DocumentInvalid
from perdure.workflow.dsl import Workflow
from perdure.workflow.yaml import YamlError, load

HERE = Path(__file__).parent
BROKEN = sorted((HERE / "broken").glob("*.yaml"))
EXAMPLES = (HERE.parents[1] / "examples" / "workflows").glob("*.yaml")
GOOD = sorted((HERE / "good").glob("*.yaml")) + sorted(path for path in EXAMPLES if path.stem != "policy-denied")
HEAD = b"apiVersion: perdure.dev/v1\nkind: Workflow\nmetadata: {name: x}\nspec:\n"
REST = b"  actions: {set: {kind: builtin.assign}}\n  tasks: [{id: a, uses: 'action:set'}]\n"


def findings(data: bytes, base: Path = HERE / "broken") -> list[tuple[str, str]]:
    try:
        compile_source(document.read(data, "x.yaml", base))
    except DocumentInvalid as error:
        return [(one.code, f"{one.line}:{one.column}") for one in error.diagnostics if one.severity == "error"]
    return []


def test_the_corpus_is_large() -> None:
    assert len(BROKEN) >= 60


@pytest.mark.parametrize("path", BROKEN, ids=[path.stem for path in BROKEN])
def test_a_broken_document_says_what_and_where(path: Path) -> None:
    data = path.read_bytes()
    expected = [tuple(line.split()[2:]) for line in data.decode().splitlines() if line.startswith("# expect: ")]
    assert expected
    assert findings(data) == expected


def test_without_its_fault_the_corpus_would_be_good() -> None:
    """The twin: what the corpus has in common is no fault."""
    assert findings(HEAD + REST) == []


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (HEAD + b"  inputs: {x: \xff}\n" + REST, "5:15"),
        (HEAD + b"  inputs: {x: a\x00b}\n" + REST, "5:16"),
        (HEAD + b"  inputs: {x: " + b"a" * 1_048_576 + b"}\n", "1:1"),
        (b"\xef\xbb\xbf" + b"a: [\n", "2:1"),
    ],
    ids=["not UTF-8", "NUL", "a byte too many", "byte order mark"],
)
def test_bytes_that_are_no_document(data: bytes, place: str) -> None:
    assert findings(data) == [("yaml_syntax", place)]


def test_a_document_of_the_largest_size_is_read() -> None:
    room = 1_048_576 - len(HEAD + REST) - len(b"  inputs: {x: }\n")
    assert findings(HEAD + b"  inputs: {x: " + b"a" * room + b"}\n" + REST) == []


def test_a_link_out_of_the_workspace_is_not_read(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.yaml").write_text("a: 1\n")
    (inner / "vars.yaml").symlink_to(tmp_path / "secret.yaml")
    assert findings(HEAD + b"  varsFiles: [vars.yaml]\n" + REST, inner) == [("invalid_file", "5:15")]
    (inner / "vars.yaml").unlink()
    (inner / "real.yaml").write_text("a: 1\n")
    (inner / "vars.yaml").symlink_to("real.yaml")
    assert findings(HEAD + b"  varsFiles: [vars.yaml]\n" + REST, inner) == []


@pytest.mark.parametrize("path", GOOD, ids=[path.stem for path in GOOD])
def test_a_good_document_compiles_and_fits_the_schema(path: Path) -> None:
    plan = Workflow.load(path).compile()
    assert plan.order
    value = load(path.read_bytes())[0]
    assert list(jsonschema_rs.validator_for(schema.schema()).iter_errors(value)) == []


def test_the_schema_refuses_what_documents_may_not_hold() -> None:
    validator = jsonschema_rs.validator_for(schema.schema())
    good: dict[str, Any] = load(HEAD + REST)[0]
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, "extra": 1})
    assert not validator.is_valid({**good, "spec": {**good["spec"], "runtime": {"maxConcurrency": 65}}})
    described = schema.schema()["$defs"]["Retry"]["properties"]["maxAttempts"]
    assert (described["minimum"], described["maximum"], "tries" in described["description"]) == (1, 20, True)


@pytest.mark.parametrize("version", ["agentctl.dev/v1", "agentctl.dev/v1alpha1"])
def test_documents_of_the_older_names_are_read_unchanged(version: str) -> None:
    data = (HEAD + REST).replace(b"perdure.dev/v1", version.encode())
    assert findings(data) == []


def test_a_playbook_is_translated_with_a_warning() -> None:
    text = b"""
playbook: {name: old}
modules: {set: {kind: builtin.assign}}
agents: {helper: {kind: heuristic, instructions: help}}
approvalMode: never
tasks:
  - {id: a, module: set, with: {x: 1}}
  - {id: b, uses: "agent:helper", needs: [a]}
"""
    source = document.read(text, "old.yaml", HERE)
    assert [one.code for one in source.diagnostics.found] == ["migration_required"]
    plan = compile_source(source).plan
    assert (plan.name, plan.order, plan.policy.approval) == ("old", ("a", "b"), "never")
    assert plan.providers["fake"].kind == "fake"


def test_variables_in_eight_layers(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("a: 1\nb: 1\nc: 1\nd: 1\ne: 1\nf: 1\ng: 1\nh: 1\n")
    (tmp_path / "three.yaml").write_text("c: 3\nd: 3\ne: 3\nf: 3\ng: 3\nh: 3\n")
    (tmp_path / "five.yaml").write_text("e: 5\nf: 5\ng: 5\nh: 5\n")
    (tmp_path / "seven.yaml").write_text("g: 7\nh: 7\n")
    (tmp_path / "flow.yaml").write_bytes(
        HEAD
        + b"""
  varsFiles: [one.yaml]
  vars: {b: 2, c: 2, d: 2, e: 2, f: 2, g: 2, h: 2}
  providers: {p: {kind: fake}}
  agents: {w: {provider: p, model: m, instructions: i, varsFiles: [three.yaml], vars: {d: 4, e: 4, f: 4, g: 4, h: 4}}}
  tasks: [{id: a, uses: "agent:w", varsFiles: [five.yaml], vars: {f: 6, g: 6, h: 6}, with: {all: "${{ vars }}"}}]
"""
    )
    flow = Workflow.load(tmp_path / "flow.yaml", variables={"h": 8}, variable_files=(tmp_path / "seven.yaml",))
    assert flow.compile().tasks["a"].vars == dict(zip("abcdefgh", range(1, 9), strict=True))
    assert flow.compiled().layers["a"] == dict(zip("abcdefgh", range(1, 9), strict=True))
    assert set(flow.compile().files) == {"one.yaml", "three.yaml", "five.yaml"}


# -- YAML ---------------------------------------------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text("abc-_", min_size=1, max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_json_is_yaml(value: Any) -> None:
    assert load(json.dumps({"v": value}, ensure_ascii=False).encode())[0] == {"v": value}


@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_place(data: bytes) -> None:
    with contextlib.suppress(YamlError):
        load(data)


@given(st.text("{}[]:,-&*!|>'\"ab \n#?%@`", max_size=60))
def test_where_both_read_it_the_library_agrees(text: str) -> None:
    try:
        ours = load(text.encode())[0]
    except YamlError:
        return
    assert ours == library.load(text, library.BaseLoader) or not isinstance(ours, str)


@pytest.mark.parametrize(
    ("text", "value"),
    [("yes", "yes"), ("010", 10), ("0o10", 8), ("0x1F", 31), ("1e3", 1000.0), ("12:30:45", "12:30:45"), ("1_000", "1_000"),
     ("2026-01-01", "2026-01-01"), ("~", None), ("'1'", "1"), ("True", True), (".5", 0.5), ("on", "on"), ("1.", 1.0)],
)  # fmt: skip
def test_scalars_of_the_core_schema(text: str, value: object) -> None:
    found = load(f"v: {text}".encode())[0]["v"]
    assert (type(found), found) == (type(value), value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot be read: No such file"):
        document.load(tmp_path / "none.yaml")
    with pytest.raises(Invalid, match="cannot be read: Is a directory"):
        document.load(tmp_path)
