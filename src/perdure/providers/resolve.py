"""From what an agent names as its model to a model. The one place that knows which names exist."""

from __future__ import annotations

from collections.abc import Callable

from perdure.errors import Invalid
from perdure.ports.provider import Model
from perdure.providers.openai import ChatModel

_PREFIXES: dict[str, Callable[[str], Model]] = {"openai": ChatModel}


def resolve(model: object) -> Model:
    """A model object as it is, or the model that ``"openai:NAME"`` names. Loads no provider library.

    Raises:
        Invalid: neither; or a library that the model needs is not installed.
    """
    if isinstance(model, str):
        prefix, _, name = model.partition(":")
        make = _PREFIXES.get(prefix)
        if make is None or not name.strip():
            known = ", ".join(f'"{prefix}:NAME"' for prefix in sorted(_PREFIXES))
            raise Invalid(f"`{model[:200]}` names no model.", help=f"Known are {known}; or give a Model object.")
        model = make(name)
    if isinstance(model, ChatModel):
        model.require()
    if isinstance(model, type) or not isinstance(model, Model):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise Invalid(
            f"A model is needed, not {what}.", help='Give "openai:NAME" or an object with `name` and `respond`.'
        )
    return model
