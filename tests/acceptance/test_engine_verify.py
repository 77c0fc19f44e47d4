"""``verify`` is true of an untouched store and false when any byte of a stored batch was changed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import perdure as p
from support.place import Place, until
from support.puppets import once, play, puppet

pytestmark = pytest.mark.anyio


async def history(place: Place) -> None:
    """A thread with turns, calls, an approval, an unknown with its verdict, a cancel."""
    async with place.app(puppet(place)) as app:
        first = await app.submit("puppet", play([once("a"), once("b", tool="asks")], "done"), thread="t")
        [asked] = await until(app.approvals, "the request")
        await app.approve(asked.id, by="alice")
        await app.settlement(first, timeout=20)
        second = await app.submit("puppet", play([once("c", do="unknown")], "done"), thread="t")
        [effect] = await until(lambda: app.effects(status="unknown"), "the unknown")
        await app.reconcile(effect, p.Applied("r"), by="alice")
        await app.settlement(second, timeout=20)
        third = await app.submit("puppet", play("<hang>"), thread="t")
        await until(lambda: place.kinds("t").count("RunStarted") == 3, "the third run")
        await app.cancel(third, by="alice")
        await app.settlement(third, timeout=20)


async def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    place, chance = Place(tmp_path), random.Random(1)
    await history(place)
    rows = place.rows("SELECT thread, first, body FROM batch ORDER BY thread, first")
    async with place.client([puppet(place)]) as app:
        assert await app.verify()
        assert await app.verify("t")
        for thread, first, stored in rows:
            body = bytes(stored)
            for position in {0, len(body) // 2, len(body) - 1, *(chance.randrange(len(body)) for _ in range(6))}:
                bit = 1 << chance.randrange(8)
                changed = body[:position] + bytes([body[position] ^ bit]) + body[position + 1 :]
                place.change("UPDATE batch SET body = ? WHERE thread = ? AND first = ?", changed, thread, first)
                report = await app.verify("t")
                assert not report, f"batch {first}, byte {position} of {len(body)}, bit {bit}"
            place.change("UPDATE batch SET body = ? WHERE thread = ? AND first = ?", body, thread, first)
        assert await app.verify()


async def test_any_changed_byte_is_found_twin(tmp_path: Path) -> None:
    """Protection off: nobody compares the chain, and a change that is still a legal record passes."""
    place = Place(tmp_path)
    await history(place)
    rows = place.rows("SELECT thread, first, body FROM batch ORDER BY first")
    thread, first, body = next(row for row in rows if b'"text":"done"' in bytes(row[2]))
    changed = bytes(body).replace(b'"text":"done"', b'"text":"gone"')
    assert changed != bytes(body)
    place.change("UPDATE batch SET body = ? WHERE thread = ? AND first = ?", changed, thread, first)
    async with place.client([puppet(place)]) as app:
        failed = [check.name for check in (await app.verify("t")).checks if check.status == "failed"]
    assert failed == ["digest-chain"]  # this check alone stands between the change and a store called good


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM batch WHERE first = (SELECT max(first) FROM batch)",
        "DELETE FROM batch WHERE first = 1",
        "UPDATE batch SET epoch = epoch + 1 WHERE first = 1",
        "UPDATE batch SET tail = zeroblob(32) WHERE first = 1",
        "UPDATE submission SET outcome = 'failed' WHERE position = 1",
        "UPDATE submission SET state = 'ready', outcome = NULL, settled_at = NULL WHERE position = 1",
        "UPDATE submission SET input = CAST('{}' AS BLOB) WHERE position = 1",
        "DELETE FROM effect",
        "UPDATE effect SET status = 'refused' WHERE status = 'confirmed'",
        "UPDATE effect SET key = 'another'",
        "UPDATE effect SET verdict = NULL",
        "DELETE FROM approval",
        "UPDATE approval SET status = 'rejected'",
    ],
)
async def test_what_the_ledger_says_is_compared_with_the_log(tmp_path: Path, damage: str) -> None:
    place = Place(tmp_path)
    await history(place)
    async with place.client([puppet(place)]) as app:
        assert await app.verify()
        place.change(damage)
        assert not await app.verify()


async def test_verify_explain_and_obligations_write_nothing(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await history(place)
    async with place.client([puppet(place)]) as app:
        before = place.dump()
        await app.verify()
        await app.obligations()
        for run in await app.runs():
            await app.explain(run.run)
            await app.inspect(run.run)
        assert place.dump() == before
