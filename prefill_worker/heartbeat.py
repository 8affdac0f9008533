"""Tells the queue that jobs are still worked on: one timer for all that run here.

It is set by the first job and goes on while there is any. A job that comes in between is told of
earlier than it need be, none ever later than `every_s` after its start or the last time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from pullfill import failpoints
from pullfill.errors import PullfillError
from pullfill.queue.contract import Delivery


class Heartbeat:
    """deliveries: of the jobs that run now, by job id; its owner calls `start` after it put one in
    and need not say when it took one out. every_s: asked for each time, since settings change.
    asyncio thread only."""

    def __init__(self, every_s: Callable[[], float], deliveries: Mapping[str, Delivery]) -> None:
        self._every_s = every_s
        self._deliveries = deliveries
        self._going = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """A job began."""
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
