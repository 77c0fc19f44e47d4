"""Model calls through the real engine: what is shown of them at each stage, the verdicts on them, verified meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import apsw
import pytest

import perdure as p
from perdure.ports.provider import ModelError, Profile, Request, Response
from perdure.projections.models import Charged, ModelTry, Tries
from perdure.projections.run import RunView
from perdure.providers.scripted import Scripted, fail, hang, say
from perdure.records.parts import Charge, Evidence, Failure, TextPart, Usage
from perdure.records.run import ModelCallFailed, ModelCallResolved, ModelCallUnknown, ModelResponseRecorded
from perdure.rules.accounting import Price

pytestmark = pytest.mark.anyio

PRICE = Price(input=2_000_000, output=8_000_000, cache_read=200_000, version="2026-11")
LOST = ModelError(
    "The connection was lost.", dispatched="unknown", evidence=Evidence("a" * 64, request_id="req_7", status=200)
)
SAID = Response(
    (TextPart("Paid."),), "stop", "gpt", Usage(1_000, 100, 600, 0, 40),
    evidence=Evidence("a" * 64, "b" * 64, "req_9", 200),
)  # fmt: skip


class Tried:
    """A model that gives its items in turn, whatever is asked; the last one for ever."""

    def __init__(self, *items: Any) -> None:
        self.items = list(items)
        self.asked = 0
        self.scripted = Scripted(lambda request: self.items[min(self.asked, len(self.items)) - 1])
        self.name = "gpt"
        self.profile = Profile(price=PRICE, max_output_tokens=500)

    async def respond(self, request: Request, emit: Any) -> Response:
        self.asked += 1
        return await self.scripted.respond(request, emit)


def agent(model: Tried, **policy: Any) -> p.Agent:
    return p.Agent("bank", input=str, output=str, model=model, policy=p.Policy(**policy))


async def until(condition: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(20):
        while not (found := await condition()):  # noqa: ASYNC110 - several kinds of change are waited for
            await asyncio.sleep(0.01)
        return found


async def healthy(app: p.App) -> None:
    found = await app.verify()
    assert found, found.failed()


async def unknown(app: p.App) -> p.Effect:
    [effect] = await until(lambda: app.effects(status="unknown"))

    async def parked() -> bool:
        return [owed.blocked_on for owed in await app.obligations()] == ["unknown"]

    await until(parked)
    return effect  # type: ignore[no-any-return]


# -- a once call of unknown outcome -----------------------------------------------------------------------------------


async def test_an_unknown_model_call_is_shown_everywhere(tmp_path: Path) -> None:
    bank = agent(Tried(fail(LOST), SAID), model_calls="once")
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "pay")
        effect = await unknown(app)
        await healthy(app)
        assert (effect.operation, effect.kind, effect.effect_class, effect.call, effect.tries) == (
            "gpt", "model", "once", "1.model", 1,
        )  # fmt: skip
        assert (effect.status, effect.reason, effect.open, effect.of_model) == (
            "unknown", "The connection was lost.", True, True,
        )  # fmt: skip
        assert effect.arguments["turn"] == 1
        assert effect.wire == LOST.evidence
        assert effect.charged is not None
        assert (effect.charged.output, effect.charged.prices) == (500, "2026-11")
        [owed] = await app.obligations()
        assert owed.detail == "nobody knows whether model 'gpt' served the call of turn 1"
        assert owed.command == effect.resolve
        found = await app.explain(receipt)
        assert (found.decision, found.disposition) == ("AwaitUnknownResolution", "unknown")
        assert found.evidence["unknown"] == [effect.id]
        assert found.evidence["modelCall"] == {
            "turn": 1, "tries": 1, "status": "unknown", "effect": effect.id, "verdict": None,
        }  # fmt: skip
        view = await app.inspect(receipt)
        [one] = view.tries
        assert (one.status, one.dispatched, one.effect, one.request_id, one.http_status) == (
            "unknown", "unknown", effect.id, "req_7", 200,
        )  # fmt: skip
        assert one.double_charge
        assert one.charged == effect.charged
        assert view.charged == Charged(effect.charged.input, 500, effect.charged.cost)
        assert (view.turns, view.cost) == ((), 0.0)


async def settled_with(tmp_path: Path, verdict: p.Verdict, *, again: bool) -> tuple[p.Effect, RunView, Any]:
    """The effect, the run and its settlement after a verdict; whether the model was asked again."""
    model = Tried(fail(LOST), SAID)
    bank = agent(model, model_calls="once")
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "pay")
        effect = await unknown(app)
        await app.reconcile(effect, verdict, by="ada", reason="their log", evidence={"line": 3})
        settled = await app.settlement(receipt, timeout=20)
        await healthy(app)
        assert model.asked == (2 if again else 1)
        assert await app.obligations() == []
        return await app.effect(effect.id), await app.inspect(receipt), settled


async def test_applied_is_the_answer(tmp_path: Path) -> None:
    effect, view, settled = await settled_with(tmp_path, p.Applied("Paid by hand."), again=False)
    assert (settled.status, view.output) == ("completed", "Paid by hand.")
    assert (effect.status, effect.verdict, effect.result) == ("confirmed", "applied", "Paid by hand.")
    assert (effect.by, effect.reason, effect.evidence) == ("ada", "their log", {"line": 3})
    [turn] = view.turns
    assert (turn.text, turn.effect, turn.cost) == ("Paid by hand.", effect.id, None)
    [one] = turn.tries
    assert (one.status, one.verdict, one.double_charge) == ("unknown", "applied", False)
    assert view.charged == Charged(effect.charged.input, 500, effect.charged.cost)  # type: ignore[union-attr]


async def test_refused_fails_the_run(tmp_path: Path) -> None:
    effect, view, settled = await settled_with(tmp_path, p.Refused("the account is closed"), again=False)
    assert (settled.status, settled.failure) == ("failed", Failure("model", "the account is closed"))
    assert (effect.status, effect.verdict, effect.error) == ("refused", "refused", settled.failure)
    assert (effect.charged, view.charged, view.turns) == (None, None, ())
    assert [(one.verdict, one.message, one.double_charge) for one in view.tries] == [
        ("refused", "the account is closed", False)
    ]


async def test_not_applied_asks_again_and_charges_nothing(tmp_path: Path) -> None:
    effect, view, settled = await settled_with(tmp_path, p.NotApplied("not in their log"), again=True)
    assert (settled.status, view.output) == ("completed", "Paid.")
    assert (effect.status, effect.verdict, effect.charged) == ("refused", "not_applied", None)
    [turn] = view.turns
    assert turn.effect not in (None, effect.id)
    assert [(one.effect, one.double_charge, one.charged) for one in turn.tries] == [(effect.id, False, None)]
    assert (view.charged, view.cost) == (None, 0.00172)


async def test_safe_to_retry_asks_again_and_may_be_charged_twice(tmp_path: Path) -> None:
    effect, view, settled = await settled_with(tmp_path, p.SafeToRetry("cheap"), again=True)
    assert (settled.status, view.output) == ("completed", "Paid.")
    assert (effect.status, effect.verdict) == ("unknown", "safe_to_retry")
    assert [(one.effect, one.double_charge, one.charged) for one in view.turns[0].tries] == [
        (effect.id, True, effect.charged)
    ]
    assert view.charged == Charged(effect.charged.input, 500, effect.charged.cost)  # type: ignore[union-attr]


async def test_cancel_run_ends_it(tmp_path: Path) -> None:
    effect, view, settled = await settled_with(tmp_path, p.CancelRun("give up"), again=False)
    assert (settled.status, effect.verdict, view.turns) == ("cancelled", "cancel_run", ())


async def test_the_answer_of_a_model_is_text(tmp_path: Path) -> None:
    bank = agent(Tried(fail(LOST), SAID), model_calls="once")
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        await app.submit(bank, "pay")
        effect = await unknown(app)
        for wrong in (None, {"text": "Paid."}, 3):
            with pytest.raises(p.Invalid, match=r"is text; this is") as refused:
                await app.reconcile(effect, p.Applied(wrong))
            assert "SafeToRetry()" in refused.value.help
        assert (await app.effect(effect.id)).open
        await app.reconcile(effect, p.Applied("Paid."))
        await app.reconcile(effect, p.Applied("Paid."))  # the same again is the same
        with pytest.raises(p.Conflict, match="already has the verdict"):
            await app.reconcile(effect, p.Applied("Not paid."))


async def test_a_call_whose_owner_stopped_is_unknown_and_not_made_again(tmp_path: Path) -> None:
    model = Tried(hang(), SAID)
    bank = agent(model, model_calls="once")
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "pay")

        async def asked() -> bool:
            return model.asked == 1

        await until(asked)
        [flying] = await app.effects()
        assert (flying.status, flying.open, flying.charged) == ("started", False, None)
        [one] = (await app.inspect(receipt)).tries
        assert (one.status, one.effect) == ("started", flying.id)
        assert (await app.explain(receipt)).evidence["modelCall"]["status"] == "started"
        with pytest.raises(p.Conflict, match="is in flight"):
            await app.reconcile(flying, p.Applied("Paid."))
    async with p.open(tmp_path / "work.db", workers=0) as client:
        found = await client.explain(receipt)
        assert (found.decision, found.evidence["modelCall"]["status"]) == ("MarkUnknown", "started")
        [report] = (await client.recover()).reports
        assert (report.decision, report.disposition) == ("MarkUnknown", "unknown")
        await healthy(client)
        [effect] = await client.effects(status="unknown")
        assert effect.reason == "it was started, and its owner vanished before an outcome was recorded"
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        effect = await unknown(app)
        assert model.asked == 1
        await app.reconcile(effect, p.NotApplied())
        assert (await app.settlement(receipt, timeout=20)).status == "completed"
        assert model.asked == 2
        await healthy(app)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_run_that_ends_over_its_model_call_lists_it_and_takes_the_verdict_as_audit(
    tmp_path: Path, how: str
) -> None:
    model = Tried(hang())
    bank = agent(model, model_calls="once", max_duration=0.5 if how == "deadline" else 60)
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "pay")

        async def asked() -> bool:
            return model.asked == 1

        await until(asked)
        if how == "cancel":
            await app.cancel(receipt, reason="enough")
        settled = await app.settlement(receipt, timeout=20)
        assert settled.status == ("cancelled" if how == "cancel" else "failed")
        await healthy(app)
        [effect] = await app.effects(status="unknown")
        last = [record async for record in app.observe(receipt)][-1]
        assert last.data["unknown"] == [effect.id]
        view = await app.inspect(receipt)
        assert view.charged is not None
        assert view.tries[0].charged == effect.charged
        await app.reconcile(effect, p.Applied("Paid."), by="ada", reason="their invoice")

        async def audited() -> bool:
            return (await app.effect(effect.id)).verdict == "applied"

        await until(audited)
        await healthy(app)
        assert (await app.effect(effect.id)).result == "Paid."
        assert (await app.settlement(receipt)).status == settled.status
        assert model.asked == 1


async def test_a_definite_failure_refuses_the_effect_in_the_commit_that_ends_the_run(tmp_path: Path) -> None:
    no = ModelError("No such key.", dispatched="yes", kind="model.authentication", evidence=Evidence(status=401))
    bank = agent(Tried(fail(no)), model_calls="once")
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "pay")
        settled = await app.settlement(receipt, timeout=20)
        assert (settled.status, settled.failure) == ("failed", Failure("model.authentication", "No such key."))
        await healthy(app)
        [effect] = await app.effects()
        assert (effect.status, effect.error, effect.wire, effect.charged) == (
            "refused", settled.failure, no.evidence, None,
        )  # fmt: skip
        assert [one.effect for one in (await app.inspect(receipt)).tries] == [effect.id]


async def test_a_run_that_nobody_owes_leaves_its_unknown_for_a_verdict(tmp_path: Path) -> None:
    bank = agent(Tried(fail(LOST), SAID), model_calls="once")
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        with pytest.raises(p.RunFailed) as failed:
            await app.run(bank, "pay", thread="notes")
        assert len(failed.value.unknown) == 1
        await healthy(app)
        [effect] = await app.effects(status="unknown")
        assert (await app.run(bank, "pay", thread="notes")).output == "Paid."  # the run before is closed first
        await healthy(app)
        await app.reconcile(effect, p.NotApplied("not in their log"))

        async def audited() -> bool:
            return (await app.effect(effect.id)).verdict == "not_applied"

        await until(audited)
        await healthy(app)


async def test_a_verdict_on_a_model_call_is_compared_with_the_log(tmp_path: Path) -> None:
    await settled_with(tmp_path, p.Applied("Paid by hand."), again=False)
    connection = apsw.Connection(str(tmp_path / "work.db"))
    connection.execute("UPDATE intent SET reason = 'another' WHERE kind = 'verdict'")
    assert connection.changes() == 1
    connection.close()
    async with p.open(tmp_path / "work.db", workers=0) as client:
        found = await client.verify()
    assert [check.name for check in found.failed()] == ["ledger-commands"]


async def test_a_row_of_a_model_call_that_was_changed_is_found(tmp_path: Path) -> None:
    bank = agent(Tried(SAID), model_calls="once")
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "pay")
        await app.settlement(receipt, timeout=20)
        await healthy(app)
        [effect] = await app.effects()
        assert (effect.status, effect.result, effect.wire) == ("confirmed", "Paid.", SAID.evidence)
        connection = apsw.Connection(str(tmp_path / "work.db"))
        connection.execute("UPDATE effect SET status = 'refused'")
        connection.close()
        found = await app.verify()
        assert [check.name for check in found.failed()] == ["ledger-effects"]


# -- calls that may be repeated ---------------------------------------------------------------------------------------


async def test_failed_tries_stand_before_the_response_that_followed(tmp_path: Path) -> None:
    busy = ModelError(
        "Slow down.", dispatched="yes", retryable=True, kind="model.rate_limit", evidence=Evidence(status=429)
    )
    lost = ModelError("Cut off.", dispatched="unknown", retryable=True)
    bank = agent(Tried(fail(busy), fail(lost), SAID))
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "pay")
        await app.settlement(receipt, timeout=20)
        await healthy(app)
        assert await app.effects() == []
        view = await app.inspect(receipt)
    [turn] = view.turns
    first, second = turn.tries
    assert (first.attempt, first.status, first.dispatched, first.kind, first.message, first.http_status) == (
        1, "failed", "yes", "model.rate_limit", "Slow down.", 429,
    )  # fmt: skip
    assert (first.charged, first.double_charge, first.effect) == (None, False, None)
    assert (second.attempt, second.dispatched, second.double_charge) == (2, "unknown", True)
    assert second.charged is not None
    assert (turn.usage, turn.cost, turn.prices) == (Usage(1_000, 100, 600, 0, 40), 0.00172, "2026-11")
    assert turn.evidence == SAID.evidence
    assert (view.usage, view.cost, view.unpriced) == (turn.usage, 0.00172, 0)
    assert view.charged == Charged(second.charged.input, 500, second.charged.cost)
    assert view.tries == ()


async def test_a_run_that_never_got_a_response_shows_its_tries(tmp_path: Path) -> None:
    no = ModelError("No such key.", dispatched="yes", kind="model.authentication", evidence=Evidence(status=401))
    bank = agent(Tried(fail(no)))
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "pay")
        assert (await app.settlement(receipt, timeout=20)).status == "failed"
        view = await app.inspect(receipt)
        await healthy(app)
    assert [(one.kind, one.http_status) for one in view.tries] == [("model.authentication", 401)]
    assert (view.turns, view.charged, view.usage) == ((), None, Usage())


# -- tries from records -----------------------------------------------------------------------------------------------


def test_tries_are_numbered_within_their_turn_and_a_verdict_finds_its_own() -> None:
    tries, charge = Tries(), Charge(10, 20, 3_000_000, "v")
    failed = ModelCallFailed("r", 1, 1, "gpt", "no", Failure("model", "refused to connect"))
    for record in (
        failed,
        ModelCallUnknown("r", 1, "e1", "gpt", "?", charge),
        ModelCallResolved("r", 1, "e1", "not_applied", "ada", ""),
        ModelCallUnknown("r", 1, "e2", "gpt", "?", charge),
        ModelCallResolved("r", 1, "e2", "applied", "ada", ""),
        ModelResponseRecorded("r", 1, "gpt", (TextPart("x"),), "stop", effect="e2"),
        ModelCallFailed("r", 2, 1, "gpt", "yes", Failure("model", "busy")),
    ):
        tries.take(record)
    held = Charged(10, 20, 3.0, "v")
    assert tries.of(1) == (
        ModelTry(1, "failed", "no", "gpt", "model", "refused to connect"),
        ModelTry(2, "unknown", "unknown", "gpt", message="?", effect="e1", verdict="not_applied"),
        ModelTry(3, "unknown", "unknown", "gpt", message="?", effect="e2", verdict="applied", charged=held),
    )
    assert [one.attempt for one in tries.of(2)] == [1]
    assert tries.of(3) == ()


async def test_a_scripted_model_has_no_price_and_says_so(tmp_path: Path) -> None:
    bank = p.Agent("bank", input=str, output=str, model=Scripted([say("hi")]))
    async with p.open(tmp_path / "work.db", agents=[bank]) as app:
        receipt = await app.submit(bank, "x")
        await app.settlement(receipt, timeout=20)
        view = await app.inspect(receipt)
    assert (view.cost, view.unpriced, view.turns[0].cost) == (0.0, 1, None)
