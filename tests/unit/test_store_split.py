"""What a crash between the two commits of a split store leaves, and that the next owner can go on from there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from perdure.errors import OwnershipLost
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Claimed
from perdure.ports.log import Tail
from perdure.ports.store import Transaction
from perdure.records.codec import EMPTY_TAIL
from perdure.testing.conformance.given import LEASE, Given, tail_after, work_of
from perdure.testing.split import SplitStore, open_split

pytestmark = pytest.mark.anyio

EMPTY = Tail(0, EMPTY_TAIL, 0)


class CrashError(BaseException):
    pass


@pytest.fixture(params=[True, False], ids=["threaded", "inline"])
async def store(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[SplitStore]:
    store = open_split(tmp_path, threaded=request.param)
    yield store
    await store.close()


def crash_at(store: SplitStore, boundary: Boundary) -> list[Boundary]:
    """Die once between the commits of the next unit of a boundary."""
    seen: list[Boundary] = []

    def between(found: Boundary) -> None:
        seen.append(found)
        if found is boundary:
            store.between = None
            raise CrashError

    store.between = between
    return seen


async def settle(given: Given, claimed: Claimed, boundary: Boundary = Boundary.SETTLE) -> None:
    """The last record and the settlement, in one unit."""
    c, after = claimed, tail_after(EMPTY, b"settled")

    def unit(tx: Transaction) -> None:
        tx.log.append(c.number, c.epoch, c.token, EMPTY, 1, b"settled", after.digest)
        tx.ledger.settle(c.number, c.epoch, c.token, work_of(c), "completed", None, None, 20, release=True)

    await given.store.write(boundary, unit)


async def test_a_crash_between_leaves_the_log_ahead_of_the_ledger(store: SplitStore) -> None:
    given = Given(store)
    row, claimed = await given.running()
    seen = crash_at(store, Boundary.SETTLE)
    with pytest.raises(CrashError):
        await settle(given, claimed)
    assert seen == [Boundary.SETTLE]
    assert [batch.body for batch in given.batches(claimed.number)] == [b"settled"]
    assert given.state(row.id) == "input-applied"


async def test_the_next_owner_goes_on_from_a_log_that_is_ahead(store: SplitStore) -> None:
    given = Given(store)
    row, old = await given.running(now=10)
    crash_at(store, Boundary.SETTLE)
    with pytest.raises(CrashError):
        await settle(given, old)
    new = await given.claim("w2", now=10 + LEASE)
    assert (new.epoch, new.tail.sequence) == (old.epoch + 1, 1)
    with pytest.raises(OwnershipLost):
        await given.append(old, new.tail)
    await given.append(new, new.tail, b"repaired")
    await given.settle(new)
    assert given.state(row.id) == "settled"


async def test_a_crash_inside_a_claim_leaves_the_thread_claimable(store: SplitStore) -> None:
    """The log knows an epoch that the ledger never gave: the next grant is that epoch with another token."""
    given = Given(store)
    await given.admit()
    crash_at(store, Boundary.REPAIR)
    with pytest.raises(CrashError):
        await given.claim(now=10)
    thread = given.look(lambda tx: tx.ledger.thread("t"))
    assert thread is not None
    assert (thread.epoch, thread.owner) == (0, None)
    claimed = await given.claim(now=10)
    assert claimed.epoch == 1
    await given.append(claimed, EMPTY)


async def test_a_crash_inside_a_release_costs_the_lease_and_nothing_else(store: SplitStore) -> None:
    given = Given(store)
    row, claimed = await given.running(now=10)
    crash_at(store, Boundary.REPAIR)
    with pytest.raises(CrashError):
        await given.release(claimed)
    with pytest.raises(OwnershipLost):
        await given.append(claimed, EMPTY)
    assert await given.claims("w2", now=9 + LEASE) == []
    again = await given.claim("w2", now=10 + LEASE)
    assert work_of(again) == row.id
    await given.append(again, EMPTY)


async def test_other_boundaries_pass(store: SplitStore) -> None:
    given = Given(store)
    _, claimed = await given.running()
    seen = crash_at(store, Boundary.RENEW)
    await settle(given, claimed, Boundary.SETTLE)
    await given.admit()
    assert seen == [Boundary.SETTLE, Boundary.REPAIR]


async def test_both_parts_are_found_again(tmp_path: Path) -> None:
    store = open_split(tmp_path)
    row, claimed = await Given(store).running()
    await Given(store).append(claimed, EMPTY)
    await store.close()
    assert {path.name for path in tmp_path.iterdir()} == {"log.db", "ledger.db"}  # noqa: ASYNC240
    store = open_split(tmp_path)
    assert Given(store).row(row.id).input_sequence == 1
    assert Given(store).tail(claimed.number).sequence == 1
    await store.close()
