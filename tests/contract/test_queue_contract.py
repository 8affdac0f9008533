"""What `queue/contract.py` promises, also of a server that restarts, forgets, hangs, has no leader
or was set up otherwise. The bound of each wait ends a test that hangs, and measures no speed."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from msgspec.structs import replace
from prometheus_client import REGISTRY

from pullfill.errors import BadMessage, ConfigError, PullfillError, QueueFull, QueueUnavailable
from pullfill.queue import nats_connection
from pullfill.queue.contract import Delivery, Receipt, Urgency
from pullfill.queue.jetstream import BUSY_REFRESH_S, JetStreamConsumer, JetStreamProducer
from pullfill.queue.nats_connection import NatsConnection
from pullfill.queue.streams import DEFAULTS, Names, consumer_of
from pullfill.wire import QueueSettings
from tests.support.nats import DeadLetter, NatsServer, dead_letters
from tests.support.queue_ends import connected
from tests.support.waiting import soon

ACK_WAIT_S = 1.0
SOON_S = 20.0
TRIES = 20
"""If the machine stops between two signs of progress, NATS rightly delivers the job again. Such a
try shows nothing, so the test tries again."""
TIGHT, NORMAL, LOOSE = Urgency
CONSUMER = consumer_of(NORMAL)
# No job comes back by silence, however long the machine stands still.
SETTINGS = QueueSettings(ack_wait_s=60.0, max_deliver=3, publish_timeout_s=5.0)
Pair = tuple[JetStreamProducer, JetStreamConsumer]


@pytest.fixture
def names() -> Names:
    return Names("test", secrets.token_hex(8))


async def both(server: NatsServer, names: Names, settings: QueueSettings = SETTINGS) -> Pair:
    return (
        await connected(JetStreamProducer, server.url, names, settings=settings, wait_s=SOON_S),
        await connected(JetStreamConsumer, server.url, names, settings=settings, wait_s=SOON_S),
    )


@dataclass
class Bench:
    """One queue. `add_consumer` makes more workers."""

    producer: JetStreamProducer
    consumer: JetStreamConsumer
    add_consumer: Callable[[], Awaitable[JetStreamConsumer]]

    async def dead_letters(self) -> list[DeadLetter]:
        """The newest first."""
        return await dead_letters(self.producer.connection, self.producer.names)

    async def depth_is(self, jobs: int, in_flight: int | None = None) -> None:
        """Wait for the cached depth to become this."""

        def reached() -> bool:
            depth = self.producer.depth()
            return depth.depth_jobs == jobs and in_flight in (None, depth.in_flight)

        await soon(reached, SOON_S)


Make = Callable[[QueueSettings], Awaitable[Bench]]


@pytest.fixture
async def make(
    nats: NatsServer, names: Names, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Make]:
    monkeypatch.setattr("pullfill.queue.jetstream.STEADY_REFRESH_S", BUSY_REFRESH_S)
    opened: list[JetStreamConsumer | JetStreamProducer] = []

    async def jetstream(settings: QueueSettings) -> Bench:
        async def add() -> JetStreamConsumer:
            consumer = await connected(JetStreamConsumer, nats.url, names, settings=settings)
            opened.append(consumer)
            return consumer

        producer, consumer = await both(nats, names, settings)
        opened.extend((producer, consumer))
        return Bench(producer, consumer, add)

    yield jetstream
    await asyncio.gather(*(one.close() for one in opened))


@pytest.fixture
async def bench(make: Make) -> Bench:
    return await make(SETTINGS)


@pytest.fixture
async def hasty(make: Make) -> Bench:
    """Silence of ACK_WAIT_S brings a job back."""
    return await make(replace(SETTINGS, ack_wait_s=ACK_WAIT_S))


@pytest.fixture
async def pair(server: NatsServer, names: Names) -> AsyncIterator[Pair]:
    """On a server of this test's own."""
    pair = await both(server, names)
    yield pair
    server.resume()
    await asyncio.gather(*(end.close() for end in pair))


async def publish_when_available(producer: JetStreamProducer, job_id: str) -> Receipt:
    """Also if the first publishes find that the stream is gone."""
    async with asyncio.timeout(SOON_S):
        while True:
            with contextlib.suppress(QueueUnavailable):
                return await producer.publish(job_id, b"", 10)
            await asyncio.sleep(0.02)


async def pulled(consumer: JetStreamConsumer) -> Delivery:
    """A puller's loop: again after QueueUnavailable or nothing."""
    async with asyncio.timeout(SOON_S):
        while True:
            with contextlib.suppress(QueueUnavailable):
                if job := await consumer.pull(1):
                    return job


async def test_the_same_job_id_is_one_job(bench: Bench) -> None:
    first = await bench.producer.publish("a", b"body", 100)
    again = await bench.producer.publish("a", b"body", 100)
    assert again.duplicate
    assert again.seq == first.seq
    assert bench.producer.depth().depth_jobs == 1
    job = await bench.consumer.pull(SOON_S)
    await job.ack()
    assert (await bench.producer.publish("a", b"body", 100)).duplicate
    assert await bench.consumer.pull(0.05) is None


@pytest.mark.essential
async def test_a_full_queue_refuses(make: Make) -> None:
    bench = await make(replace(SETTINGS, max_jobs=2))
    first = await bench.producer.publish("a", b"", 1)
    await bench.producer.publish("b", b"", 1)
    with pytest.raises(QueueFull):
        await bench.producer.publish("c", b"", 1)
    assert bench.producer.available
    assert await bench.producer.cancel(first)
    await bench.producer.publish("c", b"", 1)


async def test_nak_gives_back_at_once_or_later(bench: Bench) -> None:
    await bench.producer.publish("a", b"", 1)
    job = await bench.consumer.pull(SOON_S)
    await job.nak()
    job = await bench.consumer.pull(SOON_S)
    assert job.number == 2
    began = time.monotonic()
    await job.nak(0.3)
    again = await bench.consumer.pull(SOON_S)
    assert (again.number, time.monotonic() - began > 0.3) == (3, True)
    await again.ack()


async def test_term_leaves_a_dead_letter(hasty: Bench) -> None:
    await hasty.producer.publish("a", b"poison", 1)
    job = await hasty.consumer.pull(SOON_S)
    await job.term("cannot\r\nread it: é")
    await job.term("twice is once")
    await job.nak()
    [letter] = await hasty.dead_letters()
    assert (letter.job_id, letter.body, letter.deliveries) == ("a", b"poison", 1)
    assert letter.reason.split() == ["cannot", "read", "it:", "é"]
    await hasty.depth_is(0)
    await asyncio.sleep(1.5 * ACK_WAIT_S)
    assert await hasty.consumer.pull(0.05) is None


@pytest.mark.essential
async def test_max_deliver_ends_in_a_dead_letter_and_an_empty_queue(bench: Bench) -> None:
    await bench.producer.publish("a", b"body", 1)
    for number in (1, 2, 3):
        job = await bench.consumer.pull(SOON_S)
        assert job.number == number
        await job.nak()
    assert await bench.consumer.pull(0.1) is None
    [letter] = await soon(bench.dead_letters)
    assert (letter.job_id, letter.reason, letter.body) == ("a", "max_deliver", b"body")
    assert letter.deliveries == 3
    await bench.depth_is(0, in_flight=0)


async def test_hand_back_frees_the_job_of_a_dead_worker_and_no_other(bench: Bench) -> None:
    receipt = await bench.producer.publish("other", b"", 1)
    job = await bench.consumer.pull(SOON_S)
    mine = await bench.producer.publish("mine", b"", 1)
    with pytest.raises(BadMessage):  # tests/unit/queue/test_streams.py has more
        await bench.producer.nak("$JS.ACK.OTHER.prefill-normal.1.1.1.1.0", receipt)
    with pytest.raises(BadMessage, match="another job"):
        await bench.producer.nak(job.ack_subject, mine)
    await bench.producer.nak(job.ack_subject, None)
    await bench.producer.nak(job.ack_subject, receipt)
    again = await (await bench.add_consumer()).pull(SOON_S)
    assert (again.job_id, again.number) == ("other", 2)
    await again.ack()


@pytest.mark.essential
async def test_many_jobs_over_several_workers_each_once(bench: Bench) -> None:
    workers = [bench.consumer, await bench.add_consumer(), await bench.add_consumer()]
    await asyncio.gather(*(bench.producer.publish(f"j{i}", b"", 10) for i in range(60)))
    seen: list[str] = []

    async def work(worker: JetStreamConsumer) -> None:
        while len(seen) < 60:
            if job := await worker.pull(0.1):
                seen.append(job.job_id)
                await job.ack()

    await asyncio.gather(*(work(worker) for worker in workers))
    assert sorted(seen) == sorted(f"j{i}" for i in range(60))
    await bench.depth_is(0, in_flight=0)


# ------------------------------------------------------------------ silence


@pytest.mark.essential
async def test_silence_brings_the_job_back_and_in_progress_does_not(hasty: Bench) -> None:
    for number in range(TRIES):
        await hasty.producer.publish(f"a{number}", b"", 1)
        job = await hasty.consumer.pull(SOON_S)
        sent = [time.monotonic()]
        for _ in range(8):
            await asyncio.sleep(ACK_WAIT_S / 4)
            await job.in_progress()
            sent.append(time.monotonic())
        came = await hasty.consumer.pull(0.03)
        if not came:
            break
        assert max(b - a for a, b in pairwise(sent)) > ACK_WAIT_S / 2, "no sign was late"
        for delivery in (job, *came):
            await delivery.ack()
    await asyncio.sleep(1.5 * ACK_WAIT_S)
    again = await hasty.consumer.pull(SOON_S)
    assert (again.job_id, again.number) == (job.job_id, 2)
    await again.ack()


# ------------------------------------------------------------------ order


async def publish(bench: Bench, *jobs: tuple[str, int, Urgency]) -> None:
    for name, tokens, urgency in jobs:
        await bench.producer.publish(name, b"", tokens, urgency)


async def handed_out(bench: Bench, count: int) -> list[str]:
    names = []
    for _ in range(count):
        job = await bench.consumer.pull(SOON_S)
        names.append(job.job_id)
        await job.ack()
    assert await bench.consumer.pull(0.05) is None
    return names


@pytest.mark.essential
async def test_urgent_jobs_come_first(bench: Bench) -> None:
    await publish(
        bench, ("l", 100, LOOSE), ("n", 2000, NORMAL), ("n2", 100, NORMAL), ("t", 5000, TIGHT),
        ("t2", 100, TIGHT),
    )  # fmt: skip
    assert await handed_out(bench, 5) == ["t", "t2", "n", "n2", "l"]


@pytest.mark.essential
async def test_a_stream_of_urgent_jobs_leaves_the_others_their_share(bench: Bench) -> None:
    tight = [f"t{i}" for i in range(12)]
    await publish(
        bench, *((name, 1024, TIGHT) for name in tight), ("n", 4096, NORMAL), ("l", 2048, LOOSE)
    )
    assert await handed_out(bench, 14) == [*tight[:8], "n", "l", *tight[8:]]


async def test_a_worker_that_waits_at_all_takes_one_job_and_leaves_the_others(bench: Bench) -> None:
    """Its requests at the other consumers are withdrawn: who has no room gets no job."""
    waits = asyncio.create_task(bench.consumer.pull(SOON_S))
    await asyncio.sleep(0.05)
    await publish(bench, ("first", 100, NORMAL))
    first = await waits
    await asyncio.sleep(0.05)
    other = await bench.add_consumer()
    await publish(bench, ("tight", 100, TIGHT), ("loose", 100, LOOSE))
    for name in ("tight", "loose"):
        job = await other.pull(SOON_S)
        assert (job.job_id, job.number) == (name, 1)
        await job.ack()
    await first.ack()


# ------------------------------------------------------------------ a server that comes and goes


async def test_jobs_whose_last_worker_died_become_dead_letters(
    nats: NatsServer, names: Names
) -> None:
    """The server says once that the deliveries are used up, and then nobody is there to hear it."""
    settings = replace(SETTINGS, max_deliver=1, ack_wait_s=0.3)
    producer, dies = await both(nats, names, settings)
    await producer.publish("a", b"body", 10)
    assert await dies.pull(5)
    await dies.close()
    pending = f"CONSUMER.INFO.{producer.names.stream}.{CONSUMER}"
    await soon(
        lambda: producer.connection.api(pending), good=lambda info: not info["num_ack_pending"]
    )
    await producer.publish("b", b"other", 10)
    comes = await connected(JetStreamConsumer, nats.url, names, settings=settings, wait_s=SOON_S)
    letters = await soon(lambda: dead_letters(producer.connection, names))
    assert [(one.job_id, one.body) for one in letters] == [("a", b"body")]
    assert await comes.pull(5), "what waits is no dead letter"
    await asyncio.gather(producer.close(), comes.close())


@pytest.mark.essential
async def test_an_old_delivery_does_not_ack_a_job_of_a_new_stream(
    server: NatsServer, pair: Pair
) -> None:
    """The server comes back empty. Nor does an old receipt remove a new job."""
    producer, consumer = pair
    receipts = [await producer.publish(f"j{i}", b"", 10) for i in range(3)]
    jobs = [await pulled(consumer) for _ in receipts]
    await jobs[0].ack()
    server.kill()
    await soon(lambda: not consumer.connection.up)
    await jobs[1].ack()
    await asyncio.to_thread(server.restart, empty=True)
    new = await publish_when_available(producer, "new")
    assert new.seq == receipts[0].seq, "the case this is about: numbers start again"
    assert not await producer.cancel(receipts[0])
    await producer.nak(jobs[0].ack_subject, receipts[0])
    job = await pulled(consumer)
    await jobs[2].ack()
    assert (job.job_id, job.number) == ("new", 1)
    await job.in_progress()
    await consumer.connection.flush()
    producer.look_again()
    assert producer.depth().depth_jobs == 1
    await job.ack()


async def test_both_ends_of_a_worker_use_one_connection(server: NatsServer, names: Names) -> None:
    """Also over the next one. And `pullfill_up` says what is true of both."""
    connection = NatsConnection(server.url, "worker-1")
    producer = JetStreamProducer(connection, names, SETTINGS)
    consumer = JetStreamConsumer(connection, names, SETTINGS)
    try:
        await connection.start(SOON_S)
        for name in ("first", "second"):
            await publish_when_available(producer, name)
            job = await pulled(consumer)
            await job.ack()
            assert job.job_id == name
            assert REGISTRY.get_sample_value("pullfill_up", {"server": "nats"}) == 1
            server.kill()
            await soon(lambda: not connection.up)
            assert REGISTRY.get_sample_value("pullfill_up", {"server": "nats"}) == 0
            await asyncio.to_thread(server.restart)
        await consumer.close()
        await publish_when_available(producer, "third")
    finally:
        await producer.close()
        await connection.close()


@pytest.mark.parametrize("what", ["stream", CONSUMER])
@pytest.mark.essential
async def test_a_deleted_stream_or_consumer_is_made_again(
    bench: Bench, names: Names, what: str
) -> None:
    producer, consumer = bench.producer, bench.consumer
    if what == "stream":
        await producer.connection.api(f"STREAM.DELETE.{names.stream}")
    else:
        await producer.connection.api(f"CONSUMER.DELETE.{names.stream}.{what}")
    await publish_when_available(producer, "new")
    await (await pulled(consumer)).ack()


async def test_a_connected_server_that_answers_no_pulls_is_away_for_a_prefill_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream without a quorum: its connections stand and answer PINGs."""
    consumer = bench.consumer
    monkeypatch.setattr(nats_connection, "PING_EVERY_S", 0.125)
    monkeypatch.setattr(nats_connection, "PING_WAIT_S", 0.6)

    async def api(*_: object) -> object:
        raise QueueUnavailable("no quorum")

    with monkeypatch.context() as lost:
        lost.setattr("pullfill.queue.jetstream.consumer_of", lambda _: "nobody")
        lost.setattr(consumer.connection, "api", api)
        with contextlib.suppress(QueueUnavailable):
            assert await consumer.pull(0.1) is None
        assert consumer.connection.up
        await asyncio.sleep(2 * nats_connection.PING_EVERY_S)
        assert "no quorum" in str(consumer.health.status().error), "though PINGs are answered"
    await soon(lambda: consumer.health.up, SOON_S)
    assert await consumer.pull(0.1) is None


@pytest.mark.parametrize("how", ["cancelled", "drained"])
async def test_a_pull_that_was_withdrawn_has_left_the_server(
    bench: Bench, nats: NatsServer, names: Names, how: str
) -> None:
    """nats-py buffers its commands, but not its PING. So on a busy machine the server may answer a
    PING before it learns that the pull's inbox is not read any more. A job would be lost there."""
    producer, leaving = bench.producer, bench.consumer
    other = await connected(JetStreamConsumer, nats.url, names, wait_s=SOON_S)
    pulling = asyncio.create_task(leaving.pull(SOON_S))
    info = f"CONSUMER.INFO.{names.stream}.{CONSUMER}"
    await soon(lambda: producer.connection.api(info), good=lambda found: found["num_waiting"])
    transport, loop = leaving.connection.client._transport, asyncio.get_running_loop()
    write = transport.writelines
    transport.writelines = lambda lines: loop.call_later(0.05, write, list(lines))
    if how == "cancelled":
        pulling.cancel()
        await asyncio.gather(pulling, return_exceptions=True)
    else:
        await leaving.drain()
        assert await pulling is None
        assert await leaving.pull(0.05) is None
    await producer.publish("job", b"", 10)
    job = await other.pull(SOON_S)
    assert job.number == 1, "the first delivery was lost"
    await job.ack()
    await other.close()


# ------------------------------------------------------------------ odd answers and messages


async def publish_odd(server: NatsServer, subject: str, headers: bytes) -> None:
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


async def test_a_job_whose_headers_cannot_be_read_becomes_a_dead_letter(
    server: NatsServer, pair: Pair, names: Names
) -> None:
    """nats-py cannot decode them, and then reads no more. NATS passes them on."""
    producer, consumer = pair
    consumer.configure(replace(SETTINGS, ack_wait_s=1.0))
    await soon(lambda: consumer.ack_wait_s == 1.0)
    await publish_odd(server, names.job(5), b"NATS/1.0")
    await producer.publish("good", b"2", 20)
    good = await pulled(consumer)
    assert good.job_id == "good"
    await good.ack()

    async def found() -> list[DeadLetter]:
        with contextlib.suppress(QueueUnavailable):
            return await dead_letters(producer.connection, names)
        return []

    async with asyncio.timeout(60):
        while not (letters := await found()):
            with contextlib.suppress(QueueUnavailable):
                assert await consumer.pull(0.1) is None
    assert [letter.job_id for letter in letters] == ["seq-1"]


async def test_a_body_above_max_payload_says_what_to_change(bench: Bench) -> None:
    producer = bench.producer
    assert producer.connection.max_body < 8 << 20
    for size in ((8 << 20) + 1, 8 << 20):  # the headers count, too: NATS ended the connection
        with pytest.raises(QueueFull, match="max_payload") as caught:
            await producer.publish("huge", bytes(size), 10)
        assert not caught.value.retryable
    await producer.publish("large", bytes(producer.connection.max_body), 10)
    assert producer.available


# ------------------------------------------------------------------ the streams and their settings


async def test_a_stream_of_another_kind_is_refused_with_advice(
    nats: NatsServer, bench: Bench, names: Names
) -> None:
    """At the start, and by a worker that had said that it pulls. Only an operator can mend it."""
    producer, consumer = bench.producer, bench.consumer
    other = {"name": names.stream, "subjects": ["x"], "storage": "memory"}
    await producer.connection.api(f"STREAM.DELETE.{names.stream}")
    await producer.connection.api(f"STREAM.CREATE.{names.stream}", other)
    with pytest.raises(ConfigError, match="nats stream rm"):
        await connected(JetStreamProducer, nats.url, names, wait_s=SOON_S)
    async with asyncio.timeout(SOON_S):
        while "nats stream rm" not in str(consumer.health.status().error):
            with contextlib.suppress(PullfillError):
                await consumer.pull(0.5)
            await asyncio.sleep(0.01)


async def test_a_server_with_too_little_room_is_told_so(tmp_path: Path) -> None:
    store = f'store_dir: "{tmp_path / "store"}", max_file_store: 64MB'
    extra = f"jetstream {{ {store} }}"  # dead letters reserve 256 MiB
    with NatsServer(tmp_path, extra=extra) as server:
        with pytest.raises(QueueUnavailable, match=r"raise jetstream\.max_file_store") as caught:
            await connected(JetStreamProducer, server.url, Names("test", "room"), wait_s=1.0)
    assert "10047" in str(caught.value)
    assert "nats-server -js" not in str(caught.value)


async def configs(link: NatsConnection, names: Names) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the server has for the job stream and the consumer of normal jobs."""
    jobs = await link.api(f"STREAM.INFO.{names.stream}")
    consumer = await link.api(f"CONSUMER.INFO.{names.stream}.{CONSUMER}")
    return jobs["config"], consumer["config"]


@pytest.mark.essential
async def test_what_an_operator_changed_outlives_every_start_and_reconnect(
    nats: NatsServer, names: Names
) -> None:
    first = await both(nats, names, QueueSettings())
    link = first[1].connection
    jobs, consumer = await configs(link, names)
    assert (jobs["max_msgs"], consumer["max_deliver"]) == (DEFAULTS.max_jobs, DEFAULTS.max_deliver)
    theirs = {"max_msgs": 77, "max_bytes": 1 << 20, "max_age": 7 * 10**9, "description": "mine",
              "duplicate_window": 5 * 10**9, "metadata": {"team": "serving"}}  # fmt: skip
    await link.api(f"STREAM.UPDATE.{names.stream}", jobs | theirs)
    await link.api(
        f"CONSUMER.CREATE.{names.stream}.{CONSUMER}.{names.jobs_of(NORMAL)}",
        {"stream_name": names.stream, "config": consumer | {"ack_wait": 9 * 10**9,
         "max_deliver": 9, "max_ack_pending": 5, "description": "mine"}},
    )  # fmt: skip
    changed = await configs(link, names)
    assert changed[0]["metadata"]["team"] == "serving"
    second = await both(nats, names, QueueSettings(max_jobs=5))
    await link.client.close()
    await soon(lambda: not link.up, SOON_S)
    await soon(lambda: link.up, SOON_S)
    # It is up a moment before it has read what the server has.
    for worker in (first[1], second[1]):  # heartbeats follow the server
        await soon(lambda one=worker: (one.ack_wait_s, one.max_deliver) == (9.0, 9), SOON_S)
    now = await configs(link, names)
    assert now == (changed[0] | {"max_msgs": 5}, changed[1]), "only what queue.* sets"
    await asyncio.gather(*(worker.close() for worker in (*first, *second)))


@pytest.mark.essential
async def test_settings_act_on_running_workers_and_a_refused_one_harms_nobody(
    nats: NatsServer, names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = await both(nats, names, QueueSettings(max_deliver=3))
    before = await configs(consumer.connection, names)
    assert (before[1]["max_deliver"], consumer.max_deliver) == (3, 3)
    new = QueueSettings(
        replicas=3, max_bytes=1 << 20, max_jobs=9, ack_wait_s=7.0, max_deliver=4,
        publish_timeout_s=9.0,
    )  # fmt: skip
    for worker in (producer, consumer):  # each tells the other's server the same
        worker.configure(new)
        assert worker.publish_timeout_s == 9.0
    await soon(lambda: consumer.ack_wait_s == 7.0)
    assert "NATS refuses" in caplog.text, "one server holds no three replicas"
    for worker in (producer, consumer):
        worker.configure(QueueSettings(max_bytes=1 << 20, max_jobs=9))
    await soon(lambda: not producer.busy and not consumer.busy)
    assert producer.publish_timeout_s == DEFAULTS.publish_timeout_s
    after = await configs(consumer.connection, names)
    assert after[0] == before[0] | {"max_bytes": 1 << 20, "max_msgs": 9}
    assert after[1] == before[1] | {"ack_wait": 7 * 10**9, "max_deliver": 4}
    assert (await publish_when_available(producer, "still works")).seq == 1
    await asyncio.gather(producer.close(), consumer.close())
