"""Workflows that processes die in: one scenario for each construct, each touching the world through tasks."""

from __future__ import annotations

from typing import Any

from perdure import Workflow
from perdure.testing.crash import Expected, Scenario
from perdure.testing.evidence import Evidence
from perdure.testing.stage import Stage


def flow(stage: Stage, name: str, **spec: Any) -> Workflow:
    """A workflow whose actions ``NAME`` touch the world as effects of their class; free of approvals."""
    policy = {"approval": "never", "writableRoots": ["out"], **spec.pop("policy", {})}
    made = Workflow(name, policy=policy, **spec)
    made.base = stage.folder
    made.action("set", "builtin.assign")
    made.action("put", "builtin.memory.write")
    return made


def body(stage: Stage, made: Workflow, name: str, effect: str, function: str = "touch", **fields: Any) -> str:
    """An action that touches the world as ``name``."""
    given = {"folder": str(stage.folder), "name": name}
    return made.action(name, "builtin.python", call=f"crash.bodies:{function}", effect=effect, with_=given, **fields)


async def play(stage: Stage, made: Workflow, **options: Any) -> None:
    """Submit one run and finish it."""
    async with stage.open([]) as app:
        receipt = await stage.submit(app, made, None)  # type: ignore[arg-type]
        await stage.finish(app, receipt, **options)


async def plain_flow(stage: Stage) -> None:
    made = flow(stage, "plain", memory={"working": {"n": 0}})
    pay, look = body(stage, made, "pay", "once"), body(stage, made, "look", "observe")
    made.task("a", "action:set", with_={"x": 1})
    made.task("pay", pay, needs=["a"])
    made.task("keep", "action:put", needs=["pay"], with_={"key": "n", "value": "${{ tasks.pay.output }}"})
    made.task("look", look, needs=["keep"])
    await play(stage, made)


async def parallel_flow(stage: Stage) -> None:
    made = flow(stage, "parallel", runtime={"maxConcurrency": 3})
    for name, effect in (("pay", "once"), ("ship", "once"), ("sync", "keyed")):
        made.task(name, body(stage, made, name, effect))
    made.task("end", "action:set", needs=["pay", "ship", "sync"])
    await play(stage, made)


async def matrix_flow(stage: Stage) -> None:
    made = flow(stage, "matrix", runtime={"maxConcurrency": 2})
    pay = body(stage, made, "pay", "once")
    made.task("m", pay, matrix={"axes": {"o": ["o1", "o2"]}}, with_={"order": "${{ vars.matrix.o }}"})
    await play(stage, made)


async def loop_flow(stage: Stage) -> None:
    made = flow(stage, "loop")
    pay = body(stage, made, "pay", "once")
    made.task(
        "l", pay, loop={"maxIterations": 3, "while": "vars.loopIndex < 2"}, with_={"order": "o${{ vars.loopIndex }}"}
    )
    await play(stage, made)


async def router_flow(stage: Stage) -> None:
    made = flow(stage, "router", inputs={"v": "good"})
    pay, ship = body(stage, made, "pay", "once"), body(stage, made, "ship", "once")
    made.task(
        "r",
        "router",
        route={"select": "${{ inputs.v }}", "cases": [{"equals": "good", "tasks": ["a"]}], "default": ["b"]},
    )
    made.task("a", pay, needs=["r"])
    made.task("b", ship, needs=["r"])
    await play(stage, made)


async def sub_workflow_flow(stage: Stage) -> None:
    made = flow(stage, "sub")
    pay = body(stage, made, "pay", "once")
    tasks = [{"id": "p", "uses": pay, "with": {"order": "${{ inputs.o }}"}}]
    sub = made.subworkflow("s", version="1.0.0", tasks=tasks, outputs={"r": "${{ tasks.p.output }}"})
    made.task("one", sub, with_={"o": "o1"})
    made.task("two", sub, needs=["one"], with_={"o": "o2"})
    await play(stage, made)


async def agent_task_flow(stage: Stage) -> None:
    budgets = {"maxProviderRequests": 9, "scope": "lineage"}
    made = flow(stage, "agent", providers={"p": {"kind": "fake"}}, runtime={"budgets": budgets})
    shape = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "additionalProperties": False,
    }
    made.tool(
        "save", "builtin.workspace.write", inputSchema={**shape, "required": ["path", "content"]}, capability="filesystem.write",
        risk="medium", effectClass="workspace_mutate", idempotency="idempotent",
    )  # fmt: skip
    options = {"toolInput": {"path": "out/x.txt", "content": "hi"}, "finalText": "done"}
    agent = made.agent("w", provider="p", model="m", instructions="Work.", tools=["save"], providerOptions=options)
    made.task("w", agent, with_={"prompt": "go"})
    made.task("pay", body(stage, made, "pay", "once"), needs=["w"])
    await play(stage, made)


async def approval_flow(stage: Stage) -> None:
    made = flow(stage, "approval", policy={"approval": "mutations"}, runtime={"maxConcurrency": 2})
    made.task("pay", body(stage, made, "pay", "once"))
    made.task("beside", body(stage, made, "look", "observe", effectKind="observe"))
    await play(stage, made)


async def retry_flow(stage: Stage) -> None:
    made = flow(stage, "retry")
    retry = {"maxAttempts": 3, "backoffMs": 3000, "on": ["tool", "timeout"]}
    made.task("pay", body(stage, made, "pay", "once", "flaky"), retry=retry)
    made.task("sync", body(stage, made, "sync", "keyed", "vanish"), needs=["pay"], retry=retry)
    await play(stage, made)


async def wait_flow(stage: Stage) -> None:
    made = flow(stage, "wait", runtime={"maxConcurrency": 2})
    made.action("wait", "builtin.wait")
    made.task("w", "action:wait", with_={"seconds": 5})
    made.task("pay", body(stage, made, "pay", "once"), needs=["w"])
    await play(stage, made)


async def artifact_flow(stage: Stage) -> None:
    made = flow(stage, "artifact")
    made.action("save", "builtin.write")
    made.action("keep", "builtin.long_term_memory.write")
    made.task("keep", "action:keep", needs=["save"], with_={"key": "k", "content": "kept"})
    made.task("save", "action:save", with_={"path": "out/x.txt", "content": "kept"})
    made.task("pay", body(stage, made, "pay", "once"), needs=["keep"])
    async with stage.open([]) as app:
        receipt = await stage.submit(app, made, None)  # type: ignore[arg-type]
        await stage.finish(app, receipt)
        store = app.workflows.artifacts
        await store.collect(0.0)
        [kept] = app.store.read(lambda tx: tx.ledger.artifacts(run=receipt.run))
        assert await store.verify(kept.digest) is None, "what a task refers to is never collected"


def approved(evidence: Evidence) -> list[str]:
    """What asks a person took place only after somebody approved it."""
    unasked = evidence.world.count("pay") and not evidence.people.noted("approved")
    return ["pay took place and nobody approved it."] if unasked else []


FLOWS: list[Scenario] = [
    Scenario("plain workflow", plain_flow, Expected(effects={"pay": "once", "look": "observe"}, in_flight=1)),
    Scenario(
        "parallel tasks", parallel_flow, Expected(effects={"pay": "once", "ship": "once", "sync": "keyed"}, in_flight=2)
    ),
    Scenario("matrix of tasks", matrix_flow, Expected(effects={"pay": "once"}, in_flight=2)),
    Scenario("loop of tasks", loop_flow, Expected(effects={"pay": "once"}, in_flight=1)),
    Scenario("router of tasks", router_flow, Expected(effects={"pay": "once"}, in_flight=1)),
    Scenario("sub-workflow", sub_workflow_flow, Expected(effects={"pay": "once"}, in_flight=1)),
    Scenario(
        "agent as a task", agent_task_flow, Expected(effects={"pay": "once"}, unwitnessed=frozenset({"save", "model"}))
    ),
    Scenario(
        "approval of a task",
        approval_flow,
        Expected(effects={"pay": "once", "look": "observe"}, check=approved, in_flight=1),
    ),
    Scenario(
        "task tried again",
        retry_flow,
        Expected(effects={"pay": "once", "sync": "keyed", "try-pay": "observe", "try-sync": "observe"}, in_flight=1),
    ),
    Scenario("task that waits", wait_flow, Expected(effects={"pay": "once"}, in_flight=1)),
    Scenario(
        "artifact of a task",
        artifact_flow,
        Expected(
            effects={"pay": "once"},
            unwitnessed=frozenset({"builtin.write", "builtin.long_term_memory.write"}),
            in_flight=1,
        ),
    ),
]
