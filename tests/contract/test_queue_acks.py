"""Acks are told at once and confirmed later, many by one answer. `ack_wait` is far away: a job that
is gone was acked, not delivered again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest

from pullfill.queue import jetstream
from pullfill.queue.contract import Delivery, QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.nats_connection import NoResponders
from tests.support.nats import NatsServer, until

Pair = tuple[JetStreamProducer, JetStreamConsumer]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def pair(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(jetstream, "Acks", partial(jetstream.Acks, confirm_s=0.05))
    config = QueueConfig("test", secrets.token_hex(8), ack_wait_s=60.0, publish_timeout_s=5.0)
    producer = await JetStreamProducer.connect(server.url, config, wait_s=15)
    consumer = await JetStreamConsumer.connect(server.url, config, wait_s=15)
    yield producer, consumer
    server.resume_if_paused()
    await asyncio.gather(producer.close(), consumer.close())


async def pulled(pair: Pair, count: int) -> list[Delivery]:
    producer, consumer = pair
    await asyncio.gather(*(producer.publish(f"j{i}", b"", 10) for i in range(count)))
    return [job for _ in range(count) if (job := await consumer.pull(5))]


async def all_gone(pair: Pair) -> None:
    producer, consumer = pair
    await until(lambda: not consumer.acks.unconfirmed)
    producer.look_again()
    await until(lambda: producer.available and producer.depth().depth_jobs == 0)


def questions(
    consumer: JetStreamConsumer, monkeypatch: pytest.MonkeyPatch, *fails: Exception
) -> list[str]:
    """Acks that an answer was asked for, from now on. fails: what the first ones raise."""
    asked, real, errors = list[str](), consumer.connection.request, list(fails)

    async def request(subject: str, payload: bytes, *rest: Any) -> Any:
        if payload == b"+ACK":
            asked.append(subject)
            if errors:
                raise errors.pop(0)
        return await real(subject, payload, *rest)

    monkeypatch.setattr(consumer.connection, "request", request)
    return asked


async def test_many_acks_share_one_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = await pulled(pair, 40)
    asked = questions(pair[1], monkeypatch)
    for job in jobs:
        await job.ack()
    assert pair[1].acks.unconfirmed == 40
    await all_gone(pair)
    assert asked == [jobs[-1].ack_subject]


async def test_a_hung_server_keeps_nobody_waiting(server: NatsServer, pair: Pair) -> None:
    jobs = await pulled(pair, 3)
    server.pause()
    for job in jobs:
        await job.ack()
    server.resume()
    await all_gone(pair)


async def test_acks_that_no_leader_has_read_are_sent_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, real = await pulled(pair, 3), pair[1].connection.publish

    async def lost(*_: Any, **__: Any) -> None:
        """To a consumer without a leader."""

    asked = questions(pair[1], monkeypatch, NoResponders("no leader"))
    monkeypatch.setattr(pair[1].connection, "publish", lost)
    for job in jobs:
        await job.ack()
    monkeypatch.setattr(pair[1].connection, "publish", real)
    await all_gone(pair)
    assert len(asked) == 2


async def test_what_a_connection_took_with_it_is_forgotten(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job comes again, and its claim is refused."""
    consumer = pair[1]
    pair[1].acks._confirm_s = 60.0
    for job in await pulled(pair, 3):
        await job.ack()
    assert consumer.acks.unconfirmed == 3
    consumer.connection.reset("the test")
    await until(lambda: not consumer.acks.unconfirmed)


async def test_closing_waits_until_all_is_confirmed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair[1].acks._confirm_s = 60.0
    for job in await pulled(pair, 3):
        await job.ack()
    await pair[1].close()
    await all_gone(pair)


@pytest.mark.essential
async def test_an_old_delivery_does_not_ack_a_job_of_a_new_stream(
    server: NatsServer, pair: Pair
) -> None:
    producer, consumer = pair
    jobs = await pulled(pair, 3)
    await jobs[0].ack()
    server.kill()
    await until(lambda: not consumer.connection.up)
    await jobs[1].ack()
    await server.restart(empty=True)
    await until(lambda: producer.available and consumer.connection.up)
    await producer.publish("new", b"", 10)
    job = await consumer.pull(5)
    await jobs[2].ack()
    assert (job.job_id, job.number) == ("new", 1)
    await job.in_progress()
    await until(lambda: not consumer.acks.unconfirmed)
    producer.look_again()
    assert producer.depth().depth_jobs == 1
    await job.ack()
