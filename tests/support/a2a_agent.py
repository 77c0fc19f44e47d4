"""A real A2A server of the SDK on a port. It writes down every request it gets; what it does is the message's word.

``echo WORDS``: completes with an artifact. ``hold FILE``: works until the file is there. ``fail``, ``reject``, ``ask``,
``files``, ``data``, ``say WORDS`` (a message and no task), ``break``, ``elsewhere``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import uvicorn
from a2a.helpers import new_task_from_user_message, new_text_message, new_text_part
from a2a.server.agent_execution import AgentExecutor, RequestContext
from a2a.server.events import EventQueue
from a2a.server.request_handlers import DefaultRequestHandler
from a2a.server.routes import create_agent_card_routes, create_jsonrpc_routes
from a2a.server.tasks import InMemoryTaskStore, TaskUpdater
from a2a.types import AgentCapabilities, AgentCard, AgentInterface, AgentSkill, Part
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

JOURNAL, PORT = Path(sys.argv[1]), int(sys.argv[2])
HERE = f"http://127.0.0.1:{PORT}"


def write(**what: object) -> None:
    """Append to the journal."""
    with JOURNAL.open("a") as file:
        file.write(json.dumps(what) + "\n")


class Agent(AgentExecutor):
    """Does what it is told."""

    async def execute(self, context: RequestContext, queue: EventQueue) -> None:
        """Work."""
        assert context.message is not None
        word, _, rest = context.get_user_input().partition(" ")
        if word == "say":
            await queue.enqueue_event(new_text_message(rest))
            return
        task = context.current_task or new_task_from_user_message(context.message)
        await queue.enqueue_event(task)
        updater = TaskUpdater(queue, task.id, task.context_id)
        await updater.start_work()
        if word == "hold":
            while not Path(rest).exists():  # noqa: ASYNC110, ASYNC240 - another process makes it
                await asyncio.sleep(0.01)
            rest = "held"
        if word in ("fail", "reject", "ask"):
            end = {"fail": updater.failed, "reject": updater.reject, "ask": updater.requires_input}[word]
            await end(updater.new_agent_message([new_text_part("no paper")]))
            return
        await updater.add_artifact(self._parts(word, rest), name="out")
        await updater.complete()

    @staticmethod
    def _parts(word: str, rest: str) -> list[Part]:
        if word == "data":
            return [Part(data=ParseDict({"n": 3, "f": 1.5, "list": [1]}, Value()))]
        if word == "files":
            return [
                Part(raw=b"\x00\x01", filename="../../etc/raw.bin", media_type="application/x-raw"),
                Part(url=f"{HERE}/report.txt"),
            ]
        if word == "elsewhere":
            return [Part(url="http://localhost:1/report.txt")]
        return [new_text_part(rest)]

    async def cancel(self, context: RequestContext, queue: EventQueue) -> None:
        """Stop."""
        assert context.task_id is not None
        assert context.context_id is not None
        await TaskUpdater(queue, context.task_id, context.context_id).cancel()


class Journal:
    """Writes down what arrives, before anything is done about it."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = b""
        while True:
            event = await receive()
            body += event.get("body", b"")
            if not event.get("more_body"):
                break
        told = json.loads(body)
        write(method=told["method"], params=told.get("params"))

        async def again() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)


async def report(request: Request) -> PlainTextResponse:
    """A file."""
    return PlainTextResponse("the report")


card = AgentCard(
    name="Clerk", description="does as told", version="1.0.0", default_input_modes=["text/plain"],
    default_output_modes=["text/plain"], capabilities=AgentCapabilities(streaming=True),
    skills=[AgentSkill(id="do", name="do", description="do", tags=["t"])],
    supported_interfaces=[AgentInterface(protocol_binding="JSONRPC", url=f"{HERE}/rpc", protocol_version="1.0")],
)  # fmt: skip
handler = DefaultRequestHandler(agent_executor=Agent(), task_store=InMemoryTaskStore(), agent_card=card)
routes = [*create_agent_card_routes(card), *create_jsonrpc_routes(handler, "/rpc"), Route("/report.txt", report)]
if __name__ == "__main__":
    uvicorn.run(Journal(Starlette(routes=routes)), host="127.0.0.1", port=PORT, log_level="warning")
