"""What only the JetStream queue can show: a server that restarts, forgets, hangs or was set up
otherwise. Every wait is bounded; the bounds are about hangs, not speed."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pullfill.errors import ConfigError, QueueFull, QueueUnavailable
from pullfill.queue.contract import Delivery, QueueConfig, Receipt
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.streams import Names
from tests.support.nats import NatsServer, dead_letters, until

HANG_S = 15.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[NatsServer]:
    server = NatsServer(tmp_path)
    await server.start()
    yield server
    server.stop()


@pytest.fixture
def config(request: pytest.FixtureRequest) -> QueueConfig:
    timeout_s = getattr(request, "param", 5.0)
    return QueueConfig("test", secrets.token_hex(8), ack_wait_s=1.0, publish_timeout_s=timeout_s)


@pytest.fixture
async def pair(
    server: NatsServer, config: QueueConfig
) -> AsyncIterator[tuple[JetStreamProducer, JetStreamConsumer]]:
    producer = await JetStreamProducer.connect(server.url, config, wait_s=HANG_S)
    consumer = await JetStreamConsumer.connect(server.url, config, wait_s=HANG_S)
    yield producer, consumer
    server.resume_if_paused()
    await asyncio.gather(producer.close(), consumer.close())


async def publish_when_available(producer: JetStreamProducer, job_id: str) -> Receipt:
    await until(lambda: producer.available)
    return await producer.publish(job_id, b"", 10)


async def retried(call: Callable[[], Awaitable[list[Delivery]]]) -> list[Delivery]:
    """A puller's loop: again after QueueUnavailable or nothing."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                if result := await call():
                    return result
            except QueueUnavailable:
                pass


Pair = tuple[JetStreamProducer, JetStreamConsumer]


async def test_jobs_survive_a_killed_server(server: NatsServer, pair: Pair) -> None:
    producer, consumer = pair
    await producer.publish("held", b"1", 10)
    await producer.publish("waiting", b"2", 20)
    held = await consumer.pull(5)
    await server.restart()
    await held.ack()
    names = set[str]()
    async with asyncio.timeout(HANG_S):
        # One that was killed before it wrote down that it had delivered `held` knows nothing of
        # that ack, and delivers the job again.
        while not (names and producer.available and producer.depth().depth_jobs == 0):
            with contextlib.suppress(QueueUnavailable):
                if job := await consumer.pull(0.2):
                    names.add(job.job_id)
                    await job.ack()
            producer.look_again()
    assert names in ({"waiting"}, {"held", "waiting"})


async def test_room_is_noticed_by_one_that_publishes_nothing_for_want_of_it(
    server: NatsServer, config: QueueConfig, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While all it knows is that the queue is full it does not use the queue; it must look all
    the same, at once and again, also when a thread says so that has no loop."""
    monkeypatch.setattr("pullfill.queue.jetstream.STEADY_REFRESH_S", 3600.0)
    producer, consumer = pair
    other = await JetStreamProducer.connect(server.url, config, wait_s=HANG_S)
    try:
        await producer.publish("job", b"", 10)
        job = await consumer.pull(5)
        await job.ack()
        assert producer.depth().depth_jobs == 1, "it was not told"
        await asyncio.to_thread(producer.look_again)
        await until(lambda: producer.depth().depth_jobs == 0)
        await other.publish("theirs", b"", 10)
        await until(lambda: producer.depth().depth_jobs == 1)
    finally:
        await other.close()


async def test_a_server_that_came_back_empty_is_set_up_again(
    server: NatsServer, pair: Pair
) -> None:
    producer, consumer = pair
    old = await producer.publish("lost", b"", 10)
    held = await consumer.pull(5)
    await server.restart(empty=True)
    new = await publish_when_available(producer, "new")
    assert new.seq == old.seq, "the case this is about: numbers start again"
    assert not await producer.cancel(old), "an old receipt must not remove a new job"
    await producer.nak(held.ack_subject, old)
    await held.ack()
    job = await retried(lambda: consumer.pull(1))
    assert job.job_id == "new", "an old delivery must not settle a new job"
    assert job.number == 1
    await job.ack()


@pytest.mark.parametrize("what", ["stream", "prefill-normal"])
@pytest.mark.essential
async def test_a_deleted_stream_or_consumer_is_made_again(
    pair: Pair, config: QueueConfig, what: str
) -> None:
    producer, consumer = pair
    names = Names(config.namespace, config.compat_hash)
    if what == "stream":
        await producer.connection.api(f"STREAM.DELETE.{names.stream}")
    else:
        await producer.connection.api(f"CONSUMER.DELETE.{names.stream}.{what}")
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                await publish_when_available(producer, "new")
                break
            except QueueUnavailable:
                await asyncio.sleep(0.05)
    job = await retried(lambda: consumer.pull(1))
    await job.ack()


@pytest.mark.parametrize("config", [0.3], indirect=True)
async def test_a_hung_server_costs_one_timeout_then_nothing(
    server: NatsServer, pair: Pair, config: QueueConfig
) -> None:
    producer, consumer = pair
    server.pause()
    started = time.monotonic()
    results = await asyncio.gather(
        *(producer.publish(f"j{i}", b"x" * 400_000, 10) for i in range(5)), return_exceptions=True
    )
    assert all(isinstance(result, QueueUnavailable) for result in results)
    assert time.monotonic() - started < 10 * config.publish_timeout_s
    assert not producer.available
    started = time.monotonic()
    for i in range(100):
        with pytest.raises(QueueUnavailable):
            await producer.publish(f"k{i}", b"", 10)
    took = time.monotonic() - started
    assert took < 10 * config.publish_timeout_s, "an open breaker waits for nobody"
    with pytest.raises(QueueUnavailable):
        await consumer.pull(0.1)
    server.resume()
    await publish_when_available(producer, "after")
    names = set[str]()
    while "after" not in names:  # the others, if they were stored, are refused at their claim
        if job := await retried(lambda: consumer.pull(1)):
            names.add(job.job_id)
            await job.ack()


async def test_a_body_above_max_payload_says_what_to_change(pair: Pair) -> None:
    producer, _ = pair
    assert producer.max_body < 8 << 20
    for size in ((8 << 20) + 1, 8 << 20):  # the headers count, too: NATS ended the connection
        with pytest.raises(QueueFull, match="max_payload") as caught:
            await producer.publish("huge", bytes(size), 10)
        assert not caught.value.retryable
    await producer.publish("large", bytes(producer.max_body), 10)
    assert producer.available


async def test_a_sweep_finds_what_an_advisory_was_missed_for(
    server: NatsServer, config: QueueConfig
) -> None:
    config = replace(config, max_deliver=1, ack_wait_s=2.0)
    producer = await JetStreamProducer.connect(server.url, config, wait_s=HANG_S)
    consumer = await JetStreamConsumer.connect(server.url, config, wait_s=HANG_S)
    await producer.publish("a", b"body", 10)
    await producer.publish("b", b"other", 10)
    await consumer.pull(5)
    for subscription in list(consumer.connection.client._subs.values()):
        if "ADVISORY" in subscription.subject:
            await subscription.unsubscribe()
    job = await consumer.pull(5)
    assert await consumer.letters.sweep() == 0, "nothing is swept while a job is in flight"
    await job.ack()
    async with asyncio.timeout(HANG_S):
        while not (swept := await consumer.letters.sweep()):
            assert await consumer.pull(0.1) is None
    assert swept == 1
    [letter] = await dead_letters(producer.connection, config)
    assert (letter.job_id, letter.body) == ("a", b"body")
    await asyncio.gather(producer.close(), consumer.close())


async def test_nobody_there_ends_with_advice(
    config: QueueConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"nats://user:secret@127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(QueueUnavailable, match="nats-server") as caught:
            await JetStreamProducer.connect(url, config, wait_s=0.5)
    (line,) = caplog.messages
    assert line.startswith("waiting for NATS at nats://127.0.0.1:")
    assert "secret" not in line + str(caught.value)


async def test_connect_waits_for_a_server_that_comes(tmp_path: Path, config: QueueConfig) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    server.kill()
    connect = asyncio.create_task(JetStreamConsumer.connect(server.url, config, wait_s=HANG_S))
    await asyncio.sleep(0.2)
    try:
        await server.start()
        await (await connect).close()
    finally:
        server.stop()


async def test_a_stream_of_another_kind_is_refused_with_advice(
    server: NatsServer, pair: Pair, config: QueueConfig
) -> None:
    producer, _ = pair
    other = replace(config, compat_hash=secrets.token_hex(8))
    name = Names(other.namespace, other.compat_hash).stream
    await producer.connection.api(
        f"STREAM.CREATE.{name}", {"name": name, "subjects": ["x"], "storage": "memory"}
    )
    with pytest.raises(ConfigError, match="nats stream rm"):
        await JetStreamProducer.connect(server.url, other, wait_s=HANG_S)


async def test_an_answer_that_makes_no_sense_does_not_keep_the_queue_shut(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task that asks for the depth must survive such an answer: it also closes the breaker."""
    producer = pair[0]

    async def api(*asked: object) -> object:
        return {"what": "is this"}

    with monkeypatch.context() as odd:
        odd.setattr(producer.connection, "api", api)
        await until(lambda: not producer.available)
    await until(lambda: producer.available)


async def test_thousands_of_cancels_at_once_do_not_make_the_queue_seem_away(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All jobs that wait are cancelled when the last prefill worker is lost."""
    producer, _ = pair
    receipts = [await producer.publish(f"j{number}", b"", 10) for number in range(200)]
    now, most, real = 0, 0, producer.connection.api

    async def api(*args: Any) -> Any:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        try:
            return await real(*args)
        finally:
            now -= 1

    monkeypatch.setattr(producer.connection, "api", api)
    assert all(await asyncio.gather(*map(producer.cancel, receipts)))
    assert most < 80, "the others wait here, where no timeout runs"
    assert producer.available
