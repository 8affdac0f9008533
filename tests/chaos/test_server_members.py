"""NATS and etcd as clusters of three: the leader of each is killed."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

import pytest

from pullfill.errors import PullfillError
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.streams import Names
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.wire import QueueSettings
from tests.support.etcd import EtcdCluster
from tests.support.nats import NatsCluster, until
from tests.support.workers import eventually, member

pytestmark = pytest.mark.slow
HANG_S = 30.0
AGAIN_S = 15.0
"""Remote prefills go on within this time of the death of a leader. NATS takes 4 to 9 s to elect the
next leader of a stream. Until then prompts are prefilled locally."""


class Traffic:
    """Publishes a job every 10 ms, and acks the jobs that it pulls.

    failed: publishes that failed. A decode worker would prefill these prompts locally.
    pulled: when each job arrived."""

    def __init__(self, producer: JetStreamProducer, consumer: JetStreamConsumer) -> None:
        self.producer, self.consumer = producer, consumer
        self.failed = 0
        self.slowest_s = 0.0
        self.pulled: dict[str, float] = {}
        self.publishing = True
        self._tasks = [asyncio.create_task(self._publish()), asyncio.create_task(self._pull())]

    async def _publish(self) -> None:
        number = 0
        while self.publishing:
            number += 1
            began = time.monotonic()
            try:
                await self.producer.publish(f"j{number}", b"body", 1)
            except PullfillError:
                self.failed += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            await asyncio.sleep(0.01)

    async def _pull(self) -> None:
        while True:
            try:
                job = await self.consumer.pull(1.0)
            except PullfillError:
                await asyncio.sleep(0.05)
                continue
            if job is not None:
                self.pulled.setdefault(job.job_id, time.monotonic())
                await job.ack()

    async def more(self, jobs: int, within_s: float = HANG_S) -> None:
        """Wait until this many more jobs were pulled."""
        enough = len(self.pulled) + jobs
        try:
            await until(lambda: len(self.pulled) >= enough, within_s)
        except TimeoutError:
            raise AssertionError(
                f"{enough - len(self.pulled)} of {jobs} jobs did not come within {within_s:g} s. "
                f"{self.failed} publishes failed, the slowest took {self.slowest_s:.1f} s. "
                f"Producer: {self.producer.health.status()}. "
                f"Consumer: {self.consumer.health.status()}. "
                f"Ended: {[task for task in self._tasks if task.done()]}"
            ) from None

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.mark.essential
async def test_jobs_flow_again_after_the_stream_leader_is_killed(tmp_path: Path) -> None:
    cluster = NatsCluster(tmp_path)
    config = QueueConfig("test", secrets.token_hex(8))
    settings = QueueSettings(ack_wait_s=1.0)  # three replicas are an operator's, and stay
    stream = Names(config.namespace, config.compat_hash).stream
    try:
        await cluster.start()
        first = await JetStreamProducer.connect(
            cluster.url, config, settings=QueueSettings(replicas=3), wait_s=HANG_S
        )
        await first.close()
        leader = await cluster.leader(stream)
        url = ",".join([leader.url, *(m.url for m in cluster.members if m is not leader)])
        connected: dict[str, Any] = {"dont_randomize": True}  # connected to the leader
        producer = await JetStreamProducer.connect(
            url, config, settings=settings, wait_s=HANG_S, connect_options=connected
        )
        consumer = await JetStreamConsumer.connect(
            url, config, settings=settings, wait_s=HANG_S, connect_options=connected
        )
        before = await cluster.info(stream)
        assert before["config"]["num_replicas"] == 3
        identity = producer.streams.stream_id
        traffic = Traffic(producer, consumer)
        await traffic.more(20)
        leader.kill()
        killed, flow = time.monotonic(), len(traffic.pulled)
        await traffic.more(20)
        assert sorted(traffic.pulled.values())[flow + 19] < killed + AGAIN_S
        await cluster.info(stream)  # it has a leader again
        await until(
            lambda: producer.streams.stream_id == consumer.streams.stream_id == identity, HANG_S
        )
        await traffic.more(20)
        traffic.publishing = False  # what was on its way to a dead connection is pulled again
        await until(lambda: producer.depth().depth_jobs == 0 and producer.available, HANG_S)
        await traffic.stop()
        assert traffic.slowest_s < 10 * config.publish_timeout_s, "a publish never hangs"
        after = await producer.connection.api(f"STREAM.INFO.{stream}")
        assert after["config"] == before["config"]
        await asyncio.gather(producer.close(), consumer.close())
    finally:
        cluster.stop()


@pytest.mark.essential
async def test_nobody_loses_its_lease_when_the_etcd_leader_is_killed(tmp_path: Path) -> None:
    made: list[str] = []
    with EtcdCluster(tmp_path) as cluster:
        client = await EtcdClient.connect(cluster.url, wait_s=HANG_S)
        follower = await Settings(client, "ns", QueueSettings).start()
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
        assert worker.lease
        assert len(made) == 1
        assert not worker.revoked.is_set()
        await worker.leave()
        await follower.close()
        await client.close()
