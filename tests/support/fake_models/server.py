"""The server: raw HTTP/1.1 on loopback, so that faults are exact at the socket."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from perdure.ports.provider import Response
from perdure.providers.scripted import Call, Calls, Fail, Hang, Say
from support.fake_models import anthropic, chat, google, responses
from support.fake_models.script import FAULTS, LONG_TEXT, Answer, Asked, Break, Format, Nowhere, Odd, Raw, Status
from support.fake_models.script import response_of as reply_of

PIECE_BYTES = 1 << 16
SENT_KEPT_BYTES = 1 << 20
TLS_HELLO = b"\x16"
KEY_CODES: dict[Format, int] = {"google": 400}  # elsewhere 401
REQUEST_ID: dict[Format, str] = {
    "chat": "x-request-id",
    "responses": "x-request-id",
    "azure": "apim-request-id",
    "anthropic": "request-id",
}  # Google names a call in its body
REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 429: "Too Many Requests"}

Planned = Answer | str | None | Callable[["Seen"], "Planned"]


@dataclass
class Seen:
    """One request as it arrived, and what of the body of its answer was sent."""

    n: int
    wire: Format
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    raw: bytes
    body: dict[str, Any]
    asked: Asked
    sent: bytearray = field(default_factory=bytearray)
    finished: threading.Event = field(default_factory=threading.Event)

    @property
    def key(self) -> str:
        """The key it came with."""
        bearer = self.headers.get("authorization", "").removeprefix("Bearer ")
        named = (self.headers.get(name) for name in ("api-key", "x-api-key", "x-goog-api-key"))
        return next((key for key in named if key), bearer) or self.query.get("key", "")

    @property
    def request_id(self) -> str:
        """The name of the call in the headers of its answer; Google gives none."""
        return f"req_{self.n}" if self.wire in REQUEST_ID else ""

    @property
    def digest(self) -> str:
        """Hex SHA-256 of its body."""
        return hashlib.sha256(self.raw).hexdigest()

    @property
    def sent_digest(self) -> str:
        """Hex SHA-256 of the body of the answer as far as it was sent, once it was."""
        assert self.finished.wait(10), "the answer is still being sent"
        return hashlib.sha256(self.sent).hexdigest()


class FakeModels:
    """Every model provider in one server, in a thread of its own. Usable as a context manager.

    Args:
        port: 0 for any.
        journal: a file that gets one line of JSON for each request before it is answered, forced to the disk: the
            witness of what reached a provider, whatever becomes of the client. A temporary file by default.
        key: the only key that is accepted; None accepts any.
    """

    def __init__(self, port: int = 0, journal: Path | None = None, key: str | None = None) -> None:
        self._own_journal = journal is None
        if journal is None:
            handle, name = tempfile.mkstemp(prefix="models-", suffix=".jsonl")
            os.close(handle)
            journal = Path(name)
        self.journal = journal
        self.key = key
        self.requests: list[Seen] = []
        self.connections = 0  # made since the last `play`
        self.open = 0  # connections that are open now
        self.gone = threading.Event()  # a client went away while it waited for the server
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self._plan: deque[Planned] = deque()
        self._items: tuple[Answer, ...] | None = None
        self._turn_faults: dict[int, deque[Planned]] = {}
        self._stored = responses.Stored()
        self._n = 0
        self._closed_socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self.serve, name="fake-models", daemon=True)

    # what it does

    def play(self, *answers: Planned) -> FakeModels:
        """Forget what was seen; give these answers to the next requests, one each, whatever they ask.

        An answer is an item of a script, a fault or its name, a function of the request, or None for what the script
        says. After the last, the script goes on: that of ``script``, else a call of the first tool and then text.
        """
        self.requests.clear()
        self.gone.clear()
        self.connections = 0
        self._items = None
        self._turn_faults = {}
        self._plan = deque(answers)
        return self

    def script(self, items: Sequence[Answer], faults: Mapping[int, Sequence[Planned]] | None = None) -> FakeModels:
        """Forget what was seen; answer turn *n* of every conversation with the n-th item.

        Args:
            faults: by turn, what its first requests get before its item is played.
        """
        self.play()
        self._items = tuple(items)
        self._turn_faults = {turn: deque(planned) for turn, planned in (faults or {}).items()}
        return self

    def next(self, *answers: Planned) -> FakeModels:
        """Give these answers to the next requests; then go on as before. Forgets nothing."""
        self._plan.extend(answers)
        return self

    def expire(self) -> None:
        """Forget every stored response: continuing one is refused from now on."""
        self._stored.expire()

    def address(self, wire: Format, fault: str = "") -> str:
        """The base address for clients of a format; with the fault ``refused``, ``dns`` or ``tls``, one that fails."""
        tail = {"chat": "/v1", "responses": "/v1"}.get(wire, "")
        match FAULTS.get(fault):
            case Nowhere("refused"):
                if self._closed_socket is None:  # bound and not listening: nobody else can take the port
                    self._closed_socket = socket.socket()
                    self._closed_socket.bind(("127.0.0.1", 0))
                return f"http://127.0.0.1:{self._closed_socket.getsockname()[1]}{tail}"
            case Nowhere("dns"):
                return f"http://models.invalid{tail}"
            case Nowhere("tls"):
                return f"https://127.0.0.1:{self.port}{tail}"
            case _:
                return f"http://127.0.0.1:{self.port}{tail}"

    # its life

    def __enter__(self) -> FakeModels:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._socket.close()
        if self._closed_socket is not None:
            self._closed_socket.close()
        os.close(self._journal)
        if self._own_journal:
            self.journal.unlink()

    def serve(self) -> None:
        """Serve in this thread until told to stop."""
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._connection(reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        server = await asyncio.start_server(connected, sock=self._socket, limit=1 << 20)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            self.open -= 1
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _resets_unread(self, writer: asyncio.StreamWriter) -> bool:
        planned = self._plan[0] if self._plan else None
        if (FAULTS.get(planned) if isinstance(planned, str) else planned) != Break("accept"):
            return False
        self._plan.popleft()
        self._write_journal({"read": False, "answer": "reset unread"})
        _reset(writer)
        return True

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer. Whether the connection can serve another."""
        first = await reader.readexactly(1)
        if first == TLS_HELLO:
            writer.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
            return False
        if self._resets_unread(writer):  # sooner, the client could not even connect
            return False
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])
        }
        raw = await _read_body(reader, headers)
        seen = self._see(method, target, headers, raw)
        if seen is None:
            await self._send(writer, None, 404, "application/json", [b'{"error":{"message":"no such path"}}'], {})
            return True
        try:
            return await self._answer(seen, reader, writer)
        except ConnectionError:
            self.gone.set()
            raise
        finally:
            seen.finished.set()

    def _see(self, method: str, target: str, headers: dict[str, str], raw: bytes) -> Seen | None:
        address = urlsplit(target)
        path, query = unquote(address.path), dict(parse_qsl(address.query))
        wire = _format(path)
        if method != "POST" or wire is None:
            self._write_journal({"read": True, "path": path, "answer": "no such path"})
            return None
        body = json.loads(raw)
        match wire:
            case "chat" | "azure":
                asked = chat.asked(path, query, body)
            case "responses":
                asked = responses.asked(self._stored.history(body), body)
            case "anthropic":
                asked = anthropic.asked(body)
            case "google":
                asked = google.asked(path, query, body)
        self._n += 1
        seen = Seen(self._n, wire, path, query, headers, raw, body, asked)
        self.requests.append(seen)
        return seen

    # its answers

    async def _answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        planned = self._planned(seen)
        answer = self._refusal(seen, planned) or planned
        line = {"n": seen.n, "read": True, "wire": seen.wire, "path": seen.path, "turn": seen.asked.turn}
        line |= {"question": seen.asked.question[:200], "stream": seen.asked.stream, "request": seen.digest}
        self._write_journal(line | {"answer": _name(answer)})
        match answer:
            case Break("read", how):
                return await self._break(how, reader, writer)
            case Break("middle", how):
                return await self._half(seen, how, reader, writer)
            case Status():
                return await self._status(seen, answer, writer)
            case Raw(raw, media_type, code):
                if answer is FAULTS["malformed"] and seen.asked.stream:
                    event = {"responses": "response.created", "anthropic": "message_start"}.get(seen.wire, "")
                    raw = (f"event: {event}\n".encode() if event else b"") + b"data: " + raw + b"\n\n"
                    media_type = "text/event-stream"
                return await self._send(writer, seen, code, media_type, [raw], {})
            case Fail():
                return await self._status(seen, Status(500, "server"), writer)
            case Hang():
                return await self._break("silence", reader, writer)
            case Nowhere() | Break():
                raise AssertionError(f"{answer} is not played by an answer")
            case _:
                return await self._reply(seen, reply_of(answer, seen.asked), writer)

    def _planned(self, seen: Seen) -> Answer:
        planned = self._plan.popleft() if self._plan else None
        if planned is None and self._turn_faults.get(seen.asked.turn):
            planned = self._turn_faults[seen.asked.turn].popleft()
        while callable(planned):
            planned = planned(seen)
        if isinstance(planned, str):
            planned = FAULTS[planned]
        return self._item(seen) if planned is None else planned

    def _item(self, seen: Seen) -> Answer:
        asked = seen.asked
        if self._items is None:
            if asked.tools and not asked.answered:
                return Call(asked.tools[0], '{"city":"Oslo"}', f"call_{asked.turn}_0")
            return Say("It is sunny.")
        if asked.turn > len(self._items):
            text = f"The script has {len(self._items)} items and turn {asked.turn} is asked for."
            return Status(400, "invalid", message=text)
        return self._items[asked.turn - 1]

    def _refusal(self, seen: Seen, planned: Answer) -> Status | None:
        if self.key is not None and seen.key != self.key:
            return Status(0, "key")
        if isinstance(planned, Break | Status):
            return None
        match seen.wire:
            case "chat" | "azure":
                wrong = chat.objection(seen.path, seen.query, seen.headers, seen.body)
            case "anthropic":
                wrong = anthropic.objection(seen.headers, seen.body)
            case "google":
                wrong = google.objection(seen.path, seen.query, seen.body)
            case "responses":
                found = responses.objection(seen.body, self._stored)
                return None if found is None else Status(400, f"code {found[1]}", message=found[0])
        return None if wrong is None else Status(400, "invalid request", message=wrong)

    async def _status(self, seen: Seen, status: Status, writer: asyncio.StreamWriter) -> bool:
        if seen.wire == "google" and status.why == "refused":
            raw = json.dumps(google.blocked(seen.asked, seen.n)).encode()
            if seen.asked.stream:
                return await self._send(writer, seen, 200, "text/event-stream", [b"data: " + raw + b"\n\n"], {})
            return await self._send(writer, seen, 200, "application/json", [raw], {})
        say = {"azure": chat.azure_error, "responses": responses.error, "anthropic": anthropic.error}.get(
            seen.wire, google.error if seen.wire == "google" else chat.error
        )
        code = status.code or KEY_CODES.get(seen.wire, 401)
        body = say(status.why, status.message, seen.asked.model, seen.key, code)
        if status.why.startswith("code "):
            body["error"]["code"] = status.why.removeprefix("code ")
        headers = {
            name: formatdate(time.time() + float(value.removeprefix("DATE+")), usegmt=True)
            if "DATE" in value
            else value
            for name, value in status.headers.items()
        }
        return await self._send(writer, seen, code, "application/json", [json.dumps(body).encode()], headers)

    async def _reply(self, seen: Seen, response: Response, writer: asyncio.StreamWriter) -> bool:
        pieces = self._pieces(seen, response)
        media_type = "text/event-stream" if seen.asked.stream else "application/json"
        return await self._send(writer, seen, 200, media_type, pieces, {})

    def _pieces(self, seen: Seen, response: Response) -> list[bytes]:
        asked, n = seen.asked, seen.n
        if seen.wire == "responses" and seen.body.get("store", True):
            output = responses.output_of(response, seen.body, n)
            self._stored.keep(f"resp_{n}", [*self._stored.history(seen.body), *output])
        match seen.wire, asked.stream:
            case "responses", True:
                return responses.events(response, asked, seen.body, n)
            case "responses", False:
                return [responses.whole(response, asked, seen.body, n)]
            case "anthropic", True:
                return anthropic.events(response, asked, n)
            case "anthropic", False:
                return [anthropic.whole(response, asked, n)]
            case "google", True:
                return google.events(response, asked, n)
            case "google", False:
                return [google.whole(response, asked, n)]
            case _, True:
                return chat.events(response, asked, n)
            case _:
                return [chat.whole(response, asked, n)]

    async def _half(self, seen: Seen, how: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        item = self._item(seen) if self._items is not None else Say(LONG_TEXT)
        if not isinstance(item, Say | Call | Calls | Response | Odd):
            item = Say(LONG_TEXT)
        pieces = self._pieces(seen, reply_of(item, seen.asked))
        if not seen.asked.stream:
            if how == "error":
                return await self._status(seen, Status(500, "server"), writer)
            raw = pieces[0]
            await self._send(writer, seen, 200, "application/json", [raw[: len(raw) // 2]], {}, full=len(raw), how=how)
        else:
            half = pieces[: max(1, len(pieces) // 2)]
            if how == "error":
                say = {"responses": responses, "anthropic": anthropic, "google": google}.get(seen.wire, chat)
                half.append(say.error_event("overloaded", "", seen.asked.model, seen.key))  # type: ignore[attr-defined]
            await self._send(writer, seen, 200, "text/event-stream", half, {}, full=-1, how=how)
        return how in ("end", "error") or await self._break(how, reader, writer)

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        seen: Seen | None,
        code: int,
        media_type: str,
        pieces: Sequence[bytes],
        headers: Mapping[str, str],
        *,
        full: int | None = None,
        how: str = "end",
    ) -> bool:
        """Head and body. ``full``: the length that is promised, -1 for chunks, None for what there is."""
        chunked = full == -1 or media_type == "text/event-stream" or (full is not None and how == "end")
        length = sum(map(len, pieces)) if full is None else full
        lines = [f"HTTP/1.1 {code} {REASONS.get(code, 'Fault')}", f"content-type: {media_type}"]
        lines += ["transfer-encoding: chunked"] if chunked else [f"content-length: {length}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"{REQUEST_ID[seen.wire]}: {seen.request_id}"] if seen is not None and seen.request_id else []
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
        for piece in pieces:
            for at in range(0, len(piece), PIECE_BYTES):
                part = piece[at : at + PIECE_BYTES]
                if seen is not None and len(seen.sent) < SENT_KEPT_BYTES:
                    seen.sent += part
                writer.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
                await writer.drain()
                await asyncio.sleep(0)
        if chunked and how in ("end", "error"):
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        return True

    async def _break(self, how: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if how == "reset":
            _reset(writer)
        elif how == "silence":
            try:
                while await reader.read(1024):
                    pass
            finally:
                self.gone.set()
        return False

    def _write_journal(self, line: dict[str, Any]) -> None:
        os.write(self._journal, json.dumps(line | {"at": time.time()}).encode() + b"\n")
        os.fsync(self._journal)


def journal_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a server's journal: every request that reached it, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _format(path: str) -> Format | None:
    if chat.OPENAI.search(path):
        return "chat"
    if chat.AZURE.search(path):
        return "azure"
    if responses.PATH.search(path) or re.search(r"/openai/responses\Z", path):
        return "responses"
    if anthropic.PATH.search(path):
        return "anthropic"
    return "google" if google.PATH.search(path) else None


def _name(answer: Answer) -> str:
    named = (name for name, fault in FAULTS.items() if fault == answer)
    return next(named, type(answer).__name__ if not isinstance(answer, Status) else f"{answer.code} {answer.why}")


def _reset(writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.get("transfer-encoding", "").lower() != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    raw = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        raw += (await reader.readexactly(size + 2))[:-2]
    await reader.readuntil(b"\r\n")
    return raw
