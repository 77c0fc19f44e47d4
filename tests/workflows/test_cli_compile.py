"""``check``, ``plan``, ``explain``, ``doctor`` and ``graph``: what they say, how they exit, and that they leave nothing behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from perdure.workflow import plan as plans
from perdure.workflow.dsl import Workflow

PROGRAM = [sys.executable, "-m", "perdure.cli"]
COMMANDS = ("check", "plan", "explain", "doctor", "graph")
HEAD = "apiVersion: perdure.dev/v1\nkind: Workflow\nmetadata: {name: flow}\nspec:\n"
GOOD = """  varsFiles: [vars.yaml]
  vars: {tier: inline, hidden: s3cr3t-value}
  policy: {writableRoots: [out], processAllowlist: ['true']}
  providers: {local: {kind: fake}}
  agents: {w: {provider: local, model: m, instructions: "In ${{ vars.region }}.", vars: {tone: calm}}}
  actions:
    set: {kind: builtin.assign}
    save: {kind: builtin.write}
    run: {kind: builtin.shell.exec, command: "true"}
  tasks:
    - {id: a, uses: "action:set", with: {t: "${{ vars.tier }}", h: "${{ vars.hidden }}"}}
    - {id: b, uses: "action:save", needs: [a], with: {path: out/x, content: y}}
    - {id: c, uses: "action:run", needs: [a], when: "vars.region == 'eu'"}
    - {id: d, uses: "agent:w", needs: [c]}
    - {id: e, uses: "action:set", foreach: {items: [1]}}
"""


class Shell:
    """A folder in which commands are typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PERDURE_DB": ""}
        del self.env["PERDURE_DB"]

    def write(self, spec: str = GOOD, name: str = "flow.yaml") -> None:
        (self.folder / name).write_text(HEAD + spec)
        (self.folder / "vars.yaml").write_text("region: eu\ntier: file\n")

    def run(self, *words: str, code: int = 0) -> tuple[str, str]:
        before = self.files()
        ran = subprocess.run(
            [*PROGRAM, *words], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == code, (ran.returncode, ran.stdout, ran.stderr)
        assert "Traceback" not in ran.stderr
        assert self.files() == before, "it wrote something"
        return ran.stdout, ran.stderr

    def json(self, *words: str, code: int = 0) -> Any:
        return json.loads(self.run("--output", "json", *words, code=code)[0])

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }

    def needs(self, code: int) -> dict[str, tuple[bool, str]]:
        items = self.json("doctor", "flow.yaml", code=code)["data"]["items"]
        return {item["need"]: (item["ready"], item["detail"]) for item in items}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    made = Shell(tmp_path)
    made.write()
    return made


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on which nobody may call."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server.getsockname()[1]
        with pytest.raises(BlockingIOError):
            server.accept()


# -- check ----------------------------------------------------------------------------------------------------------------


def test_check_of_a_good_document(shell: Shell) -> None:
    out, _ = shell.run("check", "flow.yaml")
    assert out.startswith("flow.yaml: flow is good: 6 tasks, plan ")
    found = shell.json("check", "flow.yaml")
    plan = Workflow.load(shell.folder / "flow.yaml").compile()
    assert found["ok"] is True
    assert (found["kind"], found["diagnostics"]) == ("Check", [])
    assert found["data"] == {"workflow": "flow", "digest": plan.digest, "tasks": 6, "warnings": 0}


def test_check_lists_every_finding_with_place_code_and_help(shell: Shell) -> None:
    shell.write(
        "  actions: {set: {kind: builtin.assign}}\n  tasks: [{id: a, uses: 'action:sit'}, {id: b, uses: 'agent:x', needs: [c]}]\n"
    )
    out, err = shell.run("check", "flow.yaml", code=2)
    assert out == ""
    assert err.splitlines() == [
        "flow.yaml:6:19: error missing_reference: There is no action `sit`. (Did you mean `set`?)",
        "flow.yaml:6:48: error missing_reference: There is no agent `x`.",
        "flow.yaml:6:73: error missing_reference: Task `b` needs `c`, which does not exist.",
        "Error: 3 findings in flow.yaml.",
    ]
    found = shell.json("check", "flow.yaml", code=2)
    assert (found["ok"], found["error"]["code"], found["error"]["exitCode"], found["error"]["run"]) == (
        False,
        "invalid",
        2,
        None,
    )
    assert found["diagnostics"][0] == {
        "code": "missing_reference", "severity": "error", "file": "flow.yaml", "line": 6, "column": 19,
        "path": "spec.tasks[0].uses", "message": "There is no action `sit`.", "help": "Did you mean `set`?",
    }  # fmt: skip


def test_check_tells_warnings_and_is_content(shell: Shell) -> None:
    shell.write(
        "  actions: {set: {kind: builtin.assign}}\n  subworkflows: {s: {version: 1.0.0, tasks: [{id: t, uses: 'action:set'}]}}\n"
        "  tasks: [{id: a, uses: 'workflow:s', timeoutSeconds: 5}]\n"
    )
    out, err = shell.run("check", "flow.yaml")
    assert "is good" in out
    assert "flow.yaml:7:39: warning ignored_field" in err
    found = shell.json("check", "flow.yaml")
    assert (found["ok"], found["data"]["warnings"], found["diagnostics"][0]["severity"]) == (True, 1, "warning")


def test_policy_alone_is_exit_3_and_with_anything_else_2(shell: Shell) -> None:
    denied = GOOD.replace("writableRoots: [out]", "writableRoots: [out], toolsDeny: [filesystem.write]")
    shell.write(denied)
    for command in COMMANDS:
        found = shell.json(command, "flow.yaml", code=3)
        assert (found["error"]["code"], [one["code"] for one in found["diagnostics"]]) == ("denied", ["policy_denied"])
    shell.write(denied.replace("action:run", "action:ran"))
    assert {one["code"] for one in shell.json("check", "flow.yaml", code=2)["diagnostics"]} == {
        "policy_denied",
        "missing_reference",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_a_document_that_is_wrong_or_not_there_is_exit_2(shell: Shell, command: str) -> None:
    assert "No such file" in shell.run(command, "gone.yaml", code=2)[1]
    shell.write("  tasks: [\n")
    assert "error yaml_syntax" in shell.run(command, "flow.yaml", code=2)[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_variables_reach_every_command(shell: Shell, command: str) -> None:
    shell.write(GOOD.replace("vars.tier", "vars.given"))
    assert "has no variable `given`" in shell.run(command, "flow.yaml", code=2)[1]
    (shell.folder / "more.yaml").write_text("given: 1\n")
    shell.run(command, "flow.yaml", "--vars-file", "more.yaml")
    shell.run(command, "flow.yaml", "--var", "given=[1]", "--workspace", ".")
    assert "no JSON" in shell.run(command, "flow.yaml", "--var", "given=x y", code=2)[1]
    assert "is reserved" in shell.run(command, "flow.yaml", "--var", "given=1", "--var", "matrix=1", code=2)[1]


@pytest.mark.parametrize(
    "words", [("check",), ("check", "flow.yaml", "--app", "a:b"), ("plan",), ("graph", "flow.yaml", "--format", "png")]
)
def test_words_that_do_not_fit(shell: Shell, words: tuple[str, ...]) -> None:
    assert "Error: " in shell.run(*words, code=2)[1]


# -- plan and explain -------------------------------------------------------------------------------------------------------


def test_plan_shows_tasks_in_order_and_what_each_touches(shell: Shell) -> None:
    out, _ = shell.run("plan", "flow.yaml")
    rows = {line.split()[0]: line for line in out.splitlines() if line[:1] in set("abcde") and "  " in line}
    child = next(id for id in rows if id.startswith("e--0000-"))
    assert [id for id in rows if id in {"a", "b", "c", "d", child, "e"}] == ["a", "b", "c", "d", child, "e"]
    assert "workspace_mutate, idempotent" in rows["b"]
    assert "partially" in rows["b"]
    assert "process_execution, once" in rows["c"]
    assert "perhaps" in rows["c"]
    assert 'vars.region == "eu"' in rows["c"]
    assert "model, once" in rows["d"]
    assert "perhaps" not in rows["d"]
    assert "fully" in rows["e"]
    assert "aggregate" in rows["e"]
    assert "provider local (fake): w" in out
    assert "processes true" in out


def test_plan_as_json_is_the_plan(shell: Shell) -> None:
    data = shell.json("plan", "flow.yaml")["data"]
    plan = Workflow.load(shell.folder / "flow.yaml").compile()
    assert data.pop("digest") == plan.digest
    assert plans.decode(json.dumps(data).encode()) == plan


def test_explain_says_where_variables_come_from_and_never_what_they_are(shell: Shell) -> None:
    out, _ = shell.run("explain", "flow.yaml", "--var", "extra=1")
    assert "a: extra from --var, hidden from spec.vars, region from spec.varsFiles, tier from spec.vars" in out
    assert "tone from agent.vars" in out
    assert "never repeated by itself (once): c, d" in out
    assert "may ask for approval: b, c" in out
    found = shell.json("explain", "flow.yaml")
    [child] = [id for id in found["data"]["variables"] if id.startswith("e--")]
    assert found["data"]["variables"][child]["item"] == "expansion"
    assert (found["data"]["once"], found["data"]["approvals"]) == (["c", "d"], ["b", "c"])
    assert found["data"]["files"].keys() == {"vars.yaml"}
    for text in (out, json.dumps(found)):
        assert "s3cr3t-value" not in text
        assert "inline" not in text


# -- graph ----------------------------------------------------------------------------------------------------------------


def test_graph_in_both_forms(shell: Shell) -> None:
    assert shell.run("graph", "flow.yaml")[0].startswith("flowchart TD\n")
    picture = shell.run("graph", "flow.yaml", "--format", "svg")[0]
    assert ET.fromstring(picture).tag.endswith("svg")
    assert shell.json("graph", "flow.yaml", "--format", "svg")["data"] == {"format": "svg", "text": picture}


# -- doctor ---------------------------------------------------------------------------------------------------------------


def test_doctor_is_content_where_everything_is(shell: Shell) -> None:
    needs = shell.needs(0)
    assert needs.keys() == {"workspace", "program true", "writable folder out"}
    assert all(ready for ready, _ in needs.values())
    assert "yes" in shell.run("doctor", "flow.yaml")[0]


EVERYTHING = """  policy:
    writableRoots: [out]
    processAllowlist: [gone, "true"]
    environmentAllowlist: [H3_HERE, H3_GONE, H3_EMPTY]
    secretFileRoots: [secrets]
    secretProcessAllowlist: [printf, nowhere]
    networkAllowlist: [127.0.0.1]
    network: {allowPrivate: true}
  providers:
    far: {kind: openai, credential: {file: secrets/key}}
    near: {kind: anthropic}
    unused: {kind: google}
  agents:
    w: {provider: far, model: m, instructions: go}
    z: {provider: near, model: m, instructions: go}
  actions:
    gone: {kind: builtin.shell.exec, command: gone}
    "true": {kind: builtin.shell.exec, command: "true", cwd: nowhere, env: {A: {env: H3_HERE}, B: {env: H3_GONE}, C: {env: H3_EMPTY}, D: plain}}
    local: {kind: builtin.python, call: "local_bodies:run"}
    missing: {kind: builtin.python, call: "not_there.at_all:run"}
    box: {kind: builtin.shell.exec, command: "true", isolation: container, container: {image: "sha256:DIGEST"}}
    ask: {kind: builtin.http, url: "http://127.0.0.1:PORT/", headers: {K: {process: {command: printf, args: [x]}}, L: {process: {command: nowhere}}, M: {file: secrets/none}, N: {file: elsewhere}}}
    far: {kind: builtin.http, url: "https://denied.example/"}
    call: {kind: mcp.call, server: s, tool: t}
    unused: {kind: builtin.shell.exec, command: gone}
  mcpServers: {s: {url: "http://127.0.0.1:PORT/mcp"}, t: {url: "http://unused.example/"}}
  tasks:
    - {id: a, uses: "action:gone"}
    - {id: b, uses: "action:true"}
    - {id: c, uses: "action:local"}
    - {id: d, uses: "action:missing"}
    - {id: e, uses: "action:box"}
    - {id: f, uses: "action:ask"}
    - {id: g, uses: "action:far"}
    - {id: h, uses: "action:call"}
    - {id: i, uses: "agent:w"}
    - {id: j, uses: "agent:z"}
"""


def test_doctor_says_of_each_need_whether_it_is_met_and_sends_nothing(
    shell: Shell, listener: int, tmp_path: Path
) -> None:
    shell.write(EVERYTHING.replace("PORT", str(listener)).replace("DIGEST", "0" * 64))
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("never-shown")
    (tmp_path / "elsewhere").write_text("x")
    (tmp_path / "local_bodies.py").write_text("raise SystemExit('it was imported')\n")
    shell.env |= {"H3_HERE": "also-never-shown", "H3_EMPTY": "", "ANTHROPIC_API_KEY": ""}
    shell.env["PATH"] = os.pathsep.join(["/usr/bin", "/bin"])
    needs = shell.needs(6)
    ready = {need: ready for need, (ready, _) in needs.items()}
    assert ready.pop("container engine") is False
    assert ready.pop("image sha256:" + "0" * 64) is False
    assert ready == {
        "workspace": True,
        "extra models for provider far": True, "credential of provider far": True,
        "extra models for provider near": True, "credential of provider near": False,
        "program gone": False, "program true": True, "folder nowhere": False,
        "secret A of action true": True, "secret B of action true": False, "secret C of action true": False,
        "function local_bodies:run": True, "function not_there.at_all:run": False,
        "address of action ask": True, "address of action far": False,
        "secret K of action ask": True, "secret L of action ask": False, "secret M of action ask": False,
        "secret N of action ask": False,
        "extra mcp for MCP server s": True, "address of MCP server s": True,
    }  # fmt: skip
    assert "ANTHROPIC_API_KEY" in needs["credential of provider near"][1]
    assert "secretFileRoots" in needs["secret N of action ask"][1]
    out, err = shell.run("doctor", "flow.yaml", code=6)
    assert "never-shown" not in out + err + json.dumps(needs)
    found = shell.json("doctor", "flow.yaml", code=6)
    assert (found["ok"], found["error"]["code"], found["error"]["exitCode"]) == (False, "not_ready", 6)


def test_doctor_asks_the_engine_for_the_image(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    engine = folder / "docker"
    engine.write_text('#!/bin/sh\n[ "$1 $2" = "image inspect" ] && [ "$3" = "sha256:' + "1" * 64 + '" ]\n')
    engine.chmod(0o755)
    shell.env["PATH"] = f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin"
    box = "{kind: builtin.shell.exec, command: inside, isolation: container, container: {image: 'sha256:DIGEST'}}"
    spec = f"  policy: {{processAllowlist: [inside]}}\n  actions: {{box: {box}}}\n  tasks: [{{id: a, uses: 'action:box'}}]\n"
    shell.write(spec.replace("DIGEST", "1" * 64))
    assert all(ready for ready, _ in shell.needs(0).values())
    shell.write(spec.replace("DIGEST", "2" * 64))
    needs = shell.needs(6)
    assert needs["container engine"] == (True, str(engine))
    assert "never pulled" in needs["image sha256:" + "2" * 64][1]


def test_doctor_needs_a_workspace(shell: Shell) -> None:
    shell.write(GOOD.replace("policy: {", "policy: {workspaceRoot: gone, "))
    assert shell.needs(6)["workspace"][0] is False


def test_a_missing_extra_is_one_sentence(shell: Shell) -> None:
    """CEL is an extra: a document that needs it says so at its place; one that does not never looks for it."""
    block = "import sys; sys.modules['cel_expr_python'] = None\nfrom perdure.cli.main import main\nsys.exit(main())"

    def check() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", block, "check", "flow.yaml"],
            cwd=shell.folder,
            capture_output=True,
            text=True,
            check=False,
        )

    assert check().returncode == 0
    shell.write(GOOD.replace("vars.region == 'eu'", "size(vars.region) > 1"))
    ran = check()
    assert ran.returncode == 2
    assert "pip install 'perdure[cel]'" in ran.stderr
    assert ran.stderr.startswith("flow.yaml:17:47: ")
