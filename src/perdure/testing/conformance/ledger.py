"""What a ledger must do. An adapter proves it by running every case of :func:`ledger_suite`, each on a fresh store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from perdure.errors import Conflict, Corrupt, Invalid, OwnershipLost
from perdure.ports.store import Store, Transaction
from perdure.testing.conformance import ledger_lists, ledger_live, ledger_models, ledger_waits
from perdure.testing.conformance.given import (
    LEASE,
    Factory,
    Given,
    altered,
    cases_of,
    check,
    equal,
    refused,
    suite,
    work_of,
)


def ledger_suite(factory: Factory) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """Every case, named by its sentence, each on a store that ``factory`` opens for it."""
    parts = (globals(), vars(ledger_waits), vars(ledger_lists), vars(ledger_models), vars(ledger_live))
    return suite([case for part in parts for case in cases_of(part)], factory)


# -- admission --------------------------------------------------------------------------------------------------------


async def case_the_same_key_and_input_is_the_same_submission_for_ever(store: Store) -> None:
    given = Given(store)
    first = await given.admit(key="k")
    again = given.admission(key="k", at=99)
    equal(await given.do(lambda tx: tx.ledger.admit(again)), (first, True))
    await given.settle(await given.claim())
    row, replayed = await given.do(lambda tx: tx.ledger.admit(again))
    equal((row.id, row.state, replayed), (first.id, "settled", True))
    equal(given.look(lambda tx: tx.ledger.submission(again.submission)), None)


async def case_the_same_key_with_other_input_or_program_conflicts_and_names_both(store: Store) -> None:
    """A04: the first submission is untouched."""
    given = Given(store)
    first = await given.admit(key="k", program="refund", input_digest="aaaa")
    for other in (
        given.admission(key="k", program="refund", input_digest="bbbb"),
        given.admission(key="k", program="report", input_digest="aaaa"),
    ):
        error = await refused(Conflict, given.do(lambda tx, other=other: tx.ledger.admit(other)))  # type: ignore[misc]
        for word in ("refund", other.program, "aaaa", other.input_digest):
            check(word in str(error), f"{word!r} is missing: {error}")
    equal(given.row(first.id), first)
    equal(len(given.look(lambda tx: tx.ledger.submissions())), 1)


async def case_keys_are_scoped_by_principal_and_thread(store: Store) -> None:
    given = Given(store)
    rows = [
        await given.admit(thread, principal=principal, key="k", input_digest=f"{thread}{principal}")
        for thread in ("one", "two")
        for principal in ("ann", "bob")
    ]
    equal(len({row.id for row in rows}), 4)


async def case_work_without_a_key_is_always_new(store: Store) -> None:
    given = Given(store)
    rows = [await given.admit() for _ in range(3)]
    equal([row.position for row in rows], [1, 2, 3])


async def case_admissions_at_once_queue_in_the_order_of_their_calls(store: Store) -> None:
    given = Given(store)
    rows = await asyncio.gather(*(given.admit() for _ in range(50)))
    equal([row.position for row in rows], list(range(1, 51)))


async def case_the_same_key_at_once_is_one_submission(store: Store) -> None:
    """A03: one is new, the others are told of it."""
    given = Given(store)
    admissions = [given.admission(key="k") for _ in range(20)]
    results = await asyncio.gather(*(given.do(lambda tx, a=a: tx.ledger.admit(a)) for a in admissions))  # type: ignore[misc]
    equal([replayed for _, replayed in results], [False] + [True] * 19)
    equal({row.id for row, _ in results}, {admissions[0].submission})


async def case_a_submission_is_found_by_its_id_and_by_its_runs(store: Store) -> None:
    given = Given(store)
    admission = given.admission(input=bytes(range(256)), principal="ann", key="k", definition="d9")
    row, _ = await given.do(lambda tx: tx.ledger.admit(admission))
    equal(given.row(row.id), row)
    equal(given.row(row.run), row)
    equal((row.input, row.principal, row.key, row.definition), (bytes(range(256)), "ann", "k", "d9"))
    equal((row.thread, row.run, row.state, row.created_at), ("t", admission.run, "ready", 1))
    equal(given.look(lambda tx: tx.ledger.submission("sub_nobody")), None)


# -- ownership --------------------------------------------------------------------------------------------------------


async def case_only_the_head_is_granted_and_every_grant_is_a_new_epoch(store: Store) -> None:
    given = Given(store)
    rows = [await given.admit() for _ in range(3)]
    epochs = []
    for row in rows:
        claimed = await given.claim()
        equal(work_of(claimed), row.id)
        equal(given.state(row.id), "running")
        epochs.append(claimed.epoch)
        await given.settle(claimed)
    equal(epochs, [1, 2, 3])
    equal(await given.claims(), [])


async def case_a_live_lease_is_not_claimable_and_keeps_its_epoch(store: Store) -> None:
    given = Given(store)
    await given.admit()
    claimed = await given.claim(now=10)
    equal(await given.claims("w2", now=9 + LEASE), [])
    equal(await given.claims("w1", now=9 + LEASE), [])
    equal(await given.claim_thread(claimed.number, now=9 + LEASE), None)
    await given.settle(claimed)


async def case_a_lapsed_lease_is_reclaimed_and_every_verb_of_the_old_owner_is_refused(store: Store) -> None:
    given = Given(store)
    row, old = await given.running(now=10)
    new = await given.claim("w2", now=10 + LEASE)
    equal((new.epoch, work_of(new)), (old.epoch + 1, row.id))
    before = given.row(row.id)
    for verb in (given.settle, given.suspend, given.park):
        await refused(OwnershipLost, verb(old))
    equal(given.row(row.id), before)
    await given.settle(new)


async def case_an_owner_that_hides_the_refusal_still_writes_nothing(store: Store) -> None:
    """The fence is in the statement: a unit that swallows the error commits no settlement."""
    given = Given(store)
    row, old = await given.running(now=10)
    new = await given.claim("w2", now=10 + LEASE)

    def unit(tx: Transaction) -> str:
        try:
            tx.ledger.settle(old.number, old.epoch, old.token, row.id, "failed", None, None, 20, release=True)
        except OwnershipLost:
            return "lost"
        return "settled"

    equal(await given.do(unit), "lost")
    equal(given.state(row.id), "input-applied")
    await given.settle(new)
    equal(given.row(row.id).outcome, "completed")


async def case_two_workers_at_once_share_the_work_and_repeat_none(store: Store) -> None:
    """A05."""
    given = Given(store)
    await asyncio.gather(*(given.admit(f"t{n}") for n in range(60)))
    rounds = await asyncio.gather(*(given.claims(f"w{n % 4}", limit=7) for n in range(12)))
    granted = [work_of(claimed) for claims in rounds for claimed in claims]
    equal((len(granted), len(set(granted))), (60, 60))


async def case_a_stale_list_of_orphans_gives_nobody_a_second_claim(store: Store) -> None:
    """B01: two sweeps read one list; the grant that changed no row ends the second one's interest."""
    given = Given(store)
    await given.admit()
    await given.claim(now=10)
    orphans = given.look(lambda tx: [t.number for t in tx.ledger.threads()])
    first = await given.claim_thread(orphans[0], "sweep-1", now=10 + LEASE)
    second = await given.claim_thread(orphans[0], "sweep-2", now=10 + LEASE)
    check(first is not None, "the lease lapsed: the first sweep should be granted the thread")
    equal(second, None)


async def case_the_oldest_due_is_granted_first_up_to_the_limit(store: Store) -> None:
    given = Given(store)
    for at, thread in ((3, "c"), (1, "a"), (2, "b")):
        await given.admit(thread, at=at)
    equal([claimed.thread for claimed in await given.claims(limit=2)], ["a", "b"])
    equal([claimed.thread for claimed in await given.claims(limit=2)], ["c"])


async def case_no_more_threads_are_granted_than_there_are_tokens(store: Store) -> None:
    given = Given(store)
    for n in range(3):
        await given.admit(f"t{n}")
    granted = await given.do(lambda tx: tx.ledger.claim("w", None, 10, 10, 99, [7, 8]))
    equal([claimed.token for claimed in granted], [7, 8])


async def case_only_work_of_the_named_programs_is_granted(store: Store) -> None:
    given = Given(store)
    await given.admit("a", program="alpha")
    await given.admit("b", program="beta")
    equal(await given.claims(programs=["gamma"]), [])
    equal(await given.claims(programs=[]), [])
    equal((await given.claim(programs=["gamma", "beta"])).thread, "b")
    equal((await given.claim(programs=["alpha"])).thread, "a")


async def case_the_head_decides_for_which_program_a_thread_is_due(store: Store) -> None:
    given = Given(store)
    await given.admit(program="alpha")
    await given.admit(program="beta")
    equal(await given.claims(programs=["beta"]), [])
    await given.settle(await given.claim(programs=["alpha"]))
    equal(await given.claims(programs=["alpha"]), [])
    await given.claim(programs=["beta"])


async def case_a_timer_of_parked_work_is_seen_past_other_programs(store: Store) -> None:
    """Both programs find what is theirs at every instant, also when no worker of the other exists."""
    given = Given(store)
    parked = await given.admit(program="alpha")
    await given.effect(parked, status="unknown")
    await given.park(await given.claim(programs=["alpha"]), wake_at=500)
    later = await given.admit(program="beta", at=20)
    equal(given.next_due(["alpha"], now=30), 500)
    equal(given.next_due(["beta"], now=30), 30)
    equal(await given.claims(programs=["alpha"], now=499), [])
    claimed = await given.claim(programs=["beta"], now=499)
    equal(work_of(claimed), later.id)
    await given.release(claimed, now=499)
    equal(await given.claims(programs=["beta"], now=500), [])
    equal(work_of(await given.claim(programs=["alpha"], now=500)), parked.id)


async def case_two_timers_of_two_programs_are_each_seen(store: Store) -> None:
    given = Given(store)
    first, second = [await given.admit(program=program) for program in ("alpha", "beta")]
    for row, wake_at in ((first, 600), (second, 500)):
        await given.effect(row, status="unknown")
        claimed = await given.claim(now=10)
        equal(work_of(claimed), row.id)
        await given.park(claimed, wake_at=wake_at)
    equal((given.next_due(["alpha"]), given.next_due(["beta"]), given.next_due()), (600, 500, 500))
    equal(await given.claims(programs=["alpha"], now=550), [])
    equal(await given.claims(programs=["beta"], now=650), [])  # alpha's came due and stands before it
    equal(work_of(await given.claim(programs=["alpha"], now=650)), first.id)


async def case_a_claim_counts_attempts_without_progress(store: Store) -> None:
    given = Given(store)
    await given.admit()
    attempts = []
    for _ in range(3):
        claimed = await given.claim()
        check(claimed.submission is not None, "it should be granted for work")
        attempts.append(claimed.submission.attempts if claimed.submission else 0)
        await given.release(claimed)
    equal(attempts, [1, 2, 3])
    claimed = await given.claim()
    await given.append(claimed, claimed.tail)
    await given.release(claimed)
    equal((await given.claim()).submission.attempts, 1)  # type: ignore[union-attr]


async def case_a_claim_says_whether_an_owner_was_superseded(store: Store) -> None:
    given = Given(store)
    await given.admit()
    first = await given.claim(now=10)
    second = await given.claim(now=10 + LEASE)
    await given.release(second, now=20 + LEASE)
    third = await given.claim(now=20 + LEASE)
    equal([claimed.superseded for claimed in (first, second, third)], [False, True, False])


async def case_claim_thread_grants_a_thread_on_which_nothing_is_due(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    await given.settle(await given.claim())
    claimed = await given.claim_thread(row.thread_number)
    check(claimed is not None, "nobody holds it")
    if claimed is not None:
        equal((claimed.submission, claimed.epoch), (None, 2))
        await given.release(claimed)
    equal(await given.claims(), [])
    equal(await given.claim_thread(row.thread_number + 1), None)


async def case_an_abandoned_maintenance_claim_does_not_stay_due(store: Store) -> None:
    """Its lease lapses, a claim finds nothing, and nobody has to look again."""
    given = Given(store)
    row = await given.admit("old")
    await given.settle(await given.claim())
    await given.claim_thread(row.thread_number, now=10)
    fresh = await given.admit("new", at=50 + LEASE)
    equal([work_of(claimed) for claimed in await given.claims(limit=1, now=50 + LEASE)], [fresh.id])
    equal(given.next_due(now=50 + LEASE), 50 + 2 * LEASE)


async def case_a_release_gives_the_work_back(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    await given.release(await given.claim())
    equal(given.state(row.id), "ready")
    claimed = await given.claim("w2")
    equal((work_of(claimed), claimed.epoch), (row.id, 2))


async def case_a_release_after_the_input_keeps_that_it_was_applied(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    await given.release(claimed)
    equal((given.state(row.id), given.row(row.id).input_sequence), ("input-applied", 1))
    await given.claim()
    equal(given.state(row.id), "input-applied")


async def case_a_release_can_delay_the_next_claim(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    await given.release(await given.claim(), not_before=700)
    equal(await given.claims(now=699), [])
    equal(given.next_due(now=30), 700)
    equal(work_of(await given.claim(now=700)), row.id)


async def case_a_release_with_a_lost_fence_is_harmless(store: Store) -> None:
    given = Given(store)
    row, old = await given.running(now=10)
    new = await given.claim("w2", now=10 + LEASE)
    before = given.look(lambda tx: tx.ledger.thread(old.number))
    await given.release(old, not_before=10**9)
    equal(given.look(lambda tx: tx.ledger.thread(old.number)), before)
    await given.settle(new)
    await given.release(new)
    equal(given.state(row.id), "settled")


async def case_renewal_extends_every_claim_of_an_owner_and_counts_them(store: Store) -> None:
    given = Given(store)
    for n in range(3):
        await given.admit(f"t{n}")
    await given.claims("w1", limit=2)
    await given.claims("w2", limit=2)
    equal(await given.do(lambda tx: tx.ledger.renew("w1", 5000)), 2)
    equal(await given.do(lambda tx: tx.ledger.renew("nobody", 5000)), 0)
    equal([claimed.thread for claimed in await given.claims("w3", now=4999)], ["t2"])
    equal([claimed.thread for claimed in await given.claims("w3", now=5000)], ["t0", "t1"])


async def case_renewal_after_the_lease_lapsed_holds_if_nobody_took_over(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running(now=10)
    equal(await given.do(lambda tx: tx.ledger.renew("w1", 5000)), 1)
    equal(await given.claims("w2", now=4999), [])
    await given.settle(claimed, now=4999)
    equal(given.state(row.id), "settled")


async def case_renewal_of_a_lost_claim_takes_nothing_back(store: Store) -> None:
    given = Given(store)
    await given.admit()
    await given.claim("w1", now=10)
    new = await given.claim("w2", now=10 + LEASE)
    equal(await given.do(lambda tx: tx.ledger.renew("w1", 10**9)), 0)
    await given.settle(new)


# -- progress ---------------------------------------------------------------------------------------------------------


async def case_an_input_is_applied_at_one_place(store: Store) -> None:
    given = Given(store)
    row = await given.admit()
    claimed = await given.claim()
    for _ in range(2):
        await given.do(lambda tx: tx.ledger.apply_input(row.id, 2))
        equal((given.state(row.id), given.row(row.id).input_sequence), ("input-applied", 2))
    await refused(Corrupt, given.do(lambda tx: tx.ledger.apply_input(row.id, 3)))
    await refused(Invalid, given.do(lambda tx: tx.ledger.apply_input("sub_nobody", 1)))
    await given.settle(claimed)
    await given.do(lambda tx: tx.ledger.apply_input(row.id, 2))
    equal((given.state(row.id), given.row(row.id).input_sequence), ("settled", 2))


async def case_a_settlement_is_kept_ends_ownership_and_lets_the_next_begin(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    after = await given.admit()
    c = claimed
    await given.do(
        lambda tx: tx.ledger.settle(c.number, c.epoch, c.token, row.id, "failed", b"{}", "partial", 40, release=True)
    )
    found = given.row(row.id)
    equal((found.state, found.outcome, found.failure), ("settled", "failed", b"{}"))
    equal((found.disposition, found.settled_at), ("partial", 40))
    thread = given.look(lambda tx: tx.ledger.thread("t"))
    equal((thread and thread.owner, thread and thread.lease_until), (None, None))
    equal(work_of(await given.claim(now=40)), after.id)


async def case_settling_the_same_way_again_changes_nothing(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    await given.settle(claimed, now=40)
    before = given.row(row.id)
    await given.settle(claimed, now=50)
    equal(given.row(row.id), before)


async def case_a_settlement_is_written_once(store: Store) -> None:
    """B13: whoever comes second is told of the first, with the fence and without."""
    given = Given(store)
    row, claimed = await given.running()
    await given.settle(claimed, "cancelled", release=False)
    before = given.row(row.id)
    for release in (False, True):
        error = await refused(Conflict, given.settle(claimed, "completed", release=release))
        check("cancelled" in str(error), f"the message should name the stored outcome: {error}")
    stale = altered(claimed, epoch=claimed.epoch - 1)
    await refused(Conflict, given.settle(stale, "completed"))
    equal(given.row(row.id), before)


async def case_queued_work_is_settled_behind_a_running_one(store: Store) -> None:
    given = Given(store)
    running, claimed = await given.running()
    queued, last = await given.admit(), await given.admit()
    await given.settle(claimed, "cancelled", of=queued.id, release=False)
    equal((given.state(running.id), given.state(queued.id)), ("input-applied", "settled"))
    equal(await given.claims("w2"), [])
    await given.settle(claimed)
    equal(work_of(await given.claim()), last.id)


async def case_a_claim_settles_nothing_of_another_thread(store: Store) -> None:
    given = Given(store)
    other, _ = await given.running("other")
    _, claimed = await given.running("t")
    await refused(Invalid, given.settle(claimed, of=other.id))
    await refused(Invalid, given.settle(claimed, of="sub_nobody"))
    await refused(Invalid, given.suspend(altered(claimed, submission=other)))
    equal(given.state(other.id), "input-applied")


async def case_settled_among_names_the_settled_ones(store: Store) -> None:
    given = Given(store)
    rows = [await given.admit(f"t{n}") for n in range(4)]
    for claimed in await given.claims():
        if claimed.thread in ("t1", "t3"):
            await given.settle(claimed)
    wanted = [row.id for row in rows] + ["sub_nobody"]
    equal(sorted(given.look(lambda tx: tx.ledger.settled_among(wanted))), sorted([rows[1].id, rows[3].id]))
    equal(given.look(lambda tx: tx.ledger.settled_among([])), [])


async def case_an_illegal_step_changes_nothing(store: Store) -> None:
    given = Given(store)
    row, claimed = await given.running()
    queued = await given.admit()
    before = given.row(queued.id)
    await refused(Invalid, given.suspend(altered(claimed, submission=queued)))
    await refused(Invalid, given.park(altered(claimed, submission=queued)))
    equal(given.row(queued.id), before)
    await given.settle(claimed, release=False)
    await refused(Invalid, given.suspend(claimed))
    equal(given.state(row.id), "settled")


# -- the unit ---------------------------------------------------------------------------------------------------------


async def case_a_unit_that_raises_leaves_nothing_and_harms_no_neighbour(store: Store) -> None:
    given = Given(store)
    kept = [given.admission("kept"), given.admission("kept")]
    lost = given.admission("lost")

    def failing(tx: Transaction) -> None:
        tx.ledger.admit(lost)
        raise Invalid("changed my mind")

    results = await asyncio.gather(
        given.do(lambda tx: tx.ledger.admit(kept[0])),
        given.do(failing),
        given.do(lambda tx: tx.ledger.admit(kept[1])),
        return_exceptions=True,
    )
    check(isinstance(results[1], Invalid), f"the unit should fail: {results[1]!r}")
    equal([row.id for row in given.look(lambda tx: tx.ledger.submissions())], [a.submission for a in kept])
    equal(given.look(lambda tx: tx.ledger.thread("lost")), None)


async def case_every_open_submission_is_claimable_owned_or_waits_for_a_decision(store: Store) -> None:
    """Liveness: whatever state work is in, somebody can bring it on."""
    given = Given(store)
    await given.admit("ready", at=10)
    await given.claims(now=10)  # its owner dies
    for thread, kind in (("suspended", "suspend"), ("parked", "park")):
        row, claimed = await given.running(thread)
        await given.approval(row)
        await given.effect(row, status="unknown")
        await (given.suspend if kind == "suspend" else given.park)(claimed)
        await given.intend(row, "cancel")
    backing, claimed = await given.running("backing off")
    await given.release(claimed, not_before=500)
    await given.admit("fresh", at=10)
    granted = {work_of(claimed) for claimed in await given.claims(now=10 + LEASE)}
    equal(granted, {item.submission for item in given.look(lambda tx: tx.ledger.open_work())})
    check(backing.id in granted, "a backoff ends")
