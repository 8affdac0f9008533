"""The transfer worker in its modes, and what it charges to the decode worker's credits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pullfill.errors import HandoffError
from pullfill.prefill_worker.transfer_worker import Credits, TransferWorker
from pullfill.runtime import metrics
from pullfill.wire import KvMode
from tests.support.fakes import wait_for
from tests.unit.prefill_worker.test_transfer_worker import LAYOUT, MEMORY, Calls, Session

BLOCK_BYTES = LAYOUT.block_bytes


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def credits() -> Credits:
    return Credits(3 * BLOCK_BYTES)


@pytest.fixture
def transfer_worker(session: Session, credits: Credits) -> Iterator[TransferWorker]:
    transfer_worker = TransferWorker(session, "decode-1", [MEMORY], credits.open("decode-1"))
    yield transfer_worker
    session.gate.set()
    transfer_worker.close()
    assert transfer_worker.join(10)


def in_mode(transfer_worker: TransferWorker, mode: KvMode) -> Calls:
    calls = Calls(transfer_worker)
    calls.task.mode = mode
    return calls


def used(credits: Credits) -> int:
    return credits.used.get("decode-1", 0) // BLOCK_BYTES


# ------------------------------------------------------------------ push


def test_push_returns_when_the_blocks_are_there(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls = in_mode(transfer_worker, KvMode.PUSH)
    session.gate.clear()
    engine = threading.Thread(
        target=transfer_worker.write, args=(calls.task, [1], [6], True, calls.done)
    )
    engine.start()
    assert session.entered.wait(10)
    engine.join(0.02)
    assert engine.is_alive(), "the step waits"
    session.gate.set()
    engine.join(10)
    assert not engine.is_alive()
    assert session.done == [("write", [1], [6])]
    assert calls.callbacks == [None]


def test_push_after_the_end_does_not_wait(
    transfer_worker: TransferWorker, session: Session
) -> None:
    calls = in_mode(transfer_worker, KvMode.PUSH)
    transfer_worker.close()
    transfer_worker.write(calls.task, [1], [6], True, calls.done)
    assert isinstance(calls.callbacks[0], HandoffError)


# ------------------------------------------------------------------ pull


def test_pull_keeps_the_blocks_until_they_are_let_go(
    transfer_worker: TransferWorker, session: Session, credits: Credits
) -> None:
    calls = in_mode(transfer_worker, KvMode.PULL)
    task = calls.task
    transfer_worker.write(task, [3, 1], [5, 6], False, calls.done)
    transfer_worker.write(task, [2], [7], True, calls.done)
    wait_for(lambda: calls.ends)
    assert calls.ends == [None], "all is computed"
    assert session.done == []
    assert task.kept_blocks == [3, 1, 2]
    assert task.outstanding == 1, "the engine keeps them"
    assert used(credits) == 3
    assert credits.gone == ["decode-1"]
    assert len(calls.callbacks) == 2
    task.cancel()
    transfer_worker.let_go(task)
    transfer_worker.let_go(task)
    assert task.outstanding == 0
    assert calls.callbacks == [None] * 3, "the last one lets the engine free them"
    assert used(credits) == 0


def test_pull_after_a_preemption_keeps_the_new_blocks(
    transfer_worker: TransferWorker, credits: Credits
) -> None:
    calls = in_mode(transfer_worker, KvMode.PULL)
    transfer_worker.write(calls.task, [3, 1], [5, 6], False, calls.done)
    assert transfer_worker.flush(calls.task)
    transfer_worker.write(calls.task, [4, 0, 2], [5, 6, 7], True, calls.done)
    wait_for(lambda: calls.ends)
    assert calls.task.kept_blocks == [4, 0, 2]
    assert used(credits) == 3, "charged once"
    calls.task.cancel()
    transfer_worker.let_go(calls.task)
    assert calls.task.outstanding == 0
    assert used(credits) == 0


def test_a_cancelled_task_keeps_nothing(transfer_worker: TransferWorker, credits: Credits) -> None:
    """Its blocks were let go; a step that ran meanwhile must not hold them again, for ever."""
    calls = in_mode(transfer_worker, KvMode.PULL)
    calls.task.cancel()
    transfer_worker.let_go(calls.task)
    transfer_worker.write(calls.task, [1], [6], True, calls.done)
    wait_for(lambda: calls.callbacks)
    assert isinstance(calls.callbacks[0], HandoffError)
    assert (calls.task.kept, calls.task.outstanding, used(credits)) == ({}, 0, 0)


# ------------------------------------------------------------------ credits


def test_a_write_is_charged_until_it_ended(
    transfer_worker: TransferWorker, session: Session, credits: Credits
) -> None:
    calls = Calls(transfer_worker)
    flying = metrics.KV_IN_FLIGHT.labels("write")._value
    before = flying.get()
    session.gate.clear()
    transfer_worker.write(calls.task, [1, 2], [5, 6], False, calls.done)
    transfer_worker.write(calls.task, [3], [7], True, calls.done)
    assert used(credits) == 3
    assert flying.get() - before == 3 * BLOCK_BYTES
    session.gate.set()
    wait_for(lambda: calls.ends)
    assert used(credits) == 0
    assert flying.get() == before


@pytest.mark.parametrize("how", ["fenced", "cancelled"])
def test_what_is_not_written_is_given_back_too(
    how: str, transfer_worker: TransferWorker, session: Session, credits: Credits
) -> None:
    calls = Calls(transfer_worker)
    if how == "fenced":
        session.fenced = True
    else:
        calls.task.cancel()
    transfer_worker.write(calls.task, [1, 2], [5, 6], True, calls.done)
    wait_for(lambda: calls.ends)
    assert used(credits) == 0


def test_a_closed_transfer_worker_writes_off_what_is_stuck(
    transfer_worker: TransferWorker, session: Session, credits: Credits
) -> None:
    calls = Calls(transfer_worker)
    session.gate.clear()
    transfer_worker.write(calls.task, [1, 2, 3], [5, 6, 7], True, calls.done)
    assert session.entered.wait(10)
    assert credits.gone == ["decode-1"]
    transfer_worker.close()
    assert (credits.used, credits.gone) == ({}, [])


def test_a_read_costs_no_credit(
    transfer_worker: TransferWorker, session: Session, credits: Credits
) -> None:
    calls = Calls(transfer_worker)
    session.gate.clear()
    transfer_worker.read(calls.task, [5, 6, 7], [1, 2, 3], calls.done)
    assert session.entered.wait(10)
    assert used(credits) == 0
