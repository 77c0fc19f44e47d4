"""What a tool sees of the attempt it runs in: its stable key, its deadline, its steps."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable
from typing import Any

import msgspec

from perdure import ids
from perdure.agent.events import Event, ToolCallProgress
from perdure.clock import to_datetime
from perdure.definitions.context import ToolContext
from perdure.definitions.schema import Codec, codec_of
from perdure.definitions.tool import Tool
from perdure.engine import effects, intents
from perdure.engine.attempt import Attempt
from perdure.errors import Invalid, Refused, Signal
from perdure.limits import FAILURE_MESSAGE_CHARS_MAX
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import EffectRow
from perdure.records.effect import ToolCallUnknown, ToolStepPrepared, ToolStepRefused, ToolStepSettled
from perdure.records.parts import Failure
from perdure.rules import fold


class StepUnknown(Signal):
    """A ``once`` step has no outcome; the call stays open until a verdict. User code must let it pass."""


@functools.lru_cache(maxsize=4096)
def _result_codec(fn: Callable[..., Any]) -> Codec:
    return codec_of(inspect.signature(fn, eval_str=True).return_annotation)


def result_codec(fn: Callable[..., Any]) -> Codec:
    """How a step's result crosses: by its function's return annotation, else as plain JSON."""
    try:
        annotated = "return" in fn.__annotations__
    except AttributeError:
        return _PLAIN
    return _result_codec(fn) if annotated else _PLAIN


_PLAIN = codec_of(Any)


class Context(ToolContext):
    """The running context of one call. Public members are documented on ``ToolContext``."""

    def __init__(
        self,
        attempt: Attempt,
        call: fold.Call,
        tool: Tool,
        key: str,
        services: Any,
        emit: Callable[[Event], None] | None,
    ) -> None:
        run = attempt.run
        deadline = None if run.started is None else to_datetime(run.started.deadline)
        super().__init__(key=key, thread=attempt.thread, run=run.id, call=call.id, deadline=deadline, services=services)
        self._attempt = attempt
        self._call = call
        self._tool = tool
        self._emit = emit
        self._names: set[str] = set()
        self._active: list[asyncio.Task[Any] | None] = []  # tasks in which a step runs now
        self._idle: asyncio.Future[None] | None = None

    async def quiet(self, *, cancel: bool) -> None:
        """Wait for steps that the body left running (a ``gather`` that one of them failed).

        The call's outcome must not be recorded before theirs. ``cancel``, or being cancelled here, cancels them.
        """
        try:
            while self._active:
                if cancel:
                    self._cancel_active()
                self._idle = asyncio.get_running_loop().create_future()
                await self._idle
        except asyncio.CancelledError:
            self._cancel_active()
            raise

    def _cancel_active(self) -> None:
        for task in self._active:
            if task is not None:
                task.cancel()

    def progress(self, message: str) -> None:
        """Tell whoever watches the run; recorded nowhere."""
        if self._emit is not None:
            self._emit(ToolCallProgress(self.call, self._tool.name, str(message)))

    def step_key(self, name: str) -> str:
        """The stable idempotency key of a step."""
        self._check_steps("step_key")
        return ids.step_key(self.key, ids.check_id(name, "step name"))

    def _check_steps(self, what: str) -> None:
        if not self._tool.steps:
            raise Invalid(
                f"Tool {self._tool.name!r} used ctx.{what}, which only a steps=True tool has.",
                help="Declare it with @tool(steps=True); its body is then entered again after a crash.",
            )

    async def step(self, name: str, fn: Callable[..., Any], *args: Any, effect: str | None = None) -> Any:
        """Run ``fn(*args)`` once as far as the record goes, and return the decoded recorded value.

        A recorded step returns its value without running. The body may run again after a crash before its record,
        unless ``effect="once"``: then a started record precedes it and a crash leaves it unknown.

        Raises:
            Invalid: the name is illegal or was used before in this call, the result does not round-trip.
        """
        self._check_steps("step")
        if name in self._names:
            raise Invalid(
                f"Step {name!r} appears twice in call {self.call} of {self._tool.name!r}.",
                help="Give each step of a call its own name, for example f'upload-{index}'.",
            )
        ids.check_id(name, "step name")
        if effect not in (None, "once"):
            raise Invalid(f"A step's effect is 'once' or left out, not {effect!r}.")
        self._names.add(name)
        recorded = self._call.steps.get(name)
        if recorded is not None:
            if recorded.result is not None:
                return result_codec(fn).decode(recorded.result, f"recorded step {name!r}")
            if recorded.refusal is not None and effect == "once":
                raise Refused(recorded.refusal.message)
            if recorded.unknown is not None:
                raise StepUnknown(recorded.unknown.reason)
        task = asyncio.current_task()
        self._active.append(task)
        try:
            return await (self._once(name, fn, args) if effect == "once" else self._repeatable(name, fn, args))
        finally:
            self._active.remove(task)
            if not self._active and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    async def _repeatable(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        value = await _call_step(self._attempt, fn, args)
        raw, decoded = result_codec(fn).round_trip(value, f"result of step {name!r}")
        await self._attempt.append(
            Boundary.STEP_OUTCOME, (ToolStepSettled(self.run, self.call, name, msgspec.Raw(raw)),)
        )
        return decoded

    async def _once(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        attempt, now = self._attempt, self._attempt.host.clock.now()
        earlier = self._call.steps.get(name)
        tries = (earlier.tries if earlier else 0) + 1
        key = self.step_key(name)
        effect = ids.effect_id(self.run, self.call, tries, 1, name, key)
        assert attempt.submission is not None
        row = EffectRow(
            id=effect, thread=attempt.number, submission=attempt.submission.id, run=self.run, call=self.call, step=name,
            operation=self._tool.name, kind=self._tool.kind, effect_class="once", risk=self._tool.risk, key=key,
            business_key=None, status="started", verdict=None, tries=tries, sequence=attempt.state.tail + 1,
            started_at=now, ended_at=None,
        )  # fmt: skip
        await attempt.append(
            Boundary.STEP_STARTED,
            (ToolStepPrepared(self.run, self.call, name, effect, key, tries),),
            (lambda tx: tx.ledger.put_effect(row),),
        )
        outcome = await effects.dispatch(
            attempt.host, lambda: fn(*args), is_async=_is_async(fn), timeout=None,
            unknown_by_default=self._tool.on_exception == "unknown", refusals=self._tool.refusals,
        )  # fmt: skip
        return await self._record_once(name, fn, effect, outcome)

    async def _record_once(self, name: str, fn: Callable[..., Any], effect: str, outcome: effects.Outcome) -> Any:
        attempt, run, call = self._attempt, self.run, self.call
        now = attempt.host.clock.now()
        match outcome:
            case effects.Confirmed(value):
                try:
                    raw, decoded = result_codec(fn).round_trip(value, f"result of step {name!r}")
                except Invalid as error:  # it took effect; only a person can say with which result to go on
                    lost = effects.UnknownOutcome(unencodable(error).message)
                    return await self._record_once(name, fn, effect, lost)
                await attempt.append(
                    Boundary.STEP_OUTCOME,
                    (ToolStepSettled(run, call, name, msgspec.Raw(raw)),),
                    (lambda tx: tx.ledger.end_effect(effect, "confirmed", None, now),),
                )
                return decoded
            case effects.RefusedOutcome(failure, cause):
                await attempt.append(
                    Boundary.STEP_OUTCOME,
                    (ToolStepRefused(run, call, name, failure),),
                    (lambda tx: tx.ledger.end_effect(effect, "refused", None, now),),
                )
                raise cause or Refused(failure.message)
            case effects.UnknownOutcome(reason, cause):
                await attempt.append(
                    Boundary.CALL_UNKNOWN,
                    (ToolCallUnknown(run, call, effect, self._tool.name, reason, name),),
                    (intents.lose(effect, now),),
                )
                if isinstance(cause, asyncio.CancelledError):
                    raise cause
                raise StepUnknown(reason)


def _is_async(fn: Callable[..., Any]) -> bool:
    code = getattr(fn, "__code__", None)
    if code is not None:
        return bool(code.co_flags & inspect.CO_COROUTINE)
    return inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


async def _call_step(attempt: Attempt, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if attempt.host.store.failpoint is not None:
        attempt.host.hit(Boundary.DISPATCH, "before")
    result = fn(*args) if _is_async(fn) else effects.in_thread(attempt.host, functools.partial(fn, *args))
    value = await result
    if attempt.host.store.failpoint is not None:
        attempt.host.hit(Boundary.DISPATCH, "after")
    return value


def unencodable(error: Invalid) -> Failure:
    """The failure of a call that took effect and whose result cannot be stored."""
    return Failure("result", f"It took effect, but its result cannot be stored: {error}"[:FAILURE_MESSAGE_CHARS_MAX])
