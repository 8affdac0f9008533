"""The handoff when a grant ends before its task began, and when a decode worker is out of reach."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from pullfill.errors import BadMessage
from pullfill.net.channel import split_address
from pullfill.prefill_worker import handoff
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.queue.jetstream import JetStreamConsumer
from pullfill.wire import WorkerRecord
from tests.support.control_rig import FakeDirectory, Raw
from tests.support.fakes import FakeClock
from tests.support.handoff_rig import (
    COMPATIBLE,
    Cluster,
    PrefillHalf,
    prompt,
    settled,
    until,
)
from tests.support.nats import NatsServer

# ------------------------------------------------------------------ before the task is there


class SlowMover:
    """The first connection to decode memory takes until `go`."""

    def __init__(self, prefill: PrefillHalf) -> None:
        self.asked, self.go = asyncio.Event(), asyncio.Event()
        (link,) = prefill.links.links.values()
        self._real = link.transfer._open
        link.transfer._open = self._open  # type: ignore[method-assign]

    async def _open(self) -> TransferWorker:
        self.asked.set()
        await self.go.wait()
        return await self._real()


@pytest.mark.parametrize("end", ["abort", "link"])
async def test_a_grant_that_ends_before_its_task_began_is_not_computed(
    tmp_path: Path, end: str
) -> None:
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await cluster.decode(), await cluster.prefill()
        transfer_worker = SlowMover(prefill)
        served = decode.send(prompt(30))
        await asyncio.wait_for(transfer_worker.asked.wait(), 10)
        if end == "abort":
            decode.abort(served)
        else:
            for peer in list(decode.control.peers.values()):
                peer.channel.close()
        await settled(served)
        assert decode.ledger.open_jobs == 0, "proved quiet at once: nothing was ever written"
        # One more exchange over the same connection: the revoke was read before it.
        await until(lambda: len(decode.control.peers.pulling) == 1)
        other = decode.send(prompt(9, seed=2))
        await until(lambda: prefill.budget.failed == 1)
        await until(lambda: prefill.puller.in_flight == 1)
        transfer_worker.go.set()
        await settled(other)
        assert decode.right(other)
        await cluster.check_clean()
        assert prefill.engine.computed_tokens == 8
        assert (prefill.budget.completed, prefill.budget.failed) == (1, 1)


# ------------------------------------------------------------------ out of reach


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address where nobody listens. Its port stays taken, so that nobody else gets it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{sock.getsockname()[1]}"


async def cut_off(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    nowhere: str,
    record: WorkerRecord | None = None,
) -> PrefillHalf:
    """A prefill worker that knows a decode worker which it cannot reach."""
    cluster.links["appear_s"] = 0.01
    record = record or cluster.directory.members["decode-1"]
    cluster.directory.put(msgspec.structs.replace(record, control=nowhere))
    url = cluster.server and cluster.server.url
    consumer = await JetStreamConsumer.connect(url, cluster.config) if url else None
    prefill = PrefillHalf(cluster, "prefill-1", chunk=8, consumer=consumer)
    cluster.prefills.append(prefill)
    prefill.puller.start()
    return prefill


async def test_row_18_a_job_that_no_worker_can_claim_is_no_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nowhere: str
) -> None:
    """Served locally when nobody claimed it in time, which removes it from the queue."""
    async with Cluster(tmp_path, clock=FakeClock()) as cluster:
        decode = await cluster.decode()
        address = split_address(decode.control.address)
        busy = Raw(*await asyncio.open_connection(*address))  # it takes nothing, but it is there
        await busy.hello(COMPATIBLE.hash())
        await cut_off(cluster, monkeypatch, nowhere)
        served = decode.send(prompt(30))
        for _ in range(19):  # router.claim_timeout_s is 10
            decode.pass_time(0.5)
            await asyncio.sleep(0.02)
            assert served.loaded is None
            assert cluster.queue.status().depth_jobs == 1
        assert not cluster.queue.dead
        decode.pass_time(1.0)
        await settled(served)
        assert served.loaded is False
        await cluster.check_clean()
        assert not cluster.queue.dead
        busy.writer.close()


async def test_row_18_jobs_go_past_a_worker_that_cannot_reach_their_decode_worker(
    tmp_path: Path, server: NatsServer, monkeypatch: pytest.MonkeyPatch, nowhere: str
) -> None:
    """An idle prefill worker that reaches it gets them at once. Jobs of a decode worker that both
    reach are taken by both."""
    async with Cluster(tmp_path, server=server) as cluster:
        far, near = await cluster.decode("decode-1"), await cluster.decode("decode-2")
        everybody, cluster.directory = cluster.directory, FakeDirectory()
        cluster.directory.put(everybody.members[near.name])
        cut = await cut_off(cluster, monkeypatch, nowhere, everybody.members[far.name])
        pulled: list[str] = []
        start = cut.puller.begin
        monkeypatch.setattr(cut.puller, "begin", lambda d: pulled.append(d.job_id) or start(d))
        cluster.directory = everybody
        other, deliveries = await cluster.prefill(pull=False), list[int]()
        begin = other.puller.begin
        monkeypatch.setattr(
            other.puller, "begin", lambda d: deliveries.append(d.number) or begin(d)
        )
        first = far.send(prompt(9))
        await until(lambda: pulled and not cut.puller.in_flight)
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something else answers at its KV port. Its jobs are computed there; those of others go on."""
    monkeypatch.setattr(handoff, "patience", partial(handoff.patience, soonest_s=0.01))
    attempts: list[str] = []

    async def nonsense() -> TransferWorker:
        attempts.append("decode-1")
        raise BadMessage("a frame of 1347703880 bytes")

    async with Cluster(tmp_path, timeout_s=2.0) as cluster:
        cut, fine = await cluster.decode("decode-1"), await cluster.decode("decode-2")
        prefill = await cluster.prefill()
        prefill.links.links["decode-1"].transfer._open = nonsense  # type: ignore[method-assign]
        lost = [cut.send(prompt(20 + i)) for i in range(6)]
        served = fine.send(prompt(30))
        await settled(*lost, served)
        assert fine.right(served)
        assert not any(request.loaded for request in lost)
        assert attempts == ["decode-1"]
        await cluster.check_clean()
        assert not cluster.queue.dead
        assert prefill.budget.completed == 1
