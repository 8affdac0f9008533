"""Finds out whether an engine is stuck, and tells the worker.

`Watchdog` decides, from a counter and a clock. `EngineWatchdog` looks at the engine on the worker's
asyncio loop, once the engine is built. Loading and warm-up are not watched.

    WELL ──no beat for stall_s while busy──▶ STUCK ──as long again──▶ LOST (for good)
      ◀──────────────── a beat ──────────────┘

The engine loop beats at each round: at least once a second when idle, else after each step. So a
step may take up to stall_s, for example with a long prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.runtime import log, timer_grid

if TYPE_CHECKING:
    from pullfill.engine.thread import EngineThread

logger = log.get("engine.watchdog")


class Health(enum.StrEnum):
    WELL = "well"
    STUCK = "stuck"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the engine thread does now.

    busy: what it does. "" while it has no work and sleeps.
    requests: number of requests in the engine, or on the way to it."""

    beat: int
    busy: str
    requests: int


class Watchdog:
    """Decides from the pulses that `look` gets. Call it about every `interval_s`."""

    def __init__(self, stall_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._looked = clock.monotonic()
        self._beat = -1
        self.interval_s = min(1.0, stall_s / 8)
        self.still_s = 0.0
        self.health = Health.WELL

    def look(self, pulse: Pulse) -> Health:
        """Return the engine's health. LOST is final."""
        now = self._clock.monotonic()
        # Bounded: a process that was stopped or starved must not find its engine stuck afterwards.
        passed = min(now - self._looked, 2 * self.interval_s)
        self._looked = now
        if self.health is Health.LOST:
            return self.health
        moved = pulse.beat != self._beat
        self._beat = pulse.beat
        self.still_s = 0.0 if moved or not pulse.busy else self.still_s + passed
        if self.still_s >= 2 * self._stall_s:
            self.health = Health.LOST
        elif self.still_s >= self._stall_s:
            self.health = Health.STUCK
        else:
            self.health = Health.WELL
        return self.health


class EngineWatchdog:
    """Watches one engine until `stop`. Calls `give_up` of an engine that is lost.

    on_stuck: called on the loop, with True when the engine is stuck, with False when it has
    recovered."""

    def __init__(
        self,
        engine: EngineThread[Any],
        stall_s: float,
        on_stuck: Callable[[bool], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._engine = engine
        self._dog = Watchdog(stall_s, clock)
        self._on_stuck = on_stuck
        self._task: asyncio.Task[None] | None = None
        self._was = Health.WELL

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="engine-watchdog")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def complaint(self) -> str:
        """What is wrong, for people; "" while the engine is well."""
        if self._dog.health is Health.WELL:
            return ""
        pulse = self._engine.pulse()
        return (
            f"the engine is stuck in {pulse.busy or 'nothing'} for {self._dog.still_s:.0f} s "
            f"with {pulse.requests} requests"
        )

    def detail(self) -> dict[str, Any]:
        """For /ready: empty while the engine is well."""
        return {"reason": self.complaint} if self.complaint else {}

    def look(self) -> None:
        """Look at the engine once, and act on a change."""
        health = self._dog.look(self._engine.pulse())
        was, self._was = self._was, health
        if health is was:
            return
        if health is Health.LOST:
            self._engine.give_up(self.complaint)
        elif health is Health.STUCK:
            logger.error("%s: taking no work; leaving if it takes as long again", self.complaint)
            self._on_stuck(True)
        else:
            logger.warning("the engine takes steps again")
            self._on_stuck(False)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._dog.health is not Health.LOST:
            await asyncio.sleep(timer_grid.left(loop.time(), self._dog.interval_s))
            self.look()
