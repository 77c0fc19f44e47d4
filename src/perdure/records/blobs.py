"""Large payloads stand beside the batch that holds them: in its bytes is only their digest.

A JSON field of a record that is over ``INLINE_BYTES_MAX`` is replaced by ``{"$blob":"sha256:…","bytes":N}`` when the batch is
encoded, and put back when it is decoded. The chain covers the reference, and the reference covers the bytes. A payload
that looks like a reference itself is moved out whatever its size, so that every reference in stored bytes is one of ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_type_hints

import msgspec

from perdure.errors import Corrupt
from perdure.limits import INLINE_BYTES_MAX

MARK = b'{"$blob":'
Blobs = Mapping[str, bytes]
"""Digest (``sha256:`` and hex) to the bytes of a payload."""
NONE: Blobs = {}


class Reference(msgspec.Struct, frozen=True, rename={"digest": "$blob"}):
    """What stands in the bytes of a batch instead of a payload."""

    digest: str
    bytes: int


R = TypeVar("R", bound=msgspec.Struct)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Reference).decode
_fields: dict[type, tuple[str, ...]] = {}


def _payloads(record: msgspec.Struct) -> Iterator[tuple[str, bytes]]:
    """The JSON fields of a record that are a payload of somebody's."""
    kind = type(record)
    if kind not in _fields:
        hints = get_type_hints(kind)
        _fields[kind] = tuple(name for name in kind.__struct_fields__ if hints[name] is msgspec.Raw)
    for name in _fields[kind]:
        yield name, bytes(getattr(record, name))


def digest_of(payload: bytes) -> str:
    """The name of a payload."""
    return "sha256:" + hashlib.sha256(payload).hexdigest()


def moved_out(record: R, blobs: dict[str, bytes]) -> R:
    """The record with references for its large payloads, which are added to ``blobs``."""
    changed: dict[str, Any] = {}
    for name, payload in _payloads(record):
        if len(payload) > INLINE_BYTES_MAX or payload.startswith(MARK):
            digest = digest_of(payload)
            blobs[digest] = payload
            changed[name] = msgspec.Raw(_encode(Reference(digest, len(payload))))
    return msgspec.structs.replace(record, **changed) if changed else record


def put_back(record: R, blobs: Blobs) -> R:
    """The record with its payloads in place.

    Raises:
        Corrupt: one is missing, or is not what was moved out.
    """
    changed: dict[str, Any] = {}
    for name, payload in _payloads(record):
        if payload.startswith(MARK):
            reference = _reference(payload)
            found = blobs.get(reference.digest)
            if found is None:
                raise Corrupt(f"The payload {reference.digest} is missing.", help="Restore it from a backup.")
            if len(found) != reference.bytes or digest_of(found) != reference.digest:
                raise Corrupt(
                    f"The payload {reference.digest} is not what was stored.", help="Restore it from a backup."
                )
            changed[name] = msgspec.Raw(found)
    return msgspec.structs.replace(record, **changed) if changed else record


def _reference(payload: bytes) -> Reference:
    try:
        return _decode(payload)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"A reference to a payload is malformed: {error}.", help="Restore it from a backup.") from error
