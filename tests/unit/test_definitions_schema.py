"""Codecs: what crosses JSON comes back equal, or is refused by name."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import datetime as dt
import enum
import json
import subprocess
import sys
import typing
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, NoReturn, Self, TypedDict, TypeVar

import annotated_types
import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from perdure.definitions import jsonschema
from perdure.definitions.schema import Codec, codec_of
from perdure.errors import Invalid
from perdure.limits import JSON_DEPTH_MAX, PAYLOAD_BYTES_MAX
from support.naming import stable


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Line:
    sku: str
    count: int = 1
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class FrozenLine:
    sku: str = "s"


@dataclasses.dataclass
class Order:
    lines: list[Line]
    due: dt.datetime | None = None


@dataclasses.dataclass(eq=False)
class Faceless:
    x: Any
    inner: Faceless | None = None


class Pair(NamedTuple):
    a: int
    b: str = "b"


class Record(TypedDict):
    a: int
    line: Line


class Node(msgspec.Struct):
    value: int
    next: Node | None = None


class Ticket(BaseModel):
    order: str
    cents: int = Field(gt=0)


class Basket(BaseModel):
    title: str  # a property of this name is no annotation
    tickets: list[Ticket]


class Tree(BaseModel):
    children: list[Tree] = []


@dataclasses.dataclass
class Holder:
    ticket: Ticket
    others: list[Ticket] = dataclasses.field(default_factory=list)


class StructHolder(msgspec.Struct):
    ticket: Ticket | None = None


class ModelDict(TypedDict):
    ticket: Ticket


@pydantic.dataclasses.dataclass
class Checked:
    n: int = Field(ge=1)


class Aliased(BaseModel):
    order_id: str = Field(alias="orderId")


class Hidden(BaseModel):
    seen: int
    unseen: int = Field(default=0, exclude=True)


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    when: dt.datetime
    colour: Colour


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]


UserId = NewType("UserId", int)
NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)

GOOD: list[tuple[Any, Any]] = [
    (Any, {"a": [1, 2.5, "x", None, True, {"b": []}]}),
    (Any, None),
    (Any, 2**63 - 1),
    (Any, -(2**63)),
    (Any, ""),
    (object, {"a": 1}),
    (dict[str, object], {"a": [1]}),
    (None, None),
    (type(None), None),
    (str, "text \N{SNOWMAN} \U0001f600"),
    (int, 3),
    (float, 2.5),
    (float, 3),
    (bool, True),
    (bytes, b"\x00\xff"),
    (dict, {"a": 1}),
    (list, [1]),
    (tuple[int, str], (1, "x")),
    (tuple[int, ...], (1, 2)),
    (set[str], {"a", "b"}),
    (frozenset[int], frozenset({1, 2})),
    (dict[int, str], {1: "x"}),
    (list[tuple[int, int]], [(1, 2)]),
    (int | None, None),
    (int | str, "x"),
    (Literal["a", "b"], "a"),
    (Colour, Colour.RED),
    (Level, Level.LOW),
    (dt.datetime, NOON),
    (dt.datetime, dt.datetime(2026, 1, 1)),  # noqa: DTZ001  a naive time stays naive
    (dt.date, NOON.date()),
    (dt.timedelta, dt.timedelta(seconds=1.5)),
    (Decimal, Decimal("1.10")),
    (uuid.UUID, uuid.UUID(int=7)),
    (UserId, 7),
    (Line, Line("s")),
    (Order, Order([Line("s", 2)], NOON)),
    (Faceless, Faceless(1, Faceless("x"))),
    (Pair, Pair(1)),
    (Record, {"a": 1, "line": Line("s")}),
    (Node, Node(1, Node(2))),
    (list[Node], [Node(1)]),
    (Annotated[int, msgspec.Meta(ge=1)], 1),
    (Annotated[int, "a number"], 1),
    (Annotated[int, Field(ge=1)], 1),
    (list[Annotated[int, annotated_types.Ge(1)]], [1]),
    (Ticket, Ticket(order="o", cents=1)),
    (Ticket | None, None),
    (Ticket | str, "x"),
    (Ticket | Basket, Basket(title="t", tickets=[Ticket(order="o", cents=1)])),
    (list[Ticket], [Ticket(order="o", cents=1)]),
    (dict[str, list[Ticket]], {"a": [Ticket(order="o", cents=1)]}),
    (Tree, Tree(children=[Tree()])),
    (Holder, Holder(Ticket(order="o", cents=1), [Ticket(order="p", cents=2)])),
    (StructHolder, StructHolder(Ticket(order="o", cents=1))),
    (ModelDict, {"ticket": Ticket(order="o", cents=1)}),
    (Checked, Checked(2)),
    (Aliased, Aliased(orderId="o")),
    (Strict, Strict(when=NOON, colour=Colour.RED)),
    (list[Strict], [Strict(when=NOON, colour=Colour.RED)]),
    (Page[int], Page[int](items=[1])),
]


@pytest.mark.parametrize(("type_", "value"), GOOD, ids=lambda part: stable(part) if isinstance(part, type) else "value")
def test_what_fits_comes_back_equal(type_: Any, value: Any) -> None:
    codec = codec_of(type_)
    raw, decoded = codec.round_trip(value, "result")
    assert raw == codec.encode(value)
    assert type(decoded) is type(value) or type_ is float
    if not isinstance(value, Faceless):
        assert decoded == value == codec.decode(raw)
    assert codec.round_trip(decoded)[0] == raw or type_ is float
    assert json.loads(raw) is not ...
    assert codec.decode(memoryview(raw)) is not ...
    assert codec.decode(msgspec.Raw(raw)) is not ...


class Refusal(NamedTuple):
    type_: Any
    value: Any
    path: str
    why: str


DEEP: Any = None
for _ in range(JSON_DEPTH_MAX + 1):
    DEEP = [DEEP]
CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)

BAD = [
    # an unannotated result that would come back as something else (C04)
    Refusal(Any, (1, 2), "$", "tuple"),
    Refusal(Any, {"a": [1, (2,)]}, "$.a[1]", "tuple"),
    Refusal(Any, {"price": Decimal(1)}, "$.price", "Decimal"),
    Refusal(Any, {"when": [NOON]}, "$.when[0]", "datetime"),
    Refusal(Any, {1, 2}, "$", "set"),
    Refusal(Any, [b"x"], "$[0]", "bytes"),
    Refusal(Any, {"a": {1: 2}}, "$.a", "key 1"),
    Refusal(Any, {(1, 2): 3}, "$", "key (1, 2)"),
    Refusal(Any, Colour.RED, "$", "Colour"),
    Refusal(Any, Line("s"), "$", "Line"),
    Refusal(Any, [Node(1)], "$[0]", "Node"),
    Refusal(Any, Ticket(order="o", cents=1), "$", "Ticket"),
    Refusal(Any, {"a": [object()]}, "$.a[0]", "object"),
    Refusal(Any, {"f": print}, "$.f", "builtin_function_or_method"),
    # what JSON cannot hold
    Refusal(Any, float("nan"), "$", "nan"),
    Refusal(Any, {"a": [1.0, float("-inf")]}, "$.a[1]", "-inf"),
    Refusal(float, float("nan"), "$", "nan"),
    Refusal(float | None, float("inf"), "$", "inf"),
    Refusal(Line | None, Line("s", float("nan")), "$.count", "nan"),  # type: ignore[arg-type]
    Refusal(Any, [2**63], "$[0]", "64 bits"),
    Refusal(int, 2**70, "$", "64 bits"),
    Refusal(Any, -(2**63) - 1, "$", "64 bits"),
    Refusal(Any, {"a": "\ud800"}, "$.a", "surrogate"),
    Refusal(str, "\udfff", "$", "surrogate"),
    Refusal(Order, Order([Line("\ud800")]), "$.lines[0].sku", "surrogate"),
    Refusal(Any, DEEP, "", "nested deeper"),
    Refusal(Any, CIRCLE, "", "nested deeper"),
    Refusal(Any, "x" * PAYLOAD_BYTES_MAX, "", "PAYLOAD_BYTES_MAX"),
    # values that are not of the declared type
    Refusal(None, 1, "$", "`null`"),
    Refusal(str, None, "$", "`str`"),
    Refusal(dict, [1], "$", "`object`"),
    Refusal(dict[str, Any], {"a": (1,)}, "$.a", "tuple"),
    Refusal(list[int], (1,), "$", "tuple"),
    Refusal(collections.abc.Sequence[int], (1,), "$", "tuple"),
    Refusal(Line, {"sku": "s"}, "$", "dict"),
    Refusal(Line, Line(3), "$.sku", "`str`"),  # type: ignore[arg-type]
    Refusal(Order, Order([Line("s", 1, Line("t"))]), "$.lines[0].note", "got `object`"),  # type: ignore[arg-type]
    Refusal(Record, {"a": 1, "line": Line("s"), "b": 2}, "$", "key 'b'"),
    Refusal(Faceless, Faceless((1,)), "$.x", "tuple"),
    Refusal(Faceless, Faceless(1, Faceless(object())), "$.inner.x", "object"),
    Refusal(Decimal, Decimal("NaN"), "$", "Decimal"),
    Refusal(Annotated[int, msgspec.Meta(ge=1)], 0, "$", ">= 1"),
    Refusal(Annotated[int, Field(ge=1)], 0, "$", "greater than or equal to 1"),
    Refusal(list[Annotated[int, Field(ge=1)]], [1, 0], "$[1]", "greater than or equal to 1"),
    Refusal(int, "1", "$", "`int`"),
    Refusal(Ticket, {"order": "o", "cents": 1}, "$", "dict"),
    Refusal(Ticket, Ticket.model_construct(order="o", cents=0), "$.cents", "greater than 0"),
    Refusal(Holder, Holder(Ticket.model_construct(order="o", cents=0)), "$.ticket.cents", "greater than 0"),
    Refusal(StructHolder, StructHolder(Ticket.model_construct(order="o", cents=0)), "$.ticket.cents", "greater than 0"),
    Refusal(Hidden, Hidden(seen=1, unseen=2), "$.unseen", "unequal"),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: stable(f"{case.type_}-{case.value!r}"))
def test_what_would_come_back_as_something_else_is_refused_by_name(case: Refusal) -> None:
    codec = codec_of(case.type_)
    for call in (codec.round_trip, codec.encode):
        with pytest.raises(Invalid) as caught:
            call(case.value, "result of tool `x`")
        text = str(caught.value)
        assert text.startswith("result of tool `x`")
        assert case.why in text
        if case.path:
            assert f"at `{case.path}`" in text


class Misread(NamedTuple):
    type_: Any
    raw: bytes
    path: str
    why: str


MISREAD = [
    Misread(int, b'"1"', "$", "Expected `int`, got `str`"),
    Misread(Order, b'{"lines":[{"sku":1}]}', "$.lines[0].sku", "Expected `str`"),
    Misread(Order, b"{}", "$", "missing required field `lines`"),
    Misread(Any, b"{", "$", "not JSON"),
    Misread(Any, b"", "$", "not JSON"),
    Misread(Any, b'"\\ud800"', "$", "not JSON"),
    Misread(Any, b'"\xff"', "$", "not JSON"),
    Misread(Any, b"[9223372036854775808]", "$[0]", "64 bits"),
    Misread(Any, b"[" * 100 + b"]" * 100, "", "nested deeper"),
    Misread(Any, b"[" * 100_000 + b"]" * 100_000, "", "value"),
    Misread(int, b"1" * 30, "$", "64 bits"),
    Misread(Ticket, b'{"order":"o","cents":0}', "$.cents", "greater than 0"),
    Misread(Ticket, b"{", "$", "Invalid JSON"),
    Misread(list[Ticket], b'[{"order":1,"cents":0}]', "$[0].order", "`$[0].cents`: Input should be greater than 0"),
    Misread(StructHolder, b'{"ticket":{"order":"o"}}', "$.ticket.cents", "Field required"),
    Misread(Annotated[str, Field(pattern="^a")], b'"b"', "$", "pattern"),
]


@pytest.mark.parametrize("case", MISREAD, ids=lambda case: f"{case.raw[:30]!r}")
def test_bytes_that_do_not_fit_name_the_place(case: Misread) -> None:
    with pytest.raises(Invalid) as caught:
        codec_of(case.type_).decode(case.raw, "value")
    assert case.why in str(caught.value)
    if case.path:
        assert f"at `{case.path}`" in str(caught.value)


class Arbitrary:
    pass


@dataclasses.dataclass
class HoldsArbitrary:
    x: list[Arbitrary]


@dataclasses.dataclass
class OddDefault:
    x: int = Arbitrary()  # type: ignore[assignment]


@dataclasses.dataclass
class Unresolvable:
    x: Nowhere  # type: ignore[name-defined]  # noqa: F821


class Mixed(msgspec.Struct):
    x: Annotated[int, Field(ge=1)]


@pytest.mark.parametrize(
    ("type_", "named"),
    [
        (Arbitrary, "Arbitrary"),
        (list[Arbitrary], "Arbitrary"),
        (HoldsArbitrary, "Arbitrary"),
        (Callable[[int], int], "Callable"),
        (Iterator[int], "Iterator"),
        (typing.AsyncIterator[int], "AsyncIterator"),
        (type, "type"),
        (complex, "complex"),
        (Exception, "Exception"),
        (NoReturn, "NoReturn"),
        (Self, "Self"),
        (dt.datetime | str, "datetime"),
        (Line | Order, "Line"),
        (Literal[1.5], "1.5"),
        ("Nowhere", "Nowhere"),
        (list["Nowhere"], "Nowhere"),  # type: ignore[name-defined]  # noqa: F821
        (5, "5"),
        (Unresolvable, "Nowhere"),
        (OddDefault, "Arbitrary"),
        (Mixed, "mixes"),
        (Annotated[Node, Field(description="x")] | None, "mixes"),
        (Annotated[Arbitrary, Field(description="x")], "Arbitrary"),
    ],
    ids=str,
)
def test_a_type_that_cannot_cross_is_invalid_at_once(type_: Any, named: str) -> None:
    for _ in range(2):
        with pytest.raises(Invalid, match="cannot cross as JSON") as caught:
            codec_of(type_, "Parameter `x`")
        assert str(caught.value).startswith("Parameter `x` has the type")
        assert named in str(caught.value)


def test_text_is_exactly_str() -> None:
    assert codec_of(str).is_text
    for type_ in (Any, int, str | None, Annotated[str, msgspec.Meta(min_length=1)], Colour):
        assert not codec_of(type_).is_text


def test_a_missing_annotation_is_plain_json() -> None:
    import inspect

    assert codec_of(inspect.Parameter.empty).type is Any
    assert codec_of(object).type is Any
    assert codec_of(Any).schema() == {}
    assert repr(codec_of(None)) == "codec_of(None)"
    assert repr(codec_of(list[int])) == "codec_of(list[int])"


def test_classes_are_built_once() -> None:
    assert codec_of(Line) is codec_of(Line)


def test_schemas_have_no_titles_and_definitions_only_at_the_root() -> None:
    for type_, _ in GOOD:
        schema = codec_of(type_).schema()
        text = json.dumps(schema)
        assert '"title": "' not in text, schema
        assert text.count('"$defs"') == ("$defs" in schema), schema
        for ref in {part.split('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}:
            assert ref in schema["$defs"], schema
    assert codec_of(int).schema() == {"type": "integer"}
    assert codec_of(None).schema() == {"type": "null"}
    assert codec_of(Colour).schema() == {"enum": ["blue", "red"]}
    assert codec_of(Ticket).schema() == {
        "type": "object",
        "properties": {"order": {"type": "string"}, "cents": {"type": "integer", "exclusiveMinimum": 0}},
        "required": ["order", "cents"],
    }
    assert set(codec_of(Basket).schema()["properties"]) == {"title", "tickets"}
    assert set(codec_of(Tree).schema()) == {"type", "properties", "$defs"}
    assert set(codec_of(Node).schema()["$defs"]) == {"Node"}


def test_definitions_of_one_name_and_two_meanings_are_kept_apart() -> None:
    into: dict[str, Any] = {"A": {"type": "string"}}
    schema: dict[str, Any] = {
        "anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A", "b": "#/$defs/B"}},
        "$defs": {"A": {"items": {"$ref": "#/$defs/A"}}, "B": {"type": "null"}},
    }
    joined = jsonschema.hoist(schema, into)
    assert joined == {
        "anyOf": [{"$ref": "#/$defs/A_"}, {"$ref": "#/$defs/B"}],
        "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A_", "b": "#/$defs/B"}},
    }
    assert into == {"A": {"type": "string"}, "A_": {"items": {"$ref": "#/$defs/A_"}}, "B": {"type": "null"}}
    again = {"$ref": "#/$defs/A", "$defs": {"A": {"type": "string"}}}
    assert jsonschema.hoist(again, into) == {"$ref": "#/$defs/A"}
    assert set(into) == {"A", "A_", "B"}


def test_without_takes_annotations_not_properties() -> None:
    schema = {
        "title": "T",
        "properties": {"title": {"title": "Title", "type": "string"}, "description": {"default": {"title": "kept"}}},
        "required": ["title"],
        "items": [{"title": "x", "enum": ["title"]}],
    }
    assert jsonschema.without(schema, ("title",)) == {
        "properties": {"title": {"type": "string"}, "description": {"default": {"title": "kept"}}},
        "required": ["title"],
        "items": [{"enum": ["title"]}],
    }


def test_sets_are_written_in_one_order() -> None:
    words = {f"w{i}" for i in range(50)}
    assert codec_of(set[str]).encode(words) == json.dumps(sorted(words), separators=(",", ":")).encode()
    assert json.loads(codec_of(dict[str, set[str]]).encode({"b": words, "a": set()}))["b"] == sorted(words)


def test_equal_dataclasses_are_written_equally() -> None:
    codec = codec_of(Order)
    short, long = b'{"lines":[{"sku":"s"}]}', b'{"lines":[{"sku":"s","count":1,"note":null}],"due":null}'
    assert codec.decode(short) == codec.decode(long)
    assert codec.encode(codec.decode(short)) == codec.encode(codec.decode(long)) == long
    frozen = codec_of(FrozenLine)
    assert frozen.encode(frozen.decode(b"{}")) == b'{"sku":"s"}'


def test_plain_values_keep_their_order() -> None:
    assert codec_of(Any).encode({"b": 1, "a": 2}) == b'{"b":1,"a":2}'


# ------------------------------------------------------------------------------------------ properties

scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)  # fmt: skip
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)
wild = st.recursive(
    scalars | st.floats() | st.decimals() | st.datetimes() | st.binary() | st.integers() | st.uuids()
    | st.sampled_from([Colour.RED, Level.LOW, Line("s"), object(), "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner)
    | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)  # fmt: skip
PLAIN = codec_of(Any)


@given(json_values)
def test_every_json_value_round_trips(value: Any) -> None:
    raw, decoded = PLAIN.round_trip(value)
    assert decoded == value
    assert json.loads(raw) == value
    assert PLAIN.decode(raw) == value


@given(wild)
def test_a_value_comes_back_equal_or_is_refused(value: Any) -> None:
    try:
        raw, decoded = PLAIN.round_trip(value)
    except Invalid:
        return
    assert decoded == value
    assert json.loads(raw) == value


@given(
    st.builds(
        Order,
        st.lists(st.builds(Line, st.text(), st.integers(-(2**63), 2**63 - 1), st.none() | st.text()), max_size=3),
        st.none() | st.datetimes(timezones=st.just(dt.UTC)),
    )
)
def test_typed_values_round_trip(order: Order) -> None:
    codec: Codec = codec_of(Order)
    raw, decoded = codec.round_trip(order)
    assert decoded == order
    assert codec.round_trip(decoded) == (raw, order)


@given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
def test_decoding_gives_a_value_or_invalid(raw: bytes) -> None:
    for codec in (PLAIN, codec_of(Order), codec_of(Ticket)):
        with contextlib.suppress(Invalid):
            codec.round_trip(codec.decode(raw))


def test_importing_definitions_loads_neither_griffe_nor_pydantic() -> None:
    names = [path.stem for path in Path(jsonschema.__file__).parent.glob("*.py") if path.stem != "__init__"]
    assert len(names) > 5
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module('perdure.definitions.' + name)\n"
        "from perdure.definitions.tool import tool\n"
        "from perdure.definitions.agent import AgentDefinition\n"
        "@tool\n"
        "def f(a: int, b: list[str]) -> dict:\n"
        "    'One line.'\n"
        "AgentDefinition('a', tools=[f]).digest\n"
        "late = {'griffe', 'pydantic', 'asyncio', 'apsw'} & set(sys.modules)\n"
        "assert not late, late\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
