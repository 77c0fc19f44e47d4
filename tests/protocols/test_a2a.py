"""Work given to agents elsewhere: the message leaves once, and what has a name is asked about, never sent again."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from perdure.definitions.workflow import A2aPeer, Action, Network, Policy, SecretRef
from perdure.errors import Denied, Invalid
from perdure.ports.executor import Call, Failed, InDoubt, Performed, Workspace
from perdure.protocols.a2a import A2a
from support.a2a_puppet import Peer

pytestmark = pytest.mark.anyio
SUPPORT = Path(__file__).parents[1] / "support"
LOCAL = Policy(network_allowlist=("127.0.0.1",), network=Network(allow_private=True), environment_allowlist=("TOKEN",))


class Noted:
    """What was noted durably, and when."""

    def __init__(self, peer: Peer | None = None) -> None:
        self.kept: dict[str, Any] = {}
        self.before: list[str] = []
        self._peer = peer

    async def note(self, name: str, value: Any) -> None:
        assert name not in self.kept
        if self._peer is not None:
            self.before = [message["method"] for message in self._peer.messages]
        self.kept[name] = value


def call(
    message: Any = "work",
    *,
    noted: Noted | None = None,
    notes: Mapping[str, Any] | None = None,
    timeout: float = 10.0,
    policy: Policy = LOCAL,
    goes_on: bool = False,
    **fields: Any,
) -> Call:
    return Call(
        run="r", task="t", attempt=1, effect="effect_1", key="key_1", timeout=timeout, policy=policy,
        action=Action(kind="a2a.delegate", peer="clerk", **fields), input={"message": message},
        workspace=Workspace(Path.cwd()), note=(noted or Noted()).note, notes=notes or {}, goes_on=lambda: goes_on,
    )  # fmt: skip


async def delegate(peer: Peer | str, wanted: Call, **fields: Any) -> Performed:
    url = peer if isinstance(peer, str) else peer.url
    return await A2a({"clerk": A2aPeer(url=url, **{"poll_interval_ms": 5, **fields})}).execute(wanted)


# -- the agent of the SDK -------------------------------------------------------------------------------------------------
class Clerk:
    def __init__(self, url: str, journal: Path) -> None:
        self.url, self._journal = url, journal

    def said(self, method: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self._journal.read_text().splitlines()]
        return [line["params"] for line in lines if line["method"] == method]


@pytest.fixture(scope="module")
def clerk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clerk]:
    """The server of the SDK in a process of its own."""
    journal = tmp_path_factory.mktemp("clerk") / "journal"
    journal.touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with subprocess.Popen([sys.executable, str(SUPPORT / "a2a_agent.py"), str(journal), str(port)]) as server:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.02)
        try:
            yield Clerk(f"http://127.0.0.1:{port}", journal)
        finally:
            server.kill()


async def test_a_message_becomes_a_task_and_its_artifact_the_output(clerk: Clerk) -> None:
    noted = Noted()
    found = await delegate(clerk.url, call("echo hello", noted=noted))
    assert (found.result["state"], found.result["text"], found.result["output"]) == ("completed", "hello", "hello")
    assert noted.kept["remote"]["task"] == found.result["task"]
    sent = [params for params in clerk.said("SendMessage") if params["message"]["parts"] == [{"text": "echo hello"}]]
    assert [one["message"]["messageId"] for one in sent] == ["effect_1"]
    assert sent[0]["message"]["metadata"] == {"dev.perdure/idempotencyKey": "key_1"}
    assert sent[0]["configuration"]["returnImmediately"] is True


async def test_values_keep_their_types(clerk: Clerk) -> None:
    found = await delegate(clerk.url, call("data"))
    assert found.result["output"] == {"n": 3, "f": 1.5, "list": [1]}
    assert type(found.result["output"]["n"]) is int
    schema = {"type": "object", "required": ["total"]}
    for fields, wanted in (({"output_schema": schema}, call("data")), ({}, call("data", output_schema=schema))):
        with pytest.raises(Failed, match='"total" is a required property') as failed:
            await delegate(clerk.url, wanted, **fields)
        assert failed.value.kind == "output"


async def test_an_agent_that_answers_without_a_task(clerk: Clerk) -> None:
    noted = Noted()
    found = await delegate(clerk.url, call("say hi", noted=noted))
    assert (found.result["text"], found.result["task"], noted.kept) == ("hi", "", {})


async def test_files_are_kept_by_a_plain_name_and_fetched_from_the_peer_only(clerk: Clerk) -> None:
    raw, fetched = (await delegate(clerk.url, call("files"))).produced
    assert (raw.name, raw.data, raw.media_type) == ("raw.bin", b"\x00\x01", "application/x-raw")
    assert (fetched.name, fetched.data, fetched.media_type) == ("out-2", b"the report", "text/plain")
    with pytest.raises(Failed, match=r"an artifact is elsewhere: 'http://localhost:1/report\.txt'") as failed:
        await delegate(clerk.url, call("elsewhere"))
    assert failed.value.kind == "output"


@pytest.mark.parametrize(
    ("word", "why"), [("fail", "failed: no paper"), ("reject", "rejected: no paper"), ("ask", "wants input")]
)
async def test_a_remote_task_that_does_not_complete(word: str, why: str, clerk: Clerk) -> None:
    with pytest.raises(Failed, match=why) as failed:
        await delegate(clerk.url, call(word))
    assert failed.value.kind == "tool"


async def test_cancelled_it_cancels_the_remote_task(clerk: Clerk, tmp_path: Path) -> None:
    noted = Noted()
    task = asyncio.ensure_future(delegate(clerk.url, call(f"hold {tmp_path / 'never'}", noted=noted)))
    async with asyncio.timeout(10):
        while "remote" not in noted.kept:  # noqa: ASYNC110 - another task notes it
            await asyncio.sleep(0.01)
    before = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - before < 1.0
    assert [one["id"] for one in clerk.said("CancelTask") if one["id"] == noted.kept["remote"]["task"]]


# -- sending ---------------------------------------------------------------------------------------------------------------
DOUBTS = [
    ("reset", "transport"), ("cut", "transport"), ("silent", "timeout"), ("garbage", "protocol"), ("huge", "transport"),
    ("nameless", "protocol"), ("raw:[]", "protocol"), ("raw:{\"jsonrpc\": \"2.0\", \"result\": {\"task\": 7}}", "protocol"),
    ("status:500 Oops", "protocol"), ("status:408 Late", "protocol"), ("status:302 There|Location: http://127.0.0.1:1/", "protocol"),
    ("error:-32603", "protocol"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "kind"), DOUBTS, ids=[fault for fault, _ in DOUBTS])
async def test_a_message_that_may_have_arrived_is_in_doubt_and_is_not_sent_again(fault: str, kind: str) -> None:
    noted = Noted()
    async with Peer(SendMessage=fault) as peer:
        with pytest.raises(InDoubt) as doubt:
            await delegate(peer, call(noted=noted, timeout=2.0))
        assert (doubt.value.kind, len(peer.messages), noted.kept) == (kind, 1, {})


FAILURES = [
    ("status:401 No", "protocol", None), ("status:429 Slow|Retry-After: 7", "rate_limit", 7.0),
    ("status:503 Busy|Retry-After: 2", "rate_limit", 2.0), ("status:307 There|Location: http://127.0.0.1:1/", "protocol", None),
    ("error:-32602", "protocol", None), ("error:-32009", "protocol", None),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "kind", "wait"), FAILURES, ids=[fault for fault, _, _ in FAILURES])
async def test_a_message_that_was_refused_is_no_doubt(fault: str, kind: str, wait: float | None) -> None:
    async with Peer(SendMessage=fault) as peer:
        with pytest.raises(Failed) as failed:
            await delegate(peer, call())
        assert (failed.value.kind, failed.value.retry_after, len(peer.messages)) == (kind, wait, 1)


BEFORE = [
    ("reset", "transport", "could not be reached"), ("silent", "timeout", "The message was not sent"),
    ("garbage", "protocol", "no usable Agent Card"), ("raw:[]", "protocol", "no usable Agent Card"),
    ("status:404 No", "protocol", "answered 404"), ("status:503 Busy|Retry-After: 1", "rate_limit", "answered 503"),
    ("status:302 There|Location: http://localhost:1/", "protocol", "answered 302"),
    ("huge", "transport", "more than 8,388,608 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "kind", "why"), BEFORE, ids=[fault for fault, _, _ in BEFORE])
async def test_a_peer_without_a_usable_card_is_sent_nothing(fault: str, kind: str, why: str) -> None:
    async with Peer(card=fault) as peer:
        with pytest.raises(Failed, match=why) as failed:
            await delegate(peer, call(timeout=1.0))
        assert (failed.value.kind, peer.messages) == (kind, [])


@pytest.mark.parametrize(
    ("interfaces", "why"),
    [
        ([], "it has none"),
        ([{"protocolBinding": "JSONRPC", "url": "URL/rpc", "protocolVersion": "0.3"}], "it has JSONRPC 0.3"),
        ([{"protocolBinding": "GRPC", "url": "URL", "protocolVersion": "1.0"}], "it has GRPC 1.0"),
        ([{"protocolBinding": "JSONRPC", "url": "http://example.org/rpc", "protocolVersion": "1.0"}], "an interface elsewhere"),
        ([{"protocolBinding": "JSONRPC", "url": "https://127.0.0.1:PORT/", "protocolVersion": "1.0"}], "an interface elsewhere"),
        ([{"protocolBinding": "JSONRPC", "url": "http://127.0.0.1:1/rpc", "protocolVersion": "1.0"}], "an interface elsewhere"),
        ([{"protocolBinding": "JSONRPC", "url": "http://u@127.0.0.1:PORT/", "protocolVersion": "1.0"}], "an interface elsewhere"),
    ],
)  # fmt: skip
async def test_only_an_interface_of_the_peer_itself_is_used(interfaces: list[dict[str, Any]], why: str) -> None:
    async with Peer() as peer:
        text = json.dumps(interfaces).replace("PORT", str(peer.port)).replace("URL", peer.url)
        peer.interfaces = json.loads(text)
        with pytest.raises(Failed, match=why) as failed:
            await delegate(peer, call())
        assert (failed.value.kind, peer.messages) == ("protocol", [])


async def test_nobody_there() -> None:
    peer = Peer()
    async with peer:
        pass
    with pytest.raises(Failed, match="could not be reached") as failed:
        await delegate(peer, call())
    assert failed.value.kind == "transport"


# -- asking -----------------------------------------------------------------------------------------------------------------
async def test_the_name_of_the_remote_task_is_durable_before_the_first_question() -> None:
    async with Peer(polls=2) as peer:
        noted = Noted(peer)
        found = await delegate(peer, call(noted=noted))
        assert noted.before == ["SendMessage"]
        assert noted.kept["remote"] == {"task": "remote-1", "context": "c", "peer": "clerk"}
        assert (len(peer.said("SendMessage")), len(peer.said("GetTask"))) == (1, 3)
        assert found.result["output"] == "done"


async def test_a_known_remote_task_is_asked_about_and_nothing_is_sent() -> None:
    async with Peer() as peer:
        found = await delegate(peer, call(notes={"remote": {"task": "remote-1", "context": "c", "peer": "clerk"}}))
        assert found.result["output"] == "done"
        assert [(m["method"], m["params"]["id"]) for m in peer.messages] == [("GetTask", "remote-1")]


@pytest.mark.parametrize("fault", ["reset", "status:500 Oops", "garbage", "status:429 Slow"])
async def test_a_question_without_an_answer_is_asked_again(fault: str) -> None:
    async with Peer(GetTask=fault) as peer:

        async def mended() -> None:
            async with asyncio.timeout(10):
                while len(peer.said("GetTask")) < 3:  # noqa: ASYNC110 - the peer counts
                    await asyncio.sleep(0.005)
            peer.script.clear()

        mending = asyncio.ensure_future(mended())
        assert (await delegate(peer, call())).result["output"] == "done"
        await mending
        assert len(peer.said("SendMessage")) == 1


@pytest.mark.parametrize(
    ("script", "fields", "timeout", "kind", "why"),
    [
        ({}, {"max_polls": 3}, 10.0, "timeout", "has not ended after 3 questions"),
        ({"GetTask": "reset"}, {"max_polls": 2}, 10.0, "timeout", "got no answer"),
        ({}, {"max_polls": 1000, "poll_interval_ms": 50}, 0.3, "timeout", "not done within"),
        ({"GetTask": "error:-32001"}, {}, 10.0, "protocol", "knows no task 'remote-1'"),
    ],
)
async def test_a_remote_task_whose_end_is_not_seen_is_in_doubt_and_has_a_name(
    script: dict[str, str], fields: dict[str, Any], timeout: float, kind: str, why: str
) -> None:
    async with Peer(polls=10_000, **script) as peer:
        with pytest.raises(InDoubt, match=why) as doubt:
            await delegate(peer, call(timeout=timeout), **fields)
        assert (doubt.value.kind, doubt.value.output["remote"]["task"]) == (kind, "remote-1")
        assert (len(peer.said("SendMessage")), peer.said("CancelTask")) == (1, [])


async def test_a_peer_that_cannot_be_reached_leaves_a_known_task_in_doubt() -> None:
    async with Peer(card="status:404 No") as peer:
        with pytest.raises(InDoubt, match="The remote task is 'remote-1'"):
            await delegate(peer, call(notes={"remote": {"task": "remote-1", "context": "c", "peer": "clerk"}}))
        assert peer.messages == []


@pytest.mark.parametrize("goes_on", [False, True])
async def test_cancelled_it_tells_the_peer_unless_another_process_goes_on(goes_on: bool) -> None:
    async with Peer(polls=10_000) as peer:
        task = asyncio.ensure_future(delegate(peer, call(goes_on=goes_on), max_polls=1000))
        async with asyncio.timeout(10):
            while not peer.said("GetTask"):  # noqa: ASYNC110 - the peer counts
                await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(peer.said("CancelTask")) == (0 if goes_on else 1)


async def test_a_peer_that_does_not_listen_cannot_hold_up_a_cancel() -> None:
    async with Peer(polls=10_000, CancelTask="silent") as peer:
        task = asyncio.ensure_future(delegate(peer, call(), max_polls=1000))
        async with asyncio.timeout(10):
            while not peer.said("GetTask"):  # noqa: ASYNC110 - the peer counts
                await asyncio.sleep(0.005)
        before = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - before < 1.0


# -- artifacts ----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("artifacts", "why"),
    [
        ([{"artifactId": "a", "parts": [{"url": "https://127.0.0.1:PORT/x"}]}], "elsewhere"),
        ([{"artifactId": "a", "parts": [{"url": "file:///etc/passwd"}]}], "elsewhere"),
        ([{"artifactId": "a", "parts": [{"text": "x"}] * 1001}], "more than 1,000 parts"),
    ],
    ids=["scheme", "file", "parts"],
)
async def test_artifacts_that_cannot_be_kept(artifacts: list[dict[str, Any]], why: str) -> None:
    async with Peer() as peer:
        peer.artifacts = json.loads(json.dumps(artifacts).replace("PORT", str(peer.port)))
        with pytest.raises(Failed, match=why) as failed:
            await delegate(peer, call())
        assert failed.value.kind == "output"


# -- what is allowed -----------------------------------------------------------------------------------------------------------
def test_facts() -> None:
    peer = A2aPeer(url="http://clerk.test/", headers={"Authorization": SecretRef(env="TOKEN")})
    facts = A2a({"clerk": peer}).describe(call().action, {"message": {"n": 1}})
    assert (facts.kind, facts.effect_class, facts.risk, facts.capability) == (
        "remote_agent",
        "once",
        "medium",
        "a2a.delegate",
    )
    assert facts.request == {
        "peer": "clerk", "url": "http://clerk.test/", "headers": {"Authorization": {"secret": "env"}}, "message": {"n": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("input", "why"),
    [
        ({}, "needs a `message`"),
        ({"message": "x", "to": "y"}, "no 'to'"),
        ({"message": "x", "contextId": 1}, "no text"),
    ],
)
def test_input_of_another_shape(input: dict[str, Any], why: str) -> None:
    with pytest.raises(Invalid, match=why):
        A2a({"clerk": A2aPeer(url="http://clerk.test/")}).describe(call().action, input)


@pytest.mark.parametrize(
    ("peer", "error", "why"),
    [
        (A2aPeer(url="http://elsewhere.test/"), Denied, "networkAllowlist"),
        (A2aPeer(url="http://127.0.0.1/", headers={"A": SecretRef(env="OTHER")}), Denied, "environmentAllowlist"),
        (A2aPeer(url="http://127.0.0.1/", protocol_version="0.3"), Invalid, r"is not 1\.0"),
    ],
)
async def test_what_may_not_be_is_refused_before_anything_is_reached(
    peer: A2aPeer, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        await A2a({"clerk": peer}).prepare(call())
    with pytest.raises(Invalid, match="no A2A peer"):
        await A2a({}).prepare(call())


async def test_a_name_is_resolved_once_and_a_secret_is_kept_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2-hunter2")
    asked: list[str] = []

    def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"]

    policy = Policy(
        network_allowlist=("clerk.test",), network=Network(allow_private=True), environment_allowlist=("TOKEN",)
    )
    async with Peer() as peer:
        at = f"http://clerk.test:{peer.port}"
        peer.interfaces = [{"protocolBinding": "JSONRPC", "url": f"{at}/rpc", "protocolVersion": "1.0"}]
        peer.artifacts = [{"artifactId": "a", "parts": [{"text": "it is hunter2-hunter2"}]}]
        clerk = A2aPeer(url=at, headers={"Authorization": SecretRef(env="TOKEN")})
        found = await A2a({"clerk": clerk}, resolver).execute(call(policy=policy))
        assert asked == ["clerk.test"]
        assert all(b"authorization: hunter2-hunter2" in head.lower() for head in peer.heads)
        assert found.result["text"] == "it is [REDACTED]"
    private = Policy(network_allowlist=("clerk.test",))
    with pytest.raises(Denied, match="open internet"):
        await A2a({"clerk": A2aPeer(url="http://clerk.test/")}, lambda host, port: ["10.0.0.1"]).execute(
            call(policy=private)
        )
