"""Workflow documents before they are run: ``plan``, ``explain``, ``doctor``, ``graph``, ``schema``. Nothing is dispatched."""

from __future__ import annotations

import json
import os
import shutil
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
    from perdure.workflow.plan import Plan


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
    effects = {need.task: need for need in plan.requirements.effects}
    out.fields({"workflow": plan.name, "version": plan.version or None, "plan": plan.digest, "tasks": len(plan.order),
                "at once": plan.max_concurrency, "predictable": plan.predictability})  # fmt: skip
    out.line()
    items = []
    for id in plan.order:
        task, need = plan.tasks[id], effects.get(id)
        items.append({
            "id": id, "uses": task.uses if task.kind in ("action", "agent", "router") else task.kind,
            "needs": ", ".join(task.needs) or None, "effect": f"{need.kind}, {need.effect_class}" if need else None,
            "asks": "perhaps" if need and need.approval_possible else None, "when": task.when,
        })  # fmt: skip
    out.table(
        {"task": "id", "uses": "uses", "effect": "effect", "approval": "asks", "when": "when", "needs": "needs"}, items
    )
    needs = plan.requirements
    for provider in needs.providers:
        out.line(f"provider {provider.name} ({provider.kind}): {', '.join(provider.agents)}")
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
            id: {name: LAYERS[layer - 1] for name, layer in sorted(compiled.layers[id].items())} for id in plan.order
        }
        once = [need.task for need in plan.requirements.effects if need.effect_class == "once"]
        asks = [need.task for need in plan.requirements.effects if need.approval_possible]
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
    """Look whether this machine has what FILE needs: credentials, programs, folders, engines. Sends and starts nothing.

    Exit code 6 if something is missing. That a credential is there does not say that it is accepted.
    """

    async def work(out: Output) -> int:
        flow = load(file, workspace, files, variables)
        plan = flow.compile()
        items = list(_needs(plan, flow.base))
        missing = [item for item in items if not item["ready"]]
        error = None
        if missing:
            error = failures.error_body(
                "not_ready", f"{len(missing)} of {len(items)} needs are not met.", failures.REMOTE
            )
        for item in items:
            out.record("Need", item)
        out.final("Doctor", {"items": items}, error=error)
        if out.human:
            if items:
                out.table({"need": "need", "ready": "ready", "detail": "detail"}, items)
            else:
                out.note("It needs nothing of this machine.")
        return failures.REMOTE if missing else 0

    return run(work)


_KEYS = {
    "openai": "OPENAI_API_KEY",
    "azure_openai": "AZURE_OPENAI_API_KEY",
    "anthropic": "ANTHROPIC_API_KEY",
    "google": "GEMINI_API_KEY",
}


def _needs(plan: Plan, base: Path) -> Any:
    for need in plan.requirements.providers:
        provider = plan.providers[need.name]
        ref = provider.credential
        name = ref.env if ref is not None else _KEYS.get(provider.kind)
        if name is not None:
            ready = bool(os.environ.get(name))
            yield {
                "need": f"credential of provider {need.name}",
                "ready": ready,
                "detail": f"environment variable {name}",
            }
    for command in plan.requirements.processes:
        found = shutil.which(command) or (str(base / command) if os.access(base / command, os.X_OK) else None)
        yield {"need": f"program {command}", "ready": found is not None, "detail": found or "not found"}
    if any(action.isolation == "container" for action in plan.actions.values()):
        engine = shutil.which("docker") or shutil.which("podman")
        yield {"need": "docker or podman", "ready": engine is not None, "detail": engine or "neither is installed"}
    for folder in plan.policy.writable_roots:
        path = base / folder
        parent = next(p for p in (path, *path.parents) if p.exists())
        yield {"need": f"writable {folder}", "ready": os.access(parent, os.W_OK), "detail": str(path)}


@click.command()
@click.argument("target", metavar="FILE|RUN")
@click.option("--format", "form", type=click.Choice(["mermaid", "svg"]), default="mermaid", help="Default: mermaid.")
def graph(target: str, form: str) -> int:
    """Draw the tasks of a workflow FILE, or of a RUN with the state of each."""

    async def work(out: Output) -> None:
        from perdure.workflow import graph as graphs

        states = None
        if not _is_run(target):
            plan = load(target, None, (), ()).compile()
        else:
            async with opened(out.settings) as app:
                view, plan = await app.workflow(target), app.plan(target)
            states = {task.id: task.state for task in view.tasks}
        text = graphs.mermaid(plan, states) if form == "mermaid" else graphs.svg(plan, states)
        out.final("Graph", {"format": form, "text": text})
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
