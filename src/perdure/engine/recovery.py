"""Recovery carried out: read a thread, classify it, do what the decision names, thread by thread.

Every claim recovers what it finds; the sweep looks after threads that nobody can claim (blocked by a fault) or whose
program is not registered anywhere here. Each thread has its own fault boundary and time bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import msgspec

from perdure.clock import seconds
from perdure.engine import intents
from perdure.engine.attempt import Attempt, Settled
from perdure.engine.driver import Driver
from perdure.engine.host import Host, log
from perdure.engine.intents import Op
from perdure.errors import Corrupt, Error, Incompatible, Invalid, OwnershipLost, Superseded, Unavailable
from perdure.limits import (
    FAILURE_MESSAGE_CHARS_MAX,
    FAULT_BACKOFF_SECONDS_MAX,
    FAULT_BACKOFF_SECONDS_MIN,
    PAGE_BATCHES_MAX,
    RECOVERY_SECONDS_MAX,
)
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Claimed, Fault, Intent, WorkItem
from perdure.ports.log import StoredBatch
from perdure.ports.store import Transaction
from perdure.records.codec import Record
from perdure.records.thread import RepairAnnotated, SubmissionSettled
from perdure.rules import fold, plans
from perdure.rules import recovery as rules
from perdure.rules.lifecycle import SubmissionState

_encode = msgspec.json.Encoder().encode
_INLINE_BATCHES = 64  # longer logs are read off the loop


class Report(msgspec.Struct, frozen=True):
    """What recovery decided about one submission, and whether it was carried out here."""

    submission: str
    thread: str
    decision: str
    meaning: str
    disposition: str


class Recovered(msgspec.Struct, frozen=True):
    """One pass: a report for each open submission, a fault for each thread that could not be read."""

    reports: tuple[Report, ...]
    faults: tuple[Fault, ...]


def is_fault(error: BaseException) -> bool:
    """Whether an error says that a thread's stored facts cannot be used."""
    return isinstance(error, (Corrupt, Incompatible)) or (isinstance(error, Invalid) and "stored" in str(error))


async def read_thread(host: Host, claimed: Claimed) -> fold.Thread:
    """The state of a claimed thread at its fixed tail, every page verified before it counts.

    Raises:
        Corrupt: a gap, a broken chain, a short page. Incompatible: a record of a newer release.
    """
    state = fold.Thread(claimed.thread)
    tail = claimed.tail
    while state.tail < tail.sequence:
        after = state.tail

        def page(tx: Transaction, after: int = after) -> list[StoredBatch]:
            return tx.log.read(claimed.number, after, PAGE_BATCHES_MAX)

        stored = host.store.read(page) if tail.sequence <= _INLINE_BATCHES else await host.store.scan(page)
        if not stored:
            raise Corrupt(f"Thread {claimed.thread!r} ends at record {state.tail}; {tail.sequence} were promised.")
        for batch in stored:
            fold.apply_batch(state, batch.body, batch.apart)
            if state.tail != batch.last or state.digest != batch.tail:
                raise Corrupt(
                    f"Thread {claimed.thread!r}: the stored digest after record {batch.last} is not the content's.",
                    help="Run `perdure verify` and restore the database from a backup.",
                )
            if state.tail >= tail.sequence:
                break
    if state.tail != tail.sequence or state.digest != tail.digest:
        raise Corrupt(f"Thread {claimed.thread!r} does not end at record {tail.sequence} with the claimed digest.")
    return state


async def take_in(attempt: Attempt, pending: Iterable[Intent]) -> None:
    """Take a claim's pending intents into its log. One that does not fit the log is a fault of the thread.

    Raises:
        Corrupt: an intent names what the log does not hold.
    """
    try:
        taken = attempt.take_in(pending)
    except Error:
        raise
    except Exception as error:  # given back, the command would make the thread due again at once, for ever
        raise Corrupt(
            f"A command recorded for thread {attempt.thread!r} does not fit its log: {type(error).__name__}: {error}.",
            help="Run `perdure verify`.",
        ) from error
    for future in taken:
        await future


async def settle_from_history(attempt: Attempt) -> Settled | None:
    """Where the log already holds the settlement, make the ledger agree (a split store; the log wins)."""
    submission = attempt.submission
    assert submission is not None
    settled = attempt.state.settlements.get(submission.id)
    if settled is None:
        return None
    number, epoch, token, now = attempt.number, attempt.epoch, attempt.token, attempt.host.clock.now()
    failure = None if settled.failure is None else _encode(settled.failure)

    def unit(tx: Transaction) -> None:
        tx.ledger.settle(
            number, epoch, token, submission.id, settled.outcome, failure, settled.disposition, now, release=True
        )

    await attempt.host.store.write(Boundary.REPAIR, unit)
    attempt.host.settled(submission.id)
    return Settled(settled.outcome)


async def block(host: Host, number: int, thread: str, error: BaseException) -> Fault:
    """Record why a thread cannot be used; it is not claimed until its own recovery succeeds."""
    now = host.clock.now()
    earlier = next((f for f in host.store.read(lambda tx: tx.ledger.faults()) if f.thread == number), None)
    tries = earlier.tries + 1 if earlier else 1
    delay = min(FAULT_BACKOFF_SECONDS_MAX, FAULT_BACKOFF_SECONDS_MIN * 2 ** min(tries, 20))
    message = str(error)[:FAILURE_MESSAGE_CHARS_MAX]
    fault = Fault(number, thread, type(error).__name__.lower(), message, now, now, tries, now + seconds(delay))
    await host.store.write(Boundary.FAULT, lambda tx: tx.ledger.put_fault(fault))
    return fault


async def sweep(host: Host, drivers: Mapping[str, Driver], *, bound: float = RECOVERY_SECONDS_MAX) -> Recovered:
    """Recover what is due for it: blocked threads whose time has come, abandoned threads of foreign programs."""
    now = host.clock.now()
    reports: list[Report] = []
    faults: list[Fault] = []
    due = [fault.thread for fault in host.store.read(lambda tx: tx.ledger.faults()) if fault.next_at <= now]
    due += await _abandoned(host, drivers, now)
    for number in due:
        done = await recover_thread(host, drivers, number, bound=bound)
        reports += done.reports
        faults += done.faults
    return Recovered(tuple(reports), tuple(faults))


async def _abandoned(host: Host, drivers: Mapping[str, Driver], now: int) -> list[int]:
    """Threads whose lease lapsed and whose next program nobody here runs."""

    def find(tx: Transaction) -> list[int]:
        found = []
        for row in tx.ledger.abandoned(now):
            first = tx.ledger.open_work(thread=row.number, limit=1)
            if first and first[0].program not in drivers:
                found.append(row.number)
        return found

    return host.store.read(find)


async def recover(
    host: Host, drivers: Mapping[str, Driver], *, thread: str | None = None, bound: float = RECOVERY_SECONDS_MAX
) -> Recovered:
    """Recover every thread with open work that no live lease holds, or one thread.

    Raises:
        Invalid: there is no such thread.
    """
    if thread is not None:
        row = host.store.read(lambda tx: tx.ledger.thread(thread))
        if row is None:
            raise Invalid(f"There is no thread {thread!r}.", help="List them: perdure threads")
        return await recover_thread(host, drivers, row.number, bound=bound)
    reports: list[Report] = []
    faults: list[Fault] = []
    after = 0
    while True:
        page = await host.store.scan(lambda tx, after=after: tx.ledger.open_work(after=after, limit=1000))  # type: ignore[misc]
        if not page:
            break
        after = page[-1].thread_number
        for number in dict.fromkeys(item.thread_number for item in page):
            done = await recover_thread(host, drivers, number, bound=bound)
            reports += done.reports
            faults += done.faults
    return Recovered(tuple(reports), tuple(faults))


async def redrive(host: Host, submission: str, number: int, *, by: str, reason: str) -> bool:
    """Make a stuck submission claimable now, its counters reset, and record who asked. False if it cannot be."""
    now, until, token = host.clock.now(), host.lease_until(), host.new_token()
    claimed = await host.claim(lambda tx: tx.ledger.claim_thread(number, host.owner, now, until, token))
    if claimed is None:
        return False
    try:
        row = host.store.read(lambda tx: tx.ledger.submission(submission))
        if row is None or row.state == SubmissionState.SETTLED:
            return False
        attempt = Attempt(host, claimed, await read_thread(host, claimed))
        record = RepairAnnotated(submission, "Redrive", f"{by}: {reason}" if reason else by)
        await attempt.append(Boundary.REDRIVE, [record])
    finally:
        await host.give_back(claimed.number, claimed.epoch, claimed.token)
    again = host.clock.now()
    await host.store.write(Boundary.REDRIVE, lambda tx: tx.ledger.redrive(submission, again))
    host.wake()
    return True


async def recover_thread(
    host: Host, drivers: Mapping[str, Driver], number: int, *, bound: float = RECOVERY_SECONDS_MAX
) -> Recovered:
    """Recover one thread inside its own fault boundary and time bound (seconds). A live owner is left alone."""
    now, until, token = host.clock.now(), host.lease_until(), host.new_token()
    claimed = await host.claim(lambda tx: tx.ledger.claim_thread(number, host.owner, now, until, token, blocked=True))
    if claimed is None:
        return Recovered((), ())
    try:
        async with asyncio.timeout(bound):
            return Recovered(tuple(await _recover_claimed(host, drivers, claimed)), ())
    except (Unavailable, Superseded):
        raise
    except OwnershipLost:
        return Recovered((), ())  # whoever owns it now recovers what it finds
    except Exception as error:
        log.warning("thread %s cannot be recovered: %s", claimed.thread, error)
        return Recovered((), (await block(host, number, claimed.thread, error),))
    finally:
        await host.give_back(claimed.number, claimed.epoch, claimed.token)


async def _recover_claimed(host: Host, drivers: Mapping[str, Driver], claimed: Claimed) -> list[Report]:
    number = claimed.number
    state = await read_thread(host, claimed)
    attempt = Attempt(host, claimed, state)
    await take_in(attempt, claimed.intents)
    items = host.store.read(lambda tx: tx.ledger.open_work(thread=number))
    reports = [await _recover_submission(attempt, item) for item in items]
    now = host.clock.now()
    if any(fault.thread == number for fault in host.store.read(lambda tx: tx.ledger.faults())):
        await host.store.write(Boundary.FAULT, lambda tx: tx.ledger.clear_fault(number, now))
    return reports


async def _recover_submission(attempt: Attempt, item: WorkItem) -> Report:
    """Classify without a binding, so that nothing is authorized to run; repair what can be repaired from records."""
    host = attempt.host
    row = host.store.read(lambda tx: tx.ledger.submission(item.submission))
    assert row is not None
    run = attempt.state.runs.get(row.run)
    deadline = None if run is None else run.deadline
    evidence = rules.gather(
        attempt.state,
        row.id,
        row.run,
        SubmissionState(row.state),
        input_marker=row.input_sequence,
        past_deadline=deadline is not None and deadline <= host.clock.now(),
        attempts=row.attempts,
    )
    decision = rules.classify(evidence)
    match decision:
        case rules.MarkUnknown(doubts=doubts) if run is not None:
            await _mark_unknown(attempt, row.id, run, doubts)
        case rules.RepairInputMarker(sequence=sequence):
            await _repair(attempt, row.id, decision, (lambda tx: tx.ledger.apply_input(row.id, sequence),))
        case rules.FinalizeLedgerFromHistory(settlement=settled):
            await _finalize(attempt, row.id, settled, decision)
        case _:
            pass
    name = type(decision).__name__
    return Report(row.id, row.thread, name, decision.meaning, decision.disposition)


async def _mark_unknown(attempt: Attempt, submission: str, run: fold.Run, doubts: tuple[plans.Doubt, ...]) -> None:
    records: list[Record] = []
    ops: list[Op] = []
    for part in (run, *rules.parts(attempt.state, run.id)):
        own = {d.effect for call in part.open_calls() for d in plans.doubts(call)}
        own |= {d.effect for d in plans.model_doubts(part)}
        found, found_ops = intents.doubt(part, [d for d in doubts if d.effect in own], attempt.host.clock.now())
        records += found
        ops += found_ops
    records.append(RepairAnnotated(submission, "MarkUnknown", rules.MarkUnknown.meaning))
    await attempt.append(Boundary.CALL_UNKNOWN, records, ops)


async def _repair(attempt: Attempt, submission: str, decision: rules.Decision, ops: tuple[Op, ...]) -> None:
    record = RepairAnnotated(submission, type(decision).__name__, decision.meaning)
    await attempt.append(Boundary.REPAIR, [record], ops)


async def _finalize(attempt: Attempt, submission: str, settled: SubmissionSettled, decision: rules.Decision) -> None:
    number, epoch, token, now = attempt.number, attempt.epoch, attempt.token, attempt.host.clock.now()
    failure = None if settled.failure is None else _encode(settled.failure)

    def settle(tx: Transaction) -> None:
        tx.ledger.settle(
            number, epoch, token, submission, settled.outcome, failure, settled.disposition, now, release=False
        )

    await _repair(attempt, submission, decision, (settle,))
    attempt.host.settled(submission)
