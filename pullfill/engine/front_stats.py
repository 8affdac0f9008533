"""Enters vLLM's statistics into its Prometheus metrics for many engine steps at once.

vLLM does so after each step, for some forty metrics. For a step of a few tokens that is a good part
of the frontend's work. `LateStats` keeps the statistics of many steps. `settle` enters them in
their order, with vLLM's own code, at the latest when somebody reads the metrics.

Gauges show the last step only. So earlier steps that changed nothing else are left out.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger, load_stat_logger_plugin_factories

KEPT_STEPS = 32
KEPT_TOKENS = 512
"""Whichever is reached first: entering them holds up the event loop for less than a millisecond."""

_GAUGES = frozenset({
    "num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs",
    "num_kv_fetch_reqs_by_stage", "step_counter", "current_wave", "kv_cache_usage",
    "iteration_details",
})  # fmt: skip
"""Fields of vLLM's SchedulerStats of which the last value alone counts."""


class LateStats(PrometheusStatLogger):  # type: ignore[misc]
    """A stat logger for AsyncLLM, in place of vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: list[tuple[Any, Any, Any, int]] = []
        self._tokens = 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        self._late.append((scheduler_stats, iteration_stats, mm_cache_stats, engine_idx))
        if iteration_stats is not None:
            self._tokens += iteration_stats.num_generation_tokens
        if len(self._late) >= KEPT_STEPS or self._tokens >= KEPT_TOKENS:
            self.settle()

    def settle(self) -> None:
        """Enter everything that is kept."""
        late, self._late, self._tokens = self._late, [], 0
        last = {entry[3]: number for number, entry in enumerate(late) if entry[0] is not None}
        for number, (scheduler, iteration, cache, engine) in enumerate(late):
            if number != last.get(engine) and scheduler is not None and only_gauges(scheduler):
                scheduler = None
            super().record(scheduler, iteration, cache, engine)


def stat_loggers() -> list[type[LateStats]]:
    """Return the stat loggers for AsyncLLM.

    Empty if a plugin of vLLM brings a Prometheus logger, because a process has only one."""
    theirs = [f for f in load_stat_logger_plugin_factories() if isinstance(f, type)]
    return [] if any(issubclass(f, PrometheusStatLogger) for f in theirs) else [LateStats]


def only_gauges(stats: Any) -> bool:
    """Whether SchedulerStats hold only gauges, so that those of a later step replace them."""
    hits = stats.prefix_cache_stats
    return not (hits.requests or hits.queries or hits.hits) and not any(
        value
        for name, value in vars(stats).items()
        if name not in _GAUGES and name != "prefix_cache_stats"
    )
