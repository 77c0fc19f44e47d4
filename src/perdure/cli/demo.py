"""``demo``: show the main job, with every claim checked."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from perdure.cli import failures
from perdure.cli.opening import run
from perdure.cli.output import Output, clean, plain
from perdure.demo import scenario
from perdure.demo.bank import BankFailed
from perdure.errors import Unavailable


@click.command()
@click.option(
    "--input", "source", type=click.Path(path_type=Path), metavar="FILE",
    help="Your own refund requests, one JSON object a line: order, text, cents.",
)  # fmt: skip
@click.option(
    "--keep", type=click.Path(path_type=Path), metavar="DIR", help="Leave database and ledger in this folder."
)
def demo(source: Path | None, keep: Path | None) -> int:
    """See a worker killed in the middle of a side effect, and what happens next.

    An agent settles refund requests at a bank: another process, with a ledger of its own. The worker is killed with
    SIGKILL between the bank's booking and its own record. Nobody knows the outcome, so it is not guessed and not
    repeated; it waits for a verdict, while later requests go on. Needs no key and no network. Every claim is read back
    from the store and from the bank's ledger; the exit code is 4 if one does not hold.
    """

    async def work(out: Output) -> int:
        with _folder(keep) as folder:
            requests = scenario.prepare(folder, source)
            teller = _Teller(out)
            showing = scenario.Demo(folder, requests, teller, own=source is not None)
            out.line(f"An agent settles {len(requests)} refund requests at a bank. Everything is in {folder}.")
            try:
                rows = await showing.play()
            except scenario.BrokenClaim as broken:
                message = f"This claim does not hold: {broken}."
                error = failures.error_body("claim", message, failures.FAILED)
                out.final("Demo", {"claims": teller.claims}, error=error)
                out.note(f"Error: {message}")
                return failures.FAILED
            except BankFailed as failed:
                raise Unavailable(str(failed)) from failed
            items = [{"id": row.order, **plain(row)} for row in rows]
            out.final("Demo", {"items": items, "claims": teller.claims, "folder": str(keep) if keep else None})
            _end(items, teller, out, showing if keep else None)
        return 0

    return run(work)


def _end(items: list[dict[str, Any]], teller: _Teller, out: Output, kept: scenario.Demo | None) -> None:
    if not out.human:
        return
    out.line()
    columns = {"order": "order", "cents": "cents", "thread": "thread", "run": "status", "answer": "note",
               "booked": "bookings"}  # fmt: skip
    out.table(columns, items)
    out.line()
    out.line(f"{len(teller.claims)} claims, each read back from the store or the bank's ledger. All of them hold.")
    if kept is not None:
        out.line(f"Look around: {out.settings.command('threads', 'show', 'desk-1', db=str(kept.database))}")


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="perdure-demo-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class _Teller:
    """Tells steps and claims as they happen."""

    def __init__(self, out: Output) -> None:
        self.out = out
        self.claims: list[dict[str, Any]] = []
        self._steps = 0

    def step(self, title: str) -> None:
        self._steps += 1
        self.out.line()
        if self.out.human:
            print(self.out.colored(f"{self._steps}. {title}", "cyan", bold=True), flush=True)

    def say(self, text: str) -> None:
        self.out.line(f"   {text}")

    def claim(self, text: str, holds: bool) -> None:
        told = {"id": len(self.claims) + 1, "claim": text, "holds": holds}
        self.claims.append(told)
        self.out.record("Claim", told)
        if self.out.human:
            print(f"   {self.out.colored(_mark(holds), 'green' if holds else 'red')} {clean(text)}", flush=True)


def _mark(holds: bool) -> str:
    sign = "✓" if holds else "✗"
    try:
        sign.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return "ok " if holds else "NO "
    return sign
