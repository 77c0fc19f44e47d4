"""``perdure worker`` and signals: drain, cancel, exit; also when tools swallow every exception or stop the loop."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from support.cli import APP, WAIT_SECONDS, perdure, told, until, worker

DB = ("--db", "work.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "module.py").write_text(APP)
    return tmp_path


def submit(folder: Path, text: str) -> str:
    return str(told("submit", "payer", "--app", "module:app", text, cwd=folder)["data"]["submission"])


def begun(folder: Path, tool: str) -> None:
    until((folder / f"{tool}.started").exists, f"{tool} to begin")


def says(process: subprocess.Popen[str], word: str) -> None:
    assert process.stderr is not None
    line = process.stderr.readline()
    assert word in line, line


def run(folder: Path, submission: str) -> dict[str, object]:
    data: dict[str, object] = told(*DB, "inspect", submission, cwd=folder)["data"]
    return data


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_drains(number: int, folder: Path) -> None:
    running = submit(folder, "slow 1")
    with worker(folder) as process:
        begun(folder, "slow")
        process.send_signal(number)
        says(process, "Draining: 1 ")
        later = submit(folder, "pay 5")
        (folder / "slow.go").touch()
        assert process.wait(WAIT_SECONDS) == 0
    assert run(folder, running)["status"] == "completed"
    assert run(folder, later)["state"] == "ready"


def test_an_idle_worker_drains_at_once_and_tells_it_as_json(folder: Path) -> None:
    with worker(folder, "--output", "jsonl") as process:
        process.terminate()
        out, _ = process.communicate(timeout=WAIT_SECONDS)
        assert process.returncode == 0
    assert [json.loads(line)["data"] for line in out.splitlines()][-1] == {"drained": True}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_second_signal_cancels_and_the_work_stays_owed(number: int, code: int, folder: Path) -> None:
    running = submit(folder, "slow 1")
    with worker(folder) as process:
        begun(folder, "slow")
        process.send_signal(number)
        says(process, "Draining")
        process.send_signal(number)
        says(process, "Cancelling")
        assert process.wait(WAIT_SECONDS) == code
    assert run(folder, running)["status"] is None
    (effect,) = told(*DB, "effects", "list", cwd=folder)["data"]["items"]
    assert effect["status"] in ("started", "unknown")
    with worker(folder):  # whoever comes next knows that nobody knows
        until(lambda: told(*DB, "effects", "list", "--status", "unknown", cwd=folder)["data"]["items"], "the unknown")
    told(*DB, "verify", cwd=folder)


@pytest.mark.parametrize("tool", ["deaf", "stuck"])
def test_case_J02_a_tool_that_swallows_everything_cannot_swallow_the_third_signal(tool: str, folder: Path) -> None:  # noqa: N802
    running = submit(folder, f"{tool} 1")
    with worker(folder) as process:
        begun(folder, tool)
        process.terminate()
        if tool == "deaf":
            says(process, "Draining")
        later = submit(folder, "pay 5")
        process.terminate()
        if tool == "deaf":
            says(process, "Cancelling")
        assert process.poll() is None
        until(lambda: process.poll() is not None or process.terminate(), "the third signal")
        assert process.returncode == 143
    assert run(folder, running)["status"] is None
    assert run(folder, later)["state"] == "ready"
    told(*DB, "verify", cwd=folder)


def test_a_killed_worker_loses_nothing(folder: Path) -> None:
    running, later = submit(folder, "slow 1"), submit(folder, "pay 5")
    with worker(folder) as process:
        begun(folder, "slow")
        process.kill()
        assert process.wait(WAIT_SECONDS) == -signal.SIGKILL
    with worker(folder):
        assert told(*DB, "settlement", later, "--wait", cwd=folder)["data"]["status"] == "completed"
        until(
            lambda: told(*DB, "settlement", running, cwd=folder, code=None)["data"]["state"] == "unknown", "the unknown"
        )


def test_a_worker_without_agents_to_run_is_refused(folder: Path) -> None:
    (folder / "client.py").write_text("import perdure as p\ndef app():\n    return p.open('work.db', workers=0)\n")
    assert "client" in told("worker", "--app", "client:app", cwd=folder, code=2)["error"]["message"]
    told("worker", "--db", "no/such/folder/w.db", cwd=folder, code=5)
    told("worker", "--app", "module:app", "--workers", "0", cwd=folder, code=2)
    assert "--workers" in perdure("worker", "--help", cwd=folder).stdout
