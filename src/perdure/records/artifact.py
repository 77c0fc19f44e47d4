"""A file in the artifact store, as records name it."""

from __future__ import annotations

import msgspec


class ArtifactRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False, omit_defaults=True):
    """One file a task left.

    Attributes:
        path: where the task left it, relative to the workspace; for a remote's file its name.
        digest: ``sha256:`` and the hex SHA-256 of its bytes.
        size: bytes.
        media_type: by its name, or as the remote said. name: what people call it.
    """

    path: str
    digest: str
    size: int
    media_type: str = "application/octet-stream"
    name: str = ""
