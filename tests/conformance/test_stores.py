"""Every store keeps the contracts of both ports: in a file, in memory, on the loop's thread alone, and split in two.

What keeps nothing else still keeps how often models are called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from perdure.agent.nowhere import NowhereStore, Paces
from perdure.ports.store import Store
from perdure.rules.accounting import Rate
from perdure.stores.sqlite.store import open_store
from perdure.testing.conformance.ledger import ledger_suite
from perdure.testing.conformance.ledger_models import Caller, model_suite
from perdure.testing.conformance.log import log_suite
from perdure.testing.split import open_split

pytestmark = pytest.mark.anyio

OPENERS: dict[str, Callable[[str], Store]] = {
    "file": lambda folder: open_store(Path(folder) / "store.db"),
    "memory": lambda folder: open_store("memory:"),
    "inline": lambda folder: open_store(Path(folder) / "store.db", threaded=False),
    "split": open_split,
}


def cases() -> list[object]:
    params: list[object] = []
    for name, opener in OPENERS.items():

        @asynccontextmanager
        async def factory(opener: Callable[[str], Store] = opener) -> AsyncIterator[Store]:
            with TemporaryDirectory() as folder:
                store = opener(folder)
                try:
                    yield store
                finally:
                    await store.close()

        for port, suite in (("log", log_suite), ("ledger", ledger_suite)):
            params += [pytest.param(case, id=f"{name}-{port}-{sentence}") for sentence, case in suite(factory)]
    params += [pytest.param(case, id=f"nowhere-models-{sentence}") for sentence, case in model_suite(nowhere)]
    return params


@asynccontextmanager
async def nowhere() -> AsyncIterator[Store]:
    yield NowhereStore(Paces())


@pytest.mark.parametrize("case", cases())
async def test_a_store_keeps_the_contract(case: Callable[[], Awaitable[None]]) -> None:
    await case()


async def test_runs_without_a_store_share_the_rates_of_their_process() -> None:
    """Also those on other threads, each with a loop of its own."""
    rate = Rate(requests=200)

    def run() -> list[int]:
        async def ask() -> list[int]:
            return [await Caller(NowhereStore(), rate, "shared").take() for _ in range(100)]

        return asyncio.run(ask())

    answers = await asyncio.gather(*(asyncio.to_thread(run) for _ in range(4)))
    assert sum(answer == 0 for one in answers for answer in one) == 200
