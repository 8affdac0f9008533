"""A timer that calls a function once something has been unused for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A worker closes a KV session that it opened after this many seconds without a job.
IDLE_S = 60.0


class IdleTimer:
    """Calls `let_go` once there was no user for `after_s`. asyncio thread only.

    let_go: returns False when the thing is still in use in a way that the timer does not see. Then
    it is called again after `after_s`.
    """

    def __init__(self, let_go: Callable[[], bool], after_s: float) -> None:
        self._let_go = let_go
        self._after_s = after_s
        self._users = 0
        self._since = 0.0
        # A user does not cancel the timer, which would cost more than everything else here. If
        # the timer fires too early, it is set again.
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """`let_go` is not called inside the `with` block. Enter it before you look the thing up."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.start()

    @property
    def in_use(self) -> bool:
        """Whether anybody is inside `used` now."""
        return self._users > 0

    def start(self) -> None:
        """Start the timer, unless somebody is inside `used`."""
        if not self._users:
            loop = asyncio.get_running_loop()
            self._since = loop.time()
            if self._timer is None:
                self._timer = loop.call_later(self._after_s, self._look)

    def stop(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self._users:
            return  # counts again when the last one leaves
        loop = asyncio.get_running_loop()
        left = self._since + self._after_s - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._look)
        elif not self._let_go():
            self.start()
