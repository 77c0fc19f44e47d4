"""What a run left behind, judged: the store's records against a world and people that never believe them.

The three laws of ``world.check_laws`` stand first. The others say what a crash may not do either: forget what a person
was told, call a thing refused that happened, lose more to doubt than was in flight, leave a store that does not verify.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import perdure
from perdure import canonical
from perdure.limits import PAGE_BATCHES_MAX
from perdure.ports.ledger import Submission
from perdure.ports.store import Transaction
from perdure.projections.audit import Verification
from perdure.records import codec
from perdure.records.codec import Batch, Record
from perdure.records.effect import (
    ToolCallPrepared,
    ToolCallSettled,
    ToolCallUnknown,
    ToolStepPrepared,
    ToolStepSettled,
)
from perdure.records.parts import CallPart
from perdure.records.run import ModelCallPrepared, ModelCallUnknown, ModelResponseRecorded
from perdure.records.task import TaskStarted
from perdure.records.thread import SubmissionSettled
from perdure.testing.stage import People, open_at
from perdure.testing.world import Entry, World, check_laws

__all__ = ["LAWS", "Evidence", "Expected", "gather", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is promised of a scenario, whatever dies in it.

    Attributes:
        effects: name of an occurrence in the world to the class of the effect that causes it: ``once``, ``keyed``,
            ``idempotent``, ``observe``, or ``step`` for a step inside a ``steps=True`` tool. One name with the same
            facts is one intended occurrence.
        outcomes: how accepted work may settle.
        asks: names of occurrences that a person must have approved first.
        in_flight: how many effects one death may leave unknown; None does not count them.
        doubts: effects that become unknown without any death.
        unwitnessed: operations whose effects the world does not see, such as a file that is written; ``model`` for those
            of models.
        check: further laws of this scenario: sentences, each a violation.
    """

    effects: Mapping[str, str] = field(default_factory=dict)
    outcomes: frozenset[str] = frozenset({"completed"})
    asks: frozenset[str] = frozenset()
    in_flight: int | None = None
    doubts: int = 0
    unwitnessed: frozenset[str] = frozenset()
    check: Callable[[Evidence], Iterable[str]] | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything a judgement may rest on.

    Attributes:
        entries: what happened in the world. people: what people said and were told.
        records: every record of every thread, in order. rows: the ledger's submissions.
        verification: what ``verify`` says.
        deaths: how many incarnations died.
    """

    world: World
    entries: list[Entry]
    people: People
    records: list[Record]
    rows: dict[str, Submission]
    verification: Verification
    deaths: int

    def of(self, kind: type[Any]) -> list[Any]:
        """Records of one kind, in order."""
        return [record for record in self.records if isinstance(record, kind)]


def gather(folder: Path, deaths: int, *, split: bool = False) -> Evidence:
    """Read a run's folder. The store is opened as a client: nothing runs and nothing is repaired."""
    return asyncio.run(_gather(folder, deaths, split))


async def _gather(folder: Path, deaths: int, split: bool) -> Evidence:
    world, people = World(folder / "world"), People(folder / "people")
    async with perdure.open(open_at(folder, split=split), workers=0) as app:

        def read(tx: Transaction) -> tuple[list[Batch], dict[str, Submission]]:
            batches = []
            for thread in tx.ledger.threads():
                after = 0
                while page := tx.log.read(thread.number, after, PAGE_BATCHES_MAX):
                    batches += [codec.decode(stored.body, stored.apart) for stored in page]
                    after = page[-1].last
            return batches, {row.id: row for row in tx.ledger.submissions()}

        batches, rows = app.store.read(read)
        records = [record for batch in batches for record in batch.records]
        return Evidence(world, world.entries(), people, records, rows, await app.verify(), deaths)


def judge(evidence: Evidence, expected: Expected) -> list[str]:
    """Every violation, a sentence each."""
    found = [sentence for law in LAWS for sentence in law(evidence, expected)]
    if expected.check is not None:
        found += expected.check(evidence)
    return found


# -- the laws ---------------------------------------------------------------------------------------------------------


def _three_laws(e: Evidence, expected: Expected) -> list[str]:
    accepted = {noted["key"] for noted in e.people.noted("accepted")}
    counts = Counter(record.submission for record in e.of(SubmissionSettled))
    settlements = {submission: counts[submission] for submission in accepted | set(e.rows)}
    return check_laws(e.world, _confirmed(e, expected.unwitnessed), _permitted(e, expected), settlements)


def _confirmed(e: Evidence, unwitnessed: frozenset[str]) -> list[tuple[str, str | None, object]]:
    """Effect, key and result of everything recorded as having happened."""
    started: dict[tuple[str, str, str | None], ToolCallPrepared | ToolStepPrepared] = {}
    stepped: set[tuple[str, str]] = set()
    asked = {record.effect: record.key for record in e.of(ModelCallPrepared)}
    inside = {(record.run, record.task) for record in e.of(TaskStarted) if record.effect_class == "pure"}
    confirmed: list[tuple[str, str | None, object]] = []
    for record in e.records:
        match record:
            case ToolCallSettled() if (record.run, record.call) in inside:
                pass  # a wait or an approval: nothing outside was touched
            case ToolCallSettled() if _operation(started, record) in unwitnessed:
                pass
            case ModelResponseRecorded() if "model" in unwitnessed:
                pass
            case ToolCallPrepared():
                started[record.run, record.call, None] = record
            case ToolStepPrepared():
                started[record.run, record.call, record.step] = record
            case ToolStepSettled():
                stepped.add((record.run, record.call))
                found = started.get((record.run, record.call, record.step))
                effect = found.effect if found else f"{record.run}/{record.call}/{record.step}"
                confirmed.append((effect, found.key if found else None, canonical.decode(record.result)))
            case ToolCallSettled(failure=None):
                found = started.get((record.run, record.call, None))
                effect = found.effect if found else f"{record.run}/{record.call}"
                own = found is not None and (record.run, record.call) not in stepped  # else its steps have the keys
                confirmed.append((effect, found.key if found and own else None, canonical.decode(record.result)))
            case ModelResponseRecorded(effect=str(effect), parts=parts) if effect:
                said = [canonical.decode(p.arguments.encode()) if isinstance(p, CallPart) else p.text for p in parts]
                confirmed.append((effect, asked.get(effect), said))
            case _:
                pass
    return confirmed


def _operation(started: Mapping[Any, ToolCallPrepared | ToolStepPrepared], record: ToolCallSettled) -> str:
    found = started.get((record.run, record.call, None))
    return found.tool if isinstance(found, ToolCallPrepared) else ""


def _permitted(e: Evidence, expected: Expected) -> dict[str, int | None]:
    permits = Counter(key for key, _ in {(noted["key"], noted["effect"]) for noted in e.people.noted("permitted")})
    recorded = {record.key for record in (*e.of(ToolCallPrepared), *e.of(ToolStepPrepared), *e.of(ModelCallPrepared))}
    permitted: dict[str, int | None] = {}
    for entry in e.entries:
        if entry.key is None:
            continue
        if expected.effects.get(entry.name) == "once":
            permitted[entry.key] = 1 + permits[entry.key] if entry.key in recorded else 0
        else:
            permitted[entry.key] = None
    return permitted


def _intended_once(e: Evidence, expected: Expected) -> list[str]:
    """What is wanted once happens once, under whatever key; what a remote de-duplicates keeps its key."""
    groups: defaultdict[tuple[str, bytes], list[Entry]] = defaultdict(list)
    for entry in e.entries:
        groups[entry.name, canonical.encode(entry.facts)].append(entry)
    permits = {(noted["key"], noted["effect"]) for noted in e.people.noted("permitted")}
    violations = []
    for (name, facts), entries in groups.items():
        keys = {entry.key for entry in entries}
        said = f"{name} {facts.decode()}"
        match expected.effects.get(name):
            case "once":
                allowed = 1 + sum(key in keys for key, _ in permits)
                if len(entries) > allowed:
                    violations.append(f"{said} took place {len(entries)} times; {allowed} permitted.")
            case "keyed" | "step" | "idempotent":
                if len(keys) > 1:
                    violations.append(f"{said} was asked for under {len(keys)} keys; nobody can tell it is one.")
            case "observe":
                pass
            case _:
                violations.append(f"{said} took place, and the scenario does not expect it.")
    return violations


def _settled_as_told(e: Evidence, expected: Expected) -> list[str]:
    """Accepted work ends as it may, in log and ledger alike, and as people were told; a cancel they rely on holds."""
    violations = []
    logged = {record.submission: record.outcome for record in e.of(SubmissionSettled)}
    for submission in {noted["key"] for noted in e.people.noted("accepted")} | set(e.rows):
        row = e.rows.get(submission)
        if row is None:
            violations.append(f"Submission {submission} was accepted and is not in the ledger.")
            continue
        if row.state != "settled" or row.outcome != logged.get(submission):
            violations.append(
                f"The ledger says {row.state} {row.outcome} of {submission}, the log {logged.get(submission)}."
            )
        if row.outcome is not None and row.outcome not in expected.outcomes:
            violations.append(f"Submission {submission} settled as {row.outcome}: {(row.failure or b'').decode()}.")
        violations += [
            f"People were told {submission} is {noted['outcome']}; it is {row.outcome}."
            for noted in e.people.noted("settled", submission)
            if noted["outcome"] != row.outcome
        ]
        if e.people.noted("cancelled", submission) and row.outcome != "cancelled":
            violations.append(f"A cancel of {submission} was accepted; it settled as {row.outcome}.")
    return violations


def _refusals_are_true(e: Evidence, _: Expected) -> list[str]:
    """Nothing is recorded as definitely failed that took place."""
    happened = {entry.key for entry in e.entries if entry.key is not None}
    said = {noted["key"] for noted in e.people.noted("refused")}
    started: dict[tuple[str, str], ToolCallPrepared] = {}
    failed: dict[str, str] = {}  # by key: another try under it may have taken place
    for record in e.records:
        match record:
            case ToolCallPrepared(run=run, call=call, key=key):
                started[run, call] = record
                failed.pop(key, None)
            case ToolCallSettled(run=run, call=call, failure=failure) if failure is not None and (run, call) in started:
                found = started[run, call]
                failed[found.key] = f"{found.tool} is recorded as failed ({failure.message}), and it took place."
            case _:
                pass
    return [sentence for key, sentence in failed.items() if key in happened - said]


def _approved_first(e: Evidence, expected: Expected) -> list[str]:
    """What asks a person happens only if one said yes."""
    approved = {noted["tool"] for noted in e.people.noted("approved")}
    return [
        f"{entry.name} took place and nobody approved it."
        for entry in e.entries
        if entry.name in expected.asks and entry.name not in approved
    ]


def _little_doubt(e: Evidence, expected: Expected) -> list[str]:
    """Only what was in flight when a process died can be unknown: every outcome before is durable."""
    if expected.in_flight is None:
        return []
    unknown = {record.effect for record in (*e.of(ToolCallUnknown), *e.of(ModelCallUnknown))}
    most = expected.doubts + e.deaths * expected.in_flight
    if len(unknown) <= most:
        return []
    return [f"{len(unknown)} effects became unknown; {e.deaths} deaths explain at most {most}."]


def _verifies(e: Evidence, _: Expected) -> list[str]:
    """The store's own checks pass."""
    return [f"verify: {check.name}: {check.detail}" for check in e.verification.failed()]


LAWS: tuple[Callable[[Evidence, Expected], list[str]], ...] = (
    _three_laws,
    _intended_once,
    _settled_as_told,
    _refusals_are_true,
    _approved_first,
    _little_doubt,
    _verifies,
)
