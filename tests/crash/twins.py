"""Negative controls: each switches one protection off, in a child process only, and the sweep must notice.

A twin whose sweep finds nothing means that the sweep is blind, or that the protection protects nothing.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perdure import ids
from perdure.agent.batch import Batch, start_call
from perdure.agent.loop import Interpreter
from perdure.clock import RandomIds
from perdure.engine import admission, approvals, cancellation, reconciliation
from perdure.engine.admission import Receipt
from perdure.engine.attempt import Attempt
from perdure.engine.host import Host
from perdure.engine.inference import ModelCalls
from perdure.engine.intents import VerdictBody
from perdure.errors import OwnershipLost
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Intent
from perdure.ports.log import Tail
from perdure.ports.provider import ModelError
from perdure.ports.store import Transaction
from perdure.records import codec
from perdure.records.effect import ToolCallSettled, ToolCallWithdrawn
from perdure.records.parts import Failure
from perdure.records.run import ModelCallFailed, model_place
from perdure.records.thread import CancelRequested
from perdure.rules import fold, plans
from perdure.stores.sqlite.ledger import SqliteLedger
from perdure.stores.sqlite.log import SqliteLog


@dataclass(frozen=True)
class Twin:
    """A protection switched off.

    Attributes:
        name: what is off. switch: does it, in the process that is about to play.
        scenario: where it must show. finding: words of a violation that must be among those found.
    """

    name: str
    switch: Callable[[], object]
    scenario: str
    finding: str


TWINS: list[Twin] = []


def twin(scenario: str, finding: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Make a function a twin of its name."""

    def add(switch: Callable[[], object]) -> Callable[[], object]:
        TWINS.append(Twin(switch.__name__.replace("_", " "), switch, scenario, finding))
        return switch

    return add


def patch(owner: Any, name: str, value: Any) -> Any:
    """Replace an attribute for the rest of this process. The one before."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return before


# -- who may write ------------------------------------------------------------------------------------------------------


@twin("slow owner comes back", "has 2 settlements")
def fence_off() -> None:
    """The append looks neither at epoch and token nor at where the log ends; the ledger's verbs look at nothing."""

    def append(
        self: SqliteLog, thread: int, epoch: int, token: int, expected: Tail, count: int, body: bytes, *_: object
    ) -> None:
        end = self.tail(thread)
        first = end.sequence + 1
        self._execute(
            "INSERT INTO batch (thread, first, last, epoch, tail, body) VALUES (?, ?, ?, ?, ?, ?)",
            (thread, first, first + count - 1, epoch, codec.chain(end.digest, body), body),
        )

    def end_effect(self: SqliteLedger, id: str, status: str, verdict: str | None, now: int | None) -> None:
        self._execute(
            "UPDATE effect SET status = ?, verdict = ?, ended_at = ? WHERE id = ?", (status, verdict, now, id)
        )

    patch(SqliteLog, "append", append)
    patch(SqliteLedger, "_fence", lambda *_: None)
    patch(SqliteLedger, "end_effect", end_effect)


@twin("slow owner comes back to a cancelled run", "People were told")
def settlement_not_conditional() -> None:
    """Who settles last wins: a settled submission can be settled again, by whom the log already refused."""

    def settle(self: SqliteLedger, thread: int, epoch: int, token: int, submission: str, outcome: str, *rest: Any,
               release: bool) -> None:  # fmt: skip
        failure, disposition, now = rest
        self._execute(
            "UPDATE submission SET state = 'settled', outcome = ?2, failure = ?3, disposition = ?4, settled_at = ?5,"
            " wake_at = NULL WHERE id = ?1",
            (submission, outcome, failure, disposition, now),
        )
        if release:
            self._leave(thread, epoch, token, now)
        else:
            self._refresh(thread, now)

    def append(self: SqliteLog, *args: Any) -> None:
        with contextlib.suppress(OwnershipLost):
            before(self, *args)

    before = patch(SqliteLog, "append", append)
    patch(SqliteLedger, "settle", settle)


@twin("plain answer", "was accepted and is gone")
def receipt_before_admission_is_durable() -> None:
    """The receipt is handed out while the commit is on its way."""

    async def admit(host: Host, *, program: str, principal: str, key: str, thread: str | None, **rest: Any) -> Receipt:
        place = thread or ids.keyed_thread_id(principal, program, key)
        submission = ids.submission_id(place, principal, key)
        host.spawn(before(host, program=program, principal=principal, key=key, thread=thread, **rest))
        return Receipt(submission, place, ids.run_id(submission), 1)

    before = patch(admission, "admit", admit)


# -- what is recorded before the world is touched -----------------------------------------------------------------------


def _nothing_rides(self: Interpreter, calls: Any, operations: Any, concurrency: int, records: Any, ops: Any) -> None:
    """No started record goes with the response."""
    self._prepared = []
    records += [
        ToolCallWithdrawn(self.attempt.run.id, operation.call, operation.rejected)
        for operation in operations
        if operation.rejected is not None
    ]


@twin("once tool", "took place 2 times")
def intent_after_dispatch() -> None:
    """The started record is appended when the body has returned."""

    async def lane(self: Batch, call: fold.Call | None, todo: deque[fold.Call]) -> None:
        while call is not None:
            outcome = await self._perform(call)
            tool = self.toolbox.tools[call.operation.tool]
            sequence = self.attempt.state.tail + 1
            record, op = start_call(
                self.attempt, call.id, tool, self._decoded(call), call.part, call.tries + 1, sequence
            )
            await self.attempt.append(Boundary.CALL_STARTED, [record], [op])
            records, ops, boundary = self._outcome(call, outcome)
            await self.attempt.append(boundary, records, ops)
            call = todo.popleft() if todo else None

    patch(Interpreter, "_prepare", _nothing_rides)
    patch(Batch, "_start", lambda *_: None)
    patch(Batch, "_lane", lane)


@twin("once tool", "took place 2 times")
def no_started_record() -> None:
    """Only outcomes are recorded."""
    patch(Interpreter, "_prepare", _nothing_rides)
    patch(Batch, "_start", lambda *_: None)


@twin("keyed tool", "was asked for under 2 keys")
def key_drawn_anew() -> None:
    """The key is drawn, not derived: each try has another."""
    patch(ids, "idempotency_key", lambda *_: RandomIds().fresh("key"))


# -- what is made of it afterwards --------------------------------------------------------------------------------------


@twin("once tools one after another", "effects became unknown")
def results_committed_at_the_end_of_a_batch() -> None:
    """The outcomes of a batch are kept until all of them are known."""

    async def lane(self: Batch, call: fold.Call | None, todo: deque[fold.Call]) -> None:
        kept: list[tuple[fold.Call, Any]] = []
        while call is not None:
            kept.append((call, await self._perform(call)))
            self._prepared.discard(call.id)
            call = todo.popleft() if todo else None
            if call is not None:
                records: list[Any] = []
                ops: list[Any] = []
                self._start(call, records, ops)
                await self.attempt.append(Boundary.CALL_STARTED, records, ops)
        for done, outcome in kept:
            records, ops, boundary = self._outcome(done, outcome)
            await self.attempt.append(boundary, records, ops)

    patch(Batch, "_lane", lane)


@twin("model that tries again", "took place 2 times")
def unknown_treated_as_failed() -> None:
    """A call whose owner died is answered with a failure."""

    def doubt(self: Batch, found: Any, records: list[Any], ops: list[Any]) -> None:
        for lost in found:
            records.append(ToolCallSettled(self.attempt.run.id, lost.call, failure=Failure("lost", "its worker died")))
            ops.append(lambda tx, effect=lost.effect: tx.ledger.end_effect(effect, "refused", None, 0))

    patch(Batch, "_doubt", doubt)


@twin("once tool", "took place 2 times")
def once_recovered_as_idempotent() -> None:
    """Recovery runs again whatever was started."""
    patch(plans, "_lost", lambda call, prepared, contract: plans.Rerun(call.id, "idempotent"))


@twin("once model", "took place 2 times")
def no_started_record_of_a_model_call() -> None:
    """A once model call is dispatched, and recorded when it has answered."""

    async def start(self: ModelCalls, run: fold.Run, request: Any, reserve: Any) -> Any:
        place = model_place(request.turn)
        return None, ids.idempotency_key(run.id, place, 1, place, 0)

    patch(ModelCalls, "_start", start)


@twin("once model", "took place 2 times")
def a_started_model_call_is_made_again() -> None:
    """Who takes over takes the lost call for one that never left."""

    async def recover(self: Interpreter, run: fold.Run, started: Any) -> Any:
        if run.model_prepared is not None:
            lost = run.model_prepared
            gone = Failure("model", "its worker died")
            failed = ModelCallFailed(run.id, lost.turn, lost.attempt, lost.model, "no", gone, effect=lost.effect)
            _ = self.attempt.append(
                Boundary.MODEL_FAILED, [failed], (lambda tx: tx.ledger.end_effect(lost.effect, "refused", None, 0),)
            )
        return await before(self, run, started)

    before = patch(Interpreter, "_recover_call", recover)


@twin("once model lost", "took place 2 times")
def a_lost_model_call_is_tried_again() -> None:
    """An unknown outcome of a model call is taken for a failure, and asked again."""

    async def failed(self: ModelCalls, run: Any, turn: int, error: ModelError, started: Any, reserve: Any) -> float:
        told = ModelError(error.message, dispatched="yes", retryable=True, retry_after=0.001)
        return await before(self, run, turn, told, started, reserve)

    before = patch(ModelCalls, "_failed", failed)


# -- what people said ---------------------------------------------------------------------------------------------------


@twin("cancel while running", "A cancel of")
def cancel_not_recorded_before_interruption() -> None:
    """A cancel interrupts the run at once and is written down by its settlement only."""
    living: weakref.WeakSet[Attempt] = weakref.WeakSet()

    def init(self: Attempt, *args: Any, **options: Any) -> None:
        before_init(self, *args, **options)
        living.add(self)

    async def settle(self: Attempt, outcome: Any, **rest: Any) -> Any:
        submission = self.submission
        if outcome == "cancelled" and submission is not None and self.run.cancel is None:
            rest["records"] = [CancelRequested(submission.id, "ann", "changed my mind")]
        return await before_settle(self, outcome, **rest)

    async def cancel(host: Host, submission: str, *, by: str, reason: str) -> Any:
        for attempt in list(living):
            if attempt.submission is not None and attempt.submission.id == submission:
                attempt.interrupt("cancel")
                return None
        return await before(host, submission, by=by, reason=reason)

    before_init = patch(Attempt, "__init__", init)
    before_settle = patch(Attempt, "settle", settle)
    before = patch(cancellation, "cancel", cancel)


@twin("verdict cancel run", "Stuck")
def verdict_and_cancel_in_two_commits() -> None:
    """The verdict that cancels a run is committed, and then the cancel."""

    class Without:
        """A ledger that leaves cancels for later."""

        def __init__(self, ledger: Any) -> None:
            self._ledger = ledger

        def __getattr__(self, name: str) -> Any:
            return getattr(self._ledger, name)

        def add_intent(self, intent: Intent) -> tuple[Intent, bool]:
            return (intent, True) if intent.kind == "cancel" else self._ledger.add_intent(intent)

    class Halved:
        def __init__(self, tx: Transaction) -> None:
            self.log = tx.log
            self.ledger = Without(tx.ledger)

    def verdict_only(tx: Transaction, *args: Any) -> Intent:
        return before_unit(Halved(tx), *args)

    async def submit(host: Host, body: VerdictBody, *, by: str, reason: str) -> Intent:
        intent = await before(host, body, by=by, reason=reason)
        if body.verdict == "cancel_run":
            await cancellation.cancel(host, intent.submission, by=by, reason=reason)
        return intent

    before_unit = patch(reconciliation, "_submit", verdict_only)
    before = patch(reconciliation, "submit", submit)


@twin("approval rejected", "nobody approved it")
def rejection_read_as_approval() -> None:
    """Whatever a person decides is taken for a yes."""
    before = approvals.decide

    async def decide(host: Host, id: str, decision: str, **said: Any) -> Any:
        return await before(host, id, "approved", **said)

    patch(approvals, "decide", decide)
