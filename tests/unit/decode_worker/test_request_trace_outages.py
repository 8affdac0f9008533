"""What `explain` says was unreachable when a prompt was prefilled here."""

from __future__ import annotations

from pullfill.decode_worker.conditional_router import Decision, Situation
from pullfill.decode_worker.request_trace import RequestTraces
from pullfill.errors import Outcome
from tests.support.fakes import FakeClock


def test_it_is_asked_once_for_many_prompts_of_one_reason_and_again_for_another() -> None:
    clock, asked = FakeClock(), 0
    traces, said = RequestTraces("d", clock), ""

    def outage() -> str:
        nonlocal asked
        asked += 1
        return said

    traces.outage = outage
    for name in "abcdef":
        traces.decided(name, Situation(100, 0), Decision(True, "long_prompt"))
    for name in "abc":
        traces.settled(name, False, Outcome.CLAIM_TIMEOUT)
    said = "no prefill worker claims jobs"
    for name in "de":
        traces.settled(name, False, Outcome.CLAIMS_STALLED)
    assert asked == 2
    clock.advance(1.0)
    traces.settled("f", False, Outcome.CLAIM_TIMEOUT)
    told = [traces.finish(name) for name in "abcdef"]
    assert [one and one.outage for one in told] == [None] * 3 + [said] * 3
