"""What a newcomer stumbles over at the command line and at the API: each was once a surprise."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.providers.scripted import Scripted, say
from support.cli import APP, PROGRAM, environment, perdure, told, until, worker

DB = ("--db", "work.db")
AGENT = p.Agent("talker", model=Scripted([say("hi")]))


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


# -- terminals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_a_table_on_a_terminal_leaves_ids_and_words_whole(columns: str, folder: Path) -> None:
    receipts = [submitted(folder, f"say {text}")["data"] for text in ("one", "two")]
    for command in ("obligations", "runs", "threads"):
        shown = on_a_terminal([*DB, command], folder, columns)
        for receipt in receipts:
            wanted = ("thread",) if command == "threads" else ("thread", "submission" if command[0] == "o" else "run")
            assert all(receipt[name] in shown for name in wanted), shown
        assert command == "threads" or "ready" in shown, shown
        assert command == "threads" or ("─" in shown) == (columns == "200"), shown


def submitted(folder: Path, text: str) -> Any:
    return told("submit", "payer", text, "--app", "module:app", cwd=folder)


def on_a_terminal(words: list[str], cwd: Path, columns: str) -> str:
    """What ``perdure`` shows on a terminal of so many columns."""
    master, slave = pty.openpty()
    try:
        tty = environment({"COLUMNS": columns, "TERM": "xterm"})
        subprocess.run([*PROGRAM, *words], cwd=cwd, env=tty, stdout=slave, stderr=slave, timeout=60, check=True)
        os.close(slave)
        slave = -1
        shown = b""
        with contextlib.suppress(OSError):  # how Linux tells the end
            while piece := os.read(master, 65536):
                shown += piece
        return shown.decode()
    finally:
        os.close(master)
        if slave >= 0:
            os.close(slave)


def test_a_thread_with_open_work_is_not_archived(folder: Path) -> None:
    submitted(folder, "say one")
    (thread,) = told(*DB, "threads", cwd=folder)["data"]["items"]
    error = told(*DB, "threads", "archive", thread["id"], cwd=folder, code=2)["error"]
    assert error["message"] == "The thread has open work."
    assert error["help"] == "Settle or cancel it first: perdure --db work.db obligations"


# -- submit ------------------------------------------------------------------------------------------------------------


def test_input_that_is_not_utf_8_is_refused_not_altered(folder: Path) -> None:
    for line in (
        r"perdure submit payer $'say \xff' --app module:app",
        r"printf '\xff' | perdure submit payer - --app module:app",
    ):
        done = in_shell(line, folder)
        assert done.returncode == 2, done.stdout
        assert "The input is not UTF-8: byte" in done.stderr
    assert told("--db", "work.db", "runs", cwd=folder)["data"]["items"] == []


def test_nothing_is_admitted_to_a_store_that_ends_with_the_command(folder: Path) -> None:
    for address in ("memory:", ":memory:"):
        done = perdure("submit", "payer", "say hi", "--app", "module:app", "--db", address, cwd=folder, code=2)
        assert "nothing would be owed" in done.stderr
        assert done.stdout == ""


def test_a_file_where_a_module_is_asked_for(folder: Path) -> None:
    (folder / "inner").mkdir()
    (folder / "inner" / "deep.py").write_text(APP)
    for target, advice in (
        ("module.py:app", "Write the module's name: --app module:app"),
        ("./module.py:app", "Write the module's name: --app module:app"),
        ("module.py", "Write the module's name: --app module:NAME"),
        ("inner/deep.py:app", "In the folder inner, write the module's name: --app deep:app"),
        ("none.py:app", "Looked in"),
        ("./none.py:app", "Write --app MODULE:NAME"),
    ):
        assert advice in perdure("submit", "payer", "say hi", "--app", target, cwd=folder, code=2).stderr, target


# -- what to do next ---------------------------------------------------------------------------------------------------


def test_advice_is_about_the_store_that_was_named(folder: Path) -> None:
    perdure("submit", "payer", "say hi", "--app", "module:app", "--db", "my work.db", cwd=folder)
    for words, advice in (
        (("inspect", "run_none"), "List them: perdure --db 'my work.db' runs"),
        (("threads", "show", "none"), "List them: perdure --db 'my work.db' threads"),
        (("effects", "show", "eff_none"), "List them: perdure --db 'my work.db' effects list"),
        (("approvals", "approve", "apr_none", "--reason", "r"), "List them: perdure --db 'my work.db' approvals list"),
    ):
        assert told("--db", "my work.db", *words, cwd=folder, code=2)["error"]["help"] == advice
    (folder / "my work.db").rename(folder / "named.db")
    done = perdure("inspect", "run_none", cwd=folder, env={"PERDURE_DB": "named.db"}, code=2)
    assert "List them: perdure runs" in done.stderr


def test_the_version_is_found(tmp_path: Path) -> None:
    assert "Run `perdure version`." in perdure("--version", cwd=tmp_path, code=2).stderr


def test_a_timeout_is_judged_before_anything_else(folder: Path) -> None:
    for wrong in ("soon", "-5s"):
        words = ("--db", "work.db", "settlement", "sub_none", "--wait", "--timeout", wrong)
        assert "--timeout" in told(*words, cwd=folder, code=2)["error"]["message"]


def test_what_is_decided_is_asked_no_more(folder: Path) -> None:
    """A verdict and an approval wait for a worker to take them; whoever looks meanwhile is not told to decide again."""
    for text in ("pay 13", "ask 7"):
        perdure("submit", "payer", text, "--app", "module:app", "--thread", text[:3], "--key", "k", cwd=folder)
    with worker(folder):
        until(
            lambda: {i["state"] for i in told(*DB, "runs", cwd=folder)["data"]["items"]} == {"unknown", "suspended"},
            "both to wait",
        )
    runs = {item["state"]: item["id"] for item in told(*DB, "runs", cwd=folder)["data"]["items"]}
    (effect,) = told(*DB, "effects", "list", "--status", "unknown", cwd=folder)["data"]["items"]
    (request,) = told(*DB, "approvals", "list", cwd=folder)["data"]["items"]
    assert (effect["open"], effect["decided"], request["decided"]) == (True, False, False)
    for run in runs.values():
        told(*DB, "settlement", run, cwd=folder, code=3)
    perdure(*DB, "effects", "reconcile", effect["id"], "--verdict", "not-applied", "--reason", "r", cwd=folder)
    perdure(*DB, "approvals", "approve", request["id"], "--reason", "r", cwd=folder)
    (effect,) = told(*DB, "effects", "list", "--status", "unknown", cwd=folder)["data"]["items"]
    (request,) = told(*DB, "approvals", "list", cwd=folder)["data"]["items"]
    assert (effect["open"], effect["decided"]) == (False, True)
    assert (request["status"], request["decided"]) == ("pending", True)
    for words in (("effects", "list", "--status", "unknown"), ("effects", "show", effect["id"]), ("approvals", "list")):
        shown = perdure(*DB, *words, cwd=folder).stdout
        assert "is recorded; the next worker on its thread takes it from there" in shown
        assert "--reason why" not in shown
    for state, run in runs.items():
        assert told(*DB, "settlement", run, cwd=folder)["data"]["state"] == state
        assert "is recorded; the next worker" in perdure(*DB, "settlement", run, cwd=folder).stderr
    assert {item["waits"] for item in told(*DB, "obligations", cwd=folder)["data"]["items"]} == {"ready"}


# -- the API -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"store": 5}, "The store is a int. Give a path"),
        ({"store": None}, "The store is a NoneType. Give a path"),
        ({"store": b"work.db"}, "The store is a bytes. Give a path"),
        ({"store": "memory:", "agents": AGENT}, "agents is one Agent. Give a list: agents=[agent]."),
        ({"store": "memory:", "agents": p.Registration(AGENT)}, "agents is one Registration. Give a list"),
        ({"store": "memory:", "agents": "payer"}, "agents is one str. Give a list"),
    ],
    ids=str,
)
def test_what_open_cannot_take(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(p.Invalid, match=re.escape(said)):
        p.open(**arguments)


def test_an_input_of_another_type_is_not_told_to_be_returned() -> None:
    with pytest.raises(p.Invalid, match=r"Expected `str`, got `int`\. Give what the type says"):
        AGENT.run_sync(5)
