"""One producer of a model asks a real server for the depth and tells the others."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from nats.aio.msg import Msg

from pullfill.queue.contract import QueueConfig
from pullfill.queue.jetstream import JetStreamProducer
from pullfill.queue.names import Names
from pullfill.wire import DepthReport
from pullfill.wire.codec import encode
from tests.support.nats import NatsServer, until

HANG_S = 15.0
CONFIG = QueueConfig("test", secrets.token_hex(8), publish_timeout_s=1.0)
NAMES = Names(CONFIG.namespace, CONFIG.compat_hash)


class Watched:
    """Three producers, and a witness of what is asked of JetStream."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.producers: list[JetStreamProducer] = []
        self.asked = 0

    async def start(self) -> None:
        self.witness = await nats.connect(self.server.url)
        await self.witness.subscribe("$JS.API.STREAM.INFO.>", cb=self._note)
        for _ in range(3):
            self.producers.append(
                await JetStreamProducer.connect(self.server.url, CONFIG, wait_s=HANG_S)
            )

    async def _note(self, _: Msg) -> None:
        self.asked += 1

    @property
    def askers(self) -> list[JetStreamProducer]:
        return [p for p in self.producers if p._shared.asks]

    async def agreed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Wait until one asks. From then on the others wait for its reports, however late."""
        monkeypatch.setattr("pullfill.queue.depth.REPORT_S", HANG_S)
        await self.rounds(1)  # no wait of before goes on
        await until(lambda: len(self.askers) == 1)

    async def rounds(self, count: int) -> int:
        """How often the server was asked while every producer learnt a depth `count` times."""
        before = self.asked
        for _ in range(count):
            was = {id(p): p._depth._snapshot for p in self.producers}
            for producer in self.producers:
                producer.look_again()
            await until(
                lambda was=was: all(p._depth._snapshot is not was[id(p)] for p in self.producers)
            )
        return self.asked - before

    async def stop(self) -> None:
        await asyncio.gather(*(p.close() for p in self.producers), self.witness.close())


@pytest.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr("pullfill.queue.producer.BUSY_REFRESH_S", 0.05)
    monkeypatch.setattr("pullfill.queue.depth.REPORT_S", 0.25)
    server = NatsServer(tmp_path)
    await server.start()
    watched = Watched(server)
    with monkeypatch.context() as soon:  # or it takes two seconds until they agree on one asker
        for name in ("STEADY_REFRESH_S", "IDLE_REFRESH_S"):
            soon.setattr(f"pullfill.queue.producer.{name}", 0.05)
        await watched.start()
        await until(lambda: len(watched.askers) == 1)
    yield watched
    await watched.stop()
    server.stop()


async def test_three_producers_ask_no_more_than_one(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await watched.agreed(monkeypatch)
    assert await watched.rounds(10) <= 15, "three that each ask by themselves: 30"
    await watched.producers[0].publish("job", b"", 100)
    await until(lambda: all(p.depth().depth_jobs == 1 for p in watched.producers))
    assert {p.depth().depth_tokens for p in watched.producers} == {100}
    assert len(watched.askers) == 1


async def test_a_steady_stream_of_jobs_asks_once_a_second(watched: Watched) -> None:
    """Our own jobs are counted without the server, from the publish to the commit."""
    await until(lambda: len(watched.askers) == 1)
    producer, before, receipts = watched.producers[0], watched.asked, []
    begin = asyncio.get_running_loop().time()
    for number in range(40):
        receipts.append(await producer.publish(f"job-{number}", b"", 100))
        await asyncio.sleep(0.03)
    took = asyncio.get_running_loop().time() - begin
    # A producer that hears no report in time asks by itself. On a busy machine all three do.
    most = 3 * (1 + took)
    assert watched.asked - before <= most, "not with each refresh, which is 20 times a second"
    assert producer.depth().depth_jobs == 40
    for receipt in receipts:
        producer.committed(receipt)
    assert producer.depth().depth_jobs == 0


async def test_only_the_asker_hears_who_wants_to_know(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await watched.agreed(monkeypatch)
    others = [p for p in watched.producers if not p._shared.asks]
    await until(lambda: all(p._shared._wants is None for p in others))
    before = [p.connection.client.stats["in_msgs"] for p in others]
    for _ in range(100):
        await watched.witness.publish(f"{NAMES.depth}.want", b"")
    await watched.rounds(2)
    heard = [p.connection.client.stats["in_msgs"] - b for p, b in zip(others, before, strict=True)]
    assert all(count < 50 for count in heard), heard


async def test_another_asks_when_the_asker_is_gone(watched: Watched) -> None:
    await until(lambda: len(watched.askers) == 1)
    [asker] = watched.askers
    watched.producers.remove(asker)
    await asker.close()
    await watched.producers[0].publish("job", b"", 100)
    await until(lambda: len(watched.askers) == 1)
    await until(lambda: all(p.depth().depth_jobs == 1 for p in watched.producers))
    assert all(p.available for p in watched.producers)


async def test_of_two_askers_one_stops(watched: Watched) -> None:
    await until(lambda: len(watched.askers) == 1)
    for producer in watched.producers:
        producer._shared.asks = True
        producer.look_again()
    await until(lambda: len(watched.askers) == 1)
    [asker] = watched.askers
    assert asker._shared._id == min(p._shared._id for p in watched.producers)


async def test_reports_that_make_no_sense_or_are_old_change_nothing(watched: Watched) -> None:
    await watched.producers[0].publish("job", b"", 100)
    await until(lambda: all(p.depth().depth_jobs == 1 for p in watched.producers))
    stream = watched.producers[0].streams.stream_id
    old = DepthReport(
        asker="0", jobs=77, tokens=77, in_flight=0, oldest_age_s=0.0, last_seq=0,
        stream_id=stream, asked_s=0.0,
    )  # fmt: skip
    for body in (b"", b"nonsense", encode(old)):
        await watched.witness.publish(f"{NAMES.depth}.report", body)
    await watched.rounds(2)
    assert [p.depth().depth_jobs for p in watched.producers] == [1, 1, 1]


async def test_one_that_may_not_listen_asks_by_itself(tmp_path: Path) -> None:
    """A login with the rights of an older release."""
    rights = 'subscribe: ["_INBOX.>"], publish: [">"]'
    users = f'{{ users: [{{ user: u, password: "p", permissions: {{ {rights} }} }}] }}'
    server = NatsServer(tmp_path, extra=f"authorization {users}")
    await server.start()
    login = {"user": "u", "password": "p"}
    producer = await JetStreamProducer.connect(
        server.url, CONFIG, wait_s=HANG_S, connect_options=login
    )
    try:
        first = producer._depth._snapshot
        await until(lambda: producer._depth._snapshot is not first)
        assert producer.available
    finally:
        await producer.close()
        server.stop()
