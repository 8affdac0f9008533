"""Lanes keep order, a stuck lane delays no other, and a lane without work has no thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from pullfill.runtime.lanes import Lane, Pool
from tests.support.fakes import wait_for


def alive(name: str) -> int:
    return sum(t.name.startswith(f"{name}-") for t in threading.enumerate())


def test_calls_of_a_lane_run_in_order_and_one_at_a_time() -> None:
    pool, ran, inside = Pool("order", linger_s=0.01), [], threading.Lock()

    def call(lane: int, number: int) -> None:
        assert lane or inside.acquire(blocking=False)
        ran.append((lane, number))
        if not lane:
            inside.release()

    lanes = [Lane(pool) for _ in range(3)]
    for number in range(200):
        for index, lane in enumerate(lanes):
            lane.put(lambda index=index, number=number: call(index, number))  # type: ignore[misc]
    assert all(lane.wait(10) for lane in lanes)
    for index in range(3):
        assert [number for lane, number in ran if lane == index] == list(range(200))


def test_stuck_lanes_delay_nobody_and_leave_few_threads() -> None:
    """The number of busy threads is not limited, only the number of idle ones."""
    pool, gate = Pool("stuck", most_idle=2, linger_s=0.05), threading.Event()
    stuck = [Lane(pool) for _ in range(40)]
    for lane in stuck:
        lane.put(gate.wait)
    free = Lane(pool)
    assert free.submit(lambda: 7).result(10) == 7
    assert all(lane.busy for lane in stuck)
    gate.set()
    assert all(lane.wait(10) for lane in stuck)
    wait_for(lambda: alive("stuck") <= 2)
    wait_for(lambda: alive("stuck") == 0)
    assert free.submit(lambda: 8).result(10) == 8


def test_lanes_that_take_turns_share_a_thread() -> None:
    pool = Pool("turns")
    for number in range(100):
        lane = Lane(pool)
        assert lane.submit(lambda number=number: number).result(10) == number  # type: ignore[misc]
        wait_for(lambda: pool._idle)  # a moment after the lane's end
    assert pool._started == 1


def test_a_thread_that_gives_up_waiting_loses_no_call() -> None:
    """A thread gets work in the moment in which its idle time ends."""
    pool, done = Pool("linger", linger_s=0.0), []
    lane = Lane(pool)
    for number in range(500):
        lane.put(lambda number=number: done.append(number))  # type: ignore[misc]
        if number % 3 == 0:
            assert lane.wait(10)
    assert lane.wait(10)
    assert done == list(range(500))


def test_without_a_thread_the_caller_is_told_and_the_lane_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane, ran = Lane(Pool("none")), []

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            lane.put(lambda: ran.append("lost"))
    assert not lane.busy
    lane.put(lambda: ran.append("kept"))
    assert lane.wait(10)
    assert ran == ["kept"]


def test_a_call_that_fails_ends_neither_lane_nor_thread(caplog: pytest.LogCaptureFixture) -> None:
    lane, gate = Lane(pool := Pool("fails")), threading.Event()
    lane.put(gate.wait)
    lane.put(lambda: 1 / 0)
    failed = lane.submit(lambda: {}["key"])
    gate.set()
    with pytest.raises(KeyError):
        failed.result(10)
    wait_for(lambda: pool._idle)
    assert lane.submit(lambda: 3).result(10) == 3
    assert "ZeroDivisionError" in caplog.text
    assert pool._started == 1


def test_shutdown_waits_for_what_runs_and_cancels_the_rest() -> None:
    lane, gate, entered = Lane(Pool("shut")), threading.Event(), threading.Event()
    running = lane.submit(lambda: (entered.set(), gate.wait(10)))
    waiting = lane.submit(lambda: 1)
    assert entered.wait(10)
    lane.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError, match="shut"):
        lane.submit(lambda: 2)
    assert lane.wait(0.01) is False
    gate.set()
    lane.shutdown()
    assert running.done()
    with pytest.raises(CancelledError):
        waiting.result(10)
