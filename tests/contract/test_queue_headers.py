"""Headers that nats-py cannot decode. NATS passes them on, and the client then reads no more."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit

from pullfill.errors import QueueUnavailable
from pullfill.queue.contract import DeadLetter, QueueConfig
from pullfill.queue.jetstream import JetStreamProducer
from pullfill.queue.streams import Names
from tests.contract.test_queue_jetstream import Pair, config, pair, retried, server
from tests.support.nats import NatsServer, dead_letters, until

__all__ = ["config", "pair", "server"]


async def publish(server: NatsServer, subject: str, headers: bytes) -> None:
    """Send one message with these header bytes over a connection of our own."""
    url = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    await reader.readline()
    writer.write(b'CONNECT {"verbose": false, "headers": true}\r\n')
    writer.write(b"HPUB %b %d %d\r\n" % (subject.encode(), len(headers), len(headers)))
    writer.write(headers + b"\r\nPING\r\n")
    assert await asyncio.wait_for(reader.readline(), 10) == b"PONG\r\n"
    writer.close()
    await writer.wait_closed()


async def found(producer: JetStreamProducer, config: QueueConfig) -> list[DeadLetter]:
    with contextlib.suppress(QueueUnavailable):
        return await dead_letters(producer.connection, config)
    return []


async def test_a_job_whose_headers_cannot_be_read_becomes_a_dead_letter(
    server: NatsServer, config: QueueConfig, pair: Pair
) -> None:
    producer, consumer = pair
    await publish(server, Names(config.namespace, config.compat_hash).job(5), b"NATS/1.0")
    await producer.publish("good", b"2", 20)
    good = await retried(lambda: consumer.pull(5))
    assert good.job_id == "good"
    await good.ack()

    async def pull() -> None:
        while True:
            with contextlib.suppress(QueueUnavailable):
                assert await consumer.pull(1) is None

    pulling = asyncio.create_task(pull())
    async with asyncio.timeout(60):
        while not (letters := await found(producer, config)):  # noqa: ASYNC110 - asks a server
            await asyncio.sleep(0.1)
    assert not pulling.done()
    pulling.cancel()
    assert [letter.job_id for letter in letters] == ["seq-1"]


async def test_a_message_whose_headers_cannot_be_read_costs_a_connection(
    server: NatsServer, pair: Pair
) -> None:
    producer, consumer = pair
    for deaf in (producer.connection, consumer.connection):
        before = deaf.generation
        inbox = deaf.client.new_inbox()
        subscription = await deaf.client.subscribe(inbox)
        await deaf.flush()
        await publish(server, subscription.subject, b"NATS/1.0 \xff\xff\xff\r\n\r\n")
        await until(lambda: deaf.generation > before and deaf.up)  # noqa: B023
    await until(lambda: producer.available)
    await producer.publish("good", b"2", 20)
    good = await retried(lambda: consumer.pull(5))
    await good.ack()
