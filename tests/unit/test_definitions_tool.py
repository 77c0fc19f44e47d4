"""Tools: what a function declares, what a model may say to it, and every declaration that cannot be."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import json
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from perdure.definitions.docstring import parse
from perdure.definitions.schema import codec_of
from perdure.definitions.tool import EFFECTS, KINDS, RISKS, Secret, Tool, ToolContext, tool
from perdure.definitions.verdicts import NotApplied, UnknownCall, Verdict
from perdure.errors import Invalid
from support.naming import stable


class Line(BaseModel):
    """A line of an order."""

    sku: str
    count: int = Field(default=1, ge=1)


@dataclasses.dataclass
class Address:
    """Where it goes."""

    street: str
    zip: str | None = None


class Refusal(Exception):
    pass


TOKEN = Secret.env("BANK_TOKEN")


@tool
async def refund(
    ctx: ToolContext,
    order: Annotated[str, msgspec.Meta(min_length=1)],
    cents: Annotated[int, Field(gt=0)],
    lines: list[Line] | None = None,
    to: Address | None = None,
    reason: Annotated[str, "why, as the customer said it"] = "none given",
    how: Literal["card", "cash"] = "card",
    token: Secret = TOKEN,
) -> dict[str, Any]:
    """Pay an order back.

    Only whole cents.

    Args:
        order: the order
            number.
        cents (int): how much.
        unknown: no such parameter.

    Returns:
        The receipt.
    """
    return {"order": order, "cents": cents, "key": ctx.key, "token": repr(token)}


@tool(effect="observe")
def look(order: str) -> str:
    """Look an order up."""
    return order


def test_what_a_bare_tool_declares() -> None:
    assert isinstance(refund, Tool)
    assert (refund.name, refund.effect, refund.kind, refund.risk) == ("refund", "once", "external_mutate", "medium")
    assert (refund.timeout, refund.steps, refund.approval, refund.version) == (None, False, False, "")
    assert (refund.key, refund.on_exception, refund.on_failure, refund.refusals) == (None, "refused", "return", ())
    assert refund.is_async
    assert refund.context_parameter == "ctx"
    assert refund.secrets == frozenset({"token"})
    assert refund.result_codec.type == dict[str, Any]
    assert repr(refund) == "<Tool refund once>"
    assert not look.is_async
    assert look.context_parameter is None
    assert look.kind == "observe"
    assert look.result_codec.is_text


def test_what_a_full_tool_declares() -> None:
    def sell(a: int) -> None: ...

    asks: Callable[[dict[str, Any]], Any] = lambda a: a["a"] > 1  # noqa: E731
    names: Callable[[dict[str, Any]], str] = lambda a: str(a["a"])  # noqa: E731
    made = tool(
        effect="keyed", kind="network", risk="high", timeout="30s", approval=asks, version="2", key=names,
        on_exception="unknown", on_failure="fail", refusals=[Refusal, KeyError], name="sell-it", description="Sells.",
    )(sell)  # fmt: skip
    assert (made.name, made.effect, made.kind, made.risk, made.timeout) == ("sell-it", "keyed", "network", "high", 30.0)
    assert (made.approval, made.key, made.version, made.description) == (asks, names, "2", "Sells.")
    assert (made.on_exception, made.on_failure, made.refusals) == ("unknown", "fail", (Refusal, KeyError))
    assert made.result_codec.type is type(None)


@pytest.mark.parametrize("effect", EFFECTS)
def test_kind_follows_effect_unless_given(effect: str) -> None:
    kind = effect if effect in ("pure", "observe") else "external_mutate"
    assert tool(effect=effect)(look.fn).kind == kind
    for other in KINDS:
        assert tool(effect=effect, kind=other)(look.fn).kind == other


def test_calling_a_tool_calls_the_function() -> None:
    assert look("o1") == "o1"
    assert look(order="o2") == "o2"


@pytest.mark.anyio
async def test_calling_an_async_tool_gives_the_coroutine() -> None:
    ctx = ToolContext(key="k", thread="t", run="r", call="1.0")
    assert await refund(ctx, "o", 5) == {"order": "o", "cents": 5, "key": "k", "token": "Secret(env:BANK_TOKEN)"}


def test_a_tool_is_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        refund.effect = "pure"  # type: ignore[misc]


def test_a_bound_method_is_a_function() -> None:
    class Bank:
        def pay(self, cents: int) -> int:
            return cents

    made = tool(Bank().pay)
    assert made.name == "pay"
    assert list(made.parameters()["properties"]) == ["cents"]
    assert made(cents=3) == 3


# ------------------------------------------------------------------------------------------ schema, description


def test_parameters_as_the_model_sees_them() -> None:
    line = {
        "type": "object",
        "description": "A line of an order.",
        "properties": {"sku": {"type": "string"}, "count": {"type": "integer", "minimum": 1, "default": 1}},
        "required": ["sku"],
    }
    address = {
        "type": "object",
        "description": "Where it goes.",
        "properties": {
            "street": {"type": "string"},
            "zip": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        },
        "required": ["street"],
    }
    assert refund.parameters() == {
        "type": "object",
        "properties": {
            "order": {"type": "string", "minLength": 1, "description": "the order number."},
            "cents": {"type": "integer", "exclusiveMinimum": 0, "description": "how much."},
            "lines": {
                "anyOf": [{"type": "array", "items": line | {}}, {"type": "null"}], "default": None,
            },
            "to": {"anyOf": [{"$ref": "#/$defs/Address"}, {"type": "null"}], "default": None},
            "reason": {"type": "string", "description": "why, as the customer said it", "default": "none given"},
            "how": {"enum": ["card", "cash"], "default": "card"},
        },
        "required": ["order", "cents"],
        "additionalProperties": False,
        "$defs": {"Address": address},
    }  # fmt: skip
    assert refund.parameters() is refund.parameters()
    assert "BANK_TOKEN" not in json.dumps(refund.parameters())
    assert look.parameters() == {
        "type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"],
        "additionalProperties": False,
    }  # fmt: skip


def test_description_is_the_docstring_without_its_sections() -> None:
    assert refund.description == "Pay an order back.\n\nOnly whole cents."
    assert look.description == "Look an order up."
    assert tool(name="x")(lambda: None).description == ""
    assert tool(description="")(look.fn).description == ""


@pytest.mark.parametrize(
    ("doc", "text", "parameters"),
    [
        (None, "", {}),
        ("   \n ", "", {}),
        ("One.", "One.", {}),
        ("One.\n\n    Two: not a section.", "One.\n\nTwo: not a section.", {}),
        (
            "One.\n\n    Args:\n        a: x\n            y\n        b (int, optional): z\n    ",
            "One.",
            {"a": "x y", "b": "z"},
        ),
        ("Args:\n    a: x\n\nMore.", "More.", {"a": "x"}),
        ("One.\n\nArgs:\n", "One.\n\nArgs:", {}),
        ("One.\n\nRaises:\n    Error: never.\n\nExample:\n    >>> 1\n", "One.", {}),
    ],
)
def test_docstrings(doc: str | None, text: str, parameters: dict[str, str]) -> None:
    parsed = parse(doc)
    assert (parsed.text, parsed.parameters) == (text, parameters)


def test_griffe_is_loaded_at_first_use_only() -> None:
    code = (
        "import sys\n"
        "from perdure.definitions.tool import tool\n"
        "@tool\n"
        "def f(a: int) -> int:\n"
        "    '''Do.\n\n    Args:\n        a: number.\n    '''\n"
        "f.contract, f.decode_arguments('{\"a\":1}')\n"
        "assert 'griffe' not in sys.modules\n"
        "assert f.parameters()['properties']['a']['description'] == 'number.'\n"
        "assert 'griffe' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------ contract


def test_a_contract_is_what_a_pending_call_relies_on() -> None:
    def make(**options: Any) -> str:
        def f(a: int, b: str = "x") -> int:
            """Some text.

            Args:
                a: number.
            """
            return a

        return tool(name="f", **options)(f).contract

    base = make()
    assert len(base) == 64
    assert make() == base
    for same in (
        {"risk": "high"}, {"timeout": 5}, {"approval": True}, {"description": "Other."}, {"on_failure": "fail"},
        {"on_exception": "unknown"}, {"effect": "once"}, {"refusals": (KeyError,)},
    ):  # fmt: skip
        assert make(**same) == base, same
    others = [make(effect="keyed"), make(kind="network"), make(steps=True), make(version="2")]
    assert len({base, *others}) == 5

    def f(a: int, b: str = "x") -> int:
        return a + 1  # another body and no docstring: the declared version says whether it matters

    def renamed(a: int, c: str = "x") -> int:
        return a

    def retyped(a: str, b: str = "x") -> int:
        return 0

    def result(a: int, b: str = "x") -> str:
        return ""

    def default(a: int, b: str = "y") -> int:
        return a

    def documented(a: Annotated[int, "number"], b: Annotated[str, msgspec.Meta(description="text")] = "x") -> int:
        return a

    def served(ctx: ToolContext, a: int, b: str = "x", key: Secret = TOKEN) -> int:
        return a

    assert tool(f).contract == tool(name="f")(documented).contract == tool(name="f")(served).contract == base
    assert base not in {tool(name="f")(fn).contract for fn in (renamed, retyped, result, default)}
    assert tool(name="g")(f).contract != base


# ------------------------------------------------------------------------------------------ arguments


def test_arguments_are_decoded_to_python_values() -> None:
    raw = '{"cents": 5, "order": "o", "lines": [{"sku": "s"}], "to": {"street": "x"}}'
    assert refund.decode_arguments(raw) == {
        "order": "o", "cents": 5, "lines": [Line(sku="s")], "to": Address("x"), "reason": "none given", "how": "card",
    }  # fmt: skip
    assert refund.arguments_json(raw) == (
        b'{"order":"o","cents":5,"lines":[{"sku":"s","count":1}],"to":{"street":"x","zip":null},'
        b'"reason":"none given","how":"card"}'
    )
    assert refund.arguments_json(raw.replace('"x"', '"x", "zip": null')) == refund.arguments_json(raw)
    assert refund.decode_arguments(refund.arguments_json(raw)) == refund.decode_arguments(raw)
    assert list(refund.decode_arguments(raw)) == ["order", "cents", "lines", "to", "reason", "how"]


def test_equal_arguments_have_one_form() -> None:
    assert look.arguments_json(' {"order" : "\\u006f"} ') == look.arguments_json(b'{"order":"o"}') == b'{"order":"o"}'

    @tool
    def f(a: set[str], b: Decimal = Decimal("1.0")) -> None: ...

    assert f.arguments_json('{"a":["z","y","x"]}') == b'{"a":["x","y","z"],"b":"1.0"}'


def test_no_arguments() -> None:
    @tool
    def f(a: int = 1) -> None: ...

    for raw in ("", "  ", "{}", b""):
        assert f.decode_arguments(raw) == {"a": 1}
        assert f.arguments_json(raw) == b'{"a":1}'


def test_a_default_that_does_not_fit_its_type_is_kept_and_not_shown() -> None:
    marker = object()

    @tool
    def f(a: int = [], b: str = marker, c: int = 3) -> None: ...  # type: ignore[assignment]

    assert f.decode_arguments("{}") == {"a": [], "b": marker, "c": 3}
    assert f.arguments_json("{}") == b'{"c":3}'
    assert f.parameters()["properties"]["a"] == {"type": "integer"}


def test_parameters_without_annotation_are_plain_json() -> None:
    @tool
    def f(a, b=[1]):  # type: ignore[no-untyped-def]  # noqa: B006
        return a

    assert f.decode_arguments('{"a":{"x":[1]}}') == {"a": {"x": [1]}, "b": [1]}
    assert f.parameters()["properties"] == {"a": {}, "b": {"default": [1]}}
    assert f.result_codec.type is Any


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ('{"cents":1}', "missing required field `order`"),
        ("", "missing required field `order`"),
        ('{"order":"o","cents":1,"zip":2}', "unknown field `zip`"),
        ('{"order":1,"cents":1}', "Argument `order` of `refund`: Expected `str`, got `int`."),
        ('{"order":"","cents":1}', "Argument `order` of `refund`: Expected `str` of length >= 1."),
        ('{"order":"o","cents":0}', "Argument `cents` of `refund`: Input should be greater than 0."),
        (
            '{"order":"o","cents":1,"lines":[{"sku":"a"},{"sku":"b","count":0}]}',
            "Argument `lines[1].count` of `refund`: ",
        ),
        (
            '{"order":"o","cents":1,"to":{"zip":"1"}}',
            "Argument `to` of `refund`: Object missing required field `street`.",
        ),
        ('{"order":"o","cents":1,"to":{"street":1}}', "Argument `to.street` of `refund`: Expected `str`, got `int`."),
        ('{"order":"o","cents":1,"how":"gold"}', "Argument `how` of `refund`: Invalid enum value 'gold'."),
        ('{"order":"o","cents":1,"token":"x"}', "unknown field `token`"),
        ('{"order":"o","cents":1,"ctx":{}}', "unknown field `ctx`"),
        ('{"order":"o","cents":1', "not JSON"),
        ('{"order":"o","cents":1} x', "not JSON"),
        ("[1]", "Expected `object`, got `array`"),
        ("null", "Expected `object`, got `null`"),
        ('{"order":"o","cents":99999999999999999999}', "64 bits"),
        ('{"order":"\ud800","cents":1}', "surrogate"),
        (b'{"order":"\xff","cents":1}', "not JSON"),
        ('{"order":"\\ud800","cents":1}', "not JSON"),
        ('{"order":"o","cents":1,"lines":' + "[" * 70 + "]" * 70 + "}", "nested deeper"),
    ],
)
def test_bad_arguments_tell_the_model_which_and_why(raw: str | bytes, says: str) -> None:
    for call in (refund.decode_arguments, refund.arguments_json):
        with pytest.raises(Invalid) as caught:
            call(raw)
        assert says in str(caught.value)
        assert "refund" in str(caught.value)


def test_bad_arguments_list_what_the_tool_takes() -> None:
    with pytest.raises(Invalid) as caught:
        look.decode_arguments("{}")
    assert caught.value.help == "It takes `order`."

    @tool
    def f() -> None: ...

    with pytest.raises(Invalid) as caught:
        f.decode_arguments('{"a":1}')
    assert caught.value.help == "It takes none."


@given(
    st.text(max_size=60)
    | st.dictionaries(st.sampled_from(["order", "cents", "to", "x"]), st.integers() | st.text()).map(json.dumps)
)
def test_any_text_decodes_or_is_invalid(raw: str) -> None:
    try:
        arguments = refund.decode_arguments(raw)
    except Invalid:
        return
    assert refund.decode_arguments(refund.arguments_json(raw)) == arguments


# ------------------------------------------------------------------------------------------ what cannot be


def plain(a: int) -> int:
    return a


async def coroutine(a: Any) -> bool:
    return True


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"effect": "twice"}, "'pure', 'observe', 'idempotent', 'keyed', 'once'"),
    ({"effect": 1}, "effect=1"),
    ({"effect": "once", "steps": True}, "beside `steps=True`"),
    ({"effect": "pure", "steps": True}, "beside `steps=True`"),
    ({"steps": 1}, "steps=1"),
    ({"kind": "mutate"}, "'external_mutate'"),
    ({"risk": "extreme"}, ", ".join(map(repr, RISKS))),
    ({"timeout": 0}, "zero"),
    ({"timeout": -1}, "out of range"),
    ({"timeout": "soon"}, "not a duration"),
    ({"timeout": True}, "not a duration"),
    ({"timeout": float("nan")}, "out of range"),
    ({"approval": "yes"}, "approval='yes'"),
    ({"approval": coroutine}, "not async"),
    ({"approval": lambda: True}, "exactly one argument"),
    ({"approval": None}, "approval=None"),
    ({"key": "order"}, "key='order'"),
    ({"key": coroutine}, "not async"),
    ({"key": lambda a, b: ""}, "exactly one argument"),
    ({"key": str}, "key="),
    ({"version": 2}, "version"),
    ({"version": " "}, "blank"),
    ({"on_exception": "ignore"}, "'refused', 'unknown'"),
    ({"on_failure": "raise"}, "'return', 'fail'"),
    ({"refusals": ("KeyError",)}, "'KeyError'"),
    ({"refusals": KeyError}, "<class"),
    ({"refusals": (BaseException,)}, "BaseException"),
    ({"refusals": KeyError("x")}, "KeyError"),
    ({"name": ""}, "1 to 64"),
    ({"name": "a b"}, "'a b'"),
    ({"name": "a" * 65}, "1 to 64"),
    ({"name": "é"}, "'é'"),
    ({"name": "a\n"}, "1 to 64"),
    ({"name": 3}, "1 to 64"),
    ({"description": 3}, "description"),
]


@pytest.mark.parametrize(("options", "says"), BAD_OPTIONS, ids=stable)
def test_a_bad_option_is_invalid(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid) as caught:
        tool(**options)(plain)
    assert says in str(caught.value)


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="efect"):
        tool(efect="once")(plain)  # type: ignore[call-overload]


class Arbitrary:
    pass


def star(*parts: int) -> None: ...
def stars(**parts: int) -> None: ...
def slash(a: int, /) -> None: ...
def unresolved(a: int, b: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def unresolved_result(a: int) -> Nowhere: ...  # type: ignore[name-defined]  # noqa: F821
def arbitrary(a: int, b: list[Arbitrary]) -> None: ...
def arbitrary_result() -> Arbitrary: ...  # type: ignore[empty-body]
def takes_callable(a: Callable[[], int]) -> None: ...
def ambiguous(a: dt.datetime | str) -> None: ...
def two_contexts(a: ToolContext, b: ToolContext) -> None: ...
def secret_without_default(token: Secret) -> None: ...
def secret_as_text(token: Secret = "sk-123") -> None: ...  # type: ignore[assignment]
def field_default(a: int = Field(gt=0)) -> None: ...
def method(self, a: int) -> None: ...  # type: ignore[no-untyped-def]
def generator(a: int):  # type: ignore[no-untyped-def]
    yield a


async def async_generator(a: int):  # type: ignore[no-untyped-def]
    yield a


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (star, "`*parts`"),
        (stars, "`**parts`"),
        (slash, "`a`"),
        (unresolved, "annotation of `b` of tool `unresolved` cannot be resolved"),
        (unresolved_result, "annotation of `return`"),
        (arbitrary, "Parameter `b` of tool `arbitrary` has the type `list["),
        (arbitrary_result, "The result of tool `arbitrary_result` has the type `Arbitrary`"),
        (takes_callable, "Callable"),
        (ambiguous, "Parameter `a`"),
        (two_contexts, "`a`, `b`"),
        (secret_without_default, 'Secret.env("NAME")'),
        (secret_as_text, "without a default"),
        (field_default, "Annotated[type, Field(...)]"),
        (method, "`self`"),
        (generator, "generator"),
        (async_generator, "generator"),
        (lambda a: a, "'<lambda>'"),
        ("plain", "not of a str"),
        (Arbitrary, "not of a type"),
        (functools.partial(plain, 1), "not of a partial"),
        (look, "not of a Tool"),
    ],
    ids=lambda part: getattr(part, "__name__", str(part)[:40]),
)
def test_a_function_that_cannot_be_a_tool_is_invalid(fn: Any, says: str) -> None:
    with pytest.raises(Invalid) as caught:
        tool(fn)
    assert says in str(caught.value)
    assert "sk-123" not in str(caught.value)


# ------------------------------------------------------------------------------------------ probe


@pytest.mark.anyio
async def test_a_probe_is_set_once() -> None:
    @tool
    def pay(cents: int) -> str:
        return ""

    assert pay.probe_fn is None

    @pay.probe
    async def ask(call: UnknownCall) -> Verdict:
        return NotApplied(call.key)

    assert pay.probe_fn is ask
    call = UnknownCall("k", "pay", {}, "t", "r", "1.0", "e", 0, "crash")
    assert await ask(call) == NotApplied("k")
    with pytest.raises(Invalid, match="has a probe already"):
        pay.probe(ask)


@pytest.mark.parametrize("fn", [None, "x", lambda: None, lambda a, b: None])
def test_a_bad_probe_is_invalid(fn: Any) -> None:
    @tool
    def pay(cents: int) -> str:
        return ""

    with pytest.raises(Invalid, match="probe of tool `pay`"):
        pay.probe(fn)
    assert pay.probe_fn is None


# ------------------------------------------------------------------------------------------ context


@pytest.mark.anyio
async def test_steps_exist_only_in_a_steps_tool() -> None:
    until = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    ctx = ToolContext(key="k", thread="t", run="r", call="1.0", deadline=until, services=3)
    assert (ctx.key, ctx.thread, ctx.run, ctx.call, ctx.deadline, ctx.services) == ("k", "t", "r", "1.0", until, 3)
    ctx.progress("half")
    with pytest.raises(Invalid, match=r"ctx.step exists only in a `steps=True` tool"):
        await ctx.step("a", plain, 1)
    with pytest.raises(Invalid, match=r"ctx.step_key exists only in a `steps=True` tool"):
        ctx.step_key("a")
    assert ToolContext().deadline is None


def test_a_subclass_of_the_context_is_a_context() -> None:
    class Mine(ToolContext):
        pass

    def f(c: Any, a: int) -> None: ...

    f.__annotations__["c"] = Annotated[Mine, "mine"]
    assert tool(f).context_parameter == "c"
    assert list(tool(f).parameters()["properties"]) == ["a"]


# ------------------------------------------------------------------------------------------ secrets


def test_a_secret_shows_only_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BANK_TOKEN", "hunter2")
    secret = Secret.env("BANK_TOKEN")
    assert secret.reveal() == "hunter2"
    for shown in (repr(secret), str(secret), f"{secret}", f"{secret:>25}", f"{secret!r}", f"{secret}", f"{[secret]}"):
        assert "hunter2" not in shown
        assert "Secret(env:BANK_TOKEN)" in shown
    assert secret == Secret.env("BANK_TOKEN") != Secret.env("OTHER")
    assert len({secret, Secret.env("BANK_TOKEN")}) == 1
    monkeypatch.setenv("BANK_TOKEN", "new")
    assert secret.reveal() == "new"


@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_secret_is_invalid_by_name(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("BANK_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("BANK_TOKEN", value)
    with pytest.raises(Invalid, match="BANK_TOKEN is not set"):
        TOKEN.reveal()


@pytest.mark.parametrize("name", ["", "sk-live-123", "A B", "1A", "A\n", None, 3])
def test_a_secret_needs_a_name_and_never_repeats_what_it_got(name: Any) -> None:
    with pytest.raises(Invalid) as caught:
        Secret.env(name)
    assert "sk-live" not in str(caught.value)


def test_a_secret_does_not_cross_json() -> None:
    for codec in (codec_of(Any), codec_of(dict[str, Any])):
        with pytest.raises(Invalid, match=r"\$.a` is of type Secret"):
            codec.encode({"a": TOKEN})
    with pytest.raises(Invalid):
        codec_of(Secret)
    with pytest.raises(TypeError):
        json.dumps(TOKEN)


class Options(TypedDict, total=False):
    a: int


def test_typed_dicts_are_parameters() -> None:
    @tool
    def f(o: Options) -> None: ...

    assert f.decode_arguments('{"o":{"a":1}}') == {"o": {"a": 1}}
    with pytest.raises(Invalid, match=r"`o.a` of `f`"):
        f.decode_arguments('{"o":{"a":"1"}}')
