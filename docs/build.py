"""Write docs/reference/ from the code, so that no page can say something else than the program does.

``api.md`` comes from the docstrings and signatures of everything in ``perdure.__all__``, ``cli.md`` from the tree of
commands, ``lifecycle.md`` and ``checks.md`` from the tables and laws that the engine obeys, ``records.md`` from the
stored structs, ``limits.md`` from ``limits.py``. Nothing is written by hand there. ``--check`` writes nothing and fails
when a page is not what would be written. Signatures are read from the source text, not from live objects: the same page
on every machine.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import griffe

import perdure
from perdure import limits
from perdure.ports import failpoints
from perdure.projections import verification
from perdure.rules import invariants, lifecycle

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
MADE = "<!-- Written by docs/build.py from the code: change the docstring, then run `make docs`. -->"


def main() -> int:
    """Write the pages, or compare them with ``--check``. Returns the exit code."""
    check = "--check" in sys.argv[1:]
    stale = []
    pages = {
        "api.md": api_page(),
        "checks.md": checks_page(),
        "cli.md": cli_page(),
        "lifecycle.md": lifecycle_page(),
        "limits.md": limits_page(),
        "records.md": records_page(),
    }
    for name, text in pages.items():
        page = REFERENCE / name
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(page.relative_to(ROOT)))
        if not check:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, encoding="utf-8")
    if stale:
        print(f"{'stale, run `make docs`' if check else 'written'}: {', '.join(stale)}")
    return 1 if stale and check else 0


# -- the Python surface


def api_page() -> str:
    """Every public name with its signature, its docstring and, for a class, its public members."""
    package = griffe.load("perdure", search_paths=[ROOT / "src"])
    assert isinstance(package, griffe.Module)
    public = sorted((name for name in perdure.__all__ if not name.startswith("__")), key=str.casefold)
    parts = [
        MADE,
        "# Python reference",
        "`import perdure as p` gives these names.",
    ]
    parts.append(" · ".join(f"[`{name}`](#{name.lower()})" for name in public))
    for name in public:
        parts += [f"## {name}", *describe(name, getattr(perdure, name), package)]
    return page(parts)


def describe(name: str, value: object, package: griffe.Module) -> Iterator[str]:
    found = static(name, value, package)
    if isinstance(found, griffe.Class):
        yield code(f"class {signature(found, name)}")
        bases = [f"`{base.name}`" for base in ancestors(found)[:1] if base.name in perdure.__all__]
        yield f"A kind of {bases[0]}." if bases else ""
        yield from prose(found)
        yield from inherited_parameters(found)
        for member in members(found):
            yield f"### {name}.{member.name}"
            yield from (function(member) if isinstance(member, griffe.Function) else attribute(member))
    elif isinstance(found, griffe.Function):
        yield from function(found)
    elif isinstance(found, griffe.Attribute):
        yield from attribute(found, name)
    elif isinstance(found, griffe.Module):
        yield from prose(found)
        for inner in found.classes.values():
            yield f"### {name}.{inner.name}"
            yield code(f"class {signature(inner)}")
            yield from prose(inner)
    else:
        yield code(f"{name} = {value!r}")


def static(name: str, value: Any, package: griffe.Module) -> griffe.Object | None:
    """The source of a public name. A lazy name is found through the live object, an alias or constant by its name."""
    for path in (f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}", f"perdure.{name}"):
        try:
            found = package[path.removeprefix("perdure.")] if path.startswith("perdure.") else None
            if found is not None:
                return found.final_target if isinstance(found, griffe.Alias) else found
        except (KeyError, griffe.GriffeError):
            continue
    return None


def members(owner: griffe.Class) -> list[griffe.Function | griffe.Attribute]:
    """Public methods, properties and documented fields, inherited ones included where the base is ours."""
    found: dict[str, griffe.Function | griffe.Attribute] = {}
    for source in reversed([owner, *ancestors(owner)]):
        for name, member in source.members.items():
            shown = isinstance(member, griffe.Function) or (isinstance(member, griffe.Attribute) and member.docstring)
            if shown and not name.startswith("_") and not isinstance(member, griffe.Alias):
                found[name] = member  # type: ignore[assignment]  # narrowed by `shown`
    return sorted(found.values(), key=lambda member: member.lineno or 0)


def ancestors(owner: griffe.Class) -> list[griffe.Class]:
    try:
        return [base for base in owner.mro() if base.path.startswith("perdure.")]
    except ValueError:
        return []


def function(item: griffe.Function) -> Iterator[str]:
    forms = item.overloads or (
        item.parent.overloads.get(item.name) if isinstance(item.parent, griffe.Module | griffe.Class) else None
    )
    word = "async def" if "async" in item.labels else "def"
    yield code("\n".join(f"{word} {signature(form)}" for form in forms or [item]))
    yield from prose(item)


def inherited_parameters(item: griffe.Class) -> Iterator[str]:
    """What the constructor takes, from the nearest base that says it, where the class itself does not."""
    wanted = griffe.DocstringSectionKind.parameters
    for owner in [item, *ancestors(item)]:
        sections = owner.docstring.parse("google", warnings=False) if owner.docstring else []
        found = [section for section in sections if section.kind is wanted]
        if found:
            if owner is not item:
                yield "**Parameters**"
                yield "\n".join(f"- {entry(element)}" for element in found[0].value)
            return


def attribute(item: griffe.Attribute, name: str = "") -> Iterator[str]:
    kind = f": {item.annotation}" if item.annotation is not None else ""
    value = f" = {item.value}" if item.value is not None and len(str(item.value)) < 200 else ""
    yield code(f"{name or item.name}{kind}{value}")
    yield from prose(item)


def signature(item: griffe.Function | griffe.Class, name: str = "") -> str:
    """One line when it fits, else one line a parameter."""
    written = parameters(item)
    returns = f" -> {item.returns}" if isinstance(item, griffe.Function) and item.returns is not None else ""
    if isinstance(item, griffe.Class) and not written:
        return name or item.name
    line = f"{name or item.name}({', '.join(written)}){returns}"
    if len(line) <= 110:
        return line
    return f"{name or item.name}(\n" + "".join(f"    {parameter},\n" for parameter in written) + f"){returns}"


def parameters(item: griffe.Function | griffe.Class) -> list[str]:
    listed = [parameter for parameter in item.parameters if parameter.name not in ("self", "cls")]
    if not listed and isinstance(item, griffe.Class):
        return fields(item)
    written: list[str] = []
    positional_only = keyword_only = False
    for parameter in listed:
        variadic = parameter.kind in (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)
        if written and positional_only and parameter.kind is not griffe.ParameterKind.positional_only:
            written.append("/")
        positional_only = parameter.kind is griffe.ParameterKind.positional_only
        if parameter.kind is griffe.ParameterKind.var_positional:
            keyword_only = True
        if parameter.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            written.append("*")
            keyword_only = True
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(
            parameter.kind, ""
        )
        kind = f": {parameter.annotation}" if parameter.annotation is not None else ""
        default = "" if parameter.default is None or variadic else f"{' = ' if kind else '='}{parameter.default}"
        written.append(f"{stars}{parameter.name}{kind}{default}")
    return [*written, "/"] if positional_only else written


def fields(item: griffe.Class) -> list[str]:
    """What the generated constructor of a struct takes: the annotated names of its body and of its bases."""
    found: dict[str, str] = {}
    if any("Protocol" in str(base) for base in item.bases):
        return []
    for source in reversed([item, *ancestors(item)]):
        for name, member in source.members.items():
            if isinstance(member, griffe.Attribute) and member.annotation is not None and not name.startswith("_"):
                if "ClassVar" not in str(member.annotation) and "property" not in member.labels:
                    found[name] = f"{name}: {member.annotation}" + (
                        f" = {member.value}" if member.value is not None else ""
                    )
    return list(found.values())


def prose(item: griffe.Object) -> Iterator[str]:
    """A docstring as Markdown: text as it stands, each section of parameters, errors or fields as a list."""
    if item.docstring is None:
        return
    for section in item.docstring.parse("google", warnings=False):
        if section.kind is griffe.DocstringSectionKind.text:
            yield marked(section.value)
        elif section.kind is griffe.DocstringSectionKind.admonition:
            text = section.value.description
            yield f"**{section.title}**"
            yield code(text) if text.startswith(">>>") else marked(text)
        elif section.kind is griffe.DocstringSectionKind.examples:
            yield code("\n".join(text for _, text in section.value))
        else:
            title = section.title or section.kind.value.capitalize()
            yield f"**{title}**"
            yield "\n".join(f"- {entry(element)}" for element in section.value)


def marked(text: str) -> str:
    """The marks of docstrings as Markdown: roles and doubled backticks become plain code."""
    return re.sub(r"(?::(?:attr|class|func|meth):)?(`+)~?([^`\n]+)\1", r"`\2`", text)


def entry(element: griffe.DocstringElement) -> str:
    named = getattr(element, "name", "") or (str(element.annotation) if element.annotation else "")
    said = marked(re.sub(r"\s+", " ", element.description).strip())
    return f"`{named}`: {said}" if named else said


# -- the command line


def cli_page() -> str:
    """Every command with its usage, its help and its options. What all commands share is said once, at the top."""
    root = next(value for value in vars(import_module("perdure.cli.main")).values() if isinstance(value, click.Group))
    context = click.Context(root, info_name="perdure", terminal_width=100)
    shared = {name for parameter in root.params for name in parameter.opts}
    parts = [MADE, "# Command line reference"]
    parts += command(root, context, shared=set())
    for path, found in walk(root, context):
        parts += [f"## {path.command_path}", *command(found, path, shared)]
    return page(parts)


def walk(group: click.Group, context: click.Context) -> Iterator[tuple[click.Context, click.Command]]:
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if found is None or found.hidden:
            continue
        inner = click.Context(found, info_name=name, parent=context, terminal_width=100)
        yield inner, found
        if isinstance(found, click.Group):
            yield from walk(found, inner)


def command(item: click.Command, context: click.Context, shared: set[str]) -> Iterator[str]:
    yield code(" ".join([context.command_path, *item.collect_usage_pieces(context)]), "console")
    if item.help:
        paragraphs = inspect.cleandoc(item.help).partition("\f")[0].split("\n\n")
        for paragraph in paragraphs:  # \b is click's mark for lines to be kept as they are
            yield code(paragraph.removeprefix("\b\n"), "text") if paragraph.startswith("\b") else paragraph
    records = [
        parameter.get_help_record(context)
        for parameter in item.get_params(context)
        if parameter.opts[-1] != "--help" and not shared.intersection(parameter.opts)
    ]
    rows = [f"| `{cell(names)}` | {cell(said)} |" for names, said in filter(None, records) if said]
    if rows:
        yield "\n".join(["| option | meaning |", "|---|---|", *rows])
    if isinstance(item, click.Group):
        listed = [(inner.info_name, found) for inner, found in walk(item, context) if inner.parent is context]
        rows = [f"| `{name}` | {cell(found.get_short_help_str(300))} |" for name, found in listed]
        yield "\n".join(["| command | does |", "|---|---|", *rows])


# -- what the engine obeys


def lifecycle_page() -> str:
    """The legal states of submissions, effects and approvals, and the places where a process may die."""
    submission, effect, approval = lifecycle.SUBMISSION, lifecycle.EFFECT, lifecycle.APPROVAL
    decided = {
        state: {str(after): after for after in approval if after in states} for state, states in approval.items()
    }
    return page([
        MADE,
        "# Lifecycles",
        "What may follow what, as the tables of `rules/lifecycle.py` have it.",
        "## Submission",
        "Where owed work stands. The ledger looks claims and waits up here: what is missing is illegal, changes nothing.",
        "`admitted` and `terminalizing` are reached only where log and ledger are two stores.",
        *diagram(submission, lifecycle.SubmissionState),
        *transitions(submission),
        "## Effect",
        "What is known of one try of an effect; another try is another effect. Some verdicts leave it unknown, closed.",
        "The ledger keeps a row from the started record on; `requested` and `withdrawn` are said by the call's records.",
        *diagram(effect, lifecycle.EffectStatus),
        *transitions(effect),
        "## Approval",
        "No release writes `expired` yet.",
        *diagram(decided, lifecycle.ApprovalStatus),
        "## Effect classes",
        members_table(lifecycle.EffectClass, "class", "what recovery may do with a started call without an outcome"),
        "## Boundaries",
        "Every durable write names one; a test can end the process before, inside and after it.",
        "The last two are no writes: they stand around the outside world.",
        ", ".join(f"`{boundary}`" for boundary in failpoints.Boundary),
    ])  # fmt: skip


def diagram(table: Mapping[Any, Mapping[Any, Any]], states: type[StrEnum]) -> Iterator[str]:
    """A table of transitions as a Mermaid diagram, and what each state means."""
    lines = ["stateDiagram-v2", f"    [*] --> {node(next(iter(table)))}"]
    for state, events in table.items():
        targets: dict[str, list[str]] = {}
        for event, after in events.items():
            targets.setdefault(node(after), []).append(str(event))
        lines += [
            f"    {node(state)} --> {target}" + ("" if names == [target] else f": {', '.join(names)}")
            for target, names in targets.items()
        ]
        lines += [f"    {node(state)} --> [*]"] if not events else []
    yield code("\n".join(lines), "mermaid")
    if any(remarks(states).values()):
        yield members_table(states, "state", "means")


def node(state: object) -> str:
    """A state's name, as Mermaid takes one."""
    return str(state).replace("-", "_")


def transitions(table: Mapping[Any, Mapping[Any, Any]]) -> Iterator[str]:
    events = list(dict.fromkeys(event for row in table.values() for event in row))
    rows = [f"| | {' | '.join(f'`{event}`' for event in events)} |", "|---" * (len(events) + 1) + "|"]
    rows += [
        f"| `{state}` | {' | '.join(f'`{row[event]}`' if event in row else '' for event in events)} |"
        for state, row in table.items()
    ]
    yield "\n".join(rows)


def members_table(kind: type[StrEnum], name: str, means: str) -> str:
    told = remarks(kind)
    return "\n".join(
        [f"| {name} | {means} |", "|---|---|", *(f"| `{one}` | {told.get(one.name, '')} |" for one in kind)]
    )


def remarks(kind: type) -> dict[str, str]:
    """The comment behind each member of an enumeration, from its source."""
    found = re.findall(r"^    ([A-Z_]+) = .*?(?:  # (.*))?$", inspect.getsource(kind), re.MULTILINE)
    return dict(found)


def checks_page() -> str:
    """Every law that ``verify`` holds a store to."""
    parts = [MADE, "# Checks", "What `perdure verify` holds every stored history to. Each check stands on its own."]
    for title, checks in {
        "The bytes": invariants.BYTES_CHECKS,
        "The history": invariants.TRACE_CHECKS,
        "The ledger beside it": invariants.LEDGER_CHECKS | verification.AUDIT_CHECKS,
        "The store": verification.STORE_CHECKS,
    }.items():
        rows = [f"| `{name}` | {cell(said)} |" for name, said in checks.items()]
        parts += [f"## {title}", "\n".join(["| check | law |", "|---|---|", *rows])]
    return page(parts)


# -- limits


def limits_page() -> str:
    """Every constant of ``limits.py``, in its groups, with the comment beside it."""
    parts = [MADE, "# Limits", "Every loop, page, queue, payload, depth and retry of the core ends at one of these."]
    rows: list[str] = []
    for line in inspect.getsource(limits).splitlines():
        heading = re.fullmatch(r"# (.+)", line)
        constant = re.fullmatch(r"([A-Z_]+) = .*?(?:  # (.*))?", line)
        if heading:
            parts += ["\n".join(rows)]
            rows = [f"## {heading[1].capitalize()}\n", "| limit | value | |", "|---|---|---|"]
        elif constant and rows:
            value = getattr(limits, constant[1])
            rows.append(f"| `{constant[1]}` | {value:,} | {cell(constant[2] or '')} |")
    return page([*parts, "\n".join(rows)])


# -- records


def records_page() -> str:
    """Every struct that is stored, with its tag, meaning and fields."""
    package = griffe.load("perdure", search_paths=[ROOT / "src"])
    parts = [
        MADE,
        "# Records",
        "What a thread's log holds, for ever. The tag carries the version: a new shape is a new tag.",
        "Instants and durations are microseconds.",
    ]
    for name, title in {"thread": "Threads and submissions", "run": "Runs", "effect": "Effects", "parts": "Parts",
                        "codec": "Batches"}.items():  # fmt: skip
        module = package[f"records.{name}"]
        assert isinstance(module, griffe.Module)
        parts.append(f"## {title}")
        for found in module.classes.values():
            if not found.is_alias and not found.name.startswith("_"):
                parts += record(found)
    return page(parts)


def record(item: griffe.Class) -> Iterator[str]:
    live = getattr(import_module(item.module.path), item.name)
    tag = live.__struct_config__.tag
    yield f"### {item.name}"
    yield f"Stored as `{tag}`." if tag else ""
    yield from prose(item)
    rows = [
        f"| `{name}` | `{cell(str(member.annotation))}` | {'' if member.value is None else f'`{member.value}`'} |"
        for name, member in item.members.items()
        if isinstance(member, griffe.Attribute) and member.annotation is not None and "property" not in member.labels
    ]
    yield "\n".join(["| field | type | default |", "|---|---|---|", *rows])


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def code(text: str, language: str = "python") -> str:
    return f"```{language}\n{text}\n```"


def page(parts: list[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


if __name__ == "__main__":
    sys.exit(main())
