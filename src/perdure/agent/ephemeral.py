"""Running an agent here and now, with nobody to ask later: the same interpreter on an attempt that is stored nowhere."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

import msgspec

from perdure.agent import events
from perdure.agent.batch import Toolbox
from perdure.agent.events import Event
from perdure.agent.loop import Emit, Interpreter
from perdure.agent.nowhere import NowhereStore
from perdure.canonical import decode
from perdure.definitions.agent import AgentDefinition
from perdure.engine.attempt import Attempt, Parked, Settled
from perdure.engine.host import Host
from perdure.errors import Denied, RunCancelled, RunFailed, Unavailable
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Claimed, Intent, Submission
from perdure.ports.log import Tail
from perdure.ports.provider import Model
from perdure.records.codec import EMPTY_TAIL
from perdure.records.effect import ToolApprovalDecided
from perdure.records.parts import Usage
from perdure.rules import fold

T = TypeVar("T")
Approve = Callable[[events.ApprovalRequested], Any]
"""Decides a request for approval at once: returns a truth value, or an awaitable of one."""


class Result(msgspec.Struct, frozen=True):
    """What a run here and now came to.

    Attributes:
        output: decoded to the agent's output type.
        thread, run: identities. turns: model responses. usage: tokens.
        finish_reason: the provider's reason for the last response. disposition: the application's tag.
        cost: US dollars of its responses, None without a price. exhausted: the limit that was used up before the answer
            (``turns``, ``tool_calls``, ``tokens``, ``cost``); empty when none was.
    """

    output: Any
    thread: str
    run: str
    turns: int
    usage: Usage
    finish_reason: str
    disposition: str | None = None
    cost: float | None = None
    exhausted: str = ""


def result_of(definition: AgentDefinition, attempt: Attempt) -> Result:
    """The result of an attempt whose run settled.

    Raises:
        RunFailed, RunCancelled: it did not complete; ``unknown`` lists effects of unknown outcome.
    """
    run = attempt.run
    settled = run.settled
    if settled is not None and settled.outcome == "cancelled":
        raise RunCancelled(f"Run {run.id} was cancelled.")
    unknown = [u.effect for u in run.unknowns()]
    if settled is None or settled.failure is not None or run.completed is None:
        failure = settled.failure if settled is not None else None
        kind = failure.kind if failure else "unknown"
        message = failure.message if failure else _unknown_message(run)
        raise RunFailed(message, kind=kind, unknown=unknown)
    last = run.turns[-1].response
    output = definition.output_codec.decode(run.completed.output, "recorded output")
    cost = None if run.unpriced or (not run.cost and not last.prices) else run.cost / 1_000_000
    return Result(
        output, attempt.thread, run.id, len(run.turns), run.usage, last.finish, run.completed.disposition, cost,
        settled.exhausted,
    )  # fmt: skip


def _unknown_message(run: fold.Run) -> str:
    names = ", ".join(f"{u.tool} (call {u.call}): {u.reason}" for u in run.unknowns())
    return f"The outcome of an effect is unknown, and a run without history has nobody to ask: {names}."


async def carry_out(
    definition: AgentDefinition,
    raw: bytes,
    model: Model,
    *,
    emit: Emit | None = None,
    approve: Approve | None = None,
) -> Attempt:
    """Run an agent once in memory and return the finished attempt.

    Raises:
        Denied: a tool asks for approval and there is no ``approve``.
    """
    host = Host(NowhereStore())
    attempt = _attempt(host, definition, raw)
    attempt.task = asyncio.current_task()
    interpreter = Interpreter(attempt, definition, Toolbox(definition), model, emit=emit)
    try:
        while True:
            ended = await interpreter.advance()
            if isinstance(ended, (Settled, Parked)) or (attempt.run.unknowns()):
                return attempt
            await decide(attempt, approve)
    finally:
        host.stop()


async def decide(attempt: Attempt, approve: Approve | None) -> None:
    """Ask ``approve`` about every open request of the attempt's run and take the answers into its log."""
    run = attempt.run
    waiting = [c for c in run.calls.values() if c.approval is not None and c.decision is None and not c.closed]
    if not waiting:
        raise Unavailable("The run stopped without settling and without asking anything.")
    for call in waiting:
        asked = call.approval
        assert asked is not None
        if approve is None:
            raise Denied(
                f"Tool {call.operation.tool!r} asks for approval, and this run has nobody to ask.",
                help="Give approve=callback, or submit the work to a store and decide there.",
            )
        answer = approve(
            events.ApprovalRequested(asked.approval, call.id, call.operation.tool, decode(call.part.arguments.encode()))
        )
        if inspect.isawaitable(answer):
            answer = await answer
        decision = "approved" if answer else "rejected"
        record = ToolApprovalDecided(run.id, call.id, asked.approval, decision, "caller", "")  # type: ignore[arg-type]
        await attempt.append(Boundary.INTENT_APPLIED, [record], (_decided(asked.approval, decision, attempt),))


def _decided(approval: str, decision: str, attempt: Attempt) -> Any:
    now = attempt.host.clock.now()
    return lambda tx: tx.ledger.decide_approval(approval, decision, "caller", "", now)


def _attempt(host: Host, definition: AgentDefinition, raw: bytes) -> Attempt:
    thread, submission = host.ids.fresh("thread"), host.ids.fresh("sub")
    now = host.clock.now()
    row = Submission(
        submission, thread, 0, 1, "run_" + submission[4:], "local", None, definition.name, definition.digest, raw, "",
        "running", now, None, None, 0, 1, 0, None, None, None, None,
    )  # fmt: skip
    intents: tuple[Intent, ...] = ()
    claimed = Claimed(0, thread, 1, 0, Tail(0, EMPTY_TAIL, 0), row, intents, 0, False)
    return Attempt(host, claimed, fold.Thread(thread))


async def stream(
    definition: AgentDefinition, raw: bytes, model: Model, *, approve: Approve | None = None
) -> AsyncGenerator[Event | Attempt, None]:
    """Events as they happen, then the finished attempt as the last item."""
    queue: asyncio.Queue[Event | None] = asyncio.Queue()
    task = asyncio.ensure_future(carry_out(definition, raw, model, emit=queue.put_nowait, approve=approve))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (event := await queue.get()) is not None:
            yield event
        yield task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])
