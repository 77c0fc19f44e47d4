"""Variables in eight layers, low to high; a higher one replaces a whole name, nothing is merged.

1 varsFiles of the workflow, 2 its vars, 3 varsFiles of the agent, 4 its vars, 5 varsFiles of the task, 6 its vars,
7 files given by the caller, 8 values given by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from perdure.definitions.workflow import Agent, Spec
from perdure.workflow.files import RESERVED, Captured

LAYERS = (
    "spec.varsFiles", "spec.vars", "agent.varsFiles", "agent.vars", "task.varsFiles", "task.vars", "--vars-file", "--var",
)  # fmt: skip


class Given(msgspec.Struct, frozen=True):
    """What the caller gives: files of variables, in order, and single values."""

    files: tuple[dict[str, Any], ...] = ()
    values: dict[str, Any] = {}

    def reserved(self) -> list[str]:
        """Reserved names among them."""
        names = {name for file in self.files for name in file} | set(self.values)
        return sorted(names & set(RESERVED))


class Variables:
    """The layers of one document.

    Args:
        captured: its variable files. given: the caller's layers.
    """

    def __init__(self, spec: Spec, captured: Captured, given: Given) -> None:
        self._spec = spec
        self._captured = captured
        self._given = given

    def _files(self, names: Iterable[str]) -> list[Mapping[str, Any]]:
        return [self._captured.variables.get(name, {}) for name in names]

    def winners(
        self, agent: Agent | None = None, task_files: Iterable[str] = (), task_vars: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, int]]:
        """The winning value of each name, and its layer from 1."""
        layers: list[tuple[int, Mapping[str, Any]]] = []
        layers += [(1, file) for file in self._files(self._spec.vars_files)]
        layers.append((2, self._spec.vars))
        if agent is not None:
            layers += [(3, file) for file in self._files(agent.vars_files)]
            layers.append((4, agent.vars))
        layers += [(5, file) for file in self._files(task_files)]
        layers.append((6, task_vars or {}))
        layers += [(7, file) for file in self._given.files]
        layers.append((8, self._given.values))
        values: dict[str, Any] = {}
        winning: dict[str, int] = {}
        for number, layer in layers:
            for name, value in layer.items():
                values[name], winning[name] = value, number
        return values, winning
