"""Layouts of KV memory: read from descriptors, put into descriptors, checked, cropped.

Pure functions, but for the name of this host. A layout from the network is checked here once. The
code that computes addresses from it then needs no checks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

from pullfill.errors import BadMessage, IncompatibleError
from pullfill.net.this_host import host_id as this_host
from pullfill.transfer.contract import KvLayout, LocalMemory, Owner, Rect
from pullfill.wire import Compat, RegionDescriptor


def layout_of(descriptor: RegionDescriptor) -> KvLayout:
    """The layout of a described region. Raises BadMessage unless all of it is inside the region."""
    layout = KvLayout(
        base_offset=descriptor.base_offset,
        num_layers=descriptor.num_layers,
        num_blocks=descriptor.num_blocks,
        num_kv_heads=descriptor.num_kv_heads,
        page_bytes=descriptor.page_bytes,
        layer_stride=descriptor.layer_stride,
        block_stride=descriptor.block_stride,
        head_stride=descriptor.head_stride,
    )
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


def describe_region(
    memory: LocalMemory,
    *,
    instance_id: str,
    incarnation: str,
    rank: int,
    world_size: int,
    host_id: str,
    compat: Compat,
    endpoints: dict[str, str],
) -> RegionDescriptor:
    """The registry record of `memory`.

    endpoints: what `Owner.endpoints` says for this rank."""
    return RegionDescriptor(
        instance_id=instance_id,
        incarnation=incarnation,
        rank=rank,
        world_size=world_size,
        host_id=host_id,
        nbytes=memory.nbytes,
        first_head=memory.first_head,
        first_layer=memory.first_layer,
        compat=compat,
        endpoints=endpoints,
        **asdict(memory.layout),
    )


def describe_ranks(
    owner: Owner,
    memories: Sequence[LocalMemory],
    *,
    instance_id: str,
    incarnation: str,
    compat: Compat,
) -> list[RegionDescriptor]:
    """The registry record of each rank of a worker on this host.

    memories: in the order of ranks."""
    return [
        describe_region(
            memory,
            instance_id=instance_id,
            incarnation=incarnation,
            rank=rank,
            world_size=len(memories),
            host_id=this_host(),
            compat=compat,
            endpoints=owner.endpoints(rank),
        )
        for rank, memory in enumerate(memories)
    ]


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


def check_pair(local: KvLayout, remote: KvLayout) -> None:
    """Raise IncompatibleError, which names the field, unless both sides have as many layers and
    heads, and pages of the same size."""
    for field in ("page_bytes", "num_layers", "num_kv_heads"):
        ours, theirs = getattr(local, field), getattr(remote, field)
        if ours != theirs:
            raise IncompatibleError(
                f"KV memory differs in {field}: ours {ours}, theirs {theirs}; both workers need "
                "the same model, dtype, KV cache dtype and block size",
                field=field,
            )


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


def part_of(memory: LocalMemory, rect: Rect) -> LocalMemory:
    """The same memory, of which only `rect` is moved. Raises IncompatibleError."""
    layout = crop(memory.layout, rect.within(memory.rect))
    return replace(memory, layout=layout, first_head=rect.first_head, first_layer=rect.first_layer)


def both_sides(
    local: LocalMemory, descriptor: RegionDescriptor, part: Rect | None
) -> tuple[LocalMemory, KvLayout]:
    """What a session moves: our memory and the owner's layout, each without what is not in `part`.

    Raises BadMessage when a layout does not fit its memory, IncompatibleError when the two sides
    do not hold the same."""
    theirs = layout_of(descriptor)
    check_bounds(local.layout, local.nbytes)
    if part is not None:
        local = part_of(local, part)
        theirs = crop(theirs, part.within(rect_of(descriptor)))
    check_pair(local.layout, theirs)
    return local, theirs
