"""Where pages are, and which rank sends what to which rank. Pure.

A layout from the network is checked here once. The code that computes addresses from it then needs
no checks of its own.

Every rank holds a rectangle of the model's KV (`contract.Rect`): tensor parallelism splits the
heads, pipeline parallelism the layers. `plan_routes` connects workers that split in different ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise, product
from typing import NamedTuple

from pullfill.errors import BadMessage, IncompatibleError
from pullfill.transfer.contract import KvLayout, LocalMemory, Rect
from pullfill.wire import RegionDescriptor


def layout_of(descriptor: RegionDescriptor) -> KvLayout:
    """The layout of a described region. Raises BadMessage unless all of it is inside the region."""
    layout = KvLayout(*(getattr(descriptor, field.name) for field in fields(KvLayout)))
    check_bounds(layout, descriptor.nbytes)
    return layout


def rect_of(descriptor: RegionDescriptor) -> Rect:
    """What a described region holds of the whole model."""
    return Rect(
        descriptor.first_head,
        descriptor.num_kv_heads,
        descriptor.first_layer,
        descriptor.num_layers,
    )


def dense_layout(
    num_layers: int, num_blocks: int, num_kv_heads: int, page_bytes: int, base_offset: int = 0
) -> KvLayout:
    """A layout without gaps, in the order that all workers use: layer, block, head, page."""
    return KvLayout(
        base_offset=base_offset,
        num_layers=num_layers,
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        page_bytes=page_bytes,
        layer_stride=num_blocks * num_kv_heads * page_bytes,
        block_stride=num_kv_heads * page_bytes,
        head_stride=page_bytes,
    )


def check_bounds(layout: KvLayout, nbytes: int) -> None:
    """Raise BadMessage unless every page is in [0, nbytes) and no two pages overlap."""
    dims = [
        (layout.num_layers, layout.layer_stride, "layer"),
        (layout.num_blocks, layout.block_stride, "block"),
        (layout.num_kv_heads, layout.head_stride, "head"),
    ]
    if layout.base_offset < 0 or layout.page_bytes < 1 or any(n < 1 for n, _, _ in dims):
        raise BadMessage(f"layout has an empty or negative dimension: {layout}")
    # Sorted by stride, each dimension must step over everything the smaller ones span.
    span = layout.page_bytes
    for count, stride, name in sorted(dims, key=lambda d: d[1]):
        if count == 1:
            continue
        if stride < span:
            raise BadMessage(f"{name}_stride {stride} overlaps pages below it ({span} bytes)")
        span += (count - 1) * stride
    if layout.base_offset + span > nbytes:
        raise BadMessage(f"layout ends at {layout.base_offset + span}, region has {nbytes} bytes")


def crop(layout: KvLayout, rect: Rect) -> KvLayout:
    """The layout of some heads and layers of a region.

    rect: counted from the region's first head and layer. Raises IncompatibleError when it is not
    inside."""
    for field, first, count, there in (
        ("num_kv_heads", rect.first_head, rect.heads, layout.num_kv_heads),
        ("num_layers", rect.first_layer, rect.layers, layout.num_layers),
    ):
        if first < 0 or count < 1 or first + count > there:
            raise IncompatibleError(
                f"{field}: {first}..{first + count} of {there}: the two workers split the model "
                "in ways that do not fit",
                field=field,
            )
    return replace(
        layout,
        base_offset=layout.base_offset
        + rect.first_layer * layout.layer_stride
        + rect.first_head * layout.head_stride,
        num_layers=rect.layers,
        num_kv_heads=rect.heads,
    )


def both_sides(
    local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None
) -> tuple[LocalMemory, KvLayout]:
    """What a session moves: our memory and the owner's layout, each without what is not in `part`.

    part: None: all that we hold.

    Raises BadMessage when a layout does not fit its memory, IncompatibleError, which names the
    field, when the two sides do not hold the same."""
    theirs = layout_of(descriptor)
    check_bounds(local.layout, local.nbytes)
    if local.layout.page_bytes != theirs.page_bytes:
        raise IncompatibleError(
            f"KV memory differs in page_bytes: ours {local.layout.page_bytes}, theirs "
            f"{theirs.page_bytes}; both workers need the same model, dtype, KV cache dtype and "
            "block size",
            field="page_bytes",
        )
    part = part or local.rect
    ours = crop(local.layout, part.within(local.rect))
    local = replace(local, layout=ours, first_head=part.first_head, first_layer=part.first_layer)
    return local, crop(theirs, part.within(rect_of(descriptor)))


class Route(NamedTuple):
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


def plan_routes(sources: Sequence[Rect], targets: Sequence[Rect]) -> list[Route]:
    """Routes that fill the whole rectangle of every target, each byte once. Where several sources
    hold the same, target `t` takes the `t`-th of them. Raises IncompatibleError, which names the
    heads and layers that no source holds."""
    # With more ranks than KV heads, several ranks hold the same head (MLA has one "head", which
    # every rank holds). They share the work.
    routes: list[Route] = []
    for index, target in enumerate(targets):
        layers = _cuts(
            (target.first_layer, target.end_layer), [(s.first_layer, s.end_layer) for s in sources]
        )
        heads = _cuts(
            (target.first_head, target.end_head), [(s.first_head, s.end_head) for s in sources]
        )
        for (layer, end_layer), (head, end_head) in product(layers, heads):
            part = Rect(head, end_head - head, layer, end_layer - layer)
            holders = [i for i, source in enumerate(sources) if source.holds(part)]
            if not holders:
                raise IncompatibleError(
                    f"no rank has KV head {head} of layers {layer}..{end_layer - 1}, which rank "
                    f"{index} of the other worker needs: the two do not run the same model",
                    field="num_kv_heads",
                )
            routes.append(Route(holders[index % len(holders)], index, part))
    return routes


def _cuts(whole: tuple[int, int], others: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """`whole` cut wherever one of the others begins or ends."""
    edges = {edge for other in others for edge in other if whole[0] < edge < whole[1]}
    return list(pairwise(sorted({*whole, *edges})))
