"""Executors: who performs the actions of workflows. Adapters of ``ports.executor``; they know no engine."""

from __future__ import annotations

from perdure.executors.http import Http
from perdure.executors.process import Processes
from perdure.executors.python import Functions
from perdure.executors.workspace import Files
from perdure.ports.executor import Executor


def executors() -> dict[str, Executor]:
    """Every executor that needs nothing but this package, by the kinds it performs."""
    made: list[Executor] = [Files(), Processes(), Http(), Functions()]
    return {kind: executor for executor in made for kind in executor.kinds}
