"""The part of ``ledger_suite`` about work that waits, and the commands that wake it."""

from __future__ import annotations

from perdure.ports.ledger import Intent
from perdure.ports.store import Store
from perdure.testing.conformance.given import Given, altered, equal, work_of

# -- waiting ----------------------------------------------------------------------------------------------------------


async def case_suspended_work_is_a_barrier(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    await given.admit()
    await given.approval(row)
    equal(await given.suspend(claimed), True)
    equal(given.state(row.id), "suspended")
    equal(await given.claims(now=10**6), [])
    equal(given.next_due(now=10**6), None)


async def case_parked_work_is_passed_by_later_work(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    later = await given.admit()
    await given.effect(row, status="unknown")
    equal(await given.park(claimed), True)
    equal(given.state(row.id), "unknown")
    claimed = await given.claim()
    equal(work_of(claimed), later.id)
    await given.settle(claimed)
    equal(await given.claims(now=10**6), [])


async def case_parked_work_with_a_cancel_is_not_passed(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    await given.admit()
    await given.effect(row, status="unknown")
    await given.park(claimed)
    cancel = await given.intend(row, "cancel")
    claimed = await given.claim(now=30)
    equal((work_of(claimed), claimed.intents), (row.id, (cancel,)))
    equal(given.state(row.id), "input-applied")


async def case_a_thread_has_one_lease_also_when_older_work_wakes(store: Store) -> None:
    """Waking parked work displaces no later writer, and then comes before what is queued."""
    given = Given(store)
    row, claimed = await given.running()
    later, last = await given.admit(), await given.admit()
    effect = await given.effect(row, status="unknown")
    await given.park(claimed)
    claimed = await given.claim(now=20)
    equal(work_of(claimed), later.id)
    await given.intend(row, "verdict", effect)
    equal(await given.claims("w2", now=30), [])
    equal(await given.claim_thread(row.thread_number, now=30), None)
    await given.settle(claimed, now=40)
    woken = await given.claim("w2", now=40)
    equal((work_of(woken), woken.epoch), (row.id, claimed.epoch + 1))
    await given.settle(woken, now=50)
    equal(work_of(await given.claim(now=50)), last.id)


async def case_a_timer_wakes_waiting_work(store: Store) -> None:
    given = Given(store)
    for thread, kind in (("one", "suspend"), ("two", "park")):
        row, claimed = await given.running(thread)
        if kind == "suspend":
            await given.approval(row)
            await given.suspend(claimed, wake_at=900)
        else:
            await given.effect(row, status="unknown")
            await given.park(claimed, wake_at=900)
        equal(given.next_due(), 900)
        equal(await given.claims(now=899), [])
        woken = await given.claim(now=900)
        equal((work_of(woken), given.row(row.id).wake_at), (row.id, None))
        await given.settle(woken, now=900)


async def case_an_approval_recorded_before_the_suspension_is_seen(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    approval = await given.approval(row)
    intent = await given.intend(row, "approval", approval, at=18)
    equal(await given.suspend(claimed, wake_at=10**9), False)
    woken = await given.claim(now=20)
    equal((work_of(woken), woken.intents), (row.id, (intent,)))


async def case_a_verdict_recorded_before_the_parking_is_seen(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    later = await given.admit()
    effect = await given.effect(row, status="unknown")
    await given.intend(row, "verdict", effect, at=18)
    equal(await given.park(claimed, wake_at=10**9), False)
    woken = await given.claim(now=20)
    equal(work_of(woken), row.id)
    await given.settle(woken)
    equal(work_of(await given.claim()), later.id)


async def case_an_approval_recorded_before_the_parking_is_seen(store: Store) -> None:
    """An approved sibling of an unknown call can go on."""
    given = Given(store)
    row, claimed = await given.running()
    await given.effect(row, status="unknown")
    await given.intend(row, "approval", await given.approval(row), at=18)
    equal(await given.park(claimed), False)
    equal(work_of(await given.claim()), row.id)


async def case_a_cancel_recorded_before_waiting_is_seen(store: Store) -> None:
    given = Given(store)
    for thread, kind in (("one", "suspend"), ("two", "park")):
        row, claimed = await given.running(thread)
        await given.approval(row)
        await given.effect(row, status="unknown")
        cancel = await given.intend(row, "cancel", at=18)
        equal(await (given.suspend if kind == "suspend" else given.park)(claimed), False)
        woken = await given.claim()
        equal((work_of(woken), woken.intents), (row.id, (cancel,)))
        await given.take_in(cancel)
        await given.settle(woken)


async def case_approvals_wake_when_the_last_one_is_decided(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    approvals = [await given.approval(row) for _ in range(3)]
    equal(await given.suspend(claimed), True)
    for approval in approvals[:2]:
        intent = await given.intend(row, "approval", approval)
        claimed = await given.claim(now=30)
        equal((claimed.submission, claimed.intents), (None, (intent,)))
        await given.take_in(intent)
        await given.release(claimed, now=31)
        equal((await given.claims(now=31), given.state(row.id)), ([], "suspended"))
    await given.intend(row, "approval", approvals[2])
    equal(work_of(await given.claim(now=31)), row.id)


async def case_verdicts_wake_when_the_last_one_is_given(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    effects = [await given.effect(row, status="unknown") for _ in range(2)]
    equal(await given.park(claimed), True)
    await given.intend(row, "verdict", effects[0])
    claimed = await given.claim(now=30)
    equal(claimed.submission, None)
    await given.release(claimed, now=30)
    await given.intend(row, "verdict", effects[1])
    equal(work_of(await given.claim(now=30)), row.id)


# -- intents ----------------------------------------------------------------------------------------------------------


async def case_the_first_intent_wins_and_every_later_one_is_told_of_it(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    base = Intent(0, row.thread_number, row.id, "cancel", row.id, b'{"n":1}', "ann", "first", 30)
    stored, new = await given.do(lambda tx: tx.ledger.add_intent(base))
    equal((new, stored), (True, altered(base, id=stored.id)))
    later = altered(base, body=b'{"n":2}', by="bob", reason="second", at=31)
    equal(await given.do(lambda tx: tx.ledger.add_intent(later)), (stored, False))
    other, new = await given.do(lambda tx: tx.ledger.add_intent(altered(later, kind="verdict", submission=None)))
    equal((new, other.id != stored.id), (True, True))


async def case_intents_wait_in_order_until_they_are_in_the_log(store: Store) -> None:
    given = Given(store)
    rows = [await given.admit() for _ in range(3)]
    other = await given.admit("other")
    intents = [await given.intend(row, "cancel") for row in rows]
    elsewhere = await given.intend(other, "cancel")
    number = rows[0].thread_number
    equal(given.look(lambda tx: tx.ledger.intents(number)), intents)
    equal(given.look(lambda tx: tx.ledger.pending_intents()), [*intents, elsewhere])
    await given.do(lambda tx: tx.ledger.mark_applied(intents[1].id, 40))
    await given.do(lambda tx: tx.ledger.mark_applied(intents[1].id, 50))
    equal(given.look(lambda tx: tx.ledger.intents(number)), [intents[0], intents[2]])
    everything = given.look(lambda tx: tx.ledger.intents(number, pending=False))
    equal([intent.applied_at for intent in everything], [None, 40, None])
    equal(given.look(lambda tx: tx.ledger.pending_intents(limit=1)), [intents[0]])


async def case_an_intent_makes_a_thread_due_for_any_worker(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running(program="alpha")
    await given.settle(claimed)
    verdict = await given.intend(row, "verdict", "eff_old")
    equal(given.next_due(["beta"], now=30), 30)
    claimed = await given.claim(programs=["beta"], now=30)
    equal((claimed.submission, claimed.intents), (None, (verdict,)))
    await given.take_in(verdict)
    await given.release(claimed, now=31)
    equal(await given.claims(now=31), [])


async def case_a_cancel_of_queued_work_is_granted_without_its_program(store: Store) -> None:
    given = Given(store)
    row = await given.admit(program="gone")
    await given.intend(row, "cancel")
    claimed = await given.claim(programs=["beta"], now=30)
    equal((claimed.submission, given.state(row.id)), (None, "ready"))
    await given.settle(claimed, "cancelled", of=row.id, release=False)
    await given.take_in(claimed.intents[0])
    await given.release(claimed, now=31)
    equal((given.state(row.id), await given.claims(now=31)), ("settled", []))
