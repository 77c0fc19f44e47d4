"""The store port: one transaction over log and ledger.

A *unit of work* is a plain synchronous function of a ``Transaction``. The writer runs it whole, commits it with others in
one group, and only then resolves the caller's future. A unit may be run more than once (a group in which one unit raised
is rolled back and run again unit by unit), so it must change nothing but through its transaction. It is never an
awaitable: nothing waits while a transaction is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

from perdure.ports.failpoints import Boundary, Failpoint
from perdure.ports.ledger import Ledger
from perdure.ports.log import Log

T = TypeVar("T")


class Transaction(Protocol):
    """What a unit of work may touch. Valid only while the unit runs."""

    log: Log
    ledger: Ledger


Unit = Callable[[Transaction], T]


class Store(Protocol):
    """A place that keeps logs and ledger.

    Attributes:
        failpoint: set by tests; called around every durable write.
    """

    failpoint: Failpoint | None

    def write(
        self,
        boundary: Boundary,
        unit: Unit[T],
        on_error: Callable[[BaseException], None] | None = None,
        *,
        single: bool = False,
    ) -> asyncio.Future[T]:
        """Enqueue a unit at once, in call order; the future resolves when it is durable.

        ``single`` says that the unit is one verb that is atomic by itself (an append and nothing else): where it is alone
        it needs no transaction around it. ``on_error`` is called on the loop before the future carries an exception,
        whoever listens to it.

        Units are run in the order of their calls, whatever becomes of the future: a cancelled caller only stops
        listening. If the unit raises, it alone is rolled back and the future carries the exception.

        Raises (through the future):
            Unavailable: the store is full, locked too long, failing or closed; nothing of the unit is stored.
        """
        ...

    def read(self, unit: Unit[T]) -> T:
        """Run a short read-only unit now, on the loop's own connection, in one snapshot."""
        ...

    async def scan(self, unit: Unit[T]) -> T:
        """Run a long read-only unit off the loop, in one snapshot."""
        ...

    def hold(self, owner: str, lease_seconds: float, now: Callable[[], int]) -> None:
        """Keep the claims of ``owner`` alive from the writer until :meth:`close`; ``now`` is the clock they count by.

        Renewal stops while the loop has not ticked within ``LOOP_STALL_SECONDS_MAX`` or half the lease.
        """
        ...

    def subscribe(self, on_change: Callable[[], None]) -> Callable[[], None]:
        """Call ``on_change`` on the loop after another process committed. Returns the way to stop.

        A hint: it may come late, twice or without cause; losing one costs latency, never work.
        """
        ...

    async def close(self) -> None:
        """Finish what is queued, stop, close. Idempotent."""
        ...
