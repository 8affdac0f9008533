"""Threads for work that may wait for a peer: a pool, and lanes that keep order on it.

The rule: a lane with work takes an idle thread, or starts one. The number of threads at work has no
bound here, so a stuck peer holds one thread and delays nobody else. Who submits bounds it: a
prefill worker by the jobs it has grants for, a decode worker by its open jobs. The bound is on idle
threads: at most `most_idle` wait for work, each for `linger_s`. A lane without work has no thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

from pullfill import log

logger = log.get("lanes")

P = ParamSpec("P")
T = TypeVar("T")
Call = Callable[[], object]


class Pool:
    """Daemon threads, started on demand. Thread-safe. Not to be used on both sides of a fork."""

    def __init__(self, name: str, most_idle: int = 8, linger_s: float = 60.0) -> None:
        self._name = name
        self._most_idle = most_idle
        self._linger_s = linger_s
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[Call]] = []
        self._started = 0

    def run(self, call: Call) -> None:
        """Run `call` at once on a thread that does nothing else meanwhile. Raises RuntimeError when
        the system starts no more threads."""
        with self._lock:
            # The one that became idle last: the others can time out.
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
            del call  # what it refers to may be large
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
"""The process's threads that move KV."""


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
        """Have `call` run. Raises RuntimeError after `shutdown`, and when it cannot be run."""
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
        """Block until nothing runs or waits. False: not in time."""
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
