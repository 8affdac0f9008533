"""Jobs that are withdrawn, lost, delivered twice or out of reach: handoffs without vLLM."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from pullfill.decode_worker import ledger
from pullfill.errors import BadMessage
from pullfill.net.channel import split_address
from pullfill.prefill_worker import handoff
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.queue.contract import Receipt, Urgency
from pullfill.queue.jetstream import JetStreamConsumer
from tests.support.control_rig import Raw
from tests.support.fakes import FakeClock
from tests.support.handoff_rig import (
    COMPATIBLE,
    Cluster,
    DecodeHalf,
    Make,
    PrefillHalf,
    Served,
    hold,
    prompt,
    settled,
    stuck_in_a_write,
)
from tests.support.waiting import soon
from tests.support.workers import FakeDirectory


class SlowProducer:
    """A producer whose answers to publishes wait for `go`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.go = asyncio.Event()
        self.go.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def publish(self, job_id: str, body: bytes, tokens: int, urgency: Urgency) -> Receipt:
        receipt: Receipt = await self._inner.publish(job_id, body, tokens, urgency)
        await self.go.wait()
        return receipt


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
    async with make(clock=clock, timeout_s=10.0, wrap=SlowProducer) as cluster:
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
        await cluster.check_clean()


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
        for _ in range(cluster.max_deliver if how == "max_deliver" else 1):
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
        await cluster.check_clean()


# ------------------------------------------------------------------ unreadable frames


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
        faults = hold(decode)
        served = decode.send(prompt(30))
        await stuck_in_a_write(decode)
        other, deliveries = await cluster.prefill(pull=False), set[int]()
        begin = other.puller.begin
        other.puller.begin = lambda d: deliveries.add(d.number) or begin(d)
        other.puller.start()
        await holder.puller.stop()
        (peer,) = [p for p in decode.control.peers.values() if p.instance_id == holder.name]
        (link,) = holder.links.links.values()
        channel = link._channel if to == "decode" else peer.channel
        channel._writer.write(struct.pack("<I", 5) + b"\xc1" * 5)
        await soon(lambda: deliveries)
        faults.resume()
        await settled(served)
        assert decode.right(served)
        await soon(lambda: holder.links.connected == [decode.name])
        assert link._channel is not channel
        await asyncio.sleep(0.3)  # a second hand-back would come 0.05 s after the first
        assert deliveries == {2}
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


def unreachable(cluster: Cluster, nowhere: str, name: str = "decode-1") -> FakeDirectory:
    """The directory of a prefill worker that cannot reach this decode worker."""
    cluster.links["appear_s"] = 0.01
    directory = FakeDirectory()
    for known in cluster.directory.members.values():
        cut = known.instance_id == name
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
        prefill, tries = await cluster.prefill(pull=False, reaches=False), list[int]()
        begin = prefill.puller.begin
        prefill.puller.begin = lambda d: tries.append(d.number) or begin(d)
        prefill.puller.start()
        served = decode.send(prompt(30))
        await soon(lambda: tries == [1, 2, 3])
        assert served.loaded is None
        assert decode.producer.depth().depth_jobs == 1
        decode.pass_time(11.0)  # router.claim_timeout_s is 10
        await settled(served)
        assert served.loaded is False
        await cluster.check_clean()
        assert not await cluster.dead()
        busy.writer.close()


async def test_row_18_jobs_go_past_a_worker_that_cannot_reach_their_decode_worker(
    make: Make, monkeypatch: pytest.MonkeyPatch, nowhere: str
) -> None:
    """An idle prefill worker that reaches it gets them at once. Jobs of a decode worker that both
    reach are taken by both."""
    async with make() as cluster:
        far, near = await cluster.decode("decode-1"), await cluster.decode("decode-2")
        everybody, cluster.directory = cluster.directory, unreachable(cluster, nowhere)
        cut, pulled = await cluster.prefill(reaches=False), list[str]()
        start = cut.puller.begin
        monkeypatch.setattr(cut.puller, "begin", lambda d: pulled.append(d.job_id) or start(d))
        cluster.directory = everybody
        other, deliveries = await cluster.prefill(pull=False), list[int]()
        begin = other.puller.begin
        monkeypatch.setattr(
            other.puller, "begin", lambda d: deliveries.append(d.number) or begin(d)
        )
        first = far.send(prompt(9))
        await soon(lambda: pulled and not cut.puller.in_flight)
        other.puller.start()
        await settled(first)
        served = [first]
        for seed in range(8):
            served.append(far.send(prompt(9, seed=seed)))
            await settled(served[-1])
        assert max(deliveries[1:]) <= 2, "what was given back went to the worker that is idle"
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
async def test_memory_that_cannot_be_reached_costs_a_moment_and_no_dead_letter(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else answers at its KV port. Its jobs are computed there; those of others go on."""
    monkeypatch.setattr(handoff, "patience", partial(handoff.patience, soonest_s=0.01))
    attempts: list[str] = []

    async def nonsense() -> TransferWorker:
        attempts.append("decode-1")
        raise BadMessage("a frame of 1347703880 bytes")

    async with make(timeout_s=2.0) as cluster:
        cut, fine = await cluster.decode("decode-1"), await cluster.decode("decode-2")
        prefill = await cluster.prefill()
        prefill.links.links["decode-1"].transfer._open = nonsense
        lost = [cut.send(prompt(20 + i)) for i in range(6)]
        served = fine.send(prompt(30))
        await settled(*lost, served)
        assert fine.right(served)
        assert not any(request.loaded for request in lost)
        assert attempts == ["decode-1"]
        await cluster.check_clean()
        assert not await cluster.dead()
        assert prefill.budget.completed == 1
