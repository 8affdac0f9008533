"""Which rank sends what to which rank when two workers split the model in different ways. Pure.

Every rank's region is a rectangle: some KV heads of some layers, in the model's own numbering.
Tensor parallelism splits heads and, with more ranks than KV heads, gives several ranks the same
head (MLA: one "head" that every rank has); pipeline parallelism splits layers. `plan` covers every
target rank's whole rectangle from source ranks. Ranks that hold the same thing share the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pullfill.errors import BadMessage, IncompatibleError
from pullfill.transfer.contract import LocalMemory, Part
from pullfill.wire import RegionDescriptor


@dataclass(frozen=True, slots=True)
class Rect:
    """What one rank holds: `heads` KV heads from `first_head`, of `layers` layers from
    `first_layer`."""

    first_head: int
    heads: int
    first_layer: int
    layers: int

    @property
    def end_head(self) -> int:
        return self.first_head + self.heads

    @property
    def end_layer(self) -> int:
        return self.first_layer + self.layers


@dataclass(frozen=True, slots=True)
class Route:
    """`part` of the blocks goes from rank `source` to rank `target` (`part.local`: the source)."""

    source: int
    target: int
    part: Part


def head_range(total_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """(first KV head, number of them) of a tensor-parallel rank, as vLLM splits them. Raises
    IncompatibleError where neither number divides the other."""
    if total_heads % tp_size and tp_size % total_heads:
        raise IncompatibleError(
            f"{total_heads} KV heads cannot be split over {tp_size} tensor-parallel ranks",
            field="num_kv_heads",
        )
    return tp_rank * total_heads // tp_size, max(1, total_heads // tp_size)


def rects_of(memories: Sequence[LocalMemory]) -> list[Rect]:
    """What this worker's ranks hold."""
    return [
        Rect(m.first_head, m.layout.num_kv_heads, m.first_layer, m.layout.num_layers)
        for m in memories
    ]


def rects_described(descriptors: Sequence[RegionDescriptor]) -> list[Rect]:
    """What another worker's ranks hold; `descriptors` of all its ranks in order. Raises
    BadMessage when they are not the ranks of one worker."""
    size = len(descriptors)
    for rank, found in enumerate(descriptors):
        whole = (found.rank, found.world_size) == (rank, size)
        if not whole or found.incarnation != descriptors[0].incarnation:
            raise BadMessage(
                f"descriptor {rank} of {found.instance_id} says rank {found.rank} of "
                f"{found.world_size}, incarnation {found.incarnation[:8]}: {size} of one expected"
            )
    return [Rect(d.first_head, d.num_kv_heads, d.first_layer, d.num_layers) for d in descriptors]


def plan(sources: Sequence[Rect], targets: Sequence[Rect]) -> list[Route]:
    """Routes that fill every target rank's whole rectangle, each byte of it once. Where several
    sources hold the same, target `t` takes the `t`-th of them. Raises IncompatibleError naming the
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
        source = sources[chosen]
        heads = min(source.end_head, target.end_head) - head
        yield Route(
            chosen,
            index,
            Part(
                local_head=head - source.first_head,
                remote_head=head - target.first_head,
                heads=heads,
                local_layer=first_layer - source.first_layer,
                remote_layer=first_layer - target.first_layer,
                layers=end_layer - first_layer,
            ),
        )
        head += heads
