"""Finds out whether an engine is stuck, and tells the worker.

Runs on the worker's asyncio loop once the engine is built. Loading and warm-up are not watched.

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
from pullfill.runtime import log

if TYPE_CHECKING:
    from pullfill.engine.life import EngineLife

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


class EngineWatchdog:
    """Watches one engine until `stop`. Calls `give_up` of an engine that is lost.

    on_stuck: called on the loop, with True when the engine is stuck, with False when it has
    recovered.
    health: as of the last look. LOST is final."""

    def __init__(
        self,
        engine: EngineLife[Any],
        stall_s: float,
        on_stuck: Callable[[bool], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.health = Health.WELL
        self._engine = engine
        self._stall_s = stall_s
        self._on_stuck = on_stuck
        self._clock = clock
        self._interval_s = min(1.0, stall_s / 8)
        self._looked = clock.monotonic()
        self._beat = -1
        self._still_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="engine-watchdog")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def complaint(self) -> str:
        """What is wrong, for people. Empty while the engine is well."""
        if self.health is Health.WELL:
            return ""
        pulse = self._engine.pulse()
        return (
            f"the engine is stuck in {pulse.busy or 'nothing'} for {self._still_s:.0f} s "
            f"with {pulse.requests} requests"
        )

    def detail(self) -> dict[str, Any]:
        """For /ready. Empty while the engine is well."""
        return {"reason": self.complaint} if self.complaint else {}

    def look(self) -> None:
        """Look at the engine once, and act on a change. Call it about every `stall_s` / 8."""
        if self.health is Health.LOST:
            return
        now, pulse, was = self._clock.monotonic(), self._engine.pulse(), self.health
        # Bounded: a process that was stopped or starved must not find its engine stuck afterwards.
        passed = min(now - self._looked, 2 * self._interval_s)
        moved = pulse.beat != self._beat
        self._looked, self._beat = now, pulse.beat
        self._still_s = 0.0 if moved or not pulse.busy else self._still_s + passed
        if self._still_s >= 2 * self._stall_s:
            self.health = Health.LOST
            self._engine.give_up(self.complaint)
        elif self._still_s >= self._stall_s:
            self.health = Health.STUCK
            if was is Health.WELL:
                logger.error(
                    "%s: taking no work; leaving if it takes as long again", self.complaint
                )
                self._on_stuck(True)
        elif was is Health.STUCK:
            self.health = Health.WELL
            logger.warning("the engine takes steps again")
            self._on_stuck(False)

    async def _run(self) -> None:
        while self.health is not Health.LOST:
            await asyncio.sleep(self._interval_s)
            self.look()
