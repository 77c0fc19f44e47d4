"""The driver of workflows: one for every run, whatever its plan, which the database holds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

from perdure.agent.events import Event, RunEnded, RunStarted
from perdure.agent.live import Live
from perdure.agent.loop import Emit
from perdure.engine.attempt import Attempt, Ended
from perdure.engine.reconciliation import Encode, Probe
from perdure.errors import Corrupt
from perdure.ports.artifacts import ArtifactStore
from perdure.ports.executor import Executor, Workspace
from perdure.workflow import plan as plans
from perdure.workflow import request as requests
from perdure.workflow.acting import Acting, workspace_of
from perdure.workflow.agents import Agents, Models
from perdure.workflow.interpreter import Interpreter
from perdure.workflow.members import Members
from perdure.workflow.plan import Plan
from perdure.workflow.request import Request
from perdure.workflow.toolset import Tools
from perdure.workflow.values import Values

_PLANS_KEPT_MAX = 64

Protocols = Callable[[Plan, Workspace], AbstractAsyncContextManager[Mapping[str, Executor]]]
"""The executors of the protocols that a plan uses, open while one attempt goes on."""


class WorkflowDriver:
    """Implements ``engine.driver.Driver`` for every workflow.

    Args:
        executors: who performs actions, by kind. models: who answers for agents.
        artifacts: keeps the files that tasks leave.
        live: told the events of agents' turns while somebody watches.
        protocols: who performs actions of MCP servers and A2A peers.
    """

    def __init__(
        self,
        executors: Mapping[str, Executor],
        models: Models,
        artifacts: ArtifactStore | None = None,
        live: Live | None = None,
        protocols: Protocols | None = None,
    ) -> None:
        self.contracts: dict[str, str] = {}
        self.live = live
        self.artifacts = artifacts
        self._executors = executors
        self._models = models
        self._protocols = protocols
        self._plans: dict[str, Plan] = {}

    async def advance(self, attempt: Attempt) -> Ended:
        """See ``engine.driver.Driver.advance``."""
        assert attempt.submission is not None
        request = requests.decode(attempt.submission.input)
        plan = self.plan(attempt, request.plan)
        if self._protocols is None or not (plan.mcp_servers or plan.a2a_peers):
            return await Interpreter(attempt, plan, request, self._members).advance()
        async with self._protocols(plan, workspace_of(request.workspace, plan.policy.writable_roots)) as more:
            make = functools.partial(self._members, more=more)
            return await Interpreter(attempt, plan, request, make).advance()

    def plan(self, attempt: Attempt, digest: str) -> Plan:
        """A plan by its digest.

        Raises:
            Corrupt: the database does not hold it. Incompatible: this release cannot read it.
        """
        found = self._plans.get(digest)
        if found is None:
            raw = attempt.host.store.read(lambda tx: tx.ledger.plan(digest))
            if raw is None:
                raise Corrupt(f"The database does not hold the plan {digest} of run {attempt.run.id!r}.")
            if len(self._plans) >= _PLANS_KEPT_MAX:
                self._plans.clear()
            found = self._plans[digest] = plans.decode(raw)
        return found

    def _members(
        self,
        attempt: Attempt,
        plan: Plan,
        request: Request,
        values: Values,
        more: Mapping[str, Executor] | None = None,
    ) -> Members:
        workspace = workspace_of(request.workspace, plan.policy.writable_roots)
        executors = {**self._executors, **(more or {})}
        acting = Acting(attempt, plan, executors, workspace, diff=request.diff)
        tools = Tools(attempt, plan, executors, workspace)
        agents = Agents(attempt, plan, values, tools, self._models, {}, self._emit(attempt))
        return Members(attempt, plan, values, acting, agents, self.artifacts, check=request.mode == "check")

    def _emit(self, attempt: Attempt) -> Callable[[str], Emit | None] | None:
        live, submission = self.live, attempt.submission
        if live is None or submission is None:
            return None
        id = submission.id

        def tell(event: Event) -> None:
            if not isinstance(event, RunStarted | RunEnded) and live.wanted(id):
                live.emit(id, event)

        return lambda task: tell

    def probe(self, operation: str) -> tuple[Probe, Encode] | None:
        """See ``engine.driver.Driver.probe``. No executor has one."""
        return None
