"""The public ``Agent``: a definition that can also be run here and now."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from perdure.agent import ephemeral
from perdure.agent.ephemeral import Approve, Result, result_of
from perdure.agent.events import Event
from perdure.definitions.agent import AgentDefinition
from perdure.engine.attempt import Attempt
from perdure.errors import Invalid
from perdure.ports.provider import Capability, Model, profile_of

Resolve = Callable[[Any], Model]
_resolvers: list[Resolve] = []


def set_model_resolver(resolve: Resolve) -> None:
    """How model strings become models. Called once by the composition root, which knows the providers."""
    _resolvers[:] = [resolve]


def model_of(definition: AgentDefinition, model: Any = None) -> Model:
    """The model to ask: the given one, else the agent's own.

    Raises:
        Invalid: there is none, it is no model, or it declares that it cannot do what the agent needs.
    """
    chosen = model if model is not None else definition.model
    if chosen is None:
        raise Invalid(
            f"Agent {definition.name!r} has no model.", help="Give model=, on the agent, on run() or in open(models=)."
        )
    if isinstance(chosen, str):
        if not _resolvers:
            raise Invalid(f"The model {chosen!r} cannot be resolved here.", help="Give a Model object.")
    elif not isinstance(chosen, Model) and not _resolvers:
        raise Invalid(
            f"{type(chosen).__name__} is no model.", help="Give a string such as 'openai:NAME' or a Model object."
        )
    found = _resolvers[0](chosen) if _resolvers else chosen
    _negotiate(definition, found)
    return found


def _negotiate(definition: AgentDefinition, model: Model) -> None:
    """Refuse before any run starts what would fail in every run."""
    profile = profile_of(model)
    if definition.policy.cost_budget is not None and profile.price is None:
        raise Invalid(
            f"Agent {definition.name!r} has a cost budget, and nobody knows what model `{model.name}` costs.",
            help="Give the model price=Price(input=..., output=...), or use token_budget.",
        )
    if profile.capabilities is None:
        return
    needs: dict[Capability, str] = {}
    if definition.tools:
        needs["tools"] = "has tools"
    if definition.settings.get("reasoning_effort") not in (None, "none"):
        needs["reasoning_effort"] = "sets a reasoning effort"
    for capability, why in needs.items():
        if capability not in profile.capabilities:
            raise Invalid(
                f"Agent {definition.name!r} {why}; model `{model.name}` declares that it cannot do that ({capability}).",
                help=f"What it can do: {', '.join(sorted(profile.capabilities))}.",
            )


class Agent(AgentDefinition):
    """A bounded agent: instructions, tools, a policy, typed input and output. The same value serves every mode.

    Everything :class:`AgentDefinition` takes; ``run``, ``run_sync`` and ``stream`` execute it here and now, without
    history or recovery. Give it to ``perdure.open`` for durable execution.
    """

    async def run(self, input: Any, *, model: Any = None, approve: Approve | None = None) -> Result:
        """Run once in memory.

        Args:
            input: a value of the agent's input type.
            model: over the agent's own. approve: decides requests for approval.

        Raises:
            Invalid: the input does not fit. RunFailed: it failed, or an outcome is unknown (``.unknown``).
            Denied: a tool asks for approval and there is no ``approve``.
        """
        raw = self.input_codec.encode(input, "input")
        attempt = await ephemeral.carry_out(self, raw, model_of(self, model), approve=approve)
        return result_of(self, attempt)

    def run_sync(self, input: Any, *, model: Any = None, approve: Approve | None = None) -> Result:
        """:meth:`run` for code without a running loop.

        Raises:
            Invalid: called while a loop runs in this thread.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.run(input, model=model, approve=approve))
        raise Invalid("run_sync was called inside a running event loop.", help="Use `await agent.run(...)` there.")

    async def stream(self, input: Any, *, model: Any = None, approve: Approve | None = None) -> AsyncIterator[Event]:
        """The events of one run in memory as they happen. Leaving the loop early cancels the run."""
        raw = self.input_codec.encode(input, "input")
        items = ephemeral.stream(self, raw, model_of(self, model), approve=approve)
        async with contextlib.aclosing(items):  # closing this closes that, now and not when it is collected
            async for item in items:
                if isinstance(item, Attempt):
                    result_of(self, item)
                    return
                yield item
