"""Runs that use MCP servers and A2A peers: what they start, ask for and leave; killed, continued, cancelled."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.app import workflows
from perdure.projections.workflow import WorkflowView
from support.a2a_puppet import Peer
from support.flows import Flows, flow, opened, outputs, states, task

pytestmark = pytest.mark.anyio
TESTS = Path(__file__).parents[1]
PYTHON = Path(sys.executable).name
OPEN = f"policy: {{approval: never, processAllowlist: [{PYTHON}], networkAllowlist: [127.0.0.1], network: {{allowPrivate: true}}}}\n"
ASKING = OPEN.replace("never", "mutations")


def shop(folder: Path, program: str = "mcp_tools.py", mode: str = "", tools: str = "{}") -> str:
    """A server that is a process, as a document says it."""
    args = [str(TESTS / "support" / program), str(folder / "journal"), *([mode] if mode else [])]
    return f"mcpServers: {{shop: {{command: {sys.executable}, args: {json.dumps(args)}, tools: {tools}}}}}\n"


def clerk(peer: Peer, **fields: Any) -> str:
    """A peer, as a document says it."""
    more = {"pollIntervalMs": 5, "maxPolls": 1000, **fields}
    return f"a2aPeers: {{clerk: {json.dumps({'url': peer.url, **more})}}}\n"


def journal(folder: Path) -> list[dict[str, Any]]:
    file = folder / "journal"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def calls(folder: Path) -> list[Any]:
    return [
        entry.get("params", entry)
        for entry in journal(folder)
        if entry.get("method") == "tools/call" or "tool" in entry
    ]


async def until(fact: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not fact():  # noqa: ASYNC110 - another process writes; nothing tells
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    found = Path(f"/proc/{pid}/stat")
    return found.exists() and found.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.fixture
async def flows(tmp_path: Path) -> AsyncIterator[Flows]:
    async with opened(tmp_path) as found:
        yield found


DELEGATE = """
actions: {ask: {kind: a2a.delegate, peer: clerk}}
tasks: [{id: a, uses: 'action:ask', with: {message: work}}]
"""
PAY = """
actions: {pay: {kind: mcp.call, server: shop, tool: pay}}
tasks: [{id: a, uses: 'action:pay', with: {arguments: {order: o1}}}]
"""


# -- MCP -------------------------------------------------------------------------------------------------------------------
async def test_tasks_share_a_server_that_ends_with_the_run(flows: Flows, tmp_path: Path) -> None:
    view = await flows.run(
        OPEN + shop(tmp_path) + """
        runtime: {maxConcurrency: 2}
        inputs: {n: 2}
        actions:
          add: {kind: mcp.call, server: shop, tool: add, outputSchema: {type: object, required: [result]}}
          look: {kind: mcp.call, server: shop, tool: picture}
        tasks:
          - {id: a, uses: 'action:add', with: {arguments: {a: "${{ inputs.n }}", b: 1}}}
          - {id: b, uses: 'action:add', with: {arguments: {a: 10, b: 20}}}
          - {id: c, uses: 'action:add', needs: [a, b], with: {arguments: {a: "${{ tasks.a.output.structured.result }}", b: "${{ tasks.b.output.structured.result }}"}}}
          - {id: picture, uses: 'action:look', needs: [c]}
        outputs: {sum: "${{ tasks.c.output.structured.result }}"}
        """.replace("\n        ", "\n")
    )  # fmt: skip
    assert view.output == {"sum": 33}, states(view)
    [artifact] = task(view, "picture").artifacts
    assert artifact.size == 8
    [pid] = {entry["pid"] for entry in journal(tmp_path)}
    await until(lambda: not alive(pid))


async def test_only_what_our_document_declares_to_read_runs_unasked(flows: Flows, tmp_path: Path) -> None:
    tools = "{add: {readOnly: true}, boom: {effect: keyed}, seen: {readOnly: true, approval: always}}"
    spec = (
        ASKING
        + shop(tmp_path, tools=tools)
        + """
runtime: {maxConcurrency: 4}
actions:
  add: {kind: mcp.call, server: shop, tool: add}
  pay: {kind: mcp.call, server: shop, tool: pay}
  boom: {kind: mcp.call, server: shop, tool: boom}
  seen: {kind: mcp.call, server: shop, tool: seen}
tasks:
  - {id: add, uses: 'action:add', with: {arguments: {a: 1, b: 2}}}
  - {id: pay, uses: 'action:pay', with: {arguments: {order: o1}}}
  - {id: boom, uses: 'action:boom'}
  - {id: seen, uses: 'action:seen'}
"""
    )
    run = await flows.submit(spec)
    view = await flows.until(run, lambda view: len([t for t in view.tasks if t.approval]) == 3)
    await until(lambda: calls(tmp_path))
    assert [call["tool"] for call in calls(tmp_path)] == ["add"]
    asked = await flows.app.approvals(run=run)
    assert {approval.tool for approval in asked} == {"mcp.call:shop.pay", "mcp.call:shop.boom", "mcp.call:shop.seen"}
    needs = {need.task: need.approval_possible for need in flows.app.plan(run).requirements.effects}
    assert needs == {"add": False, "pay": True, "boom": True, "seen": True}
    [pay] = [approval for approval in asked if approval.tool.endswith("pay")]
    await flows.app.approve(pay.id, by="ada")
    view = await flows.until(run, lambda view: task(view, "pay").state == "succeeded")
    assert outputs(view)["pay"]["structured"] == {"paid": "o1"}


async def test_a_denied_tool_and_a_checked_run_start_nothing(flows: Flows, tmp_path: Path) -> None:
    denied = OPEN.replace("approval: never", "approval: never, toolsDeny: ['mcp.call:shop.pay']")
    with pytest.raises(p.Invalid, match=r"toolsDeny names 'mcp.call:shop.pay'"):
        await flows.run(denied + shop(tmp_path) + PAY)
    made = flow(OPEN + shop(tmp_path) + PAY, tmp_path)
    receipt = await workflows.submit(flows.app.host, made, None, principal="local", check=True)
    await flows.app.settlement(receipt, timeout=20)
    assert outputs(await flows.view(receipt.run))["a"] == {"status": "requires_execution", "changed": False}
    assert journal(tmp_path) == []


@pytest.mark.parametrize("extra", ["mcp", "a2a"])
async def test_a_missing_extra_is_one_sentence(
    extra: str, flows: Flows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] in (extra, "mcp_types") or name.startswith("perdure.protocols.")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, extra, None)
    spec = shop(tmp_path) + PAY if extra == "mcp" else 'a2aPeers: {clerk: {url: "http://127.0.0.1:1"}}\n' + DELEGATE
    failure = task(await flows.run(OPEN + spec), "a").failure
    assert failure is not None
    assert failure.message.endswith(f"needs the extra `{extra}`. Install it: pip install 'perdure[{extra}]'")


@pytest.mark.parametrize(("effect", "sent"), [("once", 1), ("keyed", 2)])
async def test_killed_in_the_middle_of_a_call(effect: str, sent: int, tmp_path: Path) -> None:
    tools = f"{{pay: {{effect: {effect}}}}}"
    (tmp_path / "flow.yaml").write_text(OPEN + shop(tmp_path, "mcp_puppet.py", "silent", tools) + PAY)
    worker = start(tmp_path)
    await until(lambda: calls(tmp_path))
    worker.kill()
    worker.wait()
    server = journal(tmp_path)[0]["pid"]
    await until(lambda: not alive(server))  # the end of its input is its end
    (tmp_path / "flow.yaml").unlink()
    async with opened(tmp_path, lease="1s") as flows:
        run = (tmp_path / "run").read_text()
        if effect == "once":
            view = await flows.until(run, lambda view: view.state == "unknown")
            assert task(view, "a").effect is not None
        else:
            await until(lambda: len(calls(tmp_path)) == sent)
            await flows.app.cancel(run, by="ada")
            await flows.app.settlement(run, timeout=20)
    keys = {call["_meta"]["dev.perdure/idempotencyKey"] for call in calls(tmp_path)}
    assert (len(calls(tmp_path)), len(keys)) == (sent, 1)


# -- A2A -------------------------------------------------------------------------------------------------------------------
async def test_a_delegated_task_and_its_artifacts(flows: Flows) -> None:
    async with Peer(polls=2) as peer:
        peer.artifacts.append(
            {
                "artifactId": "f",
                "name": "report",
                "parts": [{"url": f"{peer.url}/report.csv", "filename": "report.csv"}],
            }
        )
        view = await flows.run(OPEN + clerk(peer) + DELEGATE)
        assert outputs(view)["a"]["output"] == "done", states(view)
        [artifact] = task(view, "a").artifacts
        assert (artifact.name, artifact.size) == ("report.csv", len("bytes of /report.csv"))
        assert len(peer.said("SendMessage")) == 1


def start(folder: Path, *point: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "support.flow_worker", str(folder), *point], cwd=TESTS)


async def ended(worker: subprocess.Popen[bytes]) -> int:
    return await asyncio.to_thread(worker.wait, 30)


@pytest.mark.parametrize("script", [{}, {"SendMessage": "silent"}], ids=["before-the-note", "before-the-answer"])
async def test_killed_after_the_message_left_and_before_its_task_has_a_name(
    script: dict[str, str], tmp_path: Path
) -> None:
    async with Peer(**script) as peer:
        (tmp_path / "flow.yaml").write_text(OPEN + clerk(peer) + DELEGATE)
        worker = start(tmp_path, *([] if script else ["step-outcome", "before"]))
        if script:
            await peer.arrived.wait()
            worker.kill()
        assert await ended(worker) == -9
        peer.script.clear()
        async with opened(tmp_path, lease="1s") as flows:
            run = (tmp_path / "run").read_text()
            view = await flows.until(run, lambda view: view.state == "unknown")
            effect = task(view, "a").effect
            assert effect is not None
            assert len(peer.messages) == 1  # neither sent again nor asked about: nobody knows its name
            await flows.app.reconcile(effect, p.Applied({"output": "seen"}), by="ada", reason="asked there")
            await flows.app.settlement(run, timeout=20)
            view = await flows.view(run)
            assert outputs(view)["a"] == {"output": "seen"}
            assert await flows.app.verify()
        assert len(peer.said("SendMessage")) == 1


@pytest.mark.parametrize("phase", ["after", "asking"])
async def test_killed_when_the_remote_task_has_a_name_it_is_asked_about(phase: str, tmp_path: Path) -> None:
    async with Peer(polls=10_000) as peer:
        (tmp_path / "flow.yaml").write_text(OPEN + clerk(peer) + DELEGATE)
        worker = start(tmp_path, *(["step-outcome", "after"] if phase == "after" else []))
        if phase == "asking":
            await until(lambda: len(peer.said("GetTask")) > 2)
            worker.kill()
        assert await ended(worker) == -9
        asked = len(peer.said("GetTask"))
        assert (asked > 0) == (phase == "asking")
        peer.polls = 0
        async with opened(tmp_path, lease="1s") as flows:
            run = (tmp_path / "run").read_text()
            await flows.app.settlement(run, timeout=20)
            view = await flows.view(run)
            assert outputs(view)["a"]["output"] == "done", task(view, "a")
            assert await flows.app.verify()
        assert (len(peer.said("SendMessage")), peer.said("CancelTask")) == (1, [])


async def test_a_process_that_stops_leaves_the_remote_task_to_work(tmp_path: Path) -> None:
    async with Peer(polls=10_000) as peer:
        async with opened(tmp_path) as flows:
            run = await flows.submit(OPEN + clerk(peer) + DELEGATE)
            await until(lambda: peer.said("GetTask"))
        peer.polls = 0
        async with opened(tmp_path) as flows:
            await flows.app.settlement(run, timeout=20)
            view = await flows.view(run)
            assert outputs(view)["a"]["output"] == "done", task(view, "a")
        assert (len(peer.said("SendMessage")), peer.said("CancelTask")) == (1, [])


async def test_a_cancelled_run_cancels_the_remote_task_within_a_second(flows: Flows) -> None:
    async with Peer(polls=10_000) as peer:
        run = await flows.submit(OPEN + clerk(peer) + DELEGATE)
        await until(lambda: peer.said("GetTask"))
        before = time.monotonic()
        await flows.app.cancel(run, by="ada")
        await flows.app.settlement(run, timeout=20)
        assert time.monotonic() - before < 1.5
        view = await flows.view(run)
        assert view.state == "cancelled"
        assert len(peer.said("CancelTask")) == 1


async def test_a_task_whose_end_was_not_seen_is_asked_about_again_after_a_verdict(flows: Flows) -> None:
    async with Peer(polls=10_000) as peer:
        run = await flows.submit(OPEN + clerk(peer, maxPolls=3) + DELEGATE)
        view: WorkflowView = await flows.until(run, lambda view: view.state == "unknown")
        assert len(peer.said("GetTask")) == 3
        peer.polls = 0
        effect = task(view, "a").effect
        assert effect is not None
        await flows.app.reconcile(effect, p.SafeToRetry(), by="ada", reason="it is asked about only")
        await flows.app.settlement(run, timeout=20)
        view = await flows.view(run)
        assert outputs(view)["a"]["output"] == "done"
        assert (len(peer.said("SendMessage")), len(peer.said("GetTask"))) == (1, 4)
        assert await flows.app.verify()
