"""JSON Schemas of documents: checked without ever fetching anything, patterns in linear time."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from perdure.errors import Invalid

_encode = msgspec.json.Encoder(order="sorted").encode


def _refuse(uri: str) -> Any:
    raise ValueError(f"a schema may not refer to {uri}: nothing is fetched")


@functools.lru_cache(maxsize=1024)
def _validator(schema: bytes) -> Any:
    import jsonschema_rs  # noqa: PLC0415 - loaded when the first schema is met

    return jsonschema_rs.validator_for(
        msgspec.json.decode(schema), retriever=_refuse, pattern_options=jsonschema_rs.RegexOptions()
    )


def check_schema(schema: Any) -> str | None:
    """What is wrong with a schema itself, or None."""
    try:
        _validator(_encode(schema))
    except Exception as error:  # noqa: BLE001 - the library raises its own, ValueError and TypeError
        return str(error).split("\n", 1)[0]
    return None


def problem(schema: Any, value: Any) -> str | None:
    """Why a value does not fit a schema, with the place; None if it does.

    Raises:
        Invalid: the schema cannot be used.
    """
    try:
        validator = _validator(_encode(schema))
    except Exception as error:
        raise Invalid(f"A JSON Schema cannot be used: {str(error).splitlines()[0]}.") from error
    for found in validator.iter_errors(value):
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in found.instance_path)
        return f"at ${place}: {found.message[:500]}"
    return None
