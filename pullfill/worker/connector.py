"""The connector that stock vLLM loads in a worker: what is the same in both kinds.

vLLM constructs it twice, once for each half. The scheduler half lives in the worker's main process
and passes vLLM's calls on to the role's connector scheduler. The worker half lives in the process
of each rank (with one rank: the same) and only says where the KV cache is. The metadata of each
step carries reports from the scheduler half to the worker half, because vLLM accepts them only
from there.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from pullfill.engine import groups, kv, speculation
from pullfill.engine.environment import bind_to_parent
from pullfill.engine.kv import Attention, RankAttention
from pullfill.runtime import pages
from pullfill.transfer.owners import RankRegion
from pullfill.transfer.shm.kv_pool import SharedKvPool, tell
from pullfill.worker.memory import Told

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


class WorkerConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """See the module. A role's subclass has its scheduler half and the metadata of its steps."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._heads = kv.total_heads(vllm_config)
        self._pool: SharedKvPool | None = None
        self._told: RankTold | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.start_scheduler(vllm_config.cache_config.block_size)
            return
        bind_to_parent()
        if kv.device_of(vllm_config) == "cpu":
            place = vllm_config.kv_transfer_config.kv_connector_extra_config
            rank = vllm_config.parallel_config.rank  # one pipeline stage after another
            self._pool = SharedKvPool(place["instance_id"], rank, Path(place["directory"]))

    @abstractmethod
    def start_scheduler(self, block_size: int) -> None:
        """Make the scheduler half."""

    @abstractmethod
    def attach(self, told: Told, kv_heads: int, stored: Attention) -> None:
        """Take what all ranks have told of their memory. Scheduler half."""

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
        stored = {rank: told.attention for rank, told in metadata.items()}
        whole = kv.join_attention(stored, self._heads)
        regions = {rank: told.region for rank, told in metadata.items()}
        self.attach(
            regions, self._heads, replace(whole, groups=groups.groups_of(self._kv_cache_config))
        )

    def shutdown(self) -> None:
        """The process owns what the connector uses, and closes it."""

    # ------------------------------------------------------------------ worker half

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return self._pool

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        config = self._kv_cache_config
        why_not = groups.why_local(self._vllm_config, config)
        why_not = why_not or speculation.why_local(self._vllm_config)
        if why_not:
            device = kv.device_of(self._vllm_config)
            region = RankRegion(os.getpid(), device, len(kv_caches), 0, why_not=why_not)
        else:
            caches = groups.caches_of(config, kv_caches)
            region = tell(self._pool, caches, config.num_blocks)
            if self._pool is not None:
                pages.make_caches_present(caches)
        self._told = RankTold(region, kv.attention_of_rank(self._vllm_config, kv_caches))

    def get_handshake_metadata(self) -> RankTold | None:
        return self._told

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
