"""The ledger in SQLite. Each verb is a few statements inside the caller's unit of work."""

from __future__ import annotations

from perdure.stores.sqlite.artifacts import ArtifactRows
from perdure.stores.sqlite.effects import Effects
from perdure.stores.sqlite.lists import Lists
from perdure.stores.sqlite.live import Live
from perdure.stores.sqlite.memory import Memories
from perdure.stores.sqlite.models import Models
from perdure.stores.sqlite.progress import Progress
from perdure.stores.sqlite.workflows import Workflows


class SqliteLedger(Progress, Effects, Models, Live, Lists, Workflows, ArtifactRows, Memories):
    """Implements ``ports.ledger.Ledger`` on one connection; used inside a unit of work only."""
