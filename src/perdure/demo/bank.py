"""A small bank that really books refunds: a process of its own, with a ledger of its own that outlives its clients.

``python -m perdure.demo.bank --ledger FILE`` serves on 127.0.0.1 and prints ``{"port": N}``. It is the outside world of
the demo, so it knows nothing of Perdure: this file imports the standard library only and runs without the package.

| request | answer |
|---|---|
| ``GET /orders/{id}`` | 200 order, text, cents, balance; 404 unknown |
| ``POST /refunds`` {order, cents, key} | 201 receipt, order, cents, key: ONE booking, durable; 422 and a reason |
| ``GET /refunds?key=K`` | 200, the bookings under that key: what a probe asks |
| ``GET /ledger`` | 200, all bookings |
| ``POST /pause`` | arms: the answer to the next booking is held back once the booking is durable |
| ``GET /held`` | 200 armed, held (how many answers are held back now) |
| ``POST /resume`` | lets held answers go and disarms |

A repeated POST books a second refund, whatever its key, unless the bank was started with ``--deduplicate``. An
amount is compared with the amount of the order, not with its balance: a balance below zero is what silent repetition
costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import selectors
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, cast
from urllib.parse import parse_qs, quote, unquote, urlsplit

__all__ = [
    "BankClient",
    "BankFailed",
    "BankProcess",
    "BankRefused",
    "Booking",
    "Order",
    "read_ledger",
    "start_bank",
]

BODY_BYTES_MAX = 64 * 1024
ANSWER_BYTES_MAX = 64 * 1024 * 1024
START_SECONDS_MAX = 20.0
STOP_SECONDS_MAX = 5.0
REQUEST_SECONDS_MAX = 30.0
HELD_SECONDS_MAX = 600.0
HELD_POLL_SECONDS = 0.01
ORDERS = Path(__file__).with_name("orders.json")


class BankRefused(Exception):
    """The bank said no, and nothing was booked.

    Args:
        reason: the bank's own words.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BankFailed(Exception):
    """The bank cannot start, or its ledger cannot be read; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Booking:
    """One refund that took place."""

    receipt: str
    order: str
    cents: int
    key: str


@dataclass(frozen=True, slots=True)
class Order:
    """One order. ``balance`` is its amount less every refund booked; below zero, money was paid out twice."""

    order: str
    text: str
    cents: int
    balance: int


# the ledger file


def read_ledger(path: str | os.PathLike[str]) -> list[Booking]:
    """Every booking of a ledger file, oldest first: what really happened, read without asking the bank.

    A last line without its end was never acknowledged and is left out.

    Raises:
        BankFailed: no such file, or a line that the bank did not write.
    """
    return _read(Path(path))[0]


def _read(path: Path) -> tuple[list[Booking], int]:
    """The bookings and how many bytes hold them."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BankFailed(f"The ledger {path} cannot be read: {error.strerror}.") from error
    whole = raw[: raw.rfind(b"\n") + 1]
    bookings: list[Booking] = []
    for number, line in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            booking = Booking(**json.loads(line))
            genuine = booking.receipt == _receipt(number, booking.order, booking.cents, booking.key)
        except (TypeError, ValueError, RecursionError):
            genuine = False
        if not genuine:
            raise BankFailed(f"Line {number} of the ledger {path} is not what the bank wrote. Start with a new ledger.")
        bookings.append(booking)
    return bookings, len(whole)


def _receipt(number: int, order: str, cents: int, key: str) -> str:
    """Derived from the booking and its place, so nobody comes to it by guessing and a changed line shows."""
    content = json.dumps([number, order, cents, key]).encode()
    return f"R-{number:06d}-{hashlib.sha256(content).hexdigest()[:12]}"


def _read_orders(path: Path) -> dict[str, tuple[str, int]]:
    try:
        rows = json.loads(path.read_bytes())
        orders = {row["order"]: (str(row["text"]), int(row["cents"])) for row in rows}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BankFailed(
            f'The orders {path} cannot be read: {error}. Give a JSON list of {{"order", "text", "cents"}}.'
        ) from error
    return orders


# the bank


class _Answer(Exception):
    """Ends a request early with a status and a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class _Bank:
    """Accounts, ledger and the held answers, behind one lock. Opening it locks the file against a second bank."""

    def __init__(self, ledger: Path, orders: dict[str, tuple[str, int]], deduplicate: bool) -> None:
        try:
            self._file = os.open(ledger, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BankFailed(f"The ledger {ledger} belongs to another bank that is running. Stop it first.") from None
        except OSError as error:
            raise BankFailed(f"The ledger {ledger} cannot be opened: {error.strerror}.") from error
        self._bookings, self._size = _read(ledger)
        os.ftruncate(self._file, self._size)  # a torn last line was never acknowledged
        os.fsync(self._file)
        self._orders = orders
        self._deduplicate = deduplicate
        self._under: dict[str, list[Booking]] = {}
        self._refunded: dict[str, int] = {}
        for booking in self._bookings:
            self._index(booking)
        self._changed = threading.Condition()
        self._open = True
        self._armed = False
        self._held = 0
        self._resumed = 0

    def close(self) -> None:
        """Waits for a booking on its way to the disk; none begins after it."""
        with self._changed:
            self._open = False
            os.close(self._file)

    def order(self, order: str) -> dict[str, Any]:
        with self._changed:
            if order not in self._orders:
                raise _Answer(404, f"There is no order {order!r}.")
            text, cents = self._orders[order]
            return asdict(Order(order, text, cents, cents - self._refunded.get(order, 0)))

    def refund(self, order: str, cents: int, key: str) -> tuple[int, dict[str, Any]]:
        """Books one refund, durably, and returns status and answer, perhaps much later (see ``pause``)."""
        with self._changed:
            if not self._open:
                raise _Answer(503, "The bank is closing.")
            if self._deduplicate and key in self._under:
                earlier = self._under[key][0]
                if (earlier.order, earlier.cents) != (order, cents):
                    raise _Answer(422, f"The key {key!r} belongs to another refund.")
                return 200, asdict(earlier)
            self._judge(order, cents)
            booking = Booking(_receipt(len(self._bookings) + 1, order, cents, key), order, cents, key)
            self._append(booking)
            if self._armed:
                self._hold()
            return 201, asdict(booking)

    def under(self, key: str) -> list[dict[str, Any]]:
        with self._changed:
            return [asdict(booking) for booking in self._under.get(key, ())]

    def ledger(self) -> list[dict[str, Any]]:
        with self._changed:
            bookings = list(self._bookings)
        return [asdict(booking) for booking in bookings]

    def pause(self) -> dict[str, Any]:
        with self._changed:
            self._armed = True
        return self.held()

    def resume(self) -> dict[str, Any]:
        with self._changed:
            self._armed = False
            self._resumed += 1
            self._changed.notify_all()
        return self.held()

    def held(self) -> dict[str, Any]:
        with self._changed:
            return {"armed": self._armed, "held": self._held}

    def _judge(self, order: str, cents: int) -> None:
        if order not in self._orders:
            raise _Answer(422, f"There is no order {order!r}.")
        amount = self._orders[order][1]
        if cents > amount:
            raise _Answer(422, f"{cents} cents are more than the {amount} cents of order {order!r}.")

    def _append(self, booking: Booking) -> None:
        line = json.dumps(asdict(booking)).encode() + b"\n"
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("the disk took part of a line")
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise _Answer(503, f"The ledger cannot be written: {error}.") from error
        self._size += len(line)
        self._bookings.append(booking)
        self._index(booking)

    def _index(self, booking: Booking) -> None:
        self._under.setdefault(booking.key, []).append(booking)
        self._refunded[booking.order] = self._refunded.get(booking.order, 0) + booking.cents

    def _hold(self) -> None:
        """Waits for ``resume``; the condition lets the lock go meanwhile, so others are served."""
        self._armed = False
        self._held += 1
        resumed = self._resumed
        self._changed.wait_for(lambda: self._resumed != resumed, HELD_SECONDS_MAX)
        self._held -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, bank: _Bank) -> None:
        self.bank = bank
        super().__init__(("127.0.0.1", port), _Handler)

    def server_bind(self) -> None:
        """Without the look-up of the machine's name that http.server does: it can wait for a network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS_MAX

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name is http.server's
        """Silent: the ledger is the bank's only word."""

    def _get(self) -> tuple[int, Any]:
        bank = cast(_Server, self.server).bank
        page, _, query = self.path.partition("?")
        if page.startswith("/orders/"):
            return 200, bank.order(unquote(page.removeprefix("/orders/")))
        match page:
            case "/refunds":
                keys = parse_qs(query, keep_blank_values=True).get("key", [])
                if len(keys) != 1:
                    raise _Answer(400, "Ask for one key: /refunds?key=K.")
                return 200, bank.under(keys[0])
            case "/ledger":
                return 200, bank.ledger()
            case "/held":
                return 200, bank.held()
            case _:
                raise _Answer(404, f"The bank has no page {page!r}.")

    def _post(self) -> tuple[int, Any]:
        bank = cast(_Server, self.server).bank
        body = self._body()
        match self.path:
            case "/refunds":
                return bank.refund(*_refund_fields(body))
            case "/pause":
                return 200, bank.pause()
            case "/resume":
                return 200, bank.resume()
            case _:
                raise _Answer(404, f"The bank has no page {self.path!r}.")

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdecimal()) or len(length) > 9 or int(length) > BODY_BYTES_MAX:
            raise _Answer(413, f"A body has at most {BODY_BYTES_MAX:,} bytes and says how many.")
        body = self.rfile.read(int(length))
        if len(body) != int(length):
            raise ConnectionError("the client went away in the middle of its request")
        return body

    def _answer(self, serve: Callable[[], tuple[int, Any]]) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # the client is gone; what was booked stays booked
            try:
                status, content = serve()
            except _Answer as answer:
                status, content = answer.status, {"reason": answer.reason}
            raw = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)


def _refund_fields(body: bytes) -> tuple[str, int, str]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        raise _Answer(400, "The body is not JSON.") from None
    match fields:
        case {"order": str(order), "cents": int(cents), "key": str(key)} if len(fields) == 3:
            if isinstance(cents, bool) or cents <= 0:
                raise _Answer(422, "The amount is not a positive whole number of cents.")
            if not key.strip():
                raise _Answer(422, "The key is blank.")
            return order, cents, key
        case _:
            raise _Answer(400, 'A refund is {"order": text, "cents": whole number, "key": text}, nothing else.')


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT or, with ``--until-eof``, the end of standard input. One line on stdout says where.

    The line is ``{"port": N}``, or ``{"error": "..."}`` before an exit with 2.
    """
    parser = argparse.ArgumentParser(prog="perdure.demo.bank", description="A small bank that books refunds.")
    parser.add_argument("--ledger", type=Path, required=True, metavar="FILE", help="the bank's own file of bookings")
    parser.add_argument("--orders", type=Path, default=ORDERS, metavar="FILE", help="orders and amounts, as JSON")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--deduplicate", action="store_true", help="answer a known key with its first booking")
    parser.add_argument("--until-eof", action="store_true", help="end with standard input, so with the parent")
    options = parser.parse_args(arguments)
    stops = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # before the first thread, so that none of them is interrupted
    try:
        bank = _Bank(options.ledger, _read_orders(options.orders), options.deduplicate)
        server = _Server(options.port, bank)
    except (BankFailed, OSError, OverflowError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return 2
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if options.until_eof:
        threading.Thread(target=_stop_at_eof, daemon=True).start()
    print(json.dumps({"port": server.server_port}), flush=True)
    signal.sigwait(stops)
    bank.close()
    return 0


def _stop_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


# the client's side


class BankClient:
    """Talks to a bank. One connection a request, so it may be shared by tasks and used from any event loop.

    Every method raises :class:`BankRefused` when the bank says no, and ``TimeoutError`` or ``ConnectionError`` when no
    whole answer came: then a refund may have been booked or not.

    Args:
        url: ``http://127.0.0.1:PORT``.
        timeout: seconds to wait for a whole answer.
    """

    def __init__(self, url: str, timeout: float = REQUEST_SECONDS_MAX) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"{url!r} is not the address of a bank. Use http://127.0.0.1:PORT.")
        self.url = url
        self._host, self._port = parts.hostname, parts.port
        self._timeout = timeout

    async def order(self, order: str) -> Order:
        """The order; refused when the bank does not know it."""
        return Order(**await self._ask("GET", "/orders/" + quote(order, safe="")))

    async def refund(self, order: str, cents: int, key: str) -> Booking:
        """Book one refund. A second call books a second one, unless the bank de-duplicates on ``key``."""
        return Booking(**await self._ask("POST", "/refunds", {"order": order, "cents": cents, "key": key}))

    async def find(self, key: str) -> list[Booking]:
        """Every booking under ``key``; empty when there is none."""
        return _bookings(await self._ask("GET", "/refunds?key=" + quote(key, safe="")))

    async def ledger(self) -> list[Booking]:
        """Every booking, oldest first."""
        return _bookings(await self._ask("GET", "/ledger"))

    async def pause(self) -> None:
        """Have the answer to the next booking held back."""
        await self._ask("POST", "/pause")

    async def resume(self) -> None:
        """Let held answers go and hold back no other."""
        await self._ask("POST", "/resume")

    async def held(self) -> bool:
        """Whether a booking is durable and its answer held back."""
        return int((await self._ask("GET", "/held"))["held"]) > 0

    async def until_held(self, timeout: float = REQUEST_SECONDS_MAX) -> None:
        """Return as soon as an answer is held back.

        Raises:
            TimeoutError: none was within ``timeout`` seconds.
        """
        async with asyncio.timeout(timeout):
            while not await self.held():  # noqa: ASYNC110 - the event is in another process
                await asyncio.sleep(HELD_POLL_SECONDS)

    async def _ask(self, method: str, target: str, content: object = None) -> Any:
        body = b"" if content is None else json.dumps(content).encode()
        head = f"{method} {target} HTTP/1.0\r\nHost: {self._host}\r\nContent-Length: {len(body)}\r\n\r\n"
        try:
            async with asyncio.timeout(self._timeout):
                status, answer = _parse(await self._exchange(head.encode("ascii") + body))
        except TimeoutError as error:
            raise TimeoutError(f"The bank did not answer {method} {target} in {self._timeout:g} s.") from error
        except ConnectionError:
            raise
        except OSError as error:
            raise ConnectionError(f"The bank at {self.url} cannot be reached: {error}.") from error
        if 400 <= status < 500:
            raise BankRefused(str(answer["reason"]) if isinstance(answer, dict) and "reason" in answer else str(answer))
        if status not in (200, 201):
            raise ConnectionError(f"The bank answered {method} {target} with status {status}: {answer}.")
        return answer

    async def _exchange(self, request: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(request)
            await writer.drain()
            raw = bytearray()
            while piece := await reader.read(65_536):
                raw += piece
                if len(raw) > ANSWER_BYTES_MAX:
                    raise ConnectionError(f"The bank's answer is over {ANSWER_BYTES_MAX:,} bytes.")
            return bytes(raw)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def _parse(raw: bytes) -> tuple[int, Any]:
    """Status and content of a whole answer.

    Raises:
        ConnectionError: the answer was cut off or is no HTTP.
    """
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
    try:
        if int(fields["content-length"]) != len(body):
            raise ValueError("cut off")
        return int(first.split(" ", 2)[1]), json.loads(body)
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        raise ConnectionError(f"The bank broke off after {len(raw):,} bytes of its answer.") from error


def _bookings(rows: Iterable[dict[str, Any]]) -> list[Booking]:
    return [Booking(**row) for row in rows]


class BankProcess:
    """A running bank; as a context manager it ends with its block. It also ends when the process that started it dies.

    Attributes:
        url: where it serves.
        ledger: its file, for :func:`read_ledger`.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, ledger: Path) -> None:
        self._process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.ledger = ledger

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def client(self, timeout: float = REQUEST_SECONDS_MAX) -> BankClient:
        """A client of this bank."""
        return BankClient(self.url, timeout)

    def close(self) -> None:
        """End it in order: a booking on its way to the disk gets there. Harmless when it has ended."""
        _end(self._process)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._process.kill()
        _end(self._process)

    def __enter__(self) -> BankProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_bank(
    ledger_path: str | os.PathLike[str],
    *,
    orders: str | os.PathLike[str] | None = None,
    deduplicate: bool = False,
    port: int = 0,
) -> BankProcess:
    """Start a bank as a process of its own and return once it serves.

    Args:
        ledger_path: its file; an existing one is continued. Give it a suffix like ``.ledger``, never a database's.
        orders: the orders it knows, a JSON list of ``{"order", "text", "cents"}``; the shipped ones if left out.
        deduplicate: answer a known key with its first booking instead of a second one.
        port: 0 takes a free one.

    Raises:
        BankFailed: it did not start; the message says why.
    """
    command = [sys.executable, "-I", "-S", str(Path(__file__).resolve()), "--ledger", os.fspath(ledger_path)]
    command += ["--orders", os.fspath(orders or ORDERS), "--port", str(port), "--until-eof"]
    command += ["--deduplicate"] if deduplicate else []
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        told = json.loads(_first_line(process) or b"{}")
        if "port" not in told:
            raise BankFailed(told.get("error") or "The bank ended before it said where it serves.")
    except BaseException:
        process.kill()
        _end(process)
        raise
    return BankProcess(process, told["port"], Path(ledger_path))


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    deadline = time.monotonic() + START_SECONDS_MAX
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise BankFailed(f"The bank did not start within {START_SECONDS_MAX:g} s.")
            piece = os.read(process.stdout.fileno(), 4096)
            if not piece:
                break
            line += piece
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


if __name__ == "__main__":
    sys.exit(main())
