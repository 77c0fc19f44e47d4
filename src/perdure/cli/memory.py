"""Long-term memory from the command line: ``memory get``, ``put``, ``search``, ``reindex``."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from perdure.cli.opening import Id, opened, run
from perdure.cli.output import Output
from perdure.errors import Invalid


@click.group()
def memory() -> None:
    """Memory that outlives runs: entries by namespace and key. Searching is by words; nothing is sent anywhere."""


@memory.command()
@click.argument("namespace", type=Id("namespace"))
@click.argument("key", type=Id("key"))
def get(namespace: str, key: str) -> int:
    """Show the entry KEY of NAMESPACE."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = app.workflows.memory.get(namespace, key)
        if found is None:
            raise Invalid(
                f"{namespace!r} has no entry {key!r}.", help=f"Search it: perdure memory search {namespace} WORDS"
            )
        out.final("MemoryEntry", {"id": key, **found})
        out.line(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())

    return run(work)


@memory.command()
@click.argument("namespace", type=Id("namespace"))
@click.argument("key", type=Id("key"))
@click.argument("value")
@click.option("--text", metavar="TEXT", help="What searches look at, where VALUE is no text.")
@click.option("--metadata", metavar="JSON", help="An object that searches can filter by.")
@click.option("--retention-days", type=click.FloatRange(min=0, min_open=True), metavar="N", help="Default: for ever.")
def put(
    namespace: str, key: str, value: str, text: str | None, metadata: str | None, retention_days: float | None
) -> int:
    """Keep VALUE, JSON or else text, as the entry KEY of NAMESPACE."""

    async def work(out: Output) -> None:
        from perdure.executors.memory import entry_of

        given: dict[str, Any] = {"metadata": _object(metadata)}
        try:
            found = msgspec.json.decode(value)
        except msgspec.DecodeError:
            found = value
        given |= {"content": found} if isinstance(found, str) else {"value": found}
        if text is not None:
            given["text"] = text
        async with opened(out.settings, create=True) as app:
            await app.workflows.memory.put(namespace, key, entry_of(given), retention_days=retention_days)
        out.final("MemoryEntry", {"id": key, "namespace": namespace})
        out.line(f"Kept {key} in {namespace}.")

    return run(work)


@memory.command()
@click.argument("namespace", type=Id("namespace"))
@click.argument("query")
@click.option("--mode", type=click.Choice(["text", "vector", "hybrid"]), default="text", help="Default: text.")
@click.option("--limit", type=click.IntRange(1, 100), default=10, metavar="N", help="Default: 10.")
@click.option("--filter", "filters", multiple=True, metavar="K=JSON", help="Only entries with this in their metadata.")
def search(namespace: str, query: str, mode: str, limit: int, filters: tuple[str, ...]) -> int:
    """Find the entries of NAMESPACE that fit QUERY best."""

    async def work(out: Output) -> None:
        wanted = dict(map(_filter, filters))
        async with opened(out.settings) as app:
            found = app.workflows.memory.search(namespace, query, mode=mode, limit=limit, filters=wanted)  # type: ignore[arg-type]
        items = [{"id": one["key"], **one} for one in found]
        out.listing("MemoryResult", items, {"key": "id", "score": "score", "entry": "entry"}, empty="Nothing fits.")

    return run(work)


@memory.command()
@click.argument("namespace", type=Id("namespace"))
def reindex(namespace: str) -> int:
    """Compute the vectors of NAMESPACE anew."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            count = await app.workflows.memory.reindex(namespace)
        out.final("MemoryReindex", {"namespace": namespace, "entries": count})
        out.line(f"{count} entries.")

    return run(work)


def _filter(pair: str) -> tuple[str, Any]:
    name, equals, text = pair.partition("=")
    if not equals:
        raise Invalid(f"--filter {pair!r} is not KEY=JSON.")
    try:
        return name, msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise Invalid(f"--filter {pair!r} is not KEY=JSON: {error}.", help='Quote text: KEY="TEXT".') from error


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise Invalid(f"--metadata is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise Invalid("--metadata is no object.")
    return found
