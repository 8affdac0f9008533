"""The streams themselves: which one a delivery is from, and whose settings they have."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pullfill.queue.connection import Link
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from tests.support.nats import NatsServer, until

HANG_S = 15.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(Path(tmp_path_factory.mktemp("nats")))
    try:
        asyncio.run(server.start())
        yield server
    finally:
        server.stop()


@pytest.fixture
def config() -> QueueConfig:
    return QueueConfig("test", secrets.token_hex(8), ack_wait_s=0.5, publish_timeout_s=0.3)


async def test_a_server_whose_clock_was_set_back_makes_no_delivery_stale(
    server: NatsServer, config: QueueConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream was made before the clock was set back, so its jobs seem older than the stream.

    nats-server reads its clock without a system call, so no library can move it: what the server
    says of the stream is moved instead."""
    real = Link.api

    async def api(link: Link, *arguments: Any) -> dict[str, Any]:
        answer = await real(link, *arguments)
        if "created" in answer:
            answer["created"] = answer["created"].replace("20", "21", 1)  # 100 years later
        return answer

    monkeypatch.setattr(Link, "api", api)
    producer = await JetStreamProducer.connect(server.url, config, wait_s=HANG_S)
    consumer = await JetStreamConsumer.connect(server.url, config, wait_s=HANG_S)
    receipts = [await producer.publish(name, b"", 10) for name in ("done", "poison", "held")]
    jobs = [job for _ in range(3) for job in await consumer.pull(1, 1, 5)]
    await jobs[0].ack()
    await jobs[1].term("poison")
    for _ in range(8):  # 1.6 times ack_wait
        await asyncio.sleep(config.ack_wait_s / 5)
        await jobs[2].in_progress()
    assert await consumer.pull(1, 1, 0.1) == []
    await producer.hand_back(jobs[2].ack_subject, receipts[2])
    [again] = await consumer.pull(1, 1, 5)
    assert (again.job_id, again.number) == ("held", 2)
    await again.ack()
    await until(lambda: producer.depth().depth_jobs == 0)
    await asyncio.gather(producer.close(), consumer.close())
