"""JSON Schema documents as plain dicts: tidy them, join them, strip them. Pure; knows no types and no validators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

Schema = dict[str, Any]

_NAMED = frozenset({"properties", "$defs", "patternProperties", "dependentSchemas"})  # name -> schema
_LITERAL = frozenset({"default", "const", "enum", "examples", "required", "discriminator"})  # never schemas
_PREFIX = "#/$defs/"


def _parts(schema: Schema) -> Iterator[Schema]:
    """The schemas directly inside one schema."""
    for key, value in schema.items():
        if key in _LITERAL:
            continue
        if key in _NAMED and isinstance(value, dict):
            yield from (item for item in value.values() if isinstance(item, dict))
        elif isinstance(value, dict):
            yield value
        elif isinstance(value, list):
            yield from (item for item in value if isinstance(item, dict))


def _all(schema: Schema) -> Iterator[Schema]:
    stack = [schema]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(_parts(node))


def without(schema: Any, keys: Iterable[str]) -> Any:
    """A copy of a schema in which the annotations named in ``keys`` are left out, at every depth.

    A property that happens to be called ``title`` stays: only the annotation of that name goes.
    """
    gone = frozenset(keys)

    def copy(node: Any) -> Any:
        if isinstance(node, list):
            return [copy(item) for item in node]
        if not isinstance(node, dict):
            return node
        kept: Schema = {}
        for key, value in node.items():
            if key in _LITERAL:
                kept[key] = value
            elif key in _NAMED and isinstance(value, dict):
                kept[key] = {name: copy(item) for name, item in value.items()}
            elif key not in gone:
                kept[key] = copy(value)
        return kept

    return copy(schema)


def _rename(schema: Schema, names: dict[str, str]) -> None:
    """Make every reference of a schema follow new names of definitions."""
    for node in _all(schema):
        discriminator = node.get("discriminator")
        mapping = discriminator.get("mapping", {}) if isinstance(discriminator, dict) else {}
        for holder, key in [(node, "$ref"), *((mapping, key) for key in mapping)]:
            target = holder.get(key)
            if isinstance(target, str) and target.removeprefix(_PREFIX) in names:
                holder[key] = _PREFIX + names[target.removeprefix(_PREFIX)]


def hoist(schema: Schema, into: Schema) -> Schema:
    """Move the definitions of a schema into ``into``, renaming those whose name already means something else.

    Returns:
        The same schema without ``$defs``, its references following the names.
    """
    own = schema.pop("$defs", {})
    names = {}
    for name, body in own.items():
        free = name
        while free in into and into[free] != body:
            free += "_"
        if free != name:
            names[name] = free
    if names:
        for part in (schema, *own.values()):
            _rename(part, names)
    into.update((names.get(name, name), body) for name, body in own.items())
    return schema


def tidy(schema: Schema) -> Schema:
    """A copy without titles, with all definitions at the root and the root itself spelled out where it can be."""
    copied: Schema = without(schema, ("title",))
    defs: Schema = copied.pop("$defs", {})
    for node in [*_all(copied), *(inner for body in list(defs.values()) for inner in _all(body))]:
        if "$defs" in node:
            hoist(node, defs)
    ref = copied.get("$ref", "")
    if set(copied) == {"$ref"} and ref.startswith(_PREFIX):
        name = ref.removeprefix(_PREFIX)
        body = defs[name]
        if not any(node.get("$ref") == ref for item in defs.values() for node in _all(item)):
            del defs[name]
        copied = dict(body)
    if defs:
        copied["$defs"] = {name: defs[name] for name in sorted(defs)}
    return copied
