"""The asker's connections. Both ends together: tests/contract/test_prefix_fetch.py."""

from __future__ import annotations

import asyncio

import pytest

from pullfill.decode_worker.prefix import holders
from pullfill.decode_worker.prefix.holders import Holders
from pullfill.errors import PeerUnavailable
from pullfill.runtime.lifecycle import end
from pullfill.wire import LeaseHello, LeaseWelcome, PrefixHolder
from tests.support import framing


def reach(regions: object) -> object:
    return lambda: None


@pytest.fixture
async def made() -> Holders:
    hello = LeaseHello(decode_instance="asker", compat="c", computes="")
    return Holders(hello, reach, None)  # type: ignore[arg-type]


class Impostor:
    """Welcomes everybody as another worker."""

    async def start(self, name: str) -> PrefixHolder:
        self._name = name
        self.connections = 0
        self._tasks: list[asyncio.Task[None] | None] = []
        self._server = await asyncio.start_server(self._serve, "127.0.0.1")
        host, port = self._server.sockets[0].getsockname()
        return PrefixHolder(instance_id="holder", control=f"tcp://{host}:{port}", tokens=1)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._tasks.append(asyncio.current_task())
        try:
            await framing.read(reader, LeaseHello)
            framing.write(writer, LeaseWelcome(decode_instance=self._name, regions=()))
            await reader.read()
        finally:
            writer.close()

    async def stop(self) -> None:
        self._server.close()
        await end(*self._tasks)


async def test_an_address_that_another_worker_uses_now(made: Holders) -> None:
    impostor = Impostor()
    at = await impostor.start("another")
    with pytest.raises(PeerUnavailable, match="now used by another"):
        await made.use(at)
    assert made.away("holder")
    await made.close()
    await impostor.stop()


async def test_prompts_that_come_at_once_share_a_connection(made: Holders) -> None:
    server = Impostor()
    at = await server.start("holder")
    first, second = await asyncio.gather(made.use(at), made.use(at))
    assert first is second
    assert server.connections == 1
    made.failed("holder")
    assert first.over
    with pytest.raises(PeerUnavailable, match="just now"):
        await made.use(at)
    made._places["holder"].not_before = 0.0
    assert await made.use(at) is not first
    await made.close()
    with pytest.raises(PeerUnavailable, match="leaving"):
        await made.use(at)
    await server.stop()


async def test_a_holder_that_fails_is_left_alone_longer_each_time(made: Holders) -> None:
    server = Impostor()
    await made.use(await server.start("holder"))
    place = made._places["holder"]
    pauses = []
    for _ in range(8):
        pauses.append(place.backoff.pause_s)
        place.not_before = 0.0
        for _ in range(3):  # of several prompts, for the same fault
            made.failed("holder")
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == 30 * holders.AGAIN_S
    made.worked("holder")
    assert not made.away("holder")
    assert place.backoff.pause_s == holders.AGAIN_S
    await made.close()
    await server.stop()


async def test_unused_holders_are_forgotten(made: Holders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holders, "MOST", 3)
    for number in range(9):
        at = PrefixHolder(instance_id=f"h{number}", control="tcp://127.0.0.1:1", tokens=1)
        with pytest.raises(PeerUnavailable):
            await made.use(at)
    assert len(made._places) <= 3
    await made.close()
