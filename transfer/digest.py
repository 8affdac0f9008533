"""Digests of KV blocks, equal on both ends for equal bytes whatever the strides are."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

from pullfill.transfer.contract import LocalMemory
from pullfill.transfer.runs import checked_ids

DIGEST_BYTES = 16


def digest_blocks(memory: LocalMemory, block_ids: Sequence[int]) -> bytes:
    """blake2b-128 over the pages of `block_ids` in that order; within a block by layer, then by
    head. Reads live memory: hold whatever keeps the blocks still. Raises BadMessage."""
    layout = memory.layout
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    # Adjacent heads are one contiguous stretch in the usual layout: fewer, longer updates.
    dense = layout.num_kv_heads == 1 or layout.head_stride == layout.page_bytes
    pieces = 1 if dense else layout.num_kv_heads
    length = layout.page_bytes * (layout.num_kv_heads if dense else 1)
    page = ctypes.c_char * length
    for block in checked_ids(block_ids, layout.num_blocks, "digested").tolist():
        start = memory.address + layout.base_offset + block * layout.block_stride
        for layer in range(layout.num_layers):
            for head in range(pieces):
                at = start + layer * layout.layer_stride + head * layout.head_stride
                hasher.update(memoryview(page.from_address(at)))
    return hasher.digest()
