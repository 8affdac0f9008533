"""Blocks of different sizes on the two sides, over every transport: pieces of blocks are moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import gcd
from pathlib import Path

import numpy as np
import pytest

from pullfill.errors import BadMessage, Fenced, IncompatibleError
from pullfill.transfer.block_reader import BlockReader
from pullfill.transfer.contract import KvLayout, Rect
from pullfill.transfer.layout import dense_layout
from pullfill.transfer.pieces import cut_memory
from tests.support.transfer_rigs import (
    RIGS,
    Bytes,
    Local,
    Region,
    Rig,
    assert_same,
    memory_over,
    random_bytes,
)

GUARDED = ("loopback", "nccl", "nixl", "tcp")
"""Where the owner refuses blocks that the grant does not name."""
SECTIONS = ((6, 4), (1, 24))
"""As on a CPU: K by column, then V by token."""
LATENT = ((1, 48),)
"""As with MLA: token by token."""
Sections = tuple[tuple[int, int], ...]
UNIT, UNITS = 48, 96
SIZES = [(3, 2), (2, 3), (1, 4), (4, 1), (6, 4)]
"""Units of a page here, and there."""


@pytest.fixture(params=sorted(RIGS))
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Rig:
    return RIGS[request.param](tmp_path)


def sized(units: int, gap: int = 0, sections: Sections = SECTIONS) -> KvLayout:
    """A cache of UNITS units. gap: bytes after each block."""
    layout = dense_layout(3, UNITS // units, 1 if sections is LATENT else 2, UNIT * units)
    block = layout.block_stride + gap
    return replace(
        layout, units=units, sections=sections, block_stride=block,
        layer_stride=block * layout.num_blocks,
    )  # fmt: skip


def pieces(held: Region | Local, of_units: int) -> Bytes:
    """A copy of all pieces, [layer, piece, head, byte], the slow and obvious way."""
    layout, found = held.memory.layout, []
    for first in range(0, layout.units, of_units):
        parts, at = [], 0
        for rows, nbytes in layout.sections:
            for _ in range(rows):
                begin = at + first * nbytes
                parts.append(held.pages[..., begin : begin + of_units * nbytes])
                at += nbytes * layout.units
        found.append(np.concatenate(parts, axis=-1))
    layers, blocks, heads, nbytes = found[0].shape
    stacked = np.stack(found, axis=2).reshape(layers, blocks * len(found), heads, nbytes)
    return np.ascontiguousarray(stacked)


def some(seed: int, count: int, of: int) -> list[int]:
    chosen: list[int] = np.random.default_rng(seed).permutation(of)[:count].tolist()
    return chosen


@pytest.fixture
def closing() -> Iterator[list[Region]]:
    regions: list[Region] = []
    yield regions
    for region in regions:
        region.owner.close()


@pytest.mark.parametrize("sections", [SECTIONS, LATENT], ids=["heads", "latent"])
@pytest.mark.parametrize(("here", "there"), SIZES)
def test_pieces_are_written_and_read(
    rig: Rig, here: int, there: int, sections: Sections, closing: list[Region]
) -> None:
    region, mine = rig.region(sized(there, 13, sections)), rig.local(sized(here, 0, sections))
    closing.append(region)
    common, heads = gcd(here, there), mine.memory.layout.num_kv_heads
    count, ours, theirs = UNITS // common, here // common, there // common
    session = rig.connect(mine, region)
    before, source, target = pieces(region, common), some(1, 13, count), some(2, 13, count)
    token = region.owner.fences.open(sorted({piece // theirs for piece in target}))
    result = session.write_blocks(token, source, target)
    assert (result.blocks, result.nbytes) == (13, 13 * 3 * heads * UNIT * common)
    expected = before.copy()
    expected[:, target] = pieces(mine, common)[:, source]
    assert_same(pieces(region, common), expected)

    plain = replace(mine.memory, device=None)  # what stands for a GPU here is plain memory
    digests = BlockReader(cut_memory(region.memory, theirs))
    assert (
        digests.pages(target).tobytes()
        == BlockReader(cut_memory(plain, ours)).pages(source).tobytes()
    )
    assert (digests.pages(target) != digests.pages(target[::-1])).any()

    before = pieces(mine, common)
    session.read_blocks(token, target[:5], source[5:10])
    expected = before.copy()
    expected[:, source[5:10]] = pieces(region, common)[:, target[:5]]
    assert_same(pieces(mine, common), expected)
    assert region.owner.fences.try_revoke(token)
    with pytest.raises(Fenced):
        session.write_blocks(token, source, target)
    session.close()


def test_a_part_of_the_heads_moves_alone(rig: Rig, closing: list[Region]) -> None:
    region, mine = rig.region(sized(2)), rig.local(sized(3))
    closing.append(region)
    before, part = pieces(region, 1), Rect(1, 1, 1, 2)
    session = rig.transport.connect(mine.memory, region.descriptor, part)
    token = region.owner.fences.open([4, 5])
    session.write_blocks(token, [7, 8, 9, 10], [8, 9, 10, 11])
    session.close()
    expected = before.copy()
    expected[1:, 8:12, 1] = pieces(mine, 1)[1:, 7:11, 1]
    assert_same(pieces(region, 1), expected)


def test_what_a_grant_does_not_name_is_refused(rig: Rig, closing: list[Region]) -> None:
    region, mine = rig.region(sized(3)), rig.local(sized(1))
    closing.append(region)
    session = rig.connect(mine, region)
    token = region.owner.fences.open([5])
    before = pieces(region, 1)
    outside = [[UNITS], [-1]]
    if rig.name in GUARDED:  # where the peer maps the memory, it keeps to its grant by itself
        outside += [[14], [18], [15, 16, 17, 18]]
    for target in outside:
        with pytest.raises(BadMessage):
            session.write_blocks(token, [0] * len(target), target)
    with pytest.raises(BadMessage, match="twice"):
        session.write_blocks(token, [0, 1], [15, 15])
    assert_same(pieces(region, 1), before)
    session.write_blocks(token, [0, 1, 2], [15, 16, 17])
    session.close()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"sections": ()}, BadMessage),
        ({"units": 5}, BadMessage),
        ({"sections": ((6, 5), (1, 24))}, BadMessage),
        ({"sections": ((1, 48),)}, IncompatibleError),
    ],
)
def test_a_descriptor_that_does_not_fit_is_refused(
    rig: Rig, changes: dict[str, object], error: type[Exception], closing: list[Region]
) -> None:
    region, mine = rig.region(sized(3)), rig.local(sized(1))
    closing.append(region)
    with pytest.raises(error):
        rig.connect(mine, region, **changes)


def test_blocks_that_cannot_be_cut_are_refused(rig: Rig, closing: list[Region]) -> None:
    whole = dense_layout(3, 32, 2, UNIT * 3)
    region, mine = rig.region(whole), rig.local(sized(1))
    closing.append(region)
    with pytest.raises(IncompatibleError, match="block"):
        rig.connect(mine, region)


def test_a_digest_does_not_depend_on_the_size_of_the_blocks() -> None:
    data = random_bytes(sized(6).layer_stride * 3, 3)
    held = Local(data, memory_over(data, sized(6)))
    by_one = BlockReader(cut_memory(held.memory, 6)).pages(range(12)).tobytes()
    copy = np.zeros_like(data)
    other = Local(copy, memory_over(copy, sized(1)))
    other.pages[:] = pieces(held, 1)
    assert by_one == BlockReader(other.memory).pages(range(12)).tobytes()
