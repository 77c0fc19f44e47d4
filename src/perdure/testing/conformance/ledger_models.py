"""The part of ``ledger_suite`` about how often models are called; :func:`model_suite` is that part alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from perdure.errors import Invalid
from perdure.limits import RATE_WINDOW_SECONDS
from perdure.ports.failpoints import Boundary
from perdure.ports.store import Store, Transaction
from perdure.rules.accounting import Rate
from perdure.testing.conformance.given import Factory, cases_of, equal, refused, suite

T = TypeVar("T")

SECOND = 1_000_000
MINUTE = int(RATE_WINDOW_SECONDS) * SECOND
NOW = 1_800_000_000 * SECOND


def model_suite(factory: Factory) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """These cases alone, for a store that keeps nothing but the rates of models."""
    return suite(cases_of(globals()), factory)


class Caller:
    """Somebody who calls models."""

    def __init__(self, store: Store, rate: Rate | None = None, model: str = "m") -> None:
        self.store = store
        self.rate = rate or Rate()
        self.model = model

    async def do(self, unit: Callable[[Transaction], T]) -> T:
        """Write one unit."""
        return await self.store.write(Boundary.MODEL_RATE, unit)

    async def take(self, after: int = 0, tokens: int = 0) -> int:
        """Ask for a turn ``after`` so many microseconds: 0, or the wait until the instant to ask again."""
        now = NOW + after
        again = await self.do(lambda tx: tx.ledger.take_model_turn(self.model, now, tokens, self.rate))
        return again and again - NOW

    async def correct(self, after: int, reserved: int, used: int) -> None:
        """Say what a call used."""
        now = NOW + after
        await self.do(lambda tx: tx.ledger.correct_model_turn(self.model, now, reserved, used, self.rate))

    async def hold(self, after: int) -> None:
        """Hold the model until ``after`` so many microseconds."""
        await self.do(lambda tx: tx.ledger.hold_model(self.model, NOW + after))

    def held(self) -> int:
        """Until when the model is held, 0 if it never was."""
        until = self.store.read(lambda tx: tx.ledger.model_held_until(self.model))
        return until and until - NOW


async def case_a_minutes_calls_are_granted_at_once_and_then_evenly(store: Store) -> None:
    caller = Caller(store, Rate(requests=3))
    equal([await caller.take() for _ in range(5)], [0, 0, 0, 20 * SECOND, 20 * SECOND])
    equal([await caller.take(20 * SECOND - 1), await caller.take(20 * SECOND)], [20 * SECOND, 0])
    equal(await caller.take(20 * SECOND), 40 * SECOND)
    equal([await caller.take(3 * MINUTE) for _ in range(4)], [0, 0, 0, 3 * MINUTE + 20 * SECOND])


async def case_tokens_are_granted_by_what_a_call_reserves(store: Store) -> None:
    caller = Caller(store, Rate(tokens=600))
    equal([await caller.take(tokens=400), await caller.take(tokens=200), await caller.take(tokens=10)], [0, 0, SECOND])
    equal(await caller.take(tokens=600), MINUTE)
    equal(await caller.take(SECOND, tokens=10), 0)


async def case_a_call_beyond_a_minutes_tokens_takes_the_whole_minute(store: Store) -> None:
    caller = Caller(store, Rate(tokens=600))
    equal(await caller.take(tokens=10**12), 0)
    equal(await caller.take(tokens=10**12), MINUTE)
    equal(await caller.take(MINUTE, tokens=10**12), 0)


async def case_what_one_limit_refuses_the_other_does_not_count(store: Store) -> None:
    caller = Caller(store, Rate(requests=2, tokens=600))
    equal([await caller.take(tokens=500), await caller.take(tokens=300)], [0, 20 * SECOND])
    equal([await caller.take(tokens=100), await caller.take(tokens=100)], [0, 30 * SECOND])
    equal(await caller.take(30 * SECOND, tokens=300), 0)


async def case_asked_at_the_instant_that_was_named_it_is_granted(store: Store) -> None:
    """Whatever refused it: calls, tokens, a hold, or several of them."""
    caller = Caller(store, Rate(requests=7, tokens=1000))
    after, waits = 0, []
    for tokens in (300, 10, 900, 5, 5, 1000, 1, 2000, 1, 1, 1, 1, 1, 1, 1, 1):
        if tokens == 5:
            await caller.hold(after + 7 * SECOND)
        again = await caller.take(after, tokens)
        if again:
            equal(again > after, True)
            equal(await caller.take(again - 1, tokens), again)
            equal(await caller.take(again, tokens), 0)
            waits.append(again - after)
            after = again
    equal(len(waits) > 4, True)


async def case_every_model_has_a_rate_of_its_own(store: Store) -> None:
    callers = [Caller(store, Rate(requests=1), model) for model in ("m", "M", "m ", "", "модель/1:x'\"")]
    equal([await caller.take() for caller in callers], [0] * 5)
    equal([await caller.take() for caller in callers], [MINUTE] * 5)
    await callers[0].hold(2 * MINUTE)
    equal([caller.held() for caller in callers], [2 * MINUTE, 0, 0, 0, 0])


async def case_one_rate_is_shared_by_all_who_ask_at_once(store: Store) -> None:
    callers = [Caller(store, Rate(requests=20)) for _ in range(50)]
    granted = await asyncio.gather(*(caller.take() for caller in callers))
    equal(granted, [0] * 20 + [3 * SECOND] * 30)


async def case_without_a_bound_every_call_is_granted(store: Store) -> None:
    caller = Caller(store)
    equal([await caller.take(tokens=10**15) for _ in range(100)], [0] * 100)


async def case_a_call_that_asks_with_another_rate_is_judged_by_it(store: Store) -> None:
    """What was counted stays counted when a rate is changed."""
    before, after = Caller(store, Rate(requests=60)), Caller(store, Rate(requests=2))
    equal([await before.take() for _ in range(31)], [0] * 31)
    equal(await after.take(), SECOND)
    equal(await after.take(SECOND), 0)
    equal(await before.take(SECOND), 2 * SECOND)


async def case_a_held_model_grants_nothing_before_and_everything_from_then_on(store: Store) -> None:
    caller = Caller(store, Rate(requests=2))
    await caller.hold(5 * SECOND)
    equal([await caller.take(), await caller.take(5 * SECOND - 1)], [5 * SECOND, 5 * SECOND])
    equal([await caller.take(5 * SECOND) for _ in range(3)], [0, 0, 35 * SECOND])
    free = Caller(store)
    await free.hold(40 * SECOND)
    equal([await free.take(39 * SECOND), await free.take(40 * SECOND)], [40 * SECOND, 0])


async def case_a_hold_is_never_brought_forward(store: Store) -> None:
    caller = Caller(store)
    equal(caller.held(), 0)
    held = []
    for until in (5, 3, 5, 9, -100):
        await caller.hold(until * SECOND)
        held.append(caller.held())
    equal(held, [until * SECOND for until in (5, 5, 5, 9, 9)])


async def case_a_hold_and_a_count_leave_each_other_alone(store: Store) -> None:
    caller = Caller(store, Rate(requests=1, tokens=600))
    equal(await caller.take(tokens=100), 0)
    await caller.hold(SECOND)
    equal(await caller.take(2 * SECOND, tokens=100), MINUTE)
    equal(await caller.take(MINUTE, tokens=100), 0)
    await caller.correct(MINUTE, 100, 50)
    equal(caller.held(), SECOND)


async def case_what_a_call_did_not_use_is_given_back(store: Store) -> None:
    caller = Caller(store, Rate(tokens=600))
    equal([await caller.take(tokens=400), await caller.take(tokens=400)], [0, 20 * SECOND])
    await caller.correct(0, reserved=400, used=100)
    equal([await caller.take(tokens=500), await caller.take(tokens=1)], [0, SECOND // 10])


async def case_what_is_given_back_makes_no_more_room_than_a_minutes(store: Store) -> None:
    caller = Caller(store, Rate(tokens=600))
    equal(await caller.take(tokens=600), 0)
    await caller.correct(50 * SECOND, reserved=600, used=0)
    equal([await caller.take(50 * SECOND, tokens=n) for n in (600, 1)], [0, 50 * SECOND + SECOND // 10])
    caller.model = "idle"
    await caller.correct(0, reserved=600, used=0)
    equal([await caller.take(tokens=600), await caller.take(tokens=1)], [0, SECOND // 10])


async def case_what_counted_as_a_minute_gives_back_no_more_than_it_took(store: Store) -> None:
    caller = Caller(store, Rate(tokens=600))
    equal(await caller.take(tokens=100_000), 0)
    await caller.correct(0, reserved=100_000, used=300)
    equal([await caller.take(tokens=300), await caller.take(tokens=1)], [0, SECOND // 10])
    await caller.correct(0, reserved=300, used=100_000)
    equal(await caller.take(tokens=1), 30 * SECOND + SECOND // 10)


async def case_what_a_call_used_beyond_its_reservation_is_waited_for(store: Store) -> None:
    caller = Caller(store, Rate(tokens=600))
    equal(await caller.take(tokens=500), 0)
    await caller.correct(0, reserved=500, used=600)
    equal(await caller.take(tokens=10), SECOND)
    await caller.correct(5 * MINUTE, reserved=0, used=300)
    equal([await caller.take(5 * MINUTE, tokens=n) for n in (300, 10)], [0, 5 * MINUTE + SECOND])


async def case_a_correction_counts_tokens_only(store: Store) -> None:
    caller = Caller(store, Rate(requests=1))
    equal(await caller.take(tokens=500), 0)
    await caller.correct(0, reserved=500, used=0)
    equal(await caller.take(), MINUTE)


async def case_a_turn_of_a_unit_that_raises_is_not_counted(store: Store) -> None:
    caller = Caller(store, Rate(requests=1))

    def failing(tx: Transaction) -> None:
        tx.ledger.take_model_turn("m", NOW, 0, caller.rate)
        tx.ledger.hold_model("m", NOW + MINUTE)
        raise Invalid("changed my mind")

    await refused(Invalid, caller.do(failing))
    equal((caller.held(), await caller.take()), (0, 0))
