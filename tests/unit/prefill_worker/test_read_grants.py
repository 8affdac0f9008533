"""Who may read a prefill worker's blocks, what it publishes of its memory, and that blocks are
given back on a proof only."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pullfill.decode_worker.kv_reader import reach_for
from pullfill.errors import Fenced
from pullfill.options import WorkerOptions
from pullfill.prefill_worker.read_grants import ReadGrants
from pullfill.prefill_worker.task import PrefillTask
from pullfill.transfer.owners import MappedRank
from pullfill.transfer.shm.files import RegionFiles, create_kv
from pullfill.wire import FenceToken, KvMode
from pullfill.worker import memory
from pullfill.worker.context import WorkerContext
from tests.support.fakes import prefill_task
from tests.support.loopback import LoopbackFences
from tests.support.transfer_rigs import DENSE, extent, memory_over, pages, random_bytes


class TransferWorker:
    """Only what `ReadGrants` uses."""

    def __init__(self) -> None:
        self.let_go_of: list[PrefillTask] = []

    def let_go(self, task: PrefillTask) -> None:
        self.let_go_of.append(task)


def kept_task(transfer_worker: Any) -> PrefillTask:
    task = prefill_task(transfer_worker, hit=4, blocks=[5, 6, 7], mode=KvMode.PULL)
    task.kept = {6: 11, 7: 3}
    return task


async def test_a_fence_that_cannot_be_looked_at_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fences, transfer_worker = LoopbackFences(2), TransferWorker()
    readers, task = ReadGrants(fences), kept_task(transfer_worker)
    readers.open(task)
    real, refused = fences.try_revoke, [OSError(37, "no locks available")]

    def try_revoke(fence: FenceToken) -> bool:
        if refused:
            raise refused.pop()
        return real(fence)

    monkeypatch.setattr(fences, "try_revoke", try_revoke)
    await asyncio.wait_for(readers.let_go(task), 10)
    assert not refused
    assert transfer_worker.let_go_of == [task]
    assert readers.kept_blocks == 0


async def test_blocks_come_back_when_nobody_reads() -> None:
    fences, transfer_worker = LoopbackFences(2), TransferWorker()
    readers, task = ReadGrants(fences), kept_task(transfer_worker)
    token = readers.open(task)
    assert set(fences.granted(token, writes=False) or ()) == {11, 3}
    assert list(fences.granted(token, writes=True) or ()) == []
    assert readers.kept_blocks == 2
    let_go = fences.hold(token)
    assert not readers.revoke(task)
    with pytest.raises(Fenced):  # the read is told to end
        fences.hold(token)
    waits = asyncio.create_task(readers.let_go(task))
    await asyncio.sleep(0.02)
    assert not waits.done()
    assert transfer_worker.let_go_of == []
    let_go()
    await asyncio.wait_for(waits, 10)
    assert transfer_worker.let_go_of == [task]
    assert (fences.in_use, readers.kept_blocks) == (0, 0)


async def test_when_we_leave_the_blocks_stay() -> None:
    fences, transfer_worker = LoopbackFences(2), TransferWorker()
    readers, task = ReadGrants(fences), kept_task(transfer_worker)
    readers.open(task)
    fences.close()
    await readers.let_go(task)
    assert transfer_worker.let_go_of == [], "nothing was proved"


# ------------------------------------------------------------------ the memory

PULL = WorkerOptions(model="m", kv_mode=KvMode.PULL)


class Prefill:
    """Its memory and what it says of it."""

    def __init__(self, directory: Path, transports: frozenset[str] | None) -> None:
        self.context = WorkerContext("prefill-1", RegionFiles("prefill-1", directory=directory))
        path = create_kv(directory, "prefill-1", 0, extent(DENSE))
        self.data = np.asarray(np.memmap(path, np.uint8, "r+"))
        self.data[:] = random_bytes(self.data.nbytes, seed=5)
        self.context.ranks = [MappedRank(memory_over(self.data, DENSE), str(path), None)]
        options = WorkerOptions(model="m", transports=transports)
        memory.open_to_peers(self.context, options, None, decodes=False)


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_decode_worker_reads_what_the_fence_lets_it(name: str, tmp_path: Path) -> None:
    prefill = Prefill(tmp_path, frozenset({name}))
    ours = random_bytes(extent(DENSE), seed=6)
    reach = reach_for([memory_over(ours, DENSE)], PULL, None)
    assert reach is not None
    owner = prefill.context.owner
    regions = owner.describe()
    assert set(regions[0].endpoints) == {name}
    session = reach(regions)()
    try:
        assert session.transport == name
        fence = owner.fences.open([3, 9])
        assert session.move("read", fence, [9, 3], [0, 1]).blocks == 2
        there, here = pages(prefill.data, DENSE), pages(ours, DENSE)
        assert (here[:, [0, 1]] == there[:, [9, 3]]).all()
        assert owner.fences.try_revoke(fence)
        with pytest.raises(Fenced):
            session.move("read", fence, [9, 3], [0, 1])
    finally:
        session.close()
        memory.close(prefill.context)
    assert list(tmp_path.iterdir()) == []
