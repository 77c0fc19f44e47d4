"""Models behind Anthropic's Messages API. Importing this module loads no provider library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from perdure.definitions.context import Secret
from perdure.ports.provider import Capability
from perdure.providers._remote import RemoteModel, Target
from perdure.providers.openai import Output, check_name, native_of
from perdure.rules.accounting import Price, Rate

__all__ = ["MessagesModel"]

_ABLE: frozenset[Capability] = frozenset(
    {
        "tools",
        "parallel_tools",
        "reasoning",
        "reasoning_effort",
        "streaming",
        "images",
        "files",
        "prompt_caching",
        "stateless_continuation",
        "usage",
    }
)
_STRUCTURED: frozenset[Capability] = frozenset({"structured_output"})
# Families that the provider does not hold to a schema.
_PROMPTED = ("claude-2", "claude-3", "claude-opus-4-0", "claude-opus-4-2", "claude-sonnet-4-0", "claude-sonnet-4-2")
_ANTHROPIC_API_KEY = Secret.env("ANTHROPIC_API_KEY")


class MessagesModel(RemoteModel):
    """A Claude model, by the Messages API.

    Every answer is streamed over the wire, also where nobody follows it: only so do arguments arrive as they were
    written. Thinking goes back to the same model, signed as it came.

    Args:
        name: the model as Anthropic knows it, for example ``"claude-opus-5"``.
        base_url: the server; by default the environment variable ``ANTHROPIC_BASE_URL``, else Anthropic.
        api_key: where the key comes from; read at each call and never stored or shown. None for a server without keys.
        settings: default settings, under those of the request: ``max_tokens`` (by default the model's own maximum),
            ``temperature``, ``reasoning_effort``, ``anthropic_cache_instructions`` and the like. Names are those of
            pydantic-ai's ``AnthropicModelSettings``, without the ones that would retry or bound time.
        price: what tokens cost; by default Anthropic's price where Anthropic is asked, else unknown.
        rate: how often it may be called by all processes on one database together, None for no bound of ours.
        output: how an answer of a schema is asked for: ``"native"`` lets Anthropic hold it to the schema, ``"prompted"``
            asks in the instructions; by default native, but for models before Claude 4.1.

    Raises:
        Invalid: a blank name, a ``base_url`` that is no http(s) address or holds a password, a key given as text, an
            unknown ``output``.
    """

    format_module = "_anthropic"
    libraries = ("httpx2", "anthropic", "pydantic_ai")
    prefix = "anthropic"
    address_variable = "ANTHROPIC_BASE_URL"
    address_default = "https://api.anthropic.com"

    def __init__(
        self,
        name: str,
        base_url: str | None = None,
        api_key: Secret | None = _ANTHROPIC_API_KEY,
        settings: Mapping[str, Any] | None = None,
        *,
        output: Output | None = None,
        price: Price | None = None,
        rate: Rate | None = None,
    ) -> None:
        check_name(name)
        native = native_of(f"anthropic:{name}", output, not name.startswith(_PROMPTED))
        target = Target(f"anthropic:{name}", name, "", base_url, (("native", native),))
        super().__init__(target, api_key, settings, price, rate, _ABLE | _STRUCTURED if native else _ABLE)
        self._official = base_url is None and self.address_variable not in os.environ

    def _prices_as(self) -> str:
        return self.prefix if self._official else ""
