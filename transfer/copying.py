"""Copies bytes between two addresses of this process, and blocks out of a worker's memory.

`copy_batch` releases the GIL. A run that repeats in rows (a block over all layers) is one strided
numpy copy. A run alone is one `memmove`. Both copy as fast as the memory allows.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pullfill.transfer.contract import LocalMemory, Rect
from pullfill.transfer.gpu.copies import lane_of
from pullfill.transfer.layout import crop, dense_layout, plan_routes
from pullfill.transfer.runs import Batch, Planner

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p

# Lets numpy place an array at any address. The plan has checked the ranges.
_ANYWHERE = ctypes.c_uint8 * (1 << 46)
_STAGE_BYTES = 1 << 20


def copy_batch(source: int, target: int, batch: Batch) -> None:
    """Copy every run and row. The caller has checked the ranges.

    source, target: the addresses that the offsets of the batch count from."""
    rows = batch.rows
    if not rows.counts:
        # `map` into nothing: the loop runs in C. Python between two short copies would take a good
        # part of the time.
        targets, sources = map(target.__add__, batch.target), map(source.__add__, batch.source)
        deque(map(_memmove, targets, sources, batch.nbytes), maxlen=0)
        return
    # Beside a busy Python thread each call that released the GIL waits for it, up to 0.5 ms in a
    # worker. So all rows of a run are one call.
    for src, dst, nbytes in zip(batch.source, batch.target, batch.nbytes, strict=True):
        shape = (*rows.counts, nbytes)
        _at(target + dst, shape, rows.target)[...] = _at(source + src, shape, rows.source)


def _at(address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.uint8]:
    memory: Any = _ANYWHERE.from_address(address)
    return np.ndarray(shape, np.uint8, memory, 0, (*strides, 1))


def copies_of(memories: Sequence[LocalMemory]) -> int:
    """How many ranks, at most, hold the same heads of the same layers."""
    rects = [memory.rect for memory in memories]
    return max(
        sum(r.first_head <= s.first_head < r.end_head and r.first_layer == s.first_layer
            for r in rects)
        for s in rects
    )  # fmt: skip


class BlockReader:
    """Copies blocks out of a worker's memory, for the self-check to compare: blocks of two workers
    with equal KV give equal bytes, whatever the strides and ranks are. One thread at a time.

    From the first call on it keeps a buffer of 1 MiB, or of one block if that is more."""

    def __init__(self, memory: LocalMemory | Sequence[LocalMemory], *, copy: int = 0) -> None:
        """
        memory: of all ranks.
        copy: where several ranks hold the same, the `copy`-th of them is read.
        """
        self._memories = [memory] if isinstance(memory, LocalMemory) else list(memory)
        rects = [memory.rect for memory in self._memories]
        whole = Rect(0, max(r.end_head for r in rects), 0, max(r.end_layer for r in rects))
        layout = self._memories[0].layout
        page = layout.page_bytes
        block = self._block = whole.layers * whole.heads * page
        self._at_once = max(1, _STAGE_BYTES // block)
        # All heads of all layers, each block's pages side by side.
        dense = dense_layout(whole.layers, 1, whole.heads, page)
        stage = replace(dense, num_blocks=self._at_once, block_stride=block)
        # Target t of a plan takes the t-th of several holders.
        self._routes = [
            (self._memories[r.source], r.part.within(rects[r.source]), crop(stage, r.part))
            for r in plan_routes(rects, [whole] * (copy + 1))
            if r.target == copy
        ]
        self._stage: memoryview | None = None
        self._address = 0

    def pages(self, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """A copy of the blocks, one row each: all layers, and in each layer all heads.

        Reads live memory: the caller keeps the blocks from changing. Raises BadMessage when an id
        is out of range."""
        rows = [np.frombuffer(page, np.uint8).copy() for page in self._gathered(block_ids)]
        return np.stack(rows) if rows else np.empty((0, self._block), np.uint8)

    def _gathered(self, block_ids: Sequence[int]) -> Iterator[memoryview]:
        """Yield the bytes of each block, in a buffer that later blocks overwrite."""
        block = self._block
        if self._stage is None:
            buffer = np.empty(self._at_once * block, np.uint8)
            self._stage, self._address = buffer.data, buffer.ctypes.data
        for first in range(0, len(block_ids), self._at_once):
            some = block_ids[first : first + self._at_once]
            for source, part, stage in self._routes:
                with _readable(source, some) as (memory, ids):
                    plans = Planner(crop(memory.layout, part), stage)
                    for batch in plans.plan(ids, range(len(some))).batches():
                        copy_batch(memory.address, self._address, batch)
            for at in range(0, len(some) * block, block):
                yield self._stage[at : at + block]


@contextmanager
def _readable(
    memory: LocalMemory, blocks: Sequence[int]
) -> Iterator[tuple[LocalMemory, Sequence[int]]]:
    """Memory of the CPU that holds the blocks, and their ids there."""
    if memory.device is None:
        yield memory, blocks
        return
    with lane_of(memory.device).fetched(memory, blocks) as copy:
        yield copy, range(len(blocks))
