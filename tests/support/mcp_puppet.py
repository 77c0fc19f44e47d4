"""An MCP server by hand, with exact faults: over stdio as a program, over HTTP in the test's own process.

Both write down every message they get. What happens to a ``tools/call`` is the mode's business.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOOL = {"name": "pay", "inputSchema": {"type": "object", "properties": {"order": {"type": "string"}}}}


def answer(message: dict[str, Any], mode: str, starts: int) -> dict[str, Any] | None:
    """What a puppet says to what is no call of a tool."""
    method, version = message["method"], message.get("params", {}).get("protocolVersion")
    if method == "initialize":
        result: Any = {
            "protocolVersion": "1999-01-01" if mode == "wrong_version" else version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "puppet", "version": "1"},
        }
        if mode == "garbage_begin":
            result = {"hello": "world"}
    elif method == "tools/list":
        tool = dict(TOOL)
        if mode == "changed" and starts > 1:
            tool["inputSchema"] = {"type": "object", "properties": {"order": {"type": "integer"}}}
        if mode == "remote_ref":
            tool["inputSchema"] = {
                "type": "object",
                "properties": {"order": {"$ref": "http://127.0.0.1:9/schema.json"}},
            }
        if mode == "typed":
            tool["outputSchema"] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        result = {"tools": [tool]}
        if mode == "endless":
            result["nextCursor"] = "more"
    elif "id" in message:
        result = {}
    else:
        return None
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def outcome(message: dict[str, Any], mode: str) -> dict[str, Any]:
    """A well-formed answer to a call."""
    told: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    if mode.startswith("error"):
        return {**told, "error": {"code": int(mode[5:]), "message": "not today"}}
    result: Any = {"content": [{"type": "text", "text": "paid"}]}
    if mode == "garbage_result":
        result = {"content": 7}
    elif mode == "is_error":
        result["isError"] = True
    elif mode == "typed":
        result["structuredContent"] = {"n": "three"}
    elif mode == "ask":
        result = {"resultType": "input_required", "inputRequests": {}}
    elif mode == "large":
        result = {"content": [{"type": "text", "text": "x" * (2 << 20)}]}
    elif mode == "huge":
        result = {"content": [{"type": "text", "text": "x" * (9 << 20)}]}
    return {**told, "result": result}


def stdio(journal: Path, mode: str) -> None:
    """Serve lines until they end."""
    seen = journal.read_text().splitlines() if journal.exists() else []
    starts = 1 + sum(json.loads(line).get("event") == "started" for line in seen)

    def write(**what: Any) -> None:
        with journal.open("a") as file:
            file.write(json.dumps({**what, "pid": os.getpid()}) + "\n")

    def say(told: Any) -> None:
        sys.stdout.write((told if isinstance(told, str) else json.dumps(told)) + "\n")
        sys.stdout.flush()

    write(event="started")
    if mode == "grandchild":
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
        write(child=subprocess.Popen([sys.executable, "-c", code]).pid)
    if mode == "never_begins":
        time.sleep(60)
    if mode == "noisy":
        say("Welcome!")
    if mode == "complains":
        print("no licence found", file=sys.stderr)
        sys.exit(3)
    for line in sys.stdin:
        message = json.loads(line)
        write(method=message["method"], params=message.get("params"))
        if message["method"] == "tools/call":
            on_call(message, mode, starts, say)
            continue
        told = answer(message, mode, starts)
        if told is not None:
            say(told)
        if mode == "dies_idle" and message["method"] == "tools/list" and starts == 1:
            os._exit(1)
    if mode == "stays":
        time.sleep(60)


def on_call(message: dict[str, Any], mode: str, starts: int, say: Callable[[Any], None]) -> None:
    """What happens to a call over stdio."""
    if mode == "dies" or (mode in ("dies_once", "changed") and starts == 1):
        os._exit(1)
    if mode == "silent":
        return
    if mode == "garbage":
        say("%% not json %%")
        return
    if mode == "noisy":
        say("working on it ...")
    say(outcome(message, mode))


class Http:
    """A server over HTTP in this process. ``calls``: what ``tools/call`` messages said; ``messages``: all of them."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.messages: list[dict[str, Any]] = []
        self.headers: list[bytes] = []
        self.port = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self.release = asyncio.Event()

    @property
    def calls(self) -> list[Any]:
        """What the calls of tools said."""
        return [m["params"] for m in self.messages if m["method"] == "tools/call"]

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}/mcp"

    async def __aenter__(self) -> Http:
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
                length = next(
                    (int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x[:15] == b"content-length:"), 0
                )
                body = await reader.readexactly(length)
                if not await self._answer(head, body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> bool:
        if not head.startswith(b"POST"):
            return await self._say(writer, "405 Method Not Allowed", b"")
        message = json.loads(body)
        self.messages.append(message)
        self.headers.append(head)
        if message["method"] != "tools/call":
            if self.mode.startswith("begin:"):
                status, _, more = self.mode[6:].partition("|")
                return await self._say(writer, status, b"", more)
            told = answer(message, self.mode, len([m for m in self.messages if m["method"] == "initialize"]))
            return (
                await self._say(writer, "202 Accepted", b"")
                if told is None
                else await self._say(writer, "200 OK", json.dumps(told).encode())
            )
        return await self._call(message, writer)

    async def _call(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        mode = self.mode
        if mode == "reset" or (mode in ("reset_once", "changed") and len(self.calls) == 1):
            return False
        if mode == "cut":
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"jsonrpc"')
            await writer.drain()
            return False
        if mode == "silent":
            await self.release.wait()
            return False
        if mode.startswith("status:"):
            status, _, more = mode[7:].partition("|")
            return await self._say(writer, status, b"", more)
        if mode == "garbage":
            return await self._say(writer, "200 OK", b"%% not json %%")
        if mode == "html":
            return await self._say(writer, "200 OK", b"<html>", "Content-Type: text/html")
        if mode == "sse_cut":
            return await self._say(writer, "200 OK", b": nothing\n\n", "Content-Type: text/event-stream")
        if mode == "packed":
            return await self._say(writer, "200 OK", b"\x1f\x8b", "Content-Encoding: gzip")
        if mode.startswith("500:"):
            return await self._say(writer, "500 Oops", json.dumps(outcome(message, mode[4:])).encode())
        return await self._say(writer, "200 OK", json.dumps(outcome(message, mode)).encode())

    @staticmethod
    async def _say(writer: asyncio.StreamWriter, status: str, body: bytes, more: str = "") -> bool:
        lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
        lines += [more] if more else []
        if body and "content-type" not in more.lower():
            lines.append("Content-Type: application/json")
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await writer.drain()
        return True


if __name__ == "__main__":
    stdio(Path(sys.argv[1]), sys.argv[2])
