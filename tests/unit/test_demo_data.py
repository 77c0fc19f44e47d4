"""A file of refund requests is read whole or refused with every fault named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure.demo.bank import start_bank
from perdure.demo.data import LINE_BYTES_MAX, LINES_MAX, ORDERS, REFUNDS, RefundRequest, load, write_orders
from perdure.errors import Invalid

GOOD = b'{"order": "A-1", "text": "broken", "cents": 5}'
OTHER = b'{"order": "A-2", "text": "", "cents": 1}'


def write(folder: Path, raw: bytes) -> Path:
    path = folder / "requests.jsonl"
    path.write_bytes(raw)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(Invalid) as caught:
        load(path)
    assert caught.value.help
    return str(caught.value)


def test_the_shipped_requests_cover_what_the_demo_shows() -> None:
    requests = load(REFUNDS)
    amounts = {row["order"]: row["cents"] for row in json.loads(ORDERS.read_bytes())}
    assert len(requests) == 12
    assert [request.order for request in requests if request.order not in amounts] == ["KL-99120"]
    assert [request.order for request in requests if request.cents > amounts.get(request.order, 10**9)] == ["KL-20583"]
    assert len({request.text for request in requests}) == len({request.cents for request in requests}) == 12


@pytest.mark.parametrize(
    "raw",
    [
        GOOD + b"\n" + OTHER,
        GOOD + b"\n" + OTHER + b"\n",
        b"\xef\xbb\xbf" + GOOD + b"\r\n" + OTHER + b"\r\n",
        b"\n" + GOOD + b"\n \r\n\n" + OTHER + b"\n\n",
    ],
    ids=["no last newline", "plain", "BOM and CRLF", "blank lines"],
)
def test_what_is_tolerated(raw: bytes, tmp_path: Path) -> None:
    assert load(write(tmp_path, raw)) == [RefundRequest("A-1", "broken", 5), RefundRequest("A-2", "", 1)]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b"nonsense", "not JSON: Expecting value at column 1. Write one JSON object a line."),
        (GOOD[:-1], "not JSON"),
        (GOOD + GOOD, "not JSON: Extra data"),
        (b"[1, 2]", "the line holds a list. Write one JSON object a line."),
        (b"null", "the line holds null."),
        (b"[" * 20_000, "not a request"),
        (b'{"text": "", "cents": 5}', "the field order is missing. Add it."),
        (b'{"order": "A", "cents": 5}', "the field text is missing."),
        (b'{"order": "A", "text": ""}', "the field cents is missing."),
        (b'{"order": "A", "text": "", "cents": 5, "note": 1}', "the field 'note' is unknown. Keep only"),
        (b'{"order": "A", "order": "B", "text": "", "cents": 5}', "the field 'order' stands there twice"),
        (b'{"order": 7, "text": "", "cents": 5}', "order is the number 7. Make it text."),
        (b'{"order": "A", "text": null, "cents": 5}', "text is null. Make it text."),
        (b'{"order": "A", "text": {}, "cents": 5}', "text is an object."),
        (b'{"order": "A", "text": "", "cents": "5"}', "cents is the text '5'. Make it a whole number."),
        (b'{"order": "A", "text": "", "cents": 5.0}', "cents is the number 5.0."),
        (b'{"order": "A", "text": "", "cents": true}', "cents is true."),
        (b'{"order": "A", "text": "", "cents": NaN}', "NaN is not a number that JSON knows"),
        (b'{"order": "A", "text": "", "cents": -Infinity}', "-Infinity is not a number"),
        (b'{"order": "A", "text": "", "cents": 0}', "cents is 0. Make it a whole number from 1 to"),
        (b'{"order": "A", "text": "", "cents": -5}', "cents is -5."),
        (b'{"order": "A", "text": "", "cents": 9007199254740992}', "cents is 9007199254740992."),
        (b'{"order": "A", "text": "", "cents": ' + b"9" * 5000 + b"}", "not a request"),
        (b'{"order": "", "text": "", "cents": 5}', "order is empty."),
        (b'{"order": "  ", "text": "", "cents": 5}', "order '  ' is blank."),
        (b'{"order": "a\\nb", "text": "", "cents": 5}', "control"),
        (b'{"order": "\\ud800", "text": "", "cents": 5}', "unprintable"),
        (b'{"order": "A", "text": "\\ud800", "cents": 5}', "half of a surrogate pair"),
        (b'{"order": "A", "text": "\xff", "cents": 5}', "byte 25 of the line is not UTF-8. Save the file as UTF-8."),
        (GOOD, "order 'A-1' already stands on line 1. Keep one of the two lines."),
        (b" " * (LINE_BYTES_MAX + 1), "the line is over 65,536 bytes."),
        (b" " * (LINE_BYTES_MAX * 3), "the line is over 65,536 bytes."),
    ],
)
def test_each_fault_is_named_with_its_line(line: bytes, what: str, tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + b"\n" + line + b"\n" + OTHER + b"\n")
    message = refusal(path)
    assert f"{path}:2: " in message
    assert what in message
    assert message.startswith(f"{path} has 1 problem;"), "the lines around it are good"


def test_a_line_of_the_greatest_length_is_read(tmp_path: Path) -> None:
    line = json.dumps({"order": "A", "text": "", "cents": 5}).encode().ljust(LINE_BYTES_MAX)
    assert len(load(write(tmp_path, line + b"\r\n"))) == 1


def test_all_faults_of_a_file_are_named_at_once(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, b'{"order": "", "cents": 0, "x": 1}\n' + GOOD + b"\nnonsense\n"))
    assert message.count("requests.jsonl:1: ") == 4
    assert message.count("requests.jsonl:3: ") == 1
    assert "has 5 problems" in message


def test_at_most_twenty_faults_are_listed(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, b"nonsense\n" * 33))
    assert message.count("not JSON") == 20
    assert "has 33 problems" in message
    assert "... and 13 more." in message


@pytest.mark.parametrize("raw", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(raw: bytes, tmp_path: Path) -> None:
    assert "holds no refund request. Write one a line" in refusal(write(tmp_path, raw))


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in refusal(tmp_path / "missing.jsonl")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    assert "cannot be read" in refusal(Path("a\0b"))


def test_utf_16_is_told_by_name(tmp_path: Path) -> None:
    assert ":1: the file is UTF-16. Save it as UTF-8." in refusal(write(tmp_path, GOOD.decode().encode("utf-16")))


def test_too_many_lines(tmp_path: Path) -> None:
    rows = [json.dumps({"order": f"A-{n}", "text": "", "cents": 5}) for n in range(LINES_MAX + 1)]
    assert len(load(write(tmp_path, "\n".join(rows[:-1]).encode()))) == LINES_MAX
    assert ":10001: there are more than 10,000 lines." in refusal(write(tmp_path, "\n".join(rows).encode()))


def test_a_file_without_an_end_is_given_up() -> None:
    assert "/dev/zero:1: the file is over 67,108,864 bytes." in refusal(Path("/dev/zero"))


@pytest.mark.anyio
async def test_orders_written_for_requests_of_ones_own_are_the_banks(tmp_path: Path) -> None:
    requests = load(write(tmp_path, GOOD + b"\n" + OTHER))
    write_orders(tmp_path / "orders.json", requests)
    with start_bank(tmp_path / "bank.ledger", orders=tmp_path / "orders.json") as bank:
        for request in requests:
            assert (await bank.client().refund(request.order, request.cents, request.order)).cents == request.cents
