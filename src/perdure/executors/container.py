"""Processes in a container, where docker or podman is; a clear refusal where neither is. There is no way around it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from perdure.definitions.workflow import Action, Container
from perdure.errors import Invalid

_INSPECT_SECONDS = 10.0


def _settings(action: Action) -> Container:
    if action.container is None:
        raise Invalid("isolation is `container`, and there is no container block.", help="Name its image by digest.")
    return action.container


def engine(settings: Container) -> str:
    """The engine that is used.

    Raises:
        Invalid: there is none here.
    """
    wanted = ("docker", "podman") if settings.runtime == "auto" else (settings.runtime,)
    for name in wanted:
        found = shutil.which(name)
        if found is not None:
            return found
    raise Invalid(
        f"The action runs in a container, and {' or '.join(wanted)} is not installed here.",
        help="Install one of them, or use `isolation: process`, which is no sandbox.",
    )


def require(action: Action) -> None:
    """Look before anything is recorded: the engine answers and has the image. Blocks.

    Raises:
        Invalid: it does not.
    """
    settings = _settings(action)
    found = subprocess.run(
        [engine(settings), "image", "inspect", settings.image],
        capture_output=True,
        timeout=_INSPECT_SECONDS,
        check=False,
    )
    if found.returncode:
        raise Invalid(f"The image {settings.image} is not here, and images are never pulled.", help="Pull it first.")


def argv(action: Action, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> list[str]:
    """The command that runs ``command`` in a container: no network, nothing to write but ``/tmp``, no rights."""
    settings = _settings(action)
    words = [
        engine(settings), "run", "--rm", "--interactive", "--pull=never", "--network=none", "--read-only",
        "--user=65532:65532", "--cap-drop=ALL", "--security-opt=no-new-privileges",
        f"--memory={settings.memory_limit_bytes}", f"--cpus={settings.cpu_limit_millis / 1000:g}",
        f"--pids-limit={settings.pids_limit}", "--tmpfs=/tmp:rw,noexec,nosuid,size=16m",
        f"--volume={cwd}:/workspace:ro", "--workdir=/workspace",
    ]  # fmt: skip
    for name, value in env.items():
        words.append(f"--env={name}={value}")
    return [*words, settings.image, *command]
