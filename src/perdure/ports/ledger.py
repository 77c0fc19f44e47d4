"""The ledger port: what is owed. Mutable, audited; where it overlaps the log, the log wins and the ledger is repaired.

All verbs run inside a unit of work of the store, in the writer, synchronously; each is atomic with the unit. Instants
are arguments (microseconds since 1970): no verb reads a clock. Verbs that need a *fence* take ``(thread, epoch, token)``
and raise ``OwnershipLost`` when they are not the thread's current ones; the check is in the same statement as the write.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from perdure.ports.log import Tail
from perdure.records.artifact import ArtifactRef
from perdure.rules.accounting import Rate


class Admission(msgspec.Struct, frozen=True):
    """What is admitted. Equal admissions under one key are the same submission."""

    submission: str
    thread: str
    run: str
    principal: str
    key: str | None
    program: str
    definition: str
    input: bytes
    input_digest: str
    at: int


class Submission(msgspec.Struct, frozen=True):
    """One row of the ledger."""

    id: str
    thread: str
    thread_number: int
    position: int
    run: str
    principal: str
    key: str | None
    program: str
    definition: str
    input: bytes
    input_digest: str
    state: str
    created_at: int
    input_sequence: int | None  # marker: where the input stands in the log
    wake_at: int | None  # when a suspended or parked submission becomes claimable
    not_before: int  # backoff
    attempts: int  # in a row without progress
    attempt_tail: int  # tail at the newest claim
    outcome: str | None
    failure: bytes | None
    disposition: str | None
    settled_at: int | None


class WorkItem(msgspec.Struct, frozen=True):
    """What discovery needs of an open submission: identities, order, state. Never a payload."""

    submission: str
    thread: str
    thread_number: int
    position: int
    program: str
    state: str
    created_at: int


class Claimed(msgspec.Struct, frozen=True):
    """A granted ownership of one thread: the fence, the log's tail, what it was granted for."""

    number: int
    thread: str
    epoch: int
    token: int
    tail: Tail
    submission: Submission | None  # None: maintenance, there are only intents to take into the log
    intents: tuple[Intent, ...]
    lease_until: int
    superseded: bool  # an earlier owner never gave it back: it may have had a model call in flight


class ThreadRow(msgspec.Struct, frozen=True):
    """One thread as the ledger knows it."""

    number: int
    id: str
    created_at: int
    epoch: int
    owner: str | None
    lease_until: int | None
    due_at: int | None
    archived_at: int | None
    positions: int = 0  # queue positions given out: one submission each


IntentKind = Literal["cancel", "approval", "verdict"]


class Intent(msgspec.Struct, frozen=True):
    """A command on its way into a log: immutable, first wins per ``(kind, subject)``.

    ``subject`` is the submission (cancel), the approval id (approval) or the effect id (verdict; with ``#n`` behind it for
    the nth on an effect that is open again); ``body`` is JSON.
    """

    id: int
    thread: int
    submission: str | None
    kind: IntentKind
    subject: str
    body: bytes
    by: str
    reason: str
    at: int
    applied_at: int | None = None


class EffectRow(msgspec.Struct, frozen=True):
    """One effect as the ledger lists it. What it repeats of the log is re-derived and compared by ``verify``."""

    id: str
    thread: int
    submission: str
    run: str
    call: str
    step: str | None
    operation: str
    kind: str
    effect_class: str
    risk: str
    key: str
    business_key: str | None
    status: str
    verdict: str | None
    tries: int
    sequence: int  # of its started record
    started_at: int
    ended_at: int | None
    next_probe_at: int | None = None
    held_by: str | None = None
    held_until: int | None = None


class ApprovalRow(msgspec.Struct, frozen=True):
    """One approval request. ``arguments`` is redacted JSON; ``digest`` covers the exact arguments."""

    id: str
    thread: int
    submission: str
    run: str
    call: str
    tool: str
    arguments: bytes
    digest: str
    reason: str
    asked_at: int
    status: str
    by: str | None = None
    decision_reason: str | None = None
    decided_at: int | None = None


class ArtifactRow(msgspec.Struct, frozen=True):
    """One reference to a file in the artifact store; ``path`` and what follows are empty for a blob without any."""

    digest: str
    size: int
    created_at: int
    verified_at: int | None
    run: str = ""
    task: str = ""
    path: str = ""
    name: str = ""
    media_type: str = ""
    leased_until: int | None = None


class MemoryRow(msgspec.Struct, frozen=True):
    """One entry of long-term memory: its JSON, the text that is searched, its vector as little-endian float32."""

    namespace: str
    key: str
    entry: bytes
    text: str
    vector: bytes
    updated_at: int
    expires_at: int | None = None


class Fault(msgspec.Struct, frozen=True):
    """Why a thread is blocked. It never settles work and never proves that an effect failed."""

    thread: int
    thread_id: str
    kind: str
    message: str
    first_at: int
    last_at: int
    tries: int
    next_at: int


class Ledger(Protocol):
    """The verbs of what is owed."""

    # -- admission ------------------------------------------------------------------------------------------------
    def admit(self, admission: Admission) -> tuple[Submission, bool]:
        """Create the thread row if absent and one owed submission, at the end of its thread's queue.

        Returns the row and whether it was replayed. The same key with the same program and input digest returns the
        original row for ever, also after settlement.

        Raises:
            Conflict: the key was used with another input or program; the message names both.
        """
        ...

    def open_thread(self, thread: str, now: int) -> ThreadRow:
        """The row of a thread, made if absent: a place for history that owes nothing."""
        ...

    def submission(self, id: str) -> Submission | None:
        """The row of a submission id or of a run id. Strongly consistent."""
        ...

    # -- ownership ------------------------------------------------------------------------------------------------
    def claim(
        self, owner: str, programs: Collection[str] | None, limit: int, now: int, lease_until: int, tokens: list[int]
    ) -> list[Claimed]:
        """Grant up to ``limit`` due threads, oldest due first, each at epoch + 1 with a token of ``tokens``.

        Granted are threads that no live lease holds, that no fault blocks, and that have an eligible submission of
        one of ``programs`` (None: any) or intents to take in. Eligible is the lowest position that is not settled,
        passing parked ones without a due wake, stopping at a suspended one without a due wake. At most one live
        lease per thread.
        """
        ...

    def claim_thread(
        self,
        thread: int,
        owner: str,
        now: int,
        lease_until: int,
        token: int,
        *,
        blocked: bool = False,
        work: bool = False,
    ) -> Claimed | None:
        """Grant one thread if no live lease holds it, whatever is due on it; None otherwise. It starts no submission.

        Never bumps the epoch of a live owner. ``blocked``: also when a fault blocks it (recovery only). ``work``: as
        :meth:`claim` would, but this thread alone: only what is due on it, and its submission is started.
        """
        ...

    def renew(self, owner: str, lease_until: int) -> int:
        """Extend every claim of ``owner``, also an expired one that nobody took. Returns how many it still holds."""
        ...

    def release(self, thread: int, epoch: int, token: int, now: int, *, not_before: int = 0) -> None:
        """End ownership; the submission goes back to ready or input-applied. Fenced; a lost fence is no error here.

        ``not_before`` delays the next claim (backoff).
        """
        ...

    # -- progress (fenced by the append in the same unit) -----------------------------------------------------------
    def apply_input(self, submission: str, sequence: int) -> None:
        """Mark the input as canonical at ``sequence``. Idempotent at the same place.

        Raises:
            Corrupt: marked at another place.
        """
        ...

    def suspend(self, thread: int, epoch: int, token: int, submission: str, wake_at: int | None, now: int) -> bool:
        """End ownership and wait for decisions, as a barrier. Fenced.

        A decision recorded before this commits is seen, a cancel also when it is in the log already: then the
        submission stays claimable and False is returned. ``wake_at`` is a durable timer (the run's deadline).
        """
        ...

    def park(self, thread: int, epoch: int, token: int, submission: str, wake_at: int | None, now: int) -> bool:
        """End ownership with an unknown open; later work may pass. Otherwise as :meth:`suspend`."""
        ...

    def settle(
        self,
        thread: int,
        epoch: int,
        token: int,
        submission: str,
        outcome: str,
        failure: bytes | None,
        disposition: str | None,
        now: int,
        *,
        release: bool,
    ) -> None:
        """Make a submission terminal. Fenced. Idempotent with the same outcome.

        With ``release`` the ownership ends in the same statement group; otherwise the claim goes on (queued work was
        cancelled behind a running one).

        Raises:
            Conflict: settled with another outcome; the stored one stands.
        """
        ...

    def settled_among(self, submissions: Collection[str]) -> list[str]:
        """Which of these submissions are settled."""
        ...

    def next_due(self, programs: Collection[str] | None, now: int) -> int | None:
        """The next instant at which :meth:`claim` may grant something, None if nothing is waiting."""
        ...

    # -- intents --------------------------------------------------------------------------------------------------
    def add_intent(self, intent: Intent) -> tuple[Intent, bool]:
        """Record a command; needs no fence. First wins per (kind, subject): the stored one and whether it is new.

        Wakes what it decides: a cancel makes its submission claimable at once, whatever it waits for; an approval when no
        other of the submission is pending; a verdict when no other unknown of the submission is open without one. A
        workflow, whose branches go on by themselves, is woken by any of them.
        """
        ...

    def intents(self, thread: int, *, pending: bool = True) -> list[Intent]:
        """Intents of a thread in order of arrival, only those not yet in the log by default."""
        ...

    def pending_intents(self, limit: int = 1000) -> list[Intent]:
        """Intents of every thread that are not yet in a log, in order of arrival."""
        ...

    def mark_applied(self, intent: int, now: int) -> None:
        """The intent is in the log (same unit as its record). A thread that was due for it alone is due no more."""
        ...

    # -- effects and approvals --------------------------------------------------------------------------------------
    def put_effect(self, row: EffectRow) -> None:
        """Insert an effect's row (same unit as its record). Each try of a call is an effect of its own."""
        ...

    def end_effect(self, id: str, status: str, verdict: str | None, now: int | None) -> None:
        """Set an effect's status and verdict (same unit as its record). ``now`` None leaves ``ended_at``.

        Raises:
            Conflict: the lifecycle table does not let it come to this status from where it is.
        """
        ...

    def effect(self, id: str) -> EffectRow | None:
        """One effect."""
        ...

    def effects(
        self, *, status: str | None = None, run: str | None = None, limit: int = 1000, after: str = ""
    ) -> list[EffectRow]:
        """Effects ordered by start then id. ``unknown`` lists those without a verdict: the open ones."""
        ...

    def open_business_key(self, operation: str, business_key: str) -> EffectRow | None:
        """The started or unknown effect of an operation on the same business object, on any thread, if any.

        At most one can exist: a second :meth:`put_effect` raises ``Conflict``.
        """
        ...

    def hold_effect(self, id: str, owner: str | None, until: int | None) -> None:
        """Say that a body of this effect still runs in ``owner``; its renewals extend ``until``. None ends it."""
        ...

    def due_probes(self, now: int, limit: int = 100) -> list[EffectRow]:
        """Open unknowns whose probe is to be asked now, oldest first."""
        ...

    def schedule_probe(self, id: str, at: int) -> None:
        """When the probe of an unknown effect is asked next."""
        ...

    def put_approval(self, row: ApprovalRow) -> None:
        """Insert an approval request (same unit as its record). Idempotent."""
        ...

    def decide_approval(self, id: str, status: str, by: str, reason: str, now: int) -> None:
        """Close an approval request (same unit as its record)."""
        ...

    def approval(self, id: str) -> ApprovalRow | None:
        """One approval request."""
        ...

    def approvals(self, *, status: str | None = None, run: str | None = None, limit: int = 1000) -> list[ApprovalRow]:
        """Approval requests, oldest first."""
        ...

    # -- models -----------------------------------------------------------------------------------------------------
    def take_model_turn(self, model: str, now: int, tokens: int, rate: Rate) -> int:
        """Count one call of ``model`` that reserves ``tokens``, if its rate has room for it now.

        All callers of this verb on one database share the rate, in whatever process they are; in any stretch of time no
        more is counted than a minute's worth and what the rate grants in that stretch. It reads before it writes, so it
        is never a ``single`` unit.

        Returns:
            0: counted, the call may be dispatched. Else nothing is counted, for requests nor for tokens, and this is
            the instant at which to ask again; asked then it is granted, unless somebody took something or a hold was
            set meanwhile. A model that is held has no room.
        """
        ...

    def correct_model_turn(self, model: str, now: int, reserved: int, used: int, rate: Rate) -> None:
        """After a call that was counted with ``reserved`` tokens: count what it ``used`` instead, once.

        The difference is given back as far as that makes no more room than a whole minute's; use beyond the reservation
        makes later calls wait.
        """
        ...

    def hold_model(self, model: str, until: int) -> None:
        """The provider asked everybody to wait: nobody is granted a turn before ``until``. It is never brought forward."""
        ...

    def model_held_until(self, model: str) -> int:
        """Until when the model is held, 0 if it never was; it may be past. One row is read."""
        ...

    # -- workflows --------------------------------------------------------------------------------------------------
    def put_plan(self, digest: str, body: bytes) -> None:
        """Keep a compiled plan by the digest of its bytes. Idempotent."""
        ...

    def plan(self, digest: str) -> bytes | None:
        """The bytes of a plan."""
        ...

    def charge_lineage(
        self, lineage: str, effect: str, amounts: Mapping[str, int], limits: Mapping[str, int]
    ) -> tuple[str, int] | None:
        """Charge a lineage for one effect, all units or none. The same effect again changes nothing.

        Every run of the lineage, in whatever process, shares what is left of ``limits``. Equality is allowed.

        Returns:
            None: charged. Else the unit that would go over and what is charged of it.
        """
        ...

    def correct_lineage(self, lineage: str, effect: str, amounts: Mapping[str, int]) -> None:
        """Replace what an effect was charged by what it really used."""
        ...

    # -- artifacts --------------------------------------------------------------------------------------------------
    def lease_artifacts(self, run: str, task: str, refs: Sequence[ArtifactRef], now: int, until: int) -> None:
        """Their bytes are durable: keep them until the task's end refers to them, or until this instant. Idempotent."""
        ...

    def keep_artifacts(self, run: str, task: str, refs: Sequence[ArtifactRef], now: int) -> None:
        """The task ended and refers to them; their leases end (same unit as its record)."""
        ...

    def artifacts(
        self, *, run: str | None = None, task: str | None = None, digest: str | None = None, limit: int = 1000
    ) -> list[ArtifactRow]:
        """References, by run, task and path; of a blob nobody refers to there is one with empty run and task."""
        ...

    def verified_artifact(self, digest: str, now: int) -> None:
        """Its bytes were hashed again and are right."""
        ...

    def loose_artifacts(self, before: int, now: int) -> list[tuple[str, int]]:
        """Digest and size of blobs that no reference and no lease at ``now`` keeps, made before an instant."""
        ...

    def drop_artifacts(self, digests: Collection[str], now: int) -> list[str]:
        """Forget blobs that nothing keeps now. Returns those that were forgotten."""
        ...

    # -- long-term memory -------------------------------------------------------------------------------------------
    def put_memory(self, row: MemoryRow) -> None:
        """Keep an entry; an earlier one under its namespace and key is replaced."""
        ...

    def memory(self, namespace: str, key: str, now: int) -> MemoryRow | None:
        """An entry that has not expired."""
        ...

    def memories(self, namespace: str, now: int, *, after: str = "", limit: int = 1000) -> list[MemoryRow]:
        """Entries of a namespace that have not expired, by key, after a key."""
        ...

    def forget_expired(self, now: int) -> int:
        """Remove entries that have expired; how many."""
        ...

    # -- live events --------------------------------------------------------------------------------------------------
    # Provisional, for whoever watches from another process. Nothing depends on them; losing every one loses no work.
    def watch_events(self, submission: str, watcher: str, until: int) -> None:
        """``watcher``, a process, wants the live events of a submission until this instant; 0: no longer."""
        ...

    def watched_events(self, watcher: str, now: int) -> list[str]:
        """Submissions whose live events somebody other than ``watcher`` wants now."""
        ...

    def put_events(self, submission: str, producer: str, body: bytes, now: int) -> None:
        """Leave live events for other processes. What is older than ``LIVE_EVENTS_SECONDS`` goes with it."""
        ...

    def events_after(self, submission: str, reader: str, after: int) -> list[tuple[int, bytes]]:
        """Live events that other processes than ``reader`` left, by number, after a number; at most ``PAGE_ROWS_MAX``."""
        ...

    # -- discovery and operation --------------------------------------------------------------------------------------
    def thread(self, id: str | int) -> ThreadRow | None:
        """One thread by id or number."""
        ...

    def threads(self, *, after: int = 0, limit: int = 1000) -> list[ThreadRow]:
        """Threads by number."""
        ...

    def open_work(self, *, after: int = 0, limit: int = 1000, thread: int | None = None) -> list[WorkItem]:
        """Submissions that are not settled, by (thread, position). Never reads a payload."""
        ...

    def abandoned(self, now: int, limit: int = 100) -> list[ThreadRow]:
        """Threads whose owner let its lease lapse, oldest lease first."""
        ...

    def submissions(
        self, *, thread: int | None = None, state: str | None = None, after: str = "", limit: int = 1000
    ) -> list[Submission]:
        """Submissions in order of admission. ``after``: the id of the last one of the page before."""
        ...

    def put_fault(self, fault: Fault) -> None:
        """Block a thread. It cannot be claimed until :meth:`clear_fault`."""
        ...

    def clear_fault(self, thread: int, now: int) -> None:
        """Unblock a thread; what is due on it becomes claimable."""
        ...

    def faults(self) -> list[Fault]:
        """Every blocked thread."""
        ...

    def redrive(self, submission: str, now: int) -> bool:
        """Make an open submission claimable now, its counters reset. False if it is settled or held."""
        ...

    def repair_due(self, thread: int, now: int) -> None:
        """Recompute when a thread is due from its rows. Idempotent; used by recovery."""
        ...

    def archive(self, thread: int, now: int) -> None:
        """Hide a thread without open work from listings.

        Raises:
            Conflict: it has open work.
        """
        ...
