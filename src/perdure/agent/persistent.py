"""Running an agent now on a stored thread: history is kept, nothing is owed if the process dies (persistent mode)."""

from __future__ import annotations

import asyncio

from perdure.agent.batch import Toolbox
from perdure.agent.ephemeral import Approve, Result, decide, result_of
from perdure.agent.loop import Interpreter
from perdure.definitions.agent import AgentDefinition
from perdure.engine import recovery
from perdure.engine.attempt import Attempt, Parked, Settled
from perdure.engine.host import Host
from perdure.errors import Conflict, Superseded
from perdure.ports.ledger import Claimed, Submission
from perdure.ports.provider import Model
from perdure.ports.store import Transaction


async def run_here(
    host: Host,
    definition: AgentDefinition,
    raw: bytes,
    model: Model,
    *,
    thread: str | None,
    approve: Approve | None,
    principal: str,
) -> Result:
    """Execute one run under the thread's claim and return its result.

    Raises:
        Conflict: work is owed on the thread, or somebody holds it.
        RunFailed, RunCancelled, Denied: how it ended otherwise.
    """
    name = thread if thread is not None else host.ids.fresh("thread")
    claimed = await _claim(host, name)
    attempt: Attempt | None = None
    try:
        attempt = Attempt(host, claimed, await recovery.read_thread(host, claimed), owed=False)
        attempt.submission = _unowed(host, definition, raw, name, claimed.number, principal)
        attempt.task = asyncio.current_task()
        await attempt.close_abandoned()
        interpreter = Interpreter(attempt, definition, Toolbox(definition), model)
        while True:
            ended = await interpreter.advance()
            if isinstance(ended, (Settled, Parked)) or attempt.run.unknowns():
                return result_of(definition, attempt)
            await decide(attempt, approve)
    except (asyncio.CancelledError, Superseded) as stopped:
        if attempt is None or attempt.broken is None:
            raise
        if isinstance(stopped, asyncio.CancelledError) and attempt.task is not None:
            attempt.task.uncancel()  # the attempt stopped itself: say why instead
        raise attempt.broken from None
    finally:
        if attempt is not None:
            await attempt.release()
        else:
            await host.give_back(claimed.number, claimed.epoch, claimed.token)


async def _claim(host: Host, thread: str) -> Claimed:
    now, until, token = host.clock.now(), host.lease_until(), host.new_token()

    def unit(tx: Transaction) -> Claimed | None:
        row = tx.ledger.open_thread(thread, now)
        if tx.ledger.open_work(thread=row.number, limit=1):
            raise Conflict(
                f"Work is owed on thread {thread!r}.", help="Submit to it instead; it runs after what is queued."
            )
        return tx.ledger.claim_thread(row.number, host.owner, now, until, token)

    claimed = await host.claim(unit)
    if claimed is None:
        raise Conflict(f"Thread {thread!r} is being worked on.", help="Wait for it, or submit to it.")
    return claimed


def _unowed(
    host: Host, definition: AgentDefinition, raw: bytes, thread: str, number: int, principal: str
) -> Submission:
    submission = host.ids.fresh("sub")
    return Submission(
        submission, thread, number, 0, "run_" + submission[4:], principal, None, definition.name, definition.digest,
        raw, "", "running", host.clock.now(), None, None, 0, 1, 0, None, None, None, None,
    )  # fmt: skip
