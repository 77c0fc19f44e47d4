"""``perdure models``: what it says of a model without sending anything, and the one call it makes after a yes."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from perdure.ports.provider import Capability, Model, profile_of
from perdure.providers.resolve import named, prefixes
from perdure.providers.scripted import say
from perdure.providers.setup import Setup, setup_of
from support.cli import PROGRAM, environment, perdure, told
from support.fake_models import FakeModels, Seen, Status

pytest.importorskip("pydantic_ai", reason="needs perdure[models]")
pytest.importorskip("openai", reason="needs perdure[models]")

KEY = "sk-sentinel-5a1f"
NAME = "openai:gpt-test"
LIBRARIES = ("anthropic", "google.genai", "httpx2", "openai", "pydantic_ai")


@pytest.fixture(scope="module")
def running() -> Iterator[FakeModels]:
    with FakeModels() as server:
        yield server


@pytest.fixture
def server(running: FakeModels) -> FakeModels:
    return running.play()


def env(server: FakeModels | None = None, key: str = KEY) -> dict[str, str]:
    """The environment of a user: a key, and the loopback server for OpenAI."""
    return {"OPENAI_API_KEY": key, "OPENAI_BASE_URL": f"http://127.0.0.1:{server.port}/v1" if server else ""}


def shows_no_key(*texts: str) -> None:
    for text in texts:
        assert KEY not in text
        assert KEY[3:] not in text
        assert str(len(KEY)) not in text.replace("milliseconds", "")


# -- without a call ----------------------------------------------------------------------------------------------------


def test_a_model_that_can_be_used(server: FakeModels, tmp_path: Path) -> None:
    done = told("models", "check", NAME, cwd=tmp_path, env=env(server))
    assert done["kind"] == "ModelCheck"
    data = done["data"]
    assert data["id"] == named(NAME).name
    assert data["host"] == f"127.0.0.1:{server.port}"
    assert data["key"] == {"place": "env:OPENAI_API_KEY", "present": True}
    assert {"openai", "pydantic_ai"} <= {one["name"] for one in data["libraries"] if one["installed"]}
    assert data["live"] is None
    assert set(data["capabilities"] or get_args(Capability)) == set(get_args(Capability))
    shows_no_key(json.dumps(data))
    assert server.connections == 0
    assert list(tmp_path.iterdir()) == []


def test_what_it_says_is_what_the_model_declares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in env().items():  # a model's price depends on where it is asked
        monkeypatch.setenv(variable, value)
    for prefix in prefixes():
        name = f"{prefix}:gpt-5.6"
        try:
            profile = profile_of(named(name))
        except Exception:  # such a model needs more than a name  # noqa: BLE001
            continue
        data = told("models", "check", name, cwd=tmp_path, env=env(), code=None)["data"]
        able = data["capabilities"]
        assert (
            able is None if profile.capabilities is None else {one for one in able if able[one]} == profile.capabilities
        )
        assert (data["price"] or {}).get("version") == (profile.price.version if profile.price else None)
        assert data["maxOutputTokens"] == profile.max_output_tokens


def test_people_read_the_same(server: FakeModels, tmp_path: Path) -> None:
    done = perdure("models", "check", NAME, cwd=tmp_path, env=env(server))
    lines = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line)
    assert lines["model"].strip() == named(NAME).name
    assert lines["key"].strip() == "env:OPENAI_API_KEY, present"
    assert lines["host"].strip() == f"127.0.0.1:{server.port}"
    assert done.stderr == ""
    assert server.connections == 0


@pytest.mark.parametrize("live", [(), ("--live", "--yes")])
def test_a_missing_key_is_named_and_nothing_is_sent(server: FakeModels, tmp_path: Path, live: tuple[str, ...]) -> None:
    done = told("models", "check", NAME, *live, cwd=tmp_path, env=env(server, key=""), code=3)
    assert done["data"]["key"] == {"place": "env:OPENAI_API_KEY", "present": False}
    assert done["error"]["code"] == "setup"
    assert "OPENAI_API_KEY is not set" in done["error"]["message"]
    human = perdure("models", "check", NAME, *live, cwd=tmp_path, env=env(server, key=""), code=3)
    assert "OPENAI_API_KEY is not set" in human.stderr
    assert "env:OPENAI_API_KEY, missing" in human.stdout
    assert server.connections == 0


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    program = (
        "import importlib.util, sys; real = importlib.util.find_spec\n"
        "def find(name, *a): return None if name == 'openai' else real(name, *a)\n"
        "importlib.util.find_spec = find\n"
        "from perdure.cli.main import main; sys.exit(main(['models', 'check', 'openai:x', '--output', 'json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(env()),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    body = json.loads(done.stdout)
    assert {"name": "openai", "installed": False} in body["data"]["libraries"]
    assert "openai is not installed" in body["error"]["message"]
    assert "perdure[models]" in body["error"]["help"]


def test_no_provider_library_is_loaded(tmp_path: Path) -> None:
    program = (
        "import sys; from perdure.cli.main import main; main(['models', 'check', 'openai:x']); main(['models', 'list'])\n"
        f"print(*sorted(set({LIBRARIES!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(env()),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.split() == []


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("opnai:gpt", "openai:gpt"),
        ("OpenAI:gpt", "openai:gpt"),
        ("gpt-5.6", ""),
        ("openai:", ""),
        ("openai: ", ""),
        ("", ""),
    ],
)
def test_an_unknown_name_is_a_usage_error(name: str, near: str, tmp_path: Path) -> None:
    done = told("models", "check", name, cwd=tmp_path, env=env(), code=2)
    assert done["error"]["code"] == "invalid"
    assert "names no model" in done["error"]["message"]
    assert '"openai:NAME"' in done["error"]["help"]
    assert (f"Did you mean `{near}`?" in done["error"]["help"]) is bool(near)


def test_the_list_has_every_prefix(tmp_path: Path) -> None:
    for words in (("models",), ("models", "list")):
        data = told(*words, cwd=tmp_path)["data"]
        assert [item["id"] for item in data["items"]] == [f"{prefix}:NAME" for prefix in prefixes()]
    lines = perdure("models", "list", "--output", "jsonl", cwd=tmp_path).stdout.splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["Model"] * len(prefixes()) + ["ModelList"]


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("https://api.example.org/v1?key=s", "api.example.org"),
        ("http://me:pw@example.org:81/x", "example.org:81"),
        ("", ""),
        ("http://[", ""),
    ],
)
def test_of_an_endpoint_only_the_host_is_shown(endpoint: str, host: str) -> None:
    assert Setup(endpoint).host == host


def test_every_adapter_that_a_name_gives_tells_its_setup() -> None:
    for prefix in prefixes():
        try:
            model: Model = named(f"{prefix}:x")
        except Exception:  # such a model needs more than a name  # noqa: BLE001
            continue
        assert setup_of(model).host, prefix
        assert setup_of(model).libraries, prefix


# -- with one call -----------------------------------------------------------------------------------------------------


def test_one_live_call_after_a_yes(server: FakeModels, tmp_path: Path) -> None:
    server.play(say("ready"))
    done = told("models", "check", NAME, "--live", "--yes", cwd=tmp_path, env=env(server))
    live = done["data"]["live"]
    assert (live["text"], live["finish"]) == ("ready", "stop")
    assert live["inputTokens"] > 0 < live["outputTokens"]
    assert 0 <= live["latencyMilliseconds"] < 60_000
    (seen,) = server.requests
    assert seen.key == KEY
    assert live["requestId"] in (seen.request_id, "")
    shows_no_key(json.dumps({**done, "data": {**done["data"], "live": None}}))
    human = perdure("models", "check", NAME, "--live", "--yes", cwd=tmp_path, env=env(server))
    assert "answered in" in human.stdout


def test_without_a_yes_and_a_terminal_it_is_refused(server: FakeModels, tmp_path: Path) -> None:
    done = told("models", "check", NAME, "--live", cwd=tmp_path, env=env(server), code=2)
    assert "--yes" in done["error"]["help"]
    assert perdure("models", "check", NAME, "--live", cwd=tmp_path, env=env(server), input="y\n", code=2).stdout == ""
    assert server.connections == 0


@pytest.mark.parametrize(("answer", "code", "calls"), [("y\n", 0, 1), ("n\n", 130, 0), ("\n", 130, 0)])
def test_on_a_terminal_it_asks(server: FakeModels, tmp_path: Path, answer: str, code: int, calls: int) -> None:
    shown, exits = on_terminal(["models", "check", NAME, "--live"], answer, tmp_path, env(server))
    assert f"Send one call to {named(NAME).name} at 127.0.0.1:{server.port}?" in shown
    assert exits == code, shown
    assert len(server.requests) == calls


def on_terminal(words: list[str], answer: str, cwd: Path, extra: dict[str, str]) -> tuple[str, int]:
    """Run a command with a terminal for its streams, and type ``answer`` once it asks."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*PROGRAM, *words], cwd=cwd, env=environment({**extra, "COLUMNS": "200"}), stdin=theirs, stdout=theirs,
            stderr=theirs, close_fds=True,
        )  # fmt: skip
        os.close(theirs)
        shown, typed, deadline = b"", False, time.monotonic() + 60
        while time.monotonic() < deadline:
            if not select.select([ours], [], [], 0.1)[0]:
                continue
            try:
                piece = os.read(ours, 65_536)
            except OSError:  # the last holder of the other end closed it
                break
            shown += piece
            if not piece:
                break
            if not typed and b"[y/N]" in shown:
                os.write(ours, answer.encode())
                typed = True
        return shown.decode(), process.wait(timeout=30)
    finally:
        os.close(ours)


def test_a_failure_of_the_provider_is_exit_6_and_shows_no_key(server: FakeModels, tmp_path: Path) -> None:
    def echo(seen: Seen) -> Status:
        return Status(401, "key", message=f"Incorrect API key provided: {seen.key}.")

    for words in ((), ("--verbose",), ("--output", "json")):
        server.play(echo)
        done = perdure("models", "check", NAME, "--live", "--yes", *words, cwd=tmp_path, env=env(server), code=6)
        assert len(server.requests) == 1
        assert KEY not in done.stdout + done.stderr


def test_what_is_not_there_is_exit_6(tmp_path: Path) -> None:
    away: dict[str, Any] = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": "http://127.0.0.1:9/v1"}
    done = told("models", "check", NAME, "--live", "--yes", cwd=tmp_path, env=away, code=6)
    assert done["error"]["code"] == "model"
