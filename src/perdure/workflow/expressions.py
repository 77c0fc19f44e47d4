"""Expressions of documents: what stands inside ``${{ }}``, ``when`` and ``while``. Parsed once; pure.

First the small grammar of paths: an optional ``not``, one path, an optional comparison with a JSON literal or a word.
Whatever does not fit it is CEL, over the same roots, within bounds of its own. What an expression refers to is known from
what was parsed, and names are changed there, never in text.

Equality is that of JSON values: 1 equals 1.0, and neither equals "1" or true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

import msgspec

from perdure import canonical
from perdure.errors import Error

ROOTS = ("inputs", "vars", "memory", "tasks")
_SEGMENT = r"[A-Za-z0-9_-]+"
_PATH = re.compile(rf"({'|'.join(ROOTS)}|loop)((?:\.{_SEGMENT})*)")
_OPERATOR = re.compile(r"\s*(==|!=|<=|>=|<|>)\s*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

ErrorKind = Literal["syntax", "undefined", "type", "non_scalar", "cost", "unsupported", "missing_extra"]


class ExpressionError(Error):
    """An expression cannot be read or evaluated.

    Attributes:
        kind: what is wrong, for programs. column: where in the text it begins, from 1; 0 when nobody knows.
    """

    code = "expression"

    def __init__(self, kind: ErrorKind, message: str, *, column: int = 0, help: str = "") -> None:
        super().__init__(message, help=help)
        self.kind = kind
        self.column = column


class Scope(NamedTuple):
    """What expressions read. ``tasks`` is the output of each task that has ended, by its id."""

    inputs: Mapping[str, Any]
    vars: Mapping[str, Any]
    memory: Mapping[str, Any]
    tasks: Mapping[str, Any]


class Reference(NamedTuple):
    """One path: a root and what follows it; ``path`` of a task begins with its id and ``output``."""

    root: str
    path: tuple[str, ...]

    def __str__(self) -> str:
        """As it is written."""
        return ".".join((self.root, *self.path))


class Decision(msgspec.Struct, frozen=True, rename="camel"):
    """A condition as it was decided, with the digest of all it could have read."""

    expression: str
    context_digest: str
    result: bool


Rename = Callable[[Reference], Reference]


def truth(value: Any) -> bool:
    """Whether a value counts as true: not null, false, 0, and nothing empty."""
    return bool(value)


def equal(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal; a boolean is no number."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    return bool(left == right)


def read(reference: Reference, scope: Scope) -> Any:
    """The value of a path.

    Raises:
        ExpressionError: a part of it does not exist, which is not the same as null.
    """
    value: Any = getattr(scope, reference.root)
    path = reference.path
    if reference.root == "tasks" and len(path) > 1:
        if path[0] not in value:
            raise _undefined(reference, 0, value)
        value, path = value[path[0]], path[2:]
    for part in path:
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            raise _undefined(reference, len(reference.path) - len(path) + path.index(part), value)
    return value


def _undefined(reference: Reference, depth: int, value: Any) -> ExpressionError:
    part = reference.path[depth]
    found = ".".join((reference.root, *reference.path[:depth]))
    if not isinstance(value, Mapping):
        shown = "null" if value is None else type(value).__name__
        return ExpressionError("undefined", f"`{reference}`: {found} is {shown}, which has no `{part}`.")
    near = get_close_matches(part, list(value)[:1000], 1)
    meant = f"Did you mean `{near[0]}`?" if near else ""
    return ExpressionError("undefined", f"`{reference}`: {found} has no `{part}`.", help=meant)


class Expression:
    """One parsed expression.

    Attributes:
        text: its canonical source. references: every path it reads.
    """

    text: str
    references: frozenset[Reference]

    def evaluate(self, scope: Scope) -> Any:
        """Its value.

        Raises:
            ExpressionError: it cannot be had.
        """
        raise NotImplementedError

    def renamed(self, rename: Rename) -> Expression:
        """The same expression over other names."""
        raise NotImplementedError


class Path(Expression):
    """A path alone: its value as it is."""

    __slots__ = ("reference", "references", "text")

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.text = str(reference)
        self.references = frozenset({reference})

    def evaluate(self, scope: Scope) -> Any:
        """See :meth:`Expression.evaluate`."""
        return read(self.reference, scope)

    def renamed(self, rename: Rename) -> Expression:
        """See :meth:`Expression.renamed`."""
        return Path(rename(self.reference))


class Condition(Expression):
    """``not``, a path, and perhaps a comparison with a literal: true or false."""

    __slots__ = ("literal", "negated", "operator", "reference", "references", "text")

    def __init__(self, reference: Reference, negated: bool, operator: str, literal: Any) -> None:
        self.reference = reference
        self.negated = negated
        self.operator = operator
        self.literal = literal
        compared = f" {operator} {msgspec.json.encode(literal).decode()}" if operator else ""
        self.text = f"{'not ' if negated else ''}{reference}{compared}"
        self.references = frozenset({reference})

    def evaluate(self, scope: Scope) -> Any:
        """See :meth:`Expression.evaluate`."""
        value = read(self.reference, scope)
        result = self._compare(value) if self.operator else truth(value)
        return not result if self.negated else result

    def _compare(self, value: Any) -> bool:
        if self.operator == "==":
            return equal(value, self.literal)
        if self.operator == "!=":
            return not equal(value, self.literal)
        for side in (value, self.literal):
            if isinstance(side, bool) or not isinstance(side, int | float):
                raise ExpressionError(
                    "type", f"`{self.text}` compares {_shown(value)} with {_shown(self.literal)} by size.",
                    help="Only numbers have an order; use == or !=.",
                )  # fmt: skip
        return bool(_ORDER[self.operator](value, self.literal))

    def renamed(self, rename: Rename) -> Expression:
        """See :meth:`Expression.renamed`."""
        return Condition(rename(self.reference), self.negated, self.operator, self.literal)


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _shown(value: Any) -> str:
    return {bool: "a boolean", str: "text", list: "a list", dict: "an object"}.get(type(value), repr(value))


def reference_of(path: str) -> Reference | None:
    """The reference that a dotted path is, or None."""
    match = _PATH.fullmatch(path)
    if match is None:
        return None
    parts = tuple(match[2].split(".")[1:])
    return canonical_reference(match[1], parts)


def canonical_reference(root: str, parts: tuple[str, ...]) -> Reference | None:
    """A root and its parts as a reference; ``loop.output`` is what ``vars.loopPrevious`` is. None: no such path."""
    if root == "loop":
        return Reference("vars", ("loopPrevious", *parts[1:])) if parts[:1] == ("output",) else None
    if root == "tasks" and parts[1:2] != ("output",):
        return None
    return Reference(root, parts)


def small(source: str) -> Expression | None:
    """An expression of the small grammar, or None."""
    negated = source.startswith("not ")
    rest = source[4:].lstrip() if negated else source
    match = _PATH.match(rest)
    if match is None:
        return None
    reference = reference_of(match[0])
    if reference is None:
        return None
    after = rest[match.end() :]
    if not after.strip():
        return Condition(reference, True, "", None) if negated else Path(reference)
    operator = _OPERATOR.match(after)
    if operator is None:
        return None
    known, literal = _literal(after[operator.end() :].strip())
    return Condition(reference, negated, operator[1], literal) if known else None


def _literal(text: str) -> tuple[bool, Any]:
    """A JSON literal, a quoted text or a bare word; whether it is one."""
    if len(text) >= 2 and text[0] == text[-1] == "'" and "'" not in text[1:-1] and "\\" not in text:
        return True, text[1:-1]
    try:
        return True, canonical.decode(text.encode())
    except Error:
        pass
    if _WORD.fullmatch(text) and text not in ROOTS:
        return True, text
    return False, None


def context_digest(scope: Scope) -> str:
    """Digest of all inputs, variables, memory and outputs of tasks: of the digests of their parts, by name.

    An output is digested once, however often it is read: the cost of a decision does not grow with what was decided.
    """
    tasks = {id: _digest_of(output) for id, output in scope.tasks.items()}
    return canonical.digest(
        ["context", 1, canonical.digest(scope.inputs), canonical.digest(scope.vars), canonical.digest(scope.memory), tasks]
    )  # fmt: skip


_digests: dict[int, tuple[Any, str]] = {}
_DIGESTS_KEPT = 8192


def _digest_of(value: Any) -> str:
    """The digest of a value that is never changed in place, remembered while the value lives."""
    kept = _digests.get(id(value))
    if kept is not None and kept[0] is value:
        return kept[1]
    if len(_digests) >= _DIGESTS_KEPT:
        _digests.clear()
    made = canonical.digest(value)
    _digests[id(value)] = (value, made)
    return made
