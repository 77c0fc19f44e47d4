"""The part of ``ledger_suite`` about live events between processes."""

from __future__ import annotations

from perdure.limits import LIVE_EVENTS_SECONDS
from perdure.ports.failpoints import Boundary
from perdure.ports.store import Store
from perdure.testing.conformance.given import equal

NOW = 1_800_000_000_000_000


async def case_a_watcher_is_seen_by_others_until_it_lapses(store: Store) -> None:
    await store.write(Boundary.LIVE, lambda tx: tx.ledger.watch_events("s", "a", NOW))
    equal(store.read(lambda tx: tx.ledger.watched_events("b", NOW - 1)), ["s"])
    equal(store.read(lambda tx: tx.ledger.watched_events("b", NOW)), [])
    equal(store.read(lambda tx: tx.ledger.watched_events("a", NOW - 1)), [])
    await store.write(Boundary.LIVE, lambda tx: tx.ledger.watch_events("s", "a", NOW + 10))
    equal(store.read(lambda tx: tx.ledger.watched_events("b", NOW + 9)), ["s"])
    await store.write(Boundary.LIVE, lambda tx: tx.ledger.watch_events("s", "a", 0))
    equal(store.read(lambda tx: tx.ledger.watched_events("b", NOW + 9)), [])


async def case_live_events_are_read_by_others_in_order_from_a_number(store: Store) -> None:
    for body in (b"1", b"2"):
        await store.write(Boundary.LIVE, lambda tx, body=body: tx.ledger.put_events("s", "a", body, NOW))  # type: ignore[misc]
    await store.write(Boundary.LIVE, lambda tx: tx.ledger.put_events("t", "a", b"3", NOW))
    first, second = store.read(lambda tx: tx.ledger.events_after("s", "b", 0))
    equal([first[1], second[1]], [b"1", b"2"])
    equal(store.read(lambda tx: tx.ledger.events_after("s", "b", first[0])), [second])
    equal(store.read(lambda tx: tx.ledger.events_after("s", "a", 0)), [])


async def case_live_events_do_not_last(store: Store) -> None:
    later = NOW + int(LIVE_EVENTS_SECONDS * 1_000_000) + 1
    await store.write(Boundary.LIVE, lambda tx: tx.ledger.put_events("s", "a", b"old", NOW))
    await store.write(Boundary.LIVE, lambda tx: tx.ledger.put_events("t", "a", b"new", later))
    equal(store.read(lambda tx: tx.ledger.events_after("s", "b", 0)), [])
    equal(len(store.read(lambda tx: tx.ledger.events_after("t", "b", 0))), 1)
