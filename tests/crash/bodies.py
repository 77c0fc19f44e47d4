"""What tasks of workflows do in the crash tests: they touch the world once, under the key they are given."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from perdure import Refused
from perdure.testing.world import World


async def touch(folder: str, name: str, order: str = "o1", perdure_key: str = "") -> str:
    """Touch the world and give the receipt."""
    await asyncio.sleep(0)
    return World(Path(folder) / "world").touch(name, key=perdure_key, order=order)


async def flaky(folder: str, name: str, order: str = "o1", perdure_key: str = "") -> str:
    """Refuse the first time, touch the world after that."""
    await asyncio.sleep(0)
    world = World(Path(folder) / "world")
    if world.count("try-" + name) == 0:
        world.touch("try-" + name)
        raise Refused("not yet")
    return world.touch(name, key=perdure_key, order=order)


async def vanish(folder: str, name: str, order: str = "o1", perdure_key: str = "") -> Any:
    """Time out the first time, without having done anything; touch the world after that."""
    await asyncio.sleep(0)
    world = World(Path(folder) / "world")
    if world.count("try-" + name) == 0:
        world.touch("try-" + name)
        raise TimeoutError("no answer")
    return world.touch(name, key=perdure_key, order=order)
