"""A process that runs one workflow: ``python -m support.flow_worker FOLDER [BOUNDARY PHASE]``.

It submits what ``FOLDER/flow.yaml`` says once (under a key), works until the run has settled, and ends itself with SIGKILL
when it passes the boundary and phase.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from perdure.ports.failpoints import Boundary, Phase
from support.flows import flow, opened


async def main(folder: str, *point: str) -> None:
    """Run it."""
    place = Path(folder)
    async with opened(place, lease="1s") as flows:

        def die(boundary: Boundary, phase: Phase) -> None:
            if [boundary, phase] == list(point):
                os.kill(os.getpid(), signal.SIGKILL)

        flows.app.host.store.failpoint = die
        receipt = await flows.app.submit(flow((place / "flow.yaml").read_text(), place), key="one")
        (place / "run").write_text(receipt.run)
        await flows.app.settlement(receipt, timeout=60)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
