"""Prefill workers and decode workers that come and go, and how they greet each other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from pullfill.errors import PeerUnavailable
from pullfill.net.channel import FIRST_FRAME, HELLO_FRAME
from pullfill.net.security import ClusterKey
from pullfill.prefill_worker.decode_links import DecodeLink, DecodeLinks
from pullfill.prefill_worker.reach import OutOfReach
from pullfill.transfer.shm.files import ShmEndpoint
from pullfill.wire import Hello, WorkerRecord, encode
from tests.support.control_rig import Decode, FakeDirectory, until
from tests.support.transfer_rigs import COMPAT, DENSE, shm_rig


def greeting(tmp_path: Path, ranks: int) -> Hello:
    """What a prefill worker of so many ranks says, with paths and names as long as real ones."""
    region = shm_rig(tmp_path).region(DENSE)
    region.owner.close()
    kv = f"/dev/shm/pullfill-{'x' * 32}"
    shm = ShmEndpoint(
        kv=f"{kv}.kv", kv_inode=(25, 1 << 40), fence=f"{kv}.fence", fence_inode=(25, 1 << 40),
        nbytes=1 << 40,
    )  # fmt: skip
    endpoints = {"shm": shm.encode(), "tcp": "tcp://192.168.100.100:45678"}
    of_rank = replace(region.descriptor, world_size=ranks, endpoints=endpoints)
    return Hello(
        prefill_instance="prefill-1",
        compat=COMPAT.hash(),
        regions=tuple(replace(of_rank, rank=rank) for rank in range(ranks)),
    )


async def no_transfer_worker(_: Any) -> Any:
    raise AssertionError("nothing is moved")


def link_to(record: WorkerRecord, hello: Hello, **more: Any) -> DecodeLink:
    directory: Any = FakeDirectory()
    directory.put(replace(record, compat=COMPAT))
    opener = more.pop("open_transfer_worker", no_transfer_worker)
    links = DecodeLinks(directory, hello, COMPAT, opener, **more)
    links.start()
    return links.links[record.instance_id]


@pytest.mark.parametrize("key", [None, ClusterKey(b"k" * 32)], ids=["plain", "sealed"])
async def test_the_memory_of_many_ranks_fits_a_greeting(
    tmp_path: Path, key: ClusterKey | None
) -> None:
    hello = greeting(tmp_path, 512)
    assert len(encode(hello)) > 2 * FIRST_FRAME
    decode = Decode(key=key)
    await decode.server.start("127.0.0.1")
    link = link_to(decode.record(), hello, key=key)
    try:
        await link.wait_up(10)
    finally:
        await link.close()
        await decode.server.stop()


async def test_a_greeting_that_nobody_takes_is_told_to_people(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hello = replace(greeting(tmp_path, 1), computes="x" * HELLO_FRAME)
    decode = Decode()
    await decode.server.start("127.0.0.1")
    link = link_to(decode.record(), hello)
    try:
        await until(lambda: "our Hello has" in caplog.text)
        assert caplog.records[-1].levelno == logging.WARNING
        assert not link.connected
    finally:
        await link.close()
        await decode.server.stop()


async def test_a_new_welcome_forgives_and_the_end_closes_what_there_is(tmp_path: Path) -> None:
    closed: list[int] = []
    failing = True

    async def opened(_: Any) -> Any:
        if failing:
            raise PeerUnavailable("its KV port does not answer")
        return SimpleNamespace(close=lambda: closed.append(1), transport="fake", why_not_better=())

    decode = Decode()
    await decode.server.start("127.0.0.1")
    lost: list[int] = []
    link = link_to(decode.record(), greeting(tmp_path, 1), open_transfer_worker=opened)
    link.jobs["j"] = SimpleNamespace(link_lost=lambda: lost.append(1))  # type: ignore[assignment]
    try:
        await link.wait_up(10)
        with pytest.raises(OutOfReach, match="does not answer"):
            await link.transfer.get()
        failing = False
        with pytest.raises(OutOfReach, match="does not answer"):
            await link.transfer.get()
        for peer in list(decode.server.peers.values()):
            peer.channel.close()
        await until(lambda: lost)
        await link.wait_up(10)
        await link.transfer.get()
    finally:
        await link.close()
        await decode.server.stop()
    assert closed == [1]


@asynccontextmanager
async def following(
    tmp_path: Path, **more: float
) -> AsyncIterator[tuple[DecodeLinks, FakeDirectory, Decode]]:
    """DecodeLinks that follow a directory, and a decode worker that listens."""
    decode, directory = Decode(), FakeDirectory()
    await decode.server.start("127.0.0.1")
    seen: Any = directory
    links = DecodeLinks(
        seen, greeting(tmp_path, 1), COMPAT, no_transfer_worker,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    links.start()
    try:
        yield links, directory, decode
    finally:
        await links.close()
        await decode.server.stop()


async def test_a_record_without_an_address_waits_for_one(tmp_path: Path) -> None:
    """It fits but cannot be connected: nothing differs, and nothing may fail here. What it says
    next counts."""
    async with following(tmp_path) as (links, directory, decode):
        whole = replace(decode.record(), compat=COMPAT)
        directory.put(replace(whole, control=""))
        assert not links.knows("decode-1")
        directory.put(whole)
        await until(lambda: links.connected == ["decode-1"])


async def test_a_worker_that_is_both_does_not_connect_to_itself(tmp_path: Path) -> None:
    async with following(tmp_path) as (links, directory, decode):
        own = replace(decode.record(), instance_id="prefill-1", compat=COMPAT)
        directory.put(own)
        directory.put(replace(decode.record(), compat=COMPAT))
        await until(lambda: links.connected == ["decode-1"])
        assert not links.knows("prefill-1")


async def test_a_closed_one_follows_the_directory_no_more(tmp_path: Path) -> None:
    """A prefill side begins and ends many times in one process."""
    async with following(tmp_path) as (links, directory, decode):
        await links.close()
        directory.put(replace(decode.record(), compat=COMPAT))
        assert directory._callbacks == []
        assert not links.knows("decode-1")


async def test_a_dismissed_link_ends_and_the_next_record_makes_a_new_one(tmp_path: Path) -> None:
    async with following(tmp_path) as (links, directory, decode):
        record = replace(decode.record(), compat=COMPAT)
        directory.put(record)
        await until(lambda: links.connected == ["decode-1"])
        directory.remove("decode-1")
        decode.server.dismiss()
        await until(lambda: not decode.server.peers and not links.links)
        directory.put(replace(record, incarnation="i1"))
        await until(lambda: links.connected == ["decode-1"])


async def test_a_decode_worker_that_left_or_refuses_is_not_waited_for(tmp_path: Path) -> None:
    """In doubt, when etcd does not answer, it may still be there; back again, it is found."""
    async with following(tmp_path, appear_s=3600.0, unknown_s=3600.0) as (links, directory, decode):
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
