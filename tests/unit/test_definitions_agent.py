"""Agents, policies and the registry: what they hold, what makes two the same, and every bad input."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from perdure.definitions.agent import AgentDefinition
from perdure.definitions.policy import Policy
from perdure.definitions.registry import Registration, Registry
from perdure.definitions.tool import tool
from perdure.errors import Conflict, Invalid
from support.naming import stable


class Ticket(BaseModel):
    order: str


class Arbitrary:
    pass


@tool(effect="observe")
def look(order: str) -> str:
    """Look an order up."""
    return order


@tool
def pay(cents: int) -> str:
    """Pay."""
    return str(cents)


def instruct(ticket: Ticket) -> str:
    return f"Settle {ticket.order}."


def say(what: Any, ticket: Ticket) -> str:
    return f"{what} {ticket.order}."


class Speaker:
    def __call__(self, ticket: Ticket) -> str:
        return "Settle."


async def instruct_async(ticket: Ticket) -> str:
    return f"Settle {ticket.order}."


# ------------------------------------------------------------------------------------------ policy


def test_policy_defaults_are_finite() -> None:
    policy = Policy()
    assert policy.values() == {
        "max_turns": 16, "max_tool_calls": 64, "max_duration": None, "concurrency": 4, "token_budget": None,
        "cost_budget": None, "model_calls": "repeat", "on_exhaustion": "final-answer",
        "repeated_failure_limit": 3, "output_retries": 2, "tool_result_bytes": 51_200,
    }  # fmt: skip
    assert policy.duration_seconds(waiting=False) == 30 * 60
    assert policy.duration_seconds(waiting=True) == 7 * 24 * 3600


@pytest.mark.parametrize("given", ["30m", 1800, 1800.0, dt.timedelta(minutes=30)])
def test_policy_durations_are_seconds(given: Any) -> None:
    policy = Policy(max_duration=given)
    assert policy == Policy(max_duration=1800.0)
    assert policy.duration_seconds(waiting=True) == policy.duration_seconds(waiting=False) == 1800.0


@pytest.mark.parametrize(
    ("options", "legal"),
    [
        ({"max_turns": 0}, "1 to 1,000,000"),
        ({"max_turns": 1_000_001}, "1 to 1,000,000"),
        ({"max_turns": None}, "1 to 1,000,000"),
        ({"max_turns": True}, "1 to 1,000,000"),
        ({"max_turns": 1.0}, "1 to 1,000,000"),
        ({"max_turns": "16"}, "1 to 1,000,000"),
        ({"max_tool_calls": -1}, "0 to 1,000,000"),
        ({"concurrency": 0}, "1 to 1,024"),
        ({"concurrency": 1025}, "1 to 1,024"),
        ({"token_budget": 0}, "1 to 9,007,199,254,740,991, or None"),
        ({"repeated_failure_limit": -1}, "0 to 1,000,000"),
        ({"output_retries": -1}, "0 to 1,000,000"),
        ({"tool_result_bytes": 255}, "256 to 1,048,576"),
        ({"tool_result_bytes": 2**20 + 1}, "256 to 1,048,576"),
        ({"model_calls": "twice"}, "Use 'repeat' or 'once'"),
        ({"on_exhaustion": "stop"}, "Use 'final-answer' or 'fail'"),
        ({"cost_budget": 0}, "0.000001"),
        ({"cost_budget": "many"}, "Use dollars"),
        ({"cost_budget": float("nan")}, "Use dollars"),
        ({"cost_budget": True}, "Use dollars"),
        ({"model_calls": None}, "Use 'repeat'"),
        ({"max_duration": 0}, "above zero"),
        ({"max_duration": "0s"}, "above zero"),
        ({"max_duration": -1}, "'30s'"),
        ({"max_duration": "soon"}, "'30s'"),
        ({"max_duration": True}, "'30s'"),
        ({"max_duration": float("inf")}, "'30s'"),
        ({"max_duration": []}, "'30s'"),
    ],
    ids=str,
)
def test_a_bad_policy_lists_what_is_legal(options: dict[str, Any], legal: str) -> None:
    with pytest.raises(Invalid) as caught:
        Policy(**options)
    (name,) = options
    assert f"Policy.{name}" in str(caught.value)
    assert legal in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"max_turns": 1_000_000, "max_tool_calls": 0, "concurrency": 1024, "token_budget": 1},
        {"repeated_failure_limit": 0, "output_retries": 0, "tool_result_bytes": 256, "model_calls": "repeat"},
    ],
)
def test_the_ends_of_the_ranges_are_legal(options: dict[str, Any]) -> None:
    assert Policy(**options).values().items() >= options.items()


def test_a_policy_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Policy().max_turns = 3  # type: ignore[misc]


# ------------------------------------------------------------------------------------------ agent


def test_what_a_bare_agent_holds() -> None:
    agent = AgentDefinition("support")
    assert (agent.name, agent.input, agent.output, agent.instructions, agent.tools) == ("support", str, str, "", ())
    assert agent.input_codec.is_text
    assert agent.output_codec.is_text
    assert (agent.model, agent.policy, agent.disposition, agent.description) == (None, Policy(), None, "")
    assert (agent.metadata, agent.settings) == ({}, {})
    assert not agent.may_wait
    assert agent.duration_seconds == 1800
    assert repr(agent) == "<AgentDefinition support>"


def test_what_a_full_agent_holds() -> None:
    tag = str.lower
    settings = {"temperature": 0.5, "stop": ["x"]}
    agent = AgentDefinition(
        "support", input=Ticket, output=list[int], instructions=instruct, tools=[look, pay], model="openai:gpt-5.6",
        policy=Policy(max_turns=2), disposition=tag, description="Settles.", metadata={"team": "a"}, settings=settings,
    )  # fmt: skip
    assert agent.tools == (look, pay)
    assert agent.tool("pay") is pay
    assert agent.tool("nope") is None
    assert agent.input_codec.decode(b'{"order":"o"}') == Ticket(order="o")
    assert agent.output_codec.decode(b"[1]") == [1]
    assert agent.disposition is tag
    assert agent.settings == settings
    settings["stop"].append("y")  # type: ignore[attr-defined]
    assert agent.settings == {"temperature": 0.5, "stop": ["x"]}


def test_an_agent_may_wait_if_a_tool_asks_or_is_once() -> None:
    asks = tool(effect="observe", approval=lambda a: False)(look.fn)
    assert not AgentDefinition("a", tools=[look]).may_wait
    for one in (pay, asks, tool(steps=True)(look.fn)):
        agent = AgentDefinition("a", tools=[one])
        assert agent.may_wait
        assert agent.duration_seconds == 7 * 24 * 3600


def test_an_agent_is_immutable_and_can_be_extended() -> None:
    class Agent(AgentDefinition):
        def __init__(self, name: str, **options: Any) -> None:
            super().__init__(name, **options)
            self.extra = 1

    agent = Agent("a")
    agent.extra = 2
    assert agent.digest == AgentDefinition("a").digest
    assert repr(agent) == "<Agent a>"
    for name in ("name", "tools", "policy", "instructions", "model"):
        with pytest.raises(AttributeError, match="cannot be changed"):
            setattr(agent, name, None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": ""}, "empty"),
        ({"name": " "}, "blank"),
        ({"name": None}, "NoneType"),
        ({"name": "a\n"}, "control"),
        ({"name": "a" * 257}, "257"),
        ({"input": Arbitrary}, "The input of agent `a` has the type `Arbitrary`"),
        ({"output": list[Arbitrary]}, "The output of agent `a` has the type"),
        ({"output": "Ticket"}, "The output of agent `a`"),
        ({"instructions": None}, "NoneType"),
        ({"instructions": Arbitrary}, "text or a function"),
        ({"instructions": lambda: ""}, "exactly one argument"),
        ({"instructions": "x" * 65_537}, "65,537"),
        ({"instructions": "\ud800"}, "surrogate"),
        ({"tools": [look, look]}, "two tools named `look`"),
        ({"tools": [look.fn]}, "Decorate the function with @tool"),
        ({"tools": look}, "Tool"),
        ({"tools": "look"}, "list of tools"),
        ({"tools": [None]}, "no tool"),
        ({"model": ""}, "blank"),
        ({"model": " "}, "blank"),
        ({"policy": {"max_turns": 3}}, "Policy(...)"),
        ({"disposition": "x"}, "function"),
        ({"disposition": instruct_async}, "not async"),
        ({"disposition": lambda: 1}, "exactly one argument"),
        ({"description": None}, "description"),
        ({"metadata": {"a": 1}}, "text to text"),
        ({"metadata": "a"}, "text to text"),
        ({"settings": [1]}, "JSON values"),
        ({"settings": {"a": object()}}, "settings of agent `a`"),
        ({"settings": {"a": (1,)}}, "tuple"),
        ({"settings": {"a": float("nan")}}, "nan"),
    ],
    ids=stable,
)
def test_a_bad_agent_is_invalid(options: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid) as caught:
        AgentDefinition(**{"name": "a", **options})
    assert says in str(caught.value)


# ------------------------------------------------------------------------------------------ digest


def base(**options: Any) -> str:
    given: dict[str, Any] = {"name": "a", "instructions": "x", "tools": [look], **options}
    return AgentDefinition(**given).digest


DIFFERENT: list[dict[str, Any]] = [
    {},
    {"name": "b"},
    {"input": int},
    {"output": Ticket},
    {"instructions": "y"},
    {"instructions": instruct},
    {"instructions": instruct_async},
    {"instructions": lambda ticket: "x"},
    {"instructions": functools.partial(instruct)},
    {"instructions": functools.partial(say, "a")},
    {"instructions": functools.partial(say, "b")},
    {"instructions": functools.partial(say, Arbitrary())},
    {"instructions": Speaker()},
    {"tools": []},
    {"tools": [pay]},
    {"tools": [look, pay]},
    {"tools": [pay, look]},
    {"tools": [tool(effect="observe", description="Other.")(look.fn)]},
    {"tools": [tool(effect="observe", version="2")(look.fn)]},
    {"tools": [tool(effect="observe", approval=True)(look.fn)]},
    {"tools": [tool(effect="observe", approval=lambda a: True)(look.fn)]},
    {"tools": [tool(effect="observe", risk="high")(look.fn)]},
    {"tools": [tool(effect="observe", on_failure="fail")(look.fn)]},
    {"policy": Policy(max_turns=3)},
    {"policy": Policy(max_duration="5m")},
    {"model": "openai:a"},
    {"model": "openai:b"},
    {"settings": {"temperature": 0.5}},
    {"disposition": str.lower},
]


def test_a_digest_is_what_the_definition_is() -> None:
    digests = [base(**options) for options in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert digests == [base(**options) for options in DIFFERENT]
    assert all(len(digest) == 64 for digest in digests)


def test_what_does_not_make_another_definition() -> None:
    assert base(model=Arbitrary()) == base(model=Arbitrary()) == base()
    assert base(description="d", metadata={"a": "b"}) == base()
    assert base(policy=Policy()) == base()
    assert base(policy=Policy(max_duration="60s")) == base(policy=Policy(max_duration=60))


def test_a_digest_is_made_once() -> None:
    agent = AgentDefinition("a")
    assert agent.digest is agent.digest


def test_a_function_counts_by_source() -> None:
    def make(source: str) -> Callable[..., Any]:
        space: dict[str, Any] = {"__name__": "made"}
        exec(source, space)
        return space["f"]  # type: ignore[no-any-return]

    unreadable = base(instructions=make("def f(x): return 'a'"))
    assert unreadable == base(instructions=make("def f(x): return 'b'"))  # no source to read: by name only
    assert unreadable != base(instructions=make("def f(x): return 'a'\nf.__qualname__ = 'g'"))


def test_a_digest_is_the_same_in_another_process() -> None:
    code = (
        "from perdure.definitions.agent import AgentDefinition\n"
        "from perdure.definitions.tool import tool\n"
        "from perdure.definitions.policy import Policy\n"
        "def f(a: set[str], b: dict[str, int | None]) -> list[int]:\n"
        "    '''Do.\n\n    Args:\n        a: names.\n    '''\n"
        "print(AgentDefinition('a', instructions=len, tools=[tool(f)], policy=Policy()).digest)\n"
    )
    seen = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env).stdout
        for env in ({"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)} for seed in ("1", "2"))
    }
    assert len(seen) == 1


# ------------------------------------------------------------------------------------------ registry


def test_a_registry_knows_one_definition_a_name() -> None:
    registry = Registry()
    first = AgentDefinition("b", instructions="x")
    assert registry.add(first).agent is first
    assert registry.add(first).agent is first
    assert registry.add(AgentDefinition("b", instructions="x")).agent is first
    registration = Registration(AgentDefinition("a"), model="openai:x", services=lambda: None, probe=lambda call: None)
    assert registry.add(registration) is registration
    assert registry.add(registration) is registration
    assert registry.add(registration.agent) is registration
    assert registry.names() == ("a", "b")
    assert registry.get("a") is registration
    with pytest.raises(Conflict, match="Another definition of agent `b`"):
        registry.add(AgentDefinition("b", instructions="y"))
    with pytest.raises(Conflict, match="another model, services or probe"):
        registry.add(Registration(registration.agent, model="openai:y"))
    assert registry.get("b").agent is first
    assert registry.names() == ("a", "b")


def test_an_unknown_name_suggests_the_nearest() -> None:
    registry = Registry()
    with pytest.raises(Invalid, match="No agent is registered"):
        registry.get("support")
    registry.add(AgentDefinition("support"))
    with pytest.raises(Invalid, match="Did you mean `support`"):
        registry.get("suport")
    with pytest.raises(Invalid, match="Registered are `support`"):
        registry.get("zzz")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Registry().add("support"),  # type: ignore[arg-type]
        lambda: Registry().add(None),  # type: ignore[arg-type]
        lambda: Registration(look),  # type: ignore[arg-type]
        lambda: Registration(AgentDefinition("a"), services=3),  # type: ignore[arg-type]
        lambda: Registration(AgentDefinition("a"), probe="x"),  # type: ignore[arg-type]
        lambda: Registration(AgentDefinition("a"), model=" "),
    ],
)
def test_a_bad_registration_is_invalid(make: Callable[[], Any]) -> None:
    with pytest.raises(Invalid):
        make()


def test_a_registration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Registration(AgentDefinition("a")).model = 1  # type: ignore[misc]
