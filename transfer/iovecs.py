"""Arithmetic on run lists ([n, 2] u64: address, bytes): cut where another list cuts. Pure.

Both sides of a batch have the same bytes in the same order, cut differently. Who moves them needs
pairs of equal length, or messages of lengths that both sides know.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Iovec: TypeAlias = NDArray[np.uint64]
Ends: TypeAlias = NDArray[np.int64]


def ends_of(iovec: Iovec) -> Ends:
    """Where each run ends in the stream of bytes."""
    return np.cumsum(iovec[:, 1].astype(np.int64))


def pairs(ours: Iovec, theirs: Iovec) -> tuple[Iovec, Iovec]:
    """Both lists (no empty runs, equal totals) cut into runs of pairwise equal lengths."""
    ends_a, ends_b = ends_of(ours), ends_of(theirs)
    ends = np.union1d(ends_a, ends_b)
    return _cut_at(ours, ends_a, ends), _cut_at(theirs, ends_b, ends)


def _cut_at(iovec: Iovec, own_ends: Ends, ends: Ends) -> Iovec:
    """`iovec` cut at `ends`, which hold its own."""
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    run = np.searchsorted(own_ends, starts, side="right")
    run_starts = own_ends - iovec[:, 1].astype(np.int64)
    cut = np.empty((len(ends), 2), np.uint64)
    cut[:, 0] = iovec[run, 0] + (starts - run_starts[run]).astype(np.uint64)
    cut[:, 1] = (ends - starts).astype(np.uint64)
    return cut


def messages(iovec: Iovec, step: int) -> list[Iovec]:
    """The stream cut every `step` bytes: the runs of each piece. The piece's length is the same on
    both sides; a piece of one run is contiguous here."""
    own_ends = ends_of(iovec)
    total = int(own_ends[-1])
    cuts = np.union1d(own_ends, np.arange(step, total, step, dtype=np.int64))
    pieces = _cut_at(iovec, own_ends, cuts)
    borders = np.searchsorted(cuts, np.arange(step, total, step), side="left") + 1
    return np.split(pieces, borders)
