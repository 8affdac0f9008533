"""The handoff when a decode worker is out of reach."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
from msgspec.structs import replace

from pullfill.errors import BadMessage, PeerUnavailable
from pullfill.net.channel import split_address
from pullfill.prefill_worker import handoff
from pullfill.prefill_worker.reach import MAX_RANKS, open_transfer_worker
from pullfill.prefill_worker.transfer_worker import Credits, TransferWorker
from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.stream.stream_peer import StreamTransport
from pullfill.transfer.stream.tcp_backend import TcpKind
from pullfill.wire import RegionDescriptor
from tests.support.control_rig import FakeDirectory, Raw
from tests.support.fakes import FakeClock
from tests.support.handoff_rig import COMPATIBLE, Cluster, Make, prompt, settled
from tests.support.transfer_rigs import DENSE, tcp_rig
from tests.support.waiting import soon
from tests.support.workers import record


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
        prefill.puller.begin = lambda d: tries.append(d.number) or begin(d)  # type: ignore
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
        prefill.links.links["decode-1"].transfer._open = nonsense  # type: ignore[method-assign]
        lost = [cut.send(prompt(20 + i)) for i in range(6)]
        served = fine.send(prompt(30))
        await settled(*lost, served)
        assert fine.right(served)
        assert not any(request.loaded for request in lost)
        assert attempts == ["decode-1"]
        await cluster.check_clean()
        assert not await cluster.dead()
        assert prefill.budget.completed == 1


# ------------------------------------------------------------------ what is said of the memory


class Registry:
    """A `Directory` as far as descriptors go."""

    def __init__(self, *descriptors: RegionDescriptor) -> None:
        self._descriptors = descriptors

    async def descriptor(self, name: str, rank: int, *, expect: object) -> RegionDescriptor:
        return self._descriptors[rank]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[list[LocalMemory], RegionDescriptor]]:
    """A prefill worker's memory, and a decode worker's that is served over tcp."""
    rig = tcp_rig(tmp_path)
    region, rank = rig.region(DENSE), rig.local(DENSE)
    yield [rank.memory], region.descriptor
    region.owner.close()


async def opened(memories: list[LocalMemory], *descriptors: RegionDescriptor) -> Any:
    directory: Any = Registry(*descriptors)
    transports = [StreamTransport(TcpKind())]
    return await open_transfer_worker(
        record("decode-1"), memories=memories, directory=directory, compat=COMPATIBLE,
        transports=transports, absent={}, credits=Credits(1 << 30), copiers=WeakSet(),
    )  # fmt: skip


async def test_what_is_right_is_reached(served: tuple[list[LocalMemory], RegionDescriptor]) -> None:
    transfer_worker = await opened(*served)
    assert transfer_worker.transport == "tcp"
    transfer_worker.close()
    assert transfer_worker.join(10)


@pytest.mark.parametrize(
    "wrong",
    [{"nbytes": 64}, {"incarnation": "before"}, {"world_size": MAX_RANKS + 1}],
    ids=["nbytes", "incarnation", "world_size"],
)
async def test_a_descriptor_that_contradicts_itself_or_its_worker(
    served: tuple[list[LocalMemory], RegionDescriptor], wrong: dict[str, Any]
) -> None:
    memories, descriptor = served
    with pytest.raises(PeerUnavailable):
        await opened(memories, replace(descriptor, **wrong))
