"""Calls run in their order. One that hangs delays no other executor. Without work, no thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from pullfill.runtime.serial_executor import SerialExecutor


def test_calls_run_in_order_and_one_at_a_time() -> None:
    """Also one that is put in the moment in which the thread ends."""
    for linger_s in (0.0, 1.0):
        executor, ran, inside = SerialExecutor(linger_s), list[int](), threading.Lock()

        def call(number: int, ran: list[int] = ran, inside: threading.Lock = inside) -> None:
            assert inside.acquire(blocking=False)
            ran.append(number)
            inside.release()

        for number in range(500):
            executor.submit(call, number)
            if number % 3 == 0:
                assert executor.wait(10)
        assert executor.wait(10)
        assert ran == list(range(500))


def test_a_call_that_fails_ends_no_thread() -> None:
    executor, gate = SerialExecutor(), threading.Event()
    executor.submit(gate.wait)
    failed = executor.submit(lambda: {}["key"])
    gate.set()
    with pytest.raises(KeyError):
        failed.result(10)
    assert executor.submit(lambda: 3).result(10) == 3


def test_shutdown_waits_for_what_runs_and_cancels_the_rest() -> None:
    executor, gate, entered = SerialExecutor(), threading.Event(), threading.Event()
    running = executor.submit(lambda: (entered.set(), gate.wait(10)))
    waiting = executor.submit(lambda: 1)
    assert entered.wait(10)
    executor.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(RuntimeError, match="shut"):
        executor.submit(lambda: 2)
    assert executor.wait(0.01) is False
    gate.set()
    executor.shutdown()
    assert running.done()
    with pytest.raises(CancelledError):
        waiting.result(10)
