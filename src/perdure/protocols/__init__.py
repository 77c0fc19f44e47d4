"""Protocols: tools of MCP servers and agents behind A2A, as executors. Adapters of ``ports.executor``; they know no engine.

Each needs an extra of its own (``perdure[mcp]``, ``perdure[a2a]``), loaded when a plan that uses it is run. What is open
for one attempt of a run, servers that are processes among it, is closed with it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from perdure.definitions.workflow import A2aPeer, McpServer, Policy
from perdure.errors import Invalid
from perdure.ports.executor import Executor, Workspace


@asynccontextmanager
async def connected(
    servers: Mapping[str, McpServer], peers: Mapping[str, A2aPeer], policy: Policy, workspace: Workspace
) -> AsyncIterator[dict[str, Executor]]:
    """The executors of the protocols that a plan uses, by kind, while one attempt of its run goes on.

    Nothing is started or reached before it is used.

    Raises:
        Invalid: an extra is missing.
    """
    found: dict[str, Executor] = {}
    if not servers:
        yield found
        return
    try:
        from perdure.protocols.mcp import Mcp  # noqa: PLC0415 - half a second, for plans that use it
    except ModuleNotFoundError as error:
        raise missing("MCP servers", "mcp") from error
    tools = Mcp(servers, policy, workspace)
    found["mcp.call"] = tools
    try:
        yield found
    finally:
        await tools.close()


def missing(what: str, extra: str) -> Invalid:
    """The error of an extra that is not installed."""
    return Invalid(f"{what} need the extra `{extra}`.", help=f"Install it: pip install 'perdure[{extra}]'")
