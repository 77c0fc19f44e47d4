"""What a docstring says to a model: the text, and a line per parameter. Google style; griffe is loaded when needed."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from typing import Any

import msgspec

_SECTION = re.compile(r"^[ \t]*[A-Z][A-Za-z ]*:[ \t]*$", re.MULTILINE)


class Parsed(msgspec.Struct, frozen=True):
    """A docstring taken apart: the free text, and a description per parameter name."""

    text: str = ""
    parameters: dict[str, str] = {}


def parse(doc: str | None) -> Parsed:
    """Take a docstring apart; sections other than ``Args:`` are left out. Loads griffe only if it has sections."""
    if not doc or not doc.strip():
        return Parsed()
    clean = inspect.cleandoc(doc)
    if not _SECTION.search(clean):
        return Parsed(clean)
    text: list[str] = []
    parameters: dict[str, str] = {}
    for section in _griffe().Docstring(clean, parser="google").parse(warnings=False):
        if section.kind.value == "text":
            text.append(section.value.strip())
        elif section.kind.value in ("parameters", "other parameters"):
            parameters.update((one.name, " ".join(one.description.split())) for one in section.value)
    return Parsed("\n\n".join(text), parameters)


@functools.cache
def _griffe() -> Any:
    return importlib.import_module("griffe")
