"""An attempt on the prefill worker ends at its deadline unless it makes progress."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.prefill_worker.pace import Pace
from pullfill.wire import FenceToken, Grant, Progress, decode, encode

DEADLINE_S = 0.2


class Attempt:
    """One attempt, and what its decode worker was told."""

    def __init__(self, deadline_s: float = DEADLINE_S, still_s: float = 0.0) -> None:
        self.told: list[Progress] = []
        link: Any = SimpleNamespace(send=self.told.append)
        grant = Grant(
            rid=1, job_id="j", attempt=1, incarnation="i", deadline_s=deadline_s,
            job_digest=b"d", fence=FenceToken(slot=0, epoch=0),
        )  # fmt: skip
        self.task: Any = SimpleNamespace(
            job_id="j", attempt=1, scheduled=0, submitted=0, written_blocks=0, write_s=0.0,
            transfer_worker=SimpleNamespace(moved_bytes=0),
        )  # fmt: skip
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pace = Pace(link, grant, still_s)
        self.pace.watch(self.task, self.done)


async def took(attempt: Attempt) -> float:
    """Seconds until it was ended."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await attempt.done
    return loop.time() - began


async def test_one_that_stands_still_ends_at_its_deadline() -> None:
    attempt = Attempt()
    assert 0.9 * DEADLINE_S <= await took(attempt) < 5
    assert attempt.told == []


async def test_one_that_moves_gets_more_time_and_says_so() -> None:
    attempt = Attempt(still_s=0.3)
    attempt.task.scheduled = 2
    attempt.task.written_blocks = 1
    seconds = await took(attempt)
    assert 0.3 <= seconds < 5, "0.3 s from the look that saw it"
    assert [progress.blocks for progress in attempt.told] == [1]


async def test_after_a_preemption_no_negative_number_of_blocks_is_told() -> None:
    """The decode worker would close the connection."""
    attempt = Attempt(still_s=60.0)
    for scheduled, written in ((5, 3), (7, 1), (9, 4)):
        attempt.task.scheduled, attempt.task.written_blocks = scheduled, written
        attempt.pace.look()
    attempt.pace.stop()
    assert [decode(encode(told), Progress).blocks for told in attempt.told] == [3, 0, 3]


async def test_each_attempt_has_its_own_deadline() -> None:
    began = asyncio.get_running_loop().time()
    last, second, first = Attempt(60.0), Attempt(0.6), Attempt(0.1)
    await took(first)
    await took(second)
    assert asyncio.get_running_loop().time() - began >= 0.6
    assert not last.done.done()


async def test_what_is_over_is_not_looked_at() -> None:
    stopped, over = Attempt(), Attempt()
    for _ in range(2):
        stopped.pace.stop()
    over.done.set_result(None)
    for attempt in (stopped, over):
        attempt.task.scheduled = 2
    await asyncio.sleep(1.5 * DEADLINE_S)
    assert not stopped.done.done()
    assert stopped.told == over.told == []
