"""``a2a.delegate``: work given to an agent elsewhere, through the official SDK.

The message is sent once. The remote's id of the task is durable before it is first asked about, so whoever goes on after a
crash asks about that task and sends nothing. A message that may have arrived without such an id is in doubt and is never
sent again. Asking is harmless: a question that gets no answer is asked again, within the peer's bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mimetypes
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from a2a.client import A2ACardResolver, A2AClientError, AgentCardResolutionError, ClientConfig, ClientFactory
from a2a.client.client import Client
from a2a.client.client_factory import major_minor
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageRequest,
    Task,
    TaskState,
)
from a2a.utils.constants import PROTOCOL_VERSION_1_0, TransportProtocol
from a2a.utils.errors import A2AError, InternalError, TaskNotFoundError
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.struct_pb2 import Value

from perdure.definitions.workflow import A2aPeer, Action
from perdure.errors import Invalid, Unavailable
from perdure.executors import network
from perdure.executors.network import Resolve
from perdure.executors.secret_values import shown, texts, without
from perdure.limits import (
    A2A_PARTS_MAX,
    ARTIFACT_BYTES_MAX,
    PROTOCOL_FAREWELL_SECONDS,
    PROTOCOL_TEXT_CHARS_MAX,
)
from perdure.ports.executor import Call, Facts, Failed, InDoubt, Performed, Produced
from perdure.protocols._wire import Sent, client, resolved, watching
from perdure.records.effect import REMOTE_NOTE as REMOTE
from perdure.workflow.schemas import problem

_ENDED = {
    TaskState.TASK_STATE_COMPLETED: "completed", TaskState.TASK_STATE_FAILED: "failed",
    TaskState.TASK_STATE_CANCELED: "canceled", TaskState.TASK_STATE_REJECTED: "rejected",
}  # fmt: skip
_WAITS = {TaskState.TASK_STATE_INPUT_REQUIRED: "input", TaskState.TASK_STATE_AUTH_REQUIRED: "authentication"}
_encode = msgspec.json.Encoder().encode
logging.getLogger("a2a").addHandler(logging.NullHandler())  # what it logs goes where the program sends it


class A2a:
    """Delegates to agents.

    Args:
        peers: by name. resolver: asked for the addresses of a name.
    """

    kinds = frozenset({"a2a.delegate"})

    def __init__(self, peers: Mapping[str, A2aPeer], resolver: Resolve = network.system_resolve) -> None:
        self._peers = peers
        self._resolver = resolver

    def describe(self, action: Action, input: Mapping[str, Any]) -> Facts:
        """See ``ports.executor.Executor.describe``."""
        name, peer = self._named(action)
        request = {"peer": name, "url": peer.url, "headers": shown(dict(peer.headers)), **_given(input)}
        return Facts(f"a2a.delegate:{name}", "remote_agent", "once", action.risk or "medium", "a2a.delegate", request)

    async def prepare(self, call: Call) -> Performed | None:
        """See ``ports.executor.Executor.prepare``: by words only, nothing is reached."""
        name, peer = self._named(call.action)
        _given(call.input)
        wanted = peer.protocol_version
        if wanted is not None and not _speaks(wanted):
            raise Invalid(f"A2A peer {name!r}: the protocol version {wanted!r} is not {PROTOCOL_VERSION_1_0}.")
        network.judge(peer.url, call.policy)
        await asyncio.to_thread(texts, dict(peer.headers), call.policy, call.workspace.root)
        return None

    async def execute(self, call: Call) -> Performed:
        """See ``ports.executor.Executor.execute``. A known remote task is asked about; nothing is sent again."""
        name, peer = self._named(call.action)
        timeout = min(call.timeout, float(peer.timeout_seconds))
        delegation = _Delegation(name, peer, call, self._resolver)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(timeout):
                    await stack.enter_async_context(delegation.reached())
                    return await delegation.perform()
            except TimeoutError:
                raise delegation.late(timeout) from None
            except asyncio.CancelledError:
                await delegation.cancelled()
                raise

    async def predict(self, call: Call) -> Any:
        """See ``ports.executor.Executor.predict``: nothing is reached."""
        await self.prepare(call)
        return {"status": "requires_execution", "changed": False}

    def _named(self, action: Action) -> tuple[str, A2aPeer]:
        peer = self._peers.get(action.peer or "")
        if peer is None:
            raise Invalid(f"There is no A2A peer {action.peer!r}.", help="Add it to spec.a2aPeers.")
        return action.peer or "", peer


class _Delegation:
    """One message to one peer, and the task it became."""

    def __init__(self, name: str, peer: A2aPeer, call: Call, resolver: Resolve) -> None:
        self.name = name
        self.peer = peer
        self.call = call
        self.sent = Sent(b'"SendMessage"')
        noted = call.notes.get(REMOTE)
        self.remote: dict[str, Any] | None = dict(noted) if isinstance(noted, Mapping) else None
        self._resolver = resolver
        self._http: httpx.AsyncClient
        self._client: Client
        self._is_reached = False
        self._known: list[str] = []

    # -- reaching it --------------------------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def reached(self) -> AsyncIterator[None]:
        """A client of the peer's agent, found by its card."""
        policy, workspace = self.call.policy, self.call.workspace
        try:
            target = await resolved(self.peer.url, policy, self._resolver)
        except Unavailable as error:
            raise self._unreached(error.message) from error
        headers, self._known = await asyncio.to_thread(texts, dict(self.peer.headers), policy, workspace.root)
        self._http = await asyncio.to_thread(client, httpx, target, policy, workspace, headers)
        async with self._http:
            card = await self._card()
            chosen = self._interface(card)
            del card.supported_interfaces[:]
            card.supported_interfaces.append(chosen)
            config = ClientConfig(streaming=False, polling=True, httpx_client=self._http)
            self._client = ClientFactory(config).create(card)
            self._is_reached = True
            yield

    async def _card(self) -> AgentCard:
        seen = Sent()
        token = watching.set(seen)
        try:
            return await A2ACardResolver(self._http, self.peer.url).get_agent_card()
        except AgentCardResolutionError as error:
            if seen.busy:
                said = f"A2A peer {self.name!r} answered {seen.status}."
                raise self._unreached(said, kind="rate_limit", retry_after=seen.retry_after) from error
            if seen.problem or not seen.status:
                said = f"A2A peer {self.name!r} could not be reached: {seen.problem or error.message}."
                raise self._unreached(said) from error
            why = f"it answered {seen.status}" if seen.status >= 300 else _line(error)
            raise self._unreached(
                f"A2A peer {self.name!r} has no usable Agent Card: {why}.", kind="protocol"
            ) from error
        except (A2AError, ValueError, TypeError, AttributeError, KeyError) as error:  # a card of another shape
            said = f"A2A peer {self.name!r} has no usable Agent Card: {_line(error)}."
            raise self._unreached(said, kind="protocol") from error
        finally:
            watching.reset(token)

    def _unreached(self, said: str, *, kind: Any = "transport", retry_after: float | None = None) -> Failed | InDoubt:
        """There is no way to the peer: a failure, unless a message is there already."""
        text = self._clean(said)
        if self.remote is None:
            return Failed(text, kind=kind, retry_after=retry_after)
        return InDoubt(f"{text} The remote task is {self.remote.get('task')!r}.", output={REMOTE: self.remote})

    def _interface(self, card: AgentCard) -> Any:
        """The interface that is used: JSON-RPC, version 1.0, of the very scheme, host and port of the peer."""
        for interface in card.supported_interfaces:
            if interface.protocol_binding == TransportProtocol.JSONRPC and _speaks(interface.protocol_version):
                if not _same_origin(interface.url, self.peer.url):
                    said = f"The Agent Card of {self.name!r} names an interface elsewhere: {interface.url[:200]!r}."
                    raise self._unreached(said, kind="protocol")
                return interface
        found = ", ".join(f"{i.protocol_binding} {i.protocol_version}" for i in card.supported_interfaces) or "none"
        said = f"A2A peer {self.name!r} has no JSONRPC interface of version {PROTOCOL_VERSION_1_0}; it has {found}."
        raise self._unreached(said, kind="protocol")

    # -- sending ------------------------------------------------------------------------------------------------------
    async def perform(self) -> Performed:
        """Send, or go on with what was sent; then wait for the end of the remote task."""
        if self.remote is None:
            first = await self._send()
            if isinstance(first, Message):
                return self._answered(first)
            where = {"task": first.id, "context": first.context_id, "peer": self.name}
            self.remote = where
            await self.call.note(REMOTE, where)
            if first.status.state in _ENDED:
                return await self._over(first)
        return await self._wait()

    async def _send(self) -> Task | Message:
        given = _given(self.call.input)
        message = Message(
            message_id=self.call.effect, role=Role.ROLE_USER, parts=[_part(given["message"])],
            context_id=given.get("contextId", ""), metadata={"dev.perdure/idempotencyKey": self.call.key},
        )  # fmt: skip
        token = watching.set(self.sent)
        try:
            async for response in self._client.send_message(SendMessageRequest(message=message)):
                if response.HasField("message"):
                    return response.message
                if response.HasField("task") and response.task.id:
                    return response.task
            said = f"A2A peer {self.name!r} took the message and named no task."
            raise InDoubt(said, kind="protocol")
        except (A2AError, ParseError, ValueError, TypeError, KeyError, httpx.HTTPError) as error:
            raise self._judged(error) from error
        finally:
            watching.reset(token)

    def _judged(self, error: Exception) -> Failed | InDoubt:
        """What an error of sending means."""
        sent, who = self.sent, f"A2A peer {self.name!r}"
        why = sent.problem or _line(error)
        if not sent.left:
            return Failed(self._clean(f"{who} was not sent the message: {why}."), kind="transport")
        if sent.refused:
            kind: Any = "rate_limit" if sent.busy else "protocol"
            said = self._clean(f"{who} answered the message with {sent.status}.")
            return Failed(said, kind=kind, retry_after=sent.retry_after)
        answered = isinstance(error, A2AError) and not isinstance(error, A2AClientError)
        if answered and not isinstance(error, InternalError) and 200 <= sent.status < 300:
            return Failed(self._clean(f"{who} refused the message: {why}."), kind="protocol")
        lost = sent.status == 0 or bool(sent.problem)
        said = self._clean(f"{who} was sent the message, and named no task: {why}. It is not sent again.")
        return InDoubt(said, kind="transport" if lost else "protocol")

    # -- waiting ------------------------------------------------------------------------------------------------------
    async def _wait(self) -> Performed:
        """Ask about the remote task until it has ended."""
        assert self.remote is not None
        id, why = str(self.remote["task"]), ""
        for poll in range(self.peer.max_polls):
            if poll:
                await asyncio.sleep(self.peer.poll_interval_ms / 1000)
            try:
                task = await self._client.get_task(GetTaskRequest(id=id))
            except TaskNotFoundError as error:
                said = f"A2A peer {self.name!r} knows no task {id!r}: {_line(error)}."
                raise InDoubt(self._clean(said), kind="protocol", output={REMOTE: self.remote}) from error
            except (A2AError, ParseError, ValueError, TypeError, KeyError, httpx.HTTPError) as error:
                why = f" The last question got no answer: {_line(error)}."
                continue
            why = ""
            if task.status.state in _ENDED:
                return await self._over(task)
            if task.status.state in _WAITS:
                return await self._stuck(task, _WAITS[task.status.state])
        said = f"The task {id!r} of A2A peer {self.name!r} has not ended after {self.peer.max_polls} questions.{why}"
        raise InDoubt(self._clean(said), kind="timeout", output={REMOTE: self.remote})

    async def cancelled(self) -> None:
        """Whoever wanted it wants it no more: so the peer is told, unless another process goes on with it."""
        if self.remote is not None and self._is_reached and not self.call.goes_on():
            await self._cancel(str(self.remote["task"]))

    async def _cancel(self, id: str) -> Task | None:
        """Ask the peer to stop. Bounded."""
        with contextlib.suppress(A2AError, ParseError, ValueError, httpx.HTTPError, TimeoutError):
            async with asyncio.timeout(PROTOCOL_FAREWELL_SECONDS):
                return await self._client.cancel_task(CancelTaskRequest(id=id))
        return None

    async def _stuck(self, task: Task, wants: str) -> Performed:
        """The remote waits for somebody, and there is nobody: it is asked to stop."""
        said = f"The task {task.id!r} of A2A peer {self.name!r} wants {wants}, and there is nobody to give it."
        stopped = await self._cancel(task.id)
        if stopped is not None and stopped.status.state in _ENDED:
            raise Failed(self._clean(f"{said} It was cancelled."), output={REMOTE: self.remote})
        raise InDoubt(self._clean(f"{said} It may go on."), kind="protocol", output={REMOTE: self.remote})

    def late(self, timeout: float) -> Failed | InDoubt:
        """What running out of time means."""
        said = f"A2A peer {self.name!r} was not done within {timeout:g} s."
        if self.remote is not None:
            text = f"{said} The remote task is {self.remote.get('task')!r}."
            return InDoubt(text, kind="timeout", output={REMOTE: self.remote})
        if self.sent.left:
            return InDoubt(f"{said} The message was sent, and no task was named.", kind="timeout")
        return Failed(f"{said} The message was not sent.", kind="timeout")

    # -- what came of it ----------------------------------------------------------------------------------------------
    def _answered(self, message: Message) -> Performed:
        """An agent that answers at once, without a task."""
        parts = [_told(part) for part in message.parts]
        return self._performed({"state": "completed", "task": "", "context": message.context_id}, parts, [], [])

    async def _over(self, task: Task) -> Performed:
        state = _ENDED[task.status.state]
        where = {"state": state, "task": task.id, "context": task.context_id}
        said = [_told(part) for part in task.status.message.parts]
        if state != "completed":
            words = _text(said) or "it says no more"
            text = f"The task {task.id!r} of A2A peer {self.name!r} is {state}: {words}"
            raise Failed(self._clean(text), output=self._secretless({**where, "text": words}))
        parts: list[dict[str, Any]] = []
        artifacts: list[dict[str, Any]] = []
        produced: list[Produced] = []
        for artifact in task.artifacts:
            mine = [_told(part) for part in artifact.parts]
            for place, part in enumerate(artifact.parts):
                await self._keep(artifact.name or artifact.artifact_id, place, part, mine[place], produced)
            artifacts.append({"id": artifact.artifact_id, "name": artifact.name, "parts": mine})
            parts += mine
            if len(parts) > A2A_PARTS_MAX:
                raise self._unusable(f"its artifacts have more than {A2A_PARTS_MAX:,} parts")
        return self._performed(where, parts or said, artifacts, produced)

    async def _keep(self, name: str, place: int, part: Part, told: dict[str, Any], produced: list[Produced]) -> None:
        """Keep the bytes of a part as a file; those it names are fetched, from the peer itself only."""
        kind = part.WhichOneof("content")
        if kind == "raw":
            data, media = bytes(part.raw), part.media_type
        elif kind == "url":
            data, media = await self._fetch(part.url)
            media = part.media_type or media
        else:
            return
        if len(data) > ARTIFACT_BYTES_MAX:
            raise self._unusable(f"artifact {name!r} has {len(data):,} bytes; the limit is {ARTIFACT_BYTES_MAX:,}")
        logical = _logical(part.filename or f"{name}-{place + 1}")
        media = media or mimetypes.guess_type(logical)[0] or "application/octet-stream"
        produced.append(Produced(logical, data=data, media_type=media))
        told |= {"bytes": len(data), "file": logical, "mediaType": media}

    async def _fetch(self, url: str) -> tuple[bytes, str]:
        if not _same_origin(url, self.peer.url):
            raise self._unusable(f"an artifact is elsewhere: {url[:200]!r}")
        try:
            response = await self._http.get(url)
        except httpx.HTTPError as error:
            raise self._unusable(f"the artifact {url[:200]!r} cannot be had: {_line(error)}") from error
        if response.status_code != 200:
            raise self._unusable(f"the artifact {url[:200]!r} cannot be had: it answered {response.status_code}")
        return response.content, response.headers.get("content-type", "").partition(";")[0].strip()

    def _performed(
        self,
        where: dict[str, Any],
        parts: list[dict[str, Any]],
        artifacts: list[dict[str, Any]],
        produced: list[Produced],
    ) -> Performed:
        text = _text(parts)
        data = [part["data"] for part in parts if "data" in part]
        value = data[0] if data else _value(text)
        for schema in (self.peer.output_schema, self.call.action.output_schema):
            if schema is not None and (wrong := problem(schema, value)):
                raise self._unusable(f"its output does not fit outputSchema: {wrong}")
        told = {"status": "succeeded", "changed": True, **where, "text": text, "output": value, "artifacts": artifacts}
        told = self._secretless(told)
        return Performed(told, tuple(produced))

    def _unusable(self, why: str) -> Failed:
        return Failed(
            self._clean(f"A2A peer {self.name!r} did it, and {why}."), kind="output", output={REMOTE: self.remote}
        )

    def _clean(self, text: str) -> str:
        return without(text, self._known)[:PROTOCOL_TEXT_CHARS_MAX]

    def _secretless(self, value: Any) -> Any:
        text = _encode(value).decode()
        return msgspec.json.decode(without(text, (json.dumps(known)[1:-1] for known in self._known)))


def _given(input: Mapping[str, Any]) -> dict[str, Any]:
    """The message and what goes with it.

    Raises:
        Invalid: there is none, or more than is known.
    """
    if other := sorted(input.keys() - {"message", "contextId"}):
        raise Invalid(f"a2a.delegate takes `message` and `contextId`, and no {other[0]!r}.")
    if input.get("message") in (None, ""):
        raise Invalid("a2a.delegate needs a `message`: text, or a value.")
    if not isinstance(input.get("contextId", ""), str):
        raise Invalid("The `contextId` of a2a.delegate is no text.")
    return dict(input)


def _part(message: Any) -> Part:
    if isinstance(message, str):
        return Part(text=message)
    return Part(data=ParseDict(message, Value()), media_type="application/json")


def _told(part: Part) -> dict[str, Any]:
    """A part as a value; of a file only where it is."""
    kind = part.WhichOneof("content")
    found: dict[str, Any] = {"mediaType": part.media_type} if part.media_type else {}
    if kind == "text":
        found["text"] = part.text
    elif kind == "data":
        found["data"] = _whole(MessageToDict(part.data))
    elif kind == "url":
        found["url"] = part.url
    return found


def _whole(value: Any) -> Any:
    """Numbers of a protobuf value are floats; those that are whole are integers again."""
    match value:
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case list():
            return [_whole(item) for item in value]
        case dict():
            return {name: _whole(item) for name, item in value.items()}
        case _:
            return value


def _text(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts if "text" in part)


def _value(text: str) -> Any:
    """A text as the JSON it is, or as itself."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text


def _logical(name: str) -> str:
    """The name of a file as it is kept: no path, nothing that does not print."""
    kept = "".join(c for c in name.replace("\\", "/").rpartition("/")[2] if c.isprintable())
    return kept.strip(". ")[:255] or "artifact"


def _same_origin(url: str, peer: str) -> bool:
    """Whether two addresses have the same scheme, host and port."""
    try:
        return _origin(url) == _origin(peer)
    except ValueError:
        return False


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError(url)
    return parts.scheme, (parts.hostname or "").rstrip("."), parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _speaks(version: str) -> bool:
    """Whether a version of the protocol is the one that is spoken here."""
    try:
        return major_minor(version) == major_minor(PROTOCOL_VERSION_1_0)
    except ValueError:
        return False


def _line(error: BaseException) -> str:
    """The beginning of what an error says."""
    return (str(error).strip() or type(error).__name__).split("\n", 1)[0].rstrip(".")[:500]
