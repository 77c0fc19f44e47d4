"""The documentation is held to the code: links resolve, names and figures are the code's, promises have tests.

That what stands in code blocks runs is shown by ``tests/acceptance/test_examples.py``.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import perdure
from perdure import limits
from perdure.cli.main import cli
from perdure.errors import Error
from perdure.ports.failpoints import Boundary
from perdure.records import effect, run, thread
from perdure.rules.lifecycle import EffectClass, EffectStatus, SubmissionState

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "perdure"
DOCS = ROOT / "docs"
GUIDES = sorted((DOCS / "guides").glob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
WRITTEN = [page for page in PAGES if page.parent.name != "reference"]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^)\s]+)\)")
# Words that the glossary has another one for, and what is nobody's business outside.
UNWANTED = re.compile(
    r"\b(sessions?|jobs?|journals?|managers?|helpers?|utils?|abort(?:s|ed)?)\b"
    r"|/work/|/root/|/home/|/Users/|\bissue #?\d|\b(?:py" r"pi|localhost:\d)\b",
    re.IGNORECASE,
)  # fmt: skip


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link may name in a page: its headings, as they are made into anchors."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        number = 1
        while (unique := anchor if number == 1 else f"{anchor}-{number - 1}") in found:
            number += 1
        found.add(unique)
    return found


def targets(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Every relative link of a page: as written, the file it names, the anchor."""
    for link in LINK.findall(prose(page)):
        if "://" not in link and not link.startswith("mailto:"):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_and_anchors_resolve(page: Path) -> None:
    for link, target, anchor in targets(page):
        assert target.exists(), f"{link} names nothing"
        assert target.is_relative_to(ROOT), f"{link} leads out of the checkout"
        if anchor:
            assert anchor in anchors(target), f"{link}: {target.name} has no such heading"


def test_every_page_is_linked_from_the_readme_or_the_index() -> None:
    seen, todo = {ROOT / "README.md"}, [ROOT / "README.md"]
    while todo:
        for _, target, _ in targets(todo.pop()):
            if target.suffix == ".md" and target not in seen:
                seen.add(target)
                todo.append(target)
    lost = set(DOCS.rglob("*.md")) - seen - {DOCS / "README.md"}
    assert not lost, f"nothing leads to {sorted(map(named, lost))}"


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_pages_use_the_words_of_the_glossary(page: Path) -> None:
    found = UNWANTED.search(page.read_text(encoding="utf-8"))
    assert found is None, f"{found[0]!r} stands in {named(page)}"


def test_generated_pages_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "docs/build.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# -- promises


@pytest.mark.parametrize("page", [ROOT / "README.md", *GUIDES], ids=named)
def test_promises_name_what_shows_them(page: Path) -> None:
    """A row under *Shown by*, or of the README's promises, links to a test or an example that exists."""
    text = page.read_text(encoding="utf-8")
    wanted = "## What is promised" if page.name == "README.md" else "## Shown by"
    if wanted not in text:
        assert page.name == "limits.md", f"{named(page)} says nowhere what shows it"
        return
    section = text.split(wanted, 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("|") and "---" not in line][1:]
    assert rows
    for row in rows:
        shown = [(page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(row)]
        assert shown, f"nothing shows {row}"
        for path in shown:
            assert path.is_relative_to(ROOT / "tests") or path.is_relative_to(ROOT / "examples"), path
            assert path.is_file(), path


def test_what_is_said_to_be_missing_is_missing() -> None:
    """When one of these appears, README and guides are to say so."""
    missing = prose(ROOT / "README.md").split("## Not built yet", 1)[1].split("\n## ", 1)[0]
    for name in ("events", "send", "schedule"):
        assert hasattr(perdure.App, name) != (f"`app.{name}`" in missing), name
    for name in ("sleep", "event"):
        assert hasattr(perdure.ToolContext, name) != (f"`ctx.{name}`" in missing), name
    for name in ("Workflow", "Subagent"):
        assert hasattr(perdure, name) != (name.lower() in missing.lower()), name
    assert ("explain" in cli.list_commands(click.Context(cli))) != (
        "`perdure\nexplain` is not a command" in (text := prose(DOCS / "guides" / "unknown-outcomes.md"))
        or "`perdure explain` is not a command" in text
    )


# -- names


def commands(group: click.Group, path: str = "perdure") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if found is None or found.hidden:
            continue
        yield f"{path} {name}"
        if isinstance(found, click.Group):
            yield from commands(found, f"{path} {name}")


def test_every_command_is_documented() -> None:
    reference = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    guide = (DOCS / "guides" / "cli.md").read_text(encoding="utf-8")
    for command in commands(cli):
        assert f"## {command}\n" in reference, command
        assert f"`{' '.join(command.split()[:2])}`" in guide, f"{command} stands in no row of the guide"


@pytest.mark.parametrize("name", [name for name in perdure.__all__ if not name.startswith("__")])
def test_every_public_name_is_documented(name: str) -> None:
    reference = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    assert f"\n## {name}\n" in reference
    assert getattr(perdure, name).__doc__, f"{name} has no docstring"
    used = re.compile(rf"\b{name}\b")
    assert any(used.search(page.read_text(encoding="utf-8")) for page in WRITTEN), f"no page uses {name}"


def test_the_tree_of_errors_is_complete() -> None:
    page = (DOCS / "guides" / "errors.md").read_text(encoding="utf-8")
    public = [getattr(perdure, name) for name in perdure.__all__]
    errors = {value.__name__ for value in public if isinstance(value, type) and issubclass(value, Error)} - {"Error"}
    assert set(re.findall(r"^\| `([A-Z]\w+)` \|", page, re.MULTILINE)) == errors


def test_every_kind_of_failure_is_listed() -> None:
    rows = (DOCS / "guides" / "errors.md").read_text(encoding="utf-8").split("## Kinds of failure", 1)[1]
    listed = set(re.findall(r"`([a-z_.]+)`", "".join(re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE))))
    made: set[str] = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Failure":
                kinds = [n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant)] if node.args else []
                made.update(kind for kind in kinds if isinstance(kind, str))
    assert made <= listed, f"not listed: {sorted(made - listed)}"


def test_the_glossary_has_every_state_status_and_class() -> None:
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    words = [*EffectClass, *(status for status in EffectStatus if status != "requested")]
    words += [state for state in SubmissionState if state in ("suspended", "settled")]
    for word in words:
        assert re.search(rf"\b{str(word).removesuffix('d')}", page), word
    entries = re.findall(r"^\| \*\*(.+?)\*\* \|", page, re.MULTILINE)
    assert entries == sorted(entries), "the glossary is in order"
    assert len(entries) == len(set(entries))


# -- figures and tables


def test_figures_in_the_guide_of_limits_are_the_codes() -> None:
    page = (DOCS / "guides" / "limits.md").read_text(encoding="utf-8")
    pairs = re.findall(r"([\d.,]*\d)[^`|]*?\(`([A-Z_]+)`\)", page)
    assert len(pairs) == len(set(re.findall(r"`([A-Z_]{5,})`", page)))
    for figure, name in pairs:
        assert float(figure.replace(",", "")) == float(getattr(limits, name)), name


def test_the_design_names_every_record_table_and_boundary() -> None:
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    for module in (thread, run, effect):
        for name, value in vars(module).items():
            if getattr(getattr(value, "__struct_config__", None), "tag", None) and value.__module__ == module.__name__:
                assert f"`{name}`" in page, name
    schema = (SOURCE / "stores" / "sqlite" / "schema.sql").read_text(encoding="utf-8")
    for table in re.findall(r"^CREATE TABLE (\w+)", schema, re.MULTILINE):
        assert f"| `{table}` |" in page, table
    order = page.split("## The order of writes", 1)[1].split("\n## ", 1)[0]
    shown = {
        name
        for row in re.findall(r"^\|.*\| (`[^|]+) \|$", order, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+)`", row)
    }
    assert shown <= {str(boundary) for boundary in Boundary}
    assert len(shown) > 10


def test_the_layers_are_drawn_once() -> None:
    """Design and contributing show the same layers, and every package of the source stands in them."""
    drawn = []
    for page in (DOCS / "design.md", ROOT / "CONTRIBUTING.md"):
        found = re.search(r"```\n(cli .*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        assert found is not None, named(page)
        drawn.append({word for line in found[1].splitlines() for word in re.findall(r"\w+", line.split("  ")[0])})
    assert drawn[0] == drawn[1]
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and not path.name.startswith("_")}
    assert packages <= drawn[0], packages - drawn[0]


@pytest.mark.parametrize("page", sorted((DOCS / "decisions").glob("0*.md")), ids=named)
def test_a_decision_has_one_form(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {page.name[:4]} ")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
    assert f"]({page.name})" in (page.parent / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") < 40, "one page"
