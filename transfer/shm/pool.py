"""Makes vLLM's CPU KV cache a shared file mapping, and reads its layout. The only torch here.

`SharedKvPool` is a context manager for a connector's `get_mem_pool_context()`: the one big int8
allocation made inside it becomes a mapping of a file that peers can map too (no copy, pages come
as they are touched, zero like the original). If vLLM allocated in some other way,
`make_owner` moves the storage into shared memory instead, which keeps all views valid.

The pool owns the files until `make_owner` hands them to the `ShmOwner`; `close` covers the rest.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from pullfill.errors import IncompatibleError
from pullfill.transfer.contract import KvLayout, LocalMemory
from pullfill.transfer.layout import check_bounds
from pullfill.transfer.shm.files import RegionFiles
from pullfill.transfer.shm.owner import ShmOwner

log = logging.getLogger(__name__)


class SharedKvPool:
    """Backs one allocation with `pullfill-<instance_id>-<rank>.kv`. Not thread-safe."""

    def __init__(self, instance_id: str, rank: int, directory: Path | None = None) -> None:
        """Sweeps orphans and takes the names. Raises ConfigError."""
        self._files = RegionFiles(instance_id, rank, directory)
        self._mode = _Intercept(self._allocate)
        self._address: int | None = None
        self._handed_over = False

    @property
    def fired(self) -> bool:
        """Whether an allocation was backed by the file."""
        return self._address is not None

    def __enter__(self) -> Self:
        self._mode.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._mode.__exit__(*exc)

    def make_owner(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        incarnation: str,
        num_blocks: int | None = None,
    ) -> tuple[ShmOwner, LocalMemory]:
        """The owner of the region behind vLLM's tensors, and the memory it shares. From here on
        `ShmOwner.close` removes the files. Raises IncompatibleError, ConfigError."""
        memory = describe(kv_caches, num_blocks)
        path: str | None = None
        if memory.address != self._address:
            log.warning(
                "vLLM did not allocate its KV cache inside the memory pool context; moving %d MiB "
                "into shared memory", memory.nbytes >> 20,
            )  # fmt: skip
            storage = next(iter(kv_caches.values())).untyped_storage()
            fd, _ = storage._share_fd_cpu_()  # the storage keeps owning this descriptor
            path = f"/proc/{os.getpid()}/fd/{fd}"
            memory = describe(kv_caches, num_blocks)
        owner = ShmOwner(self._files, memory, incarnation, kv_path=path)
        self._handed_over = True
        return owner, memory

    def close(self) -> None:
        """Remove what was not handed over. The tensors keep their pages. Idempotent."""
        if not self._handed_over:
            self._files.close()

    def _allocate(self, nbytes: int) -> torch.Tensor | None:
        if self._address is not None:
            return None
        path = self._files.create_kv(nbytes)
        tensor = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.int8)
        self._address = tensor.data_ptr()
        log.info("KV cache of %d MiB is shared as %s", nbytes >> 20, path)
        return tensor


class _Intercept(TorchFunctionMode):  # type: ignore[misc]
    """Answers `torch.zeros(n, dtype=int8)` on CPU with `allocate(n)` unless that returns None."""

    def __init__(self, allocate: Callable[[int], torch.Tensor | None]) -> None:
        super().__init__()
        self._allocate = allocate

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
            if size and on_cpu and (tensor := self._allocate(size)) is not None:
                return tensor
        return func(*args, **kwargs)


def describe(kv_caches: Mapping[str, torch.Tensor], num_blocks: int | None = None) -> LocalMemory:
    """Where vLLM's KV cache is, from the tensors passed to `register_kv_caches`.

    Each is a strided [B, H, N, C] view, K and V packed in C (N and C dense: one page per block
    and head), all in one storage, layers in dict order at equal distances; a layer that reuses
    another's cache is the same object and counts once. `num_blocks`: what the scheduler counts
    in, checked if given. Raises IncompatibleError naming what is off. The caller keeps the
    tensors alive.
    """
    tensors = list({id(t): t for t in kv_caches.values()}.values())
    if not tensors:
        raise IncompatibleError("the engine has no KV cache", field="num_layers")
    first = tensors[0]
    _check_tensors(kv_caches, first)
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
    return LocalMemory(address=storage.data_ptr(), nbytes=storage.nbytes(), layout=layout)


def _check_tensors(kv_caches: Mapping[str, torch.Tensor], first: torch.Tensor) -> None:
    """All [B, H, N, C] with dense pages, alike, in one storage on the CPU."""
    base = first.untyped_storage().data_ptr()
    for name, tensor in kv_caches.items():
        if tensor.device.type != "cpu":
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
