"""Which task may begin next: those whose needs have all ended, in compiled order. Pure.

A task that waits (for a person, a verdict, a timer) is taken and does not come up again; the order of what does is the
same in every process that reads the same log.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence


class Scheduler:
    """The frontier of one run. Cost per task does not depend on how many there are, but for a logarithm.

    Args:
        order: every task in compiled order.
        needs: what must have ended before each.
        ended: tasks that have ended. taken: tasks that have begun and have not.
    """

    def __init__(
        self,
        order: Sequence[str],
        needs: Mapping[str, Sequence[str]],
        *,
        ended: Collection[str] = (),
        taken: Collection[str] = (),
    ) -> None:
        self._order = order
        self._place = {id: place for place, id in enumerate(order)}
        self._following: dict[str, list[str]] = {id: [] for id in order}
        self._missing: dict[str, int] = {}
        self._ready: list[int] = []
        done = set(ended)
        self.left = len(order) - len(done)
        for id in order:
            missing = 0
            for need in dict.fromkeys(needs[id]):
                self._following[need].append(id)
                missing += need not in done
            self._missing[id] = missing
            if not missing and id not in done and id not in taken:
                self._ready.append(self._place[id])
        heapq.heapify(self._ready)

    def next(self) -> str | None:
        """Take the first task that may begin; None if there is none now."""
        return self._order[heapq.heappop(self._ready)] if self._ready else None

    def put_back(self, id: str) -> None:
        """A task that was taken may begin after all."""
        heapq.heappush(self._ready, self._place[id])

    def end(self, id: str) -> None:
        """A task ended, however it did; what needed only it may begin."""
        self.left -= 1
        for following in self._following[id]:
            self._missing[following] -= 1
            if not self._missing[following]:
                heapq.heappush(self._ready, self._place[following])

    def place(self, id: str) -> int:
        """Where a task stands in the compiled order."""
        return self._place[id]
