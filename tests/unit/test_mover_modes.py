"""The mover in its modes, and what it charges to the decode worker's credits."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from pullfill import metrics
from pullfill.errors import HandoffError
from pullfill.prefill_worker.credits import Credits
from pullfill.prefill_worker.mover import Mover
from pullfill.transfer.digest import BlockDigester
from pullfill.wire import KvMode
from tests.support.fakes import wait_for
from tests.unit.test_prefill_mover import LAYOUT, MEMORY, Calls, Session

BLOCK_BYTES = LAYOUT.block_bytes


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def credits() -> Credits:
    return Credits(3 * BLOCK_BYTES)


@pytest.fixture
def mover(session: Session, credits: Credits) -> Iterator[Mover]:
    mover = Mover(session, "decode-1", [MEMORY], credits.open("decode-1"))
    yield mover
    session.gate.set()
    mover.close()
    assert mover.join(10)


def in_mode(mover: Mover, mode: KvMode) -> Calls:
    calls = Calls(mover)
    calls.task.mode = mode
    return calls


def used(credits: Credits) -> int:
    return credits.used.get("decode-1", 0) // BLOCK_BYTES


# ------------------------------------------------------------------ push


def test_push_returns_when_the_blocks_are_there(mover: Mover, session: Session) -> None:
    calls = in_mode(mover, KvMode.PUSH)
    session.gate.clear()
    engine = threading.Thread(target=mover.write, args=(calls.task, [1], [6], True, calls.done))
    engine.start()
    assert session.entered.wait(10)
    engine.join(0.02)
    assert engine.is_alive(), "the step waits"
    session.gate.set()
    engine.join(10)
    assert not engine.is_alive()
    assert session.done == [("write", [1], [6])]
    assert calls.callbacks == [None]


def test_push_after_the_end_does_not_wait(mover: Mover, session: Session) -> None:
    calls = in_mode(mover, KvMode.PUSH)
    mover.close()
    mover.write(calls.task, [1], [6], True, calls.done)
    assert isinstance(calls.callbacks[0], HandoffError)


# ------------------------------------------------------------------ pull


def test_pull_keeps_the_blocks_until_they_are_let_go(
    mover: Mover, session: Session, credits: Credits
) -> None:
    calls = in_mode(mover, KvMode.PULL)
    task = calls.task
    mover.write(task, [3, 1], [5, 6], False, calls.done)
    mover.write(task, [2], [7], True, calls.done)
    wait_for(lambda: calls.ends)
    assert calls.ends == [None], "all is computed"
    assert session.done == []
    assert task.kept_blocks == [3, 1, 2]
    assert task.outstanding == 1, "the engine keeps them"
    assert used(credits) == 3
    assert credits.gone == ["decode-1"]
    assert len(calls.callbacks) == 2
    task.cancel()
    mover.let_go(task)
    mover.let_go(task)
    assert task.outstanding == 0
    assert calls.callbacks == [None] * 3, "the last one lets the engine free them"
    assert used(credits) == 0


def test_pull_after_a_preemption_keeps_the_new_blocks(mover: Mover, credits: Credits) -> None:
    calls = in_mode(mover, KvMode.PULL)
    mover.write(calls.task, [3, 1], [5, 6], False, calls.done)
    assert mover.flush(calls.task)
    mover.write(calls.task, [4, 0, 2], [5, 6, 7], True, calls.done)
    wait_for(lambda: calls.ends)
    assert calls.task.kept_blocks == [4, 0, 2]
    assert used(credits) == 3, "charged once"
    calls.task.cancel()
    mover.let_go(calls.task)
    assert calls.task.outstanding == 0
    assert used(credits) == 0


def test_pull_takes_digests_of_what_it_keeps(mover: Mover) -> None:
    calls = in_mode(mover, KvMode.PULL)
    calls.task.checked = frozenset({5, 7})
    mover.write(calls.task, [3, 1, 2], [5, 6, 7], True, calls.done)
    wait_for(lambda: calls.ends)
    assert calls.task.digest == BlockDigester([MEMORY]).digest([3, 2])
    calls.task.cancel()
    mover.let_go(calls.task)


def test_a_cancelled_task_keeps_nothing(mover: Mover, credits: Credits) -> None:
    """Its blocks were let go; a step that ran meanwhile must not hold them again, for ever."""
    calls = in_mode(mover, KvMode.PULL)
    calls.task.cancel()
    mover.let_go(calls.task)
    mover.write(calls.task, [1], [6], True, calls.done)
    wait_for(lambda: calls.callbacks)
    assert isinstance(calls.callbacks[0], HandoffError)
    assert (calls.task.kept, calls.task.outstanding, used(credits)) == ({}, 0, 0)


# ------------------------------------------------------------------ credits


def test_a_write_is_charged_until_it_ended(
    mover: Mover, session: Session, credits: Credits
) -> None:
    calls = Calls(mover)
    flying = metrics.KV_IN_FLIGHT.labels("write")._value
    before = flying.get()
    session.gate.clear()
    mover.write(calls.task, [1, 2], [5, 6], False, calls.done)
    mover.write(calls.task, [3], [7], True, calls.done)
    assert used(credits) == 3
    assert flying.get() - before == 3 * BLOCK_BYTES
    session.gate.set()
    wait_for(lambda: calls.ends)
    assert used(credits) == 0
    assert flying.get() == before


@pytest.mark.parametrize("how", ["fenced", "cancelled"])
def test_what_is_not_written_is_given_back_too(
    how: str, mover: Mover, session: Session, credits: Credits
) -> None:
    calls = Calls(mover)
    if how == "fenced":
        session.fenced = True
    else:
        calls.task.cancel()
    mover.write(calls.task, [1, 2], [5, 6], True, calls.done)
    wait_for(lambda: calls.ends)
    assert used(credits) == 0


def test_a_closed_mover_writes_off_what_is_stuck(
    mover: Mover, session: Session, credits: Credits
) -> None:
    calls = Calls(mover)
    session.gate.clear()
    mover.write(calls.task, [1, 2, 3], [5, 6, 7], True, calls.done)
    assert session.entered.wait(10)
    assert credits.gone == ["decode-1"]
    mover.close()
    assert (credits.used, credits.gone) == ({}, [])


def test_a_read_costs_no_credit(mover: Mover, session: Session, credits: Credits) -> None:
    calls = Calls(mover)
    session.gate.clear()
    mover.read(calls.task, [5, 6, 7], [1, 2, 3], calls.done)
    assert session.entered.wait(10)
    assert used(credits) == 0
