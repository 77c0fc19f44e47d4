"""Every store keeps the contracts of both ports: in a file, in memory, on the loop's thread alone, and split in two."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from perdure.ports.store import Store
from perdure.stores.sqlite.store import open_store
from perdure.testing.conformance.ledger import ledger_suite
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
    return params


@pytest.mark.parametrize("case", cases())
async def test_a_store_keeps_the_contract(case: Callable[[], Awaitable[None]]) -> None:
    await case()
