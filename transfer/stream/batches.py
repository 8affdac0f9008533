"""An operation's bytes as one stream, and where each batch of it lies in one side's memory. Pure.

The order is the same on both sides whatever their layouts: for layer, for block (as the operation
lists them: ascending owner-side ids), for head, one page. Each side merges what is contiguous in
its own memory; batches are cut at fixed numbers of bytes, so both sides cut at the same places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pullfill.transfer.contract import KvLayout, LocalMemory, Part
from pullfill.transfer.stream.backend_contract import Runs

Iovec = NDArray[np.uint64]

_EXPAND = 1 << 15
"""Runs made at a time: layers are expanded in groups of about so many."""


@dataclass(frozen=True, slots=True)
class Side:
    """The heads and layers that a session moves, counted in one side's own layout."""

    head: int
    heads: int
    layer: int
    layers: int

    @staticmethod
    def whole(layout: KvLayout) -> Side:
        return Side(0, layout.num_kv_heads, 0, layout.num_layers)

    @staticmethod
    def local(part: Part) -> Side:
        return Side(part.local_head, part.heads, part.local_layer, part.layers)


class ByteStream:
    """`blocks` (ids checked by the caller, in stream order) of `side` of one memory."""

    def __init__(self, memory: LocalMemory, side: Side, blocks: NDArray[np.int64]) -> None:
        layout = memory.layout
        first = (
            memory.address
            + layout.base_offset
            + side.layer * layout.layer_stride
            + side.head * layout.head_stride
        )
        self._layer = _one_layer(layout, side, blocks, first)
        self._layers = side.layers
        self._stride = layout.layer_stride
        self.total = int(self._layer[:, 1].sum()) * side.layers
        self.runs = len(self._layer) * side.layers

    def batches(self, batch_bytes: int) -> Iterator[Runs]:
        """Batches of `batch_bytes`, the last one of what is left."""
        if not self.total:
            return
        group = max(1, _EXPAND // len(self._layer))
        left = self._layer[:0]
        for start in range(0, self._layers, group):
            count = min(group, self._layers - start)
            iovec = np.concatenate((left, self._expand(start, count)))
            ends = np.cumsum(iovec[:, 1]).astype(np.int64)
            total, done = int(ends[-1]), 0
            last = start + count == self._layers
            while total - done >= batch_bytes or (last and done < total):
                upto = min(done + batch_bytes, total)
                yield Runs(_between(iovec, ends, done, upto), upto - done)
                done = upto
            left = _between(iovec, ends, done, total) if done < total else iovec[:0]

    def _expand(self, start: int, count: int) -> Iovec:
        iovec = np.tile(self._layer, (count, 1))
        shift = (np.arange(start, start + count) * self._stride).astype(np.uint64)
        iovec[:, 0] += np.repeat(shift, len(self._layer))
        return iovec


def _one_layer(layout: KvLayout, side: Side, blocks: NDArray[np.int64], first: int) -> Iovec:
    """(address, bytes) of layer 0, merged where addresses follow each other."""
    unit, starts = layout.page_bytes, blocks * layout.block_stride
    if side.heads > 1 and layout.head_stride == layout.page_bytes:
        unit *= side.heads
    elif side.heads > 1:
        heads = np.arange(side.heads, dtype=np.int64) * layout.head_stride
        starts = (starts[:, None] + heads).ravel()
    if not len(starts):
        return np.empty((0, 2), np.uint64)
    heads_of_runs = np.flatnonzero(np.concatenate(([True], np.diff(starts) != unit)))
    iovec = np.empty((len(heads_of_runs), 2), np.uint64)
    iovec[:, 0] = starts[heads_of_runs]
    iovec[:, 0] += np.uint64(first)
    iovec[:, 1] = np.diff(np.append(heads_of_runs, len(starts))) * unit
    return iovec


def _between(iovec: Iovec, ends: NDArray[np.int64], start: int, stop: int) -> Iovec:
    """The runs of bytes [start, stop), start < stop; the outer ones cut."""
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left")) + 1
    cut = iovec[first:last].copy()
    cut[-1, 1] -= np.uint64(int(ends[last - 1]) - stop)
    skipped = np.uint64(start - (int(ends[first - 1]) if first else 0))
    cut[0, 0] += skipped
    cut[0, 1] -= skipped
    return cut
