"""What a prefill side answers vLLM's scheduler, through the connector (worker/connector.py).

A thin shell around scheduler.py. The copies run on the threads of transfer_worker.py.
"""

from __future__ import annotations

from typing import Any

from pullfill.prefill_worker.scheduler import PrefillContext
from pullfill.runtime import log
from pullfill.transfer.owners import RankRegion
from pullfill.worker.context import ByPosition, KeptFrom, SchedulerHalf, StepReports, Tables

logger = log.get("prefill_worker.connector")


class PrefillHalf(SchedulerHalf):
    """See the module."""

    def __init__(self, context: PrefillContext) -> None:
        self.context = context
        self._scheduler = context.scheduler

    def constructed(self, vllm_config: Any, kv_cache_config: Any) -> None:
        """The scheduler is there before the engine."""

    def attached(self, first: RankRegion) -> None:
        if not self.context.ranks:
            why = first.why_not and f" ({first.why_not})"
            logger.warning(
                "no transport reaches KV memory on %s: this worker gets no jobs%s",
                first.device, why,
            )  # fmt: skip

    def bind(self, manager: Any, kept_from: KeptFrom, by_position: ByPosition) -> None:
        self._scheduler.bind(manager, kept_from, by_position)

    def owns(self, request_id: str) -> bool:
        # The task is there before vLLM gets the request, and stays until vLLM has dropped it.
        return request_id in self._scheduler.tasks

    def matched(self, request: Any, hit_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched(request, hit_tokens)

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        self._scheduler.allocated(request, tables, external_tokens)

    def scheduled(self, output: Any, reports: StepReports) -> None:
        found = self._scheduler.plan(output).reports
        reports.sent.update(found.sent)
        reports.arrived.update(found.read_ok)
        reports.failed.update(found.read_failed)

    def finished(self, request_id: str, tables: Tables) -> bool:
        return self._scheduler.finished(request_id)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work
