"""Expressions and templates: what they give, what they read, and how they are renamed without touching text."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.workflow import templates
from perdure.workflow.expressions import ExpressionError, Reference, Scope, context_digest
from perdure.workflow.parsing import parse

SCOPE = Scope(
    {"a": 1, "f": 1.0, "t": "text", "xs": [1, 2, 3], "n": None, "yes": True, "o": {"p": {"q": 5}}, "e": []},
    {"v-x": "dash", "loopPrevious": {"output": {"n": 2}}, "loopIndex": 3},
    {"seen": 0},
    {"my-task": {"output": {"v": "ok"}}, "j": {"items": [{"n": 7}]}},
)

GIVES: list[tuple[str, Any]] = [
    ("inputs.a", 1),
    ("inputs.o.p.q", 5),
    ("vars.v-x", "dash"),
    ("tasks.my-task.output.output.v", "ok"),
    ("loop.output.output.n", 2),
    ("inputs.n", None),
    ("not inputs.n", True),
    ("not inputs.yes", False),
    ("inputs.a == 1", True),
    ("inputs.a == 1.0", True),
    ("inputs.a == '1'", False),
    ('inputs.a == "1"', False),
    ("inputs.yes == 1", False),
    ("inputs.t == text", True),
    ("inputs.t != 'other'", True),
    ("inputs.n == null", True),
    ("inputs.e == []", True),
    ("inputs.a < 2", True),
    ("inputs.a >= 1.5", False),
    ("not inputs.a == 2", True),
    ("inputs.a < 2 and vars.loopIndex > 1", True),
    ("inputs.a > 2 or inputs.yes", True),
    ("not (inputs.a == 2 || inputs.a == 3)", True),
    ("inputs.xs[1]", 2),
    ("size(inputs.xs) + inputs.a", 4),
    ("inputs.xs.map(x, x * 2)", [2, 4, 6]),
    ("tasks.j.output.items[0].n == 7", True),
    ("inputs.a == inputs.f", True),
    ("inputs.t + ' tasks.zz.output and inputs.q'", "text tasks.zz.output and inputs.q"),
    ("has(inputs.missing)", False),
    ("inputs.t.startsWith('te')", True),
    ("tasks.my-task.output.output.v == 'ok' ? 1 : 2", 1),
]


@pytest.mark.parametrize(("text", "value"), GIVES, ids=[text for text, _ in GIVES])
def test_what_an_expression_gives(text: str, value: Any) -> None:
    found = parse(text).evaluate(SCOPE)
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("inputs.b", "undefined", "inputs has no `b`"),
        ("inputs.o.x", "undefined", "inputs.o has no `x`"),
        ("inputs.n.x", "undefined", "inputs.n is null"),
        ("inputs.t.x", "undefined", "inputs.t is str"),
        ("tasks.gone.output", "undefined", "has no `gone`"),
        ("inputs.t < 2", "type", "by size"),
        ("inputs.yes < 2", "type", "by size"),
        ("inputs.a + inputs.t", "type", "overload"),
        ("inputs.missing + 1", "undefined", "missing"),
        ("1 +", "syntax", "is no expression"),
        ("other.x", "syntax", "undeclared"),
        ("tasks.a", "syntax", "is no path"),
        ("loop.index + 1", "syntax", "is no path"),
        ("", "syntax", "empty"),
        ("inputs.a " * 1000, "syntax", "characters"),
        ("(" * 60 + "inputs.a" + ")" * 60, "syntax", "recursion"),
        ("inputs.xs.map(a, inputs.xs.map(b, inputs.xs.map(c, [1,2,3,4,5,6,7,8,9].map(d, [1,2,3,4,5,6,7,8,9].map(e, [1,2,3,4,5,6,7,8,9].map(f, [1,2,3,4,5,6,7,8,9].map(g, 1)))))))", "cost", "budget"),
    ],
)  # fmt: skip
def test_what_an_expression_cannot_give(text: str, kind: str, says: str) -> None:
    with pytest.raises(ExpressionError, match=says) as refused:
        parse(text).evaluate(SCOPE)
    assert refused.value.kind == kind


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ExpressionError, match="Did you mean `seen`"):
        parse("memory.sean").evaluate(SCOPE)


READS = [
    ("inputs.a == 1", {"inputs.a"}),
    ("inputs.t + ' vars.x'", {"inputs.t"}),
    (
        "tasks.my-task.output.v + tasks.j.output.items[0].n // memory.x",
        {"tasks.my-task.output.v", "tasks.j.output.items"},
    ),
    ("inputs.xs.map(x, x + vars.k).size() > 0 and not memory.seen", {"inputs.xs", "vars.k", "memory.seen"}),
    ("inputs", {"inputs"}),
]


@pytest.mark.parametrize(("text", "paths"), READS)
def test_what_an_expression_reads(text: str, paths: set[str]) -> None:
    assert {str(one) for one in parse(text).references} == paths


def _inside(reference: Reference) -> Reference:
    return Reference(reference.root, ("in--" + reference.path[0], *reference.path[1:])) if reference.path else reference


def _outside(reference: Reference) -> Reference:
    return (
        Reference(reference.root, (reference.path[0].removeprefix("in--"), *reference.path[1:]))
        if reference.path
        else reference
    )


@pytest.mark.parametrize("text", [text for text, _ in GIVES if "has(" not in text and "loop." not in text])
def test_renamed_and_back_it_gives_the_same(text: str) -> None:
    expression = parse(text)
    if any(reference.root != "tasks" for reference in expression.references):
        renamed = parse(text)  # CEL's own names hold no dash: only ids of tasks are renamed to such
        back = renamed.renamed(lambda r: _inside(r) if r.root == "tasks" else r).renamed(_outside)
    else:
        back = expression.renamed(_inside).renamed(_outside)
    assert back.evaluate(SCOPE) == expression.evaluate(SCOPE)


def test_renaming_leaves_prose_alone() -> None:
    template = templates.parse({"x": "see inputs.a and tasks.j: ${{ tasks.j.output.items }} $${{ inputs.a"})
    renamed = template.renamed(_inside)
    assert renamed.source == {"x": "see inputs.a and tasks.j: ${{ tasks.in--j.output.items }} $${{ inputs.a"}
    assert {str(one) for one in renamed.references} == {"tasks.in--j.output.items"}


# -- templates ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "rendered"),
    [
        ("${{ inputs.xs }}", [1, 2, 3]),
        (" ${{ inputs.a }}", " 1"),
        ("${{ inputs.a }}${{ inputs.n }}${{ inputs.yes }}", "1nulltrue"),
        ("${{inputs.a}}-${{ inputs.f }}", "1-1.0"),
        ("$${{ inputs.a }}", "${{ inputs.a }}"),
        ("${{ inputs.a == 1 }}", True),
        ({"${{ inputs.a }}": ["${{ inputs.t }}"]}, {"${{ inputs.a }}": ["text"]}),
        ("${{ {'k': inputs.a} }}", {"k": 1}),
        ("${{ '}}' + inputs.t }}", "}}text"),
        ("no template", "no template"),
    ],
)
def test_what_a_template_gives(value: Any, rendered: Any) -> None:
    assert templates.parse(value).render(SCOPE) == rendered


@pytest.mark.parametrize(
    ("value", "kind", "place"),
    [
        ({"a": ["x ${{ inputs.a"]}, "syntax", "a[0]"),
        ({"a": {"b": "x ${{ inputs.xs }}"}}, "non_scalar", "a.b"),
        ({"a": "x ${{ inputs.gone }}"}, "undefined", "a"),
        ("${{ }}", "syntax", ""),
    ],
)
def test_what_a_template_cannot_give(value: Any, kind: str, place: str) -> None:
    with pytest.raises(templates.TemplateError) as refused:
        templates.parse(value).render(SCOPE)
    assert refused.value.kind == kind
    assert refused.value.place in (place, "value")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_characters="$")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20,
)  # fmt: skip


@given(JSON)
def test_without_templates_nothing_changes(value: Any) -> None:
    assert templates.parse(value).render(SCOPE) == value


@given(st.text("${}inputs.ax vrmeoy'\"=<>![]()+-1 ", max_size=40))
def test_any_text_gives_a_value_or_an_expression_error(text: str) -> None:
    with contextlib.suppress(ExpressionError):
        templates.parse("${{" + text + "}}").render(SCOPE)


def test_the_context_digest_covers_all_and_only_the_scope() -> None:
    same = context_digest(Scope(dict(SCOPE.inputs), dict(SCOPE.vars), dict(SCOPE.memory), dict(SCOPE.tasks)))
    assert context_digest(SCOPE) == same
    for change in (
        SCOPE._replace(inputs={}),
        SCOPE._replace(vars={}),
        SCOPE._replace(memory={}),
        SCOPE._replace(tasks={}),
    ):
        assert context_digest(change) != same


def test_without_the_extra_cel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cel_expr_python.cel", None)
    with pytest.raises(ExpressionError, match=r"pip install 'perdure\[cel\]'"):
        parse("inputs.only_here_1 + 1")
    assert parse("inputs.only_here_2 == 1")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":{"b":${{ inputs.n }}}}', '{"a":{"b":3}}'),
        ("${{ {'a': inputs.n}}}", {"a": 3}),
        ("${{ {'a': {'b': inputs.n}} }}", {"a": {"b": 3}}),
        ("${{ inputs.n }}}}", "3}}"),
        ("{${{ '}}' }}}", "{}}}"),
    ],
)
def test_braces_around_and_inside_a_template(text: str, value: object) -> None:
    assert templates.parse(text).render(Scope({"n": 3}, {}, {}, {})) == value
