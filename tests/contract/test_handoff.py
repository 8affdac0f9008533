"""The whole handoff without vLLM: real queue, ledger, control channel, runner, transfer worker,
transport.

What counts is the decode worker's memory: after each remote prefill it holds, byte for byte, what
computing there would have left; and afterwards nothing is left anywhere.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.runtime import metrics
from tests.support.fakes import FakeClock
from tests.support.handoff_rig import Cluster, hold, prompt, settled, stuck_in_a_write, until
from tests.support.kv_engine import BLOCK

# ------------------------------------------------------------------ right bytes


@pytest.mark.parametrize("transport", ["loopback", "shm"])
async def test_every_length_around_the_block_boundaries(tmp_path: Path, transport: str) -> None:
    """All at once: cold, batched, chunked."""
    async with Cluster(tmp_path, transport) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=7)
        lengths = [2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 16, 17, 18, 31, 32, 33, 34, 61]
        served = [decode.send(prompt(n, seed=n)) for n in lengths]
        await settled(*served)
        assert [n for n, s in zip(lengths, served, strict=True) if not decode.right(s)] == []
        await cluster.check_clean()
        assert prefill.budget.completed == len(lengths)
        assert prefill.engine.computed_tokens == sum(lengths) - len(lengths)


@pytest.mark.parametrize("decode_hit", [0, 1, 3])
@pytest.mark.parametrize("prefill_hit", [0, 2, 3, 5])
async def test_hits_on_either_side(tmp_path: Path, decode_hit: int, prefill_hit: int) -> None:
    tokens = prompt(6 * BLOCK + 2)
    async with Cluster(tmp_path, "shm") as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        hit = decode.cache(tokens[: decode_hit * BLOCK])
        if prefill_hit:
            prefill.engine.cache(tokens[: prefill_hit * BLOCK])
        served = decode.send(tokens, hit)
        await settled(served)
        assert decode.right(served)
        known = max(decode_hit, prefill_hit) * BLOCK
        assert prefill.engine.computed_tokens == len(tokens) - 1 - known, "nothing twice"
        await cluster.check_clean()


@settings(max_examples=40, deadline=None, database=None)
@given(st.data())
def test_any_mixture(data: st.DataObject) -> None:
    """Random lengths, hits and chunks, two prefill workers, preemptions in between."""

    async def go(directory: Path) -> None:
        async with Cluster(directory) as cluster:
            decode = await cluster.decode()
            prefills = [
                await cluster.prefill(chunk=data.draw(st.integers(1, 20))) for _ in range(2)
            ]
            shared = prompt(4 * BLOCK, seed=7)
            hit = decode.cache(shared)
            for prefill in prefills:
                prefill.engine.preempt_next = data.draw(st.booleans())
                if data.draw(st.booleans()):
                    prefill.engine.cache(shared[: 3 * BLOCK])
            served = []
            for seed in range(data.draw(st.integers(1, 5))):
                use = data.draw(st.integers(0, 4))
                rest = data.draw(st.integers(2, 24))
                tokens = shared[: use * BLOCK] + prompt(rest, seed=100 + seed)
                served.append(decode.send(tokens, hit[:use]))
            await settled(*served)
            assert all(decode.right(s) for s in served)
            await cluster.check_clean()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(go(Path(directory)))


async def test_preemption_rewrites_everything(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        prefill.engine.preempt_next = True
        served = decode.send(prompt(30))
        await settled(served)
        assert decode.right(served)
        assert prefill.engine.computed_tokens > 29
        await cluster.check_clean()


async def test_two_decode_workers_share_the_prefill_workers(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        decodes = [await cluster.decode(f"decode-{i}") for i in (1, 2)]
        for _ in range(2):
            await cluster.prefill()
        served = [(d, d.send(prompt(20 + n, seed=n))) for n in range(6) for d in decodes]
        await settled(*[s for _, s in served])
        assert all(d.right(s) for d, s in served)
        await cluster.check_clean()


# ------------------------------------------------------------------ prefill workers that fail


async def nothing(*_: object, **__: object) -> None:
    """What a dead process does."""


@pytest.mark.parametrize("where", ["computing", "writing"])
async def test_a_runner_that_is_killed_hands_its_job_on(tmp_path: Path, where: str) -> None:
    async with Cluster(tmp_path, clock=FakeClock()) as cluster:
        decode, first = await cluster.decode(), await cluster.prefill(chunk=5)
        if where == "computing":
            first.engine.gate.clear()
        else:
            faults = hold(decode)
        served = decode.send(prompt(30))
        await until(lambda: decode.ledger.counts()["granted"] == 1)  # type: ignore[index]
        if where == "writing":
            await stuck_in_a_write(decode)
        second = await cluster.prefill()
        await first.puller.stop()
        await first.puller.abandon()
        decode.pass_time(0.06)  # the queue delivers a job again only after its nak delay
        if where == "writing":
            await until(lambda: decode.ledger.quarantined_blocks == len(served.table))
            faults.resume()
        first.engine.gate.set()
        await settled(served)
        assert decode.right(served)
        await cluster.check_clean()
        assert (first.budget.completed, second.budget.completed) == (0, 1)


async def test_a_worker_that_dies_in_a_write_loses_its_job_to_another(tmp_path: Path) -> None:
    """No word from it: the connection closes and its batch ends as the kernel ends it."""
    async with Cluster(tmp_path, clock=FakeClock()) as cluster:
        decode, first = await cluster.decode(), await cluster.prefill(chunk=5)
        faults = hold(decode, after=1)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        second = await cluster.prefill()
        await first.puller.stop()
        for job in first.puller._jobs.values():
            job.settle = nothing  # type: ignore[method-assign]
        await first.links.close()
        await asyncio.to_thread(faults.kill)
        await settled(served)
        assert decode.right(served)
        await cluster.check_clean()
        assert second.budget.completed == 1


async def test_the_only_worker_dies(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        decode, only = await cluster.decode(), await cluster.prefill(chunk=5)
        faults = hold(decode)
        served = [decode.send(prompt(30, seed=n)) for n in range(3)]
        await stuck_in_a_write(decode)
        await only.puller.stop()
        await only.links.close()
        await settled(*served)
        assert [s.loaded for s in served] == [False] * 3, "at once, not at the deadline"
        await asyncio.to_thread(faults.kill)
        await cluster.check_clean()


async def test_duplicate_deliveries_leave_the_job_with_its_writer(tmp_path: Path) -> None:
    """No heartbeat reaches the queue, so it delivers the job to the other worker again and again.
    Its claims are refused, and it does not settle the message. Only the last delivery is acked:
    otherwise the job would become a dead letter."""
    clock = FakeClock()
    async with Cluster(tmp_path, clock=clock, ack_wait_s=1.0) as cluster:
        decode, first = await cluster.decode(), await cluster.prefill(chunk=5)
        faults = hold(decode)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        await first.puller.stop()
        second, claims = await cluster.prefill(), metrics.CLAIM.labels("in_progress")
        before = claims._value.get()
        for delivery in range(2, cluster.config.max_deliver + 1):
            clock.advance(1.1)
            told = before + 2 * (delivery - 1)  # counted at both ends
            await until(lambda told=told: claims._value.get() == told)  # type: ignore[misc]
            assert decode.ledger.counts()["granted"] == 1  # type: ignore[index]
        clock.advance(1.1)
        faults.resume()
        await settled(served)
        assert decode.right(served)
        await cluster.check_clean()
        assert (first.budget.completed, second.budget.completed) == (1, 0)
        assert second.engine.computed_tokens == 0
        assert not cluster.queue.dead


async def test_a_stopped_writer_keeps_its_blocks_and_nothing_else(tmp_path: Path) -> None:
    """Deadline passed, request served locally, others go on; the late bytes land in blocks that
    are still held, and the late commit is refused."""
    async with Cluster(tmp_path, clock=FakeClock()) as cluster:
        decode, zombie = await cluster.decode(), await cluster.prefill(chunk=100)
        faults = hold(decode)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        await zombie.puller.stop()
        decode.pass_time(25.0)
        await settled(served)
        assert served.loaded is False
        assert not set(served.table) & decode.pool.free
        others = [decode.cache(prompt(n, seed=n)) for n in (40, 80)]
        before = [decode.pages[:, t].copy() for t in others]
        faults.resume()
        await until(lambda: decode.ledger.open_jobs == 0)
        assert all((decode.pages[:, t] == b).all() for t, b in zip(others, before, strict=True))
        await cluster.check_clean()


async def test_abort_in_a_write(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        faults = hold(decode, after=1)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        decode.abort(served)
        await settled(served)
        assert not set(served.table) & decode.pool.free, "held"
        faults.resume()
        await until(lambda: set(served.table) <= decode.pool.free)
        await cluster.check_clean()
        assert prefill.budget.completed == 0
        again = decode.send(prompt(30))
        await settled(again)
        assert decode.right(again)


async def test_a_revoked_worker_becomes_idle(tmp_path: Path) -> None:
    """Its drain-ack may end after the job itself; a drain waits for both, not for ever."""
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        faults = hold(decode)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        decode.abort(served)
        await until(lambda: prefill.budget.tokens == 0)
        assert not prefill.puller.idle.is_set(), "a copy still runs"
        faults.resume()
        await asyncio.wait_for(prefill.puller.idle.wait(), 10)
        await cluster.check_clean()


def test_the_rig_would_notice_one_wrong_byte() -> None:
    """The oracle itself: a flipped byte anywhere in the last block is seen."""

    async def go(directory: Path) -> None:
        async with Cluster(directory) as cluster:
            decode, _ = await cluster.decode(), await cluster.prefill()
            served = decode.send(prompt(11))
            await settled(served)
            assert decode.right(served)
            decode.pages[1, served.table[-1], 1, 0] ^= 1
            assert not decode.right(served)

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(go(Path(directory)))
