"""Spans of a remote prefill, from the decode worker to the transfer, at a real OTLP receiver.

The handoff is real but for vLLM. All halves are in this process; each finds the others' spans only
by what the job carries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pullfill.decode_worker.ledger import JobState
from pullfill.runtime import tracing
from tests.support.fakes import FakeClock
from tests.support.fetch_rig import FetchWorker, without_vllm
from tests.support.handoff_rig import Make, prompt, settled
from tests.support.kv_engine import BLOCK
from tests.support.otlp import Receiver, Span
from tests.support.transfer_rigs import RIGS
from tests.support.waiting import soon

TRACE, ABOVE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{ABOVE}-01"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        tracing.begin(receiver.url, "both", "here")
        yield receiver
        tracing.close()


def within(inner: Span, outer: Span) -> bool:
    """Up to the few microseconds between two looks at the wall clock."""
    slack = 10_000_000
    return outer.start_ns - slack <= inner.start_ns <= inner.end_ns <= outer.end_ns + slack


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
        assert within(replace(span, end_ns=ended.end_ns), parent), name
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


async def test_a_prefix_of_another_decode_worker(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_vllm(monkeypatch)
    rig = RIGS["shm"](tmp_path)
    holder, asker = FetchWorker(rig, "holder"), FetchWorker(rig, "asker")
    for worker in (holder, asker):
        await worker.start()
    tokens = prompt(10 * BLOCK + 1)
    holder.cache(tokens)
    request = asker.request(tokens, holder.holds(10 * BLOCK))
    request.trace_headers = HEADERS
    told = await asker.end(await asker.admit(request))
    for worker in (asker, holder):
        await worker.check_back()
        await worker.stop()
    tracing.close()
    fetch, above = receiver.one("decode.prefix_fetch"), receiver.one("decode.request")
    assert fetch.parent == above.id
    assert within(fetch, above)
    assert fetch.attributes == {
        "pullfill.fetched_from": "holder",
        "pullfill.outcome": "fetched",
        "pullfill.kv_bytes": told.kv_bytes,
    }
    assert told.timings_ms.fetch == pytest.approx((fetch.end_ns - fetch.start_ns) / 1e6, abs=1.0)
