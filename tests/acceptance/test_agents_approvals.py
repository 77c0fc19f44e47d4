"""Approvals: asked durably, waited for without a worker, decided from another process, bound to exact arguments."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import perdure as p
from perdure.agent import batch
from support.place import Place, until
from support.puppets import once, play, puppet, tools

pytestmark = pytest.mark.anyio


def asks(name: str, **more: Any) -> list[Any]:
    return once(name, tool="asks", **more)


async def requests(app: p.App, count: int = 1) -> list[p.Approval]:
    """The pending requests, once there are ``count``."""

    async def enough() -> Any:
        found = await app.approvals()
        return found if len(found) == count else None

    found: list[p.Approval] = await until(enough, f"{count} requests")
    return found


async def suspended(app: p.App, receipt: p.Receipt) -> bool:
    return (await app.inspect(receipt)).state == "suspended"


async def test_request_suspend_decide_elsewhere_and_go_on(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        with place.worker() as worker:
            receipt = await app.submit("puppet", play([asks("a")], "done"), thread="t")
            [asked] = await requests(app)
            await until(lambda: suspended(app, receipt), "the suspension")
            worker.kill()
        # nobody works: the request waits, and says how it is answered
        assert (asked.tool, asked.arguments["name"], asked.status) == ("asks", "a", "pending")
        [owed] = await app.obligations()
        assert owed.blocked_on == "approval"
        assert owed.command == asked.resolve
        assert asked.id in (asked.resolve or "")
        assert place.world.count() == 0
        assert not place.rows("SELECT 1 FROM thread WHERE owner IS NOT NULL")

        decided = await app.approve(asked.id, by="alice", reason="fine")
        assert (decided.status, decided.by) == ("approved", "alice")
        with place.worker():
            assert await app.output(receipt, timeout=20) == "done"
        assert [e.name for e in place.world.entries()] == ["a"]
        assert await app.verify()


async def test_a_waiting_run_survives_any_number_of_workers(tmp_path: Path) -> None:
    """Waiting uses no attempt: workers come and go, and the request is asked once."""
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        receipt = await app.submit("puppet", play([asks("a")], "done"), thread="t")
        for _ in range(4):
            async with place.app(puppet(place)) as working:
                await until(lambda: suspended(app, receipt), "the suspension")
                await working.recover()
        [asked] = await app.approvals(status=None)
        [(attempts,)] = place.rows("SELECT attempts FROM submission")
        assert attempts <= 1
        await app.approve(asked.id, by="alice")
        async with place.app(puppet(place)):
            assert await app.output(receipt, timeout=20) == "done"
        assert place.kinds("t").count("ToolApprovalRequested") == 1


async def test_rejection_is_told_to_the_model_and_the_run_goes_on(tmp_path: Path) -> None:
    place, seen = Place(tmp_path), []
    agent = puppet(place, watch=lambda request: seen.append(request.messages[-1]))
    async with place.app(agent) as app:
        receipt = await app.submit(agent, play([asks("a")], "done"))
        [asked] = await requests(app)
        await app.reject(asked.id, by="alice", reason="too much money")
        assert await app.output(receipt, timeout=20) == "done"
        told = seen[-1].results[0]
        assert told.failed
        assert "too much money" in told.content
        assert place.world.count() == 0
        [call] = (await app.inspect(receipt)).turns[0].calls
        assert call.status == "withdrawn"
        with pytest.raises(p.Conflict, match="already rejected"):
            await app.approve(asked.id, by="bob")


async def test_the_same_decision_twice_is_one_and_another_is_a_conflict(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        async with place.app(puppet(place)):
            receipt = await app.submit("puppet", play([asks("a")], "done"))
            [asked] = await requests(app)
            await until(lambda: suspended(app, receipt), "the suspension")
        first = await app.approve(asked.id, by="alice", reason="fine")
        second = await app.approve(asked.id, by="bob", reason="also fine")
        assert (second.status, second.by) == (first.status, first.by) == ("approved", "alice")
        with pytest.raises(p.Conflict, match="already approved by alice"):
            await app.reject(asked.id, by="bob")
        assert len(place.rows("SELECT 1 FROM intent")) == 1
        async with place.app(puppet(place)):
            await app.settlement(receipt, timeout=20)
        assert (await app.approve(asked.id, by="carol")).by == "alice"
        with pytest.raises(p.Invalid, match="no approval request"):
            await app.approve("apr_none", by="alice")
        assert place.world.count() == 1


async def run_two(place: Place, app: p.App) -> tuple[list[str], int]:
    """Approve the first of two calls of one tool with other arguments; what ran, and how many requests are open."""
    receipt = await app.submit("puppet", play([asks("a.txt")], [asks("/etc/shadow")], "done"), thread="t")
    [first] = await requests(app)
    await app.approve(first.id, by="alice")

    async def next_stop() -> bool:
        view = await app.inspect(receipt)
        return view.state == "settled" or (len(view.turns) == 2 and view.state == "suspended")

    await until(next_stop, "the second call")
    return [e.name for e in place.world.entries()], len(await app.approvals())


async def test_case_D03_an_approval_is_bound_to_exact_arguments(tmp_path: Path) -> None:  # noqa: N802
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        assert await run_two(place, app) == (["a.txt"], 1)
        [second] = await app.approvals()
        [first] = await app.approvals(status="approved")
        assert first.digest != second.digest
        assert first.id != second.id
        assert second.arguments["name"] == "/etc/shadow"


async def test_case_D03_an_approval_is_bound_to_exact_arguments_twin(  # noqa: N802
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protection off: a decision is remembered under the bare name of the tool."""
    remembered: set[str] = set()
    ask = batch.needs_approval

    def needs(tool: Any, arguments: dict[str, Any]) -> bool:
        known = tool.name in remembered
        if tool.approval:
            remembered.add(tool.name)
        return ask(tool, arguments) and not known

    from perdure.agent import loop

    monkeypatch.setattr(loop, "needs_approval", needs)
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        assert await run_two(place, app) == (["a.txt", "/etc/shadow"], 0)


async def test_case_D03_same_arguments_again_ask_again(tmp_path: Path) -> None:  # noqa: N802
    """Single use: the same tool with the same arguments, in the next turn or beside it, is another request."""
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play([asks("a"), asks("a")], [asks("a")], "done"))
        for asked in await requests(app, 2):
            await app.approve(asked.id, by="alice")
        [third] = await requests(app)
        assert third.call == "2.0"
        assert place.world.count("a") == 2
        await app.reject(third.id, by="alice")
        assert await app.output(receipt, timeout=20) == "done"
        assert place.world.count("a") == 2


async def test_free_siblings_run_while_one_asks(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        receipt = await app.submit("puppet", play([once("free"), asks("asked"), once("also")], "done"))
        [asked] = await requests(app)
        await until(lambda: suspended(app, receipt), "the suspension")
        assert {e.name for e in place.world.entries()} == {"free", "also"}
        statuses = [c.status for c in (await app.inspect(receipt)).turns[0].calls]
        assert statuses == ["confirmed", "waiting", "confirmed"]
        await app.approve(asked.id, by="alice")
        assert await app.output(receipt, timeout=20) == "done"
        assert place.world.count() == 3


async def test_a_suspended_run_is_a_barrier_on_its_thread_only(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        first = await app.submit("puppet", play([asks("a")], "one"), thread="t")
        [asked] = await requests(app)
        behind = await app.submit("puppet", play("two"), thread="t")
        beside = await app.submit("puppet", play("three"), thread="u")
        assert await app.output(beside, timeout=20) == "three"
        with pytest.raises(TimeoutError):
            await app.settlement(behind, timeout=0.2)
        await app.approve(asked.id, by="alice")
        assert [await app.output(r, timeout=20) for r in (first, behind)] == ["one", "two"]


async def test_a_rule_that_raises_asks(tmp_path: Path) -> None:
    place = Place(tmp_path)

    @p.tool(approval=lambda a: a["cents"] > a["limit"])
    async def pay(ctx: p.ToolContext, cents: int) -> str:
        return place.world.touch("pay", key=ctx.key)

    agent = puppet(place, tools=[pay])
    async with place.app(agent) as app:
        await app.submit(agent, play([["pay", {"cents": 1}]], "done"))
        await requests(app)
        assert place.world.count() == 0


async def test_secrets_and_long_arguments_in_requests(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        await app.submit("puppet", play([asks("x" * 200)], "done"))
        [asked] = await requests(app)
        assert asked.arguments["name"] == "x" * 200


# -- what a host keeps alive -------------------------------------------------------------------------------------------


class Services:
    """Attempt-scoped services that write down what happens to them."""

    def __init__(self, place: Place, log: list[str], error: Exception | None = None) -> None:
        self.place = place
        self.log = log
        self.error = error

    @contextlib.asynccontextmanager
    async def __call__(self) -> AsyncIterator[Services]:
        self.log.append("open")
        try:
            yield self
        finally:
            self.log.append("close")

    async def on_approval_suspension(self) -> None:
        kinds = self.place.kinds("t")
        owned = self.place.rows("SELECT owner FROM thread WHERE owner IS NOT NULL")
        self.log.append(f"retain requested={'ToolApprovalRequested' in kinds} owned={bool(owned)}")
        if self.error is not None:
            raise self.error


def registered(place: Place, services: Any) -> p.Registration:
    def make() -> Any:
        return services()

    @p.tool(approval=True)
    async def asks_tool(ctx: p.ToolContext) -> str:
        ctx.services.log.append("body")
        return place.world.touch("asked", key=ctx.key)

    return p.Registration(puppet(place, tools=[asks_tool, *tools(place).values()]), services=make)


async def test_services_live_as_long_as_the_attempt(tmp_path: Path) -> None:
    place, log = Place(tmp_path), []
    async with place.app(registered(place, Services(place, log))) as app:
        receipt = await app.submit("puppet", play([["asks_tool", {}]], "done"), thread="t")
        [asked] = await requests(app)
        await until(lambda: "close" in log, "the end of the first attempt")
        assert log == ["open", "retain requested=True owned=True", "close"]
        await app.approve(asked.id, by="alice")
        assert await app.output(receipt, timeout=20) == "done"
        await until(lambda: log.count("close") == 2, "the end of the second attempt")
        assert log[3:] == ["open", "body", "close"]


async def test_a_failed_retention_keeps_its_cause_and_the_work_stays_owed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, log = Place(tmp_path), []
    services = Services(place, log, RuntimeError("no room"))
    async with place.app(registered(place, services)) as app:
        receipt = await app.submit("puppet", play([["asks_tool", {}]], "done"), thread="t")
        await until(lambda: log.count("close") >= 1, "the first attempt")
        await until(lambda: [r for r in caplog.records if r.exc_info], "the report of the failure")
        error = next(r.exc_info[1] for r in caplog.records if r.exc_info)
        assert isinstance(error, p.ApprovalSuspensionError)
        assert isinstance(error.__cause__, RuntimeError)
        [owed] = await app.obligations()
        assert owed.submission == receipt.submission
        services.error = None
        [asked] = await app.approvals()
        await until(lambda: suspended(app, receipt), "the suspension")
        await app.approve(asked.id, by="alice")
        assert await app.output(receipt, timeout=20) == "done"


async def test_services_that_cannot_be_opened_leave_the_work_owed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place, tried = Place(tmp_path), []

    @contextlib.asynccontextmanager
    async def services() -> AsyncIterator[None]:
        tried.append(1)
        if len(tried) < 3:
            raise ConnectionError("not yet")
        yield None

    async with place.app(p.Registration(puppet(place), services=services)) as app:
        receipt = await app.submit("puppet", play("done"))
        assert await app.output(receipt, timeout=20) == "done"
        assert len(tried) == 3


async def test_services_of_a_killed_attempt_are_opened_again(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        with place.worker("serviced") as worker:
            receipt = await app.submit("puppet", play([["keyed", {"gate": "g"}]], "done"))
            await until(lambda: place.waiting("g"), "the body")
            worker.kill()
        place.open_gate("g")
        with place.worker("serviced"):
            assert await app.output(receipt, timeout=20) == "done"
            await until(lambda: place.world.count("closed") == 1, "the end")
    assert (place.world.count("opened"), place.world.count("closed")) == (2, 1)
