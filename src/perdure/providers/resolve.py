"""From what an agent names as its model to a model. The one place that knows which names exist."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from difflib import get_close_matches

from perdure.errors import Invalid
from perdure.ports.provider import Capability, Model, profile_of
from perdure.providers._remote import RemoteModel

# prefix: what follows it, the module, and its class; a module is imported when one of its models is named
_PREFIXES: dict[str, tuple[str, str, str]] = {
    "anthropic": ("NAME", "anthropic", "MessagesModel"),
    "azure": ("DEPLOYMENT", "azure", "AzureModel"),
    "google": ("NAME", "google", "GeminiModel"),
    "openai": ("NAME", "openai", "ResponsesModel"),
    "openai-chat": ("NAME", "openai", "ChatModel"),
}
_NEEDS: dict[Capability, str] = {
    "tools": "the agent has tools",
    "structured_output": "the answer must fit a schema",
    "images": "the input holds an image",
    "files": "the input holds a file",
}


def prefixes() -> tuple[str, ...]:
    """What a name may begin with, before its colon."""
    return tuple(sorted(_PREFIXES))


def named(text: str) -> Model:
    """The model that ``"openai:NAME"`` names. Loads no provider library, and does not ask whether they are installed.

    Raises:
        Invalid: no model is named so (suggests the nearest prefix), or the model needs more than a name.
    """
    prefix, _, name = text.partition(":")
    if prefix not in _PREFIXES or not name.strip():
        known = ", ".join(f'"{prefix}:{_PREFIXES[prefix][0]}"' for prefix in prefixes())
        near = get_close_matches(prefix.lower(), _PREFIXES, 1) if name.strip() else []
        meant = f"Did you mean `{near[0]}:{name[:200]}`? " if near else ""
        raise Invalid(f"`{text[:200]}` names no model.", help=f"{meant}Known are {known}; or give a Model object.")
    _, module, made = _PREFIXES[prefix]
    model: Model = getattr(importlib.import_module(f"perdure.providers.{module}"), made)(name)
    return model


def resolve(model: object) -> Model:
    """A model object as it is, or the model that a name such as ``"openai:NAME"`` means. Loads no provider library.

    A model object of pydantic-ai is wrapped, see :class:`perdure.providers.library.LibraryModel`.

    Raises:
        Invalid: neither; or a library that the model needs is not installed.
    """
    if isinstance(model, str):
        model = named(model)
    if isinstance(model, RemoteModel):
        model.require()
    if _is_of_library(model):
        wrapped: Model = importlib.import_module("perdure.providers.library").LibraryModel(model)
        return wrapped
    if isinstance(model, type) or not isinstance(model, Model):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a value of type {type(model).__name__}"
        raise Invalid(
            f"A model is needed, not {what}.", help='Give "openai:NAME" or an object with `name` and `respond`.'
        )
    return model


def _is_of_library(model: object) -> bool:
    """Whether it is a model object of pydantic-ai, which is loaded if it is."""
    library = sys.modules.get("pydantic_ai.models")
    return library is not None and isinstance(model, library.Model)


def check(model: Model, *, tools: bool = False, structured: bool = False, files: Iterable[str] = ()) -> None:
    """Refuse a model that says it cannot do what is needed. One that declares nothing is not refused.

    Args:
        tools: tools are offered. structured: the provider itself must hold the answer to a schema.
        files: media types of the files of the input.

    Raises:
        Invalid: names the model and what it lacks.
    """
    declared = profile_of(model).capabilities
    if declared is None:
        return
    needs: set[Capability] = {"tools"} if tools else set()
    needs |= {"structured_output"} if structured else set()
    needs |= {"images" if media_type.startswith("image/") else "files" for media_type in files}
    for need in sorted(needs - declared):
        raise Invalid(
            f"Model `{model.name}` does not declare the capability `{need}`, and {_NEEDS[need]}.",
            help="Use another model, or leave that out.",
        )
