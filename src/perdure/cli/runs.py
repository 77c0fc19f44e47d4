"""Runs: list, inspect, cancel. RUN may be a run or a submission everywhere."""

from __future__ import annotations

import click

from perdure.cli.opening import Id, check_reason, opened, reason_option, run
from perdure.cli.output import Output, cell, plain
from perdure.projections.models import Charged, ModelTry
from perdure.projections.run import RunView, TurnView
from perdure.projections.workflow import TaskView, WorkflowView
from perdure.records.parts import Usage


@click.command()
@click.option(
    "--state", type=Id("state"), metavar="S", help="ready, running, suspended, unknown, completed, failed ..."
)
@click.option(
    "--agent", "--workflow", "agent", type=Id("agent"), metavar="A", help="Only runs of this agent or workflow."
)
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
            flow = await app.workflow(of_run) if app.is_workflow(of_run) else None
        more = {} if flow is None else plain(flow)
        out.final("Run", {**_item(view), **more, **({"state": view.state} if flow is not None else {})})
        if out.human and flow is not None:
            _say_flow(flow, out)
        elif out.human:
            _say(view, out)

    return run(work)


def _say_flow(view: WorkflowView, out: Output) -> None:
    spent = ", ".join(f"{b.unit} {b.used:,}{f' of {b.limit:,}' if b.limit else ''}" for b in view.budgets)
    out.fields({
        "run": view.run, "workflow": view.workflow, "plan": view.plan, "state": view.state,
        "mode": view.mode if view.mode != "execute" else None, "admitted": view.created_at, "settled": view.settled_at,
        "deadline": view.deadline if view.settled_at is None else None, "workspace": view.workspace,
        "failure": f"{view.failure.kind}: {view.failure.message}" if view.failure else None,
        "memory": view.memory or None, "budget": spent or None,
    })  # fmt: skip
    out.line()
    items = [
        {
            "id": task.id, "state": task.state, "tries": task.attempt or None, "uses": task.uses,
            "detail": _task_detail(task),
        }
        for task in view.tasks
    ]  # fmt: skip
    out.table({"task": "id", "state": "state", "tries": "tries", "uses": "uses", "detail": "detail"}, items)
    if view.state == "completed":
        out.line()
        out.line(f"output  {cell(view.output)}")


def _task_detail(task: TaskView) -> object:
    if task.failure is not None:
        return f"{task.failure.kind}: {task.failure.message}"
    return task.effect or task.approval or task.until or task.output


def _say(view: RunView, out: Output) -> None:
    out.fields({
        "run": view.run, "submission": view.submission, "thread": f"{view.thread} (position {view.position})",
        "agent": view.agent, "state": view.status or view.state, "admitted": view.created_at,
        "settled": view.settled_at, "disposition": view.disposition, "input": view.input,
        "failure": f"{view.failure.kind}: {view.failure.message}" if view.failure else None,
        "used up": view.exhausted or None, "tokens": _tokens(view.usage),
        "cost": _money(view.cost) if view.cost else None, "charged": _charged(view.charged),
        "unpriced": f"{view.unpriced} model calls have no price" if view.unpriced and view.cost else None,
    })  # fmt: skip
    for turn in view.turns:
        out.line()
        _say_tries(turn.turn, turn.tries, out)
        out.line(f"turn {turn.turn}  {turn.model}  {turn.finish}{_bill(turn)}")
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
    if view.tries:
        out.line()
        _say_tries(len(view.turns) + 1, view.tries, out)
    if view.status == "completed":
        out.line()
        out.line(f"output  {cell(view.output)}")


def _money(dollars: float) -> str:
    return f"${dollars:.6f}"


def _tokens(usage: Usage) -> str | None:
    """Tokens in and out, what of them a cache held or the model thought."""
    if not (usage.input or usage.output):
        return None
    cached = [f"{n:,} {what}" for n, what in ((usage.cache_read, "cached"), (usage.cache_write, "written")) if n]
    into = f"{usage.input:,} in" + (f" ({', '.join(cached)})" if cached else "")
    thought = f" ({usage.reasoning:,} reasoning)" if usage.reasoning else ""
    return f"{into}, {usage.output:,} out{thought}"


def _charged(charged: Charged | None) -> str | None:
    """What calls that may have been served count against the budgets."""
    if charged is None:
        return None
    cost = "" if charged.cost is None else f"{_money(charged.cost)}, "
    return f"{cost}{charged.input:,} in, {charged.output:,} out for calls that may have been served"


def _bill(turn: TurnView) -> str:
    shown = [_tokens(turn.usage), None if turn.cost is None else _money(turn.cost)]
    shown += [f"last answer: {turn.final} used up" if turn.final else None]
    shown += [f"request {turn.evidence.request_id}" if turn.evidence and turn.evidence.request_id else None]
    return "".join(f"  {one}" for one in shown if one)


def _say_tries(turn: int, tries: tuple[ModelTry, ...], out: Output) -> None:
    for one in tries:
        verdict = f" ({one.verdict})" if one.verdict else ""
        out.line(f"turn {turn}  {one.model or 'model call'}  try {one.attempt} {one.status}{verdict}{_seen(one)}")
        if one.message:
            out.line(f"       {one.kind + ': ' if one.kind else ''}{cell(one.message)}")
        if one.double_charge:
            out.line("       possible double charge")


def _seen(one: ModelTry) -> str:
    sent = {"no": "never left", "yes": "refused by the provider", "unknown": "may have been served"}[one.dispatched]
    status = f"  HTTP {one.http_status}" if one.http_status is not None else ""
    return f"  {sent}{status}" + (f"  request {one.request_id}" if one.request_id else "")


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
