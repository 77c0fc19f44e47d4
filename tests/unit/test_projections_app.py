"""What the engine really writes, read back through an app: each view at each stage, and verified meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

import perdure as p
from perdure.projections import run, thread
from perdure.providers.scripted import Scripted, call, calls, fail, say
from perdure.records.parts import Failure

pytestmark = pytest.mark.anyio


@p.tool(effect="observe")
async def find(order: str) -> dict[str, str]:
    """Look an order up."""
    return {"order": order}


@p.tool
async def pay(cents: int) -> str:
    """Pay."""
    if cents == 13:
        raise p.Unknown("the line went dead")
    if cents == 0:
        raise p.Refused("nothing to pay")
    return f"paid {cents}"


@p.tool(approval=True)
async def big(cents: int) -> str:
    """Pay a lot."""
    return f"paid {cents}"


@p.tool(steps=True)
async def publish(ctx: p.ToolContext, doc: str) -> str:
    """Publish."""

    async def upload() -> str:
        return f"s3://{doc}"

    url: str = await ctx.step("upload", upload)
    await ctx.step("announce", upload, effect="once")
    return url


def agent(*script: Any, name: str = "bank", **options: Any) -> p.Agent:
    options = {"input": str, "output": str, "tools": [find, pay, big, publish], **options}
    return p.Agent(name, model=Scripted(list(script)), **options)


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(20):
        while not (found := await condition()):  # noqa: ASYNC110 - several kinds of change are waited for
            await asyncio.sleep(0.01)
        return found


async def state_of(app: p.App, receipt: p.Receipt, *states: str) -> run.RunView:
    async def there() -> run.RunView | None:
        found = await app.inspect(receipt)
        return found if found.state in states else None

    view: run.RunView = await until(there)
    return view


async def healthy(app: p.App) -> None:
    found = await app.verify()
    assert found, found.failed()


async def test_a_run_through_every_stage(tmp_path: Path) -> None:
    bank = agent(
        calls(call("find", order="o1"), call("pay", cents=5), call("pay", cents=0), call("publish", doc="d")),
        call("big", cents=7),
        call("pay", cents=13),
        say("done"),
    )
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "hello", thread="customer 42", key="k1")

        await state_of(app, receipt, "suspended")
        await healthy(app)
        [owed] = await app.obligations()
        [asked] = await app.approvals()
        assert (owed.blocked_on, owed.command) == ("approval", f"perdure approvals approve {asked.id} --reason …")
        assert (await app.explain(receipt)).decision == "AwaitApprovalDecision"
        await app.approve(asked.id, by="ada", reason="fine")

        await state_of(app, receipt, "unknown")
        await healthy(app)
        [owed] = await app.obligations()
        [effect] = await app.effects(status="unknown")
        assert (owed.blocked_on, owed.command) == ("unknown", effect.resolve)
        assert (effect.arguments, effect.reason, effect.thread) == (
            {"cents": 13}, "Unknown: the line went dead", "customer 42",
        )  # fmt: skip
        found = await app.explain(receipt)
        assert (found.decision, found.command) == ("AwaitUnknownResolution", effect.resolve)
        await app.reconcile(effect, p.Applied("paid 13"), by="bob", reason="in the books", evidence={"row": 3})

        settled = await app.settlement(receipt, timeout=20)
        assert (settled.status, settled.failure) == ("completed", None)
        assert await app.output(receipt) == "done"
        assert await app.obligations() == []
        await healthy(app)

        view = await app.inspect(receipt)
        assert [[c.status for c in turn.calls] for turn in view.turns] == [
            ["confirmed", "confirmed", "refused", "confirmed"], ["confirmed"], ["confirmed"], [],
        ]  # fmt: skip
        assert [step.name for step in view.turns[0].calls[3].steps] == ["upload", "announce"]
        assert (view.output, view.agent, view.thread) == ("done", "bank", "customer 42")
        assert view.usage.output > 0
        by_operation = {(e.operation, e.arguments.get("cents")): e for e in await app.effects()}
        assert by_operation["pay", 5].result == "paid 5"
        assert by_operation["pay", 0].error == Failure("refused", "nothing to pay")
        resolved = by_operation["pay", 13]
        assert (resolved.verdict, resolved.by, resolved.reason, resolved.evidence, resolved.result) == (
            "applied", "bob", "in the books", {"row": 3}, "paid 13",
        )  # fmt: skip
        shown = await thread.show(app.store, "customer 42")
        seen = [record async for record in app.observe(receipt)]
        assert tuple(seen) == shown.history
        assert thread.settles(seen[-1], receipt.submission)


async def test_every_way_to_end(tmp_path: Path) -> None:
    silent, picky = (
        agent(fail(ValueError("no")), name="silent"),
        agent(say("x"), name="picky", output=int, policy=p.Policy(output_retries=0)),
    )
    waits = agent(call("big", cents=7), name="waits")
    async with p.open(tmp_path / "work.db", agents=[silent, picky, waits]) as app:
        receipts = [
            await app.submit("silent", "a", key="1"),
            await app.submit("picky", "a", key="2"),
            await app.submit("waits", "a", thread="t", key="3"),
            await app.submit("waits", "b", thread="t", key="4"),
        ]
        await state_of(app, receipts[2], "suspended")
        await app.cancel(receipts[3], by="ada", reason="not this one")
        await app.cancel(receipts[2], by="ada", reason="enough")
        ends = [await app.settlement(receipt, timeout=20) for receipt in receipts]
        assert [end.status for end in ends] == ["failed", "failed", "cancelled", "cancelled"]
        assert [end.failure.kind if end.failure else None for end in ends] == ["model", "output", None, None]
        await healthy(app)
        assert [view.status for view in await app.runs(state="settled")] == [end.status for end in ends]
        with pytest.raises(p.Invalid, match="has no output"):
            await run.read_output(app.store, app.store.read(lambda tx: tx.ledger.submissions(limit=1)[0]))


async def test_a_run_that_nobody_owes_is_no_finding(tmp_path: Path) -> None:
    bank = agent(call("pay", cents=5), say("done"))
    lost = agent(call("pay", cents=13), say("done"), name="lost")
    asks = agent(call("big", cents=7), say("done"), name="asks")
    async with p.open(tmp_path / "work.db", agents=[bank, lost, asks]) as app:
        assert (await app.run(bank, "hello", thread="notes")).output == "done"
        await healthy(app)
        with pytest.raises(p.RunFailed) as error:
            await app.run(lost, "hello", thread="notes")
        assert len(error.value.unknown) == 1
        await healthy(app)
        await app.run(asks, "hello", thread="notes", approve=lambda request: True)
        await healthy(app)
        receipt = await app.submit(bank, "again", thread="notes")
        await app.settlement(receipt, timeout=20)
        await healthy(app)
        assert [view.submission for view in await app.runs()] == [receipt.submission]
        [found] = await app.threads()
        assert (found.thread, found.submissions, found.open) == ("notes", 1, 0)


async def test_it_verifies_while_workers_write(tmp_path: Path) -> None:
    """One thread is read in one snapshot: what is half done is never seen."""
    bank = agent(calls(call("pay", cents=5), call("publish", doc="d")), call("pay", cents=6), say("done"))
    async with p.open(tmp_path / "work.db", agents=[bank], workers=8) as app:
        receipts = [await app.submit(bank, "x", thread=f"t{n % 7}") for n in range(60)]
        rounds = 0
        while await app.obligations():
            await healthy(app)
            rounds += 1
        await healthy(app)
        assert rounds > 0
        for receipt in receipts:
            assert (await app.settlement(receipt, timeout=20)).status == "completed"


async def test_a_client_reads_what_a_worker_left(tmp_path: Path) -> None:
    bank = agent(call("pay", cents=13), say("done"))
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "hello")
        await state_of(app, receipt, "unknown")
    async with p.open(tmp_path / "work.db", workers=0) as client:
        assert [owed.blocked_on for owed in await client.obligations()] == ["unknown"]
        found = await client.explain(receipt)
        assert (found.decision, found.evidence["binding"]) == ("AwaitUnknownResolution", False)
        await healthy(client)


async def test_a_change_behind_its_back_is_found(tmp_path: Path) -> None:
    bank = agent(call("pay", cents=5), say("done"))
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "hello")
        await app.settlement(receipt, timeout=20)
        await healthy(app)
        connection = apsw.Connection(str(tmp_path / "work.db"))
        connection.execute("UPDATE effect SET status = 'refused'")
        connection.close()
        found = await app.verify()
        assert not found
        assert [(check.name, check.thread) for check in found.failed()] == [("ledger-effects", receipt.thread)]
        assert not await app.verify(receipt.thread)
