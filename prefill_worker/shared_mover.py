"""One decode worker's mover, shared by all jobs that write to it; connected at first use.

If a KV port drops packets, or accepts and then says nothing, an attempt to connect takes seconds to
fail. So all jobs of the decode worker wait for one attempt. For a while after it failed, its jobs
fail at once and go back to the queue, so that this worker can serve other decode workers.

A mover that no job has used for `IDLE_S` is closed, and made again at the next use. asyncio thread
only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

from pullfill import log
from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import PeerUnavailable, PullfillError
from pullfill.idle import IDLE_S, IdleTimer
from pullfill.prefill_worker.mover import Mover

logger = log.get("prefill_worker.mover")

_REST_S = 2.0
_LONGEST_REST_S = 30.0


class OutOfReach(PeerUnavailable):
    """The decode worker is there, but its KV memory cannot be reached from here now."""


class SharedMover:
    """open_mover: makes a mover. name: the decode worker's, for people."""

    def __init__(
        self,
        open_mover: Callable[[], Awaitable[Mover]],
        name: str,
        clock: Clock = SYSTEM_CLOCK,
        idle_s: float = IDLE_S,
    ) -> None:
        self._open = open_mover
        self._name = name
        self._clock = clock
        self._mover: Mover | None = None
        self._attempt: asyncio.Task[None] | None = None
        self._why = ""
        self._rest_s = _REST_S
        self._again_at = 0.0
        self._closed = False
        self._idle = IdleTimer(self._rest, idle_s)
        self._rested: dict[str, object] | None = None

    @property
    def current(self) -> Mover | None:
        """The mover. None before the first success, after `drop`, and if closed as idle."""
        return self._mover

    @property
    def route(self) -> dict[str, object] | None:
        """The transport that it uses, or used before it was closed as idle, and why no better one.

        None before the first write."""
        return _route_of(self._mover) if self._mover is not None else self._rested

    @property
    def in_use(self) -> bool:
        """Whether a job holds the mover, or it still copies for one that has ended."""
        return self._idle.in_use or (self._mover is not None and self._mover.busy)

    def held(self) -> AbstractContextManager[None]:
        """Keep the mover open inside the `with` block.

        A job enters it before it asks for the mover, and leaves it after its last operation."""
        return self._idle.used()

    async def get(self) -> Mover:
        """Raises OutOfReach. Who stops waiting does not end the attempt, which is others' too."""
        if self._mover is not None:
            return self._mover
        if self._attempt is None:
            if self._closed or self._clock.monotonic() < self._again_at:
                raise self._failure()
            self._attempt = asyncio.create_task(self._connect(), name=f"reach {self._name}")
        await asyncio.shield(self._attempt)
        if self._mover is None:
            raise self._failure()
        return self._mover

    def forgive(self) -> None:
        """Something has changed: the next who asks makes an attempt."""
        self._rest_s, self._again_at = _REST_S, 0.0

    def drop(self) -> None:
        """End the mover there is; the next who asks gets a new one."""
        mover, self._mover = self._mover, None
        self._rested = None
        self._idle.stop()
        if mover is not None:
            self._why = "the connection to it ended"
            mover.close()

    def close(self) -> None:
        """For good. An attempt under way ends by itself, and what it brings is closed."""
        self._closed = True
        self._why = "it is gone"
        self.drop()

    def _rest(self) -> bool:
        """Close the mover, which nobody has held for a while."""
        mover = self._mover
        if mover is not None and mover.busy:
            return False
        self.drop()
        if mover is not None:
            self._rested = _route_of(mover)
            logger.debug("closed the idle session to %s", self._name)
        return True

    def _failure(self) -> OutOfReach:
        return OutOfReach(f"the KV memory of decode worker {self._name}: {self._why}")

    async def _connect(self) -> None:
        """Never raises: it may be that nobody waits for it any more."""
        try:
            mover = await self._open()
        except Exception as exc:
            if not isinstance(exc, PullfillError):
                logger.exception("connecting to %s failed", self._name)
            if not self._closed:
                self._why = str(exc) or repr(exc)
            self._again_at = self._clock.monotonic() + self._rest_s
            self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)
        else:
            if self._closed:
                mover.close()
            else:
                self._mover = mover
                self.forgive()
                self._idle.start()  # all jobs that asked may have left
        finally:
            self._attempt = None


def _route_of(mover: Mover) -> dict[str, object]:
    return {"transport": mover.transport, "why_not_better": list(mover.why_not_better)}
