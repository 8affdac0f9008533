"""How a process is asked to leave: first signal drains, the second one forces."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable

from pullfill import log

logger = log.get("lifecycle")


class Stop:
    """`drain`: finish what you have, then exit 0. `force`: exit now. Both are sticky."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.force = asyncio.Event()
        self.reason = ""

    def install(self) -> None:
        """SIGTERM and SIGINT on the running loop."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ask, signal.Signals(number).name)

    def ask(self, reason: str) -> None:
        """Ask to drain; asked by a signal again, force."""
        if not self.drain.is_set():
            self.reason = reason
            logger.info("%s: draining (once more forces)", reason)
            self.drain.set()
        elif reason.startswith("SIG"):
            logger.warning("%s again: stopping now", reason)
            self.force.set()

    async def race(self, work: Awaitable[object], timeout_s: float) -> bool:
        """Wait for `work` at most `timeout_s` or until forced. True when it finished."""
        task = asyncio.ensure_future(work)
        forced = asyncio.ensure_future(self.force.wait())
        await asyncio.wait({task, forced}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        done = task.done()
        for future in (task, forced):
            future.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await future
        return done


async def until(*events: asyncio.Event) -> None:
    """Return when the first of `events` is set."""
    waits = [asyncio.ensure_future(e.wait()) for e in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
