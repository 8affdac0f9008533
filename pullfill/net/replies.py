"""Answers that somebody waits for, by the number of the question (`rid`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

STOOD_S = 0.1
"""If a wait ends so late, the loop stood still, and answers that came meanwhile may not be read.
Then they get as long to be read."""


class Replies:
    """The questions of one connection. One event loop.

    unwanted: called with an answer for which nobody waits any more."""

    def __init__(self, unwanted: Callable[[Any], None]) -> None:
        self._unwanted = unwanted
        self._open: dict[int, asyncio.Future[Any]] = {}

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._open)

    async def ask(
        self, rid: int, send: Callable[[], None], within_s: float, late: Exception
    ) -> Any:
        """Send a question and return its answer. Raises `late` if none comes in time.

        Also raises what `send` and `fail` raise."""
        loop = asyncio.get_running_loop()
        future = self._open[rid] = loop.create_future()
        until = loop.time() + within_s
        try:
            send()
            await asyncio.wait([future], timeout=within_s)
            if not future.done() and loop.time() - until > STOOD_S:
                await asyncio.wait([future], timeout=STOOD_S)
            if not future.done():
                raise late
            return future.result()
        except asyncio.CancelledError:
            # The answer may have come in the same moment, and then nobody else knows of it.
            if future.done() and future.exception() is None:
                self._unwanted(future.result())
            raise
        finally:
            del self._open[rid]

    def answer(self, rid: int, message: Any) -> None:
        """Give an answer to who waits for it."""
        future = self._open.get(rid)
        if future is None or future.done():
            self._unwanted(message)
        else:
            future.set_result(message)

    def fail(self, failure: Exception) -> None:
        """End all waits: the connection is lost."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(failure)
