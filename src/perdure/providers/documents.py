"""From a provider and an agent of a workflow document to a model. No provider library is loaded for it."""

from __future__ import annotations

from typing import Any

from perdure.definitions.context import Secret
from perdure.definitions.workflow import Agent, ModelPrice, Pricing, Provider, SecretRef
from perdure.errors import Invalid
from perdure.ports.provider import Model
from perdure.providers.fake import FakeModel
from perdure.rules.accounting import Price

_DEFAULT_KEYS = {
    "openai": "OPENAI_API_KEY",
    "azure_openai": "AZURE_OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "google": "GEMINI_API_KEY",
}


def secret_of(ref: SecretRef) -> Secret:
    """Where a secret is, as the process that needs it reads it.

    Raises:
        Invalid: the reference names no place.
    """
    if ref.env is not None:
        return Secret.env(ref.env)
    if ref.file is not None:
        return Secret.file(ref.file)
    if ref.process is not None:
        return Secret.process(ref.process.command, *ref.process.args, timeout=ref.process.timeout_seconds)
    raise Invalid("A secret reference names no place.", help="Give one of env, file or process.")


def price_of(pricing: Pricing | None, provider: str, model: str) -> Price | None:
    """The price that a document gives for a model, or None."""
    found: ModelPrice | None = None if pricing is None else pricing.models.get(f"{provider}/{model}")
    if pricing is None or found is None:
        return None
    return Price(
        input=found.input_microusd_per_million_tokens,
        output=found.output_microusd_per_million_tokens,
        cache_read=found.cache_read_microusd_per_million_tokens,
        cache_write=found.cache_write_microusd_per_million_tokens,
        reasoning=found.reasoning_microusd_per_million_tokens,
        version=pricing.version,
    )


def model_of(name: str, provider: Provider, agent: Agent, pricing: Pricing | None) -> Model:
    """The model that an agent of a document asks.

    Raises:
        Invalid: the provider cannot be used so.
    """
    price = price_of(pricing, name, agent.model)
    if provider.kind == "fake":
        return FakeModel(f"fake:{agent.model}", agent.provider_options, price)
    if provider.headers:
        raise Invalid(f"Provider {name!r} has headers, which no adapter sends.", help="Leave them out.")
    key = secret_of(provider.credential or SecretRef(env=_DEFAULT_KEYS[provider.kind]))
    return _remote(provider, agent, key, price)


def _remote(provider: Provider, agent: Agent, key: Secret, price: Price | None) -> Model:
    options: dict[str, Any] = {"price": price} if price is not None else {}
    match provider.kind:
        case "openai":
            from perdure.providers.openai import ResponsesModel  # noqa: PLC0415 - the one that is asked for

            stored = "stored" if agent.provider_options.get("store") is True else "stateless"
            return ResponsesModel(agent.model, provider.endpoint, key, continuation=stored, **options)  # type: ignore[arg-type]
        case "azure_openai":
            from perdure.providers.azure import AzureModel  # noqa: PLC0415

            return AzureModel(agent.model, provider.endpoint, provider.api_version, key, **options)
        case "anthropic":
            from perdure.providers.anthropic import MessagesModel  # noqa: PLC0415

            return MessagesModel(agent.model, provider.endpoint, key, **options)
        case _:
            from perdure.providers.google import GeminiModel  # noqa: PLC0415

            return GeminiModel(agent.model, provider.endpoint, key, **options)
