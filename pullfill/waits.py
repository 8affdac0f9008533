"""Answers that somebody waits for, each until a time of its own, with one timer for all of them.

A timer for each costs more than all the rest of a wait, and nearly none of them ever comes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Waits(Generic[K, V]):
    """Belongs to the running loop. late: what the wait for a key raises when its time is over."""

    def __init__(self, late: Callable[[K], Exception]) -> None:
        self._loop = asyncio.get_running_loop()
        self._late = late
        self._open: dict[K, tuple[asyncio.Future[V], float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[asyncio.Future[V]]:
        return iter([future for future, _ in self._open.values()])

    def open(self, key: K, within_s: float) -> asyncio.Future[V]:
        """Wait for this answer; who does must `close` it at the end."""
        until = self._loop.time() + within_s
        future: asyncio.Future[V] = self._loop.create_future()
        self._open[key] = (future, until)
        timer = self._timer
        if timer is None or until < timer.when():
            if timer is not None:
                timer.cancel()
            self._timer = self._loop.call_at(until, self._look)
        return future

    def close(self, key: K) -> None:
        """Nobody waits for it any more. Idempotent."""
        self._open.pop(key, None)

    def answer(self, key: K, value: V) -> bool:
        """Here it is. False: nobody waits for it."""
        future, _ = self._open.get(key, (None, 0.0))
        if future is None or future.done():
            return False
        future.set_result(value)
        return True

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        soonest: float | None = None
        for key, (future, until) in list(self._open.items()):
            if future.done():
                continue
            if until <= now:
                future.set_exception(self._late(key))
            elif soonest is None or until < soonest:
                soonest = until
        if soonest is not None:
            self._timer = self._loop.call_at(soonest, self._look)


class Bell:
    """Like asyncio.Event, for one waiter who waits for a limited time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.rung = False
        """Since the last `clear`; may be read on any thread."""
        self._waiter: asyncio.Future[bool] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        """Wake the waiter, or the next one at once."""
        self.rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def clear(self) -> None:
        """Forget that it rang."""
        self.rung = False

    async def wait(self, within_s: float | None) -> bool:
        """Whether it rings, or has rung since `clear`. None: wait for ever."""
        if self.rung:
            return True
        assert self._waiter is None, "one waiter at a time"
        self._waiter = self._loop.create_future()
        self._until = self._loop.time() + (math.inf if within_s is None else within_s)
        timer = self._timer
        if self._until < math.inf and (timer is None or self._until < timer.when()):
            if timer is not None:
                timer.cancel()
            self._timer = self._loop.call_at(self._until, self._look)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._until <= self._loop.time():
            self._waiter.set_result(False)
        elif self._until < math.inf:
            self._timer = self._loop.call_at(self._until, self._look)
