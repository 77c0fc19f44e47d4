"""One batch of tool calls: what may run runs, a few at a time; each outcome is durable as soon as it is known.

The started record of the call that follows rides on the commit of the outcome before it, so a sequence of ``once`` calls
costs one commit each. Only what is in flight can become unknown. What recovery may do with a call is ``rules.plans``'
judgement; this module obeys it, in a fresh batch and in one that an earlier owner left.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from perdure import canonical, ids
from perdure.agent.context import Context, StepUnknown, unencodable
from perdure.agent.events import Event, ToolCallEnded, ToolCallStarted
from perdure.definitions.agent import AgentDefinition
from perdure.definitions.tool import Tool
from perdure.definitions.verdicts import UnknownCall
from perdure.engine import effects
from perdure.engine.attempt import Attempt
from perdure.engine.intents import Op, lose
from perdure.engine.reconciliation import Encode, Probe, ask, plain, postpone, submit_late
from perdure.errors import Invalid
from perdure.limits import PROBE_BACKOFF_SECONDS_MAX, SIBLING_GRACE_SECONDS_MAX
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import ApprovalRow, EffectRow
from perdure.ports.provider import ToolSpec
from perdure.records.codec import Record
from perdure.records.effect import (
    ToolApprovalRequested,
    ToolCallPrepared,
    ToolCallSettled,
    ToolCallUnknown,
    ToolCallWithdrawn,
)
from perdure.records.parts import CallPart, Failure
from perdure.records.run import ToolOperation
from perdure.redaction import redact
from perdure.rules import fold, plans

_LIVE_TRIES_MAX = 3  # of an idempotent, keyed or stepped call whose outcome got lost while its owner lives
_encode = msgspec.json.Encoder().encode


class Toolbox:
    """Tools of one attempt by name, with today's contracts and the probes that answer for them."""

    def __init__(self, definition: AgentDefinition, probe: Probe | None = None) -> None:
        self.tools: dict[str, Tool] = {tool.name: tool for tool in definition.tools}
        self.contracts: dict[str, str] = {name: tool.contract for name, tool in self.tools.items()}
        self.specs = tuple(ToolSpec(t.name, t.description, t.parameters()) for t in definition.tools)
        self._probe = probe

    def probe(self, name: str) -> Probe | None:
        """Who can say what happened to a call of this tool."""
        tool = self.tools.get(name)
        return (tool.probe_fn if tool is not None else None) or self._probe


class Batch:
    """Carries one open turn as far as it can go.

    Args:
        turn: the open turn.
        arguments: decoded arguments of calls by id, where the response was just received.
        prepared: calls whose started record went with the response; they run without another.
    """

    def __init__(
        self,
        attempt: Attempt,
        toolbox: Toolbox,
        turn: fold.Turn,
        *,
        concurrency: int,
        result_bytes: int,
        services: Any,
        emit: Callable[[Event], None] | None,
        arguments: dict[str, dict[str, Any]] | None = None,
        prepared: Sequence[str] = (),
    ) -> None:
        self.attempt = attempt
        self.toolbox = toolbox
        self.turn = turn
        self.failing: Failure | None = None  # an on_failure="fail" tool failed
        self._concurrency = concurrency
        self._result_bytes = result_bytes
        self._services = services
        self._emit = emit
        self._arguments = arguments or {}
        self._prepared = set(prepared)
        self._asked: set[str] = set()  # effects whose probe was asked in this batch

    async def run(self) -> None:
        """Run everything that may run now. Afterwards the turn is closed, or the fold says what it waits for."""
        while self.failing is None and self.attempt.interrupted is None:
            todo, doubts, recorded = await self._plan()
            if not todo and not recorded:
                return  # planned without an await, so nothing was decided meanwhile
            if todo:
                await self._lanes(todo)
            for doubt in doubts:
                await self._ask(doubt.call, doubt.effect, doubt.step)

    # -- planning -----------------------------------------------------------------------------------------------------
    async def _plan(self) -> tuple[deque[fold.Call], list[plans.Doubt], bool]:
        """What may run now, what is in doubt and was recorded so, and whether anything was recorded."""
        self._busy: set[tuple[str, str]] = set()
        todo: deque[fold.Call] = deque()
        doubts: list[plans.Doubt] = []
        records: list[Record] = []
        ops: list[Op] = []
        judged = plans.batch_plan(self.turn, self.toolbox.contracts)
        for call, plan in zip(self.turn.calls, judged, strict=True):
            if call.id in self._prepared and not call.closed:
                todo.append(call)
                continue
            match plan:
                case plans.Run() | plans.Rerun():
                    self._admit(call, todo, records, ops)
                case plans.Withdraw(failure=failure):
                    records.append(ToolCallWithdrawn(self.attempt.run.id, call.id, failure))
                case plans.RetireUnavailable(execution=execution):
                    records.append(self._retire(call, execution))
                case plans.Inject(verdict=verdict):
                    failed = None if verdict.verdict == "applied" else Failure("refused", verdict.reason or "refused")
                    records.append(ToolCallSettled(self.attempt.run.id, call.id, verdict.result, failed))
                case plans.NeedsProbe(doubts=found):
                    doubts.extend(found)
                    self._doubt(found, records, ops)
                case _:
                    pass  # settled, or it waits for somebody
        if records:
            await self.attempt.append(Boundary.CALL_UNKNOWN if doubts else Boundary.REPAIR, records, ops)
        # what has its started record runs first: nothing else may become unknown
        return deque(sorted(todo, key=lambda call: call.id not in self._prepared)), doubts, bool(records)

    def _admit(
        self,
        call: fold.Call,
        todo: deque[fold.Call],
        records: list[Record],
        ops: list[Op],
    ) -> None:
        """Queue a call that may run, unless it must ask first or its business object is taken."""
        tool = self.toolbox.tools[call.operation.tool]
        arguments = self._decoded(call)
        if call.tries == 0 and call.approval is None and needs_approval(tool, arguments):
            record, op = ask_approval(self.attempt, call.id, call.operation, call.part, tool, arguments)
            records.append(record)
            ops.append(op)
            return
        if tool.key is not None and not self._may_use(call, tool, arguments, records):
            return
        todo.append(call)

    def _may_use(self, call: fold.Call, tool: Tool, arguments: dict[str, Any], records: list[Record]) -> bool:
        """Whether the business object of a call is free. One of unknown outcome is refused, and the model is told."""
        try:
            business = business_key(tool, arguments)
        except Invalid as error:
            records.append(ToolCallWithdrawn(self.attempt.run.id, call.id, Failure("arguments", str(error))))
            return False
        if (tool.name, business) in self._busy:
            return False  # a sibling is about to use it; planned again when that one has its outcome
        held = self.attempt.host.store.read(lambda tx: tx.ledger.open_business_key(tool.name, business))
        if held is not None and not (held.run == self.attempt.run.id and held.call == call.id):
            message = f"{tool.name} on {business!r} has an outcome that is not known yet. Do not repeat it."
            records.append(ToolCallWithdrawn(self.attempt.run.id, call.id, Failure("unresolved", message)))
            return False
        self._busy.add((tool.name, business))
        return True

    def _retire(self, call: fold.Call, execution: str) -> Record:
        failure = Failure("unavailable", f"Tool {call.operation.tool!r} is not available any more ({execution}).")
        if call.prepared is None:
            return ToolCallWithdrawn(self.attempt.run.id, call.id, failure)
        return ToolCallSettled(self.attempt.run.id, call.id, failure=failure)

    def _doubt(self, found: Sequence[plans.Doubt], records: list[Record], ops: list[Op]) -> None:
        now = self.attempt.host.clock.now()
        for doubt in found:
            records.append(
                ToolCallUnknown(self.attempt.run.id, doubt.call, doubt.effect, doubt.tool, doubt.reason, doubt.step)
            )
            ops.append(lose(doubt.effect, now))

    def _decoded(self, call: fold.Call) -> dict[str, Any]:
        found = self._arguments.get(call.id)
        if found is None:
            tool = self.toolbox.tools[call.operation.tool]
            found = self._arguments[call.id] = tool.decode_arguments(call.part.arguments)
        return found

    # -- running --------------------------------------------------------------------------------------------------------
    async def _lanes(self, todo: deque[fold.Call]) -> None:
        first = [todo.popleft() for _ in range(min(self._concurrency, len(todo)))]
        records: list[Record] = []
        ops: list[Op] = []
        for call in first:
            self._start(call, records, ops)
        if records:
            await self.attempt.append(Boundary.CALL_STARTED, records, ops)
        if len(first) == 1:
            await self._lane(first[0], todo)
            return
        tasks = [asyncio.ensure_future(self._lane(call, todo)) for call in first]
        for task in tasks:
            task.add_done_callback(_heard)
        try:
            await self._gather(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _gather(self, tasks: Sequence[asyncio.Future[None]]) -> None:
        waiting: set[asyncio.Future[None]] = set(tasks)
        while waiting:
            timeout = SIBLING_GRACE_SECONDS_MAX if self.failing is not None else None
            done, waiting = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if not done:
                return  # the grace for siblings of a failing call is over

    def _start(self, call: fold.Call, records: list[Record], ops: list[Op]) -> None:
        """Add the started record of a call, where its class wants one and it has none yet."""
        if call.id in self._prepared or not plans.requires_preparation(call):
            return
        tool = self.toolbox.tools[call.operation.tool]
        if call.prepared is not None and call.verdict is None:  # a lost try that its class lets be repeated
            lost = call.prepared.effect
            ops.append(lambda tx: tx.ledger.end_effect(lost, "unknown", "declared", None))
        sequence = self.attempt.state.tail + 1 + len(records)
        record, op = start_call(self.attempt, call.id, tool, self._decoded(call), call.part, call.tries + 1, sequence)
        records.append(record)
        ops.append(op)

    async def _lane(self, call: fold.Call | None, todo: deque[fold.Call]) -> None:
        while call is not None:
            outcome = await self._perform(call)
            self._prepared.discard(call.id)
            stopping = self.failing is not None or self.attempt.interrupted is not None
            following = todo.popleft() if todo and not stopping else None
            interrupted = _interrupted(outcome)
            records, ops, boundary = self._outcome(call, outcome)
            if following is not None and not interrupted:
                self._start(following, records, ops)
            if records:
                await self.attempt.append(boundary, records, ops)
            if interrupted:
                raise asyncio.CancelledError from None
            for unknown in list(call.unknowns()):
                await self._ask(call.id, unknown.effect, unknown.step)
            call = following

    async def _perform(self, call: fold.Call) -> effects.Outcome | None:
        """Dispatch a started call; None when a ``once`` step inside it is of unknown outcome."""
        tool = self.toolbox.tools[call.operation.tool]
        arguments = self._decoded(call)
        if self._emit is not None:
            self._emit(ToolCallStarted(call.id, tool.name, redact(dict(arguments), tool.secrets)))
        for attempt in range(1, _LIVE_TRIES_MAX + 1):
            outcome = await self._dispatch(call, tool, arguments)
            if outcome is None or not isinstance(outcome, effects.UnknownOutcome):
                return outcome
            if _interrupted(outcome):
                return outcome
            if not plans.requires_preparation(call):
                return effects.RefusedOutcome(Failure("tool", outcome.reason), outcome.cause)
            if (call.operation.effect == "once" and not tool.steps) or attempt == _LIVE_TRIES_MAX:
                return outcome
            await self._again(call, attempt)
        return None

    async def _again(self, call: fold.Call, attempt: int) -> None:
        """Record another try of a call whose class permits it; the lost one stays on record as unknown."""
        await asyncio.sleep(0.1 * 2**attempt)
        self._prepared.discard(call.id)
        records: list[Record] = []
        ops: list[Op] = []
        self._start(call, records, ops)
        await self.attempt.append(Boundary.CALL_STARTED, records, ops)

    async def _dispatch(self, call: fold.Call, tool: Tool, arguments: dict[str, Any]) -> effects.Outcome | None:
        context = None
        if tool.context_parameter is not None:
            key = call.prepared.key if call.prepared is not None else call_key(self.attempt, call.id, tool, call.part)
            context = Context(self.attempt, call, tool, key, self._services, self._emit)
            arguments = {**arguments, tool.context_parameter: context}
        function = tool.fn
        outcome: effects.Outcome | None = None
        with contextlib.suppress(StepUnknown):
            outcome = await effects.dispatch(
                self.attempt.host,
                lambda: function(**arguments),
                is_async=tool.is_async,
                timeout=tool.timeout,
                unknown_by_default=tool.on_exception == "unknown",
                refusals=tool.refusals,
            )
        if context is None or not tool.steps:
            return outcome
        interrupted = _interrupted(outcome)
        try:
            await context.quiet(cancel=interrupted)
        except asyncio.CancelledError as error:
            return effects.UnknownOutcome("interrupted after dispatch", error)
        # a body may have caught what stopped it: a call is not over while a step of it is unknown
        return outcome if interrupted or not any(call.unknowns()) else None

    # -- outcomes -------------------------------------------------------------------------------------------------------
    def _outcome(self, call: fold.Call, outcome: effects.Outcome | None) -> tuple[list[Record], list[Op], Boundary]:
        run, tool = self.attempt.run.id, self.toolbox.tools[call.operation.tool]
        now = self.attempt.host.clock.now()
        effect = call.prepared.effect if call.prepared is not None else None
        records: list[Record] = []
        ops: list[Op] = []
        boundary = Boundary.CALL_OUTCOME
        status = ""
        match outcome:
            case None:
                self._say(call, "unknown")
            case effects.Confirmed(value=value):
                result, failure = self._result(tool, value)
                records.append(ToolCallSettled(run, call.id, result, failure))
                status = "confirmed"
                self._judge(tool, failure)
                self._say(call, "confirmed")
            case effects.RefusedOutcome(failure=failure):
                records.append(ToolCallSettled(run, call.id, failure=failure))
                status = "refused"
                self._judge(tool, failure)
                self._say(call, "refused", failure.message)
            case effects.UnknownOutcome(reason=reason, cause=cause):
                if effect is not None and not (tool.steps and isinstance(cause, asyncio.CancelledError)):
                    records.append(ToolCallUnknown(run, call.id, effect, tool.name, reason))
                    status, boundary = "unknown", Boundary.CALL_UNKNOWN
                    if isinstance(cause, effects.StillRunning):
                        ops.append(self._hold(tool, effect, cause.future))
                self._say(call, "unknown", reason)
        if effect is not None and status:
            ops.append(lose(effect, now) if status == "unknown" else _end_op(effect, status, now))
        return records, ops, boundary

    def _judge(self, tool: Tool, failure: Failure | None) -> None:
        if failure is not None and tool.on_failure == "fail" and self.failing is None:
            self.failing = failure

    def _say(self, call: fold.Call, outcome: str, message: str = "") -> None:
        if self._emit is not None:
            self._emit(ToolCallEnded(call.id, call.operation.tool, outcome, message))

    def _result(self, tool: Tool, value: Any) -> tuple[msgspec.Raw, Failure | None]:
        what = f"result of {tool.name!r}"
        try:
            raw, _ = tool.result_codec.round_trip(value, what)
        except Invalid as error:
            return msgspec.Raw(b"null"), unencodable(error)
        return msgspec.Raw(bounded(raw, self._result_bytes)), None

    def _hold(self, tool: Tool, effect: str, future: asyncio.Future[Any]) -> Op:
        """A synchronous body goes on in its thread: no verdict is accepted until it ends; then its truth is one."""
        host, until = self.attempt.host, self.attempt.host.lease_until()
        strict = tool.on_exception == "unknown"

        def ended(done: asyncio.Future[Any]) -> None:
            _ = host.spawn(submit_late(host, effect, done, encode=encoder(tool), strict=strict))

        future.add_done_callback(ended)
        return lambda tx: tx.ledger.hold_effect(effect, host.owner, until)

    async def _ask(self, call_id: str, effect: str, step: str | None) -> None:
        """Ask the probe about a fresh unknown at once; later it is asked with backoff, without a claim.

        Also later when it was asked before and its answer led here again: another try had no outcome either, or the
        code that it would let run has changed.
        """
        call = self.attempt.run.calls[call_id]
        tool = call.operation.tool
        probe = self.toolbox.probe(tool)
        if probe is None or call.prepared is None:
            return
        unknown = next((u for u in call.unknowns() if u.effect == effect), None)
        if unknown is None:
            return
        if effect in self._asked or call.tries > _LIVE_TRIES_MAX:
            await postpone(self.attempt.host, effect, min(PROBE_BACKOFF_SECONDS_MAX, 2.0**call.tries))
            return
        self._asked.add(effect)
        key = call.prepared.key if step is None else ids.step_key(call.prepared.key, step)
        row = self.attempt.host.store.read(lambda tx: tx.ledger.effect(effect))
        started_at = row.started_at if row is not None else self.attempt.host.clock.now()
        evidence = UnknownCall(
            key=key, tool=tool, arguments=canonical.decode(call.prepared.arguments), thread=self.attempt.thread,
            run=self.attempt.run.id, call=call.id, effect=effect, started_at=started_at, reason=unknown.reason,
        )  # fmt: skip
        declared = self.toolbox.tools.get(tool)
        await ask(self.attempt, probe, evidence, step, encoder(declared) if step is None and declared else plain)


def encoder(tool: Tool) -> Encode:
    """How a result of this tool becomes stored JSON."""
    return lambda value: tool.result_codec.round_trip(value, f"result of {tool.name!r}")[0]


def business_key(tool: Tool, arguments: dict[str, Any]) -> str:
    """The business object a call names.

    Raises:
        Invalid: the tool's key function raised, or gave no legal key.
    """
    assert tool.key is not None
    try:
        value = tool.key(arguments)
    except Exception as error:
        raise Invalid(f"The key of tool {tool.name!r} cannot be told: {type(error).__name__}: {error}.") from error
    return ids.check_id(value, f"key of tool {tool.name!r}")


def _heard(lane: asyncio.Future[None]) -> None:
    """Whatever ended one lane stops the others; how those end then is nobody's news."""
    if not lane.cancelled():
        lane.exception()


def _interrupted(outcome: effects.Outcome | None) -> bool:
    """Whether a call ended because its task was cancelled."""
    return isinstance(outcome, effects.UnknownOutcome) and isinstance(outcome.cause, asyncio.CancelledError)


def _end_op(effect: str, status: str, now: int) -> Op:
    return lambda tx: tx.ledger.end_effect(effect, status, None, now)


def bounded(raw: bytes, limit: int) -> bytes:
    """A result as recorded and shown: whole, or its exact beginning and end with its original size."""
    if len(raw) <= limit:
        return raw
    text = raw.decode()
    keep = max(1, limit // 4)
    return _encode({"truncatedToolResult": True, "originalBytes": len(raw), "head": text[:keep], "tail": text[-keep:]})


def needs_approval(tool: Tool, arguments: dict[str, Any]) -> bool:
    """Whether a call must be approved by a person; a rule that raises asks."""
    if callable(tool.approval):
        try:
            return bool(tool.approval(arguments))
        except Exception:
            return True
    return bool(tool.approval)


def call_key(attempt: Attempt, call: str, tool: Tool, part: CallPart) -> str:
    """The idempotency key of a call: its place in the run, never the provider's id."""
    digest = canonical.digest_raw(tool.arguments_json(part.arguments))
    return ids.idempotency_key(attempt.lineage, call, 0, tool.name + digest, 0)


def ask_approval(
    attempt: Attempt, call: str, operation: ToolOperation, part: CallPart, tool: Tool, arguments: dict[str, Any]
) -> tuple[Record, Op]:
    """The request for one call, bound to tool, version and exact arguments."""
    assert attempt.submission is not None
    submission = attempt.submission
    raw = tool.arguments_json(part.arguments)
    digest = canonical.digest_raw(raw)
    approval = ids.approval_id(submission.run, call, tool.name, str(tool.version or ""), digest)
    reason = f"{tool.name} asks before it runs"
    shown = canonical.encode(redact(canonical.decode(raw), tool.secrets))
    row = ApprovalRow(
        approval, attempt.number, submission.id, submission.run, call, tool.name, shown, digest, reason,
        attempt.host.clock.now(), "pending",
    )  # fmt: skip
    record = ToolApprovalRequested(submission.run, call, approval, tool.name, digest, reason)
    return record, lambda tx: tx.ledger.put_approval(row)


def start_call(
    attempt: Attempt,
    call: str,
    tool: Tool,
    arguments: dict[str, Any],
    part: CallPart,
    tries: int,
    sequence: int,
) -> tuple[ToolCallPrepared, Op]:
    """The started record of a call and its ledger row; ``sequence`` is the record's place in the log."""
    assert attempt.submission is not None
    run = attempt.submission.run
    raw = tool.arguments_json(part.arguments)
    digest = canonical.digest_raw(raw)
    key = ids.idempotency_key(attempt.lineage, call, 0, tool.name + digest, 0)
    effect = ids.effect_id(run, call, tries, 0, tool.name, digest)
    business = business_key(tool, arguments) if tool.key is not None else None
    effect_class = tool.effect
    record = ToolCallPrepared(
        run, call, effect, tool.name, effect_class, tool.contract, key, msgspec.Raw(raw), digest, tries, business
    )
    row = EffectRow(
        id=effect, thread=attempt.number, submission=attempt.submission.id, run=run, call=call, step=None,
        operation=tool.name, kind=tool.kind, effect_class=effect_class, risk=tool.risk, key=key, business_key=business,
        status="started", verdict=None, tries=tries, sequence=sequence, started_at=attempt.host.clock.now(),
        ended_at=None,
    )  # fmt: skip
    return record, lambda tx: tx.ledger.put_effect(row)
