"""A refund whose worker is killed between the payment and its own record; a probe says what happened.

A worker process books a refund and is ended by SIGKILL before the outcome is recorded. The next process finds the call
started and without an outcome. It does not run it again: it asks the probe, which looks into the bank's own ledger.

    python examples/refunds_with_probe.py
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import perdure as p
from perdure.providers.scripted import Scripted, call, say


class Bank:
    """The outside world: a file with one line a booking. It knows nothing of Perdure."""

    def __init__(self, folder: Path) -> None:
        self.ledger = folder / "bank.txt"

    def book(self, order: str, cents: int, key: str) -> str:
        with self.ledger.open("a") as file:
            file.write(f"{key} {order} {cents}\n")
        return f"receipt-{order}"

    def find(self, key: str) -> list[str]:
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return [line for line in lines if line.startswith(key)]


def agent_of(bank: Bank, *, dies: bool) -> p.Agent:
    @p.tool  # effect="once" is the default: never silently repeated
    async def refund(ctx: p.ToolContext, order: str, cents: int) -> str:
        """Pay money back."""
        receipt = bank.book(order, cents, ctx.key)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)  # the money has moved and nobody wrote it down
        return receipt

    @refund.probe  # asked when a crash hides the outcome; it changes nothing
    async def look(unknown: p.UnknownCall) -> p.Verdict:
        found = bank.find(unknown.key)
        print("probe:", "the bank has booked it" if found else "the bank has no such key")
        return p.Applied(f"receipt-{unknown.arguments['order']}") if found else p.NotApplied("no such key")

    model = Scripted([call("refund", order="o1", cents=1250), say("Your refund is on its way.")])
    return p.Agent("refunds", tools=[refund], model=model)


async def work(folder: Path, *, dies: bool) -> None:
    bank = Bank(folder)
    agent = agent_of(bank, dies=dies)
    async with p.open(folder / "shop.db", agents=[agent], lease="1s") as app:
        receipt = await app.submit(agent, "Order o1 arrived broken.", key="ticket-7")
        output = await app.output(receipt)
        [effect] = await app.effects(run=receipt.run)
        print("answer:", output)
        print("effect:", effect.status, "by verdict", effect.verdict, "of", effect.by)
        print("bookings:", len(bank.find(effect.key)))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        killed = subprocess.run([sys.executable, __file__, name], check=False)
        print("the first worker ended with", killed.returncode)
        asyncio.run(work(Path(name), dies=False))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(work(Path(sys.argv[1]), dies=True))
    else:
        main()
