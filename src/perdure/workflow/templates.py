"""JSON values with ``${{ }}`` in their strings: parsed once, rendered against a scope. Keys are never templates.

A string that is exactly one template keeps the type of its value. In mixed text only scalars can stand: null, true, false,
numbers as JSON, text as it is. ``$${{`` stands for a literal ``${{``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec

from perdure.limits import JSON_DEPTH_MAX
from perdure.workflow.expressions import Expression, ExpressionError, Reference, Rename, Scope
from perdure.workflow.parsing import parse as parse_expression

_OPEN, _CLOSE = "${{", "}}"
_encode = msgspec.json.Encoder().encode


class TemplateError(ExpressionError):
    """A template cannot be read or rendered. ``place`` is where inside the value, for example ``with.items[2]``."""

    def __init__(self, error: ExpressionError, place: str) -> None:
        super().__init__(error.kind, error.message, column=error.column, help=error.help)
        self.place = place

    def __str__(self) -> str:
        """With its place."""
        return f"{self.place}: {super().__str__()}"


@functools.lru_cache(maxsize=16_384)
def _pieces(text: str) -> tuple[str | Expression, ...]:
    """The text and the expressions of a string, in order.

    Raises:
        ExpressionError: a template does not close, or cannot be read.
    """
    found: list[str | Expression] = []
    plain, at = "", 0
    while (start := text.find(_OPEN, at)) >= 0:
        if start > 0 and text[start - 1] == "$":
            plain += text[at : start - 1] + _OPEN
            at = start + len(_OPEN)
            continue
        plain += text[at:start]
        if plain:
            found.append(plain)
            plain = ""
        end = _end(text, start + len(_OPEN))
        if end < 0:
            raise ExpressionError("syntax", "A template is not closed: `${{` without `}}`.", column=start + 1)
        inner = text[start + len(_OPEN) : end]
        try:
            found.append(parse_expression(inner))
        except ExpressionError as error:
            error.column += start + len(_OPEN) + len(inner) - len(inner.lstrip())
            raise
        at = end + len(_CLOSE)
    plain += text[at:]
    if plain or not found:
        found.append(plain)
    return tuple(found)


def _end(text: str, at: int) -> int:
    """Where the template that begins before ``at`` closes; braces in quotes, and of an object literal, do not close it."""
    quote, depth = "", 0
    while at < len(text):
        char = text[at]
        if quote:
            if char == "\\":
                at += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char == "{":
            depth += 1
        elif depth and char == "}":
            depth -= 1
        elif text.startswith(_CLOSE, at):
            return at
        at += 1
    return -1


def _text(value: Any, expression: Expression) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        kind = "an object" if isinstance(value, dict) else "a list"
        raise ExpressionError(
            "non_scalar", f"`{expression.text}` is {kind}, which cannot stand inside text.",
            help="Let the template be the whole value, or take a field of it.",
        )  # fmt: skip
    return str(_encode(value).decode())


class Template:
    """One JSON value with its templates.

    Attributes:
        source: the value as written. references: every path it reads.
    """

    __slots__ = ("_constant", "references", "source")

    def __init__(self, source: Any, references: frozenset[Reference]) -> None:
        self.source = source
        self.references = references
        self._constant = not references and not _holds_template(source)

    def render(self, scope: Scope) -> Any:
        """The value with every template replaced.

        Raises:
            TemplateError: one of them has no value.
        """
        return self.source if self._constant else _render(self.source, scope, "")

    def renamed(self, rename: Rename) -> Template:
        """The same value over other names."""
        return parse(_rename(self.source, rename))


def _holds_template(value: Any) -> bool:
    match value:
        case str():
            return _OPEN in value
        case list():
            return any(map(_holds_template, value))
        case dict():
            return any(map(_holds_template, value.values()))
        case _:
            return False


def _render(value: Any, scope: Scope, place: str) -> Any:
    if isinstance(value, str):
        return _render_text(value, scope, place) if _OPEN in value else value
    if isinstance(value, dict):
        return {key: _render(item, scope, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [_render(item, scope, f"{place}[{index}]") for index, item in enumerate(value)]
    return value


def _render_text(text: str, scope: Scope, place: str) -> Any:
    try:
        pieces = _pieces(text)
        if len(pieces) == 1:
            only = pieces[0]
            return only if isinstance(only, str) else only.evaluate(scope)
        return "".join(p if isinstance(p, str) else _text(p.evaluate(scope), p) for p in pieces)
    except TemplateError:
        raise
    except ExpressionError as error:
        raise TemplateError(error, place.lstrip(".") or "value") from error


def _rename(value: Any, rename: Rename) -> Any:
    match value:
        case str() if _OPEN in value:
            made = ""
            for piece in _pieces(value):
                if isinstance(piece, str):
                    made += piece.replace(_OPEN, "$" + _OPEN)
                else:
                    made += f"{_OPEN} {piece.renamed(rename).text} {_CLOSE}"
            return made
        case list():
            return [_rename(item, rename) for item in value]
        case dict():
            return {key: _rename(item, rename) for key, item in value.items()}
        case _:
            return value


def strings(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Every string of a value with its place, in order.

    Raises:
        ExpressionError: the value is nested beyond ``JSON_DEPTH_MAX``.
    """
    stack: list[tuple[Any, str, int]] = [(value, place, 0)]
    while stack:
        node, at, depth = stack.pop()
        if depth > JSON_DEPTH_MAX:
            raise ExpressionError("syntax", f"{at[:200]} is nested deeper than {JSON_DEPTH_MAX} levels.")
        match node:
            case str():
                yield at, node
            case list():
                stack.extend((item, f"{at}[{i}]", depth + 1) for i, item in reversed(list(enumerate(node))))
            case dict():
                stack.extend((item, f"{at}.{key}" if at else key, depth + 1) for key, item in reversed(node.items()))
            case _:
                pass


def parse(value: Any, place: str = "") -> Template:
    """A template from a JSON value.

    Raises:
        TemplateError: a string of it cannot be read; says where.
    """
    references: set[Reference] = set()
    for at, text in strings(value, place):
        if _OPEN not in text:
            continue
        try:
            for piece in _pieces(text):
                if not isinstance(piece, str):
                    references |= piece.references
        except ExpressionError as error:
            raise TemplateError(error, at) from error
    return Template(value, frozenset(references))


def exact(text: str) -> Expression | None:
    """The expression of a string that is exactly one template; None if it is not.

    Raises:
        ExpressionError: it cannot be read.
    """
    pieces = _pieces(text.strip())
    only = pieces[0] if len(pieces) == 1 else None
    return only if isinstance(only, Expression) else None


def condition(text: str) -> Expression:
    """The expression of a condition, written bare or as exactly one template.

    Raises:
        ExpressionError: it cannot be read.
    """
    return (exact(text) if _OPEN in text else None) or parse_expression(text)
