"""The commands of workflows, in real processes: exit codes, ids at once, kills, owners, cancels, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = [sys.executable, "-m", "perdure.cli"]
PATIENCE = 30.0

FLOW = """
apiVersion: perdure.dev/v1
kind: Workflow
metadata: {name: slow}
spec:
  policy: {approval: never, processAllowlist: [sleep, "true"]}
  runtime: {maxConcurrency: 2}
  actions:
    sleep: {kind: builtin.shell.exec, command: sleep, args: ["60"]}
    quick: {kind: builtin.shell.exec, command: "true"}
    pay: {kind: builtin.python, call: "bodies:pay", effect: EFFECT}
    set: {kind: builtin.assign}
  tasks: TASKS
"""
BODIES = """
import pathlib, time

def pay(perdure_key=""):
    with open("paid", "a") as file:
        file.write(perdure_key + "\\n")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return "receipt"
"""
PAYING = '[{id: a, uses: "action:set"}, {id: pay, uses: "action:pay", needs: [a]}, {id: after, uses: "action:set", needs: [pay], with: {r: "${{ tasks.pay.output }}"}}]'


class Shell:
    """A folder in which commands are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = dict(os.environ)

    def write(self, tasks: str, effect: str = "once") -> None:
        (self.folder / "flow.yaml").write_text(FLOW.replace("TASKS", tasks).replace("EFFECT", effect))
        (self.folder / "bodies.py").write_text(BODIES)

    def run(self, *words: str, code: int | None = 0) -> str:
        ran = subprocess.run(
            [*PROGRAM, *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert code is None or ran.returncode == code, (ran.returncode, ran.stdout, ran.stderr)
        return ran.stdout + ran.stderr

    def json(self, *words: str, code: int | None = 0) -> Any:
        return json.loads(self.run("--output", "json", *words, code=code).splitlines()[-1])

    def start(self, *words: str) -> tuple[subprocess.Popen[str], str]:
        """A command that goes on, and the run id that it printed first."""
        process = subprocess.Popen(
            [*PROGRAM, *words], cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def until(self, fact: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not fact():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().split() if path.exists() else []

    def state(self, run: str) -> dict[str, str]:
        return {one["id"]: one["state"] for one in self.json("inspect", run)["data"]["tasks"]}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def end(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=PATIENCE)
    return process.returncode


def test_killed_inside_a_once_effect_the_branch_parks_and_a_verdict_leads_on(shell: Shell) -> None:
    shell.write(PAYING)
    process, run = shell.start("run", "flow.yaml")
    assert run.startswith("run_")
    shell.until(lambda: bool(shell.lines("paid")))
    process.send_signal(signal.SIGKILL)
    end(process)
    told = shell.run("resume", run, code=3)
    assert "Nobody knows whether task 'pay' took place" in told
    assert len(shell.lines("paid")) == 1, "it was not run again"
    [effect] = shell.json("effects", "list", run, "--status", "unknown")["data"]["items"]
    (shell.folder / "result.json").write_text('"receipt"')
    shell.run(
        "effects", "reconcile", effect["id"], "--verdict", "applied", "--reason", "seen", "--result-file", "result.json"
    )
    done = shell.json("resume", run)
    assert done["data"]["output"]["after"]["output"] == {"r": "receipt"}
    assert len(shell.lines("paid")) == 1
    shell.run("verify")


@pytest.mark.parametrize("effect", ["keyed", "idempotent", "observe"])
def test_killed_inside_an_effect_that_can_bear_it_the_run_resumes_by_itself(shell: Shell, effect: str) -> None:
    shell.write(PAYING, effect)
    process, run = shell.start("run", "flow.yaml")
    shell.until(lambda: bool(shell.lines("paid")))
    process.send_signal(signal.SIGKILL)
    end(process)
    (shell.folder / "go").touch()
    assert shell.json("resume", run)["data"]["state"] == "completed"
    keys = shell.lines("paid")
    assert (len(keys), len(set(keys))) == (2, 1), "again, under the same key"
    assert shell.state(run) == {"a": "succeeded", "pay": "succeeded", "after": "succeeded"}


def test_of_two_resumes_one_works_and_the_other_is_told_who_does(shell: Shell) -> None:
    shell.write(PAYING)
    shell.run("run", "flow.yaml", "--detach")
    run = shell.json("runs")["data"]["items"][0]["id"]
    process, _ = shell.start("resume", run)
    shell.until(lambda: bool(shell.lines("paid")))
    told = shell.run("resume", run, code=2)
    assert f"{run} is being worked on by w_" in told
    assert "whose lease ends at" in told
    (shell.folder / "go").touch()
    assert end(process) == 0
    assert len(shell.lines("paid")) == 1
    assert f"{run} is over: completed" in shell.run("resume", run, code=2)


def test_a_cancel_from_another_process_ends_a_command_within_a_second(shell: Shell) -> None:
    shell.write(
        '[{id: s, uses: "action:sleep"}, {id: q, uses: "action:quick"}, {id: after, uses: "action:quick", needs: [s]}]'
    )
    process, run = shell.start("run", "flow.yaml")
    shell.until(
        lambda: len([e for e in shell.json("effects", "list", run)["data"]["items"] if e["status"] == "started"]) == 1
    )
    shell.run("cancel", run, "--reason", "enough")
    before = time.monotonic()
    assert end(process) == 130
    assert time.monotonic() - before < 1.0
    assert shell.state(run) == {"s": "cancelled", "q": "succeeded", "after": "cancelled"}
    [unknown] = shell.json("effects", "list", run, "--status", "unknown")["data"]["items"]
    assert unknown["call"] == "s"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_durable_cancel(shell: Shell, number: signal.Signals) -> None:
    shell.write('[{id: s, uses: "action:sleep"}]')
    process, run = shell.start("run", "flow.yaml")
    shell.until(lambda: bool(shell.json("effects", "list", run)["data"]["items"]))
    process.send_signal(number)
    assert end(process) == 130
    assert shell.json("inspect", run)["data"]["status"] == "cancelled"


def test_the_timeout_of_the_command_cancels(shell: Shell) -> None:
    shell.write('[{id: s, uses: "action:sleep"}]')
    told = shell.run("run", "flow.yaml", "--timeout-seconds", "0.5", code=130)
    assert "cancelled" in told


def test_a_bad_document_leaves_nothing_behind(shell: Shell) -> None:
    shell.write('[{id: a, uses: "action:nowhere"}, {id: a, uses: "action:set"}]')
    for command in ("check", "plan", "run", "explain", "doctor", "graph"):
        told = shell.run(command, "flow.yaml", code=2)
        assert "flow.yaml:13:45: error duplicate_task" in told
    found = shell.json("check", "flow.yaml", code=2)
    assert found["ok"] is False
    assert found["error"]["exitCode"] == 2
    assert {one["code"] for one in found["diagnostics"]} == {"duplicate_task", "missing_reference"}
    assert set(found["diagnostics"][0]) == {"code", "severity", "file", "line", "column", "path", "message", "help"}
    assert not (shell.folder / ".perdure").exists()


def test_what_policy_forbids_exits_3_and_leaves_nothing_behind(shell: Shell) -> None:
    shell.write('[{id: a, uses: "action:set"}]')
    path = shell.folder / "flow.yaml"
    path.write_text(path.read_text().replace("processAllowlist: [sleep", "processAllowlist: [cat"))
    assert "processAllowlist does not name `sleep`" in shell.run("run", "flow.yaml", code=3)
    assert not (shell.folder / ".perdure").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--input", "x"), "not KEY=VALUE"), (("--inputs", "[1]"), "no object"), (("--inputs", "{"), "no JSON"),
        (("--var", "x=nope"), "no JSON"), (("--inputs-file", "gone.json"), "cannot be read"), (("--vars-file", "gone.yaml"), "cannot be read"),
        (("--workspace", "gone"), "no folder"), (("--timeout-seconds", "0"), "timeout-seconds"), (("--key", ""), "key"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(shell: Shell, words: tuple[str, ...], says: str) -> None:
    shell.write('[{id: a, uses: "action:set"}]')
    assert says in shell.run("run", "flow.yaml", *words, code=2)


def test_inputs_and_variables_of_the_command_line(shell: Shell) -> None:
    shell.write('[{id: a, uses: "action:set", with: {i: "${{ inputs }}", v: "${{ vars.v }}"}}]')
    (shell.folder / "in.json").write_text('{"a": 1, "b": 1}')
    (shell.folder / "vars.yaml").write_text("v: low\n")
    given = ("--inputs", '{"z": 0}', "--inputs-file", "in.json", "--input", "b=[2]", "--input", "c=text")
    found = shell.json("run", "flow.yaml", *given, "--vars-file", "vars.yaml", "--var", 'v="high"')
    assert found["data"]["output"]["a"]["output"] == {"i": {"a": 1, "b": [2], "c": "text"}, "v": "high"}


def test_jsonl_tells_each_task_as_it_happens(shell: Shell) -> None:
    shell.write('[{id: a, uses: "action:set"}, {id: b, uses: "action:quick", needs: [a]}]')
    lines = [json.loads(line) for line in shell.run("--output", "jsonl", "run", "flow.yaml").splitlines()]
    assert [lines[0]["kind"], lines[0]["data"]["event"], lines[-1]["kind"]] == ["Run", "admitted", "Run"]
    assert ("b", "succeeded") in [(one["data"].get("id"), one["data"].get("state")) for one in lines[1:-1]]


def test_watch_inspect_graph_and_runs_show_a_run(shell: Shell) -> None:
    shell.write('[{id: a, uses: "action:set"}, {id: b, uses: "action:quick", needs: [a]}]')
    run = shell.json("run", "flow.yaml")["data"]["run"]
    assert "succeeded" in shell.run("watch", run)
    shown = shell.run("inspect", run)
    assert "slow" in shown
    assert "succeeded" in shown
    assert "fill:#2e7d32" in shell.run("graph", run)
    picture = shell.run("graph", run, "--format", "svg")
    assert picture.startswith("<svg ")
    assert [one["agent"] for one in shell.json("runs")["data"]["items"]] == ["slow"]
    assert shell.json("runs", "--agent", "other")["data"]["items"] == []
    assert "completed" in shell.run("explain", run) or "settled" in shell.run("explain", run)


def test_a_worker_without_an_app_runs_workflows(shell: Shell) -> None:
    shell.write('[{id: a, uses: "action:set"}]')
    shell.run("run", "flow.yaml", "--detach")
    run = shell.json("runs")["data"]["items"][0]["id"]
    process = subprocess.Popen([*PROGRAM, "worker"], cwd=shell.folder, env=shell.env, stdout=subprocess.PIPE, text=True)
    shell.until(lambda: shell.json("inspect", run)["data"]["status"] == "completed")
    process.send_signal(signal.SIGTERM)
    assert end(process) == 0


def test_resume_of_an_agents_run_or_of_nothing(shell: Shell) -> None:
    shell.write('[{id: a, uses: "action:set"}]')
    shell.run("run", "flow.yaml")
    assert "There is no submission" in shell.run("resume", "run_nowhere", code=2)
