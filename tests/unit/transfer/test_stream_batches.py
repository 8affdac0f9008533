"""Both sides of a stream must cut the same bytes at the same places, whatever their layouts."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pullfill.transfer.contract import KvLayout, LocalMemory, Rect
from pullfill.transfer.layout import crop, dense_layout, part_of
from pullfill.transfer.runs import ByteStream, Runs
from tests.support.transfer_rigs import LAYOUTS, PAGE, extent, memory_over, pages, random_bytes


def gather(runs: Runs) -> bytes:
    assert runs.iovec.dtype == np.uint64
    assert runs.iovec.flags.c_contiguous
    parts = [ctypes.string_at(address, nbytes) for address, nbytes in runs.iovec.tolist()]
    assert sum(map(len, parts)) == runs.total
    return b"".join(parts)


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
    stream = ByteStream(part_of(memory_over(data, layout), part), np.array(blocks))
    made = list(stream.batches(batch))
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
    assert ByteStream(memory, np.array(blocks)).runs == runs


def test_nothing_is_nothing() -> None:
    memory = LocalMemory(address=1 << 40, nbytes=1 << 30, layout=LAYOUTS["dense"])
    empty = ByteStream(memory, np.array([], np.int64))
    assert (empty.total, list(empty.batches(PAGE))) == (0, [])


def test_many_layers_are_expanded_in_groups_that_do_not_show() -> None:
    layout = dense_layout(3000, 40, 1, 16)  # more runs than are expanded at a time
    data = random_bytes(extent(layout), 2)
    blocks = list(range(0, 40, 2))
    memory = memory_over(data, layout)
    stream = ByteStream(memory, np.array(blocks))
    made = b"".join(gather(runs) for runs in stream.batches(10_001))
    assert made == expected(data, layout, memory.rect, blocks)


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
