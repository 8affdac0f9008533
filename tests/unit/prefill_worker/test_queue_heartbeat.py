"""One timer tells the queue of all jobs that run, and stops when none does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pullfill.prefill_worker.queue_heartbeat import QueueHeartbeat
from pullfill.queue.nats_connection import NotSent
from pullfill.runtime import failpoints
from tests.support.nats import until

EVERY_S = 0.04


class Delivered:
    def __init__(self, error: Exception | None = None) -> None:
        self.told: list[float] = []
        self._error = error

    async def in_progress(self) -> None:
        self.told.append(asyncio.get_running_loop().time())
        if self._error:
            raise self._error


def begin(beat: QueueHeartbeat, jobs: dict[str, Any], name: str, **more: Any) -> Delivered:
    jobs[name] = Delivered(**more)
    beat.start()
    return jobs[name]


async def test_all_are_told_together_as_long_as_they_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, jobs, due = asyncio.get_running_loop(), dict[str, Any](), list[Any]()
    real = loop.call_at

    def call_at(when: float, call: Any, *args: Any, **more: Any) -> Any:
        if getattr(call, "__self__", None) is not beat:
            return real(when, call, *args, **more)
        return due.append(call)

    async def pass_times(count: int) -> None:
        for _ in range(count):
            (call,) = due
            due.clear()
            call()
            if beat._going:
                assert beat._task is not None
                await beat._task

    monkeypatch.setattr(loop, "call_at", call_at)
    beat = QueueHeartbeat(lambda: EVERY_S, jobs)
    first, second = begin(beat, jobs, "a"), begin(beat, jobs, "b")
    assert not first.told
    await pass_times(2)
    assert len(first.told) == 2
    assert len(second.told) == 2, "sooner than it need be: with the others"
    del jobs["a"]
    await pass_times(2)
    assert (len(first.told), len(second.told)) == (2, 4)
    jobs.clear()
    await pass_times(1)
    assert not beat._going
    assert not due
    again = begin(beat, jobs, "c")
    await pass_times(2)
    assert len(again.told) == 2


async def test_a_job_has_no_task_and_short_ones_share_a_timer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, jobs, timers = asyncio.get_running_loop(), dict[str, Any](), list[Any]()
    real = loop.call_at

    def call_at(when: float, call: Any, *args: Any, **more: Any) -> Any:
        if getattr(call, "__self__", None) is beat:
            timers.append(call)
        return real(when, call, *args, **more)

    monkeypatch.setattr(loop, "call_at", call_at)
    beat = QueueHeartbeat(lambda: 60.0, jobs)
    before = asyncio.all_tasks()
    for number in range(100):
        begin(beat, jobs, f"j{number}")
        jobs.clear()
    assert len(timers) == 1
    assert asyncio.all_tasks() == before


async def test_one_that_cannot_be_told_of_does_not_keep_the_others_from_it() -> None:
    jobs: dict[str, Any] = {}
    beat = QueueHeartbeat(lambda: EVERY_S, jobs)
    bad, good = begin(beat, jobs, "bad", error=NotSent("away")), begin(beat, jobs, "good")
    await until(lambda: len(good.told) == 2)
    assert len(bad.told) == 2
    jobs.clear()
    await until(lambda: not beat._going)


async def test_the_failpoint_keeps_the_queue_from_hearing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failpoints, "_active", failpoints.parse("prefill.heartbeat=error"))
    jobs: dict[str, Any] = {}
    beat = QueueHeartbeat(lambda: EVERY_S, jobs)
    job = begin(beat, jobs, "a")
    await until(lambda: failpoints._active["prefill.heartbeat"].hits >= 2)
    assert not job.told
    monkeypatch.setattr(failpoints, "_active", {})
    await until(lambda: bool(job.told))
    jobs.clear()
    await until(lambda: not beat._going)
