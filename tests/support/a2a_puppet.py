"""An A2A agent by hand, in the test's own process, with exact faults. It writes down every message it gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Peer:
    """An agent at a port. ``script`` says what becomes of each method; without a word it behaves.

    Attributes:
        messages: what arrived, in order. polls: how many questions are answered ``working`` before the task has ended.
    """

    def __init__(self, polls: int = 0, **script: str) -> None:
        self.script = script
        self.polls = polls
        self.messages: list[dict[str, Any]] = []
        self.heads: list[bytes] = []
        self.port = 0
        self.release = asyncio.Event()
        self.arrived = asyncio.Event()
        self.interfaces: list[dict[str, Any]] | None = None
        self.artifacts: list[dict[str, Any]] = [{"artifactId": "a", "name": "out", "parts": [{"text": "done"}]}]
        self._writers: set[asyncio.StreamWriter] = set()

    def said(self, method: str) -> list[dict[str, Any]]:
        """The messages of one method."""
        return [message for message in self.messages if message["method"] == method]

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Peer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.release.set()
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                sizes = (int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:"))
                body = await reader.readexactly(next(sizes, 0))
                if not await self._answer(head, body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        self.heads.append(head)
        if head.startswith(b"GET"):
            path = head.split()[1].decode()
            if path != "/.well-known/agent-card.json":
                return await say(writer, "200 OK", b"bytes of " + path.encode(), "Content-Type: text/plain")
            return await self._fault(self.script.get("card", ""), writer, self._card())
        message = json.loads(body)
        self.messages.append(message)
        self.arrived.set()
        method = message["method"]
        told = {"jsonrpc": "2.0", "id": message["id"]}
        return await self._fault(self.script.get(method, ""), writer, {**told, "result": self._result(method)})

    async def _fault(self, fault: str, writer: asyncio.StreamWriter, good: dict[str, Any]) -> bool:
        """What becomes of one exchange."""
        word, _, more = fault.partition(":")
        if word == "reset":
            return False
        if word == "silent":
            await self.release.wait()
            return False
        if word == "cut":
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"jsonrpc"')
            await writer.drain()
            return False
        if word == "status":
            status, _, header = more.partition("|")
            return await say(writer, status, b"", header)
        if word == "garbage":
            return await say(writer, "200 OK", b"%% not json %%")
        if word == "huge":
            return await say(writer, "200 OK", b'"' + b"x" * (9 << 20) + b'"')
        if word == "raw":
            return await say(writer, "200 OK", more.encode())
        if word == "error":
            good = {"jsonrpc": "2.0", "id": good.get("id"), "error": {"code": int(more), "message": "not today"}}
        if word == "nameless":
            good = {**good, "result": {"task": {"status": {"state": "TASK_STATE_WORKING"}}}}
        return await say(writer, "200 OK", json.dumps(good).encode())

    def _card(self) -> dict[str, Any]:
        own = [{"protocolBinding": "JSONRPC", "url": f"{self.url}/rpc", "protocolVersion": "1.0"}]
        return {
            "name": "puppet", "description": "d", "version": "1", "capabilities": {}, "skills": [],
            "defaultInputModes": ["text/plain"], "defaultOutputModes": ["text/plain"],
            "supportedInterfaces": own if self.interfaces is None else self.interfaces,
        }  # fmt: skip

    def _result(self, method: str) -> dict[str, Any]:
        task: dict[str, Any] = {"id": "remote-1", "contextId": "c", "status": {"state": "TASK_STATE_WORKING"}}
        if method == "SendMessage":
            return {"task": task}
        if method == "CancelTask":
            return {**task, "status": {"state": "TASK_STATE_CANCELED"}}
        if len(self.said("GetTask")) > self.polls:
            return {**task, "status": {"state": "TASK_STATE_COMPLETED"}, "artifacts": self.artifacts}
        return task


async def say(writer: asyncio.StreamWriter, status: str, body: bytes, more: str = "") -> bool:
    """One answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *([more] if more else [])]
    if body and "content-type" not in more.lower():
        lines.append("Content-Type: application/json")
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    await writer.drain()
    return True
