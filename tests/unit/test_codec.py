"""What a batch is, and that what this release cannot read is refused by name before anything else happens."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from perdure.errors import Corrupt, Error, Incompatible
from perdure.records import codec
from perdure.records.parts import Failure
from perdure.records.thread import SubmissionSettled, ThreadCreated, UserInputRecorded

GOLDEN = Path(__file__).resolve().parents[1] / "histories" / "0.1" / "every_kind.hex"
BODIES = [bytes.fromhex(line) for line in GOLDEN.read_text(encoding="ascii").split()]
BATCH = codec.Batch(
    1, "t", 5, 2, "w", 7, (ThreadCreated("bank"), UserInputRecorded("sub_1", "run_1", Raw(b'{"a": 1}')))
)


def altered(**fields: Any) -> bytes:
    return json.dumps({**json.loads(codec.encode(BATCH)), **fields}).encode()


def with_record(**fields: Any) -> bytes:
    return altered(records=[{"kind": "ThreadCreated/1", "program": "bank", **fields}])


def test_a_batch_comes_back_as_it_was() -> None:
    assert codec.decode(codec.encode(BATCH)) == BATCH
    assert (BATCH.first, BATCH.last) == (5, 6)


def test_payloads_are_stored_byte_for_byte() -> None:
    assert b'"input":{"a": 1}' in codec.encode(BATCH)


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_every_stored_kind_round_trips(body: bytes) -> None:
    assert codec.encode(codec.decode(body)) == body


def test_the_version_stands_in_every_tag() -> None:
    for body in BODIES:
        assert all(record["kind"].endswith("/1") for record in json.loads(body)["records"])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (altered(v=2), "format 2"),
        (altered(v=2, novel=1, records="elsewhere"), "format 2"),
        (altered(novel=1), "unknown field `novel`"),
        (with_record(kind="ThreadCreated/2"), "ThreadCreated/2"),
        (with_record(kind="Novel/1"), "Novel/1"),
        (with_record(novel=1), "unknown field `novel`"),
    ],
    ids=[
        "newer envelope",
        "newer and different envelope",
        "field",
        "newer record",
        "new kind",
        "new field of a record",
    ],
)
def test_what_a_newer_release_wrote_is_incompatible(body: bytes, says: str) -> None:
    with pytest.raises(Incompatible) as refused:
        codec.decode(body)
    assert says in str(refused.value)
    assert "the release that wrote it" in str(refused.value)


@pytest.mark.parametrize(
    "body",
    [
        b"", b"\x00", b"{", b"null", b"[]", b"{}", b'{"v":null}', b'{"v":"1"}', b"\xff\xfe", codec.encode(BATCH)[:-1],
        codec.encode(BATCH) + b"x", b"[" * 100_000, b'"' + b"\xed\xa0\x80" + b'"',
    ],
    ids=lambda body: repr(body[:16]),
)  # fmt: skip
def test_garbage_is_corrupt(body: bytes) -> None:
    with pytest.raises(Corrupt, match="stored batch"):
        codec.decode(body)


@given(st.sampled_from(BODIES), st.integers(0), st.integers(1, 255))
def test_a_changed_byte_is_read_or_refused_by_type(body: bytes, offset: int, mask: int) -> None:
    at = offset % len(body)
    with contextlib.suppress(Corrupt, Incompatible):
        codec.decode(body[:at] + bytes([body[at] ^ mask]) + body[at + 1 :])


def test_a_settlement_that_contradicts_itself_cannot_be_made_or_read() -> None:
    with pytest.raises(ValueError, match="failure exactly when"):
        SubmissionSettled("sub_1", "run_1", "failed")
    with pytest.raises(ValueError, match="failure exactly when"):
        SubmissionSettled("sub_1", "run_1", "completed", Failure("x", "x"))
    for outcome, failure in (("cancelled", None), ("failed", Failure("x", "x"))):
        with pytest.raises(ValueError, match="only a completed settlement"):
            SubmissionSettled("sub_1", "run_1", outcome, failure, output_digest="d")  # type: ignore[arg-type]
    record = {"kind": "SubmissionSettled/1", "submission": "s", "run": "r", "outcome": "failed"}
    with pytest.raises(Error):
        codec.decode(altered(records=[record]))


def test_records_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        BATCH.first = 9  # type: ignore[misc]
    for record in BATCH.records:
        with pytest.raises(AttributeError):
            record.program = "x"  # type: ignore[misc, union-attr]


def test_the_chain_binds_all_history() -> None:
    assert hashlib.sha256(bytes(32) + b"a").digest() == codec.chain(codec.EMPTY_TAIL, b"a")
    one = codec.chain(codec.chain(codec.EMPTY_TAIL, b"a"), b"b")
    assert len({one, codec.chain(codec.chain(codec.EMPTY_TAIL, b"b"), b"a"), codec.chain(codec.EMPTY_TAIL, b"ab")}) == 3


def test_every_record_refuses_unknown_fields_and_carries_a_versioned_tag() -> None:
    for kind in codec.Record.__args__:
        config = kind.__struct_config__
        assert config.forbid_unknown_fields
        assert config.frozen
        assert config.tag_field == "kind"
        assert config.tag == f"{kind.__name__}/1"
        assert issubclass(kind, msgspec.Struct)
