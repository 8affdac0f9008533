"""Run lists cut against each other: same bytes, same order, equal lengths."""

from __future__ import annotations

import ctypes

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.transfer.runs import Iovec, pairs, pieces

lengths = st.lists(st.integers(1, 50), min_size=1, max_size=20)


def laid(data: np.ndarray, sizes: list[int], seed: int) -> Iovec:
    """Runs of `sizes` at places of `data` (each of its bytes once), in an order of their own."""
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    order = np.random.default_rng(seed).permutation(len(sizes))
    iovec = np.empty((len(sizes), 2), np.uint64)
    iovec[:, 0] = data.ctypes.data + starts[order]
    iovec[:, 1] = np.array(sizes)[order]
    return iovec


def content(iovec: Iovec) -> bytes:
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in iovec.tolist())


def fitting(sizes: list[int], total: int) -> list[int]:
    """`sizes` made to sum up to `total`."""
    ends = sorted({min(end, total) for end in np.cumsum(sizes).tolist()} | {total})
    return np.diff([0, *ends]).tolist()


@settings(max_examples=150, derandomize=True, deadline=None)
@given(a=lengths, b=lengths, seed=st.integers(0, 99))
def test_pairs_have_equal_lengths_and_lose_nothing(a: list[int], b: list[int], seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, sum(a), dtype=np.uint8)
    other = np.random.default_rng(seed + 1).integers(0, 256, sum(a), dtype=np.uint8)
    ours, theirs = laid(data, a, seed), laid(other, fitting(b, sum(a)), seed)
    left, right = pairs(ours, theirs)
    assert left[:, 1].tolist() == right[:, 1].tolist()
    assert int(left[:, 1].min()) > 0
    assert content(left) == content(ours)
    assert content(right) == content(theirs)
    assert len(left) < len(ours) + len(theirs), "cut no more often than the two lists are"


@settings(max_examples=150, derandomize=True, deadline=None)
@given(sizes=lengths, step=st.integers(1, 200), seed=st.integers(0, 99))
def test_pieces_are_cut_at_the_same_places_whatever_the_runs(
    sizes: list[int], step: int, seed: int
) -> None:
    data = np.random.default_rng(seed).integers(0, 256, sum(sizes), dtype=np.uint8)
    iovec = laid(data, sizes, seed)
    made = list(pieces(iovec, step))
    assert b"".join(content(piece.iovec) for piece in made) == content(iovec)
    totals = [int(piece.iovec[:, 1].sum()) for piece in made]
    assert totals == [piece.total for piece in made]
    assert all(total == step for total in totals[:-1])
    assert 0 < totals[-1] <= step
    assert all(int(piece.iovec[:, 1].min()) > 0 for piece in made)


def test_a_contiguous_piece_is_one_run() -> None:
    iovec = np.array([[1000, 30], [5000, 10]], np.uint64)
    assert [len(piece.iovec) for piece in pieces(iovec, 10)] == [1, 1, 1, 1]
    assert [len(piece.iovec) for piece in pieces(iovec, 40)] == [2]
