"""The connector that stock vLLM loads in a prefill worker (`kv_connector_module_path`).

A thin shell around scheduler.py. The copies run on the threads of transfer_worker.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from pullfill.engine.groups import by_position, kept_from
from pullfill.engine.kv import Attention
from pullfill.prefill_worker.scheduler import PrefillContext, PrefillScheduler, Reports
from pullfill.runtime import log
from pullfill.worker import memory
from pullfill.worker.connector import WorkerConnector
from pullfill.worker.context import current
from pullfill.worker.memory import Told

logger = log.get("prefill_worker.connector")


@dataclass
class PrefillMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the worker half must report in this step. vLLM takes these reports only from there.

    It is sent to every rank, so it is small and holds plain types only."""

    reports: Reports


class PrefillConnector(WorkerConnector):
    """See the module."""

    _scheduler: PrefillScheduler

    def start_scheduler(self, block_size: int) -> None:
        self._scheduler = current(PrefillContext, "prefill").scheduler

    def attach(self, told: Told, kv_heads: int, stored: Attention) -> None:
        context = current(PrefillContext, "prefill")
        first = memory.attach(context, told, kv_heads, stored)
        if not context.ranks:
            why = first.why_not and f" ({first.why_not})"
            logger.warning(
                "no transport reaches KV memory on %s: this worker gets no jobs%s",
                first.device, why,
            )  # fmt: skip

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        block_size = self._vllm_config.cache_config.block_size
        self._scheduler.bind(
            kv_cache_manager,
            kept_from(kv_cache_manager, block_size),
            by_position(kv_cache_manager, block_size),
        )

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PrefillMetadata:
        return PrefillMetadata(self._scheduler.plan(scheduler_output).reports)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request.request_id), None

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Tell vLLM which copies are over. vLLM calls this in each rank, after every step."""
        if not self.has_connector_metadata():
            return KVConnectorTransferResults()
        meta: PrefillMetadata = self._get_connector_metadata()
        reports = meta.reports
        return KVConnectorTransferResults(
            finished_sending=set(reports.sent),
            finished_recving=reports.read_ok | reports.read_failed,
            failed_recving=set(reports.read_failed),
        )
