"""Pull: who cannot be read writes, and is read again once it can be. Who is read may leave."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker import kv_reader as readers
from pullfill.decode_worker.kv_reader import KvReader
from pullfill.decode_worker.peers import Peer
from pullfill.errors import PeerUnavailable
from pullfill.prefill_worker.side import PrefillService
from pullfill.runtime.health import ServerHealth
from pullfill.transfer.contract import PeerSession
from pullfill.wire import KvMode
from tests.support.fakes import FakeClock
from tests.support.handoff_decode import DecodeHalf
from tests.support.handoff_rig import Cluster, hold, prompt, settled, stuck_in_a_read, until


class Route:
    """Between a decode worker and one prefill worker's KV port: it can be cut."""

    def __init__(self, decode: DecodeHalf) -> None:
        self._reach: Any = decode.control._reach
        self.cut = True
        self.tries = 0
        decode.control._reach = self._way

    def _way(self, regions: Any) -> Any:
        there = self._reach(regions)

        def open_session() -> PeerSession:
            cut = self.cut  # before the try counts: a test may then mend the route at once
            self.tries += 1
            if cut:
                raise PeerUnavailable("the KV port does not answer")
            session: PeerSession = there()
            return session

        return open_session


def reader_of(decode: DecodeHalf) -> KvReader:
    (peer,) = decode.control.peers.values()
    assert peer.reader is not None
    return peer.reader


async def transport_of(decode: DecodeHalf, seed: int) -> str | None:
    served = decode.send(prompt(30, seed=seed))
    await settled(served)
    assert served.loaded, "a job was spent on looking"
    assert decode.right(served)
    trace = decode.traces.finish(served.request.request_id)
    assert trace is not None
    return trace.transport


async def test_a_worker_that_can_be_reached_again_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall was mended, say. No job after the first is spent on finding that out."""
    async with Cluster(tmp_path, "tcp", kv_mode=KvMode.PULL) as cluster:
        decode = await cluster.decode()
        route = Route(decode)
        await cluster.prefill(chunk=5)
        reader = reader_of(decode)
        clock = reader._clock = FakeClock()
        modes: list[KvMode] = []
        grant = Peer.in_reach

        def granting(*args: Any) -> Any:
            granted = grant(*args)
            modes.append(granted.mode)
            return granted

        monkeypatch.setattr(Peer, "in_reach", granting)
        first = decode.send(prompt(30))
        await settled(first)
        assert first.loaded is False
        await transport_of(decode, 2)
        clock.advance(readers.IDLE_S - 1)
        await transport_of(decode, 3)
        assert route.tries == 1
        clock.advance(1)
        for seed in (4, 5):
            await transport_of(decode, seed)
        await until(lambda: route.tries == 2)
        route.cut = False
        await transport_of(decode, 6)
        assert route.tries == 2, "it looks at each job"
        clock.advance(readers.IDLE_S)
        await transport_of(decode, 7)
        await until(lambda: reader._session is not None and not reader._unreachable)
        assert await transport_of(decode, 8) == "tcp"
        assert route.tries == 3
        push, pull = KvMode.PUSH_ASYNC, KvMode.PULL
        assert modes == [pull, push, push, push, push, push, push, pull]
        await cluster.check_clean()


@pytest.mark.parametrize("device", [None, 0], ids=["cpu", "gpu"])
async def test_a_drain_waits_for_no_stopped_reader_of_shared_memory(
    tmp_path: Path, device: int | None
) -> None:
    """Its blocks stay as they are. GPU memory is freed when its process ends, so that drain waits.
    In both cases the worker is not busy."""
    async with Cluster(tmp_path, kv_mode=KvMode.PULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        puller = prefill.puller
        memory = replace(prefill.local.memory, device=device)
        engine: Any = SimpleNamespace(context=SimpleNamespace(memories=[memory]))
        thread: Any = SimpleNamespace(dead=asyncio.Event())
        (nats := ServerHealth("nats")).ok()
        service = PrefillService(
            engine,
            thread,
            prefill.links,
            prefill.puller,
            prefill.budget,
            prefill.credits,
            [nats],
            prefill.links.hello,
        )
        faults = hold(prefill)
        served = decode.send(prompt(30))
        await stuck_in_a_read(prefill)
        kept = {block for run in prefill.engine._runs.values() for block in run.table}
        await service.stop_taking()
        drain = asyncio.create_task(service.finished())
        await asyncio.sleep(0.05)
        assert not drain.done(), "the job still runs"
        for peer in list(decode.control.peers.values()):
            peer.channel.abort()
        await until(puller.no_jobs.is_set)
        assert puller.in_flight == 0
        if device is None:
            await asyncio.wait_for(drain, 5)
        await asyncio.sleep(0.05)
        assert drain.done() == (device is None)
        assert not kept & prefill.engine.pool.free
        faults.resume()
        await asyncio.wait_for(drain, 5)
        await settled(served)
        await cluster.check_clean()


async def test_looking_again_never_ends_the_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> PeerSession:
        raise PeerUnavailable("no") if not caplog.records else RuntimeError("a bug")

    clock = FakeClock()
    reader = KvReader("prefill-1", broken, clock)
    with pytest.raises(PeerUnavailable):
        reader._connect()
    clock.advance(readers.IDLE_S)
    assert not reader.within_reach()
    await until(lambda: "a bug" in caplog.text)
    assert reader._thread.submit(lambda: 1).result(10) == 1
    clock.advance(readers.IDLE_S)
    reader._closing = True  # nothing is begun any more
    said = len(caplog.records)
    assert not reader.within_reach()
    reader.close()
    assert len(caplog.records) == said


async def test_without_a_thread_it_looks_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control connection asks, and would end with an exception."""

    def unreachable() -> PeerSession:
        raise PeerUnavailable("no")

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    clock = FakeClock()
    reader = KvReader("prefill-1", unreachable, clock)
    with pytest.raises(PeerUnavailable):
        reader._connect()
    clock.advance(readers.IDLE_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not reader.within_reach()
    tried = reader._tried_at
    clock.advance(readers.IDLE_S)
    assert not reader.within_reach()
    assert reader._thread.wait(10)
    assert reader._tried_at > tried
    reader.close()


async def test_over_what_it_came_is_told_though_the_session_is_gone_by_then(
    tmp_path: Path,
) -> None:
    """The next job's read may have failed before the loop hears of this one's end."""
    async with Cluster(tmp_path, kv_mode=KvMode.PULL) as cluster:
        decode = await cluster.decode()
        await cluster.prefill(chunk=5)
        reader = reader_of(decode)
        real = reader._fetch

        def fetch(*args: Any) -> Any:
            moved = real(*args)
            reader._let_go()
            return moved

        reader._fetch = fetch  # type: ignore[method-assign]
        assert await transport_of(decode, 1) == "loopback"
        await cluster.check_clean()


async def test_a_link_that_is_lost_after_the_close_is_left_all_the_same() -> None:
    """While a worker stops, its readers are closed before the loop hears that their links ended."""
    gone: list[str] = []
    before, after = (KvReader(name, lambda: pytest.fail("nothing is read")) for name in "ab")
    before.leave(lambda: gone.append("before"))
    before.close()
    after.close()
    after.leave(lambda: gone.append("after"))
    after.leave(lambda: gone.append("twice"))
    assert gone == ["before", "after", "twice"]
