"""Spans of a remote prefill, from the decode worker to the transfer, at a real OTLP receiver.

The handoff is real but for vLLM. All halves are in this process; each finds the others' spans only
by what the job carries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pullfill.decode_worker.ledger import JobState
from pullfill.runtime import tracing
from tests.support.fakes import FakeClock
from tests.support.handoff_rig import Make, prompt, settled
from tests.support.kv_engine import BLOCK
from tests.support.otlp import ABOVE, HEADERS, TRACE, Receiver
from tests.support.waiting import soon


@pytest.mark.essential
async def test_one_prompt(make: Make, receiver: Receiver) -> None:
    async with make("shm") as cluster:
        decode, _ = await cluster.decode(), await cluster.prefill(chunk=5)
        tokens = prompt(30)
        hit = decode.cache(tokens[: 2 * BLOCK])
        served = decode.send(tokens, hit, headers=HEADERS)
        await settled(served)
        record = decode.traces.finish(served.request.request_id)
    tracing.close()
    assert {s.trace for s in receiver.spans} == {TRACE}
    request = receiver.one("decode.request")
    remote, attempt = receiver.one("decode.remote_prefill"), receiver.one("prefill.attempt")
    assert request.parent == ABOVE
    assert remote.parent == request.id
    for name, parent in {
        "queue.wait": remote,
        "prefill.attempt": remote,
        "decode.commit": remote,
        "prefill.claim": attempt,
        "prefill.compute": attempt,
    }.items():
        span = receiver.one(name)
        assert span.parent == parent.id, name
        # An attempt goes on until its message is settled, after the commit.
        ended = parent if name == "prefill.attempt" else span
        assert replace(span, end_ns=ended.end_ns).within(parent), name
        assert not span.error
    assert len(receiver.named("transfer.read")) == 1
    writes = receiver.named("transfer.write")
    assert len(writes) > 1, "one for each chunk"
    assert {w.parent for w in writes} == {attempt.id}
    assert sum(w.attributes["pullfill.bytes"] for w in writes) == record.kv_bytes
    assert request.attributes["pullfill.path"] == "remote"
    assert attempt.attributes["pullfill.attempt"] == 1
    assert attempt.links == ()


async def test_a_second_attempt_is_linked_to_the_first(make: Make, receiver: Receiver) -> None:
    async with make(clock=FakeClock()) as cluster:
        decode, first = await cluster.decode(), await cluster.prefill(chunk=5)
        first.engine.gate.clear()
        served = decode.send(prompt(30), headers=HEADERS)
        await soon(lambda: decode.ledger.sums().jobs[JobState.GRANTED])
        await cluster.prefill()
        await first.puller.stop()
        await first.puller.abandon()
        first.engine.gate.set()
        await settled(served)
        assert decode.right(served)
        decode.traces.finish(served.request.request_id)
    tracing.close()
    one, two = receiver.named("prefill.attempt")
    assert (one.attributes["pullfill.attempt"], two.attributes["pullfill.attempt"]) == (1, 2)
    assert one.error
    assert not two.error
    assert two.links == (one.id,)
    assert two.parent == one.parent == receiver.one("decode.remote_prefill").id
    assert len(receiver.named("queue.wait")) == 2
