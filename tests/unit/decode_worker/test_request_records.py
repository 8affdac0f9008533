"""What the record of a request tells. Those that no frontend of ours has sent stay here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.decode_worker import request_trace
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.decode_worker.rules import Decision, Situation
from pullfill.decode_worker.scheduler import DecodeHalf
from pullfill.errors import Outcome
from pullfill.snapshot import MAX_PARTS, Explained
from pullfill.wire import StageTimings, Timings
from tests.support.fakes import FakeClock
from tests.unit.decode_worker.test_scheduler import Rig as SchedulerRig


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
    assert (told.path, told.reason) == ("local", "long_prompt")
    assert (told.fallback, told.outage) == ("claim_timeout", "NATS is away")


def test_what_a_prefill_worker_says_at_its_commit_counts_only_if_vllm_loads_the_kv() -> None:
    traces = RequestTraces("d", FakeClock())
    traces.decided("r", Situation(100, 16), Decision(True, "long_prompt"))
    traces.claimed("r", 1, "p", 0.5)
    traces.committed("r", StageTimings(prefill_ms=7.0), 4096, "shm", ("nccl: no GPU",))
    traces.settled("r", Outcome.REJECTED)
    told = traces.finish("r")
    assert (told.path, told.kv_bytes, told.transport) == ("local", 0, None)
    assert (told.remote_tokens, told.why_not_better) == (0, ())
    assert told.timings_ms == Timings(queue=500.0)
    assert (told.attempts, told.prefill_instance) == (1, "p")
    assert traces.finish("r") is None


class Rig:
    """A decode worker, and the clients of the server beside it. theirs: requests of frontends."""

    def __init__(self) -> None:
        self.inside: dict[str, Any] = {}
        self.theirs: set[str] = set()
        scheduler = SchedulerRig(of_frontend=self.theirs.__contains__)
        self.traces, self.half = scheduler.traces, DecodeHalf()
        self.half.begin(scheduler.side)
        self.now = 0.0

    def send(self, request_id: str, *, remote: bool = False, stop: tuple[str, ...] = ()) -> None:
        self.inside[request_id] = SimpleNamespace(
            request_id=request_id, arrival_time=self.now, num_prompt_tokens=100,
            sampling_params=SimpleNamespace(stop=stop), num_output_tokens=4,
        )  # fmt: skip
        if remote:
            decision = Decision(True, "long_prompt")
            self.traces.decided(request_id, Situation(100, 0), decision)

    def end(self, request_id: str, reason: str = "stop") -> None:
        request = self.inside.pop(request_id)
        request.get_finished_reason = lambda: reason
        self.half.finished(request, ())

    def serve(self, *request_ids: str, reason: str = "stop") -> None:
        """All of them are of one call."""
        self.now += 1.0
        for request_id in request_ids:
            self.send(request_id, remote=True)
        for request_id in request_ids:
            self.traces.settled(request_id, Outcome.COMMITTED)
            self.end(request_id, reason)

    def find(self, name: str) -> Explained | None:
        return self.traces.find(name, list(self.inside.values()))

    def known(self, name: str) -> Explained:
        found = self.find(name)
        assert found is not None, name
        return found


@pytest.mark.essential
def test_a_request_that_no_frontend_sent_is_known_by_the_ids_that_its_client_has() -> None:
    rig = Rig()
    rig.theirs.add("cmpl-theirs-0-1234abcd")
    rig.serve("cmpl-x-1-0-1234abcd")
    rig.serve("chatcmpl-x-2-1234abcd", "cmpl-theirs-0-1234abcd")
    for name in ("cmpl-x-1", "x-1", "cmpl-x-1-0-1234abcd"):
        told = rig.known(name)
        assert (told.request_id, told.path, told.state) == (name, "remote", "answered")
        assert (told.decode_instance, told.arrived_at, told.parts) == ("decode-1", 1.0, ())
    assert rig.known("x-2").arrived_at == rig.known("chatcmpl-x-2").arrived_at == 2.0
    for name in ("x", "cmpl-x", "chatcmpl-x", "theirs", "cmpl-theirs-0-1234abcd"):
        assert rig.find(name) is None, name
    assert rig.traces.finish("cmpl-theirs-0-1234abcd"), "the request server gives it the frontend"


def test_prompts_choices_and_beams_are_parts_and_the_same_id_again_is_another_call() -> None:
    rig = Rig()
    rig.serve(*(f"{choice}_cmpl-x-{prompt}-0000000a" for prompt in (0, 1) for choice in (0, 1)))
    told = rig.known("cmpl-x")
    assert [part.request_id[:10] for part in told.parts] == [
        "1_cmpl-x-0",
        "0_cmpl-x-1",
        "1_cmpl-x-1",
    ]
    rig.serve("cmpl-x-0-0000000b", reason="error")
    told = rig.known("cmpl-x")
    assert (told.state, told.parts) == ("failed", ())
    rig.serve(*(f"cmpl-y-{'0' * 32}-beam-{beam}-0000000c" for beam in range(MAX_PARTS + 2)))
    told = rig.known("y")
    assert (len(told.parts), told.more_parts) == (MAX_PARTS - 1, 2)
    assert "-beam-1-" in told.parts[0].request_id


def test_a_request_that_runs_is_told_as_far_as_it_has_come() -> None:
    rig = Rig()
    rig.send("chatcmpl-x-0000000a")
    told = rig.known("x")
    assert (told.state, told.path, told.prompt_tokens) == ("running", "unknown", 100)
    rig.traces.decided("chatcmpl-x-0000000a", Situation(100, 0), Decision(True, "long_prompt"))
    assert (rig.known("x").path, rig.known("x").reason) == ("unknown", "long_prompt")
    rig.traces.settled("chatcmpl-x-0000000a", Outcome.COMMITTED)
    assert (rig.known("x").state, rig.known("x").path) == ("running", "remote")
    rig.end("chatcmpl-x-0000000a", "abort")
    assert rig.known("x").state == "cancelled"


def test_an_abort_after_which_nobody_knows_whether_the_answer_was_complete() -> None:
    """vLLM's server looks for stop strings, and aborts the request when it finds one."""
    rig = Rig()
    rig.send("cmpl-x-0-0000000a", remote=True, stop=("END",))
    rig.end("cmpl-x-0-0000000a", "abort")
    assert rig.known("x").state == ""


def test_the_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "MAX_RECORDS", 2)
    rig = Rig()
    rig.serve("cmpl-a-0-0000000a", "cmpl-b-0-0000000a", f"cmpl-{'x' * 9000}-0-0000000a")
    rig.serve("cmpl-c-0-0000000a")
    assert [name for name in "abc" if rig.find(name)] == ["b", "c"]
    assert rig.find("x" * 9000) is None, "clients choose the ids"


def test_the_last_that_ended_are_told_with_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_trace, "RECENT", 2)
    monkeypatch.setattr(request_trace.time, "time", lambda: 4.5)
    rig = Rig()
    rig.theirs.add("cmpl-b-0-0000000a")
    for name in "abc":
        rig.serve(f"cmpl-{name}-0-0000000a")
    rig.serve("cmpl-d-0-0000000a", reason="error")
    rig.send("cmpl-e-0-0000000a", remote=True)
    one, two = rig.traces.ended()
    assert (one.request_id, one.answer_ms, one.answer_tokens) == ("cmpl-c-0-0000000a", 1500.0, 4)
    assert (two.request_id, two.state, one.error) == ("cmpl-d-0-0000000a", "failed", None)
    assert two.error == "its engine ended it with an error"
