"""Prepares the requests of frontends for the engine, on a thread of its own.

The engine thread receives messages and puts the expensive ones here: decoding, our checks and
vLLM's block hashes of a prompt of 128k tokens take 50 ms. Results come back in the order in which
the messages were put, as work for the engine thread.

A small message is prepared at once, on the engine thread, if nothing waits before it: two wake-ups
of threads cost more than it does. The engine thread does so for one message each turn of its loop.

Lifecycle: `start` once, `put` from the engine thread, `close` at the end. The thread is a daemon:
nobody waits for a preparation under way.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pullfill.runtime import log

logger = log.get("decode_worker.intake")

# Messages up to this size may be prepared on the engine thread. 4 KiB is a prompt of 1,000 tokens,
# about 0.2 ms of work.
SMALL_BYTES = 4 << 10
# The same limit while the engine takes no steps.
SMALL_AT_REST_BYTES = 16 << 10
# Most bytes of messages that wait: 2,000 prompts of 128k tokens.
MAX_BYTES = 1 << 30

# What the engine thread must run once a message is prepared.
Work = Callable[[], None]
Preparation = Callable[[], Work | None]


class Intake:
    """A queue of preparations and the thread that runs them one after another.

    submit: `EngineThread.submit` (worker/ports.py).
    busy: returns whether the engine takes steps now.
    """

    def __init__(self, submit: Callable[..., None], busy: Callable[[], bool]) -> None:
        self._submit = submit
        self._busy = busy
        self._waiting: queue.SimpleQueue[tuple[Preparation, int] | None] = queue.SimpleQueue()
        self._put = self._done = 0
        self._given = self._taken = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="intake", daemon=True).start()

    def close(self) -> None:
        self._waiting.put(None)

    def put(self, preparation: Preparation, size: int, *, here: bool = False) -> bool:
        """Queue a preparation. Returns False, and drops it, if too much waits already.

        size: bytes of the message.
        here: the caller is the engine thread, and the preparation may run at once inside `put`."""
        small = SMALL_BYTES if self._busy() else SMALL_AT_REST_BYTES
        if here and size <= small and self._given == self._taken:
            self._prepare(preparation, here=True)
            return True
        if self._put - self._done + size > MAX_BYTES:
            return False
        self._put += size
        self._given += 1
        self._waiting.put((preparation, size))
        return True

    @property
    def idle(self) -> bool:
        """Whether no preparation waits."""
        return self._waiting.empty()

    def _run(self) -> None:
        while self.work():
            pass

    def work(self) -> bool:
        """Wait for the next preparation and run it. Returns False after `close`."""
        if (taken := self._waiting.get()) is None:
            return False
        preparation, size = taken
        self._prepare(preparation)
        self._done += size
        self._taken += 1
        return True

    def _prepare(self, preparation: Preparation, here: bool = False) -> None:
        try:
            if (work := preparation()) is not None:
                self._submit(work, wake=not here)
        except Exception:
            logger.exception("a frontend's message failed; it is ignored")
