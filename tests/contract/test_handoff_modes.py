"""The modes of the handoff: push, and pull with everything that may happen around a read."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.errors import PeerUnavailable
from pullfill.prefill_worker.handoff import Handoff
from pullfill.prefill_worker.side import PrefillService
from pullfill.runtime.health import ServerHealth
from pullfill.wire import KvMode
from tests.support.handoff_rig import (
    DecodeHalf,
    Make,
    PrefillHalf,
    hold,
    prompt,
    settled,
    stuck_in_a_read,
    stuck_in_a_write,
)
from tests.support.waiting import soon

PULL = KvMode.PULL
TRANSPORTS = ["loopback", "shm", "tcp"]


async def reading(decode: DecodeHalf, prefill: PrefillHalf, after: int = 0) -> tuple[Any, Any]:
    """A request that is stopped in the decode worker's read; and what lets it go on."""
    faults = hold(prefill, after)
    served = decode.send(prompt(30))
    await stuck_in_a_read(prefill)
    return served, faults


# ------------------------------------------------------------------ right bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", list(KvMode))
async def test_every_mode_brings_the_right_bytes(make: Make, transport: str, mode: KvMode) -> None:
    """Of prompts around the ends of blocks, all at once: cold, batched, chunked."""
    lengths = [2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 16, 17, 18, 31, 32, 33, 34, 61]
    async with make(transport, kv_mode=mode) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=7)
        served = [decode.send(prompt(n, seed=n)) for n in lengths]
        await settled(*served)
        assert [n for n, s in zip(lengths, served, strict=True) if not decode.right(s)] == []
        await cluster.check_clean()
        assert prefill.budget.completed == len(served)
        assert prefill.engine.computed_tokens == sum(lengths) - len(lengths)
        for one in served:
            record = decode.traces.finish(one.request.request_id)
            assert record is not None
            assert (record.transport, record.kv_bytes > 0) == (transport, True)


# ------------------------------------------------------------------ when something ends it


async def test_pull_abort_in_a_read(make: Make) -> None:
    """Our reader still copies into the blocks: they are held until it has ended."""
    async with make(kv_mode=PULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        served, faults = await reading(decode, prefill)
        decode.abort(served)
        await settled(served)
        assert not set(served.table) & decode.pool.free, "held"
        assert decode.ledger.quarantined_blocks == len(served.table)
        kept = {b for run in prefill.engine._runs.values() for b in run.table}
        assert kept, "the prefill worker's blocks may still be read"
        faults.resume()
        await soon(lambda: set(served.table) <= decode.pool.free)
        await cluster.check_clean()
        again = decode.send(prompt(30))
        await settled(again)
        assert decode.right(again)
        await cluster.check_clean()


async def test_pull_from_a_worker_that_dies_is_read_to_the_end(make: Make) -> None:
    """All it had to do is done, and its memory outlives it: nothing is computed again."""
    async with make("loopback", kv_mode=PULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        served, faults = await reading(decode, prefill)
        await prefill.puller.stop()
        for link in prefill.links.links.values():
            link.retired = True
            assert link._channel is not None
            link._channel.abort()
        prefill.read_grants.revoke = lambda task: False  # type: ignore[method-assign]
        await soon(lambda: not decode.control.peers.instances)
        assert served.loaded is None
        faults.resume()
        await settled(served)
        assert decode.right(served)
        del prefill.read_grants.revoke
        second = await cluster.prefill()  # gets its message, and is refused the claim
        await cluster.check_clean()
        assert second.engine.computed_tokens == 0


async def test_pull_that_fails_is_computed_here_and_its_session_made_anew(make: Make) -> None:
    async with make("loopback", kv_mode=PULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        served, faults = await reading(decode, prefill)
        await asyncio.to_thread(faults.kill)
        await settled(served)
        assert served.loaded is False
        assert decode.traces.fallback_of(served.request.request_id) == "prefill_failed"
        again = decode.send(prompt(30, seed=2))
        await settled(again)
        assert decode.right(again)
        await cluster.check_clean()


async def test_a_ready_of_nobody_we_read_from_ends_the_connection(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of a cluster that pushes says `Ready`: it is not believed."""
    async with make() as cluster:
        decode = await cluster.decode()
        await cluster.prefill(chunk=5)
        original = Handoff.commit

        async def commit(job: Handoff, task: Any) -> None:
            task.mode = PULL
            task.kept = {b: 0 for b in task.remote_blocks}
            await original(job, task)

        with monkeypatch.context() as patch:
            patch.setattr(Handoff, "commit", commit)
            served = decode.send(prompt(30))
            await settled(served)
            assert served.loaded is False
        await cluster.check_clean()


# ------------------------------------------------------------------ credits


@pytest.mark.essential
async def test_nothing_is_pulled_beyond_the_credits(make: Make) -> None:
    """While the first prompt cannot be written, only a pull that is under way brings another."""
    async with make(credit_blocks=4, patience_s=100) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=8)
        faults = hold(decode)
        first = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        await soon(lambda: prefill.credits.gone)
        rest = [decode.send(prompt(30, seed=2))]
        await soon(lambda: prefill.puller.in_flight == 2)
        rest += [decode.send(prompt(30, seed=n)) for n in (3, 4)]
        await asyncio.sleep(0.05)
        assert prefill.puller.in_flight == 2
        faults.resume()
        await settled(first, *rest)
        assert all(decode.right(s) for s in (first, *rest))
        await cluster.check_clean()


# ------------------------------------------------------------------ the reader


async def test_a_worker_whose_memory_cannot_be_reached_writes_until_it_connects_again(
    make: Make,
) -> None:
    """No job after the first is spent on finding that out."""
    async with make("tcp", kv_mode=PULL) as cluster:
        decode, tries, cut = await cluster.decode(), 0, True
        reach: Any = decode.control._reach

        def way(regions: Any) -> Any:
            def open_session() -> Any:
                nonlocal tries
                tries += 1
                if cut:
                    raise PeerUnavailable("the KV port does not answer")
                return reach(regions)()

            return open_session

        async def served(seed: int) -> bool | None:
            one = decode.send(prompt(30, seed=seed))
            await settled(one)
            return decode.right(one) if one.loaded else one.loaded

        decode.control._reach = way
        await cluster.prefill(chunk=5)
        assert [await served(seed) for seed in (1, 2, 3)] == [False, True, True]
        assert tries == 1
        cut = False
        (peer,) = decode.control.peers.values()
        peer.channel.close()
        await soon(lambda: peer.name not in decode.control.peers and decode.control.peers)
        assert await served(4)
        assert tries == 2
        await cluster.check_clean()


@pytest.mark.parametrize("device", [None, 0], ids=["cpu", "gpu"])
async def test_a_drain_waits_for_no_stopped_reader_of_shared_memory(
    make: Make, device: int | None
) -> None:
    """Its blocks stay as they are. GPU memory is freed when its process ends, so that drain waits.
    In both cases the worker is not busy."""
    async with make(kv_mode=KvMode.PULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        puller = prefill.puller
        memory = replace(prefill.local.memory, device=device)
        engine: Any = SimpleNamespace(
            context=SimpleNamespace(memories=[memory]), dead=asyncio.Event()
        )
        (nats := ServerHealth("nats")).ok()
        service = PrefillService(
            engine,
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
        await soon(puller.no_jobs.is_set)
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
