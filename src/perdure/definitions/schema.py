"""How a Python type crosses the JSON boundary: one :class:`Codec` a type, both ways, with its JSON Schema.

A value is always used as it will be read back: :meth:`Codec.round_trip` returns the decoded value also the first time,
and refuses what would come back as something else. msgspec does the work; Pydantic does it for types that only Pydantic
understands, and is never imported here (a type of Pydantic cannot exist before somebody else imported it).

May live here: types, encoding, decoding, naming the offending place. May not: tools, agents, I/O.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import msgspec
import msgspec.inspect

from perdure import canonical
from perdure.definitions import jsonschema
from perdure.definitions.files import File
from perdure.errors import Invalid
from perdure.limits import JSON_DEPTH_MAX, JSON_NODES_MAX, PAYLOAD_BYTES_MAX

ENCODE_ERRORS = (TypeError, ValueError, RecursionError, OverflowError, AttributeError, msgspec.MsgspecError)
DECODE_ERRORS = (ValueError, RecursionError, msgspec.MsgspecError)
_TYPE_ERRORS = (TypeError, ValueError, NameError, AttributeError, RecursionError, RuntimeError, SyntaxError)
_LONG_NUMBER = re.compile(rb"\d{19}")
_PLAIN_HELP = "Use a list, dict, str, number, bool or None, or annotate the type."
_TYPED_HELP = "Give what the type says, or change the type."
_TYPES_HELP = (
    "Use builtins, dataclasses, TypedDict, NamedTuple, enums, datetime, Decimal, UUID, Literal, msgspec structs or "
    "Pydantic models."
)
_MAX_FAULTS = 5


class Codec:
    """One type at the JSON boundary. Made by :func:`codec_of`; immutable.

    Attributes:
        type: the Python type, ``Any`` where nothing was declared.
        is_text: whether the type is exactly ``str``, so that a model may answer and be asked in plain text.
        is_native: whether msgspec (with :func:`dec_hook`) reads the type, so that it may be a field of a struct.
    """

    __slots__ = ("_read", "_schema", "_write", "is_native", "is_text", "type")

    def __init__(
        self,
        type_: Any,
        write: Callable[[Any], bytes],
        read: Callable[[bytes], Any],
        schema: jsonschema.Schema,
        *,
        is_native: bool,
    ) -> None:
        self.type = type_
        self.is_native = is_native
        self.is_text = type_ is str
        self._write = write
        self._read = read
        self._schema = jsonschema.tidy(schema)

    def __repr__(self) -> str:
        return f"codec_of({name_of(self.type)})"

    def schema(self) -> jsonschema.Schema:
        """JSON Schema (2020-12) of the type: no titles, ``$defs`` at the root. ``{}`` for ``Any``. Do not change it.

        Whether plain text stands for a ``str`` is the agent's decision; see ``is_text``.
        """
        return self._schema

    def encode(self, value: Any, what: str = "value") -> bytes:
        """Plain JSON of a value of this type. Same checks as :meth:`round_trip`.

        Raises:
            Invalid: the value does not fit the type, JSON or a limit; names the path.
        """
        return self.round_trip(value, what)[0]

    def decode(self, raw: bytes | memoryview | msgspec.Raw, what: str = "value") -> Any:
        """The value that JSON bytes hold, validated as this type.

        Raises:
            Invalid: not JSON, over a limit, or not of this type; names the path.
        """
        body = raw if type(raw) is bytes else bytes(raw)
        check_limits(body, what)
        try:
            return self._read(body)
        except DECODE_ERRORS as error:
            path, why = fault_of(error)
            raise Invalid(f"{what} at `{path}`: {why}.") from error

    def read(self, raw: bytes) -> Any:
        """:meth:`decode` without the limits, raising the library's own error, for :func:`fault_of`."""
        return self._read(raw)

    def write(self, value: Any) -> bytes:
        """:meth:`encode` of a value that :meth:`decode` returned: no checks."""
        return self._write(value)

    def round_trip(self, value: Any, what: str = "value") -> tuple[bytes, Any]:
        """Plain JSON of a value, and the value as it will be read back. Use the second from here on.

        Raises:
            Invalid: the value does not fit the type, JSON or a limit, or would come back as something else (a tuple
                as a list, a time as text, NaN as null); names the path and what to do.
        """
        try:
            raw = self._write(value)
        except ENCODE_ERRORS as error:
            raise _unencodable(value, what, error) from error
        if len(raw) > PAYLOAD_BYTES_MAX:
            raise _too_large(value, len(raw), what)
        check_limits(raw, what)
        try:
            decoded = self._read(raw)
        except DECODE_ERRORS as error:
            _refuse_nonfinite(value, what)
            path, why = fault_of(error)
            raise Invalid(
                f"{what} at `{path}` does not fit its type `{name_of(self.type)}`: {why}.",
                help=_TYPED_HELP,
            ) from error
        if decoded != value:
            self._accept_unequal(value, decoded, raw, what)
        return raw, decoded

    def _accept_unequal(self, value: Any, decoded: Any, raw: bytes, what: str) -> None:
        _refuse_nonfinite(value, what)
        found = _difference(value, decoded, "$")
        if found is not None:
            path, why = found
            raise Invalid(f"{what} at `{path}` {why}, so it does not round-trip through JSON.", help=self._help())
        if self._write(decoded) != raw:
            raise Invalid(f"{what} does not come back the same from JSON.", help=self._help())

    def _help(self) -> str:
        return _PLAIN_HELP if self.type is Any else _TYPED_HELP


def codec_of(type_: Any, what: str = "value") -> Codec:
    """The codec of a type. ``Any``, ``object`` or a missing annotation means plain JSON; ``None`` means null.

    Args:
        type_: a type as an annotation names it, already evaluated; a codec is its own.
        what: what is of this type, for the message.

    Raises:
        Invalid: the type cannot cross JSON; names ``what`` and the type.
    """
    if isinstance(type_, Codec):
        return type_
    if isinstance(type_, type) and get_origin(type_) is None:
        cached = _codec_of_class(type_)
        if cached is not None:
            return cached
    return _build(type_, what)


@functools.lru_cache(maxsize=1024)
def _codec_of_class(type_: type) -> Codec | None:
    try:
        return _build(type_, "")
    except Invalid:
        return None  # built again for its message, which names who asked


def name_of(type_: Any) -> str:
    """A type as a person writes it."""
    if type_ is type(None):
        return "None"
    if isinstance(type_, type) and get_origin(type_) is None:
        return type_.__qualname__.rpartition("<locals>.")[2]
    return str(type_).replace("typing.", "")


def check_limits(raw: bytes, what: str) -> None:
    """Raise unless JSON bytes are within the limits of depth, of nodes and of integers.

    Raises:
        Invalid: not JSON, deeper than ``JSON_DEPTH_MAX``, of more than ``JSON_NODES_MAX`` nodes, or holds an integer
            beyond 64 bits.
    """
    size = len(raw)
    if size <= 2 * JSON_DEPTH_MAX and (size < 19 or not _LONG_NUMBER.search(raw)):
        return  # too short for any of it
    containers = raw.count(b"[") + raw.count(b"{")
    many = 2 * (raw.count(b",") + containers + 1) > JSON_NODES_MAX  # a key is a node too
    if containers > JSON_DEPTH_MAX or many or _LONG_NUMBER.search(raw):
        canonical.decode(raw, what)


def fault_of(error: BaseException, root: str = "$") -> tuple[str, str]:
    """Where and why a value did not decode: path (``$.a[3]``, ``root`` for ``$``) and a sentence without full stop."""
    text, at, path = str(error).rpartition(" - at `")
    path = root + path.removesuffix("`").removeprefix("$") if at else root
    inner = error if hasattr(error, "errors") else error.__cause__
    if inner is not None and hasattr(inner, "errors"):
        return _pydantic_fault(inner, path)
    if isinstance(error, RecursionError):
        return root, f"it is nested deeper than {JSON_DEPTH_MAX} levels"
    why = text if at else str(error)
    if not isinstance(error, msgspec.ValidationError):
        why = f"it is not JSON: {why}"
    return path, why.rstrip(".")


def _pydantic_fault(error: Any, outer: str) -> tuple[str, str]:
    found = [
        (outer + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in one["loc"]), one["msg"])
        for one in error.errors(include_url=False, include_context=False, include_input=False)[:_MAX_FAULTS]
    ]
    (path, why), *others = found
    return path, "; ".join([why, *(f"`{place}`: {reason}" for place, reason in others)])


# ---------------------------------------------------------------------------------------------- building


def _build(type_: Any, what: str) -> Codec:
    if type_ is inspect.Parameter.empty or type_ is object:
        type_ = Any
    if type_ is None:
        type_ = type(None)
    traits = _traits_of(type_, what)
    try:
        if traits.constraints or (traits.models and is_model(type_)):
            return _through_pydantic(type_, traits, what)
        try:
            return _through_msgspec(type_, what)
        except TypeError:
            if not traits.models:
                raise
            return _through_pydantic(type_, traits, what)
    except _TYPE_ERRORS as error:
        reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise _unsupported(type_, what, reason) from error


def _unsupported(type_: Any, what: str, reason: str) -> Invalid:
    return Invalid(
        f"{what or 'value'} has the type `{name_of(type_)}`, which cannot cross as JSON: {reason}.", help=_TYPES_HELP
    )


def is_model(type_: Any) -> bool:
    """Whether a type is a Pydantic model class. Never imports Pydantic."""
    return isinstance(type_, type) and hasattr(type_, "model_validate") and hasattr(type_, "model_dump_json")


def _through_msgspec(type_: Any, what: str) -> Codec:
    order: Any = None
    fill = False
    for node in _info_nodes(msgspec.inspect.type_info(type_)):
        if isinstance(node, msgspec.inspect.CustomType) and node.cls is not object and not is_model(node.cls):
            raise _unsupported(type_, what, f"`{name_of(node.cls)}` is an arbitrary class")
        if isinstance(node, msgspec.inspect.SetType | msgspec.inspect.FrozenSetType):
            order = "deterministic"  # a set has no order of its own; two processes must write the same bytes
        if isinstance(node, msgspec.inspect.DataclassType):
            fill |= any(field.default is not msgspec.NODEFAULT for field in node.fields)

    (schema,), defs = msgspec.json.schema_components([type_], schema_hook=_schema_hook, ref_template="#/$defs/{name}")
    write = msgspec.json.Encoder(enc_hook=_enc_hook, order=order).encode
    read = msgspec.json.Decoder(type_, dec_hook=dec_hook).decode
    if fill:
        return Codec(type_, write, lambda raw: _filled(read(raw)), {**schema, "$defs": defs}, is_native=False)
    return Codec(type_, write, read, {**schema, "$defs": defs}, is_native=True)


def _filled(value: Any) -> Any:
    """Give decoded dataclasses the defaults msgspec left to the class, so that equal values are written equally."""
    stack = [value]
    while stack:
        node = stack.pop()
        if dataclasses.is_dataclass(node) and hasattr(node, "__dict__"):
            for name in _fields(node):
                if name not in node.__dict__:
                    object.__setattr__(node, name, getattr(node, name))  # frozen ones too
        stack.extend(item for _, item in _children(node))
    return value


def _info_nodes(root: msgspec.inspect.Type) -> Iterator[msgspec.inspect.Type]:
    stack: list[Any] = [root]
    seen: set[int] = set()
    while stack:
        node = stack.pop()
        if isinstance(node, msgspec.inspect.Field):
            stack.append(node.type)
        elif isinstance(node, msgspec.inspect.Type) and id(node) not in seen:
            seen.add(id(node))
            yield node
            for name in node.__struct_fields__:
                inner = getattr(node, name)
                stack.extend(inner if isinstance(inner, tuple) else (inner,))


def _enc_hook(value: Any) -> Any:
    if is_model(type(value)):
        return msgspec.Raw(value.model_dump_json(by_alias=True, warnings=False).encode())
    raise TypeError(f"A {type(value).__name__} cannot be encoded as JSON")


_hook_encode = msgspec.json.Encoder().encode


def dec_hook(type_: type, value: Any) -> Any:
    """What msgspec asks for types it does not know: Pydantic models inside others, and ``object``."""
    if is_model(type_):
        return type_.model_validate_json(_hook_encode(value))  # type: ignore[attr-defined]
    return value


def _schema_hook(type_: type) -> jsonschema.Schema:
    if is_model(type_):
        schema: jsonschema.Schema = type_.model_json_schema()  # type: ignore[attr-defined]
        return schema
    return {"title": "Any"}  # `object`; an empty one would be taken for none, and titles are dropped


def _through_pydantic(type_: Any, traits: _Traits, what: str) -> Codec:
    pydantic: Any = sys.modules.get("pydantic")
    if pydantic is None:
        raise _unsupported(type_, what, "its annotated_types constraints need Pydantic, which is not loaded")
    if traits.structs:
        raise _unsupported(type_, what, "it mixes msgspec with what only Pydantic checks; use one of the two")
    adapter = pydantic.TypeAdapter(type_)
    adapter.rebuild(raise_errors=True)

    def write(value: Any) -> bytes:
        raw: bytes = adapter.dump_json(value, by_alias=True, warnings=False)
        return raw

    return Codec(type_, write, adapter.validate_json, adapter.json_schema(), is_native=False)


class _Traits(NamedTuple):
    """What a type contains at any depth."""

    models: bool  # Pydantic models
    constraints: bool  # what msgspec would silently pass over: Field(), annotated_types, Pydantic dataclasses
    structs: bool  # msgspec structs or Meta, which Pydantic does not know


def _traits_of(type_: Any, what: str) -> _Traits:
    models = constraints = structs = False
    stack, seen = [type_], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if get_origin(node) is Annotated:
            base, *metadata = get_args(node)
            constraints |= any(_is_constraint(item) for item in metadata)
            structs |= any(isinstance(item, msgspec.Meta) for item in metadata)
            stack.append(base)
            continue
        if node is File:
            continue  # both read it
        models |= is_model(node)
        structs |= isinstance(node, msgspec.StructMeta)
        constraints |= dataclasses.is_dataclass(node) and hasattr(node, "__pydantic_validator__")
        try:
            stack.extend(_inside(node))
        except _TYPE_ERRORS as error:
            raise _unsupported(type_, what, f"{name_of(node)}: {error}") from error
    return _Traits(models, constraints, structs)


def _is_constraint(item: object) -> bool:
    return type(item).__module__.partition(".")[0] in ("pydantic", "annotated_types") and not isinstance(item, type)


def _inside(node: Any) -> list[Any]:
    """The types directly inside a type; those inside a Pydantic model are Pydantic's own business."""
    if get_origin(node) is typing.Literal or is_model(node):
        return []
    inner = [arg for arg in get_args(node) if not isinstance(arg, str | int | list)]
    if not isinstance(node, type):  # NewType, type X = ...
        inner.extend(getattr(node, alias) for alias in ("__supertype__", "__value__") if hasattr(node, alias))
    cls = get_origin(node) or node
    if isinstance(cls, type) and (
        isinstance(cls, msgspec.StructMeta)
        or dataclasses.is_dataclass(cls)
        or hasattr(cls, "__total__")
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    ):
        inner.extend(typing.get_type_hints(cls, include_extras=True).values())
    return inner


# ---------------------------------------------------------------------------------------------- naming the place


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """What is directly inside a value, each with its step of the path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f".{str(key)[:64]}", item
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            yield f"[{index}]", item
    else:
        for name in _fields(value):
            yield f".{name}", getattr(value, name, None)


def _fields(value: Any) -> tuple[str, ...]:
    kind = type(value)
    if isinstance(value, msgspec.Struct):
        return value.__struct_fields__
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    if is_model(kind):
        return (*kind.model_fields, *(value.model_extra or ()))
    return ()


_probe_encode = msgspec.json.Encoder(enc_hook=_enc_hook).encode


def files_in(value: Any) -> Iterator[tuple[str, File]]:
    """Every file in a value that crosses, with its path."""
    stack = [("$", value)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, File):
            yield path, node
        else:
            stack.extend((path + step, item) for step, item in _children(node))


def _too_large(value: Any, size: int, what: str) -> Invalid:
    told = f"{what} is {size:,} bytes of JSON; the limit is {PAYLOAD_BYTES_MAX:,} bytes (PAYLOAD_BYTES_MAX)"
    held = [(len(file.data), path) for path, file in files_in(value) if file.data]
    if not held:
        return Invalid(f"{told}.", help="Store the content elsewhere and pass a reference to it.")
    most, path = max(held)
    return Invalid(
        f"{told}. Its largest file, at `{path[:200]}`, has {most:,} bytes, as base64 a third more.",
        help="Put it where the provider can fetch it, and give its address: File.at(url, media_type=...).",
    )


def _encode_error(value: Any) -> BaseException | None:
    try:
        _probe_encode(value)
    except ENCODE_ERRORS as error:
        return error
    return None


def _unencodable(value: Any, what: str, error: BaseException) -> Invalid:
    """The error that names the innermost place that cannot be encoded."""
    if isinstance(error, RecursionError):
        return Invalid(f"{what} is nested deeper than {JSON_DEPTH_MAX} levels (JSON_DEPTH_MAX), or holds itself.")
    path = "$"
    for _ in range(JSON_DEPTH_MAX):
        found = next(((step, item, e) for step, item in _children(value) if (e := _encode_error(item))), None)
        if found is None:
            break
        step, value, error = found
        path += step
    where = f"{what} at `{path[:200]}`"
    if isinstance(error, UnicodeEncodeError):
        return Invalid(f"{where} holds a lone surrogate, which is not Unicode text.")
    if isinstance(value, dict):
        key = next((key for key in value if not isinstance(key, str)), None)
        return Invalid(f"{where} has the key {key!r:.64}; keys must be text.", help=_PLAIN_HELP)
    return Invalid(
        f"{where} is of type {type(value).__name__}, which does not round-trip through JSON.", help=_PLAIN_HELP
    )


def _refuse_nonfinite(value: Any, what: str) -> None:
    stack: list[tuple[str, Any]] = [("$", value)]
    for _ in range(JSON_NODES_MAX):
        if not stack:
            return
        path, node = stack.pop()
        if isinstance(node, float) and not math.isfinite(node):
            raise Invalid(
                f"{what} at `{path[:200]}` is {node}, which JSON cannot hold.", help="Return None or text instead."
            )
        stack.extend((path + step, item) for step, item in _children(node))


def _compares_by_identity(type_: Any) -> bool:
    return type_.__eq__ is object.__eq__


def _difference(value: Any, decoded: Any, path: str) -> tuple[str, str] | None:
    """The first place where the decoded value is another one, and how; None if only ``==`` is missing."""
    if value is decoded or value == decoded:
        return None
    if isinstance(value, dict) and isinstance(decoded, dict):
        odd = next((key for key in value if key not in decoded), None)
        if odd is not None:
            return (
                path,
                f"has the key {odd!r:.64}, which {'its type does not have' if isinstance(odd, str) else 'is no text'}",
            )
        pairs = [(f".{str(key)[:64]}", value[key], decoded[key]) for key in value]
    elif type(value) is not type(decoded):
        return path, f"is of type {type(value).__name__} and would come back as {type(decoded).__name__}"
    else:
        ours, theirs = list(_children(value)), list(_children(decoded))
        if isinstance(value, set | frozenset) or len(ours) != len(theirs):
            return path, "would come back with other items"
        if not ours and not _fields(value) and not _compares_by_identity(type(value)):
            return path, f"is of type {type(value).__name__} and would come back unequal"
        pairs = [(step, a, b) for (step, a), (_, b) in zip(ours, theirs, strict=True)]
    for step, a, b in pairs:
        found = _difference(a, b, path + step)
        if found is not None:
            return found
    return None
