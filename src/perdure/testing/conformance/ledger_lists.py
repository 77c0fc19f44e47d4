"""The part of ``ledger_suite`` about what the ledger lists: effects, approvals, open work, threads, faults."""

from __future__ import annotations

from perdure.errors import Conflict
from perdure.ports.ledger import ApprovalRow, Fault, WorkItem
from perdure.ports.store import Store, Transaction
from perdure.testing.conformance.given import LEASE, Given, altered, check, equal, refused, work_of

# -- effects and approvals --------------------------------------------------------------------------------------------


async def case_an_effect_is_listed_as_it_stands(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    effect = given.effect_row(row, step="charge", business_key="order-1", held_by="w1", held_until=70)
    await given.do(lambda tx: tx.ledger.put_effect(effect))
    equal(given.look(lambda tx: tx.ledger.effect(effect.id)), effect)
    await given.do(lambda tx: tx.ledger.end_effect(effect.id, "unknown", None, 50))
    await given.do(lambda tx: tx.ledger.end_effect(effect.id, "confirmed", "applied", None))
    wanted = altered(effect, status="confirmed", verdict="applied", ended_at=50)
    equal(given.look(lambda tx: tx.ledger.effect(effect.id)), wanted)
    equal(given.look(lambda tx: tx.ledger.effects(status="confirmed")), [wanted])
    equal(given.look(lambda tx: tx.ledger.effects(run=row.run)), [wanted])
    equal(given.look(lambda tx: tx.ledger.effects(run="run_other")), [])
    equal(given.look(lambda tx: tx.ledger.effect("eff_nobody")), None)


async def case_the_same_effect_twice_is_a_conflict_inside_the_unit(store: Store) -> None:
    given = Given(store)
    effect = given.effect_row(await given.admit())

    def unit(tx: Transaction) -> str:
        tx.ledger.put_effect(effect)
        try:
            tx.ledger.put_effect(effect)
        except Conflict:
            return "conflict"
        return "twice"

    equal(await given.do(unit), "conflict")
    equal(given.look(lambda tx: tx.ledger.effects()), [effect])


async def case_unknown_effects_are_those_without_a_verdict(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    open_ = await given.effect(row, status="unknown")
    await given.effect(row, status="unknown", verdict="safe_to_retry")
    await given.effect(row)
    equal([effect.id for effect in given.look(lambda tx: tx.ledger.effects(status="unknown"))], [open_])


async def case_pages_of_effects_lose_and_repeat_nothing(store: Store) -> None:
    """Ids are no order: the cursor is a place among starts."""
    given = Given(store)
    row = await given.admit()
    ids = [await given.effect(row, at=at) for at in (50, 10, 40, 10, 30, 10)]
    wanted = [ids[n] for n in (1, 3, 5, 4, 2, 0)]
    seen: list[str] = []
    for _ in range(4):
        after = seen[-1] if seen else ""
        seen += [effect.id for effect in given.look(lambda tx, a=after: tx.ledger.effects(limit=2, after=a))]  # type: ignore[misc]
    equal(seen, wanted)


async def case_one_open_effect_a_business_key(store: Store) -> None:
    """On any thread, until an outcome or a verdict is there."""
    given = Given(store)
    one, two = await given.admit("one"), await given.admit("two")
    effect = await given.effect(one, business_key="order-1")
    for status in ("started", "unknown"):
        if status == "unknown":
            await given.do(lambda tx: tx.ledger.end_effect(effect, "unknown", None, None))
        error = await refused(Conflict, given.effect(two, business_key="order-1"))
        check(effect in str(error), f"the message should name the open effect: {error}")
        found = given.look(lambda tx: tx.ledger.open_business_key("pay", "order-1"))
        equal(found and found.id, effect)
    await given.effect(two, business_key="order-2")
    await given.effect(two, business_key="order-1", operation="ship")
    await given.do(lambda tx: tx.ledger.end_effect(effect, "unknown", "safe_to_retry", None))
    equal(given.look(lambda tx: tx.ledger.open_business_key("pay", "order-1")), None)
    again = await given.effect(two, business_key="order-1")
    await given.do(lambda tx: tx.ledger.end_effect(again, "confirmed", None, 60))
    await given.effect(one, business_key="order-1")


async def case_an_effect_with_an_outcome_takes_no_other(store: Store) -> None:
    """The lifecycle table says from where an effect may come to a status."""
    given = Given(store)
    row = await given.admit()
    for first in ("confirmed", "refused"):
        effect = await given.effect(row)
        await given.do(lambda tx, e=effect, s=first: tx.ledger.end_effect(e, s, None, 60))  # type: ignore[misc]
        for other in ("confirmed", "refused", "unknown"):
            await refused(Conflict, given.do(lambda tx, e=effect, s=other: tx.ledger.end_effect(e, s, None, 70)))  # type: ignore[misc]
        found = given.look(lambda tx, e=effect: tx.ledger.effect(e))  # type: ignore[misc]
        equal(found and (found.status, found.ended_at), (first, 60))


async def case_a_held_effect_is_held_as_long_as_its_holder_renews(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    mine, theirs = [await given.effect(row, status="unknown") for _ in range(2)]

    def held(id: str) -> tuple[str | None, int | None]:
        found = given.look(lambda tx: tx.ledger.effect(id))
        return (found.held_by, found.held_until) if found else (None, None)

    await given.do(lambda tx: tx.ledger.hold_effect(mine, "w1", 100))
    await given.do(lambda tx: tx.ledger.hold_effect(theirs, "w2", 100))
    await given.do(lambda tx: tx.ledger.renew("w1", 900))
    equal((held(mine), held(theirs)), (("w1", 900), ("w2", 100)))
    await given.do(lambda tx: tx.ledger.hold_effect(mine, None, None))
    await given.do(lambda tx: tx.ledger.renew("w1", 999))
    equal(held(mine), (None, None))


async def case_probes_are_due_oldest_first(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    effects = [await given.effect(row, status="unknown", next_probe_at=at) for at in (40, 20, 30, None)]
    await given.effect(row, next_probe_at=5)  # started: nobody doubts it yet

    def due(now: int, limit: int = 100) -> list[str]:
        return [effect.id for effect in given.look(lambda tx: tx.ledger.due_probes(now, limit))]

    equal(due(30), [effects[1], effects[2]])
    equal(due(99, 1), [effects[1]])
    await given.do(lambda tx: tx.ledger.schedule_probe(effects[1], 500))
    await given.do(lambda tx: tx.ledger.end_effect(effects[2], "unknown", "not_applied", None))
    equal(due(99), [effects[0]])


async def case_an_approval_is_asked_and_decided_once(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    first, second = await given.approval(row, at=20), await given.approval(row, at=10)
    asked = given.look(lambda tx: tx.ledger.approval(first))
    if asked is None:
        raise AssertionError("the approval is gone")
    await given.do(lambda tx: tx.ledger.put_approval(altered(asked, reason="another")))
    equal(given.look(lambda tx: tx.ledger.approval(first)), asked)
    await given.do(lambda tx: tx.ledger.decide_approval(first, "approved", "ann", "fine", 40))
    await given.do(lambda tx: tx.ledger.decide_approval(first, "rejected", "bob", "no", 50))
    wanted = altered(asked, status="approved", by="ann", decision_reason="fine", decided_at=40)

    def listed(status: str | None = None, run: str | None = None) -> list[ApprovalRow]:
        return given.look(lambda tx: tx.ledger.approvals(status=status, run=run))

    equal(listed("approved"), [wanted])
    equal([approval.id for approval in listed()], [second, first])
    equal([approval.id for approval in listed("pending", row.run)], [second])
    equal(listed(run="run_other"), [])


# -- discovery and operation ------------------------------------------------------------------------------------------


async def case_open_work_is_listed_in_order_and_without_payload(store: Store) -> None:
    given = Given(store)
    rows = [await given.admit(f"t{n % 2}", input=b"\xff not JSON", at=n) for n in range(4)]
    await given.settle((await given.claims(limit=1))[0])
    work = given.look(lambda tx: tx.ledger.open_work())
    equal([item.submission for item in work], [rows[2].id, rows[1].id, rows[3].id])
    names = set(WorkItem.__struct_fields__)
    check(not names & {"input", "failure", "body", "arguments"}, f"a work item carries no payload: {names}")
    row, item = given.row(rows[2].id), work[0]
    equal(item, WorkItem(row.id, "t0", row.thread_number, 2, "agent", "ready", 2))
    only = given.look(lambda tx: tx.ledger.open_work(thread=rows[1].thread_number))
    equal([item.submission for item in only], [rows[1].id, rows[3].id])


async def case_pages_of_open_work_lose_nothing(store: Store) -> None:
    given = Given(store)
    wanted = sorted([await given.admit(f"t{n % 3}") for n in range(11)], key=lambda r: (r.thread_number, r.position))
    seen: list[WorkItem] = []
    for _ in range(11):
        after = seen[-1].thread_number if seen else 0
        seen += given.look(lambda tx, a=after: tx.ledger.open_work(after=a, limit=3))  # type: ignore[misc]
    equal([item.submission for item in seen], [row.id for row in wanted])


async def case_submissions_are_listed_by_admission(store: Store) -> None:
    given = Given(store)
    rows = [await given.admit(f"t{n % 2}") for n in range(4)]
    first = (await given.claims(limit=1))[0]
    await given.settle(first)

    def listed(thread: int | None = None, state: str | None = None, after: str = "", limit: int = 10) -> list[str]:
        found = given.look(lambda tx: tx.ledger.submissions(thread=thread, state=state, after=after, limit=limit))
        return [row.id for row in found]

    equal(listed(), [row.id for row in rows])
    equal(listed(limit=2), [row.id for row in rows[:2]])
    equal(listed(after=rows[1].id), [row.id for row in rows[2:]])
    equal(listed(thread=rows[1].thread_number, after=rows[1].id), [rows[3].id])
    equal(listed(thread=rows[1].thread_number), [rows[1].id, rows[3].id])
    equal(listed(state="settled"), [rows[0].id])


async def case_threads_are_found_by_number_and_id_and_paged(store: Store) -> None:
    given = Given(store)
    for n in range(5):
        await given.admit(f"t{n}", at=n)
    threads = given.look(lambda tx: tx.ledger.threads())
    equal([thread.id for thread in threads], [f"t{n}" for n in range(5)])
    equal(given.look(lambda tx: tx.ledger.threads(after=threads[1].number, limit=2)), threads[2:4])
    equal(given.look(lambda tx: tx.ledger.thread("t3")), threads[3])
    equal(given.look(lambda tx: tx.ledger.thread(threads[3].number)), threads[3])
    equal(given.look(lambda tx: tx.ledger.thread("nobody")), None)


async def case_a_blocked_thread_is_not_claimable_until_it_is_cleared(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    fault = Fault(row.thread_number, "t", "corrupt", "digest", 10, 10, 1, 100)
    await given.do(lambda tx: tx.ledger.put_fault(fault))
    equal(await given.claims(now=10**6), [])
    equal(given.next_due(now=10**6), None)
    equal(await given.claim_thread(row.thread_number), None)
    claimed = await given.claim_thread(row.thread_number, blocked=True)
    check(claimed is not None, "recovery may claim a blocked thread")
    if claimed is not None:
        await given.release(claimed)
    equal(await given.claims(now=10**6), [])
    await given.do(lambda tx: tx.ledger.clear_fault(row.thread_number, 50))
    equal(given.look(lambda tx: tx.ledger.faults()), [])
    equal(work_of(await given.claim(now=50)), row.id)


async def case_a_fault_keeps_its_beginning_and_counts_its_tries(store: Store) -> None:
    given = Given(store)
    row, other = await given.admit("t"), await given.admit("other")
    fault = Fault(row.thread_number, "t", "corrupt", "digest", 20, 20, 1, 100)
    await given.do(lambda tx: tx.ledger.put_fault(fault))
    await given.do(lambda tx: tx.ledger.put_fault(Fault(other.thread_number, "other", "slow", "", 10, 10, 1, 90)))
    again = altered(fault, kind="incompatible", message="format 2", first_at=30, last_at=30, next_at=300)
    await given.do(lambda tx: tx.ledger.put_fault(again))
    faults = given.look(lambda tx: tx.ledger.faults())
    equal([found.thread_id for found in faults], ["other", "t"])
    equal(faults[1], altered(again, first_at=20, tries=2))
    equal((given.state(row.id), given.row(row.id).outcome), ("ready", None))


async def case_a_redrive_makes_open_work_claimable_now(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    for _ in range(3):
        await given.release(await given.claim())
    await given.release(await given.claim(), not_before=10**9)
    equal(await given.claims(now=50), [])
    equal(await given.do(lambda tx: tx.ledger.redrive(row.id, 50)), True)
    claimed = await given.claim(now=50)
    equal(claimed.submission and claimed.submission.attempts, 1)
    equal(await given.do(lambda tx: tx.ledger.redrive(row.id, 50)), False)  # held
    await given.effect(row, status="unknown")
    await given.park(claimed, now=60)
    equal(await given.do(lambda tx: tx.ledger.redrive(row.id, 70)), True)
    await given.settle(await given.claim(now=70), now=80)
    equal(await given.do(lambda tx: tx.ledger.redrive(row.id, 90)), False)
    equal(await given.do(lambda tx: tx.ledger.redrive("sub_nobody", 90)), False)
    equal(await given.claims(now=90), [])


async def case_a_thread_without_open_work_can_be_archived_and_comes_back_with_new_work(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    await refused(Conflict, given.do(lambda tx: tx.ledger.archive(row.thread_number, 30)))
    await given.settle(claimed)

    def archived() -> int | None:
        thread = given.look(lambda tx: tx.ledger.thread("t"))
        return thread.archived_at if thread else -1

    await given.do(lambda tx: tx.ledger.archive(row.thread_number, 30))
    equal((archived(), given.row(row.id).outcome), (30, "completed"))
    again = await given.admit(at=40)
    equal((archived(), work_of(await given.claim(now=40))), (None, again.id))


async def case_next_due_is_when_a_claim_may_grant_something(store: Store) -> None:
    given = Given(store)
    equal(given.next_due(), None)
    row = await given.admit(at=7)
    equal(given.next_due(now=7), 7)
    claimed = await given.claim(now=10)
    equal(given.next_due(now=11), 10 + LEASE)
    await given.release(claimed, not_before=300)
    equal((given.next_due(), given.next_due(["agent"]), given.next_due(["other"])), (300, 300, None))
    claimed = await given.claim(now=300)
    await given.approval(row)
    await given.suspend(claimed, wake_at=800)
    equal(given.next_due(), 800)
    await given.settle(await given.claim(now=800), now=800)
    equal(given.next_due(), None)


async def case_repairing_when_a_thread_is_due_changes_nothing_that_is_right(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    before = given.look(lambda tx: tx.ledger.thread("t"))
    await given.do(lambda tx: tx.ledger.repair_due(row.thread_number, 20))
    equal(given.look(lambda tx: tx.ledger.thread("t")), before)
    await given.settle(claimed)
    for _ in range(2):
        await given.do(lambda tx: tx.ledger.repair_due(row.thread_number, 20))
        equal(given.next_due(now=20), None)
