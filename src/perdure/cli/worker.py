"""``worker``: run an app's agents until told to stop, and stop in three steps whatever the tools do.

Signal handlers set flags and wake the loop, nothing else, so a tool that swallows exceptions cannot swallow a signal.
The third signal does not even need the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Coroutine
from types import FrameType
from typing import Any

import click

from perdure import app as apps
from perdure.app import App
from perdure.cli.loading import app_of, app_option, importable
from perdure.cli.opening import address, prepare_logging
from perdure.cli.output import Output
from perdure.cli.settings import Settings
from perdure.errors import Invalid
from perdure.limits import STOP_SECONDS_MAX, WORKERS_MAX

_DRAIN_LOOK_SECONDS = 60.0
WORKERS = 64  # attempts at once without an app


@click.command()
@app_option(required=False)
@click.option(
    "--workers", type=click.IntRange(1, WORKERS_MAX), metavar="N", help="Attempts at once; by default the app's."
)
@click.pass_context
def worker(context: click.Context, target: str | None, workers: int | None) -> int:
    """Run the agents of an app, and workflows, until told to stop; without an app, workflows only.

    Prints one line when it is ready.

    The first SIGINT or SIGTERM drains: nothing new is begun, what runs goes on, exit code 0. The second cancels calls
    in flight: the work stays owed, exit code 130 or 143. The third ends the process at once.
    """
    settings = context.find_root().ensure_object(Settings)
    prepare_logging(settings)
    signals = Signals()
    runner = asyncio.Runner()
    try:
        code = runner.run(_work(Output(settings), target, workers, signals))
    except BaseException:
        runner.close()
        raise
    signals.leave()
    if code:  # a body that does not end must not keep the process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    runner.close()
    return code


class Signals:
    """The signals that came so far.

    Attributes:
        first, second: set when that many came.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.code = 0
        self._count = 0
        self._leaving = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self) -> None:
        """Begin to listen, on the running loop. Outside the main thread there are no signals to listen to."""
        self._loop = asyncio.get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._came)

    def leave(self) -> None:
        """Nothing is left to be done in order: from now on one signal ends the process."""
        self._leaving = True

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        self.code = 128 + number
        if self._count >= 3 or self._leaving:
            os._exit(self.code)
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is about to end
            self._loop.call_soon_threadsafe(self._wake, self._count)

    def _wake(self, count: int) -> None:
        self.first.set()
        if count > 1:
            self.second.set()


@contextlib.asynccontextmanager
async def _opened(out: Output, target: str | None, workers: int | None) -> AsyncIterator[App]:
    """The app, or one that knows no agents and runs workflows."""
    if target is not None:
        async with app_of(target, store=out.settings.db, workers=workers) as app:
            yield app
        return
    importable()
    async with apps.open(address(out.settings, create=True), workers=workers or WORKERS) as app:
        yield app


async def _work(out: Output, target: str | None, workers: int | None, signals: Signals) -> int:
    async with _opened(out, target, workers) as app:
        if app.worker is None:
            raise Invalid(f"{target} opens a client (workers=0).", help="Say how many: --workers 8.")
        signals.watch()
        _ready(app, out)
        await signals.first.wait()
        out.note(f"Draining: {app.worker.busy} attempts go on, nothing new begins. Once more cancels them.")
        drained = await _first(_drained(app), signals.second.wait())
        if not drained:
            out.note("Cancelling what is in flight; the work stays owed. Once more ends the process at once.")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS_MAX):
                    await app.close()
    out.record("Worker", {"event": "stopped", "drained": drained})
    out.final("Worker", {"drained": drained})
    out.note("Drained." if drained else "Stopped.")
    return 0 if drained else signals.code


def _ready(app: App, out: Output) -> None:
    assert app.worker is not None
    agents = sorted(app.agents)
    out.record("Worker", {"event": "ready", "agents": agents, "store": app.address, "workers": app.worker.slots})
    shown = ", ".join(agents) or "none, workflows only"
    out.line(f"Worker ready: {app.worker.slots} attempts at once on {app.address}; agents: {shown}.")


async def _drained(app: App) -> None:
    assert app.worker is not None
    while not await app.worker.drain(_DRAIN_LOOK_SECONDS):
        pass


async def _first(work: Coroutine[Any, Any, Any], other: Coroutine[Any, Any, Any]) -> bool:
    """Whether ``work`` ended before ``other``; the slower one is given up."""
    tasks = [asyncio.ensure_future(one) for one in (work, other)]
    done, rest = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    return tasks[0] in done
