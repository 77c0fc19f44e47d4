"""A loopback server that speaks Chat Completions over real HTTP, strict as the real one and faulty on demand.

It refuses conversations that OpenAI refuses (unpaired calls, broken arguments), keeps what it was asked, and plays the
answers it was given, one a request; without one it calls the first tool it is offered and then answers with text.

In a test: ``with FakeLLM() as server``. From a shell: ``python fake_llm.py [PORT]`` prints its address and serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
PIECE = 7  # characters of text or arguments in one chunk of a stream


@dataclass(frozen=True)
class Reply:
    """A complete response. ``calls`` are (id, name, raw arguments)."""

    text: str = ""
    calls: tuple[tuple[str | None, str, str], ...] = ()
    reasoning: str = ""
    refusal: str = ""
    finish: str | None = ""  # empty: what fits; None: the server leaves it out
    usage: dict[str, Any] | None = field(default_factory=lambda: dict(USAGE))
    extra: dict[str, Any] | None = None  # `extra_content` of the first call

    def reason(self) -> str | None:
        return ("tool_calls" if self.calls else "stop") if self.finish == "" else self.finish


@dataclass(frozen=True)
class Status:
    """An HTTP error."""

    code: int
    message: str = "it failed"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Raw:
    """A body as it stands, with status 200."""

    body: bytes
    media_type: str = "application/json"


@dataclass(frozen=True)
class Broken:
    """The connection ends: ``chunks`` parts of the reply first, then a TCP reset, a close, or a well-formed early end.

    ``chunks`` None breaks before the head of the response.
    """

    how: Literal["reset", "close", "end"] = "reset"
    chunks: int | None = None
    reply: Reply = Reply("It is sunny in Oslo and it will stay so.")


@dataclass(frozen=True)
class Slow:
    """Nothing comes until the client goes away; after ``chunks`` parts of the reply, if it is a stream."""

    chunks: int | None = None
    reply: Reply = Reply("It is sunny in Oslo and it will stay so.")


Answer = Reply | Status | Raw | Broken | Slow | Callable[[dict[str, Any]], "Answer"]


@dataclass(frozen=True)
class Seen:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class FakeLLM:
    """The server, in a thread of its own; ``url`` is its base address. Usable as a context manager."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[Seen] = []
        self.gone = threading.Event()  # a client went away while a `Slow` answer was due
        self._answers: deque[Answer] = deque()
        self._transports: dict[tuple[str, int], asyncio.Transport] = {}
        self._socket = socket.create_server(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        config = uvicorn.Config(
            Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])]),
            http=self._protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="fake-llm", daemon=True)

    def __enter__(self) -> FakeLLM:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def play(self, *answers: Answer) -> FakeLLM:
        """Forget what was seen and give these answers next."""
        self.requests.clear()
        self.gone.clear()
        self._answers = deque(answers)
        return self

    def run(self) -> None:
        """Serve in this thread until interrupted."""
        self._server.run([self._socket])

    def _protocol(self) -> type[H11Protocol]:
        transports = self._transports

        class Protocol(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                transports[transport.get_extra_info("peername")[:2]] = transport

        return Protocol

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(Seen(request.url.path, dict(request.headers), body))
        answer: Answer = self._answers.popleft() if self._answers else usual(body)
        while not isinstance(answer, Reply | Status | Raw | Broken | Slow):
            answer = answer(body)
        if (wrong := objection(body)) is not None:
            answer = Status(400, wrong)
        match answer:
            case Status(code, message, headers):
                error = {"message": message, "type": "error", "param": None, "code": None}
                return JSONResponse({"error": error}, code, headers)
            case Raw(raw, media_type):
                return Response(raw, media_type=media_type)
            case Reply():
                parts = pieces(answer, body)
                if not body.get("stream"):
                    return Response(b"".join(parts), media_type="application/json")
                return StreamingResponse(self._body(parts, request), media_type="text/event-stream")
            case Broken(how, None):
                await self._drop(request, how)
                return Response()
            case Slow(None):
                await self._wait_for_disconnect(request)
                return Response()
            case Broken(how, chunks, reply):
                return self._partly(pieces(reply, body), chunks or 0, request, how)
            case Slow(chunks, reply):
                return self._partly(pieces(reply, body), chunks or 0, request, "wait")

    def _partly(self, parts: list[bytes], chunks: int, request: Request, then: str) -> Response:
        stream = parts[0].startswith(b"data:")
        assert chunks < len(parts), "nothing would be missing"
        headers = {} if stream or then == "end" else {"content-length": str(len(b"".join(parts)))}
        media_type = "text/event-stream" if stream else "application/json"
        return StreamingResponse(self._body(parts[:chunks], request, then), 200, headers, media_type)

    async def _body(self, parts: list[bytes], request: Request, then: str = "end") -> AsyncIterator[bytes]:
        for part in parts:
            yield part
            await asyncio.sleep(0)
        if then == "wait":
            await self._wait_for_disconnect(request)
        elif then != "end":
            await asyncio.sleep(0.05)  # what was sent arrives before the connection goes
            await self._drop(request, then)

    async def _drop(self, request: Request, how: str) -> None:
        assert request.client is not None
        transport = self._transports[request.client.host, request.client.port]
        if how == "reset":
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        transport.abort()
        await asyncio.sleep(0)

    async def _wait_for_disconnect(self, request: Request) -> None:
        with contextlib.suppress(ClientDisconnect):
            while (await request.receive())["type"] != "http.disconnect":
                pass
        self.gone.set()


def usual(body: dict[str, Any]) -> Reply:
    """A call of the first tool, then text."""
    if body.get("tools") and body["messages"][-1]["role"] == "user":
        return Reply(calls=(("call_1", body["tools"][0]["function"]["name"], '{"city":"Oslo"}'),))
    return Reply("It is sunny.")


def objection(body: dict[str, Any]) -> str | None:
    """Why OpenAI would refuse this conversation with HTTP 400, if it would."""
    open_calls: list[str] = []
    for index, message in enumerate(body["messages"]):
        where = f"messages[{index}]"
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                return f"{where}: a tool message must answer a preceding tool call"
            open_calls.remove(message["tool_call_id"])
            continue
        if open_calls:
            return f"{where}: tool calls {open_calls} are not answered"
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or []
            open_calls = [call["id"] for call in calls]
            if len(set(open_calls)) < len(calls) or not all(open_calls):
                return f"{where}: tool call ids must be unique and not empty"
            if not calls and not message.get("content"):
                return f"{where}: an assistant message needs content or calls"
            for call in calls:
                with contextlib.suppress(ValueError):
                    if isinstance(json.loads(call["function"]["arguments"]), dict):
                        continue
                return f"{where}: the arguments of a call must be a JSON object"
        elif not isinstance(message["content"], str):
            return f"{where}: content must be text"
    return f"tool calls {open_calls} are not answered" if open_calls else None


def pieces(reply: Reply, body: dict[str, Any]) -> list[bytes]:
    """The body of a reply in parts: the events of a stream, or one JSON text in two halves."""
    base: dict[str, Any] = {"id": "chatcmpl-1", "created": 1, "model": f"{body['model']}-2026"}
    if not body.get("stream"):
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None}
        message |= {"reasoning_content": reply.reasoning} if reply.reasoning else {}
        message |= {"refusal": reply.refusal} if reply.refusal else {}
        if reply.calls:
            message["tool_calls"] = [whole(call, reply.extra if not n else None) for n, call in enumerate(reply.calls)]
        choice = {"index": 0, "message": message, "finish_reason": reply.reason()}
        raw = json.dumps(base | {"object": "chat.completion", "choices": [choice], "usage": reply.usage}).encode()
        return [raw[: len(raw) // 2], raw[len(raw) // 2 :]]

    def event(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return sse(base | {"object": "chat.completion.chunk", "choices": [choice]})

    events = [event({"role": "assistant", "content": ""})]
    events += [event({"reasoning_content": piece}) for piece in split(reply.reasoning)]
    events += [event({"content": piece}) for piece in split(reply.text)]
    events += [event({"refusal": piece}) for piece in split(reply.refusal)]
    for index, call in enumerate(reply.calls):
        head = whole((call[0], call[1], ""), reply.extra if not index else None)
        events.append(event({"tool_calls": [{"index": index} | head]}))
        for piece in split(call[2]):
            events.append(event({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    if reply.reason() is not None:
        events.append(event({}, reply.reason()))
    events.append(sse(base | {"object": "chat.completion.chunk", "choices": [], "usage": reply.usage}))
    return [*events, b"data: [DONE]\n\n"]


def whole(call: tuple[str | None, str, str], extra: dict[str, Any] | None) -> dict[str, Any]:
    function = {"name": call[1], "arguments": call[2]}
    return {"id": call[0], "type": "function", "function": function} | ({"extra_content": extra} if extra else {})


def split(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


def sse(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


if __name__ == "__main__":
    server = FakeLLM(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    print(server.url, flush=True)
    server.run()
