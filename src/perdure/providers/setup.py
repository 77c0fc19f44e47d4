"""How a model is set up, told without calling it and without loading its libraries: what ``perdure models`` shows."""

from __future__ import annotations

from importlib.util import find_spec
from urllib.parse import urlsplit

import msgspec

from perdure.definitions.context import Secret
from perdure.ports.provider import Model


class Setup(msgspec.Struct, frozen=True):
    """What an adapter's method ``setup()`` returns.

    Attributes:
        endpoint: the address its calls go to, as it is now; empty when there is none.
        key: where its key is; None when it needs none.
        libraries: modules that its calls load.
    """

    endpoint: str = ""
    key: Secret | None = None
    libraries: tuple[str, ...] = ()

    @property
    def host(self) -> str:
        """Host, and port where one is named, of the endpoint: never a path, a query or a password."""
        try:
            address = urlsplit(self.endpoint)
            port = f":{address.port}" if address.port is not None else ""
        except ValueError:
            return ""
        return f"{address.hostname}{port}" if address.hostname else ""

    def missing(self) -> tuple[str, ...]:
        """The libraries that are not installed."""
        return tuple(library for library in self.libraries if not _installed(library))


def _installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except (ImportError, ValueError):  # a parent package is missing, or somebody blocked the module
        return False


def setup_of(model: Model) -> Setup:
    """The setup of a model; an adapter that tells none has an empty one."""
    tell = getattr(model, "setup", None)
    told = tell() if callable(tell) else None
    return told if isinstance(told, Setup) else Setup()
