"""Connects to the KV memory of decode workers: transports, one session for all jobs.

Each rank of a decode worker has a region of its own, and so has each rank here. The transfer worker
uses one session over all of them (`transfer/connect.py`).

asyncio thread only.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pullfill.backoff import Backoff
from pullfill.clock import SYSTEM_CLOCK, Clock
from pullfill.errors import BadMessage, IncompatibleError, PeerUnavailable, PullfillError
from pullfill.prefill_worker.transfer_worker import Credits, TransferWorker
from pullfill.runtime import log
from pullfill.runtime.serial_executor import SerialExecutor
from pullfill.transfer.connect import connect, why_not_better
from pullfill.transfer.contract import LocalMemory, PeerTransport
from pullfill.wire import RegionDescriptor

logger = log.get("prefill_worker.reach")


async def open_transfer_worker(
    name: str,
    regions: Sequence[RegionDescriptor],
    *,
    memories: Sequence[LocalMemory],
    transports: Sequence[PeerTransport],
    absent: Mapping[str, str],
    credits: Credits,
    copiers: weakref.WeakSet[TransferWorker],
) -> TransferWorker:
    """Connect to a decode worker's KV memory, each rank over the best transport.

    name: the decode worker's. regions: its KV memory, of each rank.
    memories: our own.
    transports: the ones that we have, best first.
    absent: why other transports are not among them, for people.
    copiers: gets the transfer worker, which may still copy when its connection has ended.

    Raises IncompatibleError, TransferFailed and PeerUnavailable. The last also for regions or
    answers that make no sense: those are the decode worker's fault, never that of a job."""
    if not memories:
        raise IncompatibleError("no transport reaches this worker's KV memory", field="device")
    if not regions:
        raise IncompatibleError("no transport reaches its KV memory", field="device")
    # On a thread of its own: it may wait for a worker that does not answer.
    run = partial(asyncio.get_running_loop().run_in_executor, SerialExecutor())
    try:
        better = await run(why_not_better, regions[0], transports, absent)
        session = await run(connect, memories, regions, transports)
    except BadMessage as exc:
        raise PeerUnavailable(f"cannot connect to the KV memory: {exc}") from exc
    logger.info("writing to %s over %s", name, session.transport)
    made = TransferWorker(session, name, memories, credits, better)
    copiers.add(made)
    return made


class OutOfReach(PeerUnavailable):
    """This worker cannot serve the job, and another one may: it cannot reach the decode worker's KV
    memory now, lacks the LoRA adapter, or takes fewer multimodal inputs."""


# Connects to the KV memory of the decode worker with this name.
OpenTransferWorker = Callable[[str, Sequence[RegionDescriptor]], Awaitable[TransferWorker]]


@dataclass(eq=False, repr=False)
class SharedTransferWorker:
    """One decode worker's transfer worker, shared by all its jobs, connected at first use.

    After an attempt has failed, jobs fail at once for a while and go back to the queue.

    name: the decode worker's.
    current: the transfer worker. None before the first success, and after `drop`."""

    open: OpenTransferWorker
    name: str
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self._attempt: asyncio.Task[TransferWorker] | None = None
        self._backoff = Backoff(2.0, longest_s=30.0)
        self._again_at = 0.0
        self._regions: Sequence[RegionDescriptor] = ()
        self._closed = False
        self.current: TransferWorker | None = None

    @property
    def busy(self) -> bool:
        """Whether it copies, or keeps blocks to be read, maybe for a job that has ended."""
        return self.current is not None and self.current.busy

    def connecting(self) -> asyncio.Task[TransferWorker]:
        """Return the attempt to connect: the last one, or a new one. It may raise OutOfReach.

        Never cancel it: other jobs wait for it too."""
        # A KV port that drops packets, or accepts and then says nothing, takes seconds to fail. So
        # all jobs wait for one attempt, and this worker can serve other decode workers meanwhile.
        attempt = self._attempt
        again = self.current is None and self.clock.monotonic() >= self._again_at
        if attempt is None or (attempt.done() and again):
            attempt = self._attempt = asyncio.create_task(self._connect())
            # Or asyncio logs its failure as an error if nobody waits for it any more.
            attempt.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return attempt

    def forgive(self, regions: Sequence[RegionDescriptor]) -> None:
        """Let the next job try to connect at once: the decode worker has told its regions anew."""
        self._regions = regions
        self._backoff.reset()
        self._again_at = 0.0

    def drop(self) -> None:
        """Close the current transfer worker. The next job connects anew."""
        dropped, self.current = self.current, None
        if dropped is not None:
            self._attempt = None
            dropped.close()

    def close(self) -> None:
        """Close for good. The result of an attempt under way is closed too."""
        self._closed = True
        self.drop()

    def _failure(self, why: str) -> OutOfReach:
        return OutOfReach(f"the KV memory of decode worker {self.name}: {why}")

    async def _connect(self) -> TransferWorker:
        """Try to connect. Raises OutOfReach."""
        if self._closed:
            raise self._failure("it is gone")
        try:
            made = await self.open(self.name, self._regions)
        except Exception as exc:
            if not isinstance(exc, PullfillError):
                logger.exception("connecting to %s failed", self.name)
            self._again_at = self.clock.monotonic() + self._backoff.next()
            raise self._failure(str(exc) or repr(exc)) from exc
        if self._closed:
            made.close()
            raise self._failure("it is gone")
        self.current = made
        self._backoff.reset()
        return made
