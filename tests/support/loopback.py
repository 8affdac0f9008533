"""Fences without a region, and shared memory whose copies stop on demand: with faults for tests."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import LocalMemory, PeerSession, Rect
from pullfill.transfer.copying import copy_batch
from pullfill.transfer.runs import Copies
from pullfill.transfer.shm.fence import ShmFences
from pullfill.transfer.shm.shm_transport import ShmTransport
from pullfill.wire import FenceToken, RegionDescriptor


class LoopbackFences(ShmFences):
    """The real fences, over a file that has no name."""

    def __init__(self, slots: int) -> None:
        fd = os.memfd_create("fences")
        super().__init__(fd, "i", slots)
        weakref.finalize(self, os.close, fd)

    def hold(self, token: FenceToken) -> Callable[[], None]:
        """Hold the fence, as whoever copies does. Returns what lets go of it. Raises Fenced."""
        held = self.open_hold("i")
        with ExitStack() as ending:
            ending.callback(held.close)  # as when a process is killed: the kernel frees the lock
            held.enter(token)
            return ending.pop_all().close


class Faults:
    """Stops batches while they hold their fence. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holds = False
        self._held = 0
        self._kill = False

    def hold(self) -> Self:
        """Stop every batch, while it holds its fence, until `resume`."""
        with self._changed:
            self._holds, self._kill = True, False
        return self

    def wait_held(self) -> bool:
        """Wait until a batch is stopped."""
        with self._changed:
            return self._changed.wait_for(lambda: self._held > 0, 20)

    def resume(self, *, kill: bool = False) -> None:
        """Let the stopped batches go on. They copy all their bytes. kill: they end as if their
        process had died, and move no byte."""
        with self._changed:
            self._holds, self._kill = False, kill
            self._changed.notify_all()

    def inside_batch(self) -> None:
        with self._changed:
            if not self._holds:
                return
            self._held += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._holds)
            self._held -= 1
            if self._kill:
                raise TransferFailed("the writer died in a batch")

    def copy(self, source: int, target: int, batch: Copies) -> None:
        """A session's copier."""
        self.inside_batch()
        copy_batch(source, target, batch)


class LoopbackTransport(ShmTransport):
    """Shared memory under another name, with faults for those who copy."""

    name = "loopback"

    def __init__(self) -> None:
        self._faults: dict[str, Faults] = {}

    def faults(self, descriptor: RegionDescriptor) -> Faults:
        """Of whoever copies to or from this memory."""
        return self._faults.setdefault(descriptor.endpoints["shm"], Faults())

    def connect(
        self, local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None = None
    ) -> PeerSession:
        session = super().connect(local, descriptor, part)
        session.copier = self.faults(descriptor).copy  # type: ignore[attr-defined]
        return session
