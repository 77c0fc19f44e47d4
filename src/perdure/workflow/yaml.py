"""YAML 1.2, the core schema, a safe part of it: one document of maps, lists and scalars, with the place of each.

Composed from the events of the library's parser, because its own constructor takes duplicate keys, tags that make objects
and aliases that explode. Numbers, true, false and null are those of JSON; dates, ``yes`` and ``0o10`` stay text.
"""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

from perdure.errors import Error
from perdure.limits import DOCUMENT_BYTES_MAX, DOCUMENT_DEPTH_MAX, DOCUMENT_NODES_MAX, INTEGER_BITS_MAX
from perdure.workflow.diagnostics import Place

_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_OCTAL = re.compile(r"0o[0-7]+")
_WORDS: dict[str, Any] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class YamlError(Error):
    """Text is not of the YAML that documents are written in. ``line`` and ``column`` from 1."""

    code = "yaml_syntax"

    def __init__(self, message: str, line: int = 1, column: int = 1, *, help: str = "") -> None:
        super().__init__(message, help=help)
        self.line = line
        self.column = column


def decode(data: bytes, what: str = "The document", limit: int = DOCUMENT_BYTES_MAX) -> str:
    """The text of a file.

    Raises:
        YamlError: too long, or not UTF-8; says where.
    """
    if len(data) > limit:
        raise YamlError(f"{what} has {len(data):,} bytes; the limit is {limit:,}.")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        line = before.count("\n") + 1
        column = len(before) - (before.rfind("\n") + 1) + 1
        raise YamlError(f"{what} is not UTF-8.", line, column, help="Save it as UTF-8.") from error
    return text.removeprefix("\ufeff")


def load(data: bytes, what: str = "The document") -> tuple[Any, dict[str, Place]]:
    """The value of a YAML file, and the place of every path in it; of a key's path it is where the key stands.

    Raises:
        YamlError: the first thing that is wrong; nothing after it can be read reliably.
    """
    text = decode(data, what)
    control = _CONTROL.search(text)
    if control is not None:
        before = text[: control.start()]
        number, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise YamlError(f"{what} holds the control character U+{ord(control[0]):04X}.", number, column)
    library = importlib.import_module("yaml")
    try:
        events = list(library.parse(text, getattr(library, "CSafeLoader", library.SafeLoader)))
    except library.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise YamlError(f"{what} is not YAML: {said}.", line, column) from error
    except UnicodeEncodeError as error:
        raise YamlError(f"{what} holds a lone surrogate.") from error
    return _Composer(events, what).compose()


class _Composer:
    """Builds one value from a stream of events."""

    def __init__(self, events: list[Any], what: str) -> None:
        self._events = [e for e in events if type(e).__name__ not in ("StreamStartEvent", "StreamEndEvent")]
        self._what = what
        self._at = 0
        self._nodes = 0
        self._anchors: dict[str, tuple[Any, int]] = {}
        self.places: dict[str, Place] = {}

    def compose(self) -> tuple[Any, dict[str, Place]]:
        if not self._events:
            raise YamlError(f"{self._what} is empty.")
        self._at = 1  # the start of the document
        value, _ = self._node("", 0)
        rest = self._events[self._at + 1 :]
        if rest:
            raise self._error("holds more than one YAML document", rest[0])
        return value, self.places

    def _error(self, said: str, event: Any, *, help: str = "") -> YamlError:
        mark = event.start_mark
        return YamlError(f"{self._what} {said}.", mark.line + 1, mark.column + 1, help=help)

    def _count(self, event: Any, amount: int = 1) -> None:
        self._nodes += amount
        if self._nodes > DOCUMENT_NODES_MAX:
            raise self._error(f"has more than {DOCUMENT_NODES_MAX:,} values, its aliases followed", event)

    def _node(self, path: str, depth: int) -> tuple[Any, int]:
        """The value of the next node and how many values it holds."""
        value: Any
        event = self._events[self._at]
        self._at += 1
        kind = type(event).__name__
        if path not in self.places:
            self.places[path] = (event.start_mark.line + 1, event.start_mark.column + 1)
        if depth > DOCUMENT_DEPTH_MAX:
            raise self._error(f"is nested deeper than {DOCUMENT_DEPTH_MAX} levels", event)
        if kind == "AliasEvent":
            if event.anchor not in self._anchors:
                raise self._error(f"uses the alias *{event.anchor}, which has no value here", event)
            value, size = self._anchors[event.anchor]
            self._count(event, size)
            return value, size
        self._count(event)
        before = self._nodes
        if kind == "ScalarEvent":
            value = self._scalar(event)
        elif kind == "SequenceStartEvent":
            value = self._sequence(event, path, depth)
        else:
            value = self._mapping(event, path, depth)
        size = self._nodes - before + 1
        if event.anchor:
            self._anchors[event.anchor] = (value, size)
        return value, size

    def _sequence(self, event: Any, path: str, depth: int) -> list[Any]:
        self._no_tag(event, "tag:yaml.org,2002:seq")
        found: list[Any] = []
        while type(self._events[self._at]).__name__ != "SequenceEndEvent":
            found.append(self._node(f"{path}[{len(found)}]", depth + 1)[0])
        self._at += 1
        return found

    def _mapping(self, event: Any, path: str, depth: int) -> dict[str, Any]:
        self._no_tag(event, "tag:yaml.org,2002:map")
        found: dict[str, Any] = {}
        while type(self._events[self._at]).__name__ != "MappingEndEvent":
            key_event = self._events[self._at]
            if type(key_event).__name__ != "ScalarEvent":
                raise self._error("has a key that is no text", key_event)
            self._at += 1
            self._count(key_event)
            key = key_event.value
            if key == "<<" and key_event.implicit[0]:
                raise self._error("uses the merge key `<<`, which YAML 1.2 does not have", key_event,
                                  help="Write the fields out.")  # fmt: skip
            self._no_tag(key_event, "tag:yaml.org,2002:str")
            if key in found:
                raise self._error(f"has the key `{key[:100]}` twice", key_event, help="Take one of them out.")
            inner = f"{path}.{key}" if path else key
            self.places[inner] = (key_event.start_mark.line + 1, key_event.start_mark.column + 1)
            found[key] = self._node(inner, depth + 1)[0]
        self._at += 1
        return found

    def _no_tag(self, event: Any, allowed: str) -> None:
        if event.tag and event.tag not in (allowed, "!"):
            raise self._error(f"uses the tag {event.tag!r}, which is not allowed", event, help="Leave the tag out.")

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if event.tag and event.tag != "!":
            if event.tag == "tag:yaml.org,2002:str":
                return text
            raise self._error(f"uses the tag {event.tag!r}, which is not allowed", event, help="Leave the tag out.")
        if not event.implicit[0]:  # quoted, or a block
            return text
        if text in _WORDS:
            return _WORDS[text]
        number = self._number(text)
        if _NOT_FINITE.fullmatch(text) or (isinstance(number, float) and not math.isfinite(number)):
            raise self._error(f"has the number {text[:40]}, which JSON cannot hold", event, help="Quote it.")
        if isinstance(number, int) and number.bit_length() >= INTEGER_BITS_MAX:
            raise self._error(f"has the integer {text[:40]}, which is beyond 64 bits", event, help="Quote it.")
        return text if number is None else number

    @staticmethod
    def _number(text: str) -> int | float | None:
        if len(text) > 400:
            return None
        if _INTEGER.fullmatch(text):
            return int(text)
        if _HEX.fullmatch(text):
            return int(text, 16)
        if _OCTAL.fullmatch(text):
            return int(text[2:], 8)
        return float(text) if _FLOAT.fullmatch(text) else None
