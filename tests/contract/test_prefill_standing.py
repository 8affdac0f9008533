"""Connections in a large fleet: few stay open, others are made when a job needs them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pullfill.errors import PeerUnavailable
from pullfill.net import peer_link
from pullfill.prefill_worker import decode_links as links_module
from pullfill.prefill_worker.decode_links import LEAST, DecodeLink, DecodeLinks
from pullfill.wire import Hello, WorkerRecord, WorkerState
from tests.support.control_rig import Decode, FakeDirectory, until
from tests.support.handoff_decode import COMPATIBLE, DecodeHalf
from tests.support.handoff_rig import Cluster, PrefillHalf, hold, prompt, settled, stuck_in_a_write
from tests.support.transfer_rigs import COMPAT

SOON_S = 0.05


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """DecodeLinks check every 20 ms whether they are idle, not every second."""
    monkeypatch.setattr(peer_link, "ALIVE_INTERVAL_S", 0.02)


def prefill_record(name: str, state: WorkerState = WorkerState.READY) -> WorkerRecord:
    return WorkerRecord(
        instance_id=name, incarnation="i", role="prefill", state=state, model="m",
        compat=COMPAT, host="127.0.0.1", host_id="h", pid=1, started_at=0.0,
    )  # fmt: skip


class Fleet:
    """Decode workers that listen, and the links of prefill workers."""

    def __init__(self, decode: list[Decode], prefill: dict[str, DecodeLinks], seen: FakeDirectory):
        self.decode, self.prefill, self.directory = decode, prefill, seen

    @property
    def sockets(self) -> int:
        return sum(len(decode.server.peers) for decode in self.decode)

    @property
    def settled(self) -> bool:
        """Whether both ends have exactly the standing connections."""
        wanted = {name: links.standing for name, links in self.prefill.items()}
        return self.sockets == sum(map(len, wanted.values())) and all(
            links.connected == sorted(wanted[name]) for name, links in self.prefill.items()
        )


@asynccontextmanager
async def fleet(decode: int, prefill: int, most: int, idle_s: float = 60.0) -> AsyncIterator[Fleet]:
    async def no_transfer_worker(_: Any) -> Any:
        raise AssertionError("nothing is moved")

    directory: Any = FakeDirectory()
    async with AsyncExitStack() as stack:
        servers = [Decode(name=f"decode-{n}") for n in range(decode)]
        for server in servers:
            await server.server.start("127.0.0.1")
            stack.push_async_callback(server.server.stop)
            directory.put(replace(server.record(), compat=COMPAT))
        found = {}
        for name in [f"prefill-{n}" for n in range(prefill)]:
            directory.put(prefill_record(name))
            hello = Hello(prefill_instance=name, compat=COMPAT.hash())
            found[name] = DecodeLinks(
                directory, hello, COMPAT, no_transfer_worker,
                most=most, idle_s=idle_s,
            )  # fmt: skip
            stack.push_async_callback(found[name].close)
        for links in found.values():
            links.start()
        yield Fleet(servers, found, directory)


async def test_the_connections_of_a_fleet_are_bounded() -> None:
    """Of 20 x 16 pairs each worker keeps only a few connections, but at least one."""
    async with fleet(20, 16, most=3) as workers:
        await until(lambda: workers.settled)
        assert workers.sockets <= 20 * 3 + 16 * LEAST
        assert min(len(decode.server.peers) for decode in workers.decode) >= 3
        assert min(len(links.connected) for links in workers.prefill.values()) >= 3
        await until(lambda: {decode.server.peers.pool for decode in workers.decode} == {16})


async def test_connections_follow_who_comes_and_goes(quick: None) -> None:
    """A prefill worker that leaves, or drains, is replaced at each of its decode workers. When it
    is back, the one in its place goes."""
    async with fleet(8, 6, most=2, idle_s=SOON_S) as workers:
        await until(lambda: workers.settled)
        before = {name: links.connected for name, links in workers.prefill.items()}
        record = workers.directory.members["prefill-2"]
        gone = workers.prefill.pop("prefill-2")
        await gone.close()
        workers.directory.put(replace(record, state=WorkerState.DRAINING))
        await until(lambda: workers.settled)
        assert min(len(decode.server.peers) for decode in workers.decode) >= 2
        await until(lambda: {decode.server.peers.pool for decode in workers.decode} == {5})
        workers.directory.put(record)
        await until(lambda: workers.settled)
        now = {name: links.connected for name, links in workers.prefill.items()}
        assert now == {name: links for name, links in before.items() if name != "prefill-2"}


async def test_a_decode_worker_that_left_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode worker may drain while workers that are not connected to it pull its last jobs. If
    it is dead, no job waits for it a second time."""
    async with fleet(8, 6, most=1) as workers:
        await until(lambda: workers.settled)
        links = workers.prefill["prefill-0"]
        drains, dead = [d for d in workers.decode if d.name not in links.connected][:2]
        workers.directory.remove(drains.name)
        assert not links.knows(drains.name)
        assert (await links.find(drains.name)).connected
        await dead.server.stop()
        workers.directory.remove(dead.name)
        with pytest.raises(PeerUnavailable, match="does not answer"):
            await links.find(dead.name)
        await until(lambda: dead.name not in links.links)
        monkeypatch.setattr(links_module, "DecodeLink", None)
        with pytest.raises(PeerUnavailable, match="left the directory"):
            await links.find(dead.name)


# --------------------------------------------------------------------------- with jobs


@asynccontextmanager
async def far_apart(tmp_path: Path) -> AsyncIterator[tuple[Cluster, DecodeHalf, PrefillHalf]]:
    """A prefill worker that pulls, and a decode worker that is connected to another one only."""
    # A slow claim counts nothing, by design.
    links, budget = {"most": 1, "idle_s": SOON_S}, {"claim_s": 60.0}
    async with Cluster(tmp_path, links=links, budget=budget) as cluster:
        for number in (1, 2):
            record = replace(prefill_record(f"prefill-{number}"), compat=COMPATIBLE)
            cluster.directory.put(record)
        for number in range(16):
            await cluster.decode(f"decode-{number}")
        far, near = await cluster.prefill(pull=False), await cluster.prefill(pull=False)
        far.puller.start()
        decode = next(name for name in near.links.connected if name not in far.links.connected)
        yield cluster, cluster.decodes[decode], far


async def serve(decode: DecodeHalf, seed: int) -> None:
    served = decode.send(prompt(30, seed=seed))
    await settled(served)
    assert decode.right(served)


async def test_a_job_brings_its_connection_and_leaves_none(tmp_path: Path, quick: None) -> None:
    async with far_apart(tmp_path) as (cluster, decode, prefill):
        for seed in range(3):
            assert decode.name not in prefill.links.connected
            await serve(decode, seed)
            assert decode.name in prefill.links.connected
            await until(lambda: len(decode.control.peers) == 1)
            await until(lambda: decode.name not in prefill.links.links)
        assert (prefill.budget.completed, prefill.budget.failed) == (3, 0)
        await cluster.check_clean()


async def test_no_job_fails_though_links_are_closed_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_link, "ALIVE_INTERVAL_S", 0.001)
    async with far_apart(tmp_path) as (cluster, decode, prefill):
        prefill.links.idle_s = 0.0
        made: list[DecodeLink] = []
        connect = prefill.links._open
        monkeypatch.setattr(
            prefill.links, "_open", lambda *args: made.append(connect(*args)) or made[-1]
        )
        for seed in range(40):
            both = [decode.send(prompt(20, seed=seed)), decode.send(prompt(20, seed=seed + 50))]
            await settled(*both)
            assert all(decode.right(served) for served in both)
            for served in both:
                decode.abort(served)
            await asyncio.sleep(seed % 4 * 0.001)
        assert len(made) > 5
        assert prefill.budget.failed == 0
        await cluster.check_clean()


async def test_a_link_stays_while_its_job_runs(tmp_path: Path, quick: None) -> None:
    """A copy may take longer than `idle_s`, also a copy whose job has ended."""
    async with far_apart(tmp_path) as (cluster, decode, prefill):
        faults = hold(decode)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        await asyncio.sleep(10 * SOON_S)
        assert prefill.links.is_up(decode.name)
        decode.abort(served)
        await until(lambda: prefill.puller.in_flight <= 1)
        await asyncio.sleep(10 * SOON_S)
        assert prefill.links.is_up(decode.name), "its copy is not proved quiet"
        faults.resume()
        await until(lambda: decode.name not in prefill.links.links)
        await cluster.check_clean()


async def test_jobs_that_bring_their_connection_count_against_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a worker that still connects would pull jobs that others could begin."""
    async with far_apart(tmp_path) as (cluster, _, prefill):
        under_way: list[int] = []
        start = prefill.puller.begin

        def counted(delivery: Any) -> None:
            start(delivery)
            under_way.append(prefill.puller.in_flight)

        monkeypatch.setattr(prefill.puller, "begin", counted)
        prefill.budget.limit = 80
        far = [d for d in cluster.decodes.values() if d.name not in prefill.links.connected]
        assert len(far) >= 4
        served = [decode.send(prompt(50)) for decode in far]
        await settled(*served)
        assert all(decode.right(one) for decode, one in zip(far, served, strict=True))
        assert max(under_way) == 2, "50 of 80 tokens leave room for one more"
        await cluster.check_clean()
