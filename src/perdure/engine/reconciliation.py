"""Unknown outcomes and the verdicts on them: by a person, by a probe, or by a body that ended late.

A verdict is appended, never rewritten, and refused while a live attempt or a running thread still holds the effect.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from perdure import canonical
from perdure.clock import seconds
from perdure.definitions.verdicts import Applied, CancelRun, NotApplied, SafeToRetry, StillUnknown, UnknownCall, Verdict
from perdure.engine import effects, intents
from perdure.engine.attempt import Attempt
from perdure.engine.host import Host, log
from perdure.engine.intents import VerdictBody
from perdure.errors import Conflict, Invalid, Refused
from perdure.limits import (
    PROBE_BACKOFF_SECONDS_MAX,
    PROBE_BACKOFF_SECONDS_MIN,
    PROBE_SECONDS_MAX,
    RESPONSE_BYTES_MAX,
    VERDICTS_MAX,
)
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import EffectRow, Intent
from perdure.ports.store import Transaction
from perdure.records import codec
from perdure.records.effect import Verdict as VerdictName
from perdure.records.parts import Failure
from perdure.rules.plans import is_model_call

Probe = Callable[[UnknownCall], Awaitable[Verdict | StillUnknown] | Verdict | StillUnknown]
"""Asked about an unknown call; returns a verdict, or ``StillUnknown`` when it cannot tell."""

Encode = Callable[[Any], bytes]
"""How a result given with ``Applied`` becomes stored JSON."""

_encode = msgspec.json.Encoder().encode


def plain(value: Any) -> bytes:
    """A verdict's result as plain JSON."""
    return canonical.encode(value, "result of the verdict")


def answer(value: Any) -> bytes:
    """The result of an unknown model call: what it answered, as text.

    Raises:
        Invalid: it is no text, or more than a response may hold.
    """
    help = "Give the text that the model answered. If nobody has it, SafeToRetry() asks again and CancelRun() gives up."
    if not isinstance(value, str):
        raise Invalid(f"The answer of a model call is text; this is {type(value).__name__}.", help=help)
    if len(value) > RESPONSE_BYTES_MAX:
        raise Invalid(
            f"The answer holds {len(value):,} characters; the limit is {RESPONSE_BYTES_MAX:,}.", help="Give less of it."
        )
    return canonical.encode(value, "answer of the model call")


def verdict_body(
    verdict: Verdict,
    *,
    effect: str,
    run: str,
    call: str,
    step: str | None,
    encode: Encode = plain,
    evidence: Any = None,
) -> VerdictBody:
    """A verdict as it is recorded. ``encode`` is for the result of a call; that of a model call is its answer.

    Raises:
        Invalid: not a verdict, or its result or evidence cannot be stored.
    """
    name: VerdictName
    result = msgspec.Raw(b"null")
    failure: Failure | None = None
    given: object = verdict
    match given:
        case Applied(result=value):
            name, result = "applied", msgspec.Raw(answer(value) if is_model_call(call) else encode(value))
        case Refused():
            name, failure = "refused", Failure("refused", given.error or "refused")
        case NotApplied():
            name = "not_applied"
        case SafeToRetry():
            name = "safe_to_retry"
        case CancelRun():
            name = "cancel_run"
        case _:
            raise Invalid(
                f"{verdict!r} is not a verdict.",
                help="Give Applied(result), Refused(error), NotApplied(), SafeToRetry() or CancelRun().",
            )
    raw = canonical.encode(evidence, "evidence")
    return VerdictBody(effect, run, call, name, step, result, failure, msgspec.Raw(raw))


async def consult(probe: Probe, evidence: UnknownCall) -> Verdict | StillUnknown:
    """Ask a probe within ``PROBE_SECONDS_MAX``. One that raises cannot tell."""
    answer: Any
    try:
        async with asyncio.timeout(PROBE_SECONDS_MAX):
            answer = probe(evidence)
            if inspect.isawaitable(answer):
                answer = await answer
    except Exception as error:
        return StillUnknown(f"the probe raised {type(error).__name__}: {error}")
    if isinstance(answer, Applied | Refused | NotApplied | SafeToRetry | CancelRun | StillUnknown):
        return answer
    return StillUnknown(f"the probe returned {type(answer).__name__}, which is no verdict")


def why_of(verdict: Verdict | StillUnknown) -> str:
    """The reason a verdict carries itself."""
    return verdict.error if isinstance(verdict, Refused) else str(getattr(verdict, "why", ""))


async def ask(attempt: Attempt, probe: Probe, evidence: UnknownCall, step: str | None, encode: Encode) -> None:
    """Ask about an unknown of this attempt's own run, and take a verdict straight into the log."""
    answer = await consult(probe, evidence)
    now = attempt.host.clock.now()
    body = None
    if not isinstance(answer, StillUnknown):
        try:
            body = verdict_body(
                answer, effect=evidence.effect, run=evidence.run, call=evidence.call, step=step, encode=encode
            )
        except Invalid as error:
            answer = StillUnknown(f"the probe's result cannot be stored: {error}")
    if body is None:
        await postpone(attempt.host, evidence.effect, PROBE_BACKOFF_SECONDS_MIN)
        return
    if body.verdict == "cancel_run":
        await submit(attempt.host, body, by="probe", reason=why_of(answer))
        return
    records, ops = intents.resolve(attempt.state, body, "probe", why_of(answer), now)
    if records:
        await attempt.append(Boundary.CALL_OUTCOME, records, ops)


async def postpone(host: Host, effect: str, delay: float) -> None:
    """Have the probe of an unknown asked ``delay`` seconds from now, without a claim."""
    at = host.clock.now() + seconds(delay)
    await host.store.write(Boundary.REPAIR, lambda tx: tx.ledger.schedule_probe(effect, at))


async def submit(host: Host, body: VerdictBody, *, by: str, reason: str, persist: bool = False) -> Intent:
    """Record a verdict as an intent. The same verdict again is the same intent. ``persist``: as soon as the store can.

    Raises:
        Invalid: no such effect. Conflict: it is held, it has an outcome, or another verdict stands.
    """
    now = host.clock.now()
    write = host.persist if persist else host.store.write
    intent = await write(Boundary.INTENT, lambda tx: _submit(tx, body, by, reason, now))
    host.commanded()
    return intent


def _submit(tx: Transaction, body: VerdictBody, by: str, reason: str, now: int) -> Intent:
    row = tx.ledger.effect(body.effect)
    if row is None:
        raise Invalid(f"There is no effect {body.effect!r}.", help="List them: perdure effects list --status unknown")
    if row.verdict is None:
        _check_open(row, now)
    intent, new = _record(
        tx, row, Intent(0, row.thread, row.submission, "verdict", row.id, _encode(body), by, reason, now)
    )
    if not new:
        stored = intents.decode_verdict(intent.body)
        if (stored.verdict, bytes(stored.result), stored.failure) != (body.verdict, bytes(body.result), body.failure):
            raise Conflict(f"Effect {row.id!r} already has the verdict {stored.verdict!r} by {intent.by}; it stands.")
        return intent
    if row.verdict is not None:
        raise Conflict(f"Effect {row.id!r} already has the verdict {row.verdict!r}; it stands.")
    if body.verdict == "cancel_run":
        tx.ledger.add_intent(Intent(0, row.thread, row.submission, "cancel", row.submission, b"{}", by, reason, now))
    return intent


def _record(tx: Transaction, row: EffectRow, intent: Intent) -> tuple[Intent, bool]:
    """First verdict wins; an effect that is open again after one (its tool had changed) takes another."""
    for number in range(1, VERDICTS_MAX + 1):
        subject = row.id if number == 1 else f"{row.id}#{number}"
        stored, new = tx.ledger.add_intent(msgspec.structs.replace(intent, subject=subject))
        if new or row.verdict is not None or stored.applied_at is None:
            return stored, new
    raise Conflict(f"Effect {row.id!r} has had {VERDICTS_MAX} verdicts.", help="Cancel its run.")


def _check_open(row: EffectRow, now: int) -> None:
    if row.status == "started":
        raise Conflict(
            f"Effect {row.id!r} is in flight: its worker holds it.",
            help="If that worker is gone, wait for its lease to lapse, or run `perdure recover`.",
        )
    if row.status != "unknown":
        raise Conflict(f"Effect {row.id!r} is {row.status}; there is nothing to reconcile.")
    if row.held_until is not None and row.held_until > now:
        raise Conflict(
            f"The body of effect {row.id!r} still runs in a thread of worker {row.held_by}.",
            help="Wait until it ends; what it returns is recorded as the verdict.",
        )


async def submit_late(host: Host, effect: str, done: asyncio.Future[Any], *, encode: Encode, strict: bool) -> None:
    """A body that outlived its attempt has ended: stop holding its effect; what it returned is the verdict."""
    error = None if done.cancelled() else done.exception()
    outcome: effects.Outcome = effects.UnknownOutcome("the thread was cancelled")
    if error is not None:
        outcome = effects.judge(error, unknown_by_default=strict)
    elif not done.cancelled():
        outcome = effects.Confirmed(done.result())
    await host.persist(Boundary.REPAIR, lambda tx: tx.ledger.hold_effect(effect, None, None))
    row = host.store.read(lambda tx: tx.ledger.effect(effect))
    if row is None or isinstance(outcome, effects.UnknownOutcome):
        return
    verdict: Verdict
    verdict = Applied(outcome.value) if isinstance(outcome, effects.Confirmed) else Refused(outcome.failure.message)
    try:
        body = verdict_body(verdict, effect=effect, run=row.run, call=row.call, step=row.step, encode=encode)
        await submit(host, body, by="worker", reason="the body ended after its run was interrupted", persist=True)
    except (Invalid, Conflict) as refused:
        log.warning("the late result of effect %s was not recorded: %s", effect, refused)


async def ask_due(host: Host, probe_of: Callable[[EffectRow], tuple[Probe, Encode] | None]) -> None:
    """Ask the probes of open unknowns that are due, without a claim; a verdict becomes an intent."""
    now = host.clock.now()
    for row in host.store.read(lambda tx: tx.ledger.due_probes(now)):
        found = probe_of(row)
        if found is None or (row.held_until is not None and row.held_until > now):
            continue  # a body that still runs will tell itself
        probe, encode = found[0], found[1] if row.step is None else plain
        waited = (now - (row.ended_at or row.started_at)) / 1_000_000
        delay = min(PROBE_BACKOFF_SECONDS_MAX, max(PROBE_BACKOFF_SECONDS_MIN, waited))
        at = host.clock.now() + seconds(delay)
        await host.store.write(Boundary.REPAIR, lambda tx, row=row, at=at: tx.ledger.schedule_probe(row.id, at))  # type: ignore[misc]
        answer = await consult(probe, evidence_of(host, row))
        if isinstance(answer, StillUnknown):
            continue
        try:
            body = verdict_body(answer, effect=row.id, run=row.run, call=row.call, step=row.step, encode=encode)
            await submit(host, body, by="probe", reason=why_of(answer))
        except (Invalid, Conflict) as refused:
            log.warning("the verdict of the probe of effect %s was not taken: %s", row.id, refused)


def evidence_of(host: Host, row: EffectRow) -> UnknownCall:
    """What is known about an effect, read back from the log at its started record."""
    stored = host.store.read(lambda tx: tx.log.read_from(row.thread, row.sequence, 1))
    records = codec.decode(stored[0].body, stored[0].apart).records if stored else ()
    arguments, reason = intents.arguments_of(records, row)
    thread = host.store.read(lambda tx: tx.ledger.thread(row.thread))
    return UnknownCall(
        key=row.key, tool=row.operation, arguments=arguments, thread=thread.id if thread else "", run=row.run,
        call=row.call, effect=row.id, started_at=row.started_at, reason=reason,
    )  # fmt: skip
