"""Long-term memory: reading and searching are recorded observations, a write replaces one entry of our own database.

A write is of class ``idempotent``: the same entry under the same key again changes nothing more. Searches read what is
there when they run; a replay uses what was recorded. The only embedding is ``local_hash``, which is lexical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from perdure.clock import Clock, seconds
from perdure.definitions.workflow import Action
from perdure.errors import Invalid
from perdure.limits import (
    MEMORY_ENTRY_BYTES_MAX,
    MEMORY_QUERY_BYTES_MAX,
    MEMORY_RESULTS_MAX,
    MEMORY_SCANNED_MAX,
    PAGE_ROWS_MAX,
)
from perdure.ports.executor import Call, Facts, Failed, Performed
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import MemoryRow
from perdure.ports.store import Store
from perdure.rules.recall import Mode, Query, embed

_PREFIX = "builtin.long_term_memory."
_DAY = 86_400.0
_encode = msgspec.json.Encoder().encode
DIMENSIONS = 64


def entry_of(input: Mapping[str, Any]) -> dict[str, Any]:
    """The entry that an input says, in its one form.

    Raises:
        Invalid: it says none, or more than one, or is too large.
    """
    metadata = input.get("metadata") or {}
    content: dict[str, Any]
    if "entry" in input:
        given = input["entry"]
        if not isinstance(given, dict) or given.get("formatVersion") != 1 or not isinstance(given.get("content"), dict):
            raise Invalid("The entry is none of format 1.", help="Give content or value instead.")
        content, metadata = given["content"], given.get("metadata") or {}
    elif "content" in input:
        found = input["content"]
        content = found if isinstance(found, dict) else {"type": "text", "text": found}
    elif "value" in input:
        content = {"type": "json", "value": input["value"], **({"text": input["text"]} if "text" in input else {})}
    else:
        raise Invalid("There is nothing to remember.", help="Give content, value or entry.")
    if content.get("type") == "text" and not isinstance(content.get("text"), str):
        raise Invalid("The content of an entry is no text.")
    if not isinstance(metadata, dict):
        raise Invalid("The metadata of an entry are no object.")
    entry = {"formatVersion": 1, "content": content, "metadata": metadata}
    if len(_encode(entry)) > MEMORY_ENTRY_BYTES_MAX:
        raise Invalid(f"The entry has more than {MEMORY_ENTRY_BYTES_MAX:,} bytes.")
    return entry


def text_of(entry: Mapping[str, Any]) -> str:
    """The text of an entry that searches look at."""
    content = entry["content"]
    if isinstance(content.get("text"), str):
        return str(content["text"])
    value = content.get("value")
    return value if isinstance(value, str) else _encode(value).decode()


class Memory:
    """Long-term memory of a store, for actions and for the command line."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    def get(self, namespace: str, key: str) -> dict[str, Any] | None:
        """An entry with its key, or None."""
        now = self._clock.now()
        row = self._store.read(lambda tx: tx.ledger.memory(namespace, key, now))
        return None if row is None else {"namespace": namespace, "key": key, **msgspec.json.decode(row.entry)}

    async def put(
        self,
        namespace: str,
        key: str,
        entry: Mapping[str, Any],
        *,
        retention_days: float | None = None,
        dimensions: int = DIMENSIONS,
    ) -> None:
        """Keep an entry, for so many days or for ever."""
        now = self._clock.now()
        expires = None if retention_days is None else now + seconds(retention_days * _DAY)
        text = text_of(entry)
        await self._put(MemoryRow(namespace, key, _encode(entry), text, embed(text, dimensions), now, expires))

    async def _put(self, row: MemoryRow) -> None:
        await self._store.write(Boundary.MEMORY, lambda tx: tx.ledger.put_memory(row))

    def rows(self, namespace: str) -> Iterator[MemoryRow]:
        """Entries of a namespace by key, up to a limit."""
        now, after, seen = self._clock.now(), "", 0
        while seen < MEMORY_SCANNED_MAX:
            page = self._page(namespace, now, after)
            yield from page
            seen += len(page)
            if len(page) < PAGE_ROWS_MAX:
                return
            after = page[-1].key

    def _page(self, namespace: str, now: int, after: str) -> list[MemoryRow]:
        return self._store.read(lambda tx: tx.ledger.memories(namespace, now, after=after, limit=PAGE_ROWS_MAX))

    def search(
        self, namespace: str, text: str, *, mode: Mode = "text", limit: int = 10, filters: Mapping[str, Any] | None = None,
        dimensions: int = DIMENSIONS,
    ) -> list[dict[str, Any]]:  # fmt: skip
        """The entries that fit best: by score, then by key.

        Raises:
            Invalid: an argument is out of its range.
        """
        if len(text.encode("utf-8", "replace")) > MEMORY_QUERY_BYTES_MAX:
            raise Invalid(f"The query has more than {MEMORY_QUERY_BYTES_MAX:,} bytes.")
        if mode not in ("text", "vector", "hybrid"):
            raise Invalid(f"The mode is {mode!r}.", help="Use text, vector or hybrid.")
        if type(limit) is not int or not 1 <= limit <= MEMORY_RESULTS_MAX:
            raise Invalid(f"The limit is {limit!r}.", help=f"Use a whole number from 1 to {MEMORY_RESULTS_MAX}.")
        query, found = Query(text, mode, dimensions), []
        for row in self.rows(namespace):
            score = query.score(row.text, row.vector)
            if score:
                entry = msgspec.json.decode(row.entry)
                if all(entry["metadata"].get(name) == value for name, value in (filters or {}).items()):
                    found.append({"key": row.key, "score": score, "entry": entry})
        return sorted(found, key=lambda one: (-int(one["score"]), one["key"]))[:limit]

    async def reindex(self, namespace: str, dimensions: int = DIMENSIONS) -> int:
        """Compute every vector of a namespace anew; how many. Idempotent."""
        count = 0
        for row in list(self.rows(namespace)):
            renewed = msgspec.structs.replace(row, vector=embed(row.text, dimensions))
            if renewed != row:
                await self._put(renewed)
            count += 1
        return count

    async def forget_expired(self) -> int:
        """Remove entries that have expired; how many."""
        now = self._clock.now()
        return await self._store.write(Boundary.MEMORY, lambda tx: tx.ledger.forget_expired(now))


class LongTermMemory:
    """``builtin.long_term_memory.read``, ``search``, ``write`` and ``reindex``."""

    kinds = frozenset(_PREFIX + name for name in ("read", "search", "write", "reindex"))

    def __init__(self, store: Store, clock: Clock) -> None:
        self._memory = Memory(store, clock)

    def describe(self, action: Action, input: Mapping[str, Any]) -> Facts:
        """See ``ports.executor.Executor.describe``."""
        name = action.kind.removeprefix(_PREFIX)
        capability, request = f"long_term_memory.{name}", dict(input)
        if name == "write":
            request = {**input, "entry": entry_of(input)}
            return Facts(action.kind, "external_mutate", "idempotent", "low", capability, request)
        if name == "reindex":
            return Facts(action.kind, "internal_state", "idempotent", "low", capability, request)
        return Facts(action.kind, "observe", "observe", "low", capability, request)

    async def prepare(self, call: Call) -> Performed | None:
        """See ``ports.executor.Executor.prepare``."""
        return None

    async def execute(self, call: Call) -> Performed:
        """See ``ports.executor.Executor.execute``."""
        given, memory = call.input, self._memory
        namespace, dimensions = str(given.get("namespace") or "default"), int(given.get("dimensions") or DIMENSIONS)
        try:
            match call.action.kind.removeprefix(_PREFIX):
                case "read":
                    found = memory.get(namespace, _text(given, "key"))
                    if found is None:
                        raise Failed(f"Long-term memory {namespace!r} has no key {given['key']!r}.")
                    return Performed({"status": "succeeded", "changed": False, **found})
                case "search":
                    results = memory.search(
                        namespace, _text(given, "query"), mode=given.get("mode", "text"), limit=given.get("limit", 10),
                        filters=given.get("filters"), dimensions=dimensions,
                    )  # fmt: skip
                    return Performed({"status": "succeeded", "changed": False, "results": results})
                case "write":
                    key = _text(given, "key")
                    await memory.put(
                        namespace,
                        key,
                        entry_of(given),
                        retention_days=given.get("retentionDays"),
                        dimensions=dimensions,
                    )
                    return Performed({"status": "succeeded", "changed": True, "namespace": namespace, "key": key})
                case _:
                    count = await memory.reindex(namespace, dimensions)
                    return Performed({"status": "succeeded", "changed": True, "entries": count})
        except Invalid as error:
            raise Failed(str(error)) from error

    async def predict(self, call: Call) -> Any:
        """See ``ports.executor.Executor.predict``."""
        if call.action.kind.removeprefix(_PREFIX) in ("read", "search"):
            return (await self.execute(call)).result
        return {"status": "requires_execution", "changed": False}


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise Invalid(f"It needs `{name}` as text.")
    return value
