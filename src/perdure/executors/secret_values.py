"""Secrets of actions: read when they are needed, within what the policy allows, and taken out of everything that is kept."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from perdure.definitions.context import Secret
from perdure.definitions.workflow import Policy, SecretRef
from perdure.errors import Denied, Invalid

REDACTED = "[REDACTED]"
_SHORT = 4  # characters; a shorter secret would be found everywhere


def reveal(ref: SecretRef, policy: Policy, root: Path, *, allowed: bool = False) -> str:
    """The secret that a reference names.

    Args:
        allowed: an environment variable needs no entry in ``environmentAllowlist`` (a provider's own key).

    Raises:
        Denied: the policy does not let it be read. Invalid: it cannot be had.
    """
    if ref.env is not None:
        if not allowed and ref.env not in policy.environment_allowlist:
            raise Denied(f"environmentAllowlist does not name {ref.env!r}.")
        return Secret.env(ref.env).reveal()
    if ref.file is not None:
        path = Path(root, ref.file).resolve()
        roots = [Path(root, folder).resolve() for folder in policy.secret_file_roots]
        if not any(path.is_relative_to(folder) for folder in roots):
            raise Denied(f"The secret file {ref.file!r} is under no folder of secretFileRoots.")
        return Secret.file(path).reveal()
    if ref.process is not None:
        if os.path.basename(ref.process.command) not in policy.secret_process_allowlist:  # noqa: PTH119 - a word, no path
            raise Denied(f"secretProcessAllowlist does not name {ref.process.command!r}.")
        process = ref.process
        return Secret.process(process.command, *process.args, timeout=process.timeout_seconds).reveal()
    raise Invalid("A secret reference names no place.", help="Give one of env, file or process.")


def texts(given: Mapping[str, SecretRef | str], policy: Policy, root: Path) -> tuple[dict[str, str], list[str]]:
    """Named texts and secrets as values, and the secrets among them."""
    values: dict[str, str] = {}
    found: list[str] = []
    for name, item in given.items():
        if isinstance(item, str):
            values[name] = item
        else:
            values[name] = reveal(item, policy, root)
            found.append(values[name])
    return values, found


def without(text: str, known: Iterable[str]) -> str:
    """Text with every known secret taken out."""
    for secret in sorted(known, key=len, reverse=True):
        if len(secret) >= _SHORT:
            text = text.replace(secret, REDACTED)
    return text


def shown(given: Mapping[str, SecretRef | str]) -> dict[str, Any]:
    """Named texts and secrets as they may be stored: of a secret only its place."""
    return {
        name: item
        if isinstance(item, str)
        else {"secret": next(k for k in ("env", "file", "process") if getattr(item, k))}
        for name, item in given.items()
    }
