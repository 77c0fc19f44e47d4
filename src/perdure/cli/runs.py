"""Runs: list, inspect, cancel. RUN may be a run or a submission everywhere."""

from __future__ import annotations

import click

from perdure.cli.opening import Id, check_reason, opened, reason_option, run
from perdure.cli.output import Output, cell, plain
from perdure.projections.run import RunView


@click.command()
@click.option(
    "--state", type=Id("state"), metavar="S", help="ready, running, suspended, unknown, completed, failed ..."
)
@click.option("--agent", type=Id("agent"), metavar="A", help="Only runs of this agent.")
def runs(state: str | None, agent: str | None) -> int:
    """List runs in order of admission."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = await app.runs(state=state, agent=agent)
        items = [{**_item(view), "shown": view.status or view.state} for view in found]
        columns = {"run": "id", "agent": "agent", "state": "shown", "thread": "thread", "admitted": "createdAt"}
        out.listing("Run", items, columns, empty="No runs.")

    return run(work)


def _item(view: RunView) -> dict[str, object]:
    return {"id": view.run, **plain(view)}


@click.command()
@click.argument("of_run", metavar="RUN", type=Id("run"))
def inspect(of_run: str) -> int:
    """Show RUN: its turns, calls and settlement."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            view = await app.inspect(of_run)
        out.final("Run", _item(view))
        if out.human:
            _say(view, out)

    return run(work)


def _say(view: RunView, out: Output) -> None:
    out.fields({
        "run": view.run, "submission": view.submission, "thread": f"{view.thread} (position {view.position})",
        "agent": view.agent, "state": view.status or view.state, "admitted": view.created_at,
        "settled": view.settled_at, "disposition": view.disposition, "input": view.input,
        "failure": f"{view.failure.kind}: {view.failure.message}" if view.failure else None,
    })  # fmt: skip
    for turn in view.turns:
        out.line()
        out.line(f"turn {turn.turn}  {turn.model}  {turn.finish}")
        if turn.text:
            out.line(f"  says {cell(turn.text)}")
        for call in turn.calls:
            tries = f", {call.tries} tries" if call.tries > 1 else ""
            out.line(f"  {call.call}  {call.tool} {cell(call.arguments)}  {call.status}{tries}")
            if call.error is not None:
                out.line(f"       {call.error.kind}: {cell(call.error.message)}")
            elif call.result is not None:
                out.line(f"       {cell(call.result)}")
            for step in call.steps:
                out.line(f"       step {step.name}  {step.status}")
    if view.status == "completed":
        out.line()
        out.line(f"output  {cell(view.output)}")


@click.command()
@click.argument("of_run", metavar="RUN", type=Id("run"))
@reason_option
def cancel(of_run: str, reason: str, by: str) -> int:
    """Ask RUN to end. Durable at once; a settlement that is already there stands."""
    check_reason(reason)

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            await app.cancel(of_run, by=by, reason=reason)
            view = await app.inspect(of_run)
        out.final("Cancellation", {"id": view.run, "submission": view.submission, "by": by, "reason": reason})
        out.line(f"Cancellation of {view.run} is recorded.")

    return run(work)
