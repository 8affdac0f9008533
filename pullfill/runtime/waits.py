"""Futures, events and timeouts that cost less than asyncio's. Each job needs several of them.

Prompt  a future whose waiter resumes at once, not in the next turn of the event loop
Waits   pending answers by key. Each has its own timeout, all share one timer
Bell    an event with a timeout, which does not need a new timer for each wait
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Generator, Iterator
from contextvars import Context
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
STOOD_S = 0.1
"""If a timer runs so late, the loop stood still. Answers that came meanwhile are not read yet."""
Callback = Callable[[Any], object]


class Prompt(Generic[V]):
    """A future for one waiter.

    If it is set in a callback of the event loop, outside of any task, the waiter runs inside
    `set_result` or `set_exception`. So the caller must first finish what the waiter relies on.

    asyncio lets a task wait for any object with these methods (`asyncio.isfuture`).
    """

    __slots__ = ("_asyncio_future_blocking", "_done", "_failure", "_loop", "_value", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asyncio_future_blocking = False
        self._loop = loop
        self._done = False
        self._failure: BaseException | None = None
        self._value: V
        self._waiter: tuple[Callback, Context | None] | None = None

    def __await__(self) -> Generator[Any, None, V]:
        if not self._done:
            self._asyncio_future_blocking = True
            yield self
        return self.result()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def done(self) -> bool:
        return self._done

    def answered(self) -> bool:
        """Whether it has a result."""
        return self._done and self._failure is None

    def result(self) -> V:
        if not self._done:
            raise asyncio.InvalidStateError("there is no result yet")
        if self._failure is not None:
            raise self._failure
        return self._value

    def set_result(self, value: V) -> None:
        if self._done:
            raise asyncio.InvalidStateError("it is set already")
        self._done, self._value = True, value
        if self._waiter is not None:
            self._tell(at_once=asyncio.current_task(self._loop) is None)

    def set_exception(self, failure: BaseException) -> None:
        if self._done:
            raise asyncio.InvalidStateError("it is set already")
        self._done, self._failure = True, failure
        if self._waiter is not None:
            self._tell(at_once=asyncio.current_task(self._loop) is None)

    def cancel(self, msg: object = None) -> bool:
        """asyncio calls this when the task that waits is cancelled."""
        if self._done:
            return False
        self._done = True
        self._failure = asyncio.CancelledError() if msg is None else asyncio.CancelledError(msg)
        self._tell(at_once=False)
        return True

    def add_done_callback(self, call: Callback, *, context: Context | None = None) -> None:
        assert self._waiter is None, "one waiter"
        self._waiter = (call, context)
        if self._done:
            self._tell(at_once=False)

    def remove_done_callback(self, call: Callback) -> int:
        if self._waiter is None or self._waiter[0] != call:
            return 0
        self._waiter = None
        return 1

    def _tell(self, at_once: bool) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is None:
            return
        call, context = waiter
        if not at_once:
            self._loop.call_soon(call, self, context=context)
        elif context is None:
            call(self)
        else:
            context.run(call, self)


class Waits(Generic[K, V]):
    """Answers that somebody waits for, by key. Belongs to the running loop.

    All waits share one timer. A timer for each would cost more than the rest of the wait, and
    nearly all of them would be cancelled.

    late: makes the exception that a wait raises when its time is over.
    """

    def __init__(self, late: Callable[[K], Exception]) -> None:
        self._loop = asyncio.get_running_loop()
        self._late = late
        self._open: dict[K, tuple[Prompt[V], float]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Prompt[V]]:
        return iter([future for future, _ in self._open.values()])

    def open(self, key: K, within_s: float) -> Prompt[V]:
        """Begin to wait for the answer to `key`, for at most `within_s` seconds.

        The caller must call `close(key)` once it has the answer or an exception."""
        until = self._loop.time() + within_s
        future: Prompt[V] = Prompt(self._loop)
        self._open[key] = (future, until)
        self._look_at(until)
        return future

    def close(self, key: K) -> None:
        """End the wait for `key`. Idempotent."""
        self._open.pop(key, None)

    def answer(self, key: K, value: V) -> bool:
        """Set the answer to `key`, as by `Prompt.set_result`. False: nobody waits for it."""
        future, _ = self._open.get(key, (None, 0.0))
        if future is None or future.done():
            return False
        future.set_result(value)
        return True

    def _look(self, again: bool = False) -> None:
        timer, self._timer = self._timer, None
        now = self._loop.time()
        if not again and timer is not None and now - timer.when() > STOOD_S:
            self._timer = self._loop.call_at(now + STOOD_S, self._look, True)
            return
        soonest: float | None = None
        for key, (future, until) in list(self._open.items()):
            if future.done():
                continue
            if until <= now:
                future.set_exception(self._late(key))
            elif soonest is None or until < soonest:
                soonest = until
        if soonest is not None:
            self._look_at(soonest)

    def _look_at(self, until: float) -> None:
        timer = self._timer
        if timer is None or until < timer.when():
            if timer is not None:
                timer.cancel()
            self._timer = self._loop.call_at(until, self._look)


class Bell:
    """Like asyncio.Event, for one waiter and with a timeout."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.rung = False
        """Whether it rang since the last `clear`. Any thread may read it."""
        self._waiter: asyncio.Future[bool] | None = None
        self._until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ring(self) -> None:
        """Wake the waiter. If nobody waits, the next `wait` returns at once."""
        self.rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def clear(self) -> None:
        """Forget that it rang."""
        self.rung = False

    async def wait(self, within_s: float | None) -> bool:
        """Wait until it rings. Returns False if `within_s` passed first. None: no time limit.

        Returns True at once if it has rung since the last `clear`."""
        if self.rung:
            return True
        assert self._waiter is None, "one waiter at a time"
        self._waiter = self._loop.create_future()
        self._until = self._loop.time() + (math.inf if within_s is None else within_s)
        timer = self._timer
        if self._until < math.inf and (timer is None or self._until < timer.when()):
            if timer is not None:
                timer.cancel()
            self._timer = self._loop.call_at(self._until, self._look)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._until <= self._loop.time():
            self._waiter.set_result(False)
        elif self._until < math.inf:
            self._timer = self._loop.call_at(self._until, self._look)
