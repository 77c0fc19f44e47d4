"""Batches and their bytes. The bytes as appended are the fact: nothing is re-encoded to verify.

A batch is the unit of the log: 1 to 256 records, gap-free sequence, one writer. Its tail digest is the SHA-256 of the
previous tail digest followed by its bytes, so each batch binds all history before it. A batch's identity is its place
(thread, first sequence); a record's is its sequence. One reader per version is kept for ever.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from perdure.errors import Corrupt, Incompatible
from perdure.limits import INLINE_BYTES_MAX
from perdure.records import effect, run, task, thread
from perdure.records.blobs import MARK, NONE, Blobs, moved_out, put_back

Record = (
    thread.ThreadCreated
    | thread.UserInputRecorded
    | thread.CancelRequested
    | thread.RepairAnnotated
    | thread.SubmissionSettled
    | run.RunStarted
    | run.ModelCallPrepared
    | run.ModelResponseRecorded
    | run.ModelResponseInterrupted
    | run.ModelCallFailed
    | run.ModelCallUnknown
    | run.ModelCallResolved
    | run.OutputRejected
    | run.RunCompleted
    | effect.ToolApprovalRequested
    | effect.ToolApprovalDecided
    | effect.ToolCallPrepared
    | effect.ToolStepPrepared
    | effect.ToolStepSettled
    | effect.ToolStepRefused
    | effect.ToolCallSettled
    | effect.ToolCallWithdrawn
    | effect.ToolCallUnknown
    | effect.ToolCallResolved
    | task.WorkflowStarted
    | task.TaskStarted
    | task.TaskRetryScheduled
    | task.TaskWaiting
    | task.TaskSettled
    | task.BudgetDenied
    | task.BudgetRaised
)

EMPTY_TAIL = bytes(32)
VERSION = 1


class Batch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One atomic append.

    Attributes:
        v: envelope version.
        thread: thread id.
        first: sequence of the first record, from 1.
        epoch: the writer's fencing epoch.
        worker: the writer's incarnation.
        at: microseconds since 1970, when it was encoded. Orders nothing.
        records: 1 to 256 records.
    """

    v: Literal[1]
    thread: str
    first: int
    epoch: int
    worker: str
    at: int
    records: tuple[Record, ...]

    @property
    def last(self) -> int:
        """Sequence of the last record."""
        return self.first + len(self.records) - 1


class _Version(msgspec.Struct):
    v: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Batch)
_version = msgspec.json.Decoder(_Version)


def encode(batch: Batch) -> bytes:
    """The bytes of a batch with every payload in its place."""
    return _encoder.encode(batch)


def encode_apart(batch: Batch) -> tuple[bytes, Blobs]:
    """The bytes of a batch, as they will be stored and digested, and the payloads that stand beside it."""
    body = _encoder.encode(batch)
    if len(body) <= INLINE_BYTES_MAX and MARK not in body:
        return body, NONE
    apart: dict[str, bytes] = {}
    records = tuple(moved_out(record, apart) for record in batch.records)
    return _encoder.encode(msgspec.structs.replace(batch, records=records)), apart


def decode(body: bytes, apart: Blobs = NONE) -> Batch:
    """The batch of stored bytes, with the payloads that stand beside it in their places.

    Raises:
        Incompatible: written by a newer format, or with a record kind or field this release does not know.
        Corrupt: not a batch at all, or a payload is missing or another.
    """
    try:
        batch = _decoder.decode(body)
    except msgspec.ValidationError as error:
        try:
            version = _version.decode(body).v
        except msgspec.MsgspecError:
            raise Corrupt(f"A stored batch is malformed: {error}.", help="Restore it from a backup.") from error
        what = f"format {version}" if version != VERSION else f"content this release does not know ({error})"
        raise Incompatible(f"A stored batch has {what}.", help="Open it with the release that wrote it.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"A stored batch is not JSON: {error}.", help="Restore it from a backup.") from error
    if MARK not in body:
        return batch
    return msgspec.structs.replace(batch, records=tuple(put_back(record, apart) for record in batch.records))


def chain(previous: bytes, body: bytes) -> bytes:
    """The tail digest after ``body``, given the one before it. 32 bytes each."""
    return hashlib.sha256(previous + body).digest()
