"""Requests for approval: list them, approve or reject one."""

from __future__ import annotations

import click

from perdure.cli.opening import Id, check_reason, opened, reason_option, run
from perdure.cli.output import Output, plain


@click.group(invoke_without_command=True)
@click.pass_context
def approvals(context: click.Context) -> object:
    """List, approve or reject requests for approval. Without a command: list.

    A decision holds for the exact arguments asked for, once.
    """
    return context.invoke(list_) if context.invoked_subcommand is None else None


@approvals.command("list")
@click.argument("of_run", metavar="[RUN]", required=False, type=Id("run"))
@click.option("--all", "everything", is_flag=True, help="Also those that are decided.")
def list_(of_run: str | None, everything: bool) -> int:
    """List what waits for a decision, oldest first; of RUN, which may be a run or a submission."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = await app.approvals(status=None if everything else "pending", run=of_run)
        columns = {
            "id": "id",
            "tool": "tool",
            "call": "call",
            "status": "status",
            "run": "run",
            "asked": "askedAt",
            "arguments": "arguments",
        }
        out.listing("Approval", [plain(one) for one in found], columns, empty="Nothing waits for a decision.")
        for one in found:
            if one.status == "pending" and one.decided:
                out.line(f"  {one.id}: a decision is recorded; the next worker on its thread takes it from there.")
            elif one.status == "pending":
                out.line(f"  {out.settings.command('approvals', 'approve', one.id, '--reason', 'why')}")

    return run(work)


@approvals.command()
@click.argument("request", type=Id("approval"))
@reason_option
def approve(request: str, reason: str, by: str) -> int:
    """Approve REQUEST for its exact arguments; the call then runs."""
    return _decide(request, "approve", reason, by)


@approvals.command()
@click.argument("request", type=Id("approval"))
@reason_option
def reject(request: str, reason: str, by: str) -> int:
    """Reject REQUEST; the call never runs and the model is told."""
    return _decide(request, "reject", reason, by)


def _decide(request: str, decision: str, reason: str, by: str) -> int:
    check_reason(reason)

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            decide = app.approve if decision == "approve" else app.reject
            decided = await decide(request, by=by, reason=reason)
        out.final("Approval", plain(decided))
        out.line(f"{decided.status.capitalize()} by {decided.by}: {decided.tool} of {decided.run}.")

    return run(work)
