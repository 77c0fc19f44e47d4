"""From what an agent names as its model to a model. The one place that knows which names exist."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from perdure.errors import Invalid
from perdure.ports.provider import Model
from perdure.providers.openai import ChatModel

_PREFIXES: dict[str, Callable[[str], Model]] = {"openai": ChatModel}


def prefixes() -> tuple[str, ...]:
    """What a name may begin with, before its colon."""
    return tuple(sorted(_PREFIXES))


def named(text: str) -> Model:
    """The model that ``"openai:NAME"`` names. Loads no provider library, and does not ask whether they are installed.

    Raises:
        Invalid: no model is named so; suggests the nearest prefix.
    """
    prefix, _, name = text.partition(":")
    make = _PREFIXES.get(prefix)
    if make is None or not name.strip():
        known = ", ".join(f'"{prefix}:NAME"' for prefix in prefixes())
        near = difflib.get_close_matches(prefix, _PREFIXES, 1) if name.strip() else []
        meant = f"Did you mean `{near[0]}:{name[:200]}`? " if near else ""
        raise Invalid(f"`{text[:200]}` names no model.", help=f"{meant}Known are {known}; or give a Model object.")
    return make(name)


def resolve(model: object) -> Model:
    """A model object as it is, or the model that ``"openai:NAME"`` names. Loads no provider library.

    Raises:
        Invalid: neither; or a library that the model needs is not installed.
    """
    if isinstance(model, str):
        model = named(model)
    if isinstance(model, ChatModel):
        model.require()
    if isinstance(model, type) or not isinstance(model, Model):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise Invalid(
            f"A model is needed, not {what}.", help='Give "openai:NAME" or an object with `name` and `respond`.'
        )
    return model
