"""The connector that stock vLLM loads in a decode worker (`kv_connector_module_path`).

vLLM's calls go to the scheduler half (scheduler.py), which the decode side makes once the engine is
built (side.py). Before that, vLLM only tells what there is: the memory of each rank and its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from pullfill.decode_worker.context import ConnectorParts
from pullfill.decode_worker.scheduler import JobBlocks
from pullfill.engine import groups, speculation
from pullfill.engine.kv import Attention
from pullfill.worker import memory
from pullfill.worker.connector import WorkerConnector
from pullfill.worker.context import current


@dataclass
class DecodeMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Requests whose remote prefill ended: `loaded` all of them, `failed` those to recompute."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class DecodeConnector(WorkerConnector):
    """See the module."""

    _parts: ConnectorParts
    _by_position: Callable[[groups.Tables], groups.Tables]

    def start_scheduler(self, block_size: int) -> None:
        config = self._vllm_config
        never = "speculation" if speculation.why_local(config) else ""
        if groups.why_local(config, self._kv_cache_config):
            never = "kv_groups"
        self._parts = current(ConnectorParts, "decode")
        self._parts.blocks = JobBlocks(block_size, speculation.local_tokens(config), never)

    def attach(self, told: memory.Told, kv_heads: int, stored: Attention) -> None:
        first = memory.attach(self._parts, told, kv_heads, stored)
        self._parts.why_not = first.why_not

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        block_size = self._vllm_config.cache_config.block_size
        self._parts.blocks.kept_from = groups.kept_from(kv_cache_manager, block_size)
        self._by_position = groups.by_position(kv_cache_manager, block_size)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._parts.blocks.pool = gpu_block_pool

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._parts.scheduler.decide(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tables = self._by_position(blocks.get_block_ids())
        self._parts.scheduler.enqueue(request, tables, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        self._parts.scheduler.tier_loaded(connector_output)

    def build_connector_meta(self, scheduler_output: Any) -> DecodeMetadata:
        loaded, failed = self._parts.scheduler.collect(scheduler_output)
        return DecodeMetadata(set(loaded), set(failed))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._parts.scheduler.request_finished(request.request_id, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._parts.begun and self._parts.scheduler.has_work

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Tell vLLM whose KV has arrived. vLLM calls this in each rank, after every step."""
        if not self.has_connector_metadata():
            return KVConnectorTransferResults()
        meta: DecodeMetadata = self._get_connector_metadata()
        return KVConnectorTransferResults(
            finished_recving=meta.loaded | meta.failed, failed_recving=meta.failed
        )
