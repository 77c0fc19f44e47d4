"""Models behind Google's Gemini API. Importing this module loads no provider library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from perdure.definitions.context import Secret
from perdure.ports.provider import Capability
from perdure.providers._remote import RemoteModel, Target
from perdure.providers.openai import Output, check_name, native_of
from perdure.rules.accounting import Price, Rate

__all__ = ["GeminiModel"]

_ABLE: frozenset[Capability] = frozenset(
    {
        "tools",
        "parallel_tools",
        "reasoning",
        "reasoning_effort",
        "streaming",
        "images",
        "files",
        "stateless_continuation",
        "usage",
    }
)
_STRUCTURED: frozenset[Capability] = frozenset({"structured_output"})
_PROMPTED_BESIDE_TOOLS = ("gemini-1", "gemini-2")  # held to a schema only where there are no tools
_GEMINI_API_KEY = Secret.env("GEMINI_API_KEY")


class GeminiModel(RemoteModel):
    """A Gemini model, by ``generateContent`` and ``streamGenerateContent``.

    The format carries arguments as JSON objects, so their text is compact JSON, not what the model wrote. Thought
    signatures go back to the same model with the part they came with.

    Args:
        name: the model as Google knows it, for example ``"gemini-3-pro-preview"``.
        base_url: the server; by default the environment variable ``GOOGLE_GEMINI_BASE_URL``, else Google.
        api_key: where the key comes from; read at each call and never stored or shown. None for a server without keys.
        settings: default settings, under those of the request: ``max_tokens``, ``temperature``, ``reasoning_effort``,
            ``google_safety_settings`` and the like. Names are those of pydantic-ai's ``GoogleModelSettings``, without
            the ones that would retry or bound time.
        price: what tokens cost; by default Google's price where Google is asked, else unknown.
        rate: how often it may be called by all processes on one database together, None for no bound of ours.
        output: how an answer of a schema is asked for: ``"native"`` lets Google hold it to the schema, where the model
            can beside tools; ``"prompted"`` asks in the instructions. By default native.

    Raises:
        Invalid: a blank name, a ``base_url`` that is no http(s) address or holds a password, a key given as text, an
            unknown ``output``.
    """

    format_module = "_google"
    libraries = ("httpx2", "google.genai", "pydantic_ai")
    prefix = "google"
    address_variable = "GOOGLE_GEMINI_BASE_URL"
    address_default = "https://generativelanguage.googleapis.com"

    def __init__(
        self,
        name: str,
        base_url: str | None = None,
        api_key: Secret | None = _GEMINI_API_KEY,
        settings: Mapping[str, Any] | None = None,
        *,
        output: Output | None = None,
        price: Price | None = None,
        rate: Rate | None = None,
    ) -> None:
        check_name(name)
        native = native_of(f"google:{name}", output, True)
        target = Target(f"google:{name}", name, "", base_url, (("native", native),))
        held = native and not name.startswith(_PROMPTED_BESIDE_TOOLS)
        super().__init__(target, api_key, settings, price, rate, _ABLE | _STRUCTURED if held else _ABLE)
        self._official = base_url is None and self.address_variable not in os.environ

    def _prices_as(self) -> str:
        return self.prefix if self._official else ""
