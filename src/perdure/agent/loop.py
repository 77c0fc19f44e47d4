"""The interpreter of agents: ask the model, carry out its batch, again, until it answers. One, behind every mode.

It reads the fold and appends records; where they go is the attempt's business. So a run, a stream and a durable attempt
are the same loop, and an attempt that takes over from a dead one enters it in the middle.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from perdure import canonical, ids
from perdure.agent import events
from perdure.agent.batch import Batch, Toolbox, ask_approval, needs_approval, start_call
from perdure.agent.events import Event
from perdure.agent.meter import Meter
from perdure.agent.prompt import PromptView, check_needs
from perdure.definitions.agent import AgentDefinition
from perdure.definitions.tool import Tool
from perdure.engine.attempt import Attempt, Ended, Settled, Yielded
from perdure.engine.effects import failure_of
from perdure.engine.inference import Answer, CallFailed, CallUnknown, ModelCalls, Purse
from perdure.engine.intents import Op
from perdure.errors import ApprovalSuspensionError, Invalid
from perdure.limits import FAILURE_MESSAGE_CHARS_MAX, MODEL_CALL_SECONDS_MAX, RESERVED_OUTPUT_TOKENS
from perdure.ports.failpoints import Boundary
from perdure.ports.provider import Delta, Message, Model, ModelError, Request, UserMessage
from perdure.ports.store import Transaction
from perdure.records.codec import Record
from perdure.records.effect import ToolCallWithdrawn
from perdure.records.parts import CallPart, Charge, Failure, TextPart
from perdure.records.run import (
    AcceptedLimits,
    ModelCallFailed,
    ModelCallResolved,
    ModelCallUnknown,
    ModelResponseInterrupted,
    ModelResponseRecorded,
    OutputRejected,
    RunCompleted,
    RunStarted,
    ToolOperation,
)
from perdure.records.thread import ThreadCreated, UserInputRecorded
from perdure.rules import accounting, budget, fold, recovery

Emit = Callable[[Event], None]


_LAST_ANSWER = (
    "A limit of this run is used up ({limit}). Give your final answer now, with what you have; tools cannot be called "
    "any more."
)


class _RunFailure(Exception):
    """The run fails with this; raised inside the loop only."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Interpreter:
    """Advances one attempt of one agent.

    Args:
        toolbox: today's tools. model: who answers.
        services: what the attempt-scoped services factory gave, for ``ctx.services``.
        superseded: an earlier owner never gave the claim back; it may have had a model call in flight.
        emit: told events as they happen.
        watched: whether anybody wants them now, so that responses are streamed; None: always.
        on_approval_suspension: retains live resources before an approval wait.
        purse: a budget that its model calls share with others.
    """

    def __init__(
        self,
        attempt: Attempt,
        definition: AgentDefinition,
        toolbox: Toolbox,
        model: Model,
        *,
        services: Any = None,
        superseded: bool = False,
        emit: Emit | None = None,
        watched: Callable[[], bool] | None = None,
        on_approval_suspension: Callable[[], Any] | None = None,
        purse: Purse | None = None,
    ) -> None:
        self.attempt = attempt
        self.definition = definition
        self.toolbox = toolbox
        self.calls = ModelCalls(
            attempt,
            model,
            emit=None if emit is None else self._delta,
            told=None if emit is None else self._call_failed,
            watched=watched,
            purse=purse,
        )
        self.services = services
        self._superseded = superseded
        self._emit = emit
        self._watched = watched
        self._on_approval_suspension = on_approval_suspension
        self._view: PromptView | None = None
        self._arguments: dict[str, dict[str, Any]] = {}
        self._prepared: list[str] = []
        self._output_schema = None if definition.output_codec.is_text else definition.output_codec.schema()
        self._meter = Meter(toolbox.specs, self._output_schema)
        self._warned: set[str] | None = None
        self._able = False
        self._most = RESERVED_OUTPUT_TOKENS  # tokens that the next answer may have
        self._strict = {name for name, tool in toolbox.tools.items() if tool.on_failure == "fail"}

    async def advance(self) -> Ended:
        """Go on until the run settles or waits."""
        try:
            return await self._advance()
        except _RunFailure as failed:
            return await self._fail(failed.failure)
        except CallFailed as failed:
            return await self._fail(failed.failure, failed.records, failed.ops)
        except CallUnknown:
            return await self.attempt.park()
        except asyncio.CancelledError:
            attempt, task = self.attempt, asyncio.current_task()
            if attempt.broken is not None or attempt.interrupted in (None, "shutdown") or task is None:
                raise
            while task.cancelling():
                task.uncancel()
            return await self._interrupted()

    async def _interrupted(self) -> Ended:
        if self.attempt.run.completed is not None:
            return await self.attempt.settle("completed")
        if self.attempt.interrupted == "cancel":
            self._tell(events.RunEnded("cancelled"))
            return await self.attempt.settle("cancelled")
        return await self._fail(Failure("policy.duration", "The run reached its deadline."))

    async def _fail(self, failure: Failure, records: Sequence[Record] = (), ops: Sequence[Op] = ()) -> Settled:
        self._tell(events.RunEnded("failed", failure.kind, failure.message))
        return await self.attempt.settle("failed", failure=failure, records=records, then=ops)

    def _tell(self, event: Event) -> None:
        if self._emit is not None and (self._watched is None or self._watched()):
            self._emit(event)

    # -- the loop -----------------------------------------------------------------------------------------------------
    async def _advance(self) -> Ended:
        attempt = self.attempt
        if not attempt.started:
            await self._start()
        run = attempt.run
        started = run.started
        assert started is not None
        if run.completed is not None:
            return await attempt.settle("completed")
        if run.cancel is not None:
            self._tell(events.RunEnded("cancelled"))
            return await attempt.settle("cancelled")
        if started.deadline <= attempt.host.clock.now():
            raise _RunFailure(Failure("policy.duration", "The run reached its deadline."))
        attempt.watch_deadline(started.deadline)
        waits = await self._recover_call(run, started)
        if waits is not None:
            return waits
        while True:
            if attempt.interrupted is not None:
                raise asyncio.CancelledError  # a tool may have swallowed it
            self._check_strict(run)
            turn = run.open_turn()
            if turn is not None:
                ended = await self._batch(run, turn)
                if ended is not None:
                    return ended
                continue
            streak, most = run.failure_streak, started.limits.repeated_failure_limit
            if most and streak >= most:
                raise _RunFailure(Failure("policy.repeated_failures", f"{streak} tool calls in a row failed."))
            answer, ops = (run.turns[-1].response, ()) if self._final(run) else await self._respond(run, started)
            if answer is not None:
                settled = await self._answer(run, started.limits, answer, ops)
                if settled is not None:
                    return settled

    async def _recover_call(self, run: fold.Run, started: RunStarted) -> Ended | None:
        """What an earlier owner's model call left: an unknown to wait for, a verdict to obey, or a charge to count."""
        attempt = self.attempt
        prepared = run.model_prepared
        if prepared is not None:
            lost = ModelCallUnknown(
                run.id, prepared.turn, prepared.effect, prepared.model,
                "it was started, and its owner vanished before an outcome was recorded", prepared.reserved,
            )  # fmt: skip
            effect, now = prepared.effect, attempt.host.clock.now()
            await attempt.append(
                Boundary.CALL_UNKNOWN, [lost], (lambda tx: tx.ledger.end_effect(effect, "unknown", None, now),)
            )
        if run.model_unknown is not None:
            return await attempt.park()
        if run.model_verdict is not None:
            return await self._obey(run, started, run.model_verdict)
        repeats = started.limits.model_calls == "repeat"
        if self._superseded and repeats and run.open_turn() is None and not self._final(run):
            charged = self._reserve(self._prompt())
            record = ModelResponseInterrupted(run.id, len(run.turns) + 1, attempt.epoch - 1, charged)
            await attempt.append(Boundary.REPAIR, [record])
        return None

    async def _obey(self, run: fold.Run, started: RunStarted, verdict: ModelCallResolved) -> Ended | None:
        match verdict.verdict:
            case "applied":
                text = canonical.decode(verdict.result, "the verdict's result")
                answer = ModelResponseRecorded(
                    run.id,
                    verdict.turn,
                    self.calls.model.name,
                    (TextPart(str(text)),),
                    "stop",
                    tries=0,
                    effect=verdict.effect,
                )
                return await self._answer(run, started.limits, answer)
            case "refused":
                raise _RunFailure(verdict.failure or Failure("model", "The model call was refused by verdict."))
            case "cancel_run":
                return Yielded()  # the cancel is on its way
            case _:
                return None

    @staticmethod
    def _final(run: fold.Run) -> bool:
        """Whether the newest response is an answer that nobody rejected."""
        return bool(run.turns) and not run.turns[-1].calls and run.turns[-1].rejected is None

    def _check_strict(self, run: fold.Run) -> None:
        """A failed call of an ``on_failure="fail"`` tool ends the run, also if an earlier owner or a verdict recorded it."""
        for call in run.turns[-1].calls if self._strict and run.turns else ():
            if call.failure is not None and not call.withdrawn and call.operation.tool in self._strict:
                raise _RunFailure(call.failure)

    # -- start --------------------------------------------------------------------------------------------------------
    async def _start(self) -> None:
        """Record input, limits and the frozen deadline: one commit."""
        attempt, definition = self.attempt, self.definition
        submission = attempt.submission
        assert submission is not None
        records: list[Record] = [] if attempt.state.tail else [ThreadCreated(submission.program)]
        sequence = attempt.state.tail + len(records) + 1
        problem, instructions = None, ""
        try:
            value = definition.input_codec.decode(submission.input, "input")
            instructions = await self._instructions(value)
        except Exception as error:
            problem = failure_of(error, "input" if isinstance(error, Invalid) else "instructions")
        records.append(UserInputRecorded(submission.id, submission.run, msgspec.Raw(submission.input)))
        records.append(self._run_started(submission.run, submission.id, instructions))
        id = submission.id

        def applied(tx: Transaction) -> None:
            tx.ledger.apply_input(id, sequence)

        # Not awaited: asking the model may be repeated, and whatever is recorded next is recorded after it.
        _ = attempt.append(Boundary.INPUT, records, (applied,) if attempt.owed else ())
        self._tell(events.RunStarted(submission.run, attempt.thread))
        if problem is not None:
            raise _RunFailure(problem)

    async def _instructions(self, value: Any) -> str:
        instructions = self.definition.instructions
        if callable(instructions):
            instructions = instructions(value)
            if inspect.isawaitable(instructions):
                instructions = await instructions
        return str(instructions or "")

    def _run_started(self, run: str, submission: str, instructions: str) -> RunStarted:
        policy = self.definition.policy
        duration = int(self.definition.duration_seconds * 1_000_000)
        limits = AcceptedLimits(
            policy.max_turns,
            policy.max_tool_calls,
            duration,
            policy.concurrency,
            policy.repeated_failure_limit,
            policy.tool_result_bytes,
            policy.output_retries,
            policy.token_budget,
            policy.cost_budget_micro_usd,
            policy.on_exhaustion,
            policy.model_calls,
        )
        deadline = self.attempt.host.clock.now() + duration  # time in the queue does not count
        return RunStarted(run, submission, self.definition.name, self.definition.digest, deadline, limits, instructions)

    # -- a turn ---------------------------------------------------------------------------------------------------------
    def _prompt(self) -> PromptView:
        if self._view is None:
            self._view = PromptView(self.attempt.state, self.attempt.run.id, alone=self.attempt.alone)
        return self._view

    async def _respond(self, run: fold.Run, started: RunStarted) -> tuple[ModelResponseRecorded | None, tuple[Op, ...]]:
        """Ask for the next turn. Returns the answer if it is one: it is recorded with what comes of it."""
        number, limits = len(run.turns) + 1, started.limits
        view = self._prompt()
        messages = view.for_model()
        final, most = self._exhausted(run, limits, messages)
        self._most = most
        if final is not None:
            messages = [*messages, UserMessage(_LAST_ANSWER.format(limit=final.replace("_", " ")))]
        request = Request(
            agent=self.definition.name,
            run=run.id,
            turn=number,
            messages=messages,
            tools=self.toolbox.specs,
            output_schema=self._output_schema,
            timeout=min(MODEL_CALL_SECONDS_MAX, max(0.001, (started.deadline - self._now()) / 1_000_000)),
            settings=self._settings(limits, most),
            tools_allowed=final is None,
        )
        self._check_needs(request)
        self._warn(run, limits)
        self._tell(events.TurnStarted(number))
        answered = await self.calls.ask(request, lambda: self._reserve(view))
        self._meter.counted(len(messages), answered.response.usage)
        answer = await self._record(run, limits, number, answered, final)
        self._tell(events.TurnCompleted(number, answered.response.finish))
        if answer is None and not run.turns[-1].open:
            view.extend(run.turns[-1])
        return answer, answered.ops

    def _now(self) -> int:
        return self.attempt.host.clock.now()

    def _check_needs(self, request: Request) -> None:
        """Fail before anything is sent that the model declares it cannot take. Files come with inputs: once is enough."""
        if self._able:
            return
        try:
            check_needs(self.calls.model, request)
        except ModelError as error:
            raise _RunFailure(Failure(error.kind, str(error))) from error
        self._able = True

    def _exhausted(
        self, run: fold.Run, limits: AcceptedLimits, messages: list[Message]
    ) -> tuple[budget.Limit | None, int]:
        """The limit that makes the next call the last, if one does, and the most tokens that its answer may have.

        Raises:
            _RunFailure: it leaves room for no call.
        """
        wanted = self.definition.settings.get("max_tokens", self.calls.profile.max_output_tokens)
        most = wanted if isinstance(wanted, int) else RESERVED_OUTPUT_TOKENS
        left = None
        if limits.token_budget is not None or limits.cost_budget is not None:
            left = budget.room(run, limits, self._meter.prompt(messages), self.calls.profile.price)
        limit = budget.exhausted(run, limits, left, most)
        if limit is None:
            return None, most if left is None else min(most, left[0])
        asked = bool(run.turns) and run.turns[-1].response.final  # there is never a second last answer
        if limits.on_exhaustion == "fail" or asked or not run.turns:
            raise _RunFailure(budget.failure(run, limits, limit))
        return limit, most

    def _settings(self, limits: AcceptedLimits, most: int) -> dict[str, Any]:
        """The agent's settings; where there is a budget its answers are bounded by what is reserved for them."""
        settings = self.definition.settings
        if limits.token_budget is None and limits.cost_budget is None:
            return settings
        return {**settings, "max_tokens": most}

    def _reserve(self, view: PromptView) -> Charge:
        return accounting.reserve(self._meter.prompt(view.messages), self._most, self.calls.profile.price)

    def _warn(self, run: fold.Run, limits: AcceptedLimits) -> None:
        """Tell once that most of a limit is used. What an earlier attempt had used was told then."""
        if self._emit is None or (self._watched is not None and not self._watched()):
            return
        shares = budget.shares(run, limits, self.attempt.host.clock.now())
        reached = {name for name, share in shares.items() if budget.warned(*share)}
        if self._warned is None:
            self._warned = reached if len(run.turns) > 0 else set()
        for name in sorted(reached - self._warned):
            self._tell(events.BudgetWarning(name, *shares[name]))
        self._warned |= reached

    def _call_failed(self, turn: int, record: ModelCallFailed, delay: float | None) -> None:
        said = events.ModelCallFailed(turn, record.attempt, record.dispatched, record.failure.message, delay)
        self._tell(said)

    def _delta(self, turn: int, delta: Delta) -> None:
        kind = events.TextDelta if delta.kind == "text" else events.ReasoningDelta
        self._tell(kind(turn, delta.text))

    async def _record(
        self, run: fold.Run, limits: AcceptedLimits, number: int, answered: Answer, final: budget.Limit | None
    ) -> ModelResponseRecorded | None:
        """Commit the response, with the requests for approval and the first started records of its batch.

        Returns an answer uncommitted: one commit holds it and the settlement, or it and its rejection.
        """
        response = answered.response
        calls = [part for part in response.parts if isinstance(part, CallPart)]
        over = run.tool_calls + len(calls) > limits.max_tool_calls
        operations = self._preflight(number, calls, limits, truncated=response.finish == "length", over=over)
        parts = tuple(_storable(part) for part in response.parts)
        record = ModelResponseRecorded(
            run.id, number, response.model, parts, response.finish, response.usage, operations,
            continuation=msgspec.Raw(response.continuation or b"null"), evidence=response.evidence,
            cost=answered.cost, prices=answered.prices, effect=answered.effect, final=final or "", charged=answered.charged,
        )  # fmt: skip
        if not calls:
            return record
        if final is not None or (over and limits.on_exhaustion == "fail"):
            failure = budget.failure(run, limits, final or "tool_calls")
            await self.attempt.append(Boundary.RESPONSE, [record], answered.ops)  # its calls are withdrawn with the run
            said = " Asked for its last answer, the model called a tool." if final else ""
            raise _RunFailure(Failure(failure.kind, failure.message + said))
        records: list[Record] = [record]
        ops = [*answered.ops]
        self._prepare(calls, operations, limits.concurrency, records, ops)
        await self.attempt.append(Boundary.RESPONSE, records, ops)
        return None

    def _preflight(
        self, number: int, calls: list[CallPart], limits: AcceptedLimits, *, truncated: bool, over: bool
    ) -> tuple[ToolOperation, ...]:
        """Judge every call before any handler: what cannot run is told to the model, what can is bound to a contract."""
        operations = []
        seen: set[str] = set()
        for position, part in enumerate(calls):
            call = ids.call_id(number, position)
            repeated = bool(part.provider_id) and part.provider_id in seen
            seen.add(part.provider_id)
            tool = self.toolbox.tools.get(part.name)
            rejected: Failure | None = None
            if over:
                said = f"The run may make {limits.max_tool_calls} tool calls; this batch goes over, so none of it ran."
                rejected = Failure("policy.tool_calls", said)
            elif truncated:
                rejected = Failure("truncated", "The response was cut; none of its calls ran. Answer shorter.")
            elif repeated:
                rejected = Failure("repeated_id", f"Call id {part.provider_id[:64]!r} was used twice in one response.")
            elif tool is None:
                known = ", ".join(self.toolbox.tools) or "none"
                rejected = Failure("unknown_tool", f"There is no tool {part.name[:64]!r}. Tools: {known}.")
            else:
                try:
                    self._arguments[call] = tool.decode_arguments(part.arguments)
                except Invalid as error:
                    rejected = Failure("arguments", str(error)[:FAILURE_MESSAGE_CHARS_MAX])
            if rejected is not None or tool is None:
                operations.append(ToolOperation(call, part.name[:256], rejected=rejected))
            else:
                operations.append(ToolOperation(call, tool.name, tool.effect, tool.steps, tool.contract))
        return tuple(operations)

    def _prepare(
        self,
        calls: list[CallPart],
        operations: tuple[ToolOperation, ...],
        concurrency: int,
        records: list[Record],
        ops: list[Op],
    ) -> None:
        """What rides on the response's commit: rejections, requests for approval, started records of the first lanes."""
        self._prepared = []
        free: list[tuple[CallPart, ToolOperation, Tool]] = []
        for part, operation in zip(calls, operations, strict=True):
            if operation.rejected is not None:
                records.append(ToolCallWithdrawn(self.attempt.run.id, operation.call, operation.rejected))
                continue
            tool = self.toolbox.tools[operation.tool]
            arguments = self._arguments[operation.call]
            if needs_approval(tool, arguments):
                record, op = ask_approval(self.attempt, operation.call, operation, part, tool, arguments)
                records.append(record)
                ops.append(op)
            elif tool.key is None:  # a business object is looked up when the batch is planned
                free.append((part, operation, tool))
        for part, operation, tool in free[:concurrency]:
            if tool.effect in ("pure", "observe") and not tool.steps:
                self._prepared.append(operation.call)
                continue
            sequence = self.attempt.state.tail + 1 + len(records)
            arguments = self._arguments[operation.call]
            record, op = start_call(self.attempt, operation.call, tool, arguments, part, 1, sequence)
            records.append(record)
            ops.append(op)
            self._prepared.append(operation.call)

    # -- a batch --------------------------------------------------------------------------------------------------------
    async def _batch(self, run: fold.Run, turn: fold.Turn) -> Ended | None:
        """Carry the batch as far as it goes. None: it is complete. Otherwise how the attempt ended."""
        assert run.started is not None
        batch = Batch(
            self.attempt,
            self.toolbox,
            turn,
            concurrency=run.started.limits.concurrency,
            result_bytes=run.started.limits.tool_result_bytes,
            services=self.services,
            emit=self._emit,
            arguments=self._arguments,
            prepared=self._prepared,
        )
        self._prepared = []
        await batch.run()
        self._arguments.clear()
        if batch.failing is not None:
            raise _RunFailure(batch.failing)
        if not turn.open:
            if self._view is not None:
                self._view.extend(turn)
            return None
        if run.unknowns():
            return await self.attempt.park()
        waiting = [call for call in turn.calls if call.approval is not None and call.decision is None]
        if waiting:
            for call in waiting:
                self._tell(self._asked(call))
            if self._on_approval_suspension is not None:
                await self._retain()
            if any(call.decision is not None for call in waiting):
                return Yielded()  # decided meanwhile: this attempt's services end before the batch resumes
            return await self.attempt.suspend()
        return Yielded()

    def _asked(self, call: fold.Call) -> events.ApprovalRequested:
        assert call.approval is not None
        tool = self.toolbox.tools.get(call.operation.tool)
        arguments = canonical.decode(tool.arguments_json(call.part.arguments)) if tool is not None else {}
        return events.ApprovalRequested(call.approval.approval, call.id, call.operation.tool, arguments)

    async def _retain(self) -> None:
        """Let the host capture live resources, while the claim is renewed and a cancel is heard."""
        assert self._on_approval_suspension is not None
        try:
            done = self._on_approval_suspension()
            if inspect.isawaitable(done):
                await done
        except ApprovalSuspensionError:
            raise
        except Exception as error:
            raise ApprovalSuspensionError(f"Retaining resources before the approval wait failed: {error}") from error

    # -- the end --------------------------------------------------------------------------------------------------------
    async def _answer(
        self, run: fold.Run, limits: AcceptedLimits, answer: ModelResponseRecorded, ops: Sequence[Op] = ()
    ) -> Settled | None:
        """Settle with an answer, or reject it (None: the model may answer again)."""
        new = [] if run.turns and run.turns[-1].response is answer else [answer]
        try:
            completed = self._complete(answer)
        except Invalid as error:
            failure = Failure("output", str(error)[:FAILURE_MESSAGE_CHARS_MAX])
            if run.output_rejections >= limits.output_retries or answer.final:
                return await self._fail(failure, new, ops)
            rejected = OutputRejected(run.id, answer.turn, failure)
            await self.attempt.append(Boundary.OUTPUT_REJECTED, [*new, rejected], ops)
            self._view = None  # built again, with the rejection in its place
            return None
        except _RunFailure as failed:
            return await self._fail(failed.failure, new, ops)
        self._tell(events.RunEnded("completed"))
        return await self.attempt.settle(
            "completed", completed=completed, records=new, then=ops, exhausted=answer.final
        )

    def _complete(self, answer: ModelResponseRecorded) -> RunCompleted:
        """The result of an answer.

        Raises:
            Invalid: it does not decode.
            _RunFailure: the disposition callback failed.
        """
        text = "".join(part.text for part in answer.parts if isinstance(part, TextPart))
        codec = self.definition.output_codec
        if codec.is_text and not text.strip():
            raise Invalid("The answer is empty.")
        try:
            value = codec.decode(canonical.encode(text, "output") if codec.is_text else _json_text(text), "output")
            raw = codec.encode(value, "output")
        except UnicodeEncodeError as error:
            raise Invalid(str(error)) from error
        disposition = None
        if self.definition.disposition is not None and not answer.final:
            try:
                disposition = ids.check_id(self.definition.disposition(value), "disposition")
            except Exception as error:
                raise _RunFailure(failure_of(error, "disposition")) from error
        run = self.attempt.run.id
        return RunCompleted(run, msgspec.Raw(raw), recovery.result_digest(raw, disposition), disposition)


def _json_text(text: str) -> bytes:
    """JSON of a final answer; a fenced block around it is taken off."""
    stripped = text.strip()
    if stripped.startswith("```") and stripped.endswith("```") and "\n" in stripped:
        stripped = stripped[stripped.index("\n") + 1 : -3].strip()
    return stripped.encode()


def _storable(part: Any) -> Any:
    """A part whose text can be encoded; a lone surrogate becomes a replacement character."""
    with contextlib.suppress(UnicodeEncodeError):
        msgspec.json.encode(part)
        return part

    def clean(text: Any) -> Any:
        return text.encode("utf-8", "replace").decode() if isinstance(text, str) else text

    return type(part)(**{name: clean(getattr(part, name)) for name in part.__struct_fields__})
