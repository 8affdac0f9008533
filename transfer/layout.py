"""Layouts as plain arithmetic: from descriptors, into descriptors, checked before any use.

Pure functions, but for the name of this host. A layout that came over the network is checked here
once, so that the code which computes addresses from it needs no checks of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from pullfill.errors import BadMessage, IncompatibleError
from pullfill.net.this_host import host_id as this_host
from pullfill.transfer.contract import KvLayout, LocalMemory, Owner, Part
from pullfill.wire import Compat, RegionDescriptor


def layout_of(descriptor: RegionDescriptor) -> KvLayout:
    """The remote layout, proved to lie inside `descriptor.nbytes`. Raises BadMessage."""
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
    """The registry record of `memory`; `endpoints` is `owner.endpoints(rank)`."""
    layout = memory.layout
    return RegionDescriptor(
        instance_id=instance_id,
        incarnation=incarnation,
        rank=rank,
        world_size=world_size,
        host_id=host_id,
        nbytes=memory.nbytes,
        base_offset=layout.base_offset,
        num_layers=layout.num_layers,
        num_blocks=layout.num_blocks,
        num_kv_heads=layout.num_kv_heads,
        first_head=memory.first_head,
        first_layer=memory.first_layer,
        page_bytes=layout.page_bytes,
        layer_stride=layout.layer_stride,
        block_stride=layout.block_stride,
        head_stride=layout.head_stride,
        compat=compat,
        endpoints=endpoints,
    )


def describe_ranks(
    owner: Owner,
    memories: Sequence[LocalMemory],
    *,
    instance_id: str,
    incarnation: str,
    compat: Compat,
) -> list[RegionDescriptor]:
    """The record of each rank of a worker on this host, `memories` in the order of ranks."""
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
    """The required order, LBHNC, without gaps."""
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
    """Every page lies in [0, nbytes) and no two pages overlap. Raises BadMessage."""
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


def check_pair(local: KvLayout, remote: KvLayout, part: Part | None = None) -> None:
    """Blocks of both sides, or `part` of them, hold the same bytes. Raises IncompatibleError
    naming the field."""
    alike = ("page_bytes",) if part else ("page_bytes", "num_layers", "num_kv_heads")
    for field in alike:
        ours, theirs = getattr(local, field), getattr(remote, field)
        if ours != theirs:
            raise IncompatibleError(
                f"KV memory differs in {field}: ours {ours}, theirs {theirs}; both workers need "
                "the same model, dtype, block size and tensor-parallel size",
                field=field,
            )
    if part is None:
        return
    for field, first, count, there in (
        ("num_kv_heads", part.local_head, part.heads, local.num_kv_heads),
        ("num_kv_heads", part.remote_head, part.heads, remote.num_kv_heads),
        ("num_layers", part.local_layer, part.layers, local.num_layers),
        ("num_layers", part.remote_layer, part.layers, remote.num_layers),
    ):
        if first < 0 or count < 1 or first + count > there:
            raise IncompatibleError(
                f"{field}: {first}..{first + count} of {there}: the two workers split the model "
                "in ways that do not fit",
                field=field,
            )
