"""HTTP requests: to allowed addresses only, resolved once; what was sent and lost is in doubt, what never left is not."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perdure.definitions.workflow import Action, Network, Policy, SecretRef
from perdure.errors import Denied
from perdure.executors import network
from perdure.executors.http import Http
from perdure.ports.executor import Call, Failed, InDoubt, Workspace

pytestmark = pytest.mark.anyio
LOCAL = Policy(
    network_allowlist=("127.0.0.1", "api.test"), network=Network(allow_private=True), environment_allowlist=("KEY",)
)


class Server:
    """A server that remembers every request and answers, or breaks, as it is told."""

    def __init__(self, answer: Callable[[socket.socket, bytes], None]) -> None:
        self.requests: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self._answer = answer
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with client:
                client.settimeout(5)
                data = b""
                try:
                    while b"\r\n\r\n" not in data:
                        data += client.recv(65536)
                    head, _, body = data.partition(b"\r\n\r\n")
                    wanted = next(
                        (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")),
                        0,
                    )
                    while len(body) < wanted:
                        body += client.recv(65536)
                    self.requests.append(head + b"\r\n\r\n" + body)
                    self._answer(client, body)
                except OSError:
                    pass


def says(status: str, body: bytes = b"", *headers: str) -> Callable[[socket.socket, bytes], None]:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return lambda client, _: client.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)


@contextmanager
def serving(answer: Callable[[socket.socket, bytes], None]) -> Iterator[Server]:
    server = Server(answer)
    try:
        yield server
    finally:
        server.listener.close()


async def note(name: str, value: Any) -> None:
    raise AssertionError("a request notes nothing")


def call(
    url: str, *, policy: Policy = LOCAL, timeout: float = 5.0, input: dict[str, Any] | None = None, **fields: Any
) -> Call:
    return Call(
        run="r", task="t", attempt=1, effect="e", key="key_1", action=Action(kind="builtin.http", url=url, **fields),
        input=input or {}, workspace=Workspace(Path.cwd()), policy=policy, timeout=timeout, note=note,
    )  # fmt: skip


async def test_a_request_and_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "hunter2-hunter2")
    with serving(says("200 OK", b'{"ok": "hunter2-hunter2"}', "Content-Type: application/json")) as server:
        wanted = call(
            f"http://127.0.0.1:{server.port}/pay?a=1", method="POST", query={"b": "2 3"}, json={"n": 1},
            headers={"Authorization": SecretRef(env="KEY")}, idempotency_header="Idempotency-Key",
        )  # fmt: skip
        facts = Http().describe(wanted.action, wanted.input)
        assert (facts.effect_class, facts.kind) == ("keyed", "network")
        assert "hunter2" not in str(facts.request)
        found = await Http().execute(wanted)
    [request] = server.requests
    assert request.startswith(b"POST /pay?a=1&b=2+3 HTTP/1.1")
    assert b"Idempotency-Key: key_1" in request
    assert b"Authorization: hunter2-hunter2" in request
    assert request.endswith(b'{"n":1}')
    assert (found.result["status"], found.result["body"]) == (200, {"ok": "[REDACTED]"})


async def test_what_a_method_promises() -> None:
    for method, header, promised in (
        ("GET", None, "observe"),
        ("HEAD", None, "observe"),
        ("POST", None, "once"),
        ("PUT", "K", "keyed"),
    ):
        action = Action(kind="builtin.http", url="http://x", method=method, idempotency_header=header)  # type: ignore[arg-type]
        assert Http().describe(action, {}).effect_class == promised


@pytest.mark.parametrize(
    ("status", "kind", "wait"),
    [("404 Not Found", "tool", None), ("302 Found", "tool", None), ("429 Slow", "rate_limit", 7.0)],
)
async def test_a_status_that_was_not_expected_fails(status: str, kind: str, wait: float | None) -> None:
    with serving(says(status, b"why", "Retry-After: 7", "Location: http://elsewhere/")) as server:
        with pytest.raises(Failed) as failed:
            await Http().execute(call(f"http://127.0.0.1:{server.port}/"))
    assert (failed.value.kind, failed.value.retry_after, len(server.requests)) == (kind, wait, 1)
    assert failed.value.output["body"] == "why"


@pytest.mark.parametrize(
    "answer",
    [
        lambda client, _: None,
        lambda client, _: client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"),
        lambda client, _: client.sendall(b"nonsense\r\n\r\n"),
    ],
    ids=["closed", "cut", "garbage"],
)
async def test_a_connection_lost_after_the_request_left_is_in_doubt(answer: Any) -> None:
    with serving(answer) as server, pytest.raises(InDoubt) as doubt:
        await Http().execute(call(f"http://127.0.0.1:{server.port}/", method="POST"))
    assert (doubt.value.kind, len(server.requests)) == ("transport", 1)


async def test_nobody_there_is_no_doubt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Failed) as failed:
        await Http().execute(call(f"http://127.0.0.1:{port}/", method="POST"))
    assert failed.value.kind == "transport"


async def test_an_answer_that_does_not_come_or_is_cancelled() -> None:
    release = threading.Event()
    with serving(lambda client, _: release.wait(10)) as server:
        with pytest.raises(InDoubt, match="did not answer within"):
            await Http().execute(call(f"http://127.0.0.1:{server.port}/", timeout=0.3))
        task = asyncio.ensure_future(Http().execute(call(f"http://127.0.0.1:{server.port}/")))
        async with asyncio.timeout(5):
            while len(server.requests) < 1:  # noqa: ASYNC110 - a thread of the test
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()


async def test_an_answer_over_its_limit_is_in_doubt() -> None:
    policy = Policy(network_allowlist=("127.0.0.1",), network=Network(allow_private=True, max_response_bytes=10))
    with serving(says("200 OK", b"x" * 100)) as server, pytest.raises(InDoubt, match="more than 10 bytes"):
        await Http().execute(call(f"http://127.0.0.1:{server.port}/", policy=policy))


@pytest.mark.parametrize(
    ("url", "says_why"),
    [
        ("ftp://api.test/", "allowedSchemes"), ("http://u:p@api.test/", "user name"), ("http://other.test/", "networkAllowlist"),
        ("http://sub.api.test/", "networkAllowlist"), ("http:///x", "networkAllowlist"), ("http://api.test:99999/", "no address"),
    ],
)  # fmt: skip
def test_what_policy_refuses_by_words(url: str, says_why: str) -> None:
    with pytest.raises(Denied, match=says_why):
        network.judge(url, LOCAL)


def test_ports_and_suffixes() -> None:
    policy = Policy(network_allowlist=("*.test",), network=Network(allowed_ports=(443,)))
    assert network.judge("https://a.b.test/x", policy).port == 443
    for url in ("https://a.test:8443/", "https://test/"):
        with pytest.raises(Denied):
            network.judge(url, policy)


PRIVATE = ["127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1", "::1",
           "fe80::1", "fc00::1", "::ffff:127.0.0.1", "192.0.2.1", "198.18.0.1", "255.255.255.255", "2001:db8::1", "64:ff9b::7f00:1"]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_of_the_open_internet_is_refused_whole(address: str) -> None:
    policy = Policy(network_allowlist=("api.test",))
    target = network.judge("https://api.test/", policy)
    with pytest.raises(Denied, match="open internet"):
        network.resolve(target, policy, lambda host, port: ["93.184.216.34", address])
    assert network.resolve(target, policy, lambda host, port: ["93.184.216.34"]).address == "93.184.216.34"


async def test_a_name_that_changes_its_mind_is_asked_once() -> None:
    """DNS rebinding: the second answer would be another server, and nobody asks for it."""
    asked: list[str] = []

    def resolver(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    with serving(says("200 OK")) as server:
        await Http(resolver).execute(call(f"http://api.test:{server.port}/"))
    assert asked == ["api.test"]
    assert b"Host: api.test" in server.requests[0]
