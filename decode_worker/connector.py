"""What a decode side answers vLLM's scheduler, through the connector (worker/connector.py).

The calls go to `DecodeScheduler`, which the decode side makes once the engine is built (side.py).
Before that, vLLM only tells what there is: the memory of each rank and its blocks.
"""

from __future__ import annotations

from typing import Any

from pullfill.decode_worker.context import ConnectorParts
from pullfill.decode_worker.scheduler import JobBlocks
from pullfill.engine import groups, speculation
from pullfill.transfer.owners import RankRegion
from pullfill.worker.context import (
    ByPosition,
    KeptFrom,
    SchedulerHalf,
    StepReports,
    Tables,
    WorkerContext,
)


class DecodeHalf(SchedulerHalf):
    """See the module."""

    def __init__(self, parts: ConnectorParts) -> None:
        self._parts = parts

    def constructed(self, vllm_config: Any, kv_cache_config: Any) -> None:
        never = "speculation" if speculation.why_local(vllm_config) else ""
        if groups.why_local(vllm_config, kv_cache_config):
            never = "kv_groups"
        self._parts.blocks = JobBlocks(
            vllm_config.cache_config.block_size, speculation.local_tokens(vllm_config), never
        )

    def attached(self, context: WorkerContext, first: RankRegion) -> None:
        self._parts.why_not = first.why_not

    def bind(self, manager: Any, kept_from: KeptFrom, by_position: ByPosition) -> None:
        self._parts.blocks.kept_from = kept_from
        self._parts.blocks.pool = manager.block_pool
        self._by_position = by_position

    def matched(self, request: Any, hit_tokens: int) -> tuple[int | None, bool]:
        return self._parts.scheduler.decide(request, hit_tokens)

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        self._parts.scheduler.enqueue(request, self._by_position(tables), external_tokens)

    def loaded(self, output: Any) -> None:
        self._parts.scheduler.tier_loaded(output)

    def scheduled(self, output: Any, reports: StepReports) -> None:
        loaded, failed = self._parts.scheduler.collect(output)
        reports.arrived.update(loaded)
        reports.failed.update(failed)

    def finished(self, request_id: str, tables: Tables) -> bool:
        self._parts.scheduler.request_finished(request_id, tables)
        return False

    @property
    def has_work(self) -> bool:
        return self._parts.begun and self._parts.scheduler.has_work
