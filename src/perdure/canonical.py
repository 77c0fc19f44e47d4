"""JSON as Perdure stores and digests it. Pure.

Two encodings, never mixed: *plain* (compact, as given: what is stored) and *canonical* (RFC 8785: what is digested,
because two encoders must agree). In canonical form an integer beyond 2**53-1 becomes ``{"$int": "decimal"}``; keys of
the value that begin with ``$`` get a second one, so nothing a user writes can collide with it.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any

import msgspec
import rfc8785

from perdure.errors import Invalid
from perdure.limits import CANONICAL_INTEGER_MAX, JSON_DEPTH_MAX, JSON_NODES_MAX, PAYLOAD_BYTES_MAX

_plain = msgspec.json.Encoder()
_sorted = msgspec.json.Encoder(order="sorted")
_decoder = msgspec.json.Decoder()
_LONG_NUMBER = re.compile(rb"\d{19}")
INTEGER_MIN, INTEGER_MAX = -(2**63), 2**63 - 1


def encode(value: object, what: str = "value", *, limit: int = PAYLOAD_BYTES_MAX) -> bytes:
    """Plain JSON of a JSON value (``None``, bool, int, float, str, list, dict with str keys).

    Raises:
        Invalid: the value is no JSON value or over a limit; the message names the offending place.
    """
    try:
        raw = _plain.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        check(value, what)
        raise Invalid(f"{what} cannot be encoded as JSON: {error}.") from error
    if len(raw) > limit:
        raise Invalid(
            f"{what} is {len(raw):,} bytes of JSON; the limit is {limit:,} bytes (PAYLOAD_BYTES_MAX).",
            help="Store the content elsewhere and pass a reference to it.",
        )
    if _decoder_differs(value, raw) or _near_a_limit(raw):
        check(value, what)
    return raw


def _near_a_limit(body: bytes) -> bool:
    """Whether depth, nodes or an integer could be over a limit; cheap, and never no when one is."""
    containers = body.count(b"[") + body.count(b"{")
    if containers > JSON_DEPTH_MAX or 2 * (body.count(b",") + containers + 1) > JSON_NODES_MAX:
        return True
    return _LONG_NUMBER.search(body) is not None


def _decoder_differs(value: object, raw: bytes) -> bool:
    try:
        return bool(_decoder.decode(raw) != value)
    except RecursionError:
        return True


def decode(raw: bytes | memoryview | msgspec.Raw, what: str = "value") -> Any:
    """The JSON value of stored or received bytes, within the same limits as :func:`encode`.

    Raises:
        Invalid: not JSON, or over a limit.
    """
    try:
        value = _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Invalid(f"{what} is not JSON: {error}.") from error
    if _near_a_limit(bytes(raw)):
        check(value, what)
    return value


def check(value: object, what: str) -> None:
    """Walk a value and name the first place that is not storable JSON.

    Raises:
        Invalid: with the path (``$.a[3]``) of the offending place.
    """
    nodes = 0
    stack: list[tuple[object, str, int]] = [(value, "$", 0)]
    while stack:
        node, path, depth = stack.pop()
        nodes += 1
        where = f"{what} at `{path}`"
        if nodes > JSON_NODES_MAX:
            raise Invalid(f"{what} has more than {JSON_NODES_MAX:,} nodes (JSON_NODES_MAX).")
        if depth > JSON_DEPTH_MAX:
            raise Invalid(f"{where[:200]} is nested deeper than {JSON_DEPTH_MAX} levels (JSON_DEPTH_MAX).")
        match node:
            case None | bool():
                pass
            case int():
                if not INTEGER_MIN <= node <= INTEGER_MAX:
                    raise Invalid(f"{where} is an integer beyond 64 bits.", help="Send it as a string.")
            case float():
                if not math.isfinite(node):
                    raise Invalid(f"{where} is {node}, which JSON cannot hold.", help="Send null or a string.")
            case str():
                try:
                    node.encode()
                except UnicodeEncodeError:
                    raise Invalid(f"{where} holds a lone surrogate, which is not Unicode text.") from None
            case list():
                stack.extend((item, f"{path}[{i}]", depth + 1) for i, item in enumerate(node))
            case dict():
                for key, item in node.items():
                    if not isinstance(key, str):
                        raise Invalid(f"{where} has the key {key!r}; keys must be text.")
                    stack.append((key, f"{path} (key)", depth + 1))
                    stack.append((item, f"{path}.{key[:64]}", depth + 1))
            case _:
                raise Invalid(
                    f"{where} is a {type(node).__name__}, which does not round-trip through JSON.",
                    help="Use a list, dict, str, number, bool or None, or annotate the type.",
                )


def _plainly_sortable(value: object) -> bool:
    """Whether the sorted fast path is proven equal to RFC 8785: no floats, small integers, keys below U+D800."""
    match value:
        case None | bool():
            return True
        case int():
            return -CANONICAL_INTEGER_MAX <= value <= CANONICAL_INTEGER_MAX
        case str():
            return True
        case list():
            return all(_plainly_sortable(item) for item in value)
        case dict():
            return all(
                isinstance(key, str) and (key.isascii() or max(key) < "\ud800") and key[:1] != "$"
                and _plainly_sortable(item)
                for key, item in value.items()
            )  # fmt: skip
        case _:
            return False


def _tagged(value: Any) -> Any:
    match value:
        case bool():
            return value
        case int() if abs(value) > CANONICAL_INTEGER_MAX:
            return {"$int": str(value)}
        case list():
            return [_tagged(item) for item in value]
        case dict():
            return {("$" + key if key[:1] == "$" else key): _tagged(item) for key, item in value.items()}
        case _:
            return value


def canonical(value: object) -> bytes:
    """RFC 8785 bytes of a JSON value, integers beyond 2**53-1 tagged.

    Raises:
        Invalid: the value is no storable JSON value.
    """
    try:
        if _plainly_sortable(value):
            raw = _sorted.encode(value)
            if not _near_a_limit(raw):
                return raw
    except (UnicodeEncodeError, RecursionError):
        pass  # the walk below says what is wrong
    check(value, "value")
    return rfc8785.dumps(_tagged(value))


def sha256(data: bytes) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def digest(value: object) -> str:
    """Hex SHA-256 of the canonical form."""
    return hashlib.sha256(canonical(value)).hexdigest()


def digest_raw(raw: bytes | msgspec.Raw) -> str:
    """Digest of the value that plain JSON bytes hold: independent of spacing and key order.

    Raises:
        Invalid: not JSON, or over a limit.
    """
    return digest(decode(raw))
