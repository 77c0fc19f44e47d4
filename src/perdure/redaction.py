"""What may be shown of a value that may hold secrets: its shape and types, never its content. Pure."""

from __future__ import annotations

from typing import Any

SHOWN = "***"


def redact(value: Any, secret: frozenset[str] = frozenset()) -> Any:
    """A copy of JSON arguments in which the top-level fields named in ``secret`` show ``***``."""
    if not secret or not isinstance(value, dict):
        return value
    return {key: SHOWN if key in secret else item for key, item in value.items()}
