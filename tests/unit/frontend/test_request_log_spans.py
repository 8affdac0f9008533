"""Spans of a frontend's requests, at a real OTLP receiver. Workers are fakes over real ZMQ."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from pullfill.runtime import tracing
from tests.support.fake_vllm import Request, request
from tests.support.frontend_rig import FakeDecode, rig, until
from tests.support.otlp import Receiver

TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "vendor=1"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        tracing.begin(receiver.url, "frontend", "frontend-1")
        yield receiver
        tracing.close(20.0)


def traced(request_id: str, headers: dict[str, str] | None) -> Request:
    made = request(request_id)
    made.trace_headers = headers
    return made


async def answered(request_id: str, headers: dict[str, str] | None) -> FakeDecode:
    """Send one request, and return the worker that answered it. All spans are at the receiver."""
    worker = FakeDecode()
    async with rig(worker) as r:
        await r.ready(1)
        r.dispatcher.submit(traced(request_id, headers))
        await until(lambda: request_id in r.sink.finished)
    tracing.close(20.0)
    return worker


async def test_the_worker_goes_on_with_the_clients_trace(receiver: Receiver) -> None:
    worker = await answered("cmpl-x-0-1234abcd", HEADERS)
    whole, sent = receiver.one("frontend.request"), receiver.one("frontend.dispatch")
    assert (whole.trace, whole.parent) == (TRACE, CLIENT)
    assert (sent.trace, sent.parent, sent.links) == (TRACE, whole.id, ())
    assert worker.added[0].trace_headers == {
        "traceparent": f"00-{TRACE}-{sent.id}-01", "tracestate": "vendor=1",
    }  # fmt: skip
    assert whole.attributes["gen_ai.request.id"] == "cmpl-x-0"
    assert whole.attributes["gen_ai.usage.completion_tokens"] > 0
    assert sent.attributes["pullfill.decode_instance"] == worker.record.instance_id
    assert not whole.error
    assert not sent.error


async def test_a_request_without_a_trace_begins_one(receiver: Receiver) -> None:
    worker = await answered("a-1", None)
    whole = receiver.one("frontend.request")
    assert whole.parent == ""
    assert whole.trace in worker.added[0].trace_headers["traceparent"]


async def test_a_request_that_is_sent_again_is_linked(receiver: Receiver) -> None:
    one, two = FakeDecode("decode-1", hold=True), FakeDecode("decode-2")
    async with rig(one, two) as r:
        await r.ready(2)
        r.dispatcher.submit(traced("a-1", HEADERS))
        await until(lambda: bool(one.added))
        one.die()
        await until(lambda: "a-1" in r.sink.finished)
    tracing.close(20.0)
    first, second = receiver.named("frontend.dispatch")
    assert first.error
    assert not second.error
    assert second.links == (first.id,)
    assert second.parent == first.parent == receiver.one("frontend.request").id


async def test_an_abort_ends_the_trace(receiver: Receiver) -> None:
    worker = FakeDecode(hold=True)
    async with rig(worker) as r:
        await r.ready(1)
        r.dispatcher.submit(traced("a-1", HEADERS))
        await until(lambda: bool(worker.added))
        r.dispatcher.abort(["a-1"])
        await asyncio.sleep(0)
    tracing.close(20.0)
    assert receiver.one("frontend.request").error == "aborted"
    assert receiver.one("frontend.dispatch").error == "aborted"


async def test_a_stop_string_is_no_error(receiver: Receiver) -> None:
    """vLLM finds it in the frontend, and aborts the request at its worker."""
    worker = FakeDecode(hold=True)
    async with rig(worker) as r:
        await r.ready(1)
        r.dispatcher.submit(traced("a-1", HEADERS))
        await until(lambda: bool(worker.added))
        record = r.dispatcher.flights["a-1"].record
        r.dispatcher.abort(["a-1"], answered=True)
        assert record.answer_ms is not None, "not cancelled"
        await until(lambda: worker.aborted == ["a-1"])
    tracing.close(20.0)
    assert not receiver.one("frontend.request").error


async def test_an_unsampled_trace_reaches_the_worker_as_it_came(receiver: Receiver) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CLIENT}-00"}
    worker = await answered("a-1", headers)
    assert worker.added[0].trace_headers == headers
    assert receiver.spans == []
