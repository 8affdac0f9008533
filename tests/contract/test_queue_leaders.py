"""A server of a NATS cluster dies: the stream, the dead-letter stream and each consumer have a
leader of their own. What has no leader stops nothing else.

One server stands for the cluster here. Some of its answers are withheld: a missing leader sends
none."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from pullfill.errors import QueueUnavailable
from pullfill.queue.contract import QueueConfig, Urgency
from pullfill.queue.jetstream import JetStreamConsumer, JetStreamProducer
from pullfill.queue.nats_connection import NoResponders
from pullfill.queue.streams import Names, consumer_of
from tests.support.nats import NatsServer, until

HANG_S = 15.0
TIGHT = consumer_of(Urgency.TIGHT)


@dataclass
class Ends:
    producer: JetStreamProducer
    consumer: JetStreamConsumer
    names: Names

    async def lose(self, end: JetStreamConsumer | JetStreamProducer) -> None:
        """Break a connection, and wait for the next one."""
        before = end.connection.generation
        end.connection.reset("the test breaks it")
        await until(lambda: end.connection.up and end.connection.generation > before, HANG_S)


@pytest.fixture
async def ends(nats: NatsServer) -> AsyncIterator[Ends]:
    config = QueueConfig("test", secrets.token_hex(8), publish_timeout_s=5.0)
    producer = await JetStreamProducer.connect(nats.url, config, wait_s=HANG_S)
    consumer = await JetStreamConsumer.connect(nats.url, config, wait_s=HANG_S)
    yield Ends(producer, consumer, Names(config.namespace, config.compat_hash))
    await asyncio.gather(producer.close(), consumer.close())


def silence(end: Any, monkeypatch: pytest.MonkeyPatch, *about: str) -> list[str]:
    """JetStream does not answer an end about what has one of these words in its name. Returns what
    it was asked about that."""
    real, asked = end.connection.api, list[str]()

    async def api(operation: str, *rest: Any, **more: Any) -> Any:
        if any(word in operation for word in about):
            asked.append(operation)
            raise QueueUnavailable("no answer")
        return await real(operation, *rest, **more)

    monkeypatch.setattr(end.connection, "api", api)
    return asked


@pytest.mark.parametrize("reconnects", [False, True])
async def test_a_consumer_without_a_leader_holds_no_job_of_another_urgency(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, reconnects: bool
) -> None:
    with monkeypatch.context() as patch:
        asked = silence(ends.consumer, patch, TIGHT)
        if reconnects:
            await ends.lose(ends.consumer)
        await ends.producer.connection.api(f"CONSUMER.DELETE.{ends.names.stream}.{TIGHT}")
        await ends.producer.publish("normal", b"", 7)
        await ends.producer.publish("tight", b"", 7, Urgency.TIGHT)
        job = await asyncio.wait_for(ends.consumer.pull(HANG_S), HANG_S)
        assert job.job_id == "normal"
        await until(lambda: bool(asked))
        assert ends.consumer.health.up
        await job.ack()
    job = await ends.consumer.pull(HANG_S)
    assert job.job_id == "tight"
    await job.ack()


async def test_without_a_leader_of_the_stream_prompts_are_prefilled_locally(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publish fails at once, and none is tried until JetStream answers."""

    async def nobody(*_: object) -> None:
        raise NoResponders("no leader")

    with monkeypatch.context() as patch:
        patch.setattr(ends.producer.connection, "request", nobody)
        with pytest.raises(QueueUnavailable):
            await ends.producer.publish("a", b"", 7)
        assert not ends.producer.available
    await until(lambda: ends.producer.available, HANG_S)
    await ends.producer.publish("b", b"", 7)
    job = await ends.consumer.pull(HANG_S)
    assert job.job_id == "b"
    await job.ack()


async def test_a_dead_letter_stream_without_a_leader_holds_no_job(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(ends.consumer, monkeypatch, ends.names.dead_stream)
    await ends.lose(ends.consumer)
    await ends.producer.publish("a", b"", 7)
    job = await ends.consumer.pull(HANG_S)
    await job.ack()
