"""How an agent's input crosses: as its type does, and in it only a file may look like one.

So whoever reads a recorded input tells its files from other values without knowing its type.
"""

from __future__ import annotations

from typing import Any

from perdure import canonical
from perdure.definitions.files import KEY
from perdure.definitions.schema import Codec, codec_of, files_in
from perdure.errors import Invalid
from perdure.limits import FILES_MAX

_MARK = f'"{KEY}"'.encode()


class InputCodec(Codec):
    """The codec of an input: what holds more than ``FILES_MAX`` files, or the key ``$file`` elsewhere, is refused."""

    __slots__ = ()

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec.type, codec.write, codec.read, codec.schema(), is_native=codec.is_native)

    def round_trip(self, value: Any, what: str = "value") -> tuple[bytes, Any]:
        """As :meth:`Codec.round_trip`.

        Raises:
            Invalid: also for too many files, and for the reserved key.
        """
        raw, decoded = super().round_trip(value, what)
        if _MARK in raw:
            files = sum(1 for _ in files_in(decoded))
            if files > FILES_MAX:
                raise Invalid(f"{what} holds {files} files; the limit is {FILES_MAX} (FILES_MAX).")
            if files != _keys(canonical.decode(raw)):
                raise Invalid(
                    f"{what} has the key `{KEY}`, which only a file may have.",
                    help="Declare the type of the input with File where one stands, or rename the key.",
                )
        return raw, decoded


def input_codec_of(type_: Any, what: str) -> InputCodec:
    """The codec of an input's type.

    Raises:
        Invalid: the type cannot cross JSON.
    """
    return InputCodec(codec_of(type_, what))


def _keys(value: Any) -> int:
    """How often the reserved key stands in a JSON value."""
    stack, found = [value], 0
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            found += KEY in node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)
    return found
