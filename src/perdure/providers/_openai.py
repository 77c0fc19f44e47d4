"""OpenAI's two wire formats, Chat Completions and Responses, at OpenAI, at Azure, and at servers that speak them.

Loaded by the first call of such a model, in a thread.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import httpx2
import msgspec
import openai
from openai.types import responses
from pydantic_ai import messages as their
from pydantic_ai.models.openai import (
    OpenAIChatModel,
    OpenAIChatModelSettings,
    OpenAIResponsesModel,
    OpenAIResponsesModelSettings,
)
from pydantic_ai.profiles.openai import SAMPLING_PARAMS, OpenAIModelProfile
from pydantic_ai.providers.openai import OpenAIProvider

from perdure.ports.provider import AssistantMessage, Message, ModelError, Request
from perdure.providers import _wire as wires
from perdure.providers._pydantic_ai import Format, details_of, record_of, schema_text
from perdure.providers._target import Target
from perdure.records.parts import Part, ReasoningPart

_RESPONSES_OURS = frozenset(
    {
        "openai_store",
        "openai_previous_response_id",
        "openai_conversation_id",
        "openai_background",
        "openai_transport",
        "openai_send_reasoning_ids",
        "openai_context_management",
        "openai_native_tools",
    }
)  # where the conversation is kept, and what the provider executes by itself
_STRICT = frozenset(
    {"$defs", "$ref", "additionalProperties", "anyOf", "const", "description", "enum", "exclusiveMaximum"}
    | {"exclusiveMinimum", "format", "items", "maxItems", "maximum", "minItems", "minimum", "multipleOf", "pattern"}
    | {"properties", "required", "title", "type"}
)  # keywords of JSON Schema that a strict schema may have
_encode = msgspec.json.Encoder(order="sorted").encode


class _OpenAIFormat(Format):
    """What both formats share."""

    system = "openai"
    effort_setting = "openai_reasoning_effort"

    def __init__(self, target: Target, http: httpx2.AsyncClient) -> None:
        self.target = target
        self.api = target.api
        self.native = bool(target.option("native"))
        self._key_header = target.option("key_header", "authorization")
        self.provider = OpenAIProvider(openai_client=_client(target, http))

    def auth(self, key: str) -> dict[str, str]:
        if self._key_header == "authorization":
            return {"authorization": f"Bearer {key}"}
        return {self._key_header: key}

    def settings(self, given: dict[str, Any], request: Request) -> dict[str, Any]:
        """The library's settings.

        Raises:
            ModelError: the model takes no such setting; the library would drop it.
        """
        if (unfit := sorted(given.keys() & set(SAMPLING_PARAMS))) and self._reasons(given):
            raise ModelError(
                f"Model `{self.target.name}` takes no setting `{unfit[0]}` while it reasons.",
                dispatched="no",
                kind="model.setup",
                help='Leave it out, or set `reasoning_effort` to "none" where the model can do that.',
            )
        if self.target.option("prompt_cache_key"):
            given.setdefault("openai_prompt_cache_key", request.agent)
        return given

    def _reasons(self, given: dict[str, Any]) -> bool:
        profile = cast(OpenAIModelProfile, self.model.profile)
        if not profile.get("openai_supports_reasoning", False):
            return False
        efforts = profile.get("openai_reasoning_efforts")
        can_stop = profile.get("openai_supports_reasoning_effort_none", False) if efforts is None else "none" in efforts
        effort = given.get(self.effort_setting)
        active = profile.get("thinking_enabled_by_default", False) if effort is None else effort != "none"
        return active or not can_stop

    def strict(self, schema: dict[str, Any]) -> bool | None:
        return strict_fits(schema)


def as_built(create: Callable[..., Any], *fields: str) -> Callable[..., Any]:
    """A call of the client that sends these lists as they were built.

    The client would copy them field by field after its own type hints, on the event loop, for milliseconds a message;
    pydantic-ai has given them the names of the wire already.
    """

    async def lean(**given: Any) -> Any:
        body = {name: given[name] for name in fields if isinstance(given.get(name), list)}
        return await create(
            **{**given, **{name: [] for name in body}, "extra_body": {**(given.get("extra_body") or {}), **body}}
        )

    return lean


class _Lean:
    """A client that is so with each copy that the library makes of it."""

    @functools.cached_property
    def responses(self) -> Any:
        """See ``openai.AsyncOpenAI.responses``."""
        resource = cast(Any, super()).responses
        resource.create = as_built(resource.create, "input", "tools")
        return resource

    @functools.cached_property
    def chat(self) -> Any:
        """See ``openai.AsyncOpenAI.chat``."""
        resource = cast(Any, super()).chat
        resource.completions.create = as_built(resource.completions.create, "messages", "tools")
        return resource


class _OpenAI(_Lean, openai.AsyncOpenAI):
    pass


class _Azure(_Lean, openai.AsyncAzureOpenAI):
    pass


def _client(target: Target, http: httpx2.AsyncClient) -> openai.AsyncOpenAI:
    version = target.option("api_version")
    if version:
        assert target.base_url is not None
        return _Azure(
            api_key=wires.PLACEHOLDER,
            azure_endpoint=target.base_url,
            api_version=version,
            max_retries=0,
            http_client=http,
        )
    return _OpenAI(
        api_key=wires.PLACEHOLDER, base_url=target.base_url, max_retries=0, http_client=http, websocket_base_url=None
    )


class ChatFormat(_OpenAIFormat):
    """Chat Completions."""

    settings_known: ClassVar[frozenset[str]] = (
        OpenAIChatModelSettings.__required_keys__ | OpenAIChatModelSettings.__optional_keys__
    ) - OpenAIChatModel.unsupported_settings
    details_kept: ClassVar[frozenset[str]] = frozenset({"extra_content"})
    urls: ClassVar[frozenset[str]] = frozenset({"image"})

    def __init__(self, target: Target, http: httpx2.AsyncClient) -> None:
        super().__init__(target, http)
        self.model = OpenAIChatModel(
            target.model,
            provider=self.provider,
            profile=cast(
                OpenAIModelProfile,
                # A stream without an end was cut; schemas are sent as the tool declares them.
                {"openai_chat_streaming_requires_finish_reason": True, "json_schema_transformer": None},
            ),
        )

    def reasoning(self, part: ReasoningPart, detail: dict[str, Any] | None) -> list[their.ModelResponsePart]:
        """Its id is the field it came in; what the library took out of the text itself is not repeated."""
        return super().reasoning(part, detail) if part.id and part.id != "content" else []


class _ResponsesModel(OpenAIResponsesModel):
    """Notes the status of a complete response: a stream that was cut before it has none."""

    def _process_provider_details(self, response: responses.Response) -> dict[str, Any] | None:
        return {_STATUS: response.status}


_STATUS = "perdure_status"


class ResponsesFormat(_OpenAIFormat):
    """Responses. Where the conversation is kept between calls is the target's option ``continuation``."""

    settings_known: ClassVar[frozenset[str]] = (
        (OpenAIResponsesModelSettings.__required_keys__ | OpenAIResponsesModelSettings.__optional_keys__)
        - _RESPONSES_OURS
        - OpenAIResponsesModel.unsupported_settings
    )
    details_kept: ClassVar[frozenset[str]] = frozenset({"phase", "namespace", "raw_content"})
    urls: ClassVar[frozenset[str]] = frozenset({"image", "document", "audio"})

    def __init__(self, target: Target, http: httpx2.AsyncClient) -> None:
        super().__init__(target, http)
        self._mode = target.option("continuation", "stateless")
        profile: dict[str, Any] = {"json_schema_transformer": None}
        known = cast(dict[str, Any], OpenAIProvider.model_profile(target.model) or {})
        encrypted = target.option("encrypted_reasoning")
        if encrypted is None:
            encrypted = bool(known.get("openai_supports_encrypted_reasoning_content"))
        self._encrypted = encrypted and self._mode == "stateless"
        profile["openai_supports_encrypted_reasoning_content"] = self._encrypted
        self.model = _ResponsesModel(target.model, provider=self.provider, profile=cast(OpenAIModelProfile, profile))

    def settings(self, given: dict[str, Any], request: Request) -> dict[str, Any]:
        given = super().settings(given, request)
        given["openai_prompt_cache_diagnostics"] = False
        given["openai_store"] = self._mode == "stored"
        return given

    def messages(self, request: Request, name: str) -> tuple[list[their.ModelMessage], dict[str, Any]]:
        if self._mode == "stored" and request.use_continuation:
            at = max((n for n, said in enumerate(request.messages) if isinstance(said, AssistantMessage)), default=-1)
            if at >= 0 and (held := self._held(request, request.messages[: at + 1], name)):
                new = [made for said in request.messages[at + 1 :] for made in self.message(said, request, name)]
                if new:
                    return new, {"openai_previous_response_id": held}
        return super().messages(request, name)

    def _held(self, request: Request, messages: Sequence[Message], name: str) -> str:
        """The id under which the provider holds these messages, the last an answer; empty if it does not."""
        last = messages[-1]
        assert isinstance(last, AssistantMessage)
        record = record_of(last.continuation) if self.owns(last, request, name) else {}
        identity = record.get("id")
        same = record.get("held") == self._digest(request, messages)
        return identity if isinstance(identity, str) and same else ""

    def _digest(self, request: Request, messages: Sequence[Message]) -> str:
        """What the provider was told and said; where it changed since (a call's id, say), all is sent again."""
        asked = request.output_schema if self.native_schema(request) is None else None
        told: list[Any] = [schema_text(asked) if asked is not None else ""]
        for message in messages:
            if isinstance(message, AssistantMessage):
                told.append(("said", message.parts, message.model))
            else:
                told.append((type(message).__name__, message))
        return hashlib.sha256(_encode(told)).hexdigest()

    def continuation(self, request: Request, parts: tuple[Part, ...]) -> dict[str, Any]:
        """What the provider holds from now on."""
        if self._mode != "stored":
            return {}
        whole = [*request.messages, AssistantMessage(parts, self.target.name)]
        return {"held": self._digest(request, whole)}

    def reasoning(self, part: ReasoningPart, detail: dict[str, Any] | None) -> list[their.ModelResponsePart]:
        """Encrypted, or in the clear where the model gives it so; nothing where the provider keeps it or nobody does."""
        raw = bool((detail or {}).get("raw_content"))
        return super().reasoning(part, detail) if self._mode == "stateless" and (self._encrypted or raw) else []

    def assistant(self, message: AssistantMessage, request: Request, name: str) -> list[their.ModelResponsePart]:
        if self._encrypted and self.owns(message, request, name):
            details = zip(message.parts, details_of(message), strict=True)
            reasoned = [(part, detail or {}) for part, detail in details if isinstance(part, ReasoningPart)]
            whole = {part.id for part, detail in reasoned if part.signature or detail.get("raw_content")}
            for part, _ in reasoned:
                if part.id not in whole:
                    raise ModelError(
                        f"Model `{name}` cannot go on statelessly: reasoning `{part.id}` was recorded without its "
                        "encrypted content.",
                        dispatched="no",
                        kind="model.continuation",
                        help="Send the turn without it (use_continuation=False), or use "
                        'ResponsesModel(..., continuation="stored") or continuation="none".',
                    )
        return super().assistant(message, request, name)

    def incomplete(self, answer: their.ModelResponse) -> str:
        status = (answer.provider_details or {}).get(_STATUS)
        if answer.finish_reason == "content_filter" and answer.provider_response_id is None:
            return ""  # Azure refused the prompt before there was a response
        if status in ("completed", "incomplete", "failed"):
            return ""
        return "the stream ended before the response did" if status is None else f"its status is {status}"


def strict_fits(schema: Any) -> bool:
    """Whether a schema says only what OpenAI's strict mode can hold an answer to."""
    if isinstance(schema, bool) or not isinstance(schema, dict) or not schema.keys() <= _STRICT:
        return False
    properties = schema.get("properties", {})
    if schema.get("type") == "object" or "properties" in schema:
        if schema.get("additionalProperties") is not False or set(schema.get("required", ())) != set(properties):
            return False
    nested = [*properties.values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", ())]
    nested += [schema["items"]] if "items" in schema else []
    return all(strict_fits(inner) for inner in nested)


formats: dict[str, Callable[[Target, httpx2.AsyncClient], Format]] = {
    "chat": ChatFormat,
    "responses": ResponsesFormat,
}

for _make in formats.values():  # loads, here in the thread, what the libraries would load on the event loop
    _make(Target("any", "any", base_url="http://127.0.0.1/v1"), httpx2.AsyncClient(verify=False, trust_env=False))
