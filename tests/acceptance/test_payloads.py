"""Payloads over the inline limit: stored beside their batch, read back whole, covered by the chain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perdure as p
from perdure.errors import Corrupt
from perdure.limits import INLINE_BYTES_MAX
from perdure.providers.scripted import Scripted, call, say
from perdure.records import codec
from perdure.records.blobs import MARK
from perdure.records.codec import Batch
from perdure.records.task import TaskSettled
from support.flows import opened

pytestmark = pytest.mark.anyio
LARGE = 3 * INLINE_BYTES_MAX


def agent(size: int, seen: list[Any]) -> p.Agent:
    @p.tool
    async def fetch() -> str:
        """Fetch a page."""
        return "x" * size

    @p.tool
    async def keep(text: str) -> str:
        """Keep a text."""
        seen.append(len(text))
        return text[:4]

    model = Scripted([call("fetch"), call("keep", text="y" * size), say("done")])
    return p.Agent("a", tools=[fetch, keep], model=model, policy=p.Policy(tool_result_bytes=INLINE_BYTES_MAX))


def rows(path: Path, query: str) -> list[tuple[Any, ...]]:
    connection = apsw.Connection(str(path))
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


async def test_large_arguments_results_and_inputs_survive_a_restart(tmp_path: Path) -> None:
    path, seen = tmp_path / "w.db", list[Any]()
    async with p.open(path, agents=[agent(LARGE, seen)]) as app:
        receipt = await app.submit("a", "z" * LARGE, key="k")
        assert (await app.settlement(receipt, timeout=30)).status == "completed"
        again = await app.submit("a", "z" * LARGE, key="k")
        assert again.submission == receipt.submission
        assert await app.verify()
    assert seen == [LARGE]
    sizes = {size for (size,) in rows(path, "SELECT length(body) FROM blob")}
    assert sizes == {LARGE + 2, LARGE + 11}  # the input and the result; the arguments
    assert max(size for (size,) in rows(path, "SELECT length(body) FROM batch")) < LARGE + 10_000
    async with p.open(path, workers=0) as client:
        (effect,) = [one for one in await client.effects(run=receipt.run, status=None) if one.operation == "keep"]
        assert effect.status == "confirmed"
        assert len(effect.arguments["text"]) == LARGE


async def test_a_large_output_of_a_task_is_what_the_next_one_reads(tmp_path: Path) -> None:
    async with opened(tmp_path) as flows:
        view = await flows.run(
            """
            policy: {approval: never}
            actions: {big: {kind: builtin.python, call: "support.flows:text", effect: once}, set: {kind: builtin.assign}}
            tasks:
              - {id: a, uses: "action:big", with: {size: 3000000}}
              - {id: b, uses: "action:set", needs: [a], with: {x: "${{ tasks.a.output }}"}}
            outputs: {x: "${{ tasks.b.output.output.x }}"}
            """
        )
        assert view.failure is None, view.failure
        assert view.output == {"x": "x" * 3_000_000}
        assert await flows.app.verify()


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ("DELETE FROM blob", "missing"),
        ("UPDATE blob SET body = CAST(replace(CAST(body AS TEXT), 'yyyy', 'yyyz') AS BLOB)", "not what was stored"),
    ],
)
async def test_a_payload_that_is_gone_or_changed_is_found(tmp_path: Path, damage: str, word: str) -> None:
    path = tmp_path / "w.db"
    async with p.open(path, agents=[agent(LARGE, [])]) as app:
        await app.settlement(await app.submit("a", "go"), timeout=30)
    rows(path, damage)
    async with p.open(path, workers=0) as client:
        found = await client.verify()
    assert not found
    assert any(check.name == "schema-round-trip" and word in check.detail for check in found.checks)


async def test_what_looks_like_a_reference_is_a_value(tmp_path: Path) -> None:
    """Nobody can make history refer to something else by writing a reference into a value."""
    value = {"$blob": "sha256:" + "0" * 64, "bytes": 5}
    seen = []

    @p.tool
    async def keep(value: dict[str, Any]) -> dict[str, Any]:
        """Keep it."""
        seen.append(value)
        return value

    model = Scripted([call("keep", value=value), say("done")])
    path = tmp_path / "w.db"
    async with p.open(path, agents=[p.Agent("a", tools=[keep], model=model, input=dict[str, Any])]) as app:
        receipt = await app.submit("a", value)
        assert (await app.settlement(receipt, timeout=10)).status == "completed"
        assert await app.verify()
    assert seen == [value]


@given(st.sampled_from([0, 2, 100, INLINE_BYTES_MAX - 2, INLINE_BYTES_MAX - 1, INLINE_BYTES_MAX + 5]), st.booleans())
def test_a_batch_comes_back_as_it_was(size: int, lookalike: bool) -> None:
    payload = msgspec.json.encode("x" * size)
    memory = MARK + b'"no","bytes":0}' if lookalike else b"{}"
    record = TaskSettled("r", "t", "succeeded", output=msgspec.Raw(payload), delta=msgspec.Raw(memory))
    batch = Batch(1, "thread", 1, 1, "w", 1, (record, record))
    body, apart = codec.encode_apart(batch)
    assert len(apart) == (len(payload) > INLINE_BYTES_MAX) + lookalike
    assert codec.decode(body, apart) == batch
    assert len(body) < 2 * INLINE_BYTES_MAX + 10_000
    if apart:
        with pytest.raises(Corrupt, match="missing"):
            codec.decode(body)
