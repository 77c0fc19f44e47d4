"""``version`` and ``completion``."""

from __future__ import annotations

import platform

import click
from click.shell_completion import get_completion_class

import perdure
from perdure.cli.output import Output
from perdure.cli.settings import Settings


@click.command()
@click.pass_context
def version(context: click.Context) -> None:
    """Print the version."""
    out = Output(context.find_root().ensure_object(Settings))
    out.final("Version", {"version": perdure.__version__, "python": platform.python_version()})
    out.line(f"perdure {perdure.__version__}")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "fish", "zsh"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    bash  eval "$(perdure completion bash)"    in ~/.bashrc
    zsh   eval "$(perdure completion zsh)"     in ~/.zshrc
    fish  perdure completion fish | source     in ~/.config/fish/config.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    script = found(context.find_root().command, {}, "perdure", "_PERDURE_COMPLETE").source()
    out = Output(context.find_root().ensure_object(Settings))
    out.final("Completion", {"shell": shell, "script": script})
    out.line(script)
