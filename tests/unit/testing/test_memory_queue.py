"""What only the in-memory queue has: it can be taken offline, and its clock is ours."""

from __future__ import annotations

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue.contract import QueueConfig
from pullfill.testing.memory_queue import MemoryQueue


class FakeClock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


async def test_offline_refuses_and_settles_nothing() -> None:
    queue = MemoryQueue(QueueConfig("ns", "abc"), FakeClock())
    producer, consumer = queue.producer(), queue.consumer()
    receipt = await producer.publish("a", b"", 1)
    await producer.publish("b", b"", 1)
    queue.offline = True
    assert not producer.available
    with pytest.raises(QueueUnavailable):
        await producer.publish("c", b"", 1)
    with pytest.raises(QueueUnavailable):
        await consumer.pull(0.01)
    assert not await producer.cancel(receipt)
    queue.offline = False
    jobs = [await consumer.pull(0.01) for _ in range(2)]
    assert [job.job_id for job in jobs] == ["a", "b"], "the claim of the cancelled one is refused"
    queue.offline = True
    await jobs[0].ack()
    queue.offline = False
    assert producer.depth().depth_jobs == 2


async def test_nobody_waits_for_a_clock_that_stands_still() -> None:
    consumer = MemoryQueue(QueueConfig("ns", "abc"), FakeClock()).consumer()
    assert await consumer.pull(0.02) is None


async def test_a_job_nobody_asks_for_disappears() -> None:
    clock = FakeClock()
    queue = MemoryQueue(QueueConfig("ns", "abc", max_age_s=10), clock)
    await queue.producer().publish("a", b"", 1)
    clock.now = 11.0
    assert queue.producer().depth().depth_jobs == 0
    assert await queue.consumer().pull(0.01) is None
