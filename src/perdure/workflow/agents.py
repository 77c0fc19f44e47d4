"""Agents as tasks: their turns run inline, in the same attempt, on the same thread, under the same budget.

Each try of the task has a run of its own for its turns; what an earlier try said is not shown to the next. The output is
the structured answer, or the text and what it used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure import canonical
from perdure.agent.batch import Toolbox
from perdure.agent.loop import Emit, Interpreter
from perdure.definitions.agent import AgentDefinition
from perdure.definitions.policy import Policy
from perdure.definitions.workflow import Agent, Provider
from perdure.engine.attempt import Attempt, Parked, Part, Settled, Suspended, Yielded
from perdure.errors import Error, Invalid
from perdure.limits import FAILURE_MESSAGE_CHARS_MAX
from perdure.ports.provider import Model
from perdure.records.parts import Failure
from perdure.records.task import TaskStarted
from perdure.workflow import templates
from perdure.workflow.outcomes import Broken, Done, Left, Outcome, RetryKind
from perdure.workflow.plan import Plan, PlannedTask
from perdure.workflow.purse import BudgetPurse
from perdure.workflow.toolset import Tools, schema_codec
from perdure.workflow.values import Given, Values

Models = Callable[[str, Provider, Agent, Plan], Model]
"""The model of an agent: its provider's name, the provider, the agent, the plan (prices, policy)."""

_RETRIES: dict[str, RetryKind] = {"model.rate_limit": "rate_limit", "timeout": "timeout", "model": "transport"}


class Agents:
    """The agent tasks of one attempt.

    Args:
        models: who answers.
        reserved: what tasks in flight reserved of the budget, shared by all of them.
        emit: told events of a task's turns, with the task's id; None: nobody is.
    """

    def __init__(
        self,
        attempt: Attempt,
        plan: Plan,
        values: Values,
        tools: Tools,
        models: Models,
        reserved: dict[str, int],
        emit: Callable[[str], Emit | None] | None = None,
    ) -> None:
        self._attempt = attempt
        self._plan = plan
        self._values = values
        self._tools = tools
        self._models = models
        self._reserved = reserved
        self._emit = emit

    def begin(self, task: PlannedTask, attempt: int) -> TaskStarted:
        """The record of a try that begins."""
        run = self._attempt.run.id
        return TaskStarted(
            run, task.id, attempt, "agent", definition=task.definition, agent=f"{run}.{task.id}.{attempt}"
        )  # fmt: skip

    async def perform(self, task: PlannedTask, given: Given) -> Outcome:
        """Go on with the turns of the try that runs, until they end or wait."""
        flow, submission = self._attempt.run.flow, self._attempt.submission
        assert flow is not None
        assert submission is not None
        state = flow.tasks[task.id]
        agent = self._plan.agents[task.target]
        prompt = given.value.get("prompt")
        text = prompt if isinstance(prompt, str) else canonical.encode(given.value, "input").decode()
        lineage = f"{flow.started.lineage or self._attempt.run.id}.{task.id}"
        try:
            definition = self._definition(task, agent)
            model = self._models(agent.provider, self._plan.providers[agent.provider], agent, self._plan)
        except Error as error:
            return Broken(Failure("model.setup", str(error)[:FAILURE_MESSAGE_CHARS_MAX]))
        inner = replace(submission, run=state.agent, program=definition.name, input=msgspec.json.encode(text))
        part = Part(self._attempt, inner, lineage)
        return await self._turns(task, agent, definition, model, part)

    async def _turns(
        self, task: PlannedTask, agent: Agent, definition: AgentDefinition, model: Model, part: Part
    ) -> Outcome:
        budgets = self._plan.budget.limits
        flow = self._attempt.run.flow
        assert flow is not None
        lineage = (flow.started.lineage or self._attempt.run.id) if budgets.scope == "lineage" else ""
        purse = BudgetPurse(self._attempt, task.id, self._reserved, lineage)
        emit = self._emit(task.id) if self._emit is not None else None
        interpreter = Interpreter(
            part, definition, Toolbox(definition), model, emit=emit, superseded=self._attempt.superseded, purse=purse
        )
        while True:
            seen = self._attempt.state.tail
            ended = await interpreter.advance()
            match ended:
                case Settled():
                    return self._outcome(agent, part)
                case Parked():
                    return Left("unknown")
                case Suspended():
                    return Left("approval")
                case Yielded():
                    pass  # something was decided meanwhile
            if self._attempt.interrupted is not None:
                raise asyncio.CancelledError
            if self._attempt.state.tail == seen:
                return Left("again")

    def _outcome(self, agent: Agent, part: Part) -> Outcome:
        if part.ended == "completed":
            assert part.run.completed is not None
            output = canonical.decode(part.run.completed.output)
            if agent.structured_output is not None:
                return Done(output)
            used = part.run.usage
            return Done({"text": output, "usage": {"inputTokens": used.input, "outputTokens": used.output}})
        failure = part.failure or Failure("cancelled", "The agent was cancelled.")
        if part.run.unknowns():
            return Left("unknown")
        return Broken(failure, retry=_RETRIES.get(failure.kind, "tool" if failure.kind == "tool" else ""))

    def _definition(self, task: PlannedTask, agent: Agent) -> AgentDefinition:
        """The agent as the interpreter of agents takes it.

        Raises:
            Invalid: a tool is denied or missing. ExpressionError: its instructions cannot be rendered.
        """
        scope = self._values.scope(task, self._values.memory(task.id))
        text = self._plan.instructions.get(task.target, agent.instructions or "")
        instructions = templates.parse(text, "instructions").render(scope)
        if not isinstance(instructions, str):
            raise Invalid(f"The instructions of agent {task.target!r} are not text.")
        limit = agent.usage_limit
        tokens = None
        if limit is not None and (limit.max_input_tokens or limit.max_output_tokens):
            tokens = (limit.max_input_tokens or 0) + (limit.max_output_tokens or 0)
        policy = Policy(
            max_turns=agent.max_turns, max_tool_calls=agent.max_tool_calls, concurrency=1, token_budget=tokens,
            cost_budget=None if limit is None else limit.max_cost_usd, model_calls=agent.model_calls,
            on_exhaustion="fail", output_retries=0, repeated_failure_limit=0, max_duration="7d",
        )  # fmt: skip
        settings: dict[str, Any] = {"max_tokens": agent.max_output_tokens}
        if agent.reasoning is not None:
            settings["reasoning_effort"] = agent.reasoning.effort
        return AgentDefinition(
            task.target, instructions=instructions, tools=self._tools.of(task.id, agent.tools), policy=policy,
            output=str if agent.structured_output is None else schema_codec(agent.structured_output), settings=settings,
        )  # fmt: skip
