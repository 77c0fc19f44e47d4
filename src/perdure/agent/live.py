"""Live events of durable runs: straight to who watches in this process, through the store to who watches in another.

Everything here is provisional. A run streams its model's answer only while somebody watches, and nothing waits for a
watcher: one that is slow loses the oldest events.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncGenerator

import msgspec

from perdure.agent import events
from perdure.agent.events import Event
from perdure.clock import seconds
from perdure.engine.host import Host, log
from perdure.errors import Unavailable
from perdure.limits import LIVE_EVENTS_MAX, LIVE_FLUSH_SECONDS, LIVE_WATCH_SECONDS
from perdure.ports.failpoints import Boundary
from perdure.ports.ledger import Submission

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(list[Event]).decode


class _Watcher:
    """One iteration over the events of a run in this process."""

    def __init__(self) -> None:
        self.waiting: deque[Event] = deque(maxlen=LIVE_EVENTS_MAX)
        self.news = asyncio.Event()
        self.told = False  # by the process itself: then nothing is on its way through the store

    def tell(self, event: Event) -> None:
        self.told = True
        self.waiting.append(event)
        self.news.set()


class Live:
    """Who watches what, in one process.

    Args:
        host: the process and its store.
    """

    def __init__(self, host: Host) -> None:
        self._host = host
        self._here: defaultdict[str, set[_Watcher]] = defaultdict(set)
        self._elsewhere: frozenset[str] = frozenset()
        self._leaving: defaultdict[str, list[Event]] = defaultdict(list)
        self._flushing: asyncio.Task[None] | None = None
        host.foreign.append(self._look)
        self._look()

    def _look(self) -> None:
        """Another process wrote: who watches, and what was left for us."""
        host, now = self._host, self._host.clock.now()
        try:
            found = host.store.read(lambda tx: tx.ledger.watched_events(host.owner, now))
        except Unavailable:
            return
        self._elsewhere = frozenset(found)
        for watchers in self._here.values():
            for watcher in watchers:
                watcher.news.set()

    # -- who works ------------------------------------------------------------------------------------------------------
    def wanted(self, submission: str) -> bool:
        """Whether anybody watches this submission."""
        return submission in self._here or submission in self._elsewhere

    def emit(self, submission: str, event: Event) -> None:
        """Pass an event on. How a run ends is told by its settlement, not by whoever is about to record it."""
        if isinstance(event, events.RunEnded):
            return
        for watcher in self._here.get(submission, ()):
            watcher.tell(event)
        if submission in self._elsewhere:
            self._leaving[submission].append(event)
            if self._flushing is None or self._flushing.done():
                self._flushing = self._host.spawn(self._flush())

    async def _flush(self) -> None:
        host = self._host
        while self._leaving:
            leaving, self._leaving = self._leaving, defaultdict(list)
            now = host.clock.now()
            for submission, told in leaving.items():
                body = _encode(_joined(told))
                try:
                    await host.store.write(
                        Boundary.LIVE,
                        lambda tx, s=submission, b=body, at=now: tx.ledger.put_events(s, host.owner, b, at),  # type: ignore[misc]
                    )
                except Unavailable as error:
                    log.debug("live events of %s are lost: %s", submission, error)
            await asyncio.sleep(LIVE_FLUSH_SECONDS)

    # -- who watches ----------------------------------------------------------------------------------------------------
    async def follow(self, submission: str) -> AsyncGenerator[Event]:
        """The events of a submission from now on; the last is :class:`events.RunEnded`, once it is settled."""
        host, watcher = self._host, _Watcher()
        self._here[submission].add(watcher)
        settled = host.until_settled(submission)
        settled.add_done_callback(lambda _: watcher.news.set())
        telling = host.spawn(self._keep_watching(submission))
        after = 0
        try:
            while True:
                watcher.news.clear()
                row = host.store.read(lambda tx: tx.ledger.submission(submission))
                left = host.store.read(lambda tx, after=after: tx.ledger.events_after(submission, host.owner, after))  # type: ignore[misc]
                for number, body in left:
                    after = number
                    watcher.waiting.extend(_decode(body))
                while watcher.waiting:
                    yield watcher.waiting.popleft()
                if left:
                    continue
                if row is None or row.state != "settled":
                    await watcher.news.wait()
                elif watcher.told:
                    yield _end(row)
                    return
                else:  # the last events may be on their way yet
                    watcher.told = True
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(watcher.news.wait(), 2 * LIVE_FLUSH_SECONDS)
        finally:
            telling.cancel()
            settled.cancel()
            self._here[submission].discard(watcher)
            if not self._here[submission]:
                del self._here[submission]
            with contextlib.suppress(Unavailable):
                await host.store.write(Boundary.LIVE, lambda tx: tx.ledger.watch_events(submission, host.owner, 0))

    async def _keep_watching(self, submission: str) -> None:
        """Say to the other processes that somebody watches here, again and again."""
        host = self._host
        while True:
            until = host.clock.now() + seconds(LIVE_WATCH_SECONDS)
            with contextlib.suppress(Unavailable):
                await host.store.write(
                    Boundary.LIVE,
                    lambda tx, until=until: tx.ledger.watch_events(submission, host.owner, until),  # type: ignore[misc]
                )
            await asyncio.sleep(LIVE_WATCH_SECONDS / 2)


def _joined(told: list[Event]) -> list[Event]:
    """Deltas that follow each other as one."""
    joined: list[Event] = []
    for event in told:
        last = joined[-1] if joined else None
        if isinstance(event, events.TextDelta) and isinstance(last, events.TextDelta) and event.turn == last.turn:
            joined[-1] = events.TextDelta(event.turn, last.text + event.text)
        elif (
            isinstance(event, events.ReasoningDelta)
            and isinstance(last, events.ReasoningDelta)
            and event.turn == last.turn
        ):
            joined[-1] = events.ReasoningDelta(event.turn, last.text + event.text)
        else:
            joined.append(event)
    return joined


def _end(row: Submission) -> events.RunEnded:
    failure = msgspec.json.decode(row.failure, type=dict[str, str]) if row.failure else {}
    return events.RunEnded(row.outcome or "", failure.get("kind", ""), failure.get("message", ""))
