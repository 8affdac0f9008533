"""The connector that stock vLLM loads in a decode worker (`kv_connector_module_path`).

A thin shell: vLLM's calls on one side, connector_scheduler.py and memory.py on the other. The
scheduler half lives in the worker's main process, the worker half in the process of each rank (with
one rank: the same), where it only says where the KV cache is. The metadata of each step carries the
reports from the scheduler half to the worker half, because vLLM accepts them only from there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from pullfill.decode_worker import context as contexts
from pullfill.decode_worker import memory
from pullfill.decode_worker.connector_scheduler import ConnectorScheduler
from pullfill.engine import attention, kv
from pullfill.engine.handshake import RankTold
from pullfill.engine.rank_processes import bind_to_parent
from pullfill.runtime import pages
from pullfill.transfer.shm.kv_pool import SharedKvPool, tell

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass
class DecodeMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Requests whose remote prefill ended: `loaded` all of them, `failed` those to recompute."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class DecodeConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM constructs it twice: once per role."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        kv.require_one_group(kv_cache_config)
        self._heads = kv.total_heads(vllm_config)
        self._side: ConnectorScheduler | None = None
        self._pool: SharedKvPool | None = None
        self._told: RankTold | None = None
        if role is KVConnectorRole.SCHEDULER:
            context = contexts.current()
            self._side = ConnectorScheduler(context, vllm_config.cache_config.block_size)
            context.extra["connector_scheduler"] = self._side
            return
        bind_to_parent()
        if kv.device_of(vllm_config) == "cpu":
            place = vllm_config.kv_transfer_config.kv_connector_extra_config
            self._pool = SharedKvPool(
                place["instance_id"], kv.rank_of(vllm_config), Path(place["directory"])
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """One KV head range of one block is one contiguous run."""
        return "LBHNC"

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ------------------------------------------------------------------ worker half

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._pool

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        region = tell(self._pool, kv_caches, self._kv_cache_config.num_blocks)
        self._told = RankTold(region, attention.of_rank(self._vllm_config, kv_caches))
        if self._pool is not None:
            pages.make_caches_present(kv_caches)

    def get_handshake_metadata(self) -> RankTold | None:
        return self._told

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded from here: prefill workers write into the cache themselves."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """See start_load_kv."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is sent from here."""

    def wait_for_save(self) -> None:
        """See save_kv_layer."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Called after each step's forward pass, also after a step that ran no model."""
        if not self.has_connector_metadata():
            return KVConnectorTransferResults()
        meta = self._get_connector_metadata()
        assert isinstance(meta, DecodeMetadata)
        return KVConnectorTransferResults(
            finished_recving=meta.loaded | meta.failed, failed_recving=meta.failed
        )

    # ------------------------------------------------------------------ scheduler half

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], RankTold]
    ) -> None:
        regions = {rank: told.region for rank, told in metadata.items()}
        stored = {rank: told.attention for rank, told in metadata.items()}
        memory.attach(contexts.current(), regions, self._heads, attention.join(stored, self._heads))

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        assert self._side is not None
        self._side.bind_skipped(kv.skipped_of(kv_cache_manager))

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        assert self._side is not None
        self._side.bind_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        assert self._side is not None
        return self._side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        assert self._side is not None
        self._side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> DecodeMetadata:
        assert self._side is not None
        loaded, failed = self._side.collect()
        return DecodeMetadata(set(loaded), set(failed))

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        assert self._side is not None
        self._side.finished(request.request_id, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._side is not None and self._side.has_work

    def shutdown(self) -> None:
        """The process owns what the connector uses; it is closed by main."""
