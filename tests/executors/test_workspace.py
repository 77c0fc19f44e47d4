"""Files of a workspace: never outside of it, whatever links say or become meanwhile; written all or nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from perdure.definitions.workflow import Action, Policy
from perdure.errors import Denied
from perdure.executors import workspace
from perdure.executors.workspace import Files, read_file, write_file
from perdure.ports.executor import Call, Failed, Workspace

pytestmark = pytest.mark.anyio


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "out").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "in.txt").write_text("inside")
    return folder


async def note(name: str, value: Any) -> None:
    raise AssertionError("a file notes nothing")


def call(root: Path, kind: str, **given: Any) -> Call:
    return Call(
        run="r", task="t", attempt=1, effect="e", key="k", action=Action(kind=kind), input=given,  # type: ignore[arg-type]
        workspace=Workspace(root, (root / "out",)), policy=Policy(), timeout=5.0, note=note,
    )  # fmt: skip


@pytest.mark.parametrize(
    "path", ["../secret.txt", "out/../../secret.txt", "/etc/passwd", "link", "linked/secret.txt", "absolute", "chain"]
)
async def test_a_path_out_of_the_workspace_is_refused(root: Path, path: str) -> None:
    (root / "link").symlink_to("../secret.txt")
    (root / "linked").symlink_to("..")
    (root / "absolute").symlink_to(root.parent / "secret.txt")
    (root / "chain").symlink_to("link")
    with pytest.raises(Denied):
        read_file(root, path)
    with pytest.raises(Denied):
        write_file(root, path, b"x", (root,))
    assert (root.parent / "secret.txt").read_text() == "secret"


async def test_a_link_that_stays_inside_is_followed(root: Path) -> None:
    (root / "a").mkdir()
    (root / "a" / "up").symlink_to("../in.txt")
    (root / "whole").symlink_to(root / "in.txt")
    assert read_file(root, "a/up") == b"inside"
    assert read_file(root, "whole") == b"inside"
    assert write_file(root, "a/up", b"new", (root,)) == "in.txt"
    assert (root / "in.txt").read_text() == "new"


def swapped(root: Path, rounds: int, *, protected: bool) -> bool:
    """Whether a reader ever gets what is outside while a folder is swapped for a link again and again."""
    inner, away, link = root / "d", root / "away", root / "l"
    inner.mkdir()
    (inner / "secret.txt").write_text("inside")
    link.symlink_to("..")
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(inner, away)
            os.rename(link, inner)
            os.rename(inner, link)
            os.rename(away, inner)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(rounds):
            try:
                found = read_file(root, "d/secret.txt") if protected else (root / "d" / "secret.txt").read_bytes()
            except (OSError, Denied):
                continue
            if found == b"secret":
                return True
    finally:
        stop.set()
        thread.join()
    return False


def test_a_link_swapped_in_meanwhile_leads_nowhere(root: Path) -> None:
    assert not swapped(root, 3_000, protected=True)


def test_without_the_walk_the_swap_is_seen(root: Path) -> None:
    """The twin: a plain read does leave the workspace."""
    assert swapped(root, 200_000, protected=False)


async def test_a_write_is_all_or_nothing_and_told(root: Path) -> None:
    files = Files()
    wanted = call(root, "builtin.write", path="out/deep/x.txt", content="one\n")
    facts = files.describe(wanted.action, wanted.input)
    assert "content" not in facts.request
    assert await files.prepare(wanted) is None
    done = await files.execute(wanted)
    assert (root / "out/deep/x.txt").read_text() == "one\n"
    assert (done.result["changed"], done.result["before"], done.result["after"]) == (True, None, "one\n")
    assert "+one" in done.result["diff"]
    assert [one.name for one in done.produced] == ["out/deep/x.txt"]
    same = await files.prepare(wanted)
    assert same is not None
    assert same.result["changed"] is False
    assert [path.name for path in (root / "out/deep").iterdir()] == ["x.txt"], "no temporary file is left"


async def test_a_failed_write_leaves_what_was_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "out/x.txt").write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(workspace.os, "fsync", full)
    with pytest.raises(Failed, match="No space left"):
        await Files().execute(call(root, "builtin.write", path="out/x.txt", content="new"))
    assert (root / "out/x.txt").read_text() == "old"
    assert [path.name for path in (root / "out").iterdir()] == ["x.txt"]


@pytest.mark.parametrize("path", ["in.txt", "other/x.txt", "out/../in.txt"])
async def test_a_write_outside_of_every_writable_root_is_denied(root: Path, path: str) -> None:
    with pytest.raises(Denied, match="writable root"):
        await Files().prepare(call(root, "builtin.write", path=path, content="x"))


async def test_what_cannot_be_read_fails(root: Path) -> None:
    (root / "big").write_bytes(b"a" * (workspace.READ_BYTES_MAX + 1))
    (root / "bytes").write_bytes(b"\xff")
    os.mkfifo(root / "pipe")
    for path in ("gone", "out", "big", "bytes", "pipe"):
        with pytest.raises(Failed):
            await Files().execute(call(root, "builtin.read", path=path))


async def test_artifacts_by_glob_are_regular_files_inside(root: Path) -> None:
    (root / "out/a.log").write_text("a")
    (root / "out/b.log").symlink_to("../../secret.txt")
    (root / "out/c.txt").write_text("c")
    assert [one.name for one in workspace.found_files(root, ("out/*.log", "out/*.txt"))] == ["out/a.log", "out/c.txt"]
    with pytest.raises(Denied):
        workspace.found_files(root, ("../*.txt",))
