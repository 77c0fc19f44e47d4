"""Whether log, chain, ledger and the store's own file agree. Writes nothing and repairs nothing.

Every stored byte of a thread is read in one snapshot, and no row of the ledger is believed that the log can contradict.
What cannot be seen: a log cut back to an end that it once had and that the ledger still fits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from perdure import ids
from perdure.canonical import digest_raw
from perdure.engine.intents import decode_verdict
from perdure.errors import Corrupt, Error, Invalid
from perdure.limits import APPROVALS_MAX, FINDINGS_MAX, PAGE_BATCHES_MAX, PAGE_ROWS_MAX, SCAN_RECORDS_MAX
from perdure.ports.ledger import ApprovalRow, EffectRow, Intent, Submission, ThreadRow
from perdure.ports.store import Store, Transaction
from perdure.records import codec
from perdure.records.effect import ToolApprovalDecided, ToolApprovalRequested, ToolCallResolved
from perdure.records.run import ModelCallResolved, RunStarted
from perdure.records.thread import CancelRequested, SubmissionSettled, UserInputRecorded
from perdure.redaction import SHOWN
from perdure.rules import invariants
from perdure.rules.invariants import CHECKS, Check, Stored
from perdure.rules.lifecycle import ApprovalStatus, SubmissionState

AUDIT_CHECKS = {
    "ledger-bytes": "The admitted input is what its digest covers and, byte for byte, what the log holds.",
    "ledger-places": "Rows of the ledger name their own thread, run and submission; keyed ids are the derived ones.",
    "ledger-decisions": "Author, reason and arguments of an approval are those that were asked and decided.",
    "ledger-commands": "A command marked as taken in is in the log or had nothing left to decide, and says the same.",
    "ledger-ownership": "Fence, lease and due time fit the log and what is owed.",
}
STORE_CHECKS = {"store-integrity": "The store finds its own file in order."}


class ThreadCheck(Check, frozen=True):
    """One law and how the store stands to it. ``thread``: where it is broken; None when it is said of all of them."""

    thread: str | None = None


class Verification(msgspec.Struct, frozen=True):
    """Every check over everything that was read. True exactly when none failed.

    Attributes:
        checks: one for each law that held, and one for each thread that breaks a law.
        threads, records: how much was read.
    """

    checks: tuple[ThreadCheck, ...]
    threads: int
    records: int

    def __bool__(self) -> bool:
        return not self.failed()

    def failed(self) -> tuple[ThreadCheck, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")


async def verify(store: Store, thread: str | None = None) -> Verification:
    """Check logs, chain, ledger and the store's own file against each other. Writes nothing.

    Each thread is read in one snapshot, a page at a time; what is remembered of it is what folding it needs.

    Raises:
        Invalid: there is no such thread.
    """
    tally = _Tally()
    if thread is None:
        after: int | None = 0
        while after is not None:
            start = after
            try:
                after = await store.scan(lambda tx, start=start: _verify_from(tx, start, tally))  # type: ignore[misc]
            except Corrupt as error:
                tally.fail("store-integrity", None, error.message)
                break
        await _find_strays(store, tally)
    else:
        await store.scan(lambda tx: _verify_one(tx, thread, tally))
    await _integrity(store, tally)
    return tally.verification()


async def _integrity(store: Store, tally: _Tally) -> None:
    check = getattr(store, "integrity", None)
    if check is None:
        tally.skip("store-integrity", "the store has no check of its own")
        return
    try:
        problems = await check()
    except Error as error:
        problems = [error.message]
    for problem in problems:
        tally.fail("store-integrity", None, problem)


class _Tally:
    """What was found over all threads, in bounded space."""

    def __init__(self) -> None:
        self.threads = 0
        self.records = 0
        self._failed: list[ThreadCheck] = []
        self._unnamed = 0
        self._broken: set[str] = set()
        self._skipped: dict[str, tuple[int, str]] = {}

    def fail(self, name: str, thread: str | None, detail: str) -> None:
        self._broken.add(name)
        if len(self._failed) < FINDINGS_MAX:
            self._failed.append(ThreadCheck(name, "failed", detail, thread))
        else:
            self._unnamed += 1

    def skip(self, name: str, why: str) -> None:
        count, first = self._skipped.get(name, (0, why))
        self._skipped[name] = (count + 1, first)

    def verification(self) -> Verification:
        checks = []
        for name in CHECKS | AUDIT_CHECKS | STORE_CHECKS:
            if name in self._broken:
                continue
            if name in self._skipped:
                count, why = self._skipped[name]
                checks.append(ThreadCheck(name, "skipped", why if count == 1 else f"{why} (and {count - 1} more)"))
            else:
                checks.append(ThreadCheck(name, "passed"))
        checks += self._failed
        if self._unnamed:
            checks.append(ThreadCheck("more", "failed", f"{self._unnamed} more failed checks are not listed"))
        return Verification(tuple(checks), self.threads, self.records)


def stored_batches(tx: Transaction, thread: int) -> Iterator[Stored]:
    """Every stored batch of a thread in order, a page at a time."""
    after = 0
    while page := tx.log.read(thread, after, PAGE_BATCHES_MAX):
        for batch in page:
            yield batch.first, batch.last, batch.epoch, batch.tail, batch.body, batch.apart
        after = page[-1].first
        if len(page) < PAGE_BATCHES_MAX:
            return


def _verify_from(tx: Transaction, after: int, tally: _Tally) -> int | None:
    """Judge threads after a number, as many as one snapshot may take. The last one's number, None at the end."""
    until = tally.records + SCAN_RECORDS_MAX
    faults = {fault.thread for fault in tx.ledger.faults()}
    rows = tx.ledger.threads(after=after, limit=PAGE_ROWS_MAX)
    for row in rows:
        _Judge(tx, row, tally, blocked=row.number in faults).judge()
        after = row.number
        if tally.records >= until:
            return after
    return after if len(rows) == PAGE_ROWS_MAX else None


def _verify_one(tx: Transaction, thread: str, tally: _Tally) -> None:
    row = tx.ledger.thread(thread)
    if row is None:
        raise Invalid(f"There is no thread {thread!r}.", help="List them: perdure threads")
    blocked = any(fault.thread == row.number for fault in tx.ledger.faults())
    try:
        _Judge(tx, row, tally, blocked=blocked).judge()
    except Corrupt as error:
        tally.fail("store-integrity", thread, error.message)


async def _find_strays(store: Store, tally: _Tally) -> None:
    """Rows of effects and approvals to which no run of any thread leads."""
    after: str | None = ""
    try:
        while after is not None:
            start = after
            after = await store.scan(lambda tx, start=start: _stray_effects(tx, start, tally))  # type: ignore[misc]
        await store.scan(lambda tx: _stray_approvals(tx, tally))
    except Corrupt as error:
        tally.fail("store-integrity", None, error.message)


def _stray_effects(tx: Transaction, after: str, tally: _Tally) -> str | None:
    rows = tx.ledger.effects(after=after, limit=SCAN_RECORDS_MAX)
    owned = {run: tx.ledger.submission(run) is not None for run in {row.run for row in rows}}
    for row in rows:
        if not owned[row.run] and not _started_at(tx, row):
            tally.fail("ledger-places", None, f"effect {row.id!r} belongs to no run: {row.run!r}")
    return rows[-1].id if len(rows) == SCAN_RECORDS_MAX else None


def _started_at(tx: Transaction, row: EffectRow) -> bool:
    """Whether the log holds the start of an effect where its row says: that of a run nobody owes."""
    try:
        found = tx.log.read_from(row.thread, row.sequence, 1)
        records = codec.decode(found[0].body, found[0].apart).records if found else ()
    except Error:
        return True  # the check of that thread's bytes says so
    return any(getattr(record, "effect", None) == row.id for record in records)


def _stray_approvals(tx: Transaction, tally: _Tally) -> None:
    for row in tx.ledger.approvals(limit=APPROVALS_MAX):
        if tx.ledger.submission(row.run) is None and not _asked(tx, row):
            tally.fail("ledger-places", None, f"approval {row.id!r} belongs to no run: {row.run!r}")


def _asked(tx: Transaction, row: ApprovalRow) -> bool:
    """Whether the log of a thread holds a request: that of a run nobody owes. Reads all of it."""
    needle = msgspec.json.encode(row.id)
    return any(needle in body for *_, body, _ in stored_batches(tx, row.thread))


# Only batches that hold one of these are decoded a second time.
_NOTED = re.compile(
    rb'"kind":"(?:UserInputRecorded|RunStarted|ToolApprovalRequested|ToolApprovalDecided|CancelRequested'
    rb"|ToolCallResolved|ModelCallResolved|SubmissionSettled)/"
)


class _Noted(msgspec.Struct):
    """What the log says that rows repeat word for word."""

    last: int = 0
    epoch: int = 0
    inputs: dict[str, bytes] = msgspec.field(default_factory=dict)  # run -> SHA-256 of the input's bytes
    programs: dict[str, str] = msgspec.field(default_factory=dict)  # run -> program
    asked: dict[str, str] = msgspec.field(default_factory=dict)  # approval -> reason
    decided: dict[str, tuple[str, str, str]] = msgspec.field(default_factory=dict)  # approval -> decision, by, reason
    cancels: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict)  # submission -> by, reason
    # effect -> verdict, by, reason
    verdicts: dict[str, list[tuple[str, str, str]]] = msgspec.field(default_factory=dict)
    settled: set[str] = msgspec.field(default_factory=set)

    def take(self, record: codec.Record) -> None:
        match record:
            case UserInputRecorded():
                self.inputs[record.run] = hashlib.sha256(record.input).digest()
            case RunStarted():
                self.programs[record.run] = record.program
            case ToolApprovalRequested():
                self.asked[record.approval] = record.reason
            case ToolApprovalDecided():
                self.decided[record.approval] = (record.decision, record.by, record.reason)
            case CancelRequested():
                self.cancels[record.submission] = (record.by, record.reason)
            case ToolCallResolved() | ModelCallResolved():
                self.verdicts.setdefault(record.effect, []).append((record.verdict, record.by, record.reason))
            case SubmissionSettled():
                self.settled.add(record.submission)
            case _:
                pass


class _Judge:
    """One thread in one snapshot."""

    def __init__(self, tx: Transaction, row: ThreadRow, tally: _Tally, *, blocked: bool) -> None:
        self._tx = tx
        self._row = row
        self._tally = tally
        self._blocked = blocked
        self._noted = _Noted()
        self._first: dict[str, str] = {}
        self._open: list[Submission] = []
        self._runs: dict[str, None] = {}
        self._approvals: dict[str, str] = {}  # id -> status

    def judge(self) -> None:
        ledger = invariants.Ledger(
            _Lazy(self._submissions), _Lazy(self._effects), _Lazy(self._approval_rows), self._row.positions
        )
        report = invariants.check(self._row.id, self._batches(), ledger)
        self._tally.threads += 1
        self._tally.records += self._noted.last
        unreadable = ""
        for check in report:
            if check.status == "failed":
                self._tally.fail(check.name, self._row.id, check.detail)
            elif check.status == "skipped":
                self._tally.skip(check.name, f"thread {self._row.id!r}: {check.detail}")
                if check.name == "ledger-input":
                    unreadable = check.detail
        if unreadable:
            for name in AUDIT_CHECKS:
                self._tally.skip(name, f"thread {self._row.id!r}: {unreadable}")
            return
        self._intents()
        self._ownership()
        for name, detail in self._first.items():
            self._tally.fail(name, self._row.id, detail)

    def _fail(self, name: str, detail: str) -> None:
        self._first.setdefault(name, detail)

    # -- what is read -------------------------------------------------------------------------------------------------
    def _batches(self) -> Iterator[Stored]:
        noted = self._noted
        for stored in stored_batches(self._tx, self._row.number):
            _, noted.last, noted.epoch, _, body, apart = stored
            if _NOTED.search(body) is not None:
                try:
                    records = codec.decode(body, apart).records
                except Error:
                    records = ()  # the check of bytes says so
                for record in records:
                    noted.take(record)
            yield stored

    def _submissions(self) -> Iterator[Submission]:
        after = ""
        while page := self._tx.ledger.submissions(thread=self._row.number, after=after, limit=PAGE_ROWS_MAX):
            for row in page:
                self._submission(row)
                self._runs[row.run] = None
                slim = msgspec.structs.replace(row, input=b"")
                if row.state != SubmissionState.SETTLED:
                    self._open.append(slim)
                yield slim
            if len(page) < PAGE_ROWS_MAX:
                return
            after = page[-1].id

    def _effects(self) -> Iterator[EffectRow]:
        for run in {**self._runs, **dict.fromkeys(self._noted.inputs)}:
            after = ""
            while page := self._tx.ledger.effects(run=run, after=after, limit=PAGE_ROWS_MAX):
                for row in page:
                    if row.thread != self._row.number:
                        self._fail("ledger-places", f"effect {row.id!r} is on thread number {row.thread}")
                    yield row
                if len(page) < PAGE_ROWS_MAX:
                    break
                after = page[-1].id

    def _approval_rows(self) -> Iterator[ApprovalRow]:
        for run in {**self._runs, **dict.fromkeys(self._noted.inputs)}:
            for row in self._tx.ledger.approvals(run=run, limit=APPROVALS_MAX):
                self._approval(row)
                self._approvals[row.id] = row.status
                yield row

    # -- rows ---------------------------------------------------------------------------------------------------------
    def _submission(self, row: Submission) -> None:
        noted = self._noted
        try:
            covered = digest_raw(row.input) == row.input_digest
        except (Error, msgspec.MsgspecError):
            covered = False
        if not covered:
            self._fail("ledger-bytes", f"the input of {row.id!r} is not the one its digest covers")
        logged = noted.inputs.get(row.run)
        if logged is not None and logged != hashlib.sha256(row.input).digest():
            self._fail("ledger-bytes", f"the input of {row.id!r} is not the one in the log, byte for byte")
        program = noted.programs.get(row.run, row.program)
        if program != row.program:
            self._fail("ledger-places", f"{row.id!r} is of {row.program!r}; the log started {program!r}")
        if row.key is not None and row.id != ids.submission_id(self._row.id, row.principal, row.key):
            self._fail("ledger-places", f"{row.id!r} is not the id of key {row.key!r} of {row.principal!r}")
        settled = row.state == SubmissionState.SETTLED
        if settled != (row.outcome is not None) or settled != (row.settled_at is not None):
            self._fail("ledger-places", f"{row.id!r} is {row.state} with outcome {row.outcome}")
        applied = (SubmissionState.INPUT_APPLIED, SubmissionState.SUSPENDED, SubmissionState.UNKNOWN)
        if not settled and (row.state in applied) != (row.input_sequence is not None):
            self._fail("ledger-places", f"{row.id!r} is {row.state} and its input is marked at {row.input_sequence}")
        if row.attempt_tail > noted.last:
            self._fail(
                "ledger-ownership", f"{row.id!r} was claimed at record {row.attempt_tail}; the log ends at {noted.last}"
            )

    def _approval(self, row: ApprovalRow) -> None:
        where = f"approval {row.id!r}"
        if row.thread != self._row.number or row.submission != ids.submission_of(row.run):
            self._fail("ledger-places", f"{where} is on thread number {row.thread}, of {row.submission!r}")
        if not _shows(row):
            self._fail("ledger-decisions", f"{where} shows other arguments than its digest covers")
        if self._noted.asked.get(row.id, row.reason) != row.reason:
            self._fail("ledger-decisions", f"{where} gives another reason than it was asked with")
        decided = self._noted.decided.get(row.id)
        if decided is not None and decided[1:] != (row.by, row.decision_reason):
            self._fail("ledger-decisions", f"{where} names {row.by!r}; the log says {decided[1]!r}, {decided[2]!r}")
        if (row.status == ApprovalStatus.PENDING) != (row.decided_at is None):
            self._fail("ledger-decisions", f"{where} is {row.status} and was decided at {row.decided_at}")

    def _intents(self) -> None:
        for intent in self._tx.ledger.intents(self._row.number, pending=False):
            try:
                problem = self._intent(intent)
            except (msgspec.MsgspecError, KeyError, TypeError) as error:
                problem = f"has a malformed body ({error})"
            if problem:
                self._fail("ledger-commands", f"{intent.kind} of {intent.subject!r} by {intent.by!r} {problem}")

    def _intent(self, intent: Intent) -> str:
        """What is wrong with one command; empty when it fits the log."""
        noted, taken = self._noted, intent.applied_at is not None
        said: tuple[str, ...] = (intent.by, intent.reason)
        match intent.kind:
            case "cancel":
                logged: tuple[str, ...] | None = noted.cancels.get(intent.subject)
                moot = intent.subject in noted.settled
            case "approval":
                said = (msgspec.json.decode(intent.body)["decision"], *said)
                logged = noted.decided.get(intent.subject)
                moot = self._approvals.get(intent.subject, "") != ApprovalStatus.PENDING
            case "verdict":
                verdict = decode_verdict(intent.body).verdict
                said = (verdict, *said)
                given = noted.verdicts.get(intent.subject, [])
                logged = said if said in given else given[-1] if given else None
                moot = True  # an effect that is unknown and has no verdict is listed as open, whatever was commanded
        if logged is None:
            return "" if moot or not taken else "is marked as taken in, and the log does not hold it"
        if not taken:
            return "" if intent.kind == "verdict" else "is in the log, and not marked as taken in"
        return "" if logged == said else f"says {said}; the log says {logged}"

    # -- ownership ----------------------------------------------------------------------------------------------------
    def _ownership(self) -> None:
        row = self._row
        if row.epoch < self._noted.epoch:
            self._fail("ledger-ownership", f"epoch {row.epoch} is behind epoch {self._noted.epoch} of the log")
        if (row.owner is None) != (row.lease_until is None):
            self._fail("ledger-ownership", f"owner {row.owner!r} has the lease {row.lease_until}")
        if row.owner is not None:
            return
        running = [s.id for s in self._open if s.state == SubmissionState.RUNNING]
        if running:
            self._fail("ledger-ownership", f"{running[0]!r} is running and nobody owns its thread")
        waits = (SubmissionState.UNKNOWN, SubmissionState.SUSPENDED)
        pending = bool(self._tx.ledger.intents(row.number))
        head = next((s for s in self._open if s.state != SubmissionState.UNKNOWN), None)
        claimable = pending or (head is not None and (head.state not in waits or head.wake_at is not None))
        if claimable and row.due_at is None:
            self._fail("ledger-ownership", "work is owed and the thread is never due")
        if row.due_at is not None and not self._open and not pending:
            self._fail("ledger-ownership", "the thread is due and nothing is owed")


def _shows(row: ApprovalRow) -> bool:
    """Whether the shown arguments are the ones the digest covers, as far as redaction lets one see."""
    try:
        shown = msgspec.json.decode(row.arguments)
        if digest_raw(row.arguments) == row.digest:
            return True
    except (Error, msgspec.MsgspecError):
        return False
    return isinstance(shown, dict) and SHOWN in shown.values()


class _Lazy:
    """Rows that are read when they are looked at: after the last batch."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows())
