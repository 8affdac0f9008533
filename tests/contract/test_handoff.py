"""The whole handoff without vLLM: real queue, ledger, control channel, runner, transfer worker,
transport.

What counts is the decode worker's memory: after each remote prefill it holds, byte for byte, what
computing there would have left; and afterwards nothing is left anywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.decode_worker.load import jobs_of
from pullfill.errors import Outcome, PeerUnavailable
from pullfill.prefill_worker.handoff import Handoff
from pullfill.prefill_worker.side import PrefillService
from pullfill.queue.contract import Urgency
from pullfill.runtime.health import ServerHealth
from pullfill.wire import KvMode, Load, PrefillJob, decode, encode, u32
from tests.support import said
from tests.support.fakes import FakeClock, FakeRequest
from tests.support.handoff_rig import (
    Cluster,
    DecodeHalf,
    Make,
    PrefillHalf,
    hold,
    prompt,
    settled,
    stuck_in_a_read,
    stuck_in_a_write,
)
from tests.support.kv_engine import BLOCK, LAYOUT
from tests.support.nats import NatsServer
from tests.support.waiting import soon

# ------------------------------------------------------------------ right bytes


@settings(max_examples=40, deadline=None, database=None)
@given(st.data())
def test_any_mixture(nats: NatsServer, data: st.DataObject) -> None:
    """Random lengths, hits and chunks, two prefill workers, preemptions in between."""

    async def go(directory: Path) -> None:
        async with Cluster(directory, nats) as cluster:
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


# ------------------------------------------------------------------ bad messages


class Tampered:
    """A producer whose published bodies are changed on the way."""

    def __init__(self, inner: Any, change: Callable[[bytes], bytes]) -> None:
        self._inner, self._change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def publish(self, job_id: str, body: bytes, tokens: int, urgency: Urgency) -> Any:
        return await self._inner.publish(job_id, self._change(body), tokens, urgency)


def forged(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda body: encode(msgspec.structs.replace(decode(body, PrefillJob), **changes))


def swapped_tokens(body: bytes) -> bytes:
    job = decode(body, PrefillJob)
    return forged(token_ids=bytes(reversed(job.token_ids)))(body)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda body: b"\xc1" * 40, Outcome.JOB_GONE),
        (forged(job_id="another"), Outcome.JOB_GONE),
        (swapped_tokens, Outcome.PREFILL_FAILED),
        (forged(token_ids=u32.pack(range(300))), Outcome.PREFILL_FAILED),
        (forged(block_ids=u32.pack([90, 91, 92])), Outcome.PREFILL_FAILED),
        (forged(hit_tokens=4), Outcome.PREFILL_FAILED),
    ],
    ids=["noise", "job-id", "tokens", "more-tokens", "blocks", "hit"],
)
async def test_poison_and_forgery_write_nothing(
    make: Make, change: Callable[[bytes], bytes], outcome: Outcome
) -> None:
    """Dead-lettered, served locally, and not one byte of any block touched."""
    clean = True

    def maybe(body: bytes) -> bytes:
        return body if clean else change(body)

    async with make(wrap=lambda inner: Tampered(inner, maybe), clock=FakeClock()) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        clean = False
        served = decode.send(prompt(3 * BLOCK))
        before = decode.pages.copy()
        await settled(served)
        assert len(await soon(cluster.dead)) == 1
        assert served.loaded is False
        trace = decode.traces.finish(served.request.request_id)
        assert trace.fallback == outcome.value
        assert (decode.pages == before).all()
        clean = True
        again = decode.send(prompt(9))
        await settled(again)
        assert decode.right(again), "the worker lives"
        await cluster.check_clean()
        assert prefill.budget.completed == 1


# --------------------------------------------------------------------------
# The modes of the handoff: push, and pull with everything that may happen around a read.


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
            link._channel.abort()
        prefill.read_grants.revoke = lambda task: False
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
        unused: Any = None
        service = PrefillService(engine, unused, prefill.puller, [nats], prefill.links.hello)
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
            await asyncio.wait_for(drain, 20)
        await asyncio.sleep(0.05)
        assert drain.done() == (device is None)
        assert not kept & prefill.engine.pool.free
        faults.resume()
        await asyncio.wait_for(drain, 20)
        await settled(served)
        await cluster.check_clean()


# --------------------------------------------------------------------------
# An attempt that makes progress goes on beyond its deadline. Real control channel, ledger, runner
# and transfer worker. The link copies one batch after another, slowly.


TIMEOUT_S = 0.8
"""`remote_timeout_s`. It is also the whole deadline, because the link is not measured yet."""
BLOCKS = 16
BATCH_S = 0.17
LONG = prompt(BLOCKS * BLOCK + 1)


def slow(cluster: Cluster, half: DecodeHalf | PrefillHalf) -> None:
    """Slow down the copies to or from `half` to one block per BATCH_S."""
    transport: Any = cluster.rig.transport
    connect = transport.connect

    def connect_for_small_batches(*arguments: object) -> Any:
        session = connect(*arguments)
        session._limits = (LAYOUT.block_bytes, 1000)
        return session

    transport.connect = connect_for_small_batches
    owner: Any = (half.region if isinstance(half, DecodeHalf) else half.local).owner
    owner.faults.inside_batch = lambda: time.sleep(BATCH_S)


@pytest.mark.parametrize(("mode", "chunk"), [(KvMode.PUSH_ASYNC, 1000), (KvMode.PULL, 7)])
@pytest.mark.essential
async def test_a_job_that_moves_is_never_timed_out_and_started_again(
    make: Make, mode: KvMode, chunk: int
) -> None:
    """One copy takes three times as long as the deadline."""
    async with make(timeout_s=TIMEOUT_S, kv_mode=mode) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=chunk)
        slow(cluster, prefill if mode is KvMode.PULL else decode)
        began = time.monotonic()
        served = decode.send(LONG)
        await settled(served)
        assert time.monotonic() - began > 3 * TIMEOUT_S, "or the deadline was never reached"
        assert decode.right(served)
        assert prefill.engine.computed_tokens == len(LONG) - 1, "computed once"
        await cluster.check_clean()
        assert (prefill.budget.completed, prefill.budget.failed) == (1, 0)


# --------------------------------------------------------------------------
# What prefill workers report reaches the router: real control channel, ledger and queue depth.


TOKENS = 10 * BLOCK
"""Tokens of each prompt that a prefill worker must compute."""


async def reported(decode: DecodeHalf, prefill: PrefillHalf, load: Load) -> None:
    prefill.links.load = lambda: load
    prefill.links.pause("")  # says so at once
    await soon(lambda: [p.load for p in decode.control.peers.pulling] == [load])


def remote(decode: DecodeHalf, seed: int) -> bool:
    request = FakeRequest(f"asked-{seed}", prompt(TOKENS + 1, seed=seed))
    return decode.side.decide(request, 0)[1]


async def test_a_commit_tells_the_load_once_more(make: Make) -> None:
    """Else the tokens of a job that is over would count as done of those that are open."""
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        await soon(lambda: decode.control.peers.pulling)
        told = itertools.count(1)
        prefill.links.load = lambda: Load(done_tokens=next(told))
        await settled(decode.send(prompt(TOKENS + 1, seed=1)))
        (peer,) = decode.control.peers.pulling
        assert peer.load.done_tokens >= 2, "with the claim, and with the commit"


@pytest.mark.essential
async def test_a_burst_is_admitted_up_to_the_expected_wait(make: Make) -> None:
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=7)
        decode.look()
        prefill.puller.pause("check", "paused")
        served = [decode.send(prompt(TOKENS + 1, seed=n)) for n in range(4)]
        assert remote(decode, 4), "nobody has measured anything yet"
        # Each takes 4 s, so the next one would wait for 16 s.
        await reported(decode, prefill, Load(tokens_per_s=TOKENS / 4))
        assert not remote(decode, 5)
        decode.abort(served.pop())
        decode.abort(served.pop())
        await soon(lambda: decode.producer.depth().depth_jobs == 2)
        assert remote(decode, 6), "8 s"
        served.append(decode.send(prompt(TOKENS + 1, seed=7)))
        (last,) = [e for e in decode.ledger._jobs.values() if e.request_id == "r4"]
        assert last.claim_timeout_s == 16, "twice what it is expected to wait"
        assert last.deadline - last.opened_at > 20, "and more for the whole than the setting"
        assert not remote(decode, 8)
        await reported(decode, prefill, Load(tokens_per_s=TOKENS))
        assert remote(decode, 9), "3 s"
        prefill.puller.pause("check", "")
        await settled(*served)
        assert all(decode.right(s) for s in served)
        await cluster.check_clean()


@pytest.mark.essential
async def test_a_prompt_whose_job_nats_does_not_take_stays_and_takes_no_blocks(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """It took blocks, failed, and was a `queue_full` without a line in any log."""
    async with make() as cluster:
        decode, _ = await cluster.decode(), await cluster.prefill()
        decode.look(max_body=(8 << 10) + 5 * TOKENS)
        assert remote(decode, 1)
        for seed in (2, 3):
            request = FakeRequest(f"long-{seed}", prompt(2 * TOKENS, seed=seed))
            assert decode.side.decide(request, 0) == (0, False)
            reason = decode.side._decisions[request.request_id][1].reason
            assert reason == "job_too_large"
        (told,) = [r.getMessage() for r in caplog.records if "stays here" in r.getMessage()]
        assert "raise max_payload" in told


@pytest.mark.essential
async def test_prompts_too_long_for_some_prefill_workers_go_to_the_others(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """One with a smaller `--max-model-len` got and failed all of them, and nobody learned why."""
    async with make() as cluster:
        decode, small = await cluster.decode(), await cluster.prefill(longest=TOKENS)
        decode.look()
        assert remote(decode, 1)
        for seed in (2, 3):
            request = FakeRequest(f"long-{seed}", prompt(TOKENS + 2, seed=seed))
            assert decode.side.decide(request, 0) == (0, False)
            assert decode.side._decisions[request.request_id][1].reason == "prompt_too_long"
        assert caplog.text.count("stays here, like all") == 1
        assert caplog.text.count("at most (its --max-model-len)") == 1
        large = await cluster.prefill()
        served = [decode.send(prompt(TOKENS + 2, seed=seed)) for seed in range(4, 12)]
        await settled(*served)
        assert all(request.loaded and decode.right(request) for request in served)
        await soon(lambda: large.budget.completed == len(served))  # a moment after the commit
        assert small.budget.failed == 0
        await cluster.check_clean()


async def test_what_is_computed_is_not_in_front_though_nothing_is_written(make: Make) -> None:
    """In pull mode nothing is ever written, and in the others it comes later."""
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=7)
        decode.look()
        prefill.puller.pause("check", "paused")
        served = decode.send(prompt(TOKENS + 1, seed=1))
        await soon(lambda: decode.producer.depth().depth_jobs == 1)
        (job,) = jobs_of(decode.ledger)
        await reported(decode, prefill, Load(tokens_per_s=TOKENS / 12))
        assert not remote(decode, 2), "12 s"
        (writer,) = decode.control.peers
        grant = said.grant(decode.ledger, job.job_id, "i0", writer).grant
        await reported(decode, prefill, Load(tokens_per_s=TOKENS / 12, done_tokens=TOKENS // 2))
        assert remote(decode, 3), "6 s"
        said.gave_up(decode.ledger, job.job_id, grant.attempt, "i0", writer, retry=False)
        await settled(served)
        prefill.puller.pause("check", "")
        await cluster.check_clean()
