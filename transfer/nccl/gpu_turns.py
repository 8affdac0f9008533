"""Turns on a GPU. Who has a turn may have a transfer waiting there, and has memory to stage it in.

A peer takes its turn first, and its owner after that. Turns are made when the worker starts. Their
memory is never given back (`CudaGpu.allocate`).
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from pullfill.errors import TransferFailed
from pullfill.transfer.gpu.copies import BATCH_RUNS, lane_of
from pullfill.transfer.gpu.cuda import Addresses, CudaStream, load, settle
from pullfill.transfer.runs import Iovec, pieces, size_of

# A kernel of NCCL's occupies multiprocessors while it waits for the other side. So only so many of
# each side are on a GPU at a time. A worker with both sides on is a peer of some workers and the
# owner for others. Each side has turns of its own, so nobody waits for a turn in a circle.
TURNS = 4
# Seconds between two looks of a waiting session at its connection.
TICK_S = 0.02


@dataclass(frozen=True, slots=True)
class Turn:
    """`nbytes` of GPU memory at `address`."""

    address: int
    nbytes: int
    gpu: CudaGpu

    def copy(self, target: Iovec, source: Iovec) -> None:
        """Copy runs of pairwise equal lengths. Returns when done. Raises TransferFailed."""
        if len(target):
            columns = (target[:, 0], source[:, 0], source[:, 1])
            self.gpu.copy(*(np.ascontiguousarray(column) for column in columns))


class Turns:
    """The turns of one GPU on one side. Thread-safe."""

    def __init__(self, gpu: CudaGpu) -> None:
        self._gpu = gpu
        self._free: queue.SimpleQueue[Turn] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._made = False

    def make(self, nbytes: int) -> None:
        """Make the turns, once, with so much memory each. Raises TransferFailed when the GPU has
        too little."""
        with self._mutex:
            if self._made:
                return
            try:
                first = self._gpu.allocate(TURNS * nbytes)
            except Exception as exc:
                raise TransferFailed(
                    f"no {TURNS * nbytes >> 20} MiB of GPU memory to stage KV in "
                    f"(a smaller --gpu-memory-utilization leaves more): {exc}"
                ) from exc
            self._gpu.warm()
            for number in range(TURNS):
                self._free.put(Turn(first + number * nbytes, nbytes, self._gpu))
            self._made = True

    @contextlib.contextmanager
    def take(self, watch: Callable[[], None]) -> Iterator[Turn]:
        """Wait for a turn, and have it until the `with` ends. Nothing on the GPU may use the turn's
        memory then.

        watch: called every TICK_S. It raises to give up."""
        while True:
            try:
                turn = self._free.get(timeout=TICK_S)
                break
            except queue.Empty:
                watch()
        try:
            yield turn
        finally:
            self._free.put(turn)


class Laid:
    """A batch cut into messages.

    places: address and length of each message, in the blocks or in the turn's memory.
    blocks, ring: the runs that are copied between the blocks and the turn's memory.
    """

    def __init__(self, runs: Iovec, step: int, turn: Turn) -> None:
        """Raises TransferFailed when the turn's memory is too small."""
        messages = list(pieces(runs, step))
        staged = [message for message in messages if len(message) > 1]
        self.blocks: Iovec = np.concatenate(staged) if staged else runs[:0]
        self.ring = self.blocks.copy()
        nbytes, at = size_of(self.blocks), turn.address
        if nbytes > turn.nbytes:
            raise TransferFailed(f"{nbytes} bytes in one batch, {turn.nbytes} can be staged")
        ends = np.cumsum(self.blocks[:, 1])
        self.ring[:, 0] = np.uint64(at) + ends - self.blocks[:, 1]
        self.places: list[tuple[int, int]] = []
        for message in messages:
            if len(message) == 1:
                self.places.append((int(message[0, 0]), size_of(message)))
            else:
                self.places.append((at, size_of(message)))
                at += size_of(message)


class CudaGpu:
    """One GPU. Makes no CUDA context before it is used."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.uuid = load().uuid(device)

    def activate(self) -> None:
        """Make it the calling thread's device: NCCL takes the driver's current context."""
        load().enter(self._device)

    def stream(self) -> CudaStream:
        return load().stream(self._device)

    def warm(self) -> None:
        """Get ready for `copy`. The first call takes seconds: see `lane_of`."""
        lane_of(self._device)

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, for as long as the process lives."""
        # To give memory back waits for everything that runs on the GPU, also for a kernel that
        # waits for another worker. Not from torch's pool, which orders memory by its own streams.
        return load().allocate(self._device, nbytes)

    def copy(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        """Copy runs within the GPU, on the lane that all copies of this process share. Returns when
        all of it is done. Raises TransferFailed when nothing of it goes on. Any thread."""
        lane = lane_of(self._device)
        for first in range(0, len(nbytes), BATCH_RUNS):
            part = slice(first, first + BATCH_RUNS)
            with lane.lock:
                lane.check()
                try:
                    lane.copy(target[part], source[part], nbytes[part])
                except Exception as exc:
                    settle(lane.wait, "a GPU does not say whether it still writes; waiting")
                    raise TransferFailed(f"copying within the GPU failed: {exc}") from exc
