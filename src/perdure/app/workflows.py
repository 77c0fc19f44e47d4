"""Workflows in an app: who performs their actions here, who answers for their agents, and how a run is admitted.

Loaded when the first workflow is submitted or claimed: an app of agents does not pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure import canonical, ids
from perdure.agent.live import Live
from perdure.engine import admission
from perdure.engine.admission import Receipt
from perdure.engine.attempt import Attempt, Ended
from perdure.engine.host import Host
from perdure.engine.reconciliation import Encode, Probe
from perdure.errors import Invalid
from perdure.ports.failpoints import Boundary
from perdure.records.task import PROGRAM

if TYPE_CHECKING:
    from perdure.executors.memory import Memory
    from perdure.ports.executor import Executor, Workspace
    from perdure.ports.provider import Model
    from perdure.stores.artifacts import FileArtifacts
    from perdure.workflow.driver import WorkflowDriver
    from perdure.workflow.dsl import Workflow
    from perdure.workflow.plan import Plan


class Workflows:
    """Implements ``engine.driver.Driver`` for workflows; what it needs is loaded with the first attempt."""

    def __init__(self, host: Host, live: Live) -> None:
        self.contracts: dict[str, str] = {}
        self._host = host
        self._live = live
        self._driver: WorkflowDriver | None = None
        self._artifacts: FileArtifacts | None = None

    @property
    def artifacts(self) -> FileArtifacts:
        """The files that tasks left, beside the database."""
        if self._artifacts is None:
            from perdure.stores.artifacts import FileArtifacts

            self._artifacts = FileArtifacts.beside(self._host.store, self._host.clock)
        return self._artifacts

    @property
    def memory(self) -> Memory:
        """Long-term memory of this store."""
        from perdure.executors.memory import Memory

        return Memory(self._host.store, self._host.clock)

    async def advance(self, attempt: Attempt) -> Ended:
        """See ``engine.driver.Driver.advance``."""
        if self._driver is None:
            from perdure.executors import executors
            from perdure.workflow.driver import WorkflowDriver

            self._driver = WorkflowDriver(
                executors(self._host.store, self._host.clock), _model, self.artifacts, self._live, _protocols
            )
        return await self._driver.advance(attempt)

    def probe(self, operation: str) -> tuple[Probe, Encode] | None:
        """See ``engine.driver.Driver.probe``."""
        return None


def _model(name: str, provider: Any, agent: Any, plan: Plan) -> Model:
    from perdure.providers.documents import model_of

    return model_of(name, provider, agent, plan.budget.pricing)


def _protocols(plan: Plan, workspace: Workspace) -> AbstractAsyncContextManager[Mapping[str, Executor]]:
    from perdure.protocols import connected

    return connected(plan.mcp_servers, plan.a2a_peers, plan.policy, workspace)


def program_name(definition: str) -> str:
    """The name of the workflow of a submission, by its definition."""
    return definition.rpartition("@")[0]


async def submit(
    host: Host,
    flow: Workflow,
    inputs: dict[str, Any] | None,
    *,
    principal: str,
    key: str | None = None,
    workspace: Path | None = None,
    check: bool = False,
    diff: bool | None = None,
    lineage: str = "",
) -> Receipt:
    """Compile a workflow, keep its plan and admit a run of it.

    Args:
        inputs: over the document's defaults. workspace: what it may see; by default the document's folder.
        check: predict and change nothing. diff: whether results hold diffs; by default as the document says.
        lineage: whose idempotency keys and shared budget it uses.

    Raises:
        Invalid: the workflow, its inputs or the key do not fit. Conflict: the key was used for other work.
    """
    from perdure.workflow import plan as plans
    from perdure.workflow import request as requests
    from perdure.workflow.dsl import Workflow

    if not isinstance(flow, Workflow):
        raise Invalid(
            f"{type(flow).__name__} is no agent and no workflow.", help="Give an Agent, its name or a Workflow."
        )
    plan = flow.compile()
    if inputs is not None and not isinstance(inputs, dict):
        raise Invalid(f"The inputs of a workflow are an object, not {type(inputs).__name__}.")
    body = plans.encode(plan)
    digest = plan.digest
    root = _folder(workspace or flow.base, plan.policy.workspace_root)
    request = requests.Request(
        workflow=plan.name, plan=digest, workspace=str(root), inputs=inputs or {}, mode="check" if check else "execute",
        diff=plan.output.show_diff if diff is None else diff, lineage=lineage,
    )  # fmt: skip
    raw = requests.encode(request)
    canonical.decode(raw, "inputs")
    thread = None if key is None else ids.keyed_thread_id(principal, f"{PROGRAM}:{plan.name}", ids.check_id(key, "key"))
    if host.store.read(lambda tx: tx.ledger.plan(digest)) is None:
        await host.store.write(Boundary.ADMIT, lambda tx: tx.ledger.put_plan(digest, body))
    return await admission.admit(
        host,
        program=PROGRAM,
        definition=f"{plan.name}@{digest}",
        input=raw,
        principal=principal,
        thread=thread,
        key=key,
    )


def _folder(base: Path, root: str) -> Path:
    folder = (base / root).resolve()
    if not folder.is_dir():
        raise Invalid(f"The workspace {str(folder)!r} is no folder.", help="Name one: --workspace DIR")
    return folder
