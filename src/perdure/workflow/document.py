"""From the bytes of a document to the document, or to everything that is wrong with it, each finding with its place.

What a field may be follows from ``definitions.workflow`` and nothing else: the raw value is walked beside the types, so one
wrong field hides no other.
"""

from __future__ import annotations

import functools
import re
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Meta

from perdure.definitions.workflow import Document, SecretRef
from perdure.errors import Invalid
from perdure.workflow import legacy
from perdure.workflow.diagnostics import Diagnostics, DocumentInvalid, nearest
from perdure.workflow.files import Captured
from perdure.workflow.yaml import YamlError
from perdure.workflow.yaml import load as load_yaml

OWN = "perdure.dev/v1"
DIALECTS = (OWN, "agentctl.dev/v1", "agentctl.dev/v1alpha1")


class Source:
    """A document that was read.

    Attributes:
        document: it. file: its name. base: the folder its relative paths start from.
        diagnostics: warnings so far, and places for more. files: what was captured beside it.
        dialect: its ``apiVersion``.
    """

    def __init__(self, document: Document, diagnostics: Diagnostics, base: Path, files: Captured) -> None:
        self.document = document
        self.diagnostics = diagnostics
        self.file = diagnostics.file
        self.base = base
        self.files = files
        self.dialect = document.api_version


def load(path: Path | str, workspace: Path | str | None = None) -> Source:
    """A document from its file.

    Raises:
        Invalid: the file cannot be read. DocumentInvalid: the document is wrong.
    """
    file = Path(path)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise Invalid(f"The workflow {str(path)!r} cannot be read: {error.strerror}.") from error
    base = file.resolve().parent
    return read(data, str(path), base, Path(workspace).resolve() if workspace is not None else base)


def read(data: bytes, file: str, base: Path, workspace: Path | None = None) -> Source:
    """A document from its bytes.

    Args:
        base: the folder its relative paths start from. workspace: the folder they must stay in.

    Raises:
        DocumentInvalid: with every finding.
    """
    diagnostics = Diagnostics(file)
    try:
        value, diagnostics.places = load_yaml(data)
    except YamlError as error:
        diagnostics.places = {"": (error.line, error.column)}
        diagnostics.add("yaml_syntax", "", error.message, help=error.help)
        raise DocumentInvalid(diagnostics.found) from error
    if isinstance(value, dict) and "apiVersion" not in value and ("playbook" in value or "modules" in value):
        diagnostics.warn("migration_required", "", "The document has no apiVersion; it is read as a playbook.",
                         help="Write it as perdure.dev/v1.")  # fmt: skip
        value = legacy.translate(value)
    return _judged(value, diagnostics, base, workspace or base)


def of_value(value: Any, file: str, base: Path) -> Source:
    """A document from its value, as a program builds it.

    Raises:
        DocumentInvalid: with every finding.
    """
    return _judged(value, Diagnostics(file, {"": (0, 0)}), base, base)


def _judged(value: Any, diagnostics: Diagnostics, base: Path, workspace: Path) -> Source:
    checked = check(value, diagnostics)
    diagnostics.raise_errors()
    document = msgspec.convert(checked, Document)
    captured = Captured(base, workspace, diagnostics)
    _check_secrets(document, diagnostics)
    captured.capture(document)
    diagnostics.raise_errors()
    return Source(document, diagnostics, base, captured)


def check(value: Any, diagnostics: Diagnostics) -> Any:
    """Judge a raw value as a document; findings go to ``diagnostics``."""
    if not isinstance(value, dict):
        diagnostics.add("schema_violation", "", f"A workflow is a map; this is {_kind(value)}.")
        return value
    version = value.get("apiVersion")
    if isinstance(version, str) and version not in DIALECTS:
        diagnostics.add(
            "unsupported_version", "apiVersion", f"apiVersion {version!r} is not known.",
            help=nearest(version, DIALECTS) or f"Known are {', '.join(DIALECTS)}.",
        )  # fmt: skip
    spec = value.get("spec")
    for place, holder in (("sourceSnapshot", value), ("spec.sourceSnapshot", spec)):
        if isinstance(holder, dict) and "sourceSnapshot" in holder:
            diagnostics.add("schema_violation", place, "`sourceSnapshot` is reserved.", help="Leave it out.")
    _walk(value, Document, "", diagnostics)
    return value


_PLAIN: dict[Any, str] = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def _kind(value: Any) -> str:
    return {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "text", list: "a list"}.get(
        type(value), "a map"
    )


def _walk(value: Any, wanted: Any, path: str, found: Diagnostics) -> None:
    """Judge a value by the type a field has."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Annotated:
        _walk(value, arguments[0], path, found)
        for item in arguments[1:]:
            if isinstance(item, Meta):
                _bound(value, item, path, found)
    elif wanted is Any:
        return
    elif origin in (typing.Union, types.UnionType):
        _walk_union(value, arguments, path, found)
    elif origin is typing.Literal:
        _walk_choice(value, arguments, path, found)
    elif origin in (tuple, list):
        _walk_list(value, arguments[0], path, found)
    elif origin is dict:
        _walk_map(value, arguments, path, found)
    elif isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        _walk_struct(value, wanted, path, found)
    else:
        _walk_plain(value, wanted, path, found)


def _wrong(value: Any, wanted: str, path: str, found: Diagnostics) -> None:
    found.add("schema_violation", path, f"{path or 'The document'} is {wanted}; this is {_kind(value)}.")


def _walk_union(value: Any, arguments: tuple[Any, ...], path: str, found: Diagnostics) -> None:
    if value is None and type(None) in arguments:
        return
    choices = [one for one in arguments if one is not type(None)]
    if len(choices) == 1:
        _walk(value, choices[0], path, found)
    elif isinstance(value, dict):
        structs = [one for one in choices if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        _walk(value, structs[0] if structs else choices[0], path, found)
    else:
        plain = [one for one in choices if not (isinstance(one, type) and issubclass(one, msgspec.Struct))]
        _walk(value, plain[0] if plain else choices[0], path, found)


def _walk_choice(value: Any, choices: tuple[Any, ...], path: str, found: Diagnostics) -> None:
    if value in choices and isinstance(value, str):
        return
    if not isinstance(value, str):
        _wrong(value, "text", path, found)
        return
    if path == "apiVersion":
        return  # it has a finding of its own
    known = ", ".join(f"`{one}`" for one in choices)
    found.add(
        "schema_violation",
        path,
        f"{path} is `{value[:64]}`, which is not one of {known}.",
        help=nearest(value, choices),
    )


def _walk_list(value: Any, inner: Any, path: str, found: Diagnostics) -> None:
    if not isinstance(value, list):
        _wrong(value, "a list", path, found)
        return
    for index, item in enumerate(value):
        _walk(item, inner, f"{path}[{index}]", found)


def _walk_map(value: Any, arguments: tuple[Any, ...], path: str, found: Diagnostics) -> None:
    if not isinstance(value, dict):
        _wrong(value, "a map", path, found)
        return
    for key, item in value.items():
        if not key.strip():
            found.add("schema_violation", f"{path}.{key}", f"{path} has an empty name.")
        _walk(item, arguments[1], f"{path}.{key}", found)


@functools.lru_cache(maxsize=128)
def _fields(wanted: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.encode_name: field for field in msgspec.structs.fields(wanted)}


def _walk_struct(value: Any, wanted: type[msgspec.Struct], path: str, found: Diagnostics) -> None:
    if not isinstance(value, dict):
        _wrong(value, "a map", path, found)
        return
    fields = _fields(wanted)
    for key, item in value.items():
        inner = f"{path}.{key}" if path else key
        field = fields.get(key)
        if field is None:
            if key != "sourceSnapshot":
                found.add("schema_violation", inner, f"`{key[:64]}` is no field of {path or 'a workflow'}.",
                          help=nearest(key, fields) or f"Fields are {', '.join(fields)}.")  # fmt: skip
        else:
            _walk(item, field.type, inner, found)
    for name, field in fields.items():
        if field.required and name not in value:
            found.add("schema_violation", path, f"{path or 'The document'} has no `{name}`, which it must have.")
    if wanted is SecretRef and sum(value.get(name) is not None for name in fields) != 1:
        found.add("invalid_secret_reference", path, "A secret reference names exactly one of env, file and process.")


def _walk_plain(value: Any, wanted: Any, path: str, found: Diagnostics) -> None:
    good = isinstance(value, wanted) if wanted is not float else isinstance(value, int | float)
    if wanted in (int, float) and isinstance(value, bool):
        good = False
    if wanted is int and isinstance(value, float) and value.is_integer():
        good = False
    if not good:
        _wrong(value, _PLAIN.get(wanted, wanted.__name__), path, found)


def _bound(value: Any, meta: Meta, path: str, found: Diagnostics) -> None:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        low, high = meta.ge, meta.le
        if (
            (low is not None and value < low)
            or (high is not None and value > high)
            or (meta.gt is not None and value <= meta.gt)
        ):
            told = f"from {low:,} to {high:,}" if low is not None and high is not None else (
                f"at least {low:,}" if low is not None else "above 0"
            )  # fmt: skip
            found.add("schema_violation", path, f"{path} is {value:,}; it is {told}.")
    elif isinstance(value, str):
        _bound_text(value, meta, path, found)
    elif isinstance(value, list) and meta.min_length and len(value) < meta.min_length:
        found.add("schema_violation", path, f"{path} is empty.")


def _bound_text(value: str, meta: Meta, path: str, found: Diagnostics) -> None:
    if meta.min_length and len(value) < meta.min_length:
        found.add("schema_violation", path, f"{path} is empty.")
    elif meta.max_length and len(value) > meta.max_length:
        found.add("schema_violation", path, f"{path} has {len(value):,} characters; the most are {meta.max_length:,}.")
    elif meta.pattern and not re.search(meta.pattern, value):
        shape = "It starts with a letter; letters, digits, `_` and `-` follow." if "A-Za-z" in meta.pattern else ""
        found.add("schema_violation", path, f"{path} is `{value[:64]}`, which is not of the form it has.", help=shape)


def _check_secrets(document: Document, found: Diagnostics) -> None:
    """Secret references that the policy can never let be read."""
    policy = document.spec.policy
    for path, ref in secrets_of(document):
        if (
            ref.env is not None
            and not path.startswith("spec.providers.")
            and ref.env not in policy.environment_allowlist
        ):
            found.add("policy_denied", path, f"environmentAllowlist does not name {ref.env!r}.",
                      help="Add it to spec.policy.environmentAllowlist.")  # fmt: skip
        if ref.file is not None and not policy.secret_file_roots:
            found.add("policy_denied", path, "A secret file needs a folder in spec.policy.secretFileRoots.")
        if ref.process is not None:
            name = ref.process.command.rpartition("/")[2]
            if name not in policy.secret_process_allowlist:
                found.add("policy_denied", path, f"secretProcessAllowlist does not name {name!r}.")


def secrets_of(document: Document) -> list[tuple[str, SecretRef]]:
    """Every secret reference with its path."""
    found: list[tuple[str, SecretRef]] = []

    def walk(value: Any, path: str) -> None:
        if isinstance(value, SecretRef):
            found.append((path, value))
        elif isinstance(value, msgspec.Struct):
            for field in msgspec.structs.fields(value):
                walk(getattr(value, field.name), f"{path}.{field.encode_name}" if path else field.encode_name)
        elif isinstance(value, dict):
            for key, item in value.items():
                if isinstance(item, msgspec.Struct):
                    walk(item, f"{path}.{key}")

    walk(document, "")
    return found
