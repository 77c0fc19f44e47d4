"""Which definitions an app serves, by name. A name means one definition for as long as the app lives."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perdure.definitions.agent import AgentDefinition
from perdure.errors import Conflict, Invalid


@dataclass(frozen=True, slots=True)
class Registration:
    """An agent, and what a host adds to it.

    Attributes:
        agent: the definition.
        model: model used instead of the agent's own, or None.
        services: function returning an async context manager, entered once per attempt; what it gives is
            ``ToolContext.services``. None for no services.
        probe: function asked about unknown calls of tools without a probe of their own, or None.

    Raises:
        Invalid: one of them cannot be.
    """

    agent: AgentDefinition
    model: Any = None
    services: Callable[..., Any] | None = None
    probe: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.agent, AgentDefinition):
            raise Invalid(f"{self.agent!r:.64} is no agent.", help="Give an Agent or a Registration of one.")
        for name in ("services", "probe"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise Invalid(f"{name} of the registration of `{self.agent.name}` is no function: {value!r:.64}.")
        if isinstance(self.model, str) and not self.model.strip():
            raise Invalid(f"The model of the registration of `{self.agent.name}` is blank.")


class Registry:
    """Registrations by the name of their agent."""

    def __init__(self) -> None:
        self._by_name: dict[str, Registration] = {}

    def add(self, agent: AgentDefinition | Registration) -> Registration:
        """Register an agent; adding the same again changes nothing.

        Returns:
            What is registered under its name.

        Raises:
            Conflict: another definition is registered under its name, or the same with another model, services or
                probe.
            Invalid: not an agent or a registration.
        """
        new = agent if isinstance(agent, Registration) else Registration(agent)
        name = new.agent.name
        known = self._by_name.setdefault(name, new)
        if known is new or (known.agent is new.agent and agent is new.agent):
            return known
        if known.agent.digest != new.agent.digest:
            raise Conflict(
                f"Another definition of agent `{name}` is registered (digest {known.agent.digest[:12]}, "
                f"this one {new.agent.digest[:12]}).",
                help="Give one of the two another name, or use the registered one.",
            )
        if isinstance(agent, Registration) and (
            (new.model, new.services, new.probe) != (known.model, known.services, known.probe)
        ):
            raise Conflict(f"Agent `{name}` is registered with another model, services or probe.")
        return known

    def get(self, name: str) -> Registration:
        """The registration of the agent called ``name``.

        Raises:
            Invalid: there is none; suggests the nearest name.
        """
        found = self._by_name.get(name)
        if found is not None:
            return found
        near = difflib.get_close_matches(name, self._by_name, n=1)
        if near:
            help = f"Did you mean `{near[0]}`?"
        elif self._by_name:
            help = f"Registered are {', '.join(f'`{one}`' for one in sorted(self._by_name)[:20])}."
        else:
            help = "No agent is registered: give them as agents=[...] when opening."
        raise Invalid(f"No agent is called `{name}`.", help=help)

    def names(self) -> tuple[str, ...]:
        """Names of all registered agents, sorted."""
        return tuple(sorted(self._by_name))
