"""Prefill workers and decode workers that come and go, and how they greet each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pullfill.errors import PeerUnavailable
from pullfill.net import peer_link
from pullfill.net.channel import FIRST_FRAME, HELLO_FRAME
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.decode_links import DecodeLinks
from pullfill.wire import Hello, encode
from tests.support.control_rig import Decode
from tests.support.handoff_rig import Make, hold, prompt, settled, stuck_in_a_write
from tests.support.transfer_rigs import COMPAT, DENSE, shm_rig
from tests.support.waiting import soon
from tests.support.workers import FakeDirectory

HELLO = Hello(prefill_instance="prefill-1", compat=COMPAT.hash())


async def no_transfer_worker(*_: Any) -> Any:
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
        seen, hello, COMPAT, no_transfer_worker, key, **more
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
        directory.put(decode.record())
        assert (await links.find("decode-1")).connected
    async with following(replace(HELLO, computes="x" * HELLO_FRAME)) as (links, directory, decode):
        directory.put(decode.record())
        await soon(lambda: "our Hello has" in caplog.text)
        assert not links.connected


async def test_a_worker_that_is_both_does_not_connect_to_itself() -> None:
    async with following() as (links, directory, decode):
        own = replace(decode.record(), instance_id="prefill-1")
        directory.put(own)
        directory.put(decode.record())
        await soon(lambda: links.connected == ["decode-1"])
        assert not links.knows("prefill-1")


async def test_a_link_that_breaks_without_a_record_ends_and_the_next_record_makes_one() -> None:
    async with following() as (links, directory, decode):
        record = decode.record()
        directory.put(record)
        await soon(lambda: links.connected == ["decode-1"])
        directory.remove("decode-1")
        for peer in decode.server.peers.values():
            peer.channel.close()
        await soon(lambda: not decode.server.peers and not links.links)
        directory.put(replace(record, incarnation="i1"))
        await soon(lambda: links.connected == ["decode-1"])
        before = links.links["decode-1"]
        directory.put(replace(record, incarnation="i2"))
        await soon(lambda: links.connected == ["decode-1"])
        assert links.links["decode-1"] is not before, "it would write into what is no more"


async def test_a_decode_worker_that_comes_back_to_the_directory_stays() -> None:
    """As it was, after its key was lost for a while. Its connection may break later. A prefill
    worker that drains says so over the next one, too."""
    async with following() as (links, directory, decode):
        directory.put(decode.record())
        await soon(lambda: links.connected == ["decode-1"])
        directory.remove("decode-1")
        directory.put(decode.record())
        links.leave()
        (peer,) = decode.server.peers.values()
        peer.channel.close()
        await soon(lambda: peer.name not in decode.server.peers)
        await soon(lambda: links.connected == ["decode-1"])
        await soon(lambda: [p.leaving for p in decode.server.peers.values()] == [True])


async def test_a_decode_worker_that_left_or_refuses_is_not_waited_for() -> None:
    """In doubt, when etcd does not answer, it may still be there; back again, it is found."""
    async with following(appear_s=3600.0) as (links, directory, decode):
        nobody = decode.record("tcp://127.0.0.1:1")
        directory.put(nobody)
        async with asyncio.timeout(10):
            with pytest.raises(PeerUnavailable, match="does not answer"):
                await links.find("decode-1")
            assert not links.is_up("decode-1")
            directory.remove("decode-1")
            await soon(lambda: not links.links)
            with pytest.raises(PeerUnavailable, match="not listed"):
                await links.find("decode-1")
            assert not links.knows("decode-1")
            directory.reachable = False
            assert links.knows("decode-1")
            directory.reachable = True
            directory.put(decode.record())
            assert (await links.find("decode-1")).connected
            directory.put(replace(decode.record(), compat=None))
            assert not links.knows("decode-1"), "it does not fit any more"


# ------------------------------------------------------------------ a decode worker that leaves


async def test_a_link_to_a_decode_worker_that_left_stays_while_its_jobs_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy may take longer than IDLE_S, also a copy whose job has ended."""
    monkeypatch.setattr(peer_link, "ALIVE_INTERVAL_S", 0.02)
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        (link,) = prefill.links.links.values()
        link._idle_s = 0.05
        faults = hold(decode)
        prefill.engine.gate.clear()
        served = decode.send(prompt(30))
        await soon(lambda: prefill.tasks)
        cluster.directory.remove(decode.name)
        await asyncio.sleep(0.3)
        assert prefill.links.is_up(decode.name), "its job is computed"
        prefill.engine.gate.set()
        await stuck_in_a_write(decode)
        decode.abort(served)
        await soon(lambda: not prefill.puller.in_flight)
        await asyncio.sleep(0.3)
        assert prefill.links.is_up(decode.name), "its copy is not proved quiet"
        faults.resume()
        await soon(lambda: not prefill.links.links)
        await cluster.check_clean()


async def test_a_decode_worker_that_falls_silent_keeps_no_credit(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy may hang for ever, and the jobs of others wait for the credit."""
    monkeypatch.setattr(peer_link, "ALIVE_INTERVAL_S", 0.02)
    async with make(credit_blocks=4, links={"silent_s": 1.0}) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        faults = hold(decode)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        await soon(lambda: prefill.credits.gone)
        (peer,) = decode.control.peers.values()
        monkeypatch.setattr(peer.channel, "write", lambda *_, **__: None)
        await soon(lambda: not prefill.credits.gone)
        faults.resume()
        await settled(served)
        await cluster.check_clean()
