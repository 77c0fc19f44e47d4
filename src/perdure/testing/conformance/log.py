"""What a log must do. An adapter proves it by running every case of :func:`log_suite`, each on a fresh store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from perdure.errors import Conflict, Invalid, OwnershipLost
from perdure.limits import BATCH_RECORDS_MAX, MIB
from perdure.ports.failpoints import Boundary
from perdure.ports.log import StoredBatch, Tail
from perdure.ports.store import Store, Transaction
from perdure.records.codec import EMPTY_TAIL
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
    tail_after,
)

EMPTY = Tail(0, EMPTY_TAIL, 0)


def log_suite(factory: Factory) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """Every case, named by its sentence, each on a store that ``factory`` opens for it."""
    return suite(cases_of(globals()), factory)


async def case_a_log_begins_empty(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    equal(claimed.tail, EMPTY)
    equal(given.tail(claimed.number), EMPTY)
    equal(given.batches(claimed.number), [])


async def case_bytes_come_back_as_they_were_appended(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    body = bytes(range(256))
    tail = await given.append(claimed, EMPTY, body, 3)
    equal(given.tail(claimed.number), tail)
    equal(given.batches(claimed.number), [StoredBatch(1, 3, claimed.epoch, tail.digest, body)])


async def case_a_large_batch_comes_back_whole(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    body = b"\x00\xff" * (MIB // 2)
    await given.append(claimed, EMPTY, body, BATCH_RECORDS_MAX)
    equal(given.batches(claimed.number)[0].body, body)
    equal(given.tail(claimed.number).sequence, BATCH_RECORDS_MAX)


async def case_a_batch_holds_1_to_256_records(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    for count in (0, -1, BATCH_RECORDS_MAX + 1):
        await refused(Invalid, given.append(claimed, EMPTY, b"x", count))
    equal(given.tail(claimed.number), EMPTY)


async def case_a_batch_is_visible_with_its_unit_or_not_at_all(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    seen: list[Tail] = []

    def unit(tx: Transaction) -> None:
        tail = EMPTY
        for body in (b"one", b"two"):
            after = tail_after(tail, body)
            tx.log.append(claimed.number, claimed.epoch, claimed.token, tail, 1, body, after.digest)
            tail = after
        seen.append(tx.log.tail(claimed.number))
        raise Invalid("changed my mind")

    await refused(Invalid, given.do(unit))
    equal(seen[0].sequence, 2)
    equal(given.batches(claimed.number), [])
    await given.append(claimed, EMPTY)
    equal(given.tail(claimed.number).sequence, 1)


async def case_the_same_bytes_at_the_same_place_again_change_nothing(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    first = await given.append(claimed, EMPTY, b"one")
    second = await given.append(claimed, first, b"two")
    before = given.batches(claimed.number)
    await given.append(claimed, first, b"two")
    await given.append(claimed, EMPTY, b"one")
    equal(given.batches(claimed.number), before)
    equal(given.tail(claimed.number), second)


async def case_other_bytes_at_the_same_place_are_a_conflict_and_the_stored_ones_stand(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    first = await given.append(claimed, EMPTY, b"one")
    await given.append(claimed, first, b"two")
    before = given.batches(claimed.number)
    await refused(Conflict, given.append(claimed, first, b"TWO"))
    await refused(Conflict, given.append(claimed, EMPTY, b"ONE"))
    equal(given.batches(claimed.number), before)


async def case_a_stale_end_is_a_conflict_that_names_the_real_one(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    first = await given.append(claimed, EMPTY, b"one", 2)
    await given.append(claimed, first, b"two", 5)
    error = await refused(Conflict, given.append(claimed, first, b"three"))
    check("7" in str(error), f"the message should name record 7: {error}")


async def case_an_append_beyond_the_end_is_a_conflict(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    await refused(Conflict, given.append(claimed, Tail(1, bytes(32), 1), b"late"))
    first = await given.append(claimed, EMPTY, b"one", 2)
    for wrong in (
        Tail(3, first.digest, 1),  # a gap
        Tail(1, first.digest, 1),  # inside the batch
        Tail(2, bytes(32), 1),  # another history
        Tail(2, first.digest, 2),  # another batch
    ):
        await refused(Conflict, given.append(claimed, wrong, b"two"))
    equal(given.tail(claimed.number), first)


async def case_only_the_current_epoch_and_token_may_append(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    for wrong in (
        altered(claimed, epoch=claimed.epoch - 1),
        altered(claimed, epoch=claimed.epoch + 1),
        altered(claimed, token=claimed.token + 1),
    ):
        await refused(OwnershipLost, given.append(wrong, EMPTY))
    equal(given.tail(claimed.number), EMPTY)
    await given.append(claimed, EMPTY)


async def case_a_takeover_goes_on_at_the_end_and_the_old_owner_is_refused(store: Store) -> None:
    given = Given(store)
    _, old = await given.running()
    first = await given.append(old, EMPTY, b"one")
    new = await given.claim("w2", now=10 + LEASE)
    equal(new.tail, first)
    await refused(OwnershipLost, given.append(old, first, b"zombie"))
    await refused(OwnershipLost, given.append(old, EMPTY, b"one"))
    await given.append(new, first, b"two")
    equal([batch.body for batch in given.batches(old.number)], [b"one", b"two"])
    equal([batch.epoch for batch in given.batches(old.number)], [old.epoch, new.epoch])


async def case_an_owner_that_gave_up_cannot_append(store: Store) -> None:
    given = Given(store)
    await given.admit()
    for end in (given.release, given.suspend, given.settle):
        claimed = await given.claim(now=100)
        await end(claimed, now=100)
        await refused(OwnershipLost, given.append(claimed, EMPTY))
    equal(given.batches(claimed.number), [])


async def case_a_lapsed_lease_alone_takes_nothing_away(store: Store) -> None:
    """The lease is a hint: until somebody else claims, the owner may write."""
    given = Given(store)
    _, claimed = await given.running(now=10)
    await given.admit(at=10 + 5 * LEASE)
    await given.append(claimed, EMPTY)


async def case_an_append_to_no_thread_is_refused(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    await refused(Invalid, given.append(altered(claimed, number=claimed.number + 1), EMPTY))
    equal(given.batches(claimed.number + 1), [])


async def case_threads_do_not_see_each_other(store: Store) -> None:
    given = Given(store)
    _, one = await given.running("one")
    _, two = await given.running("two")
    await given.append(one, EMPTY, b"one")
    await given.append(two, EMPTY, b"two")
    equal([batch.body for batch in given.batches(one.number)], [b"one"])
    equal([batch.body for batch in given.batches(two.number)], [b"two"])
    await refused(OwnershipLost, given.append(altered(one, number=two.number), given.tail(two.number)))


async def case_reading_goes_on_after_a_place_with_the_exact_rest(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    tail, places = EMPTY, [0]
    for n in range(20):
        tail = await given.append(claimed, tail, b"%d" % n, 1 + n % 3)
        places.append(tail.sequence)
    everything = given.batches(claimed.number)
    equal([batch.last for batch in everything], places[1:])
    equal([batch.first for batch in everything], [place + 1 for place in places[:-1]])
    for n, place in enumerate(places):
        equal(given.batches(claimed.number, place), everything[n:])
        equal(given.batches(claimed.number, place, 3), everything[n : n + 3])


async def case_reading_from_a_record_begins_with_the_batch_that_holds_it(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    tail = EMPTY
    for n in range(6):
        tail = await given.append(claimed, tail, b"%d" % n, 1 + n % 3)
    everything = given.batches(claimed.number)
    for sequence in range(1, tail.sequence + 1):
        for limit in (1, 2, 100):
            found = given.look(lambda tx, s=sequence, m=limit: tx.log.read_from(claimed.number, s, m))  # type: ignore[misc]
            equal(found, [batch for batch in everything if batch.last >= sequence][:limit])
    equal(given.look(lambda tx: tx.log.read_from(claimed.number, tail.sequence + 1, 9)), [])


async def case_appends_that_nobody_awaits_land_in_the_order_of_their_calls(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    tail, futures = EMPTY, []
    for n in range(200):
        body = b"%d" % n
        after = tail_after(tail, body)

        def unit(tx: Transaction, expected: Tail = tail, body: bytes = body, digest: bytes = after.digest) -> None:
            tx.log.append(claimed.number, claimed.epoch, claimed.token, expected, 1, body, digest)

        futures.append(store.write(Boundary.RESPONSE, unit))
        if n % 7 == 0:
            await asyncio.sleep(0)
        if n % 3 == 0:
            futures.pop().cancel()  # whoever stops listening stops nothing
        tail = after
    await asyncio.gather(*futures)
    await given.do(lambda tx: None)
    equal([batch.body for batch in given.batches(claimed.number)], [b"%d" % n for n in range(200)])


async def case_a_refused_append_harms_no_neighbour(store: Store) -> None:
    given = Given(store)
    _, one = await given.running("one")
    _, two = await given.running("two")
    stale = altered(two, epoch=two.epoch - 1)
    results = await asyncio.gather(
        given.append(one, EMPTY, b"one"),
        given.append(stale, EMPTY, b"stale"),
        given.append(two, EMPTY, b"two"),
        return_exceptions=True,
    )
    check(isinstance(results[1], OwnershipLost), f"the stale append should be refused: {results[1]!r}")
    equal([batch.body for batch in given.batches(one.number)], [b"one"])
    equal([batch.body for batch in given.batches(two.number)], [b"two"])


async def case_clocks_do_not_matter(store: Store) -> None:
    """A08: epochs and sequences order; a clock that stands still or runs back makes no owner look stale."""
    given = Given(store)
    hour = 3_600_000_000
    row, claimed = await given.running(now=5 * hour)
    first = await given.append(claimed, EMPTY, b"one")
    await given.do(lambda tx: tx.ledger.renew("w1", 4 * hour + LEASE))
    second = await given.append(claimed, first, b"two")
    await given.release(claimed, now=4 * hour)
    again = await given.claim(now=4 * hour)
    check(again.epoch == claimed.epoch + 1, "an epoch counts, whatever the clock says")
    await given.append(again, second, b"three")
    await given.settle(again, now=hour)
    equal(given.state(row.id), "settled")
    equal(len(given.batches(claimed.number)), 3)


async def case_a_long_read_sees_what_was_durable_before_it(store: Store) -> None:
    given = Given(store)
    _, claimed = await given.running()
    await given.append(claimed, EMPTY)
    equal((await store.scan(lambda tx: tx.log.tail(claimed.number))).sequence, 1)
