"""A delivery without a sign of progress for ACK_WAIT_S: the job comes back."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from tests.contract.test_queue_contract import ACK_WAIT_S, SOON_S, Bench, hasty, make

__all__ = ["hasty", "make"]
TRIES = 20
"""If the machine stops between two signs of progress, NATS rightly delivers the job again. Such a
try shows nothing, so the test tries again."""


@pytest.mark.essential
async def test_silence_brings_the_job_back_and_in_progress_does_not(hasty: Bench) -> None:
    for number in range(TRIES):
        await hasty.producer.publish(f"a{number}", b"", 1)
        job = await hasty.consumer.pull(SOON_S)
        sent = [time.monotonic()]
        for _ in range(8):
            await hasty.advance(ACK_WAIT_S / 4)
            await job.in_progress()
            sent.append(time.monotonic())
        came = await hasty.consumer.pull(0.03)
        if not came:
            break
        assert max(b - a for a, b in pairwise(sent)) > ACK_WAIT_S / 2, "no sign was late"
        for delivery in (job, *came):
            await delivery.ack()
    await hasty.advance(1.5 * ACK_WAIT_S)
    again = await hasty.consumer.pull(SOON_S)
    assert (again.job_id, again.number) == (job.job_id, 2)
    await again.ack()


async def test_a_stale_ack_settles_the_redelivered_job(hasty: Bench) -> None:
    await hasty.producer.publish("a", b"", 1)
    first = await hasty.consumer.pull(SOON_S)
    await hasty.advance(1.5 * ACK_WAIT_S)
    second = await hasty.consumer.pull(SOON_S)
    await first.ack()
    await hasty.depth_is(0)
    await second.ack()
    assert await hasty.consumer.pull(0.05) is None
