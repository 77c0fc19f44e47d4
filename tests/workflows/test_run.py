"""What a run of a workflow does: graph, memory, conditions, failure, retry, waits; read back from the store and verified."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import perdure as p
from support.flows import Flows, calls, opened, outputs, states, task

pytestmark = pytest.mark.anyio

NOTE = "note: {kind: builtin.python, call: 'support.flows:note', effect: once}"
FREE = "policy: {approval: never}\n"


@pytest.fixture
async def flows(tmp_path: Path) -> AsyncIterator[Flows]:
    calls.clear()
    async with opened(tmp_path) as found:
        yield found


async def test_values_flow_and_keep_their_types(flows: Flows) -> None:
    view = await flows.run(
        """
        inputs: {n: 3, flag: true}
        vars: {greeting: hello}
        actions: {set: {kind: builtin.assign}}
        tasks:
          - {id: a, uses: "action:set", with: {n: "${{ inputs.n }}", text: "${{ vars.greeting }} ${{ inputs.n }}"}}
          - {id: b, uses: "action:set", needs: [a], with: {all: "${{ tasks.a.output.output }}", more: "${{ inputs.n + 1 }}"}}
        outputs: {b: "${{ tasks.b.output.output }}", flag: "${{ inputs.flag }}"}
        """,
        {"n": 4},
    )
    assert view.output == {"b": {"all": {"n": 4, "text": "hello 4"}, "more": 5}, "flag": True}


async def test_without_outputs_a_run_gives_those_of_its_tasks(flows: Flows) -> None:
    view = await flows.run("actions: {set: {kind: builtin.assign}}\ntasks: [{id: a, uses: 'action:set', with: {x: 1}}]")
    assert view.output["a"]["output"] == {"x": 1}


async def test_memory_is_read_as_it_was_when_the_batch_began(flows: Flows) -> None:
    view = await flows.run(
        """
        runtime: {maxConcurrency: 2}
        memory: {working: {k: old}}
        actions: {set: {kind: builtin.assign}, put: {kind: builtin.memory.write}, get: {kind: builtin.memory.read}}
        tasks:
          - {id: write, uses: "action:put", with: {key: k, value: new}}
          - {id: beside, uses: "action:set", with: {k: "${{ memory.k }}"}}
          - {id: after, uses: "action:get", needs: [write], with: {key: k}}
        outputs: {memory: "${{ memory.k }}"}
        """
    )
    found = outputs(view)
    assert found["beside"]["output"] == {"k": "old"}
    assert found["after"]["value"] == "new"
    assert found["write"] == {"status": "succeeded", "changed": True, "before": "old", "after": "new", "key": "k"}
    assert view.output == {"memory": "new"}
    assert view.memory == {"k": "new"}
    assert task(view, "write").delta == {"formatVersion": 1, "set": {"k": "new"}, "remove": []}


async def test_a_template_key_is_held_to_what_was_declared(flows: Flows) -> None:
    view = await flows.run(
        """
        inputs: {key: other}
        actions: {put: {kind: builtin.memory.write}}
        tasks: [{id: w, uses: "action:put", memoryWrites: [k], with: {key: "${{ inputs.key }}", value: 1}}]
        """
    )
    assert view.state == "failed"
    assert "may not write the key 'other'" in str(task(view, "w").failure)
    assert view.memory == {}


async def test_a_false_condition_skips_and_what_needs_it_is_skipped(flows: Flows) -> None:
    view = await flows.run(
        """
        inputs: {go: false}
        actions: {set: {kind: builtin.assign}}
        tasks:
          - {id: a, uses: "action:set", when: "inputs.go"}
          - {id: b, uses: "action:set", needs: [a]}
          - {id: c, uses: "action:set", when: "${{ not inputs.go }}"}
        outputs: {}
        """
    )
    assert states(view) == {"a": "skipped", "b": "skipped", "c": "succeeded"}
    decision = task(view, "a").output["condition"]
    assert (task(view, "a").output["reason"], decision["result"]) == ("when condition was false", False)
    assert len(decision["contextDigest"]) == 64
    assert task(view, "b").output == {"reason": "dependency did not succeed"}
    assert task(view, "c").decision["result"] is True
    assert view.state == "completed"


@pytest.mark.parametrize(
    ("value", "chosen"), [("ok", "good"), (1, "one"), ("1", "other"), (True, "other"), (None, "other")]
)
async def test_a_router_compares_json_values(flows: Flows, value: object, chosen: str) -> None:
    view = await flows.run(
        """
        inputs: {v: null}
        actions: {set: {kind: builtin.assign}}
        tasks:
          - {id: r, uses: router, route: {select: "${{ inputs.v }}",
             cases: [{equals: ok, tasks: [good]}, {equals: 1, tasks: [one]}], default: [other]}}
          - {id: good, uses: "action:set", needs: [r]}
          - {id: one, uses: "action:set", needs: [r]}
          - {id: other, uses: "action:set", needs: [r]}
        """,
        {"v": value},
    )
    assert [id for id, state in states(view).items() if state == "succeeded"] == ["r", chosen]
    assert task(view, "r").output == {"selected": value, "matched": chosen != "other", "destinations": [chosen]}
    skipped = next(t for t in view.tasks if t.state == "skipped")
    assert (skipped.output["reason"], skipped.output["route"]["router"]) == ("route not selected", "r")


async def test_a_loop_runs_while_its_condition_holds(flows: Flows) -> None:
    spec = """
        inputs: {most: 3}
        actions: {set: {kind: builtin.assign}}
        tasks:
          - id: l
            uses: action:set
            loop: {maxIterations: 5, while: "${{ vars.loopIndex < inputs.most }}", initial: {output: {sum: 0}}}
            with: {sum: "${{ loop.output.output.sum + vars.loopIndex }}"}
        """
    view = await flows.run(spec)
    last = task(view, "l").output
    assert last["iterations"] == 3
    assert [item["state"] for item in last["items"]] == ["succeeded"] * 3 + ["skipped"] * 2
    assert [item["output"]["output"]["sum"] for item in last["items"][:3]] == [0, 1, 3]
    over = await flows.run(spec, {"most": 9})
    assert over.state == "failed"
    assert "still true" in str(over.failure)


async def test_foreach_and_matrix_children_are_tasks_of_their_own(flows: Flows) -> None:
    view = await flows.run(
        """
        runtime: {maxConcurrency: 3}
        actions: {set: {kind: builtin.assign}}
        tasks:
          - {id: e, uses: "action:set", foreach: {items: [x, y], as: who}, with: {v: "${{ vars.who }}${{ vars.foreachIndex }}"}}
          - {id: m, uses: "action:set", matrix: {axes: {b: [1, 2], a: [p]}}, with: {v: "${{ vars.matrix.a }}${{ vars.matrix.b }}"}}
        outputs: {e: "${{ tasks.e.output.items }}", m: "${{ tasks.m.output.items }}"}
        """
    )
    assert [item["output"]["output"]["v"] for item in view.output["e"]] == ["x0", "y1"]
    assert [item["output"]["output"]["v"] for item in view.output["m"]] == ["p1", "p2"]
    assert [t.id[:7] for t in view.tasks if t.id.startswith("e--")] == ["e--0000", "e--0001"]


async def test_an_aggregate_runs_although_a_child_failed(flows: Flows) -> None:
    view = await flows.run(
        """
        actions: {check: {kind: builtin.assert}}
        tasks:
          - {id: e, uses: "action:check", failure: continue, foreach: {items: [true, false]}, with: {that: "${{ vars.item }}"}}
        """
    )
    assert [item["state"] for item in task(view, "e").output["items"]] == ["succeeded", "failed"]
    assert task(view, "e").output["items"][1]["error"] == "the assertion does not hold"
    assert (task(view, "e").state, view.state) == ("succeeded", "failed")


async def test_a_sub_workflow_has_names_of_its_own(flows: Flows) -> None:
    view = await flows.run(
        """
        inputs: {who: ada}
        memory: {working: {k: outer}}
        actions: {set: {kind: builtin.assign}, put: {kind: builtin.memory.write}}
        subworkflows:
          greet:
            version: 1.0.0
            inputs: {word: hi}
            inputSchema: {type: object, required: [who], properties: {who: {type: string}}}
            outputs: {text: "${{ tasks.say.output.output.text }}"}
            tasks:
              - {id: say, uses: "action:set", with: {text: "${{ inputs.word }} ${{ inputs.who }}, inputs.word stays"}}
              - {id: keep, uses: "action:put", needs: [say], with: {key: k, value: inner}}
        tasks:
          - {id: one, uses: "workflow:greet", with: {who: "${{ inputs.who }}"}}
          - {id: two, uses: "workflow:greet", needs: [one], with: {who: "${{ tasks.one.output.text }}", word: ho}}
        outputs: {two: "${{ tasks.two.output.text }}"}
        """
    )
    assert view.output == {"two": "ho hi ada, inputs.word stays, inputs.word stays"}
    assert view.memory == {"k": "outer", "one--k": "inner", "two--k": "inner"}
    bad = await flows.run(
        """
        actions: {set: {kind: builtin.assign}}
        subworkflows: {s: {version: 1.0.0, inputSchema: {required: [x]}, tasks: [{id: t, uses: "action:set"}]}}
        tasks: [{id: a, uses: "workflow:s"}]
        """
    )
    assert "do not fit its inputSchema" in str(bad.failure)
    assert states(bad)["a--t"] == "cancelled"


async def test_a_failure_stops_the_run_or_only_what_needs_it(flows: Flows) -> None:
    spec = """
        actions: {check: {kind: builtin.assert}, set: {kind: builtin.assign}}
        tasks:
          - {id: bad, uses: "action:check", failure: %s, with: {that: false, message: no}}
          - {id: needs, uses: "action:set", needs: [bad]}
          - {id: free, uses: "action:set"}
        """
    stopped = await flows.run(spec % "stop")
    assert states(stopped) == {"bad": "failed", "needs": "cancelled", "free": "cancelled"}
    assert (stopped.failure.kind, stopped.failure.message) == ("assertion", "Task 'bad' failed: no")  # type: ignore[union-attr]
    went_on = await flows.run(spec % "continue")
    assert states(went_on) == {"bad": "failed", "needs": "skipped", "free": "succeeded"}
    assert went_on.state == "failed"


async def test_outputs_are_checked(flows: Flows) -> None:
    view = await flows.run(
        """
        actions: {set: {kind: builtin.assign}}
        tasks: [{id: a, uses: "action:set", with: {x: one}, outputSchema: {properties: {output: {properties: {x: {type: integer}}}}}}]
        """
    )
    assert (view.state, view.failure.kind) == ("failed", "output")  # type: ignore[union-attr]
    assert "$.output.x" in view.failure.message  # type: ignore[union-attr]


async def test_a_template_without_a_value_fails_its_task(flows: Flows) -> None:
    view = await flows.run(
        "actions: {set: {kind: builtin.assign}}\ntasks: [{id: a, uses: 'action:set', with: {x: '${{ inputs.gone }}'}}]"
    )
    assert view.failure is not None
    assert view.failure.kind == "template"


async def test_a_failed_try_is_followed_by_another(flows: Flows) -> None:
    view = await flows.run(
        FREE
        + """
        actions: {flaky: {kind: builtin.python, call: "support.flows_bodies:flaky", effect: idempotent}}
        tasks:
          - {id: a, uses: "action:flaky", retry: {maxAttempts: 3, backoffMs: 20, on: [tool]}, with: {fails: 2}}
        """.replace("\n        ", "\n")
    )
    assert (task(view, "a").state, task(view, "a").attempt) == ("succeeded", 3)
    assert len({call["key"] for call in calls}) == 1, "one key in every try"
    assert len(calls) == 3


async def test_a_retry_is_bounded_and_only_for_what_it_names(flows: Flows) -> None:
    spec = """
        actions: {flaky: {kind: builtin.python, call: "support.flows_bodies:flaky", effect: idempotent}}
        policy: {approval: never}
        tasks: [{id: a, uses: "action:flaky", retry: {maxAttempts: 2, on: [%s]}, with: {fails: 9}}]
        """
    assert task(await flows.run(spec % "tool"), "a").attempt == 2
    assert task(await flows.run(spec % "timeout"), "a").attempt == 1


async def test_a_wait_holds_no_worker_and_ends(flows: Flows) -> None:
    run = await flows.submit(
        """
        actions: {wait: {kind: builtin.wait}, set: {kind: builtin.assign}}
        tasks: [{id: w, uses: "action:wait", with: {seconds: 1.5}}, {id: after, uses: "action:set", needs: [w]}]
        """
    )
    waits = await flows.until(run, lambda view: view.state == "suspended")
    assert states(waits) == {"w": "waiting", "after": "pending"}
    assert flows.app.worker is not None
    assert flows.app.worker.busy == 0
    await flows.app.settlement(run, timeout=10)
    assert states(await flows.view(run)) == {"w": "succeeded", "after": "succeeded"}


async def test_an_approval_holds_only_what_needs_it(flows: Flows) -> None:
    run = await flows.submit(
        """
        runtime: {maxConcurrency: 2}
        actions: {gate: {kind: builtin.approval, title: deploy}, set: {kind: builtin.assign}}
        tasks:
          - {id: gate, uses: "action:gate", with: {details: {to: prod}}}
          - {id: deploy, uses: "action:set", needs: [gate]}
          - {id: other, uses: "action:set"}
          - {id: more, uses: "action:set", needs: [other]}
        """
    )
    view = await flows.until(run, lambda view: view.state == "suspended")
    assert states(view) == {
        "gate": "waiting_for_approval",
        "deploy": "pending",
        "other": "succeeded",
        "more": "succeeded",
    }
    [asked] = await flows.app.approvals(run=run)
    assert asked.arguments == {"title": "deploy", "details": {"to": "prod"}}
    await flows.app.approve(asked.id, by="ada", reason="looked")
    await flows.app.settlement(run, timeout=10)
    done = await flows.view(run)
    assert task(done, "gate").output == {
        "status": "succeeded",
        "changed": False,
        "approved": True,
        "by": "ada",
        "reason": "looked",
    }
    assert done.state == "completed"


async def test_a_rejection_fails_the_task_and_nothing_was_dispatched(flows: Flows) -> None:
    run = await flows.submit(f"actions: {{{NOTE}}}\ntasks: [{{id: a, uses: 'action:note', with: {{x: 1}}}}]")
    await flows.until(run, lambda view: view.state == "suspended")
    [asked] = await flows.app.approvals(run=run)
    await flows.app.reject(asked.id, by="ada", reason="no")
    await flows.app.settlement(run, timeout=10)
    view = await flows.view(run)
    assert (view.state, calls) == ("failed", [])
    assert "rejected by ada: no" in str(view.failure)


async def test_an_approval_that_nobody_gives_expires(flows: Flows) -> None:
    view = await flows.run(
        "actions: {gate: {kind: builtin.approval, expiresInSeconds: 1}}\ntasks: [{id: g, uses: 'action:gate'}]"
    )
    assert "expired" in str(view.failure)
    assert [one.status for one in await flows.app.approvals(status=None)] == ["expired"]


async def test_an_unknown_parks_its_branch_only_and_a_verdict_leads_on(flows: Flows) -> None:
    run = await flows.submit(
        """
        policy: {approval: never}
        runtime: {maxConcurrency: 2}
        actions: {lost: {kind: builtin.python, call: "support.flows_bodies:lost"}, set: {kind: builtin.assign}}
        tasks:
          - {id: pay, uses: "action:lost"}
          - {id: mail, uses: "action:set", needs: [pay], with: {r: "${{ tasks.pay.output }}"}}
          - {id: free, uses: "action:set"}
          - {id: freer, uses: "action:set", needs: [free]}
        """
    )
    view = await flows.until(run, lambda view: view.state == "unknown")
    assert states(view) == {"pay": "waiting_for_effect", "mail": "pending", "free": "succeeded", "freer": "succeeded"}
    [effect] = await flows.app.effects(status="unknown")
    assert (effect.operation, effect.call, len(calls)) == ("builtin.python", "pay", 1)
    await flows.app.reconcile(effect, p.Applied({"receipt": 7}), by="ada", reason="seen at the bank")
    await flows.app.settlement(run, timeout=10)
    done = await flows.view(run)
    assert (outputs(done)["mail"]["output"], len(calls)) == ({"r": {"receipt": 7}}, 1)


@pytest.mark.parametrize(
    ("verdict", "state", "times"),
    [
        (p.NotApplied(), "completed", 2),
        (p.SafeToRetry(), "completed", 2),
        (p.Refused("no"), "failed", 1),
        (p.CancelRun(), "cancelled", 1),
    ],
)
async def test_every_verdict_on_a_task(flows: Flows, verdict: p.Verdict, state: str, times: int) -> None:
    run = await flows.submit(
        """
        policy: {approval: never}
        actions: {lost: {kind: builtin.python, call: "support.flows_bodies:lost_once"}}
        tasks: [{id: pay, uses: "action:lost"}]
        """
    )
    await flows.until(run, lambda view: view.state == "unknown")
    [effect] = await flows.app.effects(status="unknown")
    await flows.app.reconcile(effect, verdict, by="ada", reason="because")
    await flows.app.settlement(run, timeout=10)
    assert ((await flows.view(run)).state, len(calls)) == (state, times)
    assert len({call["key"] for call in calls}) == 1


async def test_a_stop_with_an_unknown_open_leaves_it_listed(flows: Flows) -> None:
    run = await flows.submit(
        """
        policy: {approval: never}
        runtime: {maxConcurrency: 2}
        actions: {lost: {kind: builtin.python, call: "support.flows_bodies:lost"}, check: {kind: builtin.assert}, wait: {kind: builtin.wait}}
        tasks:
          - {id: pay, uses: "action:lost"}
          - {id: w, uses: "action:wait", with: {seconds: 0.2}}
          - {id: bad, uses: "action:check", needs: [w], with: {that: false}}
        """
    )
    settled = await flows.app.settlement(run, timeout=10)
    assert settled.status == "failed"
    [effect] = await flows.app.effects(status="unknown")
    assert effect.open
    await flows.app.reconcile(effect, p.Applied(None), by="ada", reason="late")
    assert await flows.app.verify()
    assert len(calls) == 1


async def test_a_cancel_reaches_a_process_in_flight_and_keeps_what_siblings_did(flows: Flows) -> None:
    run = await flows.submit(
        """
        policy: {approval: never, processAllowlist: [sleep, "true"]}
        runtime: {maxConcurrency: 2}
        actions: {sleep: {kind: builtin.shell.exec, command: sleep, args: ["60"]}, quick: {kind: builtin.shell.exec, command: "true"}}
        tasks: [{id: s, uses: "action:sleep"}, {id: q, uses: "action:quick"}, {id: after, uses: "action:quick", needs: [s]}]
        """
    )
    await flows.until(run, lambda view: states(view)["s"] == "running" and len(view.tasks) == 3)
    await flows.until_effects(run, "confirmed", 1)
    before = asyncio.get_running_loop().time()
    await flows.app.cancel(run, by="ada", reason="enough")
    settled = await flows.app.settlement(run, timeout=5)
    assert settled.status == "cancelled"
    assert asyncio.get_running_loop().time() - before < 1.5
    assert states(await flows.view(run)) == {"s": "cancelled", "q": "succeeded", "after": "cancelled"}
    [unknown] = await flows.app.effects(status="unknown")
    assert unknown.call == "s", "it had started: nobody can say what it did"
    assert await flows.app.verify()


async def test_the_deadline_counts_from_creation(flows: Flows) -> None:
    view = await flows.run(
        """
        runtime: {budgets: {maxWallTimeSeconds: 1}}
        actions: {wait: {kind: builtin.wait}}
        tasks: [{id: w, uses: "action:wait", with: {seconds: 600}}]
        """
    )
    assert (view.state, view.failure.kind) == ("failed", "policy.duration")  # type: ignore[union-attr]
    assert states(view) == {"w": "cancelled"}


async def test_what_policy_denies_is_not_dispatched(flows: Flows) -> None:
    with pytest.raises(p.Invalid, match=r"toolsDeny names 'python.call'"):
        await flows.run(
            f"policy: {{approval: never, toolsDeny: [python.call]}}\nactions: {{{NOTE}}}\ntasks: [{{id: a, uses: 'action:note'}}]"
        )
    assert await flows.app.runs() == []
    for mode, kind in (("deny_approval", "denied"), ("fail", "denied")):
        found = await flows.run(
            f"policy: {{nonInteractive: {mode}}}\nactions: {{{NOTE}}}\ntasks: [{{id: a, uses: 'action:note'}}]"
        )
        assert found.failure is not None
        assert (found.failure.kind, calls) == (kind, [])


async def test_the_same_key_is_the_same_run(flows: Flows) -> None:
    spec = f"policy: {{approval: never}}\nactions: {{{NOTE}}}\ntasks: [{{id: a, uses: 'action:note', with: {{x: 1}}}}]"
    first = await flows.submit(spec, key="day-1")
    assert await flows.submit(spec, key="day-1") == first
    await flows.app.settlement(first, timeout=10)
    assert len(calls) == 1
    with pytest.raises(p.Conflict):
        await flows.submit(spec, {"other": 1}, key="day-1")


async def test_check_mode_changes_nothing(flows: Flows) -> None:
    from perdure.app import workflows as hosting
    from support.flows import flow

    made = flow(
        """
        policy: {approval: never, writableRoots: [.]}
        actions: {note: {kind: builtin.python, call: "support.flows:note"}, save: {kind: builtin.write}, set: {kind: builtin.assign}}
        tasks:
          - {id: a, uses: "action:note"}
          - {id: b, uses: "action:save", with: {path: x.txt, content: new}}
          - {id: c, uses: "action:set", needs: [b], with: {d: "${{ tasks.b.output.diff }}"}}
        """,
        flows.folder,
    )
    receipt = await hosting.submit(flows.app.host, made, None, principal="local", check=True)
    await flows.app.settlement(receipt, timeout=10)
    view = await flows.view(receipt.run)
    assert (view.state, calls, (flows.folder / "x.txt").exists()) == ("completed", [], False)
    assert outputs(view)["a"]["status"] == "requires_execution"
    assert "+new" in outputs(view)["c"]["output"]["d"]
    assert await flows.app.effects() == []
