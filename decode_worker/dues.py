"""Which open job is due next, without looking at all of them.

A heap of (due, entry), corrected when an item comes up: an entry whose due moved later is put back,
one that is settled is dropped. An entry whose due moves earlier must be added again. So neither an
open, nor a claim, nor a tick costs more because thousands of jobs wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from pullfill.decode_worker.entry import Entry

_FEW = 1024


class Dues:
    """Called with the ledger's lock held."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Entry]] = []
        self._serial = itertools.count()
        self._sweep_at = _FEW

    def add(self, entry: Entry) -> None:
        """It is new, or is due earlier than before."""
        heapq.heappush(self._heap, (entry.due, next(self._serial), entry))
        if len(self._heap) > self._sweep_at:
            self._heap = [item for item in self._heap if not item[2].settled]
            heapq.heapify(self._heap)
            self._sweep_at = max(_FEW, 2 * len(self._heap))

    def past(self, now: float) -> Iterator[Entry]:
        """Those that are due by `now`, once each. More may be added meanwhile."""
        while (due := self.soonest()) is not None and due <= now:
            yield heapq.heappop(self._heap)[2]

    def soonest(self) -> float | None:
        """When the next one is due; None if none is."""
        while self._heap:
            due, _, entry = self._heap[0]
            if entry.settled:
                heapq.heappop(self._heap)
            elif entry.due > due:
                heapq.heapreplace(self._heap, (entry.due, next(self._serial), entry))
            else:
                return due
        return None
