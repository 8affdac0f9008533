"""Threads for work that may wait for a peer: a pool, and lanes that keep order on it.

A lane with work takes an idle thread of the pool, or starts a new one. A lane without work has no
thread. Only idle threads are limited: at most `most_idle` wait for work, each for `linger_s`.

This module sets no limit for busy threads. So if a peer hangs, one thread waits for it, and the
work for other peers continues. The callers set the limit: a prefill worker by the number of its
jobs with a grant, a decode worker by the number of its open jobs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from pullfill.runtime import log

logger = log.get("lanes")

P = ParamSpec("P")
T = TypeVar("T")
Call = Callable[[], object]


class Pool:
    """Daemon threads, started on demand. Thread-safe.

    After a fork only one of the two processes may use it."""

    def __init__(self, name: str, most_idle: int = 8, linger_s: float = 60.0) -> None:
        self._name = name
        self._most_idle = most_idle
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Call]] = []
        self._started = 0

    def run(self, call: Call) -> None:
        """Run `call` at once, on a thread of its own.

        Raises RuntimeError if the system cannot start a thread."""
        with self._lock:
            # Take the one that became idle last, so that the others can time out.
            inbox = self._idle.pop() if self._idle else None
            self._started += inbox is None
            number = self._started
        if inbox is not None:
            inbox.put(call)
            return
        name = f"{self._name}-{number}"
        threading.Thread(target=self._work, args=(call,), name=name, daemon=True).start()

    def _work(self, call: Call) -> None:
        inbox: SimpleQueue[Call] = SimpleQueue()
        while True:
            try:
                call()
            except Exception:
                logger.exception("work on a pool thread failed")
            del call  # it may hold large objects
            with self._lock:
                if len(self._idle) >= self._most_idle:
                    return
                self._idle.append(inbox)
            try:
                call = inbox.get(timeout=self._linger_s)
            except Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                call = inbox.get()  # `run` has just chosen this thread


POOL = Pool("kv-copy")
"""The threads of this process that copy KV."""


class Lane(Executor):
    """Runs calls one at a time, in the order in which they came. Thread-safe."""

    def __init__(self, pool: Pool = POOL) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._quiet = threading.Condition(self._lock)
        self._waiters = 0
        self._calls: deque[tuple[Call, Future[Any] | None]] = deque()
        self._running = False
        self._shut = False

    @property
    def busy(self) -> bool:
        """Whether a call runs or waits."""
        return self._running

    def put(self, call: Call, future: Future[Any] | None = None) -> None:
        """Queue `call`. Raises RuntimeError after `shutdown`, or if no thread can be started."""
        with self._lock:
            if self._shut:
                raise RuntimeError("this lane is shut")
            self._calls.append((call, future))
            if self._running:
                return
            self._running = True
            try:
                self._pool.run(self._run)
            except BaseException:
                self._running = False
                self._calls.clear()
                raise

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as exc:
                future.set_exception(exc)
            else:
                future.set_result(result)

        self.put(call, future)
        return future

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until no call runs or waits. Returns False if that took longer than `timeout_s`."""
        with self._lock:
            self._waiters += 1
            try:
                return self._quiet.wait_for(lambda: not self._running, timeout_s)
            finally:
                self._waiters -= 1

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor. Idempotent."""
        with self._lock:
            self._shut = True
            if cancel_futures:
                for _, future in self._calls:
                    if future is not None:
                        future.cancel()
        if wait:
            self.wait()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._running = False
                    if self._waiters:
                        self._quiet.notify_all()
                    return
                call, _ = self._calls.popleft()
            try:
                call()
            except Exception:
                logger.exception("work in a lane failed")
