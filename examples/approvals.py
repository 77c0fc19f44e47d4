"""A tool that asks a person before it runs, and runs only with the arguments that were approved.

Two refunds in one batch: the small one runs at once, the large one waits. The run holds no worker while it waits; the
decision is recorded, with its author and reason, before anything acts on it.

    python examples/approvals.py
"""

import asyncio
import tempfile
from pathlib import Path

import perdure as p
from perdure.providers.scripted import Scripted, call, calls, say

BOOKED: list[str] = []


@p.tool(approval=lambda arguments: arguments["cents"] > 5000)
async def refund(order: str, cents: int) -> str:
    """Pay money back; above 50.00 a person is asked first."""
    BOOKED.append(f"{order}:{cents}")
    return f"refunded {cents} cents of {order}"


def agent_of(name: str) -> p.Agent:
    both = calls(call("refund", order="o1", cents=900), call("refund", order="o2", cents=90_000))
    return p.Agent(name, tools=[refund], model=Scripted([both, say("Done what I was allowed to do.")]))


async def decided(app: p.App, agent: p.Agent, decision: str) -> None:
    receipt = await app.submit(agent, "Refund both orders.")
    async for record in app.observe(receipt):
        if record.kind == "ToolCallSettled":
            break  # the small refund has run; the large one was asked about before it
    [request] = await app.approvals(run=receipt.run)
    print(f"{request.tool} asks for {request.arguments}; booked so far: {BOOKED}")
    if decision == "approve":
        await app.approve(request.id, by="ann", reason="goods came back")
    else:
        await app.reject(request.id, by="ann", reason="no goods came back")
    print("run:", (await app.settlement(receipt)).status)
    for call_ in (await app.inspect(receipt)).turns[0].calls:
        print(" ", call_.arguments["order"], call_.status, call_.error.message if call_.error else call_.result)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        agents = [agent_of("approving"), agent_of("rejecting")]
        async with p.open(Path(folder) / "shop.db", agents=agents) as app:
            await decided(app, agents[0], "approve")
            BOOKED.clear()
            await decided(app, agents[1], "reject")
            print("booked in the end:", BOOKED)


if __name__ == "__main__":
    asyncio.run(main())
