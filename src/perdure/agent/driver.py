"""The durable driver of agents: binds a registration to an attempt and lets the interpreter go on."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

from perdure.agent.batch import Toolbox, encoder
from perdure.agent.live import Live
from perdure.agent.loop import Interpreter
from perdure.definitions.registry import Registration
from perdure.engine.attempt import Attempt, Ended
from perdure.engine.reconciliation import Encode, Probe
from perdure.ports.provider import Model


class AgentDriver:
    """Implements ``engine.driver.Driver`` for one registered agent.

    Args:
        model: who answers; over the agent's own.
        live: told the events of every run here while somebody watches it; None for nobody.
    """

    def __init__(self, registration: Registration, model: Model, live: Live | None = None) -> None:
        self.definition = registration.agent
        self.model = model
        self.toolbox = Toolbox(registration.agent, registration.probe)
        self.contracts = self.toolbox.contracts
        self._services = registration.services
        self.live = live

    async def advance(self, attempt: Attempt) -> Ended:
        """See ``engine.driver.Driver.advance``. Attempt-scoped services are open while it runs."""
        if self._services is None:
            return await self._interpreter(attempt, None).advance()
        async with contextlib.AsyncExitStack() as stack:
            scope = self._services(attempt) if _takes_argument(self._services) else self._services()
            services = await stack.enter_async_context(scope)
            try:
                return await self._interpreter(attempt, services).advance()
            finally:
                attempt.task = None  # services end in peace: what interrupts now is found by the next claim

    def _interpreter(self, attempt: Attempt, services: Any) -> Interpreter:
        retain = getattr(services, "on_approval_suspension", None)
        live, submission = self.live, attempt.submission
        return Interpreter(
            attempt,
            self.definition,
            self.toolbox,
            self.model,
            services=services,
            superseded=attempt.superseded,
            emit=functools.partial(live.emit, submission.id) if live and submission else None,
            watched=functools.partial(live.wanted, submission.id) if live and submission else None,
            on_approval_suspension=retain if callable(retain) else None,
        )

    def probe(self, operation: str) -> tuple[Probe, Encode] | None:
        """See ``engine.driver.Driver.probe``."""
        probe = self.toolbox.probe(operation) if operation in self.toolbox.tools else None
        return None if probe is None else (probe, encoder(self.toolbox.tools[operation]))


def _takes_argument(factory: Any) -> bool:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
