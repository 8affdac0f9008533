"""Who may read a prefill worker's blocks, and that they are given back on a proof only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pullfill.errors import HandoffError
from pullfill.prefill_worker.readers import Readers
from pullfill.prefill_worker.task import PrefillTask
from pullfill.transfer.loopback import LoopbackFences
from pullfill.wire import FenceToken, KvMode


class Mover:
    """Only what `Readers` uses."""

    def __init__(self) -> None:
        self.let_go_of: list[PrefillTask] = []

    def let_go(self, task: PrefillTask) -> None:
        self.let_go_of.append(task)


def kept_task(mover: Any) -> PrefillTask:
    task = PrefillTask(
        "j.1", "j", 1, list(range(12)), 4, 4, [5, 6, 7], FenceToken(slot=0, epoch=0), None, 0,
        mover, lambda _: None, mode=KvMode.PULL,
    )  # fmt: skip
    task.kept = {6: 11, 7: 3}
    return task


async def test_a_fence_that_cannot_be_looked_at_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fences, mover = LoopbackFences(16, 2), Mover()
    readers, task = Readers(fences), kept_task(mover)
    readers.open(task)
    real, refused = fences.try_revoke, [OSError(37, "no locks available")]

    def try_revoke(fence: FenceToken) -> bool:
        if refused:
            raise refused.pop()
        return real(fence)

    monkeypatch.setattr(fences, "try_revoke", try_revoke)
    await asyncio.wait_for(readers.let_go(task), 10)
    assert mover.let_go_of == [task]
    assert readers.kept_blocks == 0


async def test_blocks_come_back_when_nobody_reads() -> None:
    fences, mover = LoopbackFences(16, 2), Mover()
    readers, task = Readers(fences), kept_task(mover)
    token = readers.open(task)
    assert fences.granted(token) == {11, 3}
    assert fences.granted(token, writes=True) == set()
    assert readers.kept_blocks == 2
    fences.valid(token).holders += 1
    waits = asyncio.create_task(readers.let_go(task))
    await asyncio.sleep(0.02)
    assert not waits.done()
    assert mover.let_go_of == []
    fences.slots[token.slot].holders -= 1
    await asyncio.wait_for(waits, 10)
    assert mover.let_go_of == [task]
    assert (fences.in_use, readers.kept_blocks) == (0, 0)


async def test_a_task_that_never_got_ready_is_let_go_at_once() -> None:
    mover = Mover()
    task = kept_task(mover)
    await Readers(LoopbackFences(16, 2)).let_go(task)
    assert mover.let_go_of == [task]


async def test_stop_ends_a_read_soon() -> None:
    fences, mover = LoopbackFences(16, 2), Mover()
    readers, task = Readers(fences), kept_task(mover)
    slot = fences.valid(readers.open(task))
    slot.holders += 1
    readers.stop(task)
    assert slot.dying
    assert mover.let_go_of == []
    readers.stop(kept_task(mover))  # of a task that has none: nothing
    slot.holders = 0
    await readers.let_go(task)
    assert mover.let_go_of == [task]


async def test_when_we_leave_the_blocks_stay() -> None:
    fences, mover = LoopbackFences(16, 2), Mover()
    readers, task = Readers(fences), kept_task(mover)
    readers.open(task)
    fences.close()
    await readers.let_go(task)
    assert mover.let_go_of == [], "nothing was proved"


def test_memory_that_nobody_can_read_is_never_ready() -> None:
    with pytest.raises(HandoffError):
        Readers(None).open(kept_task(Mover()))
