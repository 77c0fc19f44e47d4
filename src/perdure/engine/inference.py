"""Model calls: the one door to a model, and the truth about what was dispatched through it.

A try that gives no response is a record before the next one starts. A ``repeat`` call may be made again; a ``once``
call is an effect: recorded before it starts, refused by a definite failure, unknown when nobody can say.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from perdure import ids
from perdure.clock import seconds
from perdure.engine.attempt import Attempt
from perdure.engine.effects import failure_of
from perdure.engine.intents import Op
from perdure.errors import Signal
from perdure.limits import (
    FAILURE_MESSAGE_CHARS_MAX,
    MODEL_BACKOFF_SECONDS_MAX,
    MODEL_BACKOFF_SECONDS_MIN,
    MODEL_FAILURES_MAX,
    MODEL_TRIES_MAX,
    RATE_JITTER_SECONDS_MAX,
    RESPONSE_BYTES_MAX,
    RESPONSE_CALLS_MAX,
    RETRY_AFTER_SECONDS_MAX,
)
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import EffectRow
from perdure.ports.provider import Delta, Model, ModelError, Profile, Request, Response, profile_of
from perdure.records.codec import Record
from perdure.records.parts import NO_CHARGE, CallPart, Charge, Failure, Usage
from perdure.records.run import ModelCallFailed, ModelCallPrepared, ModelCallUnknown, model_place
from perdure.rules import accounting, fold

KIND = "model"
RISK = "medium"  # it costs money and tells somebody outside; it changes nothing there
_encode = msgspec.json.Encoder().encode

Told = Callable[[int, ModelCallFailed, float | None], None]
"""Told of each failed try: the turn, the record, and in how many seconds it is tried again."""


class CallFailed(Signal):
    """No response, and no further try. ``records`` and ``ops`` belong into the commit that says what comes of it."""

    def __init__(self, failure: Failure, records: Sequence[Record] = (), ops: Sequence[Op] = ()) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.records = records
        self.ops = ops


class CallUnknown(Signal):
    """A ``once`` call may have been served: recorded, and the run waits for a verdict."""


class Answer(msgspec.Struct, frozen=True):
    """A complete response, not recorded yet.

    Attributes:
        response: what the model said.
        cost, prices: micro-USD by real usage and the version of the price; None and empty without one.
        charged: the reservation, where the provider told no usage.
        effect: the effect that the response confirms; empty for a ``repeat`` call.
        ops: ledger changes of the commit that records it.
    """

    response: Response
    cost: int | None = None
    prices: str = ""
    charged: Charge = NO_CHARGE
    effect: str = ""
    ops: tuple[Op, ...] = ()


class Purse(Protocol):
    """A budget that the calls of one attempt share with others."""

    async def take(self, place: str, charge: Charge) -> Callable[[], None]:
        """Reserve one request and what it may cost at most, before it is dispatched.

        Args:
            place: names this very try, the same after a crash.

        Returns:
            what ends the reservation; called when the outcome is in the log, or about to be.

        Raises:
            CallFailed: the budget has no room; nothing may be dispatched.
        """
        ...


class ModelCalls:
    """The model calls of one attempt.

    Args:
        purse: the budget they share with others, if any.
        emit: told the deltas of a streamed response; None: not streamed. told: told of failed tries.
        watched: whether anybody wants the deltas of the next response; None: always.
    """

    def __init__(
        self,
        attempt: Attempt,
        model: Model,
        *,
        emit: Callable[[int, Delta], None] | None = None,
        told: Told | None = None,
        watched: Callable[[], bool] | None = None,
        purse: Purse | None = None,
    ) -> None:
        self.model = model
        self._purse = purse
        self.profile: Profile = profile_of(model)
        self._attempt = attempt
        self._emit = emit
        self._told = told
        self._watched = watched

    async def ask(self, request: Request, reserve: Callable[[], Charge]) -> Answer:
        """One response, asked for again where that is allowed: with backoff, Retry-After and the tries counted.

        Args:
            reserve: what the call is charged while nobody knows whether it was served.

        Raises:
            CallFailed: there is no response. CallUnknown: a ``once`` call of unknown outcome was recorded.
        """
        attempt = self._attempt
        run, turn = attempt.run, request.turn
        emit = self._emit
        once = run.started is not None and run.started.limits.model_calls == "once"
        started: ModelCallPrepared | None = None
        while True:
            if run.continuation_lost:
                request = replace(request, use_continuation=False)
            reserved = await self._wait_for_turn(run, turn, reserve)
            release = None
            if self._purse is not None:
                release = await self._purse.take(f"{run.id}.{turn}.{run.turn_tries + 1}", reserve())
            if once:
                started, key = await self._start(run, request, reserve)
                request = replace(request, key=key)
            host = attempt.host
            streamed = emit is not None and (self._watched is None or self._watched())
            deltas = (lambda delta: emit(turn, delta)) if emit is not None and streamed else None
            try:
                if host.store.failpoint is not None:
                    host.hit(Boundary.MODEL_CALL, "before")
                response = _checked(await self.model.respond(request, deltas))
                if host.store.failpoint is not None:
                    host.hit(Boundary.MODEL_CALL, "after")
                self._correct(reserved, response.usage)
                return self._answer(response, started, reserve)
            except asyncio.CancelledError:
                self._interrupted(run, turn, started, reserve)
                raise
            except ModelError as error:
                delay = await self._failed(run, turn, error, started, reserve)
            except Exception as error:
                own = ModelError(failure_of(error, "model").message, dispatched="unknown")
                delay = await self._failed(run, turn, own, started, reserve)
            finally:
                if release is not None:
                    release()
            await asyncio.sleep(delay)

    def _answer(self, response: Response, started: ModelCallPrepared | None, reserve: Callable[[], Charge]) -> Answer:
        price, usage = self.profile.price, response.usage
        told = usage != _NO_USAGE
        cost = accounting.cost(usage, price) if price is not None and told else None
        prices = price.version if price is not None and told else ""
        charged = NO_CHARGE if told else reserve()
        if started is None:
            return Answer(response, cost, prices, charged)
        effect, now = started.effect, self._attempt.host.clock.now()
        return Answer(
            response, cost, prices, charged, effect, (lambda tx: tx.ledger.end_effect(effect, "confirmed", None, now),)
        )

    # -- before -------------------------------------------------------------------------------------------------------
    async def _wait_for_turn(self, run: fold.Run, turn: int, reserve: Callable[[], Charge]) -> int:
        """Wait until the rate of this model, shared by every process on the database, has room for a call.

        Returns the tokens that were counted for it.
        """
        profile, name, host = self.profile, self.model.name, self._attempt.host
        rate = profile.rate
        if rate is None and not profile.shared:
            return 0
        tokens = 0
        while True:
            now = host.clock.now()
            if rate is None:
                until = host.store.read(lambda tx: tx.ledger.model_held_until(name))
            else:
                charge = reserve()
                tokens = charge.input + charge.output
                until = await host.store.write(
                    Boundary.MODEL_RATE,
                    lambda tx, now=now, tokens=tokens: tx.ledger.take_model_turn(name, now, tokens, rate),  # type: ignore[misc]
                )
            if until <= now:
                return tokens
            deadline = run.started.deadline if run.started is not None else until
            if until >= deadline:
                failure = Failure(
                    "model.rate_limit", f"Model `{name}` may be called again only after the run's deadline."
                )
                record = ModelCallFailed(run.id, turn, run.turn_tries + 1, name, "no", failure)
                self._tell(turn, record, None)
                raise CallFailed(failure, [record])
            jitter = random.uniform(0, RATE_JITTER_SECONDS_MAX)  # all who wait ask again: not all at one instant
            await asyncio.sleep((until - now) / 1_000_000 + jitter)

    def _correct(self, reserved: int, usage: Usage) -> None:
        """Count what a call used instead of what it reserved, where tokens a minute are bounded."""
        rate, used = self.profile.rate, usage.input + usage.output
        if rate is None or rate.tokens is None or not used:
            return
        host, name, bounds = self._attempt.host, self.model.name, rate
        now = host.clock.now()
        _ = host.store.write(
            Boundary.MODEL_RATE, lambda tx: tx.ledger.correct_model_turn(name, now, reserved, used, bounds)
        )

    async def _start(
        self, run: fold.Run, request: Request, reserve: Callable[[], Charge]
    ) -> tuple[ModelCallPrepared, str]:
        """The started record of a ``once`` call, durable before it is dispatched, and the call's key."""
        attempt, name, turn = self._attempt, self.model.name, request.turn
        assert attempt.submission is not None
        tries, place = run.turn_tries + 1, model_place(turn)
        digest = hashlib.sha256(_encode(replace(request, timeout=None, key=""))).hexdigest()
        key = ids.idempotency_key(attempt.lineage, place, 1, model_place(turn), 0)
        effect = ids.effect_id(run.id, place, tries, 1, name, digest)
        row = EffectRow(
            id=effect, thread=attempt.number, submission=attempt.submission.id, run=run.id, call=place, step=None,
            operation=name, kind=KIND, effect_class="once", risk=RISK,
            key=key, business_key=None, status="started", verdict=None,
            tries=tries, sequence=attempt.state.tail + 1, started_at=attempt.host.clock.now(), ended_at=None,
        )  # fmt: skip
        record = ModelCallPrepared(run.id, turn, tries, digest, effect, name, key, reserve())
        await attempt.append(Boundary.MODEL_STARTED, [record], (lambda tx: tx.ledger.put_effect(row),))
        return record, key

    # -- after --------------------------------------------------------------------------------------------------------
    def _interrupted(
        self, run: fold.Run, turn: int, started: ModelCallPrepared | None, reserve: Callable[[], Charge]
    ) -> None:
        """A ``repeat`` call was cancelled: it may be charged. A ``once`` call is settled by whoever ends the attempt."""
        if started is None and self._attempt.broken is None:
            failure = Failure("cancelled", "The call was interrupted; the provider may charge it.")
            record = ModelCallFailed(
                run.id, turn, run.turn_tries + 1, self.model.name, "unknown", failure, charged=reserve()
            )
            _ = self._attempt.append(Boundary.MODEL_FAILED, [record])

    async def _failed(
        self,
        run: fold.Run,
        turn: int,
        error: ModelError,
        started: ModelCallPrepared | None,
        reserve: Callable[[], Charge],
    ) -> float:
        """Record a failed try. Returns the seconds after which to try again."""
        attempt, name, now = self._attempt, self.model.name, self._attempt.host.clock.now()
        failure = Failure(error.kind, _message(error))
        if started is not None and error.dispatched == "unknown":
            effect = started.effect
            lost = ModelCallUnknown(run.id, turn, effect, name, failure.message, started.reserved, error.evidence)
            await attempt.append(
                Boundary.CALL_UNKNOWN, [lost], (lambda tx: tx.ledger.end_effect(effect, "unknown", None, now),)
            )
            raise CallUnknown(failure.message)
        charged = reserve() if error.dispatched == "unknown" else NO_CHARGE
        tries = run.turn_tries + 1
        record = ModelCallFailed(
            run.id, turn, tries, name, error.dispatched, failure, error.evidence, charged,
            started.effect if started is not None else "",
        )  # fmt: skip
        ops: tuple[Op, ...] = ()
        if started is not None:
            refused = started.effect
            ops = (lambda tx: tx.ledger.end_effect(refused, "refused", None, now),)
        self._hold(error, now)
        delay = self._delay(run, error)
        self._tell(turn, record, delay)
        if delay is None:
            raise CallFailed(failure, [record], ops)
        _ = attempt.append(Boundary.MODEL_FAILED, [record], ops)
        return delay

    def _hold(self, error: ModelError, now: int) -> None:
        """The provider asked to wait: every process on this database does."""
        if not self.profile.shared or not error.retry_after or error.retry_after > RETRY_AFTER_SECONDS_MAX:
            return
        name, until = self.model.name, now + seconds(error.retry_after)
        _ = self._attempt.host.store.write(Boundary.MODEL_RATE, lambda tx: tx.ledger.hold_model(name, until))

    def _delay(self, run: fold.Run, error: ModelError) -> float | None:
        """Seconds until the next try; None when there is none."""
        if error.kind == "model.continuation" and not run.continuation_lost and error.dispatched != "unknown":
            return 0.0  # a definite refusal of what a continuation names: the same turn with the whole history
        if not error.retryable or run.turn_failures + 1 >= MODEL_TRIES_MAX:
            return None
        if run.model_failures + 1 >= MODEL_FAILURES_MAX:
            return None
        if error.retry_after is not None:
            return None if error.retry_after > RETRY_AFTER_SECONDS_MAX else max(error.retry_after, _backoff(1))
        return _backoff(run.turn_failures + 1)

    def _tell(self, turn: int, record: ModelCallFailed, delay: float | None) -> None:
        if self._told is not None:
            self._told(turn, record, delay)


_NO_USAGE = Usage()


def _message(error: ModelError) -> str:
    text = str(error).encode("utf-8", "replace").decode()
    return text[:FAILURE_MESSAGE_CHARS_MAX] or "The model call failed."


def _backoff(tries: int) -> float:
    most = min(MODEL_BACKOFF_SECONDS_MAX, MODEL_BACKOFF_SECONDS_MIN * 2.0 ** (tries - 1))
    return random.uniform(most / 2, most)


def _checked(response: Response) -> Response:
    """Refuse a response beyond the engine's bounds."""
    calls = sum(isinstance(part, CallPart) for part in response.parts)
    if calls > RESPONSE_CALLS_MAX:
        raise ModelError(f"The response holds {calls:,} calls; the limit is {RESPONSE_CALLS_MAX:,}.", dispatched="yes")
    size = sum(len(part.arguments if isinstance(part, CallPart) else part.text) for part in response.parts)
    if size > RESPONSE_BYTES_MAX:
        raise ModelError(
            f"The response holds {size:,} characters; the limit is {RESPONSE_BYTES_MAX:,}.", dispatched="yes"
        )
    return response
