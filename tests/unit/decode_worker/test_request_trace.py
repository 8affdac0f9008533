"""What the record of a request tells, and its spans."""

from __future__ import annotations

import pytest

from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.errors import Outcome
from pullfill.wire import StageTimings, Timings
from tests.support.fakes import FakeClock


def test_the_first_decision_and_the_outage_of_its_fallback_are_told() -> None:
    """vLLM asks again after the fallback. That says nothing new."""
    said = ""
    traces = RequestTraces("d", outage=lambda: said)
    traces.decided("r", Situation(100, 0), Decision(True, "long_prompt"))
    said = "NATS is away"
    traces.settled("r", Outcome.CLAIM_TIMEOUT)
    said = ""
    traces.decided("r", Situation(100, 0), Decision(False, "fallback"))
    told = traces.finish("r")
    assert told is not None
    assert (told.path, told.reason) == ("local", "long_prompt")
    assert (told.fallback, told.outage) == ("claim_timeout", "NATS is away")


@pytest.mark.parametrize("outcome", [Outcome.COMMITTED, Outcome.REJECTED])
def test_what_a_prefill_worker_says_at_its_commit_counts_if_vllm_loads_the_kv(
    outcome: Outcome,
) -> None:
    traces = RequestTraces("d", FakeClock())
    traces.decided("r", Situation(100, 16), Decision(True, "long_prompt"))
    traces.claimed("r", 1, "p", 0.5)
    traces.committed("r", StageTimings(prefill_ms=7.0), 4096, "shm", ("nccl: no GPU",))
    traces.settled("r", outcome)
    told = traces.finish("r")
    assert told is not None
    if outcome is Outcome.COMMITTED:
        times = Timings(
            queue=500.0, claim=0.0, prefix_read=0.0, prefill=7.0, kv_write=0.0, tail=0.0, commit=0.0
        )
        assert (told.path, told.kv_bytes, told.transport) == ("remote", 4096, "shm")
        assert (told.remote_tokens, told.why_not_better) == (83, ("nccl: no GPU",))
    else:
        times = Timings(queue=500.0)
        assert (told.path, told.kv_bytes, told.transport) == ("local", 0, None)
        assert (told.remote_tokens, told.why_not_better) == (0, ())
    assert told.timings_ms == times
    assert (told.attempts, told.prefill_instance) == (1, "p")
    assert traces.finish("r") is None
