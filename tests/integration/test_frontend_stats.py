"""Statistics that are kept for a while: nothing is missing once they are read. With vLLM's own
structs, in this process."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats

from pullfill.engine import front_patches
from pullfill.engine.front_patches import KEPT_STEPS, KEPT_TOKENS, LateStats, only_gauges


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, int]]:
    """What vLLM's logger is given, in its order."""
    calls: list[tuple[Any, Any, int]] = []

    def record(self: Any, scheduler: Any, iteration: Any, cache: Any, engine: int) -> None:
        calls.append((scheduler, iteration, engine))

    monkeypatch.setattr(PrometheusStatLogger, "__init__", lambda self: None)
    monkeypatch.setattr(PrometheusStatLogger, "record", record)
    return calls


def step(tokens: int = 1) -> IterationStats:
    stats = IterationStats()
    stats.num_generation_tokens = tokens
    return stats


def test_steps_wait_until_they_are_read(entered: list[Any]) -> None:
    late = LateStats()
    steps = [(SchedulerStats(num_running_reqs=n), step()) for n in range(3)]
    for scheduler, iteration in steps:
        late.record(scheduler, iteration, engine_idx=0)
    assert not entered
    late.settle()
    assert [iteration for _, iteration, _ in entered] == [iteration for _, iteration in steps]
    assert [scheduler for scheduler, _, _ in entered] == [None, None, steps[2][0]]
    late.settle()
    assert len(entered) == 3, "entered twice"


def test_a_step_that_counted_something_is_never_left_out(entered: list[Any]) -> None:
    late = LateStats()
    counted = SchedulerStats(prefix_cache_stats=PrefixCacheStats(requests=1, queries=7, hits=0))
    for scheduler in (counted, None, SchedulerStats()):
        late.record(scheduler, step())
    late.settle()
    assert entered[0][0] is counted
    assert len(entered) == 3


def test_the_last_gauges_of_each_engine_count(entered: list[Any]) -> None:
    late = LateStats()
    first, second = SchedulerStats(num_running_reqs=1), SchedulerStats(num_running_reqs=2)
    late.record(first, None, engine_idx=0)
    late.record(second, None, engine_idx=1)
    late.settle()
    assert entered == [(first, None, 0), (second, None, 1)]


@pytest.mark.parametrize(("steps", "tokens"), [(KEPT_STEPS, 1), (2, KEPT_TOKENS // 2)])
def test_what_is_kept_is_bounded(entered: list[Any], steps: int, tokens: int) -> None:
    late = LateStats()
    for _ in range(steps - 1):
        late.record(SchedulerStats(), step(tokens))
    assert not entered
    late.record(SchedulerStats(), step(tokens))
    assert len(entered) == steps


def test_every_other_field_is_taken_for_something_that_counts() -> None:
    assert only_gauges(SchedulerStats(num_running_reqs=3, kv_cache_usage=0.5))
    names = vars(SchedulerStats()).keys() - front_patches._GAUGES - {"prefix_cache_stats"}
    for name in names:
        stats = SchedulerStats()
        setattr(stats, name, {"a": 1})
        assert not only_gauges(stats), name
    assert {"spec_decoding_stats", "kv_connector_stats", "running_lora_adapters"} <= names


def test_a_plugin_that_brings_its_own_logger_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert front_patches.stat_loggers() == [LateStats]

    class Theirs(PrometheusStatLogger):  # type: ignore[misc]
        pass

    monkeypatch.setattr(front_patches, "load_stat_logger_plugin_factories", lambda: [Theirs])
    assert front_patches.stat_loggers() == []
