"""Executors: who performs the actions of workflows. Adapters of ``ports.executor``; they know no engine."""

from __future__ import annotations

from perdure.clock import Clock
from perdure.executors.http import Http
from perdure.executors.memory import LongTermMemory
from perdure.executors.process import Processes
from perdure.executors.python import Functions
from perdure.executors.workspace import Files
from perdure.ports.executor import Executor
from perdure.ports.store import Store


def executors(store: Store, clock: Clock) -> dict[str, Executor]:
    """Every executor of this package by the kinds it performs. ``store`` holds long-term memory."""
    made: list[Executor] = [Files(), Processes(), Http(), Functions(), LongTermMemory(store, clock)]
    return {kind: executor for executor in made for kind in executor.kinds}
