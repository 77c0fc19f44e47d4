"""Names, prices, profiles and schemas of models: what is known without a call and without a provider's library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from perdure.definitions.context import Secret
from perdure.errors import Invalid
from perdure.ports.provider import Model, Profile, profile_of
from perdure.providers import Price, Rate, pricing
from perdure.providers.anthropic import MessagesModel
from perdure.providers.azure import AzureModel
from perdure.providers.google import GeminiModel
from perdure.providers.openai import ChatModel, ResponsesModel
from perdure.providers.resolve import check, named, prefixes, resolve
from perdure.providers.scripted import Scripted
from perdure.providers.setup import setup_of

PRICES = {"version": "2026-12", "models": {"openai:mine": {"input": 2.5, "output": 10, "cache_read": 0.0000001}}}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "PERDURE_PRICES", "OPENAI_API_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", "https://example.openai.azure.com")


# names


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("openai:gpt-5.6", ResponsesModel),
        ("openai-chat:ft:gpt-5.6:acme", ChatModel),
        ("azure:prod", AzureModel),
        ("anthropic:claude-opus-5", MessagesModel),
        ("google:gemini-3-pro", GeminiModel),
    ],
)
def test_a_name_means_a_model(name: str, made: type) -> None:
    model = named(name)
    assert type(model) is made
    assert model.name == name
    assert name.partition(":")[2] in repr(model)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("opnai:gpt-5.6", "openai:gpt-5.6"),
        ("OpenAI:gpt-5.6", "openai:gpt-5.6"),
        ("openai_chat:x", "openai-chat:x"),
        ("antropic:x", "anthropic:x"),
        ("gogle:x", "google:x"),
    ],
)
def test_a_mistyped_prefix_suggests_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(Invalid, match=f"Did you mean `{meant}`"):
        resolve(name)


@pytest.mark.parametrize("name", ["", ":x", "gpt-5.6", "openai:", "openai: ", "zzz:x"])
def test_what_is_near_nothing_lists_the_known(name: str) -> None:
    with pytest.raises(Invalid) as caught:
        resolve(name)
    assert "Did you mean" not in str(caught.value)
    assert all(f'"{prefix}:' in str(caught.value) for prefix in prefixes())


# what is refused when a model is made


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ResponsesModel(" "), "blank"),
        (lambda: ResponsesModel("m", "ftp://x/v1"), "base_url"),
        (lambda: ResponsesModel("m", "http://user:hidden@x/v1"), "base_url"),
        (lambda: ResponsesModel("m", api_key="hidden"), "not a Secret"),
        (lambda: ResponsesModel("m", continuation="forever"), "forever"),
        (lambda: ResponsesModel("m", output="tool"), "tool"),
        (lambda: ChatModel("m", output="tool"), "tool"),
        (lambda: ChatModel("m", price=2), "price"),
        (lambda: ChatModel("m", rate=2), "rate"),
        (lambda: AzureModel("m", api="other"), "other"),
        (lambda: AzureModel("m", "https://x.azure.com/openai/v1", "2026-10-01"), "api_version"),
        (lambda: AzureModel("m", "https://user:hidden@x.azure.com"), "base_url"),
    ],
)
def test_a_model_that_cannot_be_is_refused(make: Any, words: str) -> None:
    with pytest.raises(Invalid) as caught:
        make()
    assert words in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_setup_is_told_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup_of(ResponsesModel("m")).host == "api.openai.com"
    assert setup_of(AzureModel("m")).host == "example.openai.azure.com"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:11434/v1")
    assert setup_of(ChatModel("m")).host == "127.0.0.1:11434"
    assert setup_of(ChatModel("m")).key == Secret.env("OPENAI_API_KEY")
    assert setup_of(ChatModel("m")).missing() == ()


# profiles


def test_a_profile_says_what_is_known() -> None:
    rate = Rate(requests=60)
    profile = profile_of(ResponsesModel("gpt-5.6", settings={"max_tokens": 500}, rate=rate))
    assert (profile.max_output_tokens, profile.rate, profile.shared) == (500, rate, True)
    assert profile.capabilities is not None
    assert {"tools", "structured_output", "stateless_continuation", "prompt_caching"} <= profile.capabilities
    stored = profile_of(ResponsesModel("gpt-5.6", continuation="stored")).capabilities or frozenset()
    assert "stored_continuation" in stored
    assert "stateless_continuation" not in stored
    local = profile_of(ChatModel("m", "http://127.0.0.1:11434/v1")).capabilities or frozenset()
    assert not {"structured_output", "prompt_caching"} & local
    azure = [profile_of(AzureModel("m", api=api)).capabilities or frozenset() for api in ("chat", "responses")]  # type: ignore[arg-type]
    assert [{"images", "files"} & able for able in azure] == [{"images"}, {"images", "files"}]


def test_what_a_model_lacks_is_refused_by_name() -> None:
    able = Scripted([], name="small", profile=Profile(capabilities=frozenset({"tools"})))
    check(able, tools=True)
    for needs, words in (
        ({"structured": True}, "structured_output"),
        ({"files": ["image/png"]}, "images"),
        ({"files": ["application/pdf"]}, "files"),
    ):
        with pytest.raises(Invalid, match=words) as caught:
            check(able, tools=True, **needs)  # type: ignore[arg-type]
        assert "small" in str(caught.value)
    check(Scripted([]), tools=True, structured=True, files=["image/png"])  # nothing declared, nothing refused


# prices


def test_the_built_in_table_knows_the_prices_of_providers() -> None:
    pytest.importorskip("genai_prices")
    from genai_prices import data_snapshot

    for provider, model in (
        ("openai", "gpt-4o"),
        ("openai", "gpt-4o-2024-08-06"),
        ("anthropic", "claude-fable-5-20261001"),
    ):
        found = pricing.price_of((), provider, model)
        _, info = data_snapshot.get_snapshot().find_provider_model(model, None, provider, None)
        rates = info.prices
        assert found is not None
        assert found.input == Decimal(rates.input_mtok) * 1_000_000
        assert found.output == Decimal(rates.output_mtok) * 1_000_000
        assert found.version.startswith("genai_prices ")
    assert pricing.price_of((), "openai", "no-such-model") is None
    assert pricing.price_of((), "nobody", "gpt-4o") is None


def test_a_price_belongs_to_whom_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("genai_prices")
    official = profile_of(ResponsesModel("gpt-4o")).price
    assert official is not None
    assert profile_of(ChatModel("gpt-4o")).price == official
    assert profile_of(ResponsesModel("gpt-4o", "http://127.0.0.1/v1")).price is None
    own = Price(input=1, output=2)
    assert profile_of(ResponsesModel("gpt-4o", "http://127.0.0.1/v1", price=own)).price == own
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1/v1")
    assert profile_of(ChatModel("gpt-4o")).price is None


def test_a_price_is_looked_up_when_it_is_asked_for_and_without_the_library() -> None:
    pytest.importorskip("genai_prices")
    program = """
import sys
import perdure
from perdure.providers.openai import ResponsesModel
heavy = {"pydantic_ai", "pydantic", "genai_prices", "httpx2", "openai"}
model = ResponsesModel("gpt-4o")
from perdure.providers import pricing
before = pricing._table is None, heavy & set(sys.modules)
price = model.profile.price
print(before, price.input > 0, heavy & set(sys.modules))
"""
    environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "(True, set()) True set()"


def priced(tmp_path: Path, content: object, name: str = "prices.json") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_a_price_file_counts_before_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"openai:gpt-4o": {"input": 1, "output": 2}, "azure:prod": {"input": 3, "output": 4, "reasoning": 5}}
    monkeypatch.setenv("PERDURE_PRICES", str(priced(tmp_path, {"version": "mine", "models": models})))
    assert profile_of(ResponsesModel("gpt-4o")).price == Price(input=1_000_000, output=2_000_000, version="mine")
    assert profile_of(ChatModel("gpt-4o")).price == Price(input=1_000_000, output=2_000_000, version="mine")
    prod = profile_of(AzureModel("prod")).price
    assert prod == Price(input=3_000_000, output=4_000_000, reasoning=5_000_000, version="mine")
    assert profile_of(ResponsesModel("gpt-4o", "http://127.0.0.1/v1")).price is not None
    other = profile_of(ResponsesModel("o3")).price
    assert other is None or other.version != "mine"


def test_a_price_file_is_in_dollars_and_rounded_up(tmp_path: Path) -> None:
    loaded = pricing.load(priced(tmp_path, PRICES))
    assert loaded.version == "2026-12"
    assert loaded.models["openai:mine"] == Price(input=2_500_000, output=10_000_000, cache_read=1, version="2026-12")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        {"models": {}},
        {"version": " ", "models": {}},
        {"version": "1", "models": {}, "more": 1},
        {"version": "1", "models": {"m": {"input": 1}}},
        {"version": "1", "models": {"m": {"input": -1, "output": 1}}},
        {"version": "1", "models": {"m": {"input": 1e300, "output": 1}}},
        {"version": "1", "models": {"m": {"input": "NaN", "output": 1}}},
        {"version": "1", "models": {"m": {"input": True, "output": 1}}},
        {"version": "1", "models": {"m": {"input": 1, "output": 1, "cached": 1}}},
    ],
    ids=str,
)
def test_a_wrong_price_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object) -> None:
    path = priced(tmp_path, content, "wrong.json")
    with pytest.raises(Invalid, match=r"wrong\.json"):
        pricing.load(path)
    monkeypatch.setenv("PERDURE_PRICES", str(path))
    with pytest.raises(Invalid, match=r"wrong\.json"):
        resolve("openai-chat:gpt-4o")


def test_a_price_file_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "none.json")
    monkeypatch.setenv("PERDURE_PRICES", path)
    with pytest.raises(Invalid, match="PERDURE_PRICES") as caught:
        resolve("openai-chat:gpt-4o")
    assert "none.json" in str(caught.value)
    large = priced(tmp_path, " " * (pricing.FILE_BYTES_MAX + 1), "large.json")
    with pytest.raises(Invalid, match="larger than"):
        pricing.load(large)


# schemas


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": "object", "properties": {}, "additionalProperties": False, "required": []}, True),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}, False),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, False),
        ({"type": "object", "additionalProperties": {"type": "string"}}, False),
        ({"type": "array", "items": {"type": "object"}}, False),
        ({"type": "string", "default": "x"}, False),
        ({"anyOf": [{"type": "string"}, {"oneOf": []}]}, False),
        ({"type": "array", "items": {"enum": ["a", "b"]}}, True),
        (True, False),
    ],
)
def test_a_schema_is_strict_only_if_all_of_it_can_be_held(schema: Any, fits: bool) -> None:
    formats = pytest.importorskip("perdure.providers._openai", reason="needs perdure[models]")
    assert formats.strict_fits(schema) is fits


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"type": "object", "x": 1}, {"type": "object", "x": 1}),
        ({"type": "string"}, None),
        ({"anyOf": [{"type": "object"}]}, None),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}},
            {"type": "object", "$defs": {"A": {"type": "object"}}},
        ),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}, "minProperties": 1}, None),
        ({"$ref": "#/$defs/B", "$defs": {}}, None),
    ],
)
def test_a_schema_gets_an_object_at_its_root_without_losing_a_word(schema: Any, found: Any) -> None:
    core = pytest.importorskip("perdure.providers._pydantic_ai", reason="needs perdure[models]")
    assert core.rooted(schema) == found


# the wire


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"retry-after": "7"}, 7, 7),
        ({"retry-after": "1.5"}, 1.5, 1.5),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "7"}, 7, 7),
        ({"retry-after": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(0))}, 0, 0),
        ({"retry-after": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 3600))}, 3000, 3600),
    ],
)
def test_how_long_to_wait_is_read_from_every_form(headers: dict[str, str], low: float, high: float) -> None:
    wires = pytest.importorskip("perdure.providers._wire", reason="needs perdure[models]")
    wire = wires.Wire(1000)
    wire.answer = wires.httpx2.Headers(headers)
    assert low <= wire.retry_after() <= high


@pytest.mark.parametrize("value", ["", "soon", "-1", "nan", "inf", "Mon, 99 Foo 2026 00:00:00 GMT"])
def test_a_wait_that_says_nothing_is_none(value: str) -> None:
    wires = pytest.importorskip("perdure.providers._wire", reason="needs perdure[models]")
    wire = wires.Wire(1000)
    wire.answer = wires.httpx2.Headers({"retry-after": value})
    assert wire.retry_after() is None


def test_a_request_id_is_a_short_printable_word() -> None:
    wires = pytest.importorskip("perdure.providers._wire", reason="needs perdure[models]")
    wire = wires.Wire(1000)
    for value, found in (("req_1", "req_1"), ("x" * 257, ""), ("", "")):
        wire.answer = wires.httpx2.Headers({"request-id": value})
        assert wire.request_id() == found
    assert wire.evidence() == wires.Evidence()  # nothing was sent


def test_every_model_meets_the_port() -> None:
    for prefix in prefixes():
        assert isinstance(named(f"{prefix}:m"), Model)
