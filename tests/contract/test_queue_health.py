"""Both ends of the queue notice a NATS that hangs or dies, and tell whoever depends on it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from nats.aio.client import Client

from pullfill.errors import PeerUnavailable, PullfillError, QueueUnavailable
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.prefill_worker.puller import Budget, Puller
from pullfill.prefill_worker.read_grants import ReadGrants
from pullfill.prefill_worker.transfer_worker import Credits
from pullfill.queue import nats_connection, streams
from pullfill.queue.contract import QueueConfig, Urgency
from pullfill.queue.jetstream import (
    REQUEST_S,
    JetStreamConsumer,
    JetStreamProducer,
)
from pullfill.queue.nats_connection import NatsConnection
from pullfill.queue.streams import consumer_of
from pullfill.runtime.health import UP
from pullfill.wire import QueueSettings
from tests.support.control_rig import Decode, FakeDirectory, hello
from tests.support.nats import NatsServer, until
from tests.support.small_disk import full, small_disk
from tests.support.transfer_rigs import COMPAT

HANG_S = 15.0
CONSUMER = consumer_of(Urgency.NORMAL)


@dataclass
class Ends:
    server: NatsServer
    producer: JetStreamProducer
    consumer: JetStreamConsumer

    async def lose(self, how: str) -> None:
        """Wait until both connections are up and nothing arrives any more."""
        await until(lambda: self.producer.health.up and self.consumer.health.up, HANG_S)
        getattr(self.server, how)()

    async def bring_back(self, how: str) -> None:
        if how == "pause":
            self.server.resume()
        else:
            await self.server.start()


@pytest.fixture
async def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Ends]:
    monkeypatch.setattr(nats_connection, "PING_EVERY_S", 0.125)
    monkeypatch.setattr(nats_connection, "PING_WAIT_S", 0.6)
    server = NatsServer(tmp_path)
    await server.start()
    config = QueueConfig("test", secrets.token_hex(8), publish_timeout_s=0.3)
    login = server.url.replace("nats://", "nats://somebody:secret@")
    producer = await JetStreamProducer.connect(login, config, wait_s=HANG_S)
    consumer = await JetStreamConsumer.connect(login, config, wait_s=HANG_S)
    yield Ends(server, producer, consumer)
    server.resume_if_paused()
    await asyncio.gather(producer.close(), consumer.close())
    server.stop()


@pytest.mark.parametrize("how", ["pause", "kill"])
async def test_both_ends_say_that_nats_is_away_and_since_when(
    ends: Ends, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    await ends.lose(how)
    await until(lambda: not (ends.producer.health.up or ends.consumer.health.up), HANG_S)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert not ends.producer.available, "nothing is published, so nothing waits for an answer"
    status = ends.producer.health.status()
    assert not status.up
    assert status.error is not None
    assert ends.server.url.removeprefix("nats://") in status.error
    assert "secret" not in status.error
    assert UP.labels("nats")._value.get() == 0
    await asyncio.sleep(0.05)
    assert ends.producer.health.status().since_s > status.since_s
    await ends.bring_back(how)
    await until(lambda: ends.producer.available and ends.consumer.health.up, HANG_S)
    assert UP.labels("nats")._value.get() == 1
    assert ends.producer.health.status().error is None


async def test_a_link_closes_though_its_dial_loses_a_cancellation(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio.wait_for of Python 3.11 does, if what it waits for is done in that moment."""
    real, lost, dialled = Client.connect, list[str](), asyncio.Event()

    async def connect(client: Client, *args: Any, **options: Any) -> None:
        await real(client, *args, **options)
        dialled.set()
        try:
            await asyncio.sleep(HANG_S)
        except asyncio.CancelledError:
            lost.append("cancellation")

    async def setup() -> None:
        return

    async def wait_up(_: float) -> bool:
        await dialled.wait()
        return False

    monkeypatch.setattr(Client, "connect", connect)
    link = NatsConnection(ends.server.url, "test")
    monkeypatch.setattr(link, "wait_up", wait_up)  # `start` gives up inside the dial
    async with asyncio.timeout(HANG_S / 3):
        with pytest.raises(QueueUnavailable):
            await link.start(HANG_S, setup)
    assert lost == ["cancellation"]


async def test_a_process_that_stood_still_does_not_blame_the_server(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loop runs again only when the time for the answer is over."""
    client = ends.consumer.connection.client
    real, asked = client.flush, list[float]()

    async def flush(**options: Any) -> None:
        asked.append(time.monotonic())
        time.sleep(1.2 * nats_connection.PING_WAIT_S)  # noqa: ASYNC251 - the loop is to stand still
        await real(**options)

    turns: list[bool] = []
    ends.consumer.health.subscribe(lambda: turns.append(ends.consumer.health.up))
    with monkeypatch.context() as slow:
        slow.setattr(client, "flush", flush)
        await until(lambda: len(asked) > 1, HANG_S)
    assert turns == []


@pytest.mark.parametrize("how", ["pause", "kill"])
async def test_a_prefill_worker_that_cannot_pull_says_so_at_once(
    ends: Ends, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the next Heartbeat, which never comes here. Back again, it counts again."""
    monkeypatch.setattr("pullfill.net.peer_link.ALIVE_INTERVAL_S", 3600.0)
    decode, directory = Decode(silent_s=3600.0), FakeDirectory()
    await decode.server.start("127.0.0.1")
    seen: Any = directory

    async def no_transfer_worker(_: Any) -> Any:
        raise PeerUnavailable("this test moves nothing")

    links = DecodeLinks(seen, hello("prefill-1"), COMPAT, no_transfer_worker)
    links.start()
    engine: Any = None
    puller = Puller(
        ends.consumer, links, engine, Budget(1), Credits(1), ReadGrants(None),
        ends.consumer.health, max_prompt_tokens=1,
    )  # fmt: skip
    try:
        directory.put(replace(decode.record(), compat=COMPAT))
        await until(lambda: len(decode.server.peers.pulling) == 1, HANG_S)
        decode.open()
        await ends.lose(how)
        await until(lambda: len(decode.server.peers.pulling) == 0, HANG_S)
        (line,) = decode.server.peers.not_pulling
        assert line.startswith("prefill-1 pulls no jobs: NATS does not answer it")
        await until(lambda: decode.ledger.open_jobs == 0, HANG_S)
        await ends.bring_back(how)
        await until(lambda: len(decode.server.peers.pulling) == 1, HANG_S)
        assert decode.server.peers.not_pulling == []
        assert puller.budget.room.is_set(), "the next pull does not wait for its pause"
    finally:
        await links.close()
        await decode.server.stop()


async def test_a_connected_server_that_answers_no_pulls_is_away_for_a_prefill_worker(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream without a quorum: its connections stand and answer PINGs."""
    consumer = ends.consumer
    with monkeypatch.context() as lost:
        lost.setattr("pullfill.queue.jetstream.consumer_of", lambda _: "nobody")
        lost.setattr(consumer.connection, "api", _unavailable)
        with contextlib.suppress(QueueUnavailable):
            assert await consumer.pull(0.1) is None
        assert consumer.connection.up
        await asyncio.sleep(2 * nats_connection.PING_EVERY_S)
        assert not consumer.health.up, "a PING that is answered does not hide it"
        assert "no quorum" in str(consumer.health.status().error)
    await until(lambda: consumer.health.up, HANG_S)
    assert await consumer.pull(0.1) is None


async def test_a_cancelled_pull_withdraws_its_request_also_after_a_restart(ends: Ends) -> None:
    """Else the next job goes to nobody, and uses up one of its deliveries."""
    info = f"CONSUMER.INFO.{ends.consumer._names.stream}.{CONSUMER}"

    async def waiting(count: int, within_s: float = HANG_S) -> None:
        async with asyncio.timeout(within_s):
            while (await ends.producer.connection.api(info))["num_waiting"] != count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    for _ in range(3):
        pulling = asyncio.create_task(ends.consumer.pull(HANG_S))
        await waiting(1)
        pulling.cancel()
        await waiting(0, within_s=REQUEST_S / 2)  # by itself it would end later
        await ends.lose("stop")
        await until(lambda: not (ends.producer.health.up or ends.consumer.health.up))
        await ends.bring_back("stop")
        await until(lambda: ends.producer.health.up and ends.consumer.health.up)


async def test_a_pull_that_was_cancelled_has_left_the_server(ends: Ends) -> None:
    """On a busy machine its UNSUB is written late. A job would be sent to it, and be given back."""
    producer, consumer = ends.producer, ends.consumer
    pull = asyncio.create_task(consumer.pull(HANG_S))
    info = f"CONSUMER.INFO.{consumer._names.stream}.{CONSUMER}"
    async with asyncio.timeout(HANG_S):
        while not (await producer.connection.api(info))["num_waiting"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    transport, loop = consumer.connection.client._transport, asyncio.get_running_loop()
    write = transport.writelines
    transport.writelines = lambda lines: loop.call_later(0.2, write, list(lines))
    pull.cancel()
    await asyncio.gather(pull, return_exceptions=True)
    await producer.publish("a", b"", 10)
    await asyncio.sleep(0.5)
    job = await consumer.pull(HANG_S)
    assert job is not None
    assert job.number == 1
    await job.ack()


async def test_a_server_with_a_full_disk_costs_one_answer_until_it_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers all else, and goes on storing nothing when there is room again."""
    monkeypatch.setattr(streams, "DEAD_MAX_BYTES", 1 << 20)
    settings = QueueSettings(max_bytes=4 << 20)
    config = QueueConfig("test", secrets.token_hex(8), publish_timeout_s=0.3)
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(tmp_path / "disk", 16))
        server = NatsServer(disk)
        stack.callback(server.stop)
        await server.start()
        producer = await JetStreamProducer.connect(server.url, config, settings=settings)

        async def published() -> tuple[int, int]:
            """How many jobs of ten were stored, and how many had to wait for an answer."""
            stored, waited = 0, 0
            for _ in range(10):
                waited += producer.available
                with contextlib.suppress(PullfillError):
                    await producer.publish(secrets.token_hex(8), bytes(8000), 1)
                    stored += 1
                await asyncio.sleep(0.1)
            return stored, waited - stored

        assert await published() == (10, 0)
        with full(disk):
            stored, waited = await published()
            assert stored == 0
            assert waited <= 3, "the pause doubles"
            await until(lambda: "stores no jobs" in str(producer.health.status().error))
        assert (await published())[0] == 0
        (line,) = [r.getMessage() for r in caplog.records if "stores no jobs" in r.message]
        assert line.startswith(f"NATS at {server.url} answers but stores no jobs")
        await server.restart()
        await until(lambda: producer.available, HANG_S)
        assert await published() == (10, 0)
        await producer.close()


async def _unavailable(*_: object, **__: object) -> str:
    raise QueueUnavailable("no quorum")


async def test_a_stream_that_was_made_anew_with_other_rules_is_said(ends: Ends) -> None:
    """Only an operator can mend it. The worker said that it pulls."""

    async def pull() -> None:
        while True:
            with contextlib.suppress(PullfillError):
                await ends.consumer.pull(0.5)
            await asyncio.sleep(0.01)

    api, name = ends.producer.connection.api, ends.consumer.streams._names.stream
    await api(f"STREAM.DELETE.{name}")
    await api(f"STREAM.CREATE.{name}", {"name": name, "subjects": ["x"], "storage": "memory"})
    pulling = asyncio.create_task(pull())
    await until(lambda: "nats stream rm" in str(ends.consumer.health.status().error))
    assert not pulling.done()
    pulling.cancel()
