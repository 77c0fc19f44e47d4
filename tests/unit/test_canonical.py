"""Plain JSON stores what it was given or refuses it; canonical JSON is RFC 8785 byte for byte."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import json
from typing import Any

import msgspec
import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from perdure import canonical
from perdure.canonical import decode, digest, digest_raw, encode
from perdure.errors import Invalid
from perdure.limits import CANONICAL_INTEGER_MAX, JSON_DEPTH_MAX, JSON_NODES_MAX, PAYLOAD_BYTES_MAX

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SMALL = st.integers(-CANONICAL_INTEGER_MAX, CANONICAL_INTEGER_MAX)
STORABLE = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def values(integers: st.SearchStrategy[int], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | integers | FLOATS | TEXT
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=20)


PLAIN = values(SMALL, TEXT.filter(lambda key: not key.startswith("$")))
ANY = values(STORABLE, TEXT | st.sampled_from(["$int", "$$int", "$"]))


class Color(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int


def nested(depth: int, core: object = 0) -> object:
    value = core
    for _ in range(depth):
        value = [value]
    return value


# -- canonical ---------------------------------------------------------------------------------------------------------


@given(PLAIN)
def test_canonical_equals_rfc8785(value: object) -> None:
    assert canonical.canonical(value) == rfc8785.dumps(value)  # type: ignore[arg-type]


@given(ANY)
def test_the_fast_path_changes_nothing(value: object) -> None:
    assert canonical.canonical(value) == rfc8785.dumps(canonical._tagged(value))


@given(st.dictionaries(TEXT, SMALL))
def test_key_order_never_matters(value: dict[str, int]) -> None:
    assert digest(value) == digest(dict(reversed(value.items())))


@given(ANY, ANY)
def test_equal_bytes_only_for_equal_values(one: object, other: object) -> None:
    """Up to what JSON cannot tell apart: 1 and 1.0, 0 and -0.0."""
    if canonical.canonical(one) == canonical.canonical(other):
        assert json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True) or one == other


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (CANONICAL_INTEGER_MAX, b"9007199254740991"),
        (-CANONICAL_INTEGER_MAX, b"-9007199254740991"),
        (CANONICAL_INTEGER_MAX + 1, b'{"$int":"9007199254740992"}'),
        (-(2**63), b'{"$int":"-9223372036854775808"}'),
        ({"$int": "9007199254740992"}, b'{"$$int":"9007199254740992"}'),
        ({"$$int": 1}, b'{"$$$int":1}'),
        ({"a$": 1}, b'{"a$":1}'),
        (float(2**53), b"9007199254740992"),
        ([1.0, -0.0, 1e21, 1e-7, 0.1], b"[1,0,1e+21,1e-7,0.1]"),
        ({"\U0001f600": 1, "\ufb33": 2}, '{"\U0001f600":1,"\ufb33":2}'.encode()),  # UTF-16 order, not code points
        ('\x00\x1f\x7f"\\/\u2028', b'"\\u0000\\u001f\x7f\\"\\\\/\xe2\x80\xa8"'),
        ([True, False, None, Color.RED], b'[true,false,null,"red"]'),
    ],
)
def test_canonical_bytes(value: object, expected: bytes) -> None:
    assert canonical.canonical(value) == expected


def test_no_user_value_collides_with_a_tagged_integer() -> None:
    big = 2**60
    likes: list[object] = [big, str(big), {"$int": str(big)}, {"$$int": str(big)}, {"$int": big}, {"int": str(big)}]
    assert len({digest(like) for like in likes}) == len(likes)


# -- what cannot be stored ---------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, object, str]] = [
    ("nan", {"a": [1, float("nan")]}, "`$.a[1]` is nan"),
    ("infinity", [float("inf")], "`$[0]` is inf"),
    ("minus infinity", float("-inf"), "`$` is -inf"),
    ("surrogate", {"a": "\ud800"}, "`$.a` holds a lone surrogate"),
    ("surrogate key", {"\udfff": 1}, "`$ (key)` holds a lone surrogate"),
    ("65 bits", {"n": 2**63}, "`$.n` is an integer beyond 64 bits"),
    ("minus 65 bits", [-(2**63) - 1], "`$[0]` is an integer beyond 64 bits"),
    ("far beyond", 10**400, "`$` is an integer beyond 64 bits"),
    ("too deep", nested(JSON_DEPTH_MAX + 1), "nested deeper than 64 levels"),
    ("far too deep", nested(5_000), "nested deeper than 64 levels"),
    ("flat and too many", [0] * (JSON_NODES_MAX + 1), "more than 65,536 nodes"),
    ("keys and too many", {str(i): 0 for i in range(JSON_NODES_MAX // 2 + 1)}, "more than 65,536 nodes"),
    ("tuple", {"a": (1, 2)}, "`$.a` is a tuple"),
    ("bytes", b"x", "`$` is a bytes"),
    ("set", [{1}], "`$[0]` is a set"),
    ("date", dt.date(2026, 1, 1), "is a date"),
    ("decimal", decimal.Decimal("1.5"), "is a Decimal"),
    ("dataclass", Point(1), "is a Point"),
    ("raw", {"a": msgspec.Raw(b"1")}, "`$.a` is a Raw"),
    ("object", object(), "is a object"),
    ("integer key", {"a": {1: 2}}, "`$.a` has the key 1"),
]


@pytest.mark.parametrize(("value", "says"), [(v, says) for _, v, says in REFUSED], ids=[name for name, _, _ in REFUSED])
def test_what_json_cannot_hold_is_refused_with_its_place(value: object, says: str) -> None:
    with pytest.raises(Invalid) as refused:
        encode(value, "the result")
    assert "the result" in str(refused.value)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "value", [v for n, v, _ in REFUSED if "many" not in n], ids=[n for n, _, _ in REFUSED if "many" not in n]
)
def test_what_cannot_be_stored_cannot_be_digested(value: object) -> None:
    with pytest.raises(Invalid):
        digest(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    for function in (encode, digest):
        with pytest.raises(Invalid):
            function(loop)


def test_size_is_limited_and_the_message_names_the_limit() -> None:
    assert len(encode("x" * (PAYLOAD_BYTES_MAX - 2))) == PAYLOAD_BYTES_MAX
    with pytest.raises(
        Invalid, match=r"input is 16,777,217 bytes of JSON; the limit is 16,777,216 bytes \(PAYLOAD_BYTES_MAX\)"
    ):
        encode("x" * (PAYLOAD_BYTES_MAX - 1), "input")
    with pytest.raises(Invalid, match="the limit is 10 bytes"):
        encode("123456789", limit=10)


def test_what_is_just_within_the_limits_passes() -> None:
    for value in (nested(JSON_DEPTH_MAX), [0] * (JSON_NODES_MAX - 1), 2**63 - 1, -(2**63)):
        assert decode(encode(value)) == value


# -- plain -------------------------------------------------------------------------------------------------------------


@given(ANY)
def test_plain_json_comes_back_as_it_was(value: object) -> None:
    assert decode(encode(value)) == value
    assert digest_raw(encode(value)) == digest(decode(encode(value)))


def test_a_digest_of_bytes_ignores_spacing_and_order() -> None:
    assert digest_raw(b'{"b": [1, 2],\n "a": 1.0}') == digest({"a": 1, "b": [1, 2]})
    assert digest_raw(msgspec.Raw(b" 1 ")) == digest(1)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"nope", b"NaN", b"Infinity", b"1e400", b'"\xff"', b'"\\ud800"', b"[1,]", b"1 2",
        b"[" * 100_000, b"9223372036854775808", b"1" * 400,
        b"[" * (JSON_DEPTH_MAX + 1) + b"0" + b"]" * (JSON_DEPTH_MAX + 1),
        b"[" + b"0," * JSON_NODES_MAX + b"0]",
    ],
    ids=lambda raw: repr(raw[:24]),
)  # fmt: skip
def test_bytes_that_hold_no_storable_value_are_refused(raw: bytes) -> None:
    for function in (decode, digest_raw):
        with pytest.raises(Invalid):
            function(raw)


@given(st.binary(max_size=40))
def test_decode_never_raises_anything_else(raw: bytes) -> None:
    try:
        value = decode(raw, "body")
    except Invalid:
        return
    assert decode(encode(value)) == value


def test_many_commas_or_brackets_in_text_are_only_text() -> None:
    for text in ("," * 100_000, "[" * 100_000, "1" * 100_000):
        assert decode(encode(text)) == text
