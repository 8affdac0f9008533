"""Who may read a prefill worker's blocks, and that these are given back on a proof only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pullfill.errors import Fenced
from pullfill.prefill_worker.read_grants import ReadGrants
from pullfill.prefill_worker.task import PrefillTask
from pullfill.wire import KvMode
from tests.support.fakes import prefill_task
from tests.support.loopback import LoopbackFences


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
