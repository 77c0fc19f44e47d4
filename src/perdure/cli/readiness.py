"""What a plan needs of this machine, and whether it is here. Sends nothing, starts nothing, reads no secret.

That a credential is there does not say that it is accepted; that an address is allowed does not say that it answers.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from perdure.definitions.workflow import PROCESS_KINDS, Action, Policy, SecretRef
from perdure.errors import Error
from perdure.executors import container, network
from perdure.executors.process import folder, program
from perdure.limits import SECRET_FILE_BYTES_MAX
from perdure.workflow.plan import Plan

KEYS = {
    "openai": "OPENAI_API_KEY",
    "azure_openai": "AZURE_OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "google": "GEMINI_API_KEY",
}
_LIBRARIES = {"openai": "openai", "azure_openai": "openai", "anthropic": "anthropic", "google": "google.genai"}


class Need(msgspec.Struct, frozen=True):
    """One thing that a run needs: what it is, whether it is here, and where it was found or what is wrong."""

    need: str
    ready: bool
    detail: str


def needs(plan: Plan, base: Path) -> list[Need]:
    """Everything that the tasks of a plan need of this machine, each once, in a stable order.

    Args:
        base: the folder that the workspace is relative to.
    """
    root = (base / plan.policy.workspace_root).resolve()
    found = [Need("workspace", root.is_dir(), str(root))]
    found += _providers(plan, root)
    used = {task.target for task in plan.tasks.values() if task.kind == "action"}
    for name in sorted(used):
        found += _action(name, plan.actions[name], plan, root)
    for name in sorted({plan.actions[one].server or "" for one in used if plan.actions[one].kind == "mcp.call"} - {""}):
        found += _server(name, plan, root)
    for name in sorted(
        {plan.actions[one].peer or "" for one in used if plan.actions[one].kind == "a2a.delegate"} - {""}
    ):
        peer = plan.a2a_peers[name]
        found.append(_library("a2a", "a2a", f"A2A peer {name}"))
        found.append(_address(f"A2A peer {name}", peer.url, plan.policy))
        found += _secrets(f"A2A peer {name}", peer.headers, plan.policy, root)
    found += _writable(plan, root)
    if plan.policy.network.custom_ca is not None:
        found.append(_secret("custom CA", plan.policy.network.custom_ca, plan.policy, root))
    return list(dict.fromkeys(found))


def _judged(need: str, look: Callable[[], str]) -> Need:
    try:
        return Need(need, True, look())
    except Error as error:
        return Need(need, False, f"{error.message} {error.help}".strip())
    except (OSError, subprocess.SubprocessError) as error:
        return Need(need, False, str(error))


def _address(what: str, url: str, policy: Policy) -> Need:
    return _judged(f"address of {what}", lambda: f"{network.judge(url, policy).host} is allowed")


def _library(module: str, extra: str, what: str) -> Need:
    try:
        here = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        here = False
    told = f"the library {module}" if here else f"pip install 'perdure[{extra}]'"
    return Need(f"extra {extra} for {what}", here, told)


def _providers(plan: Plan, root: Path) -> Iterator[Need]:
    for needed in plan.requirements.providers:
        provider = plan.providers[needed.name]
        if provider.kind == "fake":
            continue
        yield _library(_LIBRARIES[provider.kind], "models", f"provider {needed.name}")
        ref = provider.credential or SecretRef(env=KEYS[provider.kind])
        yield _secret(f"credential of provider {needed.name}", ref, plan.policy, root)
        yield from _secrets(f"provider {needed.name}", provider.headers, plan.policy, root)


def _action(name: str, action: Action, plan: Plan, root: Path) -> Iterator[Need]:
    policy = plan.policy
    if action.kind in PROCESS_KINDS:
        yield from _process(action, policy, root)
    if action.kind == "builtin.python":
        yield _function(action.call or "")
    if action.kind == "builtin.http" and action.url and "${{" not in action.url:
        yield _address(f"action {name}", action.url, policy)
    if action.kind == "mcp.call":
        yield _library("mcp", "mcp", f"MCP server {action.server}")
    yield from _secrets(f"action {name}", {**action.env, **action.headers}, policy, root)


def _process(action: Action, policy: Policy, root: Path) -> Iterator[Need]:
    if action.isolation == "container" and action.container is not None:
        settings = action.container

        def image() -> str:
            container.require(action)
            return "present"

        yield _judged("container engine", lambda: container.engine(settings))
        yield _judged(f"image {settings.image}", image)
    elif action.command:
        command = action.command
        yield _judged(f"program {command}", lambda: program(command, policy, root))
    if action.cwd and "${{" not in action.cwd:
        yield _judged(f"folder {action.cwd}", lambda: str(folder(action.cwd, root)))


def _function(call: str) -> Need:
    """Whether the package of a function can be found; it is not imported, because that would run it."""
    package = call.partition(":")[0].partition(".")[0]
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    detail = "not found; is its folder in PYTHONPATH?" if spec is None else str(spec.origin or package)
    return Need(f"function {call}", spec is not None, detail)


def _server(name: str, plan: Plan, root: Path) -> Iterator[Need]:
    server, policy = plan.mcp_servers[name], plan.policy
    what = f"MCP server {name}"
    if server.url is not None:
        yield _address(what, server.url, policy)
    if server.command is not None:
        command = server.command
        yield _judged(f"program {command}", lambda: program(command, policy, root))
        yield _judged(f"folder of {what}", lambda: str(folder(server.cwd, root)))
    yield from _secrets(what, {**server.env, **server.headers}, policy, root)


def _writable(plan: Plan, root: Path) -> Iterator[Need]:
    writes = any(
        task.kind == "action" and plan.actions[task.target].kind == "builtin.write" for task in plan.tasks.values()
    )
    writes = writes or any(plan.tools[name].kind == "builtin.workspace.write" for name in plan.requirements.tools)
    for name in plan.policy.writable_roots if writes else ():
        path = (root / name).resolve()
        around = next(folder for folder in (path, *path.parents) if folder.exists())
        yield Need(f"writable folder {name}", around.is_dir() and os.access(around, os.W_OK), str(path))


def _secrets(what: str, given: Mapping[str, Any], policy: Policy, root: Path) -> Iterator[Need]:
    for name, item in given.items():
        if isinstance(item, SecretRef):
            yield _secret(f"secret {name} of {what}", item, policy, root)


def _secret(need: str, ref: SecretRef, policy: Policy, root: Path) -> Need:
    if ref.env is not None:
        here = bool(os.environ.get(ref.env))
        return Need(need, here, f"environment variable {ref.env}" + ("" if here else " is not set"))
    if ref.file is not None:
        return _secret_file(need, Path(root, ref.file).resolve(), policy, root)
    assert ref.process is not None
    found = shutil.which(ref.process.command)
    return Need(need, found is not None, found or f"there is no program {ref.process.command!r} here")


def _secret_file(need: str, path: Path, policy: Policy, root: Path) -> Need:
    if not any(path.is_relative_to(Path(root, one).resolve()) for one in policy.secret_file_roots):
        return Need(need, False, f"{path} is under no folder of secretFileRoots")
    if not path.is_file():
        return Need(need, False, f"{path} is no file")
    size = path.stat().st_size
    if not 0 < size <= SECRET_FILE_BYTES_MAX:
        return Need(need, False, f"{path} has {size:,} bytes; a secret has 1 to {SECRET_FILE_BYTES_MAX:,}")
    return Need(need, os.access(path, os.R_OK), f"file {path}")
