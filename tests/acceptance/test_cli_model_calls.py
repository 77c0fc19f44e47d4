"""A model call of unknown outcome on the command line: shown, looked up, and led on by a verdict from another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cli import perdure, told, until, worker

DB = ("--db", "work.db")
APP = '''
"""An agent whose model is called once a turn; the first call is cut off by the network."""
import pathlib
import perdure as p
from perdure.ports.provider import ModelError
from perdure.providers.scripted import Scripted, fail, say
from perdure.records.parts import Evidence

def script(request):
    if pathlib.Path("cut").exists():
        return say("Paid.")
    pathlib.Path("cut").touch()
    return fail(ModelError("The connection was lost.", dispatched="unknown", evidence=Evidence(request_id="req_7")))

asker = p.Agent("asker", input=str, output=str, model=Scripted(script), policy=p.Policy(model_calls="once"))
app = p.open("work.db", agents=[asker])
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "module.py").write_text(APP)
    return tmp_path


def parked(folder: Path) -> tuple[str, str]:
    """A submission that waits for a verdict, and its effect."""
    receipt = told("submit", "asker", "--app", "module:app", "pay", cwd=folder)["data"]
    sub: str = receipt["submission"]
    with worker(folder):
        until(lambda: told(*DB, "settlement", sub, cwd=folder, code=None)["data"]["state"] == "unknown", "the unknown")
    (item,) = told(*DB, "effects", "list", "--status", "unknown", cwd=folder)["data"]["items"]
    return sub, item["id"]


def test_it_is_shown_with_what_helps_to_look_it_up(folder: Path) -> None:
    sub, effect = parked(folder)
    shown = perdure(*DB, "effects", "show", effect, cwd=folder).stdout
    assert "served the call of turn 1 (The connection was lost.)." in shown
    assert "The provider calls it req_7." in shown
    item = told(*DB, "effects", "show", effect, cwd=folder)["data"]
    assert item["commands"]["applied"].endswith(" --result-file answer.json")
    assert all(command in shown for command in item["commands"].values())
    assert (item["kind"], item["effectClass"], item["call"], item["wire"]["requestId"]) == (
        "model", "once", "1.model", "req_7",
    )  # fmt: skip
    inspected = perdure(*DB, "inspect", sub, cwd=folder).stdout
    assert "turn 1  scripted" in inspected
    assert "try 1 unknown  may have been served  request req_7" in inspected
    assert "possible double charge" in inspected
    (owed,) = told(*DB, "obligations", cwd=folder)["data"]["items"]
    assert (owed["blockedOn"], owed["detail"].endswith("served the call of turn 1")) == ("unknown", True)


def test_its_answer_is_given_as_a_json_string(folder: Path) -> None:
    sub, effect = parked(folder)
    (folder / "answer.json").write_text('"Paid by hand."')
    (folder / "object.json").write_text('{"text": "Paid."}')
    applied = (*DB, "effects", "reconcile", effect, "--verdict", "applied", "--reason", "their log")
    for wrong in (applied, (*applied, "--result-file", "object.json")):
        error = told(*wrong, cwd=folder, code=2)["error"]
        assert error["message"].startswith("The answer of a model call is text; this is ")
    told(*applied, "--result-file", "answer.json", cwd=folder)
    with worker(folder):
        ended = told(*DB, "settlement", sub, "--wait", cwd=folder)["data"]
    assert (ended["status"], ended["output"]) == ("completed", "Paid by hand.")
    (turn,) = told(*DB, "inspect", sub, cwd=folder)["data"]["turns"]
    assert [(one["status"], one["verdict"]) for one in turn["tries"]] == [("unknown", "applied")]
    assert perdure(*DB, "verify", cwd=folder, code=0)


def test_a_refusal_fails_the_run(folder: Path) -> None:
    sub, effect = parked(folder)
    told(*DB, "effects", "reconcile", effect, "--verdict", "refused", "--reason", "no credit", cwd=folder)
    with worker(folder):
        ended = told(*DB, "settlement", sub, "--wait", cwd=folder, code=None)["data"]
    assert (ended["status"], ended["failure"]) == ("failed", {"kind": "model", "message": "no credit"})
