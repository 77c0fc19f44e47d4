"""Anthropic Messages, over pydantic-ai. Loaded by the first call of a model, in a thread."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import anthropic
import httpx2
from pydantic_ai import messages as their
from pydantic_ai.models.anthropic import AnthropicModel, AnthropicModelSettings
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.profiles.anthropic import AnthropicModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider

from perdure.ports.provider import AssistantMessage, ModelError, Request, ToolMessage
from perdure.providers import _wire as wires
from perdure.providers._pydantic_ai import Format
from perdure.providers._remote import Target
from perdure.records.parts import ReasoningPart

# Settings that name what is kept at the provider for one conversation, or start what our records do not hold.
_NOT_OFFERED = frozenset({"anthropic_container", "anthropic_context_management", "anthropic_task_budget"})

_SAMPLING = frozenset({"temperature", "top_p", "top_k"})


class _Model(AnthropicModel):
    """Streams every answer: only a stream tells the text of arguments as the model wrote it, and long answers end."""

    async def _messages_create(self, messages: Any, stream: bool, *rest: Any, **more: Any) -> Any:
        return await super()._messages_create(messages, True, *rest, **more)


class Messages(Format):
    """Claude, by the Messages API."""

    settings_known: ClassVar[frozenset[str]] = (
        AnthropicModelSettings.__required_keys__ | AnthropicModelSettings.__optional_keys__
    ) - _NOT_OFFERED
    effort_setting: ClassVar[str] = "thinking"
    urls: ClassVar[frozenset[str]] = frozenset({"image", "document"})
    streams: ClassVar[bool] = True

    def __init__(self, target: Target, http: httpx2.AsyncClient) -> None:
        client = anthropic.AsyncAnthropic(
            api_key=wires.PLACEHOLDER,
            base_url=target.base_url,
            max_retries=0,
            http_client=http,
        )
        self._name = target.name
        self.native = bool(target.option("native"))
        changed = AnthropicModelProfile(
            anthropic_binds_thinking_blocks=False,  # or the library repeats a request that was refused for them
            supports_inline_system_prompts=False,  # instructions stay at the top, where every model takes them
            supports_json_schema_output=self.native,
        )
        self.model = _Model(
            target.model,
            provider=AnthropicProvider(anthropic_client=client),
            profile=lambda known: cast(ModelProfile, {**known, **changed}),
        )
        self.system = self.model.system

    def auth(self, key: str) -> dict[str, str]:
        """The header that carries the key."""
        return {"x-api-key": key}

    def settings(self, given: dict[str, Any], request: Request) -> dict[str, Any]:
        """The library's settings: an effort of ``none`` is no thinking.

        Raises:
            ModelError: the model takes no such setting; the library would drop it.
        """
        if self.model.profile.get("anthropic_disallows_sampling_settings", False):
            for setting in sorted(_SAMPLING & given.keys()):
                raise ModelError(
                    f"Model `{self.model.model_name}` takes no setting `{setting}`.",
                    dispatched="no",
                    kind="model.setup",
                    help="Leave it out.",
                )
        if given.get("thinking") == "none":
            return given | {"thinking": False}
        if not self.model.profile.get("anthropic_supports_adaptive_thinking", False) and self._goes_on_unthought(
            request
        ):
            return {name: value for name, value in given.items() if name not in ("thinking", "anthropic_thinking")}
        return given

    def _goes_on_unthought(self, request: Request) -> bool:
        """Whether results go to calls that came without thinking of this model, where thinking is then refused."""
        if len(request.messages) < 2 or not isinstance(request.messages[-1], ToolMessage):
            return False
        said = request.messages[-2]
        if not isinstance(said, AssistantMessage) or not self.owns(said, request, self._name):
            return True
        return not said.parts or not isinstance(said.parts[0], ReasoningPart)

    def messages(self, request: Request, name: str) -> tuple[list[their.ModelMessage], dict[str, Any]]:
        """The conversation with what users and tools say in a row as one message: roles alternate."""
        found, more = super().messages(request, name)
        out: list[their.ModelMessage] = []
        for message in found:
            last = out[-1] if out else None
            if isinstance(message, their.ModelRequest) and isinstance(last, their.ModelRequest):
                out[-1] = their.ModelRequest([*last.parts, *message.parts])
            else:
                out.append(message)
        return out, more

    def strict(self, schema: dict[str, Any]) -> bool | None:
        """Always: the provider knows no other way."""
        return True

    def incomplete(self, answer: their.ModelResponse) -> str:
        """Without a reason for its end, a stream was cut."""
        return "" if (answer.provider_details or {}).get("finish_reason") else "the stream has no end"


formats = {"": Messages}

# Loads, here in the thread, what the libraries would load on the event loop.
Messages(Target("any", "any", base_url="http://127.0.0.1"), httpx2.AsyncClient(verify=False, trust_env=False))
