"""Running a workflow written as text, in a folder of its own, and what its tasks came to."""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import perdure as p
from perdure.app import App
from perdure.projections.workflow import TaskView, WorkflowView
from perdure.workflow import document
from perdure.workflow.dsl import Workflow

PATIENCE = 20.0
HEAD = "apiVersion: perdure.dev/v1\nkind: Workflow\nmetadata: {name: flow}\nspec:\n"

calls: list[Any] = []
"""What ``note`` was called with, in this process."""


def note(**given: Any) -> Any:
    """A witness: remembers that it was called."""
    calls.append(given)
    return given


def text(size: int) -> str:
    """A text of a size."""
    return "x" * size


def flow(spec: str, folder: Path) -> Workflow:
    """A workflow from the text of its spec."""
    text = HEAD + textwrap.indent(textwrap.dedent(spec).strip("\n"), "  ") + "\n"
    made = Workflow("flow")
    made._source = document.read(text.encode(), "flow.yaml", folder)
    made.base = folder
    return made


class Flows:
    """An app in a folder, with what a test asks of it."""

    def __init__(self, app: App, folder: Path) -> None:
        self.app = app
        self.folder = folder

    async def submit(self, spec: str, inputs: dict[str, Any] | None = None, **options: Any) -> str:
        """Admit a run."""
        return (await self.app.submit(flow(spec, self.folder), inputs, **options)).run

    async def run(self, spec: str, inputs: dict[str, Any] | None = None, **options: Any) -> WorkflowView:
        """Run one to its settlement."""
        run = await self.submit(spec, inputs, **options)
        await self.app.settlement(run, timeout=PATIENCE)
        assert await self.app.verify()
        return await self.view(run)

    async def view(self, run: str) -> WorkflowView:
        """A run as it stands."""
        return await self.app.workflow(run)

    async def until(self, run: str, fact: Callable[[WorkflowView], bool]) -> WorkflowView:
        """Wait until something is so of a run."""
        thread, deadline = self.app.thread_of(run), time.monotonic() + PATIENCE
        while True:
            waiting = self.app.host.until_progress(thread)
            try:
                view = await self.view(run)
                if fact(view):
                    return view
                assert time.monotonic() < deadline, f"it never became so: {states(view)}"
                await asyncio.wait([waiting], timeout=0.05)
            finally:
                waiting.cancel()

    async def until_effects(self, run: str, status: str, count: int) -> None:
        """Wait until so many effects of a run have a status."""
        thread = self.app.thread_of(run)
        async with asyncio.timeout(PATIENCE):
            found = -1
            while found < count:
                waiting = self.app.host.until_progress(thread)
                found = len(await self.app.effects(run=run, status=status))
                if found < count:
                    await waiting
                waiting.cancel()


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[Flows]:
    """An app on ``work.db`` in a folder."""
    async with p.open(folder / "work.db", **{"workers": 4, **options}) as app:
        yield Flows(app, folder)


def task(view: WorkflowView, id: str) -> TaskView:
    """One task of a run."""
    return next(one for one in view.tasks if one.id == id)


def states(view: WorkflowView) -> dict[str, str]:
    """Task to state."""
    return {one.id: one.state for one in view.tasks}


def outputs(view: WorkflowView) -> dict[str, Any]:
    """Task to output."""
    return {one.id: one.output for one in view.tasks}
