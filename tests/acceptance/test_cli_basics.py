"""The command line itself: help, suggestions, global options, envelopes, exit codes, and ids that are none."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import perdure as p
from perdure.cli.main import COMMANDS
from support.cli import PROGRAM, environment, perdure, told

HERE = Path(__file__).parent
LATE = ("apsw", "asyncio", "msgspec", "rich", "perdure.app")
HELP_SECONDS_WANTED = 0.12


def test_the_help_is_the_golden_one(tmp_path: Path) -> None:
    assert perdure("--help", cwd=tmp_path).stdout == (HERE / "golden" / "help.txt").read_text(encoding="utf-8")


def test_help_is_quick(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    def seconds(*words: str) -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, check=True)
        return time.perf_counter() - began

    pairs = [(seconds("-c", "pass"), seconds("-m", "perdure.cli", "--help")) for _ in range(7)]
    over = statistics.median(full for _, full in pairs) - statistics.median(bare for bare, _ in pairs)
    record_property("notice", f"perdure --help: {over:.3f} s over a bare interpreter; wanted: {HELP_SECONDS_WANTED} s")
    assert over < 1.0


def test_help_loads_nothing_it_does_not_need(tmp_path: Path) -> None:
    program = (
        "import sys; from perdure.cli.main import main; main(['--help']);"
        f"print(*sorted(set({LATE!r}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_importing_the_package_loads_nothing_and_gives_every_name(tmp_path: Path) -> None:
    program = (
        f"import sys, perdure as p; print(*sorted(set({LATE!r}) & set(sys.modules)));"
        "print(*[name for name in p.__all__ if not hasattr(p, name)]); print(p.Agent.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["", "", "perdure.agent.agent"]


def test_the_surface_is_the_one_that_is_pinned() -> None:
    pinned = HERE.parents[1] / "docs" / "reference" / "surface.txt"
    assert sorted(p.__all__) == p.__all__ == pinned.read_text(encoding="utf-8").split()
    with pytest.raises(AttributeError, match="nonsense"):
        p.nonsense  # noqa: B018


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str, tmp_path: Path) -> None:
    shown = perdure(command, "--help", cwd=tmp_path).stdout
    assert shown.startswith(f"Usage: perdure {command}")
    assert "--db" in shown
    assert list(tmp_path.iterdir()) == []


def test_nothing_at_all_is_a_usage_error(tmp_path: Path) -> None:
    assert "Commands:" in perdure(cwd=tmp_path, code=2).stderr


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (("obligation",), "obligations"),
        (("efects", "list"), "effects"),
        (("effects", "reconcil", "e"), "reconcile"),
        (("threads", "shw", "t"), "show"),
        (("--otput", "json", "threads"), "--output"),
        (("threads", "--colr", "never"), "--color"),
        (("effects", "list", "--stats", "unknown"), "--status"),
        (("verify", "--tread", "t"), "--thread"),
    ],
)
def test_what_is_mistyped_suggests_the_nearest(words: tuple[str, ...], nearest: str, tmp_path: Path) -> None:
    done = perdure(*words, cwd=tmp_path, code=2)
    assert f"Did you mean '{nearest}'?" in done.stderr
    assert done.stdout == ""


def test_a_mistyped_command_has_an_envelope_too(tmp_path: Path) -> None:
    for words in (("efects", "--output", "json"), ("--output=json", "efects")):
        done = perdure(*words, cwd=tmp_path, code=2)
        error = json.loads(done.stdout)["error"]
        assert (error["code"], error["exitCode"]) == ("usage", 2)
        assert "effects" in error["message"]


def test_global_options_stand_before_or_after(tmp_path: Path) -> None:
    forms = [
        ("--output", "json", "effects", "list"),
        ("effects", "--output", "json", "list"),
        ("effects", "list", "--output", "json"),
        ("--output", "human", "effects", "list", "--output", "json"),
        ("effects", "--output=json"),
    ]
    assert len({perdure(*words, cwd=tmp_path).stdout for words in forms}) == 1
    for words in (("--db", "no/x.db", "threads"), ("threads", "--db", "no/x.db")):
        perdure(*words, cwd=tmp_path, code=5)


def test_a_default_that_is_missing_is_empty_and_is_not_made(tmp_path: Path) -> None:
    for words in (
        ("threads",),
        ("runs",),
        ("effects", "list"),
        ("approvals",),
        ("obligations",),
        ("verify",),
        ("recover",),
    ):
        envelope = told(*words, cwd=tmp_path)
        assert (
            all(item.get("status") == "passed" for item in envelope["data"]["items"]) or not envelope["data"]["items"]
        )
    assert perdure("threads", cwd=tmp_path).stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("env", [None, {"PERDURE_DB": "missing.db"}])
def test_a_named_file_that_is_missing_is_a_failure(env: dict[str, str] | None, tmp_path: Path) -> None:
    named = () if env else ("--db", "missing.db")
    for words in (("threads",), ("verify",), ("settlement", "sub_x"), ("cancel", "sub_x", "--reason", "r")):
        assert told(*words, *named, cwd=tmp_path, env=env, code=5)["error"]["code"] == "unavailable"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_database_is_refused_unchanged(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("remember the milk\n" * 100)
    assert told("threads", "--db", "notes.txt", cwd=tmp_path, code=5)["error"]["code"] == "corrupt"
    assert (tmp_path / "notes.txt").read_text() == "remember the milk\n" * 100
    perdure("threads", "--db", "", cwd=tmp_path, code=2)
    perdure("threads", "--db", "postgresql://host/x", cwd=tmp_path, code=2)


ILLEGAL = {"empty": "", "blank": " ", "long": "x" * 257, "control": "a\x01b", "newline": "a\n", "decomposed": "e\u0301"}


@pytest.mark.parametrize("id", ILLEGAL.values(), ids=ILLEGAL)
def test_a02_an_id_that_is_none_is_refused_everywhere(id: str, tmp_path: Path) -> None:
    reason = ("--reason", "r")
    lines = [
        ("settlement", id), ("inspect", id), ("cancel", id, *reason), ("redrive", id), ("effects", "list", id),
        ("effects", "show", id), ("effects", "reconcile", id, "--verdict", "applied", *reason), ("approvals", "list", id),
        ("approvals", "approve", id, *reason), ("approvals", "reject", id, *reason), ("threads", "show", id),
        ("threads", "archive", id), ("recover", "--thread", id), ("verify", "--thread", id), ("runs", "--agent", id),
        ("submit", id, "--app", "m:a", "x"), ("submit", "a", "--app", "m:a", "--thread", id, "x"),
        ("submit", "a", "--app", "m:a", "--key", id, "x"), ("cancel", "sub_x", *reason, "--by", id),
    ]  # fmt: skip
    program = (
        "import contextlib, io, json, sys\nfrom perdure.cli.main import main\n"
        "for words in json.load(sys.stdin):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        "        code = main(words)\n"
        "    print(code, words, said.getvalue())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, input=json.dumps(lines), capture_output=True, text=True,
        env=environment(), check=True,
    )  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert len(rows) == len(lines)
    assert [row for row in rows if not row.startswith("2 ")] == []
    assert list(tmp_path.iterdir()) == []


def test_a02_a_nul_is_refused(tmp_path: Path) -> None:
    program = "import sys; from perdure.cli.main import main; sys.exit(main(['settlement', 'a\\0b']))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "control character" in done.stderr) == (2, True)


def test_a_traceback_is_shown_only_with_verbose(tmp_path: Path) -> None:
    words = ("settlement", "sub_x")
    assert "Traceback" not in perdure(*words, cwd=tmp_path, code=2).stderr
    assert "Traceback" in perdure(*words, "--verbose", cwd=tmp_path, code=2).stderr


def test_colour_is_for_terminals_or_on_request(tmp_path: Path) -> None:
    words = ("settlement", "sub_x")
    assert "\x1b" not in perdure(*words, cwd=tmp_path, code=2).stderr
    assert "\x1b" in perdure(*words, "--color", "always", cwd=tmp_path, code=2).stderr
    terminal = [sys.executable, "-c", "import pty, sys; sys.exit(pty.spawn(sys.argv[1:]) >> 8)", *PROGRAM, *words]
    for env, colour in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        merged = environment({"TERM": "xterm", **env})
        done = subprocess.run(terminal, cwd=tmp_path, env=merged, capture_output=True, check=False)
        assert (b"\x1b[31m" in done.stdout) is colour, env


def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m perdure.cli completion bash | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_version_and_completion(tmp_path: Path) -> None:
    assert perdure("version", cwd=tmp_path).stdout == f"perdure {p.__version__}\n"
    assert told("version", cwd=tmp_path)["data"]["version"] == p.__version__
    for shell in ("bash", "fish", "zsh"):
        assert "_PERDURE_COMPLETE" in perdure("completion", shell, cwd=tmp_path).stdout
    words = {"_PERDURE_COMPLETE": "bash_complete", "COMP_WORDS": "perdure effects rec", "COMP_CWORD": "2"}
    program = "import sys; from perdure.cli.main import main; sys.exit(main([]))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment(words),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "reconcile" in done.stdout
