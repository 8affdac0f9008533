"""The least rights of docs/operations.md are enough, and reach no other namespace: real servers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill.config import ClusterRef
from pullfill.deploy import doctor
from pullfill.errors import ConfigError
from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.registry import keys
from pullfill.registry.client import EtcdClient
from pullfill.registry.watch import Put, watch_prefix
from tests.support.etcd import EtcdServer
from tests.support.nats import NatsServer, dead_letters
from tests.support.waiting import soon

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct-horse-battery-staple"
HANG_S = 20.0
QUEUE = QueueConfig("demo", "0123456789abcdef", publish_timeout_s=1.0, max_deliver=1, ack_wait_s=1)


def block_of(marker: str) -> str:
    """The code block of docs/operations.md that holds `marker`."""
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs" / "operations.md").read_text(), re.S)
    (found,) = [block for block in blocks if marker in block]
    return str(found)


# ------------------------------------------------------------------ NATS


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    """With the `authorization` of the document; its passwords are ours."""
    text = block_of("publish: [").replace("…", PASSWORD)
    with NatsServer(tmp_path / "nats", extra=text) as server:
        yield server


async def test_jobs_dead_letters_and_surveys_with_the_rights_of_one_namespace(
    nats: NatsServer,
) -> None:
    options = {"user": "demo", "password": PASSWORD}
    producer = await JetStreamProducer.connect(
        nats.url, QUEUE, wait_s=HANG_S, connect_options=options
    )
    consumer = await JetStreamConsumer.connect(
        nats.url, QUEUE, wait_s=HANG_S, connect_options=options
    )
    try:
        await producer.publish("acked", b"body", 7)
        delivery = await consumer.pull(HANG_S)
        await delivery.in_progress()
        await delivery.ack()
        receipt = await producer.publish("cancelled", b"body", 7)
        assert await producer.cancel(receipt)
        await producer.publish("poison", b"body", 7)
        delivery = await consumer.pull(HANG_S)
        await delivery.term("poison")
        await producer.publish("used up", b"body", 7)
        await consumer.pull(HANG_S)  # and never settled: an advisory moves it

        async def dead() -> set[str]:
            return {letter.job_id for letter in await dead_letters(producer.connection, QUEUE)}

        await soon(dead, good={"poison", "used up"}.__eq__)
        login = nats.url.replace("://", f"://demo:{PASSWORD}@")
        assert [*(await doctor.ask_nats(ClusterRef("demo", "", login))).values()] == [2]
    finally:
        await asyncio.gather(producer.close(), consumer.close())
    assert "Violation" not in nats.log.read_text()


# ------------------------------------------------------------------ etcd


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """Set up by the commands of the document, with root's and the workers' password in place."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        for line in block_of("role grant-permission").strip().splitlines():
            words = line.replace("…", PASSWORD).split()
            assert words[0] == "etcdctl"
            server.ctl(*words[1:])
        yield server


@pytest.mark.essential
async def test_a_worker_lives_on_the_rights_of_its_namespace(etcd: EtcdServer) -> None:
    url = etcd.url.replace("://", f"://demo:{PASSWORD}@")
    client = await EtcdClient.connect(url, wait_s=HANG_S)
    prefix = keys.namespace_prefix("demo")
    seen: list[bytes] = []

    async def follow() -> None:
        async for event in watch_prefix(client, prefix, idle_s=0.5):
            if isinstance(event, Put):
                seen.append(event.value)

    following = asyncio.create_task(follow())
    try:
        await client.ping(2.0)
        lease, _, _ = await client.grant_lease(5)
        worker = keys.worker("demo", "decode", "decode-1")
        assert await client.put_all([(worker, b"one")], lease)
        assert await client.put_if(keys.config("demo", "router"), b"two", mod_revision=0)
        assert (await client.keep_alive(lease)).ttl > 0
        await soon(lambda: seen == [b"one", b"two"], HANG_S)
        await client.revoke_lease(lease)
        assert await client.get(worker) is None
        await client.delete(keys.config("demo", "router"))
        for refused in (
            client.put(keys.config("other", "router"), b"mine"),
            client.get_prefix(keys.namespace_prefix("other")),
            client.get_prefix("/pullfill/"),
        ):
            with pytest.raises(ConfigError, match="permission"):
                await refused
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await client.close()
