"""NATS and etcd as clusters of three: the leader of each is killed."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import operate
from pullfill.errors import PullfillError
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.streams import Names
from pullfill.registry.client import EtcdClient
from pullfill.registry.live_settings import Settings
from pullfill.wire import QueueSettings
from tests.integration.test_mock_engine import MOCK, ask
from tests.support.cluster import Cluster
from tests.support.cluster import until as wait
from tests.support.etcd import EtcdCluster
from tests.support.nats import NatsCluster, until
from tests.support.prompts import random_prompt
from tests.support.workers import eventually, member

pytestmark = pytest.mark.slow
HANG_S = 30.0
AGAIN_S = 15.0
"""Remote prefills go on within this time of the death of a leader. NATS takes 4 to 9 s to elect the
next leader of a stream. Until then prompts are prefilled locally."""


# ------------------------------------------------------------------ the queue and the registry


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


@pytest.mark.parametrize(
    "near",
    [
        pytest.param(True, id="connected to it"),
        pytest.param(False, id="connected anywhere", marks=pytest.mark.long),
    ],
)
@pytest.mark.essential
async def test_jobs_flow_again_after_the_stream_leader_is_killed(
    tmp_path: Path, near: bool
) -> None:
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
        connected: dict[str, Any] = {"dont_randomize": near}
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


# ------------------------------------------------------------------ whole workers


@dataclass
class Trio(Cluster):
    """A cluster on three NATS servers and three etcd members."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.etcds = EtcdCluster(self.directory / "etcds")
        self.natses = NatsCluster(self.directory / "natses")
        self.etcd, self.nats = self.etcds, self.natses  # type: ignore[assignment]

    @property
    def stream(self) -> str:
        """Name of the one job stream."""

        async def names() -> list[str]:
            async with self.natses.client() as client:
                found = (await self.natses.api(client, "STREAM.NAMES")).get("streams") or ()
                return [name for name in found if not name.endswith("-dead")]

        # A member hears of a new stream a little after its workers were told that it is there.
        (name,) = wait(lambda: asyncio.run(names()), HANG_S, "the member knows the stream")
        return str(name)

    def edit_stream(self, **fields: Any) -> dict[str, Any]:
        """As `nats stream edit` does. The configuration after it."""

        async def edit() -> dict[str, Any]:
            name = self_stream
            config = (await self.natses.info(name))["config"]
            async with self.natses.client() as client:
                answer = await self.natses.api(client, f"STREAM.UPDATE.{name}", config | fields)
            return dict(answer["config"])

        self_stream = self.stream
        return asyncio.run(edit())


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[Trio]:
    cluster = Trio(tmp_path_factory.mktemp("trio"), model_path, lease_ttl_s=5)
    try:
        cluster.start_servers()
        ref = ClusterRef(cluster.namespace, cluster.etcds.url, cluster.natses.url)
        assert operate.config_set(ref, "queue.replicas", "3") == 0
        for role in ("decode", "decode", "prefill", "prefill"):
            cluster.launch(role, *MOCK)
        cluster.launch("frontend")
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_remote")
        yield cluster
    finally:
        cluster.stop()


class Requests:
    """Clients, each of which sends one request after the other until `stop`.

    done: when each request was sent, and whether its prefill was remote."""

    def __init__(self, cluster: Cluster, clients: int = 3) -> None:
        self.done: list[tuple[float, bool]] = []
        self.failed: list[str] = []
        self._cluster, self._ended = cluster, threading.Event()
        cluster.client()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        seed = 1000 * number
        while not self._ended.is_set():
            seed, sent = seed + 1, time.monotonic()
            try:
                _, told = ask(self._cluster, random_prompt(200, seed=seed), 2)
            except (openai.OpenAIError, OSError, AssertionError) as exc:
                self.failed.append(str(exc))
                continue
            self.done.append((sent, told["path"] == "remote" and told["fallback"] is None))

    def remote_since(self, when: float) -> int:
        return sum(remote and sent > when for sent, remote in self.done)

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.parametrize("server", ["nats", "etcd"])
def test_no_request_fails_when_a_leader_is_killed(trio: Trio, server: str) -> None:
    mine = trio.edit_stream(description="mine", max_msgs=4321)
    assert (mine["num_replicas"], mine["max_msgs"]) == (3, 4321)
    load = Requests(trio)
    try:
        wait(lambda: load.remote_since(0) > 10, HANG_S, "load runs")
        leader: Any = (
            asyncio.run(trio.natses.leader(trio.stream))
            if server == "nats"
            else trio.etcds.leader()
        )
        leader.kill()
        killed = time.monotonic()
        wait(lambda: load.remote_since(killed) > 5, HANG_S, "remote prefills again")
        assert time.monotonic() < killed + AGAIN_S
        asyncio.run(trio.natses.info(trio.stream))  # it has a leader again
        elected = time.monotonic()
        wait(lambda: load.remote_since(elected) > 20, HANG_S, "remote prefills go on")
    finally:
        load.stop()
    assert load.failed == []
    if server == "nats":
        asyncio.run(leader.start())
    else:
        leader.start()
    assert len(trio.incarnations()) == 4
    now = asyncio.run(trio.natses.info(trio.stream))["config"]
    assert now == mine, "nobody reverted an operator's setting"
    trio.assert_clean()
