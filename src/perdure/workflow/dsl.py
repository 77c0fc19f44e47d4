"""Workflows in Python: loaded from a document, or built here. Both compile to the same plan, byte for byte."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from perdure import canonical
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


def _fields(given: dict[str, Any], what: str) -> dict[str, Any]:
    fields = {camel(name): _plain(value) for name, value in given.items() if value is not None}
    canonical.check(fields, what)
    return fields


def _plain(value: Any) -> Any:
    """A value as JSON: the structs of ``perdure.definitions.workflow`` as what a document would hold."""
    match value:
        case msgspec.Struct():
            return _plain(msgspec.to_builtins(value))
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {key: _plain(item) for key, item in value.items()}
        case _:
            return value


class Workflow:
    """A workflow that can be compiled and submitted.

    Built in Python, fields are those of the document in snake case, with an underscore behind Python's own words
    (``with_``); values are JSON as the document holds it, with ``${{ }}`` templates where the document has them.

    Args:
        name: what it is called. version: yours, for people.
        base: the folder that paths of files start from, and that a run sees; by default the current one.
        spec: other fields of the document's ``spec``: ``inputs``, ``outputs``, ``policy``, ``runtime``, ``memory``.

    Raises:
        Invalid: a name is used twice, or a value is no JSON.

    Example:
        flow = Workflow("hello", inputs={"who": "world"})
        say = flow.action("say", "builtin.assign")
        flow.task("greet", say, with_={"text": "Hello, ${{ inputs.who }}!"})
        flow.compile().order  # ("greet",)
    """

    def __init__(
        self,
        name: str,
        *,
        version: str = "",
        description: str = "",
        labels: dict[str, str] | None = None,
        base: str | Path | None = None,
        **spec: Any,
    ) -> None:
        metadata = {"name": name, "version": version, "description": description, "labels": labels or {}}
        self._value: dict[str, Any] = {
            "apiVersion": document.OWN,
            "kind": "Workflow",
            "metadata": {key: value for key, value in metadata.items() if value},
            "spec": {**_fields(spec, f"workflow {name!r}"), "tasks": []},
        }
        self._source: document.Source | None = None
        self._given = Given()
        self._compiled: Compiled | None = None
        self.base = Path(base).resolve() if base is not None else Path.cwd()

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
        self._own()
        held: dict[str, Any] = self._value["spec"].setdefault(section, {})
        if name in held:
            raise Invalid(f"`{name}` is there already among the {section} of the workflow.", help="Use another name.")
        held[name] = _fields(fields, f"{section}.{name}")
        self._compiled = None

    def _own(self) -> None:
        if self._source is not None:
            raise Invalid(f"The workflow {self.name!r} was read from a document; nothing is added to it here.")

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

    def mcp_server(self, name: str, **fields: Any) -> str:
        """Add a server of MCP tools; returns its name."""
        self._put("mcpServers", name, fields)
        return name

    def a2a_peer(self, name: str, url: str, **fields: Any) -> str:
        """Add a remote agent; returns its name."""
        self._put("a2aPeers", name, {"url": url, **fields})
        return name

    def task(self, id: str, uses: str, *, needs: Iterable[str] = (), **fields: Any) -> str:
        """Add a task; returns its id, to be needed by others.

        Args:
            uses: what :meth:`action`, :meth:`agent` or :meth:`subworkflow` returned; ``router`` with a ``route``.
            fields: of a task of the document: ``with_``, ``when``, ``foreach``, ``matrix``, ``loop``, ``retry``, ``failure``.
        """
        if isinstance(needs, str):
            raise Invalid(f"The needs of task {id!r} are a list of ids, not text.", help=f"Write needs=[{needs!r}].")
        self._own()
        task = {"id": id, "uses": uses, "needs": list(needs) or None, **fields}
        self._value["spec"]["tasks"].append(_fields(task, f"task {id!r}"))
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
    def digest(self) -> str:
        """Hex SHA-256 of its plan.

        Raises:
            DocumentInvalid: it does not compile.
        """
        return self.compile().digest

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
