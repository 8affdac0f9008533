"""Planning against a naive oracle that walks pages one by one, and copying what was planned."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.errors import IncompatibleError
from pullfill.transfer.contract import KvLayout, Rect
from pullfill.transfer.layout import check_bounds, crop, dense_layout
from pullfill.transfer.runs import (
    Copies,
    Iovec,
    Planner,
    Rows,
    pairs,
    pieces,
    size_of,
)
from tests.support.transfer_rigs import (
    PAGE,
    extent,
)


@st.composite
def layouts(draw: st.DrawFn, layers: int, heads: int, page: int) -> KvLayout:
    """Any order of (layer, block, head), any gaps."""
    blocks = draw(st.integers(1, 9))
    counts = {"layer": layers, "block": blocks, "head": heads}
    strides = {}
    span = page
    for name in draw(st.permutations(sorted(counts))):
        strides[name] = span + draw(st.sampled_from([0, 0, 0, 3]))
        span = strides[name] * counts[name]
    return KvLayout(
        base_offset=draw(st.sampled_from([0, 7])),
        num_layers=layers,
        num_blocks=blocks,
        num_kv_heads=heads,
        page_bytes=page,
        layer_stride=strides["layer"],
        block_stride=strides["block"],
        head_stride=strides["head"],
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[KvLayout, KvLayout, list[int], list[int]]:
    layers, heads, page = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    source, target = draw(layouts(layers, heads, page)), draw(layouts(layers, heads, page))
    if draw(st.booleans()):  # one run
        size = draw(st.integers(1, min(source.num_blocks, target.num_blocks)))
        s, t = (draw(st.integers(0, side.num_blocks - size)) for side in (source, target))
        return source, target, [*range(s, s + size)], [*range(t, t + size)]
    targets = draw(st.lists(st.integers(0, target.num_blocks - 1), unique=True, max_size=9))
    size = len(targets)
    sources = draw(
        st.lists(st.integers(0, source.num_blocks - 1), min_size=size, max_size=size)
    )  # fmt: skip
    return source, target, sources, targets


def at(layout: KvLayout, layer: int, block: int, head: int) -> int:
    return (
        layout.base_offset
        + layer * layout.layer_stride
        + block * layout.block_stride
        + head * layout.head_stride
    )


def byte_map(
    source: KvLayout, target: KvLayout, sources: list[int], targets: list[int]
) -> dict[int, int]:
    """target byte -> source byte, the slow and obvious way."""
    moved = {}
    for layer, head in itertools.product(range(source.num_layers), range(source.num_kv_heads)):
        for s, t in zip(sources, targets, strict=True):
            for i in range(source.page_bytes):
                moved[at(target, layer, t, head) + i] = at(source, layer, s, head) + i
    return moved


def planned_map(batches: Iterable[Copies]) -> dict[int, int]:
    moved = {}
    for batch in batches:
        for s, t, n in zip(*batch.flat(), strict=True):
            for i in range(int(n)):
                assert int(t) + i not in moved, "a byte is written twice"
                moved[int(t) + i] = int(s) + i
    return moved


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(1, 40), st.integers(1, 7))
def test_plan_moves_exactly_the_oracles_bytes(
    case: tuple[KvLayout, KvLayout, list[int], list[int]], max_bytes: int, max_runs: int
) -> None:
    source, target, sources, targets = case
    check_bounds(source, extent(source))
    check_bounds(target, extent(target))
    todo = Planner(source, target).plan(sources, targets)
    expected = byte_map(source, target, sources, targets)
    assert todo.total == len(expected)
    limits = (max_bytes, max_runs)
    assert planned_map(todo.batches()) == expected
    assert planned_map(todo.batches(*limits)) == expected
    for batch in todo.batches(*limits):
        _, _, nbytes = batch.flat()
        assert 1 <= len(nbytes) <= max_runs
        assert nbytes.sum() == batch.total <= max_bytes


def test_long_runs_are_cut_at_pages() -> None:
    """The GPU's kernel moves only what 16 divides."""
    todo = Copies([64], [128], [1 << 20], Rows((3,), (1 << 21,), (1 << 22,)))
    cut = list(todo.batches(100_000, 32))
    assert len(cut) > 1
    for batch in cut:
        assert not np.any(np.concatenate(batch.flat()) % 16)
        assert batch.total <= 100_000


def content(iovec: Iovec) -> bytes:
    return b"".join(ctypes.string_at(address, nbytes) for address, nbytes in iovec.tolist())


def test_a_part_beyond_its_region_is_refused() -> None:
    """A peer names the part in its hello."""
    layout = dense_layout(8, 40, 4, PAGE)
    assert crop(layout, Rect(3, 1, 7, 1)).num_layers == 1
    for part in (Rect(3, 2, 0, 8), Rect(0, 4, 7, 2), Rect(-1, 1, 0, 1), Rect(0, 0, 0, 8)):
        with pytest.raises(IncompatibleError):
            crop(layout, part)


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
    assert b"".join(content(piece) for piece in made) == content(iovec)
    totals = [size_of(piece) for piece in made]
    assert all(total == step for total in totals[:-1])
    assert 0 < totals[-1] <= step
    assert all(int(piece[:, 1].min()) > 0 for piece in made)
