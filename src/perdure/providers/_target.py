"""Which model at which address a connection is made to."""

from __future__ import annotations

from typing import Any

import msgspec

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Target(msgspec.Struct, frozen=True):
    """One model at one address, as a format makes its connection to it.

    Attributes:
        name: the model's name in records. model: as the provider knows it.
        api: which of the formats of the module. base_url: None for the provider's own.
        options: more that the format was told, by name.
    """

    name: str
    model: str
    api: str = ""
    base_url: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str, default: Any = None) -> Any:
        """One of the options."""
        return dict(self.options).get(name, default)
