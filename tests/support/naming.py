"""Names of parametrized cases that are the same in every process."""

from __future__ import annotations

import re

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def stable(part: object) -> str:
    """Text of a parameter without memory addresses, cut to 50 characters."""
    return _ADDRESS.sub("", str(part))[:50]
