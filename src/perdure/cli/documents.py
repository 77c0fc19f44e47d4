"""Workflow documents before they are run: ``plan``, ``explain``, ``doctor``, ``graph``, ``schema``. Nothing is dispatched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from perdure.cli import failures
from perdure.cli.opening import opened, run
from perdure.cli.output import Output, plain
from perdure.errors import Invalid

if TYPE_CHECKING:
    from perdure.workflow.dsl import Workflow
    from perdure.workflow.plan import EffectNeed, Plan


def document_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``FILE`` and what its compilation depends on."""
    for option in (
        click.option("--var", "variables", multiple=True, metavar="K=JSON", help="A variable; over every other layer."),
        click.option(
            "--vars-file", "files", multiple=True, metavar="F", help="A file of variables, over the document's."
        ),
        click.option("--workspace", metavar="DIR", help="The folder the run may see. Default: the document's."),
        click.argument("file"),
    ):
        command = option(command)
    return command


def load(file: str, workspace: str | None, files: tuple[str, ...], variables: tuple[str, ...]) -> Workflow:
    """The workflow of a command line.

    Raises:
        Invalid: as ``DocumentInvalid`` with every finding.
    """
    from perdure.workflow.dsl import Workflow

    given = {}
    for item in variables:
        name, equals, text = item.partition("=")
        if not equals or not name:
            raise Invalid(f"--var {item[:100]!r} is not KEY=JSON.", help="For example --var region='\"eu\"'.")
        try:
            given[name] = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise Invalid(f"The value of --var {name} is no JSON: {error}.", help="Quote text twice.") from error
    flow = Workflow.load(file, workspace=workspace, variables=given, variable_files=files)
    if workspace is not None:
        flow.base = Path(workspace).resolve()
    return flow


def _is_run(target: str) -> bool:
    """Whether a word means a run and no file."""
    return target.startswith(("run_", "sub_")) and not Path(target).exists()


def warnings_of(flow: Workflow, out: Output) -> list[dict[str, Any]]:
    """Tell people the warnings of a document; give programs all of them."""
    found = flow.compiled().warnings
    for one in found:
        out.note(str(one))
    return [msgspec.to_builtins(one) for one in found]


@click.command("plan")
@document_options
def plan_command(file: str, workspace: str | None, files: tuple[str, ...], variables: tuple[str, ...]) -> int:
    """Show what FILE compiles to: its tasks in order, what each touches, and what a run will need."""

    async def work(out: Output) -> None:
        flow = load(file, workspace, files, variables)
        plan = flow.compile()
        notes = warnings_of(flow, out)
        out.final("Plan", {"digest": plan.digest, **msgspec.to_builtins(plan)}, diagnostics=notes)
        if out.human:
            _say_plan(plan, out)

    return run(work)


def _say_plan(plan: Plan, out: Output) -> None:
    out.fields({"workflow": plan.name, "version": plan.version or None, "plan": plan.digest, "tasks": len(plan.order),
                "at once": plan.max_concurrency, "predictable": plan.predictability})  # fmt: skip
    out.line()
    items = []
    by_task: dict[str, list[EffectNeed]] = {}
    for need in plan.requirements.effects:
        by_task.setdefault(need.task, []).append(need)
    for id in plan.order:
        task, effects = plan.tasks[id], by_task.get(id, [])
        items.append({
            "id": id, "uses": task.uses if task.kind in ("action", "agent", "router") else task.kind,
            "needs": ", ".join(task.needs) or None, "predictable": task.predictability, "when": task.when,
            "effect": "; ".join(f"{need.kind}, {need.effect_class}" for need in effects) or None,
            "asks": "perhaps" if any(need.approval_possible for need in effects) else None,
        })  # fmt: skip
    columns = {"task": "id", "uses": "uses", "effect": "effect", "approval": "asks", "predictable": "predictable",
               "when": "when", "needs": "needs"}  # fmt: skip
    out.table(columns, items)
    needs = plan.requirements
    for provider in needs.providers:
        out.line(f"provider {provider.name} ({provider.kind}): {', '.join(provider.agents)}")
    if needs.tools:
        out.line(f"tools {', '.join(needs.tools)}")
    if needs.processes:
        out.line(f"processes {', '.join(needs.processes)}")


@click.command()
@document_options
def explain(file: str, workspace: str | None, files: tuple[str, ...], variables: tuple[str, ...]) -> int:
    """Explain FILE: the plan's digest, where each variable of each task comes from, what asks and what cannot be repeated.

    FILE may also be a run: then why it stands where it does.
    """

    async def work(out: Output) -> None:
        if _is_run(file):
            await _explain_run(file, out)
            return
        from perdure.workflow.variables import LAYERS

        flow = load(file, workspace, files, variables)
        plan, compiled = flow.compile(), flow.compiled()
        notes = warnings_of(flow, out)
        layers = {
            id: {
                name: LAYERS[layer - 1] if layer else "expansion" for name, layer in sorted(compiled.layers[id].items())
            }
            for id in plan.order
        }
        effects = plan.requirements.effects
        once = list(dict.fromkeys(need.task for need in effects if need.effect_class == "once"))
        asks = list(dict.fromkeys(need.task for need in effects if need.approval_possible))
        data = {"digest": plan.digest, "document": plan.document, "files": plan.files, "variables": layers, "once": once,
                "approvals": asks, "fingerprints": {id: plan.tasks[id].definition for id in plan.order}}  # fmt: skip
        out.final("Explanation", data, diagnostics=notes)
        if not out.human:
            return
        out.fields({"workflow": plan.name, "plan": plan.digest, "document": plan.document})
        for id in plan.order:
            shown = ", ".join(f"{name} from {layer}" for name, layer in layers[id].items())
            out.line(f"{id}: {shown or 'no variables'}")
        out.line(f"never repeated by itself (once): {', '.join(once) or 'nothing'}")
        out.line(f"may ask for approval: {', '.join(asks) or 'nothing'}")

    return run(work)


async def _explain_run(id: str, out: Output) -> None:
    async with opened(out.settings) as app:
        found = await app.explain(id)
    out.final("Explanation", {"id": found.submission, **plain(found)})
    if out.human:
        out.fields({"submission": found.submission, "decision": found.decision, "meaning": found.meaning})


@click.command()
@document_options
def doctor(file: str, workspace: str | None, files: tuple[str, ...], variables: tuple[str, ...]) -> int:
    """Look whether this machine has what FILE needs: credentials, programs, folders, images, extras. Sends nothing.

    Exit code 6 if something is missing. That a credential is there does not say that it is accepted.
    """

    async def work(out: Output) -> int:
        from perdure.cli.loading import importable
        from perdure.cli.readiness import needs

        importable()
        flow = load(file, workspace, files, variables)
        plan = flow.compile()
        notes = warnings_of(flow, out)
        items = [msgspec.to_builtins(need) for need in needs(plan, flow.base)]
        missing = [item for item in items if not item["ready"]]
        error = None
        if missing:
            said = f"{len(missing)} of {len(items)} needs are not met: {missing[0]['need']} ({missing[0]['detail']})."
            error = failures.error_body("not_ready", said, failures.REMOTE)
        for item in items:
            out.record("Need", item)
        out.final("Doctor", {"items": items}, error=error, diagnostics=notes)
        if out.human:
            out.table({"need": "need", "ready": "ready", "detail": "detail"}, items)
            if missing:
                out.note(f"{len(missing)} of {len(items)} needs are not met.")
        return failures.REMOTE if missing else 0

    return run(work)


@click.command()
@click.option("--format", "form", type=click.Choice(["mermaid", "svg"]), default="mermaid", help="Default: mermaid.")
@document_options
def graph(file: str, workspace: str | None, files: tuple[str, ...], variables: tuple[str, ...], form: str) -> int:
    """Draw the tasks of a workflow FILE, or of a run with the state of each."""

    async def work(out: Output) -> None:
        from perdure.workflow import graph as graphs

        states = None
        if not _is_run(file):
            flow = load(file, workspace, files, variables)
            plan, notes = flow.compile(), warnings_of(flow, out)
        else:
            async with opened(out.settings) as app:
                view, plan = await app.workflow(file), app.plan(file)
            states, notes = {task.id: task.state for task in view.tasks}, []
        text = graphs.mermaid(plan, states) if form == "mermaid" else graphs.svg(plan, states)
        out.final("Graph", {"format": form, "text": text}, diagnostics=notes)
        if out.human:
            click.echo(text, nl=False)

    return run(work)


@click.command()
def schema() -> int:
    """Print the JSON Schema of workflow documents, for editors."""

    async def work(out: Output) -> None:
        from perdure.workflow import schema as schemas

        found = schemas.schema()
        out.final("Schema", found)
        if out.human:
            click.echo(json.dumps(found, indent=2))

    return run(work)
