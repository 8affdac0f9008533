"""Makes and changes vLLM's EngineCoreOutputs, so that other rooms need not import vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any

from pullfill.engine import front_wire, release
from pullfill.engine.blame import Fault

_LEVELS = frozenset({
    "num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs",
    "num_kv_fetch_reqs_by_stage", "kv_cache_usage", "waiting_lora_adapters",
    "running_lora_adapters",
})  # fmt: skip
"""Fields of vLLM's SchedulerStats of which the newest value alone counts."""
_HITS = ("prefix_cache_stats", "connector_prefix_cache_stats")
_COUNTS = (
    "requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits",
)  # fmt: skip
"""Fields of vLLM's PrefixCacheStats that add up."""


def count_as_computed(request: Any, tokens: int) -> None:
    """Count external tokens of a request as computed here, not as found in a cache.

    Call it when vLLM has scheduled the request for the first time, before its first output. From
    the number of cached tokens vLLM then finds how many the prompt has added to the prefix cache.

    request: vLLM's Request."""
    stats = request.prefill_stats
    if stats is not None:
        stats.num_cached_tokens -= tokens


def correct_cached_tokens(output: Any, offloaded: Callable[[str], int] = lambda _: 0) -> None:
    """Count only the local prefix hit as cached, not the tokens that a prefill worker computed.

    The number of external tokens stays for vLLM's metrics.

    offloaded: returns how much of a request's hit came from vLLM's own KV offloading."""
    stats = output.prefill_stats
    if stats is not None and stats.num_external_cached_tokens:
        found = offloaded(output.request_id)
        stats.num_cached_tokens = stats.num_local_cached_tokens + found


def error_outputs(request_id: str, why: str, fault: Fault = Fault.REQUEST) -> Any:
    """EngineCoreOutputs that end one request with an error. why: for the user."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[],
                finish_reason=FinishReason.ERROR,
                stop_reason=why,
                kv_transfer_params=front_wire.fault_mark(fault),
            )
        ]
    )


def bound_grammar(request: Any, core: Any) -> bool:
    """Whether a vLLM Request has structured output. If so, bounds its grammar (grammars.py)."""
    if getattr(request, "structured_output_request", None) is None:
        return False
    from pullfill.engine import grammars

    grammars.bound(request, core)
    return True


def explain_error(output: Any, request: Any) -> None:
    """If an output ends a request with structured output with an error, say why in `stop_reason`.
    vLLM itself tells clients nothing. request: vLLM's Request."""
    from vllm.v1.engine import FinishReason

    from pullfill.engine import grammars

    if output.finish_reason == FinishReason.ERROR:
        output.stop_reason = grammars.why_ended(request)


def utility_outputs(call_id: int, result: Any, failure: str | None) -> Any:
    """EngineCoreOutputs that answer one utility call."""
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    from vllm.v1.serial_utils import UtilityResult

    answer = UtilityOutput(call_id, failure)
    if failure is None:
        answer.result = UtilityResult(result)
    return EngineCoreOutputs(utility_output=answer)


def only_stats(batch: Any) -> bool:
    """Whether EngineCoreOutputs tell the scheduler's statistics and nothing else."""
    return not (
        batch.outputs
        or batch.utility_output
        or batch.finished_requests
        or batch.wave_complete is not None
        or batch.start_wave is not None
    )


def stats_outputs(stats: Any) -> Any:
    """EngineCoreOutputs that tell these statistics and nothing else."""
    from vllm.v1.engine import EngineCoreOutputs

    return EngineCoreOutputs(scheduler_stats=stats)


def idle(stats: Any) -> bool:
    """Whether SchedulerStats say that the engine has no request."""
    return not (stats.num_running_reqs or stats.num_waiting_reqs or stats.num_skipped_waiting_reqs)


def plain(stats: Any) -> bool:
    """Whether SchedulerStats can be added to newer ones: they hold levels and prefix cache counts
    only. What we do not know cannot be added."""
    if any(_others(stats.__class__)(stats)):
        return False
    hits, more = stats.prefix_cache_stats, stats.connector_prefix_cache_stats
    return not (hits.reset or (more is not None and more.reset))


@cache
def _others(kind: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Gets all other fields of SchedulerStats."""
    return attrgetter(*[f.name for f in fields(kind) if f.name not in {*_LEVELS, *_HITS}])


def add_up(newer: Any, older: Any) -> None:
    """Add `plain` SchedulerStats of an older step to newer ones, which keep their levels."""
    for name in _HITS:
        more = getattr(older, name)
        if more is None or not (more.requests or more.preempted_requests):
            continue
        total = getattr(newer, name)
        if total is None or not (total.requests or total.preempted_requests):
            setattr(newer, name, more)
            continue
        for count in _COUNTS:
            setattr(total, count, getattr(total, count) + getattr(more, count))
        release.this.add_hits_by_source(total, more)
