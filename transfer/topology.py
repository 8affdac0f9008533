"""Which rank sends what to which rank when two workers split the model in different ways. Pure.

Every rank holds a rectangle of the model's KV: some KV heads of some layers (`contract.Rect`).
Tensor parallelism splits the heads. With more ranks than KV heads, several ranks hold the same head
(MLA has one "head", which every rank holds). Pipeline parallelism splits the layers. `plan` fills
the rectangle of every target rank from source ranks. Source ranks that hold the same share the
work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pullfill.errors import BadMessage, IncompatibleError
from pullfill.transfer.contract import Rect
from pullfill.transfer.layout import rect_of
from pullfill.wire import RegionDescriptor


@dataclass(frozen=True, slots=True)
class Route:
    """`part` of each block goes from rank `source` to rank `target`."""

    source: int
    target: int
    part: Rect


def head_range(total_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """(first KV head, number of them) of a tensor-parallel rank, as vLLM splits them. Raises
    IncompatibleError where neither number divides the other."""
    if total_heads % tp_size and tp_size % total_heads:
        raise IncompatibleError(
            f"{total_heads} KV heads cannot be split over {tp_size} tensor-parallel ranks",
            field="num_kv_heads",
        )
    return tp_rank * total_heads // tp_size, max(1, total_heads // tp_size)


def rects_described(descriptors: Sequence[RegionDescriptor]) -> list[Rect]:
    """What the ranks of another worker hold.

    descriptors: of all its ranks, in order. Raises BadMessage when they are not the ranks of one
    worker."""
    size = len(descriptors)
    for rank, found in enumerate(descriptors):
        whole = (found.rank, found.world_size) == (rank, size)
        if not whole or found.incarnation != descriptors[0].incarnation:
            raise BadMessage(
                f"descriptor {rank} of {found.instance_id} says rank {found.rank} of "
                f"{found.world_size}, incarnation {found.incarnation[:8]}: {size} of one expected"
            )
    return [rect_of(descriptor) for descriptor in descriptors]


def plan(sources: Sequence[Rect], targets: Sequence[Rect]) -> list[Route]:
    """Routes that fill the whole rectangle of every target, each byte once. Where several sources
    hold the same, target `t` takes the `t`-th of them. Raises IncompatibleError, which names the
    heads and layers that no source holds."""
    routes: list[Route] = []
    for index, target in enumerate(targets):
        for first_layer, end_layer in _bands(sources, target):
            routes += _cover(sources, index, target, first_layer, end_layer)
    return routes


def _bands(sources: Sequence[Rect], target: Rect) -> Iterator[tuple[int, int]]:
    """The target's layers, cut wherever a source's layers begin or end."""
    cuts = {target.first_layer, target.end_layer}
    for source in sources:
        cuts |= {source.first_layer, source.end_layer}
    inside = sorted(c for c in cuts if target.first_layer <= c <= target.end_layer)
    yield from pairwise(inside)


def _cover(
    sources: Sequence[Rect], index: int, target: Rect, first_layer: int, end_layer: int
) -> Iterator[Route]:
    head = target.first_head
    while head < target.end_head:
        holders = [
            i
            for i, s in enumerate(sources)
            if s.first_head <= head < s.end_head
            and s.first_layer <= first_layer
            and end_layer <= s.end_layer
        ]
        if not holders:
            raise IncompatibleError(
                f"no rank has KV head {head} of layers {first_layer}..{end_layer - 1}, which rank "
                f"{index} of the other worker needs: the two do not run the same model",
                field="num_kv_heads",
            )
        chosen = holders[index % len(holders)]
        heads = min(sources[chosen].end_head, target.end_head) - head
        yield Route(chosen, index, Rect(head, heads, first_layer, end_layer - first_layer))
        head += heads
