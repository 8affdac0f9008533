"""Which bytes go where: pure, vectorised, no I/O.

`plan` turns (source block, target block) pairs into a `CopyPlan`. Addresses come from strides,
never from shapes. Runs are merged where source *and* target are contiguous: heads within a block,
layers within a block, then neighbouring blocks, as far as both layouts are dense. What does not
merge, layers above all, lies at constant distances on both sides: the plan keeps it as `Rows`.

`CopyPlan.batches` walks it in bounded `Batch`es, which keep a run and its rows together, so that
one call can copy them (a block over all layers).

Copying empties the CPU's caches, and then each numpy call costs 5 us: they are counted here. One
run is planned without any, and so is every plan cut into batches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import BadMessage
from pullfill.transfer.contract import KvLayout, Part

Offsets = NDArray[np.int64]

BATCH_BYTES = 32 << 20
"""A fence is held per batch: at 4-10 GB/s this is 3-8 ms, which is what a revoke waits for a writer
that is alive. What is done between batches costs 1 % of a copy of this length."""
BATCH_RUNS = 1024
"""Also the kernel's limit of one vectored copy (IOV_MAX)."""
RUN_BYTES = 1 << 20
"""Pieces of a run are not made shorter: libc moves less than ~1 MiB at a time more slowly."""
LIMITS = BATCH_BYTES, BATCH_RUNS, RUN_BYTES


@dataclass(frozen=True, slots=True)
class Rows:
    """Copies that repeat a run at constant distances: dimensions outermost first, each so many
    times, so many bytes apart in the source and in the target. No dimension: the run alone."""

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

    def split(self, limit: int) -> Iterator[tuple[int, int, Rows]]:
        """Pieces of at most `limit` (≥ 1) copies, each with its displacements, in order."""
        if self.count <= limit:
            yield 0, 0, self
            return
        inner = Rows(self.counts[1:], self.source[1:], self.target[1:])
        at_once = limit // inner.count
        for first in range(0, self.counts[0], at_once or 1):
            s, t = first * self.source[0], first * self.target[0]
            if at_once:
                counts = (min(at_once, self.counts[0] - first), *inner.counts)
                yield s, t, Rows(counts, self.source, self.target)
            else:
                yield from ((s + ds, t + dt, rows) for ds, dt, rows in inner.split(limit))


SINGLE = Rows()


@dataclass(slots=True)
class Flat:
    """Runs spelled out: three arrays of equal length, in bytes; `total` bytes."""

    source: Offsets
    target: Offsets
    nbytes: Offsets
    total: int

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclass(slots=True)
class Batch:
    """Copies done under one holding of the fence: runs as three lists of equal length, in bytes,
    each run once for every row; `total` bytes. Lists, because most are walked, not computed with.
    """

    source: list[int]
    target: list[int]
    nbytes: list[int]
    total: int
    rows: Rows = SINGLE

    def __len__(self) -> int:
        return len(self.nbytes)

    def flat(self, first: int = 0) -> Flat:
        """The same copies from run `first` on, without rows."""
        source = np.array(self.source[first:], np.int64)
        target = np.array(self.target[first:], np.int64)
        nbytes = np.array(self.nbytes[first:], np.int64)
        if self.rows.counts:
            s_steps, t_steps = self.rows.steps()
            source = (source[:, None] + s_steps).ravel()
            target = (target[:, None] + t_steps).ravel()
            nbytes = np.repeat(nbytes, len(s_steps))
        return Flat(source, target, nbytes, int(nbytes.sum()) if first else self.total)


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Runs at the first layer and head (`source/target/nbytes`, in bytes), and the rows of every
    layer and head that did not fold into them."""

    blocks: int
    source: list[int]
    target: list[int]
    nbytes: list[int]
    rows: Rows

    @property
    def runs(self) -> int:
        """Copies before long ones are cut for batching."""
        return len(self.nbytes) * self.rows.count

    @property
    def total(self) -> int:
        """Bytes moved."""
        return sum(self.nbytes) * self.rows.count

    def batches(
        self,
        max_bytes: int = BATCH_BYTES,
        max_runs: int = BATCH_RUNS,
        run_bytes: int = RUN_BYTES,
    ) -> Iterator[Batch]:
        """Bounded batches in order. A batch holds ≤ max_runs copies and ≤ max_bytes, rows counted.
        Runs are cut where a batch could not hold one in all its rows, yet never into pieces of less
        than run_bytes (≤ max_bytes): then the rows are split."""
        if not self.nbytes:
            return
        limit = max(run_bytes, max_bytes // self.rows.count)
        source, target, nbytes, longest = self._cut(limit)
        alike = nbytes.count(longest) == len(nbytes)  # as they mostly are
        ends = [] if alike else [*accumulate(nbytes)]
        for s_step, t_step, rows in self.rows.split(min(max_runs, max_bytes // longest)):
            count = rows.count
            sources = [at + s_step for at in source] if s_step else source
            targets = [at + t_step for at in target] if t_step else target
            most, at_once = max_bytes // count, max_runs // count
            first = done = 0
            while first < len(nbytes):
                if alike:
                    last = min(first + min(at_once, most // longest), len(nbytes))
                    total = (last - first) * longest
                else:
                    last = min(first + at_once, bisect_right(ends, done + most))
                    total = ends[last - 1] - done
                cut = slice(first, last)
                yield Batch(sources[cut], targets[cut], nbytes[cut], total * count, rows)
                first, done = last, done + total

    def _cut(self, limit: int) -> tuple[list[int], list[int], list[int], int]:
        """The runs, those longer than `limit` in pieces; the length of the longest."""
        longest = max(self.nbytes)
        if longest <= limit:
            return self.source, self.target, self.nbytes, longest
        source, target, lengths = [], [], []
        for s, t, nbytes in zip(self.source, self.target, self.nbytes, strict=True):
            for done in range(0, nbytes, limit):
                source.append(s + done)
                target.append(t + done)
                lengths.append(min(limit, nbytes - done))
        return source, target, lengths, limit


class Planner:
    """Plans copies between one pair of layouts. What does not depend on the blocks is worked out
    once. Stateless after that: any number of threads."""

    def __init__(self, source: KvLayout, target: KvLayout, part: Part | None = None) -> None:
        """`part` of each block (`local` is the source, `remote` the target); by default all layers
        and heads of layouts that have as many. page_bytes of both must be equal, and `part` lie
        inside both (`check_pair`)."""
        if part is None:
            part = Part(0, 0, source.num_kv_heads, 0, 0, source.num_layers)
        self._source, self._target = source, target
        self._unit, self._rows = _fold(source, target, part)
        self._mergeable = source.block_stride == target.block_stride == self._unit
        self._source_at = _address(source, part.local_layer, part.local_head)
        self._target_at = _address(target, part.remote_layer, part.remote_head)

    def plan(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> CopyPlan:
        """Copy block `source_blocks[i]` to `target_blocks[i]`. Raises BadMessage (nothing planned)
        when lengths differ, an id is out of range, or a target appears twice."""
        if len(source_blocks) != len(target_blocks):
            raise BadMessage(
                f"{len(source_blocks)} source blocks for {len(target_blocks)} target blocks"
            )
        count, unit, source, target = len(source_blocks), self._unit, self._source, self._target
        if (
            self._mergeable
            and is_run(source_blocks, source.num_blocks)
            and is_run(target_blocks, target.num_blocks)
        ):
            from_ = [source_blocks[0] * source.block_stride + self._source_at]
            to = [target_blocks[0] * target.block_stride + self._target_at]
            return CopyPlan(count, from_, to, [count * unit], self._rows)
        first_source, first_target, lengths = merge_pairs(
            checked_ids(source_blocks, source.num_blocks, "source"),
            checked_ids(target_blocks, target.num_blocks, "target"),
            mergeable=self._mergeable,
        )
        from_ = (first_source * source.block_stride + self._source_at).tolist()
        to = (first_target * target.block_stride + self._target_at).tolist()
        return CopyPlan(count, from_, to, (lengths * unit).tolist(), self._rows)


def plan(
    source_layout: KvLayout,
    target_layout: KvLayout,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    *,
    part: Part | None = None,
) -> CopyPlan:
    """One plan of a `Planner` that nobody needs again."""
    return Planner(source_layout, target_layout, part).plan(source_blocks, target_blocks)


def merge_pairs(
    source: Offsets, target: Offsets, *, mergeable: bool = True
) -> tuple[Offsets, Offsets, Offsets]:
    """Maximal runs (first source, first target, length) of pairs that step by one on both sides.
    Raises BadMessage when a target appears twice."""
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


def is_run(ids: Sequence[int], num_blocks: int) -> bool:
    """Whether a list holds neighbouring ids in [0, num_blocks), ascending. False: perhaps."""
    if not isinstance(ids, list) or not ids or type(ids[0]) is not int:
        return False
    first, last = ids[0], ids[0] + len(ids) - 1
    if first < 0 or last >= num_blocks or ids[-1] != last:
        return False
    return ids == [*range(first, last + 1)]


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


def _address(layout: KvLayout, layer: int, head: int) -> int:
    return layout.base_offset + layer * layout.layer_stride + head * layout.head_stride


def _fold(a: KvLayout, b: KvLayout, part: Part) -> tuple[int, Rows]:
    """Contiguous bytes per block, and the rows of (layer, head) pairs not folded in."""
    unit, rows, dense = a.page_bytes, Rows(), True
    for count, a_stride, b_stride in (
        (part.heads, a.head_stride, b.head_stride),
        (part.layers, a.layer_stride, b.layer_stride),
    ):
        if count == 1:
            continue
        dense = dense and a_stride == b_stride == unit
        if dense:
            unit *= count
        else:
            rows = Rows((count, *rows.counts), (a_stride, *rows.source), (b_stride, *rows.target))
    return unit, rows
