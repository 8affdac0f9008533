"""Makes vLLM's CPU KV cache a shared file mapping, and reads its layout. The only torch in shm/.

`SharedKvPool` is a context manager for a connector's `get_mem_pool_context()`. The one big int8
allocation made inside it becomes a mapping of a file, which peers can map too. It is zero, as the
allocation would be, and nothing is copied. (pullfill/runtime/pages.py makes its pages present.)

This runs in the process of each rank. The worker's main process owns the files (`RegionFiles`),
maps them (`owners.py`) and removes them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pullfill.errors import IncompatibleError
from pullfill.transfer.contract import KvLayout, LocalMemory
from pullfill.transfer.layout import check_bounds
from pullfill.transfer.owners import RankRegion, region_of, tell_gpu
from pullfill.transfer.shm.files import create_kv, kv_path

log = logging.getLogger(__name__)

# Never emptied. vLLM drops every KV tensor when its engine ends, also after a failed step. Freed
# memory would be used again at once, while our copies from it and into it go on.
_told: list[torch.UntypedStorage] = []


class SharedKvPool(TorchFunctionMode):  # type: ignore[misc]
    """Inside it, the first `torch.zeros(n, dtype=int8)` on the CPU is backed by
    `pullfill-<instance_id>-<rank>.kv`. Not thread-safe."""

    def __init__(self, instance_id: str, rank: int, directory: Path) -> None:
        super().__init__()
        self._place = directory, instance_id, rank
        self.path = kv_path(*self._place)
        self.address: int | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and len(args) == 1 and kwargs.get("dtype") == torch.int8:
            size = args[0] if isinstance(args[0], int) else None
            on_cpu = torch.device(kwargs.get("device") or torch.get_default_device()).type == "cpu"
            if size and on_cpu and self.address is None:
                return self._allocate(size)
        return func(*args, **kwargs)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        create_kv(*self._place, nbytes)
        tensor = torch.from_file(str(self.path), shared=True, size=nbytes, dtype=torch.int8)
        self.address = tensor.data_ptr()
        log.info("KV cache of %d MiB is shared as %s", nbytes >> 20, self.path)
        return tensor


def tell(
    pool: SharedKvPool | None, kv_caches: Mapping[str, torch.Tensor], num_blocks: int
) -> RankRegion:
    """Describe the caches that vLLM registered for the main process. They stay allocated as long as
    this process lives. Memory that is neither the CPU's nor a CUDA device's is described by its
    shape alone. Raises IncompatibleError."""
    tensors = list({id(t): t for t in kv_caches.values()}.values())
    if not tensors:
        raise IncompatibleError("the engine has no KV cache", field="num_layers")
    _told.append(tensors[0].untyped_storage())
    if pool is not None and tensors[0].device.type == "cpu":
        memory = describe(kv_caches, num_blocks)
        if memory.address != pool.address:
            raise IncompatibleError(
                "vLLM did not allocate its KV cache in the memory pool that pullfill gave it",
                field="layout",
            )
        return region_of(memory, str(pool.path))
    if tensors[0].device.type == "cuda":
        return tell_gpu(describe(kv_caches, num_blocks, "cuda"))
    rows, width = tensors[0].shape[-2:]
    return RankRegion(
        pid=os.getpid(),
        device=tensors[0].device.type,
        num_layers=len(tensors),
        page_bytes=rows * width * tensors[0].element_size(),
    )


def describe(
    kv_caches: Mapping[str, torch.Tensor], num_blocks: int | None = None, device: str = "cpu"
) -> LocalMemory:
    """Where vLLM's KV cache is, from the tensors passed to `register_kv_caches`.

    kv_caches: strided [B, H, N, C] views with K and V packed in C, one at least. N and C are dense:
    one page per block and head. All are in one storage, the layers in dict order at equal
    distances. A layer that reuses another's cache is the same object and counts once.
    num_blocks: what the scheduler counts. Checked if given.
    device: the type of device that must hold the cache.

    Raises IncompatibleError, which names what is wrong. Keeps nothing allocated; `tell` does.
    """
    tensors = list({id(t): t for t in kv_caches.values()}.values())
    first = tensors[0]
    _check_tensors(kv_caches, first, device)
    size = first.element_size()
    blocks, heads, rows, width = first.shape
    strides = [stride * size for stride in first.stride()]
    page = rows * width * size
    addresses = [t.data_ptr() for t in tensors]
    layer_stride = addresses[1] - addresses[0] if len(tensors) > 1 else blocks * strides[0]
    if layer_stride <= 0 or any(b - a != layer_stride for a, b in pairwise(addresses)):
        raise IncompatibleError(
            "layers are not at equal distances in memory (several KV cache groups?)",
            field="layer_stride",
        )
    if num_blocks is not None and blocks != num_blocks:
        raise IncompatibleError(
            f"vLLM splits each of its {num_blocks} blocks into kernel blocks ({blocks} in all); "
            "use the block size of the attention backend (--block-size)",
            field="block_size",
        )
    storage = first.untyped_storage()
    layout = KvLayout(
        base_offset=addresses[0] - storage.data_ptr(),
        num_layers=len(tensors),
        num_blocks=blocks,
        num_kv_heads=heads,
        page_bytes=page,
        layer_stride=layer_stride,
        block_stride=strides[0] if blocks > 1 else heads * page,
        head_stride=strides[1] if heads > 1 else page,
    )
    check_bounds(layout, storage.nbytes())
    return LocalMemory(
        address=storage.data_ptr(),
        nbytes=storage.nbytes(),
        layout=layout,
        device=None if device == "cpu" else first.device.index or 0,
    )


def _check_tensors(kv_caches: Mapping[str, torch.Tensor], first: torch.Tensor, device: str) -> None:
    """Raise IncompatibleError unless all are [B, H, N, C] with dense pages, alike, in one storage
    on such a device."""
    base = first.untyped_storage().data_ptr()
    for name, tensor in kv_caches.items():
        if tensor.device.type != device:
            raise IncompatibleError(f"{name}: KV cache on {tensor.device}", field="device")
        if tensor.dim() != 4:
            raise IncompatibleError(
                f"{name}: expected a [B, H, N, C] view, got shape {tuple(tensor.shape)}",
                field="layout",
            )
        _, _, rows, width = tensor.shape
        if (width > 1 and tensor.stride(3) != 1) or (rows > 1 and tensor.stride(2) != width):
            raise IncompatibleError(
                f"{name}: a (block, head) page is not contiguous (strides {tensor.stride()}); "
                "the layout must be LBHNC",
                field="layout",
            )
        alike = (tensor.shape, tensor.stride(), tensor.dtype) == (
            first.shape, first.stride(), first.dtype
        )  # fmt: skip
        if not alike:
            raise IncompatibleError(
                f"{name}: shape, strides or dtype differ from the first layer's", field="layout"
            )
        if tensor.untyped_storage().data_ptr() != base:
            raise IncompatibleError(f"{name}: in an allocation of its own", field="layer_stride")
