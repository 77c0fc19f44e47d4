"""The composition root: open a store, register definitions, run workers, and everything a user asks of the whole."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure import canonical, ids
from perdure.agent.agent import model_of, set_model_resolver
from perdure.agent.batch import encoder
from perdure.agent.driver import AgentDriver
from perdure.agent.ephemeral import Approve, Result
from perdure.agent.events import Event
from perdure.agent.live import Live
from perdure.agent.persistent import run_here
from perdure.app import workflows
from perdure.app.workflows import Workflows
from perdure.clock import Clock, Ids, parse_duration, to_datetime
from perdure.definitions.agent import AgentDefinition
from perdure.definitions.registry import Registration, Registry
from perdure.definitions.verdicts import Verdict
from perdure.engine import admission, approvals, cancellation, reconciliation, recovery
from perdure.engine.admission import Receipt
from perdure.engine.host import Host
from perdure.engine.recovery import Recovered
from perdure.engine.worker import Worker
from perdure.errors import Conflict, Invalid, RunCancelled, RunFailed
from perdure.limits import LEASE_SECONDS, LEASE_SECONDS_MIN, LISTED_MAX, PAGE_BATCHES_MAX, WORKERS_MAX
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import ApprovalRow, ArtifactRow, EffectRow, Submission
from perdure.ports.store import Store
from perdure.projections import approval, obligations, run, thread
from perdure.projections.approval import Approval
from perdure.projections.effect import Effect, decisions, read_effect
from perdure.projections.obligations import Obligation
from perdure.projections.run import RunView, Settlement
from perdure.projections.thread import RecordView, ThreadView
from perdure.providers.resolve import resolve
from perdure.records.task import PROGRAM
from perdure.stores.sqlite.store import open_store

if TYPE_CHECKING:
    from perdure.projections.audit import Explanation, Verification
    from perdure.projections.workflow import WorkflowView
    from perdure.workflow.dsl import Workflow
    from perdure.workflow.plan import Plan

set_model_resolver(resolve)


class Authorizer:
    """Consulted before every operation. Subclass it; the default allows what whoever holds the app asks."""

    async def authorize(self, operation: str, *, thread: str | None, submission: str | None, principal: str) -> None:
        """Return to allow, raise ``Denied`` to refuse. ``operation`` is the name of the ``App`` method."""
        return


@dataclass(frozen=True, slots=True)
class _Options:
    workers: int
    recover: bool
    recovery_seconds: float
    principal: str


class App:
    """An open store with what is registered on it. Made by :func:`open`; an async context manager.

    Every method is a coroutine, except :meth:`observe` and :meth:`events`, which are async iterators. Listings return
    lists.
    """

    def __init__(
        self,
        store: str | Path | Store,
        registry: Registry,
        models: Mapping[str, Any],
        options: _Options,
        *,
        lease_seconds: float,
        authorizer: Authorizer,
        clock: Clock | None,
        id_source: Ids | None,
        create: bool,
    ) -> None:
        self._address = store
        self._registry = registry
        self._models = models
        self._options = options
        self._lease_seconds = lease_seconds
        self._authorizer = authorizer
        self._clock = clock
        self._id_source = id_source
        self._create = create
        self._host: Host | None = None
        self._worker: Worker | None = None
        self._live: Live | None = None
        self._workflows: Workflows | None = None

    # -- life ---------------------------------------------------------------------------------------------------------
    async def __aenter__(self) -> App:
        if self._host is not None:
            raise Conflict("This app is already open.", help="Call perdure.open again for another one.")
        drivers = self._drivers() if self._options.workers else {}
        store: Store
        if isinstance(self._address, str | Path):
            store = open_store(self._address, create=self._create)
        else:
            store = self._address
        self._host = Host(store, clock=self._clock, ids=self._id_source, lease_seconds=self._lease_seconds)
        self._host.start()
        self._live = Live(self._host)
        for driver in drivers.values():
            driver.live = self._live
        self._workflows = Workflows(self._host, self._live)
        if self._options.workers:
            self._worker = Worker(
                self._host,
                {**drivers, PROGRAM: self._workflows},
                self._options.workers,
                recover=self._options.recover,
                recovery_seconds=self._options.recovery_seconds,
            )
            self._worker.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop workers, give claims back, close the store. Unfinished work stays owed."""
        host, self._host = self._host, None
        if host is None:
            return
        if self._worker is not None:
            await self._worker.stop()
        host.stop()
        await host.store.close()

    def _drivers(self) -> dict[str, AgentDriver]:
        drivers = {}
        for name in self._registry.names():
            registration = self._registry.get(name)
            model = self._models.get(name, registration.model)
            drivers[name] = AgentDriver(registration, model_of(registration.agent, model))
        return drivers

    @property
    def host(self) -> Host:
        """The engine's side of this process.

        Raises:
            Invalid: the app is not open.
        """
        if self._host is None:
            raise Invalid("The app is not open.", help="Use `async with perdure.open(...) as app:`.")
        return self._host

    @property
    def store(self) -> Store:
        """The open store, for the test kit and adapters."""
        return self.host.store

    @property
    def address(self) -> str:
        """The store as it was named to :func:`open`; the path of one that was given open."""
        return str(getattr(self._address, "path", self._address))

    @property
    def agents(self) -> dict[str, AgentDefinition]:
        """The registered agents by name."""
        return {name: self._registry.get(name).agent for name in self._registry.names()}

    @property
    def workflows(self) -> Workflows:
        """The workflows of this store: their artifacts, and who runs them."""
        assert self._workflows is not None
        return self._workflows

    async def workflow(self, run: Receipt | str) -> WorkflowView:
        """One run of a workflow: its tasks, memory, budgets.

        Raises:
            Invalid: no such run, or it is an agent's.
        """
        from perdure.projections import workflow

        id = self._submission_id(run)
        await self._allow("inspect", submission=id)
        return await workflow.view(self.store, self._row(id))

    async def artifacts(
        self, *, run: str | None = None, task: str | None = None, digest: str | None = None
    ) -> list[ArtifactRow]:
        """Files that tasks left, by run, task and path."""
        await self._allow("artifacts")
        wanted = None if run is None else ids.run_id(ids.submission_of(run))
        return await self.store.scan(
            lambda tx: tx.ledger.artifacts(run=wanted, task=task, digest=digest, limit=LISTED_MAX)
        )

    def is_workflow(self, run: Receipt | str) -> bool:
        """Whether a run is a workflow's."""
        return self._row(self._submission_id(run)).program == PROGRAM

    def plan(self, run: Receipt | str) -> Plan:
        """The plan that a run of a workflow goes by."""
        from perdure.projections import workflow

        return workflow.plan_of(self.store, self._row(self._submission_id(run)))

    def thread_number(self, run: Receipt | str) -> int:
        """The number of a run's thread in this store."""
        return self._row(self._submission_id(run)).thread_number

    def thread_of(self, run: Receipt | str) -> str:
        """The thread of a run."""
        return self._row(self._submission_id(run)).thread

    def ownership(self, run: Receipt | str) -> tuple[str, int] | None:
        """Who owns a run's thread and until when (microseconds since 1970) its lease lasts; None: nobody."""
        number = self.thread_number(run)
        row = self.store.read(lambda tx: tx.ledger.thread(number))
        return None if row is None or row.owner is None else (row.owner, row.lease_until or 0)

    def decided(self, run: Receipt | str) -> bool:
        """Whether something was decided about a run that its log does not hold yet."""
        number = self.thread_number(run)
        return bool(self.store.read(lambda tx: tx.ledger.intents(number)))

    @staticmethod
    def instant(at: int) -> dt.datetime:
        """Microseconds since 1970 as a time, UTC."""
        return to_datetime(at)

    def attend(self, thread: int) -> Worker:
        """A worker for one thread of workflows alone, until it is stopped; for a client that runs what it asked for."""
        worker = Worker(self.host, {PROGRAM: self.workflows}, 1, recover=False, only=thread)
        worker.start()
        return worker

    @property
    def worker(self) -> Worker | None:
        """The worker of this process; None for a client (``workers=0``)."""
        return self._worker

    async def _allow(self, operation: str, *, thread: str | None = None, submission: str | None = None) -> None:
        await self._authorizer.authorize(
            operation, thread=thread, submission=submission, principal=self._options.principal
        )

    # -- work ---------------------------------------------------------------------------------------------------------
    async def submit(
        self,
        agent: AgentDefinition | str | Workflow,
        input: Any = None,
        *,
        thread: str | None = None,
        key: str | None = None,
        principal: str | None = None,
    ) -> Receipt:
        """Admit work durably. From the receipt on, exactly one settlement is owed, however many processes die.

        Args:
            agent: the agent or its registered name; or a workflow, which has a thread of its own.
            input: a value of its input type; of a workflow its inputs, an object.
            thread: whose queue it joins; without one it is new, or derived from principal, agent and ``key``.
            key: idempotency key; the same key with the same input gives the same receipt, for ever.
            principal: on whose behalf; the app's by default.

        Raises:
            Invalid: the input or an id does not fit. Conflict: the key was used for other work.
            Unavailable: nothing was admitted; or the reply was lost, then repeat with the same key.
        """
        if not isinstance(agent, AgentDefinition | str):
            await self._allow("submit")
            if thread is not None:
                raise Invalid("A workflow has a thread of its own.", help="Leave `thread` out; give a key.")
            by = principal if principal is not None else self._options.principal
            return await workflows.submit(self.host, agent, input, principal=by, key=key)
        definition = self._definition(agent)
        await self._allow("submit", thread=thread)
        raw = definition.input_codec.encode(input, f"input of {definition.name!r}")
        return await admission.admit(
            self.host,
            program=definition.name,
            definition=definition.digest,
            input=raw,
            principal=principal if principal is not None else self._options.principal,
            thread=thread,
            key=key,
        )

    async def submit_json(
        self, agent: str, raw: bytes, *, thread: str | None = None, key: str | None = None, principal: str | None = None
    ) -> Receipt:
        """:meth:`submit` with the input as JSON bytes, validated by the agent's input type."""
        definition = self._definition(agent)
        value = definition.input_codec.decode(raw, f"input of {definition.name!r}")
        return await self.submit(definition, value, thread=thread, key=key, principal=principal)

    def _definition(self, agent: AgentDefinition | str) -> AgentDefinition:
        if isinstance(agent, str):
            return self._registry.get(agent).agent
        if not isinstance(agent, AgentDefinition):
            raise Invalid(f"{type(agent).__name__} is no agent.", help="Give an Agent or the name of a registered one.")
        if agent.name in self._registry.names():
            registered = self._registry.get(agent.name).agent
            if registered.digest != agent.digest:
                raise Conflict(
                    f"Another definition is registered as {agent.name!r}.", help="Open the app with this one instead."
                )
            return registered
        if self._options.workers:
            raise Invalid(
                f"Agent {agent.name!r} is not registered here.", help="Add it to open(agents=[...]) so that it can run."
            )
        return agent

    async def run(
        self, agent: AgentDefinition | str, input: Any, *, thread: str | None = None, model: Any = None,
        approve: Approve | None = None,
    ) -> Result:  # fmt: skip
        """Execute now under the thread's claim: history is kept, nothing is owed if the process dies.

        Raises:
            Conflict: work is owed on the thread, or somebody holds it.
            RunFailed, RunCancelled, Denied, Invalid: as for ``Agent.run``.
        """
        definition = self._definition(agent)
        await self._allow("run", thread=thread)
        if thread is not None:
            ids.check_id(thread, "thread")
        raw = definition.input_codec.encode(input, f"input of {definition.name!r}")
        registered = self._registry.get(definition.name) if definition.name in self._registry.names() else None
        chosen = model or self._models.get(definition.name) or (registered.model if registered else None)
        return await run_here(
            self.host, definition, raw, model_of(definition, chosen), thread=thread, approve=approve,
            principal=self._options.principal,
        )  # fmt: skip

    async def settlement(self, receipt: Receipt | str, *, timeout: float | str | None = None) -> Settlement:
        """Wait for the one terminal outcome. Cancelling this only detaches; the work goes on.

        Raises:
            TimeoutError: not settled within ``timeout`` seconds. Invalid: no such submission.
        """
        id = self._submission_id(receipt)
        await self._allow("settlement", submission=id)
        seconds = None if timeout is None else parse_duration(timeout, "timeout")
        host = self.host
        async with asyncio.timeout(seconds):
            while True:
                waiting = host.until_settled(id)
                try:
                    row = self._row(id)
                    if row.state == "settled":
                        return run.settlement(row)
                    await waiting
                finally:
                    waiting.cancel()

    async def output(self, receipt: Receipt | str, *, timeout: float | str | None = None) -> Any:
        """Wait for the settlement and read the output, decoded to the agent's output type.

        Raises:
            RunFailed, RunCancelled: how it settled otherwise.
            Invalid: the recorded output does not fit today's output type; the settlement stands.
        """
        settled = await self.settlement(receipt, timeout=timeout)
        if settled.status == "cancelled":
            raise RunCancelled(f"Run {settled.run} was cancelled.")
        if settled.failure is not None:
            raise RunFailed(settled.failure.message, kind=settled.failure.kind)
        raw = await run.read_output(self.store, self._row(settled.submission))
        row = self._row(settled.submission)
        if row.program in self._registry.names():
            return self._registry.get(row.program).agent.output_codec.decode(raw, "recorded output")
        return canonical.decode(raw)

    def _submission_id(self, receipt: Receipt | str) -> str:
        id = receipt.submission if isinstance(receipt, Receipt) else receipt
        return ids.submission_of(ids.check_id(id, "submission"))

    def _row(self, id: str) -> Submission:
        row = self.store.read(lambda tx: tx.ledger.submission(id))
        if row is None:
            raise Invalid(f"There is no submission {id!r} in this store.", help="List them: perdure runs")
        return row

    async def observe(self, target: Receipt | str, *, after: int = 0) -> AsyncIterator[RecordView]:
        """Committed records of a thread in order: from a cursor, then live. Resumes exactly after ``.sequence``.

        Args:
            target: a receipt, a submission or run id (then it ends with that settlement), or a thread (never ends).
            after: sequence after which to start.
        """
        name, until = self._observed(target)
        await self._allow("observe", thread=name)
        row = self.store.read(lambda tx: tx.ledger.thread(name))
        if row is None:
            raise Invalid(f"There is no thread {name!r}.", help="List them: perdure threads")
        cursor = after
        while True:
            waiting = self.host.until_progress(name)
            try:
                # a page starts at a batch: ask from the beginning of the one the cursor stands in
                first = cursor + 1
                stored = self.store.read(lambda tx, first=first: tx.log.read_from(row.number, first, PAGE_BATCHES_MAX))  # type: ignore[misc]
                for batch in stored:
                    for view in thread.records_of(batch):
                        if view.sequence > cursor:
                            cursor = view.sequence
                            yield view
                            if until is not None and thread.settles(view, until):
                                return
                if not stored:
                    await waiting
            finally:
                waiting.cancel()

    async def events(self, receipt: Receipt | str) -> AsyncIterator[Event]:
        """Events of one submission as they happen, from now on, whatever process on the store works on it.

        Text and reasoning deltas are provisional: an answer counts once it is recorded, and an interrupted one starts
        again. The last event is ``RunEnded``, as it was settled. A model's answer is streamed only while somebody
        watches; one that was begun before is not.

        Raises:
            Invalid: no such submission.
        """
        id = self._submission_id(receipt)
        await self._allow("events", submission=id)
        self._row(id)
        live = self._live
        assert live is not None
        async with contextlib.aclosing(live.follow(id)) as told:
            async for event in told:
                yield event

    def _observed(self, target: Receipt | str) -> tuple[str, str | None]:
        if isinstance(target, Receipt):
            return target.thread, target.submission
        id = ids.submission_of(target)
        row = self.store.read(lambda tx: tx.ledger.submission(id))
        return (row.thread, row.id) if row is not None else (target, None)

    # -- decisions ------------------------------------------------------------------------------------------------------
    async def cancel(self, receipt: Receipt | str, *, by: str = "local", reason: str = "") -> None:
        """Ask for a run to end. Durable and idempotent; the first reason stands; it cannot replace a settlement.

        Raises:
            Conflict: it is already settled. Invalid: no such submission.
        """
        id = self._submission_id(receipt)
        await self._allow("cancel", submission=id)
        await cancellation.cancel(self.host, id, by=by, reason=reason)

    async def approvals(self, *, status: str | None = "pending", run: str | None = None) -> list[Approval]:
        """Requests for approval, oldest first; ``status`` None lists all, ``run`` may be a run or submission id."""
        await self._allow("approvals")
        wanted = None if run is None else ids.run_id(ids.submission_of(run))
        rows = await self.store.scan(lambda tx: tx.ledger.approvals(status=status, run=wanted, limit=LISTED_MAX))
        return [self._approval(row) for row in rows]

    async def approve(self, id: str, *, by: str = "local", reason: str = "") -> Approval:
        """Approve one request, for its exact arguments, once. The same decision again changes nothing.

        Raises:
            Invalid: no such request. Conflict: it was decided otherwise, or its run is over.
        """
        await self._allow("approve")
        return self._approval(await approvals.decide(self.host, id, "approved", by=by, reason=reason))

    async def reject(self, id: str, *, by: str = "local", reason: str = "") -> Approval:
        """Reject one request: the model is told, the call never runs. Otherwise as :meth:`approve`."""
        await self._allow("reject")
        return self._approval(await approvals.decide(self.host, id, "rejected", by=by, reason=reason))

    def _approval(self, row: ApprovalRow) -> Approval:
        found, decided = self.store.read(lambda tx: (tx.ledger.thread(row.thread), row.id in decisions(tx, row.thread)))
        return approval.approval(row, found.id if found is not None else "", decided=decided)

    async def effects(self, *, status: str | None = None, run: str | None = None) -> list[Effect]:
        """Effects by start; ``status="unknown"`` lists those that wait for a verdict."""
        await self._allow("effects")
        wanted = None if run is None else ids.run_id(ids.submission_of(run))
        rows = await self.store.scan(lambda tx: tx.ledger.effects(status=status, run=wanted, limit=LISTED_MAX))
        return [await read_effect(self.store, row) for row in rows]

    async def effect(self, id: str) -> Effect:
        """One effect, with its arguments, result and verdict read back from the log."""
        await self._allow("effects")
        row = self.store.read(lambda tx: tx.ledger.effect(id))
        if row is None:
            raise Invalid(f"There is no effect {id!r}.", help="List them: perdure effects list")
        return await read_effect(self.store, row)

    async def reconcile(
        self, effect: Effect | str, verdict: Verdict, *, by: str = "local", reason: str = "", evidence: Any = None
    ) -> None:
        """Give the verdict on an effect of unknown outcome. Appended, with author, reason and evidence.

        Args:
            verdict: ``Applied(result)``, ``Refused(error)``, ``NotApplied()``, ``SafeToRetry()`` or ``CancelRun()``. The
                result of a model call is the text it answered; one that is refused fails its run.
            evidence: any JSON value: what convinced you.

        Raises:
            Invalid: no such effect, or its result cannot be stored.
            Conflict: it is in flight or held by a running thread, has an outcome, or another verdict stands.
        """
        id = effect if isinstance(effect, str) else effect.id
        await self._allow("reconcile")
        row = self.store.read(lambda tx: tx.ledger.effect(id))
        if row is None:
            raise Invalid(f"There is no effect {id!r}.", help="List them: perdure effects list --status unknown")
        body = reconciliation.verdict_body(
            verdict, effect=row.id, run=row.run, call=row.call, step=row.step, encode=self._encoder(row),
            evidence=evidence,
        )  # fmt: skip
        await reconciliation.submit(self.host, body, by=_text(by, "by"), reason=_text(reason, "reason", blank=True))

    def _encoder(self, row: EffectRow) -> reconciliation.Encode:
        submission = self.store.read(
            lambda tx: tx.ledger.submission(row.submission)
        )  # none of a run in persistent mode
        if submission is not None and submission.program in self._registry.names() and row.step is None:
            tool = next(
                (t for t in self._registry.get(submission.program).agent.tools if t.name == row.operation), None
            )
            if tool is not None:
                return encoder(tool)
        return reconciliation.plain

    # -- operation ------------------------------------------------------------------------------------------------------
    async def recover(self, *, thread: str | None = None) -> Recovered:
        """Recover every abandoned thread now, or one: mark what nobody knows, repair what records allow."""
        await self._allow("recover", thread=thread)
        drivers = self._worker.drivers if self._worker is not None else {}
        return await recovery.recover(self.host, drivers, thread=thread, bound=self._options.recovery_seconds)

    async def redrive(self, receipt: Receipt | str, *, by: str = "local", reason: str = "") -> bool:
        """Try a stuck submission again as recovery would; who asked and why is recorded.

        Returns:
            False if it is settled, a live owner has it, or a fault blocks its thread.
        """
        id = self._submission_id(receipt)
        await self._allow("redrive", submission=id)
        row = self._row(id)
        by, reason = _text(by, "by"), _text(reason, "reason", blank=True)
        return await recovery.redrive(self.host, row.id, row.thread_number, by=by, reason=reason)

    async def explain(self, receipt: Receipt | str) -> Explanation:
        """Where a submission stands, by which evidence, and what recovery would do. Writes nothing."""
        id = self._submission_id(receipt)
        await self._allow("explain", submission=id)
        from perdure.projections import audit  # rarely asked, and a fifth of what an import takes

        return await audit.explain(self.store, self._row(id), self._contracts(), self.host.clock.now())

    def _contracts(self) -> dict[str, dict[str, str]]:
        return {
            name: {tool.name: tool.contract for tool in self._registry.get(name).agent.tools}
            for name in self._registry.names()
        }

    async def verify(self, thread: str | None = None) -> Verification:
        """Check logs, chain, ledger and indexes against each other. True exactly when every check passed. Writes nothing."""
        await self._allow("verify", thread=thread)
        from perdure.projections import audit  # rarely asked, and a fifth of what an import takes

        return await audit.verify(self.store, thread)

    async def obligations(self, *, aging: float | str = "5m", overdue: float | str = "1h") -> list[Obligation]:
        """Every owed submission, also those in good order, with what it waits for and the command that helps."""
        await self._allow("obligations")
        return await obligations.obligations(
            self.store, self.host.clock.now(), parse_duration(aging, "aging"), parse_duration(overdue, "overdue")
        )

    async def runs(self, *, state: str | None = None, agent: str | None = None) -> list[RunView]:
        """Runs in order of admission."""
        await self._allow("runs")
        return await run.runs(self.store, state=state, program=agent)

    async def inspect(self, receipt: Receipt | str) -> RunView:
        """One run with its turns, calls, steps and settlement, read from the log."""
        id = self._submission_id(receipt)
        await self._allow("inspect", submission=id)
        return await run.inspect(self.store, self._row(id))

    async def threads(self) -> list[ThreadView]:
        """Threads in order of creation."""
        await self._allow("threads")
        return await thread.threads(self.store)

    async def archive(self, thread: str) -> None:
        """Hide a thread without open work from listings. New work on it brings it back.

        Raises:
            Conflict: it has open work.
        """
        await self._allow("archive", thread=thread)
        row = self.store.read(lambda tx: tx.ledger.thread(thread))
        if row is None:
            raise Invalid(f"There is no thread {thread!r}.", help="List them: perdure threads")
        now = self.host.clock.now()
        await self.store.write(Boundary.ARCHIVE, lambda tx: tx.ledger.archive(row.number, now))


_instead: dict[str, Any] = {}


@contextmanager
def opened_with(*, store: str | None = None, workers: int | None = None) -> Iterator[None]:
    """Until the block ends, :func:`open` takes these instead of its arguments; None leaves its own.

    For the command line, which makes a client of somebody else's app before anything of it runs.
    """
    given = {"store": store, "workers": workers}
    before = dict(_instead)
    _instead.update({name: value for name, value in given.items() if value is not None})
    try:
        yield
    finally:
        _instead.clear()
        _instead.update(before)


def _text(value: str, what: str, *, blank: bool = False) -> str:
    return approvals.check_text(value, what, blank=blank)


def open(
    store: str | Path | Store,
    *,
    agents: Iterable[AgentDefinition | Registration] = (),
    models: Mapping[str, Any] | None = None,
    workers: int = 64,
    recover: bool = True,
    recovery_timeout: float | str | dt.timedelta = "30s",
    lease: float | str | dt.timedelta = "10s",
    principal: str = "local",
    authorizer: Authorizer | None = None,
    clock: Clock | None = None,
    ids: Ids | None = None,
    create: bool = True,
) -> App:
    """Open a store and what runs on it. Use it as ``async with perdure.open(...) as app``.

    Args:
        store: a path, ``sqlite:///path`` or ``memory:``; or an open store, which is closed with the app.
        agents: agents (or ``Registration``) that may run here, found by their names.
        models: agent name to model, over the agent's own.
        workers: attempts at once, 0 to 1024. 0 opens a client: it admits, reads and administers, and runs nothing.
        recover: sweep blocked threads and due probes in the background.
        recovery_timeout: bound for one thread's recovery.
        lease: how long a claim outlives its owner; at least 50 ms. A liveness hint, never a proof.
        principal: on whose behalf work is admitted by default.
        authorizer: consulted before every operation.
        clock, ids: replace time and identity in tests.
        create: make the database when it does not exist.

    Raises:
        Invalid: an argument is out of range. Conflict: two definitions under one name.
        On entering: Unavailable, Corrupt, Incompatible, Invalid about the store.
    """
    store = _instead.get("store", store)
    if isinstance(store, bytes | bytearray | int | float | None):
        raise Invalid(f"The store is a {type(store).__name__}.", help="Give a path, sqlite:///path or memory:.")
    slots = _instead.get("workers", workers)
    if isinstance(slots, bool) or not isinstance(slots, int) or not 0 <= slots <= WORKERS_MAX:
        raise Invalid(f"workers is {slots!r}.", help=f"Give a whole number from 0 to {WORKERS_MAX}.")
    lease_seconds = parse_duration(lease, "lease")
    if lease_seconds < LEASE_SECONDS_MIN:
        raise Invalid(
            f"lease is {lease_seconds} s.", help=f"Give at least {LEASE_SECONDS_MIN} s; {LEASE_SECONDS} s is usual."
        )
    if isinstance(agents, AgentDefinition | Registration | str):
        raise Invalid(f"agents is one {type(agents).__name__}.", help="Give a list: agents=[agent].")
    registry = Registry()
    for agent in agents:
        registry.add(agent)
    unknown = set(models or {}) - set(registry.names())
    if unknown:
        raise Invalid(f"models names {', '.join(sorted(unknown))}, which no registered agent has.")
    options = _Options(
        slots, recover, parse_duration(recovery_timeout, "recovery_timeout"), _check_principal(principal)
    )
    return App(
        store, registry, models or {}, options, lease_seconds=lease_seconds, authorizer=authorizer or Authorizer(),
        clock=clock, id_source=ids, create=create,
    )  # fmt: skip


def _check_principal(value: str) -> str:
    return ids.check_id(value, "principal")
