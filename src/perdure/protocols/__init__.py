"""Protocols: tools of MCP servers and agents behind A2A, as executors. Adapters of ``ports.executor``; they know no engine.

Each needs an extra of its own (``perdure[mcp]``, ``perdure[a2a]``), loaded when a plan that uses it is run. What is open
for one attempt of a run, servers that are processes among it, is closed with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from perdure.definitions.workflow import A2aPeer, Action, McpServer, Policy
from perdure.errors import Invalid
from perdure.ports.executor import Call, Executor, Facts, Performed, Workspace


@asynccontextmanager
async def connected(
    servers: Mapping[str, McpServer], peers: Mapping[str, A2aPeer], policy: Policy, workspace: Workspace
) -> AsyncIterator[dict[str, Executor]]:
    """The executors of the protocols that a plan uses, by kind, while one attempt of its run goes on.

    Nothing is started or reached before it is used. Where an extra is missing, its actions fail with the sentence that
    names it.
    """
    found: dict[str, Executor] = {}
    if peers:
        found["a2a.delegate"] = _a2a(peers)
    if not servers:
        yield found
        return
    try:
        from perdure.protocols.mcp import Mcp  # noqa: PLC0415 - half a second, for plans that use it
    except ModuleNotFoundError:
        yield {**found, "mcp.call": Missing("mcp.call", "mcp")}
        return
    tools = Mcp(servers, policy, workspace)
    try:
        yield {**found, "mcp.call": tools}
    finally:
        await tools.close()


def _a2a(peers: Mapping[str, A2aPeer]) -> Executor:
    try:
        from perdure.protocols.a2a import A2a  # noqa: PLC0415 - half a second, for plans that use it
    except ModuleNotFoundError:
        return Missing("a2a.delegate", "a2a")
    return A2a(peers)


class Missing:
    """Stands where an extra is not installed."""

    def __init__(self, kind: str, extra: str) -> None:
        self.kinds = frozenset({kind})
        self._error = Invalid(f"{kind} needs the extra `{extra}`.", help=f"Install it: pip install 'perdure[{extra}]'")

    def describe(self, action: Action, input: Mapping[str, Any]) -> Facts:
        """See ``ports.executor.Executor.describe``: says what is missing."""
        raise self._error

    async def prepare(self, call: Call) -> Performed | None:
        """See ``ports.executor.Executor.prepare``: says what is missing."""
        raise self._error

    async def execute(self, call: Call) -> Performed:
        """See ``ports.executor.Executor.execute``: says what is missing."""
        raise self._error

    async def predict(self, call: Call) -> Any:
        """See ``ports.executor.Executor.predict``: says what is missing."""
        raise self._error
