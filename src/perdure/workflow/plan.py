"""A compiled workflow: expanded tasks in a fixed order, with everything a run needs and nothing of the machine it is on.

A plan is stored by its digest and carried out years later by another process: nothing of the document or its files is
read again. Its bytes are canonical, so equal workflows give equal plans however they were authored.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from perdure import canonical
from perdure.definitions.workflow import (
    A2aPeer,
    Action,
    Agent,
    Budgets,
    Compensate,
    Compensation,
    Json,
    McpServer,
    Memory,
    Output,
    Part,
    Policy,
    Pricing,
    Provider,
    Retry,
    Route,
    ToolContract,
)
from perdure.errors import Incompatible, Invalid
from perdure.limits import PLAN_BYTES_MAX

FORMAT_VERSION = 1
TaskKind = Literal["action", "agent", "router", "aggregate", "loop", "inputs", "outputs"]
Predictability = Literal["fully", "partially", "requires_execution"]


class PlannedTask(Part, frozen=True, kw_only=True):
    """One node, expanded and resolved.

    Attributes:
        uses: as authored. target: the name of its action or agent; empty for the rest.
        with_: templates; every reference is to a task of this plan.
        vars: the winning value of every variable it can read.
        retry, timeout_seconds, failure: as authored, with the defaults filled in.
        memory_reads: keys of working memory its expressions can read; None: all of it.
        memory_writes: keys it may write; None: none.
        children: of an aggregate or a loop, in order of expansion. guard: the condition of a loop.
        previous: of an iteration: the task whose output ``vars.loopPrevious`` is; empty for the first.
        input_schema: of a sub-workflow's inputs. outputs: of its outputs.
        namespace: prefix of long-term memory's namespaces inside a sub-workflow.
        definition: fingerprint of everything that governs it. contract: of what its output must be.
    """

    id: str
    kind: TaskKind
    uses: str
    target: str = ""
    needs: tuple[str, ...] = ()
    vars: dict[str, Json] = {}
    with_: dict[str, Json] = msgspec.field(name="with", default_factory=dict)
    when: str | None = None
    retry: Retry = Retry()
    timeout_seconds: int = 120
    failure: Literal["stop", "continue"] = "stop"
    output_schema: Json = None
    memory_reads: tuple[str, ...] | None = ()
    memory_writes: tuple[str, ...] | None = None
    route: Route | None = None
    children: tuple[str, ...] = ()
    guard: str | None = None
    previous: str = ""
    input_schema: Json = None
    outputs: dict[str, Json] | None = None
    namespace: str = ""
    compensate: Compensate | None = None
    definition: str = ""
    contract: str = ""
    predictability: Predictability = "fully"


class ProviderNeed(Part, frozen=True, kw_only=True):
    """A provider that a run needs."""

    name: str
    kind: str
    agents: tuple[str, ...]
    capabilities: tuple[str, ...]


class EffectNeed(Part, frozen=True, kw_only=True):
    """An effect that a task may have."""

    task: str
    operation: str
    kind: str
    effect_class: str
    approval_possible: bool
    predictability: Predictability


class Requirements(Part, frozen=True, kw_only=True):
    """What a run will need of the outside."""

    providers: tuple[ProviderNeed, ...] = ()
    tools: tuple[str, ...] = ()
    effects: tuple[EffectNeed, ...] = ()
    processes: tuple[str, ...] = ()


class BudgetPlan(Part, frozen=True, kw_only=True):
    """Limits and prices, and what is known of them before a run."""

    limits: Budgets = Budgets()
    pricing: Pricing | None = None
    planned_tasks: int = 0
    planned_expansion_items: int = 0
    planned_loop_iterations: int = 0


class Plan(Part, frozen=True, kw_only=True):
    """A compiled workflow.

    A default that is left out of its bytes belongs to the format: another default is another format.

    Attributes:
        format_version: always in its bytes.
        document: digest of the expanded workflow. files: relative path to digest of every captured file.
        instructions: agent name to its text, captured.
        vars: the winning variables outside of tasks, for ``outputs``.
        inputs: defaults.
    """

    format_version: int
    name: str
    version: str = ""
    labels: dict[str, str] = {}
    dialect: str
    document: str
    order: tuple[str, ...]
    max_concurrency: int = 1
    tasks: dict[str, PlannedTask]
    actions: dict[str, Action] = {}
    agents: dict[str, Agent] = {}
    tools: dict[str, ToolContract] = {}
    providers: dict[str, Provider] = {}
    mcp_servers: dict[str, McpServer] = {}
    a2a_peers: dict[str, A2aPeer] = {}
    policy: Policy = Policy()
    memory: Memory = Memory()
    compensation: Compensation = Compensation()
    output: Output = Output()
    instructions: dict[str, str] = {}
    files: dict[str, str] = {}
    vars: dict[str, Json] = {}
    inputs: dict[str, Json] = {}
    outputs: dict[str, Json] = {}
    predictability: Predictability = "fully"
    requirements: Requirements = Requirements()
    budget: BudgetPlan = BudgetPlan()

    @property
    def digest(self) -> str:
        """Hex SHA-256 of its bytes."""
        return canonical.sha256(encode(self))


class _Version(msgspec.Struct, rename="camel"):
    format_version: Any = None


_decoder = msgspec.json.Decoder(Plan)
_version = msgspec.json.Decoder(_Version)
_encoder = msgspec.json.Encoder(order="sorted")


def encode(plan: Plan) -> bytes:
    """The bytes of a plan: sorted keys, no defaults.

    Raises:
        Invalid: it is over ``PLAN_BYTES_MAX``.
    """
    raw = _encoder.encode(plan)
    if len(raw) > PLAN_BYTES_MAX:
        raise Invalid(f"The compiled plan has {len(raw):,} bytes; the limit is {PLAN_BYTES_MAX:,} (PLAN_BYTES_MAX).")
    return raw


def decode(raw: bytes) -> Plan:
    """A plan from its bytes.

    Raises:
        Incompatible: it is of a newer format, or holds what this release does not know.
    """
    try:
        found = _version.decode(raw).format_version
        if found != FORMAT_VERSION:
            raise Incompatible(
                f"A stored plan has format {str(found)[:32]}; this release knows format {FORMAT_VERSION}.",
                help="Use the release that compiled it.",
            )
        return _decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise Incompatible(
            f"A stored plan has content this release does not know ({error}).", help="Use the release that compiled it."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Incompatible(f"A stored plan cannot be read: {error}.") from error


def capability_class(idempotency: str | None) -> Any:
    """The class of recovery that a declared idempotency means."""
    return _CLASSES.get(idempotency or "unknown", "once")


_CLASSES: dict[str, str] = {
    "pure": "pure",
    "idempotent": "idempotent",
    "keyed": "keyed",
    "at_most_once": "once",
    "unknown": "once",
}
