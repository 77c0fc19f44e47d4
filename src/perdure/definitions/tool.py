"""Tools: a function, what a model may say to it, and what recovery may do with it. Values only; nothing runs here.

A function becomes a :class:`Tool` once, at import; everything that can be wrong with it is said then. What is costly
(the docstring, the schemas, the contract) is made at first use and kept.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, overload

import msgspec

from perdure import canonical
from perdure.definitions import docstring, jsonschema
from perdure.definitions.context import Secret, ToolContext
from perdure.definitions.policy import positive_seconds
from perdure.definitions.schema import DECODE_ERRORS, Codec, check_limits, fault_of
from perdure.definitions.signature import Parameter, arguments_decoder, read_signature
from perdure.errors import Invalid
from perdure.ids import check_id

__all__ = ["EFFECTS", "KINDS", "RISKS", "Secret", "Tool", "ToolContext", "tool"]

EFFECTS = ("pure", "observe", "idempotent", "keyed", "once")
KINDS = (
    "pure", "internal_state", "observe", "workspace_mutate", "external_mutate", "process_execution", "network", "model",
    "remote_agent",
)  # fmt: skip
RISKS = ("low", "medium", "high", "critical")
ON_EXCEPTION = ("refused", "unknown")
ON_FAILURE = ("return", "fail")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_encode = msgspec.json.Encoder().encode

Arguments = dict[str, Any]
_Probe = TypeVar("_Probe", bound=Callable[..., Any])


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
    _parameters: tuple[Parameter, ...]
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


def _make(
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
    signature = read_signature(fn, what)
    return Tool(
        fn=fn,
        name=name,
        effect=effect,
        kind=_choice(what, "kind", default_kind if kind is None else kind, KINDS),
        risk=_choice(what, "risk", risk, RISKS),
        timeout=None if timeout is None else positive_seconds(timeout, f"The timeout of {what}"),
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
        _decoder=arguments_decoder(signature.parameters),
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
    help = "List exception types, for example (CardDeclined,)."
    if not isinstance(value, Iterable):
        raise Invalid(f"{what} has refusals={value!r:.64}.", help=help)
    types = tuple(value)
    for one in types:
        if not isinstance(one, type) or not issubclass(one, Exception):
            raise Invalid(f"{what} has {one!r:.64} in refusals=.", help=help)
    return types


def _checked_description(what: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise Invalid(f"The description of {what} is a {type(value).__name__}, not text.")
    return value
