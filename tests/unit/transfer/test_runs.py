"""Planning against a naive oracle that walks pages one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.errors import BadMessage
from pullfill.transfer.contract import KvLayout
from pullfill.transfer.layout import check_bounds, dense_layout
from pullfill.transfer.runs import SINGLE, Batch, Rows, merge_pairs, plan
from tests.support.transfer_rigs import extent


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


def planned_map(batches: Iterable[Batch]) -> dict[int, int]:
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
    todo = plan(source, target, sources, targets)
    expected = byte_map(source, target, sources, targets)
    assert todo.total == len(expected)
    limits = (max_bytes, max_runs)
    assert planned_map(todo.batches()) == expected
    assert planned_map(todo.batches(*limits)) == expected
    for batch in todo.batches(*limits):
        _, _, nbytes = batch.flat()
        assert 1 <= len(nbytes) <= max_runs
        assert nbytes.sum() == batch.total <= max_bytes


def test_a_block_stays_together_over_its_layers() -> None:
    layout = dense_layout(4, 100, 2, 1024)
    (batch,) = plan(layout, layout, [7, 3], [9, 5]).batches()
    assert (len(batch), batch.rows.counts, batch.total) == (2, (4,), 2 * 4 * 2048)
    assert batch.target == [5 * 2048, 9 * 2048]
    halves = list(plan(layout, layout, [7, 3], [9, 5]).batches(max_bytes=8192))
    assert [(len(b), b.rows.counts) for b in halves] == [(1, (4,)), (1, (4,))]
    layers = list(plan(layout, layout, [7, 3], [9, 5]).batches(max_bytes=4096))
    assert [(len(b), b.rows.counts) for b in layers] == [(1, (2,))] * 4


def test_rows_are_split_within_the_outermost_dimension_that_is_too_long() -> None:
    rows = Rows((2, 5), (1000, 10), (2000, 20))
    pieces = list(rows.split(2))
    assert [(s, t, r.counts) for s, t, r in pieces] == [
        (0, 0, (2,)), (20, 40, (2,)), (40, 80, (1,)),
        (1000, 2000, (2,)), (1020, 2040, (2,)), (1040, 2080, (1,)),
    ]  # fmt: skip
    assert [r.counts for _, _, r in rows.split(5)] == [(1, 5), (1, 5)]
    assert list(rows.split(10)) == [(0, 0, rows)]
    assert list(SINGLE.split(1)) == [(0, 0, SINGLE)]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), unique_by=lambda p: p[1]))
def test_merged_runs_are_maximal_and_complete(pairs: list[tuple[int, int]]) -> None:
    source = np.array([s for s, _ in pairs], np.int64)
    target = np.array([t for _, t in pairs], np.int64)
    runs = list(zip(*(a.tolist() for a in merge_pairs(source, target)), strict=True))
    expanded = [(s + i, t + i) for s, t, n in runs for i in range(n)]
    assert sorted(expanded) == sorted(pairs)
    starts = {(s, t) for s, t, _ in runs}
    assert all((s + n, t + n) not in starts for s, t, n in runs)


def test_everything_dense_is_one_copy() -> None:
    # All layers of a block side by side, then the next block.
    layout = KvLayout(0, 3, 10, 2, 64, layer_stride=128, block_stride=384, head_stride=64)
    todo = plan(layout, layout, range(10), range(10))
    assert (len(todo.nbytes), todo.rows.count) == (1, 1)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([0], [9]),
        ([9], [0]),
        ([-1], [0]),
        ([0, 1], [0]),
        ([0, 1], [2, 2]),
        ([1 << 70], [0]),
        ([7, 8, 9], [0, 1, 2]),
        ([0, 1, 2], [7, 8, 9]),
        ([-1, 0], [0, 1]),
        ([0, 1], [-1, 0]),
    ],
)
def test_bad_ids_plan_nothing(source: list[int], target: list[int]) -> None:
    layout = dense_layout(1, 9, 1, 16)
    with pytest.raises(BadMessage):
        plan(layout, layout, source, target)


def test_overlapping_or_empty_layouts_are_refused() -> None:
    good = dense_layout(2, 4, 2, 16)
    check_bounds(good, extent(good))
    for bad in (
        dense_layout(0, 4, 2, 16),
        KvLayout(0, 2, 4, 2, 16, layer_stride=64, block_stride=32, head_stride=16),
        KvLayout(0, 2, 4, 2, 16, layer_stride=128, block_stride=32, head_stride=8),
        KvLayout(-1, 2, 4, 2, 16, layer_stride=128, block_stride=32, head_stride=16),
    ):
        with pytest.raises(BadMessage):
            check_bounds(bad, 1 << 20)
    with pytest.raises(BadMessage):
        check_bounds(good, extent(good) - 1)
