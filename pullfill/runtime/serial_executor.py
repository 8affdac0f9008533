"""A thread for work that may wait for a peer: calls run one at a time, in their order.

There is a thread only while there is work, and for `linger_s` after it. This module sets no limit
for the number of threads. The callers do: a prefill worker by its jobs with a grant, a decode
worker by its open jobs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
# A call and its outcome.
Call = tuple[Future[Any], Callable[[], Any]]


class SerialExecutor(Executor):
    """Thread-safe. Its thread is a daemon. After a fork only one of the two processes may use it.

    busy: whether a call runs or waits."""

    # A peer that hangs delays nobody else, and an idle pair of workers keeps no thread. The
    # standard library's executors keep theirs, and make the interpreter wait at its end for a
    # thread that hangs.

    def __init__(self, linger_s: float = 1.0) -> None:
        self._linger_s = linger_s
        self._changed = threading.Condition()
        self._calls: deque[Call] = deque()
        self._has_thread = False
        self._shut = False
        self.busy = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor. Raises RuntimeError after `shutdown`, or if no thread can be started."""
        future: Future[T] = Future()
        with self._changed:
            if self._shut:
                raise RuntimeError("this executor is shut")
            if not self._has_thread:
                threading.Thread(target=self._run, name="kv-copy", daemon=True).start()
                self._has_thread = True
            self._calls.append((future, partial(fn, *args, **kwargs)))
            self.busy = True
            self._changed.notify_all()
        return future

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until no call runs or waits. Returns False if that took longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.busy, timeout_s)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """See Executor. Idempotent."""
        with self._changed:
            self._shut = True
            for future, _ in self._calls if cancel_futures else ():
                future.cancel()
            self._changed.notify_all()
        if wait:
            self.wait()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            future, call = found
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except BaseException as exc:
                    future.set_exception(exc)
                else:
                    future.set_result(result)
                    del result
            del found, future, call  # they may hold large objects

    def _next(self) -> Call | None:
        """Return the next call. None: the thread must end."""
        with self._changed:
            if not self._calls:
                self.busy = False
                self._changed.notify_all()
                linger_s = 0.0 if self._shut else self._linger_s
                self._changed.wait_for(lambda: self._calls or self._shut, linger_s)
            if self._calls:
                return self._calls.popleft()
            self._has_thread = False
            return None
