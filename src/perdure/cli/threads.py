"""Threads: list, show every record, archive. Nothing shown here is derived from a clock."""

from __future__ import annotations

import json
from typing import Any

import click

from perdure.cli.opening import Id, opened, run
from perdure.cli.output import Output, plain
from perdure.projections import thread as projection
from perdure.projections.thread import RecordView

_CLOCK = ("deadline",)  # fields of records that a clock gave


@click.group(invoke_without_command=True)
@click.pass_context
def threads(context: click.Context) -> int | None:
    """List threads, show or archive one. Without a command: list."""
    if context.invoked_subcommand is not None:
        return None

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = await app.threads()
        items = [_head(view) for view in found]
        columns = {"thread": "id", "submissions": "submissions", "open": "open", "records": "records"}
        out.listing("Thread", items, columns, empty="No threads.")

    return run(work)


def _head(view: projection.ThreadView) -> dict[str, Any]:
    return {
        "id": view.thread, "submissions": view.submissions, "open": view.open, "records": view.records,
        "archived": view.archived,
    }  # fmt: skip


@threads.command()
@click.argument("thread", type=Id("thread"))
def show(thread: str) -> int:
    """Show every record of THREAD in order."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            view = await projection.show(app.store, thread)
        records = [_record(record) for record in view.history]
        for record in records:
            out.record("Record", record)
        out.final("Thread", {**_head(view), "items": records})
        if out.human:
            out.fields(_head(view))
            out.line()
            for record in records:
                shown = json.dumps(record["data"], ensure_ascii=False)
                out.line(f"{record['id']:>5}  {record['kind']:<24} {shown}")

    return run(work)


def _record(record: RecordView) -> dict[str, Any]:
    data = {name: value for name, value in plain(record.data).items() if name != "kind" and name not in _CLOCK}
    return {"id": record.sequence, "kind": record.kind, "epoch": record.epoch, "data": data}


@threads.command()
@click.argument("thread", type=Id("thread"))
def archive(thread: str) -> int:
    """Hide THREAD from listings; it must owe nothing. New work on it brings it back."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            await app.archive(thread)
        out.final("Thread", {"id": thread, "archived": True})
        out.line(f"Archived {thread}.")

    return run(work)
