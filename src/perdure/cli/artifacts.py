"""Files that tasks left: list, show, verify, export, collect. And ``budget`` and ``gc``, which look after what runs use."""

from __future__ import annotations

from pathlib import Path

import click

from perdure.cli import failures
from perdure.cli.opening import Id, opened, run
from perdure.cli.output import Output, plain
from perdure.errors import Invalid


@click.group()
def artifacts() -> None:
    """Files that tasks left, by the digest of their bytes; they are beside the database."""


@artifacts.command("list")
@click.argument("of_run", metavar="[RUN]", required=False, type=Id("run"))
@click.option("--task", type=Id("task"), metavar="T", help="Only of this task.")
def list_(of_run: str | None, task: str | None) -> int:
    """List files, by run, task and path."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = await app.artifacts(run=of_run, task=task)
        items = [{"id": one.digest, **plain(one)} for one in found]
        columns = {"digest": "id", "bytes": "size", "run": "run", "task": "task", "path": "path"}
        out.listing("Artifact", items, columns, empty="No artifacts.")

    return run(work)


@artifacts.command()
@click.argument("digest")
def show(digest: str) -> int:
    """Show who refers to DIGEST, and when its bytes were last verified."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = await app.artifacts(digest=digest)
            place = app.workflows.artifacts.place(digest)
        if not found:
            raise Invalid(f"There is no artifact {digest!r}.", help="List them: perdure artifacts list")
        items = [plain(one) for one in found]
        out.final("Artifact", {"id": digest, "file": str(place), "size": found[0].size, "references": items})
        if out.human:
            out.fields({"digest": digest, "bytes": found[0].size, "file": str(place), "verified": found[0].verified_at})
            for one in found:
                if one.run:
                    out.line(f"  {one.run} {one.task} {one.path}")

    return run(work)


@artifacts.command()
@click.argument("digest", required=False)
@click.option("--all", "everything", is_flag=True, help="Every artifact.")
def verify(digest: str | None, everything: bool) -> int:
    """Hash the bytes of DIGEST again, or of all. Exit code 5 if any are missing or changed."""
    if (digest is None) == (not everything):
        raise click.UsageError("Give a DIGEST, or --all.")

    async def work(out: Output) -> int:
        async with opened(out.settings) as app:
            found = [digest] if digest is not None else sorted({one.digest for one in await app.artifacts()})
            items = [{"id": one, "problem": await app.workflows.artifacts.verify(one)} for one in found]
        bad = [item for item in items if item["problem"]]
        error = None
        if bad:
            error = failures.error_body(
                "corrupt", f"{len(bad)} of {len(items)} artifacts are not whole.", failures.PERSISTENCE
            )
        out.final("ArtifactVerification", {"items": items}, error=error)
        for item in bad:
            out.line(f"failed: {item['id']}: {item['problem']}")
        out.line(f"{len(items) - len(bad)} of {len(items)} artifacts are whole.")
        return failures.PERSISTENCE if bad else 0

    return run(work)


@artifacts.command()
@click.argument("digest")
@click.argument("file")
@click.option("--overwrite", is_flag=True, help="Replace FILE if it exists.")
def export(digest: str, file: str, overwrite: bool) -> int:
    """Verify the bytes of DIGEST and write them to FILE, all or nothing."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            await app.workflows.artifacts.export(digest, Path(file), overwrite=overwrite)
        out.final("ArtifactExport", {"id": digest, "file": file})
        out.line(f"Wrote {file}.")

    return run(work)


_OLDER = click.option(
    "--older-than-days", "days", type=click.FloatRange(min=0), default=30.0, metavar="N", help="Default: 30."
)
_DRY = click.option("--dry-run", is_flag=True, help="Only tell what would go.")


@artifacts.command("gc")
@_OLDER
@_DRY
def collect(days: float, dry_run: bool) -> int:
    """Remove files that no task refers to, once they are old enough."""
    return _collect(days, dry_run)


@click.command()
@_OLDER
@_DRY
def gc(days: float, dry_run: bool) -> int:
    """Remove what nothing refers to any more: files of the artifact store, and expired entries of long-term memory."""
    return _collect(days, dry_run, memory=True)


def _collect(days: float, dry_run: bool, *, memory: bool = False) -> int:
    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            found = await app.workflows.artifacts.collect(days, dry_run=dry_run)
            if memory and not dry_run:
                out.line(f"{await app.workflows.memory.forget_expired()} expired entries of memory removed.")
        out.final("Collection", plain(found))
        word = "would be removed" if dry_run else "removed"
        count = found.considered if dry_run else found.removed
        out.line(f"{count} artifacts {word}, {found.reclaimed_bytes:,} bytes; {found.temporary} partial files.")

    return run(work)


@click.command()
@click.argument("of_run", metavar="RUN", type=Id("run"))
def budget(of_run: str) -> int:
    """Show what RUN has used of each budget, and its limits."""

    async def work(out: Output) -> None:
        async with opened(out.settings) as app:
            view = await app.workflow(of_run)
        items = [{"id": one.unit, **plain(one)} for one in view.budgets]
        out.listing("Budget", items, {"unit": "unit", "used": "used", "limit": "limit"}, empty="It has used nothing.")

    return run(work)
