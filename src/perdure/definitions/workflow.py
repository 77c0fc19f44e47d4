"""The workflow document as it is authored: one value per construct, with its defaults and ranges. Pure.

Names are those of the document in snake case. A range that a type can say is a constraint here; what needs more than one
field, or a place in the file, is judged when a document is read or compiled. Nothing here is needed to read a record.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from perdure.limits import KIB, MIB

Json = Any
"""A JSON value; where a document allows it, with ``${{ }}`` templates in its strings."""

Name = Annotated[str, Meta(min_length=1, max_length=256)]
TaskId = Annotated[str, Meta(pattern="^[A-Za-z][A-Za-z0-9_-]*$", max_length=200)]
Seconds = Annotated[int, Meta(ge=1, le=86_400)]
StreamBytes = Annotated[int, Meta(ge=1, le=16 * MIB)]
Positive = Annotated[int, Meta(ge=1)]
Expansion = Annotated[int, Meta(ge=1, le=256)]
Tries = Annotated[int, Meta(ge=1, le=20)]
Milliseconds = Annotated[int, Meta(ge=0, le=60_000)]

Risk = Literal["low", "medium", "high", "critical"]
EffectKind = Literal[
    "pure", "internal_state", "observe", "workspace_mutate", "external_mutate", "process_execution", "network", "model",
    "remote_agent",
]  # fmt: skip
Idempotency = Literal["pure", "idempotent", "keyed", "at_most_once", "unknown"]
EffectClass = Literal["pure", "observe", "idempotent", "keyed", "once"]
Approval = Literal["policy", "never", "always"]
ActionKind = Literal[
    "builtin.assign",
    "builtin.assert",
    "builtin.read",
    "builtin.write",
    "builtin.shell.exec",
    "extension.process",
    "builtin.http",
    "builtin.python",
    "builtin.wait",
    "builtin.approval",
    "builtin.memory.read",
    "builtin.memory.write",
    "builtin.long_term_memory.read",
    "builtin.long_term_memory.search",
    "builtin.long_term_memory.write",
    "builtin.long_term_memory.promote",
    "builtin.long_term_memory.reindex",
    "mcp.call",
    "a2a.delegate",
]
RENDERED_FIELDS = ("args", "env", "stdin", "cwd", "url", "headers", "query", "body", "json", "title", "details")
"""Fields of an action that may hold templates, beside ``with``; each is rendered into one value, never through a shell."""
PROCESS_KINDS = frozenset({"builtin.shell.exec", "extension.process"})


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"):
    """Base of every construct: camel case in a document, unknown fields refused, defaults left out."""


class SecretProcess(Part, frozen=True, kw_only=True):
    """A program that prints a secret."""

    command: Name
    args: tuple[Annotated[str, Meta(max_length=4096)], ...] = ()
    timeout_seconds: Annotated[int, Meta(ge=1, le=60)] = 5
    output_limit_bytes: Annotated[int, Meta(ge=1, le=64 * KIB)] = 16 * KIB


class SecretRef(Part, frozen=True, kw_only=True):
    """Where a secret is: exactly one of an environment variable, a file, a program. Never the secret."""

    env: Name | None = None
    file: Name | None = None
    process: SecretProcess | None = None


class Metadata(Part, frozen=True, kw_only=True):
    """What a workflow is called."""

    name: Name
    description: str = ""
    labels: dict[str, str] = {}
    version: str = ""


class Retry(Part, frozen=True, kw_only=True):
    """When a failed try is followed by another.

    Attributes:
        max_attempts: tries in all. backoff_ms: milliseconds before the second.
        backoff: ``fixed``, or ``exponential``: doubled each time. max_backoff_ms: its bound.
        jitter: shorten each wait by up to half, by chance. on: what kinds of failure are tried again.
    """

    max_attempts: Tries = 1
    backoff_ms: Milliseconds = 0
    backoff: Literal["fixed", "exponential"] = "fixed"
    max_backoff_ms: Milliseconds = 60_000
    jitter: bool = False
    on: tuple[Literal["transport", "timeout", "rate_limit", "exit", "assertion", "tool"], ...] = (
        "transport",
        "timeout",
        "rate_limit",
    )


class Foreach(Part, frozen=True, kw_only=True):
    """One child task for each item of a list that the document holds."""

    items: list[Json]
    as_: Name = msgspec.field(name="as", default="item")
    max_items: Expansion = 32


class Matrix(Part, frozen=True, kw_only=True):
    """One child task for each combination of values."""

    axes: dict[str, list[Json]]
    max_items: Expansion = 32


class Case(Part, frozen=True, kw_only=True):
    """What a router selects when its value is this one."""

    equals: Json
    tasks: Annotated[tuple[TaskId, ...], Meta(min_length=1)]


class Route(Part, frozen=True, kw_only=True):
    """Which tasks follow a value."""

    select: str
    cases: Annotated[tuple[Case, ...], Meta(min_length=1)]
    default: tuple[TaskId, ...] = ()


class Loop(Part, frozen=True, kw_only=True):
    """A bounded repetition while a condition holds."""

    max_iterations: Annotated[int, Meta(ge=1, le=64)]
    while_: str = msgspec.field(name="while")
    initial: Json = None


class Compensate(Part, frozen=True, kw_only=True):
    """The inverse of a task."""

    uses: Name
    with_: dict[str, Json] = msgspec.field(name="with", default_factory=dict)
    retry: Retry = Retry()
    timeout_seconds: Seconds | None = None


class Task(Part, frozen=True, kw_only=True):
    """A node of the graph, as authored."""

    id: TaskId
    uses: Name
    needs: tuple[TaskId, ...] = ()
    foreach: Foreach | None = None
    matrix: Matrix | None = None
    route: Route | None = None
    loop: Loop | None = None
    memory_writes: tuple[Name, ...] | None = None
    when: str | None = None
    vars: dict[str, Json] = {}
    vars_files: tuple[Name, ...] = ()
    with_: dict[str, Json] = msgspec.field(name="with", default_factory=dict)
    output_schema: Json = None
    retry: Retry = Retry()
    timeout_seconds: Seconds | None = None
    failure: Literal["stop", "continue"] = "stop"
    compensate: Compensate | None = None


class Subworkflow(Part, frozen=True, kw_only=True):
    """A graph used by name."""

    version: Name
    inputs: dict[str, Json] = {}
    input_schema: Json = None
    outputs: dict[str, Json] = {}
    output_schema: Json = None
    tasks: Annotated[tuple[Task, ...], Meta(min_length=1)]


class Container(Part, frozen=True, kw_only=True):
    """How a process is isolated in a container."""

    image: Annotated[str, Meta(pattern="^([^@\\s]+@)?sha256:[0-9a-f]{64}$")]
    runtime: Literal["auto", "docker", "podman"] = "auto"
    memory_limit_bytes: Annotated[int, Meta(ge=16 * MIB, le=16 * KIB * MIB)] = 256 * MIB
    cpu_limit_millis: Annotated[int, Meta(ge=1, le=64_000)] = 1000
    pids_limit: Annotated[int, Meta(ge=1, le=4096)] = 64


class Action(Part, frozen=True, kw_only=True):
    """Something that a task does without a model.

    Attributes:
        command, args, cwd, env, stdin: of a process; ``args``, ``env`` values given as text and ``stdin`` may hold
            templates, each rendered into one value. env: name to a secret's place, or to text.
        stdout_limit_bytes, stderr_limit_bytes, combined_limit_bytes: what is read of a process at most.
        idempotency: what an extension or MCP tool promises. effect: the class a Python function declares.
        kind_of_effect: what a Python function touches.
        call: ``module:function`` of a Python function.
        artifacts: globs of files in the workspace that are kept when it succeeded.
        title, details, expires_in_seconds: of an approval.
    """

    kind: ActionKind
    description: str = ""
    with_: dict[str, Json] = msgspec.field(name="with", default_factory=dict)
    command: str | None = None
    args: tuple[str, ...] = ()
    cwd: str | None = None
    env: dict[str, SecretRef | str] = {}
    stdin: str | None = None
    timeout_seconds: Seconds | None = None
    stdout_limit_bytes: StreamBytes = 1 * MIB
    stderr_limit_bytes: StreamBytes = 1 * MIB
    combined_output_limit_bytes: StreamBytes = 2 * MIB
    isolation: Literal["process", "container"] = "process"
    container: Container | None = None
    idempotency: Idempotency | None = None
    protocol_version: str | None = None
    input_schema: Json = None
    output_schema: Json = None
    capabilities: tuple[str, ...] = ()
    artifacts: tuple[Name, ...] = ()
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] = "GET"
    url: str | None = None
    headers: dict[str, SecretRef | str] = {}
    query: dict[str, str] = {}
    body: str | None = None
    json: Json = None
    expect_status: tuple[Annotated[int, Meta(ge=100, le=599)], ...] = ()
    idempotency_header: str | None = None
    call: str | None = None
    effect: EffectClass = "once"
    effect_kind: EffectKind = "external_mutate"
    risk: Risk | None = None
    server: str | None = None
    tool: str | None = None
    peer: str | None = None
    seconds: Annotated[float, Meta(ge=0)] | None = None
    until: str | None = None
    title: str = ""
    details: Json = None
    expires_in_seconds: Annotated[int, Meta(ge=1, le=31_536_000)] | None = None


class ToolContract(Part, frozen=True, kw_only=True):
    """A tool that a model may call."""

    kind: Literal["builtin.workspace.read", "builtin.workspace.write", "builtin.echo"]
    description: str = ""
    input_schema: Json
    output_schema: Json = None
    capability: str
    risk: Risk
    effect_class: EffectKind
    idempotency: Idempotency
    retry_safe: bool = False
    timeout_seconds: Seconds | None = None
    secrets: tuple[str, ...] = ()
    network: tuple[str, ...] = ()
    approval: Approval = "policy"


class Reasoning(Part, frozen=True, kw_only=True):
    """How hard a model thinks."""

    effort: Literal["none", "low", "medium", "high", "xhigh", "max"]
    mode: str | None = None


class UsageLimit(Part, frozen=True, kw_only=True):
    """What one agent may use."""

    max_input_tokens: Positive | None = None
    max_output_tokens: Positive | None = None
    max_cost_usd: Annotated[float, Meta(gt=0)] | None = None


class Agent(Part, frozen=True, kw_only=True):
    """A bounded use of a model. ``timeout_seconds`` bounds each request to it."""

    provider: Name
    model: Name
    instructions: str | None = None
    instructions_file: Name | None = None
    vars: dict[str, Json] = {}
    vars_files: tuple[Name, ...] = ()
    tools: tuple[Name, ...] = ()
    max_turns: Annotated[int, Meta(ge=1, le=64)] = 8
    max_tool_calls: Annotated[int, Meta(ge=0, le=256)] = 16
    max_output_tokens: Positive = 2048
    timeout_seconds: Seconds = 120
    retry: Retry = Retry()
    reasoning: Reasoning | None = None
    structured_output: Json = None
    usage_limit: UsageLimit | None = None
    stream: bool = False
    provider_options: dict[str, Json] = {}
    model_calls: Literal["once", "repeat"] = "once"


class Provider(Part, frozen=True, kw_only=True):
    """Where a model is."""

    kind: Literal["fake", "openai", "azure_openai", "anthropic", "google"]
    endpoint: str | None = None
    credential: SecretRef | None = None
    api_version: str | None = None
    headers: dict[str, SecretRef] = {}


class Network(Part, frozen=True, kw_only=True):
    """Which addresses may be reached, and how."""

    allowed_schemes: tuple[Literal["https", "http"], ...] = ("https", "http")
    allowed_ports: tuple[Annotated[int, Meta(ge=1, le=65_535)], ...] = ()
    allow_private: bool = False
    allow_proxy: bool = False
    custom_ca: SecretRef | None = None
    connect_timeout_seconds: Annotated[int, Meta(ge=1, le=120)] = 10
    max_response_bytes: Annotated[int, Meta(ge=1, le=64 * MIB)] = 8 * MIB


class Policy(Part, frozen=True, kw_only=True):
    """What a workflow may do."""

    workspace_root: str = "."
    writable_roots: tuple[Name, ...] = ()
    environment_allowlist: tuple[Name, ...] = ()
    network_allowlist: tuple[Name, ...] = ()
    network: Network = Network()
    process_allowlist: tuple[Name, ...] = ()
    secret_file_roots: tuple[Name, ...] = ()
    secret_process_allowlist: tuple[Name, ...] = ()
    providers: tuple[Name, ...] = ()
    tools_allow: tuple[Name, ...] = ()
    tools_deny: tuple[Name, ...] = ()
    approval: Literal["never", "mutations", "high_risk", "always"] = "mutations"
    non_interactive: Literal["pause", "deny_approval", "fail"] = "pause"


class Embedding(Part, frozen=True, kw_only=True):
    """How long-term memory turns text into vectors."""

    provider: Name = "local_hash"
    model: str | None = None
    dimensions: Annotated[int, Meta(ge=8, le=4096)] = 64


class LongTerm(Part, frozen=True, kw_only=True):
    """Memory that outlives a run."""

    provider: Literal["sqlite"] = "sqlite"
    namespace: Name = "default"
    retention_days: Annotated[int, Meta(ge=1, le=36_500)] | None = None
    embedding: Embedding = Embedding()


class Memory(Part, frozen=True, kw_only=True):
    """Working memory of the run, and memory that outlives it."""

    working: dict[str, Json] = {}
    long_term: LongTerm | None = None


class McpServer(Part, frozen=True, kw_only=True):
    """A server of tools: over HTTP (``url``) or as a child process (``command``).

    ``tools`` declares, by tool name, what each promises; an undeclared one is of class ``once``.
    """

    url: str | None = None
    command: str | None = None
    args: tuple[str, ...] = ()
    env: dict[str, SecretRef | str] = {}
    cwd: str | None = None
    headers: dict[str, SecretRef] = {}
    protocol_version: str | None = None
    timeout_seconds: Seconds = 120
    tools: dict[str, McpTool] = {}


class McpTool(Part, frozen=True, kw_only=True):
    """What our own document declares of a tool of a server."""

    effect: EffectClass = "once"
    effect_kind: EffectKind = "external_mutate"
    risk: Risk = "medium"
    read_only: bool = False
    approval: Approval = "policy"

    @property
    def promised(self) -> EffectClass:
        """The class it is treated as: a tool that is declared to read only promises at least that."""
        return "observe" if self.read_only and self.effect == "once" else self.effect


class A2aPeer(Part, frozen=True, kw_only=True):
    """A remote agent."""

    url: Name
    headers: dict[str, SecretRef] = {}
    protocol_version: str | None = None
    timeout_seconds: Seconds = 120
    max_polls: Annotated[int, Meta(ge=1, le=1000)] = 100
    poll_interval_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100
    output_schema: Json = None


class Identity(Part, frozen=True, kw_only=True):
    """Who may sign packs."""

    identity: Name
    issuer: Name


class PackTrust(Part, frozen=True, kw_only=True):
    """Which packs are trusted."""

    unsigned: Literal["deny", "warn", "allow"] = "warn"
    identities: tuple[Identity, ...] = ()
    allow_unsigned_process: bool = False


class Budgets(Part, frozen=True, kw_only=True):
    """What a run may use. ``scope: lineage`` shares what is spent with the runs derived from it."""

    max_provider_requests: Positive | None = None
    max_turns: Positive | None = None
    max_tool_calls: Positive | None = None
    max_input_tokens: Positive | None = None
    max_output_tokens: Positive | None = None
    max_total_tokens: Positive | None = None
    max_wall_time_seconds: Positive | None = None
    max_process_output_bytes: Positive | None = None
    max_artifact_bytes: Positive | None = None
    max_tasks: Positive | None = None
    max_expansion_items: Positive | None = None
    max_loop_iterations: Positive | None = None
    max_cost_microusd: Positive | None = None
    scope: Literal["run", "lineage"] = "run"
    on_budget: Literal["fail", "suspend"] = "fail"


class ModelPrice(Part, frozen=True, kw_only=True):
    """Micro-USD for a million tokens."""

    input_microusd_per_million_tokens: Positive
    output_microusd_per_million_tokens: Positive
    reasoning_microusd_per_million_tokens: Positive | None = None
    cache_read_microusd_per_million_tokens: Positive | None = None
    cache_write_microusd_per_million_tokens: Positive | None = None


class Pricing(Part, frozen=True, kw_only=True):
    """Prices by ``provider/model``."""

    version: Name
    models: dict[str, ModelPrice]


class Runtime(Part, frozen=True, kw_only=True):
    """How a workflow is run."""

    max_concurrency: Annotated[int, Meta(ge=1, le=64)] = 1
    default_timeout_seconds: Seconds = 120
    budgets: Budgets = Budgets()
    pricing: Pricing | None = None


class Compensation(Part, frozen=True, kw_only=True):
    """Policy of inverse actions."""

    on_failure: Literal["manual", "automatic"] = "manual"
    approval: Approval = "policy"


class Output(Part, frozen=True, kw_only=True):
    """Presentation."""

    verbose: bool = False
    show_diff: bool = True


class Spec(Part, frozen=True, kw_only=True):
    """What a workflow is."""

    inputs: dict[str, Json] = {}
    vars_files: tuple[Name, ...] = ()
    vars: dict[str, Json] = {}
    outputs: dict[str, Json] = {}
    providers: dict[Name, Provider] = {}
    agents: dict[Name, Agent] = {}
    actions: dict[Name, Action] = {}
    tools: dict[Name, ToolContract] = {}
    subworkflows: dict[Name, Subworkflow] = {}
    compensation: Compensation = Compensation()
    tasks: Annotated[tuple[Task, ...], Meta(min_length=1)]
    policy: Policy = Policy()
    memory: Memory = Memory()
    mcp_servers: dict[Name, McpServer] = {}
    a2a_peers: dict[Name, A2aPeer] = {}
    packs: tuple[Name, ...] = ()
    pack_trust: PackTrust = PackTrust()
    runtime: Runtime = Runtime()
    output: Output = Output()


class Document(Part, frozen=True, kw_only=True):
    """A whole document."""

    api_version: Literal["perdure.dev/v1", "agentctl.dev/v1", "agentctl.dev/v1alpha1"]
    kind: Literal["Workflow"]
    metadata: Metadata
    spec: Spec
