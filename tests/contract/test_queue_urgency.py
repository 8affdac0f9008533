"""The order in which jobs are handed out, on JetStream and in memory, and that it loses none."""

from __future__ import annotations

import asyncio

import pytest

from pullfill.queue.contract import Delivery, JobConsumer, Urgency
from pullfill.queue.jetstream import JetStreamConsumer
from tests.contract.test_queue_contract import SOON_S, Bench, bench, make

__all__ = ["bench", "make"]
TIGHT, NORMAL, LOOSE = Urgency


async def publish(bench: Bench, *jobs: tuple[str, int, Urgency]) -> None:
    for name, tokens, urgency in jobs:
        await bench.producer.publish(name, b"", tokens, urgency)


async def one(consumer: JobConsumer) -> Delivery:
    job = await consumer.pull(SOON_S)
    return job


async def handed_out(bench: Bench, count: int) -> list[str]:
    names = []
    for _ in range(count):
        job = await one(bench.consumer)
        names.append(job.job_id)
        await job.ack()
    assert await bench.consumer.pull(0.05) is None
    return names


@pytest.mark.essential
async def test_urgent_jobs_come_first(bench: Bench) -> None:
    await publish(
        bench, ("l", 100, LOOSE), ("n", 2000, NORMAL), ("n2", 100, NORMAL), ("t", 5000, TIGHT),
        ("t2", 100, TIGHT),
    )  # fmt: skip
    assert await handed_out(bench, 5) == ["t", "t2", "n", "n2", "l"]


async def test_no_urgency_is_left_out(bench: Bench) -> None:
    """Sixteen urgent jobs of 1000 tokens: after each nine (their share), the others' turn."""
    for number in range(16):
        await publish(bench, *((f"{u.label[0]}{number}", 1000, u) for u in Urgency))
    order = "".join(name[0] for name in await handed_out(bench, 48))
    # A round is 9, 5 and 3 jobs: each ends with the job that uses its credit up, and the next one
    # is as much shorter.
    assert order.startswith("tttttttttnnnnnlllttttttt"), order


async def test_a_worker_that_waits_at_all_takes_one_job_and_leaves_the_others(bench: Bench) -> None:
    """Its requests at the other consumers are withdrawn: who has no room gets no job."""
    waits = asyncio.create_task(one(bench.consumer))
    await asyncio.sleep(0.05)
    await publish(bench, ("first", 100, NORMAL))
    first = await waits
    if isinstance(bench.consumer, JetStreamConsumer):
        await asyncio.sleep(0.05)
    other = await bench.add_consumer()
    await publish(bench, ("tight", 100, TIGHT), ("loose", 100, LOOSE))
    for name in ("tight", "loose"):
        job = await one(other)
        assert (job.job_id, job.number) == (name, 1)
        await job.ack()
    await first.ack()


async def test_a_worker_may_take_nothing_but_urgent_jobs(bench: Bench) -> None:
    await publish(bench, ("normal", 100, NORMAL))
    assert await bench.consumer.pull(0.0, urgent_only=True) is None
    await publish(bench, ("tight", 100, TIGHT))
    job = await bench.consumer.pull(0.0, urgent_only=True)
    assert job.job_id == "tight"
    await job.ack()
    assert await handed_out(bench, 1) == ["normal"]
