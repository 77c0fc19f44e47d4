"""Google Gemini, over pydantic-ai. Loaded by the first call of a model, in a thread."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import httpx2
from google import genai
from google.genai.types import HttpOptions, HttpRetryOptions
from pydantic_ai import messages as their
from pydantic_ai.models.google import GoogleModel, GoogleModelSettings
from pydantic_ai.providers.google import GoogleProvider

from perdure.ports.provider import Message, ModelError, Request, ToolMessage
from perdure.providers import _wire as wires
from perdure.providers._pydantic_ai import Format
from perdure.providers._remote import Target

UNBOUNDED_SECONDS = 86_400.0  # a call without a bound: the library insists on one
_NOT_OFFERED = frozenset({"google_cached_content"})  # the library leaves out instructions and tools beside it

_TLS = httpx2.create_ssl_context()  # for clients that are never used; else the library reads certificates for each


class _Model(GoogleModel):
    """One request a call, and the time that our wire allows."""

    async def _build_content_and_config(self, messages: Any, model_settings: Any, *rest: Any) -> Any:
        bound = model_settings.get("timeout")
        if isinstance(bound, httpx2.Timeout):
            seconds = UNBOUNDED_SECONDS if bound.read is None else bound.read
            model_settings = {**model_settings, "timeout": seconds}
        contents, config = await super()._build_content_and_config(messages, model_settings, *rest)
        config["automatic_continuation"] = False
        config["automatic_function_calling"] = {"disable": True}
        return contents, config


_UPLOADED = "https://generativelanguage.googleapis.com/v1beta/files"


class Gemini(Format):
    """Gemini, by generateContent and streamGenerateContent."""

    settings_known: ClassVar[frozenset[str]] = (
        GoogleModelSettings.__required_keys__ | GoogleModelSettings.__optional_keys__
    ) - _NOT_OFFERED
    effort_setting: ClassVar[str] = "thinking"
    details_kept: ClassVar[frozenset[str]] = frozenset({"thought_signature"})

    def fetches(self, kind: str, url: str) -> bool:
        """Gemini fetches what was uploaded to it, and nothing else."""
        return url.startswith(_UPLOADED)

    def __init__(self, target: Target, http: httpx2.AsyncClient) -> None:
        client = genai.Client(
            vertexai=False,
            api_key=wires.PLACEHOLDER,
            http_options=HttpOptions(
                base_url=target.base_url,
                httpx_async_client=http,
                timeout=int(UNBOUNDED_SECONDS * 1000),
                retry_options=HttpRetryOptions(attempts=1),
                client_args={"verify": _TLS},
                async_client_args={"verify": _TLS, "ssl": _TLS},
            ),
        )
        self.model = _Model(target.model, provider=GoogleProvider(client=client))
        self.system = self.model.system
        self._name = target.name
        self.native = bool(target.option("native"))
        self._native_beside_tools = bool(self.model.profile.get("google_supports_tool_combination", False))

    def auth(self, key: str) -> dict[str, str]:
        """The header that carries the key."""
        return {"x-goog-api-key": key}

    def settings(self, given: dict[str, Any], request: Request) -> dict[str, Any]:
        """The library's settings: an effort of ``none`` is no thinking."""
        return given | ({"thinking": False} if given.get("thinking") == "none" else {})

    def native_schema(self, request: Request) -> dict[str, Any] | None:
        """Older models cannot do both tools and a schema; then the prompt asks for it."""
        return super().native_schema(request) if self._native_beside_tools or not request.tools else None

    def message(self, message: Message, request: Request, name: str) -> Any:
        """Results that are JSON objects go as objects: the format carries no text beside them."""
        made = super().message(message, request, name)
        if isinstance(message, ToolMessage):
            for sent in made:
                for part in sent.parts:
                    if isinstance(part, their.ToolReturnPart) and part.outcome == "success":
                        part.content = _object(part.content)
        return made

    def incomplete(self, answer: their.ModelResponse) -> str:
        """Without a reason for its end, a stream was cut.

        Raises:
            ModelError: the provider refuses the prompt; it says so in an answer without content.
        """
        details = answer.provider_details or {}
        if (reason := details.get("block_reason")) and not answer.parts:
            raise ModelError(
                f"Model `{self._name}` refuses the prompt: {reason}.", dispatched="yes", kind="model.refused"
            )
        return "" if details.get("finish_reason") else "the stream has no end"


def _object(content: Any) -> Any:
    try:
        value = json.loads(content)
    except ValueError:
        return content
    return value if isinstance(value, dict) else content


formats = {"": Gemini}

# Loads, here in the thread, what the libraries would load on the event loop.
Gemini(Target("any", "any", base_url="http://127.0.0.1"), httpx2.AsyncClient(verify=False, trust_env=False))
