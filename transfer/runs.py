"""Which bytes go where: pure, vectorised, no I/O.

`plan` turns (source block, target block) pairs into a `CopyPlan`; `CopyPlan.batches` yields
bounded `Batch`es of (source offset, target offset, bytes). Addresses come from strides, never from
shapes. Runs are merged where source *and* target are contiguous: heads within a block, layers
within a block, then neighbouring blocks, as far as both layouts are dense.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pullfill.errors import BadMessage
from pullfill.transfer.contract import KvLayout, Part

Offsets = NDArray[np.int64]

BATCH_BYTES = 4 << 20
"""A fence is held per batch: at 4-10 GB/s this is 0.4-1 ms."""
BATCH_RUNS = 1024
"""Also the kernel's limit of one vectored copy (IOV_MAX)."""
RUN_BYTES = 1 << 20
"""Longer runs are cut: single copies above ~1 MiB bypass the cache and run slower."""
_EXPAND = 1 << 16


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies done under one holding of the fence. Three arrays of equal length, in bytes."""

    source: Offsets
    target: Offsets
    nbytes: Offsets

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total(self) -> int:
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Runs at layer 0, head 0 (`source/target/nbytes`) times the displacements of every layer and
    head that did not fold into them (`source_steps/target_steps`)."""

    blocks: int
    source: Offsets
    target: Offsets
    nbytes: Offsets
    source_steps: Offsets
    target_steps: Offsets

    @property
    def runs(self) -> int:
        """Copies before long ones are cut for batching."""
        return len(self.nbytes) * len(self.source_steps)

    @property
    def total(self) -> int:
        """Bytes moved."""
        return int(self.nbytes.sum()) * len(self.source_steps)

    def batches(
        self,
        max_bytes: int = BATCH_BYTES,
        max_runs: int = BATCH_RUNS,
        max_run_bytes: int = RUN_BYTES,
    ) -> Iterator[Batch]:
        """Bounded batches in order. A batch holds ≤ max_runs copies of ≤ max_run_bytes each and
        ≤ max_bytes in all (max_run_bytes ≤ max_bytes)."""
        source, target, nbytes = _cut(self.source, self.target, self.nbytes, max_run_bytes)
        if not len(nbytes):
            return
        group = max(1, _EXPAND // len(nbytes))
        for first in range(0, len(self.source_steps), group):
            s_steps = self.source_steps[first : first + group]
            t_steps = self.target_steps[first : first + group]
            flat = Batch(
                (s_steps[:, None] + source).ravel(),
                (t_steps[:, None] + target).ravel(),
                np.tile(nbytes, len(s_steps)),
            )
            yield from _split(flat, max_bytes, max_runs)


def plan(
    source_layout: KvLayout,
    target_layout: KvLayout,
    source_blocks: Sequence[int],
    target_blocks: Sequence[int],
    *,
    part: Part | None = None,
) -> CopyPlan:
    """Plan copying block `source_blocks[i]` to `target_blocks[i]`, or `part` of it (`local` is the
    source, `remote` the target; by default all layers and heads of layouts that have as many).

    page_bytes of both layouts must be equal, and `part` lie inside both (`check_pair`). Raises
    BadMessage (nothing planned) when lengths differ, an id is out of range, or a target appears
    twice.
    """
    source = checked_ids(source_blocks, source_layout.num_blocks, "source")
    target = checked_ids(target_blocks, target_layout.num_blocks, "target")
    if len(source) != len(target):
        raise BadMessage(f"{len(source)} source blocks for {len(target)} target blocks")
    if part is None:
        part = Part(0, 0, source_layout.num_kv_heads, 0, 0, source_layout.num_layers)

    unit, steps = _fold(source_layout, target_layout, part)
    mergeable = source_layout.block_stride == target_layout.block_stride == unit
    first_source, first_target, lengths = merge_pairs(source, target, mergeable=mergeable)
    return CopyPlan(
        blocks=len(source),
        source=_address(source_layout, part.local_layer, part.local_head)
        + first_source * source_layout.block_stride,
        target=_address(target_layout, part.remote_layer, part.remote_head)
        + first_target * target_layout.block_stride,
        nbytes=lengths * unit,
        source_steps=steps[0],
        target_steps=steps[1],
    )


def merge_pairs(
    source: Offsets, target: Offsets, *, mergeable: bool = True
) -> tuple[Offsets, Offsets, Offsets]:
    """Maximal runs (first source, first target, length) of pairs that step by one on both sides.
    Raises BadMessage when a target appears twice."""
    order = np.argsort(target, kind="stable")
    source, target = source[order], target[order]
    step = np.diff(target)
    if len(step) and int(step.min()) == 0:
        raise BadMessage("a target block appears twice")
    if not mergeable or not len(source):
        return source, target, np.ones(len(source), np.int64)
    starts = np.flatnonzero(np.concatenate(([True], (step != 1) | (np.diff(source) != 1))))
    return source[starts], target[starts], np.diff(np.append(starts, len(source)))


def checked_ids(ids: Sequence[int], num_blocks: int, what: str) -> Offsets:
    """`ids` as int64, each in [0, num_blocks). Raises BadMessage."""
    try:
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
    except (OverflowError, TypeError, ValueError) as exc:
        raise BadMessage(f"{what} block ids are not block ids: {exc}") from exc
    if len(array):
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= num_blocks:
            bad = low if low < 0 else high
            raise BadMessage(f"{what} block {bad} is outside 0..{num_blocks - 1}")
    return array


def _address(layout: KvLayout, layer: int, head: int) -> int:
    return layout.base_offset + layer * layout.layer_stride + head * layout.head_stride


def _fold(a: KvLayout, b: KvLayout, part: Part) -> tuple[int, tuple[Offsets, Offsets]]:
    """Contiguous bytes per block, and displacements of the (layer, head) pairs not folded in."""
    unit, steps = a.page_bytes, (np.zeros(1, np.int64), np.zeros(1, np.int64))
    dense = True
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
            index = np.arange(count, dtype=np.int64)[:, None]
            steps = (
                (index * a_stride + steps[0]).ravel(),
                (index * b_stride + steps[1]).ravel(),
            )
    return unit, steps


def _cut(
    source: Offsets, target: Offsets, nbytes: Offsets, limit: int
) -> tuple[Offsets, Offsets, Offsets]:
    """Split runs longer than `limit` bytes."""
    pieces = -(-nbytes // limit)
    if not len(pieces) or int(pieces.max()) == 1:
        return source, target, nbytes
    owner = np.repeat(np.arange(len(pieces)), pieces)
    shift = (np.arange(len(owner)) - (np.cumsum(pieces) - pieces)[owner]) * limit
    return (
        source[owner] + shift,
        target[owner] + shift,
        np.minimum(nbytes[owner] - shift, limit),
    )


def _split(flat: Batch, max_bytes: int, max_runs: int) -> Iterator[Batch]:
    ends = np.cumsum(flat.nbytes)
    first, done = 0, 0
    while first < len(ends):
        last = int(np.searchsorted(ends, done + max_bytes, side="right"))
        last = max(first + 1, min(last, first + max_runs))
        yield Batch(flat.source[first:last], flat.target[first:last], flat.nbytes[first:last])
        first, done = last, int(ends[last - 1])
