"""Pulls jobs while there is budget, in tokens: enough that the engine always has the next prompt
while the last one's blocks are being written, and no more, so that other workers get the rest."""

from __future__ import annotations

import asyncio
import contextlib

from pullfill import log
from pullfill.errors import PullfillError
from pullfill.prefill_worker.runner import JobRunner
from pullfill.queue.contract import JobConsumer

logger = log.get("prefill_worker.puller")

_WAIT_S = 2.0


class Puller:
    """Owns the pull loop. `budget_tokens`: prompt tokens under way at which it stops pulling."""

    def __init__(
        self, consumer: JobConsumer, runner: JobRunner, *, budget_tokens: int, max_jobs: int
    ) -> None:
        self._consumer = consumer
        self._runner = runner
        self._budget = budget_tokens
        self._max_jobs = max_jobs
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._paused = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def changed(self) -> None:
        """A job ended: there may be room again."""
        self._room.set()

    def pause(self, paused: bool) -> None:
        """Take nothing for a while. What a pull under way still brings is given back."""
        self._paused = paused
        self._room.set()

    async def stop(self) -> None:
        """Take nothing any more. Jobs under way go on."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        with contextlib.suppress(PullfillError):
            await self._consumer.drain()

    async def _run(self) -> None:
        pause = 0.1
        while True:
            free_tokens = self._budget - self._runner.in_flight_tokens
            free_jobs = self._max_jobs - self._runner.in_flight
            if self._paused or free_tokens <= 0 or free_jobs <= 0:
                self._room.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WAIT_S):
                        await self._room.wait()
                continue
            try:
                deliveries = await self._consumer.pull(free_tokens, free_jobs, _WAIT_S)
                pause = 0.1
            except Exception as exc:
                level = logger.debug if isinstance(exc, PullfillError) else logger.exception
                level("no jobs now: %s", exc)
                await asyncio.sleep(pause)
                pause = min(pause * 2, 2.0)
                continue
            for delivery in deliveries:
                if self._paused:
                    with contextlib.suppress(PullfillError):  # it comes again by itself
                        await delivery.nak()
                else:
                    self._runner.start(delivery)
