"""vLLM's own KV offloading, beside our connector: a second KV cache, in CPU memory.

vLLM's MultiConnector then has two connectors: ours, and `Tier`. That is vLLM's OffloadingConnector,
and what our connector asks of it.

vLLM copies a block one step after it was computed, also if its request has ended by then. If a
prefill worker wrote into the block meanwhile, vLLM would keep that KV under the wrong prompt. So
our connector calls `claim` for the blocks, and offers them when the step has run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from pullfill.runtime import metrics

# vLLM's names of what its offloading has copied.
_BYTES = {
    "vllm:kv_offload_load_bytes": metrics.KV_OFFLOAD_BYTES.labels("load"),
    "vllm:kv_offload_store_bytes": metrics.KV_OFFLOAD_BYTES.labels("store"),
}


class Tier(OffloadingConnector):  # type: ignore[misc]
    """See the module. All methods here are of the scheduler half: engine thread."""

    def hit(self, request: Any, hit_tokens: int) -> int | None:
        """Return how many tokens beyond the prefix hit it has. None: it must be asked again."""
        found, _ = self.get_num_new_matched_tokens(request, hit_tokens)
        return None if found is None else int(found)

    def load(self, request: Any, tokens: int) -> None:
        """Load the first `tokens` tokens beyond the prefix hit into the request's blocks.

        vLLM then names the request in `finished_recving`."""
        blocks = self._kv_cache_manager.get_blocks(request.request_id)
        self.update_state_after_alloc(request, blocks, tokens)

    def claim(self, block_ids: Iterable[int]) -> None:
        """Have the step that is being scheduled wait for all copies from these blocks.

        They were allocated in this step. Once it has run, anybody may write into them."""
        self.connector_scheduler._current_batch_allocated_block_ids.update(block_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        metrics.KV_OFFLOAD_TOKENS.inc(num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def get_kv_connector_stats(self) -> None:
        """Count what was copied. vLLM's frontend cannot show a connector that it does not have."""
        stats = super().get_kv_connector_stats()
        copied = stats.reduce() if stats is not None else {}
        for name in _BYTES.keys() & copied.keys():
            _BYTES[name].inc(copied[name])


# vLLM's own copies refuse to run for KV caches in CPU memory. It takes classes of others for where
# it keeps offloaded KV, by `spec_name` and `spec_module_path`. This one is vLLM's own with one
# change: the engine's process copies the bytes itself, at once.
class HostSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """Keeps offloaded KV in the memory of each rank's process."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        pages = [cache.page_size_bytes for cache in kv_caches.tensors]
        kept = [torch.zeros((self.num_chunks, page), dtype=torch.int8) for page in pages]
        return HostCopies(kv_caches, kept)


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

    # `expedited` is new in vLLM 0.33: such a load passes others. Here none is under way.
    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
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
