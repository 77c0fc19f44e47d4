"""Tools of MCP servers: what a journal of the server says is what happened, whatever became of the answer."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.definitions.workflow import Action, McpServer, McpTool, Network, Policy, SecretRef
from perdure.errors import Denied, Invalid
from perdure.ports.executor import Call, Failed, InDoubt, Performed, Workspace
from perdure.protocols.mcp import Mcp
from support.mcp_puppet import Http

pytestmark = pytest.mark.anyio
SUPPORT = Path(__file__).parents[1] / "support"
PYTHON = Path(sys.executable).name
LOCAL = Policy(
    process_allowlist=(PYTHON,),
    network_allowlist=("127.0.0.1",),
    network=Network(allow_private=True),
    environment_allowlist=("TOKEN",),
)
Asked = Callable[..., Awaitable[Performed]]


def journal(folder: Path) -> list[dict[str, Any]]:
    """What the server wrote down."""
    file = folder / "journal"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def called(folder: Path) -> int:
    """How many calls of tools reached the server."""
    return sum(entry.get("method") == "tools/call" or "tool" in entry for entry in journal(folder))


def program(folder: Path, file: str, *args: str, **fields: Any) -> McpServer:
    """A server that is a process."""
    return McpServer(command=sys.executable, args=(str(SUPPORT / file), str(folder / "journal"), *args), **fields)


def puppet(folder: Path, mode: str, effect: str = "once", **fields: Any) -> McpServer:
    """A server by hand over stdio."""
    return program(folder, "mcp_puppet.py", mode, tools={"pay": McpTool(effect=effect)}, **fields)  # type: ignore[arg-type]


class Notes:
    """What was noted durably."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    async def note(self, name: str, value: Any) -> None:
        assert name not in self.kept
        self.kept[name] = value


def call(
    tool: str = "pay",
    arguments: Any = None,
    *,
    timeout: float = 10.0,
    notes: Mapping[str, Any] | None = None,
    noted: Notes | None = None,
    policy: Policy = LOCAL,
    **fields: Any,
) -> Call:
    return Call(
        run="r", task="t", attempt=1, effect="e", key="key_1", timeout=timeout,
        action=Action(kind="mcp.call", server="shop", tool=tool, **fields),
        input={} if arguments is None else {"arguments": arguments}, workspace=Workspace(Path.cwd()), policy=policy,
        note=(noted or Notes()).note, notes=notes or {},
    )  # fmt: skip


class Using:
    """Servers in use, let go at the end."""

    def __init__(self) -> None:
        self.open: list[Mcp] = []

    def __call__(self, server: McpServer, policy: Policy = LOCAL, root: Path | None = None) -> Mcp:
        made = Mcp({"shop": server}, policy, Workspace(root or Path.cwd()))
        self.open.append(made)
        return made


@pytest.fixture
async def using() -> AsyncIterator[Using]:
    made = Using()
    yield made
    for one in made.open:
        await one.close()


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


async def until(fact: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not fact():  # noqa: ASYNC110 - another process writes; nothing tells
            await asyncio.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@contextmanager
def shop_over_http(folder: Path) -> Iterator[str]:
    """The server of the SDK, by uvicorn, in a process of its own."""
    port = free_port()
    with subprocess.Popen(
        [sys.executable, str(SUPPORT / "mcp_tools.py"), str(folder / "journal"), str(port)]
    ) as server:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.02)
        try:
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            server.kill()


# -- the server of the SDK, both ways ---------------------------------------------------------------------------------------
async def exercise(mcp: Mcp, folder: Path) -> None:
    """What holds over every transport."""
    noted = Notes()
    found = await mcp.execute(call("pay", {"order": "o1"}, noted=noted))
    assert found.result["structured"] == {"paid": "o1"}
    assert (found.result["status"], found.result["changed"]) == ("succeeded", True)
    [paid] = [entry for entry in journal(folder) if entry.get("tool") == "pay"]
    assert paid["meta"]["dev.perdure/idempotencyKey"] == "key_1"
    [offered] = [tool for tool in await mcp.tools("shop") if tool.name == "pay"]
    assert noted.kept["tool"]["digest"] == offered.digest
    assert noted.kept["tool"]["server"] == {"name": "Shop", "version": "7"}
    with pytest.raises(Failed, match="boom failed") as failed:
        await mcp.execute(call("boom"))
    assert (failed.value.kind, failed.value.output["status"]) == ("tool", "failed")
    before = called(folder)
    with pytest.raises(Failed, match='"b" is a required property') as refused:
        await mcp.execute(call("add", {"a": 1}))
    with pytest.raises(Failed, match="has no tool 'sell'; it offers add"):
        await mcp.execute(call("sell"))
    assert (refused.value.kind, called(folder)) == ("protocol", before)
    with pytest.raises(InDoubt, match=r"did not answer within 0\.5 s") as late:
        await mcp.execute(call("slow", timeout=0.5))
    assert late.value.kind == "timeout"
    await until(lambda: any(entry.get("event") == "cancelled" for entry in journal(folder)))
    found = await mcp.execute(call("add", {"a": 1, "b": 2}))
    assert found.result["text"] == "3"


async def test_a_server_that_is_a_process(tmp_path: Path, using: Using) -> None:
    mcp = using(program(tmp_path, "mcp_tools.py"))
    await exercise(mcp, tmp_path)
    [pid] = {entry["pid"] for entry in journal(tmp_path)}  # started once for all of it
    await mcp.close()
    await gone(pid)


async def test_a_server_over_http(tmp_path: Path, using: Using) -> None:
    with shop_over_http(tmp_path) as url:
        mcp = using(McpServer(url=url))
        await exercise(mcp, tmp_path)
        await mcp.close()


async def test_the_newest_protocol_where_the_document_wants_it(tmp_path: Path, using: Using) -> None:
    mcp = using(program(tmp_path, "mcp_tools.py", protocol_version="2026-07-28"))
    noted = Notes()
    await mcp.execute(call("add", {"a": 1, "b": 2}, noted=noted))
    assert noted.kept["tool"]["protocol"] == "2026-07-28"


async def test_cancelled_it_tells_the_server_within_a_second(tmp_path: Path, using: Using) -> None:
    mcp = using(program(tmp_path, "mcp_tools.py"))
    task = asyncio.ensure_future(mcp.execute(call("slow")))
    await until(lambda: called(tmp_path))
    before = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - before < 1.0
    await until(lambda: any(entry.get("event") == "cancelled" for entry in journal(tmp_path)))


async def test_calls_side_by_side_share_one_server(tmp_path: Path, using: Using) -> None:
    mcp = using(program(tmp_path, "mcp_tools.py"))
    found = await asyncio.gather(*(mcp.execute(call("add", {"a": n, "b": 1})) for n in range(20)))
    assert [one.result["text"] for one in found] == [str(n + 1) for n in range(20)]
    assert sum(entry.get("event") == "started" for entry in journal(tmp_path)) == 1


async def test_its_environment_holds_what_is_allowed_and_a_secret_is_kept_nowhere(
    tmp_path: Path, using: Using, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    server = program(tmp_path, "mcp_tools.py", env={"SECRET": SecretRef(env="TOKEN"), "MINE": "x"})
    mcp = using(server)
    found = await mcp.execute(call("seen"))
    environment = found.result["structured"]
    assert (environment["MINE"], environment["SECRET"]) == ("x", "[REDACTED]")
    assert "PYTEST_CURRENT_TEST" not in environment
    assert not {"USER", "SHELL", "TERM", "LOGNAME"} & environment.keys()
    assert "hunter2" not in str(found.result)
    assert "hunter2" not in str(mcp.describe(call("seen").action, {}).request)


async def test_what_is_no_text_becomes_a_file(tmp_path: Path, using: Using) -> None:
    found = await using(program(tmp_path, "mcp_tools.py")).execute(call("picture"))
    [file] = found.produced
    assert (file.data, file.media_type) == (b"\x89PNG....", "image/png")
    [part] = found.result["content"]
    assert part["bytes"] == 8
    assert "data" not in part


# -- what is declared, and what is allowed ------------------------------------------------------------------------------
def test_only_our_own_document_says_what_a_tool_promises() -> None:
    server = McpServer(
        command="x", tools={"read": McpTool(read_only=True), "put": McpTool(effect="keyed", risk="high")}
    )
    mcp = Mcp({"shop": server}, LOCAL, Workspace(Path.cwd()))
    for tool, promised, risk in (("read", "observe", "medium"), ("put", "keyed", "high"), ("other", "once", "medium")):
        facts = mcp.describe(call(tool).action, {})
        assert (facts.effect_class, facts.risk, facts.kind) == (promised, risk, "network")
    facts = mcp.describe(call("other", idempotency="keyed").action, {"arguments": {"a": 1}})
    assert (facts.effect_class, facts.request["arguments"]) == ("keyed", {"a": 1})


async def test_annotations_of_a_server_authorise_nothing(tmp_path: Path, using: Using) -> None:
    for tool in await using(program(tmp_path, "mcp_tools.py")).tools("shop"):
        assert (tool.effect, tool.risk) == ("once", "medium")


@pytest.mark.parametrize(
    ("server", "policy", "error", "why"),
    [
        (McpServer(command=sys.executable), Policy(), Denied, "processAllowlist"),
        (McpServer(url="http://elsewhere.test/mcp"), LOCAL, Denied, "networkAllowlist"),
        (McpServer(url="http://127.0.0.1:1/", headers={"A": SecretRef(env="NOT_ALLOWED")}), LOCAL, Denied, "environmentAllowlist"),
        (McpServer(command=sys.executable, cwd="../.."), LOCAL, Denied, "leads out"),
        (McpServer(command=sys.executable, protocol_version="1999"), LOCAL, Invalid, "not one of 2024-11-05"),
        (McpServer(), LOCAL, Invalid, "either a `url` or a `command`"),
        (McpServer(url="http://127.0.0.1:1/", command="x"), LOCAL, Invalid, "either a `url` or a `command`"),
    ],
)  # fmt: skip
async def test_what_may_not_be_is_refused_before_anything_starts(
    server: McpServer, policy: Policy, error: type[Exception], why: str, tmp_path: Path, using: Using
) -> None:
    with pytest.raises(error, match=why):
        await using(server, policy, tmp_path).prepare(call(policy=policy))


async def test_a_private_address_is_refused_after_the_name_is_resolved(tmp_path: Path) -> None:
    policy = Policy(network_allowlist=("shop.test",))
    mcp = Mcp(
        {"shop": McpServer(url="http://shop.test/mcp")}, policy, Workspace(tmp_path), lambda host, port: ["10.0.0.1"]
    )
    with pytest.raises(Denied, match="open internet"):
        await mcp.execute(call(policy=policy))


async def test_input_of_another_shape() -> None:
    mcp = Mcp({"shop": McpServer(command="x")}, LOCAL, Workspace(Path.cwd()))
    for wrong, why in (({"arguments": [1]}, "no object"), ({"order": 1}, "no 'order'")):
        with pytest.raises(Invalid, match=why):
            mcp.describe(call().action, wrong)
    with pytest.raises(Invalid, match="no MCP server 'none'"):
        mcp.describe(Action(kind="mcp.call", server="none", tool="x"), {})


# -- faults of a process -------------------------------------------------------------------------------------------------
DOUBTS = [
    ("dies", "transport", "the answer was lost"),
    ("silent", "timeout", "did not answer within"),
    ("garbage", "timeout", "did not answer within"),
    ("garbage_result", "protocol", "makes no sense"),
    ("huge", "transport", "a message of more than 8,388,608 bytes"),
]


@pytest.mark.parametrize(("mode", "kind", "why"), DOUBTS, ids=[mode for mode, _, _ in DOUBTS])
async def test_a_process_that_took_a_call_and_gave_no_answer(
    mode: str, kind: str, why: str, tmp_path: Path, using: Using
) -> None:
    mcp = using(puppet(tmp_path, mode))
    await mcp.tools("shop")
    with pytest.raises(InDoubt, match=why) as doubt:
        await mcp.execute(call(timeout=0.5 if kind == "timeout" else 10.0))
    assert (doubt.value.kind, called(tmp_path)) == (kind, 1)


FAILURES = [
    ("is_error", "tool", "paid"),
    ("error-32602", "protocol", "error -32602: not today"),
    ("error-32603", "tool", "error -32603: not today"),
    ("typed", "output", "does not fit the server's own schema"),
]


@pytest.mark.parametrize(("mode", "kind", "why"), FAILURES, ids=[mode for mode, _, _ in FAILURES])
async def test_an_answer_that_is_no_success(mode: str, kind: str, why: str, tmp_path: Path, using: Using) -> None:
    with pytest.raises(Failed, match=why) as failed:
        await using(puppet(tmp_path, mode)).execute(call())
    assert (failed.value.kind, called(tmp_path)) == (kind, 1)


BEFORE = [
    ("wrong_version", "protocol", "1999-01-01"),
    ("garbage_begin", "protocol", "does not keep to the protocol"),
    ("never_begins", "timeout", "not ready within 1 s"),
    ("complains", "transport", "no licence found"),
    ("endless", "protocol", "lists more than"),
    ("remote_ref", "protocol", "nothing is fetched"),
]


@pytest.mark.parametrize(("mode", "kind", "why"), BEFORE, ids=[mode for mode, _, _ in BEFORE])
async def test_what_goes_wrong_before_a_call_is_no_doubt(
    mode: str, kind: str, why: str, tmp_path: Path, using: Using
) -> None:
    mcp = using(puppet(tmp_path, mode, timeout_seconds=1 if mode == "never_begins" else 20))
    with pytest.raises(Failed, match=why) as failed:
        await mcp.execute(call(timeout=20))
    assert (failed.value.kind, called(tmp_path)) == (kind, 0)
    await mcp.close()
    for pid in {entry["pid"] for entry in journal(tmp_path)}:
        await gone(pid)


async def test_a_server_that_speaks_another_version_than_the_document_wants(tmp_path: Path, using: Using) -> None:
    mcp = using(puppet(tmp_path, "plain", protocol_version="2025-06-18"))
    with pytest.raises(Failed, match=r"speaks 2025-11-25, and the document wants 2025-06-18"):
        await mcp.execute(call())
    assert called(tmp_path) == 0


async def test_a_program_that_cannot_be_started(tmp_path: Path, using: Using) -> None:
    script = tmp_path / PYTHON
    script.write_text("no program")
    script.chmod(0o755)
    with pytest.raises(Failed) as failed:
        await using(McpServer(command=str(script))).execute(call())
    assert failed.value.kind == "transport"


async def test_a_server_that_prints_what_is_no_message_is_understood_still(tmp_path: Path, using: Using) -> None:
    assert (await using(puppet(tmp_path, "noisy")).execute(call())).result["text"] == "paid"


async def test_a_server_found_dead_is_started_anew_for_the_next_call(tmp_path: Path, using: Using) -> None:
    mcp = using(puppet(tmp_path, "dies_idle"))
    await mcp.tools("shop")
    [pid] = {entry["pid"] for entry in journal(tmp_path)}
    await gone(pid)
    await until(lambda: not mcp._connections["shop"].usable)
    assert (await mcp.execute(call())).result["text"] == "paid"
    assert called(tmp_path) == 1


@pytest.mark.parametrize(("effect", "calls"), [("keyed", 2), ("idempotent", 2), ("observe", 2), ("once", 1)])
async def test_a_lost_call_is_sent_once_more_only_where_its_class_can_bear_it(
    effect: str, calls: int, tmp_path: Path, using: Using
) -> None:
    wanted = using(puppet(tmp_path, "dies_once", effect)).execute(call())
    if effect == "once":
        with pytest.raises(InDoubt):
            await wanted
    else:
        assert (await wanted).result["text"] == "paid"
    sent = [entry["params"] for entry in journal(tmp_path) if entry.get("method") == "tools/call"]
    assert len(sent) == calls
    assert {told["_meta"]["dev.perdure/idempotencyKey"] for told in sent} == {"key_1"}


async def test_it_is_not_sent_a_third_time(tmp_path: Path, using: Using) -> None:
    with pytest.raises(InDoubt, match="lost"):
        await using(puppet(tmp_path, "dies", "keyed")).execute(call())
    assert called(tmp_path) == 2


async def test_it_is_not_sent_again_to_a_tool_of_another_schema(tmp_path: Path, using: Using) -> None:
    with pytest.raises(InDoubt, match="describes 'pay' otherwise"):
        await using(puppet(tmp_path, "changed", "keyed")).execute(call())
    assert called(tmp_path) == 1


async def test_a_later_process_does_not_repeat_a_call_to_a_tool_of_another_schema(tmp_path: Path, using: Using) -> None:
    mcp = using(puppet(tmp_path, "plain", "keyed"))
    with pytest.raises(InDoubt, match="describes 'pay' otherwise"):
        await mcp.execute(call(notes={"tool": {"digest": "of before"}}))
    assert called(tmp_path) == 0
    [offered] = await mcp.tools("shop")
    found = await mcp.execute(call(notes={"tool": {"digest": offered.digest}}))
    assert (found.result["text"], called(tmp_path)) == ("paid", 1)


@pytest.mark.parametrize("mode", ["stays", "grandchild"])
async def test_no_process_is_left(mode: str, tmp_path: Path, using: Using) -> None:
    mcp = using(puppet(tmp_path, mode))
    await mcp.execute(call())
    before = time.monotonic()
    await mcp.close()
    assert time.monotonic() - before < 3.0
    for entry in journal(tmp_path):
        for pid in {entry["pid"], entry.get("child", entry["pid"])}:
            await gone(pid)


async def test_cancelled_while_it_starts_it_leaves_no_process(tmp_path: Path, using: Using) -> None:
    mcp = using(puppet(tmp_path, "never_begins"))
    task = asyncio.ensure_future(mcp.execute(call()))
    await until(lambda: journal(tmp_path))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(journal(tmp_path)[0]["pid"])


# -- faults over HTTP ----------------------------------------------------------------------------------------------------
HTTP_DOUBTS = [
    ("reset", "transport"), ("cut", "transport"), ("silent", "timeout"), ("garbage", "protocol"), ("html", "transport"),
    ("sse_cut", "transport"), ("packed", "transport"), ("status:500 Oops", "transport"), ("status:202 Accepted", "transport"),
    ("status:408 Request Timeout", "transport"), ("status:302 Found|Location: http://127.0.0.1:1/x", "transport"),
    ("garbage_result", "protocol"), ("500:error-32603", "transport"), ("huge", "transport"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "kind"), HTTP_DOUBTS, ids=[mode for mode, _ in HTTP_DOUBTS])
async def test_a_call_over_http_without_an_answer_is_in_doubt(mode: str, kind: str, using: Using) -> None:
    async with Http(mode) as server:
        mcp = using(McpServer(url=server.url))
        await mcp.tools("shop")
        with pytest.raises(InDoubt) as doubt:
            await mcp.execute(call(timeout=0.5 if kind == "timeout" else 10.0))
        assert (doubt.value.kind, len(server.calls)) == (kind, 1)
        server.mode = "plain"  # the connection still serves others
        assert (await mcp.execute(call())).result["text"] == "paid"
        await mcp.close()


HTTP_FAILURES = [
    ("status:401 Unauthorized", "protocol", None), ("status:429 Slow|Retry-After: 7", "rate_limit", 7.0),
    ("status:503 Busy|Retry-After: 2", "rate_limit", 2.0), ("status:307 There|Location: http://127.0.0.1:1/x", "protocol", None),
    ("is_error", "tool", None), ("error-32602", "protocol", None), ("error-32603", "tool", None), ("500:error-32602", "protocol", None),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "kind", "wait"), HTTP_FAILURES, ids=[mode for mode, _, _ in HTTP_FAILURES])
async def test_what_the_server_answers_is_no_doubt(mode: str, kind: str, wait: float | None, using: Using) -> None:
    async with Http(mode) as server:
        mcp = using(McpServer(url=server.url))
        with pytest.raises(Failed) as failed:
            await mcp.execute(call())
        assert (failed.value.kind, failed.value.retry_after, len(server.calls)) == (kind, wait, 1)
        await mcp.close()


HTTP_BEFORE = [
    ("begin:401 Unauthorized", "protocol"), ("begin:503 Busy|Retry-After: 1", "rate_limit"), ("begin:500 Oops", "protocol"),
    ("begin:307 There|Location: http://localhost:1/mcp", "protocol"), ("begin:302 There|Location: http://example.org/", "protocol"),
    ("wrong_version", "protocol"),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "kind"), HTTP_BEFORE, ids=[mode for mode, _ in HTTP_BEFORE])
async def test_a_server_that_cannot_be_had_was_not_called(mode: str, kind: str, using: Using) -> None:
    async with Http(mode) as server:
        mcp = using(McpServer(url=server.url))
        with pytest.raises(Failed) as failed:
            await mcp.execute(call())
        assert (failed.value.kind, server.calls) == (kind, [])
        await mcp.close()


async def test_nobody_there(using: Using) -> None:
    with pytest.raises(Failed, match="could not be reached") as failed:
        await using(McpServer(url=f"http://127.0.0.1:{free_port()}/mcp")).execute(call())
    assert failed.value.kind == "transport"


async def test_a_server_that_went_away_between_two_calls(using: Using) -> None:
    server = Http("plain")
    async with server:
        mcp = using(McpServer(url=server.url))
        await mcp.execute(call())
    with pytest.raises(Failed, match="was not called") as failed:
        await mcp.execute(call())
    assert (failed.value.kind, len(server.calls)) == ("transport", 1)
    async with server:
        assert (await mcp.execute(call())).result["text"] == "paid"
        await mcp.close()


@pytest.mark.parametrize("effect", ["once", "keyed"])
async def test_a_server_that_forgot_its_session_is_met_anew(effect: Any, using: Using) -> None:
    async with Http("status:404 Not Found") as server:
        mcp = using(McpServer(url=server.url, tools={"pay": McpTool(effect=effect)}))
        with pytest.raises(Failed, match="answered 404") as failed:
            await mcp.execute(call())
        assert (failed.value.kind, len(server.calls)) == ("transport", 1 if effect == "once" else 2)
        server.mode = "plain"
        assert (await mcp.execute(call())).result["text"] == "paid"
        begun = [message for message in server.messages if message["method"] == "initialize"]
        assert len(begun) == len(server.calls)
        await mcp.close()


@pytest.mark.parametrize(
    ("mode", "effect", "calls"), [("reset_once", "keyed", 2), ("reset", "keyed", 2), ("changed", "keyed", 1)]
)
async def test_a_call_lost_over_http_and_sent_once_more(mode: str, effect: Any, calls: int, using: Using) -> None:
    async with Http(mode) as server:
        mcp = using(McpServer(url=server.url, tools={"pay": McpTool(effect=effect)}))
        if mode == "reset_once":
            assert (await mcp.execute(call())).result["text"] == "paid"
        else:
            with pytest.raises(InDoubt):
                await mcp.execute(call())
        assert len(server.calls) == calls
        await mcp.close()


async def test_a_name_is_resolved_once_and_headers_reach_the_server(
    using: Using, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    asked: list[str] = []

    def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    policy = Policy(
        network_allowlist=("shop.test",), network=Network(allow_private=True), environment_allowlist=("TOKEN",)
    )
    async with Http("plain") as server:
        at = McpServer(url=f"http://shop.test:{server.port}/mcp", headers={"Authorization": SecretRef(env="TOKEN")})
        mcp = Mcp({"shop": at}, policy, Workspace(tmp_path), resolver)
        await mcp.execute(call(policy=policy))
        await mcp.close()
        assert asked == ["shop.test"]
        for head in server.headers:
            assert b"host: shop.test" in head.lower()
            assert b"authorization: hunter2-hunter2" in head.lower()
