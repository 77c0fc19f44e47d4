"""Processes: started directly, never through a shell, in a group of their own, with an environment of their own.

Both outputs are drained side by side within limits. Over a limit, past its time or cancelled, the whole group is ended:
asked first, then killed. This is no sandbox: a process sees what its user sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from perdure.definitions.workflow import Action, Policy
from perdure.errors import Denied, Invalid
from perdure.executors import container
from perdure.executors.secret_values import shown, texts, without
from perdure.executors.workspace import found_files, inside
from perdure.limits import PROCESS_GRACE_SECONDS
from perdure.ports.executor import Call, Facts, Failed, InDoubt, Performed

_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ")
_CLASSES = {"pure": "pure", "idempotent": "idempotent", "keyed": "keyed"}


class Limits(msgspec.Struct, frozen=True):
    """Bytes that are read of a process at most."""

    stdout: int
    stderr: int
    combined: int


class Ended(msgspec.Struct, frozen=True):
    """How a process ended. ``over``: which limit it broke; then the group was ended."""

    code: int
    stdout: bytes
    stderr: bytes
    over: str = ""


class _Drain:
    """What both outputs have given so far."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.parts: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self.over = ""

    async def read(self, name: str, stream: asyncio.StreamReader, full: asyncio.Event) -> None:
        """Read one output to its end; what is over a limit is dropped, and ``full`` is set."""
        mine, limit = self.parts[name], getattr(self.limits, name)
        while piece := await stream.read(65_536):
            room = min(limit - len(mine), self.limits.combined - sum(map(len, self.parts.values())))
            mine += piece[: max(0, room)]
            if len(piece) > room and not self.over:
                self.over = f"{name} has more than {limit:,} bytes" if limit - len(mine) <= 0 else (
                    f"the output has more than {self.limits.combined:,} bytes"
                )  # fmt: skip
                full.set()


class Watched(asyncio.subprocess.SubprocessStreamProtocol):
    """Tells when the process itself has ended, whoever else keeps its outputs open."""

    def __init__(self, limit: int = 65_536) -> None:
        super().__init__(limit=limit, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        """The process ended."""
        super().process_exited()
        self.exited.set()


async def run(
    argv: list[str], *, cwd: Path, env: Mapping[str, str], stdin: bytes, timeout: float, limits: Limits
) -> Ended:
    """Run one process to its end.

    Raises:
        OSError: it surely did not start. Late: it did not end in time; the group was ended.
    """
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        Watched, *argv, cwd=cwd, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    process = asyncio.subprocess.Process(transport, protocol, loop)
    drain, full = _Drain(limits), asyncio.Event()
    assert process.stdout is not None
    assert process.stderr is not None
    reading = [
        asyncio.ensure_future(drain.read("stdout", process.stdout, full)),
        asyncio.ensure_future(drain.read("stderr", process.stderr, full)),
    ]
    writing = asyncio.ensure_future(_feed(process, stdin))
    ending = asyncio.ensure_future(_end(protocol, reading))
    filling = asyncio.ensure_future(full.wait())
    try:
        done, _ = await asyncio.wait([ending, filling], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise Late(_so_far(process, drain))
        if drain.over:
            return _so_far(process, drain)
        return Ended(process.returncode or 0, bytes(drain.parts["stdout"]), bytes(drain.parts["stderr"]))
    finally:
        for task in (filling, writing):
            task.cancel()
        await _stop(process, protocol, ending, reading)


class Late(TimeoutError):
    """A process did not end in time. ``ended`` holds what it had printed."""

    def __init__(self, ended: Ended) -> None:
        super().__init__("it did not end in time")
        self.ended = ended


def _so_far(process: asyncio.subprocess.Process, drain: _Drain) -> Ended:
    code = process.returncode if process.returncode is not None else -1
    return Ended(code, bytes(drain.parts["stdout"]), bytes(drain.parts["stderr"]), drain.over)


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


async def _end(protocol: Watched, reading: Sequence[asyncio.Future[None]]) -> None:
    """The process ended and so did its outputs; a grandchild that keeps them open is not waited for long."""
    await protocol.exited.wait()
    await asyncio.wait(reading, timeout=PROCESS_GRACE_SECONDS)


async def _stop(
    process: asyncio.subprocess.Process,
    protocol: Watched,
    ending: asyncio.Future[None],
    reading: Sequence[asyncio.Future[None]],
) -> None:
    """End whatever is left of the group, and leave nothing behind. Also when this is itself cancelled."""
    if process.returncode is None:
        signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([ending], timeout=PROCESS_GRACE_SECONDS)
    signal_group(process.pid, signal.SIGKILL)
    if process.returncode is None:
        with contextlib.suppress(asyncio.CancelledError):
            await protocol.exited.wait()
    for task in (ending, *reading):
        task.cancel()
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()


def signal_group(group: int, number: signal.Signals) -> None:
    """Tell every process of a group; none may be left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def allowed(command: str, policy: Policy) -> None:
    """Hold a command to the policy.

    Raises:
        Denied: it does not name it.
    """
    name = os.path.basename(command)  # noqa: PTH119 - a word, perhaps no path
    if name not in policy.process_allowlist:
        raise Denied(f"processAllowlist does not name {name!r}.", help="Add it to policy.processAllowlist.")


def program(command: str, policy: Policy, root: Path) -> str:
    """The path of an allowed program.

    Raises:
        Denied: the policy does not name it. Invalid: it is not there.
    """
    allowed(command, policy)
    found: str | None
    if command.startswith("/"):
        found = command
    elif "/" in command:
        found = str(root.joinpath(*inside(root, command)))
    else:
        found = shutil.which(command)
    if found is None or not os.access(found, os.X_OK):
        raise Invalid(f"There is no program {command!r} here.", help="Install it, or name it by its path.")
    return found


def folder(cwd: str | None, root: Path) -> Path:
    """The folder of the workspace a process starts in.

    Raises:
        Denied: it is outside. Invalid: it is not there.
    """
    found = root.joinpath(*inside(root, cwd or ".")).resolve()
    if not found.is_relative_to(root):
        raise Denied(f"The folder {cwd!r} is outside of the workspace.")
    if not found.is_dir():
        raise Invalid(f"The folder {cwd!r} does not exist.")
    return found


def environment(policy: Policy) -> dict[str, str]:
    """What a process may see of this one's environment."""
    return {name: os.environ[name] for name in (*_KEPT, *policy.environment_allowlist) if name in os.environ}


class Processes:
    """``builtin.shell.exec`` and ``extension.process``."""

    kinds = frozenset({"builtin.shell.exec", "extension.process"})

    def describe(self, action: Action, input: Mapping[str, Any]) -> Facts:
        """See ``ports.executor.Executor.describe``."""
        request = {
            "command": action.command, "args": list(action.args), "cwd": action.cwd, "env": shown(action.env),
            "input": dict(input), "isolation": action.isolation,
        }  # fmt: skip
        if action.stdin is not None:
            request["stdin"] = action.stdin
        declared: Any = _CLASSES.get(action.idempotency or "", "once")
        return Facts(action.kind, "process_execution", declared, action.risk or "high", "process.exec", request)

    async def prepare(self, call: Call) -> Performed | None:
        """See ``ports.executor.Executor.prepare``."""
        self._program(call)
        self._cwd(call)
        texts(call.action.env, call.policy, call.workspace.root)
        if call.action.isolation == "container":
            await asyncio.to_thread(container.require, call.action)
        return None

    @staticmethod
    def _program(call: Call) -> str:
        """The program that is started; a container's is looked for inside of it."""
        command = call.action.command
        if not command:
            raise Invalid(f"{call.action.kind} has no command.")
        if call.action.isolation == "container":
            allowed(command, call.policy)
            return command
        return program(command, call.policy, call.workspace.root)

    @staticmethod
    def _cwd(call: Call) -> Path:
        return folder(call.action.cwd, call.workspace.root)

    async def execute(self, call: Call) -> Performed:
        """See ``ports.executor.Executor.execute``."""
        action = call.action
        values, known = texts(action.env, call.policy, call.workspace.root)
        argv, cwd = [self._program(call), *action.args], self._cwd(call)
        env = environment(call.policy) | values
        if action.isolation == "container":
            argv = container.argv(action, [action.command or "", *action.args], cwd, values)
        if action.kind == "extension.process":
            return await self._extension(call, argv, cwd, env, known)
        stdin = (action.stdin or "").encode()
        ended = await self._run(call, argv, cwd, env, stdin, known)
        told = {
            "status": "succeeded", "changed": True, "exitCode": ended.code,
            "stdout": _text(ended.stdout, known), "stderr": _text(ended.stderr, known),
        }  # fmt: skip
        return Performed(told, found_files(call.workspace.root, action.artifacts))

    async def _run(
        self, call: Call, argv: list[str], cwd: Path, env: dict[str, str], stdin: bytes, known: list[str]
    ) -> Ended:
        action = call.action
        limits = Limits(action.stdout_limit_bytes, action.stderr_limit_bytes, action.combined_output_limit_bytes)
        try:
            ended = await run(argv, cwd=cwd, env=env, stdin=stdin, timeout=call.timeout, limits=limits)
        except Late as late:
            said = f"{argv[0]} did not end within {call.timeout:g} s; its process group was ended."
            raise InDoubt(said, kind="timeout", output=_kept(late.ended, known)) from late
        except OSError as error:
            raise Failed(f"{argv[0]} could not be started: {error.strerror}.") from error
        if ended.over:
            raise Failed(f"{argv[0]}: {ended.over}; it was ended.", output=_kept(ended, known))
        if ended.code:
            how = f"ended by signal {-ended.code}" if ended.code < 0 else f"exited with {ended.code}"
            raise Failed(f"{argv[0]} {how}.", kind="exit", output=_kept(ended, known))
        return ended

    async def _extension(
        self, call: Call, argv: list[str], cwd: Path, env: dict[str, str], known: list[str]
    ) -> Performed:
        """Ask the program what it is, then invoke it: a JSON value in, a JSON value out."""
        action, prefix = (
            call.action,
            "agentctl" if (call.action.protocol_version or "").startswith("agentctl") else "perdure",
        )
        version = action.protocol_version or "perdure.dev/process-extension/v1"
        asked = await self._run(call, [*argv, f"--{prefix}-handshake"], cwd, env, b"", known)
        wanted = {
            "protocolVersion": version, "inputSchema": action.input_schema, "outputSchema": action.output_schema,
            "capabilities": list(action.capabilities),
        }  # fmt: skip
        said = _json(asked.stdout, "its handshake")
        if any(said.get(name) != value for name, value in wanted.items()):
            raise Failed(f"{argv[0]} does not declare what the document declares of it.", kind="protocol")
        request = {"protocolVersion": version, "effectId": call.effect, "input": dict(call.input)}
        try:
            ended = await self._run(call, [*argv, f"--{prefix}-invoke"], cwd, env, msgspec.json.encode(request), known)
            answer = _json(ended.stdout, "its answer")
            if (
                answer.get("protocolVersion") != version
                or answer.get("effectId") != call.effect
                or "output" not in answer
            ):
                raise Failed("its answer is about something else", kind="protocol")
        except Failed as failed:  # it was invoked: whatever follows says nothing about what it did
            raise InDoubt(
                f"{argv[0]} was invoked, and then: {failed.error}", kind="transport", output=failed.output
            ) from failed
        return Performed(answer["output"], found_files(call.workspace.root, action.artifacts))

    async def predict(self, call: Call) -> Any:
        """See ``ports.executor.Executor.predict``: nothing is started."""
        await self.prepare(call)
        return {"status": "requires_execution", "changed": False}


def _json(raw: bytes, what: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise Failed(f"{what} is no JSON: {error}", kind="protocol") from error
    if not isinstance(found, dict):
        raise Failed(f"{what} is no object", kind="protocol")
    return found


def _text(raw: bytes, known: list[str]) -> str:
    return without(raw.decode("utf-8", "replace"), known)


def _kept(ended: Ended, known: list[str]) -> dict[str, Any]:
    return {"exitCode": ended.code, "stdout": _text(ended.stdout, known), "stderr": _text(ended.stderr, known)}
