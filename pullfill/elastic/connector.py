"""The connector that stock vLLM loads in an elastic worker (`kv_connector_module_path`).

vLLM constructs the connector once, when the engine starts. So this one holds two: the connector of
a decode worker and that of a prefill worker. Each of vLLM's calls about a request goes to one of
them. A request is a prefill job if the prefill side has a task for it. The task is there before
vLLM gets the request, and stays until vLLM has dropped it. Every other request is a client's.

Both connectors are told of every step, even while only one side serves. Each of them pairs the plan
of a step with its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from pullfill.decode_worker.connector import DecodeConnector, DecodeMetadata
from pullfill.elastic.context import ElasticContext
from pullfill.engine.kv import Attention
from pullfill.prefill_worker.connector import PrefillConnector, PrefillMetadata
from pullfill.worker.connector import WorkerConnector
from pullfill.worker.context import current
from pullfill.worker.memory import Told


@dataclass
class ElasticMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What each side reports in this step."""

    decode: DecodeMetadata
    prefill: PrefillMetadata


class ElasticConnector(WorkerConnector):
    """See the module. Only the scheduler half has the two connectors."""

    _decode: DecodeConnector
    _prefill: PrefillConnector

    def start_scheduler(self, block_size: int) -> None:
        self._context = current(ElasticContext, "decode --elastic")
        parts = self._vllm_config, KVConnectorRole.SCHEDULER, self._kv_cache_config
        self._decode, self._prefill = DecodeConnector(*parts), PrefillConnector(*parts)

    def attach(self, told: Told, kv_heads: int, stored: Attention) -> None:
        self._decode.attach(told, kv_heads, stored)
        self._context.share()

    def _of(self, request: Any) -> DecodeConnector | PrefillConnector:
        ours = request.request_id in self._context.prefill.scheduler.tasks
        return self._prefill if ours else self._decode

    # ------------------------------------------------------------------ scheduler half

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._decode.bind_kv_cache_manager(kv_cache_manager)
        self._prefill.bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._decode.bind_gpu_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._of(request).get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._of(request).update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ElasticMetadata:
        return ElasticMetadata(
            self._decode.build_connector_meta(scheduler_output),
            self._prefill.build_connector_meta(scheduler_output),
        )

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._of(request).request_finished_all_groups(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._decode.has_pending_push_work() or self._prefill.has_pending_push_work()

    # ------------------------------------------------------------------ worker half

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Tell vLLM what either side reports. vLLM calls this in each rank, after every step."""
        if not self.has_connector_metadata():
            return KVConnectorTransferResults()
        meta: ElasticMetadata = self._get_connector_metadata()
        arrived, jobs = meta.decode, meta.prefill.reports
        return KVConnectorTransferResults(
            finished_sending=set(jobs.sent),
            finished_recving=arrived.loaded | arrived.failed | jobs.read_ok | jobs.read_failed,
            failed_recving=arrived.failed | jobs.read_failed,
        )
