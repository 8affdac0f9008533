"""Extends the deadline of an attempt while it makes progress.

The deadline of a grant is an estimate: the link may not be measured yet, or may have become slower.
An attempt that makes progress must not lose its work to a wrong estimate. So this worker checks
each attempt several times before its deadline. If it has made progress, the decode worker is told.
Both then give it more time, counted from that moment. An attempt without progress ends at its
deadline.
"""

from __future__ import annotations

import asyncio

from pullfill.prefill_worker.decode_links import DecodeLink
from pullfill.prefill_worker.task import PrefillTask
from pullfill.wire import Grant, Progress

_LOOKS = 4
"""The least number of checks before the deadline."""
_EVERY_S = 1.0


class Pace:
    """The deadline of one attempt. Its time begins when this object is made. asyncio thread only.

    timeout_s: how long the attempt may go on without progress after it has made some."""

    def __init__(self, connection: DecodeLink, grant: Grant, timeout_s: float) -> None:
        self._connection, self._grant = connection, grant
        self._still_s = max(grant.deadline_s, timeout_s)
        self._every_s = min(_EVERY_S, grant.deadline_s / _LOOKS)
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + grant.deadline_s
        self._timer: asyncio.TimerHandle | None = None
        self._computed = self._moved = self._written = 0
        self._write_s = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._until - self._loop.time())

    def watch(self, task: PrefillTask, done: asyncio.Future[None]) -> None:
        """Check the task until `stop`. After its deadline `done` raises TimeoutError."""
        self._task, self._done = task, done
        self._look_again(self._loop.time())

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def look(self) -> None:
        """Check now."""
        self.stop()
        if self._done.done():
            return
        now = self._loop.time()
        if self._has_moved(self._task):
            self._tell(self._task)
            self._until = now + self._still_s
        if now < self._until:
            self._look_again(now)
        else:
            self._done.set_exception(TimeoutError())

    def _look_again(self, now: float) -> None:
        self._timer = self._loop.call_at(min(now + self._every_s, self._until), self.look)

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
