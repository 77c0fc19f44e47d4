"""Test your own agent as Perdure tests itself: let its process die at every durable boundary, and judge by a witness.

The sweep plays the scenario in a forked process that ends itself at boundary 1, and lets the next process finish; then
at boundary 2, and so on. After each run it compares what the store says with the ``World``: a file that counts what
really happened. The twin declares the payment ``idempotent``, which it is not, and the sweep must find the damage: a
test whose twin passes proves nothing.

    python examples/crash_sweep.py
"""

import re

import perdure as p
from perdure.providers.scripted import Scripted, call, say
from perdure.testing.crash import Expected, Scenario, Stage, Violation, sweep


async def play(stage: Stage, effect: str) -> None:
    """One incarnation: open the store, submit under a key, and do what people do until the work is settled."""

    @p.tool(effect=effect)
    async def pay(ctx: p.ToolContext, order: str) -> str:
        """Pay for an order."""
        return stage.world.touch("pay", key=ctx.key, order=order)

    agent = p.Agent("payer", tools=[pay], model=Scripted([call("pay", order="o1"), say("paid")]))
    async with stage.open([agent]) as app:
        receipt = await stage.submit(app, agent, "Pay for o1.")
        await stage.finish(app, receipt)  # also looks into the world and gives a verdict where an outcome is unknown


async def careful(stage: Stage) -> None:
    await play(stage, "once")


async def careless(stage: Stage) -> None:
    await play(stage, "idempotent")


PROMISE = Expected(effects={"pay": "once"}, in_flight=1)
SCENARIO, TWIN = Scenario("one payment", careful, PROMISE), Scenario("its twin", careless, PROMISE)


def twice(violation: Violation) -> bool:
    return "took place" in violation.text


def main() -> None:
    report = sweep(SCENARIO)
    print("deaths:", report.runs, "at", report.boundaries, "boundaries; broken runs:", report.broken)
    twin = sweep(TWIN, stop=twice)
    found = [violation.text for violation in twin.violations if twice(violation)]
    print("twin:", re.sub("key_[a-z0-9]+", "key_…", found[0]) if found else "nothing found, so this proves nothing")


if __name__ == "__main__":
    main()
