"""Agents whose input says what the model does: one script language for every process of a scenario.

An input is ``play(turn, turn, ...)``; a turn is text (an answer), a value (an answer as JSON), or a list of tool calls
``[name, arguments]``, ``[name, arguments, {"id": ...}]`` or ``[name, "raw arguments"]``. It travels in the
instructions, so the model of any process plays it from the right turn on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any

import perdure as p
from perdure.ports.provider import Request, Response, SystemMessage
from perdure.providers.scripted import Scripted, call, calls, hang, say
from perdure.records.parts import TextPart, Usage
from support.place import Place
from support.validity import faults

SURROGATE = "<surrogate>"  # what no input can carry and a model may still write


def play(*turns: Any) -> dict[str, Any]:
    """An input: what the model does, turn by turn; the last turn is repeated."""
    return {"turns": list(turns)}


def once(name: str = "pay", gate: str = "", do: str = "", tool: str = "once") -> list[Any]:
    """A call of the puppets' ``once`` tool (or another with its signature)."""
    return [tool, {"name": name, "gate": gate, "do": do}]


def script_of(request: Request) -> list[Any]:
    """The turns of the run that asks."""
    first = request.messages[0]
    assert isinstance(first, SystemMessage)
    turns: list[Any] = json.loads(first.text)["turns"]
    return turns


def perform(request: Request) -> Any:
    """What the puppets' model does."""
    turns = script_of(request)
    turn = turns[min(request.turn, len(turns)) - 1]
    if turn == "<hang>":
        return hang()
    if turn == "<cut>":
        return Response((TextPart("cut"),), "length", "puppet", Usage())
    if isinstance(turn, list):
        return calls(*(_call(*one) for one in turn))
    return say(turn)


def _call(name: str, arguments: Any, more: dict[str, str] | None = None) -> Any:
    id = (more or {}).get("id", "").replace(SURROGATE, "\ud800")
    if isinstance(arguments, str):
        arguments = arguments.replace(SURROGATE, "\ud800")
    return call(name, raw=arguments, id=id) if isinstance(arguments, str) else call(name, arguments, id=id)


def model(watch: Callable[[Request], None] | None = None) -> Scripted:
    """The puppets' model; ``watch`` sees every request. It refuses what a provider would refuse."""

    def respond(request: Request) -> Any:
        wrong = faults(request.messages)
        assert not wrong, wrong
        if watch is not None:
            watch(request)
        return perform(request)

    return Scripted(respond)


async def act(place: Place, ctx: p.ToolContext, tool: str, name: str, gate: str, do: str) -> str:
    """Touch the world once, stand before the gate, then end as told."""
    receipt = place.world.touch(name, key=ctx.key, tool=tool)
    await place.pass_gate(gate)
    match do:
        case "":
            return receipt
        case "timeout":
            raise TimeoutError("no answer")
        case "connection":
            raise ConnectionResetError("lost")
        case "unknown":
            raise p.Unknown("nobody can say")
        case "refuse":
            raise p.Refused("no money")
        case "raise":
            raise ValueError("broken")
        case "surrogate":
            return "\ud800"
        case _:
            raise AssertionError(do)


def tools(place: Place) -> dict[str, p.Agent]:
    """The puppets' tools by name."""

    @p.tool(name="once")
    async def once_tool(ctx: p.ToolContext, name: str = "pay", gate: str = "", do: str = "") -> str:
        """Touch the world once."""
        return await act(place, ctx, "once", name, gate, do)

    @p.tool(name="strict", on_exception="unknown")
    async def strict(ctx: p.ToolContext, name: str = "pay", gate: str = "", do: str = "") -> str:
        """Touch the world once; any exception is unknown."""
        return await act(place, ctx, "strict", name, gate, do)

    @p.tool(effect="observe")
    async def look(ctx: p.ToolContext, name: str = "look", gate: str = "", do: str = "") -> str:
        """Look."""
        return await act(place, ctx, "look", name, gate, do)

    @p.tool(effect="keyed")
    async def keyed(ctx: p.ToolContext, name: str = "keyed", gate: str = "", do: str = "") -> str:
        """Touch with a key."""
        return await act(place, ctx, "keyed", name, gate, do)

    @p.tool(effect="once", approval=True)
    async def asks(ctx: p.ToolContext, name: str = "asked", gate: str = "", do: str = "") -> str:
        """Ask first."""
        return await act(place, ctx, "asks", name, gate, do)

    @p.tool(key=lambda a: a["name"])
    async def business(ctx: p.ToolContext, name: str = "order", gate: str = "", do: str = "") -> str:
        """Touch a business object."""
        return await act(place, ctx, "business", name, gate, do)

    @p.tool(on_failure="fail")
    async def vital(ctx: p.ToolContext, name: str = "vital", gate: str = "", do: str = "") -> str:
        """Its failure fails the run."""
        return await act(place, ctx, "vital", name, gate, do)

    @p.tool(timeout=0.05)
    async def hasty(ctx: p.ToolContext, name: str = "hasty", gate: str = "", do: str = "") -> str:
        """Has 50 ms."""
        return await act(place, ctx, "hasty", name, gate, do)

    @p.tool(timeout=0.05)
    def threaded(ctx: p.ToolContext, name: str = "thread", gate: str = "", do: str = "") -> str:
        """A synchronous body."""
        receipt = place.world.touch(name, key=ctx.key, tool="threaded")
        place.pass_gate_sync(gate)
        if do == "refuse":
            raise p.Refused("no money")
        return receipt

    @p.tool(steps=True)
    async def staged(ctx: p.ToolContext, gate: str = "") -> list[str]:
        """Three steps at once, then one alone."""

        async def step(name: str) -> str:
            return place.world.touch(name, key=ctx.step_key(name))

        first = await asyncio.gather(*(ctx.step(name, step, name) for name in ("c", "a", "b")))
        await place.pass_gate(gate)
        return [*first, await ctx.step("last", step, "last")]

    found = [once_tool, strict, look, keyed, asks, business, vital, hasty, threaded, staged]
    return {tool.name: tool for tool in found}


def told(input: dict[str, Any]) -> str:
    """The script as instructions."""
    return json.dumps(input)


def puppet(
    place: Place,
    *,
    name: str = "puppet",
    policy: p.Policy | None = None,
    without: str = "",
    watch: Callable[[Request], None] | None = None,
    **options: Any,
) -> p.Agent:
    """The agent. ``without`` names a tool it does not have."""
    mine = [tool for tool in tools(place).values() if tool.name != without]
    options = {"output": str, "tools": mine, **options}
    return p.Agent(name, input=dict, instructions=told, model=model(watch), policy=policy, **options)


def wide(place: Place) -> p.Agent:
    """A puppet whose policy is in nobody's way."""
    return puppet(place, policy=p.Policy(repeated_failure_limit=0, max_turns=100, max_tool_calls=1000))


def changed(place: Place) -> p.Agent:
    """The puppet after a deploy that changed ``once``."""

    @p.tool(name="once", version="2")
    async def once_tool(ctx: p.ToolContext, name: str = "pay", gate: str = "", do: str = "") -> str:
        """Touch the world once, differently."""
        return await act(place, ctx, "once", name, gate, do)

    return puppet(place, tools=[once_tool, *(t for t in tools(place).values() if t.name != "once")])


def bare(place: Place) -> p.Agent:
    """The puppet after a deploy that removed ``once``."""
    return puppet(place, without="once")


def trivial(place: Place) -> p.Agent:
    """One call that touches the world under the run's id, then an answer."""

    @p.tool
    async def touch(ctx: p.ToolContext) -> str:
        """Touch."""
        return place.world.touch(ctx.run, key=ctx.key)

    return p.Agent("trivial", tools=[touch], model=Scripted([call("touch"), say("done")]))


def probed(place: Place) -> p.Registration:
    """A puppet whose probe knows only what the world knows."""
    return p.Registration(puppet(place), probe=lambda unknown: ask_world(place, unknown))


def ask_world(place: Place, unknown: p.UnknownCall) -> Any:
    """Applied with the receipt, or not applied."""
    for entry in place.world.entries():
        if entry.key == unknown.key:
            return p.Applied(entry.receipt)
    return p.NotApplied("the world has no such key")


def serviced(place: Place) -> p.Registration:
    """A puppet with attempt-scoped services that say when they are opened and closed."""

    @contextlib.asynccontextmanager
    async def services() -> Any:
        place.world.touch("opened")
        try:
            yield {}
        finally:
            place.world.touch("closed")

    return p.Registration(puppet(place), services=services)


PROGRAMS: dict[str, Callable[[Place], Any]] = {
    "puppet": puppet,
    "wide": wide,
    "changed": changed,
    "bare": bare,
    "trivial": trivial,
    "probed": probed,
    "serviced": serviced,
}
