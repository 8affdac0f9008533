"""What came of a request is found by the ids that its client knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.engine import front_wire
from pullfill.frontend.admission import Admission
from pullfill.frontend.flight import Waits
from pullfill.frontend.request_log import RequestLog, RequestRecord
from pullfill.runtime import tracing
from pullfill.snapshot import Explained
from pullfill.wire import ExplainRecord
from tests.support.asgi import Client
from tests.support.fake_vllm import request
from tests.support.frontend_rig import FakeDecode, rig
from tests.support.otlp import Receiver
from tests.support.said import blank
from tests.support.waiting import soon

App = Callable[[Any, Any, Any], Awaitable[None]]


def record(request_id: str) -> ExplainRecord:
    return blank(ExplainRecord, request_id=request_id, path="remote", decode_instance="d")


def known(requests: RequestLog, name: str) -> Explained:
    found = requests.get(name)
    assert found is not None, name
    return found


def finish(requests: RequestLog, key: str) -> None:
    """An engine request from its beginning to its end, in the call that is being served."""
    one = RequestRecord(key, 0.5, 7.0)
    requests.begin(one)
    requests.sent(f"{key}-12345678", one, one.to("d"))
    requests.take(front_wire.encode_list([record(f"{key}-12345678")]))
    one.answer_ms = 1.0
    requests.over(one)


async def serve(requests: RequestLog, app: App, name: str = "", most: int = 9) -> Client:
    """Serve an HTTP request. Returns its client."""
    headers = [(b"x-request-id", name.encode())] if name else []
    gate = Admission(app, str, most, requests=requests)
    return await Client(gate, headers=headers).say().ended()


def answering(
    requests: RequestLog, response_id: str, *keys: str, status: int = 200, body: bytes = b"x"
) -> App:
    """As a route of vLLM: notes the id of the answer, then makes engine requests."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["request_metadata"] = SimpleNamespace(request_id=response_id)
        for key in keys:
            finish(requests, key)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app


async def test_an_id_finds_its_own_request_and_no_other() -> None:
    """`cmpl-foo-0` found the first prompt of `cmpl-foo`. Beams have ids that nobody knows."""
    requests = RequestLog()
    beams = [f"cmpl-a/b-{number:x}-beam-{number % 2}" for number in range(40)]
    await serve(requests, answering(requests, "cmpl-foo", "cmpl-foo-0"), "foo")
    await serve(
        requests, answering(requests, "cmpl-foo-0", "cmpl-foo-0-0", "1_cmpl-foo-0-0"), "foo-0"
    )
    await serve(requests, answering(requests, "cmpl-a/b", *beams), "a/b")
    for name, parts in (
        ("cmpl-foo", []), ("foo", []), ("cmpl-foo-0", ["1_cmpl-foo-0-0"]), ("a/b", beams[1:32]),
        ("cmpl-foo-0-0", []),  # as in logs
    ):  # fmt: skip
        found = known(requests, name)
        assert (found.request_id, [part.request_id for part in found.parts]) == (name, parts)
        assert found.more_parts == (8 if name == "a/b" else 0)
        assert (found.timings_ms.route, found.timings_ms.first_token) == (0.5, 7.0)
    assert requests.get("cmpl") is None


async def test_an_id_that_is_sent_again_finds_the_last_request_and_an_answer_its_own() -> None:
    requests = RequestLog(limit=3)
    for number in range(5):
        names = (f"cmpl-{number}", f"cmpl-{number}-0")
        await serve(requests, answering(requests, *names), "x")
        assert known(requests, "x").arrived_at == known(requests, names[0]).arrived_at
    assert [requests.get(f"cmpl-{number}") is None for number in range(5)] == [
        True, True, False, False, False,
    ]  # fmt: skip
    assert known(requests, "x").request_id == "x", "the oldest are forgotten without it"


async def test_a_request_that_is_refused_or_fails_says_why() -> None:
    requests = RequestLog()
    error = json.dumps({"error": {"message": "no such model", "code": 404}}).encode()
    await serve(requests, answering(requests, "cmpl-a", status=404, body=error), "a")
    refused = await serve(requests, answering(requests, "never"), most=0)
    name = refused.headers[b"x-request-id"].decode()
    cut = b'data: {"error": {"message": "bad regex", "code": 400}}\n\n'
    await serve(requests, answering(requests, "cmpl-b", body=cut), "b")
    event = b'event: response.failed\ndata: {"response": {"error": {"message": "lost"}}}\n\n'
    await serve(requests, answering(requests, "resp_c", body=event), "c")
    await serve(
        requests, answering(requests, "cmpl-d", status=500, body=b"Internal Server Error"), "d"
    )
    for told, status, why in (
        ("cmpl-a", 404, "no such model"), (name, 429, "0 requests are being served"),
        ("cmpl-b", 200, "bad regex"), ("resp_c", 200, "lost"), ("d", 500, "Internal Server Error"),
    ):  # fmt: skip
        found = known(requests, told)
        assert (found.state, found.status, found.path) == ("failed", status, "none")
        assert str(found.error).startswith(why)


async def test_what_is_under_way_or_was_cancelled_says_so() -> None:
    requests, states = RequestLog(), list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        one = RequestRecord("cmpl-x-0")
        requests.begin(one)
        states.append(known(requests, "x").state)
        requests.over(one)

    await serve(requests, app, "x")
    states.append(known(requests, "x").state)
    assert states == ["running", "cancelled"]


async def test_an_answer_whose_last_byte_is_out_is_waited_for() -> None:
    requests, left = RequestLog(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answering(requests, "cmpl-x", status=400, body=b"no")(scope, receive, send)
        await left.wait()

    serving = asyncio.create_task(serve(requests, app))
    await soon(lambda: requests.get("cmpl-x") is not None)
    waiting = asyncio.create_task(requests.settled("cmpl-x"))
    await asyncio.sleep(0)
    left.set()
    await waiting
    found = known(requests, "cmpl-x")
    assert (found.state, found.error) == ("failed", "no")
    await serving


async def test_a_flood_of_refusals_pushes_out_no_request_that_was_served() -> None:
    requests = RequestLog(limit=3)
    requests.take(front_wire.encode_list([record("stranger")]))
    for number in range(5):
        await serve(requests, answering(requests, f"k{number}", f"k{number}-0"))
    for number in range(5):
        await serve(requests, answering(requests, f"r{number}"), most=0, name=f"r{number}")
    for kind in "kr":
        kept = [requests.get(f"{kind}{number}") is not None for number in range(5)]
        assert kept == [False, False, True, True, True]
    await serve(requests, answering(requests, "many", *(f"many-{part}" for part in range(9))))
    assert requests.get("k4") is None, "the engine requests of all together are bounded"
    assert requests.get("r4") is not None


async def test_a_request_that_lost_its_worker_or_never_had_one_is_explained() -> None:
    worker = FakeDecode("decode-1", hold=True)
    async with rig(worker, waits=Waits(first=0.05, restart=0.05)) as r:
        r.dispatcher.submit(request("cmpl-a-0-1234abcd", max_tokens=9, seed=1, temperature=1.0))
        await soon(lambda: bool(worker.added))
        worker.die()
        a = await r.told("cmpl-a-0")
        r.dispatcher.submit(request("cmpl-b-0-1234abcd"))
        b = await r.told("cmpl-b-0")
        assert (a.state, a.path, a.decode_instance, a.prompt_tokens) == (
            "failed", "unknown", "decode-1", 3,
        )  # fmt: skip
        assert (b.state, b.path, b.decode_instance) == ("failed", "none", "")
        assert a.migrated_from == (), "no other worker has continued it"
        assert (a.error, b.error) == tuple(r.sink.failures.values())
        assert [record.key for record in r.requests.since(0)] == ["cmpl-b-0", "cmpl-a-0"]


async def test_an_answer_that_a_stop_string_ended_is_known_at_once() -> None:
    """Its worker tells of it a moment later."""
    async with rig(FakeDecode(step_s=0.01)) as r:
        r.dispatcher.submit(request("cmpl-a-0-1234abcd", max_tokens=999))
        await soon(lambda: bool(r.sink.tokens))
        r.dispatcher.abort(["cmpl-a-0-1234abcd"], answered=True)
        await r.requests.settled("cmpl-a-0")
        found = known(r.requests, "cmpl-a-0")
        assert (found.state, found.path) == ("answered", "local")


async def test_a_record_that_never_comes_is_not_waited_for() -> None:
    requests, one = RequestLog(wait_s=0.01), RequestRecord("x")
    one.answer_ms = 1.0
    requests.begin(one)
    requests.sent("wire", one, one.to("decode-1"))
    requests.over(one)
    async with asyncio.timeout(5):
        await requests.settled("x")
    found = known(requests, "x")
    assert (found.state, found.path) == ("answered", "unknown")


# --------------------------------------------------------------------------- spans


TRACE, CLIENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{CLIENT}-01", "tracestate": "vendor=1"}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        tracing.begin(receiver.url, "frontend", "frontend-1")
        yield receiver
        tracing.close(20.0)


async def test_a_request_that_is_sent_again_is_linked(receiver: Receiver) -> None:
    one, two, asked = FakeDecode("decode-1", hold=True), FakeDecode("decode-2"), request("a-1")
    asked.trace_headers = HEADERS
    async with rig(one, two) as r:
        r.dispatcher.submit(asked)
        await soon(lambda: bool(one.added))
        one.die()
        await soon(lambda: "a-1" in r.sink.finished)
    tracing.close(20.0)
    first, second = receiver.named("frontend.dispatch")
    assert first.error
    assert not second.error
    assert second.links == (first.id,)
    assert second.parent == first.parent == receiver.one("frontend.request").id
