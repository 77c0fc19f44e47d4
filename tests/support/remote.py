"""Models of every wire format at the loopback server, in whole durable runs whose deltas are followed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import perdure as p
from perdure.agent.events import Event
from perdure.definitions.tool import Secret
from perdure.ports.provider import Model
from perdure.providers.anthropic import MessagesModel
from perdure.providers.azure import AzureModel
from perdure.providers.google import GeminiModel
from perdure.providers.openai import ChatModel, ResponsesModel
from perdure.records.codec import Record
from perdure.records.run import ModelCallFailed, ModelResponseRecorded
from support.fake_models import FakeModels, Format, journal_of
from support.place import Place, until

KEY = "sk-the-secret-key-of-the-tests"
KEY_NAME = "PERDURE_TEST_KEY"
API_VERSION = "2026-10-01-preview"

MODELS: dict[Format, Callable[..., Model]] = {
    "chat": lambda url, **fields: ChatModel("gpt-test", url, **fields),
    "responses": lambda url, **fields: ResponsesModel("gpt-test", url, **{"encrypted_reasoning": True} | fields),
    "azure": lambda url, **fields: AzureModel("gpt-deployed", url, API_VERSION, **fields),
    "anthropic": lambda url, **fields: MessagesModel("claude-opus-5", url, **fields),
    "google": lambda url, **fields: GeminiModel("gemini-3-test", url, **fields),
}
"""How a model of each format is made, from its address."""


def model_at(server: FakeModels, wire: Format, fault: str = "", **fields: Any) -> Model:
    """A model of the server in this format; its key comes from the environment."""
    return MODELS[wire](server.address(wire, fault), api_key=Secret.env(KEY_NAME), **fields)


async def watched(place: Place, agent: p.Agent, model: Model, input: Any) -> tuple[list[Event], Any]:
    """Carry out one submission in an app while another app on the store follows it: all events, and the output."""
    async with place.client([agent]) as outside:
        receipt = await outside.submit(agent, input, thread="t")

        async def follow() -> list[Event]:
            return [event async for event in outside.events(receipt)]

        following = asyncio.ensure_future(follow())
        await until(lambda: outside.store.read(lambda tx: tx.ledger.watched_events("nobody", 0)), "a watcher")
        async with app_with(place, agent, model) as app:
            told = await asyncio.wait_for(following, 30)
            assert await app.verify()
        return told, await outside.output(receipt, timeout=1)


def quick(patch: pytest.MonkeyPatch) -> None:
    """The same tries, with less time between them."""
    patch.setattr("perdure.engine.inference.MODEL_BACKOFF_SECONDS_MIN", 0.002)
    patch.setattr("perdure.engine.inference.RATE_JITTER_SECONDS_MAX", 0.001)


def calls(records: list[Record]) -> list[ModelCallFailed | ModelResponseRecorded]:
    """What is recorded of model calls that ended."""
    return [record for record in records if isinstance(record, ModelCallFailed | ModelResponseRecorded)]


def read(server: FakeModels, since: int = 0) -> list[dict[str, Any]]:
    """The requests that reached the server, by its journal."""
    return [line for line in journal_of(server.journal)[since:] if line["read"]]


def hidden(place: Place, secret: str = KEY) -> bool:
    """Whether no file of the place holds the secret."""
    files = [file for file in place.folder.rglob("*") if file.is_file()]
    assert files
    return not any(secret.encode() in file.read_bytes() for file in files)


def app_with(place: Place, agent: p.Agent, model: Model, **options: Any) -> p.App:
    """An app that runs the agent, unchanged, with this model."""
    return place.app(agent, models={agent.name: model}, **options)
