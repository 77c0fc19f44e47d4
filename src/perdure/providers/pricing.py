"""What tokens of a model cost: by a file of yours, else by the table of the ``genai_prices`` package.

That package comes with the ``models`` extra. Its data is read alone, without its code and what that would load.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime
from decimal import ROUND_CEILING, Decimal
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from perdure.errors import Invalid
from perdure.limits import MIB
from perdure.rules.accounting import Price, Rate

__all__ = ["Price", "PriceFile", "Rate", "load", "price_of"]

VARIABLE = "PERDURE_PRICES"
FILE_BYTES_MAX = 4 * MIB
DOLLARS_MAX = 1_000_000  # for a million tokens
_MICRO = 1_000_000
_TABLE = "genai_prices"
_files: dict[str, PriceFile] = {}
_table: list[Any] | None = None
_version = ""


class PriceFile(msgspec.Struct, frozen=True):
    """A price file: its ``version``, and prices by the names of models."""

    version: str
    models: dict[str, Price]


class _Rates(msgspec.Struct, forbid_unknown_fields=True):
    input: Decimal
    output: Decimal
    cache_read: Decimal | None = None
    cache_write: Decimal | None = None
    reasoning: Decimal | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: str
    models: dict[str, _Rates]


def load(path: str | os.PathLike[str]) -> PriceFile:
    """A price file: JSON, dollars for a million tokens, by the names of models::

        {"version": "2026-12", "models": {"openai:gpt-5.6": {"input": 2.5, "output": 10, "cache_read": 0.25}}}

    ``cache_read``, ``cache_write`` and ``reasoning`` may be left out: then they cost what ``input`` and ``output`` do.

    Raises:
        Invalid: there is no such file, it is too large, or it is not of this form.
    """
    name = os.fspath(path)
    try:
        with Path(name).open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Invalid(f"The price file `{name}` cannot be read: {reason}.", help=_where(name)) from error
    if len(raw) > FILE_BYTES_MAX:
        raise Invalid(f"The price file `{name}` is larger than {FILE_BYTES_MAX:,} bytes.")
    try:
        given = msgspec.json.decode(raw, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Invalid(
            f"The price file `{name}` is not of the form that prices have: {error}.",
            help='It is {"version": ..., "models": {"openai:NAME": {"input": ..., "output": ...}}}, in dollars.',
        ) from error
    if not given.version.strip():
        raise Invalid(f"The price file `{name}` has no version.", help="It is recorded with each charge; give one.")
    return PriceFile(given.version, {model: _price(name, given.version, model, r) for model, r in given.models.items()})


def _where(name: str) -> str:
    return f"The environment variable {VARIABLE} names it." if os.environ.get(VARIABLE) == name else ""


def _price(file: str, version: str, model: str, rates: _Rates) -> Price:
    whole: dict[str, int | None] = {}
    for field in _Rates.__struct_fields__:
        rate = getattr(rates, field)
        if rate is not None and not (rate.is_finite() and 0 <= rate <= DOLLARS_MAX):
            raise Invalid(
                f"In the price file `{file}` the `{field}` of `{model}` is {rate!s:.32}.",
                help="Use dollars for a million tokens, from 0.",
            )
        whole[field] = None if rate is None else _micro_usd(rate)
    assert whole["input"] is not None
    assert whole["output"] is not None
    return Price(
        input=whole["input"],
        output=whole["output"],
        cache_read=whole["cache_read"],
        cache_write=whole["cache_write"],
        reasoning=whole["reasoning"],
        version=version,
    )


def _micro_usd(dollars: Decimal) -> int:
    return int((dollars * _MICRO).to_integral_value(ROUND_CEILING))


def own_file() -> PriceFile | None:
    """The file that the environment variable ``PERDURE_PRICES`` names, read once; None when it names none.

    Raises:
        Invalid: see :func:`load`.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    if path not in _files:
        _files[path] = load(path)
    return _files[path]


def price_of(names: tuple[str, ...], provider: str, model: str) -> Price | None:
    """The price of a model, None when nobody knows it.

    Args:
        names: the model's names in a file of yours, the first that is there counts.
        provider: as the built-in table knows it; empty: not looked for there.
        model: as the provider knows it.

    The built-in table's price is that of today and of ordinary prompts: some providers ask more for very long ones.

    Raises:
        Invalid: the file that ``PERDURE_PRICES`` names is wrong.
    """
    if (file := own_file()) is not None:
        for name in names:
            if name in file.models:
                return file.models[name]
    return _built_in(provider, model) if provider else None


def _built_in(provider: str, model: str) -> Price | None:
    wanted = model.lower()
    for offered in _providers():
        if offered.fields["id"] != provider:
            continue
        for info in offered.fields["models"]:
            if _matches(info.fields["match"], wanted):
                return _todays(info.fields["prices"])
    return None


def _todays(prices: Any) -> Price | None:
    if isinstance(prices, list):
        today = datetime.now(UTC).date()
        active = [each for each in prices if _active(each.fields.get("constraint"), today)]
        prices = (active or prices)[-1 if active else 0].fields["prices"]
    fields: Mapping[str, Any] = prices.fields
    found = {name: _rate(fields.get(f"{key}_mtok")) for name, key in _KEYS.items()}
    if found["input"] is None or found["output"] is None:
        return None
    return Price(
        input=found["input"],
        output=found["output"],
        cache_read=found["cache_read"],
        cache_write=found["cache_write"],
        reasoning=found["reasoning"],
        version=_version,
    )


_KEYS = {
    "input": "input",
    "output": "output",
    "cache_read": "cache_read",
    "cache_write": "cache_write",
    "reasoning": "output_reasoning",
}


def _rate(value: Any) -> int | None:
    if isinstance(value, _Node):  # by size of the prompt
        value = value.fields["base"]
    return None if value is None else _micro_usd(value)


def _active(constraint: Any, today: date) -> bool:
    if constraint is None:
        return True
    start = constraint.fields.get(
        "start_date"
    )  # other constraints are times of day: their discounts are not counted on
    return start is not None and bool(start <= today)


def _matches(clause: Any, text: str) -> bool:
    (name, value), *_ = clause.fields.items()
    match name:
        case "equals":
            return bool(text == value.lower())
        case "starts_with":
            return bool(text.startswith(value.lower()))
        case "ends_with":
            return bool(text.endswith(value.lower()))
        case "contains":
            return bool(value.lower() in text)
        case "or_":
            return any(_matches(each, text) for each in value)
        case "and_":
            return all(_matches(each, text) for each in value)
        case "regex":
            return re.search(value, text) is not None
        case _:
            return False


# the package's data, without its code


class _Node:
    """One object of the data: what it was made with."""

    __slots__ = ("fields",)

    def __init__(self, *values: Any, **fields: Any) -> None:
        self.fields = fields | ({"constraint": values[0]} if values else {})


def _providers() -> list[Any]:
    """The providers of the table; none when the package is not installed or its data has another form."""
    global _table, _version  # noqa: PLW0603 (read once)
    if _table is None:
        try:
            _table, _version = _read()
        except (ImportError, LookupError, AttributeError, TypeError, NameError, OSError):
            _table = []
    return _table


def _read() -> tuple[list[Any], str]:
    from importlib.metadata import version  # noqa: PLC0415 (slow to import)

    found = find_spec(_TABLE)
    if found is None or found.origin is None:
        return [], ""
    package = f"{__name__}.{_TABLE}"
    code = SourceFileLoader(f"{package}.data", str(Path(found.origin).with_name("data.py"))).get_code(f"{package}.data")
    assert code is not None
    names = [name for name in code.co_names if name[:1].isupper() and name not in ("Decimal", "UTC")]
    space: dict[str, Any] = {"__name__": f"{package}.data", "__package__": package}
    with _stand_ins(package, names):
        exec(code, space)  # noqa: S102 (installed code, as its own import would run it)
    return space["providers"], f"{_TABLE} {version(_TABLE)}"


@contextmanager
def _stand_ins(package: str, names: list[str]) -> Iterator[None]:
    """Modules of the names that the data imports its classes from."""
    types = ModuleType(f"{package}.types")
    for name in names:
        setattr(types, name, _Node)
    parent = ModuleType(package)
    parent.__path__ = []
    sys.modules |= {package: parent, types.__name__: types}
    try:
        yield
    finally:
        for name in (package, types.__name__):
            sys.modules.pop(name, None)
