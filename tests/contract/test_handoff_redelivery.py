"""A real NATS server delivers a job twice, while the first worker is alive.

Two prefill workers and a decode worker without vLLM, otherwise real. A job stays with a worker that
is alive. A link that breaks causes one more delivery, not one from each end.
"""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pullfill.decode_worker import ledger
from pullfill.prefill_worker.puller import Puller
from pullfill.queue.contract import Delivery
from pullfill.queue.jetstream import JetStreamDelivery
from tests.support.handoff_rig import (
    Cluster,
    DecodeHalf,
    PrefillHalf,
    Served,
    hold,
    prompt,
    settled,
    stuck_in_a_write,
)
from tests.support.nats import NatsServer
from tests.support.waiting import soon

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
        await soon(lambda: max(deliveries.values()) == 2)
    await soon(lambda: other.puller.in_flight == 0)
    beats = Counter[str]()
    real = JetStreamDelivery.in_progress

    async def beat(delivery: JetStreamDelivery) -> None:
        beats[delivery.job_id] += 1
        await real(delivery)

    monkeypatch.setattr(JetStreamDelivery, "in_progress", beat)
    await soon(lambda: max(beats.values(), default=0) > 5)  # 1.7 times `ack_wait`
    assert max(deliveries.values()) == 2
    faults.resume()
    await settled(served)
    assert decode.right(served)
    await cluster.check_clean()
    assert (holder.budget.completed, other.budget.completed) == (1, 0)
    assert other.engine.computed_tokens == 0


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
    await soon(lambda: max(deliveries.values()) == 2)
    faults.resume()
    await settled(served)
    assert decode.right(served)
    await soon(lambda: holder.links.connected == [decode.name])
    assert link._channel is not channel
    await asyncio.sleep(0.3)  # a second hand-back would come 0.05 s after the first
    assert max(deliveries.values()) == 2
    await cluster.check_clean()
    assert (holder.budget.completed, other.budget.completed) == (0, 1)
