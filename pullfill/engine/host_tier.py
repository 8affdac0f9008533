"""vLLM's KV offloading for KV caches in CPU memory, where its own copies refuse to run.

vLLM takes classes of others for where it keeps offloaded KV, by `spec_name` and `spec_module_path`.
These two are vLLM's own ones, for CPU memory and for CPU memory before a disk, with one change:
the engine's process copies the bytes itself, at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Keeps offloaded KV in the memory of each rank's process."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        parts = self.blocks_per_chunk
        kept = [
            torch.zeros((self.num_chunks, parts * cache.page_size_bytes), dtype=torch.int8)
            for cache in kv_caches.tensors
        ]
        return HostCopies(kv_caches, kept, parts)


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Keeps offloaded KV in shared memory, from where vLLM's threads write it to other media."""

    def get_manager(self) -> Any:
        manager = super().get_manager()
        # All ranks have mapped the file by now. Without a name it ends with them.
        Path(self._scheduler_mmap.mmap_path).unlink(missing_ok=True)
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        parts = self.blocks_per_chunk
        kept = [
            region.create_next_worker_view(parts * cache.page_size_bytes)
            for cache in kv_caches.tensors
        ]
        return HostCopies(kv_caches, kept, parts)


class HostCopies(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between the KV cache of one rank and offloaded KV. Each call copies at once.

    caches: vLLM's description of the KV cache. A block is a row of each of its tensors.
    kept: a tensor for each of them. A row is a chunk of `parts` blocks, one after another."""

    def __init__(self, caches: CanonicalKVCaches, kept: Sequence[torch.Tensor], parts: int) -> None:
        self._parts = parts
        self._caches = [cache.tensor.numpy() for cache in caches.tensors]
        self._kept = [tensor.unflatten(1, (parts, -1)).numpy() for tensor in kept]
        self._groups = caches.group_data_refs
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec.block_ids, store=False)

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, store: bool) -> bool:
        """blocks: vLLM's GPULoadStoreSpec, in the KV cache. chunks: where they are kept."""
        begin, nbytes = time.monotonic(), 0
        for group, ids, chunk, part in self._by_group(blocks, chunks):
            for ref in self._groups[group]:
                size = ref.page_size_bytes
                cache, kept = self._caches[ref.tensor_idx], self._kept[ref.tensor_idx]
                if store:
                    kept[chunk, part, :size] = cache[ids, :size]
                else:
                    cache[ids, :size] = kept[chunk, part, :size]
                nbytes += size * len(ids)
        self._done.append(TransferResult(job_id, True, nbytes, time.monotonic() - begin))
        return True

    def _by_group(self, blocks: Any, chunks: Any) -> Iterator[tuple[int, Any, Any, Any]]:
        """Yield (group, block ids, and for each of them its chunk and its part of the chunk)."""
        first = first_chunk = 0
        for group, (count, index) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            if not count:
                continue
            # The first block may be in the middle of its chunk.
            at = np.arange(count) + index % self._parts
            end_chunk = first_chunk + int(at[-1]) // self._parts + 1
            kept = chunks[first_chunk:end_chunk]
            ids = blocks.block_ids[first : first + count]
            yield group, ids, kept[at // self._parts], at % self._parts
            first, first_chunk = first + count, end_chunk

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""
