"""What is wrong with a document: every finding with its place, all of them in one go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Literal

import msgspec

from perdure.errors import Invalid

Severity = Literal["error", "warning"]
Place = tuple[int, int]


class Diagnostic(msgspec.Struct, frozen=True):
    """One finding.

    Attributes:
        code: what it is, for programs. file, line, column: where; lines and columns from 1, 0 when nobody knows.
        path: where in the document, for example ``spec.tasks[2].with.path``.
        help: what to do.
    """

    code: str
    severity: Severity
    file: str
    line: int
    column: int
    path: str
    message: str
    help: str = ""

    def __str__(self) -> str:
        """One line for people."""
        said = f"{self.file}:{self.line}:{self.column}: {self.severity} {self.code}: {self.message}"
        return f"{said} ({self.help.rstrip('.')})" if self.help else said


class DocumentInvalid(Invalid):
    """A document, or what it refers to, cannot be used. ``diagnostics`` are all that was found."""

    code = "document_invalid"

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        found = tuple(diagnostics)
        errors = [one for one in found if one.severity == "error"]
        first = errors[0] if errors else found[0]
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        super().__init__(f"{first.file}:{first.line}:{first.column}: {first.message}{more}", help=first.help)
        self.diagnostics = found


class Diagnostics:
    """Collects findings about one document.

    Args:
        file: its name. places: path to (line, column).
    """

    def __init__(self, file: str, places: Mapping[str, Place] | None = None) -> None:
        self.file = file
        self.places: Mapping[str, Place] = places or {}
        self.found: list[Diagnostic] = []
        self._known: set[Diagnostic] = set()

    def place(self, path: str) -> Place:
        """Where a path stands; of one that is not there, where the nearest thing around it does."""
        while path:
            if path in self.places:
                return self.places[path]
            cut = max(path.rfind("."), path.rfind("["))
            path = path[:cut] if cut > 0 else ""
        return self.places.get("", (1, 1))

    def add(self, code: str, path: str, message: str, *, help: str = "", severity: Severity = "error") -> None:
        """Add a finding at a path."""
        line, column = self.place(path)
        one = Diagnostic(code, severity, self.file, line, column, path, message, help)
        if one not in self._known:
            self._known.add(one)
            self.found.append(one)

    def warn(self, code: str, path: str, message: str, *, help: str = "") -> None:
        """Add a warning."""
        self.add(code, path, message, help=help, severity="warning")

    @property
    def failed(self) -> bool:
        """Whether an error is among them."""
        return any(one.severity == "error" for one in self.found)

    def ordered(self) -> list[Diagnostic]:
        """Every finding, by its place."""
        return sorted(self.found, key=lambda one: (one.line, one.column, one.path, one.code))

    def raise_errors(self) -> None:
        """Raise if an error is among them.

        Raises:
            DocumentInvalid: with every finding.
        """
        if self.failed:
            raise DocumentInvalid(self.ordered())


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion in words, or nothing."""
    near = get_close_matches(name, list(known), 1)
    return f"Did you mean `{near[0]}`?" if near else ""
