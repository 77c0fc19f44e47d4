"""Files that a document refers to: variables and instructions, captured before anything is compiled and never read again.

Paths are literal, relative to the document, inside the workspace, of regular files; links must stay inside.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from perdure.definitions.workflow import Document
from perdure.limits import CAPTURED_BYTES_MAX, CAPTURED_FILES_MAX, DOCUMENT_BYTES_MAX
from perdure.workflow.diagnostics import Diagnostics
from perdure.workflow.yaml import YamlError, decode, load

RESERVED = ("loopIndex", "loopPrevious", "foreachIndex", "matrix", "matrixIndex")
_INCLUDES = ("varsFiles", "include", "includes")


class Captured:
    """What was captured beside a document.

    Attributes:
        digests: path as written to the digest of its bytes. variables: of variable files. texts: of instructions.
    """

    def __init__(self, base: Path, workspace: Path, found: Diagnostics) -> None:
        self.digests: dict[str, str] = {}
        self.variables: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, str] = {}
        self._base = base
        self._workspace = workspace.resolve()
        self._found = found
        self._references = 0
        self._bytes = 0

    def capture(self, document: Document) -> None:
        """Read every file a document names; findings go to its diagnostics."""
        spec = document.spec
        for index, path in enumerate(spec.vars_files):
            self.variable_file(path, f"spec.varsFiles[{index}]")
        for name, agent in spec.agents.items():
            for index, path in enumerate(agent.vars_files):
                self.variable_file(path, f"spec.agents.{name}.varsFiles[{index}]")
            if agent.instructions_file is not None:
                place = f"spec.agents.{name}.instructionsFile"
                raw = self._read(agent.instructions_file, place)
                if raw is not None:
                    self._text(agent.instructions_file, raw, place)
        self._tasks(spec.tasks, "spec.tasks")
        for name, subworkflow in spec.subworkflows.items():
            self._tasks(subworkflow.tasks, f"spec.subworkflows.{name}.tasks")
        for place, names in self._named(document):
            for reserved in RESERVED:
                if reserved in names:
                    self._found.add(
                        "schema_violation", f"{place}.{reserved}", f"The variable name `{reserved}` is reserved."
                    )

    def _tasks(self, tasks: Any, at: str) -> None:
        for number, task in enumerate(tasks):
            for index, path in enumerate(task.vars_files):
                self.variable_file(path, f"{at}[{number}].varsFiles[{index}]")

    def _named(self, document: Document) -> list[tuple[str, dict[str, Any]]]:
        spec = document.spec
        named = [("spec.vars", spec.vars)]
        named += [(f"spec.agents.{name}.vars", agent.vars) for name, agent in spec.agents.items()]
        named += [(f"spec.tasks[{i}].vars", task.vars) for i, task in enumerate(spec.tasks)]
        for name, flow in spec.subworkflows.items():
            named += [(f"spec.subworkflows.{name}.tasks[{i}].vars", task.vars) for i, task in enumerate(flow.tasks)]
        return named

    def variable_file(self, path: str, place: str) -> dict[str, Any]:
        """The variables of a file."""
        if path in self.variables:
            return self.variables[path]
        self.variables[path] = {}
        raw = self._read(path, place)
        if raw is None:
            return {}
        try:
            value, _ = load(raw, f"The variable file {path!r}")
        except YamlError as error:
            self._found.add("invalid_variables", place, f"{error.message} (line {error.line}, column {error.column})")
            return {}
        self.variables[path] = self._checked(value, path, place)
        return self.variables[path]

    def _checked(self, value: Any, path: str, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._found.add("invalid_variables", place, f"The variable file {path!r} holds no map.")
            return {}
        for name in (*_INCLUDES, *RESERVED):
            if name in value:
                self._found.add(
                    "invalid_variables", place, f"The variable file {path!r} uses the name `{name}`, which is reserved."
                )
        return value

    def _text(self, path: str, raw: bytes, place: str) -> None:
        try:
            self.texts[path] = decode(raw, f"The file {path!r}")
        except YamlError as error:
            self._found.add("invalid_file", place, error.message)

    def _read(self, path: str, place: str) -> bytes | None:
        self._references += 1
        if self._references > CAPTURED_FILES_MAX:
            self._found.add("invalid_file", place, f"The document refers to more than {CAPTURED_FILES_MAX} files.")
            return None
        wrong = None
        if Path(path).is_absolute() or ".." in Path(path).parts:
            wrong = "leads out of the document's folder"
        else:
            full = self._base / path
            try:
                resolved = full.resolve(strict=True)
                if not resolved.is_relative_to(self._workspace):
                    wrong = "leads out of the workspace"
                elif not resolved.is_file():
                    wrong = "is no regular file"
                elif resolved.stat().st_size > DOCUMENT_BYTES_MAX:
                    wrong = f"has more than {DOCUMENT_BYTES_MAX:,} bytes"
            except OSError as error:
                wrong = f"cannot be read: {error.strerror}"
        if wrong is not None:
            self._found.add("invalid_file", place, f"The file {path!r} {wrong}.")
            return None
        raw = (self._base / path).read_bytes()
        self._bytes += len(raw)
        if self._bytes > CAPTURED_BYTES_MAX:
            self._found.add(
                "invalid_file", place, f"The files of the document have more than {CAPTURED_BYTES_MAX:,} bytes."
            )
            return None
        self.digests[path] = hashlib.sha256(raw).hexdigest()
        return raw
