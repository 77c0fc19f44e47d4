"""Bad input of every kind: a typed error whose message says what, where and what to do; and nothing is written."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pydantic
import pytest

import perdure as p
from perdure.limits import JSON_DEPTH_MAX, JSON_NODES_MAX, PAYLOAD_BYTES_MAX
from perdure.providers.scripted import Scripted, call, say
from support.place import Place, until
from support.puppets import once, play, puppet

pytestmark = pytest.mark.anyio


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


# -- ids and keys: the table itself is case A02; here is what the message says -------------------------------------------

IDS = {
    "empty": ("", "is empty"),
    "blank": ("   ", "is blank"),
    "over-long": ("x" * 257, "257 characters"),
    "control": ("a\x07b", "control character"),
    "newline": ("a\n", "control character"),
    "NUL": ("a\0b", "control character"),
    "surrogate": ("\udc80", "lone surrogate"),
    "not NFC": ("e\u0301", "normal form C"),
    "no text": (7, "is a int, not text"),
    "bytes": (b"t", "is a bytes, not text"),
}


@pytest.mark.parametrize("what", ["thread", "key", "principal"])
@pytest.mark.parametrize("kind", IDS)
async def test_ids_and_keys(tmp_path: Path, kind: str, what: str) -> None:
    value, said = IDS[kind]
    place = Place(tmp_path)
    async with place.client([puppet(place)]) as app:
        before = place.dump()
        with pytest.raises(p.Invalid) as refused:
            await app.submit("puppet", play("done"), **{what: value})
        assert said in str(refused.value)
        assert str(refused.value).startswith(what)
        assert place.dump() == before


# -- payloads ----------------------------------------------------------------------------------------------------------

PAYLOADS: dict[str, tuple[Any, str]] = {
    "NaN": ([1, math.nan], "$.turns[0][1]"),
    "infinity": ({"x": math.inf}, "$.turns[0].x"),
    "minus infinity": ([-math.inf], "$.turns[0][0]"),
    "surrogate": (["a\ud800"], "$.turns[0][0]"),
    "surrogate key": ({"\ud800": 1}, "$.turns[0]"),
    "65 bits": ([2**63], "$.turns[0][0]"),
    "minus 65 bits": ([-(2**63) - 1], "$.turns[0][0]"),
    "huge": ([10**400], "$.turns[0][0]"),
    "object": ({"a": [object()]}, "$.turns[0].a[0]"),
    "too deep": (nested(JSON_DEPTH_MAX + 1), "nested deeper than"),
    "too large": ("x" * (PAYLOAD_BYTES_MAX + 1), "PAYLOAD_BYTES_MAX"),
    "too many": ([0] * (JSON_NODES_MAX + 1), "JSON_NODES_MAX"),
}


@pytest.mark.parametrize("kind", PAYLOADS)
async def test_payloads(tmp_path: Path, kind: str) -> None:
    value, said = PAYLOADS[kind]
    place = Place(tmp_path)
    agent = puppet(place)
    async with place.app(agent) as app:
        before = place.dump()
        for attempt in (
            lambda: app.submit(agent, {"turns": [value]}, thread="t"),
            lambda: app.run(agent, {"turns": [value]}, thread="t"),
            lambda: agent.run({"turns": [value]}),
        ):
            with pytest.raises(p.Invalid) as refused:
                await attempt()
            assert said in str(refused.value), str(refused.value)
        assert place.dump() == before
        assert place.world.count() == 0


@pytest.mark.parametrize("kind", PAYLOADS)
async def test_verdicts_and_evidence(tmp_path: Path, kind: str) -> None:
    value, _ = PAYLOADS[kind]
    place = Place(tmp_path)
    async with place.app(puppet(place)) as app:
        await app.submit("puppet", play([once(do="unknown")], "done"), thread="t")
        [effect] = await until(lambda: app.effects(status="unknown"), "the unknown")
        await until(lambda: not place.rows("SELECT 1 FROM thread WHERE owner IS NOT NULL"), "the end of the attempt")
        before = place.dump()
        with pytest.raises(p.Invalid):
            await app.reconcile(effect, p.Applied([value]), by="alice")
        with pytest.raises(p.Invalid):
            await app.reconcile(effect, p.NotApplied(), by="alice", evidence=[value])
        for by in ("", " ", "a\0", "\ud800", "x" * 100_000):
            with pytest.raises(p.Invalid):
                await app.reconcile(effect, p.NotApplied(), by=by)
        with pytest.raises(p.Invalid, match="is not a verdict"):
            await app.reconcile(effect, "applied", by="alice")  # type: ignore[arg-type]
        with pytest.raises(p.Invalid, match="is not a verdict"):
            await app.reconcile(effect, p.StillUnknown(), by="alice")  # type: ignore[arg-type]
        with pytest.raises(p.Invalid, match="no effect"):
            await app.reconcile("eff_none", p.NotApplied(), by="alice")
        assert place.dump() == before


@dataclasses.dataclass
class Order:
    number: int
    lines: list[str]


class Refund(pydantic.BaseModel):
    cents: int = pydantic.Field(gt=0)


class Row(msgspec.Struct, forbid_unknown_fields=True):
    name: str


@pytest.mark.parametrize(
    ("type_", "raw", "where"),
    [
        (Order, b'{"number": "x", "lines": []}', "$.number"),
        (Order, b'{"number": 1, "lines": ["a", 2]}', "$.lines[1]"),
        (Order, b'{"number": 1}', "lines"),
        (Refund, b'{"cents": 0}', "cents"),
        (Refund, b"[]", "$"),
        (Row, b'{"name": "a", "more": 1}', "more"),
        (dict[str, int], b'{"a": 1.5}', "$["),
        (int, b"true", "int"),
        (str, b"17", "str"),
        (str, b"{", "str"),
        (str, b"", "JSON"),
        (str, b"\xff", "JSON"),
        (dict, b'{"a": NaN}', "JSON"),
        (dict, b'{"a": 99999999999999999999}', "64 bits"),
    ],
)
async def test_inputs_that_do_not_fit_their_type(tmp_path: Path, type_: Any, raw: bytes, where: str) -> None:
    place = Place(tmp_path)
    agent = p.Agent("typed", input=type_, model=Scripted([say("done")]))
    async with place.client([agent]) as app:
        before = place.dump()
        with pytest.raises(p.Invalid) as refused:
            await app.submit_json("typed", raw)
        assert where in str(refused.value), str(refused.value)
        assert "typed" in str(refused.value)
        assert place.dump() == before


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("type_", "answer"),
    [
        (Refund, {"cents": -1}), (Refund, "no JSON"), (int, "1.5"), (Order, {"number": 1}), (dict, "[1]"),
        (dict, '{"a": NaN}'), (dict, '{"a": 99999999999999999999}'), (dict, "{" * 50), (list, "[" * 100 + "]" * 100),
    ],
)  # fmt: skip
async def test_outputs_that_do_not_decode_are_said_to_the_model_then_fail(
    tmp_path: Path, type_: Any, answer: Any
) -> None:
    place = Place(tmp_path)
    model = Scripted(lambda request: say(answer))
    agent = p.Agent("typed", output=type_, model=model)
    async with place.app(agent) as app:
        receipt = await app.submit(agent, "go")
        with pytest.raises(p.RunFailed) as failed:
            await app.output(receipt, timeout=20)
        assert failed.value.kind == "output"
        assert len(model.requests) == 3
        assert await app.verify()


# -- definitions -------------------------------------------------------------------------------------------------------


class Opaque:
    pass


def bad_tools() -> dict[str, tuple[Callable[[], Any], str]]:
    def unknown_type(a: Opaque) -> str:
        return ""

    def variadic(*args: int) -> str:
        return ""

    def by_name(**options: int) -> str:
        return ""

    def unresolved(a: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
        return ""

    def odd_result(a: int) -> Opaque:
        return Opaque()

    def generator(a: int) -> Any:
        yield a

    def fine(a: int) -> str:
        return ""

    return {
        "parameter type": (lambda: p.tool(unknown_type), "unknown_type"),
        "variadic": (lambda: p.tool(variadic), "variadic"),
        "keywords": (lambda: p.tool(by_name), "by_name"),
        "unresolved": (lambda: p.tool(unresolved), "unresolved"),
        "result type": (lambda: p.tool(odd_result), "odd_result"),
        "generator": (lambda: p.tool(generator), "generator"),
        "effect": (lambda: p.tool(effect="twice")(fine), "'once'"),
        "kind": (lambda: p.tool(kind="magic")(fine), "'network'"),
        "risk": (lambda: p.tool(risk="some")(fine), "'high'"),
        "steps": (lambda: p.tool(effect="once", steps=True)(fine), "steps"),
        "timeout": (lambda: p.tool(timeout=-1)(fine), "timeout"),
        "timeout zero": (lambda: p.tool(timeout="0s")(fine), "timeout"),
        "approval": (lambda: p.tool(approval="yes")(fine), "approval"),
        "key": (lambda: p.tool(key="order")(fine), "key"),
        "name": (lambda: p.tool(name="a b")(fine), "name"),
        "class": (lambda: p.tool(Opaque), "function"),
        "refusals": (lambda: p.tool(refusals=[3])(fine), "refusals"),
        "version": (lambda: p.tool(version="\0")(fine), "version"),
    }


@pytest.mark.parametrize("kind", bad_tools())
def test_tools_that_cannot_be_built_are_refused_at_their_definition(kind: str) -> None:
    make, said = bad_tools()[kind]
    with pytest.raises(p.Invalid) as refused:
        make()
    assert said in str(refused.value), str(refused.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: p.Agent("a", input=Opaque), "Opaque"),
        (lambda: p.Agent("a", output=Opaque), "Opaque"),
        (lambda: p.Agent("a", tools=[len]), "@tool"),
        (lambda: p.Agent("a", tools="once"), "list"),
        (lambda: p.Agent("a", instructions=3), "instructions"),
        (lambda: p.Agent("a", instructions="\ud800"), "surrogate"),
        (lambda: p.Agent("a", policy=3), "Policy"),
        (lambda: p.Agent("a", model=" "), "model"),
        (lambda: p.Agent("a", settings={"t": math.nan}), "settings"),
        (lambda: p.Policy(max_turns=0), "max_turns"),
        (lambda: p.Policy(concurrency=10_000), "concurrency"),
        (lambda: p.Policy(max_duration="soon"), "max_duration"),
        (lambda: p.Policy(token_budget=1.5), "token_budget"),
        (lambda: p.Secret("not a name"), "Secret.env"),
    ],
)
def test_definitions_that_cannot_be(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(p.Invalid) as refused:
        make()
    assert said in str(refused.value), str(refused.value)


async def test_two_definitions_under_one_name(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with pytest.raises(p.Conflict, match="puppet"):
        p.open(place.db, agents=[puppet(place), puppet(place, without="once")])
    async with place.app(puppet(place)) as app:
        before = place.dump()
        with pytest.raises(p.Conflict, match="puppet"):
            await app.submit(puppet(place, without="once"), play("done"))
        with pytest.raises(p.Invalid, match="Did you mean `puppet`"):
            await app.submit("pupet", play("done"))
        with pytest.raises(p.Invalid, match="not registered"):
            await app.submit(puppet(place, name="other"), play("done"))
        with pytest.raises(p.Invalid):
            await app.submit(17, play("done"))  # type: ignore[arg-type]
        assert place.dump() == before


# -- models ------------------------------------------------------------------------------------------------------------


async def test_a_model_that_calls_what_is_not_there_repeats_ids_and_breaks_arguments(tmp_path: Path) -> None:
    place, seen = Place(tmp_path), []
    agent = puppet(place, watch=lambda r: seen.append(r.messages[-1]))
    async with place.app(agent) as app:
        batch = [
            ["onse", {}, {"id": "a"}], [*once("good"), {"id": "b"}], [*once("twice"), {"id": "b"}],
            ["once", '{"name": ', {"id": "c"}], ["once", {"name": 5}, {"id": "d"}], ["once", {"nme": "x"}, {"id": "e"}],
        ]  # fmt: skip
        receipt = await app.submit(agent, play(batch, "done"))
        assert await app.output(receipt, timeout=20) == "done"
    assert [e.name for e in place.world.entries()] == ["good"]
    results = seen[-1].results
    assert [r.failed for r in results] == [True, False, True, True, True, True]
    assert "no tool 'onse'" in results[0].content
    assert "once" in results[0].content
    assert "used twice" in results[2].content
    assert "`name`" in results[4].content
    assert "nme" in results[5].content


async def test_a_model_that_answers_beyond_all_bounds(tmp_path: Path) -> None:
    place = Place(tmp_path)
    many = p.Agent("many", tools=puppet(place).tools, model=Scripted(lambda r: _many(2000)))
    async with place.app(many) as app:
        receipt = await app.submit(many, "go")
        with pytest.raises(p.RunFailed, match="limit"):
            await app.output(receipt, timeout=20)
    assert place.world.count() == 0


def _many(count: int) -> Any:
    from perdure.ports.provider import Response
    from perdure.records.parts import CallPart, Usage

    return Response(tuple(CallPart("once", "{}", f"c{i}") for i in range(count)), "tool_calls", "m", Usage())


@pytest.mark.parametrize("answer", [None, 17, "text", call])
async def test_a_model_that_returns_no_response(tmp_path: Path, answer: Any) -> None:
    class Odd:
        name = "odd"

        async def respond(self, request: Any, emit: Any) -> Any:
            return answer

    place = Place(tmp_path)
    agent = p.Agent("odd", model=Odd())
    async with place.app(agent) as app:
        receipt = await app.submit(agent, "go")
        with pytest.raises(p.RunFailed) as failed:
            await app.output(receipt, timeout=20)
        assert failed.value.kind == "model"
    with pytest.raises(p.Invalid, match="A model is needed, not a value of type object"):
        await p.Agent("odd", model=object()).run("go")
    with pytest.raises(p.Invalid, match="has no model"):
        await p.Agent("odd").run("go")


# -- stores ------------------------------------------------------------------------------------------------------------


async def test_stores_that_cannot_be_opened(tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "work.db"
    with pytest.raises(p.Unavailable, match="mkdir -p"):
        async with p.open(missing):
            pass
    assert not missing.parent.exists()
    with pytest.raises(p.Unavailable, match="no database"):
        async with p.open(tmp_path / "none.db", create=False):
            pass
    with pytest.raises(p.Unavailable, match="is a folder"):
        async with p.open(tmp_path):
            pass
    text = tmp_path / "notes.txt"
    text.write_text("these are my notes, not a database")
    with pytest.raises(p.Corrupt, match="not an SQLite database"):
        async with p.open(text):
            pass
    assert text.read_text() == "these are my notes, not a database"
    for address in ("", " ", "a\0b", "mysql://host/db", "sqlite://host/db"):
        with pytest.raises(p.Invalid):
            async with p.open(address):
                pass
    assert names(tmp_path) == ["notes.txt"]


async def test_a_foreign_or_newer_database_is_left_alone(tmp_path: Path) -> None:
    import apsw

    foreign = tmp_path / "foreign.db"
    connection = apsw.Connection(str(foreign))
    connection.execute("CREATE TABLE mine (a)")
    connection.close()
    place = Place(tmp_path)
    async with place.client():
        pass
    place.change("PRAGMA user_version = 99")
    for path, error, said in ((foreign, p.Invalid, "not one of Perdure's"), (place.db, p.Incompatible, "format 99")):
        before = path.read_bytes()
        with pytest.raises(error, match=said):
            async with p.open(path):
                pass
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    "options",
    [
        {"workers": -1}, {"workers": 1025}, {"workers": True}, {"workers": 1.5}, {"lease": "1ms"}, {"lease": "soon"},
        {"lease": math.nan}, {"recovery_timeout": -1}, {"principal": ""}, {"models": {"nobody": None}}, {"agents": [3]},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_open(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(p.Invalid):
        p.open(tmp_path / "work.db", **options)
    assert list(tmp_path.iterdir()) == []


async def test_an_app_that_is_not_open_says_so(tmp_path: Path) -> None:
    place = Place(tmp_path)
    app = place.app(puppet(place))
    with pytest.raises(p.Invalid, match="async with"):
        await app.submit("puppet", play("done"))
    async with app:
        with pytest.raises(p.Conflict, match="already open"):
            await app.__aenter__()
    with pytest.raises(p.Invalid, match="async with"):
        await app.submit("puppet", play("done"))


async def test_refused_by_the_authorizer_writes_nothing(tmp_path: Path) -> None:
    class Nobody(p.Authorizer):
        async def authorize(self, operation: str, **_: Any) -> None:
            raise p.Denied(f"{operation} is not for you")

    place = Place(tmp_path)
    async with p.open(place.db, agents=[puppet(place)], authorizer=Nobody(), workers=0) as app:
        before = place.dump()
        operations: list[Callable[[], Any]] = [
            lambda: app.submit("puppet", play("done")), lambda: app.run("puppet", play("done")),
            lambda: app.cancel("sub_x"), lambda: app.approve("apr_x"), lambda: app.reject("apr_x"),
            lambda: app.reconcile("eff_x", p.NotApplied()), app.effects, app.verify,
            app.obligations, app.runs, app.threads, app.recover,
            lambda: app.redrive("sub_x"), lambda: app.explain("sub_x"), lambda: app.inspect("sub_x"),
            lambda: app.settlement("sub_x", timeout=1), lambda: app.output("sub_x", timeout=1),
            lambda: app.archive("t"), app.approvals, lambda: app.effect("eff_x"),
            lambda: anext(aiter(app.observe("t"))),
        ]  # fmt: skip
        for operation in operations:
            with pytest.raises(p.Denied, match="not for you"):
                await operation()
        assert place.dump() == before
