"""A history of every kind in a real store, written with the ledger's verbs and real records, as an engine would.

Thread ``shop`` holds a run that used everything, a parked one, a cancelled one with a late verdict, a suspended one and
one behind it; ``late`` a failed run, ``fresh`` one that nobody touched, ``notes`` a run that nobody owes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from perdure import canonical, ids
from perdure.engine.intents import STATUS, ApprovalBody, VerdictBody
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Admission, ApprovalRow, Claimed, EffectRow, Intent, Submission
from perdure.ports.log import Tail
from perdure.ports.store import Store, Transaction
from perdure.records import codec
from perdure.records.codec import Record
from perdure.records.effect import (
    ToolApprovalDecided,
    ToolApprovalRequested,
    ToolCallPrepared,
    ToolCallResolved,
    ToolCallSettled,
    ToolCallUnknown,
    ToolCallWithdrawn,
    ToolStepPrepared,
    ToolStepRefused,
    ToolStepSettled,
)
from perdure.records.parts import CallPart, Failure, TextPart, Usage
from perdure.records.run import (
    AcceptedLimits,
    ModelResponseRecorded,
    OutputRejected,
    RunCompleted,
    RunStarted,
    ToolOperation,
)
from perdure.records.thread import CancelRequested, SubmissionSettled, ThreadCreated, UserInputRecorded
from perdure.rules.recovery import result_digest

Op = Callable[[Transaction], object]
LEASE = 10**13
DEADLINE = 2_000_000_000_000_000
LIMITS = AcceptedLimits(16, 64, 60_000_000, 4, 3, 51_200)
ARGUMENTS = b'{"cents":5}'
DIGEST = canonical.digest_raw(ARGUMENTS)
CONTRACT = "contract"
_encode = msgspec.json.encode


class Script:
    """One thread and whoever owns it now. Time is a counter that moves with every unit."""

    clock = 1_700_000_000_000_000
    tokens = 0

    def __init__(self, store: Store, thread: str, program: str = "bank") -> None:
        self.store = store
        self.thread = thread
        self.program = program
        self.claimed: Claimed | None = None
        self.tail = Tail(0, codec.EMPTY_TAIL, 0)

    @classmethod
    def now(cls) -> int:
        cls.clock += 1_000
        return cls.clock

    async def do(self, *ops: Op) -> Any:
        def unit(tx: Transaction) -> Any:
            results = [op(tx) for op in ops]
            return results[0] if results else None

        return await self.store.write(Boundary.REPAIR, unit)

    async def admit(self, key: str, input: bytes = b'{"order": "o1"}') -> Submission:
        submission = ids.submission_id(self.thread, "local", key)
        wanted = Admission(
            submission, self.thread, ids.run_id(submission), "local", key, self.program, "d" * 64, input,
            canonical.digest_raw(input), self.now(),
        )  # fmt: skip
        row, _ = await self.do(lambda tx: tx.ledger.admit(wanted))
        return row

    async def claim(self) -> Submission | None:
        Script.tokens += 1
        now, token = self.now(), Script.tokens
        number = self.store.read(lambda tx: tx.ledger.open_thread(self.thread, now)).number
        claimed = await self.do(lambda tx: tx.ledger.claim_thread(number, "w_1", now, now + LEASE, token))
        assert claimed is not None
        self.claimed, self.tail = claimed, claimed.tail
        return claimed.submission

    @property
    def owner(self) -> Claimed:
        assert self.claimed is not None
        return self.claimed

    @property
    def fence(self) -> tuple[int, int, int]:
        return self.owner.number, self.owner.epoch, self.owner.token

    @property
    def next(self) -> int:
        return self.tail.sequence + 1

    async def append(self, records: Sequence[Record], *ops: Op) -> None:
        owner, expected = self.owner, self.tail
        batch = codec.Batch(1, self.thread, self.next, owner.epoch, "w_1", self.now(), tuple(records))
        body = codec.encode(batch)
        digest = codec.chain(expected.digest, body)
        await self.do(
            lambda tx: tx.log.append(owner.number, owner.epoch, owner.token, expected, len(records), body, digest), *ops
        )
        self.tail = Tail(batch.last, digest, batch.first)

    # -- a run --------------------------------------------------------------------------------------------------------
    async def begin(self, row: Submission, *, owed: bool = True) -> None:
        created: list[Record] = [] if self.tail.sequence else [ThreadCreated(self.program)]
        sequence = self.next + len(created)
        started = RunStarted(row.run, row.id, self.program, row.definition, DEADLINE, LIMITS, "You are a bank.")
        mark: list[Op] = [lambda tx: tx.ledger.apply_input(row.id, sequence)] if owed else []
        await self.append([*created, UserInputRecorded(row.id, row.run, Raw(row.input)), started], *mark)

    def effect(
        self, row: Submission, call: str, tool: str, effect_class: str = "once", *, step: str | None = None,
        tries: int = 1, business: str | None = None, at: int = 0,
    ) -> EffectRow:  # fmt: skip
        """The row of an effect whose started record is ``at`` places into the next batch."""
        id = ids.effect_id(row.run, call, tries, 0 if step is None else 1, step or tool, DIGEST)
        return EffectRow(
            id, self.owner.number, row.id, row.run, call, step, step or tool, "external_mutate", effect_class, "medium",
            f"key_{call}_{step}", business, "started", None, tries, self.next + at, self.now(), None,
        )  # fmt: skip

    def approval(self, row: Submission, call: str, tool: str, shown: bytes = ARGUMENTS) -> ApprovalRow:
        id = ids.approval_id(row.run, call, tool, "1", DIGEST)
        return ApprovalRow(
            id, self.owner.number, row.id, row.run, call, tool, shown, DIGEST, f"{tool} asks", self.now(), "pending"
        )

    async def settle(
        self, row: Submission, outcome: str, *before: Record, failure: Failure | None = None,
        output: bytes | None = None, disposition: str | None = None, unknown: tuple[str, ...] = (),
        release: bool = True, ops: Sequence[Op] = (), owed: bool = True,
    ) -> None:  # fmt: skip
        records, covers = list(before), None
        if output is not None:
            covers = result_digest(output, disposition)
            records.append(RunCompleted(row.run, Raw(output), covers, disposition))
        settled = SubmissionSettled(row.id, row.run, outcome, failure, covers, disposition, unknown)  # type: ignore[arg-type]
        raw, fence, now = None if failure is None else _encode(failure), self.fence, self.now()

        def settle(tx: Transaction) -> None:
            tx.ledger.settle(*fence, row.id, outcome, raw, disposition, now, release=release)

        await self.append([*records, settled], *ops, *([settle] if owed else []))

    async def release(self) -> None:
        fence, now = self.fence, self.now()
        await self.do(lambda tx: tx.ledger.release(*fence, now))

    async def command(self, kind: str, subject: str, row: Submission, body: bytes, by: str, reason: str) -> Intent:
        wanted = Intent(0, row.thread_number, row.id, kind, subject, body, by, reason, self.now())  # type: ignore[arg-type]
        intent, _ = await self.do(lambda tx: tx.ledger.add_intent(wanted))
        return intent

    def taken(self, intent: Intent) -> Op:
        now = self.now()
        return lambda tx: tx.ledger.mark_applied(intent.id, now)


def put(row: EffectRow) -> Op:
    return lambda tx: tx.ledger.put_effect(row)


def end(row: EffectRow, status: str, verdict: str | None = None) -> Op:
    now = Script.now()
    return lambda tx: tx.ledger.end_effect(row.id, status, verdict, now)


def prepared(row: EffectRow) -> ToolCallPrepared:
    return ToolCallPrepared(
        row.run, row.call, row.id, row.operation, row.effect_class, CONTRACT, row.key, Raw(ARGUMENTS), DIGEST,
        row.tries, row.business_key,
    )  # fmt: skip


def unknown(row: EffectRow, tool: str, reason: str = "its owner vanished") -> ToolCallUnknown:
    return ToolCallUnknown(row.run, row.call, row.id, tool, reason, row.step)


def operation(call: str, tool: str, effect: str = "once", **more: Any) -> ToolOperation:
    return ToolOperation(call, tool, effect, contract=CONTRACT, **more)


def response(row: Submission, turn: int, *operations: ToolOperation, text: str = "") -> ModelResponseRecorded:
    parts: list[Any] = [TextPart(text)] if text else []
    parts += [CallPart(o.tool, ARGUMENTS.decode(), f"toolu_{o.call}") for o in operations]
    finish = "tool_calls" if operations else "stop"
    return ModelResponseRecorded(row.run, turn, "scripted", tuple(parts), finish, Usage(10, 5), operations)


@dataclass
class Written:
    """What was written, by what tests ask about."""

    done: Submission  # completed, used everything
    parked: Submission  # its effect ``lost`` is unknown
    cancelled: Submission  # with an effect that stayed unknown and was refused later
    suspended: Submission  # its request ``asked`` is pending
    queued: Submission  # behind it
    failed: Submission
    fresh: Submission
    noted: Submission  # on ``notes``; never owed
    lost: EffectRow
    late: EffectRow
    step: EffectRow
    asked: ApprovalRow
    approved: ApprovalRow
    effects: dict[str, EffectRow]  # of ``done``, by call


async def everything(store: Store) -> Written:
    """Write all of it."""
    shop = Script(store, "shop")
    done, parked, cancelled, suspended, queued = [await shop.admit(f"k{n}") for n in range(1, 6)]
    effects, approved, step = await _done(shop, done)
    lost = await _parked(shop, parked)
    late = await _cancelled(shop, cancelled)
    asked = await _suspended(shop, suspended)
    late_script = Script(store, "late")
    failed = await late_script.admit("k1", b'"late"')
    await late_script.claim()
    await late_script.begin(failed)
    await late_script.settle(failed, "failed", failure=Failure("policy.duration", "The run reached its deadline."))
    fresh = await Script(store, "fresh").admit("k1", b"null")
    noted = await _noted(store)
    return Written(
        done, parked, cancelled, suspended, queued, failed, fresh, noted, lost, late, step, asked, approved, effects
    )


async def _done(s: Script, row: Submission) -> tuple[dict[str, EffectRow], ApprovalRow, EffectRow]:
    await s.claim()
    await s.begin(row)
    declared = response(
        row, 1, operation("1.0", "pay"), operation("1.1", "refund"), operation("1.2", "find", "observe"),
        ToolOperation("1.3", "nope", rejected=Failure("unknown_tool", "There is no tool 'nope'.")),
        operation("1.4", "publish", steps=True), operation("1.5", "big"), operation("1.6", "notify", "keyed"),
        text="I will.",
    )  # fmt: skip
    pay, refund = s.effect(row, "1.0", "pay", business="order-1", at=1), s.effect(row, "1.1", "refund", at=2)
    publish, notify = s.effect(row, "1.4", "publish", at=3), s.effect(row, "1.6", "notify", "keyed", at=4)
    big = s.approval(row, "1.5", "big", b'{"cents":5,"pin":"***"}')
    await s.append(
        [
            declared, prepared(pay), prepared(refund), prepared(publish), prepared(notify),
            ToolApprovalRequested(row.run, "1.5", big.id, "big", DIGEST, big.reason),
            ToolCallWithdrawn(row.run, "1.3", Failure("unknown_tool", "There is no tool 'nope'.")),
        ],
        *map(put, (pay, refund, publish, notify)), lambda tx: tx.ledger.put_approval(big),
    )  # fmt: skip
    await s.append(
        [
            ToolCallSettled(row.run, "1.0", Raw(b'{"receipt":"r1"}')),
            ToolCallSettled(row.run, "1.1", failure=Failure("refused", "no such order")),
            ToolCallSettled(row.run, "1.2", Raw(b"42")),
        ],
        end(pay, "confirmed"), end(refund, "refused"),
    )  # fmt: skip
    step = s.effect(row, "1.4", "publish", step="announce", at=1)
    await s.append(
        [
            ToolStepSettled(row.run, "1.4", "upload", Raw(b'"s3://x"')),
            ToolStepPrepared(row.run, "1.4", "announce", step.id, step.key, 1),
        ],
        put(step),
    )
    await s.append([ToolStepRefused(row.run, "1.4", "announce", Failure("refused", "closed"))], end(step, "refused"))
    again = s.effect(row, "1.4", "publish", step="announce", tries=2)
    await s.append([ToolStepPrepared(row.run, "1.4", "announce", again.id, again.key, 2)], put(again))
    await s.release()
    decision = _encode(ApprovalBody(big.id, row.run, "1.5", "approved", DIGEST))
    intent = await s.command("approval", big.id, row, decision, "ada", "fine")
    await s.claim()  # the first owner is gone: the step is of unknown outcome, the keyed call is tried again
    now = s.now()
    decide: Op = lambda tx: tx.ledger.decide_approval(big.id, "approved", "ada", "fine", now)  # noqa: E731
    await s.append(
        [
            unknown(again, "publish"),
            ToolApprovalDecided(row.run, "1.5", big.id, "approved", "ada", "fine"),
        ],
        end(again, "unknown"), decide, s.taken(intent),
    )  # fmt: skip
    body = VerdictBody(again.id, row.run, "1.4", "applied", "announce", Raw(b'"sent"'), None, Raw(b'{"row":3}'))
    verdict = await s.command("verdict", again.id, row, _encode(body), "bob", "seen")
    resolved = ToolCallResolved(
        row.run, "1.4", again.id, "applied", "bob", "seen", "announce", Raw(b'"sent"'), Raw(b'{"row":3}')
    )
    await s.append(
        [resolved, ToolStepSettled(row.run, "1.4", "announce", Raw(b'"sent"'))],
        end(again, STATUS["applied"], "applied"), s.taken(verdict),
    )  # fmt: skip
    second, publish2 = s.effect(row, "1.6", "notify", "keyed", tries=2), s.effect(row, "1.4", "publish", tries=2, at=1)
    paid = s.effect(row, "1.5", "big", at=2)
    await s.append(
        [prepared(second), prepared(publish2), prepared(paid)],
        end(notify, "unknown", "declared"), end(publish, "unknown", "declared"), *map(put, (second, publish2, paid)),
    )  # fmt: skip
    await s.append(
        [
            ToolCallSettled(row.run, "1.4", Raw(b"7")), ToolCallSettled(row.run, "1.5", Raw(b'"ok"')),
            ToolCallSettled(row.run, "1.6", Raw(b"null")),
        ],
        end(publish2, "confirmed"), end(paid, "confirmed"), end(second, "confirmed"),
    )  # fmt: skip
    await s.append([response(row, 2, text="12"), OutputRejected(row.run, 2, Failure("output", "expected an object"))])
    await s.settle(
        row, "completed", response(row, 3, text='{"paid": true}'), output=b'{"paid": true}', disposition="paid"
    )
    found = {
        "1.0": pay, "1.1": refund, "1.4": publish2, "1.4/1": publish, "1.5": paid, "1.6": second, "1.6/1": notify,
        "announce": again, "announce/1": step,
    }  # fmt: skip
    return found, big, again


async def _parked(s: Script, row: Submission) -> EffectRow:
    await s.claim()
    await s.begin(row)
    lost = s.effect(row, "1.0", "pay", business="order-2", at=1)
    await s.append([response(row, 1, operation("1.0", "pay")), prepared(lost)], put(lost))
    await s.append([unknown(lost, "pay", "the line went dead")], end(lost, "unknown"))
    fence, now = s.fence, s.now()
    assert await s.do(lambda tx: tx.ledger.park(*fence, row.id, DEADLINE, now))
    return lost


async def _cancelled(s: Script, row: Submission) -> EffectRow:
    await s.claim()
    await s.begin(row)
    late = s.effect(row, "1.0", "pay", business="order-3", at=1)
    await s.append(
        [response(row, 1, operation("1.0", "pay"), operation("1.1", "find", "observe")), prepared(late)], put(late)
    )
    intent = await s.command("cancel", row.id, row, b"{}", "ada", "enough")
    await s.append([CancelRequested(row.id, "ada", "enough")], s.taken(intent))
    await s.settle(
        row, "cancelled", unknown(late, "pay", "the run ended"),
        ToolCallWithdrawn(row.run, "1.1", Failure("cancelled", "The run was cancelled.")), unknown=(late.id,),
        release=False, ops=[end(late, "unknown")],
    )  # fmt: skip
    body = VerdictBody(late.id, row.run, "1.0", "refused", None, Raw(b"null"), Failure("refused", "never arrived"))
    verdict = await s.command("verdict", late.id, row, _encode(body), "bob", "no row")
    await s.append(
        [ToolCallResolved(row.run, "1.0", late.id, "refused", "bob", "no row")],
        end(late, "refused", "refused"), s.taken(verdict),
    )  # fmt: skip
    await s.release()
    return late


async def _suspended(s: Script, row: Submission) -> ApprovalRow:
    await s.claim()
    await s.begin(row)
    asked = s.approval(row, "1.0", "big")
    await s.append(
        [
            response(row, 1, operation("1.0", "big")),
            ToolApprovalRequested(row.run, "1.0", asked.id, "big", DIGEST, asked.reason),
        ],
        lambda tx: tx.ledger.put_approval(asked),
    )
    fence, now = s.fence, s.now()
    assert await s.do(lambda tx: tx.ledger.suspend(*fence, row.id, DEADLINE, now))
    return asked


async def _noted(store: Store) -> Submission:
    s = Script(store, "notes")
    now = s.now()
    await s.do(lambda tx: tx.ledger.open_thread("notes", now))
    await s.claim()
    row = Submission(
        "sub_unowed", "notes", s.owner.number, 0, "run_unowed", "local", None, "bank", "d" * 64, b'"hi"', "", "running",
        now, None, None, 0, 1, 0, None, None, None, None,
    )  # fmt: skip
    await s.begin(row, owed=False)
    pay = s.effect(row, "1.0", "pay", at=1)
    await s.append([response(row, 1, operation("1.0", "pay")), prepared(pay)], put(pay))
    await s.append([ToolCallSettled(row.run, "1.0", Raw(b"null"))], end(pay, "confirmed"))
    await s.settle(row, "completed", response(row, 2, text="hi"), output=b'"hi"', owed=False)
    await s.release()
    return row
