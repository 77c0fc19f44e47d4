"""What a newcomer stumbles over at the command line and at the API: each was once a surprise."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.cli import APP, PROGRAM, environment, perdure


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "module.py").write_text(APP)
    return tmp_path


def in_shell(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``perdure`` with what only a shell can do to it."""
    return subprocess.run(
        ["bash", "-c", f'perdure() {{ "{PROGRAM[0]}" -m perdure.cli "$@"; }}; {line}'], cwd=cwd, env=environment(),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("perdure runs >&-", 0),
        ("perdure runs --output json >&-", 0),
        ("perdure inspect nope 2>&-", 2),
        ("perdure inspect nope --output json >&- 2>&-", 2),
        ("perdure submit payer - --app module:app <&-", 2),
    ],
)
def test_a_stream_that_the_caller_closed_is_no_crash(line: str, code: int, folder: Path) -> None:
    done = in_shell(line, folder)
    assert done.returncode == code, done.stderr
    assert "Unexpected" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_sentence(folder: Path) -> None:
    for words in ("version", "version --output json", "inspect nope --output json"):
        done = in_shell(f"perdure {words} > /dev/full", folder)
        assert done.returncode == (2 if "nope" in words else 5), done.stderr
        assert done.stderr.startswith("Error: ")
        assert "Traceback" not in done.stderr


def test_help_goes_to_a_closed_stdout(folder: Path) -> None:
    assert in_shell("perdure --help >&-", folder).returncode == 0
    assert perdure("version", cwd=folder).stdout.startswith("perdure ")
