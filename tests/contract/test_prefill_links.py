"""Prefill workers and decode workers that come and go, and how they greet each other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pullfill.errors import PeerUnavailable
from pullfill.net import peer_link
from pullfill.net.channel import FIRST_FRAME, HELLO_FRAME
from pullfill.net.security import ClusterKey
from pullfill.wire import encode
from tests.support.control_rig import Decode, hello
from tests.support.handoff_rig import Make, hold, prompt, settled, stuck_in_a_write
from tests.support.transfer_rigs import DENSE, shm_rig
from tests.support.waiting import soon

KEY = ClusterKey(b"k" * 32)


@pytest.mark.parametrize("decode", [{"key": KEY}], indirect=True)
async def test_a_greeting_may_be_long_and_one_that_nobody_takes_is_told_to_people(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, connect: Any
) -> None:
    region = shm_rig(tmp_path).region(DENSE)
    region.owner.close()
    of_rank = replace(region.descriptor, world_size=512, endpoints={"shm": "x" * 500})
    regions = tuple(replace(of_rank, rank=rank) for rank in range(512))
    long = replace(hello("prefill-1"), regions=regions)
    assert 2 * FIRST_FRAME < len(encode(long)) < HELLO_FRAME
    await connect(says=long, key=KEY)
    too_long = replace(hello("prefill-2"), computes="x" * HELLO_FRAME)
    prefill = await connect(says=too_long, key=KEY, up=False)
    await soon(lambda: "our Hello has" in caplog.text)
    assert not prefill.link.connected


async def test_a_worker_that_is_both_does_not_connect_to_itself(
    decode: Decode, connect: Any
) -> None:
    prefill = await connect()
    prefill.directory.put(replace(decode.record(), instance_id="prefill-1"))
    assert list(prefill.links.links) == ["decode-1"]
    assert not prefill.links.knows("prefill-1")


async def test_a_link_that_breaks_without_a_record_ends_and_the_next_record_makes_one(
    decode: Decode, connect: Any
) -> None:
    prefill = await connect()
    links, directory, record = prefill.links, prefill.directory, decode.record()
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


async def test_a_decode_worker_that_comes_back_to_the_directory_stays(
    decode: Decode, connect: Any
) -> None:
    """As it was, after its key was lost for a while. Its connection may break later. A prefill
    worker that drains says so over the next one, too."""
    prefill = await connect()
    prefill.directory.remove("decode-1")
    prefill.directory.put(decode.record())
    prefill.links.leave()
    (peer,) = decode.server.peers.values()
    peer.channel.close()
    await soon(lambda: peer.name not in decode.server.peers)
    await soon(lambda: prefill.links.connected == ["decode-1"])
    await soon(lambda: [p.leaving for p in decode.server.peers.values()] == [True])


async def test_a_decode_worker_that_left_or_refuses_is_not_waited_for(
    decode: Decode, connect: Any
) -> None:
    """In doubt, when etcd does not answer, it may still be there; back again, it is found."""
    prefill = await connect(address="tcp://127.0.0.1:1", up=False, appear_s=3600.0)
    links, directory = prefill.links, prefill.directory
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
