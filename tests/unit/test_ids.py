"""Identity is derived and checked in one place."""

from __future__ import annotations

import re
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure import ids
from perdure.errors import Invalid
from perdure.limits import ID_CHARS_MAX

PART = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(-(2**63), 2**63 - 1), st.none())


@pytest.mark.parametrize(
    "good",
    [
        "a", "thread-1", "x" * ID_CHARS_MAX, "a b", " a", "a:b/c|d", "Ärger", "日本語", "emoji 🙂", "\u0301", "{}",
        "'\"\\", "-",
    ],
)  # fmt: skip
def test_a_legal_id_is_returned_as_it_is(good: str) -> None:
    assert ids.check_id(good, "key") == good


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("", "key is empty"),
        (" ", "is blank"),
        ("   ", "is blank"),
        ("x" * (ID_CHARS_MAX + 1), "has 257 characters"),
        ("x" * 100_000, "has 100,000 characters"),
        ("a\x00b", "unprintable"),
        ("a\nb", "unprintable"),
        ("\t", "unprintable"),
        ("a\x7f", "unprintable"),
        ("a\x85b", "unprintable"),
        ("a\u200bb", "unprintable"),  # zero width space
        ("a\u00a0b", "unprintable"),  # no-break space
        ("a\u202eb", "unprintable"),  # right-to-left override
        ("a\u2028b", "unprintable"),
        ("\ufeffa", "unprintable"),
        ("a\ud800", "lone surrogate"),
        ("\udfffb", "lone surrogate"),
        ("e\u0301", "not in Unicode normal form C"),
        ("\u212b", "not in Unicode normal form C"),  # angstrom sign
        (1, "is a int, not text"),
        (None, "is a NoneType, not text"),
        (b"a", "is a bytes, not text"),
    ],
)
def test_an_illegal_id_says_why_and_what_is_legal(bad: object, says: str) -> None:
    with pytest.raises(Invalid) as refused:
        ids.check_id(bad, "key")
    message = str(refused.value)
    assert message.startswith("key ")
    assert says in message
    assert len(message) < 300
    message.encode()  # it can be printed whatever the id was


@given(st.text())
def test_check_id_accepts_or_refuses_and_nothing_else(text: str) -> None:
    try:
        assert ids.check_id(text, "thread") is text
    except Invalid:
        return
    assert 0 < len(text) <= ID_CHARS_MAX
    assert text.isprintable()
    text.encode()


# -- derived ---------------------------------------------------------------------------------------------------------


def test_derived_ids_are_pinned_for_ever() -> None:
    """A record written today must be found by tomorrow's release."""
    assert ids.derive("sub", "t", "p", "k") == ids.submission_id("t", "p", "k") == "sub_3iucozj5uxxbzeeipr4dprr7"
    assert ids.keyed_thread_id("p", "prog", "k") == "thread_duv7gdhhsmxtu3xpnmvsjgse"
    assert ids.effect_id("run_1", "1.0", 1, 0, "pay", "d") == "eff_x56bfs6mw5djybwwofntesef"
    assert ids.idempotency_key("run_1", "1.0", 0, "d", 0) == "key_ej4myc6swfrg4wqba75lucti"
    assert ids.step_key("key_1", "upload") == "key_twyvovw55v6mnm3xgmfixlwl"
    assert ids.approval_id("run_1", "1.0", "pay", "1", "d") == "apr_rad7l3ti3gcvlnbjplfqziab"
    assert ids.call_id(3, 0) == "3.0"
    assert ids.run_id("sub_abc") == "run_abc"


def test_a_run_and_its_submission_name_each_other() -> None:
    assert ids.submission_of(ids.run_id("sub_abc")) == "sub_abc"
    assert ids.submission_of("sub_abc") == "sub_abc"


@given(st.lists(PART, max_size=4))
def test_a_derived_id_has_one_form(parts: list[str | int | None]) -> None:
    assert re.fullmatch(r"eff_[a-z2-7]{24}", ids.derive("eff", *parts))


@given(st.lists(PART, max_size=4), st.lists(PART, max_size=4))
def test_other_parts_are_another_identity(one: list[str | int | None], other: list[str | int | None]) -> None:
    same = [(type(p), p) for p in one] == [(type(p), p) for p in other]
    assert (ids.derive("eff", *one) == ids.derive("eff", *other)) == same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b:c"), ("a:b", "c")),
        (("a", ""), ("", "a")),
        (("a",), ("a", "")),
        (("a", None), ("a", "null")),
        (("1",), (1,)),
        (('a","b',), ("a", "b")),
        (("a\x00b",), ("a", "b")),
        (("a\\",), ("a\\\\",)),
    ],
)
def test_no_separator_merges_two_identities(one: tuple[typing.Any, ...], other: tuple[typing.Any, ...]) -> None:
    assert ids.derive("key", *one) != ids.derive("key", *other)
    assert ids.derive("key", *one) != ids.derive("eff", *one)


def test_a_try_is_another_effect_under_the_same_key() -> None:
    first, second = (ids.effect_id("run_1", "1.0", attempt, 0, "pay", "d") for attempt in (1, 2))
    assert first != second
    assert ids.idempotency_key("run_1", "1.0", 0, "d", 0) != ids.idempotency_key("run_1", "1.0", 0, "d", 1)
