"""``check --app``: before a deployment, what this build would do with the work that is open."""

from __future__ import annotations

from typing import Any

import click

from perdure.app import App
from perdure.cli import failures
from perdure.cli.loading import app_of, app_option
from perdure.cli.opening import run
from perdure.cli.output import Output, plain
from perdure.projections.audit import Explanation


@click.command()
@app_option()
def check(target: str) -> int:
    """Tell what this build would do with each open submission of the database. Runs and writes nothing.

    Exit code 3 if one would be stranded: its agent is not in the app, its thread cannot be decided, or a call that was
    started can no longer be judged because its tool changed.
    """

    async def work(out: Output) -> int:
        async with app_of(target, store=out.settings.db, workers=0) as app:
            items = [await _item(app, one.submission, one.agent) for one in await app.obligations()]
        stranded = [item for item in items if item["stranded"]]
        error = None
        if stranded:
            message = f"{len(stranded)} of {len(items)} open submissions would be stranded: {stranded[0]['id']}"
            error = failures.error_body("stranded", f"{message} ({stranded[0]['stranded']}).", failures.HELD)
        for item in items:
            out.record("Check", item)
        out.final("CheckList", {"items": items}, error=error)
        if out.human:
            if items:
                columns = {
                    "submission": "id",
                    "agent": "agent",
                    "decision": "decision",
                    "verdict": "verdict",
                    "why": "why",
                }
                out.table(columns, items)
            else:
                out.note("No submission is open.")
            for item in stranded:
                out.note(f"{item['id']} would be stranded: {item['stranded']}.")
        return failures.HELD if stranded else 0

    return run(work)


async def _item(app: App, submission: str, agent: str) -> dict[str, Any]:
    found = await app.explain(submission)
    stranded = _stranded(found, agent, app)
    changed = found.evidence["changed"]
    verdict = "stranded" if stranded else "changed" if changed else "ok"
    why = stranded or found.meaning
    if changed and not stranded:
        why = f"{why} The tool of call {', '.join(changed)} is gone or changed; the call is not run again."
    return {"id": submission, "agent": agent, **plain(found), "stranded": stranded, "verdict": verdict, "why": why}


def _stranded(found: Explanation, agent: str, app: App) -> str | None:
    """Why this build could not go on with it, or None."""
    if agent not in app.agents:
        return f"no agent is called {agent!r} in this app"
    if found.decision == "Blocked":
        return found.meaning
    if found.evidence["changed"] and found.decision == "MarkUnknown":
        call = found.evidence["changed"][0]
        return f"the tool of call {call} is gone or changed, and nobody knows whether the call took place"
    return None
