"""CEL in documents: whatever the small grammar of paths does not hold, over the same roots. Bounded, without I/O.

The library evaluates; what an expression reads is found here, by its tokens: a chain of names that begins with a root,
outside of strings and comments. An output of a task is handed to CEL as one variable, so that ids with a dash work.
``and``, ``or`` and ``not`` may be written for ``&&``, ``||`` and ``!``.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from perdure import canonical
from perdure.errors import Invalid
from perdure.workflow.expressions import (
    ROOTS,
    Expression,
    ExpressionError,
    Reference,
    Rename,
    Scope,
    canonical_reference,
)

_STRING = r"""[rRbB]{0,2}(?:\"\"\"[\s\S]*?\"\"\"|'''[\s\S]*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
_TOKEN = re.compile(
    rf"(?P<string>{_STRING})|(?P<comment>//[^\n]*)|(?P<member>\.\s*[A-Za-z_]\w*)"
    rf"|(?P<task>tasks\s*\.\s*[A-Za-z][A-Za-z0-9_-]*)|(?P<word>[A-Za-z_]\w*)|(?P<space>\s+)|(?P<other>.)",
    re.S,
)
_PLAIN_STRING = re.compile(r"""(['"])([^'"\\\n]*)\1""")
_NAME = re.compile(r"[A-Za-z_]\w*")
_RESERVED = frozenset(
    ("as", "break", "const", "continue", "else", "false", "for", "function", "if", "import", "in", "let", "loop",
     "namespace", "null", "package", "return", "true", "var", "void", "while")
)  # fmt: skip
_WORDS = {"and": "&&", "or": "||", "not": "!"}
_ROOT_LOOP = "loop"


class _Chain(NamedTuple):
    """A reference in a source: its text from ``start`` to ``end``."""

    start: int
    end: int
    reference: Reference


class _Source(NamedTuple):
    """A source split into text and chains; words are CEL's own."""

    pieces: tuple[str | _Chain, ...]


def _tokens(source: str) -> Iterator[re.Match[str]]:
    return _TOKEN.finditer(source)


def _split(source: str) -> _Source:
    pieces: list[str | _Chain] = []
    tokens = list(_tokens(source))
    at = 0
    while at < len(tokens):
        token = tokens[at]
        kind, text = token.lastgroup, token[0]
        if kind == "comment":
            pieces.append(" ")
        elif kind == "task" or (kind == "word" and text in (*ROOTS, _ROOT_LOOP)):
            at, chain = _chain(tokens, at)
            pieces.append(chain)
            continue
        elif kind == "word" and text in _WORDS:
            pieces.append(_WORDS[text])
        else:
            pieces.append(text)
        at += 1
    return _Source(tuple(pieces))


def _chain(tokens: list[re.Match[str]], at: int) -> tuple[int, _Chain]:
    first = tokens[at]
    parts = [part.strip() for part in first[0].split(".")]
    end, at = first.end(), at + 1
    while at < len(tokens):
        if tokens[at].lastgroup == "member":
            following = tokens[at + 1][0] if at + 1 < len(tokens) else ""
            if following == "(":  # a method of the value, for example .size()
                break
            part, after = tokens[at][0][1:].strip(), at + 1
        else:
            part, after = _key(tokens, at)
            if not after:
                break
        parts.append(part)
        end, at = tokens[after - 1].end(), after
    reference = canonical_reference(parts[0], tuple(parts[1:]))
    if reference is None:
        raise ExpressionError(
            "syntax", f"`{'.'.join(parts)}` is no path.", column=first.start() + 1,
            help="Paths are inputs.NAME, vars.NAME, memory.NAME and tasks.ID.output.",
        )  # fmt: skip
    return at, _Chain(first.start(), end, reference)


def _key(tokens: list[re.Match[str]], at: int) -> tuple[str, int]:
    """A key in brackets, ``["name"]``, and where it ends; 0: there is none."""
    shape = [token[0] for token in tokens[at : at + 3]]
    if len(shape) == 3 and (shape[0], shape[2]) == ("[", "]") and (key := _PLAIN_STRING.fullmatch(shape[1])):
        return key[2], at + 3
    return "", 0


def _written(reference: Reference) -> str:
    """A reference in CEL: what is no name of CEL stands in brackets."""
    known = 2 if reference.root == "tasks" else 0  # an id may hold a dash; it is a variable of its own
    named = [f".{part}" for part in reference.path[:known]]
    keys = [f".{part}" if _is_name(part) else f'["{part}"]' for part in reference.path[known:]]
    return reference.root + "".join([*named, *keys])


def _is_name(part: str) -> bool:
    return _NAME.fullmatch(part) is not None and part not in _RESERVED


def _library() -> Any:
    try:
        return importlib.import_module("cel_expr_python.cel")
    except ImportError as error:
        raise ExpressionError(
            "missing_extra",
            "The expression is CEL, and CEL is not installed.",
            help="Install it: pip install 'perdure[cel]'",
        ) from error


class Cel(Expression):
    """A compiled CEL expression."""

    __slots__ = ("_compiled", "_keys", "_outputs", "_roots", "_source", "references", "text")

    def __init__(self, source: str) -> None:
        cel = _library()
        self._source = _split(source)
        chains = [piece for piece in self._source.pieces if isinstance(piece, _Chain)]
        self.references = frozenset(chain.reference for chain in chains)
        self.text = "".join(p if isinstance(p, str) else _written(p.reference) for p in self._source.pieces)
        ids = sorted({chain.reference.path[0] for chain in chains if chain.reference.root == "tasks"})
        self._outputs = {id: f"task_{place}" for place, id in enumerate(ids)}
        keys = sorted({c.reference.path[0] for c in chains if c.reference.root == "memory" and c.reference.path})
        self._keys = {key: f"key_{place}" for place, key in enumerate(keys) if not _is_name(key)}
        self._roots = sorted({chain.reference.root for chain in chains} - {"tasks"})
        names = {**dict.fromkeys(self._roots, cel.Type.DYN), **dict.fromkeys(self._outputs.values(), cel.Type.DYN)}
        text = "".join(p if isinstance(p, str) else self._named(p.reference) for p in self._source.pieces)
        try:
            self._compiled = cel.NewEnv(variables=names).compile(text)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ExpressionError("syntax", f"`{self.text}` is no expression: {_first_line(error)}") from error

    def _named(self, reference: Reference) -> str:
        if reference.root != "tasks":
            if reference.root == "memory" and reference.path and reference.path[0] in self._keys:
                reference = Reference("memory", (self._keys[reference.path[0]], *reference.path[1:]))
            return _written(reference)
        return _written(Reference(self._outputs[reference.path[0]], reference.path[2:]))

    def evaluate(self, scope: Scope) -> Any:
        """See :meth:`Expression.evaluate`."""
        data: dict[str, Any] = {root: dict(getattr(scope, root)) for root in self._roots}
        for key, name in self._keys.items():  # under a name that CEL can ask for: has(memory.name)
            if key in scope.memory:
                data["memory"][name] = scope.memory[key]
        for id, name in self._outputs.items():
            if id not in scope.tasks:
                raise ExpressionError("undefined", f"`{self.text}`: task {id!r} has no output.")
            data[name] = scope.tasks[id]
        cel = _library()
        try:
            found = self._compiled.eval(data=data)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:
            kind = "cost" if "budget" in str(error) else "type"
            raise ExpressionError(kind, f"`{self.text}`: {_first_line(error)}") from error  # type: ignore[arg-type]
        if found.type() == cel.Type.ERROR:
            said = str(found.plain_value())
            missing = "NOT_FOUND" in said or "no such" in said
            raise ExpressionError("undefined" if missing else "type", f"`{self.text}`: {said.splitlines()[0]}")
        value = found.plain_value()
        try:
            canonical.check(value, f"the value of `{self.text}`")
        except Invalid as error:
            raise ExpressionError("type", error.message, help=error.help) from error
        return value

    def renamed(self, rename: Rename) -> Expression:
        """See :meth:`Expression.renamed`."""
        return parse("".join(p if isinstance(p, str) else _written(rename(p.reference)) for p in self._source.pieces))


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].removeprefix("ERROR: ") if lines else type(error).__name__


def parse(source: str) -> Expression:
    """A CEL expression.

    Raises:
        ExpressionError: it does not compile, or CEL is not installed.
    """
    return Cel(source)
