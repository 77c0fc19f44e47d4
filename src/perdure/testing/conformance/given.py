"""What the suites of a store's ports stand on: a store's verbs as awaitables, with the arguments a case does not mean.

Instants are small integers; a lease ends ``LEASE`` after the claim. Nothing here knows any particular store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import msgspec

from perdure.errors import Error
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Admission, ApprovalRow, Claimed, EffectRow, Intent, IntentKind, Submission
from perdure.ports.log import StoredBatch, Tail
from perdure.ports.store import Store, Transaction
from perdure.records.codec import chain

T = TypeVar("T")
E = TypeVar("E", bound=Error)
Case = Callable[[Store], Awaitable[None]]
Factory = Callable[[], AbstractAsyncContextManager[Store]]
"""Opens a fresh, empty store and closes it."""

LEASE = 1000


def suite(cases: Iterable[Case], factory: Factory) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """Cases named by their sentence, each bound to a store of its own."""
    return [(_sentence(case), _bound(case, factory)) for case in cases]


def cases_of(names: dict[str, Any]) -> list[Case]:
    """The cases of a module, in the order they are written."""
    return [value for name, value in names.items() if name.startswith("case_")]


def _sentence(case: Case) -> str:
    name: str = getattr(case, "__name__", "case")
    return name.removeprefix("case_").replace("_", " ")


def _bound(case: Case, factory: Factory) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        async with factory() as store:
            await case(store)

    return run


def check(condition: object, message: str) -> None:
    """Fail with a message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def equal(got: object, wanted: object) -> None:
    """Fail unless two values are equal."""
    check(got == wanted, f"got {got!r}, wanted {wanted!r}")


async def refused(error: type[E], work: Awaitable[object]) -> E:
    """The error that ``work`` ends with. Fails if it ends otherwise."""
    try:
        result = await work
    except error as found:
        return found
    raise AssertionError(f"no {error.__name__}, but {result!r}")


R = TypeVar("R", bound=msgspec.Struct)


def altered(row: R, **changes: object) -> R:
    """A row of the ledger with other values in some fields."""
    return msgspec.structs.replace(row, **changes)


class Given:
    """A store by short words. Each verb is one unit of work."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._count = 0

    def fresh(self, kind: str) -> str:
        """A new id."""
        self._count += 1
        return f"{kind}_{self._count:024d}"

    async def do(self, unit: Callable[[Transaction], T]) -> T:
        """Write one unit."""
        return await self.store.write(Boundary.REPAIR, unit)

    def look(self, unit: Callable[[Transaction], T]) -> T:
        """Read one unit."""
        return self.store.read(unit)

    # -- admission and ownership ------------------------------------------------------------------------------------
    def admission(self, thread: str = "t", *, at: int = 1, **fields: Any) -> Admission:
        """An admission with a fresh submission."""
        id = self.fresh("sub")
        values: dict[str, Any] = {
            "principal": "p", "key": None, "program": "agent", "definition": "d1", "input": b"{}", "input_digest": "i1",
        } | fields  # fmt: skip
        return Admission(submission=id, thread=thread, run="run_" + id[4:], at=at, **values)

    async def admit(self, thread: str = "t", *, at: int = 1, **fields: Any) -> Submission:
        """Admit fresh work and return its row."""
        admission = self.admission(thread, at=at, **fields)
        row, replayed = await self.do(lambda tx: tx.ledger.admit(admission))
        check(not replayed, f"{admission!r} came back as a replay")
        return row

    async def claims(
        self, owner: str = "w1", *, programs: Collection[str] | None = None, limit: int = 16, now: int = 10
    ) -> list[Claimed]:
        """Claim what is due."""
        tokens = [self._token() for _ in range(limit)]
        return await self.do(lambda tx: tx.ledger.claim(owner, programs, limit, now, now + LEASE, tokens))

    async def claim(self, owner: str = "w1", *, programs: Collection[str] | None = None, now: int = 10) -> Claimed:
        """Claim exactly one thread."""
        granted = await self.claims(owner, programs=programs, now=now)
        check(len(granted) == 1, f"one thread should be due at {now}, but {granted!r} was granted")
        return granted[0]

    async def running(self, thread: str = "t", *, now: int = 10, **fields: Any) -> tuple[Submission, Claimed]:
        """Admit work and claim it, with its input applied."""
        row = await self.admit(thread, at=now, **fields)
        claimed = await self.claim(now=now)
        equal(work_of(claimed), row.id)
        await self.do(lambda tx: tx.ledger.apply_input(row.id, 1))
        return row, claimed

    async def claim_thread(
        self, thread: int, owner: str = "w2", *, now: int = 10, blocked: bool = False
    ) -> Claimed | None:
        """Claim one thread whatever is due on it."""
        token = self._token()
        return await self.do(lambda tx: tx.ledger.claim_thread(thread, owner, now, now + LEASE, token, blocked=blocked))

    def _token(self) -> int:
        self._count += 1
        return 1_000_000 + self._count

    async def release(self, claimed: Claimed, *, now: int = 10, not_before: int = 0) -> None:
        """Give a claim back."""
        c = claimed
        await self.do(lambda tx: tx.ledger.release(c.number, c.epoch, c.token, now, not_before=not_before))

    async def suspend(self, claimed: Claimed, *, wake_at: int | None = None, now: int = 10) -> bool:
        """Suspend the claimed submission."""
        c, id = claimed, work_of(claimed)
        return await self.do(lambda tx: tx.ledger.suspend(c.number, c.epoch, c.token, id, wake_at, now))

    async def park(self, claimed: Claimed, *, wake_at: int | None = None, now: int = 10) -> bool:
        """Park the claimed submission."""
        c, id = claimed, work_of(claimed)
        return await self.do(lambda tx: tx.ledger.park(c.number, c.epoch, c.token, id, wake_at, now))

    async def settle(
        self,
        claimed: Claimed,
        outcome: str = "completed",
        *,
        of: str | None = None,
        release: bool = True,
        now: int = 10,
    ) -> None:
        """Settle a submission, the claimed one unless another is named."""
        c, id = claimed, of or work_of(claimed)
        await self.do(
            lambda tx: tx.ledger.settle(c.number, c.epoch, c.token, id, outcome, None, None, now, release=release)
        )

    # -- decisions --------------------------------------------------------------------------------------------------
    async def intend(self, row: Submission, kind: IntentKind, subject: str | None = None, *, at: int = 30) -> Intent:
        """Record a command about a submission."""
        intent = Intent(0, row.thread_number, row.id, kind, subject or row.id, b"{}", "ops", "because", at)
        return (await self.do(lambda tx: tx.ledger.add_intent(intent)))[0]

    async def take_in(self, intent: Intent, *, at: int = 31) -> None:
        """Note that a command is in the log, and what it decides."""

        def unit(tx: Transaction) -> None:
            if intent.kind == "approval":
                tx.ledger.decide_approval(intent.subject, "approved", intent.by, intent.reason, at)
            tx.ledger.mark_applied(intent.id, at)

        await self.do(unit)

    async def approval(self, row: Submission, *, at: int = 15) -> str:
        """Ask for an approval."""
        id = self.fresh("apr")
        asked = ApprovalRow(id, row.thread_number, row.id, row.run, "call", "pay", b"{}", "a1", "risk", at, "pending")
        await self.do(lambda tx: tx.ledger.put_approval(asked))
        return id

    def effect_row(self, row: Submission, *, at: int = 15, **fields: Any) -> EffectRow:
        """An effect of a submission's run that was started."""
        values: dict[str, Any] = {
            "step": None, "operation": "pay", "kind": "tool", "effect_class": "once", "risk": "high", "key": "k",
            "business_key": None, "status": "started", "verdict": None, "tries": 1, "sequence": 2, "ended_at": None,
        } | fields  # fmt: skip
        return EffectRow(
            id=self.fresh("eff"), thread=row.thread_number, submission=row.id, run=row.run, call="call", started_at=at,
            **values,
        )  # fmt: skip

    async def effect(self, row: Submission, *, at: int = 15, **fields: Any) -> str:
        """Put an effect of a submission's run into the ledger."""
        effect = self.effect_row(row, at=at, **fields)
        await self.do(lambda tx: tx.ledger.put_effect(effect))
        return effect.id

    # -- the log ----------------------------------------------------------------------------------------------------
    async def append(self, claimed: Claimed, expected: Tail, body: bytes = b"one", count: int = 1) -> Tail:
        """Append a batch and return where the log ends then."""
        c, after = claimed, tail_after(expected, body, count)
        await self.do(lambda tx: tx.log.append(c.number, c.epoch, c.token, expected, count, body, after.digest))
        return after

    def tail(self, thread: int) -> Tail:
        """Where a log ends."""
        return self.look(lambda tx: tx.log.tail(thread))

    def batches(self, thread: int, after: int = 0, limit: int = 1000) -> list[StoredBatch]:
        """Batches of a log."""
        return self.look(lambda tx: tx.log.read(thread, after, limit))

    # -- looking ----------------------------------------------------------------------------------------------------
    def row(self, submission: str) -> Submission:
        """The row of a submission that must exist."""
        found = self.look(lambda tx: tx.ledger.submission(submission))
        if found is None:
            raise AssertionError(f"{submission!r} is not in the ledger")
        return found

    def state(self, submission: str) -> str:
        """The state of a submission that must exist."""
        return self.row(submission).state

    def next_due(self, programs: Collection[str] | None = None, *, now: int = 10) -> int | None:
        """When something may be claimable."""
        return self.look(lambda tx: tx.ledger.next_due(programs, now))


def work_of(claimed: Claimed) -> str:
    """The submission that a claim was granted for."""
    if claimed.submission is None:
        raise AssertionError(f"{claimed!r} was granted for maintenance")
    return claimed.submission.id


def tail_after(expected: Tail, body: bytes, count: int = 1) -> Tail:
    """Where a log ends after a batch."""
    return Tail(expected.sequence + count, chain(expected.digest, body), expected.sequence + 1)
