"""Waiting for what another thread or process does."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any


def patience(seconds: float) -> float:
    """How long to wait for what takes at most `seconds` on an idle machine.

    With three processes for each core that want to run, all takes three times as long."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def eventually(
    holds: Callable[[], object], otherwise: str = "it never came", within_s: float = 20.0
) -> None:
    """Wait until `holds()`, and look often. Fails with `otherwise`."""
    until(holds, within_s, otherwise, 0.002)


def until(check: Callable[[], Any], within_s: float, what: str, every_s: float = 0.05) -> Any:
    """Return the first true value of `check`. Raises AssertionError naming `what`.

    within_s: on an idle machine (`patience`).
    every_s: how often it looks at first. Later it looks up to four times less often."""
    began, longest_s = time.monotonic(), 4 * every_s
    while True:
        value = check()
        if value:
            return value
        # Asked each time: the load average of a run that has just begun is low.
        assert time.monotonic() < began + patience(within_s), f"not within {within_s} s: {what}"
        time.sleep(every_s)
        # A look at a cluster takes 6 ms of CPU, which whoever is waited for may need.
        every_s = min(1.1 * every_s, longest_s)


async def soon(
    look: Callable[[], Any], within_s: float = 20.0, good: Callable[[Any], object] = bool
) -> Any:
    """Return the first good value of `look`, while other tasks of the event loop run.

    look: may be a coroutine function, which asks a server. within_s: as of `until`."""
    began = time.monotonic()
    while True:
        found = look()
        if inspect.isawaitable(found):
            found = await found
        if good(found):
            return found
        assert time.monotonic() < began + patience(within_s), "it never came"
        await asyncio.sleep(0.005)


class Call(threading.Thread):
    """A call on a thread of its own."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        super().__init__(daemon=True)
        self._call = partial(function, *arguments)
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as exc:
            self._error = exc

    def end(self) -> BaseException | None:
        """Wait for its end. Returns what it raised."""
        self.join(20)
        assert not self.is_alive()
        return self._error
