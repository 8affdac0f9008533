"""NATS and etcd as clusters of three: the leader of each is killed."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path

import pytest

from pullfill.errors import PullfillError
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.names import Names
from pullfill.registry.client import EtcdClient
from pullfill.registry.settings import Settings
from pullfill.wire import QueueSettings
from tests.support.etcd import EtcdCluster
from tests.support.nats import NatsCluster, until
from tests.support.workers import eventually, member

pytestmark = pytest.mark.slow
HANG_S = 30.0


class Traffic:
    """Publishes a job every 10 ms and acks what it pulls."""

    def __init__(self, producer: JetStreamProducer, consumer: JetStreamConsumer) -> None:
        self.producer, self.consumer = producer, consumer
        self.failed = 0
        self.slowest_s = 0.0
        self.pulled: dict[str, float] = {}
        self._tasks = [asyncio.create_task(self._publish()), asyncio.create_task(self._pull())]

    async def _publish(self) -> None:
        number = 0
        while True:
            number += 1
            began = time.monotonic()
            try:
                await self.producer.publish(f"j{number}", b"", 1)
            except PullfillError:
                self.failed += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            await asyncio.sleep(0.01)

    async def _pull(self) -> None:
        while True:
            try:
                jobs = await self.consumer.pull(1, 1, 1.0)
            except PullfillError:
                await asyncio.sleep(0.05)
                continue
            for job in jobs:
                self.pulled.setdefault(job.job_id, time.monotonic())
                await job.ack()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_jobs_flow_again_after_the_stream_leader_is_killed(tmp_path: Path) -> None:
    cluster = NatsCluster(tmp_path)
    config = QueueConfig("test", secrets.token_hex(8))
    settings = QueueSettings(replicas=3)
    stream = Names(config.namespace, config.compat_hash).stream
    try:
        await cluster.start()
        producer = await JetStreamProducer.connect(
            cluster.url, config, settings=settings, wait_s=HANG_S
        )
        consumer = await JetStreamConsumer.connect(
            cluster.url, config, settings=settings, wait_s=HANG_S
        )
        before = await cluster.info(stream)
        assert before["config"]["num_replicas"] == 3
        identity = producer.streams.stream_id
        traffic = Traffic(producer, consumer)
        await until(lambda: len(traffic.pulled) > 20)
        (await cluster.leader(stream)).kill()
        killed = time.monotonic()
        await until(lambda: traffic.failed > 0, HANG_S)
        await until(lambda: max(traffic.pulled.values()) > killed + 0.5, HANG_S)
        await traffic.stop()
        await until(lambda: producer.depth().depth_jobs == 0 and producer.available, HANG_S)
        assert producer.streams.stream_id == consumer.stream_id == identity
        assert traffic.slowest_s < 10 * config.publish_timeout_s, "a publish never hangs"
        after = await producer._link.api(f"STREAM.INFO.{stream}")
        assert after["config"] == before["config"]
        await asyncio.gather(producer.close(), consumer.close())
    finally:
        cluster.stop()


async def test_nobody_loses_its_lease_when_the_etcd_leader_is_killed(tmp_path: Path) -> None:
    made: list[str] = []
    with EtcdCluster(tmp_path) as cluster:
        client = await EtcdClient.connect(cluster.url, wait_s=HANG_S)
        follower = await Settings.started(client, "ns", QueueSettings)
        worker = member(client, "ns", "decode-1", ttl_s=5, made=made)
        await worker.join()
        leader = await asyncio.to_thread(cluster.leader)
        await asyncio.to_thread(leader.kill)
        began = time.monotonic()
        while True:
            try:
                await follower.set("max_jobs", "7")
                break
            except PullfillError:
                assert time.monotonic() < began + HANG_S
        await eventually(lambda: follower.current.max_jobs == 7, HANG_S)
        await asyncio.sleep(6.0)  # a TTL and more
        assert worker.registered
        assert len(made) == 1
        assert not worker.revoked.is_set()
        await worker.leave()
        await follower.close()
        await client.close()
