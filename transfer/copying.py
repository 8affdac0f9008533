"""Copies bytes between two addresses of this process, with the GIL released.

There are three ways. A run that repeats in rows (a block over all layers) is one strided numpy
copy. A run alone is one `memmove`. Loops over both run in C, because Python between two short
copies would take a good part of the time. These two ways copy as fast as the memory allows while no
other thread wants the GIL.

Beside a busy Python thread, a call that released the GIL waits for it up to a switch interval: 5 ms
by default, 0.5 ms in workers (engine/environment.py). With 5 ms short copies became 18 times
slower. So short copies are watched. When the thread sleeps for milliseconds between them, the third
way is taken for one second: one vectored kernel copy for the whole batch (`process_vm_writev` to
this process). It is half as fast, but releases the GIL once per batch.
"""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import TransferFailed
from pullfill.transfer.contract import LocalMemory, Rect
from pullfill.transfer.layout import crop, dense_layout, plan_routes
from pullfill.transfer.runs import Batch, Flat, Planner, Rows

_LONG_CALL = 1 << 20
"""Calls that copy at least this many bytes are not watched: beside their time the wait for the GIL
does not matter."""
_WATCH_EVERY = 8
"""Calls between two looks at the clock."""
_SLOW_S, _SLOW_BYTES_PER_S = 1e-3, 1 << 30
"""_WATCH_EVERY calls are slow if they take _SLOW_S longer than their bytes do at
_SLOW_BYTES_PER_S."""
_SLEEPS = 2
_LOST_S = 2e-3
"""The GIL counts as contended if, in one batch, the thread went to sleep by itself _SLEEPS times
and lost _LOST_S. (Preemption by other processes is no sleep of its own.)"""
_VECTORED_FOR_S = 1.0

_libc = ctypes.CDLL(None, use_errno=True)
_memmove = _libc.memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p

_memmove_held = ctypes.PyDLL(None).memmove
_memmove_held.argtypes = _memmove.argtypes
_memmove_held.restype = _memmove.restype

_ANYWHERE = ctypes.c_uint8 * (1 << 46)
"""Lets numpy place an array at any distance from an address. The plan has checked the ranges."""

_LARGEST = 1 << 62
"""Elements of an array in which numpy can count."""

_vectored_until = 0.0
"""Until this time (perf_counter) the GIL counts as contended. Threads write it without a lock: a
race costs speed only."""


def copy_batch(source: int, target: int, batch: Batch) -> None:
    """Copy every run and row. The caller has checked the ranges. Raises TransferFailed when the
    kernel copied less than all.

    source, target: the addresses that the offsets of the batch count from."""
    copy = _copy_tiles if batch.rows.counts else _copy_runs
    count = len(batch)
    if count < _WATCH_EVERY or batch.total >= _LONG_CALL * count or not vectored_works():
        copy(source, target, batch, slice(None))
        return
    done = 0
    if time.perf_counter() >= _vectored_until:
        done = _copy_watched(source, target, batch, copy)
    if done < count:
        _copy_vectored(source, target, batch.flat(done))


def copy_held(source: int, target: int, batch: Batch) -> None:
    """As `copy_batch`, but keeps the GIL. For few bytes: the wait for the GIL would take longer."""
    for src, dst, nbytes in zip(batch.source, batch.target, batch.nbytes, strict=True):
        for src_row, dst_row in _displacements(batch.rows):
            _memmove_held(target + dst + dst_row, source + src + src_row, nbytes)


@lru_cache(maxsize=64)
def _displacements(rows: Rows) -> list[tuple[int, int]]:
    """The offset of each row in the source and in the target."""
    # Cached: a session has the same few rows each time, and numpy costs more than the copies.
    source, target = rows.steps()
    return list(zip(source.tolist(), target.tolist(), strict=True))


_Copy = Callable[[int, int, Batch, slice], None]


def _copy_runs(source: int, target: int, batch: Batch, part: slice) -> None:
    # `map` into nothing: the loop runs in C.
    deque(
        map(
            _memmove,
            map(target.__add__, batch.target[part]),
            map(source.__add__, batch.source[part]),
            batch.nbytes[part],
        ),
        maxlen=0,
    )


def _copy_tiles(source: int, target: int, batch: Batch, part: slice) -> None:
    """Copy runs that repeat in rows."""
    # Runs of one length are items of one array on each side. Where all have the same length, as
    # they mostly have, no Python runs between the copy of one block and the next.
    sources, targets, lengths = batch.source[part], batch.target[part], batch.nbytes[part]
    rows, kinds = batch.rows, set(lengths)
    highest = max(*sources, *targets)
    if highest * rows.count * max(kinds) >= _LARGEST:
        for src, dst, nbytes in zip(sources, targets, lengths, strict=True):
            from_tiles = _tiles(source + src, rows.counts, rows.source, nbytes, 0)
            _tiles(target + dst, rows.counts, rows.target, nbytes, 0)[0] = from_tiles[0]
        return
    tiles = {
        nbytes: (
            _tiles(source, rows.counts, rows.source, nbytes, highest),
            _tiles(target, rows.counts, rows.target, nbytes, highest),
        )
        for nbytes in kinds
    }
    if len(kinds) > 1:
        for src, dst, nbytes in zip(sources, targets, lengths, strict=True):
            from_tiles, to_tiles = tiles[nbytes]
            to_tiles[dst] = from_tiles[src]
        return
    from_tiles, to_tiles = tiles[lengths[0]]
    deque(map(to_tiles.__setitem__, targets, map(from_tiles.__getitem__, sources)), maxlen=0)


def _tiles(
    address: int, counts: tuple[int, ...], strides: tuple[int, ...], nbytes: int, highest: int
) -> NDArray[np.uint8]:
    """The array whose item `i` is the tile that begins `i` bytes after `address`.

    highest: the last item that is asked for."""
    memory: Any = _ANYWHERE.from_address(address)
    shape = (highest + 1, *counts, nbytes)
    return np.ndarray(shape, np.uint8, memory, 0, (1, *strides, 1))


def _copy_watched(source: int, target: int, batch: Batch, copy: _Copy) -> int:
    """Copy a few runs at a time until the GIL proves to be contended. Returns how many are done."""
    global _vectored_until
    slept_before, lost_before = _idle()
    slow = _SLOW_S + batch.total * _WATCH_EVERY / (len(batch) * _SLOW_BYTES_PER_S)
    now = time.perf_counter()
    for first in range(0, len(batch), _WATCH_EVERY):
        last = first + _WATCH_EVERY
        copy(source, target, batch, slice(first, last))
        before, now = now, time.perf_counter()
        if now - before > slow:
            slept, lost = _idle()
            if slept - slept_before >= _SLEEPS and lost - lost_before >= _LOST_S:
                _vectored_until = now + _VECTORED_FOR_S
                return last
    return len(batch)


def _idle() -> tuple[int, float]:
    """Return how often this thread has gone to sleep so far, and for how long it did not run."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_nvcsw, time.perf_counter() - usage.ru_utime - usage.ru_stime


def _copy_vectored(source: int, target: int, flat: Flat) -> None:
    moved = _vectored(
        _iovec(source, flat.source, flat.nbytes), _iovec(target, flat.target, flat.nbytes)
    )
    if moved != flat.total:
        raise TransferFailed(
            f"moved {moved} of {flat.total} bytes: {os.strerror(ctypes.get_errno())}"
        )


@cache
def vectored_works() -> bool:
    """Whether this kernel and sandbox let a process copy within itself by iovec."""
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    one = np.array([[0, 4], [4, 4]], np.uint64)
    src, dst = one.copy(), one.copy()
    src[:, 0] += np.uint64(source.ctypes.data)
    dst[:, 0] += np.uint64(target.ctypes.data)
    try:
        return _vectored(src, dst) == 8 and bool((source == target).all())
    except AttributeError:
        return False


def _iovec(base: int, offsets: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.uint64]:
    iovec = np.empty((len(nbytes), 2), np.uint64)
    iovec[:, 0] = offsets
    iovec[:, 0] += np.uint64(base)
    iovec[:, 1] = nbytes
    return iovec


def _vectored(source: NDArray[np.uint64], target: NDArray[np.uint64]) -> int:
    call, pointer, size = _libc.process_vm_writev, ctypes.c_void_p, ctypes.c_ulong
    call.argtypes = (ctypes.c_int, pointer, size, pointer, size, size)
    call.restype = ctypes.c_ssize_t
    from_, to = source.ctypes.data, target.ctypes.data
    return int(call(os.getpid(), from_, len(source), to, len(target), 0))


_STAGE_BYTES = 1 << 20


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
    from pullfill.transfer.gpu.copies import lane_of

    with lane_of(memory.device).fetched(memory, blocks) as copy:
        yield copy, range(len(blocks))
