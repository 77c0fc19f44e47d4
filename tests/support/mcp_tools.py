"""A real MCP server of the SDK: over stdio, or over HTTP when a port is given. It writes down every call it gets."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Context, Image

JOURNAL = Path(sys.argv[1])
server = MCPServer("Shop", version="7")


def write(**what: object) -> None:
    """Append to the journal, durably enough to outlive this process."""
    with JOURNAL.open("a") as file:
        file.write(json.dumps({**what, "pid": os.getpid()}) + "\n")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    write(tool="add", a=a, b=b)
    return a + b


@server.tool()
async def pay(order: str, ctx: Context) -> dict[str, str]:
    """Pay an order."""
    meta = ctx.request_context.meta
    write(tool="pay", order=order, meta=dict(meta) if meta else None)
    return {"paid": order}


@server.tool()
def boom() -> str:
    """Fail."""
    write(tool="boom")
    raise ValueError("out of paper")


@server.tool()
def seen() -> dict[str, str]:
    """The environment of this server."""
    return dict(os.environ)


@server.tool()
def picture() -> Image:
    """Some bytes."""
    return Image(data=b"\x89PNG....", format="png")


@server.tool()
async def slow(ctx: Context) -> str:
    """Never ends by itself."""
    import anyio

    write(tool="slow", event="begun")
    try:
        await anyio.sleep(60)
    except BaseException:
        write(tool="slow", event="cancelled")
        raise
    return "late"


if __name__ == "__main__":
    write(event="started")
    if len(sys.argv) > 2:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
    else:
        server.run(transport="stdio")
