"""An operation's bytes as one stream, and where each batch of it is in one side's memory. Pure.

The order is the same on both sides, whatever their layouts: for each layer, for each block (as the
operation lists them: ascending ids of the owner), for each head, one page. Such a stream is like a
dense region. So `runs.Planner` plans a copy into it, and only the source of that plan is used. Each
side merges what is contiguous in its own memory. Both sides cut the stream every `batch_bytes`
bytes, so they cut at the same places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pullfill.transfer.contract import KvLayout, LocalMemory
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.runs import Offsets, Planner

Iovec: TypeAlias = NDArray[np.uint64]
"""[n, 2], C-contiguous: address, bytes (a `struct iovec[n]`)."""
_EXPAND = 1 << 15
"""Runs made at a time: layers are expanded in groups of about so many."""


@dataclass(frozen=True, slots=True)
class Runs:
    """A part of a stream as it lies in one side's memory, in the order of the stream.

    iovec: the runs. The other side has the same bytes, but cut into other runs.
    total: bytes of all runs. The same on both sides.
    """

    iovec: Iovec
    total: int


class ByteStream:
    """Some blocks of one memory as a stream."""

    def __init__(self, memory: LocalMemory, blocks: Offsets) -> None:
        """blocks: ids in the order of the stream. The caller has checked them."""
        layout = memory.layout
        flat = _into_stream(layout).flat(blocks, np.arange(len(blocks), dtype=np.int64))
        self._layer = np.empty((len(flat), 2), np.uint64)
        self._layer[:, 0] = flat.source
        self._layer[:, 0] += np.uint64(memory.address)
        self._layer[:, 1] = flat.nbytes
        self._layers = layout.num_layers
        self._stride = layout.layer_stride
        self.total = flat.total * self._layers
        self.runs = len(flat) * self._layers

    def batches(self, batch_bytes: int) -> Iterator[Runs]:
        """Batches of `batch_bytes` each; the last one has what is left."""
        if not self.total:
            return
        group = max(1, _EXPAND // len(self._layer))
        left = self._layer[:0]
        for start in range(0, self._layers, group):
            count = min(group, self._layers - start)
            iovec = np.concatenate((left, self._expand(start, count)))
            left = iovec[:0]
            for batch in pieces(iovec, batch_bytes):
                if batch.total < batch_bytes and start + count < self._layers:
                    left = batch.iovec
                else:
                    yield batch

    def _expand(self, start: int, count: int) -> Iovec:
        iovec = np.tile(self._layer, (count, 1))
        shift = (np.arange(start, start + count) * self._stride).astype(np.uint64)
        iovec[:, 0] += np.repeat(shift, len(self._layer))
        return iovec


@lru_cache(maxsize=64)
def _into_stream(layout: KvLayout) -> Planner:
    """Plans one layer of any blocks."""
    # The stream has one block here; that it will have more changes none of its strides.
    stream = dense_layout(1, 1, layout.num_kv_heads, layout.page_bytes)
    return Planner(replace(layout, num_layers=1), stream)


def pieces(iovec: Iovec, step: int) -> Iterator[Runs]:
    """Cut a list of runs every `step` bytes; the last piece has what is left.

    Both sides that cut the same bytes get pieces of the same lengths."""
    lengths = iovec[:, 1].astype(np.int64)
    ends = np.cumsum(lengths)
    starts = np.arange(0, ends[-1], step)
    stops = np.minimum(starts + step, ends[-1])
    firsts = np.searchsorted(ends, starts, side="right")
    lasts = np.searchsorted(ends, stops, side="left")
    skipped = starts - (ends - lengths)[firsts]
    beyond = ends[lasts] - stops
    columns = (firsts, lasts + 1, skipped, beyond, stops - starts)
    for first, last, before, after, total in zip(*(c.tolist() for c in columns), strict=True):
        piece = iovec[first:last].copy()
        piece[-1, 1] -= after
        piece[0, 0] += before
        piece[0, 1] -= before
        yield Runs(piece, total)


def pairs(ours: Iovec, theirs: Iovec) -> tuple[Iovec, Iovec]:
    """Cut both lists into runs of pairwise equal lengths. They have no empty runs and as many bytes
    in all."""
    both = [(iovec, np.cumsum(iovec[:, 1].astype(np.int64))) for iovec in (ours, theirs)]
    ends = np.union1d(both[0][1], both[1][1])
    left, right = (_cut_at(iovec, own_ends, ends) for iovec, own_ends in both)
    return left, right


def _cut_at(iovec: Iovec, own_ends: Offsets, ends: Offsets) -> Iovec:
    """`iovec` cut at `ends`, its own among them."""
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    run = np.searchsorted(own_ends, starts, side="right")
    run_starts = own_ends - iovec[:, 1].astype(np.int64)
    cut = np.empty((len(ends), 2), np.uint64)
    cut[:, 0] = iovec[run, 0] + (starts - run_starts[run]).astype(np.uint64)
    cut[:, 1] = (ends - starts).astype(np.uint64)
    return cut
