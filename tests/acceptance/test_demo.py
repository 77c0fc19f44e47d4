"""The demo as a newcomer runs it, with files of their own, and with lies that it must notice."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perdure.demo.bank import read_ledger
from support.cli import environment, perdure, told

SECONDS_MAX = 50.0


def test_the_demo_runs_and_every_claim_holds(tmp_path: Path) -> None:
    began = time.monotonic()
    done = perdure("demo", "--keep", "kept", cwd=tmp_path)
    assert time.monotonic() - began < SECONDS_MAX
    marks = [line.strip() for line in done.stdout.splitlines() if line.strip().startswith(("✓", "✗"))]
    assert len(marks) > 20
    assert all(mark.startswith("✓") for mark in marks)
    assert [path.name for path in (tmp_path / "kept").glob("*.db")] == ["demo.db"]
    bookings = read_ledger(tmp_path / "kept" / "bank.ledger")
    assert len({booking.order for booking in bookings}) == len(bookings) == 10
    told("--db", "kept/demo.db", "verify", cwd=tmp_path)
    runs = told("--db", "kept/demo.db", "runs", cwd=tmp_path)["data"]["items"]
    assert [run["status"] for run in runs] == ["completed"] * 12
    assert told("--db", "kept/demo.db", "obligations", cwd=tmp_path)["data"]["items"] == []
    again = told("demo", "--keep", "kept", cwd=tmp_path, code=2)
    assert "is not empty" in again["error"]["message"]


def test_requests_of_ones_own(tmp_path: Path) -> None:
    requests = [{"order": f"Ä-{number}", "text": "bitte", "cents": number} for number in range(1, 8)]
    (tmp_path / "own.jsonl").write_text("\n".join(json.dumps(one) for one in requests), encoding="utf-8")
    data = told("demo", "--input", "own.jsonl", cwd=tmp_path)["data"]
    assert [(item["id"], item["cents"], item["bookings"]) for item in data["items"]] == [
        (one["order"], one["cents"], 1) for one in requests
    ]
    assert all(claim["holds"] for claim in data["claims"])
    assert [path.name for path in tmp_path.iterdir()] == ["own.jsonl"]


def test_one_request_is_enough(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"order": "o", "text": "t", "cents": 1}\n')
    lines = perdure("demo", "--input", "one.jsonl", "--output", "jsonl", cwd=tmp_path).stdout.splitlines()
    kinds = [json.loads(line)["kind"] for line in lines]
    assert (set(kinds[:-1]), kinds[-1]) == ({"Claim"}, "Demo")


def test_a_bad_file_is_refused_with_all_its_problems(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(
        '{"order": "a", "cents": -1}\nnot json\n{"order": "", "text": "t", "cents": 1}\n'
    )
    shown = perdure("demo", "--input", "bad.jsonl", "--keep", "kept", cwd=tmp_path, code=2)
    assert shown.stdout == ""
    assert all(f"bad.jsonl:{line}:" in shown.stderr for line in (1, 2, 3))
    perdure("demo", "--input", "missing.jsonl", cwd=tmp_path, code=2)
    (tmp_path / "empty.jsonl").touch()
    perdure("demo", "--input", "empty.jsonl", cwd=tmp_path, code=2)
    assert not (tmp_path / "kept").exists()


BETWEEN = "class Lying(scenario.Demo):\n    async def meanwhile(self, effect):\n        "
AGAIN = "await self.bank.client().refund(effect.arguments['order'], effect.arguments['cents'], effect.key)\n"
OTHER = "await self.bank.client().refund('KL-20433', 5, 'another')\n"
MORE = "await self.app.submit(scenario.agent.agent, self.requests[0], thread='desk-9', key='more')\n"
LIES = {  # what is done behind the demo's back, and the claim that must notice
    "the bank books it again": (BETWEEN + AGAIN, "the refund was dispatched exactly once"),
    "the bank books another": (
        BETWEEN + OTHER,
        "the bank booked the 10 refunds that the store knows, each once, and no",
    ),
    "work nobody asked for": (BETWEEN + MORE, "the bank booked the 10 refunds that the store knows, each once, and no"),
    "the refund is declared harmless": (
        "class Lying(scenario.Demo):\n    target = 'harmless:app'\n",
        "recovery has judged the refund within",
    ),
}
HARMLESS = """
import dataclasses
from perdure.demo import agent
agent.refund = dataclasses.replace(agent.refund, effect="idempotent")
tools = [agent.find_order, agent.refund]
agent.agent = agent.p.Agent(
    agent.NAME, input=agent.RefundRequest, output=agent.Outcome, tools=tools, model=agent.Scripted(agent.decide)
)
app = agent.app
"""


@pytest.mark.parametrize("lie", LIES)
def test_twin_a_claim_that_is_made_false_is_named(lie: str, tmp_path: Path) -> None:
    source, claim = LIES[lie]
    (tmp_path / "harmless.py").write_text(HARMLESS)
    (tmp_path / "twin.py").write_text(
        f"import sys\nfrom perdure.cli.main import main\nfrom perdure.demo import scenario\n{source}"
        "scenario.Demo = Lying\nscenario.WAIT_SECONDS_MAX = 3.0\nsys.exit(main(['demo']))\n"
    )
    done = subprocess.run(
        [sys.executable, "twin.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 4, done.stdout + done.stderr
    assert f"This claim does not hold: {claim}" in done.stderr
    assert done.stdout.count("✗") == 1
