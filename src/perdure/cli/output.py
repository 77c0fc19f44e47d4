"""What commands print: envelopes for programs; for people, tables on a terminal and aligned lines elsewhere.

Results go to stdout, everything else to stderr. Text that came from outside is shown without its control characters.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
import msgspec

from perdure.cli.settings import Settings

API_VERSION = "perdure.dev/cli/v1"
CELL_CHARS_MAX = 120
LAST_CHARS_MIN = 24  # of the last column, where it wraps
_INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_COLORS = {
    "completed": "green", "confirmed": "green", "approved": "green", "ok": "green",
    "failed": "red", "refused": "red", "rejected": "red", "overdue": "red", "stranded": "red",
    "unknown": "yellow", "suspended": "yellow", "pending": "yellow", "aging": "yellow", "cancelled": "yellow",
}  # fmt: skip


def envelope(
    kind: str,
    data: Mapping[str, Any],
    *,
    error: dict[str, Any] | None = None,
    diagnostics: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """One envelope; it is ``ok`` exactly when there is no error."""
    body: dict[str, Any] = {"apiVersion": API_VERSION, "kind": kind, "ok": error is None, "data": dict(data)}
    if error is not None:
        body["error"] = error
    return {**body, "diagnostics": list(diagnostics)}


def write_json(body: Mapping[str, Any]) -> None:
    """One line of JSON on stdout, flushed."""
    try:
        raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half a surrogate pair, from a name on the command line
        raw = json.dumps(body, separators=(",", ":")).encode()
    sys.stdout.flush()
    sys.stdout.buffer.write(raw + b"\n")
    sys.stdout.buffer.flush()


def plain(value: Any) -> Any:
    """A view as JSON: fields in camel case, instants as RFC 3339 text; values that users gave as they are."""
    match value:
        case dt.datetime():
            return value.isoformat().replace("+00:00", "Z")
        case msgspec.Struct():
            return {camel(name): plain(getattr(value, name)) for name in value.__struct_fields__}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {camel(one.name): plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
        case list() | tuple():
            return [plain(item) for item in value]
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case msgspec.Raw():
            return msgspec.json.decode(value)
        case bytes():
            return value.decode("utf-8", "replace")
        case _:
            return value


def camel(name: str) -> str:
    """``started_at`` as ``startedAt``."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def clean(text: str, *, lines: bool = False) -> str:
    """Text without control characters; ``lines`` keeps line breaks and tabs."""
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape", "replace").decode() for c in text)


def cell(value: Any) -> str:
    """A value as one short line."""
    if value is None:
        return "-"
    if isinstance(value, dt.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) and _INSTANT.fullmatch(value):
        return value[:19].replace("T", " ")
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    text = clean(text)
    return text if len(text) <= CELL_CHARS_MAX else text[: CELL_CHARS_MAX - 1] + "…"


class Output:
    """Prints the results of one command in the form that was asked for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @property
    def human(self) -> bool:
        """Whether people read it."""
        return self.settings.human

    def note(self, text: str) -> None:
        """Something beside the result: on stderr, for people only."""
        if self.human:
            print(clean(text, lines=True), file=sys.stderr, flush=True)

    def line(self, text: str = "") -> None:
        """A line of the result, for people only."""
        if self.human:
            print(clean(text, lines=True), flush=True)

    def colored(self, text: str, color: str | None, *, bold: bool = False) -> str:
        """``text`` in a colour, where stdout gets colour."""
        return click.style(text, fg=color, bold=bold or None) if color and self.settings.colored(sys.stdout) else text

    def record(self, kind: str, data: Mapping[str, Any]) -> None:
        """Something that happened on the way: an envelope of its own in ``jsonl``."""
        if self.settings.output == "jsonl":
            write_json(envelope(kind, plain(dict(data))))

    def final(
        self,
        kind: str,
        data: Mapping[str, Any],
        *,
        error: dict[str, Any] | None = None,
        diagnostics: Sequence[dict[str, Any]] = (),
    ) -> None:
        """The envelope of the whole result; nothing for people."""
        if not self.human:
            write_json(envelope(kind, plain(dict(data)), error=error, diagnostics=diagnostics))

    def listing(self, kind: str, items: Sequence[Mapping[str, Any]], columns: Mapping[str, str], *, empty: str) -> None:
        """A list: a table for people; ``{"items": [...]}`` for programs, in ``jsonl`` each item first.

        Args:
            kind: of one item; the list's is ``<kind>List``.
            columns: heading to the item's field.
            empty: what people read when there is nothing.
        """
        for item in items:
            self.record(kind, item)
        self.final(f"{kind}List", {"items": items})
        if self.human:
            if items:
                self.table(columns, items)
            else:
                self.note(empty)

    def table(self, columns: Mapping[str, str], items: Iterable[Mapping[str, Any]]) -> None:
        """Rows under headings. Where the terminal is too narrow for them its own line breaks leave ids whole."""
        rows = [[cell(item.get(field)) for field in columns.values()] for item in items]
        if sys.stdout.isatty() and self._rich_table(list(columns), rows):
            return
        headings = [name.upper() for name in columns]
        widths = [max(len(row[index]) for row in [headings, *rows]) for index in range(len(headings))]
        for row in [headings, *rows]:
            padded = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
            shown = [self.colored(one, _COLORS.get(one.strip())) for one in padded]
            print("  ".join(shown).rstrip(), flush=True)

    def _rich_table(self, headings: list[str], rows: list[list[str]]) -> bool:
        """Print a table if the terminal is wide enough for all but its last column, which may wrap."""
        from rich import box
        from rich.cells import cell_len
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        colored = self.settings.colored(sys.stdout)
        console = Console(file=sys.stdout, no_color=not colored, highlight=False)
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        widths = [max(cell_len(text) for text in column) for column in zip(headings, *rows, strict=True)]
        widths[-1] = min(widths[-1], LAST_CHARS_MIN)
        if sum(widths) + 3 * len(widths) > console.width:
            return False
        for heading in headings:
            table.add_column(heading, overflow="fold", no_wrap=heading != headings[-1])  # ids are there to be copied
        for row in rows:
            table.add_row(*(Text(text, style=_COLORS.get(text, "") if colored else "") for text in row))
        console.print(table)
        return True

    def fields(self, pairs: Mapping[str, Any]) -> None:
        """Named values, one a line; those that are None are left out."""
        shown = {name: cell(value) for name, value in pairs.items() if value is not None}
        width = max((len(name) for name in shown), default=0)
        for name, text in shown.items():
            print(f"{name.ljust(width)}  {self.colored(text, _COLORS.get(text))}", flush=True)
