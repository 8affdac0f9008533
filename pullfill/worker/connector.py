"""The connector that stock vLLM loads in a worker (`kv_connector_module_path`).

vLLM constructs it twice, once for each half. The scheduler half lives in the worker's main process
and passes vLLM's calls on to the sides of the worker: each request belongs to one of them. The
worker half lives in the process of each rank (with one rank: the same) and only says where the KV
cache is. The metadata of each step carries reports from the scheduler half to the worker half,
because vLLM accepts them only from there.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from pullfill.engine import groups, kv, speculation
from pullfill.engine.environment import bind_to_parent
from pullfill.engine.kv import RankAttention
from pullfill.runtime import pages
from pullfill.transfer.owners import RankRegion
from pullfill.transfer.shm.files import shm_dir
from pullfill.transfer.shm.kv_pool import SharedKvPool, tell
from pullfill.worker import memory
from pullfill.worker.context import SchedulerHalf, StepReport, installed

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass
class RankTold(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What a rank tells the main process about its memory, by vLLM's own handshake.

    vLLM asks each rank for it once the KV caches are registered, and gives all of it to the
    scheduler half before the first request."""

    region: RankRegion
    attention: RankAttention


class StepMetadata(StepReport, KVConnectorMetadata):  # type: ignore[misc]
    """What the worker half must report in this step. It is sent to every rank."""


class WorkerConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._heads = kv.total_heads(vllm_config)
        self._block_size = vllm_config.cache_config.block_size
        self._pool: SharedKvPool | None = None
        self._told: RankTold | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._context, self._halves = installed()
            return
        name, directory = self.place(vllm_config)
        if kv.device() == "cpu":
            rank = vllm_config.parallel_config.rank  # one pipeline stage after another
            self._pool = SharedKvPool(name, rank, directory)

    def place(self, vllm_config: VllmConfig) -> tuple[str, Path]:
        """Return the worker's instance id, and where its files are. Called once in each rank."""
        bind_to_parent()
        return vllm_config.kv_transfer_config.engine_id, shm_dir()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """Return the layout with layers outermost, so that KV heads of a block are contiguous."""
        return "LBHNC"

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], RankTold]
    ) -> None:
        regions = {rank: told.region for rank, told in metadata.items()}
        stored = kv.join_attention([told.attention for told in metadata.values()])
        grouped = groups.groups_of(self._kv_cache_config)
        memory.attach(self._context, regions, self._heads, stored, grouped)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        kept_from = groups.kept_from(kv_cache_manager, self._block_size)
        self._by_position = groups.by_position(kv_cache_manager, self._block_size)
        for half in self._halves:
            half.bind(kv_cache_manager, kept_from, self._by_position)

    def _of(self, request: Any) -> SchedulerHalf:
        first, *others = self._halves
        return next((half for half in others if half.owns(request.request_id)), first)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # The request has no blocks. But if a load into its blocks has failed, vLLM still reserves
        # as many for it. So it would need them twice, and if its prompt takes more than half of the
        # KV cache, it would wait forever.
        self._context.in_flight.discard(request)
        name, half, deferred = request.request_id, self._of(request), self._halves[0].deferred
        if name not in deferred:
            return half.matched(request, num_computed_tokens)
        found = (0, False) if deferred[name] else half.matched(request, num_computed_tokens)
        if found[0] == 0:  # it is computed here, but not now
            deferred[name] = True
            return None, False
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of(request).allocated(request, blocks.get_block_ids(), num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        for half in self._halves:
            half.loaded(connector_output)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        # All are told of every step: each pairs the plan of a step with its end.
        told = [half.scheduled(scheduler_output) for half in self._halves]
        return StepMetadata(
            loaded=set().union(*(report.loaded for report in told)),
            failed=set().union(*(report.failed for report in told)),
            sent=set().union(*(report.sent for report in told)),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of(request).finished(request, block_ids), None

    def has_pending_push_work(self) -> bool:
        return any(half.has_work for half in self._halves)

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._pool

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        why_not = groups.why_local(self._vllm_config, config)
        why_not = why_not or speculation.why_local(self._vllm_config)
        if why_not:
            region = RankRegion(os.getpid(), kv.device(), len(kv_caches), 0, why_not=why_not)
        else:
            caches = groups.caches_of(config, kv_caches)
            region = tell(self._pool, caches, config.num_blocks)
            if self._pool is not None:
                pages.make_caches_present(caches)
        self._told = RankTold(region, kv.attention_of_rank(self._vllm_config, kv_caches))

    def get_handshake_metadata(self) -> RankTold | None:
        return self._told

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Tell vLLM what the sides report. vLLM calls this in each rank, after every step."""
        if not self.has_connector_metadata():
            return KVConnectorTransferResults()
        report: StepMetadata = self._get_connector_metadata()
        return KVConnectorTransferResults(
            finished_sending=set(report.sent),
            finished_recving=report.loaded | report.failed,
            failed_recving=set(report.failed),
        )

    # All copies are made by the main process, between steps. So the model runner waits for none.

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to do: a request whose KV is under way is not scheduled."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See start_load_kv."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: a prefill worker writes whole chunks after the step."""

    def wait_for_save(self) -> None:
        """See save_kv_layer."""
