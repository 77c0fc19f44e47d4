"""What the parameters and annotations of a function say. Pure; a docstring is not read here."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import msgspec

from perdure.definitions.context import Secret, ToolContext
from perdure.definitions.schema import Codec, codec_of, dec_hook
from perdure.errors import Invalid


class Parameter(msgspec.Struct, frozen=True):
    """One parameter the model sees."""

    name: str
    codec: Codec
    required: bool
    default: Any
    default_json: bytes | None  # None: required, or a default that does not fit the type and so is not shown
    note: str  # description found in the annotation


class Signature(msgspec.Struct, frozen=True):
    """What the parameters and annotations of a function say."""

    parameters: tuple[Parameter, ...]
    result: Codec
    context_parameter: str | None
    secrets: frozenset[str]


def read_signature(fn: Callable[..., Any], what: str) -> Signature:
    hints = _hints(fn, what)
    parameters: list[Parameter] = []
    contexts: list[str] = []
    secrets: set[str] = set()
    for one in inspect.signature(fn).parameters.values():
        _check_parameter(one, what)
        hint = hints.get(one.name, Any)
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if isinstance(bare, type) and issubclass(bare, ToolContext):
            contexts.append(one.name)
        elif bare is Secret:
            secrets.add(_checked_secret(one, what))
        else:
            parameters.append(_read_parameter(one, hint, what))
    if len(contexts) > 1:
        raise Invalid(f"{what} has two context parameters: `{'`, `'.join(contexts)}`.", help="Keep one.")
    result = codec_of(hints.get("return", Any), f"The result of {what}")
    return Signature(tuple(parameters), result, contexts[0] if contexts else None, frozenset(secrets))


def _hints(fn: Callable[..., Any], what: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn, include_extras=True)
    except (NameError, TypeError, SyntaxError, AttributeError, ValueError) as error:
        missing = getattr(error, "name", None)
        noted = getattr(fn, "__annotations__", {}).items()
        where = [name for name, text in noted if isinstance(text, str) and missing and missing in text]
        whose = f" of `{where[0]}`" if where else ""
        raise Invalid(
            f"An annotation{whose} of {what} cannot be resolved: {error}.",
            help="Import or define the type at module level, not under `if TYPE_CHECKING:` or inside a function.",
        ) from error


def _check_parameter(one: inspect.Parameter, what: str) -> None:
    if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
        stars = "*" if one.kind is one.VAR_POSITIONAL else "**" if one.kind is one.VAR_KEYWORD else ""
        shown = stars + one.name
        raise Invalid(
            f"Parameter `{shown}` of {what} cannot be named by a model.",
            help="Give each argument a parameter of its own that takes a keyword.",
        )
    if one.name.startswith("__") or one.name == "self":
        raise Invalid(f"Parameter `{one.name}` of {what} cannot be.", help="Decorate a plain function, not a method.")
    if type(one.default).__name__ == "FieldInfo":
        raise Invalid(
            f"Parameter `{one.name}` of {what} has a Field as its default.",
            help="Write `Annotated[type, Field(...)]`, and the default itself behind `=`.",
        )


def _checked_secret(one: inspect.Parameter, what: str) -> str:
    if not isinstance(one.default, Secret):
        raise Invalid(
            f"Parameter `{one.name}` of {what} is a Secret without a default.",
            help=f'Say where it is: `{one.name}: Secret = Secret.env("NAME")`.',
        )
    return one.name


def _read_parameter(one: inspect.Parameter, hint: Any, what: str) -> Parameter:
    codec = codec_of(hint, f"Parameter `{one.name}` of {what}")
    note = ""
    if get_origin(hint) is Annotated:
        note = next((item for item in hint.__metadata__ if isinstance(item, str)), "")
    if one.default is one.empty:
        return Parameter(one.name, codec, True, None, None, note)
    try:
        default_json = codec.encode(one.default)
    except Invalid:
        default_json = None
    return Parameter(one.name, codec, False, one.default, default_json, note)


def arguments_decoder(parameters: tuple[Parameter, ...]) -> msgspec.json.Decoder[Any]:
    fields: list[Any] = []
    for one in parameters:
        kind = one.codec.type if one.codec.is_native else msgspec.Raw
        fields.append((one.name, kind) if one.required else (one.name, kind, msgspec.UNSET))
    # named parts, never positions: a missing one must be told from a wrong one
    struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(struct, dec_hook=dec_hook)
