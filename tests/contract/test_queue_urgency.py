"""The order in which jobs are handed out, on JetStream and in memory, and that it loses none."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass

import pytest

from pullfill.errors import BadMessage
from pullfill.queue.contract import Delivery, JobConsumer
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.lanes import LOOK_S, send_notice
from pullfill.queue.urgency import Lane, Urgency, lane_of
from tests.contract.test_queue_contract import ACK_WAIT_S, SOON_S, Bench, bench, hasty, make
from tests.support.nats import until

__all__ = ["bench", "hasty", "make"]
TIGHT, NORMAL, LOOSE = Urgency


@dataclass(frozen=True)
class J:
    name: str
    tokens: int
    urgency: Urgency = NORMAL


async def publish(bench: Bench, *jobs: J) -> None:
    for job in jobs:
        await bench.producer.publish(job.name, b"", job.tokens, job.urgency)


async def noticed(bench: Bench) -> None:
    """Until the consumer has heard what was published."""
    await asyncio.sleep(0.1)


async def one(consumer: JobConsumer, wait_s: float = SOON_S) -> Delivery:
    [job] = await consumer.pull(1, 1, wait_s)
    return job


async def handed_out(bench: Bench, count: int) -> list[str]:
    names = []
    for _ in range(count):
        job = await one(bench.consumer)
        names.append(job.job_id)
        await job.ack()
    assert await bench.consumer.pull(1, 1, 0.05) == []
    return names


@pytest.mark.essential
async def test_urgent_jobs_come_first_and_short_ones_before_long_ones(bench: Bench) -> None:
    await publish(
        bench, J("first", 9000, LOOSE), J("l", 100, LOOSE), J("n long", 5000), J("n", 100),
        J("t long", 5000, TIGHT), J("t", 100, TIGHT), J("t2", 100, TIGHT),
    )  # fmt: skip
    await noticed(bench)
    order = await handed_out(bench, 7)
    assert order == ["first", "t", "t2", "t long", "n", "n long", "l"]


async def test_no_urgency_is_left_out(bench: Bench) -> None:
    """Sixteen urgent jobs of 1000 tokens: after each eight (their share), the others' turn."""
    await publish(bench, J("first", 1))
    for number in range(16):
        for urgency in Urgency:
            await publish(bench, J(f"{urgency.label[0]}{number}", 1000, urgency))
    await noticed(bench)
    order = "".join(name[0] for name in await handed_out(bench, 49))
    # The first job was charged to the normal ones. A round is 9, 5 and 3 jobs: each ends with the
    # job that uses its credit up, and the next one is as much shorter.
    assert order == "ftttttttttnnnnnllltttttttnnnnllnnnnllnnnlllllllll"


async def test_a_long_job_is_passed_only_so_often(bench: Bench) -> None:
    await publish(bench, J("first", 1), J("long", 2000))
    await publish(bench, *(J(f"short{number}", 1000) for number in range(8)))
    await noticed(bench)
    order = await handed_out(bench, 10)
    assert order.index("long") == 6, "after 4 times 1024 tokens"


async def test_a_job_that_finds_none_waiting_comes_next(bench: Bench) -> None:
    """It goes to no lane: nobody waits at a lane, so that costs nothing while nothing waits."""
    for number in range(3):
        receipt = await bench.producer.publish(f"j{number}", b"", 100, LOOSE)
        job = await one(bench.consumer)
        bench.producer.claimed(receipt)
        assert getattr(job, "lane", None) is None
        await job.ack()
        bench.producer.committed(receipt)


async def test_a_waiting_worker_hears_of_a_job_in_a_lane(bench: Bench) -> None:
    await publish(bench, J("first", 100))
    held = await one(bench.consumer)
    waits = asyncio.create_task(one(bench.consumer))
    await asyncio.sleep(0.05)
    await publish(bench, J("tight", 100, TIGHT))
    assert (await waits).job_id == "tight"
    await held.ack()


async def test_a_worker_may_take_nothing_but_urgent_jobs(bench: Bench) -> None:
    rung: list[int] = []
    bench.consumer.on_urgent = lambda: rung.append(1)
    await publish(bench, J("first", 100), J("normal", 100))
    await noticed(bench)
    assert not bench.consumer.urgent
    assert await bench.consumer.pull(1, 1, SOON_S, urgent_only=True) == []
    assert not rung
    await publish(bench, J("tight", 100, TIGHT))
    await until(lambda: bool(rung), SOON_S)
    assert bench.consumer.urgent
    [job] = await bench.consumer.pull(1, 9, SOON_S, urgent_only=True)
    assert job.job_id == "tight"
    assert not bench.consumer.urgent
    await job.ack()
    assert await handed_out(bench, 2) == ["first", "normal"]


async def delivered(bench: Bench) -> Delivery:
    """A job of a lane, delivered."""
    await publish(bench, J("first", 100), J("lane", 5000, LOOSE))
    await noticed(bench)
    await (await one(bench.consumer)).ack()
    job = await one(bench.consumer)
    assert (job.job_id, job.number, job.tokens) == ("lane", 1, 5000)
    return job


@pytest.fixture
async def lane(bench: Bench) -> Delivery:
    return await delivered(bench)


async def test_a_job_of_a_lane_can_be_given_back(bench: Bench, lane: Delivery) -> None:
    other = await bench.add_consumer()
    await lane.nak()
    again = await one(other)
    assert (again.job_id, again.number) == ("lane", 2)
    await again.ack()
    await bench.depth_is(0, in_flight=0)


async def test_a_job_of_a_lane_whose_worker_died_comes_again(hasty: Bench) -> None:
    await delivered(hasty)
    await hasty.advance(1.5 * ACK_WAIT_S)
    again = await one(await hasty.add_consumer(), SOON_S + LOOK_S)
    assert (again.job_id, again.number) == ("lane", 2)


async def test_the_decode_worker_gives_a_job_of_a_lane_back(bench: Bench) -> None:
    await publish(bench, J("first", 100))
    receipt = await bench.producer.publish("lane", b"", 5000, LOOSE)
    await (await one(bench.consumer)).ack()
    job = await one(bench.consumer)
    await bench.producer.nak(job.ack_subject, receipt)
    assert (await one(bench.consumer)).number == 2
    for bad in (job.ack_subject.replace("prefill-", "other-"), "memory.x.y"):
        if bad != job.ack_subject:
            with pytest.raises(BadMessage):
                await bench.producer.nak(bad, None)


async def test_a_job_of_a_lane_that_nobody_settles_ends_as_a_dead_letter(bench: Bench) -> None:
    await publish(bench, J("first", 100), J("lane", 5000, LOOSE))
    await (await one(bench.consumer)).ack()
    for _ in range(3):
        await (await one(bench.consumer)).nak()
    assert await bench.consumer.pull(1, 1, LOOK_S + 0.5) == []
    await bench.dead_is(1)
    await bench.depth_is(0, in_flight=0)


async def test_a_job_of_a_lane_that_is_cancelled_is_not_delivered(bench: Bench) -> None:
    await publish(bench, J("first", 100))
    receipt = await bench.producer.publish("lane", b"", 5000, LOOSE)
    assert await bench.producer.cancel(receipt)
    await (await one(bench.consumer)).ack()
    assert await bench.consumer.pull(1, 1, 0.05) == []


async def test_the_depth_counts_jobs_in_lanes(bench: Bench, lane: Delivery) -> None:
    await publish(bench, J("another", 1000, TIGHT))
    await bench.depth_is(2, in_flight=1)
    await lane.ack()
    await bench.depth_is(1, in_flight=0)


async def test_workers_share_the_lanes_and_no_job_comes_twice(bench: Bench) -> None:
    workers = [bench.consumer, *[await bench.add_consumer() for _ in range(3)]]
    taken = Counter[str]()

    async def work(consumer: JobConsumer) -> None:
        while sum(taken.values()) < 60:
            for job in await consumer.pull(1, 1, 0.2):
                taken[job.job_id] += 1
                assert job.number == 1, "nobody takes more than it wants"
                await job.ack()

    async def feed() -> None:
        for number in range(60):
            await publish(bench, J(f"j{number}", 600 * (number % 7), Urgency(number % 3)))

    async with asyncio.timeout(30):
        await asyncio.gather(feed(), *map(work, workers))
    assert set(taken.values()) == {1}


async def test_a_lost_notice_is_made_up_for(bench: Bench) -> None:
    """NATS delivers notices at most once."""
    if not isinstance(bench.producer, JetStreamProducer):
        return
    assert isinstance(bench.consumer, JetStreamConsumer)
    await publish(bench, J("first", 100))
    await (await one(bench.consumer)).ack()
    client = bench.consumer.connection.client
    subject = bench.consumer.lanes._names.notices
    (notices,) = [sub for sub in client._subs.values() if sub.subject == subject]
    await notices.unsubscribe()
    await publish(bench, J("unheard", 100, TIGHT))
    pull = asyncio.create_task(one(bench.consumer, 2 * LOOK_S))
    assert (await pull).job_id == "unheard"
    await until(lambda: not bench.consumer.lanes.turns, SOON_S)


async def test_a_lane_that_seems_empty_after_a_notice_is_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NATS confirms a job a moment before the consumer of its lane hears of it."""
    producer = bench.producer
    if not isinstance(producer, JetStreamProducer):
        return
    consumer = bench.consumer
    assert isinstance(consumer, JetStreamConsumer)
    monkeypatch.setattr("pullfill.queue.lanes.LOOK_S", math.inf)
    await publish(bench, J("first", 100), J("lane", 100))
    for name in ("first", "lane"):
        assert (await one(bench.consumer)).job_id == name
    lane, found = lane_of(NORMAL, 100), asyncio.Event()
    lanes = consumer.lanes
    empty = lanes.empty

    async def late(lane: Lane, *, lacks_consumer: bool) -> None:
        """The job comes now, without another notice."""
        if not found.is_set():
            found.set()
            await until(lambda: lane in lanes._noticed, SOON_S)
            await producer._store("late", b"", 100, NORMAL, lane)
        await empty(lane, lacks_consumer=lacks_consumer)

    monkeypatch.setattr(lanes, "empty", late)
    await send_notice(producer.connection, lanes._names, lane)
    assert (await one(bench.consumer, 5.0)).job_id == "late"
    assert found.is_set()


async def test_a_job_stored_right_after_the_lane_was_emptied_is_told_of(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A free worker has found nothing, and the claim of the last job is on its way."""
    monkeypatch.setattr("pullfill.queue.lanes.LOOK_S", math.inf)
    monkeypatch.setattr("pullfill.queue.depth.NOTICE_S", 3600.0)
    await publish(bench, J("first", 100))
    emptied = await bench.producer.publish("lane", b"", 100)
    for name in ("first", "lane"):
        assert (await one(bench.consumer)).job_id == name
    free = await bench.add_consumer()
    pull = asyncio.create_task(one(free, 5.0))
    await asyncio.sleep(0.05)
    await publish(bench, J("late", 100))
    bench.producer.claimed(emptied)
    assert (await pull).job_id == "late"
