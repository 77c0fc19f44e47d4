"""A worker whose agent asks a loopback model: ``python -m support.models_worker FOLDER WIRE URL MODE [DIE] [OPTIONS]``.

MODE is ``repeat`` or ``once``. DIE is a boundary and a phase, ``response:inside``: there it kills itself. OPTIONS is a
JSON object: ``rate`` of the model, calls a minute; ``unprotected``: a once call is dispatched without a started record.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import perdure as p
from perdure import ids
from perdure.engine.inference import ModelCalls
from perdure.ports.failpoints import Boundary, Phase
from perdure.records.run import model_place
from perdure.rules.accounting import Rate
from support.place import LEASE, Place
from support.remote import MODELS


def agent_of(place: Place, mode: Any) -> p.Agent:
    """The agent of every process of a scenario."""

    @p.tool(effect="keyed")
    async def weather(city: str) -> str:
        """Ask for the weather."""
        return place.world.touch("asked", city=city)

    return p.Agent("clerk", tools=[weather], policy=p.Policy(model_calls=mode))


def die_at(where: str) -> Any:
    """A failpoint that kills this process with SIGKILL."""

    def failpoint(boundary: Boundary, phase: Phase) -> None:
        if f"{boundary}:{phase}" == where:
            os.kill(os.getpid(), signal.SIGKILL)

    return failpoint


def unprotect() -> None:
    """Dispatch once calls without recording first that they start."""

    async def start(self: ModelCalls, run: Any, request: Any, reserve: Any) -> Any:
        place = model_place(request.turn)
        return None, ids.idempotency_key(run.id, place, 1, place, 0)

    ModelCalls._start = start  # type: ignore[method-assign]


async def main(folder: str, wire: str, url: str, mode: str, die: str = "", options: str = "{}") -> None:
    """Open the app, say so, work."""
    place, chosen = Place(Path(folder)), json.loads(options)
    if chosen.get("unprotected"):
        unprotect()
    rate = Rate(requests=chosen["rate"]) if "rate" in chosen else None
    model = MODELS[wire](url, api_key=p.Secret.env("PERDURE_TEST_KEY"), rate=rate)  # type: ignore[index]
    agent = agent_of(place, mode)
    async with p.open(place.db, agents=[agent], models={agent.name: model}, lease=LEASE) as app:
        if die:
            app.store.failpoint = die_at(die)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        print("ready", flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
