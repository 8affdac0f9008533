"""Sends heartbeats to the queue, so that it does not give running jobs to another worker.

One timer serves all jobs. The first job starts it, and it repeats while any job runs. A job that
starts mid-interval gets its first heartbeat early. The gap never exceeds `every_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pullfill.errors import PullfillError
from pullfill.queue.contract import Delivery
from pullfill.runtime import failpoints


class QueueHeartbeat:
    """See the module. asyncio thread only.

    every_s: returns the seconds between two heartbeats. Called each time, as settings change.
    deliveries: one for each running job, by job id. Its owner calls `start` after it added one. It
    may remove one at any time without a call."""

    def __init__(self, every_s: Callable[[], float], deliveries: Mapping[str, Delivery]) -> None:
        self._every_s = every_s
        self._deliveries = deliveries
        self._going = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the timer unless it runs. Call it after a delivery was added."""
        if not self._going:
            self._going = True
            loop = asyncio.get_running_loop()
            loop.call_at(loop.time() + self._every_s(), self._due)

    def _due(self) -> None:
        if self._deliveries:
            self._task = asyncio.create_task(self._beat())
        else:
            self._going = False

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_at(loop.time() + self._every_s(), self._due)
        for delivery in list(self._deliveries.values()):
            try:
                failpoints.hit("prefill.heartbeat")
                await delivery.in_progress()
            except (PullfillError, failpoints.FailpointError):
                continue
