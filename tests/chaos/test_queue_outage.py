"""Outages of NATS against the queue alone: longer and rougher than the contract tests afford."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from tests.support.nats import NatsServer, dead_letters, until

pytestmark = pytest.mark.slow
HANG_S = 30.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path)
    await server.start()
    yield server
    server.stop()


@pytest.fixture
def config() -> QueueConfig:
    return QueueConfig(
        "chaos", secrets.token_hex(8), ack_wait_s=1.0, max_deliver=20, publish_timeout_s=0.3
    )


class Load:
    """A publisher and workers that go on whatever happens, and what they saw."""

    def __init__(self, producer: JetStreamProducer) -> None:
        self.producer = producer
        self.stored: set[str] = set()
        self.refused: set[str] = set()
        self.done: Counter[str] = Counter()
        self.stop = False

    async def publish(self) -> None:
        number = 0
        while not self.stop:
            number += 1
            job_id = f"job-{number}"
            try:
                await self.producer.publish(job_id, secrets.token_bytes(2000), 100)
                self.stored.add(job_id)
            except QueueUnavailable:
                self.refused.add(job_id)
            await asyncio.sleep(0.005)

    async def work(self, worker: JetStreamConsumer) -> None:
        while not self.stop or self.producer.depth().depth_jobs or not self.producer.available:
            try:
                if job := await worker.pull(0.5):
                    await job.ack()
                    self.done[job.job_id] += 1
            except QueueUnavailable:
                await asyncio.sleep(0.02)


@pytest.mark.essential
async def test_no_stored_job_is_lost_over_three_kills(
    server: NatsServer, config: QueueConfig
) -> None:
    producer = await JetStreamProducer.connect(server.url, config, wait_s=HANG_S)
    workers = [await JetStreamConsumer.connect(server.url, config, wait_s=HANG_S) for _ in range(2)]
    load = Load(producer)
    tasks = [asyncio.create_task(load.publish())]
    tasks += [asyncio.create_task(load.work(worker)) for worker in workers]
    for kills in range(4):
        if kills:
            await server.restart()
        stored = len(load.stored)
        await until(lambda stored=stored: len(load.stored) > stored + 50)  # type: ignore[misc]
    load.stop = True
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*tasks)
    await until(lambda: producer.available and producer.depth().depth_jobs == 0)
    assert await dead_letters(producer.connection, config) == []
    await asyncio.gather(producer.close(), *(worker.close() for worker in workers))
    assert load.stored <= set(load.done), load.stored - set(load.done)
    assert set(load.done) <= load.stored | load.refused
    assert load.refused, "the outages were noticed"
