"""What carries a program forward. Agents have one driver, workflows will have another; the engine knows neither."""

from __future__ import annotations

from typing import Protocol

from perdure.engine.attempt import Attempt, Ended
from perdure.engine.reconciliation import Encode, Probe


class Driver(Protocol):
    """Advances one attempt of a program as far as it can go.

    Attributes:
        contracts: today's replay contract of each tool by name; recovery judges by it.
    """

    contracts: dict[str, str]

    async def advance(self, attempt: Attempt) -> Ended:
        """Go on until the run settles, waits, or gives the claim back.

        Everything it changes goes through ``attempt``. A cancelled ``advance`` with ``attempt.interrupted`` unset is
        process loss: it must raise, and the work stays owed.
        """
        ...

    def probe(self, operation: str) -> tuple[Probe, Encode] | None:
        """Who can say what happened to an effect of this operation, and how a result of it is stored."""
        ...
