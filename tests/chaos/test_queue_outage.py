"""NATS is killed under load: a server that has its store again, and the leader of a cluster."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.streams import PUBLISH_TIMEOUT_S, Names
from pullfill.wire import QueueSettings
from tests.support.nats import NatsCluster, NatsServer, dead_letters
from tests.support.queue_ends import connected
from tests.support.waiting import patience, soon

pytestmark = pytest.mark.slow
HANG_S = 30.0
AGAIN_S = 15.0
"""Remote prefills go on within this time of the death of a leader. NATS takes 4 to 9 s to elect the
next leader of a stream. Until then prompts are prefilled locally."""


class Traffic:
    """Publishes a job every 10 ms, and acks the jobs that each consumer pulls, whatever happens.

    stored, refused: the jobs whose publish succeeded, or failed: a decode worker would prefill
    these prompts locally. done: how often each job was acked. pulled_at: when."""

    def __init__(self, producer: JetStreamProducer, *consumers: JetStreamConsumer) -> None:
        self.producer, self.consumers = producer, consumers
        self.stored, self.refused = set[str](), set[str]()
        self.done, self.pulled_at = Counter[str](), list[float]()
        self.slowest_s = 0.0
        self._stop = False
        self._tasks = [asyncio.create_task(self._publish())]
        self._tasks += [asyncio.create_task(self._work(each)) for each in consumers]

    async def _publish(self) -> None:
        number = 0
        while not self._stop:
            number += 1
            began = time.monotonic()
            try:
                await self.producer.publish(f"job-{number}", secrets.token_bytes(2000), 100)
                self.stored.add(f"job-{number}")
            except QueueUnavailable:
                self.refused.add(f"job-{number}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            await asyncio.sleep(0.01)

    async def _work(self, consumer: JetStreamConsumer) -> None:
        while not self._stop or self.producer.depth().depth_jobs or not self.producer.available:
            try:
                if job := await consumer.pull(0.5):
                    await job.ack()
                    self.done[job.job_id] += 1
                    self.pulled_at.append(time.monotonic())
            except QueueUnavailable:
                await asyncio.sleep(0.02)

    async def more(self, jobs: int) -> None:
        """Wait until this many more jobs were done."""
        enough = len(self.pulled_at) + jobs
        try:
            await soon(lambda: len(self.pulled_at) >= enough, HANG_S)
        except AssertionError:
            raise AssertionError(
                f"{enough - len(self.pulled_at)} of {jobs} jobs did not come. "
                f"{len(self.refused)} publishes failed. Producer: {self.producer.health.status()}. "
                f"Consumers: {[each.health.status() for each in self.consumers]}"
            ) from None

    async def end(self) -> None:
        """Publish no more, and wait until every job is done."""
        self._stop = True
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*self._tasks)
        await soon(lambda: self.producer.available and not self.producer.depth().depth_jobs)


@pytest.mark.essential
async def test_no_stored_job_is_lost_over_three_kills(tmp_path: Path) -> None:
    names = Names("chaos", secrets.token_hex(8))
    settings = QueueSettings(ack_wait_s=1.0, max_deliver=20, publish_timeout_s=0.3)
    how: dict[str, Any] = {"settings": settings, "wait_s": HANG_S}
    with NatsServer(tmp_path) as server:
        producer = await connected(JetStreamProducer, server.url, names, **how)
        workers = [await connected(JetStreamConsumer, server.url, names, **how) for _ in range(2)]
        traffic = Traffic(producer, *workers)
        for _ in range(3):
            await traffic.more(50)
            await asyncio.to_thread(server.restart)
        await traffic.more(50)
        await traffic.end()
        assert await dead_letters(producer.connection, names) == []
        await asyncio.gather(producer.close(), *(worker.close() for worker in workers))
    done = set(traffic.done)
    assert traffic.stored <= done, traffic.stored - done
    assert done <= traffic.stored | traffic.refused
    assert traffic.refused, "the outages were noticed"


@pytest.mark.essential
async def test_jobs_flow_again_after_the_stream_leader_is_killed(tmp_path: Path) -> None:
    names = Names("test", secrets.token_hex(8))
    settings = QueueSettings(ack_wait_s=1.0)  # three replicas are an operator's, and stay
    stream, replicas = names.stream, QueueSettings(replicas=3)
    with NatsCluster(tmp_path) as cluster:
        first = await connected(
            JetStreamProducer, cluster.url, names, settings=replicas, wait_s=HANG_S
        )
        leads = (await cluster.info(first.connection, stream))["cluster"]["leader"]
        await first.close()
        leader = cluster.members[int(leads.removeprefix("n"))]
        url = ",".join([leader.url, *(m.url for m in cluster.members if m is not leader)])
        how: dict[str, Any] = {"settings": settings, "wait_s": HANG_S}
        how["connect_options"] = {"dont_randomize": True}  # connected to the leader
        producer = await connected(JetStreamProducer, url, names, **how)
        consumer = await connected(JetStreamConsumer, url, names, **how)
        before = await cluster.info(producer.connection, stream)
        assert before["config"]["num_replicas"] == 3
        identity = producer.stream_id
        traffic = Traffic(producer, consumer)
        await traffic.more(20)
        leader.kill()
        killed, flow = time.monotonic(), len(traffic.pulled_at)
        await traffic.more(20)
        assert traffic.pulled_at[flow + 19] < killed + patience(AGAIN_S)
        await cluster.info(producer.connection, stream)  # it has a leader again
        await soon(lambda: producer.stream_id == consumer.stream_id == identity, HANG_S)
        await traffic.more(20)
        await traffic.end()  # what was on its way to a dead connection is pulled again
        assert traffic.slowest_s < 10 * PUBLISH_TIMEOUT_S, "a publish never hangs"
        config = (await cluster.info(producer.connection, stream))["config"]
        assert config == before["config"]
        await asyncio.gather(producer.close(), consumer.close())
