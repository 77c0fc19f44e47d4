"""Members of a batch: how a task of each kind begins, goes on after a crash or a decision, and ends as a record."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from perdure import canonical
from perdure.clock import parse_instant, seconds
from perdure.definitions.workflow import RENDERED_FIELDS, Action, LongTerm
from perdure.engine.attempt import Attempt
from perdure.engine.intents import Op
from perdure.errors import Error, Invalid
from perdure.limits import FAILURE_MESSAGE_CHARS_MAX
from perdure.ports.artifacts import ArtifactStore
from perdure.ports.failpoints import Boundary
from perdure.records.artifact import ArtifactRef
from perdure.records.codec import Record
from perdure.records.effect import ToolCallSettled, ToolCallWithdrawn
from perdure.records.parts import Failure
from perdure.records.task import TaskRetryScheduled, TaskSettled, TaskStarted, TaskWaiting
from perdure.rules import fold
from perdure.rules.flow import DELTA_VERSION, Flow
from perdure.workflow import pure, templates
from perdure.workflow.acting import Acted, Acting
from perdure.workflow.agents import Agents
from perdure.workflow.expressions import Decision, ExpressionError, Scope
from perdure.workflow.outcomes import Broken, Done, Left, Outcome
from perdure.workflow.plan import Plan, PlannedTask
from perdure.workflow.retries import next_try
from perdure.workflow.schemas import problem
from perdure.workflow.values import Given, Values

_encode = msgspec.json.Encoder().encode
DEPENDENCY = "dependency did not succeed"
CONDITION = "when condition was false"
ROUTE = "route not selected"
LONG_TERM = ("builtin.long_term_memory.read", "builtin.long_term_memory.search", "builtin.long_term_memory.write",
             "builtin.long_term_memory.reindex")  # fmt: skip


class Member(msgspec.Struct):
    """One task of a batch.

    Attributes:
        records, ops: to be committed: before dispatch until ``body`` has run, with the batch after it.
        body: carries it out; None: its outcome is known.
        durable: ``body`` may begin only when ``records`` are durable.
    """

    task: PlannedTask
    attempt: int
    given: Given | None = None
    decision: Decision | None = None
    records: list[Record] = msgspec.field(default_factory=list)
    ops: list[Op] = msgspec.field(default_factory=list)
    body: Callable[[], Awaitable[Acted]] | None = None
    durable: bool = False
    outcome: Outcome | None = None
    boundary: Boundary = Boundary.CALL_OUTCOME


class Closing(msgspec.Struct):
    """What ends a member: records, and the end itself unless another try follows."""

    records: list[Record]
    ops: list[Op] = msgspec.field(default_factory=list)
    settled: TaskSettled | None = None
    output: Any = None


class Members:
    """Makes the members of one attempt's batches.

    Args:
        check: predict and change nothing.
        artifacts: keeps what tasks leave; None where nothing can be kept.
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: Plan,
        values: Values,
        acting: Acting,
        agents: Agents,
        artifacts: ArtifactStore | None,
        *,
        check: bool,
    ) -> None:
        self.attempt = attempt
        self.plan = plan
        self.values = values
        self.acting = acting
        self.agents = agents
        self.artifacts = artifacts
        self.check = check
        self._routers = _routers(plan)
        self._decisions: dict[str, Decision] = {}
        self._left_at: dict[str, int] = {}

    @property
    def flow(self) -> Flow:
        """The state of the run."""
        flow = self.attempt.run.flow
        assert flow is not None
        return flow

    # -- whether --------------------------------------------------------------------------------------------------------
    def skip(self, id: str) -> TaskSettled | None:
        """The end of a task that is not to run: what it needs did not succeed, no route leads to it, its condition is
        false. None: it is to run; its condition is kept for its end."""
        task = self.plan.tasks[id]
        for router, destination in self._routers.get(id, ()):
            end = self.values.ended(router)
            if end is not None and end.end == "succeeded":
                chosen = self.values.outputs[router]
                if destination not in chosen["destinations"]:
                    route = {"router": router, "selected": chosen["selected"], "matched": chosen["matched"]}
                    return self._skipped(task, {"reason": ROUTE, "route": route})
        if not self._needs_hold(task):
            return self._skipped(task, {"reason": DEPENDENCY})
        if task.when is None:
            return None
        try:
            decision = self.values.decide(task.when, self._scope(task))
        except ExpressionError as error:
            failure = Failure("template", f"when: {error}"[:FAILURE_MESSAGE_CHARS_MAX])
            return TaskSettled(
                self.attempt.run.id,
                id,
                "failed",
                0,
                failure=failure,
                definition=task.definition,
                contract=task.contract,
            )
        if decision.result:
            self._decisions[id] = decision
            return None
        return self._skipped(task, {"reason": CONDITION, "condition": msgspec.to_builtins(decision)}, decision)

    def _needs_hold(self, task: PlannedTask) -> bool:
        if task.kind in ("aggregate", "loop"):
            return True
        for need in task.needs:
            end = self.values.ended(need)
            assert end is not None
            if end.end == "succeeded":
                continue
            inner = task.kind == "outputs" and self.plan.tasks[need].kind != "inputs"
            if inner and end.end == "skipped" and self.values.outputs.get(need) != _LOST:
                continue
            return False
        return True

    def _skipped(self, task: PlannedTask, output: dict[str, Any], decision: Any = None) -> TaskSettled:
        raw = canonical.encode(output, "output")
        return TaskSettled(
            self.attempt.run.id, task.id, "skipped", 0, msgspec.Raw(raw), definition=task.definition,
            contract=task.contract, output_digest=canonical.digest(output), **_optional(decision=decision),
        )  # fmt: skip

    def _scope(self, task: PlannedTask) -> Scope:
        """What the expressions of a task read. An iteration's previous output is a variable of its own."""
        extra = {"loopPrevious": self.values.outputs[task.previous]} if task.previous else None
        return self.values.scope(task, self.values.memory(task.id), extra)

    # -- beginning ------------------------------------------------------------------------------------------------------
    async def begin(self, id: str) -> Member:
        """A try that begins. What its templates lack is its failure."""
        task = self.plan.tasks[id]
        state = self.flow.tasks.get(id)
        member = Member(task, 1 if state is None else state.attempt + 1, decision=self._decisions.pop(id, None))
        try:
            await self._begin(member)
        except ExpressionError as error:
            member.outcome = Broken(Failure("template", str(error)[:FAILURE_MESSAGE_CHARS_MAX]))
        except Error as error:
            member.outcome = Broken(Failure("input", str(error)[:FAILURE_MESSAGE_CHARS_MAX]))
        return member

    async def _begin(self, member: Member) -> None:
        task, scope = member.task, self._scope(member.task)
        body = pure.BODIES.get(task.kind)
        if body is not None:
            member.given = Given({}, self.values.digest(task, scope, task.with_))
            member.outcome = body(task, self.values, scope)
            return
        action = self.plan.actions.get(task.target) if task.kind == "action" else None
        member.given = given = self.values.given(task, scope, action.with_ if action is not None else None)
        if action is not None and action.kind.startswith(LONG_TERM):
            member.given = given = self._remembering(task, given)
        if action is None:
            self._begin_agent(member, given)
        elif action.kind in pure.PURE:
            member.outcome = pure.act(task, action.kind, given.value, scope.memory)
        elif action.kind in pure.WRITES_MEMORY:
            self._begin_memory(member, action, given, scope)
        elif self.check:
            member.outcome = await self._predict(task, self._action(action, scope), given)
        elif action.kind in ("builtin.wait", "builtin.approval"):
            self._begin_wait(member, action, given)
        else:
            rendered = self._action(action, scope)
            acted = await self.acting.open(task, rendered, given.value, member.attempt)
            self._opened(member, acted, rendered, given)

    def _remembering(self, task: PlannedTask, given: Given) -> Given:
        """What the document says of long-term memory, under what the task says itself."""
        declared = self.plan.memory.long_term or LongTerm()
        whole: dict[str, Any] = {
            "namespace": task.namespace + declared.namespace, "dimensions": declared.embedding.dimensions, **given.value,
        }  # fmt: skip
        if declared.retention_days is not None:
            whole.setdefault("retentionDays", declared.retention_days)
        return Given(whole, given.digest)

    def _opened(self, member: Member, acted: Acted, action: Action, given: Given) -> None:
        member.records, member.ops, member.boundary = acted.records, acted.ops, acted.boundary
        member.outcome = acted.outcome
        if acted.outcome is None:
            member.durable = True
            member.body = lambda: self.acting.perform(member.task, action, given.value)

    def _action(self, action: Action, scope: Scope) -> Action:
        """The action with its own templates rendered, each into one value."""
        changed: dict[str, Any] = {}
        for name in RENDERED_FIELDS:
            value = getattr(action, name)
            if value:
                plain = msgspec.json.decode(_encode(value))
                rendered = templates.parse(plain, name).render(scope)
                if rendered != plain:
                    changed[name] = _as_text(name, rendered)
        if not changed:
            return action
        return msgspec.convert({**msgspec.to_builtins(action), **changed}, Action)

    async def _predict(self, task: PlannedTask, action: Action, given: Given) -> Outcome:
        executor = self.acting.executors.get(action.kind)
        if executor is None:
            return Done({"status": "requires_execution", "changed": False})
        return Done(await executor.predict(self.acting.call(task, action, given.value)))

    def _begin_agent(self, member: Member, given: Given) -> None:
        task = member.task
        if self.check:
            provider = self.plan.agents[task.target].provider
            member.outcome = Done({"status": "requires_execution", "changed": False, "provider": provider})
            return
        member.records = [self.agents.begin(task, member.attempt)]
        member.body = lambda: self._perform_agent(task, given)

    async def _perform_agent(self, task: PlannedTask, given: Given) -> Acted:
        return Acted(outcome=await self.agents.perform(task, given))

    def _begin_memory(self, member: Member, action: Action, given: Given, scope: Scope) -> None:
        """A write of working memory: done with the batch, unless policy forbids it or asks somebody first."""
        task = member.task
        acted = self.acting.judge(task, action.kind, "memory.write", given.value, member.attempt)
        if acted is None:
            member.outcome = pure.act(task, action.kind, given.value, scope.memory)
        else:
            member.records, member.ops, member.outcome = acted.records, acted.ops, acted.outcome
            member.boundary = acted.boundary

    def _begin_wait(self, member: Member, action: Action, given: Given) -> None:
        task, run = member.task, self.attempt.run.id
        started = TaskStarted(run, task.id, member.attempt, action.kind, "pure", task.definition)
        if action.kind == "builtin.approval":
            title = str(given.value.get("title") or action.title or task.id)
            asked = {"title": title, "details": given.value.get("details", action.details)}
            acted = self.acting.request(task, started, action.kind, asked, title)
            member.records, member.ops, member.outcome = acted.records, acted.ops, acted.outcome
            member.boundary = acted.boundary
            expires = given.value.get("expiresInSeconds") or action.expires_in_seconds
            if expires:
                until = self.attempt.host.clock.now() + seconds(float(expires))
                member.records.append(TaskWaiting(run, task.id, until))
            return
        member.records = [
            started,
            TaskWaiting(run, task.id, _instant(action, given.value, self.attempt.host.clock.now())),
        ]
        member.outcome = Left("timer")

    # -- going on -------------------------------------------------------------------------------------------------------
    def due(self, id: str, now: int, *, fresh: bool) -> bool:
        """Whether a task that has begun can go on now: its instant is here, somebody decided, its owner vanished."""
        state = self.flow.tasks.get(id)
        if state is None or not state.running:
            return state is None or state.until <= now
        if fresh:
            return not (state.until > now and self._is_wait(id))
        if self._left_at.get(id) == self.attempt.state.tail and not (state.until and state.until <= now):
            return False
        if state.agent:
            return _agent_may_go_on(self.attempt.state.runs.get(state.agent))
        call = self.attempt.run.calls[id]
        if call.closed or (state.until and state.until <= now):
            return True
        if call.unknown is not None:
            return False
        return call.verdict is not None or (call.approval is not None and call.decision is not None)

    def _is_wait(self, id: str) -> bool:
        action = self.plan.actions.get(self.plan.tasks[id].target)
        return action is not None and action.kind == "builtin.wait"

    async def resume(self, id: str) -> Member:
        """A try that has begun, here or in a process that is gone; or the next one, if its time has come."""
        state = self.flow.tasks.get(id)
        if state is None or not state.running:
            return await self.begin(id)
        task = self.plan.tasks[id]
        member = Member(task, state.attempt)
        self._left_at[id] = self.attempt.state.tail
        try:
            scope = self._scope(task)
            action = self.plan.actions.get(task.target) if task.kind == "action" else None
            member.given = given = self.values.given(task, scope, action.with_ if action is not None else None)
            if action is not None and action.kind.startswith(LONG_TERM):
                member.given = given = self._remembering(task, given)
            if action is None:
                member.body = lambda: self._perform_agent(task, given)
            elif action.kind == "builtin.wait":
                self._resume_wait(member)
            elif action.kind == "builtin.approval":
                self._resume_approval(member)
            elif action.kind in pure.WRITES_MEMORY:
                self._resume_approval(member)
                if isinstance(member.outcome, Done):
                    member.outcome = pure.act(task, action.kind, given.value, scope.memory)
            else:
                rendered = self._action(action, scope)
                acted = await self.acting.resume(task, rendered, given.value, self.attempt.run.calls[id])
                self._opened(member, acted, rendered, given)
        except Error as error:
            kind = "template" if isinstance(error, ExpressionError) else "input"
            member.outcome = Broken(Failure(kind, str(error)[:FAILURE_MESSAGE_CHARS_MAX]))
        return member

    def _resume_wait(self, member: Member) -> None:
        state = self.flow.tasks[member.task.id]
        if state.until > self.attempt.host.clock.now():
            member.outcome = Left("timer")
        else:
            member.records = [ToolCallSettled(self.attempt.run.id, member.task.id)]
            member.outcome = Done({"status": "succeeded", "changed": False, "until": state.until})

    def _resume_approval(self, member: Member) -> None:
        id, run = member.task.id, self.attempt.run.id
        call, state = self.attempt.run.calls[id], self.flow.tasks[id]
        decision = call.decision
        if decision is None and state.until and state.until <= self.attempt.host.clock.now():
            approval = call.approval.approval if call.approval is not None else ""
            failure = Failure("rejected", "Nobody decided before the approval expired.")
            now = self.attempt.host.clock.now()
            member.records = [ToolCallWithdrawn(run, id, failure)]
            member.ops = [lambda tx: tx.ledger.decide_approval(approval, "expired", "perdure", failure.message, now)]
            member.outcome = Broken(failure)
        elif decision is None:
            member.outcome = Left("approval")
        elif decision.decision == "approved":
            member.records = [] if call.closed else [ToolCallSettled(run, id)]
            output = {"status": "succeeded", "changed": False, "approved": True}
            member.outcome = Done({**output, "by": decision.by, "reason": decision.reason})
        else:
            said = f"Approval {decision.decision} by {decision.by}: {decision.reason}".rstrip(": ")
            failure = Failure("rejected", said)
            member.records = [] if call.closed else [ToolCallWithdrawn(run, id, failure)]
            member.outcome = Broken(failure)

    # -- ending ---------------------------------------------------------------------------------------------------------
    async def close(self, member: Member) -> Closing:
        """The end of a member whose outcome is known, or its next try."""
        outcome = member.outcome
        if isinstance(outcome, Done):
            return await self._succeeded(member, outcome)
        assert isinstance(outcome, Broken)
        return self._failed(member, outcome)

    def _failed(self, member: Member, broken: Broken) -> Closing:
        task, run = member.task, self.attempt.run.id
        state = self.flow.tasks.get(task.id)
        delay = next_try(task.retry, member.attempt, broken, random.random())
        if delay is not None:
            at = self.attempt.host.clock.now() + seconds(delay)
            records: list[Record] = []
            if state is None or not state.running:  # a pure task: its try is recorded where another follows
                records.append(TaskStarted(run, task.id, member.attempt, "pure", "pure", task.definition))
            retry = TaskRetryScheduled(run, task.id, member.attempt, broken.failure, at, broken.printed)
            return Closing([*records, retry])
        output = broken.output
        raw = canonical.encode(output, "output of the failure")
        settled = TaskSettled(
            run, task.id, "failed", member.attempt, msgspec.Raw(raw), broken.failure, definition=task.definition,
            contract=task.contract, input_digest="" if member.given is None else member.given.digest,
            output_digest=canonical.digest(output), printed=broken.printed, **_optional(decision=member.decision),
        )  # fmt: skip
        return Closing([settled], settled=settled, output=output)

    async def _succeeded(self, member: Member, done: Done) -> Closing:
        task, run = member.task, self.attempt.run.id
        try:
            if task.output_schema is not None and (wrong := problem(task.output_schema, done.output)):
                raise Invalid(f"The output of {task.id!r} does not fit its outputSchema: {wrong}.")
            raw = canonical.encode(done.output, f"output of task {task.id!r}")
        except Invalid as error:
            failure = Failure("output", str(error)[:FAILURE_MESSAGE_CHARS_MAX])
            return self._failed(member, Broken(failure, done.output if "outputSchema" in str(error) else None))
        artifacts: tuple[ArtifactRef, ...] = ()
        ops: list[Op] = []
        if done.produced and self.artifacts is not None:
            try:
                artifacts = await self.artifacts.ingest(run, task.id, done.produced)
            except Invalid as error:
                return self._failed(
                    member, Broken(Failure("output", str(error)[:FAILURE_MESSAGE_CHARS_MAX]), done.output)
                )
            refs, now = artifacts, self.attempt.host.clock.now()
            ops.append(lambda tx: tx.ledger.keep_artifacts(run, task.id, refs, now))
        extra: dict[str, Any] = {}
        if done.put or done.gone:
            delta = {"formatVersion": DELTA_VERSION, "set": done.put, "remove": list(done.gone)}
            extra = {"delta": msgspec.Raw(_encode(delta)), "delta_digest": canonical.digest(delta)}
        decision = done.decision if done.decision is not None else member.decision
        settled = TaskSettled(
            run, task.id, "succeeded", member.attempt, msgspec.Raw(raw), definition=task.definition,
            contract=task.contract, input_digest="" if member.given is None else member.given.digest,
            output_digest=canonical.digest(done.output), artifacts=artifacts, printed=done.printed,
            **_optional(decision=decision), **extra,
        )  # fmt: skip
        return Closing([settled], ops, settled, done.output)


_LOST = {"reason": DEPENDENCY}


def _as_text(name: str, value: Any) -> Any:
    """Elements of an argument vector, an environment or a header are text, whatever their templates gave."""
    if name == "args":
        return [item if isinstance(item, str) else _encode(item).decode() for item in value]
    if name in ("env", "headers", "query"):
        return {k: v if isinstance(v, str | dict) else _encode(v).decode() for k, v in value.items()}
    if name in ("stdin", "body") and not isinstance(value, str):
        return _encode(value).decode()
    return value


def _optional(*, decision: Any) -> dict[str, Any]:
    """A field that is left out when it has no value."""
    return {} if decision is None else {"decision": msgspec.Raw(_encode(decision))}


def _routers(plan: Plan) -> dict[str, list[tuple[str, str]]]:
    """Task to the routers that may lead to it, each with the destination that it is, or is a part of."""
    found: dict[str, list[tuple[str, str]]] = {}
    for id, task in plan.tasks.items():
        if task.route is None:
            continue
        named = [one for case in task.route.cases for one in case.tasks] + list(task.route.default)
        for destination in dict.fromkeys(named):
            for part in _parts(plan, destination):
                found.setdefault(part, []).append((id, destination))
    return found


def _parts(plan: Plan, id: str) -> list[str]:
    """A task with what begins it: the children of one that was expanded, the way into a sub-workflow."""
    task, parts = plan.tasks[id], [id]
    for child in task.children:
        parts += _parts(plan, child)
    if task.kind == "outputs":
        parts += [need for need in task.needs[:1] if plan.tasks[need].kind == "inputs"]
    return parts


def _agent_may_go_on(run: fold.Run | None) -> bool:
    """Whether the turns of an agent that waited can go on: no unknown is open, and not every question is open."""
    if run is None:
        return True
    if run.unknowns():
        return False
    asked = [call for call in run.open_calls() if call.approval is not None and not call.closed]
    return not asked or any(call.decision is not None for call in asked)


def _instant(action: Action, given: Mapping[str, Any], now: int) -> int:
    """When a wait ends, microseconds since 1970.

    Raises:
        Invalid: it says neither seconds nor until, or what it says is no time.
    """
    length = given.get("seconds", action.seconds)
    until = given.get("until", action.until)
    if until is not None:
        return parse_instant(str(until), "until")
    if isinstance(length, bool) or not isinstance(length, int | float) or length < 0:
        raise Invalid("builtin.wait needs `seconds` (a number from 0) or `until` (an instant).")
    return now + seconds(float(length))
