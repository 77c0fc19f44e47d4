"""What the documentation shows is run: every example, the tutorial and the README's first lines, every block of a guide."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.providers.scripted import call, say
from support.fake_llm import FakeLLM, Reply
from support.fake_models import FakeModels
from support.pages import blocks, matches, play

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SECONDS_MAX = 100

PRINTED = {
    "approvals.py": """
        refund asks for {'order': 'o2', 'cents': 90000}; booked so far: ['o1:900']
        run: completed
          o1 confirmed refunded 900 cents of o1
          o2 confirmed refunded 90000 cents of o2
        refund asks for {'order': 'o2', 'cents': 90000}; booked so far: ['o1:900']
        run: completed
          o1 confirmed refunded 900 cents of o1
          o2 withdrawn Approval rejected by ann: no goods came back
        booked in the end: ['o1:900']
    """,
    "crash_sweep.py": """
        deaths: … boundaries; broken runs: 0
        twin: pay took place 2 times under key key_…; 1 permitted.
    """,
    "durable_steps.py": """
        the first worker ended with -9
        answer: Published.
        steps: upload confirmed, index confirmed, announce confirmed
        done: upload
        done: index
        done: announce https://example.org/report under key_…
    """,
    "first_agent.py": """
        in memory: 7 left after 2 turns
        same work: True
        settled: completed
        read back: 7 left
        verified: True
    """,
    "live_model.py": """
        skipped: no model server answers here. Start one, for example `ollama serve` with a small model, or set
        PERDURE_LIVE_BASE_URL and PERDURE_LIVE_MODEL to one that speaks OpenAI's Chat Completions.
    """,
    "openai_compatible.py": """
        skipped: set EXAMPLE_BASE_URL or OPENAI_API_KEY to run this with a real model
    """,
    "refunds_with_probe.py": """
        the first worker ended with -9
        probe: the bank has booked it
        answer: Your refund is on its way.
        effect: confirmed by verdict applied of probe
        bookings: 1
    """,
    "several_workers.py": """
        settled: 24 of 24 {'completed'}
        verified: True
        parcels by key: 24
        workers that packed: two or more
    """,
}


def run(name: str, **environment: str) -> str:
    """What an example prints; it must end well and say nothing on stderr."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "EXAMPLE_", "PERDURE_"))}
    inherited["PERDURE_LIVE_BASE_URL"] = "http://127.0.0.1:9/v1"  # where nobody answers, whatever runs on this machine
    done = subprocess.run(
        [sys.executable, name], cwd=EXAMPLES, env={**inherited, **environment}, capture_output=True, text=True,
        timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def flat(text: str) -> str:
    """Text without the indentation of its lines."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_shows(name: str) -> None:
    printed = run(name)
    assert matches(flat(PRINTED[name]), flat(printed)), printed


def test_every_example_is_run_and_says_how() -> None:
    found = {path.name: ast.get_docstring(ast.parse(path.read_bytes())) for path in EXAMPLES.glob("*.py")}
    assert set(found) == set(PRINTED)
    for name, header in found.items():
        assert header, name
        assert f"python examples/{name}" in header, name


def test_the_example_of_a_real_model_speaks_to_a_server() -> None:
    with FakeLLM() as server:
        server.play(Reply(calls=(("c1", "weather", '{"city": "Oslo"}'),)), Reply("Sunny in Oslo."))
        printed = run("openai_compatible.py", EXAMPLE_BASE_URL=server.url, EXAMPLE_MODEL="qwen3")
    assert flat(printed) == "answer: Sunny in Oslo.\nturns: 2 by openai-chat:qwen3"


def test_the_live_example_speaks_to_a_server() -> None:
    with FakeModels() as server:
        script = [call("thermometer", city="Oslo"), say('{"city": "Oslo", "degrees": 7}')]
        server.play(*script, *script)
        live = {"PERDURE_LIVE_BASE_URL": server.address("chat"), "PERDURE_LIVE_MODEL": "qwen3"}
        printed = run("live_model.py", **live)
    assert "[thermometer: confirmed]" in printed
    assert "Report(city='Oslo', degrees=7) in 2 turns" in printed


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    """Its files are written and its commands run in an empty folder; what they print is what the page shows."""
    played = play((ROOT / page).read_text(encoding="utf-8"), tmp_path)
    for command, printed in played:
        if command.expected is not None:
            assert matches(command.expected, printed), (
                f"$ {command.line}\n{printed}\n-- the page says\n{command.expected}"
            )


PYTHON = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name in ("guides", "docs", "decisions")]


@pytest.mark.parametrize("page", [page for page in PYTHON if page.name != "tutorial.md"], ids=lambda page: page.name)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Each block stands on its own."""
    texts = [block.text for block in blocks(page.read_text(encoding="utf-8")) if block.language == "python"]
    for number, text in enumerate(texts):
        program = tmp_path / f"block_{number}.py"
        program.write_text(text)
        done = subprocess.run(
            [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}"


def test_commands_of_guides_exist() -> None:
    """A command that a guide shows is one that the program has."""
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^## (perdure .+)$", reference, re.MULTILINE))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md"))]:
        for block in blocks(page.read_text(encoding="utf-8")):
            for line in re.findall(r"^(?:\$ )?(perdure .+)$", block.text, re.MULTILINE):
                words = re.sub(r" --db \S+", "", line).split()
                assert {" ".join(words[:2]), " ".join(words[:3])} & known, line
