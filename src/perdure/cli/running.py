"""Running workflows from the command line: ``run``, ``resume``, ``watch``. The run goes on in this process, and only it.

The first SIGINT or SIGTERM is a durable cancel. Whatever becomes of this process, the work stays owed: ``resume`` goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import click
import msgspec

from perdure import ids
from perdure.app import App
from perdure.app import workflows as hosting
from perdure.cli import failures
from perdure.cli.documents import document_options, load, warnings_of
from perdure.cli.loading import importable
from perdure.cli.opening import Id, address, author, opened, prepare_logging, read_value
from perdure.cli.output import Output, plain
from perdure.cli.settings import Settings
from perdure.cli.worker import Signals
from perdure.errors import Conflict, Invalid
from perdure.projections.workflow import TaskView, WorkflowView

_LOOK_SECONDS = 0.25
_WAITING = ("waiting_for_approval", "waiting_for_effect")


def _inputs(pairs: tuple[str, ...], text: str | None, file: str | None) -> dict[str, Any]:
    """Inputs of a command line: a file or an object, then single values, which are JSON or else text."""
    found: dict[str, Any] = {}
    raw = read_value(file, "inputs file") if file is not None else text.encode() if text is not None else b"{}"
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise Invalid(f"The inputs are no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise Invalid("The inputs are no object.", help='Give them like --inputs \'{"day": "2026-01-01"}\'.')
    found.update(value)
    for pair in pairs:
        name, equals, given = pair.partition("=")
        if not equals or not name:
            raise Invalid(f"--input {pair[:100]!r} is not KEY=VALUE.")
        try:
            found[name] = msgspec.json.decode(given)
        except msgspec.DecodeError:
            found[name] = given
    return found


@click.command("run")
@document_options
@click.option("--input", "pairs", multiple=True, metavar="K=V", help="One input; JSON, or else text.")
@click.option("--inputs", "text", metavar="JSON", help="All inputs, an object.")
@click.option("--inputs-file", metavar="F", help="All inputs, a JSON file; `-` reads standard input.")
@click.option("--key", type=Id("key"), metavar="K", help="The same key with the same inputs is the same run, for ever.")
@click.option(
    "--timeout-seconds", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Cancel it after N seconds."
)
@click.option("--check", is_flag=True, help="Change nothing; predict what each task would do.")
@click.option(
    "--diff/--no-diff", default=None, help="Whether results hold diffs of changed text. Default: as FILE says."
)
@click.option("--detach", is_flag=True, help="Only admit it; a worker or `perdure resume` runs it.")
@click.pass_context
def run_command(
    context: click.Context, file: str, workspace: str | None, files: tuple[str, ...], variables: tuple[str, ...],
    pairs: tuple[str, ...], text: str | None, inputs_file: str | None, key: str | None, timeout_seconds: float | None,
    check: bool, diff: bool | None, detach: bool,
) -> int:  # fmt: skip
    """Run the workflow FILE durably. Its run id is printed first, at once.

    Exit code: 0 completed; 2 the document is wrong; 3 denied, an approval is pending, or an outcome is unknown; 4 failed;
    5 the store; 130 cancelled.
    """
    settings = context.find_root().ensure_object(Settings)
    prepare_logging(settings)
    out = Output(settings)
    flow = load(file, workspace, files, variables)
    flow.compile()
    warnings_of(flow, out)
    inputs = _inputs(pairs, text, inputs_file)

    async def work() -> int:
        from perdure import app as apps

        async with apps.open(address(settings, create=True), workers=0, create=True) as app:
            receipt = await hosting.submit(app.host, flow, inputs, principal="local", key=key, check=check, diff=diff)
            _announce(receipt.run, out)
            if detach:
                out.final("Receipt", {"id": receipt.run, **plain(receipt)})
                return 0
            return await _attend(app, receipt.run, timeout_seconds, out)

    return asyncio.run(work())


def _announce(run: str, out: Output) -> None:
    """The run's id, first and at once."""
    out.record("Run", {"id": run, "event": "admitted"})
    if out.human:
        print(run, flush=True)


@click.command()
@click.argument("of_run", metavar="RUN", type=Id("run"))
@click.option(
    "--timeout-seconds", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Cancel it after N seconds."
)
@click.pass_context
def resume(context: click.Context, of_run: str, timeout_seconds: float | None) -> int:
    """Go on with RUN in this process. A dead owner's lease is waited out; a live owner is left alone, and named.

    Exit codes are those of `perdure run`.
    """
    settings = context.find_root().ensure_object(Settings)
    prepare_logging(settings)
    out = Output(settings)

    async def work() -> int:
        async with opened(settings) as app:
            view = await app.workflow(of_run)
            if view.settled_at is not None:
                raise Conflict(f"{view.run} is over: {view.state}.", help=f"See it: perdure inspect {view.run}")
            await _unowned(app, of_run, out)
            _announce(view.run, out)
            return await _attend(app, view.run, timeout_seconds, out)

    return asyncio.run(work())


async def _unowned(app: App, run: str, out: Output) -> None:
    """Wait until nobody owns a run's thread.

    Raises:
        Conflict: its owner lives: it renewed its lease.
    """
    first = None
    while True:
        found = app.ownership(run)
        now = app.host.clock.now()
        if found is None or found[1] <= now:
            return
        owner, until = found
        if first is not None and (owner, until) != first:
            when = plain(app.instant(until))
            raise Conflict(f"{run} is being worked on by {owner}, whose lease ends at {when} unless it is renewed.",
                           help=f"Watch it: perdure watch {run}")  # fmt: skip
        if first is None:
            out.note(f"Worker {owner} holds {run}; waiting whether it is alive.")
        first = (owner, until)
        await asyncio.sleep(min(_LOOK_SECONDS, max(0.01, (until - now) / 1_000_000)))


async def _attend(app: App, run: str, timeout: float | None, out: Output) -> int:
    """Work on a run until it settles or waits for a person; tell what happens meanwhile."""
    importable()
    signals = Signals()
    signals.watch()
    worker = app.attend(app.thread_number(run))
    progress = Progress(app, run, out)
    stopping = asyncio.ensure_future(_stop(app, run, signals, timeout))
    try:
        view = await progress.follow()
    finally:
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        await worker.stop()
        signals.leave()
    return told(view, out)


async def _stop(app: App, run: str, signals: Signals, timeout: float | None) -> None:
    """The first signal, or the end of the time, is a durable cancel."""
    reason = "a signal came"
    try:
        async with asyncio.timeout(timeout):
            await signals.first.wait()
    except TimeoutError:
        reason = f"it took more than {timeout:g} s (--timeout-seconds)"
    with contextlib.suppress(Conflict):
        await app.cancel(run, by=author(), reason=reason)


class Progress:
    """Tells what happens to a run as it happens: a live table on a terminal, lines elsewhere, envelopes in ``jsonl``."""

    def __init__(self, app: App, run: str, out: Output) -> None:
        self._app = app
        self._run = run
        self._out = out
        self._shown: dict[str, str] = {}
        self._live: Any = None

    async def follow(self, *, waits: bool = True) -> WorkflowView:
        """Until the run settles; or, with ``waits``, until only a person can move it."""
        app, thread = self._app, self._app.thread_of(self._run)
        with self._display():
            while True:
                waiting = app.host.until_progress(thread)
                try:
                    view = await app.workflow(self._run)
                    self._tell(view)
                    if view.settled_at is not None or (waits and held(view) and not app.decided(self._run)):
                        return view
                    await asyncio.wait([waiting], timeout=_LOOK_SECONDS)
                finally:
                    waiting.cancel()

    def _display(self) -> Any:
        if not (self._out.human and sys.stderr.isatty()):
            return contextlib.nullcontext()
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), refresh_per_second=8, transient=True)
        return self._live

    def _tell(self, view: WorkflowView) -> None:
        for task in view.tasks:
            if self._shown.get(task.id) == task.state or (task.state == "pending" and task.id not in self._shown):
                continue
            self._shown[task.id] = task.state
            self._out.record("Task", {"run": view.run, **plain(task)})
            if self._live is None and task.state != "pending":
                self._out.note(_line(task))
        if self._live is not None:
            self._live.update(_table(view))


def _line(task: TaskView) -> str:
    why = f": {task.failure.message}" if task.failure is not None else ""
    tries = f" (try {task.attempt})" if task.attempt > 1 else ""
    return f"{task.state:<21} {task.id}{tries}{why}"


def _table(view: WorkflowView) -> Any:
    from rich.table import Table
    from rich.text import Text

    colors = {"succeeded": "green", "failed": "red", "running": "cyan", "skipped": "dim", "cancelled": "dim"}
    done = sum(task.state in ("succeeded", "failed", "skipped", "cancelled") for task in view.tasks)
    spent = ", ".join(f"{b.unit} {b.used}{f'/{b.limit}' if b.limit else ''}" for b in view.budgets if b.used)
    table = Table(
        title=f"{view.workflow}  {done}/{len(view.tasks)}  {spent}", box=None, pad_edge=False, title_justify="left"
    )
    for heading in ("task", "state", "detail"):
        table.add_column(heading)
    open_first = [task for task in view.tasks if task.state not in ("succeeded", "skipped", "pending")]
    rest = [task for task in view.tasks if task.state in ("succeeded", "skipped")][-8:]
    for task in [*rest, *open_first][-30:]:
        why = task.failure.message if task.failure is not None else ""
        table.add_row(task.id, Text(task.state, style=colors.get(task.state, "yellow")), Text(why[:80]))
    return table


def held(view: WorkflowView) -> bool:
    """Whether only a person can move a run: something waits for one, and nothing else can go on."""
    if view.state not in ("suspended", "unknown"):
        return False
    open_tasks = [
        task for task in view.tasks if task.state not in ("pending", "succeeded", "failed", "skipped", "cancelled")
    ]
    return bool(open_tasks) and all(task.state in _WAITING for task in open_tasks)


def told(view: WorkflowView, out: Output) -> int:
    """Tell how a run stands at the end of a command; its exit code."""
    error = _error(view, out)
    data = {"id": view.run, **plain(view)}
    out.final("Run", data, error=error)
    if out.human:
        if view.state == "completed":
            print(msgspec.json.format(msgspec.json.encode(view.output), indent=2).decode(), flush=True)
        if error is not None:
            out.note(f"{error['message']} {error['help']}".rstrip())
    return int(error["exitCode"]) if error is not None else 0


def _error(view: WorkflowView, out: Output) -> dict[str, Any] | None:
    if view.state == "failed" and view.failure is not None:
        kind = view.failure.kind
        exits = failures.HELD if kind == "denied" else failures.FAILED
        code = {"denied": "denied", "budget": "budget"}.get(kind, "run_failed")
        return failures.error_body(code, view.failure.message, exits, run=view.run,
                                   help=out.settings.located(f"See perdure inspect {view.run}"))  # fmt: skip
    if view.state == "cancelled":
        return failures.error_body("run_cancelled", "The run was cancelled.", failures.CANCELLED, run=view.run)
    for task in view.tasks:
        if task.effect is not None:
            help = "Resolve it: " + out.settings.command(
                "effects", "reconcile", task.effect, "--verdict", "...", "--reason", "..."
            )
            said = f"Nobody knows whether task {task.id!r} took place (effect {task.effect})."
            return failures.error_body(
                "unknown_outcome", said, failures.HELD, run=view.run, help=f"{help}; then {_again(view, out)}"
            )
    for task in view.tasks:
        if task.approval is not None:
            help = "Decide: " + out.settings.command("approvals", "approve", task.approval, "--reason", "...")
            said = f"Task {task.id!r} waits for an approval ({task.approval})."
            return failures.error_body(
                "approval_pending", said, failures.HELD, run=view.run, help=f"{help}; then {_again(view, out)}"
            )
    return None


def _again(view: WorkflowView, out: Output) -> str:
    return out.settings.command("resume", view.run)


@click.command()
@click.argument("of_run", metavar="RUN", type=Id("run"))
@click.pass_context
def watch(context: click.Context, of_run: str) -> int:
    """Watch RUN until it settles, whatever process works on it. Works on nothing itself."""
    settings = context.find_root().ensure_object(Settings)
    prepare_logging(settings)
    out = Output(settings)

    async def work() -> int:
        async with opened(settings) as app:
            run = ids.run_id(ids.submission_of(of_run))
            view = await Progress(app, run, out).follow(waits=False)
        return told(view, out)

    return asyncio.run(work())
