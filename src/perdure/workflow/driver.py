"""The driver of workflows: one for every run, whatever its plan, which the database holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from perdure.agent.events import Event, RunEnded, RunStarted
from perdure.agent.live import Live
from perdure.agent.loop import Emit
from perdure.engine.attempt import Attempt, Ended
from perdure.engine.reconciliation import Encode, Probe
from perdure.errors import Corrupt
from perdure.ports.artifacts import ArtifactStore
from perdure.ports.executor import Executor
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


class WorkflowDriver:
    """Implements ``engine.driver.Driver`` for every workflow.

    Args:
        executors: who performs actions, by kind. models: who answers for agents.
        artifacts: keeps the files that tasks leave.
        live: told the events of agents' turns while somebody watches.
    """

    def __init__(
        self,
        executors: Mapping[str, Executor],
        models: Models,
        artifacts: ArtifactStore | None = None,
        live: Live | None = None,
    ) -> None:
        self.contracts: dict[str, str] = {}
        self.live = live
        self.artifacts = artifacts
        self._executors = executors
        self._models = models
        self._plans: dict[str, Plan] = {}

    async def advance(self, attempt: Attempt) -> Ended:
        """See ``engine.driver.Driver.advance``."""
        assert attempt.submission is not None
        request = requests.decode(attempt.submission.input)
        return await Interpreter(attempt, self.plan(attempt, request.plan), request, self._members).advance()

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

    def _members(self, attempt: Attempt, plan: Plan, request: Request, values: Values) -> Members:
        workspace = workspace_of(request.workspace, plan.policy.writable_roots)
        acting = Acting(attempt, plan, self._executors, workspace, diff=request.diff)
        tools = Tools(attempt, plan, self._executors, workspace)
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
