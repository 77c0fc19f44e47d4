"""Actions of tasks that touch the world, through their executors: asked for, recorded, performed, judged.

The started record is durable before an executor is called. Its class decides what a lost outcome means: ``once`` is
unknown and waits for a verdict; a class that can bear it is tried again; what only reads has simply failed.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from perdure import canonical, ids
from perdure.definitions.workflow import Action
from perdure.engine import effects
from perdure.engine.attempt import Attempt
from perdure.engine.intents import Op, lose
from perdure.errors import Denied, Error, Invalid
from perdure.limits import DIFF_CHARS_MAX, FAILURE_MESSAGE_CHARS_MAX
from perdure.ports.executor import Call, Executor, Facts, Failed, InDoubt, Performed, Produced, Workspace
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import ApprovalRow, EffectRow
from perdure.records.codec import Record
from perdure.records.effect import (
    ToolApprovalRequested,
    ToolCallPrepared,
    ToolCallSettled,
    ToolCallUnknown,
    ToolCallWithdrawn,
    ToolStepSettled,
)
from perdure.records.parts import Failure
from perdure.records.task import TaskStarted
from perdure.redaction import redact
from perdure.rules import authority, fold, plans
from perdure.workflow.outcomes import Broken, Done, Left, Outcome, RetryKind
from perdure.workflow.plan import Plan, PlannedTask

_LIVE_TRIES_MAX = 3  # of an effect whose class can bear it, while its owner lives
_RETRY_KINDS: dict[str, RetryKind] = {
    "tool": "tool", "timeout": "timeout", "transport": "transport", "rate_limit": "rate_limit", "exit": "exit",
    "assertion": "assertion",
}  # fmt: skip


class Acted(msgspec.Struct):
    """What comes of opening or carrying out an action.

    Attributes:
        records, ops: to be committed: before dispatch while ``outcome`` is None, else with what follows.
        outcome: how it ended; None: it is to be performed.
        boundary: of the records.
    """

    records: list[Record] = msgspec.field(default_factory=list)
    ops: list[Op] = msgspec.field(default_factory=list)
    outcome: Outcome | None = None
    boundary: Boundary = Boundary.CALL_OUTCOME


class Acting:
    """The actions of one attempt.

    Args:
        executors: by the kind of action.
        workspace: what the run may see and write.
        diff: whether results hold a diff of changed text.
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: Plan,
        executors: Mapping[str, Executor],
        workspace: Workspace,
        *,
        diff: bool = True,
    ) -> None:
        self.attempt = attempt
        self.plan = plan
        self.executors = executors
        self.workspace = workspace
        self.diff = diff
        flow = attempt.run.flow
        assert flow is not None
        self._lineage = flow.started.lineage or attempt.run.id
        self._generation = flow.started.generation

    def executor(self, kind: str) -> Executor:
        """Who performs actions of a kind.

        Raises:
            Invalid: nobody here.
        """
        found = self.executors.get(kind)
        if found is None:
            raise Invalid(f"Nothing here performs actions of the kind {kind!r}.")
        return found

    # -- opening ------------------------------------------------------------------------------------------------------
    async def open(self, task: PlannedTask, action: Action, given: dict[str, Any], attempt: int) -> Acted:
        """Judge a new try: refuse it, ask for it, find that nothing is to do, or record that it starts."""
        try:
            executor = self.executor(action.kind)
            facts = executor.describe(action, given)
            allowed = self._authority(facts)
            if isinstance(allowed, authority.Refused):
                return Acted(outcome=_denied(f"{facts.operation} is denied by policy: {allowed.reason}."))
            prepared = await executor.prepare(self.call(task, action, given, attempt))
        except Denied as error:
            return Acted(outcome=_denied(str(error)))
        except Error as error:
            return Acted(outcome=Broken(Failure("input", str(error)[:FAILURE_MESSAGE_CHARS_MAX])))
        if prepared is not None:
            return Acted(outcome=Done(prepared.result, produced=prepared.produced))
        started = TaskStarted(
            self.attempt.run.id, task.id, attempt, facts.operation, facts.effect_class, task.definition
        )
        if isinstance(allowed, authority.Asked):
            return self._ask(task, started, facts, allowed, given)
        acted = Acted([started])
        self._start(task, facts, acted, first=True)
        return acted

    def judge(self, task: PlannedTask, kind: str, capability: str, request: Any, attempt: int) -> Acted | None:
        """Whether policy stops a change of the run's own state: refused, or asked for first. None: it may be made."""
        facts = Facts(kind, "internal_state", "keyed", "low", capability, request)
        match self._authority(facts):
            case authority.Refused(reason=reason):
                return Acted(outcome=_denied(f"{kind} is denied by policy: {reason}."))
            case authority.Asked() as asked:
                started = TaskStarted(self.attempt.run.id, task.id, attempt, kind, "keyed", task.definition)
                return self._ask(task, started, facts, asked, request)
            case _:
                return None

    def _authority(self, facts: Facts) -> authority.Authority:
        policy = self.plan.policy
        remote = facts.kind == "network" and facts.effect_class not in ("pure", "observe") and self.plan.dialect == OWN
        names = (facts.capability, facts.operation)
        touch = authority.Touch(names, facts.kind, facts.risk, approval=facts.approval, remote=remote)
        return authority.decide(touch, mode=policy.approval, allow=policy.tools_allow, deny=policy.tools_deny)

    def _ask(self, task: PlannedTask, started: TaskStarted, facts: Facts, asked: authority.Asked, shown: Any) -> Acted:
        match self.plan.policy.non_interactive:
            case "deny_approval":
                return Acted(outcome=_denied(f"{facts.operation} needs an approval, and nonInteractive denies it."))
            case "fail":
                said = f"{facts.operation} needs an approval, and nonInteractive is `fail`."
                return Acted(outcome=Broken(Failure("denied", said), fatal=True))
            case _:
                return self.request(task, started, facts.operation, facts.request, asked.reason, shown)

    def request(
        self, task: PlannedTask, started: TaskStarted, operation: str, request: Any, reason: str, shown: Any = None
    ) -> Acted:
        """Ask a person: bound to the exact request; ``shown`` are the values they read, if that is only their digest."""
        attempt = self.attempt
        assert attempt.submission is not None
        whole = _told(request, shown)
        told, digest = canonical.encode(redact(whole, frozenset()), "request"), canonical.digest(whole)
        run, tries = attempt.run.id, self._tries(task.id) + 1
        approval = ids.approval_id(run, f"{task.id}#{tries}", operation, task.definition, digest)
        row = ApprovalRow(
            approval, attempt.number, attempt.submission.id, run, task.id, operation,
            told, digest, reason, attempt.host.clock.now(), "pending",
        )  # fmt: skip
        record = ToolApprovalRequested(run, task.id, approval, operation, digest, reason)
        return Acted(
            [started, record], [lambda tx: tx.ledger.put_approval(row)], Left("approval"), Boundary.TASKS_STARTED
        )

    def _tries(self, id: str) -> int:
        call = self.attempt.run.calls.get(id)
        return 0 if call is None else call.tries

    def _start(self, task: PlannedTask, facts: Facts, acted: Acted, *, first: bool) -> None:
        """Add the started record of the next try of an effect, and its row."""
        attempt = self.attempt
        assert attempt.submission is not None
        run, tries = attempt.run.id, self._tries(task.id) + 1
        raw = canonical.encode(facts.request, f"request of task {task.id!r}")
        digest = canonical.digest(facts.request)
        key = ids.idempotency_key(self._lineage, task.id, 1, facts.operation + digest, self._generation)
        effect = ids.effect_id(run, task.id, tries, 1, facts.operation, digest)
        record = ToolCallPrepared(
            run,
            task.id,
            effect,
            facts.operation,
            facts.effect_class,
            task.definition,
            key,
            msgspec.Raw(raw),
            digest,
            tries,
        )
        row = EffectRow(
            id=effect, thread=attempt.number, submission=attempt.submission.id, run=run, call=task.id, step=None,
            operation=facts.operation, kind=facts.kind, effect_class=facts.effect_class, risk=facts.risk, key=key,
            business_key=None, status="started", verdict=None, tries=tries,
            sequence=0, started_at=attempt.host.clock.now(), ended_at=None,
        )  # fmt: skip
        acted.records.append(record)
        acted.ops.append(PutEffect(row))

    # -- going on with what an earlier owner, or a decision, left -----------------------------------------------------
    async def resume(self, task: PlannedTask, action: Action, given: dict[str, Any], call: fold.Call) -> Acted:
        """Obey the plan of a try that has begun: its outcome, a verdict, another try, or a wait."""
        if call.closed:
            return Acted(outcome=self._recorded(call))
        plan, run = plans.task_plan(call), self.attempt.run.id
        match plan:
            case plans.AwaitDecision():
                return Acted(outcome=Left("approval"))
            case plans.AwaitVerdict():
                return Acted(outcome=Left("unknown"))
            case plans.Withdraw(failure=failure):
                return Acted(
                    [ToolCallWithdrawn(run, task.id, failure)], outcome=Broken(failure), boundary=Boundary.CALL_OUTCOME
                )
            case plans.Inject(verdict=verdict):
                failed = None if verdict.verdict == "applied" else Failure("refused", verdict.reason or "refused")
                settled = ToolCallSettled(run, task.id, verdict.result, failed)
                outcome = Broken(failed) if failed else Done(canonical.decode(verdict.result))
                return Acted([settled], outcome=outcome)
            case plans.NeedsProbe(doubts=doubts):
                now = self.attempt.host.clock.now()
                records: list[Record] = [
                    ToolCallUnknown(run, task.id, doubt.effect, doubt.tool, doubt.reason, doubt.step)
                    for doubt in doubts
                ]
                return Acted(records, [lose(d.effect, now) for d in doubts], Left("unknown"), Boundary.CALL_UNKNOWN)
            case _:
                return await self._again(task, action, given, call)

    async def _again(self, task: PlannedTask, action: Action, given: dict[str, Any], call: fold.Call) -> Acted:
        """The first dispatch after an approval, or another of the same try."""
        acted = Acted()
        try:
            executor = self.executor(action.kind)
            facts = executor.describe(action, given)
            if call.prepared is None:
                await executor.prepare(self.call(task, action, given))
        except Error as error:
            return Acted(outcome=_denied(str(error)) if isinstance(error, Denied) else Broken(_failure("input", error)))
        if call.prepared is not None and call.verdict is None:
            lost = call.prepared.effect
            acted.ops.append(lambda tx: tx.ledger.end_effect(lost, "unknown", "declared", None))
        self._start(task, facts, acted, first=False)
        return acted

    def _recorded(self, call: fold.Call) -> Outcome:
        """The outcome that the log holds."""
        if call.failure is not None:
            return Broken(call.failure, None if call.result is None else canonical.decode(call.result))
        value = canonical.decode(call.result or b"null")
        if isinstance(value, dict) and value.keys() == {"result", "$produced"}:
            found = tuple(self._produced(name) for name in value["$produced"])
            return Done(value["result"], produced=found, printed=_printed(value["result"]))
        return Done(value, printed=_printed(value))

    def _produced(self, name: str) -> Produced:
        return Produced(name, self.workspace.root / name)

    # -- performing ---------------------------------------------------------------------------------------------------
    def call(
        self,
        task: PlannedTask,
        action: Action,
        given: dict[str, Any],
        attempt: int = 1,
        effect: str = "",
        key: str = "",
    ) -> Call:
        """One action as its executor takes it."""
        run = self.attempt.run
        call = run.calls.get(task.id)
        notes = {} if call is None else {n: canonical.decode(s.result) for n, s in call.steps.items() if s.result}

        async def note(name: str, value: Any) -> None:
            raw = msgspec.Raw(canonical.encode(value, f"note {name!r}"))
            await self.attempt.append(Boundary.STEP_OUTCOME, [ToolStepSettled(run.id, task.id, name, raw)])

        return Call(
            run=run.id, task=task.id, attempt=attempt, effect=effect, key=key, action=action, input=given,
            workspace=self.workspace, policy=self.plan.policy, timeout=float(action.timeout_seconds or task.timeout_seconds),
            note=note, notes=notes, diff=self.diff,
            goes_on=lambda: self.attempt.interrupted not in ("cancel", "deadline"),
        )  # fmt: skip

    async def perform(self, task: PlannedTask, action: Action, given: dict[str, Any]) -> Acted:
        """Call the executor, its started record being durable, and judge what came of it."""
        executor = self.executor(action.kind)
        live = 1
        while True:
            prepared = self.attempt.run.calls[task.id].prepared
            assert prepared is not None
            call = self.call(task, action, given, prepared.attempt, prepared.effect, prepared.key)
            outcome = await effects.dispatch(
                self.attempt.host, functools.partial(executor.execute, call), is_async=True, timeout=None,
                unknown_by_default=prepared.effect_class == "once",
            )  # fmt: skip
            if not isinstance(outcome, effects.UnknownOutcome) or isinstance(outcome.cause, asyncio.CancelledError):
                break
            if prepared.effect_class == "once" or live == _LIVE_TRIES_MAX or self._retried(task, outcome.cause):
                break
            if prepared.effect_class in ("pure", "observe"):
                break
            await self._repeat(task, action, given, live)
            live += 1
        return self._judge(task, prepared, outcome)

    def _retried(self, task: PlannedTask, cause: BaseException | None) -> bool:
        """Whether the task's own policy tries such a failure again."""
        flow = self.attempt.run.flow
        assert flow is not None
        kind = cause.kind if isinstance(cause, InDoubt) else _kind(cause)
        return flow.tasks[task.id].attempt < task.retry.max_attempts and kind in task.retry.on

    async def _repeat(self, task: PlannedTask, action: Action, given: dict[str, Any], live: int) -> None:
        """Record another try of an effect whose class can bear it, after a moment."""
        await asyncio.sleep(0.1 * 2**live)
        acted = await self._again(task, action, given, self.attempt.run.calls[task.id])
        await commit(self.attempt, Boundary.CALL_STARTED, acted.records, acted.ops)

    def _judge(self, task: PlannedTask, prepared: ToolCallPrepared, outcome: effects.Outcome) -> Acted:
        run, effect, now = self.attempt.run.id, prepared.effect, self.attempt.host.clock.now()
        match outcome:
            case effects.Confirmed(value=Performed(result=result, produced=produced)):
                return self._confirmed(task, effect, result, produced)
            case effects.RefusedOutcome(failure=failure, cause=cause):
                broken = _broken(failure, cause)
                raw = msgspec.Raw(canonical.encode(broken.output, "output of the failure"))
                settled = ToolCallSettled(run, task.id, raw, broken.failure)
                return Acted([settled], [_end(effect, "refused", now)], broken)
            case effects.UnknownOutcome(reason=reason, cause=cause):
                if isinstance(cause, asyncio.CancelledError):
                    raise cause
                kind = cause.kind if isinstance(cause, InDoubt) else _kind(cause)
                output = cause.output if isinstance(cause, InDoubt) else None
                broken = Broken(Failure(kind, reason), output, retry=_RETRY_KINDS.get(kind, ""))
                if prepared.effect_class in ("pure", "observe"):  # what only reads has simply failed
                    settled = ToolCallSettled(run, task.id, failure=broken.failure)
                    return Acted([settled], [_end(effect, "refused", now)], broken)
                if prepared.effect_class != "once" and self._retried(task, cause):
                    return Acted([], [_declared(effect)], broken)  # another try follows, under the same key
                unknown = ToolCallUnknown(run, task.id, effect, prepared.tool, reason)
                return Acted([unknown], [lose(effect, now)], Left("unknown"), Boundary.CALL_UNKNOWN)
            case _:
                raise AssertionError(f"an executor gave {outcome!r}")

    def _confirmed(self, task: PlannedTask, effect: str, result: Any, produced: Sequence[Produced]) -> Acted:
        run, now = self.attempt.run.id, self.attempt.host.clock.now()
        names = [p.name for p in produced if p.path is not None]
        stored = {"result": result, "$produced": names} if names else result
        try:
            raw = canonical.encode(stored, f"result of task {task.id!r}")
        except Invalid as error:
            failure = _failure("result", error)
            return Acted(
                [ToolCallSettled(run, task.id, failure=failure)], [_end(effect, "confirmed", now)], Broken(failure)
            )
        settled = ToolCallSettled(run, task.id, msgspec.Raw(raw))
        done = Done(result, produced=tuple(produced), printed=_printed(result))
        return Acted([settled], [_end(effect, "confirmed", now)], done)


OWN: Literal["perdure.dev/v1"] = "perdure.dev/v1"


class PutEffect:
    """Insert an effect's row; the sequence of its started record is set when it is appended."""

    def __init__(self, row: EffectRow) -> None:
        self.row = row

    def __call__(self, tx: Any) -> None:
        tx.ledger.put_effect(self.row)


def commit(attempt: Attempt, boundary: Boundary, records: Sequence[Record], ops: Sequence[Op]) -> asyncio.Future[None]:
    """Append records and their ledger changes; each effect's row learns where its started record stands."""
    places = {
        record.effect: attempt.state.tail + 1 + place
        for place, record in enumerate(records)
        if isinstance(record, ToolCallPrepared)
    }
    for op in ops:
        if isinstance(op, PutEffect):
            op.row = replace(op.row, sequence=places[op.row.id])
    return attempt.append(boundary, records, ops)


def workspace_of(root: str, writable: Sequence[str]) -> Workspace:
    """The folders of a run, resolved now."""
    base = Path(root).resolve()
    return Workspace(base, tuple((base / folder).resolve() for folder in writable))


def _told(request: Any, shown: Any) -> dict[str, Any]:
    """A request as people read it: with the values that it names by their digests, cut where they are long."""
    told: dict[str, Any] = dict(request) if isinstance(request, dict) else {"request": request}
    for name, value in (shown or {}).items() if isinstance(shown, dict) else ():
        if name not in told:
            whole = isinstance(value, str) and len(value) > DIFF_CHARS_MAX
            told[name] = value[:DIFF_CHARS_MAX] + " [cut]" if whole else value
    return told


def _printed(result: Any) -> int:
    """Bytes that a process printed, by its result."""
    if not isinstance(result, dict) or "stdout" not in result:
        return 0
    return sum(len(str(result.get(name) or "").encode("utf-8", "replace")) for name in ("stdout", "stderr"))


def _denied(message: str) -> Broken:
    return Broken(Failure("denied", message[:FAILURE_MESSAGE_CHARS_MAX]))


def _failure(kind: str, error: BaseException) -> Failure:
    return Failure(kind, str(error)[:FAILURE_MESSAGE_CHARS_MAX])


def _kind(cause: BaseException | None) -> str:
    return "timeout" if isinstance(cause, TimeoutError) else "transport"


def _broken(failure: Failure, cause: BaseException | None) -> Broken:
    if isinstance(cause, Denied):
        return _denied(str(cause))
    if not isinstance(cause, Failed):
        return Broken(failure, retry="tool")
    named = Failure(cause.kind, failure.message)
    output = cause.output
    return Broken(
        named, output, retry=_RETRY_KINDS.get(cause.kind, ""), retry_after=cause.retry_after, printed=_printed(output)
    )


def _end(effect: str, status: str, now: int) -> Op:
    return lambda tx: tx.ledger.end_effect(effect, status, None, now)


def _declared(effect: str) -> Op:
    return lambda tx: tx.ledger.end_effect(effect, "unknown", "declared", None)
