"""A worker process of a scenario: ``python -m support.worker FOLDER PROGRAM OPTIONS``. Works until it is killed."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path

from support.place import Place
from support.puppets import PROGRAMS


async def main(folder: str, program: str, options: str) -> None:
    """Open the app, say so, work."""
    place = Place(Path(folder))
    async with place.app(PROGRAMS[program](place), **json.loads(options)):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(*sys.argv[1:4]))
