"""The agents that are measured: scripted models, trivial bodies, so that what is left is ours."""

from __future__ import annotations

from typing import Any

import perdure as p
from perdure.providers.scripted import Scripted, call, calls, say

POLICY = p.Policy(max_turns=100_000, max_tool_calls=100_000, concurrency=1, max_duration="1h")


def answer(number: int) -> dict[str, Any]:
    """What a step returns: the same small value the peers' benchmarks store."""
    return {"ok": True, "n": number, "text": "x" * 40}


async def _step(number: int) -> dict[str, Any]:
    return answer(number)


@p.tool(steps=True)
async def steps(ctx: p.ToolContext, count: int) -> int:
    """Durable steps, one after another."""
    for number in range(count):
        await ctx.step(f"s{number}", _step, number)
    return count


@p.tool(steps=True)
async def once_steps(ctx: p.ToolContext, count: int) -> int:
    """Steps of class once: a started record before each, its outcome after it."""
    for number in range(count):
        await ctx.step(f"s{number}", _step, number, effect="once")
    return count


@p.tool
async def once(number: int) -> dict[str, Any]:
    """An effect of class once."""
    return answer(number)


def stepper(count: int) -> p.Agent:
    """One call with ``count`` steps, then an answer."""
    return p.Agent("stepper", tools=[steps], policy=POLICY, model=Scripted([call("steps", count=count), say("done")]))


def once_stepper(count: int) -> p.Agent:
    """One call with ``count`` once steps, then an answer."""
    model = Scripted([call("once_steps", count=count), say("done")])
    return p.Agent("once-stepper", tools=[once_steps], policy=POLICY, model=model)


def once_batch(count: int) -> p.Agent:
    """One response with ``count`` once calls that run one after another."""
    model = Scripted([calls(*[call("once", number=n) for n in range(count)]), say("done")])
    return p.Agent("once-batch", tools=[once], policy=POLICY, model=model)


def once_turns(count: int) -> p.Agent:
    """``count`` turns with one once call each."""
    model = Scripted(lambda r: call("once", number=r.turn) if r.turn <= count else say("done"))
    return p.Agent("once-turns", tools=[once], policy=POLICY, model=model)


def talker(count: int, size: int = 500) -> p.Agent:
    """``count`` turns, each with a once call whose argument and result are ``size`` bytes."""
    text = "t" * size

    @p.tool
    async def note(text: str) -> str:
        """Keep a note."""
        return text

    model = Scripted(lambda r: call("note", text=text) if r.turn <= count else say("done"))
    return p.Agent("talker", tools=[note], policy=POLICY, model=model)
