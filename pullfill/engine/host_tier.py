"""vLLM's KV offloading for KV caches in CPU memory, where its own copies refuse to run.

vLLM takes classes of others for where it keeps offloaded KV, by `spec_name` and `spec_module_path`.
These two are vLLM's own ones, for CPU memory and for CPU memory before a disk, with one change:
the engine's process copies the bytes itself, at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Keeps offloaded KV in the memory of each rank's process."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        pages = [cache.page_size_bytes for cache in kv_caches.tensors]
        kept = [torch.zeros((self.num_chunks, page), dtype=torch.int8) for page in pages]
        return HostCopies(kv_caches, kept)


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Keeps offloaded KV in shared memory, from where vLLM's threads write it to other media."""

    def get_manager(self) -> Any:
        manager = super().get_manager()
        region = self._scheduler_mmap
        if not region._creator:
            # vLLM makes this half after all ranks have mapped the file. Without a name, the file
            # ends with the processes, also if they are killed.
            Path(region.mmap_path).unlink()
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        pages = [cache.page_size_bytes for cache in kv_caches.tensors]
        return HostCopies(kv_caches, [region.create_next_worker_view(page) for page in pages])


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the KV cache of one rank and offloaded KV. Each call copies at once.

    caches: vLLM's description of the KV cache. A block is a row of each of its tensors.
    kept: a tensor for each of them, where an offloaded block is a row."""

    def __init__(self, caches: CanonicalKVCaches, kept: Sequence[torch.Tensor]) -> None:
        self._caches = [cache.tensor.numpy() for cache in caches.tensors]
        self._kept = [tensor.numpy() for tensor in kept]
        self._groups = caches.group_data_refs
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    def _copy(self, job_id: int, blocks: Any, rows: Any, *, store: bool) -> bool:
        """blocks: vLLM's GPULoadStoreSpec, in the KV cache. rows: of `kept`, one for each block."""
        begin, nbytes, first = time.monotonic(), 0, 0
        for refs, count in zip(self._groups, blocks.group_sizes, strict=True):
            ids = blocks.block_ids[first : first + count]
            at = rows[first : first + count]
            first += count
            for ref in refs:
                size = ref.page_size_bytes
                cache, kept = self._caches[ref.tensor_idx], self._kept[ref.tensor_idx]
                if store:
                    kept[at, :size] = cache[ids, :size]
                else:
                    cache[ids, :size] = kept[at, :size]
                nbytes += size * count
        self._done.append(TransferResult(job_id, True, nbytes, time.monotonic() - begin))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""
