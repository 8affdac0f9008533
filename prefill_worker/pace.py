"""How long one attempt may take: until its deadline, or for as long as it moves.

The deadline of a grant is an estimate. Nobody may have measured the link yet, or it may have become
slower. An attempt that moves all the time would lose all its work by a deadline. So this worker
looks at it several times before the deadline, and tells the decode worker that it moved. Both then
allow it more time, counted from that moment. An attempt that stands still ends as before.
"""

from __future__ import annotations

import asyncio

from pullfill.prefill_worker.link import DecodeLink
from pullfill.prefill_worker.task import PrefillTask
from pullfill.waits import Prompt
from pullfill.wire import Grant, Progress

_LOOKS = 4
"""Looks before the deadline, at least."""
_EVERY_S = 1.0


class Paces:
    """Looks at all attempts of this worker, with one timer: nearly every attempt ends before its
    first look. asyncio thread only."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._watched: dict[Pace, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, pace: Pace) -> None:
        self._watched[pace] = None
        self._look_at(pace.look_at)

    def remove(self, pace: Pace) -> None:
        """Idempotent."""
        self._watched.pop(pace, None)

    def _look_at(self, when: float) -> None:
        timer = self._timer
        if timer is None or when < timer.when():
            if timer is not None:
                timer.cancel()
            self._timer = self._loop.call_at(when, self._look)

    def _look(self) -> None:
        self._timer = None
        for pace in list(self._watched):
            if pace.look_at <= self._loop.time():
                pace.look()
        if self._watched:
            self._look_at(min(pace.look_at for pace in self._watched))


class Pace:
    """Starts to count when it is made. timeout_s: how long the attempt may stand still after it
    moved. look_at: when to look next."""

    def __init__(self, paces: Paces, link: DecodeLink, grant: Grant, timeout_s: float) -> None:
        self._paces, self._link, self._grant = paces, link, grant
        self._still_s = max(grant.deadline_s, timeout_s)
        self._every_s = min(_EVERY_S, grant.deadline_s / _LOOKS)
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + grant.deadline_s
        self.look_at = self._until
        self._computed = self._moved = self._written = 0
        self._write_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._until - self._loop.time())

    def watch(self, task: PrefillTask, done: Prompt[None]) -> None:
        """Look at the task from now on, until `stop`. Once its time is over `done` raises
        TimeoutError."""
        self._task, self._done = task, done
        self.look_at = min(self._loop.time() + self._every_s, self._until)
        self._paces.add(self)

    def stop(self) -> None:
        """Idempotent."""
        self._paces.remove(self)

    def look(self) -> None:
        """It is time to."""
        if self._done.done():
            self.stop()
            return
        now = self._loop.time()
        if self._has_moved(self._task):
            self._tell(self._task)
            self._until = now + self._still_s
        if now < self._until:
            self.look_at = min(now + self._every_s, self._until)
        else:
            self.stop()
            self._done.set_exception(TimeoutError())

    def _has_moved(self, task: PrefillTask) -> bool:
        """Since the last look: more was computed, or the link copied while the task waits for it.
        Copies for other jobs count too, since they are in front of it."""
        computed, moved = task.scheduled_blocks, task.mover.moved_bytes
        more = computed > self._computed or (task.submitted > 0 and moved > self._moved)
        self._computed, self._moved = computed, moved
        return more

    def _tell(self, task: PrefillTask) -> None:
        blocks, seconds = task.written_blocks, task.write_s
        self._link.send(
            Progress(
                job_id=task.job_id,
                attempt=task.attempt,
                incarnation=self._grant.incarnation,
                blocks=blocks - self._written,
                write_s=max(0.0, seconds - self._write_s),
            )
        )
        self._written, self._write_s = blocks, seconds
