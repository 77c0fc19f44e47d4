"""The command line's root: global options, the table of commands, and where a failure becomes an exit code.

Loads click and nothing else; a command's module is loaded when it is called. What a command returns is its exit code.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from perdure.cli.settings import Settings, calm, fill_streams, scan_output, silence_stdout

COMMANDS: dict[str, tuple[str, str]] = {
    "approvals": ("approvals:approvals", "List, approve or reject requests for approval."),
    "artifacts": ("artifacts:artifacts", "List, verify, export or collect files that tasks left."),
    "budget": ("artifacts:budget", "Show what a run has used of its budgets."),
    "cancel": ("runs:cancel", "Ask a run to end."),
    "check": ("check:check", "Judge a workflow, or what this build would do with open work."),
    "completion": ("about:completion", "Print a shell's completion script."),
    "demo": ("demo:demo", "See a worker killed in the middle of a side effect, and what happens next."),
    "doctor": ("documents:doctor", "Look whether this machine has what a workflow needs."),
    "effects": ("effects:effects", "List effects, show one, reconcile unknown ones."),
    "explain": ("documents:explain", "Explain a workflow, or why a run stands where it does."),
    "gc": ("artifacts:gc", "Remove what nothing refers to any more."),
    "graph": ("documents:graph", "Draw the tasks of a workflow or a run."),
    "inspect": ("runs:inspect", "Show a run: its turns or tasks, and its settlement."),
    "memory": ("memory:memory", "Read, keep and search long-term memory."),
    "models": ("models:models", "List the names of models, check whether one can be used."),
    "obligations": ("hosts:obligations", "List what is owed and what it waits for."),
    "plan": ("documents:plan_command", "Show what a workflow compiles to."),
    "recover": ("hosts:recover", "Recover abandoned threads now."),
    "redrive": ("hosts:redrive", "Try a stuck submission again."),
    "resume": ("running:resume", "Go on with a run of a workflow in this process."),
    "run": ("running:run_command", "Run a workflow."),
    "runs": ("runs:runs", "List runs."),
    "schema": ("documents:schema", "Print the JSON Schema of workflow documents."),
    "settlement": ("work:settlement", "Show how a submission settled, or where it stands."),
    "submit": ("work:submit", "Admit work for an agent."),
    "threads": ("threads:threads", "List threads, show or archive one."),
    "verify": ("hosts:verify", "Check logs, ledger and indexes against each other."),
    "version": ("about:version", "Print the version."),
    "watch": ("running:watch", "Watch a run of a workflow until it settles."),
    "worker": ("worker:worker", "Run agents and workflows until told to stop."),
}


def _keep(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is not None and parameter.name is not None:
        setattr(context.find_root().ensure_object(Settings), parameter.name, value)


def _shared(hidden: bool) -> list[click.Parameter]:
    """The global options: one list for the root, and one, not shown in help, for every command."""
    common: dict[str, Any] = {"callback": _keep, "expose_value": False, "hidden": hidden, "default": None}
    choice = click.Choice
    return [
        click.Option(
            ["--db"], metavar="PATH|URL", help="The store. Default: PERDURE_DB, else .perdure/perdure.db.", **common
        ),
        click.Option(["--output"], type=choice(["human", "json", "jsonl"]), help="Form of the results.", **common),
        click.Option(["--color"], type=choice(["auto", "always", "never"]), help="Colour of human output.", **common),
        click.Option(["--verbose"], is_flag=True, help="Show log lines, and tracebacks of failures.", **common),
    ]


def _adopt(command: click.Command) -> click.Command:
    """Let a command, and those inside it, take the global options too."""
    command.params.extend(_shared(hidden=True))
    command.epilog = "The options of `perdure` itself (--db, --output, --color, --verbose) may stand here too."
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            _adopt(inner)
    return command


class Root(click.Group):
    """Loads a command's module when the command is called, and not for ``--help``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one command, once."""
        if cmd_name not in COMMANDS:
            return None
        if cmd_name not in self.commands:
            (place, short) = COMMANDS[cmd_name]
            module, _, name = place.partition(":")
            found: click.Command = getattr(importlib.import_module(f"perdure.cli.{module}"), name)
            found.short_help = short
            self.commands[cmd_name] = _adopt(found)
        return self.commands[cmd_name]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but with every command to suggest from."""
        try:
            return super().resolve_command(ctx, args)
        except click.exceptions.NoSuchCommand as error:
            raise click.exceptions.NoSuchCommand(error.command_name, possibilities=list(COMMANDS), ctx=ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """As click does; a reader of stdout that went away is no failure."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            silence_stdout()
            return 0

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, without loading any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


cli = Root(
    name="perdure",
    params=_shared(hidden=False),
    help=(
        "Durable execution for AI agents and workflows.\n\n"
        "Work that was accepted is owed exactly one settlement, however many processes die on the way. "
        "Begin with `perdure demo`.\n\n"
        "Exit codes: 0 ok; 2 usage or validation; 3 denied, approval pending, unknown outcome; 4 run failed; "
        "5 persistence; 6 remote provider or protocol; 130 cancelled."
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    Args:
        arguments: the words after ``perdure``; those of this process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    settings = Settings()
    fill_streams()
    for stream in (sys.stdout, sys.stderr):
        calm(stream)
    try:
        code = cli.main(words, prog_name="perdure", standalone_mode=False, obj=settings)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        silence_stdout()
        return 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - told, and turned into an exit code
        if settings.output == "human":
            settings.output = scan_output(words)
        return importlib.import_module("perdure.cli.failures").report(error, settings)  # type: ignore[no-any-return]
