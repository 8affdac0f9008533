"""Which bytes go where. Pure, vectorised, no I/O. The one planner of runs for all transports.

A *run* is contiguous in the source and in the target. A `Planner` turns pairs of (source block,
target block) into `Copies`. Heads of a block, layers of a block and neighbouring blocks become one
run where both layouts are dense. `Copies.batches` cuts them into bounded batches.

Over some transports each side knows only its own memory. `stream_of` gives such a side its runs, in
an order that does not depend on its layout: the bytes arrive in the order in which they are sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import BadMessage
from pullfill.transfer.contract import KvLayout, LocalMemory

Offsets = NDArray[np.int64]
# [n, 2], C-contiguous: address, bytes (a `struct iovec[n]`).
Iovec: TypeAlias = NDArray[np.uint64]

# A fence is held for one batch. At 4-10 GB/s a batch takes 3-8 ms, so a revoke waits that long
# for a running writer. The work between two batches costs 1 % of the copy.
BATCH_BYTES = 32 << 20
BATCH_RUNS = 1024
LIMITS = BATCH_BYTES, BATCH_RUNS


# What does not merge, layers above all, lies at constant distances on both sides.
@dataclass(frozen=True, slots=True)
class Rows:
    """Copies that repeat a run at constant distances.

    counts: how often, for each dimension, outermost first. Empty: the run alone.
    source, target: the distances in the source and in the target, in bytes.
    """

    counts: tuple[int, ...] = ()
    source: tuple[int, ...] = ()
    target: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """How many copies of each run."""
        return prod(self.counts)

    def steps(self) -> tuple[Offsets, Offsets]:
        """Displacements of every copy in the source and in the target."""
        source = target = np.zeros(1, np.int64)
        for count, s, t in zip(self.counts, self.source, self.target, strict=True):
            index = np.arange(count, dtype=np.int64)
            source = (source[:, None] + index * s).ravel()
            target = (target[:, None] + index * t).ravel()
        return source, target


@dataclass(frozen=True, slots=True)
class Copies:
    """All copies of some blocks, or those that are made under one hold of the fence.

    source, target, nbytes: the runs, three lists of equal length, in bytes.
    rows: each run is copied once for every row: the layers and heads that did not merge into runs.
    """

    # Lists, because most runs are walked, not computed with.

    source: list[int]
    target: list[int]
    nbytes: list[int]
    rows: Rows = Rows()  # the runs alone

    @property
    def total(self) -> int:
        """Bytes of all copies."""
        return sum(self.nbytes) * self.rows.count

    def flat(self) -> tuple[Offsets, Offsets, Offsets]:
        """All copies, spelled out: sources, targets, bytes."""
        source, target, nbytes = np.array((self.source, self.target, self.nbytes), np.int64)
        s_steps, t_steps = self.rows.steps()
        source = (source[:, None] + s_steps).ravel()
        target = (target[:, None] + t_steps).ravel()
        return source, target, np.repeat(nbytes, len(s_steps))

    def batches(self, max_bytes: int = BATCH_BYTES, max_runs: int = BATCH_RUNS) -> Iterator[Copies]:
        """Bounded batches, in order. Each has all rows of its runs. Longer runs are cut.

        max_bytes, max_runs: of a batch at most, rows counted."""
        if self.rows.count > min(max_bytes, max_runs):  # too many rows for any run
            spelled_out = Copies(*(column.tolist() for column in self.flat()))
            yield from spelled_out.batches(max_bytes, max_runs)
            return
        most, at_once = max_bytes // self.rows.count, max_runs // self.rows.count
        source, target, nbytes = self._cut(most & -4096 or most)  # pages stay aligned
        ends = [*accumulate(nbytes)]
        first = done = 0
        while first < len(nbytes):
            last = min(first + at_once, bisect_right(ends, done + most))
            cut = slice(first, last)
            yield Copies(source[cut], target[cut], nbytes[cut], self.rows)
            first, done = last, ends[last - 1]

    def _cut(self, limit: int) -> tuple[list[int], list[int], list[int]]:
        """The runs, with those longer than `limit` cut."""
        if max(self.nbytes, default=0) <= limit:
            return self.source, self.target, self.nbytes
        pieces = [
            (s + done, t + done, min(limit, nbytes - done))
            for s, t, nbytes in zip(self.source, self.target, self.nbytes, strict=True)
            for done in range(0, nbytes, limit)
        ]
        source, target, lengths = (list(column) for column in zip(*pieces, strict=True))
        return source, target, lengths


class Planner:
    """Plans copies between one pair of layouts. Computes once what does not depend on the blocks.
    Any number of threads."""

    def __init__(self, source: KvLayout, target: KvLayout) -> None:
        """Both have as many layers and heads, and pages of the same size (`layout.both_sides`)."""
        self._source, self._target = source, target
        self._unit, self._rows = _fold(source, target)
        self._mergeable = source.block_stride == target.block_stride == self._unit

    def plan(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> Copies:
        """Copy block `source_blocks[i]` to `target_blocks[i]`. Raises BadMessage (nothing planned)
        when lengths differ, an id is out of range, or a target appears twice."""
        from_ids, to_ids = checked_pairs(
            source_blocks, self._source.num_blocks, target_blocks, self._target.num_blocks
        )
        from_, to, lengths = merge_pairs(from_ids, to_ids, mergeable=self._mergeable)
        source = from_ * self._source.block_stride + self._source.base_offset
        target = to * self._target.block_stride + self._target.base_offset
        nbytes = (lengths * self._unit).tolist()
        return Copies(source.tolist(), target.tolist(), nbytes, self._rows)


def merge_pairs(
    source: Offsets, target: Offsets, *, mergeable: bool = True
) -> tuple[Offsets, Offsets, Offsets]:
    """The longest runs of pairs that step by one on both sides: first source, first target, length,
    in the order of the targets. Raises BadMessage when a target appears twice.

    mergeable: if False, each pair is a run of its own."""
    step = target[1:] - target[:-1]
    if len(step) and int(step.min()) <= 0:
        order = np.argsort(target, kind="stable")
        source, target = source[order], target[order]
        step = target[1:] - target[:-1]
        if int(step.min()) == 0:
            raise BadMessage("a target block appears twice")
    if mergeable and len(step):
        breaks = np.flatnonzero((step != 1) | (source[1:] - source[:-1] != 1))
        if len(breaks) < len(step):
            starts = np.zeros(len(breaks) + 2, np.int64)
            np.add(breaks, 1, out=starts[1:-1])
            starts[-1] = len(source)
            lengths = starts[1:] - starts[:-1]
            return source[starts[:-1]], target[starts[:-1]], lengths
    return source, target, np.ones(len(source), np.int64)


def checked_ids(ids: Sequence[int], num_blocks: int, what: str) -> Offsets:
    """`ids` as int64, each in [0, num_blocks). Raises BadMessage."""
    try:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
    except (OverflowError, TypeError, ValueError) as exc:
        raise BadMessage(f"{what} block ids are not block ids: {exc}") from exc
    # A negative id is a very large unsigned one.
    if len(array) and int(array.view(np.uint64).max()) >= num_blocks:
        bad = int(array.min())
        bad = bad if bad < 0 else int(array.max())
        raise BadMessage(f"{what} block {bad} is outside 0..{num_blocks - 1}")
    return array


def checked_pairs(
    source: Sequence[int], source_blocks: int, target: Sequence[int], target_blocks: int
) -> tuple[Offsets, Offsets]:
    """Both lists as int64. Raises BadMessage when lengths differ, or an id is not in the memory of
    that side, which has so many blocks."""
    if len(source) != len(target):
        raise BadMessage(f"{len(source)} source blocks for {len(target)} target blocks")
    return (
        checked_ids(source, source_blocks, "source"),
        checked_ids(target, target_blocks, "target"),
    )


def _fold(a: KvLayout, b: KvLayout) -> tuple[int, Rows]:
    """Contiguous bytes per block, and the rows of the layers and heads that are not among them."""
    unit, rows, dense = a.page_bytes, Rows(), True
    for count, a_stride, b_stride in (
        (a.num_kv_heads, a.head_stride, b.head_stride),
        (a.num_layers, a.layer_stride, b.layer_stride),
    ):
        if count == 1:
            continue
        dense = dense and a_stride == b_stride == unit
        if dense:
            unit *= count
        else:
            rows = Rows((count, *rows.counts), (a_stride, *rows.source), (b_stride, *rows.target))
    return unit, rows


def size_of(iovec: Iovec) -> int:
    """Bytes of all runs."""
    return int(iovec[:, 1].sum())


def stream_of(memory: LocalMemory, blocks: Offsets) -> Iovec:
    """Some blocks of one memory as a stream: for each layer, for each block, for each head, one
    page. What is contiguous in this memory is one run. The other side's stream has the same bytes,
    but cut into other runs.

    blocks: ids, as the operation lists them (ascending ids of the owner). The caller has checked
    them."""
    layout = memory.layout
    layers = np.arange(layout.num_layers)[:, None, None] * layout.layer_stride
    heads = np.arange(layout.num_kv_heads) * layout.head_stride
    first = memory.address + layout.base_offset
    pages = (first + layers + blocks[:, None] * layout.block_stride + heads).ravel()
    begins = np.ones(len(pages), bool)
    begins[1:] = pages[1:] - pages[:-1] != layout.page_bytes
    starts = np.flatnonzero(begins)
    iovec = np.empty((len(starts), 2), np.uint64)
    iovec[:, 0] = pages[starts]
    iovec[:, 1] = np.diff(starts, append=len(pages)) * layout.page_bytes
    return iovec


def pieces(iovec: Iovec, step: int) -> Iterator[Iovec]:
    """Cut a list of runs every `step` bytes; the last piece has what is left.

    Both sides that cut the same bytes get pieces of the same lengths."""
    if not len(iovec):
        return
    ends = _ends(iovec)
    starts = np.arange(0, ends[-1], step)
    stops = np.minimum(starts + step, ends[-1])
    # Only the runs at the cuts are looked at. Nothing is sorted: a move may have 100,000s of runs.
    firsts = np.searchsorted(ends, starts, side="right")
    lasts = np.searchsorted(ends, stops, side="left")
    skipped = starts - (ends[firsts] - iovec[firsts, 1].astype(np.int64))
    beyond = ends[lasts] - stops
    columns = (firsts, lasts + 1, skipped, beyond)
    for first, last, before, after in zip(*(c.tolist() for c in columns), strict=True):
        piece = iovec[first:last].copy()
        piece[-1, 1] -= after
        piece[0, 0] += before
        piece[0, 1] -= before
        yield piece


def pairs(ours: Iovec, theirs: Iovec) -> tuple[Iovec, Iovec]:
    """Cut both lists into runs of pairwise equal lengths. They have no empty runs and as many bytes
    in all."""
    our_ends, their_ends = _ends(ours), _ends(theirs)
    ends = np.union1d(our_ends, their_ends)
    return _cut_at(ours, our_ends, ends), _cut_at(theirs, their_ends, ends)


def _ends(iovec: Iovec) -> Offsets:
    """Where each run ends, in bytes of the list."""
    ends: Offsets = np.cumsum(iovec[:, 1].astype(np.int64))
    return ends


def _cut_at(iovec: Iovec, own_ends: Offsets, ends: Offsets) -> Iovec:
    """`iovec` cut at `ends`, its own among them."""
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    run = np.searchsorted(own_ends, starts, side="right")
    run_starts = own_ends - iovec[:, 1].astype(np.int64)
    cut = np.empty((len(ends), 2), np.uint64)
    cut[:, 0] = iovec[run, 0] + (starts - run_starts[run]).astype(np.uint64)
    cut[:, 1] = (ends - starts).astype(np.uint64)
    return cut
