"""The demo's bank books what it acknowledges, repeats what it is told twice, and outlives its clients."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.demo import bank as module
from perdure.demo.bank import (
    ORDERS,
    BankClient,
    BankFailed,
    BankProcess,
    BankRefused,
    Booking,
    read_ledger,
    start_bank,
)

pytestmark = pytest.mark.anyio
LAMP = "KL-20417"  # 6490 cents


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[BankProcess]:
    with start_bank(tmp_path / "bank.ledger") as process:
        yield process


def gone(pid: int) -> bool:
    """Whether the process ends within five seconds; a zombie has ended."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.01)
    return False


def test_the_file_needs_nothing_but_the_standard_library() -> None:
    found = [node for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.Import)]
    froms = [
        node for node in ast.walk(ast.parse(Path(module.__file__).read_text())) if isinstance(node, ast.ImportFrom)
    ]
    names = {alias.name for node in found for alias in node.names} | {str(node.module) for node in froms}
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names - {"sqlite3"}


async def test_orders_refunds_and_the_ledger(bank: BankProcess) -> None:
    client = bank.client()
    assert read_ledger(bank.ledger) == []
    order = await client.order(LAMP)
    assert (order.order, order.text, order.cents, order.balance) == (LAMP, "Desk lamp, walnut and linen", 6490, 6490)
    booking = await client.refund(LAMP, 1000, "key-1")
    assert (booking.order, booking.cents, booking.key) == (LAMP, 1000, "key-1")
    assert (await client.order(LAMP)).balance == 5490
    assert await client.find("key-1") == await client.ledger() == read_ledger(bank.ledger) == [booking]
    assert await client.find("key-2") == []


async def test_a_second_request_books_a_second_refund_and_it_shows(bank: BankProcess) -> None:
    client = bank.client()
    first, second = [await client.refund(LAMP, 6490, "key-1") for _ in range(2)]
    assert first.receipt != second.receipt
    assert await client.find("key-1") == read_ledger(bank.ledger) == [first, second]
    assert (await client.order(LAMP)).balance == -6490


async def test_a_bank_that_deduplicates_books_once(tmp_path: Path) -> None:
    with start_bank(tmp_path / "bank.ledger", deduplicate=True) as bank:
        client = bank.client()
        assert await client.refund(LAMP, 10, "key-1") == await client.refund(LAMP, 10, "key-1")
        with pytest.raises(BankRefused, match="belongs to another refund"):
            await client.refund(LAMP, 11, "key-1")
        assert len(read_ledger(bank.ledger)) == 1


@pytest.mark.parametrize(
    ("order", "cents", "key", "reason"),
    [
        ("KL-1", 10, "k", "no order 'KL-1'"),
        (LAMP, 6491, "k", "6491 cents are more than the 6490 cents"),
        (LAMP, 10**400, "k", "more than the 6490 cents"),
        (LAMP, 0, "k", "positive"),
        (LAMP, -5, "k", "positive"),
        (LAMP, True, "k", "positive"),
        (LAMP, 1.5, "k", "nothing else"),
        (LAMP, float("nan"), "k", "nothing else"),
        (LAMP, 10, " ", "blank"),
        (LAMP, 10, None, "nothing else"),
    ],
)  # fmt: skip
async def test_what_the_bank_refuses_is_not_booked(
    order: str, cents: int, key: str, reason: str, shared: BankProcess
) -> None:
    with pytest.raises(BankRefused, match=reason) as caught:
        await shared.client().refund(order, cents, key)
    assert caught.value.reason == str(caught.value)
    assert read_ledger(shared.ledger) == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BankProcess]:
    with start_bank(tmp_path_factory.mktemp("bank") / "bank.ledger") as process:
        yield process


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET /orders/KL-1 HTTP/1.0\r\n\r\n", 404),
        ("GET /refunds HTTP/1.0\r\n\r\n", 400),
        ("GET /nothing HTTP/1.0\r\n\r\n", 404),
        ("POST /nothing HTTP/1.0\r\n\r\n", 404),
        ("POST /refunds HTTP/1.0\r\nContent-Length: 3\r\n\r\n{}]", 400),
        ("POST /refunds HTTP/1.0\r\nContent-Length: 2\r\n\r\n[]", 400),
        ("POST /refunds HTTP/1.0\r\nContent-Length: -1\r\n\r\n", 413),
        ("POST /refunds HTTP/1.0\r\nContent-Length: 99999999999999999999\r\n\r\n", 413),
    ],
)
async def test_what_is_no_request_is_answered_with_a_reason(request_: str, status: int, shared: BankProcess) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", shared.port)
    writer.write(request_.encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.split()[1] == str(status).encode()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["reason"]


async def test_ids_of_any_characters_arrive(tmp_path: Path) -> None:
    odd = "ä/?#&=% 1"
    orders = tmp_path / "orders.json"
    orders.write_text(json.dumps([{"order": odd, "text": "x", "cents": 5}]))
    with start_bank(tmp_path / "bank.ledger", orders=orders) as bank:
        booking = await bank.client().refund(odd, 5, odd)
        assert (await bank.client().order(odd)).balance == 0
        assert await bank.client().find(odd) == [booking]


async def test_an_answer_is_held_back_once_the_booking_is_durable(bank: BankProcess) -> None:
    client = bank.client()
    await client.pause()
    assert not await client.held()
    first = asyncio.ensure_future(client.refund(LAMP, 10, "key-1"))
    await client.until_held()
    assert [booking.key for booking in read_ledger(bank.ledger)] == ["key-1"]
    assert not first.done()
    await client.refund(LAMP, 20, "key-2")  # the others are served
    await client.resume()
    assert (await first).key == "key-1"
    assert not await client.held()
    await client.refund(LAMP, 30, "key-3")  # and nothing is held any more


async def test_resume_without_a_booking_disarms(bank: BankProcess) -> None:
    client = bank.client()
    await client.pause()
    await client.resume()
    await client.refund(LAMP, 10, "key-1")
    with pytest.raises(TimeoutError):
        await client.until_held(0.05)


async def test_a_refusal_is_not_held_back(bank: BankProcess) -> None:
    client = bank.client()
    await client.pause()
    with pytest.raises(BankRefused):
        await client.refund("KL-1", 10, "key-1")
    assert not await client.held()


async def test_a_client_killed_in_between_leaves_its_booking(bank: BankProcess) -> None:
    client = bank.client()
    await client.pause()
    program = (
        "import asyncio, sys; from perdure.demo.bank import *\n"
        "asyncio.run(BankClient(sys.argv[1]).refund(sys.argv[2], 5, 'k'))"
    )
    victim = await asyncio.create_subprocess_exec(sys.executable, "-c", program, bank.url, LAMP)
    await client.until_held()
    victim.kill()
    assert await victim.wait() == -signal.SIGKILL
    await client.resume()
    assert [booking.cents for booking in await client.find("k")] == [5]


async def test_lost_and_late_answers(bank: BankProcess) -> None:
    client = bank.client()
    await client.pause()
    with pytest.raises(TimeoutError, match=r"did not answer POST /refunds in 0\.2 s"):
        await bank.client(timeout=0.2).refund(LAMP, 10, "late")
    await client.resume()
    await client.pause()
    lost = asyncio.ensure_future(client.refund(LAMP, 10, "lost"))
    await client.until_held()
    bank.kill()
    with pytest.raises(ConnectionError):
        await lost
    with pytest.raises(ConnectionError):
        await client.order(LAMP)
    assert [booking.key for booking in read_ledger(bank.ledger)] == ["late", "lost"]


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.0 201 OK\r\nContent-Length: 90\r\n\r\n{", b"HTTP/1.0 500 No\r\nContent-Length: 2\r\n\r\n{}"],
)
async def test_a_broken_answer_is_a_lost_connection(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        client = BankClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(ConnectionError):
            await client.order(LAMP)


def test_an_address_is_checked() -> None:
    with pytest.raises(ValueError, match="is not the address of a bank"):
        BankClient("localhost")


async def test_many_clients_at_once_lose_nothing(bank: BankProcess) -> None:
    client = bank.client()
    await asyncio.gather(*(client.refund(LAMP, 1, f"key-{number % 10}") for number in range(60)))
    bookings = read_ledger(bank.ledger)
    assert Counter(booking.key for booking in bookings) == {f"key-{number}": 6 for number in range(10)}
    assert len({booking.receipt for booking in bookings}) == 60


async def test_a_ledger_is_continued_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    ledger = tmp_path / "bank.ledger"
    with start_bank(ledger) as bank:
        first = await bank.client().refund(LAMP, 10, "key-1")
    with ledger.open("ab") as file:
        file.write(b'{"receipt": "R-0000')
    assert read_ledger(ledger) == [first]
    with start_bank(ledger) as bank:
        assert (await bank.client().order(LAMP)).balance == 6480
        second = await bank.client().refund(LAMP, 10, "key-1")
    assert read_ledger(ledger) == [first, second]


@pytest.mark.parametrize("line", [b"nonsense", b"[1]", b'{"receipt": "R"}', b""])
def test_a_ledger_of_foreign_lines_is_not_believed(line: bytes, tmp_path: Path) -> None:
    ledger = tmp_path / "bank.ledger"
    ledger.write_bytes(line + b"\n")
    with pytest.raises(BankFailed, match="Line 1 of the ledger"):
        read_ledger(ledger)
    with pytest.raises(BankFailed, match="Line 1 of the ledger"):
        start_bank(ledger)


async def test_a_changed_amount_shows(bank: BankProcess) -> None:
    await bank.client().refund(LAMP, 10, "key-1")
    bank.ledger.write_bytes(bank.ledger.read_bytes().replace(b'"cents": 10', b'"cents": 11'))
    with pytest.raises(BankFailed, match="not what the bank wrote"):
        read_ledger(bank.ledger)


def test_a_bank_that_cannot_start_says_why(bank: BankProcess, tmp_path: Path) -> None:
    with pytest.raises(BankFailed, match="another bank"):
        start_bank(bank.ledger)
    with pytest.raises(BankFailed, match="cannot be opened"):
        start_bank(tmp_path / "nowhere" / "bank.ledger")
    with pytest.raises(BankFailed, match="orders"):
        start_bank(tmp_path / "other.ledger", orders=bank.ledger)
    with pytest.raises(BankFailed, match=r"\S"):
        start_bank(tmp_path / "other.ledger", port=bank.port)
    with pytest.raises(BankFailed, match="cannot be read"):
        read_ledger(tmp_path / "missing.ledger")


def test_it_ends_in_order_on_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "perdure.demo.bank", "--ledger", str(tmp_path / "bank.ledger")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["port"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stdout.read() == b""


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from perdure.demo.bank import *\n"
        "print(start_bank(sys.argv[1]).pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "bank.ledger")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    assert gone(pid)


async def test_its_block_ends_it_even_while_an_answer_is_held(tmp_path: Path) -> None:
    with start_bank(tmp_path / "bank.ledger") as bank:
        client = bank.client()
        await client.pause()
        held = asyncio.ensure_future(client.refund(LAMP, 10, "key-1"))
        await client.until_held()
    assert gone(bank.pid)
    with pytest.raises(ConnectionError):
        await held
    bank.close()
    with contextlib.suppress(ProcessLookupError):
        bank.kill()


def test_the_shipped_orders_are_readable() -> None:
    rows = json.loads(ORDERS.read_bytes())
    assert len({row["order"] for row in rows}) == len(rows) == 11
    assert Booking("R", "o", 1, "k") == Booking("R", "o", 1, "k")
