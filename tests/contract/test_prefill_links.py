"""Prefill workers and decode workers that come and go, and how they greet each other."""

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
from pullfill.net.channel import FIRST_FRAME, HELLO_FRAME
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.wire import Hello, WorkerRecord, WorkerState, encode
from tests.support.control_rig import Decode, FakeDirectory, until
from tests.support.handoff_rig import (
    COMPATIBLE,
    Cluster,
    DecodeHalf,
    PrefillHalf,
    hold,
    prompt,
    settled,
    stuck_in_a_write,
)
from tests.support.transfer_rigs import COMPAT, DENSE, shm_rig

HELLO = Hello(prefill_instance="prefill-1", compat=COMPAT.hash())


async def no_transfer_worker(_: Any) -> Any:
    raise AssertionError("nothing is moved")


@asynccontextmanager
async def following(
    hello: Hello = HELLO, key: ClusterKey | None = None, **more: float
) -> AsyncIterator[tuple[DecodeLinks, FakeDirectory, Decode]]:
    """DecodeLinks that follow a directory, and a decode worker that listens."""
    decode, directory = Decode(key=key), FakeDirectory()
    await decode.server.start("127.0.0.1")
    seen: Any = directory
    links = DecodeLinks(
        seen, hello, COMPAT, no_transfer_worker, key, **more  # type: ignore[arg-type]
    )  # fmt: skip
    links.start()
    try:
        yield links, directory, decode
    finally:
        await links.close()
        await decode.server.stop()


async def test_a_greeting_may_be_long_and_one_that_nobody_takes_is_told_to_people(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    region = shm_rig(tmp_path).region(DENSE)
    region.owner.close()
    of_rank = replace(region.descriptor, world_size=512, endpoints={"shm": "x" * 500})
    hello = replace(HELLO, regions=tuple(replace(of_rank, rank=rank) for rank in range(512)))
    assert 2 * FIRST_FRAME < len(encode(hello)) < HELLO_FRAME
    async with following(hello, ClusterKey(b"k" * 32)) as (links, directory, decode):
        directory.put(replace(decode.record(), compat=COMPAT))
        assert (await links.find("decode-1")).connected
    async with following(replace(HELLO, computes="x" * HELLO_FRAME)) as (links, directory, decode):
        directory.put(replace(decode.record(), compat=COMPAT))
        await until(lambda: "our Hello has" in caplog.text)
        assert not links.connected


async def test_a_worker_that_is_both_does_not_connect_to_itself() -> None:
    async with following() as (links, directory, decode):
        own = replace(decode.record(), instance_id="prefill-1", compat=COMPAT)
        directory.put(own)
        directory.put(replace(decode.record(), compat=COMPAT))
        await until(lambda: links.connected == ["decode-1"])
        assert not links.knows("prefill-1")


async def test_a_dismissed_link_ends_and_the_next_record_makes_a_new_one() -> None:
    async with following() as (links, directory, decode):
        record = replace(decode.record(), compat=COMPAT)
        directory.put(record)
        await until(lambda: links.connected == ["decode-1"])
        directory.remove("decode-1")
        decode.server.dismiss()
        await until(lambda: not decode.server.peers and not links.links)
        directory.put(replace(record, incarnation="i1"))
        await until(lambda: links.connected == ["decode-1"])


async def test_a_decode_worker_that_left_or_refuses_is_not_waited_for() -> None:
    """In doubt, when etcd does not answer, it may still be there; back again, it is found."""
    async with following(appear_s=3600.0, unknown_s=3600.0) as (links, directory, decode):
        nobody = replace(decode.record("tcp://127.0.0.1:1"), compat=COMPAT)
        directory.put(nobody)
        async with asyncio.timeout(10):
            with pytest.raises(PeerUnavailable, match="does not answer"):
                await links.find("decode-1")
            directory.remove("decode-1")
            with pytest.raises(PeerUnavailable, match=r"left|does not answer"):
                await links.find("decode-1")
            await until(lambda: not links.links)
            with pytest.raises(PeerUnavailable, match="left the directory"):
                await links.find("decode-1")
            assert not links.knows("decode-1")
            directory.reachable = False
            assert links.knows("decode-1")
            directory.put(replace(decode.record(), compat=COMPAT))
            assert (await links.find("decode-1")).connected


# ------------------------------------------------------------------ a large fleet

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
