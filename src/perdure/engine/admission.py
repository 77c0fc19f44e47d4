"""One door in: the only way to create owed work. A receipt is returned only after admission is durable."""

from __future__ import annotations

import msgspec

from perdure import ids
from perdure.canonical import digest_raw
from perdure.engine.host import Host
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Admission


class Receipt(msgspec.Struct, frozen=True):
    """Proof that work was durably admitted and is owed one settlement. Carries no authority.

    Attributes:
        submission: id of the submission. thread: its thread. run: its run's id.
        position: place in the thread's queue, from 1.
    """

    submission: str
    thread: str
    run: str
    position: int


async def admit(
    host: Host,
    *,
    program: str,
    definition: str,
    input: bytes,
    principal: str,
    thread: str | None,
    key: str | None,
) -> Receipt:
    """Admit one submission. The same key with the same input gives the same receipt, for ever.

    Args:
        input: JSON bytes, already validated by the program's codec.
        thread: queue to join; with a key and no thread it is derived from principal, program and key.
        key: the caller's idempotency key, scoped by thread and principal.

    Raises:
        Invalid: an id breaks the rule for ids. Conflict: the key was used for other work.
        Unavailable: nothing was admitted, or the reply was lost; repeat with the same key.
    """
    ids.check_id(principal, "principal")
    if thread is not None:
        ids.check_id(thread, "thread")
    if key is not None:
        ids.check_id(key, "key")
    if thread is None:
        thread = host.ids.fresh("thread") if key is None else ids.keyed_thread_id(principal, program, key)
    submission = host.ids.fresh("sub") if key is None else ids.submission_id(thread, principal, key)
    admission = Admission(
        submission=submission,
        thread=thread,
        run=ids.run_id(submission),
        principal=principal,
        key=key,
        program=program,
        definition=definition,
        input=input,
        input_digest=digest_raw(input),
        at=host.clock.now(),
    )
    row, _ = await host.store.write(Boundary.ADMIT, lambda tx: tx.ledger.admit(admission))
    host.wake()
    return Receipt(row.id, row.thread, row.run, row.position)
