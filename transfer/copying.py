"""Copies bytes between two addresses of this process, and blocks out of a worker's memory.

`copy_batch` releases the GIL. A run that repeats in rows (a block over all layers) is one strided
numpy copy. A run alone is one `memmove`. Both copy as fast as the memory allows.
"""

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pullfill.transfer.contract import LocalMemory, Rect
from pullfill.transfer.gpu.cuda import load
from pullfill.transfer.layout import crop, dense_layout, plan_routes
from pullfill.transfer.runs import Copies, Planner

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p

# Lets numpy place an array at any address. The plan has checked the ranges.
_ANYWHERE = ctypes.c_uint8 * (1 << 46)


def copy_batch(source: int, target: int, batch: Copies) -> None:
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
    return max(Counter(memory.rect for memory in memories).values())


def read_pages(
    memories: Sequence[LocalMemory], block_ids: Sequence[int], *, copy: int = 0
) -> NDArray[np.uint8]:
    """Return a copy of blocks, one row each: all layers, and in each layer all heads. Blocks of two
    workers with equal KV give equal bytes, whatever the strides and ranks are.

    memories: of all ranks.
    copy: where several ranks hold the same, the `copy`-th of them is read.

    Reads live memory: the caller keeps the blocks from changing. Raises BadMessage when an id is
    out of range."""
    rects = [memory.rect for memory in memories]
    whole = Rect(0, max(r.end_head for r in rects), 0, max(r.end_layer for r in rects))
    count, page = len(block_ids), memories[0].layout.page_bytes
    found = np.empty((count, whole.layers * whole.heads * page), np.uint8)
    # All heads of all layers, each block's pages side by side.
    dense = dense_layout(whole.layers, 1, whole.heads, page)
    rows = replace(dense, num_blocks=count, block_stride=found.shape[1])
    # Target t of a plan takes the t-th of several holders.
    for route in plan_routes(rects, [whole] * (copy + 1)):
        if route.target != copy:
            continue
        here = route.part.within(rects[route.source])
        memory, target = memories[route.source], found.ctypes.data
        todo = Planner(crop(memory.layout, here), crop(rows, route.part))
        for batch in todo.plan(block_ids, range(count)).batches():
            if memory.device is None:
                copy_batch(memory.address, target, batch)
                continue
            for source, to, nbytes in zip(*map(np.ndarray.tolist, batch.flat()), strict=True):
                load().read(memory.device, target + to, memory.address + source, nbytes)
    return found
