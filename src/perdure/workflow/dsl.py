"""Workflows in Python: loaded from a document, or built here. Both compile to the same plan, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.errors import Invalid
from perdure.workflow import document
from perdure.workflow.compile import Compiled, compile_source
from perdure.workflow.plan import Plan
from perdure.workflow.variables import Given
from perdure.workflow.yaml import YamlError
from perdure.workflow.yaml import load as load_yaml


def camel(name: str) -> str:
    """``max_attempts`` as ``maxAttempts``; an underscore at the end (``with_``) is taken off."""
    first, *rest = name.rstrip("_").split("_")
    return first + "".join(word.capitalize() for word in rest)


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    return {camel(name): value for name, value in given.items() if value is not None}


class Workflow:
    """A workflow that can be compiled and submitted.

    Built in Python, fields are those of the document in snake case, with an underscore behind Python's own words
    (``with_``, ``while_``); values are JSON, with ``${{ }}`` templates where the document has them.

    Args:
        name: what it is called. version: yours, for people.
        spec: other fields of the document's ``spec``: ``inputs``, ``outputs``, ``policy``, ``runtime``, ``memory``.

    Raises:
        Invalid: a name is used twice.
    """

    def __init__(
        self, name: str, *, version: str = "", description: str = "", labels: dict[str, str] | None = None, **spec: Any
    ) -> None:
        metadata = {"name": name, "version": version, "description": description, "labels": labels or {}}
        self._value: dict[str, Any] = {
            "apiVersion": document.OWN,
            "kind": "Workflow",
            "metadata": {key: value for key, value in metadata.items() if value},
            "spec": {**_fields(spec), "tasks": []},
        }
        self._source: document.Source | None = None
        self._given = Given()
        self._compiled: Compiled | None = None
        self.base = Path.cwd()

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        workspace: str | Path | None = None,
        variables: dict[str, Any] | None = None,
        variable_files: tuple[str | Path, ...] = (),
    ) -> Workflow:
        """The workflow of a document's file.

        Args:
            workspace: the folder that its files must stay in; by default the document's.
            variables, variable_files: the two highest layers of variables.

        Raises:
            Invalid: a file cannot be read; as ``DocumentInvalid`` with every finding, each with its place.
        """
        source = document.load(path, workspace)
        made = cls(source.document.metadata.name)
        made._source = source
        made.base = source.base
        made._given = Given(tuple(_variables(Path(one)) for one in variable_files), variables or {})
        return made

    # -- building -----------------------------------------------------------------------------------------------------
    def _put(self, section: str, name: str, fields: dict[str, Any]) -> None:
        held: dict[str, Any] = self._value["spec"].setdefault(section, {})
        if name in held:
            raise Invalid(f"`{name}` is there already among the {section} of the workflow.", help="Use another name.")
        held[name] = _fields(fields)
        self._compiled = None

    def action(self, name: str, kind: str, **fields: Any) -> str:
        """Add an action; returns what a task uses it by."""
        self._put("actions", name, {"kind": kind, **fields})
        return f"action:{name}"

    def agent(self, name: str, **fields: Any) -> str:
        """Add an agent; returns what a task uses it by."""
        self._put("agents", name, fields)
        return f"agent:{name}"

    def provider(self, name: str, kind: str, **fields: Any) -> str:
        """Add a provider; returns its name."""
        self._put("providers", name, {"kind": kind, **fields})
        return name

    def tool(self, name: str, kind: str, **fields: Any) -> str:
        """Add a tool that agents may call; returns its name."""
        self._put("tools", name, {"kind": kind, **fields})
        return name

    def subworkflow(self, name: str, **fields: Any) -> str:
        """Add a reusable graph; its ``tasks`` are those of the document. Returns what a task uses it by."""
        self._put("subworkflows", name, fields)
        return f"workflow:{name}"

    def task(self, id: str, uses: str, *, needs: Any = (), **fields: Any) -> str:
        """Add a task; returns its id."""
        task = {"id": id, "uses": uses, "needs": list(needs) or None, **fields}
        self._value["spec"]["tasks"].append(_fields(task))
        self._compiled = None
        return id

    # -- compiling ----------------------------------------------------------------------------------------------------
    @property
    def source(self) -> document.Source:
        """The document, read.

        Raises:
            DocumentInvalid: with every finding.
        """
        if self._source is not None:
            return self._source
        return document.of_value(self._value, "<python>", self.base)

    def compiled(self) -> Compiled:
        """The plan, the layers its variables came from, and warnings.

        Raises:
            DocumentInvalid: with every finding, each with its place.
        """
        if self._compiled is None:
            self._compiled = compile_source(self.source, self._given)
        return self._compiled

    def compile(self) -> Plan:
        """The plan: the same bytes for the same workflow, in any process.

        Raises:
            Invalid: the workflow cannot be; as ``DocumentInvalid`` with every finding, each with its place.
        """
        return self.compiled().plan

    @property
    def name(self) -> str:
        """What it is called."""
        name: str = self._source.document.metadata.name if self._source else self._value["metadata"]["name"]
        return name


def _variables(path: Path) -> dict[str, Any]:
    try:
        value, _ = load_yaml(path.read_bytes(), f"The variable file {str(path)!r}")
    except OSError as error:
        raise Invalid(f"The variable file {str(path)!r} cannot be read: {error.strerror}.") from error
    except YamlError as error:
        raise Invalid(f"{error.message} (line {error.line}, column {error.column})") from error
    if not isinstance(value, dict):
        raise Invalid(f"The variable file {str(path)!r} holds no map.")
    return value
