"""One decode worker's mover, shared by all jobs that write to it; connected at first use.

A KV port that drops packets, or accepts and says nothing, takes seconds to give up. Jobs of this
decode worker wait for one attempt together, and share its failure for a while after it: they go
back to the queue at once, and this worker's places go to jobs of others. asyncio thread only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from pullfill import log
from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import PeerUnavailable, PullfillError
from pullfill.prefill_worker.mover import Mover

logger = log.get("prefill_worker.mover")

_REST_S = 2.0
_LONGEST_REST_S = 30.0


class OutOfReach(PeerUnavailable):
    """The decode worker is there, but its KV memory cannot be reached from here now."""


class SharedMover:
    """open_mover: makes a mover. name: the decode worker's, for people."""

    def __init__(
        self, open_mover: Callable[[], Awaitable[Mover]], name: str, clock: Clock = SYSTEM_CLOCK
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

    @property
    def current(self) -> Mover | None:
        """None before the first success, and after `drop`."""
        return self._mover

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
        if mover is not None:
            self._why = "the connection to it ended"
            mover.close()

    def close(self) -> None:
        """For good. An attempt under way ends by itself, and what it brings is closed."""
        self._closed = True
        self._why = "it is gone"
        self.drop()

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
        finally:
            self._attempt = None
