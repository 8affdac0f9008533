"""Both sides of a stream must cut the same bytes at the same places, whatever their layouts."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.transfer.contract import KvLayout, LocalMemory, Rect
from pullfill.transfer.layout import crop, dense_layout, part_of
from pullfill.transfer.runs import Iovec, Runs, pairs, pieces, stream_of
from tests.support.transfer_rigs import LAYOUTS, PAGE, extent, memory_over, pages, random_bytes


def content(iovec: Iovec) -> bytes:
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in iovec.tolist())


def gather(runs: Runs) -> bytes:
    assert (runs.iovec.dtype, runs.iovec.flags.c_contiguous) == (np.uint64, True)
    found = content(runs.iovec)
    assert len(found) == runs.total
    return found


def expected(data: np.ndarray, layout: KvLayout, part: Rect, blocks: list[int]) -> bytes:
    """Layer, block, head, page: the definition."""
    view = pages(data, layout)
    heads = slice(part.first_head, part.end_head)
    return b"".join(
        view[layer, block, heads].tobytes()
        for layer in range(part.first_layer, part.end_layer)
        for block in blocks
    )


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    blocks=st.lists(st.integers(0, 39), min_size=1, max_size=40, unique=True),
    head=st.sampled_from([(0, 1), (1, 1), (0, 2)]),
    layer=st.sampled_from([(0, 1), (2, 1), (1, 2), (0, 3)]),
    batch=st.integers(1, 4 * PAGE),
)
def test_batches_are_the_stream_cut_at_fixed_places(
    name: str, blocks: list[int], head: tuple[int, int], layer: tuple[int, int], batch: int
) -> None:
    layout = LAYOUTS[name]
    data = random_bytes(extent(layout), 1)
    part = Rect(*head, *layer)
    stream = stream_of(part_of(memory_over(data, layout), part), np.array(blocks))
    made = list(pieces(stream.iovec, batch))
    want = expected(data, layout, part, blocks)
    assert stream.total == len(want)
    assert b"".join(gather(runs) for runs in made) == want
    assert all(runs.total == batch for runs in made[:-1])
    assert 0 < made[-1].total <= batch


@pytest.mark.parametrize(
    ("layout", "blocks", "runs"),
    [
        (dense_layout(3, 40, 2, PAGE), range(10, 30), 3),
        (dense_layout(3, 40, 2, PAGE), [4, 5, 9], 6),
        (LAYOUTS["padded-heads"], [4, 5], 12),
        (LAYOUTS["head-outermost"], [4, 5], 12),
    ],
)
def test_runs_are_merged_where_memory_is_contiguous(
    layout: KvLayout, blocks: list[int], runs: int
) -> None:
    memory = LocalMemory(address=1 << 40, nbytes=1 << 30, layout=layout)
    assert len(stream_of(memory, np.array(blocks)).iovec) == runs


def test_a_part_is_counted_from_what_its_region_begins_with() -> None:
    part, region = Rect(5, 2, 7, 4), Rect(4, 4, 4, 8)
    assert part.within(region) == Rect(1, 2, 3, 4)
    layout = dense_layout(8, 40, 4, PAGE)
    memory = LocalMemory(1 << 40, 1 << 30, layout, first_head=4, first_layer=4)
    assert memory.rect == region
    moved = part_of(memory, part)
    assert moved.rect == part
    assert moved.layout == crop(layout, Rect(1, 2, 3, 4))
    assert moved.layout.base_offset == 3 * layout.layer_stride + PAGE


lengths = st.lists(st.integers(1, 50), min_size=1, max_size=20)


def laid(data: np.ndarray, sizes: list[int], seed: int) -> Iovec:
    """Runs of `sizes` at places of `data` (each of its bytes once), in an order of their own."""
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    order = np.random.default_rng(seed).permutation(len(sizes))
    iovec = np.empty((len(sizes), 2), np.uint64)
    iovec[:, 0] = data.ctypes.data + starts[order]
    iovec[:, 1] = np.array(sizes)[order]
    return iovec


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
