"""From the source of an expression to the expression: the small grammar first, then CEL."""

from __future__ import annotations

import functools

from perdure.limits import EXPRESSION_CHARS_MAX, EXPRESSION_REFERENCES_MAX
from perdure.workflow.expressions import Expression, ExpressionError, small


@functools.lru_cache(maxsize=8192)
def parse(text: str) -> Expression:
    """An expression from its source.

    Raises:
        ExpressionError: it is neither of the small grammar nor CEL; or CEL is not installed.
    """
    source = text.strip()
    if not source:
        raise ExpressionError("syntax", "The expression is empty.", column=1)
    if len(source) > EXPRESSION_CHARS_MAX:
        raise ExpressionError(
            "syntax", f"The expression has {len(source):,} characters; the limit is {EXPRESSION_CHARS_MAX:,}."
        )
    found = small(source)
    if found is not None:
        return found
    from perdure.workflow import cel  # noqa: PLC0415 - only where an expression needs it

    made = cel.parse(source)
    if len(made.references) > EXPRESSION_REFERENCES_MAX:
        raise ExpressionError("syntax", f"The expression reads more than {EXPRESSION_REFERENCES_MAX} paths.")
    return made
