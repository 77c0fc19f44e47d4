"""For whoever is on duty: what is owed, recovery, redrive and verification."""

from __future__ import annotations

import click

from perdure.cli import failures
from perdure.cli.opening import Id, author, opened, run
from perdure.cli.output import Output, plain
from perdure.projections.audit import ThreadCheck


@click.command()
@click.option("--aging", default="5m", metavar="DURATION", help="How old counts as aging. Default: 5m.")
@click.option("--overdue", default="1h", metavar="DURATION", help="How old counts as overdue. Default: 1h.")
def obligations(aging: str, overdue: str) -> int:
    """List every owed submission, also those in good order, with what it waits for and the command that helps."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = await app.obligations(aging=aging, overdue=overdue)
        items = [
            {"id": one.submission, **plain(one), "age": f"{one.age_seconds:.0f} s", "waits": one.blocked_on or "turn"}
            for one in found
        ]
        columns = {"submission": "id", "agent": "agent", "thread": "thread", "state": "state", "waits for": "waits",
                   "age": "age", "severity": "severity", "why": "detail"}  # fmt: skip
        out.listing("Obligation", items, columns, empty="Nothing is owed.")
        for command in dict.fromkeys(one.command for one in found if one.command):
            out.line(f"  {out.settings.located(command)}")

    return run(work)


@click.command()
@click.option("--thread", type=Id("thread"), metavar="T", help="Only this thread.")
def recover(thread: str | None) -> int:
    """Recover abandoned threads now: mark what nobody knows, repair what records allow. Runs no work."""

    async def work(out: Output) -> int:
        async with opened(out.settings) as app:
            done = await app.recover(thread=thread)
        faults = [plain(fault) for fault in done.faults]
        for fault in done.faults:
            out.note(f"Thread {fault.thread_id} is blocked: {fault.kind}: {fault.message}")
        error = None
        if faults:
            message = f"{len(faults)} of the threads cannot be recovered."
            error = failures.error_body("blocked", message, failures.PERSISTENCE, help="Run `perdure verify`.")
        items = [{"id": one.submission, **plain(one)} for one in done.reports]
        for item in items:
            out.record("Recovery", item)
        out.final("RecoveryList", {"items": items, "faults": faults}, error=error)
        if out.human and items:
            out.table({"submission": "id", "thread": "thread", "decision": "decision", "meaning": "meaning"}, items)
        elif not faults:
            out.note("No thread needs recovery.")
        return failures.PERSISTENCE if faults else 0

    return run(work)


@click.command()
@click.argument("submission", type=Id("submission"))
@click.option("--by", type=Id("by"), default=author, metavar="WHO", help="Who asks. Default: you.")
@click.option("--reason", default="", metavar="TEXT", help="Why.")
def redrive(submission: str, by: str, reason: str) -> int:
    """Try a stuck SUBMISSION again, as recovery would."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            done = await app.redrive(submission, by=by, reason=reason)
        out.final("Redrive", {"id": submission, "redriven": done})
        out.line(
            f"{submission} is due now; the next worker takes it."
            if done
            else f"{submission} is settled or a live worker has it; nothing was changed."
        )

    return run(work)


@click.command()
@click.option("--thread", type=Id("thread"), metavar="T", help="Only this thread.")
def verify(thread: str | None) -> int:
    """Check logs, chain, ledger and indexes against each other. Writes nothing; exit code 5 if a check fails."""

    async def work(out: Output) -> int:
        async with opened(out.settings) as app:
            found = await app.verify(thread)
        failed = found.failed()
        error = None
        if failed:
            help = "Restore the database from a backup." if not thread else "Run `perdure verify` over everything."
            error = failures.error_body("corrupt", _where(failed[0]), failures.PERSISTENCE, help=help)
        items = [{"id": check.name, **plain(check)} for check in found.checks]
        for item in items:
            out.record("Check", item)
        out.final(
            "Verification",
            {"passed": not failed, "threads": found.threads, "records": found.records, "items": items},
            error=error,
        )
        for check in failed:
            out.line(f"failed: {_where(check)}")
        passed = sum(check.status == "passed" for check in found.checks)
        skipped = sum(check.status == "skipped" for check in found.checks)
        rest = f", {skipped} skipped" if skipped else ""
        shown = f"{len(failed)} failed, " if failed else ""
        out.line(f"{shown}{passed} checks passed{rest}; {found.records} records in {found.threads} threads.")
        return failures.PERSISTENCE if failed else 0

    return run(work)


def _where(check: ThreadCheck) -> str:
    where = f" on thread {check.thread}" if check.thread is not None else ""
    return f"{check.name}{where}: {check.detail}"
