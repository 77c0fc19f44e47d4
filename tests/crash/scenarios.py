"""What processes do in the crash tests. Tools touch the world once, under the key they are given, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import apsw

from crash.flows import FLOWS
from perdure import Agent, Applied, CancelRun, NotApplied, Policy, Refused, SafeToRetry, StillUnknown, ToolContext, tool
from perdure.definitions.tool import Tool
from perdure.definitions.verdicts import UnknownCall, Verdict
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import EffectRow
from perdure.ports.provider import ModelError, Profile, Request, ToolMessage
from perdure.ports.store import Transaction
from perdure.providers.scripted import Scripted, call, calls, fail, say
from perdure.rules.accounting import Rate
from perdure.testing.crash import Expected, Scenario, Stage
from perdure.testing.stage import honest
from perdure.testing.world import World

Play = Callable[[Stage], Coroutine[Any, Any, None]]
SCENARIOS: list[Scenario] = []


def scenario(**expected: Any) -> Callable[[Play], Play]:
    """Make a function a scenario of its name."""

    def add(play: Play) -> Play:
        SCENARIOS.append(Scenario(play.__name__.replace("_", " "), play, Expected(**expected)))
        return play

    return add


def toucher(world: World, name: str, **options: Any) -> Tool:
    """A tool that touches the world and returns its receipt."""

    async def body(order: str, ctx: ToolContext) -> str:
        await asyncio.sleep(0)
        return world.touch(name, key=ctx.key, order=order)

    return tool(name=name, description="Touch the world.", **options)(body)


def once_first(world: World, name: str, first: Callable[[str, ToolContext], str], **options: Any) -> Tool:
    """A tool that behaves as ``first`` says when it runs for the first time, and touches the world after that."""

    async def body(order: str, ctx: ToolContext) -> str:
        await asyncio.sleep(0)
        if world.count("try-" + name) == 0:
            world.touch("try-" + name)
            return first(order, ctx)
        return world.touch(name, key=ctx.key, order=order)

    return tool(name=name, description="Touch the world, perhaps.", **options)(body)


def vanish(order: str, ctx: ToolContext) -> str:
    """Time out without having done anything."""
    raise TimeoutError("no answer")


async def play_one(stage: Stage, agent: Agent, **options: Any) -> None:
    """Submit one piece of work and finish it."""
    async with stage.open([agent]) as app:
        receipt = await stage.submit(app, agent, "go")
        await stage.finish(app, receipt, **options)


def tried(*names: str) -> dict[str, str]:
    """Occurrences that only say that a body ran."""
    return {"try-" + name: "observe" for name in names}


# -- answers and classes of effects -----------------------------------------------------------------------------------


@scenario(in_flight=0)
async def plain_answer(stage: Stage) -> None:
    await play_one(stage, Agent("plain", model=Scripted([say("done")])))


@scenario(effects={"pay": "once"}, in_flight=1)
async def once_tool(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("paid")])
    await play_one(stage, Agent("once", tools=[toucher(stage.world, "pay")], model=model))


@scenario(effects={"pay": "once"}, in_flight=1)
async def once_tool_in_a_thread(stage: Stage) -> None:
    world = stage.world

    @tool
    def pay(order: str, ctx: ToolContext) -> str:
        """Pay, blocking."""
        return world.touch("pay", key=ctx.key, order=order)

    model = Scripted([call("pay", order="o1"), say("paid")])
    await play_one(stage, Agent("sync", tools=[pay], model=model))


@scenario(effects={"pay": "once"}, in_flight=1)
async def once_tool_with_probe(stage: Stage) -> None:
    pay = toucher(stage.world, "pay")

    @pay.probe
    async def look(unknown: UnknownCall) -> Verdict:
        found = [entry for entry in stage.world.entries() if entry.key == unknown.key]
        if found:
            return Applied(found[-1].receipt)
        stage.people.note("permitted", unknown.key, effect=unknown.effect)
        return NotApplied("the world does not know it")

    model = Scripted([call("pay", order="o1"), say("paid")])
    await play_one(stage, Agent("probed", tools=[pay], model=model), judge=None)


@scenario(effects={"pay": "once"}, in_flight=1)
async def once_tool_with_a_probe_that_cannot_tell(stage: Stage) -> None:
    pay = toucher(stage.world, "pay")

    @pay.probe
    def look(unknown: UnknownCall) -> StillUnknown:
        return StillUnknown("the bank is closed")

    model = Scripted([call("pay", order="o1"), say("paid")])
    await play_one(stage, Agent("probed", tools=[pay], model=model))


@scenario(effects={"pay": "once", "ship": "once"}, in_flight=2)
async def two_parallel_once_tools(stage: Stage) -> None:
    tools = [toucher(stage.world, "pay"), toucher(stage.world, "ship")]
    model = Scripted([calls(call("pay", order="o1"), call("ship", order="o1")), say("both")])
    await play_one(stage, Agent("parallel", tools=tools, model=model))


@scenario(effects={"pay": "once"}, in_flight=1)
async def once_tools_one_after_another(stage: Stage) -> None:
    model = Scripted([calls(*(call("pay", order=f"o{n}") for n in range(3))), say("all")])
    agent = Agent("batch", tools=[toucher(stage.world, "pay")], model=model, policy=Policy(concurrency=1))
    await play_one(stage, agent)


@scenario(effects={"charge": "keyed"}, in_flight=0)
async def keyed_tool(stage: Stage) -> None:
    model = Scripted([call("charge", order="o1"), say("charged")])
    await play_one(
        stage, Agent("keyed", tools=[toucher(stage.world, "charge", effect="keyed")], model=model), judge=None
    )


@scenario(effects={"label": "idempotent"}, in_flight=0)
async def idempotent_tool(stage: Stage) -> None:
    model = Scripted([call("label", order="o1"), say("labelled")])
    agent = Agent("idempotent", tools=[toucher(stage.world, "label", effect="idempotent")], model=model)
    await play_one(stage, agent, judge=None)


@scenario(effects={"look": "observe", "pay": "once"}, in_flight=1)
async def observe_tool(stage: Stage) -> None:
    tools = [toucher(stage.world, "look", effect="observe"), toucher(stage.world, "pay")]
    model = Scripted([call("look", order="o1"), call("pay", order="o1"), say("seen")])
    await play_one(stage, Agent("observe", tools=tools, model=model))


# -- steps ------------------------------------------------------------------------------------------------------------


def worker_tool(world: World, *, once: str | None = None) -> Tool:
    """A tool of three steps; the one named ``once`` is an effect of its own."""

    @tool(steps=True)
    async def work(order: str, ctx: ToolContext) -> list[str]:
        """Work in three steps."""

        async def touch(name: str) -> str:
            kind = "wire" if name == once else "part"
            return world.touch(kind, key=ctx.step_key(name), order=order, step=name)

        return [await ctx.step(name, touch, name, effect="once" if name == once else None) for name in ("a", "b", "c")]

    return work


@scenario(effects={"part": "step"}, in_flight=0)
async def durable_steps(stage: Stage) -> None:
    model = Scripted([call("work", order="o1"), say("worked")])
    await play_one(stage, Agent("steps", tools=[worker_tool(stage.world)], model=model), judge=None)


@scenario(effects={"part": "step", "wire": "once"}, in_flight=1)
async def once_step_inside_steps(stage: Stage) -> None:
    model = Scripted([call("work", order="o1"), say("worked")])
    await play_one(stage, Agent("once-step", tools=[worker_tool(stage.world, once="b")], model=model))


# -- approvals --------------------------------------------------------------------------------------------------------


@scenario(effects={"pay": "once"}, asks=frozenset({"pay"}), in_flight=1)
async def approval_approved(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("paid")])
    await play_one(stage, Agent("asks", tools=[toucher(stage.world, "pay", approval=True)], model=model))


@scenario(effects={"pay": "once"}, asks=frozenset({"pay"}), in_flight=0)
async def approval_rejected(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("not paid")])
    agent = Agent("asks", tools=[toucher(stage.world, "pay", approval=True)], model=model)
    await play_one(stage, agent, decide="rejected")


@scenario(effects={"pay": "once", "ship": "once"}, asks=frozenset({"pay"}), in_flight=1)
async def approval_beside_a_free_call(stage: Stage) -> None:
    tools = [toucher(stage.world, "pay", approval=True), toucher(stage.world, "ship")]
    model = Scripted([calls(call("pay", order="o1"), call("ship", order="o1")), say("both")])
    await play_one(stage, Agent("mixed", tools=tools, model=model))


# -- cancelling -------------------------------------------------------------------------------------------------------


def hanging(stage: Stage) -> Tool:
    """A tool that touches the world and then never ends by itself."""

    @tool
    async def pay(order: str, ctx: ToolContext) -> str:
        """Pay, and wait for ever."""
        stage.world.touch("pay", key=ctx.key, order=order)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    return pay


@scenario(effects={"pay": "once"}, outcomes=frozenset({"cancelled"}), in_flight=1, doubts=1)
async def cancel_while_running(stage: Stage) -> None:
    agent = Agent("hangs", tools=[hanging(stage)], model=Scripted([call("pay", order="o1"), say("paid")]))
    async with stage.open([agent]) as app:
        receipt = await stage.submit(app, agent, "go")
        await stage.until(lambda: stage.world.count("pay") > 0 or stage.resting(app))
        await stage.cancel(app, receipt)
        await stage.finish(app, receipt)


@scenario(effects={"pay": "once"}, asks=frozenset({"pay"}), outcomes=frozenset({"cancelled", "completed"}), in_flight=1)
async def cancel_while_queued(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("paid")])
    agent = Agent("asks", tools=[toucher(stage.world, "pay", approval=True)], model=model)
    async with stage.open([agent]) as app:
        first = await stage.submit(app, agent, "first", key="1", thread="queue")
        second = await stage.submit(app, agent, "second", key="2", thread="queue")
        await stage.rest(app)
        await stage.cancel(app, second)
        await stage.finish(app, second, decide=None, judge=None)
        await stage.finish(app, first)


@scenario(effects={"pay": "once"}, asks=frozenset({"pay"}), outcomes=frozenset({"cancelled"}), in_flight=0)
async def cancel_while_suspended(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("paid")])
    agent = Agent("asks", tools=[toucher(stage.world, "pay", approval=True)], model=model)
    async with stage.open([agent]) as app:
        receipt = await stage.submit(app, agent, "go")
        await stage.rest(app)
        await stage.cancel(app, receipt)
        await stage.finish(app, receipt)


@scenario(effects={"pay": "once", **tried("pay")}, outcomes=frozenset({"cancelled"}), in_flight=1, doubts=1)
async def cancel_while_unknown(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("paid")])
    agent = Agent("lost", tools=[once_first(stage.world, "pay", vanish)], model=model)
    async with stage.open([agent]) as app:
        receipt = await stage.submit(app, agent, "go")
        await stage.rest(app)
        await stage.cancel(app, receipt)
        await stage.finish(app, receipt)
        await stage.judge(app)  # what stayed unknown is cleared up later: an audit, which resumes nothing
        await stage.rest(app)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def touch_and_vanish(world: World) -> Callable[[str, ToolContext], str]:
    """Touch the world, then time out."""

    def first(order: str, ctx: ToolContext) -> str:
        world.touch("pay", key=ctx.key, order=order)
        raise TimeoutError("no answer")

    return first


def lost_agent(stage: Stage, *, touched: bool) -> Agent:
    """Its payment times out the first time, having touched the world or not."""
    first = touch_and_vanish(stage.world) if touched else vanish
    model = Scripted([call("pay", order="o1"), say("done")])
    return Agent("lost", tools=[once_first(stage.world, "pay", first)], model=model)


LOST: dict[str, Any] = {"effects": {"pay": "once", **tried("pay")}, "in_flight": 1, "doubts": 1}


@scenario(**LOST)
async def verdict_applied(stage: Stage) -> None:
    await play_one(stage, lost_agent(stage, touched=True))


@scenario(**LOST)
async def verdict_refused(stage: Stage) -> None:
    def judge(stage: Stage, effect: EffectRow) -> Verdict:
        verdict = honest(stage, effect)
        return Refused("the bank never saw it") if isinstance(verdict, NotApplied) else verdict

    await play_one(stage, lost_agent(stage, touched=False), judge=judge)


@scenario(**LOST)
async def verdict_not_applied(stage: Stage) -> None:
    await play_one(stage, lost_agent(stage, touched=False))


@scenario(**LOST)
async def verdict_safe_to_retry(stage: Stage) -> None:
    def judge(stage: Stage, effect: EffectRow) -> Verdict:
        return SafeToRetry() if effect.tries == 1 else honest(stage, effect)

    await play_one(stage, lost_agent(stage, touched=True), judge=judge)


@scenario(**LOST, outcomes=frozenset({"cancelled"}))
async def verdict_cancel_run(stage: Stage) -> None:
    await play_one(stage, lost_agent(stage, touched=True), judge=lambda stage, effect: CancelRun())


@scenario(effects={"pay": "once", "ship": "once", **tried("pay")}, in_flight=2, doubts=1)
async def verdict_on_one_of_two(stage: Stage) -> None:
    """The first of two parallel calls is lost; the other goes on; then a verdict frees the lost one."""
    tools = [once_first(stage.world, "pay", vanish), toucher(stage.world, "ship")]
    model = Scripted([calls(call("pay", order="o1"), call("ship", order="o1")), say("both")])
    await play_one(stage, Agent("half", tools=tools, model=model))


# -- failures ---------------------------------------------------------------------------------------------------------


def retrying(request: Request) -> Any:
    """A model that calls again when it is told that its call failed: what an agent does."""
    last = request.messages[-1]
    failed = isinstance(last, ToolMessage) and any(result.failed for result in last.results)
    return call("pay", order="o1") if request.turn == 1 or failed else say("paid")


@scenario(effects={"pay": "once"}, in_flight=1)
async def model_that_tries_again(stage: Stage) -> None:
    await play_one(stage, Agent("again", tools=[toucher(stage.world, "pay")], model=Scripted(retrying)))


@scenario(effects={"pay": "once"}, in_flight=1)
async def refused_then_paid(stage: Stage) -> None:
    world = stage.world

    @tool
    async def pay(order: str, ctx: ToolContext) -> str:
        """Pay, unless it is the first time."""
        if ctx.call.startswith("1."):
            raise Refused("no funds")
        return world.touch("pay", key=ctx.key, order=order)

    await play_one(stage, Agent("refused", tools=[pay], model=Scripted(retrying)))


# -- models -------------------------------------------------------------------------------------------------------------


def thinker(world: World, *first: Any, then: Callable[[str], Any] = say) -> Scripted:
    """A model that touches the world under the key it is given and answers with the receipt; ``first`` it fails so."""

    def think(request: Request) -> Any:
        tried = world.count("try-think")
        if tried < len(first):
            world.touch("try-think")
            if first[tried] is SILENT:  # it was served, and nobody heard the answer
                world.touch("think", key=request.key or None, turn=request.turn)
            return first[tried]
        receipt = world.touch("think", key=request.key or None, turn=request.turn)
        return then(receipt) if request.turn == 1 else say(receipt)

    return Scripted(think)


THINKS: dict[str, Any] = {"effects": {"think": "once"}, "in_flight": 1}
ONCE = Policy(model_calls="once")
BUSY = fail(ModelError("overloaded", dispatched="yes", retryable=True, retry_after=0.001))
SILENT = fail(ModelError("no answer", dispatched="unknown", retryable=True, retry_after=0.001))


@scenario(**THINKS)
async def once_model(stage: Stage) -> None:
    await play_one(stage, Agent("thinker", model=thinker(stage.world), policy=ONCE))


@scenario(effects={"think": "once", "pay": "once"}, in_flight=1)
async def once_model_with_a_tool(stage: Stage) -> None:
    model = thinker(stage.world, then=lambda receipt: call("pay", order=receipt))
    await play_one(stage, Agent("thinker", tools=[toucher(stage.world, "pay")], model=model, policy=ONCE))


@scenario(effects={"think": "once", **tried("think")}, in_flight=1)
async def once_model_refused_then_answered(stage: Stage) -> None:
    await play_one(stage, Agent("thinker", model=thinker(stage.world, BUSY), policy=ONCE))


@scenario(effects={"think": "once", **tried("think")}, in_flight=1, doubts=1)
async def once_model_lost(stage: Stage) -> None:
    await play_one(stage, Agent("thinker", model=thinker(stage.world, SILENT), policy=ONCE))


@scenario(effects={"think": "once", **tried("think")}, outcomes=frozenset({"cancelled"}), in_flight=1, doubts=1)
async def once_model_lost_and_cancelled(stage: Stage) -> None:
    agent = Agent("thinker", model=thinker(stage.world, SILENT), policy=ONCE)
    await play_one(stage, agent, judge=lambda stage, effect: CancelRun())


@scenario(**THINKS)
async def model_whose_rate_is_shared(stage: Stage) -> None:
    """Every call is counted before it, and corrected after it, in the ledger."""
    model = thinker(stage.world)
    model.profile = Profile(rate=Rate(requests=1_000, tokens=1_000_000), shared=True)
    await play_one(stage, Agent("thinker", model=model, policy=ONCE))


@scenario(**THINKS)
async def run_that_is_watched_from_elsewhere(stage: Stage) -> None:
    """Its events are left in the store for another process; nothing depends on them."""
    agent = Agent("thinker", model=thinker(stage.world), policy=ONCE)
    async with stage.open([agent]) as app:
        receipt = await stage.submit(app, agent, "go")
        wanted = functools.partial(_watch, receipt.submission)
        await app.store.write(Boundary.LIVE, wanted)
        await stage.finish(app, receipt)


def _watch(submission: str, tx: Transaction) -> None:
    tx.ledger.watch_events(submission, "somebody", 2**60)


@scenario(effects={"think": "observe", **tried("think")}, in_flight=0)
async def model_that_fails_and_is_asked_again(stage: Stage) -> None:
    await play_one(stage, Agent("thinker", model=thinker(stage.world, SILENT, BUSY)))


@scenario()
async def output_rejected_then_accepted(stage: Stage) -> None:
    await play_one(stage, Agent("typed", output=int, model=Scripted([say("many"), say("42")])))


@scenario(effects={"pay": "once"}, outcomes=frozenset({"failed"}), in_flight=1)
async def policy_limit(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("paid")])
    policy = Policy(max_turns=1, on_exhaustion="fail")
    await play_one(stage, Agent("short", tools=[toucher(stage.world, "pay")], model=model, policy=policy))


@scenario(effects={"pay": "once"}, in_flight=1)
async def policy_limit_with_a_last_answer(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("paid")])
    agent = Agent("short", tools=[toucher(stage.world, "pay")], model=model, policy=Policy(max_turns=1))
    await play_one(stage, agent)


def no_refund(stage: Stage, effect: EffectRow) -> Verdict:
    """The refusing tool never does anything; its unknown outcome is a refusal."""
    return Refused("no funds") if effect.operation == "pay" else honest(stage, effect)


@scenario(effects={"pay": "once"}, outcomes=frozenset({"completed", "failed"}), in_flight=1)
async def deadline_while_nobody_lives(stage: Stage) -> None:
    """The run may take less time than a lease: whoever takes over finds it past its deadline."""
    model = Scripted([call("pay", order="o1"), say("paid")])
    policy = Policy(max_duration="10s")
    await play_one(stage, Agent("brief", tools=[toucher(stage.world, "pay")], model=model, policy=policy), judge=None)


@scenario(effects={"pay": "once"}, asks=frozenset({"pay"}), outcomes=frozenset({"failed"}), in_flight=0)
async def deadline_while_suspended(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("paid")])
    tools = [toucher(stage.world, "pay", approval=True)]
    agent = Agent("brief", tools=tools, model=model, policy=Policy(max_duration="10s"))
    await play_one(stage, agent, decide=None)


@scenario(effects={"pay": "once", **tried("pay")}, outcomes=frozenset({"failed"}), in_flight=1, doubts=1)
async def deadline_while_unknown(stage: Stage) -> None:
    model = Scripted([call("pay", order="o1"), say("paid")])
    tools = [once_first(stage.world, "pay", vanish)]
    agent = Agent("brief", tools=tools, model=model, policy=Policy(max_duration="10s"))
    await play_one(stage, agent, judge=None)


@scenario(effects={"ship": "once"}, outcomes=frozenset({"failed"}), in_flight=2)
async def on_failure_fail(stage: Stage) -> None:
    @tool(on_failure="fail")
    async def pay(order: str) -> str:
        """Refuse."""
        raise Refused("no funds")

    model = Scripted([calls(call("pay", order="o1"), call("ship", order="o1")), say("both")])
    agent = Agent("strict", tools=[pay, toucher(stage.world, "ship")], model=model)
    await play_one(stage, agent, judge=no_refund)


# -- several submissions ----------------------------------------------------------------------------------------------


@scenario(effects={"pay": "once", **tried("pay")}, in_flight=1, doubts=1)
async def first_parked_second_passes(stage: Stage) -> None:
    def answer(request: Request) -> Any:
        wants = any("first" in getattr(message, "text", "") for message in request.messages[-1:])
        return call("pay", order="o1") if request.turn == 1 and wants else say("done")

    agent = Agent("lane", tools=[once_first(stage.world, "pay", vanish)], model=Scripted(answer))
    async with stage.open([agent]) as app:
        first = await stage.submit(app, agent, "first", key="1", thread="lane")
        second = await stage.submit(app, agent, "second", key="2", thread="lane")
        await stage.finish(app, second, judge=None)
        await stage.finish(app, first, second)


@scenario(effects={"pay": "once"}, outcomes=frozenset({"completed"}))
async def persistent_run_then_submit(stage: Stage) -> None:
    world = stage.world

    @tool
    async def pay(order: str, ctx: ToolContext) -> str:
        """Pay for this run."""
        return world.touch("pay", key=ctx.key, order=order, run=ctx.run)

    agent = Agent("chat", tools=[pay], model=Scripted([call("pay", order="o1"), say("paid")]))
    async with stage.open([agent]) as app:
        await stage.once("ran", lambda: app.run(agent, "hello", thread="chat"))
        receipt = await stage.submit(app, agent, "go", thread="chat")
        await stage.finish(app, receipt)


@scenario(effects={"pay": "once", **tried("pay")}, in_flight=1, doubts=1)
async def business_key(stage: Stage) -> None:
    """A payment is lost; another run may not pay the same order before there is a verdict."""
    pay = once_first(stage.world, "pay", vanish, key=lambda arguments: str(arguments["order"]))
    agent = Agent("orders", tools=[pay], model=Scripted([call("pay", order="o1"), say("done")]))
    async with stage.open([agent]) as app:
        first = await stage.submit(app, agent, "first", key="1", thread="a")
        await stage.rest(app)
        if stage.row(app, first).state != "settled":
            second = await stage.submit(app, agent, "second", key="2", thread="b")
            await stage.finish(app, second, judge=None)
        await stage.finish(app, first)


# -- operators --------------------------------------------------------------------------------------------------------


@scenario(effects={"pay": "once"}, in_flight=1)
async def operators_hands(stage: Stage) -> None:
    """Everything an operator may do beside the work: redrive, recover, archive, and open the thread again."""
    model = Scripted([call("pay", order="o1"), say("paid")])
    agent = Agent("once", tools=[toucher(stage.world, "pay")], model=model)
    async with stage.open([agent], workers=0) as app:
        receipt = await stage.submit(app, agent, "go", thread="desk")
        await app.redrive(receipt)
        await app.recover()
    async with stage.open([agent]) as app:
        await stage.finish(app, receipt)
        await app.recover()
        await app.archive("desk")


@scenario(effects={"pay": "once"}, outcomes=frozenset({"completed"}), in_flight=1)
async def recovery_by_a_stranger(stage: Stage) -> None:
    """A process that does not know the agent recovers what another left behind; then the agent's own goes on."""
    model = Scripted([call("pay", order="o1"), say("paid")])
    agent = Agent("once", tools=[toucher(stage.world, "pay")], model=model)
    async with stage.open([], workers=0) as app:
        await app.recover()
    await play_one(stage, agent)


@scenario(effects={"pay": "once"}, asks=frozenset({"pay"}), in_flight=1)
async def blocked_thread(stage: Stage) -> None:
    """A stored digest is damaged while the run waits: the thread is blocked, mended, recovered, and goes on."""
    model = Scripted([call("pay", order="o1"), say("paid")])
    agent = Agent("asks", tools=[toucher(stage.world, "pay", approval=True)], model=model)

    def digest(change: str, *values: Any) -> Any:
        with contextlib.closing(apsw.Connection(str(stage.folder / "store.db"))) as connection:
            return connection.execute(change, values).fetchall()

    async with stage.open([agent]) as app:
        receipt = await stage.submit(app, agent, "go")
        await stage.rest(app)
        if not stage.people.noted("mended", "store"):
            if not stage.people.noted("damaged", "store"):
                [(kept,)] = digest("SELECT hex(tail) FROM batch WHERE first = 1")
                stage.people.note("damaged", "store", kept=kept)
            digest("UPDATE batch SET tail = zeroblob(32) WHERE first = 1")
            await stage.decide(app, "approved")
            await stage.rest(app)
            digest("UPDATE batch SET tail = unhex(?) WHERE first = 1", stage.people.noted("damaged")[0]["kept"])
            stage.people.note("mended", "store")
        await app.recover()
        await stage.finish(app, receipt)


# -- two owners -------------------------------------------------------------------------------------------------------


def slow(stage: Stage, release: asyncio.Event) -> Tool:
    """A tool whose body touches the world and returns only when it is released, whatever its owner is told."""

    @tool
    async def pay(order: str, ctx: ToolContext) -> str:
        """Pay, slowly."""
        receipt = stage.world.touch("pay", key=ctx.key, order=order)
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        return receipt

    return pay


async def two_owners(stage: Stage, *, cancel: bool) -> None:
    """An owner is slow; its lease lapses; another takes over and ends the work; then the first wants to go on."""
    release = asyncio.Event()
    agent = Agent("slow", tools=[slow(stage, release)], model=Scripted([call("pay", order="o1"), say("paid")]))
    async with stage.open([agent]) as first:
        receipt = await stage.submit(first, agent, "go")
        await stage.until(lambda: stage.world.count("pay") > 0 or stage.resting(first))
        if stage.resting(first):
            release.set()  # an earlier incarnation died: its call is unknown, and nobody is slow this time
        async with stage.open([agent], ahead=60) as second:
            if cancel:
                await stage.cancel(second, receipt)
            await stage.finish(second, receipt)
            release.set()
            await stage.rest(first)
        stage.see(stage.row(first, receipt))


@scenario(effects={"pay": "once"}, in_flight=1, doubts=1)
async def slow_owner_comes_back(stage: Stage) -> None:
    await two_owners(stage, cancel=False)


@scenario(effects={"pay": "once"}, outcomes=frozenset({"cancelled"}), in_flight=1, doubts=1)
async def slow_owner_comes_back_to_a_cancelled_run(stage: Stage) -> None:
    await two_owners(stage, cancel=True)


SCENARIOS.extend(FLOWS)


def named(name: str) -> Scenario:
    """The scenario of this name."""
    return next(scenario for scenario in SCENARIOS if scenario.name == name)
