"""``check FILE`` judges a workflow; ``check --app`` tells what this build would do with the work that is open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perdure.cli import failures
from perdure.cli.loading import app_of, app_option
from perdure.cli.opening import run
from perdure.cli.output import Output, plain

if TYPE_CHECKING:
    from perdure.app import App
    from perdure.projections.audit import Explanation


@click.command()
@app_option(required=False)
@click.option("--var", "variables", multiple=True, metavar="K=JSON", help="A variable; over every other layer.")
@click.option("--vars-file", "files", multiple=True, metavar="F", help="A file of variables, over the document's.")
@click.option("--workspace", metavar="DIR", help="The folder a run may see. Default: the document's.")
@click.argument("file", required=False)
def check(
    target: str | None, variables: tuple[str, ...], files: tuple[str, ...], workspace: str | None, file: str | None
) -> int:
    """Judge the workflow FILE: everything that is wrong with it, each with its place. Exit code 2, or 3 for policy alone.

    With --app, tell instead what that build would do with each open submission. Neither runs or writes anything.
    Exit code 3 if one would be stranded: its agent is not in the app, its thread cannot be decided, or a call that was
    started can no longer be judged because its tool changed.
    """

    if (file is None) == (target is None):
        raise click.UsageError("Give a workflow FILE, or --app MODULE:NAME.")
    if file is not None:
        return run(lambda out: _document(out, file, workspace, files, variables))
    assert target is not None

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


async def _document(
    out: Output, file: str, workspace: str | None, files: tuple[str, ...], variables: tuple[str, ...]
) -> int:
    from perdure.cli.documents import load, warnings_of

    flow = load(file, workspace, files, variables)
    plan = flow.compile()
    notes = warnings_of(flow, out)
    data = {"workflow": plan.name, "digest": plan.digest, "tasks": len(plan.order), "warnings": len(notes)}
    out.final("Check", data, diagnostics=notes)
    out.line(f"{file}: {plan.name} is good: {len(plan.order)} tasks, plan {plan.digest[:12]}.")
    return 0


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
