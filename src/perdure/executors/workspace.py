"""Files of a workspace: reading and writing without ever leaving it, whatever its links say or become meanwhile.

A path is walked component by component from the open folder of the workspace, without following links; a link is resolved
by hand and must stay inside. So a link that is swapped in between a check and its use leads nowhere: there is no path
left to look up. Linux and macOS.
"""

from __future__ import annotations

import asyncio
import difflib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from perdure.definitions.workflow import Action
from perdure.errors import Denied, Invalid
from perdure.limits import DIFF_CHARS_MAX, LINKS_MAX, READ_BYTES_MAX
from perdure.ports.executor import Call, Facts, Failed, Performed, Produced, Workspace

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def inside(root: Path, path: str) -> tuple[str, ...]:
    """The components of a relative path that stays under a folder, ``.`` and inner ``..`` resolved by words.

    Raises:
        Denied: it is absolute and elsewhere, or leads out of it.
    """
    if "\0" in path:
        raise Denied(f"The path {path[:200]!r} holds a NUL.")
    pure = PurePosixPath(path)
    if pure.is_absolute():
        try:
            pure = pure.relative_to(PurePosixPath(root))
        except ValueError:
            raise Denied(f"The path {path[:200]!r} is outside of the workspace {str(root)!r}.") from None
    found: list[str] = []
    for part in pure.parts:
        if part == "..":
            if not found:
                raise Denied(f"The path {path[:200]!r} leads out of the workspace.")
            found.pop()
        else:
            found.append(part)
    return tuple(found)


@contextmanager
def opened_parent(root: Path, path: str, *, make: bool = False) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """The open folder a path's last component is in, its name there, and the whole path with links resolved.

    Args:
        make: create folders that are missing.

    Raises:
        Denied: it leads out of the workspace, by its words or by a link. FileNotFoundError: a folder is missing.
    """
    left = list(inside(root, path))
    if not left:
        raise Denied(f"The path {path[:200]!r} is the workspace itself.")
    stack = [os.open(root, _FOLDER)]
    names: list[str] = []
    links = 0
    try:
        while True:
            name = left.pop(0)
            if name == "..":
                if len(stack) == 1:
                    raise Denied(f"The path {path[:200]!r} leads out of the workspace through a link.")
                os.close(stack.pop())
                names.pop()
                if not left:
                    raise Denied(f"The path {path[:200]!r} names a folder.")
                continue
            target = _link(stack[-1], name)
            if target is not None:
                links += 1
                if links > LINKS_MAX:
                    raise Denied(f"The path {path[:200]!r} follows more than {LINKS_MAX} links.")
                left = _through(root, names, target, path) + left
                while len(stack) > 1 and target.startswith("/"):
                    os.close(stack.pop())
                if target.startswith("/"):
                    names.clear()
                if not left:
                    raise Denied(f"The path {path[:200]!r} is a link to a folder.")
                continue
            if not left:
                yield stack[-1], name, (*names, name)
                return
            stack.append(_enter(stack[-1], name, make=make))
            names.append(name)
    finally:
        for handle in stack:
            os.close(handle)


def _link(folder: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def _through(root: Path, names: Sequence[str], target: str, path: str) -> list[str]:
    """What a link leads to, as components from where it stands, or from the root if it is absolute and inside."""
    if target.startswith("/"):
        try:
            return list(PurePosixPath(target).relative_to(PurePosixPath(root)).parts)
        except ValueError:
            raise Denied(f"The path {path[:200]!r} leads out of the workspace through a link to {target!r}.") from None
    return [part for part in target.split("/") if part not in ("", ".")]


def _enter(folder: int, name: str, *, make: bool) -> int:
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o777, dir_fd=folder)
    return os.open(name, _FOLDER, dir_fd=folder)


def read_file(root: Path, path: str, limit: int = READ_BYTES_MAX) -> bytes:
    """The bytes of a regular file in a workspace.

    Raises:
        Denied: it is outside. FileNotFoundError, IsADirectoryError. Invalid: it is no regular file, or too large.
    """
    with opened_parent(root, path) as (folder, name, _):
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        with os.fdopen(handle, "rb") as file:
            info = os.fstat(file.fileno())
            if stat.S_ISDIR(info.st_mode):
                raise IsADirectoryError(path)
            if not stat.S_ISREG(info.st_mode):
                raise Invalid(f"{path!r} is no regular file.")
            found = file.read(limit + 1)
    if len(found) > limit:
        raise Invalid(f"{path!r} has more than {limit:,} bytes.")
    return found


def write_file(root: Path, path: str, content: bytes, writable: Sequence[Path]) -> str:
    """Write a file in a workspace, all or nothing: a new file beside it, synchronised, then renamed over it.

    Returns:
        the path it was written to, relative to the workspace, links resolved.

    Raises:
        Denied: it is outside of the workspace or of every writable root.
    """
    check_writable(root, path, writable)
    with opened_parent(root, path, make=True) as (folder, name, names):
        _require_writable(root, names, path, writable)
        temporary = f".{name}.{secrets.token_hex(8)}.tmp"
        handle = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=folder
        )
        try:
            with os.fdopen(handle, "wb") as file:
                with suppress(OSError):
                    os.fchmod(file.fileno(), stat.S_IMODE(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.fsync(folder)
        return "/".join(names)


def check_writable(root: Path, path: str, writable: Sequence[Path]) -> None:
    """Refuse by words alone a path that no writable root holds, before anything is made.

    Raises:
        Denied: none does.
    """
    _require_writable(root, inside(root, path), path, writable)


def _require_writable(root: Path, names: Sequence[str], path: str, writable: Sequence[Path]) -> None:
    whole = root.joinpath(*names)
    if not any(whole.is_relative_to(folder) for folder in writable):
        roots = ", ".join(str(folder) for folder in writable) or "none"
        raise Denied(
            f"{path[:200]!r} is under no writable root ({roots}).", help="Add its folder to policy.writableRoots."
        )


def found_files(root: Path, patterns: Sequence[str]) -> tuple[Produced, ...]:
    """Regular files of a workspace that match globs, by path; links are left out."""
    names: set[str] = set()
    for pattern in patterns:
        inside(root, pattern)
        for path in root.glob(pattern):
            info = path.lstat()
            if stat.S_ISREG(info.st_mode) and path.resolve().is_relative_to(root):
                names.add(path.relative_to(root).as_posix())
    return tuple(Produced(name, root / name) for name in sorted(names))


def text_of(input: Mapping[str, Any], name: str, kind: str) -> str:
    """A text that an action needs.

    Raises:
        Invalid: it is missing, or no text.
    """
    value = input.get(name)
    if not isinstance(value, str):
        raise Invalid(f"{kind} needs `{name}` as text; it is {type(value).__name__}.")
    return value


def _old_text(root: Path, path: str) -> str | None:
    try:
        return read_file(root, path).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        return None


def diff_of(before: str | None, after: str, path: str) -> str:
    """A unified diff, bounded in size."""
    lines = difflib.unified_diff(
        (before or "").splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    text = "".join(line if line.endswith("\n") else line + "\n" for line in lines)
    return text if len(text) <= DIFF_CHARS_MAX else text[:DIFF_CHARS_MAX] + "\n[diff cut]\n"


class Files:
    """``builtin.read`` and ``builtin.write``."""

    kinds = frozenset({"builtin.read", "builtin.write"})

    def describe(self, action: Action, input: Mapping[str, Any]) -> Facts:
        """See ``ports.executor.Executor.describe``."""
        path = text_of(input, "path", action.kind)
        if action.kind == "builtin.read":
            return Facts("builtin.read", "observe", "observe", "low", "filesystem.read", {"path": path})
        content = text_of(input, "content", action.kind).encode("utf-8", "surrogatepass")
        request = {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        return Facts("builtin.write", "workspace_mutate", "idempotent", "medium", "filesystem.write", request)

    async def prepare(self, call: Call) -> Performed | None:
        """See ``ports.executor.Executor.prepare``: a file that already has this content needs nothing."""
        path = text_of(call.input, "path", call.action.kind)
        root = call.workspace.root
        if call.action.kind == "builtin.read":
            inside(root, path)
            return None
        content = text_of(call.input, "content", call.action.kind)
        check_writable(root, path, call.workspace.writable)
        before = await asyncio.to_thread(_quiet_old_text, root, path)
        if before == content:
            return Performed(_written(path, content, content, changed=False, diff=call.diff), ())
        return None

    async def execute(self, call: Call) -> Performed:
        """See ``ports.executor.Executor.execute``."""
        path = text_of(call.input, "path", call.action.kind)
        try:
            if call.action.kind == "builtin.read":
                raw = await asyncio.to_thread(read_file, call.workspace.root, path)
                return Performed({"status": "succeeded", "changed": False, "content": raw.decode()})
            return await asyncio.to_thread(_write, call.workspace, path, str(call.input["content"]), call.diff)
        except (OSError, Invalid, UnicodeDecodeError) as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise Failed(f"{call.action.kind} of {path!r}: {said}") from error

    async def predict(self, call: Call) -> Any:
        """See ``ports.executor.Executor.predict``: a file is read, a write is shown and not made."""
        if call.action.kind == "builtin.read":
            return (await self.execute(call)).result
        await self.prepare(call)
        path, content = text_of(call.input, "path", call.action.kind), str(call.input["content"])
        before = await asyncio.to_thread(_quiet_old_text, call.workspace.root, path)
        told = _written(path, before, content, changed=before != content, diff=call.diff)
        return {**told, "status": "predicted"}


def _quiet_old_text(root: Path, path: str) -> str | None:
    try:
        return _old_text(root, path)
    except (OSError, Invalid):
        return None  # what is wrong with it is told by the write


def _write(workspace: Workspace, path: str, content: str, diff: bool) -> Performed:
    before = _quiet_old_text(workspace.root, path)
    name = write_file(workspace.root, path, content.encode(), workspace.writable)
    told = _written(path, before, content, changed=before != content, diff=diff)
    return Performed(told, (Produced(name, workspace.root / name),))


def _written(path: str, before: str | None, after: str, *, changed: bool, diff: bool) -> dict[str, Any]:
    """What a write tells: what was and is there, of large texts only their digests: the artifact store keeps them."""
    told: dict[str, Any] = {
        "status": "succeeded",
        "changed": changed,
        "path": path,
        "before": None if before is None else _kept(before),
        "after": _kept(after),
        "predictability": "partially",
    }
    return {**told, "diff": diff_of(before, after, path)} if diff else told


def _kept(text: str) -> Any:
    if len(text) <= DIFF_CHARS_MAX:
        return text
    raw = text.encode("utf-8", "surrogatepass")
    return {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
