"""The demo's agent, as a user of Perdure would write it: it looks an order up, refunds it at the bank, and answers.

``app`` is what ``perdure worker --app perdure.demo.agent:app`` opens; the environment says where bank and store are.
The refund declares no probe, so an outcome that a crash hides is for a person to judge. Its model is a script that
knows nothing but what each request holds.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import msgspec

import perdure as p
from perdure.demo.bank import BankClient, BankRefused, Order
from perdure.demo.data import RefundRequest
from perdure.ports.provider import Request, ToolMessage, ToolResult, UserMessage
from perdure.providers.scripted import Call, Say, Scripted, call, say

BANK = "PERDURE_DEMO_BANK"
STORE = "PERDURE_DEMO_STORE"
TIED = "PERDURE_DEMO_TIED"
LEASE = "2s"  # a dead worker is found out this late at most
NAME = "refunds"


class Outcome(msgspec.Struct, frozen=True):
    """What the agent says in the end. ``receipt`` is the bank's, empty when nothing was refunded."""

    refunded: bool
    receipt: str
    note: str


@p.tool(effect="observe", refusals=(BankRefused,))
async def find_order(ctx: p.ToolContext, order: str) -> Order:
    """Look an order up at the bank.

    Args:
        order: the order number.
    """
    found: Order = await ctx.services.order(order)
    return found


@p.tool(effect="once", risk="high", refusals=(BankRefused,))
async def refund(ctx: p.ToolContext, order: str, cents: int) -> str:
    """Pay money back. Returns the bank's receipt.

    Args:
        order: the order number.
        cents: how much.
    """
    receipt: str = (await ctx.services.refund(order, cents, ctx.key)).receipt
    return receipt


def decide(request: Request) -> Call | Say:
    """The model: one next move, from the messages of the request alone."""
    asked, results = _conversation(request)
    found = results.get("find_order")
    if found is None:
        return call("find_order", order=asked.order)
    if found.failed:
        return say(Outcome(False, "", f"declined: there is no order {asked.order}"))
    order = msgspec.json.decode(found.content, type=Order)
    if asked.cents > order.cents:
        return say(Outcome(False, "", f"declined: {asked.cents} cents are more than the order's {order.cents}"))
    paid = results.get("refund")
    if paid is None:
        return call("refund", order=asked.order, cents=asked.cents)
    if paid.failed:
        return say(Outcome(False, "", f"declined: {paid.content}"))
    return say(Outcome(True, _text(paid.content), f"refunded {asked.cents} cents"))


def _conversation(request: Request) -> tuple[RefundRequest, dict[str, ToolResult]]:
    """What is asked now, and what the tools answered about it. A thread holds other requests, and may return to one."""
    asked: RefundRequest | None = None
    results: dict[str, dict[str, ToolResult]] = {}
    for message in request.messages:
        match message:
            case UserMessage(text):
                asked = msgspec.json.decode(text.rpartition("\n\n")[2], type=RefundRequest)
            case ToolMessage(answers) if asked is not None:
                results.setdefault(asked.order, {}).update({answer.name: answer for answer in answers})
            case _:
                pass
    assert asked is not None
    return asked, results.get(asked.order, {})


def _text(content: str) -> str:
    """A text result, which models are shown with or without its quotes."""
    return str(json.loads(content)) if content.startswith('"') else content


agent = p.Agent(
    NAME,
    input=RefundRequest,
    output=Outcome,
    instructions="Settle the refund request: look the order up, refund what is asked if the order covers it, answer.",
    tools=[find_order, refund],
    model=Scripted(decide),
)


@asynccontextmanager
async def _bank(url: str) -> AsyncIterator[BankClient]:
    yield BankClient(url)


def app() -> AbstractAsyncContextManager[p.App]:
    """The app of the demo's workers: store and bank are named by the environment."""
    if os.environ.get(TIED):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    registration = p.Registration(agent, services=partial(_bank, os.environ[BANK]))
    return p.open(os.environ[STORE], agents=[registration], lease=LEASE)


def _end_with_parent() -> None:
    """A demo that dies takes its workers along: their standard input ends."""
    while os.read(0, 4096):
        pass
    os._exit(0)
