"""Tools: a function, what a model may say to it, and what recovery may do with it. Values only; nothing runs here.

A function becomes a :class:`Tool` once, at import; everything that can be wrong with it is said then. What is costly
(the docstring, the schemas, the contract) is made at first use and kept.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any, NoReturn, TypeVar, get_args, get_origin, overload

import msgspec

from perdure import canonical
from perdure.clock import parse_duration
from perdure.definitions import docstring, jsonschema
from perdure.definitions.schema import DECODE_ERRORS, Codec, check_limits, codec_of, dec_hook, fault_of
from perdure.errors import Invalid
from perdure.ids import check_id

EFFECTS = ("pure", "observe", "idempotent", "keyed", "once")
KINDS = (
    "pure", "internal_state", "observe", "workspace_mutate", "external_mutate", "process_execution", "network", "model",
    "remote_agent",
)  # fmt: skip
RISKS = ("low", "medium", "high", "critical")
ON_EXCEPTION = ("refused", "unknown")
ON_FAILURE = ("return", "fail")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ENVIRONMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_encode = msgspec.json.Encoder().encode

Arguments = dict[str, Any]
_Probe = TypeVar("_Probe", bound=Callable[..., Any])


class Secret:
    """A secret a tool or a model needs: where it is, not what it is. Only the name is ever stored, shown or sent.

    A tool's parameter of this type is not shown to the model; its default, a ``Secret``, supplies it::

        @tool
        async def charge(cents: int, token: Secret = Secret.env("BANK_TOKEN")) -> str: ...
    """

    __slots__ = ("_name",)

    def __init__(self, name: Any) -> None:
        if not isinstance(name, str) or not _ENVIRONMENT.fullmatch(name):
            # what was given may be the secret itself: it is not repeated
            raise Invalid(
                "A Secret names no environment variable.",
                help='Use Secret.env("NAME"): letters, digits and `_`, not beginning with a digit.',
            )
        self._name = name

    @classmethod
    def env(cls, name: str) -> Secret:
        """The secret in environment variable ``name``, read at each :meth:`reveal`.

        Raises:
            Invalid: ``name`` is no name of an environment variable.
        """
        return cls(name)

    def reveal(self) -> str:
        """The secret itself, as it is now. Do not store or print it.

        Raises:
            Invalid: the environment variable is not set or empty.
        """
        value = os.environ.get(self._name)
        if not value:
            raise Invalid(
                f"The environment variable {self._name} is not set.", help="Set it where this process is started."
            )
        return value

    def __repr__(self) -> str:
        return f"Secret(env:{self._name})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._name == self._name

    def __hash__(self) -> int:
        return hash((Secret, self._name))


class ToolContext:
    """What a running tool knows about its call. A tool gets it by annotating a parameter with this type.

    Make one with keywords to call a tool in a test.

    Attributes:
        key: the stable idempotency key of this call: the same after a crash, a retry or a verdict. Give it to the
            outside.
        thread: id of the thread.
        run: id of the run.
        call: the call's place within the run, ``"turn.position"``.
        services: what the registration's services made for this attempt, or None.
    """

    key: str
    thread: str
    run: str
    call: str
    services: Any
    _until: datetime | None = None

    def __init__(
        self,
        *,
        key: str = "",
        thread: str = "",
        run: str = "",
        call: str = "",
        deadline: datetime | None = None,
        services: Any = None,
    ) -> None:
        self.key = key
        self.thread = thread
        self.run = run
        self.call = call
        self.services = services
        self._until = deadline

    @property
    def deadline(self) -> datetime | None:
        """When the run ends at the latest, as an aware UTC datetime; None where there is no bound."""
        return self._until

    def progress(self, message: str) -> None:
        """Tell whoever watches the run how far the call is. Recorded nowhere; nobody may watch."""

    async def step(self, name: str, fn: Callable[..., Any], *args: Any, effect: str | None = None) -> Any:
        """Run ``fn(*args)`` as a named durable step and return its recorded value.

        A step that is recorded returns its value without running. One that is not may execute again after a crash;
        ``effect="once"`` makes it unknown instead.

        Args:
            name: unique within the call.
            fn: function, sync or async.
            effect: None or ``"once"``.

        Raises:
            Invalid: not in a ``steps=True`` tool, a repeated name, a result that does not round-trip.
        """
        _no_steps("step")

    def step_key(self, name: str) -> str:
        """The idempotency key of the step ``name`` of this call: stable, to be given to the outside.

        Raises:
            Invalid: not in a ``steps=True`` tool.
        """
        _no_steps("step_key")


def _no_steps(what: str) -> NoReturn:
    raise Invalid(
        f"ctx.{what} exists only in a `steps=True` tool.",
        help="Declare it with @tool(steps=True); its body is then entered again after a crash.",
    )


@dataclass(frozen=True, slots=True)
class _Parameter:
    """One parameter the model sees."""

    name: str
    codec: Codec
    required: bool
    default: Any
    default_json: bytes | None  # None: required, or a default that does not fit the type and so is not shown
    note: str  # description found in the annotation


@dataclass(frozen=True, slots=True)
class _Signature:
    """What the parameters and annotations of a function say."""

    parameters: tuple[_Parameter, ...]
    result: Codec
    context_parameter: str | None
    secrets: frozenset[str]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Tool:
    """A function a model may call, made by :func:`tool`. Immutable, but for the probe that may be set once.

    Calling it calls the function.

    Attributes:
        fn: the function.
        name: as the model sees it; ``[A-Za-z0-9_-]``, 1 to 64 characters.
        effect: the class: what recovery may do with a started call without an outcome; see :func:`tool`.
        kind: what it touches.
        risk: ``"low" | "medium" | "high" | "critical"``.
        timeout: seconds a call may take, or None.
        steps: whether its effect is divided into named durable steps.
        approval: whether a person is asked first; or a function of the decoded arguments that says so.
        version: the declared version, ``""`` when none.
        key: function of the decoded arguments that names the business object, or None.
        on_exception: what an exception that says nothing of its own means: ``"refused"`` or ``"unknown"``.
        on_failure: ``"return"`` shows a failure to the model, ``"fail"`` fails the run.
        refusals: exception types that mean it definitely did not happen.
        is_async: whether ``fn`` is a coroutine function; others run in a thread.
        context_parameter: name of the parameter that gets the ``ToolContext``, or None.
        secrets: names of the parameters of type ``Secret``; never shown, never in the arguments.
        result_codec: how its result crosses.
        probe_fn: function asked about a call of unknown outcome, or None.
    """

    fn: Callable[..., Any]
    name: str
    effect: str
    kind: str
    risk: str
    timeout: float | None
    steps: bool
    approval: bool | Callable[[Arguments], Any]
    version: str
    key: Callable[[Arguments], str] | None
    on_exception: str
    on_failure: str
    refusals: tuple[type[Exception], ...]
    is_async: bool
    context_parameter: str | None
    secrets: frozenset[str]
    result_codec: Codec
    _parameters: tuple[_Parameter, ...]
    _decoder: msgspec.json.Decoder[Any]
    _description: str | None
    _kept: dict[str, Any] = field(default_factory=dict)  # what is made at first use, and the probe

    def __repr__(self) -> str:
        return f"<Tool {self.name} {self.effect}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, as if it were not decorated."""
        return self.fn(*args, **kwargs)

    @property
    def description(self) -> str:
        """What the model is told: as declared, else the docstring without its sections; ``""`` if there is none."""
        return self._description if self._description is not None else self._docstring().text

    @property
    def contract(self) -> str:
        """Replay contract: a digest of what a pending call relies on.

        Name, schemas of parameters and result without descriptions, class, kind, steps and the declared version. A
        call recorded under another contract is not run again by this tool.
        """
        contract: str = self._keep("contract", self._make_contract)
        return contract

    @property
    def probe_fn(self) -> Callable[..., Any] | None:
        """The function that :meth:`probe` registered, or None."""
        return self._kept.get("probe")

    def probe(self, fn: _Probe) -> _Probe:
        """Register the function asked when a crash hides the outcome of a call: decorator, once.

        It gets an ``UnknownCall`` and returns a verdict or ``StillUnknown``; sync or async. It must change nothing.

        Raises:
            Invalid: not a function of one argument, or there is one already.
        """
        check_takes_one(fn, f"The probe of tool `{self.name}`")
        if "probe" in self._kept:
            raise Invalid(f"Tool `{self.name}` has a probe already.", help="Register one function only.")
        self._kept["probe"] = fn
        return fn

    def parameters(self) -> jsonschema.Schema:
        """JSON Schema of the arguments object, descriptions included. Do not change it.

        Descriptions come from the docstring's ``Args:`` section, else from the annotation.
        """
        schema: jsonschema.Schema = self._keep("parameters", self._make_parameters)
        return schema

    def decode_arguments(self, raw: str | bytes) -> Arguments:
        """Validated arguments, ready for ``fn(**arguments)``: defaults filled in, context and secrets not.

        Args:
            raw: what the model wrote; blank means no arguments.

        Raises:
            Invalid: it does not fit; the message tells the model which argument and why.
        """
        given = self._decode(raw)
        return {one.name: given.get(one.name, one.default) for one in self._parameters}

    def arguments_json(self, raw: str | bytes) -> bytes:
        """Plain JSON of the validated arguments in their one form: declared order, defaults filled in.

        Equal arguments give equal bytes, however the model wrote them; approvals are bound to these.

        Raises:
            Invalid: as :meth:`decode_arguments`.
        """
        given = self._decode(raw)
        out = {}
        for one in self._parameters:
            body = one.codec.write(given[one.name]) if one.name in given else one.default_json
            if body is not None:
                out[one.name] = msgspec.Raw(body)
        return _encode(out)

    def _decode(self, raw: str | bytes) -> Arguments:
        try:
            body = raw if isinstance(raw, bytes) else raw.encode()
        except UnicodeEncodeError as error:
            raise self._misfit("$", "they hold a lone surrogate, which is not Unicode text") from error
        if not body.strip():
            body = b"{}"
        check_limits(body, f"The arguments of `{self.name}`")
        try:
            fields = self._decoder.decode(body)
        except DECODE_ERRORS as error:
            raise self._misfit(*fault_of(error)) from error
        given = {}
        for one in self._parameters:
            part = getattr(fields, one.name)
            if part is msgspec.UNSET:
                continue
            try:
                given[one.name] = one.codec.read(bytes(part)) if type(part) is msgspec.Raw else part
            except DECODE_ERRORS as error:
                raise self._misfit(*fault_of(error, f"$.{one.name}")) from error
        return given

    def _misfit(self, path: str, why: str) -> Invalid:
        if path != "$":
            return Invalid(f"Argument `{path[2:]}` of `{self.name}`: {why}.")
        names = ", ".join(f"`{one.name}`{'' if one.required else ' (optional)'}" for one in self._parameters)
        return Invalid(f"The arguments of `{self.name}` do not fit: {why}.", help=f"It takes {names or 'none'}.")

    def _keep(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def _docstring(self) -> docstring.Parsed:
        parsed: docstring.Parsed = self._keep("docstring", lambda: docstring.parse(self.fn.__doc__))
        return parsed

    def _make_contract(self) -> str:
        return canonical.digest({
            "name": self.name,
            "parameters": jsonschema.without(self._bare_parameters(), ("description",)),
            "result": jsonschema.without(self.result_codec.schema(), ("description",)),
            "class": self.effect,
            "kind": self.kind,
            "steps": self.steps,
            "version": self.version,
        })  # fmt: skip

    def _bare_parameters(self) -> jsonschema.Schema:
        properties: dict[str, jsonschema.Schema] = {}
        defs: jsonschema.Schema = {}
        for one in self._parameters:
            schema = jsonschema.hoist(jsonschema.without(one.codec.schema(), ()), defs)
            if one.note:
                schema.setdefault("description", one.note)
            if one.default_json is not None:
                schema["default"] = msgspec.json.decode(one.default_json)
            properties[one.name] = schema
        out: jsonschema.Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        required = [one.name for one in self._parameters if one.required]
        if required:
            out["required"] = required
        if defs:
            out["$defs"] = defs
        return out

    def _make_parameters(self) -> jsonschema.Schema:
        schema = self._bare_parameters()
        for name, text in self._docstring().parameters.items():
            if name in schema["properties"]:
                schema["properties"][name]["description"] = text
        return schema


@overload
def tool(fn: Callable[..., Any], /) -> Tool: ...
@overload
def tool(
    *,
    effect: str | None = None,
    kind: str | None = None,
    risk: str = "medium",
    timeout: str | float | timedelta | None = None,
    steps: bool = False,
    approval: bool | Callable[[Arguments], Any] = False,
    version: str = "",
    key: Callable[[Arguments], str] | None = None,
    on_exception: str = "refused",
    on_failure: str = "return",
    refusals: Iterable[type[Exception]] = (),
    name: str | None = None,
    description: str | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(fn: Callable[..., Any] | None = None, /, **options: Any) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a tool: ``@tool`` or ``@tool(effect=..., ...)``.

    Parameters, schema and descriptions come from the signature, annotations and (Google style) docstring. A parameter
    annotated ``ToolContext`` gets the context of the call; parameters of type ``Secret`` get their default. Neither is
    shown to the model. Sync functions run in a thread.

    Args:
        fn: the function, sync or async.
        effect: what recovery may do when a call was started and nobody knows its outcome. ``"once"`` (default): ask a
            probe, else the outcome is unknown, never a silent repeat. ``"keyed"``: run again with the same key, on
            which the remote de-duplicates. ``"idempotent"``: run again, the same input is harmless. ``"observe"``:
            reads only. ``"pure"``: touches nothing.
        kind: what it touches: ``"pure" | "internal_state" | "observe" | "workspace_mutate" | "external_mutate" |
            "process_execution" | "network" | "model" | "remote_agent"``. Default ``"external_mutate"``; ``"observe"``
            and ``"pure"`` for these effects.
        risk: ``"low" | "medium" | "high" | "critical"``. Default ``"medium"``.
        timeout: seconds, a ``timedelta`` or text like ``"30s"`` that one call may take. Default None: the run's end.
        steps: the function divides its effect into named durable steps with ``ctx.step``; recovery enters it again.
            Not together with ``effect``.
        approval: ask a person before a call runs: True, or a function of the decoded arguments that returns whether
            to. Default False.
        version: declared version of the behaviour; changing it keeps pending calls of the old one from running again.
        key: function of the decoded arguments that returns text naming the business object. A second call with the
            key of a call whose outcome is unknown is refused.
        on_exception: what an exception means that does not say itself whether it happened. ``"refused"`` (default):
            it did not, except for timeouts, lost connections and the like; ``"unknown"``: nobody knows.
        on_failure: ``"return"`` (default): the model sees the failure; ``"fail"``: the run fails.
        refusals: exception types that mean it definitely did not happen.
        name: as the model sees it. Default: the function's name.
        description: what the model is told. Default: the docstring without its sections.

    Raises:
        Invalid: the function or an option cannot be; says which and what is legal.
    """
    return _make(fn, **options) if fn is not None else functools.partial(_make, **options)


def _make(  # noqa: PLR0913
    fn: Callable[..., Any],
    *,
    effect: str | None = None,
    kind: str | None = None,
    risk: str = "medium",
    timeout: str | float | timedelta | None = None,
    steps: bool = False,
    approval: bool | Callable[[Arguments], Any] = False,
    version: str = "",
    key: Callable[[Arguments], str] | None = None,
    on_exception: str = "refused",
    on_failure: str = "return",
    refusals: Iterable[type[Exception]] = (),
    name: str | None = None,
    description: str | None = None,
) -> Tool:
    name = _checked_name(fn, name)
    what = f"tool `{name}`"
    if effect is not None and steps:
        raise Invalid(
            f"{what} has `effect=` beside `steps=True`.",
            help='Its steps carry their own: ctx.step(..., effect="once"). Leave `effect=` out.',
        )
    effect = _choice(what, "effect", "once" if effect is None else effect, EFFECTS)
    default_kind = effect if effect in ("pure", "observe") else "external_mutate"
    signature = _read_signature(fn, what)
    return Tool(
        fn=fn,
        name=name,
        effect=effect,
        kind=_choice(what, "kind", default_kind if kind is None else kind, KINDS),
        risk=_choice(what, "risk", risk, RISKS),
        timeout=_checked_timeout(what, timeout),
        steps=_checked_bool(what, "steps", steps),
        approval=approval if isinstance(approval, bool) else _checked_function(what, "approval", approval),
        version=check_id(version, f"The version of {what}") if version != "" else "",
        key=None if key is None else _checked_function(what, "key", key),
        on_exception=_choice(what, "on_exception", on_exception, ON_EXCEPTION),
        on_failure=_choice(what, "on_failure", on_failure, ON_FAILURE),
        refusals=_checked_refusals(what, refusals),
        is_async=inspect.iscoroutinefunction(fn),
        context_parameter=signature.context_parameter,
        secrets=signature.secrets,
        result_codec=signature.result,
        _parameters=signature.parameters,
        _decoder=_arguments_decoder(signature.parameters),
        _description=_checked_description(what, description),
    )


# ---------------------------------------------------------------------------------------------- options


def _checked_name(fn: object, name: object) -> str:
    if not inspect.isroutine(fn):
        raise Invalid(
            f"A tool is made of a function, not of a {type(fn).__name__}.", help="Decorate a `def` or `async def`."
        )
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise Invalid(f"tool `{fn.__name__}` is a generator.", help="Return the result instead of yielding it.")
    found = getattr(fn, "__name__", "") if name is None else name
    if not isinstance(found, str) or not _NAME.fullmatch(found):
        raise Invalid(
            f"The name of a tool is {found!r:.80}.",
            help="Use 1 to 64 of the letters A-Z, a-z, digits, `_` and `-`; name= gives another than the function's.",
        )
    return found


def _choice(what: str, option: str, value: object, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise Invalid(f"{what} has {option}={value!r:.64}.", help=f"Use one of {listed}.")
    return value


def _checked_bool(what: str, option: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise Invalid(f"{what} has {option}={value!r:.64}.", help="Use True or False.")
    return value


def _checked_timeout(what: str, value: str | float | timedelta | None) -> float | None:
    if value is None:
        return None
    seconds = parse_duration(value, f"The timeout of {what}")
    if seconds == 0:
        raise Invalid(f"The timeout of {what} is zero.", help="Use a time above zero, or None for no bound.")
    return seconds


def _checked_function(what: str, option: str, value: Any) -> Callable[[Arguments], Any]:
    if not callable(value) or isinstance(value, type) or inspect.iscoroutinefunction(value):
        raise Invalid(
            f"{what} has {option}={value!r:.64}.", help="Use a function (not async) of the dict of decoded arguments."
        )
    check_takes_one(value, f"The {option}= of {what}")
    return typing.cast("Callable[[Arguments], Any]", value)


def check_takes_one(fn: object, what: str) -> None:
    """For this package: raise unless ``fn`` can be called with one positional argument."""
    if not callable(fn):
        raise Invalid(f"{what} is a {type(fn).__name__}, not a function.")
    try:
        inspect.signature(fn).bind(None)
    except TypeError:
        raise Invalid(f"{what} does not take exactly one argument.") from None
    except ValueError:
        pass  # a builtin that does not tell


def _checked_refusals(what: str, value: object) -> tuple[type[Exception], ...]:
    types = tuple(value) if isinstance(value, Iterable) else (value,)
    for one in types:
        if not isinstance(one, type) or not issubclass(one, Exception):
            raise Invalid(
                f"{what} has {one!r:.64} in refusals=.", help="List exception types, for example (CardDeclined,)."
            )
    return types


def _checked_description(what: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise Invalid(f"The description of {what} is a {type(value).__name__}, not text.")
    return value


# ---------------------------------------------------------------------------------------------- signature


def _read_signature(fn: Callable[..., Any], what: str) -> _Signature:
    hints = _hints(fn, what)
    parameters: list[_Parameter] = []
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
    return _Signature(tuple(parameters), result, contexts[0] if contexts else None, frozenset(secrets))


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


def _read_parameter(one: inspect.Parameter, hint: Any, what: str) -> _Parameter:
    codec = codec_of(hint, f"Parameter `{one.name}` of {what}")
    note = ""
    if get_origin(hint) is Annotated:
        note = next((item for item in hint.__metadata__ if isinstance(item, str)), "")
    if one.default is one.empty:
        return _Parameter(one.name, codec, True, None, None, note)
    try:
        default_json = codec.encode(one.default)
    except Invalid:
        default_json = None
    return _Parameter(one.name, codec, False, one.default, default_json, note)


def _arguments_decoder(parameters: tuple[_Parameter, ...]) -> msgspec.json.Decoder[Any]:
    fields: list[Any] = []
    for one in parameters:
        kind = one.codec.type if one.codec.is_native else msgspec.Raw
        fields.append((one.name, kind) if one.required else (one.name, kind, msgspec.UNSET))
    # named parts, never positions: a missing one must be told from a wrong one
    struct = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(struct, dec_hook=dec_hook)
