"""An MCP server as a child process: in a group of its own, spoken to in lines of JSON, and gone when it is let go.

Implements the two streams that a session of the SDK wants. A line is bounded; what is printed that is no message is
dropped and counted; the end of the process ends the streams, whoever else keeps its pipes open.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCNotification, jsonrpc_message_adapter

from perdure.executors.process import Watched, signal_group
from perdure.limits import MCP_MESSAGE_BYTES_MAX, PROCESS_GRACE_SECONDS, PROTOCOL_TEXT_CHARS_MAX
from perdure.protocols._wire import watching


class Child:
    """A server that runs.

    Attributes:
        read, write: messages from it and to it.
        problem: why it can say nothing more; empty while it can.
        dropped: lines it printed that are no messages.
    """

    read: MemoryObjectReceiveStream[SessionMessage | Exception]

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self._argv, self._cwd, self._env = argv, cwd, env
        self._errors = bytearray()
        self._let_go = False
        self.problem = ""
        self.dropped = 0
        self.write = Lines(self)

    async def start(self) -> None:
        """Start it.

        Raises:
            OSError: it surely did not start.
        """
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: Watched(MCP_MESSAGE_BYTES_MAX), *self._argv, cwd=self._cwd, env=dict(self._env),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._protocol = protocol
        self.process = asyncio.subprocess.Process(transport, protocol, loop)
        self._transport = transport
        send, self.read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        self._listening = asyncio.ensure_future(self._listen(send))
        self._tasks = [
            self._listening,
            asyncio.ensure_future(self._read_errors()),
            asyncio.ensure_future(self._watch()),
        ]

    @property
    def gone(self) -> bool:
        """Whether nothing can be said to it any more."""
        return self._let_go or bool(self.problem) or self._protocol.exited.is_set()

    @property
    def errors(self) -> str:
        """The end of what it printed on its standard error."""
        return self._errors.decode("utf-8", "replace").strip()

    async def _watch(self) -> None:
        """Its end is the end of what it says: a grandchild that keeps the pipe open is not waited for long."""
        await self._protocol.exited.wait()
        await asyncio.wait([self._listening], timeout=PROCESS_GRACE_SECONDS)
        if not self._listening.done() and not self._let_go:
            self.problem = "it ended"
        self._listening.cancel()

    async def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while piece := await self.process.stderr.read(65_536):
            self._errors += piece
            del self._errors[:-PROTOCOL_TEXT_CHARS_MAX]

    async def _listen(self, send: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        assert self.process.stdout is not None
        async with send:
            try:
                while True:
                    line = await self.process.stdout.readuntil(b"\n")
                    try:
                        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                    except ValueError:
                        self.dropped += bool(line.strip())
                        continue
                    await send.send(SessionMessage(message))
            except asyncio.IncompleteReadError:
                self.problem = "" if self._let_go else "it ended"
            except asyncio.LimitOverrunError:
                self.problem = f"it sent a message of more than {MCP_MESSAGE_BYTES_MAX:,} bytes"
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass  # nobody listens any more

    async def stop(self) -> None:
        """Let it end by itself, else end it and all it started. Bounded; also when this is itself cancelled."""
        assert self.process.stdin is not None
        self._let_go = True
        self.process.stdin.close()
        try:
            await self._ended(PROCESS_GRACE_SECONDS)
            if not self._protocol.exited.is_set():
                signal_group(self.process.pid, signal.SIGTERM)
                await self._ended(PROCESS_GRACE_SECONDS)
        finally:
            signal_group(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(asyncio.CancelledError):
                await self._protocol.exited.wait()
            for task in self._tasks:
                task.cancel()
            self.read.close()
            self._transport.close()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(self._tasks)

    async def _ended(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._protocol.exited.wait()


class Lines:
    """The stream of messages to a server."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def __aenter__(self) -> Lines:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, where: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Nothing: its process is let go by whoever started it."""

    async def send(self, item: SessionMessage, /) -> None:
        """Write one message. A notification is not waited for: a server that reads nothing cannot hold up a cancel.

        Raises:
            anyio.BrokenResourceError: there is nobody to read it.
        """
        child = self._child
        stdin = child.process.stdin
        assert stdin is not None
        if child.gone or stdin.is_closing():
            raise anyio.BrokenResourceError
        data = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
        sent = watching.get()
        if sent is not None and sent.marker in data:
            sent.left = True
        try:
            stdin.write(data)
            if not isinstance(item.message, JSONRPCNotification):
                await stdin.drain()
        except (ConnectionError, RuntimeError) as error:
            raise anyio.BrokenResourceError from error
