"""A first agent: run in memory, then owed by a store.

Shows a typed input and output, a tool, and what a receipt is worth: the same key gives the same work, and the output
can be read by whoever opens the store later.

    python examples/first_agent.py

The model is a script, so this needs no key and no network. Give ``model="openai:NAME"`` instead for a real one.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

import perdure as p
from perdure.providers.scripted import Scripted, call, say

SHELVES = {"tea": 7, "cups": 0}


@dataclass
class Question:
    item: str


@dataclass
class Answer:
    in_stock: bool
    note: str


@p.tool(effect="observe")
def stock(item: str) -> int:
    """How many of an item are on the shelf.

    Args:
        item: name of the item.
    """
    return SHELVES[item]


keeper = p.Agent(
    "keeper",
    input=Question,
    output=Answer,
    instructions="Say whether the item is in stock.",
    tools=[stock],
    model=Scripted([call("stock", item="tea"), say(Answer(True, "7 left"))]),
)


async def main() -> None:
    # here and now: nothing is stored, nothing is owed
    result = await keeper.run(Question("tea"))
    print("in memory:", result.output.note, "after", result.turns, "turns")

    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "shop.db"
        # durable: from the receipt on, exactly one settlement is owed
        async with p.open(store, agents=[keeper]) as app:
            receipt = await app.submit(keeper, Question("tea"), key="question-1")
            again = await app.submit(keeper, Question("tea"), key="question-1")
            print("same work:", again == receipt)
            settled = await app.settlement(receipt)
            print("settled:", settled.status)

        # later, in any process: a client reads what was settled
        async with p.open(store, agents=[keeper], workers=0) as client:
            answer = await client.output(receipt)
            print("read back:", answer.note)
            print("verified:", bool(await client.verify()))


if __name__ == "__main__":
    asyncio.run(main())
