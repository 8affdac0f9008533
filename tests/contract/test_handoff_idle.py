"""KV sessions that no job uses are closed. No job may fail because of that."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from pullfill.wire import KvMode
from tests.support.handoff_decode import DecodeHalf
from tests.support.handoff_rig import Cluster, PrefillHalf, prompt, settled, until


def idle_after(prefill: PrefillHalf, decode: DecodeHalf, seconds: float) -> Any:
    shared = prefill.links.links[decode.name].transfer
    shared._idle._after_s = seconds
    return shared


async def serve(decode: DecodeHalf, seed: int) -> None:
    served = decode.send(prompt(30, seed=seed))
    await settled(served)
    assert decode.right(served)
    decode.abort(served)


async def test_an_idle_connection_is_closed_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster(tmp_path, "tcp") as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill(chunk=5)
        shared = idle_after(prefill, decode, 0.02)
        owner: Any = decode.region.owner
        for seed in (1, 2):
            await serve(decode, seed)
            await until(lambda: shared.current is None)
            await until(lambda: owner.connections == 0)
            assert prefill.links.routes[decode.name]["transport"] == "tcp"
        assert prefill.budget.failed == 0
        await cluster.check_clean()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("transport", ["tcp", "loopback"])
async def test_no_job_fails_though_sessions_are_closed_all_the_time(
    tmp_path: Path, transport: str
) -> None:
    """The session is closed in the moment in which its last job ends and other jobs ask for it."""
    async with Cluster(tmp_path, transport) as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill(chunk=8)
        shared = idle_after(prefill, decode, 0.0)
        opened = 0
        connect = shared._open

        async def counted() -> Any:
            nonlocal opened
            opened += 1
            return await connect()

        shared._open = counted
        for seed in range(0, 40, 2):
            both = [decode.send(prompt(20, seed=seed)), decode.send(prompt(20, seed=seed + 1))]
            if seed % 4:
                await asyncio.sleep(0.001)
            await settled(*both)
            for served in both:
                assert decode.right(served)
                decode.abort(served)
        await cluster.check_clean()
        assert (prefill.budget.completed, prefill.budget.failed) == (40, 0)
        assert opened > 5


async def test_a_reader_closes_an_idle_session_and_opens_it_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path, "tcp", kv_mode=KvMode.PULL) as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill(chunk=5)
        (peer,) = decode.control.peers.values()
        assert peer.reader is not None
        peer.reader._idle._after_s = 0.02
        owner: Any = prefill.local.owner
        for seed in (1, 2):
            await serve(decode, seed)
            trace = decode.traces.finish(f"r{seed - 1}")
            assert trace is not None
            assert trace.transport == "tcp"
            await until(lambda: owner.connections == 0)
        assert prefill.budget.failed == 0
        await cluster.check_clean()


async def test_a_fleet_keeps_no_connection_or_thread_for_pairs(
    tmp_path: Path,
) -> None:
    """Once each pair has shared a job, each decode worker has three connections and three threads.
    Later it has none."""
    async with Cluster(tmp_path, "tcp") as cluster:
        decodes = [await cluster.decode(f"decode-{number}") for number in range(3)]
        prefills = [await cluster.prefill(chunk=5, pull=False) for _ in range(3)]
        owners: list[Any] = [decode.region.owner for decode in decodes]

        def serving() -> int:
            return sum(t.name.startswith("kv-127.") for t in threading.enumerate())

        with contextlib.ExitStack() as jobs:
            for prefill in prefills:
                for decode in decodes:
                    idle_after(prefill, decode, 0.02)
                    link = prefill.links.links[decode.name]
                    jobs.enter_context(link.transfer.held())
                    await link.transfer.get()
            assert [owner.connections for owner in owners] == [3, 3, 3]
            assert serving() == 9
        await until(lambda: not any(owner.connections for owner in owners))
        await until(lambda: serving() == 0)
        prefills[0].puller.start()
        for seed, decode in enumerate(decodes):
            await serve(decode, seed)
        await cluster.check_clean()
