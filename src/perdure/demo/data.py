"""What the demo works on: refund requests, one JSON object a line, read strictly.

A file is taken whole or not at all; everything that is wrong with it is said at once, with line numbers. Shipped beside
this module: twelve fictional requests (one for an unknown order, one over the order's amount) and the bank's orders.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import msgspec

from perdure.errors import Invalid
from perdure.ids import check_id
from perdure.limits import CANONICAL_INTEGER_MAX

__all__ = ["ORDERS", "REFUNDS", "RefundRequest", "load", "write_orders"]

LINES_MAX = 10_000
LINE_BYTES_MAX = 64 * 1024
FILE_BYTES_MAX = 64 * 1024 * 1024
PROBLEMS_SHOWN_MAX = 20
REFUNDS = Path(__file__).with_name("refunds.jsonl")
ORDERS = Path(__file__).with_name("orders.json")
_BOM = b"\xef\xbb\xbf"
_EXAMPLE = '{"order": "KL-20417", "text": "It arrived broken.", "cents": 1250}'
_TYPES: dict[str, tuple[type, str]] = {"order": (str, "text"), "text": (str, "text"), "cents": (int, "a whole number")}


class RefundRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: the order, the customer's words, and the cents asked for."""

    order: str
    text: str
    cents: int


def load(path: str | os.PathLike[str]) -> list[RefundRequest]:
    """Every request of a JSON-lines file, in its order. A byte order mark, CRLF and blank lines are tolerated.

    Raises:
        Invalid: the file cannot be read, or lines of it are no requests: one error that lists up to 20 problems, each
            with its line, what is wrong and what to do.
    """
    problems = _Problems(str(path))
    requests: list[RefundRequest] = []
    first_line: dict[str, int] = {}
    try:
        with Path(path).open("rb") as file:
            for number, raw in _lines(file, problems):
                request = _request(number, raw, problems)
                if request is None:
                    continue
                earlier = first_line.setdefault(request.order, number)
                if earlier != number:
                    shown = _shown(request.order)
                    problems.add(number, f"order {shown} already stands on line {earlier}. Keep one of the two lines.")
                requests.append(request)
    except (OSError, ValueError) as error:
        raise Invalid(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.",
            help="Name a readable file of refund requests, one JSON object a line.",
        ) from error
    if not requests and not problems.count:
        raise Invalid(f"{path} holds no refund request.", help=f"Write one a line, like this: {_EXAMPLE}")
    problems.raise_any()
    return requests


def write_orders(path: str | os.PathLike[str], requests: Iterable[RefundRequest]) -> None:
    """Write the orders that these requests are about, each with the amount asked for, as the bank reads them.

    For requests of somebody's own: the shipped bank (``ORDERS``) knows only the shipped ones.
    """
    rows = [{"order": request.order, "text": f"Order {request.order}", "cents": request.cents} for request in requests]
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


class _Problems:
    def __init__(self, path: str) -> None:
        self.path = path
        self.count = 0
        self._shown: list[str] = []

    def add(self, line: int, what: str) -> None:
        self.count += 1
        if len(self._shown) < PROBLEMS_SHOWN_MAX:
            self._shown.append(f"{self.path}:{line}: {what}")

    def raise_any(self) -> None:
        if self.count:
            more = self.count - len(self._shown)
            rest = [f"... and {more} more."] if more else []
            count = "1 problem" if self.count == 1 else f"{self.count} problems"
            text = "\n  ".join([f"{self.path} has {count}; nothing was taken from it:", *self._shown, *rest])
            raise Invalid(text + "\n", help=f"A request is one line like this: {_EXAMPLE}")


def _lines(file: BinaryIO, problems: _Problems) -> Iterable[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank, without its end. Never holds more than one line."""
    number = size = 0
    while raw := file.readline(LINE_BYTES_MAX + 2):  # the two bytes of CRLF
        number += 1
        size += len(raw)
        if number == 1:
            raw = raw.removeprefix(_BOM)
            if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                problems.add(1, "the file is UTF-16. Save it as UTF-8.")
                return
        if number > LINES_MAX:
            problems.add(number, f"there are more than {LINES_MAX:,} lines. Split the file.")
            return
        line = raw.removesuffix(b"\n").removesuffix(b"\r")
        if len(line) > LINE_BYTES_MAX:
            problems.add(number, f"the line is over {LINE_BYTES_MAX:,} bytes. Shorten its text.")
            while not raw.endswith(b"\n") and size <= FILE_BYTES_MAX and (raw := file.readline(LINE_BYTES_MAX)):
                size += len(raw)
        elif line.strip():
            yield number, line
        if size > FILE_BYTES_MAX:
            problems.add(number, f"the file is over {FILE_BYTES_MAX:,} bytes. Split it.")
            return


def _request(number: int, raw: bytes, problems: _Problems) -> RefundRequest | None:
    try:
        fields = json.loads(raw.decode(), object_pairs_hook=_distinct, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        problems.add(number, f"byte {error.start + 1} of the line is not UTF-8. Save the file as UTF-8.")
        return None
    except json.JSONDecodeError as error:
        problems.add(number, f"not JSON: {error.msg} at column {error.colno}. Write one JSON object a line.")
        return None
    except (ValueError, RecursionError) as error:
        problems.add(number, f"not a request: {error}. Write one JSON object a line.")
        return None
    if not isinstance(fields, dict):
        problems.add(number, f"the line holds {_kind(fields)}. Write one JSON object a line.")
        return None
    before = problems.count
    for what in _faults(fields):
        problems.add(number, what)
    return None if problems.count > before else RefundRequest(**fields)


def _faults(fields: dict[str, Any]) -> Iterable[str]:
    """Everything that is wrong with the fields of one request."""
    for name in fields:
        if name not in _TYPES:
            yield f"the field {_shown(name)} is unknown. Keep only order, text and cents."
    for name, (kind, wanted) in _TYPES.items():
        if name not in fields:
            yield f"the field {name} is missing. Add it."
        elif type(fields[name]) is not kind:
            yield f"{name} is {_kind(fields[name])}. Make it {wanted}."
    order, text, cents = fields.get("order"), fields.get("text"), fields.get("cents")
    if isinstance(order, str):
        try:
            check_id(order, "order")
        except Invalid as error:
            yield str(error)
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError:
            yield "text holds half of a surrogate pair. Write the character itself."
    if type(cents) is int and not 0 < cents <= CANONICAL_INTEGER_MAX:
        yield f"cents is {_shown(cents)}. Make it a whole number from 1 to {CANONICAL_INTEGER_MAX}."


def _kind(value: object) -> str:
    match value:
        case None | bool():
            return json.dumps(value)
        case int() | float():
            return f"the number {_shown(value)}"
        case str():
            return f"the text {_shown(value)}"
        case list():
            return "a list"
        case _:
            return "an object"


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else shown[:39] + "…"


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {_shown(twice)} stands there twice")
    return fields


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON knows")
