"""Effects: list them, show one, and give the verdict that only a person can give."""

from __future__ import annotations

from typing import Any

import click

from perdure import canonical
from perdure.cli.opening import Id, check_reason, opened, read_value, reason_option, run
from perdure.cli.output import Output, cell, plain
from perdure.cli.settings import Settings
from perdure.definitions.verdicts import Applied, CancelRun, NotApplied, SafeToRetry, Verdict
from perdure.errors import Invalid, Refused
from perdure.projections.effect import Effect, question

VERDICTS = {
    "applied": "if it took place",
    "refused": "if it was refused",
    "not-applied": "if it did not take place, to try again",
    "safe-to-retry": "if trying again is harmless either way",
    "cancel-run": "to give the run up",
}


@click.group(invoke_without_command=True)
@click.pass_context
def effects(context: click.Context) -> object:
    """List effects, show one, reconcile unknown ones. Without a command: list.

    An effect is one recorded touch of the outside world. Its outcome is unknown when a crash hid it; then it waits
    for a verdict and is never repeated by itself.
    """
    return context.invoke(list_) if context.invoked_subcommand is None else None


@effects.command("list")
@click.argument("of_run", metavar="[RUN]", required=False, type=Id("run"))
@click.option(
    "--status", type=click.Choice(["started", "confirmed", "refused", "unknown"]),
    help="Only these; unknown: those that wait for a verdict.",
)  # fmt: skip
def list_(of_run: str | None, status: str | None) -> int:
    """List effects, oldest first; of RUN, which may be a run or a submission."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = await app.effects(status=status, run=of_run)
        items = [_item(effect, out.settings) for effect in found]
        columns = {"id": "id", "tool": "operation", "status": "status", "class": "effectClass", "run": "run",
                   "started": "startedAt", "arguments": "arguments"}  # fmt: skip
        shown = "No effect waits for a verdict." if status == "unknown" else "No effects."
        out.listing("Effect", items, columns, empty=shown)
        for effect in found:
            if effect.open or effect.decided:
                out.line()
                _say_commands(effect, out)

    return run(work)


@effects.command()
@click.argument("effect", type=Id("effect"))
def show(effect: str) -> int:
    """Show one effect with its arguments, result and verdict."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = await app.effect(effect)
        item = _item(found, out.settings)
        out.final("Effect", item)
        if out.human:
            out.fields({name: value for name, value in item.items() if name not in ("commands", "resolve", "open")})
            if found.open or found.decided:
                _say_commands(found, out)

    return run(work)


@effects.command()
@click.argument("effect", type=Id("effect"))
@click.option("--verdict", required=True, type=click.Choice([*VERDICTS, "compensated"]), help="What happened.")
@reason_option
@click.option(
    "--result-file", metavar="F",
    help="With applied: the call's result as JSON, of a model call its answer as a JSON string; `-` is standard input.",
)  # fmt: skip
@click.option("--evidence-file", metavar="F", help="What convinced you, as JSON; recorded with the verdict.")
@click.option("--compensation-effect", metavar="E2", type=Id("effect"), help="With compensated: what reversed it.")
def reconcile(
    effect: str,
    verdict: str,
    reason: str,
    by: str,
    result_file: str | None,
    evidence_file: str | None,
    compensation_effect: str | None,
) -> int:
    """Give the verdict on an effect of unknown outcome. It is appended, with author, reason and evidence."""
    check_reason(reason)
    if verdict == "compensated" or compensation_effect is not None:
        raise Invalid(
            "The verdict compensated is not part of this release.",
            help="Record what you know with applied or refused, and reverse it outside.",
        )
    if result_file is not None and verdict != "applied":
        raise Invalid("--result-file stands beside --verdict applied only.")

    async def work(out: Output) -> None:
        given = _verdict(verdict, reason, result_file)
        evidence = None if evidence_file is None else _json(evidence_file, "evidence")
        async with opened(out.settings) as app:
            await app.reconcile(effect, given, by=by, reason=reason, evidence=evidence)
            after = await app.effect(effect)
        out.final("Reconciliation", {"id": effect, "run": after.run, "verdict": verdict, "by": by, "reason": reason})
        out.line(f"Recorded for {effect}: {verdict}, by {by}. The next worker on its thread takes it from there.")

    return run(work)


def _verdict(name: str, reason: str, result_file: str | None) -> Verdict:
    match name:
        case "applied":
            return Applied(None if result_file is None else _json(result_file, "result"))
        case "refused":
            return Refused(reason)
        case "not-applied":
            return NotApplied(reason)
        case "safe-to-retry":
            return SafeToRetry(reason)
        case _:
            return CancelRun(reason)


def _json(path: str, what: str) -> Any:
    return canonical.decode(read_value(path, f"{what} file"), f"The {what} in {path}")


def commands(effect: Effect, settings: Settings) -> dict[str, str]:
    """The exact command for each verdict on an effect; the reason is yours to write, and what a model answered."""
    found = {
        name: settings.command("effects", "reconcile", effect.id, "--verdict", name, "--reason", "why")
        for name in VERDICTS
    }
    if effect.of_model:
        found["applied"] += " --result-file answer.json"
    return found


def _item(effect: Effect, settings: Settings) -> dict[str, Any]:
    item: dict[str, Any] = {**plain(effect), "open": effect.open}
    if effect.open:
        item["commands"] = commands(effect, settings)
    return item


def _say_commands(effect: Effect, out: Output) -> None:
    if effect.decided:
        out.line(f"{effect.id}: a verdict is recorded; the next worker on its thread takes it from there.")
        return
    about = f"{effect.operation} {cell(effect.arguments)} took place"
    if effect.of_model:
        about = question(effect.operation, effect.call)
    out.line(f"{effect.id}: nobody knows whether {about} ({effect.reason}).")
    if effect.wire is not None and effect.wire.request_id:
        out.line(f"  The provider calls it {effect.wire.request_id}.")
    if effect.held:
        out.line("  Its body still runs in a worker's thread; a verdict is accepted when it ended.")
    found = commands(effect, out.settings)
    width = max(len(when) for when in VERDICTS.values())
    for name, when in VERDICTS.items():
        out.line(f"  {when.ljust(width)}  {found[name]}")
