"""Bodies that fail in ways that tests want; each call is remembered in ``flows.calls``."""

from __future__ import annotations

from typing import Any

import perdure as p
from support.flows import calls


def flaky(fails: int, perdure_key: str = "") -> int:
    """Fails so many times, then gives its number of calls."""
    calls.append({"key": perdure_key})
    if len(calls) <= fails:
        raise p.Refused("not yet")
    return len(calls)


def lost(perdure_key: str = "") -> Any:
    """Nobody knows what came of it."""
    calls.append({"key": perdure_key})
    raise p.Unknown("the line went dead")


def lost_once(perdure_key: str = "") -> Any:
    """Nobody knows what came of the first call; the second gives 1."""
    calls.append({"key": perdure_key})
    if len(calls) == 1:
        raise p.Unknown("the line went dead")
    return 1
