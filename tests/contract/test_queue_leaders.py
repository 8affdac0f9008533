"""A server of a NATS cluster dies: the stream, the dead-letter stream and the consumer of each lane
have leaders of their own. What has no leader stops nothing else.

One server stands for the cluster here. Some of its answers are withheld: a missing leader sends
none."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from pullfill.errors import QueueUnavailable
from pullfill.queue import streams
from pullfill.queue.contract import QueueConfig
from pullfill.queue.depth import Snapshot
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.names import BUSY, CONSUMER, MSG_ID, TAKEN, Names
from pullfill.queue.urgency import LANES, Lane, Urgency
from tests.support.nats import NatsServer, until

HANG_S = 15.0
TIGHT = LANES[0]


@dataclass
class Ends:
    producer: JetStreamProducer
    consumer: JetStreamConsumer
    names: Names

    def pull(self, **more: Any) -> asyncio.Task[list[Any]]:
        return asyncio.create_task(self.consumer.pull(1, 1, HANG_S, **more))

    async def direct(self, name: str = "", reply: str = "answers") -> None:
        """A job past the stream comes to the consumer. Without a name: the question."""
        headers = {MSG_ID: name} if name else {}
        client = self.consumer.connection.client
        await self.consumer._on_direct(Msg(client, self.names.direct, reply, b"", headers))

    async def answers(self) -> Subscription:
        """Listen to what the consumer answers. The server knows of it when this returns: nats-py
        writes a SUB late, and in front of this question."""
        subscription = await self.producer.connection.client.subscribe("answers")
        await self.producer.connection.api("INFO")
        return subscription

    async def lose(self, end: JetStreamConsumer | JetStreamProducer) -> None:
        """Break a connection, and wait for the next one."""
        before = end.connection.generation
        end.connection.reset("the test breaks it")
        await until(lambda: end.connection.up and end.connection.generation > before, HANG_S)


@pytest.fixture
async def ends(nats: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ends]:
    monkeypatch.setattr(streams, "RECONNECT_S", HANG_S)  # JetStream is there, if late
    config = QueueConfig("test", secrets.token_hex(8), publish_timeout_s=5.0)
    producer = await JetStreamProducer.connect(nats.url, config, wait_s=HANG_S)
    consumer = await JetStreamConsumer.connect(nats.url, config, wait_s=HANG_S)
    yield Ends(producer, consumer, Names(config.namespace, config.compat_hash))
    await asyncio.gather(producer.close(), consumer.close())


def silence(end: Any, monkeypatch: pytest.MonkeyPatch, *about: str) -> None:
    """JetStream does not answer an end about what has one of these words in its name."""
    real = end.connection.api

    async def api(operation: str, *rest: Any, **more: Any) -> Any:
        if any(word in operation for word in about):
            raise QueueUnavailable("no answer")
        return await real(operation, *rest, **more)

    monkeypatch.setattr(end.connection, "api", api)


async def test_a_lane_that_waits_for_its_leader_holds_no_other_job(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a stored one, nor one that comes past the stream."""
    asked = list[Lane]()

    async def ensure(lane: Lane) -> None:
        asked.append(lane)
        await asyncio.Event().wait()

    monkeypatch.setattr(ends.consumer.lanes, "_ensure", ensure)
    for number in range(2):
        ends.consumer.lanes.turns.fill(TIGHT)  # nobody has made it
        pulling = ends.pull()
        await until(lambda: bool(asked) and not ends.consumer.lanes.turns)
        if number:
            await ends.direct("past the stream")
        else:
            await ends.producer.publish("stored", b"", 7)
        [job] = await asyncio.wait_for(pulling, HANG_S)
        assert job.job_id == ("past the stream" if number else "stored")
        await job.ack()
    assert asked == [TIGHT]
    assert ends.consumer.health.up


async def test_a_lane_is_filled_again_once_its_consumer_is_made(ends: Ends) -> None:
    await ends.producer.publish("first", b"", 7)
    await until(lambda: ends.producer.depth().depth_jobs == 1)
    await ends.producer.publish("tight", b"", 7, Urgency.TIGHT)
    await until(lambda: bool(ends.consumer.lanes.turns))
    rung = list[int]()
    ends.consumer.on_urgent = lambda: rung.append(1)
    taken = [job for _ in range(2) for job in await ends.consumer.pull(1, 1, HANG_S)]
    assert {job.job_id for job in taken} == {"first", "tight"}
    assert rung, "a full worker hears of it, too"
    for job in taken:
        await job.ack()


async def test_a_lane_without_a_leader_does_not_close_the_queue(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ends.producer.publish("first", b"", 7)
    await until(lambda: ends.producer.depth().depth_jobs == 1)
    await ends.producer.publish("second", b"", 7)  # in a lane, as one waits
    silence(ends.producer, monkeypatch, "CONSUMER.INFO.S-normal", "prefill-normal")
    await ends.producer._look()
    await ends.lose(ends.producer)
    assert ends.producer.available
    assert not ends.producer.past_stream
    assert ends.producer.depth().depth_jobs == 2


async def test_a_producer_that_reconnects_while_there_is_no_leader_is_connected(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its jobs can go past the stream."""

    async def ask_depth(*_: object) -> Snapshot:
        raise QueueUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr("pullfill.queue.producer.ask_depth", ask_depth)
        await ends.lose(ends.producer)
        assert not ends.producer.available
        pulling = ends.pull()
        await until(lambda: ends.producer.past_stream, HANG_S)
        await ends.producer.publish("past the stream", b"", 7)
        assert [job.job_id for job in await pulling] == ["past the stream"]
    await until(lambda: ends.producer.available and not ends.producer.past_stream, HANG_S)


async def test_a_dead_letter_stream_without_a_leader_holds_no_job(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(ends.consumer, monkeypatch, ends.names.dead_stream)
    await ends.lose(ends.consumer)
    assert ends.consumer.stream_id
    await ends.producer.publish("a", b"", 7)
    [job] = await ends.consumer.pull(1, 1, HANG_S)
    await job.ack()


async def test_a_dead_letter_stream_that_is_gone_is_made_though_a_reconnect_did_not_wait_for_it(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = ends.names.dead_stream
    await ends.producer.connection.api(f"STREAM.DELETE.{dead}")
    with monkeypatch.context() as patch:
        silence(ends.consumer, patch, dead)
        refused = ends.consumer.connection.api

        async def first_only(operation: str, *rest: Any, **more: Any) -> Any:
            if dead in operation:
                patch.undo()
            return await refused(operation, *rest, **more)

        patch.setattr(ends.consumer.connection, "api", first_only)
        await ends.lose(ends.consumer)
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                await ends.producer.connection.api(f"STREAM.INFO.{dead}")
                break
            except QueueUnavailable:
                await asyncio.sleep(0.02)


async def test_a_worker_that_took_a_job_past_the_stream_is_sent_no_other(ends: Ends) -> None:
    """Its request for a stored job still waits at the server. Nobody would take what comes."""
    pulling = ends.pull()
    await until(lambda: ends.consumer._requests.lives)
    await ends.direct("past the stream")
    assert [job.job_id for job in await pulling] == ["past the stream"]
    await ends.consumer.connection.flush()  # the server knows that the request is withdrawn
    await ends.producer.publish("stored", b"", 7)
    await asyncio.sleep(0.1)
    [job] = await ends.consumer.pull(1, 1, HANG_S)
    assert (job.job_id, job.number) == ("stored", 1)
    await job.ack()


async def test_a_full_worker_takes_no_job_past_the_stream(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pulls urgent jobs only. A direct job would wait behind all that it has."""
    answers = await ends.answers()
    for urgent_only, answer in ((True, BUSY), (False, TAKEN)):
        with monkeypatch.context() as patch:
            released = asyncio.Event()
            patch.setattr(ends.consumer.acks, "push", released.wait)  # a pull begins with it
            ends.consumer.lanes.turns.fill(TIGHT)
            pulling = ends.pull(urgent_only=urgent_only)
            await until(lambda: ends.consumer._waiting)
            await ends.direct()
            assert (await answers.next_msg(HANG_S)).data == answer
            released.set()
            if not urgent_only:
                await ends.producer.publish("a", b"", 7)
            assert [job.job_id for job in await pulling] == ([] if urgent_only else ["a"])


async def test_a_job_past_the_stream_is_refused_if_its_pull_is_cancelled(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, as its producer waits for the answer. Nothing stores the job, so the producer must
    not believe that a worker has it."""
    answers = await ends.answers()
    pulling = ends.pull()
    await until(lambda: ends.consumer._requests.lives)
    with monkeypatch.context() as patch:
        # While the stream has no leader, its server is slow to note a withdrawal.
        released = asyncio.Event()
        patch.setattr(ends.consumer._requests, "withdraw", lambda **_: released.wait())
        await ends.direct("a")
        pulling.cancel()
        assert (await answers.next_msg(HANG_S)).data == BUSY
        released.set()
        with pytest.raises(asyncio.CancelledError):
            await pulling

    pulling = ends.pull()
    await until(lambda: ends.consumer._waiting)
    await ends.direct("a")
    assert [job.job_id for job in await pulling] == ["a"]
    assert (await answers.next_msg(HANG_S)).data == TAKEN


async def test_an_old_check_of_the_stream_says_nothing_about_the_next(ends: Ends) -> None:
    async def failed() -> QueueUnavailable:
        return QueueUnavailable("an outage of yesterday")

    ends.consumer._checking = asyncio.create_task(failed())
    turns = list[bool]()
    ends.consumer.health.on_change = lambda: turns.append(ends.consumer.health.up)
    await ends.producer.connection.api(f"CONSUMER.DELETE.{ends.names.stream}.{CONSUMER}")
    pulling = ends.pull()
    await until(lambda: ends.consumer._requests.lives, HANG_S)
    await until(lambda: ends.producer.available and not ends.producer.past_stream, HANG_S)
    await ends.producer.publish("a", b"", 7)
    [job] = await asyncio.wait_for(pulling, HANG_S)
    await job.ack()
    assert False not in turns


async def test_a_producer_subscribes_once_for_each_connection(ends: Ends) -> None:
    """Not each time it finds the stream gone."""
    subscriptions = ends.producer.connection.client._subs
    before = len(subscriptions)
    for _ in range(3):
        await ends.producer.connection.api(f"STREAM.DELETE.{ends.names.stream}")
        await ends.producer._look()
    assert len(subscriptions) == before
