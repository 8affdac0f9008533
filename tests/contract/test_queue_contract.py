"""What `queue/contract.py` promises."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest
from msgspec.structs import replace

from pullfill.errors import BadMessage, QueueFull
from pullfill.queue.contract import (
    Delivery,
    Urgency,
)
from pullfill.queue.jetstream import BUSY_REFRESH_S, JetStreamConsumer, JetStreamProducer
from pullfill.queue.streams import Names
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


@dataclass
class Bench:
    """One queue. `add_consumer` makes more workers."""

    names: Names
    producer: JetStreamProducer
    consumer: JetStreamConsumer
    add_consumer: Callable[[], Awaitable[JetStreamConsumer]]

    async def dead_letters(self) -> list[DeadLetter]:
        """The newest first."""
        return await dead_letters(self.producer.connection, self.names)

    async def depth_is(self, jobs: int, in_flight: int | None = None) -> None:
        """Wait for the cached depth to become this."""

        def reached() -> bool:
            depth = self.producer.depth()
            return depth.depth_jobs == jobs and in_flight in (None, depth.in_flight)

        await soon(reached, SOON_S)


Make = Callable[[QueueSettings], Awaitable[Bench]]


@pytest.fixture
async def make(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    monkeypatch.setattr("pullfill.queue.jetstream.STEADY_REFRESH_S", BUSY_REFRESH_S)
    opened: list[JetStreamConsumer | JetStreamProducer] = []

    async def jetstream(settings: QueueSettings) -> Bench:
        names = Names("test", secrets.token_hex(8))

        async def add() -> JetStreamConsumer:
            consumer = await connected(JetStreamConsumer, nats.url, names, settings=settings)
            opened.append(consumer)
            return consumer

        producer = await connected(JetStreamProducer, nats.url, names, settings=settings)
        opened.append(producer)
        return Bench(names, producer, await add(), add)

    yield jetstream
    await asyncio.gather(*(one.close() for one in opened))


SETTINGS = QueueSettings(ack_wait_s=60.0, max_deliver=3)


@pytest.fixture
async def bench(make: Make) -> Bench:
    """No job comes back by silence, however long the machine stands still."""
    return await make(SETTINGS)


@pytest.fixture
async def hasty(make: Make) -> Bench:
    """Silence of ACK_WAIT_S brings a job back."""
    return await make(replace(SETTINGS, ack_wait_s=ACK_WAIT_S))


async def pulled(consumer: JetStreamConsumer, count: int) -> list[Delivery]:
    return [job for _ in range(count) if (job := await consumer.pull(SOON_S))]


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


async def test_gone_are_the_jobs_whose_message_was_removed(bench: Bench) -> None:
    receipts = [await bench.producer.publish(name, b"body", 10) for name in "abcd"]
    acked, *_ = await pulled(bench.consumer, 1)
    await acked.ack()
    await pulled(bench.consumer, 1)
    assert await bench.producer.cancel(receipts[2])

    def gone() -> list[str]:
        bench.producer.look_again()
        return [receipt.job_id for receipt in bench.producer.gone(receipts)]

    assert await soon(gone, good=lambda found: len(found) > 1) == [acked.job_id, "c"], (
        "not one in flight, nor one that waits"
    )


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
