"""Rules about the source itself that no linter knows. A rule here is one sentence of CONTRIBUTING.md."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "perdure"
LINES_WANTED = 600
LINES_MAX = 900
LATE = ("griffe", "pydantic", "pydantic_ai", "rich")  # what `perdure --help` must not pay for

# Written in two halves, so that this file keeps its own rules.
UNFINISHED = re.compile(rb"\b(TO" rb"DO|FIX" rb"ME)\b")
REGISTRIES = re.compile(
    rb"(py" rb"pi\.org|python" rb"hosted\.org|registry\.npm" rb"js\.org|registry\.yarn" rb"pkg\.com"
    rb"|deb\.deb" rb"ian\.org|crates" rb"\.io|--(extra-)?index" rb"-url|--find" rb"-links)"
)  # fmt: skip


def tracked() -> list[Path]:
    """Every file that belongs to the project: what git tracks, or everything in an unpacked source archive."""
    if (ROOT / ".git").exists():
        names = subprocess.run(
            ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout
        found = [ROOT / os.fsdecode(name) for name in names.split(b"\0") if name]
    else:
        found = [path for path in ROOT.rglob("*") if not any(part.startswith(".venv") for part in path.parts)]
    return sorted(path for path in found if path.is_file())


def test_every_source_file_opens_with_its_charter() -> None:
    bare = [path for path in SOURCE.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_bytes()))]
    assert not bare, f"say at the top what may live here and what may not: {names(bare)}"


def test_source_files_stay_short(record_property: Callable[[str, object], None]) -> None:
    lines = {path: path.read_bytes().count(b"\n") for path in SOURCE.rglob("*.py")}
    for path, count in sorted(lines.items()):
        if LINES_WANTED < count <= LINES_MAX:
            record_property("notice", f"{path.relative_to(ROOT)} has {count} lines; wanted: {LINES_WANTED} at most")
    long = [path for path, count in lines.items() if count > LINES_MAX]
    assert not long, f"more than {LINES_MAX} lines: {names(long)}"


def test_nothing_imports_the_sqlite_of_the_standard_library() -> None:
    """Two copies of SQLite in one process drop each other's file locks, so tests and benchmarks obey as well."""
    guilty = [
        path
        for path in tracked()
        if path.suffix == ".py" and "peers" not in path.parts and "sqlite3" in imports(ast.parse(path.read_bytes()))
    ]  # the peers bring their own, in environments of their own
    assert not guilty, f"use apsw in {names(guilty)}"


@pytest.mark.parametrize(
    ("pattern", "what"),
    [(UNFINISHED, "a note about unfinished work"), (REGISTRIES, "the address of a registry")],
    ids=["notes", "registries"],
)
def test_no_tracked_file_holds(pattern: re.Pattern[bytes], what: str) -> None:
    guilty = [path for path in tracked() if pattern.search(path.read_bytes())]
    assert not guilty, f"{what} stands in {names(guilty)}"


def test_every_lock_pins_by_hash() -> None:
    for lock in sorted(ROOT.glob("requirements*.txt")):
        blocks = re.split(r"\n(?=[a-z0-9])", lock.read_text(encoding="utf-8"))
        pins = [block for block in blocks if re.match(r"[a-z0-9]", block)]
        assert pins, f"{lock.name} is empty"
        loose = [pin.splitlines()[0] for pin in pins if "==" not in pin.splitlines()[0] or "--hash=sha256:" not in pin]
        assert not loose, f"{lock.name} does not pin {loose}: run `make lock`"


def test_every_core_requirement_is_locked() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    held = {line.split("==")[0] for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()}
    missing = {re.split(r"[><=~\[ ]", requirement)[0] for requirement in wanted} - held
    assert not missing, f"run `make lock`: {sorted(missing)}"


@pytest.mark.parametrize("door", ["perdure", "perdure.cli.main"])
def test_heavy_libraries_are_loaded_late(door: str) -> None:
    program = f"import sys, {door}; print(*sorted(set({LATE!r}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == [], f"import these where they are used: {found.stdout}"


def imports(tree: ast.Module) -> set[str]:
    """First names of every module that the file imports, at any depth."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def names(paths: list[Path]) -> str:
    return ", ".join(str(path.relative_to(ROOT)) for path in sorted(paths))
