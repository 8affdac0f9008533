"""One decode worker's transfer worker, shared by all jobs that write to it; connected at first use.

If a KV port drops packets, or accepts and then says nothing, an attempt to connect takes seconds to
fail. So all jobs of the decode worker wait for one attempt. For a while after it failed, its jobs
fail at once and go back to the queue, so that this worker can serve other decode workers.

A transfer worker that no job has used for `IDLE_S` is closed, and made again at the next use.
asyncio thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from pullfill.backoff import Backoff
from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import PeerUnavailable, PullfillError
from pullfill.prefill_worker.transfer_worker import TransferWorker
from pullfill.runtime import log
from pullfill.runtime.idle import IDLE_S, IdleTimer

logger = log.get("prefill_worker.transfer_worker")


class OutOfReach(PeerUnavailable):
    """The decode worker is there, but its KV memory cannot be reached from here now."""


class SharedTransferWorker:
    """See the module.

    open_transfer_worker: makes a transfer worker.
    name: the decode worker's, for people."""

    def __init__(
        self,
        open_transfer_worker: Callable[[], Awaitable[TransferWorker]],
        name: str,
        clock: Clock = SYSTEM_CLOCK,
        idle_s: float = IDLE_S,
    ) -> None:
        self._open = open_transfer_worker
        self._name = name
        self._clock = clock
        self._transfer_worker: TransferWorker | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._why = ""
        self._backoff = Backoff(2.0, longest_s=30.0)
        self._again_at = 0.0
        self._closed = False
        self._idle = IdleTimer(self._rest, idle_s)
        self._rested: dict[str, object] | None = None

    @property
    def current(self) -> TransferWorker | None:
        """The transfer worker. None before the first success, after `drop`, and if closed as
        idle."""
        return self._transfer_worker

    @property
    def route(self) -> dict[str, object] | None:
        """The transport that it uses, or used before it was closed as idle, and why no better one.

        None before the first write."""
        return (
            _route_of(self._transfer_worker) if self._transfer_worker is not None else self._rested
        )

    @property
    def in_use(self) -> bool:
        """Whether a job holds the transfer worker, or it still copies for one that has ended."""
        return self._idle.in_use or (
            self._transfer_worker is not None and self._transfer_worker.busy
        )

    def held(self) -> AbstractContextManager[None]:
        """Keep the transfer worker open inside the `with` block.

        A job enters it before it asks for the transfer worker, and leaves it after its last
        operation."""
        return self._idle.used()

    async def get(self) -> TransferWorker:
        """Return the transfer worker. Connects if there is none. Raises OutOfReach.

        If the caller is cancelled, the attempt to connect goes on: other jobs wait for it too."""
        if self._transfer_worker is not None:
            return self._transfer_worker
        if self._attempt is None:
            if self._closed or self._clock.monotonic() < self._again_at:
                raise self._failure()
            self._attempt = asyncio.create_task(self._connect(), name=f"reach {self._name}")
        await asyncio.shield(self._attempt)
        if self._transfer_worker is None:
            raise self._failure()
        return self._transfer_worker

    def forgive(self) -> None:
        """Let the next `get` try to connect at once, because something has changed."""
        self._backoff.reset()
        self._again_at = 0.0

    def drop(self) -> None:
        """Close the current transfer worker. The next `get` makes a new one."""
        transfer_worker, self._transfer_worker = self._transfer_worker, None
        self._rested = None
        self._idle.stop()
        if transfer_worker is not None:
            self._why = "the connection to it ended"
            transfer_worker.close()

    def close(self) -> None:
        """Close for good. The result of an attempt under way is closed too."""
        self._closed = True
        self._why = "it is gone"
        self.drop()

    def _rest(self) -> bool:
        """Close the idle transfer worker. Returns False if it still copies."""
        transfer_worker = self._transfer_worker
        if transfer_worker is not None and transfer_worker.busy:
            return False
        self.drop()
        if transfer_worker is not None:
            self._rested = _route_of(transfer_worker)
            logger.debug("closed the idle session to %s", self._name)
        return True

    def _failure(self) -> OutOfReach:
        return OutOfReach(f"the KV memory of decode worker {self._name}: {self._why}")

    async def _connect(self) -> None:
        """Try to connect. Never raises, because maybe nobody waits for it any more."""
        try:
            transfer_worker = await self._open()
        except Exception as exc:
            if not isinstance(exc, PullfillError):
                logger.exception("connecting to %s failed", self._name)
            if not self._closed:
                self._why = str(exc) or repr(exc)
            self._again_at = self._clock.monotonic() + self._backoff.next()
        else:
            if self._closed:
                transfer_worker.close()
            else:
                self._transfer_worker = transfer_worker
                self.forgive()
                self._idle.start()  # all jobs that asked may have left
        finally:
            self._attempt = None


def _route_of(transfer_worker: TransferWorker) -> dict[str, object]:
    return {
        "transport": transfer_worker.transport,
        "why_not_better": list(transfer_worker.why_not_better),
    }
