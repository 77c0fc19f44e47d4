"""An outside witness and the laws judged by it. It counts what really happened and trusts no record of ours.

A test hands a :class:`World` to its tools; each of them touches it once where a real tool would touch the outside.
The laws take plain values, so that any store, and any other runtime, can be judged by them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from perdure import canonical, ids
from perdure.clock import Ids, RandomIds
from perdure.errors import Corrupt, Invalid, Unavailable, ensure

__all__ = ["Entry", "World", "check_laws", "repeated", "unproduced", "unsettled"]

_RECEIPT = "witness"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One real occurrence.

    Attributes:
        receipt: what :meth:`World.touch` returned for it; no other occurrence has it.
        name: what happened.
        key: the key under which it was asked for, if one was given.
        process: the process in which it happened.
        mark: makes two occurrences of the same thing two.
        facts: whatever else was given.
    """

    receipt: str
    name: str
    key: str | None
    process: int
    mark: str
    facts: dict[str, Any]


class World:
    """A file that many processes append occurrences to and nobody takes one from.

    An occurrence is one write and on the disk before ``touch`` returns. A process killed inside ``touch`` may leave
    part of a line; no receipt was given for it, so it is not counted, and the next occurrence is not harmed by it.

    Args:
        path: the file; it appears at the first occurrence.
        ids: where occurrences get their marks from; a simulation passes seeded ones.
    """

    def __init__(self, path: str | os.PathLike[str], *, ids: Ids | None = None) -> None:
        self.path = Path(path)
        self._ids = ids or RandomIds()

    def touch(self, name: str, /, *, key: str | None = None, **facts: Any) -> str:
        """Record one occurrence and return its receipt, which nobody comes to without this call.

        Raises:
            Invalid: name or key is no legal id, or a fact is no JSON value.
            Unavailable: the file cannot be written; whether the occurrence counts is then for ``entries`` to say.
        """
        ids.check_id(name, "name")
        if key is not None:
            ids.check_id(key, "key")
        mark = self._ids.fresh("mark")
        receipt = _receipt(name, key, mark, facts)
        line = canonical.encode(msgspec.to_builtins(Entry(receipt, name, key, os.getpid(), mark, facts)), "occurrence")
        raw = b"\n" + line + b"\n"  # a line of its own, even after one that was torn
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                written = os.write(file, raw)
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise Unavailable(f"The witness file {self.path} cannot be written: {error.strerror}.") from error
        ensure(written == len(raw), Unavailable(f"The witness file {self.path} took part of an occurrence."))
        return receipt

    def entries(self) -> list[Entry]:
        """Every occurrence, in the order in which they reached the file; empty while there is none.

        Raises:
            Corrupt: a whole line is not what ``touch`` wrote.
        """
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise Unavailable(f"The witness file {self.path} cannot be read: {error.strerror}.") from error
        found: list[Entry] = []
        for number, line in enumerate(raw.split(b"\n"), 1):
            if not line or _torn(line):
                continue
            try:
                entry = msgspec.json.decode(line, type=Entry)
                genuine = entry.receipt == _receipt(entry.name, entry.key, entry.mark, entry.facts)
            except (msgspec.DecodeError, Invalid):
                genuine = False
            ensure(genuine, Corrupt(f"Line {number} of the witness file {self.path} is not what a touch wrote."))
            found.append(entry)
        return found

    def count(self, name: str | None = None, key: str | None = None) -> int:
        """How many occurrences there were: of this name, under this key, where given."""
        return sum(name in (None, entry.name) and key in (None, entry.key) for entry in self.entries())

    def has_receipt(self, receipt: object) -> bool:
        """Whether an occurrence has this receipt."""
        return any(entry.receipt == receipt for entry in self.entries())


def check_laws(
    world: World,
    confirmed: Iterable[tuple[str, str | None, object]],
    dispatches: Mapping[str, int | None],
    settlements: Mapping[str, int],
) -> list[str]:
    """Judge what was recorded by what happened: the violations, a sentence each; none when all three laws hold.

    Args:
        world: the witness.
        confirmed: see :func:`unproduced`.
        dispatches: see :func:`repeated`.
        settlements: see :func:`unsettled`.
    """
    entries = world.entries()
    return [*unproduced(entries, confirmed), *repeated(entries, dispatches), *unsettled(settlements)]


def unproduced(entries: Iterable[Entry], confirmed: Iterable[tuple[str, str | None, object]]) -> list[str]:
    """Law 1: no confirmed result that the world did not produce.

    Args:
        entries: what happened.
        confirmed: effect id, key and result of every confirmed effect. A result is a receipt or a JSON value that holds
            at least one; every receipt in it must be the world's, under this key if one is given.
    """
    key_of = {entry.receipt: entry.key for entry in entries}
    violations: list[str] = []
    for effect, key, result in confirmed:
        receipts = [text for text in _texts(result) if text.startswith(_RECEIPT + "_") or text in key_of]
        if not receipts:
            violations.append(f"Effect {effect} is confirmed with {_shown(result)}, in which there is no receipt.")
        for receipt in receipts:
            if receipt not in key_of:
                violations.append(f"Effect {effect} is confirmed with {receipt}, which the world never gave.")
            elif key is not None and key_of[receipt] != key:
                violations.append(
                    f"Effect {effect} of key {key} is confirmed with {receipt}, given under key {key_of[receipt]}."
                )
    return violations


def repeated(entries: Iterable[Entry], dispatches: Mapping[str, int | None]) -> list[str]:
    """Law 2: no ``once`` effect dispatched more often than 1 + its verdicts that allowed another try.

    Occurrences of one name under one key are counted together. Those without a key are not judged.

    Args:
        entries: what happened.
        dispatches: how many dispatches were permitted under each key; ``None`` where the effect's class permits any
            number. A key that is missing was never recorded, so nothing was permitted under it.
    """
    counts = Counter((entry.key, entry.name) for entry in entries if entry.key is not None)
    violations: list[str] = []
    for (key, name), count in counts.items():
        permitted = dispatches.get(key, 0)
        if permitted is not None and count > permitted:
            violations.append(f"{name} took place {count} times under key {key}; {permitted} permitted.")
    return violations


def unsettled(settlements: Mapping[str, int]) -> list[str]:
    """Law 3: every accepted submission has exactly one settlement.

    Args:
        settlements: the number of settlements of every accepted submission, 0 where there is none.
    """
    return [
        f"Submission {submission} has {count} settlements; accepted work is owed exactly one."
        for submission, count in settlements.items()
        if count != 1
    ]


def _receipt(name: str, key: str | None, mark: str, facts: dict[str, Any]) -> str:
    return ids.derive(_RECEIPT, name, key, mark, canonical.digest(facts))


def _torn(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return True
    return False


def _texts(value: object) -> Iterator[str]:
    stack = [value]
    while stack:
        node = stack.pop()
        match node:
            case str():
                yield node
            case list() | tuple():
                stack.extend(node)
            case dict():
                stack.extend(node.values())
            case _:
                pass


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:79] + "…"
