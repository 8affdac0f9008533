"""Prepares the requests of frontends for the engine, on a thread of its own.

The engine thread receives messages and puts the expensive ones here: decoding, our checks and
vLLM's block hashes of a prompt of 128k tokens take 50 ms. Results come back in the order in which
the messages were put, as work for the engine thread.

Nobody waits for a preparation under way when the process ends: the thread is a daemon.
"""

from __future__ import annotations

from collections.abc import Callable

from pullfill.runtime import log
from pullfill.runtime.serial_executor import SerialExecutor

logger = log.get("decode_worker.intake")

# Messages up to this size may be prepared on the engine thread. 4 KiB is a prompt of 1,000 tokens,
# about 0.2 ms of work.
SMALL_BYTES = 4 << 10
# Most bytes of messages that wait: 2,000 prompts of 128k tokens.
MAX_BYTES = 1 << 30

# What the engine thread must run once a message is prepared.
Work = Callable[[], None]
Preparation = Callable[[], Work | None]


class Intake:
    """Runs preparations one after another. Call it on the engine thread.

    submit: `EngineThread.submit` (worker/ports.py)."""

    def __init__(self, submit: Callable[..., None]) -> None:
        self._submit = submit
        self.thread = SerialExecutor()
        # Bytes so far. Two sums, because each is changed by another thread.
        self._put = self._done = 0

    def put(self, preparation: Preparation, size: int, *, here: bool = False) -> bool:
        """Queue a preparation. Returns whether it was queued.

        It is not, and is dropped, if too much waits already or the intake thread cannot start.

        size: bytes of the message.
        here: a small message may be prepared at once, on the caller's thread."""
        # A small message that nothing waits before: two wake-ups of threads cost more than it does.
        if here and size <= SMALL_BYTES and not self.thread.busy:
            self._prepare(preparation, wake=False)
            return True
        if self._put - self._done + size > MAX_BYTES:
            return False

        def run() -> None:
            self._prepare(preparation, wake=True)
            self._done += size

        self._put += size
        try:
            self.thread.put(run)
        except RuntimeError as exc:  # no thread can be started, or this worker ends
            logger.warning("a message is not prepared: %s", exc)
            self._put -= size
            return False
        return True

    def _prepare(self, preparation: Preparation, wake: bool) -> None:
        try:
            if (work := preparation()) is not None:
                self._submit(work, wake=wake)
        except Exception:
            logger.exception("a frontend's message failed; it is ignored")
