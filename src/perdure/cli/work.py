"""Admitting work and asking how it ended: ``submit`` and ``settlement``."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from perdure.app import App
from perdure.cli import failures
from perdure.cli.loading import app_of, app_option
from perdure.cli.opening import Id, opened, read_value, run
from perdure.cli.output import Output, plain
from perdure.clock import parse_duration
from perdure.errors import Invalid
from perdure.projections.effect import question
from perdure.projections.run import RunView


@click.command()
@click.argument("agent", type=Id("agent"))
@app_option()
@click.option("--thread", type=Id("thread"), metavar="T", help="Whose queue it joins. Default: a thread of its own.")
@click.option("--key", type=Id("key"), metavar="K", help="The same key with the same input is the same work, for ever.")
@click.argument("input")
def submit(agent: str, target: str, thread: str | None, key: str | None, input: str) -> int:
    """Admit INPUT for AGENT durably and print the receipt. Nothing runs here: a worker does that.

    INPUT is JSON, or plain text where the agent's input is text; `-` reads it from standard input.
    """

    async def work(out: Output) -> None:
        given = out.settings.db
        async with app_of(target, store=given, workers=0) as app:
            if app.address in ("memory:", ":memory:"):
                raise Invalid(
                    "A store in memory ends with this command, so nothing would be owed.", help="Name a file."
                )
            raw = _input(app, agent, input)
            receipt = await app.submit_json(agent, raw, thread=thread, key=key)
            then = out.settings.command("settlement", receipt.submission, "--wait", db=given or app.address)
        out.final("Receipt", {"id": receipt.submission, **plain(receipt)})
        out.line(
            f"Admitted {receipt.submission} as {receipt.run}: position {receipt.position} on thread {receipt.thread}."
        )
        out.note(f"See how it settles: {then}")

    return run(work)


def _input(app: App, agent: str, text: str) -> bytes:
    definition = app.agents.get(agent)
    raw = read_value("-", "input") if text == "-" else text.encode("utf-8", "surrogateescape")
    if definition is not None and definition.input_codec.is_text:
        try:
            return msgspec.json.encode(raw.decode())
        except UnicodeDecodeError as error:
            raise Invalid(f"The input is not UTF-8: byte {error.start + 1}.", help="Give text in UTF-8.") from None
    return raw


@click.command()
@click.argument("submission", type=Id("submission"))
@click.option("--wait", is_flag=True, help="Wait until it is settled.")
@click.option(
    "--timeout", metavar="DURATION", help="With --wait: how long, for example 30s. The work goes on after it."
)
def settlement(submission: str, wait: bool, timeout: str | None) -> int:
    """Show how SUBMISSION settled, or where it stands.

    Exit code: 0 completed, or on its way; 3 an approval is pending or an outcome unknown; 4 failed; 130 cancelled.
    """
    if timeout is not None and not wait:
        raise click.UsageError("--timeout stands beside --wait.")
    if timeout is not None:
        parse_duration(timeout, "--timeout")

    async def work(out: Output) -> int:
        async with opened(out.settings) as app:
            if wait:
                await _waited(app, submission, timeout, out)
            view = await app.inspect(submission)
            blocker = None if view.status else await _blocker(app, view, out)
        return _told(view, blocker, out)

    return run(work)


async def _waited(app: App, submission: str, timeout: str | None, out: Output) -> None:
    try:
        await app.settlement(submission, timeout=0)
    except TimeoutError:
        blocker = await _blocker(app, await app.inspect(submission), out)
        if blocker is not None:
            out.note(f"{blocker['message']} {blocker['help']}")
        try:
            await app.settlement(submission, timeout=timeout)
        except TimeoutError:
            raise TimeoutError(f"{submission} was not settled within {timeout}.") from None


async def _blocker(app: App, view: RunView, out: Output) -> dict[str, Any] | None:
    """What only a person can move, if a run waits for that."""
    unknown = [effect for effect in await app.effects(status="unknown", run=view.run) if effect.open]
    if unknown:
        return failures.error_body(
            "unknown_outcome",
            f"Nobody knows whether {question(unknown[0].operation, unknown[0].call, unknown[0].step)}.",
            failures.HELD,
            help=f"See {out.settings.command('effects', 'list', view.run, '--status', 'unknown')}",
            run=view.run,
        )
    asked = [request for request in await app.approvals(run=view.run) if not request.decided]
    if asked:
        return failures.error_body(
            "approval_pending",
            f"{asked[0].tool} asks a person for approval.",
            failures.HELD,
            help=f"See {out.settings.command('approvals', 'list', view.run)}",
            run=view.run,
        )
    return None


def _told(view: RunView, blocker: dict[str, Any] | None, out: Output) -> int:
    error = blocker
    if view.failure is not None:
        error = failures.error_body("run_failed", view.failure.message, failures.FAILED, run=view.run)
    elif view.status == "cancelled":
        error = failures.error_body("run_cancelled", "The run was cancelled.", failures.CANCELLED, run=view.run)
    data = {
        "id": view.submission, "submission": view.submission, "run": view.run, "thread": view.thread,
        "agent": view.agent, "state": view.state, "status": view.status, "failure": view.failure,
        "disposition": view.disposition, "output": view.output, "settledAt": view.settled_at,
    }  # fmt: skip
    out.final("Settlement", data, error=error)
    if out.human:
        out.fields({
            "submission": view.submission, "run": view.run, "thread": view.thread, "agent": view.agent,
            "status": view.status or view.state, "disposition": view.disposition,
            "failure": f"{view.failure.kind}: {view.failure.message}" if view.failure else None,
        })  # fmt: skip
        if view.status == "completed":
            out.line(f"output  {msgspec.json.encode(view.output).decode()}")
        if blocker is not None:
            out.note(f"{blocker['message']} {blocker['help']}")
        elif view.state in ("unknown", "suspended"):
            out.note("What was decided is recorded; the next worker on its thread takes it from there.")
    return int(error["exitCode"]) if error is not None else 0
