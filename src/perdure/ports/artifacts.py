"""The artifact port: files that tasks leave, kept by the digest of their bytes beside the database.

A file is ingested before its task completes: its bytes are durable and a lease of an hour keeps them. The transaction that
completes the task inserts the reference and ends the lease (``Ledger.keep_artifacts``), so a crash in between leaves at
most bytes that nobody refers to, which collection removes once their lease is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from perdure.ports.executor import Produced
from perdure.records.artifact import ArtifactRef


class Collected(msgspec.Struct, frozen=True):
    """What a collection found and did.

    Attributes:
        considered: blobs nobody refers to, older than asked. removed: of them. reclaimed_bytes: their size.
        temporary: stale partial files and untracked blobs that were removed beside them.
    """

    considered: int
    removed: int
    reclaimed_bytes: int
    temporary: int


class ArtifactStore(Protocol):
    """Keeps files by digest (``sha256:`` and hex)."""

    async def ingest(self, run: str, task: str, produced: Sequence[Produced]) -> tuple[ArtifactRef, ...]:
        """Make files durable and lease them for an hour. Again after a crash it gives the same references.

        Raises:
            Invalid: a file is none, is a link, or is over the limit; names it.
        """
        ...

    async def verify(self, digest: str) -> str | None:
        """Hash stored bytes again. What is wrong with them, or None."""
        ...

    async def export(self, digest: str, target: Path, *, overwrite: bool = False) -> None:
        """Verify bytes and write them to a file, all or nothing.

        Raises:
            Invalid: the file exists and may not be overwritten, or is a link. Corrupt: the bytes are missing or changed.
        """
        ...

    async def collect(self, older_than_days: float, *, dry_run: bool = False) -> Collected:
        """Remove what no task refers to, no lease keeps and is older than so many days."""
        ...
