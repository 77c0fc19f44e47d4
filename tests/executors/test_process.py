"""Processes: direct arguments, an environment of their own, bounded output, and a group that ends whole."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from perdure.definitions.workflow import Action, Container, Policy, SecretRef
from perdure.errors import Denied, Invalid
from perdure.executors import container
from perdure.executors.process import Processes
from perdure.ports.executor import Call, Failed, InDoubt, Performed, Workspace

pytestmark = pytest.mark.anyio
PYTHON = Path(sys.executable).name


async def note(name: str, value: Any) -> None:
    raise AssertionError("a process notes nothing")


def call(root: Path, code: str = "", *, timeout: float = 10.0, policy: Policy | None = None, **fields: Any) -> Call:
    given = {"kind": "builtin.shell.exec", "command": sys.executable, "args": ("-c", code), **fields}
    action = Action(**given)
    return Call(
        run="r", task="t", attempt=1, effect="e", key="k", action=action, input={}, workspace=Workspace(root),
        policy=policy or Policy(process_allowlist=(PYTHON, "sh")), timeout=timeout, note=note,
    )  # fmt: skip


async def run(wanted: Call) -> Performed:
    assert await Processes().prepare(wanted) is None
    return await Processes().execute(wanted)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z" if Path("/proc").exists() else True


async def gone(pid: int) -> None:
    async with asyncio.timeout(5):
        while alive(pid):  # noqa: ASYNC110 - another process ends; nothing tells
            await asyncio.sleep(0.01)


async def test_arguments_are_given_as_they_are_and_never_through_a_shell(tmp_path: Path) -> None:
    code = "import sys, json; print(json.dumps([sys.argv[1:], sys.stdin.read()]))"
    found = await run(call(tmp_path, args=("-c", code, "$HOME; rm -rf *", "a b"), stdin="in\n"))
    assert found.result["stdout"] == '[["$HOME; rm -rf *", "a b"], "in\\n"]\n'
    assert (found.result["exitCode"], found.result["stderr"]) == (0, "")


async def test_the_environment_holds_what_is_allowed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREE", "free")
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    policy = Policy(process_allowlist=(PYTHON,), environment_allowlist=("FREE", "TOKEN"))
    code = "import os; print(sorted(os.environ)); print(os.environ['MINE'], os.environ['SECRET'])"
    found = await run(call(tmp_path, code, policy=policy, env={"MINE": "x", "SECRET": SecretRef(env="TOKEN")}))
    assert "FREE" in found.result["stdout"]
    assert "PYTEST_CURRENT_TEST" not in found.result["stdout"]
    assert "x [REDACTED]" in found.result["stdout"]
    assert "hunter2" not in str(found.result)
    with pytest.raises(Denied, match="environmentAllowlist"):
        await run(call(tmp_path, code, env={"SECRET": SecretRef(env="TOKEN")}))


async def test_a_failure_keeps_what_was_printed(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="exited with 3") as failed:
        await run(call(tmp_path, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"))
    assert failed.value.kind == "exit"
    assert failed.value.output == {"exitCode": 3, "stdout": "out\n", "stderr": "err\n"}


@pytest.mark.parametrize("limits", [{"stdout_limit_bytes": 1000}, {"combined_output_limit_bytes": 1000}])
async def test_output_over_its_limit_ends_the_process_and_keeps_what_was_read(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    code = "import os, sys\nopen('pid', 'w').write(str(os.getpid()))\nwhile True: sys.stdout.write('x' * 4096); sys.stdout.flush()"
    with pytest.raises(Failed, match="more than") as failed:
        await run(call(tmp_path, code, **limits))
    assert len(failed.value.output["stdout"]) == 1000
    await gone(int((tmp_path / "pid").read_text()))


GRANDCHILD = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"])
open("pids", "w").write(f"{os.getpid()} {child.pid}")
print("ready", flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""


async def test_past_its_time_the_whole_group_is_ended_and_nobody_can_say(tmp_path: Path) -> None:
    with pytest.raises(InDoubt, match="did not end within") as doubt:
        await run(call(tmp_path, GRANDCHILD, timeout=1.0))
    assert (doubt.value.kind, doubt.value.output["stdout"]) == ("timeout", "ready\n")
    for pid in (tmp_path / "pids").read_text().split():
        await gone(int(pid))


async def test_cancelled_it_ends_within_a_second(tmp_path: Path) -> None:
    task = asyncio.ensure_future(run(call(tmp_path, GRANDCHILD)))
    async with asyncio.timeout(5):
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():  # noqa: ASYNC110 - its file tells
            await asyncio.sleep(0.01)
    before = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - before < 1.0
    for pid in (tmp_path / "pids").read_text().split():
        await gone(int(pid))


async def test_a_grandchild_that_keeps_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)']); print('done')"
    )
    before = time.monotonic()
    found = await run(call(tmp_path, code))
    assert found.result["stdout"] == "done\n"
    assert time.monotonic() - before < 5


async def test_what_may_not_run_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(Denied, match="processAllowlist"):
        await Processes().prepare(call(tmp_path, command="rm"))
    with pytest.raises(Invalid, match="no program"):
        await Processes().prepare(
            call(tmp_path, command="no-such-program", policy=Policy(process_allowlist=("no-such-program",)))
        )
    with pytest.raises(Denied, match="leads out"):
        await Processes().prepare(call(tmp_path, cwd=".."))


EXTENSION = """
import json, sys
name = "perdure.dev/process-extension/v1"
shape = {"type": "object"}
if sys.argv[1].endswith("handshake"):
    print(json.dumps({"protocolVersion": name, "name": "double", "inputSchema": shape, "outputSchema": shape, "capabilities": ["math"]}))
else:
    given = json.load(sys.stdin)
    print(json.dumps({"protocolVersion": name, "effectId": given["effectId"], "output": {"n": given["input"]["n"] * 2}}))
"""


def extension(root: Path, text: str, **fields: Any) -> Call:
    (root / "ext.py").write_text(text)
    shape = {"type": "object"}
    wanted = call(
        root,
        kind="extension.process",
        args=("ext.py",),
        input_schema=shape,
        output_schema=shape,
        capabilities=("math",),
        **fields,
    )
    from msgspec.structs import replace

    return replace(wanted, input={"n": 21})


async def test_an_extension_shakes_hands_and_is_invoked(tmp_path: Path) -> None:
    assert (await run(extension(tmp_path, EXTENSION))).result == {"n": 42}


async def test_an_extension_that_is_another_is_not_invoked(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="does not declare"):
        await run(extension(tmp_path, EXTENSION.replace('["math"]', '["files"]')))


async def test_an_extension_that_fails_after_it_was_invoked_leaves_doubt(tmp_path: Path) -> None:
    with pytest.raises(InDoubt, match="was invoked"):
        await run(extension(tmp_path, EXTENSION.replace("given = json.load(sys.stdin)", "sys.exit(1)")))


IMAGE = "sha256:" + "0" * 64


async def test_without_an_engine_a_container_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Invalid, match="docker or podman is not installed"):
        await Processes().prepare(call(tmp_path, isolation="container", container=Container(image=IMAGE)))


def test_a_container_has_no_network_and_no_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "docker"
    engine.write_text("#!/bin/sh\nexit 1\n")
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    action = Action(kind="builtin.shell.exec", command="ls", isolation="container", container=Container(image=IMAGE))
    words = container.argv(action, ["ls", "-l"], tmp_path, {"A": "b"})
    assert words[0] == str(engine)
    assert words[-3:] == [IMAGE, "ls", "-l"]
    assert {
        "--network=none",
        "--read-only",
        "--cap-drop=ALL",
        "--user=65532:65532",
        "--pull=never",
        "--env=A=b",
    } <= set(words)
    with pytest.raises(Invalid, match="is not here"):
        container.require(action)
