"""The transfer worker: first in first out, exactly one callback each, also around its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from pullfill.errors import Fenced, HandoffError
from pullfill.prefill_worker.task import PrefillTask
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.transfer.contract import MoveResult
from pullfill.transfer.layout import dense_layout
from pullfill.wire import FenceToken
from tests.support.fakes import wait_for
from tests.support.transfer_rigs import extent, memory_over, random_bytes

FENCE = FenceToken(slot=1, epoch=1)
LAYOUT = dense_layout(2, 8, 1, 64)
BYTES = random_bytes(extent(LAYOUT), seed=3)
MEMORY = memory_over(BYTES, LAYOUT)


class Session:
    """A PeerSession that writes down what it is asked; `gate` clear makes it stop in a copy."""

    transport = "fake"

    def __init__(self) -> None:
        self.done: list[tuple[str, list[int], list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fenced = False
        self.closed = 0
        self.interrupted = 0
        self.moved_bytes = 0

    def _move(self, verb: str, source: Sequence[int], target: Sequence[int]) -> MoveResult:
        self.entered.set()
        assert self.gate.wait(10)
        if self.fenced:
            raise Fenced("revoked")
        self.done.append((verb, list(source), list(target)))
        return MoveResult(len(source), 100 * len(source), 0.001)

    def write_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        assert fence == FENCE
        return self._move("write", source, target)

    def read_blocks(
        self, fence: FenceToken, source: Sequence[int], target: Sequence[int]
    ) -> MoveResult:
        return self._move("read", source, target)

    def interrupt(self) -> None:
        self.interrupted += 1

    def close(self) -> None:
        self.closed += 1


class Calls:
    """Callbacks and ends of one task, as they come."""

    def __init__(self, transfer_worker: TransferWorker) -> None:
        self.callbacks: list[BaseException | None] = []
        self.ends: list[BaseException | None] = []
        self.task = PrefillTask(
            "j.1", "j", 1, list(range(12)), 4, 0, [5, 6, 7], FENCE, None, 0, transfer_worker,
            self.ends.append,
        )  # fmt: skip

    def done(self, task: PrefillTask, failure: BaseException | None) -> None:
        assert task is self.task
        self.callbacks.append(failure)


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def transfer_worker(session: Session) -> Iterator[TransferWorker]:
    transfer_worker = TransferWorker(session, "decode-1", [MEMORY])
    yield transfer_worker
    session.gate.set()
    transfer_worker.close()
    assert transfer_worker.join(10)
    assert session.closed == 1
    assert session.interrupted >= 1


def test_in_order_and_counted(transfer_worker: TransferWorker, session: Session) -> None:
    calls = Calls(transfer_worker)
    transfer_worker.read(calls.task, [5], [0], calls.done)
    transfer_worker.write(calls.task, [1], [6], False, calls.done)
    transfer_worker.write(calls.task, [2], [7], True, calls.done)
    wait_for(lambda: calls.ends)
    assert session.done == [("read", [5], [0]), ("write", [1], [6]), ("write", [2], [7])]
    assert (calls.callbacks, calls.ends) == ([None] * 3, [None])
    task = calls.task
    assert (task.written_blocks, task.written_bytes) == (2, 200)
    assert task.outstanding == 0


def test_a_failed_write_ends_the_task_and_the_rest_is_dropped(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls = Calls(transfer_worker)
    session.fenced = True
    transfer_worker.write(calls.task, [1], [6], False, calls.done)
    transfer_worker.write(calls.task, [2], [7], True, calls.done)
    wait_for(lambda: len(calls.callbacks) == 2)
    wait_for(lambda: calls.ends)
    assert isinstance(calls.ends[0], Fenced)
    assert len(calls.ends) == 1
    assert calls.task.written_blocks == 0


def test_a_failed_read_does_not_end_the_task(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls = Calls(transfer_worker)
    session.fenced = True
    transfer_worker.read(calls.task, [5], [0], calls.done)
    wait_for(lambda: calls.callbacks)
    assert transfer_worker.flush(calls.task)
    assert calls.ends == []


def held_in_the_first_of_two(transfer_worker: TransferWorker, session: Session) -> Calls:
    """Two writes. The first waits in its copy for `session.gate`."""
    calls = Calls(transfer_worker)
    session.gate.clear()
    transfer_worker.write(calls.task, [1], [6], False, calls.done)
    transfer_worker.write(calls.task, [2], [7], True, calls.done)
    assert session.entered.wait(10)
    return calls


def test_cancelled_work_is_not_done_but_answered(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls = held_in_the_first_of_two(transfer_worker, session)
    calls.task.cancel()
    session.gate.set()
    wait_for(lambda: len(calls.callbacks) == 2)
    assert session.done == [("write", [1], [6])], "a running copy ends by itself"
    assert isinstance(calls.callbacks[1], HandoffError)


def test_flush_waits_for_the_running_copy(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls = Calls(transfer_worker)
    session.gate.clear()
    transfer_worker.write(calls.task, [1], [6], False, calls.done)
    assert session.entered.wait(10)
    assert transfer_worker.flush(calls.task, timeout_s=0.02) is False
    session.gate.set()
    assert transfer_worker.flush(calls.task) is True
    assert calls.callbacks == [None]


def test_flush_waits_for_no_other_task(transfer_worker: TransferWorker, session: Session) -> None:
    """A preempted task whose peer is slow for others: the engine thread waits here."""
    other, calls = Calls(transfer_worker), Calls(transfer_worker)
    transfer_worker.write(calls.task, [1], [6], False, calls.done)
    wait_for(lambda: calls.callbacks)
    session.gate.clear()
    session.entered.clear()
    transfer_worker.write(other.task, [1], [6], False, other.done)
    assert session.entered.wait(10)
    calls.task.outstanding += 1  # planned, as the scheduler half counts it
    assert transfer_worker.flush(calls.task) is True
    assert (other.callbacks, session.gate.is_set()) == ([], False)
    transfer_worker.write(calls.task, [2], [7], False, calls.done)
    assert transfer_worker.flush(calls.task, timeout_s=0.02) is False, (
        "its own copy waits in the queue"
    )
    session.gate.set()
    assert transfer_worker.flush(calls.task) is True
    assert calls.callbacks == [None, None]


def test_quiet_is_told_once_after_the_last_copy_of_the_task(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls, told = Calls(transfer_worker), []
    calls.task.when_quiet(lambda: told.append("idle"))
    assert told == ["idle"], "nothing was submitted"
    session.gate.clear()
    transfer_worker.write(calls.task, [1], [6], False, calls.done)
    transfer_worker.write(calls.task, [2], [7], True, calls.done)
    assert session.entered.wait(10)
    calls.task.when_quiet(lambda: told.append(len(calls.callbacks)))
    assert told == ["idle"]
    session.gate.set()
    wait_for(lambda: len(told) == 2)
    assert told == ["idle", 2]
    assert transfer_worker.flush(calls.task)
    assert len(told) == 2


def test_a_callback_that_fails_leaves_nobody_waiting(transfer_worker: TransferWorker) -> None:
    calls = Calls(transfer_worker)

    def broken(task: PrefillTask, failure: BaseException | None) -> None:
        raise ValueError("a callback")

    transfer_worker.write(calls.task, [1], [6], False, broken)
    assert transfer_worker.flush(calls.task, timeout_s=10)


def test_close_lets_the_running_copy_end_and_fails_the_rest(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls = held_in_the_first_of_two(transfer_worker, session)
    transfer_worker.close()
    transfer_worker.close()
    assert transfer_worker.flush(calls.task, timeout_s=0.02) is False
    session.gate.set()
    assert transfer_worker.flush(calls.task) is True
    assert session.done == [("write", [1], [6])]
    assert calls.callbacks[0] is None
    assert isinstance(calls.callbacks[1], HandoffError)
    assert len(calls.ends) == 1


def test_work_submitted_after_the_end_is_answered_too(
    transfer_worker: TransferWorker, session: Session
) -> None:
    """The decode worker leaves while a step computes; the step's writes come after. Unanswered,
    they would keep the request's blocks for ever."""
    transfer_worker.close()
    calls = Calls(transfer_worker)
    assert transfer_worker.flush(calls.task)
    transfer_worker.write(calls.task, [1], [6], True, calls.done)
    assert len(calls.callbacks) == 1
    assert isinstance(calls.ends[0], HandoffError)
    assert calls.task.outstanding == 0
    assert session.done == []


def test_without_a_thread_for_it_an_operation_is_answered(
    transfer_worker: TransferWorker, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    calls = Calls(transfer_worker)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    transfer_worker.write(calls.task, [1], [6], True, calls.done)
    monkeypatch.undo()
    assert isinstance(calls.ends[0], HandoffError)
    assert calls.task.outstanding == 0
    assert session.done == []
    assert not transfer_worker.busy


def test_without_a_thread_for_it_the_session_is_closed_all_the_same(
    transfer_worker: TransferWorker, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    transfer_worker.close()
    assert session.closed == 1
