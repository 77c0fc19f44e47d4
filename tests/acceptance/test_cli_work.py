"""From submit to settlement on the command line: receipts, exit codes, verdicts, decisions, and operation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import apsw
import pytest

from support.cli import APP, perdure, told, until, worker

DB = ("--db", "work.db")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "module.py").write_text(APP)
    return tmp_path


def submit(folder: Path, text: str, *words: str) -> dict[str, Any]:
    return told("submit", "payer", "--app", "module:app", text, *words, cwd=folder)["data"]  # type: ignore[no-any-return]


def state(folder: Path, submission: str, code: int | None = None) -> dict[str, Any]:
    return told(*DB, "settlement", submission, cwd=folder, code=code)


@pytest.fixture(scope="module")
def settled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A store in which one worker has done what it could; read by many tests, changed by none."""
    folder = tmp_path_factory.mktemp("settled")
    (folder / "module.py").write_text(APP)
    words = {"done": "pay 5", "doubt": "pay 13", "asks": "ask 7", "broken": "break 1", "later": "say hello"}
    subs = {name: submit(folder, text, "--thread", name)["submission"] for name, text in words.items()}
    gone = submit(folder, "say x", "--thread", "gone")["submission"]
    perdure(*DB, "cancel", gone, "--reason", "not needed", cwd=folder)
    with worker(folder):
        until(
            lambda: _counts(folder) == {"completed": 2, "failed": 1, "cancelled": 1, "unknown": 1, "suspended": 1},
            "them",
        )
    return folder, {**subs, "gone": gone}


def _counts(folder: Path) -> dict[str, int]:
    items = told(*DB, "runs", cwd=folder)["data"]["items"]
    states = [item["status"] or item["state"] for item in items]
    return {state: states.count(state) for state in states}


def test_a_receipt_is_the_same_for_the_same_key(folder: Path) -> None:
    first = submit(folder, "pay 5", "--key", "k")
    assert set(first) == {"id", "submission", "thread", "run", "position"}
    assert submit(folder, "pay 5", "--key", "k") == first
    line = perdure("submit", "payer", "--app", "module:app", "--key", "k", "-", cwd=folder, input="pay 5").stdout
    assert first["submission"] in line
    other = told("submit", "payer", "--app", "module:app", "--key", "k", "pay 6", cwd=folder, code=2)
    assert other["error"]["code"] == "conflict"
    assert len(told(*DB, "runs", cwd=folder)["data"]["items"]) == 1


def test_submit_runs_nothing_and_db_names_another_store(folder: Path) -> None:
    submit(folder, "slow 1", "--db", "other.db")
    assert not (folder / "slow.started").exists()
    assert not (folder / "work.db").exists()
    assert told("--db", "other.db", "obligations", cwd=folder)["data"]["items"][0]["blockedOn"] == "ready"


def test_input_is_validated_by_the_agents_type(folder: Path) -> None:
    (folder / "typed.py").write_text(
        "import perdure as p\nfrom typing import TypedDict\nclass In(TypedDict):\n    n: int\n"
        "def app():\n    return p.open('work.db', agents=[p.Agent('typed', input=In)])\n"
    )
    words = ("submit", "typed", "--app", "typed:app")
    told(*words, '{"n": 1}', cwd=folder)
    for wrong in ('{"n": "x"}', "{}", "not json", ""):
        assert told(*words, wrong, cwd=folder, code=2)["error"]["code"] == "invalid"
    near = told("submit", "typd", "--app", "typed:app", '{"n": 1}', cwd=folder, code=2)["error"]
    assert "`typed`" in near["help"]
    assert len(told(*DB, "runs", cwd=folder)["data"]["items"]) == 1


@pytest.mark.parametrize(
    ("name", "code", "status", "error"),
    [
        ("done", 0, "completed", None),
        ("later", 0, "completed", None),
        ("doubt", 3, None, "unknown_outcome"),
        ("asks", 3, None, "approval_pending"),
        ("broken", 4, "failed", "run_failed"),
        ("gone", 130, "cancelled", "run_cancelled"),
    ],
)
def test_settlement_says_how_it_stands(
    settled: tuple[Path, dict[str, str]], name: str, code: int, status: str | None, error: str | None
) -> None:
    folder, subs = settled
    envelope = state(folder, subs[name], code)
    assert envelope["data"]["status"] == status
    assert envelope.get("error", {}).get("code") == error
    if error:
        assert envelope["error"]["run"] == envelope["data"]["run"]
    of_run = told(*DB, "settlement", envelope["data"]["run"], cwd=folder, code=code)
    assert of_run == envelope
    assert perdure(*DB, "settlement", subs[name], cwd=folder, code=code).stdout.startswith("submission")


def test_work_that_is_on_its_way_exits_with_0_and_a_wait_that_ends_early_does_not(folder: Path) -> None:
    sub = submit(folder, "pay 5")["submission"]
    assert state(folder, sub, 0)["data"]["state"] == "ready"
    waited = told(*DB, "settlement", sub, "--wait", "--timeout", "0.1", cwd=folder, code=3)
    assert waited["error"]["code"] == "timeout"
    with worker(folder):
        assert told(*DB, "settlement", sub, "--wait", cwd=folder)["data"]["output"] == "done"


def test_listings_have_items_with_ids(settled: tuple[Path, dict[str, str]]) -> None:
    folder, _ = settled
    counts = {("threads",): 6, ("runs",): 6, ("effects", "list"): 2, ("approvals", "list"): 1, ("obligations",): 2}
    for words, count in counts.items():
        envelope = told(*DB, *words, cwd=folder)
        items = envelope["data"]["items"]
        assert envelope["kind"].endswith("List")
        assert len({item["id"] for item in items}) == len(items) == count, words
        lines = perdure(*DB, *words, "--output", "jsonl", cwd=folder).stdout.splitlines()
        assert json.loads(lines[-1]) == envelope if words != ("obligations",) else len(lines) == 3
        assert len(lines) == count + 1
        plain = perdure(*DB, *words, cwd=folder).stdout
        assert items[0]["id"] in plain
        assert "\x1b" not in plain
    assert [len(told(*DB, "runs", "--state", one, cwd=folder)["data"]["items"]) for one in ("failed", "unknown")] == [
        1,
        1,
    ]
    told(*DB, "runs", "--state", "nonsense", cwd=folder, code=2)


def test_an_unknown_effect_shows_the_commands_that_resolve_it(settled: tuple[Path, dict[str, str]]) -> None:
    folder, subs = settled
    (item,) = told(*DB, "effects", "list", subs["doubt"], "--status", "unknown", cwd=folder)["data"]["items"]
    assert item["commands"]["applied"] in perdure(*DB, "effects", "list", "--status", "unknown", cwd=folder).stdout
    assert item["commands"]["applied"].startswith(f"perdure --db work.db effects reconcile {item['id']} ")
    assert told(*DB, "effects", "show", item["id"], cwd=folder)["data"]["arguments"] == {"cents": 13}
    assert item["commands"]["not-applied"] in perdure(*DB, "effects", "show", item["id"], cwd=folder).stdout


def test_a_verdict_is_given_from_another_process(folder: Path) -> None:
    sub = submit(folder, "pay 13")["submission"]
    with worker(folder):
        until(lambda: state(folder, sub)["data"]["state"] == "unknown", "the unknown")
    (effect,) = told(*DB, "effects", "list", "--status", "unknown", cwd=folder)["data"]["items"]
    reconcile = (*DB, "effects", "reconcile", effect["id"])
    (folder / "result.json").write_text('"R-1"')
    (folder / "evidence.json").write_text('{"line": 7}')
    (folder / "broken.json").write_text("{")
    applied = (*reconcile, "--verdict", "applied", "--reason", "seen", "--by", "ann")
    for wrong in (
        (*reconcile, "--verdict", "applied", "--reason", " "),
        (*reconcile, "--verdict", "applied"),
        (*reconcile, "--verdict", "aplied", "--reason", "r"),
        (*reconcile, "--verdict", "refused", "--reason", "r", "--result-file", "result.json"),
        (*applied, "--result-file", "missing.json"),
        (*applied, "--result-file", "broken.json"),
        (*DB, "effects", "reconcile", "eff_none", "--verdict", "applied", "--reason", "r"),
    ):
        told(*wrong, cwd=folder, code=2)
    compensated = told(*reconcile, "--verdict", "compensated", "--reason", "r", cwd=folder, code=2)["error"]
    assert compensated["message"].endswith("is not part of this release.")
    told(*applied, "--result-file", "result.json", "--evidence-file", "evidence.json", cwd=folder)
    told(*reconcile, "--verdict", "refused", "--reason", "no", cwd=folder, code=2)
    with worker(folder):
        assert told(*DB, "settlement", sub, "--wait", cwd=folder)["data"]["status"] == "completed"
    after = told(*DB, "effects", "show", effect["id"], cwd=folder)["data"]
    assert (after["status"], after["verdict"], after["result"]) == ("confirmed", "applied", "R-1")
    assert (after["by"], after["reason"], after["evidence"]) == ("ann", "seen", {"line": 7})


def test_approvals_are_decided_from_another_process(folder: Path) -> None:
    subs = [submit(folder, "ask 7")["submission"] for _ in range(2)]
    with worker(folder):
        until(lambda: len(told(*DB, "approvals", "list", cwd=folder)["data"]["items"]) == 2, "both requests")
        ids = {item["submission"]: item["id"] for item in told(*DB, "approvals", "list", cwd=folder)["data"]["items"]}
        yes, no = (ids[sub] for sub in subs)
        told(*DB, "approvals", "approve", yes, cwd=folder, code=2)
        assert told(*DB, "approvals", "approve", yes, "--reason", "fine", cwd=folder)["data"]["status"] == "approved"
        told(*DB, "approvals", "reject", no, "--reason", "too much", "--by", "ann", cwd=folder)
        told(*DB, "approvals", "approve", no, "--reason", "after all", cwd=folder, code=2)
        for sub in subs:
            told(*DB, "settlement", sub, "--wait", cwd=folder)
    assert told(*DB, "approvals", "list", cwd=folder)["data"]["items"] == []
    status = [item["status"] for item in told(*DB, "approvals", "list", "--all", cwd=folder)["data"]["items"]]
    assert sorted(status) == ["approved", "rejected"]


def test_threads_are_shown_without_a_clock_and_archived(settled: tuple[Path, dict[str, str]], folder: Path) -> None:
    kept, _ = settled
    shown = [
        perdure(*DB, "threads", "show", "doubt", *form, cwd=kept).stdout for form in [(), ("--output", "json")] * 2
    ]
    assert shown[:2] == shown[2:]
    assert [item["kind"] for item in json.loads(shown[1])["data"]["items"]][-1] == "ToolCallUnknown"
    assert "deadline" not in shown[1]
    told(*DB, "threads", "archive", "doubt", cwd=kept, code=2)
    sub = submit(folder, "say x", "--thread", "t")["submission"]
    with worker(folder):
        told(*DB, "settlement", sub, "--wait", cwd=folder)
    told(*DB, "threads", "archive", "t", cwd=folder)
    assert told(*DB, "threads", cwd=folder)["data"]["items"] == []


def test_inspect_shows_turns_and_calls(settled: tuple[Path, dict[str, str]]) -> None:
    folder, subs = settled
    data = told(*DB, "inspect", subs["done"], cwd=folder)["data"]
    assert [call["result"] for turn in data["turns"] for call in turn["calls"]] == ["paid 5"]
    assert "paid 5" in perdure(*DB, "inspect", data["run"], cwd=folder).stdout
    told(*DB, "inspect", "run_none", cwd=folder, code=2)


def test_operation_of_what_is_in_good_order(settled: tuple[Path, dict[str, str]]) -> None:
    folder, subs = settled
    assert told(*DB, "verify", cwd=folder)["data"]["passed"] is True
    told(*DB, "verify", "--thread", "doubt", cwd=folder)
    told(*DB, "verify", "--thread", "none", cwd=folder, code=2)
    told(*DB, "recover", cwd=folder)
    assert told(*DB, "redrive", subs["done"], cwd=folder)["data"]["redriven"] is False
    told(*DB, "cancel", subs["done"], "--reason", "late", cwd=folder, code=2)
    overdue = told(*DB, "obligations", "--overdue", "0s", cwd=folder)["data"]["items"]
    assert {item["severity"] for item in overdue} == {"overdue"}
    assert "--db work.db effects reconcile" in perdure(*DB, "obligations", cwd=folder).stdout
    told(*DB, "obligations", "--aging", "soon", cwd=folder, code=2)


def test_verify_names_what_is_broken_and_where(folder: Path) -> None:
    sub = submit(folder, "say hello", "--thread", "t")["submission"]
    with worker(folder):
        told(*DB, "settlement", sub, "--wait", cwd=folder)
    told(*DB, "verify", cwd=folder)
    connection = apsw.Connection(str(folder / "work.db"))
    first, body = list(connection.execute("SELECT first, body FROM batch ORDER BY first"))[-1]
    connection.execute("UPDATE batch SET body = ? WHERE first = ?", (body.replace(b"hello", b"hullo"), first))
    connection.close()
    envelope = told(*DB, "verify", cwd=folder, code=5)
    assert "thread t" in envelope["error"]["message"]
    assert any(item["status"] == "failed" and item["thread"] == "t" for item in envelope["data"]["items"])
    assert "failed: " in perdure(*DB, "verify", cwd=folder, code=5).stdout


def test_check_tells_what_a_build_would_do(settled: tuple[Path, dict[str, str]]) -> None:
    folder, _ = settled
    (folder / "renamed.py").write_text(APP.replace('p.Agent("payer"', 'p.Agent("buyer"'))
    items = told("check", "--app", "module:app", cwd=folder)["data"]["items"]
    assert {item["verdict"] for item in items} == {"ok"}
    lost = told("check", "--app", "renamed:app", cwd=folder, code=3)
    assert lost["error"]["code"] == "stranded"
    assert {item["verdict"] for item in lost["data"]["items"]} == {"stranded"}


def test_check_names_a_started_call_whose_tool_changed(folder: Path) -> None:
    submit(folder, "slow 1")
    with worker(folder) as process:
        until((folder / "slow.started").exists, "slow to begin")
        process.kill()
    (folder / "changed.py").write_text(APP.replace("@p.tool\nasync def slow", '@p.tool(version="2")\nasync def slow'))
    (kept,) = told("check", "--app", "module:app", cwd=folder)["data"]["items"]
    (lost,) = told("check", "--app", "changed:app", cwd=folder, code=3)["data"]["items"]
    assert (kept["decision"], kept["verdict"]) == ("MarkUnknown", "ok")
    assert (lost["decision"], lost["verdict"]) == ("MarkUnknown", "stranded")


FORMS = {
    "a function": "def app():\n    return p.open('work.db', agents=[agent])\n",
    "an async function": "async def app():\n    return p.open('work.db', agents=[agent])\n",
    "an object": "app = p.open('work.db', agents=[agent])\n",
    "a context manager": (
        "import contextlib\n@contextlib.asynccontextmanager\nasync def app():\n"
        "    async with p.open('work.db', agents=[agent]) as opened:\n        yield opened\n"
    ),
    "a generator": (
        "async def app():\n    async with p.open('work.db', agents=[agent]) as opened:\n        yield opened\n"
    ),
    "an attribute": "class here:\n    app = staticmethod(lambda: p.open('work.db', agents=[agent]))\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_an_app_is_named_in_every_form(form: str, folder: Path) -> None:
    (folder / "form.py").write_text(APP.partition("def app")[0] + FORMS[form])
    target = "form:here.app" if form == "an attribute" else "form:app"
    told("submit", "payer", "--app", target, "slow 1", cwd=folder)
    assert not (folder / "slow.started").exists()
    assert told("check", "--app", target, cwd=folder)["data"]["items"][0]["decision"] == "AwaitClaim"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nowhere:app", "There is no module 'nowhere'."),
        ("module:ap", "Module 'module' has no 'ap'."),
        ("module", "'module' does not name an app."),
        ("module:", "'module:' does not name an app."),
        ("module:Nothing", "module:Nothing is a Nothing, not an app."),
        ("module:APP_DOES", "Module 'module' has no 'APP_DOES'."),
        ("faulty:app", "Module 'faulty' cannot be imported: ZeroDivisionError: division by zero"),
        ("needy:app", "Module 'needy' cannot be imported: No module named 'not_installed'."),
        ("wrong:args", "wrong:args takes arguments."),
        ("wrong:fails", "wrong:fails raised OSError: no disk"),
        ("wrong:number", "wrong:number is a int, not an app."),
    ],
)
def test_an_app_that_is_none_is_one_sentence(target: str, says: str, folder: Path) -> None:
    (folder / "faulty.py").write_text("1 / 0\n")
    (folder / "needy.py").write_text("import not_installed\n")
    (folder / "wrong.py").write_text("number = 1\ndef args(x): ...\ndef fails():\n    raise OSError('no disk')\n")
    for words in (("submit", "payer", "say x"), ("worker",), ("check",)):
        assert told(*words, "--app", target, cwd=folder, code=2)["error"]["message"] == says
    assert not (folder / "work.db").exists()
