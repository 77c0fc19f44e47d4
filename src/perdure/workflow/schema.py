"""The JSON Schema of documents, made from the types they are read by: for editors to complete and check from."""

from __future__ import annotations

import inspect
import re
from typing import Any

import msgspec

from perdure.definitions import workflow as definitions
from perdure.definitions.workflow import Document

ID = "https://perdure.dev/schemas/workflow-v1.json"


def schema() -> dict[str, Any]:
    """The schema, 2020-12."""
    (_, defs) = msgspec.json.schema_components([Document], ref_template="#/$defs/{name}")
    for name, component in defs.items():
        made = getattr(definitions, name, None)
        if made is not None:
            _describe(component, inspect.getdoc(made) or "")
        component.pop("title", None)
    document = defs.pop("Document")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": ID, "title": "Perdure workflow", **document,
            "$defs": dict(sorted(defs.items()))}  # fmt: skip


def _describe(component: dict[str, Any], text: str) -> None:
    """Put a construct's own words, and those of its fields, where an editor shows them."""
    component["description"] = text.split("\n\n", 1)[0].replace("\n", " ")
    properties = component.get("properties", {})
    for names, said in re.findall(r"^\s*([a-z_, ]+): (.+?)(?=\n\s*[a-z_, ]+: |\Z)", _attributes(text), re.M | re.S):
        for name in names.split(","):
            found = properties.get(_camel(name.strip()))
            if isinstance(found, dict) and "$ref" not in found:
                found["description"] = " ".join(said.split())


def _attributes(text: str) -> str:
    return text.partition("Attributes:")[2]


def _camel(name: str) -> str:
    first, *rest = name.rstrip("_").split("_")
    return first + "".join(word.capitalize() for word in rest)
