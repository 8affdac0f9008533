"""A real NATS server delivers a job twice, while the first worker is alive.

Two prefill workers and a decode worker without vLLM, otherwise real. A job stays with a worker that
is alive. A link that breaks causes one more delivery, not one from each end.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pullfill.decode_worker import ledger
from pullfill.prefill_worker.puller import MAX_WAITING, Puller
from pullfill.queue.contract import Delivery
from pullfill.queue.jetstream import JetStreamDelivery
from pullfill.wire import PrefillJob, encode, u32
from tests.support.handoff_rig import (
    COMPATIBLE,
    Cluster,
    DecodeHalf,
    PrefillHalf,
    Served,
    hold,
    prompt,
    settled,
    stuck_in_a_write,
    until,
)
from tests.support.nats import NatsServer

NEVER_S = 60.0
"""An `ack_wait` that no test reaches: only a nak brings a message back."""


@pytest.fixture
async def cluster(
    tmp_path: Path, server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Cluster]:
    # After 0.1 s a request whose writer is stopped goes on locally, and its message is deleted. A
    # busy machine may take longer than that to deliver the message again.
    monkeypatch.setattr(ledger, "NO_PROOF_S", 20.0)
    async with Cluster(tmp_path, server, ack_wait_s=NEVER_S) as cluster:
        yield cluster
        server.resume()


@pytest.fixture
def deliveries(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count, by job id, how often prefill workers have started the job. Jobs that the last pull of
    a stopped worker brings are given back and do not count."""
    seen: Counter[str] = Counter()
    numbers = set()
    real = Puller.begin

    def begin(self: Puller, delivery: Delivery, **how: bool) -> None:
        numbers.add((delivery.job_id, delivery.number))
        seen[delivery.job_id] = sum(job == delivery.job_id for job, _ in numbers)
        real(self, delivery, **how)

    monkeypatch.setattr(Puller, "begin", begin)
    return seen


async def nothing(*_: object) -> None: ...


async def a_writer_at_work(
    cluster: Cluster,
) -> tuple[DecodeHalf, PrefillHalf, PrefillHalf, Served, Any]:
    """A decode worker, a prefill worker that is stopped inside a write, and one that pulls."""
    decode, holder = await cluster.decode(), await cluster.prefill(chunk=5)
    faults = hold(decode)
    served = decode.send(prompt(30))
    await stuck_in_a_write(decode)
    return decode, holder, await cluster.prefill(), served, faults


async def test_a_nats_outage_takes_no_job_from_its_writer(
    cluster: Cluster,
    server: NatsServer,
    deliveries: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server hangs, gets no heartbeat for `ack_wait` and delivers the job again."""
    # A busy machine may send some heartbeats late, but not for as long as that.
    ack_wait_s = 2.0
    cluster.config = replace(cluster.config, ack_wait_s=ack_wait_s)
    decode, holder, other, served, faults = await a_writer_at_work(cluster)
    await holder.puller.stop()
    with pytest.MonkeyPatch.context() as lost:  # heartbeats get lost in the outage
        lost.setattr(JetStreamDelivery, "in_progress", nothing)
        server.pause()
        await asyncio.sleep(0.2)
        server.resume()
        await until(lambda: max(deliveries.values()) == 2)
    await until(lambda: other.puller.in_flight == 0)
    beats = Counter[str]()
    real = JetStreamDelivery.in_progress

    async def beat(delivery: JetStreamDelivery) -> None:
        beats[delivery.job_id] += 1
        await real(delivery)

    monkeypatch.setattr(JetStreamDelivery, "in_progress", beat)
    await until(lambda: max(beats.values(), default=0) > 5)  # 1.7 times `ack_wait`
    assert max(deliveries.values()) == 2
    faults.resume()
    await settled(served)
    assert decode.right(served)
    await cluster.check_clean()
    assert (holder.budget.completed, other.budget.completed) == (1, 0)
    assert other.engine.computed_tokens == 0


@pytest.mark.parametrize("granted", [False, True], ids=["claim lost", "grant lost"])
async def test_a_link_that_goes_silent_under_a_claim_leaves_the_job_to_another_worker(
    tmp_path: Path, server: NatsServer, deliveries: Counter[str], granted: bool
) -> None:
    """Not after `ack_wait`, though no decode worker naks what it has not granted. If it has, both
    ends nak, and the job stays with its new writer."""
    async with Cluster(tmp_path, server, ack_wait_s=NEVER_S) as cluster:
        decode, holder = await cluster.decode(), await cluster.prefill(pull=False)
        other = await cluster.prefill(pull=False)
        cut_off(decode, holder, granted)
        (link,) = holder.links.links.values()
        link._silent_s = 1.0
        served = decode.send(prompt(30))
        holder.puller.start()
        await until(lambda: holder.budget.waiting == 1)
        await holder.puller.stop()
        other.puller.start()
        await settled(served)
        assert decode.right(served)
        await cluster.check_clean()
        assert (holder.budget.completed, other.budget.completed) == (0, 1)
        assert max(deliveries.values()) in ((2, 3) if granted else (2,))


def cut_off(decode: DecodeHalf, holder: PrefillHalf, granted: bool) -> None:
    """From now on nothing that the decode worker says reaches this prefill worker.

    granted: what this one says reaches the decode worker."""
    control = decode.control
    (peer,) = [p for p in control.peers.values() if p.instance_id == holder.name]
    peer.channel.write = lambda *_, **__: None  # type: ignore[method-assign]
    if not granted:
        handoff, grant = control._handoff, control._handoff.grant
        handoff.grant = lambda who, asked: None if who is peer else grant(who, asked)  # type: ignore[method-assign]

    async def greets(channel: Any) -> Any:
        return await asyncio.Event().wait()

    control._greet = greets  # type: ignore[method-assign]


async def test_a_job_that_comes_back_to_the_worker_that_lost_its_link_runs_again(
    cluster: Cluster, deliveries: Counter[str]
) -> None:
    """The queue may deliver it before the first run is over. That run must not settle it."""
    decode, holder, other, served, faults = await a_writer_at_work(cluster)
    await other.puller.stop()
    (job,) = holder.puller._jobs.values()
    real, lost = job.link_lost, asyncio.Event()

    def late() -> None:
        asyncio.get_running_loop().call_later(0.2, real)
        lost.set()

    job.link_lost = late  # type: ignore[method-assign]
    (peer,) = [p for p in decode.control.peers.values() if p.instance_id == holder.name]
    peer.channel.abort()
    await asyncio.wait_for(lost.wait(), 10)
    await until(lambda: max(deliveries.values()) == 2)
    faults.resume()
    await settled(served)
    assert decode.right(served)
    assert max(deliveries.values()) == 2, "and not after ack_wait"
    await cluster.check_clean()
    assert holder.budget.completed == 1


async def test_a_holder_that_fails_after_the_last_delivery_leaves_the_prompt_to_us(
    cluster: Cluster, deliveries: Counter[str]
) -> None:
    """The worker that got the last delivery has acked it, so nobody can be given the job again."""
    cluster.config = replace(cluster.config, max_deliver=2)
    decode, holder, other, served, faults = await a_writer_at_work(cluster)
    await holder.puller.stop()
    (entry,) = decode.ledger._jobs.values()
    await decode.producer.nak(entry.ack_subject, entry.receipt)  # type: ignore[arg-type]
    await until(lambda: max(deliveries.values()) == 2 and other.puller.in_flight == 0)
    await other.puller.stop()
    (peer,) = [p for p in decode.control.peers.values() if p.instance_id == holder.name]
    began = time.monotonic()
    peer.channel.abort()
    faults.resume()
    await settled(served)
    assert time.monotonic() - began < 5.0, "and not after the claim timeout of 10 s"
    assert served.loaded is False
    await cluster.check_clean()


# ------------------------------------------------------------------ unreadable frames


@pytest.mark.parametrize("to", ["decode", "prefill"])
@pytest.mark.essential
async def test_an_unreadable_frame_ends_the_control_connection(
    cluster: Cluster, deliveries: Counter[str], to: str
) -> None:
    """Its jobs go on at the other worker; the link is made anew. Both ends see it break, and only
    the decode worker hands the delivery back."""
    decode, holder, other, served, faults = await a_writer_at_work(cluster)
    await holder.puller.stop()
    (peer,) = [p for p in decode.control.peers.values() if p.instance_id == holder.name]
    (link,) = holder.links.links.values()
    channel = link._channel if to == "decode" else peer.channel
    assert channel is not None
    channel._writer.write(struct.pack("<I", 5) + b"\xc1" * 5)
    await until(lambda: max(deliveries.values()) == 2)
    faults.resume()
    await settled(served)
    assert decode.right(served)
    await until(lambda: holder.links.connected == [decode.name])
    assert link._channel is not channel
    await asyncio.sleep(0.3)  # a second hand-back would come 0.05 s after the first
    assert max(deliveries.values()) == 2
    await cluster.check_clean()
    assert (holder.budget.completed, other.budget.completed) == (0, 1)


async def test_deliveries_that_wait_are_bounded_by_their_number(cluster: Cluster) -> None:
    """A decode worker answers no claim. Its jobs use no budget, but no worker pulls all of them."""
    live = await cluster.decode()
    prefills = [await cluster.prefill(pull=False) for _ in range(2)]
    answer = asyncio.Event()
    for prefill in prefills:
        find = prefill.links.find

        async def late(instance_id: str, find: Any = find, **how: bool) -> Any:
            if instance_id == "decode-gone":
                await answer.wait()
            return await find(instance_id, **how)

        prefill.links.find = late  # type: ignore[method-assign]
        prefill.puller.start()
    for number in range(2 * MAX_WAITING + 10):
        job = PrefillJob(
            job_id=f"gone-{number}", incarnation="i", decode_instance="decode-gone",
            request_id="r", compat=COMPATIBLE.hash(),
            token_ids=u32.pack([1, 2, 3]), hit_tokens=0, block_ids=u32.pack([1]), timeout_s=1.0,
        )  # fmt: skip
        # Each alone fills the budget of a prefill worker.
        await live.producer.publish(job.job_id, encode(job), 1024)
    await until(lambda: all(p.budget.waiting == MAX_WAITING for p in prefills), 30)
    await until(lambda: not any(p.budget.tokens for p in prefills))
    await asyncio.sleep(0.1)
    assert [p.budget.waiting for p in prefills] == [MAX_WAITING] * 2
    answer.set()
    served = live.send(prompt(30))
    await settled(served)
    assert live.right(served)
    await cluster.check_clean()
