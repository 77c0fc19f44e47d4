"""How failures are told: one sentence for people, one envelope for programs, one exit code for both."""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Any

import click

from perdure import errors
from perdure.cli.output import clean, envelope, write_json
from perdure.cli.settings import Settings, silence_stdout

USAGE, HELD, FAILED, PERSISTENCE, REMOTE, CANCELLED = 2, 3, 4, 5, 6, 130
INTERNAL = 1

_EXITS: tuple[tuple[type[BaseException], int, str], ...] = (
    (errors.RunFailed, FAILED, "run_failed"),
    (errors.RunCancelled, CANCELLED, "run_cancelled"),
    (errors.Denied, HELD, "denied"),
    (errors.Unknown, HELD, "unknown"),
    (errors.ApprovalSuspensionError, HELD, "approval_suspension"),
    (errors.Corrupt, PERSISTENCE, "corrupt"),
    (errors.Incompatible, PERSISTENCE, "incompatible"),
    (errors.Unavailable, PERSISTENCE, "unavailable"),
    (errors.OwnershipLost, PERSISTENCE, "ownership_lost"),
    (errors.Conflict, USAGE, "conflict"),
    (errors.Invalid, USAGE, "invalid"),
    (click.ClickException, USAGE, "usage"),
    (KeyboardInterrupt, CANCELLED, "interrupted"),
    (click.Abort, CANCELLED, "interrupted"),
    (TimeoutError, HELD, "timeout"),
    (OSError, PERSISTENCE, "unavailable"),
)


class Stop(Exception):
    """Ends a command whose results are told already, with an exit code other than 0."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def exit_code(error: BaseException) -> tuple[int, str]:
    """Exit code and error code of a failure."""
    if getattr(error, "code", None) == "model":  # a provider's, known without loading one
        return REMOTE, "model"
    return next(((exits, code) for kind, exits, code in _EXITS if isinstance(error, kind)), (INTERNAL, "internal"))


def error_body(code: str, message: str, exits: int, *, help: str = "", run: str | None = None) -> dict[str, Any]:
    """The ``error`` of an envelope."""
    return {"code": code, "message": message, "help": help, "exitCode": exits, "run": run}


def report(error: BaseException, settings: Settings) -> int:
    """Tell a failure and return its exit code."""
    if isinstance(error, Stop):
        return error.code
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return USAGE
    causes = list(_leaves(error))
    exits, code = exit_code(causes[0])
    if settings.verbose:
        traceback.print_exception(error, file=sys.stderr)
    told = [_told(cause, settings) for cause in causes]
    findings = [one for cause in causes for one in getattr(cause, "diagnostics", ())]
    if findings and all(one.code == "policy_denied" for one in findings if one.severity == "error"):
        exits, code = HELD, "denied"
    try:
        if settings.human:
            for one in findings:
                print(clean(str(one), lines=True), file=sys.stderr)
            count = sum(one.severity == "error" for one in findings)
            if count:  # each is told already
                told = [(f"{count} {'finding' if count == 1 else 'findings'} in {findings[0].file}.", "")]
            _say(told, causes[0], settings)
        else:
            body = error_body(code, told[0][0], exits, help=told[0][1], run=getattr(error, "run", None))
            notes = [_diagnostic(cause, *words) for cause, words in zip(causes, told, strict=True)]
            notes = [_finding(one) for one in findings] or notes
            write_json(envelope("Error", {}, error=body, diagnostics=notes))
    except BrokenPipeError:
        silence_stdout()
    except OSError:  # what should hold the envelope takes nothing, such as a full disk
        silence_stdout()
        with contextlib.suppress(OSError):
            _say(told, causes[0], settings)
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # what it still holds can go nowhere; the interpreter would try again at its end
        silence_stdout()
    return exits


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _told(error: BaseException, settings: Settings) -> tuple[str, str]:
    """What was wrong, and what to do next."""
    match error:
        case errors.Error():
            return error.message or type(error).__name__, settings.pointed(error.help)
        case click.exceptions.NoSuchOption(option_name="--version"):
            return error.message, "Run `perdure version`."
        case click.exceptions.NoSuchOption() | click.exceptions.NoSuchCommand():
            near = f" Did you mean '{error.possibilities[0]}'?" if error.possibilities else ""
            return f"{error.message}{near}", f"See `{error.ctx.command_path if error.ctx else 'perdure'} --help`."
        case click.ClickException():
            where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "perdure"
            return error.format_message(), f"See `{where} --help`."
        case KeyboardInterrupt() | click.Abort():
            return "Interrupted.", ""
        case TimeoutError():
            return str(error) or "It took too long.", "The work goes on."
        case OSError():
            return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}.", ""
        case _:
            return (
                f"Unexpected {type(error).__name__}: {error}",
                "Run it again with --verbose and report what it shows.",
            )


def _say(told: list[tuple[str, str]], first: BaseException, settings: Settings) -> None:
    word = "perdure:" if isinstance(first, (KeyboardInterrupt, click.Abort)) else "Error:"
    shown = click.style(word, fg="red", bold=True) if settings.colored(sys.stderr) else word
    for message, help in told:
        print(f"{shown} {clean(message, lines=True)}".rstrip(), file=sys.stderr)
        if help:
            print(f"  {clean(help, lines=True)}", file=sys.stderr)


def _diagnostic(error: BaseException, message: str, help: str) -> dict[str, Any]:
    return {
        "code": exit_code(error)[1], "severity": "error", "file": None, "line": None, "column": None, "path": None,
        "message": message, "help": help,
    }  # fmt: skip


def _finding(one: Any) -> dict[str, Any]:
    return {
        name: getattr(one, name) for name in ("code", "severity", "file", "line", "column", "path", "message", "help")
    }
