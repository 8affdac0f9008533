"""The streams themselves: which one a delivery is from, and whose settings they have."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue.contract import QueueConfig, Urgency
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.nats_connection import NatsConnection
from pullfill.queue.streams import Names, consumer_of
from pullfill.wire import QueueSettings
from tests.support.nats import NatsServer, until

HANG_S = 15.0
CONSUMER = consumer_of(Urgency.NORMAL)


@pytest.fixture
def config() -> QueueConfig:
    return QueueConfig("test", secrets.token_hex(8), ack_wait_s=0.5, publish_timeout_s=5.0)


# ------------------------------------------------------------------ whose settings

Configs = tuple[dict[str, Any], dict[str, Any]]


async def configs(link: NatsConnection, config: QueueConfig) -> Configs:
    """What the server has for the job stream and the consumer."""
    stream = Names(config.namespace, config.compat_hash).stream
    jobs = await link.api(f"STREAM.INFO.{stream}")
    consumer = await link.api(f"CONSUMER.INFO.{stream}.{CONSUMER}")
    return jobs["config"], consumer["config"]


async def both(
    nats: NatsServer, config: QueueConfig, settings: QueueSettings
) -> tuple[JetStreamProducer, JetStreamConsumer]:
    return (
        await JetStreamProducer.connect(nats.url, config, settings=settings, wait_s=HANG_S),
        await JetStreamConsumer.connect(nats.url, config, settings=settings, wait_s=HANG_S),
    )


@pytest.mark.essential
async def test_what_an_operator_changed_outlives_every_start_and_reconnect(
    nats: NatsServer, config: QueueConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await both(nats, config, QueueSettings())
    link, names = first[1].connection, Names(config.namespace, config.compat_hash)
    jobs, consumer = await configs(link, config)
    assert (jobs["max_msgs"], consumer["max_deliver"]) == (config.max_jobs, config.max_deliver)
    theirs = {"max_msgs": 77, "max_bytes": 1 << 20, "max_age": 7 * 10**9, "description": "mine",
              "duplicate_window": 5 * 10**9, "metadata": {"team": "serving"}}  # fmt: skip
    await link.api(f"STREAM.UPDATE.{names.stream}", jobs | theirs)
    await link.api(
        f"CONSUMER.CREATE.{names.stream}.{CONSUMER}.{names.jobs_of(Urgency.NORMAL)}",
        {"stream_name": names.stream, "config": consumer | {"ack_wait": 9 * 10**9,
         "max_deliver": 9, "max_ack_pending": 5, "description": "mine"}},
    )  # fmt: skip
    changed = await configs(link, config)
    assert changed[0]["metadata"]["team"] == "serving"
    second = await both(nats, config, QueueSettings(max_jobs=5))
    first[1].connection.reset("the test")
    await until(lambda: first[1].connection.generation == 2 and first[1].connection.up)
    now = await configs(first[1].connection, config)
    assert now == (changed[0] | {"max_msgs": 5}, changed[1]), "only what queue.* sets"
    for worker in (first[1], second[1]):
        assert (worker.ack_wait_s, worker.max_deliver) == (9.0, 9), "heartbeats follow the server"
    await asyncio.gather(*(worker.close() for worker in (*first, *second)))


@pytest.mark.essential
async def test_settings_act_on_running_workers_and_a_refused_one_harms_nobody(
    nats: NatsServer, config: QueueConfig, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = await both(nats, config, QueueSettings(max_deliver=3))
    before = await configs(consumer.connection, config)
    assert (before[1]["max_deliver"], consumer.max_deliver) == (3, 3)
    new = QueueSettings(
        replicas=3, max_bytes=1 << 20, max_jobs=9, ack_wait_s=7.0, max_deliver=4,
        publish_timeout_s=9.0,
    )  # fmt: skip
    for worker in (producer, consumer):  # each tells the other's server the same
        worker.streams.configure(new)
        assert worker.streams.publish_timeout_s == 9.0
    await until(lambda: consumer.ack_wait_s == 7.0)
    assert "NATS refuses" in caplog.text, "one server holds no three replicas"
    for worker in (producer, consumer):
        worker.streams.configure(QueueSettings(max_bytes=1 << 20, max_jobs=9))
    await until(lambda: not producer.streams.busy and not consumer.streams.busy)
    assert producer.streams.publish_timeout_s == config.publish_timeout_s
    after = await configs(consumer.connection, config)
    assert after[0] == before[0] | {"max_bytes": 1 << 20, "max_msgs": 9}
    assert after[1] == before[1] | {"ack_wait": 7 * 10**9, "max_deliver": 4}
    assert (await producer.publish("still works", b"", 1)).seq == 1
    await asyncio.gather(producer.close(), consumer.close())


async def test_workers_that_start_at_the_same_time_agree(
    nats: NatsServer, config: QueueConfig
) -> None:
    settings = QueueSettings(max_jobs=9, ack_wait_s=7.0)
    pairs = await asyncio.gather(*(both(nats, config, settings) for _ in range(4)))
    jobs, consumer = await configs(pairs[0][1].connection, config)
    assert (jobs["max_msgs"], consumer["ack_wait"]) == (9, 7 * 10**9)
    assert len({worker.streams.stream_id for pair in pairs for worker in pair}) == 1
    await asyncio.gather(*(worker.close() for pair in pairs for worker in pair))


async def test_a_worker_that_drains_takes_no_job_with_it(
    nats: NatsServer, config: QueueConfig
) -> None:
    """Its pull is still open. nats-py buffers its commands, but not its PING. So the server answers
    a PING before it learns that the pull's inbox is not read any more."""
    producer, leaving = await both(nats, config, QueueSettings())
    other = await JetStreamConsumer.connect(nats.url, config, wait_s=HANG_S)
    transport: Any = leaving.connection.client._transport
    write, loop = transport.writelines, asyncio.get_running_loop()
    transport.writelines = lambda lines: loop.call_later(0.05, write, list(lines))
    pulling = asyncio.create_task(leaving.pull(5.0))
    consumer = f"CONSUMER.INFO.{Names(config.namespace, config.compat_hash).stream}.{CONSUMER}"
    async with asyncio.timeout(HANG_S):
        while (await producer.connection.api(consumer))["num_waiting"] == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await leaving.drain()
    assert await pulling is None
    await producer.publish("job", b"", 10)
    job = await other.pull(5.0)
    assert job.number == 1, "the first delivery was lost"
    await job.ack()
    await asyncio.gather(producer.close(), leaving.close(), other.close())


async def test_a_server_with_too_little_room_is_told_so(tmp_path: Path) -> None:
    store = f'store_dir: "{tmp_path / "store"}", max_file_store: 64MB'
    server = NatsServer(tmp_path, extra=f"jetstream {{ {store} }}")  # dead letters reserve 256 MiB
    try:
        await server.start()
        with pytest.raises(QueueUnavailable, match=r"raise jetstream\.max_file_store") as caught:
            await JetStreamProducer.connect(server.url, QueueConfig("test", "room"), wait_s=1.0)
    finally:
        server.stop()
    assert "10047" in str(caught.value)
    assert "nats-server -js" not in str(caught.value)
