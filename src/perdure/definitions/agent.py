"""What an agent is: its types, instructions, tools and bounds. A value; ``perdure.agent`` gives it hands.

A run refers to a definition by name and digest; no record needs the definition to be read.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from perdure import canonical
from perdure.definitions.inputs import input_codec_of
from perdure.definitions.policy import Policy
from perdure.definitions.schema import Codec, codec_of
from perdure.definitions.tool import Tool, check_takes_one
from perdure.errors import Invalid
from perdure.ids import check_id
from perdure.limits import TEXT_CHARS_MAX

Instructions = str | Callable[[Any], Any]


class AgentDefinition:
    """An agent as its author wrote it. Immutable; two are the same if their digests are.

    Args:
        name: identity across deployments: printable Unicode in NFC, 1 to 256 characters.
        input: type of what a run is given. Default ``str``.
        output: type of the answer. Default ``str``.
        instructions: text of at most 65,536 characters, or a function of the input that returns it, sync or async;
            asked once per run. Default none.
        tools: tools made by ``@tool``; their names are unique.
        model: a model object, or text like ``"openai:gpt-5.6"``; optional here.
        policy: bounds of a run. Default ``Policy()``.
        disposition: function of the output that returns the application's tag on a completed run, or None.
        description: what the agent does, for people and for agents that call it.
        metadata: text to text, for the application.
        settings: settings passed to the model as they are (temperature and the like): a JSON object.

    Attributes:
        input_codec: how the input crosses.
        output_codec: how the output crosses; ``is_text`` says whether a plain text answer is one.

    Raises:
        Invalid: any of them cannot be; says which and why.
    """

    __slots__ = (
        "_by_name",
        "_digest",
        "description",
        "disposition",
        "input",
        "input_codec",
        "instructions",
        "metadata",
        "model",
        "name",
        "output",
        "output_codec",
        "policy",
        "settings",
        "tools",
    )

    def __init__(
        self,
        name: str,
        *,
        input: Any = str,
        output: Any = str,
        instructions: Instructions = "",
        tools: Iterable[Tool] = (),
        model: Any = None,
        policy: Policy | None = None,
        disposition: Callable[[Any], Any] | None = None,
        description: str = "",
        metadata: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.name: str = check_id(name, "The name of an agent")
        what = f"agent `{name}`"
        self.input: Any = input
        self.output: Any = output
        self.input_codec: Codec = input_codec_of(input, f"The input of {what}")
        self.output_codec: Codec = codec_of(output, f"The output of {what}")
        self.instructions: Instructions = _checked_instructions(what, instructions)
        self._by_name: dict[str, Tool] = _checked_tools(what, tools)
        self.tools: tuple[Tool, ...] = tuple(self._by_name.values())
        self.model: Any = _checked_model(what, model)
        self.policy: Policy = _checked_policy(what, policy)
        self.disposition: Callable[[Any], Any] | None = _checked_disposition(what, disposition)
        self.description: str = _checked_text(what, "description", description)
        self.metadata: dict[str, str] = _checked_metadata(what, metadata)
        self.settings: dict[str, Any] = _checked_settings(what, settings)
        self._digest: str = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and hasattr(self, name):
            raise AttributeError(f"{name} of agent {self.name!r} cannot be changed; make another definition.")
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def tool(self, name: str) -> Tool | None:
        """The tool a model calls ``name``, or None if the agent has no such tool."""
        return self._by_name.get(name)

    @property
    def may_wait(self) -> bool:
        """Whether a run may have to wait for a person: a tool asks approval or is of class ``once``."""
        return any(tool.approval is not False or tool.effect == "once" for tool in self.tools)

    @property
    def duration_seconds(self) -> float:
        """Seconds a run may take, by the policy and :attr:`may_wait`."""
        return self.policy.duration_seconds(waiting=self.may_wait)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of everything that makes this definition what it is; made at first use.

        Functions count by module, qualified name and, where it can be read, their source. A model counts only by a
        name given as text. A tool counts by what it promises and says, not by its body.
        """
        if not self._digest:
            self._digest = canonical.digest(self._facts())
        return self._digest

    def _facts(self) -> dict[str, Any]:
        text = self.instructions if isinstance(self.instructions, str) else None
        return {
            "name": self.name,
            "input": self.input_codec.schema(),
            "output": self.output_codec.schema(),
            "instructions": text if text is not None else _identity(self.instructions),
            "tools": [_tool_facts(tool) for tool in self.tools],
            "policy": self.policy.values(),
            "model": self.model if isinstance(self.model, str) else None,
            "disposition": _identity(self.disposition),
            "settings": self.settings,
        }


_FIXED = frozenset(AgentDefinition.__slots__) - {"_digest"}


def _tool_facts(tool: Tool) -> dict[str, Any]:
    return {
        "contract": tool.contract,
        "description": tool.description,
        "parameters": tool.parameters(),
        "risk": tool.risk,
        "timeout": tool.timeout,
        "approval": tool.approval if isinstance(tool.approval, bool) else _identity(tool.approval),
        "key": _identity(tool.key),
        "onException": tool.on_exception,
        "onFailure": tool.on_failure,
        "refusals": [f"{one.__module__}.{one.__qualname__}" for one in tool.refusals],
    }


def _identity(fn: Any) -> dict[str, Any] | None:
    """What names a function in a digest: never its address, so that two processes agree."""
    if fn is None:
        return None
    if isinstance(fn, functools.partial):
        return {"partial": _identity(fn.func), "arguments": _told([*fn.args, fn.keywords])}
    named = fn if hasattr(fn, "__qualname__") else type(fn)
    try:
        source = hashlib.sha256(inspect.getsource(named).encode()).hexdigest()
    except (OSError, TypeError, IndexError, SyntaxError):
        source = None
    return {"module": getattr(named, "__module__", None), "name": named.__qualname__, "source": source}


def _told(value: Any) -> Any:
    """A JSON value as it is, of anything else only the type."""
    try:
        return msgspec.json.decode(canonical.encode(value))
    except Invalid:
        return [type(item).__qualname__ for item in value]


def _checked_text(what: str, field: str, value: object) -> str:
    if not isinstance(value, str):
        raise Invalid(f"The {field} of {what} are a {type(value).__name__}, not text.")
    if len(value) > TEXT_CHARS_MAX:
        raise Invalid(f"The {field} of {what} have {len(value):,} characters; the limit is {TEXT_CHARS_MAX:,}.")
    canonical.encode(value, f"The {field} of {what}")
    return value


def _checked_instructions(what: str, value: Any) -> Instructions:
    if callable(value) and not isinstance(value, type):
        check_takes_one(value, f"The instructions of {what}")
        return value  # type: ignore[no-any-return]
    if not isinstance(value, str):
        raise Invalid(
            f"The instructions of {what} are a {type(value).__name__}.", help="Use text or a function of the input."
        )
    return _checked_text(what, "instructions", value)


def _checked_tools(what: str, tools: Any) -> dict[str, Tool]:
    if isinstance(tools, str) or not isinstance(tools, Iterable):
        raise Invalid(f"The tools of {what} are a {type(tools).__name__}.", help="Give a list of tools.")
    found: dict[str, Tool] = {}
    for one in tools:
        if not isinstance(one, Tool):
            name = getattr(one, "__name__", type(one).__name__)
            raise Invalid(f"`{name}` among the tools of {what} is no tool.", help="Decorate the function with @tool.")
        if one.name in found:
            raise Invalid(f"{what} has two tools named `{one.name}`.", help='Name one of them: @tool(name="...").')
        found[one.name] = one
    return found


def _checked_model(what: str, model: Any) -> Any:
    if isinstance(model, str) and not model.strip():
        raise Invalid(f"The model of {what} is blank.", help="Name one, for example 'openai:gpt-5.6', or leave it out.")
    return model


def _checked_policy(what: str, policy: Any) -> Policy:
    if policy is None:
        return Policy()
    if not isinstance(policy, Policy):
        raise Invalid(f"The policy of {what} is a {type(policy).__name__}.", help="Give a Policy(...).")
    return policy


def _checked_disposition(what: str, value: Any) -> Callable[[Any], Any] | None:
    if value is None:
        return None
    if not callable(value) or inspect.iscoroutinefunction(value):
        raise Invalid(f"The disposition of {what} is {value!r:.64}.", help="Use a function (not async) of the output.")
    check_takes_one(value, f"The disposition of {what}")
    return value  # type: ignore[no-any-return]


def _checked_metadata(what: str, value: Any) -> dict[str, str]:
    given = {} if value is None else value
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise Invalid(f"The metadata of {what} are {value!r:.64}.", help="Use a dict of text to text.")
    return dict(given)


def _checked_settings(what: str, value: Any) -> dict[str, Any]:
    given = {} if value is None else value
    if not isinstance(given, Mapping):
        raise Invalid(f"The settings of {what} are {value!r:.64}.", help="Use a dict of JSON values.")
    copied: dict[str, Any] = msgspec.json.decode(canonical.encode(dict(given), f"The settings of {what}"))
    return copied
