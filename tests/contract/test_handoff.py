"""The whole handoff without vLLM: real queue, ledger, control channel, runner, transfer worker,
transport.

What counts is the decode worker's memory: after each remote prefill it holds, byte for byte, what
computing there would have left; and afterwards nothing is left anywhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pullfill.decode_worker import ledger
from pullfill.decode_worker.side import jobs_of
from pullfill.errors import BadMessage, Outcome, PeerUnavailable
from pullfill.net.channel import split_address
from pullfill.prefill_worker.handoff import Handoff
from pullfill.prefill_worker.side import PrefillService
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.queue.contract import Receipt, Urgency
from pullfill.queue.jetstream import JetStreamConsumer
from pullfill.runtime.health import ServerHealth
from pullfill.wire import GiveUp, KvMode, Load, PrefillJob, decode, encode, u32
from tests.support import said
from tests.support.control_rig import Raw
from tests.support.fakes import FakeClock, FakeRequest
from tests.support.handoff_rig import (
    COMPATIBLE,
    Cluster,
    DecodeHalf,
    Make,
    PrefillHalf,
    Served,
    copying,
    faults_of,
    prompt,
    settled,
)
from tests.support.kv_engine import BLOCK, LAYOUT
from tests.support.nats import NatsServer
from tests.support.waiting import soon
from tests.support.workers import FakeDirectory

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

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(go(Path(directory)))


# ------------------------------------------------------------------ bad messages


class Between:
    """A producer whose published bodies are changed on the way. Its answers wait for `go`."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.go = inner, asyncio.Event()
        self.go.set()
        self.change: Callable[[bytes], bytes] = bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def publish(self, job_id: str, body: bytes, tokens: int, urgency: Urgency) -> Receipt:
        receipt: Receipt = await self._inner.publish(job_id, self.change(body), tokens, urgency)
        await self.go.wait()
        return receipt


def forged(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda body: encode(replace(decode(body, PrefillJob), **changes))


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
    async with make(wrap=Between, clock=FakeClock()) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        producer: Any = decode.producer
        producer.change = change
        served = decode.send(prompt(3 * BLOCK))
        before = decode.pages.copy()
        await settled(served)
        assert len(await soon(cluster.dead)) == 1
        assert served.loaded is False
        trace = decode.traces.finish(served.request.request_id)
        assert trace.fallback == outcome.value
        assert (decode.pages == before).all()
        producer.change = bytes
        again = decode.send(prompt(9))
        await settled(again)
        assert decode.right(again), "the worker lives"
        await cluster.check_clean()
        assert prefill.budget.completed == 1


# --------------------------------------------------------------------------
# The modes of the handoff: push, and pull with everything that may happen around a read.


PULL = KvMode.PULL
TRANSPORTS = ["loopback", "shm", "tcp"]


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
        served, faults = await copying(decode, prefill)
        decode.abort(served)
        await settled(served)
        assert not set(served.table) & decode.pool.free, "held"
        assert decode.ledger.quarantined_blocks == len(served.table)
        kept = {b for run in prefill.engine._runs.values() for b in run.table}
        assert kept, "the prefill worker's blocks may still be read"
        ((_, blocks, first_target),) = prefill.puller.fences._granted.values()
        assert not blocks[first_target:], "and never be written"
        faults.resume()
        await soon(lambda: set(served.table) <= decode.pool.free)
        await cluster.check_clean()
        again = decode.send(prompt(30))
        await settled(again)
        assert decode.right(again)


async def test_pull_from_a_worker_that_dies_is_read_to_the_end(make: Make) -> None:
    """All it had to do is done, and its memory outlives it: nothing is computed again."""
    async with make("loopback", kv_mode=PULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        served, faults = await copying(decode, prefill)
        await prefill.puller.stop()
        for link in prefill.links.links.values():
            link.retired = True
            link._channel.abort()
        prefill.puller.fences.try_revoke = lambda token: False
        await soon(lambda: not decode.control.peers.instances)
        assert served.loaded is None
        faults.resume()
        await settled(served)
        assert decode.right(served)
        del prefill.puller.fences.try_revoke
        second = await cluster.prefill()  # gets its message, and is refused the claim
        await cluster.check_clean()
        assert second.engine.computed_tokens == 0


async def test_pull_that_fails_is_computed_here_and_its_session_made_anew(make: Make) -> None:
    async with make("loopback", kv_mode=PULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        served, faults = await copying(decode, prefill)
        faults.resume(kill=True)
        await settled(served)
        assert served.loaded is False
        assert decode.traces.fallback_of(served.request.request_id) == "prefill_failed"
        again = decode.send(prompt(30, seed=2))
        await settled(again)
        assert decode.right(again)


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


# ------------------------------------------------------------------ credits


@pytest.mark.essential
async def test_nothing_is_pulled_beyond_the_credits(make: Make) -> None:
    """While the first prompt cannot be written, only a pull that is under way brings another."""
    async with make(credit_blocks=4, patience_s=100) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=8)
        first, faults = await copying(decode, decode)
        await soon(lambda: prefill.credits.gone)
        rest = [decode.send(prompt(30, seed=2))]
        await soon(lambda: prefill.puller.in_flight == 2)
        rest += [decode.send(prompt(30, seed=n)) for n in (3, 4)]
        await asyncio.sleep(0.05)
        assert prefill.puller.in_flight == 2
        faults.resume()
        await settled(first, *rest)
        assert all(decode.right(s) for s in (first, *rest))


# ------------------------------------------------------------------ the reader


async def test_a_worker_whose_memory_cannot_be_reached_writes_until_it_connects_again(
    make: Make,
) -> None:
    """No job after the first is spent on finding that out."""
    async with make("tcp", kv_mode=PULL) as cluster:
        decode, tries, cut = await cluster.decode(), 0, True
        reach: Any = decode.control.reach

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

        decode.control.reach = way
        await cluster.prefill(chunk=5)
        assert [await served(seed) for seed in (1, 2, 3)] == [False, True, True]
        assert tries == 1
        cut = False
        (peer,) = decode.control.peers.values()
        peer.channel.close()
        await soon(lambda: peer.name not in decode.control.peers and decode.control.peers)
        assert await served(4)
        assert tries == 2


@pytest.mark.parametrize("device", [None, 0], ids=["cpu", "gpu"])
async def test_a_drain_waits_for_no_stopped_reader_of_shared_memory(
    make: Make, device: int | None
) -> None:
    """Its blocks stay as they are. GPU memory is freed when its process ends, so that drain waits.
    In both cases the worker is not busy."""
    async with make(kv_mode=KvMode.PULL) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(chunk=5)
        puller = prefill.puller
        memory = dataclasses.replace(prefill.region.memory, device=device)
        engine: Any = SimpleNamespace(
            context=SimpleNamespace(memories=[memory]), dead=asyncio.Event()
        )
        (nats := ServerHealth("nats")).ok()
        unused: Any = None
        service = PrefillService(engine, unused, prefill.puller, [nats])
        served, faults = await copying(decode, prefill)
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
        session.limits = (LAYOUT.block_bytes, 1000)
        return session

    transport.connect = connect_for_small_batches
    faults_of(half).inside_batch = lambda: time.sleep(BATCH_S)


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
        prefill.links.load = lambda: Load(done_tokens=next(told), tokens_per_s=9.0)
        await settled(decode.send(prompt(TOKENS + 1, seed=1)))
        (peer,) = decode.control.peers.pulling
        assert 2 <= peer.load.done_tokens < peer.done_tokens() < 999, "with claim and commit"


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
        said.grant(decode.ledger, job.job_id, "i0", writer)
        await reported(decode, prefill, Load(tokens_per_s=TOKENS / 12, done_tokens=TOKENS // 2))
        assert remote(decode, 3), "6 s"
        told = GiveUp(job_id=job.job_id, attempt=1, incarnation="i0", cause="why", retry=False)
        decode.ledger.gave_up(told, writer)
        await settled(served)
        prefill.puller.pause("check", "")


# ------------------------------------------------------------------ withdrawn, lost, out of reach


def otherwise(how: str, decode: DecodeHalf, served: Served) -> None:
    """The decode worker decides that it needs no prefill worker."""
    if how == "abort":
        decode.abort(served)
    else:
        decode.pass_time(11.0)  # nobody has claimed the job: the prompt is computed here


async def stop_at(
    when: str, decode: DecodeHalf, prefill: PrefillHalf, claims: asyncio.Event
) -> Served:
    """Send a request, and let its job come so far. One job of another request waits before it."""
    producer: Any = decode.producer
    if when == "being published":
        producer.go.clear()
    served = decode.send(prompt(40, seed=2))
    (job_id,) = [e.job_id for e in decode.ledger._jobs.values()
                 if e.request_id == served.request.request_id]  # fmt: skip
    if when == "before the publish":
        return served
    await soon(lambda: producer.depth().depth_jobs == 2)
    if when != "pulled":
        return served
    claims.clear()
    prefill.puller.start()
    await soon(lambda: job_id in prefill.puller._jobs)
    return served


@pytest.mark.parametrize("how", ["abort", "claim timeout"])
@pytest.mark.parametrize("when", ["before the publish", "being published", "queued", "pulled"])
@pytest.mark.essential
async def test_it_is_not_computed(make: Make, when: str, how: str) -> None:
    clock = FakeClock()
    claims = asyncio.Event()
    claims.set()
    async with make(clock=clock, timeout_s=10.0, wrap=Between) as cluster:
        decode = await cluster.decode()
        prefill = await cluster.prefill(pull=False)
        find = prefill.links.find

        async def late(instance_id: str, **how: bool) -> Any:
            await claims.wait()
            return await find(instance_id, **how)

        computed: list[int] = []
        submit = prefill.engine.submit

        def noted(task: Any) -> None:
            computed.append(len(task.token_ids))
            submit(task)

        prefill.links.find = late
        prefill.engine.submit = noted
        first = decode.send(prompt(30))
        await soon(lambda: decode.producer.depth().depth_jobs == 1)
        unwanted = await stop_at(when, decode, prefill, claims)
        otherwise(how, decode, unwanted)
        decode.producer.go.set()
        claims.set()
        if when != "pulled":
            prefill.puller.start()
        await settled(first, unwanted)
        last = decode.send(prompt(20, seed=3))
        await settled(last)
        assert decode.right(last)
        assert not unwanted.loaded
        # The clock has passed for the first job, too.
        assert computed == ([29, 19] if how == "abort" else [19])


# ------------------------------------------------------------------ the queue loses it


async def lose(how: str, cluster: Cluster, consumer: JetStreamConsumer) -> None:
    """Let the message of the only job disappear, after it was published."""
    names = cluster.names
    (producer,) = [decode.producer for decode in cluster.decodes.values()]
    connection: Any = producer.connection
    if how == "purge":
        assert (await connection.api(f"STREAM.PURGE.{names.stream}"))["purged"] == 1
    elif how == "delete":
        await connection.api(f"STREAM.DELETE.{names.stream}")
    else:
        for _ in range(consumer.max_deliver if how == "max_deliver" else 1):
            delivery = await consumer.pull(30.0)
            await (delivery.term("it is poison") if how == "term" else delivery.nak())
        assert not await consumer.pull(0.2)


@pytest.mark.parametrize("how", ["purge", "delete", "term", "max_deliver"])
async def test_a_job_whose_message_is_gone_is_local(
    make: Make, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Within a second, not after the claim timeout of 10 s. It is told, and the next one is remote.

    An older job, which a prefill worker holds, stays where it is."""
    caplog.set_level(logging.WARNING)
    async with make() as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill(pull=False)
        consumer = await cluster.consumer()
        beside = how in ("term", "max_deliver")
        if beside:
            older = decode.send(prompt(30))
            await soon(lambda: decode.producer.depth().depth_jobs == 1)
            held = await consumer.pull(30.0)
        served = decode.send(prompt(20, seed=2))
        await soon(lambda: decode.producer.depth().depth_jobs == 1 + beside)
        await lose(how, cluster, consumer)
        await settled(served)
        assert served.loaded is False
        trace = decode.traces.finish(served.request.request_id)
        assert trace.fallback == "job_gone"
        assert "1 jobs are gone from the queue" in caplog.text
        if beside:
            assert older.loaded is None
            await held.nak()
        await consumer.close()
        prefill.puller.start()
        await soon(lambda: decode.producer.available)
        last = decode.send(prompt(20, seed=3))
        await settled(last)
        assert decode.right(last)


# ------------------------------------------------------------------ unreadable frames


def noting(prefill: PrefillHalf) -> list[int]:
    """The number of each delivery that this worker gets from now on."""
    given, begin = list[int](), prefill.puller.begin
    prefill.puller.begin = lambda delivery: given.append(delivery.number) or begin(delivery)
    return given


@pytest.mark.parametrize("to", ["decode", "prefill"])
@pytest.mark.essential
async def test_an_unreadable_frame_ends_the_control_connection(
    make: Make, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """Its jobs go on at the other worker; the link is made anew. Both ends see it break, and only
    the decode worker hands the delivery back."""
    # After 0.1 s a request whose writer is stopped goes on locally, and its message is deleted. A
    # busy machine may take longer than that to deliver the message again.
    monkeypatch.setattr(ledger, "NO_PROOF_S", 20.0)
    async with make(ack_wait_s=60.0) as cluster:  # only a nak brings a message back
        decode, holder = await cluster.decode(), await cluster.prefill(chunk=5)
        served, faults = await copying(decode, decode)
        other = await cluster.prefill(pull=False)
        given = noting(other)
        other.puller.start()
        await holder.puller.stop()
        (peer,) = [p for p in decode.control.peers.values() if p.instance_id == holder.name]
        (link,) = holder.links.links.values()
        channel = link._channel if to == "decode" else peer.channel
        channel._writer.write(struct.pack("<I", 5) + b"\xc1" * 5)
        await soon(lambda: given)
        faults.resume()
        await settled(served)
        assert decode.right(served)
        await soon(lambda: holder.links.connected == [decode.name])
        assert link._channel is not channel
        await asyncio.sleep(0.3)  # a second hand-back would come 0.05 s after the first
        assert set(given) == {2}
        await cluster.check_clean()
        assert (holder.budget.completed, other.budget.completed) == (0, 1)


# --------------------------------------------------------------------------
# The handoff when a decode worker is out of reach.


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address where nobody listens. Its port stays taken, so that nobody else gets it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{sock.getsockname()[1]}"


def unreachable(cluster: Cluster, nowhere: str) -> FakeDirectory:
    """What a prefill worker finds in etcd if nobody answers at the address of decode-1."""
    cluster.links["appear_s"] = 0.01
    directory = FakeDirectory()
    for known in cluster.directory.members.values():
        cut = known.instance_id == "decode-1"
        directory.put(replace(known, control=nowhere) if cut else known)
    return directory


async def test_row_18_a_job_that_no_worker_can_claim_is_no_dead_letter(
    make: Make, nowhere: str
) -> None:
    """Served locally when nobody claimed it in time, which removes it from the queue."""
    async with make(clock=FakeClock()) as cluster:
        decode = await cluster.decode()
        address = split_address(decode.control.address)
        busy = Raw(*await asyncio.open_connection(*address))  # it takes nothing, but it is there
        await busy.hello(COMPATIBLE.hash())
        cluster.directory = unreachable(cluster, nowhere)
        prefill = await cluster.prefill(pull=False, reaches=False)
        given = noting(prefill)
        prefill.puller.start()
        served = decode.send(prompt(30))
        await soon(lambda: given == [1, 2, 3])
        assert served.loaded is None
        assert decode.producer.depth().depth_jobs == 1
        decode.pass_time(11.0)  # router.claim_timeout_s is 10
        await settled(served)
        assert served.loaded is False
        await cluster.check_clean()
        assert not await cluster.dead()
        busy.writer.close()


async def test_row_18_jobs_go_past_a_worker_that_cannot_reach_their_decode_worker(
    make: Make, nowhere: str
) -> None:
    """An idle prefill worker that reaches it gets them at once. Jobs of a decode worker that both
    reach are taken by both."""
    async with make() as cluster:
        far, near = await cluster.decode("decode-1"), await cluster.decode("decode-2")
        everybody, cluster.directory = cluster.directory, unreachable(cluster, nowhere)
        cut = await cluster.prefill(reaches=False)
        pulled = noting(cut)
        cluster.directory = everybody
        other = await cluster.prefill(pull=False)
        given = noting(other)
        first = far.send(prompt(9))
        await soon(lambda: pulled and not cut.puller.in_flight)
        other.puller.start()
        await settled(first)
        served = [first]
        for seed in range(8):
            served.append(far.send(prompt(9, seed=seed)))
            await settled(served[-1])
        assert max(given[1:]) <= 2, "what was given back went to the worker that is idle"
        served += [far.send(prompt(9, seed=seed)) for seed in range(8, 12)]
        await settled(*served)
        assert all(far.right(one) for one in served)
        await other.puller.stop()
        alone = near.send(prompt(9))
        await settled(alone)
        assert near.right(alone)
        await cluster.check_clean()
        assert (cut.budget.completed, other.budget.completed) == (1, 13)


@pytest.mark.essential
async def test_memory_that_cannot_be_reached_costs_a_moment_and_no_dead_letter(make: Make) -> None:
    """Something else answers at its KV port. Its jobs are computed there; those of others go on."""
    attempts: list[str] = []

    async def nonsense(*_: object) -> TransferWorker:
        attempts.append("decode-1")
        raise BadMessage("a frame of 1347703880 bytes")

    async with make(timeout_s=2.0) as cluster:
        cut, fine = await cluster.decode("decode-1"), await cluster.decode("decode-2")
        prefill = await cluster.prefill()
        prefill.links.links["decode-1"].transfer.open = nonsense
        lost = [cut.send(prompt(20 + i)) for i in range(6)]
        served = fine.send(prompt(30))
        await settled(*lost, served)
        assert fine.right(served)
        assert not any(request.loaded for request in lost)
        assert attempts == ["decode-1"]
        await cluster.check_clean()
        assert not await cluster.dead()
        assert prefill.budget.completed == 1
