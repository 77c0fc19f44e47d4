"""Artifacts as files beside the database: by the digest of their bytes, read-only, each there once.

A file is copied to a temporary one while it is hashed, synchronised, and linked under its digest; what is there already is
verified instead. All who ingest, verify, export or collect hold one lock, across processes. What is collected goes to a
trash folder first, and comes back when the database still knows it at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import mimetypes
import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from perdure.clock import Clock, seconds
from perdure.errors import Corrupt, Invalid
from perdure.limits import ARTIFACT_BYTES_MAX, ARTIFACT_CHUNK_BYTES, ARTIFACT_LEASE_SECONDS
from perdure.ports.artifacts import Collected
from perdure.ports.executor import Produced
from perdure.ports.failpoints import Boundary
from perdure.ports.store import Store
from perdure.records.artifact import ArtifactRef

_DAY = 86_400.0


class FileArtifacts:
    """Implements ``ports.artifacts.ArtifactStore`` in a folder.

    Args:
        root: the folder; made when the first file is kept.
        limit: bytes a file may have.
        step: called between the steps of an ingestion with their names, by tests.
    """

    def __init__(
        self,
        root: Path,
        store: Store,
        clock: Clock,
        *,
        limit: int = ARTIFACT_BYTES_MAX,
        step: Callable[[str], None] | None = None,
    ) -> None:
        self.root = root
        self._store = store
        self._clock = clock
        self._limit = limit
        self._step = step or (lambda name: None)
        self._thread = threading.Lock()
        self._recovered = False

    @classmethod
    def beside(cls, store: Store, clock: Clock) -> FileArtifacts:
        """The artifacts of a database: the folder ``artifacts`` beside its file; of one in memory a temporary one."""
        path = str(getattr(store, "path", "") or ":memory:")
        if path == ":memory:":
            return cls(Path(tempfile.mkdtemp(prefix="perdure-artifacts-")), store, clock)
        return cls(Path(path).resolve().parent / "artifacts", store, clock)

    # -- places -------------------------------------------------------------------------------------------------------
    def place(self, digest: str) -> Path:
        """Where the bytes of a digest are.

        Raises:
            Invalid: it is no digest.
        """
        kind, _, name = digest.partition(":")
        if kind != "sha256" or len(name) != 64 or set(name) - set("0123456789abcdef"):
            raise Invalid(f"{digest[:100]!r} is no digest of an artifact.", help="It reads sha256: and 64 hex digits.")
        return self.root / "sha256" / name[:2] / name

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """The one lock of all processes on this folder. Blocks."""
        with self._thread:
            for folder in ("sha256", "tmp", "trash"):
                (self.root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            with (self.root / ".lock").open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not self._recovered:
                    self._recover()
                    self._recovered = True
                yield

    def _recover(self) -> None:
        """A collection that was interrupted: what the database knows comes back, the rest goes."""
        for path in (self.root / "trash").iterdir():
            digest = "sha256:" + path.name
            if self._store.read(lambda tx, digest=digest: tx.ledger.artifacts(digest=digest, limit=1)):  # type: ignore[misc]
                target = self.place(digest)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                path.rename(target)
                _sync(target.parent)
            else:
                path.unlink()

    # -- keeping ------------------------------------------------------------------------------------------------------
    async def ingest(self, run: str, task: str, produced: Sequence[Produced]) -> tuple[ArtifactRef, ...]:
        """See ``ports.artifacts.ArtifactStore.ingest``."""
        refs = await asyncio.to_thread(self._ingest_all, produced)
        now = self._clock.now()
        until = now + seconds(ARTIFACT_LEASE_SECONDS)
        await self._store.write(
            Boundary.ARTIFACT_LEASED, lambda tx: tx.ledger.lease_artifacts(run, task, refs, now, until)
        )
        return refs

    def _ingest_all(self, produced: Sequence[Produced]) -> tuple[ArtifactRef, ...]:
        with self._locked():
            return tuple(sorted((self._ingest(one) for one in produced), key=lambda ref: ref.path))

    def _ingest(self, one: Produced) -> ArtifactRef:
        temporary = self.root / "tmp" / secrets.token_hex(16)
        try:
            with temporary.open("xb") as target:
                if one.path is None:
                    digest, size = _copy(iter([one.data]), target, self._limit, one.name)
                else:
                    with _regular(one.path) as source:
                        digest, size = _copy(_chunks(source), target, self._limit, one.name)
                target.flush()
                self._step("copied")
                os.fsync(target.fileno())
            temporary.chmod(0o400)
            self._put(temporary, digest)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        media = one.media_type or mimetypes.guess_type(one.name)[0] or "application/octet-stream"
        return ArtifactRef(one.name, digest, size, media, Path(one.name).name)

    def _put(self, temporary: Path, digest: str) -> None:
        target = self.place(digest)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        self._step("synced")
        try:
            os.link(temporary, target)
        except FileExistsError:
            if self._check(digest) is None:
                return
            temporary.replace(target)  # what was there is damaged; these bytes are right
        self._step("linked")
        _sync(target.parent)
        _sync(self.root / "sha256")

    # -- checking -----------------------------------------------------------------------------------------------------
    def _check(self, digest: str) -> str | None:
        path = self.place(digest)
        try:
            with _regular(path) as file:
                found = hashlib.sha256()
                for piece in _chunks(file):
                    found.update(piece)
        except (Invalid, OSError):
            return f"its bytes are missing: {path}"
        return None if digest == "sha256:" + found.hexdigest() else f"its bytes are not those of its digest: {path}"

    async def verify(self, digest: str) -> str | None:
        """See ``ports.artifacts.ArtifactStore.verify``."""

        def check() -> str | None:
            with self._locked():
                return self._check(digest)

        wrong = await asyncio.to_thread(check)
        if wrong is None:
            now = self._clock.now()
            await self._store.write(Boundary.ARTIFACT_LEASED, lambda tx: tx.ledger.verified_artifact(digest, now))
        return wrong

    async def export(self, digest: str, target: Path, *, overwrite: bool = False) -> None:
        """See ``ports.artifacts.ArtifactStore.export``."""
        await asyncio.to_thread(self._export, digest, target, overwrite)

    def _export(self, digest: str, target: Path, overwrite: bool) -> None:
        if target.is_symlink():
            raise Invalid(f"{str(target)!r} is a link.", help="Name a file.")
        if target.exists() and not overwrite:
            raise Invalid(f"{str(target)!r} exists.", help="Use --overwrite to replace it.")
        with self._locked():
            if wrong := self._check(digest):
                raise Corrupt(f"Artifact {digest}: {wrong}.", help="Restore it from a backup, or run its task again.")
            handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
            try:
                with os.fdopen(handle, "wb") as file, self.place(digest).open("rb") as source:
                    shutil.copyfileobj(source, file, ARTIFACT_CHUNK_BYTES)
                    file.flush()
                    os.fsync(file.fileno())
                if overwrite:
                    os.replace(name, target)  # noqa: PTH105 - both are names in one folder
                else:
                    os.link(name, target)
            except FileExistsError:
                raise Invalid(f"{str(target)!r} exists.", help="Use --overwrite to replace it.") from None
            finally:
                with contextlib.suppress(FileNotFoundError):
                    Path(name).unlink()

    # -- collecting ---------------------------------------------------------------------------------------------------
    async def collect(self, older_than_days: float, *, dry_run: bool = False) -> Collected:
        """See ``ports.artifacts.ArtifactStore.collect``."""
        now = self._clock.now()
        before = now - seconds(older_than_days * _DAY)
        loose = dict(self._store.read(lambda tx: tx.ledger.loose_artifacts(before, now)))
        stale = await asyncio.to_thread(self._stale, before)
        if dry_run:
            return Collected(len(loose), 0, 0, len(stale))
        moved = await asyncio.to_thread(self._quarantine, list(loose))
        try:
            dropped = await self._store.write(
                Boundary.ARTIFACTS_DROPPED, lambda tx: tx.ledger.drop_artifacts(moved, now)
            )
        except BaseException:
            await asyncio.to_thread(self._restore, moved)
            raise
        await asyncio.to_thread(self._bury, moved, dropped, stale)
        return Collected(len(loose), len(dropped), sum(loose[digest] for digest in dropped), len(stale))

    def _stale(self, before: int) -> list[Path]:
        """Partial files, and blobs that the database does not know, older than an instant."""
        found = []
        with self._locked():
            for path in [*(self.root / "tmp").iterdir(), *(self.root / "sha256").glob("*/*")]:
                if path.lstat().st_mtime_ns // 1000 >= before:
                    continue
                digest = "sha256:" + path.name
                if path.parent.name == "tmp" or not self._store.read(
                    lambda tx, digest=digest: tx.ledger.artifacts(digest=digest, limit=1)  # type: ignore[misc]
                ):
                    found.append(path)
        return found

    def _quarantine(self, digests: Sequence[str]) -> list[str]:
        moved = []
        with self._locked():
            for digest in digests:
                with contextlib.suppress(FileNotFoundError):
                    self.place(digest).rename(self.root / "trash" / digest.partition(":")[2])
                moved.append(digest)
        return moved

    def _restore(self, digests: Sequence[str]) -> None:
        with self._locked():
            for digest in digests:
                with contextlib.suppress(FileNotFoundError):
                    (self.root / "trash" / digest.partition(":")[2]).rename(self.place(digest))

    def _bury(self, moved: Sequence[str], dropped: Sequence[str], stale: Sequence[Path]) -> None:
        self._restore([digest for digest in moved if digest not in dropped])
        with self._locked():
            for path in [*((self.root / "trash" / digest.partition(":")[2]) for digest in dropped), *stale]:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()


@contextmanager
def _regular(path: Path) -> Iterator[IO[bytes]]:
    """An open regular file, never through a link.

    Raises:
        Invalid: it is none.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Invalid(f"The file {str(path)!r} cannot be kept: {error.strerror}.") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise Invalid(f"{str(path)!r} is no regular file.")
        yield file


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(ARTIFACT_CHUNK_BYTES):
        yield piece


def _copy(pieces: Iterator[bytes], target: IO[bytes], limit: int, name: str) -> tuple[str, int]:
    found, size = hashlib.sha256(), 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise Invalid(f"{name!r} has more than {limit:,} bytes, the limit for artifacts.")
        found.update(piece)
        target.write(piece)
    return "sha256:" + found.hexdigest(), size


def _sync(folder: Path) -> None:
    handle: Any = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
