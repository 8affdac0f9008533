"""When open jobs are due, soonest first.

A job may become due later than the heap says. `soonest` corrects the entry once it is the first of
the heap. Only a sweep, which is rare, visits all jobs.
"""

from __future__ import annotations

import heapq
import itertools
import math

from pullfill.decode_worker.ledger_types import Entry

_FEW = 1024


class Dues:
    """A heap of (due time, serial, job). Only the ledger uses it, with its lock held.

    next_look: when the ledger's timer looks at the jobs next."""

    def __init__(self) -> None:
        self.next_look = math.inf
        self._heap: list[tuple[float, int, Entry]] = []
        self._serial = itertools.count()
        self._sweep_at = _FEW

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, entry: Entry) -> bool:
        """Add a job. Call it for each new job, and when the due time of a job moves earlier.

        Returns whether the timer must be woken, because it would sleep beyond the due time."""
        heapq.heappush(self._heap, (entry.due, next(self._serial), entry))
        if len(self._heap) > self._sweep_at:
            self._heap = [item for item in self._heap if not item[2].settled]
            heapq.heapify(self._heap)
            self._sweep_at = max(_FEW, 2 * len(self._heap))
        earlier = entry.due < self.next_look
        self.next_look = min(self.next_look, entry.due)
        return earlier

    def soonest(self) -> float | None:
        """Return when the first job is due. None: there is no job whose request waits."""
        while self._heap:
            due, _, entry = self._heap[0]
            if entry.settled:
                heapq.heappop(self._heap)
            elif entry.due > due:
                heapq.heapreplace(self._heap, (entry.due, next(self._serial), entry))
            else:
                return due
        return None

    def pop(self) -> Entry:
        """Take out the job that `soonest` has found."""
        return heapq.heappop(self._heap)[2]
