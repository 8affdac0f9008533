"""Extends the deadline of an attempt while it makes progress.

The deadline of a grant is an estimate: the link may not be measured yet, or may have become slower.
An attempt that makes progress must not lose its work to a wrong estimate. So this worker checks
each attempt several times before its deadline. If it has made progress, the decode worker is told.
Both then give it more time, counted from that moment. An attempt without progress ends at its
deadline.
"""

from __future__ import annotations

import asyncio

from pullfill.prefill_worker.control_connection import ControlConnection
from pullfill.prefill_worker.task import PrefillTask
from pullfill.wire import Grant, Progress

_LOOKS = 4
"""The least number of checks before the deadline."""
_EVERY_S = 1.0


class Paces:
    """Checks all attempts of this worker, with one timer: nearly all end before their first check.

    asyncio thread only."""

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
    """The deadline of one attempt. Its time begins when this object is made.

    timeout_s: how long the attempt may go on without progress after it has made some.
    look_at: when the next check is due."""

    def __init__(
        self, paces: Paces, connection: ControlConnection, grant: Grant, timeout_s: float
    ) -> None:
        self._paces, self._connection, self._grant = paces, connection, grant
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

    def watch(self, task: PrefillTask, done: asyncio.Future[None]) -> None:
        """Check the task until `stop`. After its deadline `done` raises TimeoutError."""
        self._task, self._done = task, done
        self.look_at = min(self._loop.time() + self._every_s, self._until)
        self._paces.add(self)

    def stop(self) -> None:
        """Idempotent."""
        self._paces.remove(self)

    def look(self) -> None:
        """Check now."""
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
        """Whether the task has made progress since the last check.

        It has if more was computed, or if the link has copied while the task waits for the link.
        Copies for other jobs count, too, because they are in front of it."""
        computed, moved = task.scheduled, task.transfer_worker.moved_bytes
        more = computed > self._computed or (task.submitted > 0 and moved > self._moved)
        self._computed, self._moved = computed, moved
        return more

    def _tell(self, task: PrefillTask) -> None:
        blocks, seconds = task.written_blocks, task.write_s
        self._connection.send(
            Progress(
                job_id=task.job_id,
                attempt=task.attempt,
                incarnation=self._grant.incarnation,
                blocks=max(0, blocks - self._written),  # a preempted prompt is written again
                write_s=max(0.0, seconds - self._write_s),
            )
        )
        self._written, self._write_s = blocks, seconds
