"""The transfer worker: first in first out, exactly one callback each, also around its end. And the
credits that it charges: what is charged comes back, once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from unittest.mock import Mock

import pytest

from pullfill.errors import Fenced, HandoffError
from pullfill.prefill_worker.task import PrefillTask
from pullfill.prefill_worker.transfer_worker import Copy, Credits, TransferWorker
from pullfill.runtime import metrics
from pullfill.transfer.contract import Direction, PeerSession
from pullfill.transfer.layout import dense_layout
from pullfill.wire import FenceToken, KvMode
from tests.support.fakes import prefill_task
from tests.support.transfer_rigs import extent, memory_over, random_bytes
from tests.support.waiting import eventually

FENCE = FenceToken(slot=1, epoch=1)
LAYOUT = dense_layout(2, 8, 1, 64)
BYTES = random_bytes(extent(LAYOUT), seed=3)
MEMORY = memory_over(BYTES, LAYOUT)


class Session(PeerSession):
    """A PeerSession that writes down what it is asked; `gate` clear makes it stop in a copy."""

    transport, moved_bytes = "fake", 0

    def __init__(self) -> None:
        self.done: list[tuple[str, list[int], list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fenced = False
        self.closed = 0
        self.interrupted = 0

    def move(
        self, verb: Direction, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> int:
        assert fence == FENCE
        self.entered.set()
        assert self.gate.wait(10)
        if self.fenced:
            raise Fenced("revoked")
        self.done.append((verb, list(source), list(target)))
        return 100 * len(source)

    def interrupt(self) -> None:
        self.interrupted += 1

    def close(self) -> None:
        self.closed += 1


class Calls:
    """Callbacks and ends of one task, as they come."""

    def __init__(self, transfer_worker: TransferWorker, mode: KvMode = KvMode.PUSH_ASYNC) -> None:
        self.callbacks: list[BaseException | None] = []
        self.ends: list[BaseException | None] = []
        self.task = prefill_task(
            transfer_worker, self.ends.append, blocks=[5, 6, 7], fence=FENCE, mode=mode
        )

    def read(self, local: list[int], remote: list[int]) -> None:
        copy = Copy(self.task, "read", local, remote, self.done)
        self.task.transfer_worker.copy(copy)

    def write(self, local: list[int], remote: list[int], last: bool = False) -> None:
        copy = Copy(self.task, "write", local, remote, self.done, last)
        self.task.transfer_worker.copy(copy)

    def done(self, task: PrefillTask, failure: BaseException | None) -> None:
        assert task is self.task
        self.callbacks.append(failure)


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def credits() -> Credits:
    return Credits(3 * LAYOUT.block_bytes)


@pytest.fixture
def transfer_worker(session: Session, credits: Credits) -> Iterator[TransferWorker]:
    transfer_worker = TransferWorker(session, "decode-1", [MEMORY], credits)
    yield transfer_worker
    session.gate.set()
    transfer_worker.close()
    assert transfer_worker.join(10)
    assert session.closed == 1
    assert session.interrupted >= 1


def test_a_small_copy_in_shared_memory_is_made_at_once_if_it_comes_next(
    transfer_worker: TransferWorker, session: Session
) -> None:
    """Two wake-ups of threads would take longer."""
    session.transport = "shm"
    first = Calls(transfer_worker)
    first.read([0], [5])
    first.write([1], [6], last=True)
    assert (first.callbacks, first.ends) == ([None] * 2, [None])
    session.transport = "tcp"  # its peer may hang
    second = held_in_the_first_of_two(transfer_worker, session)
    session.transport = "shm"
    second.write([3], [5])
    assert second.callbacks == []
    session.gate.set()
    eventually(lambda: len(second.callbacks) == 3)
    assert session.done[-1] == ("write", [3], [5])


def test_a_failed_write_ends_the_task_and_the_rest_is_dropped_but_no_failed_read_does(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls = Calls(transfer_worker)
    session.fenced = True
    calls.read([0], [5])
    assert transfer_worker.flush(calls.task)
    assert calls.ends == [], "the prefix is computed here"
    calls.write([1], [6])
    calls.write([2], [7], last=True)
    eventually(lambda: len(calls.callbacks) == 3)
    eventually(lambda: calls.ends)
    assert isinstance(calls.ends[0], Fenced)
    assert len(calls.ends) == 1
    assert calls.task.written_blocks == 0


def held_in_the_first_of_two(transfer_worker: TransferWorker, session: Session) -> Calls:
    """Two writes. The first waits in its copy for `session.gate`."""
    calls = Calls(transfer_worker)
    session.gate.clear()
    session.entered.clear()
    calls.write([1], [6])
    calls.write([2], [7], last=True)
    assert session.entered.wait(10)
    return calls


def test_cancelled_work_is_not_done_but_answered(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls = held_in_the_first_of_two(transfer_worker, session)
    calls.task.cancel()
    session.gate.set()
    eventually(lambda: len(calls.callbacks) == 2)
    assert session.done == [("write", [1], [6])], "a running copy ends by itself"
    assert isinstance(calls.callbacks[1], HandoffError)


def test_a_callback_that_fails_leaves_nobody_waiting(transfer_worker: TransferWorker) -> None:
    calls = Calls(transfer_worker)

    broken = Mock(side_effect=ValueError("a callback"))
    transfer_worker.copy(Copy(calls.task, "write", [1], [6], broken))
    assert transfer_worker.flush(calls.task, timeout_s=10)


def test_work_submitted_after_the_end_is_answered_too(
    transfer_worker: TransferWorker, session: Session
) -> None:
    """The decode worker leaves while a step computes; the step's writes come after. Unanswered,
    they would keep the request's blocks for ever."""
    transfer_worker.close()
    calls = Calls(transfer_worker)
    assert transfer_worker.flush(calls.task)
    calls.write([1], [6], last=True)
    assert len(calls.callbacks) == 1
    assert isinstance(calls.ends[0], HandoffError)
    assert session.done == []


# ------------------------------------------------------------------ modes


def test_pull_after_a_preemption_keeps_the_new_blocks(
    transfer_worker: TransferWorker, credits: Credits
) -> None:
    calls = Calls(transfer_worker, KvMode.PULL)
    calls.write([3, 1], [5, 6])
    assert transfer_worker.flush(calls.task)
    calls.write([4, 0, 2], [5, 6, 7], last=True)
    eventually(lambda: calls.ends)
    assert calls.task.kept_blocks == [4, 0, 2]
    assert used(credits) == 3, "charged once"
    calls.task.cancel()
    assert calls.callbacks == []
    for _ in range(2):
        transfer_worker.let_go(calls.task)
    assert calls.callbacks == [None] * 2
    assert used(credits) == 0


def test_a_cancelled_task_keeps_nothing(transfer_worker: TransferWorker, credits: Credits) -> None:
    """Its blocks were let go; a step that ran meanwhile must not hold them again, for ever."""
    calls = Calls(transfer_worker, KvMode.PULL)
    calls.task.cancel()
    transfer_worker.let_go(calls.task)
    calls.write([1], [6], last=True)
    assert (calls.task.kept, calls.callbacks, used(credits)) == ({}, [None], 0)


# ------------------------------------------------------------------ credits


def used(credits: Credits) -> int:
    """Blocks that are charged to the decode worker."""
    return credits.used.get("decode-1", 0) // LAYOUT.block_bytes


def test_there_is_room_once_nobody_is_at_the_limit() -> None:
    rooms: list[int] = []
    credits = Credits(100, on_room=lambda: rooms.append(1))
    one, two = credits.open("decode-1"), credits.open("decode-2")
    credits.add(one, 60)
    credits.add(two, 99)
    assert credits.gone == []
    credits.add(one, 40)
    credits.add(two, 1)
    assert credits.gone == ["decode-1", "decode-2"]
    assert credits.used == {"decode-1": 100, "decode-2": 100}
    credits.add(one, -1)
    assert rooms == [], "the other has none"
    credits.add(two, -70)
    assert rooms == [1]
    credits.refresh_metrics()
    found = {w: metrics.KV_CREDITS.labels(w)._value.get() for w in ("limit", "most", "all")}
    assert found == {"limit": 100, "most": 99, "all": 129}
