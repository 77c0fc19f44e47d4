"""The demo, step by step: real processes, a real SIGKILL, and claims that are read back before they are printed.

Two witnesses are asked, one against the other: the store, and the ledger file of the bank, which knows nothing of
Perdure. A claim that does not hold ends the demo.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

import perdure as p
from perdure.demo import agent, data
from perdure.demo.bank import BankProcess, Booking, read_ledger, start_bank
from perdure.demo.data import RefundRequest

T = TypeVar("T")
DATABASE = "demo.db"
LEDGER = "bank.ledger"
WAIT_SECONDS_MAX = 30.0
POLL_SECONDS = 0.02
REQUESTS_MAX = 1_000
REQUESTS_PER_DESK = 4
DESKS_MAX = 64


class Teller(Protocol):
    """Whoever shows the demo to somebody."""

    def step(self, title: str) -> None:
        """A new step begins."""

    def say(self, text: str) -> None:
        """What happens; no claim."""

    def claim(self, text: str, holds: bool) -> None:
        """A claim that was just checked, and whether it holds."""


class BrokenClaim(Exception):
    """A claim of the demo does not hold. The message is the claim."""


@dataclass(frozen=True, slots=True)
class Row:
    """How one request ended: what the store says, and how often the bank's ledger has it."""

    order: str
    cents: int
    thread: str
    status: str
    note: str
    receipt: str
    bookings: int


def prepare(folder: Path, input: Path | None) -> list[RefundRequest]:
    """Read the requests and lay out an empty folder.

    Raises:
        Invalid: the file holds no usable requests, or the folder is not empty; nothing was done.
    """
    requests = data.load(input or data.REFUNDS)
    if len(requests) > REQUESTS_MAX:
        raise p.Invalid(f"{input} holds {len(requests):,} requests; the demo takes {REQUESTS_MAX:,}.", help="Split it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise p.Invalid(f"The folder {folder} is not empty.", help="Name a new folder.")
    except OSError as error:
        raise p.Invalid(
            f"The folder {folder} cannot be used: {error.strerror}.", help="Name another folder."
        ) from error
    return requests


class Demo:
    """One showing.

    Args:
        folder: empty; gets the database and the bank's ledger.
        requests: what is to be settled.
        own: the requests are the user's: their orders are made known to the bank.
    """

    target = "perdure.demo.agent:app"

    def __init__(self, folder: Path, requests: Sequence[RefundRequest], teller: Teller, *, own: bool) -> None:
        self.folder = folder
        self.requests = requests
        self.teller = teller
        self.database = folder / DATABASE
        self.ledger = folder / LEDGER
        self.log = folder / "workers.log"
        self.own = own
        self.app: p.App
        self.bank: BankProcess
        self.receipts: list[p.Receipt] = []

    async def play(self) -> list[Row]:
        """Show everything. Returns how each request ended.

        Raises:
            BrokenClaim: a claim does not hold. BankFailed: the bank cannot start.
        """
        orders = data.ORDERS
        if self.own:
            orders = self.folder / "orders.json"
            data.write_orders(orders, self.requests)
        with start_bank(self.ledger, orders=orders) as self.bank:
            async with p.open(self.database, agents=[agent.agent], workers=0) as self.app:
                await self._admit()
                effect = await self._kill()
                await self.meanwhile(effect)
                self.teller.step("Another worker takes over")
                async with self._worker(8) as worker:
                    await self._recover(effect)
                    await self._reconcile(effect)
                    await self._settle(effect)
                    await self._drain(worker)
                return await self._compare()

    def claim(self, text: str, holds: object) -> None:
        """Tell a claim that was checked.

        Raises:
            BrokenClaim: it does not hold.
        """
        self.teller.claim(text, bool(holds))
        if not holds:
            raise BrokenClaim(text)

    def booked(self, *, key: str | None = None) -> list[Booking]:
        """Bookings in the bank's own file, under a key or all."""
        return [booking for booking in read_ledger(self.ledger) if key in (None, booking.key)]

    # -- the steps ----------------------------------------------------------------------------------------------------
    async def _admit(self) -> None:
        count = len(self.requests)
        desks = min(DESKS_MAX, -(-count // REQUESTS_PER_DESK))
        self.teller.step("Work is admitted")
        self.teller.say(f"{count} refund requests for {desks} threads; each gets a receipt before anything runs.")
        for index, request in enumerate(self.requests):
            desk = f"desk-{index % desks + 1}"
            self.receipts.append(await self.app.submit(agent.agent, request, thread=desk, key=request.order))
        owed = await self.app.obligations()
        self.claim(f"the store owes {count} settlements", len(owed) == count)
        self.claim("the bank has booked nothing yet", not self.booked())

    async def _kill(self) -> p.Effect:
        self.teller.step("A worker is killed in the middle of a refund")
        await self.bank.client().pause()
        async with self._worker(1) as worker:
            await self._within(self.bank.client().until_held(WAIT_SECONDS_MAX), "the first refund reaches the bank")
            started = await self.app.effects(status="started")
            self.claim("the store has recorded that one refund was started, and no outcome", len(started) == 1)
            effect = started[0]
            self.claim("the bank's ledger holds its booking", len(self.booked(key=effect.key)) == 1)
            self.teller.say("The money has moved. The bank's answer is on its way; the worker dies before it arrives.")
            worker.kill()
            code = await worker.wait()
        self.claim(f"worker process {worker.pid} was ended by SIGKILL", code == -signal.SIGKILL)
        await self.bank.client().resume()
        after = await self.app.effect(effect.id)
        self.claim("the store still knows no outcome of the refund", after.status == "started")
        return effect

    async def meanwhile(self, effect: p.Effect) -> None:
        """What happens between the kill and the recovery: nothing. Here a test can be dishonest."""

    async def _recover(self, effect: p.Effect) -> None:
        await self._within(self._until_parked(effect), "recovery has judged the refund")
        found = await self.app.effect(effect.id)
        self.claim(f"the refund's outcome is recorded as {found.status}, not guessed", found.open)
        others = [receipt for receipt in self.receipts if receipt.submission != effect.submission]
        for receipt in others:
            await self._within(self.app.settlement(receipt), f"{receipt.run} settles")
        runs = {view.submission: view for view in await self.app.runs()}
        mine = runs.pop(effect.submission)
        self.claim(f"its run is not settled, but {mine.state}", mine.status is None)
        if runs:
            self.claim(f"the other {len(runs)} runs are settled", all(view.status for view in runs.values()))
        later = [view for view in runs.values() if view.thread == mine.thread and view.position > mine.position]
        if later:
            self.claim(
                f"{len(later)} of them stood behind it on thread {mine.thread} and went on meanwhile",
                all(view.status for view in later),
            )
        self.claim("the refund was dispatched exactly once", len(self.booked(key=effect.key)) == 1)
        owed = await self.app.obligations()
        waits = [(one.submission, one.blocked_on) for one in owed]
        self.claim(
            "one obligation is left: this refund, waiting for a verdict", waits == [(effect.submission, "unknown")]
        )

    async def _until_parked(self, effect: p.Effect) -> None:
        """Return once recovery has recorded the unknown and its run waits for a verdict."""
        async for record in self.app.observe(effect.thread):
            if record.kind == "ToolCallUnknown" and record.data["effect"] == effect.id:
                break
        # that it waits is no record, and it begins in another process
        while (await self.app.inspect(effect.submission)).state != "unknown":  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    async def _reconcile(self, effect: p.Effect) -> None:
        self.teller.step("A person looks into the bank's ledger and gives the verdict")
        booking = self.booked(key=effect.key)[0]
        self.teller.say(f"{self.ledger.name}: {booking.order}, {booking.cents} cents, receipt {booking.receipt}")
        result, evidence = self.folder / "result.json", self.folder / "evidence.json"
        result.write_bytes(msgspec.json.encode(booking.receipt))
        evidence.write_bytes(msgspec.json.encode({"ledger": self.ledger.name, "booking": msgspec.to_builtins(booking)}))
        words = ["--db", str(self.database), "effects", "reconcile", effect.id, "--verdict", "applied"]
        words += ["--result-file", str(result), "--evidence-file", str(evidence), "--reason", "the bank has booked it"]
        self.teller.say(shlex.join(["perdure", *words]))
        program = [sys.executable, "-m", "perdure.cli", *words, "--output", "json"]
        process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
        told, _ = await self._within(process.communicate(), "the verdict is taken")
        self.claim("that command, in a process of its own, was accepted", process.returncode == 0 and _ok(told))

    async def _settle(self, effect: p.Effect) -> None:
        self.teller.step("The refund is settled")
        settled = await self._within(self.app.settlement(effect.submission), "the refund's run settles")
        self.claim(f"its run is {settled.status}", settled.status == "completed")
        after, output = await self.app.effect(effect.id), await self.app.output(effect.submission)
        told = (after.status, after.verdict, after.reason, after.by is not None, after.evidence is not None)
        wanted = ("confirmed", "applied", "the bank has booked it", True, True)
        self.claim(f"the verdict is on record, by {after.by}, with reason and evidence", told == wanted)
        receipt = self.booked(key=effect.key)[0].receipt
        self.claim(f"the agent's answer names the bank's receipt {receipt}", output.receipt == receipt)
        self.claim("the bank's ledger still holds its booking once", len(self.booked(key=effect.key)) == 1)

    async def _drain(self, worker: asyncio.subprocess.Process) -> None:
        worker.terminate()
        code = await self._within(worker.wait(), "the worker drains")
        self.claim("the worker obeyed SIGTERM: it drained and exited with 0", code == 0)

    async def _compare(self) -> list[Row]:
        self.teller.step("Store and bank are compared")
        bookings = self.booked()
        per_order = Counter(booking.order for booking in bookings)
        rows = [
            await self._row(receipt, request, per_order[request.order])
            for receipt, request in zip(self.receipts, self.requests, strict=True)
        ]
        paid = [row for row in rows if row.receipt]
        self.claim(f"{len(rows)} of {len(rows)} requests are settled", all(row.status == "completed" for row in rows))
        booked = Counter((b.order, b.cents, b.receipt) for b in bookings)
        self.claim(
            f"the bank booked the {len(paid)} refunds that the store knows, each once, and no other",
            booked == Counter((row.order, row.cents, row.receipt) for row in paid),
        )
        counts = await self._settlements()
        wanted = Counter(receipt.submission for receipt in self.receipts)
        self.claim("every submission has exactly one settlement in its thread's log", counts == wanted)
        found = await self.app.verify()
        passed = sum(check.status == "passed" for check in found.checks)
        self.claim(f"verify: {passed} checks passed over {found.records} records, none failed", found)
        return rows

    async def _row(self, receipt: p.Receipt, request: RefundRequest, bookings: int) -> Row:
        settled, output = await self.app.settlement(receipt, timeout=0), await self.app.output(receipt, timeout=0)
        return Row(
            request.order, request.cents, receipt.thread, settled.status, output.note, output.receipt, bookings
        )  # fmt: skip

    async def _settlements(self) -> Counter[str]:
        """Settlements in the threads' logs, by submission."""
        found: Counter[str] = Counter()
        for view in await self.app.threads():
            async for record in self.app.observe(view.thread):
                if record.kind == "SubmissionSettled":
                    found[record.data["submission"]] += 1
                if record.sequence == view.records:
                    break
        return found

    # -- processes ----------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def _worker(self, slots: int) -> AsyncIterator[asyncio.subprocess.Process]:
        """A worker process, as anybody would start one; gone when the block ends."""
        place = {agent.BANK: self.bank.url, agent.STORE: str(self.database), agent.TIED: "1"}
        program = [sys.executable, "-m", "perdure.cli", "worker", "--app", self.target, "--workers", str(slots)]
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, **place},
            )
        try:
            assert process.stdout is not None
            line = await self._within(process.stdout.readline(), "a worker starts")
            self.claim(f"worker process {process.pid} is ready", b"ready" in line)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _within(self, work: Awaitable[T], what: str) -> T:
        """Wait for something that is bound to happen.

        Raises:
            BrokenClaim: it does not, within ``WAIT_SECONDS_MAX``.
        """
        try:
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                return await work
        except TimeoutError:
            text = f"{what} within {WAIT_SECONDS_MAX:g} s"
            self.teller.claim(text, False)
            raise BrokenClaim(text) from None


def _ok(raw: bytes) -> bool:
    try:
        return bool(json.loads(raw)["ok"])
    except (ValueError, KeyError, TypeError):
        return False
