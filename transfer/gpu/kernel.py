"""One Triton kernel that copies many small runs. Its input is a table: source, target, length.

Gathering into a buffer, scattering out of one, and copying into a peer's mapped blocks differ only
in the addresses of the table.

With `TRITON_INTERPRET=1`, set before the import, the kernel runs on plain CPU memory, for tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from pullfill.transfer.gpu.cuda import Addresses

# Words of 8 bytes that a program moves in a step: 64 bytes for each thread of 4 warps.
LANES = 1024
STEPS = 4
# Bytes of a row at most, a multiple of 16.
SPAN = 256 << 10
# Rows that long runs add at most: those of 4 GiB.
ROOM = (4 << 30) // SPAN
_WIDTH = 3


@triton.jit  # type: ignore[untyped-decorator]
def _copy_runs(table, LANES: tl.constexpr, STEPS: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    piece = tl.program_id(0).to(tl.int64)
    run = tl.program_id(1).to(tl.int64)
    source = tl.load(table + run * 3)
    target = tl.load(table + run * 3 + 1)
    words = tl.load(table + run * 3 + 2)
    # The compiler does not know what the table holds. To promise the alignment here makes loads and
    # stores 16 bytes wide.
    s = tl.multiple_of(source.to(tl.pointer_type(tl.int64)), 16)
    d = tl.multiple_of(target.to(tl.pointer_type(tl.int64)), 16)
    words = tl.multiple_of(words, 2)
    first = piece * (LANES * STEPS)
    for step in range(STEPS):
        at = first + step * LANES + tl.arange(0, LANES)
        mask = at < words
        tl.store(d + at, tl.load(s + at, mask=mask), mask=mask)


class RunKernel:
    """Launches the kernel on one device and stream. One thread at a time. The stream must be
    synchronised before the next launch."""

    def __init__(self, device: torch.device, stream: int, most: int) -> None:
        """
        stream: the CUstream. 0 on the CPU (the interpreter).
        most: runs of a launch. At most 49,000, because a grid is at most 65,535 high.
        """
        on_gpu = device.type == "cuda"
        rows = most + ROOM
        self._host = torch.empty((rows, _WIDTH), dtype=torch.int64, pin_memory=on_gpu)
        self._table = torch.empty_like(self._host, device=device) if on_gpu else self._host
        self._rows: NDArray[np.int64] = self._host.numpy()
        self._device = device
        self._stream: Any = torch.cuda.ExternalStream(stream, device) if on_gpu else None

    def launch(self, target: Addresses, source: Addresses, nbytes: Addresses) -> None:
        """Queue copies of 4 GiB at most, between addresses that this device can reach. 16
        divides all addresses and lengths."""
        if not len(nbytes):
            return
        # All runs launch as many programs as the longest one. So long runs become several rows.
        target, source, nbytes = _cut(target, source, nbytes)
        count = len(nbytes)
        rows = self._rows[:count]
        rows[:, 0] = source
        rows[:, 1] = target
        rows[:, 2] = nbytes >> np.uint64(3)
        pieces = -(-int(rows[:, 2].max()) // (LANES * STEPS))
        if self._stream is None:
            self._run(count, pieces)
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._table[:count].copy_(self._host[:count], non_blocking=True)
            self._run(count, pieces)

    def warm(self) -> None:
        """Compile it now. It takes seconds: too long for somebody who holds a fence."""
        buffer = torch.zeros(64, dtype=torch.uint8, device=self._device)
        base = np.array([buffer.data_ptr()], np.uint64)
        self.launch(base + np.uint64(32), base, np.array([16], np.uint64))
        if self._stream is not None:
            self._stream.synchronize()

    def _run(self, count: int, pieces: int) -> None:
        # Pieces first: the second dimension of a CUDA grid ends at 65,535.
        _copy_runs[(pieces, count)](self._table, LANES=LANES, STEPS=STEPS)


def _cut(
    target: Addresses, source: Addresses, nbytes: Addresses
) -> tuple[Addresses, Addresses, Addresses]:
    """The same copies, none longer than SPAN."""
    span = np.uint64(SPAN)
    if int(nbytes.max()) <= SPAN:
        return target, source, nbytes
    parts = ((nbytes + span - np.uint64(1)) // span).astype(np.int64)
    run = np.repeat(np.arange(len(parts)), parts)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    done = (np.arange(len(run)) - first).astype(np.uint64) * span
    return target[run] + done, source[run] + done, np.minimum(nbytes[run] - done, span)
