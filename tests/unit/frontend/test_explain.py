"""What came of a request is found by the ids that its client knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pullfill.frontend import explain as explain_room
from pullfill.frontend.admission import Admission
from pullfill.frontend.explain import ExplainStore, Trace, key_of
from pullfill.wire import ExplainRecord
from tests.support.fake_decode import FakeDecode
from tests.support.fake_vllm import request
from tests.support.frontend_rig import rig, until

App = Callable[[Any, Any, Any], Awaitable[None]]


def record(request_id: str) -> ExplainRecord:
    return ExplainRecord(
        request_id=request_id, path="remote", reason="long_prompt", prompt_tokens=9,
        prefix_hit_tokens=0, remote_tokens=8, decode_instance="d",
    )  # fmt: skip


def finish(store: ExplainStore, key: str) -> Trace:
    """An engine request from its beginning to its end, in the call that is being served."""
    trace = Trace(key, 0.5, 7.0)
    store.open(f"{key}-12345678", trace)
    store.put(record(f"{key}-12345678"))
    trace.answer_ms = 1.0
    store.over(trace)
    return trace


async def serve(store: ExplainStore, app: App, name: str = "", most: int = 9) -> dict[str, Any]:
    """Serve an HTTP request. Returns the first message to the client."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def ready(_: float) -> bool:
        return True

    headers = [(b"x-request-id", name.encode())] if name else []
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    gate = Admission(app, ready, most, explain=store)
    # As uvicorn does: a task, with a context of its own.
    await asyncio.create_task(gate(scope, receive, send))  # type: ignore[arg-type]
    answer: dict[str, Any] = sent[0] if sent else {}
    return answer


def answering(
    store: ExplainStore, response_id: str, *keys: str, status: int = 200, body: bytes = b"x"
) -> App:
    """As a route of vLLM: notes the id of the answer, then makes engine requests."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["request_metadata"] = SimpleNamespace(request_id=response_id)
        for key in keys:
            finish(store, key)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return app


@pytest.mark.parametrize(
    ("request_id", "external_id", "key"),
    [
        ("chatcmpl-x-12345678", "chatcmpl-x", "chatcmpl-x"),
        ("2_chatcmpl-x-12345678", "chatcmpl-x", "2_chatcmpl-x"),
        ("cmpl-x-0-12345678", "cmpl-x-0", "cmpl-x-0"),
        ("0_cmpl-x-1-12345678", "cmpl-x-1", "0_cmpl-x-1"),
        ("7_mine-12345678", "7_mine", "7_mine"),
        ("bare", None, "bare"),
    ],
)
def test_explain_keys_drop_vllms_random_tail_and_keep_the_choice(
    request_id: str, external_id: str | None, key: str
) -> None:
    assert key_of(request_id, external_id) == key


async def test_an_id_finds_its_own_request_and_no_other() -> None:
    """`cmpl-foo-0` found the first prompt of `cmpl-foo`. Beams have ids that nobody knows."""
    store = ExplainStore()
    beams = [f"cmpl-a/b-{number:x}-beam-{number % 2}" for number in range(40)]
    await serve(store, answering(store, "cmpl-foo", "cmpl-foo-0"), "foo")
    await serve(store, answering(store, "cmpl-foo-0", "cmpl-foo-0-0", "1_cmpl-foo-0-0"), "foo-0")
    await serve(store, answering(store, "cmpl-a/b", *beams), "a/b")
    for name, parts in (
        ("cmpl-foo", []), ("foo", []), ("cmpl-foo-0", ["1_cmpl-foo-0-0"]), ("a/b", beams[1:32]),
        ("cmpl-foo-0-0", []),  # as in logs
    ):  # fmt: skip
        found = store.get(name)
        assert found is not None, name
        assert (found.request_id, [part.request_id for part in found.parts]) == (name, parts)
        assert (found.same_id, found.more_parts) == ((), 8 if name == "a/b" else 0)
        assert (found.timings_ms.route, found.timings_ms.first_token) == (0.5, 7.0)
    assert store.get("cmpl") is None


async def test_requests_with_one_id_are_all_told() -> None:
    store = ExplainStore()
    for number in range(25):
        keys = ["cmpl-x-0"] if number % 2 == 0 else []
        status = 200 if keys else 400
        await serve(store, answering(store, "cmpl-x", *keys, status=status), "x")
    found = store.get("cmpl-x")
    assert found is not None
    states = [one.state for one in (found, *found.same_id)]
    assert states == ["answered", "failed"] * 10


async def test_a_request_that_is_refused_or_fails_says_why() -> None:
    store = ExplainStore()
    error = json.dumps({"error": {"message": "no such model", "code": 404}}).encode()
    await serve(store, answering(store, "cmpl-a", status=404, body=error), "a")
    refused = await serve(store, answering(store, "never"), most=0)
    (name,) = (value.decode() for key, value in refused["headers"] if key == b"x-request-id")
    cut = b'data: {"error": {"message": "bad regex", "code": 400}}\n\n'
    await serve(store, answering(store, "cmpl-b", body=cut), "b")
    event = b'event: response.failed\ndata: {"response": {"error": {"message": "lost"}}}\n\n'
    await serve(store, answering(store, "resp_c", body=event), "c")
    await serve(store, answering(store, "cmpl-d", status=500, body=b"Internal Server Error"), "d")
    for known, status, why in (
        ("cmpl-a", 404, "no such model"), (name, 429, "0 requests are being served"),
        ("cmpl-b", 200, "bad regex"), ("resp_c", 200, "lost"), ("d", 500, "Internal Server Error"),
    ):  # fmt: skip
        found = store.get(known)
        assert found is not None, known
        assert (found.state, found.status, found.path) == ("failed", status, "none")
        assert found.error is not None
        assert found.error.startswith(why)


async def test_what_is_under_way_or_was_cancelled_says_so() -> None:
    store, states = ExplainStore(), list[str]()

    def look() -> None:
        found = store.get("x")
        assert found is not None
        states.append(found.state)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        trace = Trace("cmpl-x-0")
        store.begin(trace)
        look()
        store.over(trace)

    await serve(store, app, "x")
    look()
    assert states == ["running", "cancelled"]


async def test_an_answer_whose_last_byte_is_out_is_waited_for() -> None:
    store, left = ExplainStore(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answering(store, "cmpl-x", status=400, body=b"no")(scope, receive, send)
        await left.wait()

    serving = asyncio.create_task(serve(store, app))
    await until(lambda: store.get("cmpl-x") is not None)
    waiting = asyncio.create_task(store.settled("cmpl-x"))
    await asyncio.sleep(0)
    left.set()
    await waiting
    found = store.get("cmpl-x")
    assert found is not None
    assert (found.state, found.error) == ("failed", "no")
    await serving


async def test_a_flood_of_refusals_pushes_out_no_request_that_was_served() -> None:
    store = ExplainStore(limit=3)
    store.put(record("stranger"))
    for number in range(5):
        await serve(store, answering(store, f"k{number}", f"k{number}-0"))
        await serve(store, answering(store, f"r{number}"), most=0, name=f"r{number}")
    known = [store.get(f"k{number}") is not None for number in range(5)]
    assert known == [store.get(f"r{number}") is not None for number in range(5)]
    assert known == [False, False, True, True, True]
    assert len(store._by_id) == 3 + 3 + 3
    assert len(store._by_key) == 3
    await serve(store, answering(store, "many", *(f"many-{part}" for part in range(9))))
    assert store.get("k4") is None, "the records of all together are bounded"


async def test_a_request_that_lost_its_worker_or_never_had_one_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pullfill.frontend.dispatch.NO_WORKER_WAIT_S", 0.05)
    worker = FakeDecode("decode-1", hold=True)
    async with rig(worker, restart_wait_s=0.05) as r:
        await r.ready(1)
        r.dispatcher.submit(request("cmpl-a-0-1234abcd", max_tokens=9, seed=1, temperature=1.0))
        await until(lambda: bool(worker.added))
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
        assert [trace.key for _, trace in r.explain.since(0)] == ["cmpl-b-0", "cmpl-a-0"]


async def test_an_answer_that_a_stop_string_ended_is_known_at_once() -> None:
    """Its worker tells of it a moment later."""
    async with rig(FakeDecode(step_s=0.01)) as r:
        await r.ready(1)
        r.dispatcher.submit(request("cmpl-a-0-1234abcd", max_tokens=999))
        await until(lambda: bool(r.sink.tokens))
        r.dispatcher.abort(["cmpl-a-0-1234abcd"], answered=True)
        await r.explain.settled("cmpl-a-0")
        found = r.explain.get("cmpl-a-0")
        assert found is not None
        assert (found.state, found.path) == ("answered", "local")


async def test_a_record_that_never_comes_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(explain_room, "WAIT_S", 0.01)
    store, trace = ExplainStore(), Trace("x")
    trace.worker, trace.answer_ms = "decode-1", 1.0
    store.begin(trace)
    store.over(trace)
    async with asyncio.timeout(5):
        await store.settled("x")
    found = store.get("x")
    assert found is not None
    assert (found.state, found.path) == ("answered", "unknown")


def test_records_since_a_number_come_newest_first_and_each_once() -> None:
    store = ExplainStore(limit=3)
    for i in range(5):
        finish(store, f"k{i}")
    found = [(trace.key, trace.serial) for _, trace in store.since(0)]
    assert found == [("k4", 5), ("k3", 4), ("k2", 3)]
    assert [trace.key for _, trace in store.since(4)] == ["k4"]
    assert list(store.since(5)) == []
