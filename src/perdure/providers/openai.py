"""Models behind OpenAI's wire formats: Responses, and Chat Completions with the many servers that speak it.

Importing this module loads no provider library. They are loaded (in a thread: it takes seconds) by the first call.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from perdure.definitions.context import Secret
from perdure.errors import Invalid
from perdure.ports.provider import Capability
from perdure.providers._remote import RemoteModel, Target
from perdure.rules.accounting import Price, Rate

__all__ = ["ChatModel", "ResponsesModel"]

Continuation = Literal["stateless", "stored", "none"]
Output = Literal["native", "prompted"]
OPENAI = "https://api.openai.com/v1"
CONTINUATIONS = ("stateless", "stored", "none")
OUTPUTS = ("native", "prompted")
_OPENAI_API_KEY = Secret.env("OPENAI_API_KEY")
_COMMON: frozenset[Capability] = frozenset(
    {"tools", "parallel_tools", "reasoning", "reasoning_effort", "streaming", "images", "files", "usage"}
)


class ChatModel(RemoteModel):
    """A model of an OpenAI-compatible Chat Completions server.

    One call is one HTTP request: the client's own retries are off, whether to repeat is the engine's decision. Works
    in several event loops at once; each has its own connections, closed when the loop shuts down.

    Args:
        name: the model as the server knows it, for example ``"gpt-5.6"``.
        base_url: the server, for example ``"http://127.0.0.1:11434/v1"``; by default the environment variable
            ``OPENAI_BASE_URL``, else OpenAI.
        api_key: where the key comes from; read at each call and never stored or shown. None for a server without keys.
        settings: default settings (``temperature``, ``max_tokens``, ``reasoning_effort``, ...), under those of the
            request. Names are those of pydantic-ai's ``OpenAIChatModelSettings``, without the ones that would retry or
            bound time; ``reasoning_effort`` is one of "none", "minimal", "low", "medium", "high", "xhigh", "max".
        output: how a structured answer is asked for: ``"native"`` gives the schema to the server, which holds the
            answer to it; ``"prompted"`` asks in words, which every server understands. By default native at OpenAI's
            own address, else prompted.
        price: what tokens cost; by default OpenAI's price where OpenAI is asked, else unknown.
        rate: how often it may be called by all processes on one database together; None for no bound of ours.

    Raises:
        Invalid: a blank name, a ``base_url`` that is no http(s) address or holds a password, a key given as text, an
            unknown ``output``.
    """

    format_module = "_openai"
    libraries = ("httpx2", "openai", "pydantic_ai")
    prefix = "openai-chat"
    prices_as = "openai"
    address_variable = "OPENAI_BASE_URL"
    address_default = OPENAI

    def __init__(
        self,
        name: str,
        base_url: str | None = None,
        api_key: Secret | None = _OPENAI_API_KEY,
        settings: Mapping[str, Any] | None = None,
        *,
        output: Output | None = None,
        price: Price | None = None,
        rate: Rate | None = None,
    ) -> None:
        check_name(name)
        official = base_url is None and "OPENAI_BASE_URL" not in os.environ
        options, able = chat_options(f"openai-chat:{name}", output, official=official)
        target = Target(f"openai-chat:{name}", name, "chat", base_url, options)
        super().__init__(target, api_key, settings, price, rate, able)
        self._official = official

    def _prices_as(self) -> str:
        return "openai" if self._official else ""


class ResponsesModel(RemoteModel):
    """A model of OpenAI's Responses API, or of a server that speaks it.

    One call is one HTTP request. What the model reasoned is kept from turn to turn by ``continuation``:

    - ``"stateless"``: nothing is stored at the provider; reasoning comes back encrypted, is recorded with the turn, and
      is given back with the whole conversation. Reasoning that was recorded without its encrypted content is refused
      before anything is sent (kind ``model.continuation``).
    - ``"stored"``: the provider stores each response; the next call names the last one and sends only what is new. The
      whole conversation is sent when the last answer is another model's, or when what came before it has changed.
    - ``"none"``: nothing is stored, and reasoning is left behind.

    With ``Request.use_continuation`` False, each of them sends the whole conversation without reasoning.

    Args:
        name: the model as the server knows it, for example ``"gpt-5.6"``.
        base_url: the server; by default the environment variable ``OPENAI_BASE_URL``, else OpenAI.
        api_key: where the key comes from; read at each call and never stored or shown. None for a server without keys.
        settings: default settings, under those of the request. Names are those of pydantic-ai's
            ``OpenAIResponsesModelSettings``, without those that decide where the conversation is kept, retry, or bound
            time; and ``reasoning_effort`` ("none" to "max").
        continuation: see above.
        encrypted_reasoning: whether the model gives its reasoning encrypted; by default told by its name.
        output: as with :class:`ChatModel`; native by default.
        price: what tokens cost; by default OpenAI's price where OpenAI is asked, else unknown.
        rate: how often it may be called by all processes on one database together; None for no bound of ours.

    Raises:
        Invalid: a blank name, a ``base_url`` that is no http(s) address or holds a password, a key given as text, an
            unknown ``continuation`` or ``output``.
    """

    format_module = "_openai"
    libraries = ("httpx2", "openai", "pydantic_ai")
    prefix = "openai"
    address_variable = "OPENAI_BASE_URL"
    address_default = OPENAI

    def __init__(
        self,
        name: str,
        base_url: str | None = None,
        api_key: Secret | None = _OPENAI_API_KEY,
        settings: Mapping[str, Any] | None = None,
        continuation: Continuation = "stateless",
        *,
        encrypted_reasoning: bool | None = None,
        output: Output | None = None,
        price: Price | None = None,
        rate: Rate | None = None,
    ) -> None:
        check_name(name)
        self._official = base_url is None and "OPENAI_BASE_URL" not in os.environ
        options, able = responses_options(f"openai:{name}", continuation, encrypted_reasoning, output)
        target = Target(f"openai:{name}", name, "responses", base_url, options)
        super().__init__(target, api_key, settings, price, rate, able)

    def _prices_as(self) -> str:
        return "openai" if self._official else ""


_NONE: frozenset[Capability] = frozenset()
_STRUCTURED: frozenset[Capability] = frozenset({"structured_output"})
_CACHING: frozenset[Capability] = frozenset({"prompt_caching"})
_CONTINUES: dict[str, frozenset[Capability]] = {
    "stateless": frozenset({"stateless_continuation"}),
    "stored": frozenset({"stored_continuation"}),
    "none": _NONE,
}


def check_name(name: object) -> None:
    """A name that a provider may know.

    Raises:
        Invalid: it is blank.
    """
    if not isinstance(name, str) or not name.strip():
        raise Invalid("The name of a model is blank.")


def native_of(name: str, output: str | None, default: bool) -> bool:
    """Whether the provider itself holds an answer to its schema.

    Raises:
        Invalid: ``output`` is neither "native" nor "prompted".
    """
    if output is not None and output not in OUTPUTS:
        raise Invalid(f"The output of model `{name}` is {output!r:.64}.", help='Use "native" or "prompted".')
    return default if output is None else output == "native"


def chat_options(
    name: str, output: str | None, *, official: bool
) -> tuple[tuple[tuple[str, Any], ...], frozenset[Capability]]:
    """The options of a Chat Completions target, and what such a model can do.

    Args:
        official: whether OpenAI or Azure is asked; others may refuse what they do not know.

    Raises:
        Invalid: an unknown ``output``.
    """
    native = native_of(name, output, official)
    able = _COMMON | (_STRUCTURED if native else _NONE) | (_CACHING if official else _NONE)
    return (("native", native), ("prompt_cache_key", official)), able


def responses_options(
    name: str, continuation: str, encrypted_reasoning: bool | None, output: str | None
) -> tuple[tuple[tuple[str, Any], ...], frozenset[Capability]]:
    """The options of a Responses target, and what such a model can do.

    Raises:
        Invalid: an unknown ``continuation`` or ``output``.
    """
    if continuation not in CONTINUATIONS:
        raise Invalid(
            f"The continuation of model `{name}` is {continuation!r:.64}.",
            help='Use "stateless", "stored" or "none".',
        )
    native = native_of(name, output, True)
    options = (
        ("native", native),
        ("prompt_cache_key", True),
        ("continuation", continuation),
        ("encrypted_reasoning", encrypted_reasoning),
    )
    return options, _COMMON | _CACHING | _CONTINUES[continuation] | (_STRUCTURED if native else _NONE)
