"""The connector that stock vLLM loads in a prefill worker (`kv_connector_module_path`).

A thin shell around scheduler_side.py; the copies run on the movers' threads (mover.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from pullfill.engine import kv
from pullfill.prefill_worker import context as contexts
from pullfill.prefill_worker import memory
from pullfill.prefill_worker.scheduler_side import Reports, SchedulerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass
class PrefillMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker half must report in this step, because vLLM takes it only from there. Sent
    to every rank: small and plain."""

    reports: Reports


class PrefillConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM constructs it twice: once per role."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        kv.require_one_group(kv_cache_config)
        self._context = contexts.current()
        if role is KVConnectorRole.SCHEDULER:
            self._context.side = SchedulerSide(self._context, vllm_config.cache_config.block_size)

    @property
    def _side(self) -> SchedulerSide:
        side = self._context.side
        assert isinstance(side, SchedulerSide)
        return side

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str:
        """One KV head range of one block is one contiguous run."""
        return "LBHNC"

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # ------------------------------------------------------------------ worker half

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        return None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        memory.register(self._context, kv_caches, self._kv_cache_config.num_blocks)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Prefix reads were started when their blocks were allocated."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request whose prefix is being read is not scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Whole chunks are written after the step, by the main process."""

    def wait_for_save(self) -> None:
        """See save_kv_layer."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if not self.has_connector_metadata():
            return KVConnectorTransferResults()
        meta = self._get_connector_metadata()
        assert isinstance(meta, PrefillMetadata)
        reports = meta.reports
        return KVConnectorTransferResults(
            finished_sending=set(reports.sent),
            finished_recving=reports.read_ok | reports.read_failed,
            failed_recving=set(reports.read_failed),
        )

    # ------------------------------------------------------------------ scheduler half

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._side.bind_manager(kv_cache_manager)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._side.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._side.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PrefillMetadata:
        return PrefillMetadata(self._side.plan(scheduler_output).reports)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._side.finished(request.request_id), None

    def has_pending_push_work(self) -> bool:
        side = self._context.side
        return side is not None and side.has_work

    def shutdown(self) -> None:
        """The process owns what the connector uses; it is closed by main."""
