"""Budgets of a run: shared by its parallel tasks, reserved before dispatch, counted after a crash, shared by a lineage."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.app import workflows as hosting
from perdure.records.run import ModelCallPrepared
from support.flows import Flows, flow, opened, states

pytestmark = pytest.mark.anyio

MANY = """
runtime: {maxConcurrency: 64, budgets: {%s}}
providers: {p: {kind: fake}}
agents: {w: {provider: p, model: m, instructions: go, maxOutputTokens: 20, providerOptions: {delayMs: 20, finalText: done}}}
tasks: [{id: t, uses: "agent:w", failure: continue, foreach: {maxItems: 64, items: [%s]}, with: {prompt: go}}]
"""


@pytest.fixture
async def flows(tmp_path: Path) -> AsyncIterator[Flows]:
    async with opened(tmp_path) as found:
        yield found


async def dispatched(flows: Flows, run: str) -> int:
    return len([e for e in await flows.app.effects(run=run) if e.kind == "model"])


async def test_64_parallel_tasks_dispatch_exactly_what_the_budget_allows(flows: Flows) -> None:
    items = ", ".join(map(str, range(64)))
    view = await flows.run(MANY % ("maxProviderRequests: 10", items))
    assert await dispatched(flows, view.run) == 10
    assert [one.used for one in view.budgets if one.unit == "provider_requests"] == [10]
    found = list(states(view).values())
    assert (found.count("succeeded"), found.count("failed")) == (10 + 1, 54)
    assert view.failure is not None
    assert view.failure.kind == "budget"


async def test_without_a_budget_all_are_dispatched(flows: Flows) -> None:
    """The twin: nothing else holds them back."""
    items = ", ".join(map(str, range(64)))
    view = await flows.run(MANY % ("maxTurns: 1000", items))
    assert await dispatched(flows, view.run) == 64


@pytest.mark.parametrize("limit", ["maxTurns: 2", "maxOutputTokens: 30", "maxTotalTokens: 80"])
async def test_every_unit_of_models_is_held(flows: Flows, limit: str) -> None:
    view = await flows.run((MANY % (limit, "1, 2, 3, 4")).replace("maxConcurrency: 64", "maxConcurrency: 1"))
    assert view.failure is not None
    assert view.failure.kind == "budget"
    assert 0 < await dispatched(flows, view.run) < 4
    assert all(one.limit is None or one.used <= one.limit for one in view.budgets)


async def test_a_cost_budget_needs_and_uses_the_documents_prices(flows: Flows) -> None:
    prices = "pricing: {version: v1, models: {p/m: {inputMicrousdPerMillionTokens: 1000000, outputMicrousdPerMillionTokens: 1000000}}}"
    spec = (MANY % ("maxCostMicrousd: 80", "1, 2, 3, 4")).replace("budgets:", f"{prices}, budgets:")
    view = await flows.run(spec.replace("maxConcurrency: 64", "maxConcurrency: 1"))
    assert view.failure is not None
    assert (view.failure.kind, "cost_microusd" in view.failure.message) == ("budget", True)
    assert 0 < await dispatched(flows, view.run) < 4


LINEAGE = """
import asyncio, json, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import perdure as p
from perdure.app import workflows as hosting
from support.flows import flow

async def main():
    folder = Path(sys.argv[2])
    made = flow(sys.argv[3], folder)
    async with p.open(folder / "work.db", workers=0) as app:
        receipt = await hosting.submit(app.host, made, {"n": int(sys.argv[4])}, principal="local", lineage="run_first")
        worker = app.attend(app.thread_number(receipt))
        print("ready", flush=True)
        sys.stdin.readline()
        await app.settlement(receipt, timeout=30)
        await worker.stop()
        print(len([e for e in await app.effects(run=receipt.run) if e.kind == "model"]))

asyncio.run(main())
"""


TESTS = str(Path(__file__).resolve().parents[1])


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def test_four_processes_share_the_budget_of_a_lineage(flows: Flows) -> None:
    items = ", ".join(map(str, range(16)))
    spec = MANY % ("maxProviderRequests: 10, scope: lineage", items)
    command = [sys.executable, "-c", LINEAGE, TESTS, str(flows.folder), spec]
    processes = [start([*command, str(n)]) for n in range(4)]
    outs = await asyncio.gather(*(asyncio.to_thread(process.communicate, "\n") for process in processes))
    counts = [int(out.split()[-1]) for out, _ in outs]
    assert sum(counts) == 10, counts


async def test_a_run_of_its_own_shares_nothing(flows: Flows) -> None:
    """The twin: with the scope of a run each has the whole budget."""
    spec = MANY % ("maxProviderRequests: 3", "1, 2, 3, 4")
    made = flow(spec, flows.folder)
    receipts = [
        await hosting.submit(flows.app.host, made, {"n": n}, principal="local", lineage="run_first") for n in range(2)
    ]
    for receipt in receipts:
        await flows.app.settlement(receipt, timeout=20)
    assert [await dispatched(flows, receipt.run) for receipt in receipts] == [3, 3]


async def test_the_started_record_of_a_model_call_holds_its_reservation(flows: Flows) -> None:
    run = (await flows.run(MANY % ("maxTurns: 9", "1"))).run
    found = [r.data async for r in flows.app.observe(run) if r.kind == ModelCallPrepared.__name__]
    assert found[0]["reserved"]["output"] == 20
