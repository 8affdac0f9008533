"""Acks are told at once and confirmed later, many by one answer, over whatever connection there is.
`ack_wait` is far away: a job that is gone was acked, not delivered again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue import acks, streams
from pullfill.queue.contract import Delivery, QueueConfig
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from tests.support.nats import NatsServer, until

Pair = tuple[JetStreamProducer, JetStreamConsumer]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with NatsServer(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def pair(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(acks, "CONFIRM_S", 0.05)
    monkeypatch.setattr(streams, "RECONNECT_S", 15.0)  # JetStream is there, however late it answers
    config = QueueConfig("test", secrets.token_hex(8), ack_wait_s=60.0, publish_timeout_s=5.0)
    producer = await JetStreamProducer.connect(server.url, config, wait_s=15)
    consumer = await JetStreamConsumer.connect(server.url, config, wait_s=15)
    yield producer, consumer
    server.resume_if_paused()
    await asyncio.gather(producer.close(), consumer.close())


async def pulled(pair: Pair, count: int) -> list[Delivery]:
    producer, consumer = pair
    await asyncio.gather(*(producer.publish(f"j{i}", b"", 10) for i in range(count)))
    jobs = await consumer.pull(10**6, count, 5)
    while len(jobs) < count:
        jobs += await consumer.pull(10**6, count - len(jobs), 5)
    return jobs


async def all_gone(pair: Pair) -> None:
    producer, consumer = pair
    await until(lambda: not consumer.acks.unconfirmed)
    producer.look_again()
    await until(lambda: producer.available and producer.depth().depth_jobs == 0)


def questions(consumer: JetStreamConsumer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Acks that an answer was asked for, from now on."""
    asked, real = list[str](), consumer.connection.request

    async def request(subject: str, payload: bytes, *rest: Any) -> Any:
        if payload == b"+ACK":
            asked.append(subject)
        return await real(subject, payload, *rest)

    monkeypatch.setattr(consumer.connection, "request", request)
    return asked


def published(consumer: JetStreamConsumer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Subjects of what is sent without a question, from now on."""
    sent, real = list[str](), consumer.connection.publish

    async def publish(subject: str, *rest: Any, **more: Any) -> None:
        sent.append(subject)
        await real(subject, *rest, **more)

    monkeypatch.setattr(consumer.connection, "publish", publish)
    return sent


async def test_many_acks_share_one_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = await pulled(pair, 40)
    asked = questions(pair[1], monkeypatch)
    for job in jobs:
        await job.ack()
    assert pair[1].acks.unconfirmed == 40
    await all_gone(pair)
    assert asked == [jobs[-1].ack_subject]


@pytest.mark.parametrize("busy_s", [60.0, 0.0])
async def test_acks_go_out_with_the_next_pull_if_it_is_near(
    busy_s: float, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In front of it, as one write; else at once."""
    monkeypatch.setattr(acks, "CONFIRM_S", 60.0)
    monkeypatch.setattr(acks, "BUSY_S", busy_s)
    producer, consumer = pair
    jobs = await pulled(pair, 3)
    sent = published(consumer, monkeypatch)
    for job in jobs:
        await job.ack()
    assert len(sent) == (0 if busy_s else 3)
    assert await consumer.pull(1, 1, 0.05) == []
    assert sent[:3] == [job.ack_subject for job in jobs]
    assert "MSG.NEXT" in sent[3]
    await consumer.pull(1, 1, 0.05)
    assert len(sent) == 5, "once"
    producer.look_again()
    await until(lambda: producer.depth().depth_jobs == 0)


async def test_an_ack_that_waits_for_a_pull_does_not_wait_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acks, "CONFIRM_S", 60.0)
    monkeypatch.setattr(acks, "BUSY_S", 1.0)
    producer, consumer = pair
    jobs = await pulled(pair, 3)
    for _ in range(2):  # pulls come one after the other, however long those above took
        await consumer.acks.push()
    sent = published(consumer, monkeypatch)
    for job in jobs:
        await job.ack()
    assert sent == []
    producer.look_again()
    await until(lambda: producer.depth().depth_jobs == 0)


async def test_a_hung_server_keeps_nobody_waiting(server: NatsServer, pair: Pair) -> None:
    jobs = await pulled(pair, 3)
    server.pause()
    for job in jobs:
        await job.ack()
    server.resume()
    await all_gone(pair)


async def test_what_is_acked_without_a_connection_is_told_over_the_next(pair: Pair) -> None:
    jobs = await pulled(pair, 3)
    pair[1].connection.reset("the test")
    await until(lambda: not pair[1].connection.up)
    for job in jobs:
        await job.ack()
    await all_gone(pair)


async def test_what_a_connection_took_with_it_is_told_over_the_next(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = await pulled(pair, 3)

    async def lost(*_: Any, **__: Any) -> None:
        """Into a socket that nobody reads any more."""

    with monkeypatch.context() as patch:
        patch.setattr(pair[1].connection, "publish", lost)
        patch.setattr(acks, "CONFIRM_S", 2.0)  # not before the connection is lost
        for job in jobs:
            await job.ack()
        await pair[1].acks.push()
        pair[1].connection.reset("the test")
        await until(lambda: not pair[1].connection.up)
    assert pair[1].acks.unconfirmed == 3
    await all_gone(pair)


async def test_a_worker_without_room_settles_after_a_slow_reconnect(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pulls nothing. Until it knows the stream, it sends neither heartbeats nor acks."""
    jobs, streams = await pulled(pair, 3), pair[1].streams
    ensure, tries = streams.ensure, list[str]()

    async def slow() -> None:
        tries.append(streams.stream_id)
        if len(tries) <= 2:
            raise QueueUnavailable("JetStream does not answer")
        await ensure()

    monkeypatch.setattr(streams, "ensure", slow)
    pair[1].connection.reset("the test")
    await until(lambda: len(tries) >= 3)
    for job in jobs:
        await job.ack()
    await all_gone(pair)


async def test_closing_waits_until_all_is_confirmed(pair: Pair) -> None:
    jobs = await pulled(pair, 3)
    pair[1].connection.reset("the test")
    await until(lambda: not pair[1].connection.up)
    for job in jobs:
        await job.ack()
    await pair[1].close()
    await all_gone(pair)


async def test_closing_does_not_wait_for_ever(
    server: NatsServer, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acks, "CLOSE_S", 0.2)
    jobs = await pulled(pair, 3)
    server.pause()
    for job in jobs:
        await job.ack()
    async with asyncio.timeout(15):
        await pair[1].acks.close()
    assert pair[1].acks.unconfirmed == 3


@pytest.mark.essential
async def test_an_old_delivery_does_not_ack_a_job_of_a_new_stream(
    server: NatsServer, pair: Pair
) -> None:
    producer, consumer = pair
    jobs = await pulled(pair, 3)
    server.kill()
    await until(lambda: not consumer.connection.up)
    for job in jobs:
        await job.ack()
    await server.restart(empty=True)
    await until(lambda: producer.available and consumer.connection.up)
    await producer.publish("new", b"", 10)
    await until(lambda: not consumer.acks.unconfirmed)
    [job] = await consumer.pull(1, 1, 5)
    assert (job.job_id, job.number) == ("new", 1)
    await job.ack()


async def test_an_ack_that_gets_no_answer_is_left_to_itself(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a delivery that a killed server had not written down: the link stands, nobody says a
    word about this one."""
    consumer, asked = pair[1], list[str]()
    [job] = await pulled(pair, 1)

    async def request(subject: str, *_: Any) -> None:
        asked.append(subject)
        raise QueueUnavailable("no answer")

    monkeypatch.setattr(consumer.connection, "request", request)
    await job.ack()
    await until(lambda: not consumer.acks.unconfirmed)
    assert asked == [job.ack_subject] * acks.TRIES


async def test_what_is_open_is_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acks, "MAX_OPEN", 5)
    for job in await pulled(pair, 20):
        await job.ack()
    assert pair[1].acks.unconfirmed == 5
    await all_gone(pair)
