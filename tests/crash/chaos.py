"""Chaos: real workers on one file, killed, frozen and told to stop at random; people do as they like; the world judges.

    python tests/crash/chaos.py --seed 7 --rounds 3

The module is also the app that its workers run. What happens is drawn from the seed; when it takes effect is not, since
processes are real: a seed that failed is to be tried more than once. The laws are those of the sweep and a few more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

import perdure as p
from perdure.definitions.tool import Tool
from perdure.ports.provider import AssistantMessage, Message, Request, UserMessage
from perdure.projections.effect import Effect
from perdure.providers.scripted import Item, Scripted, call, calls, say
from perdure.records.effect import ToolApprovalDecided, ToolCallPrepared, ToolCallResolved, ToolStepPrepared
from perdure.records.parts import CallPart
from perdure.testing.evidence import Evidence, Expected, gather, judge
from perdure.testing.stage import People
from perdure.testing.world import World

FOLDER, TWIN = "CHAOS_FOLDER", "CHAOS_TWIN"  # variables that tell workers where they play, and what is switched off
LEASE = 0.7
HASTY = "hasty"
KINDS = ("pay", "block", "wire", "keyed", "work", "batch", "ask", "both", "book", "lost", "refuse")
CLASSES = {
    "pay": "once", "block": "once", "wire": "once", "buy": "once", "book": "once", "lost": "once", "step-once": "once",
    "charge": "keyed", "label": "idempotent", "look": "observe", "step": "step",
}  # fmt: skip
PATIENCE = 120.0  # seconds until everything is settled once the harm is over
SHOWN = 20

# -- the app ----------------------------------------------------------------------------------------------------------


def pause(*about: str) -> float:
    """How long a body takes before or after its touch: mostly a moment, sometimes longer than a lease."""
    chance = random.Random("/".join(about))
    return chance.uniform(0.5, 1.3) * LEASE * 1.5 if chance.random() < 0.12 else chance.uniform(0, 0.06)


def tools(folder: Path) -> list[Tool]:
    """Each touches the world once where a real one would; ``pay`` is declared wrongly in a twin."""
    world, people = World(folder / "world"), People(folder / "people")

    def toucher(name: str, **options: Any) -> Tool:
        async def body(order: str, ctx: p.ToolContext) -> str:
            await asyncio.sleep(pause(name, order, "before"))
            receipt = world.touch(name, key=ctx.key, order=order)
            await asyncio.sleep(pause(name, order, "after"))
            return receipt

        return p.tool(name=name, description="Touch the world.", **options)(body)

    @p.tool
    def block(order: str, ctx: p.ToolContext) -> str:
        """Touch the world from a thread."""
        time.sleep(pause("block", order, "before"))
        receipt = world.touch("block", key=ctx.key, order=order)
        time.sleep(pause("block", order, "after"))
        return receipt

    @p.tool(key=lambda arguments: arguments["account"])
    async def book(order: str, account: str, ctx: p.ToolContext) -> str:
        """Touch the world on behalf of a business object."""
        await asyncio.sleep(pause("book", order, "before"))
        receipt = world.touch("book", key=ctx.key, order=order)
        await asyncio.sleep(pause("book", order, "after"))
        return receipt

    @p.tool
    async def lost(order: str, ctx: p.ToolContext) -> str:
        """Lose the reply, sometimes after and sometimes before it happened."""
        if random.random() < 0.6:
            world.touch("lost", key=ctx.key, order=order)
        await asyncio.sleep(pause("lost", order))
        if random.random() < 0.3 and world.count("lost", ctx.key):
            return str([e.receipt for e in world.entries() if e.key == ctx.key][-1])
        raise TimeoutError("no reply")

    @p.tool
    async def refuse(order: str, ctx: p.ToolContext) -> str:
        """Refuse without touching anything."""
        await asyncio.sleep(pause("refuse", order))
        raise p.Refused("no")

    @p.tool(steps=True)
    async def work(order: str, ctx: p.ToolContext) -> list[str]:
        """Four steps, two of them once."""

        async def touch(name: str, kind: str) -> str:
            await asyncio.sleep(pause(kind, order, name, "before"))
            receipt = world.touch(kind, key=ctx.step_key(name), order=order, step=name)
            await asyncio.sleep(pause(kind, order, name, "after"))
            return receipt

        found = [await ctx.step("a", touch, "a", "step")]
        found.append(await ctx.step("b", touch, "b", "step-once", effect="once"))
        found.append(await ctx.step("c", touch, "c", "step"))
        found.append(await ctx.step("d", touch, "d", "step-once", effect="once"))
        return found

    wire = toucher("wire")

    @wire.probe
    async def look(unknown: p.UnknownCall) -> p.Verdict | p.StillUnknown:
        if random.random() < 0.3:
            return p.StillUnknown("ask again")
        found = [entry for entry in world.entries() if entry.key == unknown.key]
        if found:
            return p.Applied(found[-1].receipt)
        people.note("permitted", unknown.key, effect=unknown.effect)
        return p.NotApplied("the world does not know it")

    pay = toucher("pay", effect="idempotent" if os.environ.get(TWIN) else "once")
    charge, label = toucher("charge", effect="keyed"), toucher("label", effect="idempotent")
    see, buy = toucher("look", effect="observe"), toucher("buy", approval=True)
    return [pay, block, wire, charge, label, see, buy, book, lost, refuse, work]


def _order(message: Message) -> str | None:
    """The order a message is about, if it says: an input does, and so does a call of the run's own."""
    match message:
        case UserMessage(text):
            return text.splitlines()[-1]
        case AssistantMessage(parts):
            return next((json.loads(part.arguments)["order"] for part in parts if isinstance(part, CallPart)), None)
        case _:
            return None


def script(request: Request) -> Item:
    """What the model says: the input names the kind of work, the order and the account."""
    order = next(filter(None, map(_order, reversed(request.messages))))
    kind, _, account = order.split(".")
    turns: dict[str, list[Item]] = {
        "pay": [call("look", order=order), call("pay", order=order)],
        "block": [call("block", order=order)],
        "wire": [call("wire", order=order)],
        "keyed": [call("charge", order=order), call("label", order=order)],
        "work": [call("work", order=order)],
        "batch": [
            calls(*(call(n, order=order) for n in ("pay", "wire", "charge", "block", "label", "work"))),
            call("look", order=order),
        ],
        "ask": [call("buy", order=order), call("pay", order=order)],
        "both": [calls(call("buy", order=order), call("pay", order=order), call("wire", order=order))],
        "book": [call("book", order=order, account=account)],
        "lost": [call("lost", order=order)],
        "refuse": [call("refuse", order=order), call("pay", order=order)],
    }
    items = [*turns[kind], say(f"done {order}")]
    return items[min(request.turn, len(items)) - 1]


def agents(folder: Path) -> list[p.Agent]:
    """Two that do the same, so that programs are mixed on threads, and one whose runs may end at their deadline."""
    policies = {name: p.Policy(concurrency=3) for name in ("clerk", "keeper")}
    policies[HASTY] = p.Policy(concurrency=3, max_duration=2.0)
    return [p.Agent(n, tools=tools(folder), model=Scripted(script), policy=one) for n, one in policies.items()]


def app() -> p.App:
    """What a worker opens."""
    folder = Path(os.environ[FOLDER])
    return p.open(folder / "store.db", agents=agents(folder), lease=LEASE, workers=12)


# -- workers ----------------------------------------------------------------------------------------------------------


class Process:
    """One worker process, what was done to it, and how it must end."""

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.log = folder / f"worker-{number}.log"
        self.killed = False
        self.frozen = False
        self.signals: list[int] = []
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "perdure.cli", "--verbose", "worker", "--app", f"{Path(__file__).stem}:app"],
                cwd=Path(__file__).parent,
                env={**os.environ, FOLDER: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def ready(self) -> bool:
        return "Worker ready" in self.log.read_text()

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        self.killed = True
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.frozen = True
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.frozen = False
        self.process.send_signal(signal.SIGCONT)

    def tell(self, number: int) -> None:
        self.signals.append(number)
        self.process.send_signal(number)

    def verdict(self) -> str | None:
        """What is wrong with how it ended."""
        code = self.process.wait()
        allowed = {-9} if self.killed else {0} if len(self.signals) == 1 else {0, *(128 + s for s in self.signals)}
        if len(self.signals) > 1 and "Drained." in self.log.read_text():
            allowed |= {-s for s in self.signals}  # the last one met an interpreter that had nothing left to do
        if not self.killed and not self.signals:
            allowed = set()
        if code in allowed or (self.killed and code == 0):
            return None
        return f"Worker {self.number} ended with {code}; signals {self.signals}, killed {self.killed} (see {self.log})."

    def errors(self) -> list[str]:
        """Lines of its log that nobody expects."""
        bad = re.compile(r" (ERROR|CRITICAL) |Traceback|Error:|Warning")
        fine = re.compile(r"made no progress in \d+ attempts|TimeoutError: no reply|Refused: no")
        lines = self.log.read_text(errors="replace").splitlines()
        return [f"{self.log.name}: {line}" for line in lines if bad.search(line) and not fine.search(line)]


# -- a round ----------------------------------------------------------------------------------------------------------


class Round:
    """One round: a folder, its people, its workers."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.chance = random.Random(options.seed)
        self.world = World(folder / "world")
        self.people = People(folder / "people")
        self.receipts: dict[str, tuple[p.Receipt, tuple[Any, ...]]] = {}
        self.cancelled: dict[str, float] = {}  # when a cancel was accepted
        self.orders: dict[str, str] = {}  # submission to order
        self.slots: list[Process] = []
        self.past: list[Process] = []
        self.done: Counter[str] = Counter()
        self.violations: list[str] = []
        self.slowest: dict[str, float] = {}
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        if self.options.verbose:
            print(f"  {time.monotonic() - self.began:6.2f} {text}", flush=True)

    def start(self) -> Process:
        made = Process(self.folder, len(self.slots) + len(self.past))
        self.slots.append(made)
        return made

    def bury(self, process: Process) -> None:
        self.slots.remove(process)
        self.past.append(process)
        wrong = process.verdict()
        if wrong:
            self.violations.append(wrong)

    async def play(self) -> list[str]:
        for _ in range(self.options.workers):
            self.start()
        async with p.open(self.folder / "store.db", agents=agents(self.folder), workers=0) as client:
            await self._chaos(client)
            await self._finish(client)
            await self._after(client)
        evidence = await asyncio.to_thread(gather, self.folder, self.done["kill"])
        outcomes = frozenset({"completed", "cancelled", "failed"})
        expected = Expected(effects=CLASSES, outcomes=outcomes, check=self._own_laws)
        self.violations += judge(evidence, expected)
        for process in self.past:
            self.violations += process.errors()
        return self.violations

    async def _chaos(self, client: p.App) -> None:
        until = time.monotonic() + self.options.seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._submitting(client, until))
            group.create_task(self._deciding(client, until))
            group.create_task(self._harming(until))

    # -- people ---------------------------------------------------------------------------------------------------------
    async def _submitting(self, client: p.App, until: float) -> None:
        chance = random.Random(f"{self.options.seed}/submit")
        gap = self.options.seconds * 0.8 / self.options.submissions
        for number in range(self.options.submissions):
            order = f"{chance.choice(KINDS)}.o{number}.a{chance.randrange(4)}"
            thread = f"t{chance.randrange(8)}" if chance.random() < 0.6 else None
            what = (chance.choice(["clerk", "clerk", "keeper", "keeper", HASTY]), order, thread, f"k{number}")
            await self._submit(client, what, order)
            if chance.random() < 0.15:
                again = chance.choice(list(self.receipts))
                await self._submit(client, self.receipts[again][1], "")
            await asyncio.sleep(chance.uniform(0, 2 * gap))

    async def _submit(self, client: p.App, what: tuple[Any, ...], order: str) -> None:
        agent, text, thread, key = what
        began = time.monotonic()
        receipt = await client.submit(agent, text, thread=thread, key=key)
        self._took("submit", began)
        if key in self.receipts:
            if self.receipts[key][0] != receipt:
                self.violations.append(f"Key {key} gave {self.receipts[key][0]} and then {receipt}.")
            return
        self.receipts[key] = (receipt, what)
        self.orders[receipt.submission] = order
        self.people.note("accepted", receipt.submission, work=key, wanted=thread, receipt=msgspec.to_builtins(receipt))
        self.done["submit"] += 1

    def _took(self, what: str, began: float) -> None:
        self.slowest[what] = max(self.slowest.get(what, 0.0), time.monotonic() - began)

    async def _deciding(self, client: p.App, until: float) -> None:
        chance = random.Random(f"{self.options.seed}/people")
        while time.monotonic() < until:
            await asyncio.sleep(chance.uniform(0.05, 0.5))
            began = time.monotonic()
            match chance.choices(("approve", "judge", "cancel", "redrive", "recover", "see"), (4, 4, 2, 1, 1, 2))[0]:
                case "approve":
                    await self._approve(client, chance, 0.5)
                case "judge":
                    await self._judge(client, chance, 0.5)
                case "cancel" if self.receipts:
                    await self._cancel(client, chance)
                case "redrive" if self.receipts:
                    receipt = self.receipts[chance.choice(list(self.receipts))][0]
                    self.done["redrive"] += await client.redrive(receipt, by="ann", reason="why not")
                case "recover":
                    self.done["recover"] += len((await client.recover()).reports)
                case "see":
                    await self._see(client)
            self._took("people", began)

    async def _approve(self, client: p.App, chance: random.Random, share: float) -> None:
        for request in await client.approvals():
            if chance.random() > share:
                continue
            order = request.arguments["order"]
            with contextlib.suppress(p.Conflict):  # its run ended meanwhile
                if chance.random() < 0.7:
                    self.people.note("approved", request.id, tool=request.tool, order=order)
                    await client.approve(request.id, by="ann")
                    self.done["approve"] += 1
                else:
                    await client.reject(request.id, by="ann", reason="too much")
                    self.people.note("rejected", request.id, tool=request.tool, order=order)
                    self.done["reject"] += 1

    async def _judge(self, client: p.App, chance: random.Random, share: float) -> int:
        given = 0
        for effect in await client.effects(status="unknown"):
            if chance.random() > share:
                continue
            try:
                await client.reconcile(effect, self._verdict(effect, chance), by="ann", reason="looked")
                given += 1
            except p.Conflict as error:
                self.say(f"verdict on {effect.operation} refused: {error}")
        self.done["verdict"] += given
        return given

    def _verdict(self, effect: Effect, chance: random.Random) -> p.Verdict:
        if chance.random() < 0.04:
            return p.CancelRun("enough")
        found = [entry for entry in self.world.entries() if entry.key == effect.key]
        if found:
            return p.Applied(found[-1].receipt)
        self.people.note("permitted", effect.key, effect=effect.id)
        return p.NotApplied("the world does not know it")

    async def _cancel(self, client: p.App, chance: random.Random) -> None:
        receipt = self.receipts[chance.choice(list(self.receipts)[-15:])][0]
        with contextlib.suppress(p.Conflict):
            await client.cancel(receipt, by="ann", reason="changed my mind")
            self.cancelled[receipt.submission] = time.time()
            self.done["cancel"] += 1

    async def _see(self, client: p.App) -> None:
        seen = {noted["key"] for noted in self.people.noted("settled")}
        for view in await client.runs(state="settled"):
            if view.submission not in seen and view.submission in self.orders:
                settled = await client.settlement(view.submission, timeout=5)
                self.people.note("settled", view.submission, outcome=settled.status)

    # -- harm -----------------------------------------------------------------------------------------------------------
    async def _harming(self, until: float) -> None:
        chance = random.Random(f"{self.options.seed}/harm")
        busy: set[asyncio.Task[None]] = set()
        while time.monotonic() < until:
            await asyncio.sleep(chance.uniform(0.1, self.options.gap))
            what = chance.choices(("kill", "freeze", "drain", "stop", "young"), (6, 3, 2, 2, 1))[0]
            idle = [one for one in self.slots if one.ready and not one.frozen and not one.signals]
            if what == "young":
                idle = [one for one in self.slots if not one.ready]
            if not idle:
                continue
            victim = chance.choice(idle)
            self.say(f"{what} worker {victim.number}")
            self.done["kill" if what == "young" else what] += 1
            match what:
                case "kill" | "young":
                    victim.kill()
                    self._replace(victim)
                case "freeze":
                    victim.freeze()
                    task = asyncio.create_task(
                        self._thaw(victim, LEASE * chance.uniform(1.3, 3.0), chance.random() < 0.2)
                    )
                    busy.add(task)
                case "drain" | "stop":
                    victim.tell(chance.choice([signal.SIGTERM, signal.SIGINT]))
                    pause = chance.uniform(0.0, 0.4) if what == "stop" else 20.0
                    task = asyncio.create_task(self._drained(victim, pause, chance.random() < 0.3))
                    busy.add(task)
        for task in busy:
            await task

    def _replace(self, process: Process) -> None:
        self.bury(process)
        self.start()

    async def _thaw(self, process: Process, seconds: float, die: bool) -> None:
        await asyncio.sleep(seconds)
        if die:
            process.kill()
            self.done["kill"] += 1
            self._replace(process)
        else:
            process.thaw()

    async def _drained(self, process: Process, patience: float, again: bool) -> None:
        """Wait until a worker that was told to end has ended; after ``patience`` tell it again."""
        began = time.monotonic()
        until = began + patience
        while process.alive:
            if time.monotonic() > until:
                if len(process.signals) > 3:
                    self.violations.append(f"Worker {process.number} did not end after {process.signals}.")
                    process.kill()
                    break
                process.tell(signal.SIGTERM if process.signals[0] == signal.SIGTERM else signal.SIGINT)
                until = time.monotonic() + (0.3 if again else 15.0)
            await asyncio.sleep(0.05)
        self._took("drain", began)
        self._replace(process)

    # -- the end ----------------------------------------------------------------------------------------------------------
    async def _finish(self, client: p.App) -> None:
        """No more harm: workers finish, people say what they are asked, and everybody goes home."""
        self.say("no more harm")
        for process in self.slots:
            if process.frozen:
                process.thaw()
        began = time.monotonic()
        while left := await self._left(client):
            if time.monotonic() - began > PATIENCE:
                self.violations += [f"Left after {PATIENCE:g} s: {one}" for one in left]
                break
            await asyncio.sleep(0.1)
        self._took("finish", began)
        while not all(process.ready for process in self.slots):  # noqa: ASYNC110 - a log file announces nothing
            await asyncio.sleep(0.05)
        for process in self.slots:
            process.tell(signal.SIGTERM)
        for process in list(self.slots):
            try:
                process.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.violations.append(f"Worker {process.number} did not end in 30 s with nothing to do.")
                process.kill()
            self.bury(process)

    async def _left(self, client: p.App) -> list[Any]:
        """Say everything that people are asked; what is owed or unknown then."""
        chance = random.Random(time.monotonic_ns())
        await self._approve(client, chance, 1.0)
        await self._judge(client, chance, 1.0)
        owed = await client.obligations()
        for one in owed:
            if one.blocked_on == "stuck":
                self.done["stuck"] += await client.redrive(one.submission, by="ann", reason="stuck")
        return [*owed, *await client.effects(status="unknown")]

    async def _after(self, client: p.App) -> None:
        await self._see(client)
        self.violations += [f"Started for ever: {one}" for one in await client.effects(status="started")]
        faults = client.store.read(lambda tx: tx.ledger.faults())
        self.violations += [f"Blocked: {fault}" for fault in faults]
        pending = client.store.read(lambda tx: tx.ledger.pending_intents())
        self.violations += [f"Never taken in: {one}" for one in pending]
        self.violations += [f"Still pending: {one}" for one in await client.approvals()]
        for receipt, _ in self.receipts.values():
            settled = await client.settlement(receipt, timeout=1)
            self.done[settled.status] += 1
            if settled.status == "completed":
                output = await client.output(receipt)
                if output != f"done {self.orders[receipt.submission]}":
                    self.violations.append(f"{receipt.submission} gave {output!r}.")

    def _own_laws(self, e: Evidence) -> Iterable[str]:
        approved = {noted["order"] for noted in self.people.noted("approved")}
        rejected = {noted["order"] for noted in self.people.noted("rejected")}
        decided = {record.approval: record.decision for record in e.of(ToolApprovalDecided)}
        for noted in self.people.noted("rejected"):
            if decided.get(noted["key"]) not in ("rejected", None):
                yield f"{noted} was rejected and is recorded as {decided[noted['key']]}."
        prepared = Counter(record.key for record in (*e.of(ToolCallPrepared), *e.of(ToolStepPrepared)))
        key_of = {record.effect: record.key for record in (*e.of(ToolCallPrepared), *e.of(ToolStepPrepared))}
        allowed = Counter(
            key_of[record.effect]
            for record in e.of(ToolCallResolved)
            if record.verdict in ("not_applied", "safe_to_retry")
        )
        for key, count in Counter((x.key, x.name) for x in e.entries).items():
            if CLASSES[key[1]] == "once":
                if count > prepared[key[0]]:
                    yield f"{key[1]} took place {count} times under {key[0]}, started {prepared[key[0]]} times."
                if prepared[key[0]] > 1 + allowed[key[0]]:
                    yield f"{key[1]} {key[0]} was started {prepared[key[0]]} times, allowed {1 + allowed[key[0]]}."
        for row in e.rows.values():
            if row.outcome == "failed" and (row.program != HASTY or b"policy.duration" not in (row.failure or b"")):
                yield f"Submission {row.id} of {row.program} failed: {(row.failure or b'').decode()}."
        for submission, at in self.cancelled.items():
            row = e.rows[submission]
            if row.outcome != "cancelled" and row.settled_at is not None and row.settled_at / 1e6 > at + 5:
                yield f"A cancel of {submission} was accepted at {at}; it settled as {row.outcome} at {row.settled_at}."
        for entry in e.entries:
            if entry.name == "buy" and (entry.facts["order"] not in approved or entry.facts["order"] in rejected):
                yield f"{entry} was not approved."


def play(folder: Path, options: argparse.Namespace) -> list[str]:
    """Play one round in a folder, say what was done, and give what is broken."""
    played = Round(options, folder)
    violations = asyncio.run(played.play())
    done = ", ".join(f"{count} {what}" for what, count in sorted(played.done.items()) if count)
    slowest = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in played.slowest.items())
    print(f"seed {options.seed}: {'BROKEN' if violations else 'ok'}; {done}; slowest {slowest}", flush=True)
    return violations


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="one for each seed from SEED on")
    parser.add_argument("--seconds", type=float, default=30, help="how long there is harm in a round")
    parser.add_argument("--submissions", type=int, default=90, help="in a round")
    parser.add_argument("--workers", type=int, default=3, help="processes")
    parser.add_argument("--gap", type=float, default=1.0, help="longest pause between two harms, in seconds")
    parser.add_argument("--verbose", action="store_true", help="tell what is done to whom")
    return parser.parse_args(given)


def main() -> int:
    options = arguments()
    broken = 0
    for seed in range(options.seed, options.seed + options.rounds):
        options.seed = seed
        folder = Path(tempfile.mkdtemp(prefix=f"perdure-chaos-{seed}-"))
        violations = play(folder, options)
        if not violations:
            shutil.rmtree(folder)
            continue
        broken += 1
        for sentence in violations[:SHOWN]:
            print(f"  {sentence[:1000]}")
        again = f"--seed {seed} --seconds {options.seconds:g} --submissions {options.submissions} --gap {options.gap:g}"
        print(f"  {len(violations)} violations, see {folder}; again: {sys.executable} {__file__} {again}", flush=True)
    return min(broken, 1)


if __name__ == "__main__":
    sys.exit(main())
