"""The real frontend process (vLLM's app) over fake decode workers and a real etcd, by HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pullfill.runtime.probe import ProbeServer
from tests.support.fake_decode import FakeDecode
from tests.support.fake_vllm import Output, Outputs
from tests.support.frontend_http import PAGE, PATIENCE_S, Served, expected, until, workers
from tests.support.late import Late

openai: Any = Late("openai")


async def test_models_completions_and_tokenize(served: Served) -> None:
    fake = FakeDecode("decode-1", model="m", max_model_len=512, cached_tokens=2)
    async with workers(served, fake) as http, served.client() as client:
        assert [m.id for m in (await client.models.list()).data] == ["m"]
        done = await client.completions.create(model="m", prompt="hello", max_tokens=6)
        prompt = fake.added[0].prompt_token_ids
        assert prompt is not None
        assert done.choices[0].text == expected(prompt, 6)
        assert done.usage is not None
        assert done.usage.prompt_tokens == len(prompt)
        assert done.usage.prompt_tokens_details is not None
        assert done.usage.prompt_tokens_details.cached_tokens == 2
        tokens = (await http.post("/tokenize", json={"model": "m", "prompt": "hello"})).json()
        assert tokens["tokens"] == prompt
        echoed = await client.completions.create(model="m", prompt="abc", max_tokens=2, echo=True)
        assert echoed.choices[0].text.startswith("abc")


async def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs(served: Served) -> None:
    """The openai client uses a connection again for 5 s. Just then the server must not close it."""
    limits = httpx.Limits(keepalive_expiry=60.0)
    async with httpx.AsyncClient(base_url=served.url, limits=limits) as http:
        ours = []
        for pause_s in (6.0, 0.0):
            answer = await http.get("/ready")
            ours.append(answer.extensions["network_stream"].get_extra_info("client_addr"))
            await asyncio.sleep(pause_s)
    assert ours[0] == ours[1], "the second request needed a new connection"


async def test_choices_and_batches_are_requests_of_their_own(served: Served) -> None:
    one = FakeDecode("decode-1", model="m", max_model_len=512)
    two = FakeDecode("decode-2", model="m", max_model_len=512)
    async with workers(served, one, two) as http, served.client() as client:
        done = await client.completions.create(
            model="m", prompt=["ab", "xyz"], n=3, max_tokens=3, temperature=1.0
        )
        assert len(done.choices) == 6
        assert (len(one.added), len(two.added)) == (3, 3)
        record = (await http.get(f"/pullfill/requests/{done.id}")).json()
        assert record["request_id"] == done.id
        assert set(record["timings_ms"]) == {
            "route", "queue", "claim", "fetch", "prefix_read", "prefill", "kv_write", "tail",
            "commit", "first_token",
        }  # fmt: skip
        assert set(record) == {
            "request_id", "path", "reason", "prompt_tokens", "prefix_hit_tokens", "remote_tokens",
            "decode_instance", "prefill_instance", "attempts", "fallback", "kv_bytes", "timings_ms",
            "migrated_from", "migrated_tokens", "transport", "why_not_better", "outage",
            "expected_s", "offloaded_tokens", "decode_choice", "predicted_ms", "outcome_ms",
            "choice", "regret_ms", "fetched_tokens",
            "fetched_from", "fetch", "stages", "state", "status", "error", "arrived_at", "parts",
            "more_parts", "same_id",
        }  # fmt: skip
        assert (record["state"], record["status"], len(record["parts"])) == ("answered", 200, 5)
        assert 0 < record["timings_ms"]["route"] < record["timings_ms"]["first_token"]
        missing = await http.get("/pullfill/requests/chatcmpl-none")
        assert missing.status_code == 404
        assert "no record of request" in missing.json()["error"]["message"]


async def test_chat_stream_responses_and_stop_strings(served: Served) -> None:
    fake = FakeDecode("decode-1", model="m", max_model_len=512, step_s=0.002)
    async with workers(served, fake) as http, served.client() as client:
        messages: Any = [{"role": "user", "content": "hi"}]
        stream = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=20, stream=True
        )
        text, request_id = "", ""
        async for chunk in stream:
            request_id = chunk.id
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        assert text == expected(fake.added[0].prompt_token_ids or [], 20)
        assert (await http.get(f"/pullfill/requests/{request_id}")).status_code == 200
        stop = text[3:5]
        cut = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=400, stop=[stop]
        )
        assert cut.choices[0].message.content == text[:3]
        assert cut.choices[0].finish_reason == "stop"
        # The worker sends its record after the abort.
        told_of = (await http.get(f"/pullfill/requests/{cut.id}")).json()
        assert (told_of["state"], told_of["path"]) == ("answered", "local")
        assert len(fake.aborted) == 1
        async with http.stream("GET", "/pullfill/ui/events") as events:
            told = (json.loads(s[6:]) async for s in events.aiter_lines() if s.startswith("data: "))
            ended = {row["id"]: row["at"] for row in (await anext(told))["ended"]}
        assert ended[cut.id] is not None, "a stop string is no cancel"
        answer = await client.responses.create(model="m", input="hi", max_output_tokens=16)
        assert answer.status in ("completed", "incomplete")
        assert (await http.get(f"/pullfill/requests/{answer.id}")).status_code == 200


async def test_a_request_is_explained_by_the_ids_that_its_client_knows(served: Served) -> None:
    """`cmpl-foo-0` found the first prompt of `cmpl-foo`, and ids with a slash nothing."""
    async with workers(served, FakeDecode("decode-1", model="m", max_model_len=512)) as http:

        async def ask(name: str = "", path: str = "/v1/completions", **body: Any) -> Any:
            headers = {"x-request-id": name} if name else {}
            return await http.post(path, headers=headers, json={"model": "m", **body})

        async def told(request_id: str) -> Any:
            got = await http.get(f"/pullfill/requests/{quote(request_id, safe='')}")
            assert got.status_code == 200, request_id
            return got.json()

        hi: Any = [{"role": "user", "content": "hi"}]
        chat, tokens = "/v1/chat/completions", {"max_tokens": 2}
        for name, answer in (
            ("foo-0", await ask("foo-0", prompt="hello, hello", **tokens)),
            ("foo", await ask("foo", prompt="hello", **tokens)),
            ("a/b", await ask("a/b", prompt="hello", **tokens)),
            ("", await ask(path=chat, messages=hi, n=2, **tokens)),
            ("", await ask(path=f"{chat}/batch", messages=[hi, hi], **tokens)),
            ("", await ask(path="/v1/messages", messages=hi, **tokens)),
            ("", await ask(path="/v1/responses", input="hi", max_output_tokens=16)),
        ):
            names = {answer.json()["id"], name or answer.headers["x-request-id"]}
            assert len(names) == 2
            for one in names:
                record = await told(one)
                assert (record["request_id"], record["state"]) == (one, "answered")
                assert (record["path"], record["same_id"]) == ("local", [])
        short, long = [(await told(one))["prompt_tokens"] for one in ("cmpl-foo", "cmpl-foo-0")]
        assert short < long
        await ask("foo", prompt="hello again", max_tokens=-1)
        foo = await told("foo")
        assert (foo["state"], foo["status"], foo["path"]) == ("failed", 400, "none")
        assert "max_tokens" in foo["error"]
        assert [one["state"] for one in foo["same_id"]] == ["answered"]
        refused = await ask(prompt="hi", stream=True, structured_outputs={"regex": "("}, **tokens)
        found = await told(refused.headers["x-request-id"])
        assert (found["state"], found["status"]) == ("failed", refused.status_code)
        assert found["error"]


@pytest.mark.essential
async def test_transfer_params_of_a_client_never_reach_a_worker(served: Served) -> None:
    fake = FakeDecode("decode-1", model="m", max_model_len=512)
    async with workers(served, fake) as http:
        body = {
            "model": "m",
            "prompt": "hello",
            "max_tokens": 2,
            "kv_transfer_params": {"remote_block_ids": [1]},
            "vllm_xargs": {"kv_transfer_params": "x", "mine": 1},
        }
        done = await http.post("/v1/completions", json=body)
        assert done.status_code == 200, done.text
        assert done.json()["kv_transfer_params"] is None
        params = fake.added[0].sampling_params
        assert params is not None
        assert "kv_transfer_params" not in (params.get("extra_args") or {})
        assert "remote_block_ids" not in repr(fake.added[0])


@pytest.mark.essential
async def test_bad_input_gets_vllms_answer_and_no_worker_hears_of_it(served: Served) -> None:
    fake = FakeDecode("decode-1", model="m", max_model_len=512)
    async with workers(served, fake) as http:
        long = await http.post("/v1/completions", json={"model": "m", "prompt": "word " * 600})
        assert long.status_code == 400
        assert "512" in long.text  # the worker's limit, smaller than the frontend's own flag
        assert "513" in long.text
        unknown = await http.post("/v1/completions", json={"model": "zzz", "prompt": "a"})
        assert unknown.status_code == 404
        headers = {"content-type": "application/json"}
        broken = await http.post("/v1/completions", content=b"{nope", headers=headers)
        assert broken.status_code == 400
        assert not fake.added


async def test_our_own_refusals_have_openais_form_and_cors_headers(served: Served) -> None:
    """A page in a browser can read no answer without the latter."""
    page, body = {"origin": PAGE}, {"model": "m", "prompt": "a"}
    async with workers(served) as http:
        refused = {
            "/v1/embeddings": 404, "/v1/audio/transcriptions": 404, "/v1/nothing": 404,
            "/v1/completions": 503,
        }  # fmt: skip
        for path, status in refused.items():
            answer = await http.post(path, json=body, headers=page)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, status), path
            assert answer.headers["access-control-allow-origin"] == PAGE
        assert (await http.get("/v1/models/")).status_code == 307  # vLLM's, as before
        assert (await http.get("/v1/responses/none")).status_code == 404


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 500}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 500},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": "hello"},
}
"""A body for each path that can stream."""
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "vllm_xargs": ({"vllm_xargs": {"ttft_ms": -1}}, "must be a number of milliseconds"),
    "regex": ({"structured_outputs": {"regex": "(("}}, "regex"),
    "schema": ({"structured_outputs": {"json": {"type": "x"}}}, "Invalid type"),
    "logit_bias": ({"logit_bias": {"99999999": 1}}, "99999999"),
}


@pytest.mark.parametrize("path", [path for path in STREAMS if path != "/v1/messages"])
async def test_a_bad_value_is_refused_before_the_stream_begins(served: Served, path: str) -> None:
    fake = FakeDecode("decode-1", model="m", max_model_len=512)
    async with workers(served, fake) as http:
        for name, (bad, why) in BAD.items():
            body = {"model": "m", "stream": True, **STREAMS[path], **bad}
            answer = await http.post(path, json=body)
            assert answer.status_code == 400, (name, answer.text)
            assert why in answer.json()["error"]["message"]
        assert not fake.added


@pytest.mark.parametrize(
    ("path", "more"),
    [*((path, {}) for path in STREAMS), ("/v1/completions", {"n": 3}),
     ("/v1/responses", {"seed": 1})],
)  # fmt: skip
async def test_a_worker_lost_mid_stream_ends_the_stream_with_its_name(
    served: Served, path: str, more: dict[str, Any]
) -> None:
    fake = FakeDecode("decode-1", model="m", max_model_len=512, step_s=0.01)
    async with workers(served, fake) as http:
        body = {"model": "m", "stream": True, **STREAMS[path], **more}
        events, lost_at = list[str](), 0.0
        async with http.stream("POST", path, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(line.removeprefix("data: "))
                if len(events) == 5 and not lost_at:
                    lost_at = time.monotonic()
                    await asyncio.to_thread(fake.die)
        assert time.monotonic() - lost_at < 5.0
        if path in ("/v1/completions", "/v1/chat/completions"):
            assert events.pop() == "[DONE]"
        last = json.loads(events[-1])
        error = last["response"]["error"] if path == "/v1/responses" else last["error"]
        assert "decode-1 was lost" in error["message"]
        if path == "/v1/messages":
            assert last["type"] == "error"
        elif path == "/v1/responses":
            assert (last["type"], error["code"]) == ("response.failed", "server_error")
            assert last["response"]["status"] == "failed"
            assert last["sequence_number"] == len(events) - 1
        else:
            assert error["code"] == 503


@pytest.mark.parametrize(
    ("path", "asked"),
    [("/v1/completions", {"prompt": "hi"}),
     ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})],
)  # fmt: skip
@pytest.mark.essential
async def test_an_error_has_one_type_in_streams_and_bodies(
    served: Served, path: str, asked: dict[str, Any]
) -> None:
    body, errors = {"model": "m", "max_tokens": 500, **asked}, []
    async with workers(served) as http:  # no worker at all
        errors.append((await http.post(path, json=body)).json()["error"])
    for stream in (False, True):
        fake = FakeDecode("decode-1", model="m", max_model_len=1000, step_s=0.01)
        async with workers(served, fake) as http:
            call = asyncio.create_task(http.post(path, json=body | {"stream": stream}))
            await until(lambda fake=fake: bool(fake.added))
            await asyncio.to_thread(fake.die)
            text = (await call).text
            told = text.split("data: ")[-2] if stream else text
            errors.append(json.loads(told)["error"])
    assert [(e["type"], e["code"], e["param"]) for e in errors] == [
        ("ServiceUnavailableError", 503, None)
    ] * 3


async def test_a_refused_request_is_one_line_of_the_log(served: Served) -> None:
    refused = {
        "/v1/completions": {"prompt": "hi", "stream": True, "vllm_xargs": {"ttft_ms": -1}},
        "/v1/messages": {"messages": [{"role": "user", "content": "word " * 600}]},
    }
    before = len(served.log.read_text())
    async with workers(served, FakeDecode("decode-1", model="m", max_model_len=512)) as http:
        for path, body in refused.items():
            body |= {"model": "m", "max_tokens": 5}
            text = (await http.post(path, json=body)).text
            assert "BadRequestError" in text
    lines = served.log.read_text()[before:]
    assert "Traceback" not in lines
    assert "512" in next(line for line in lines.splitlines() if "create_messages" in line)


@pytest.mark.essential
async def test_without_a_worker_streams_too_get_503(served: Served) -> None:
    async with workers(served) as http:
        ready = await http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["ready"] is False
        assert (await http.get("/live")).status_code == 200
        body = {"model": "m", "prompt": "hello", "stream": True}
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert "pullfill decode" in refused.json()["error"]["message"]


async def soon(
    http: httpx.AsyncClient, path: str, good: Callable[[httpx.Response], bool]
) -> httpx.Response:
    """Ask until `good` accepts the answer. Return that answer.

    The frontend calls a worker lost if it does not answer within one second."""
    async with asyncio.timeout(PATIENCE_S):
        while not good(answer := await http.get(path)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return answer


async def test_status_and_metrics_show_the_workers(served: Served) -> None:
    queue = {
        "depth_jobs": 3, "depth_tokens": 900, "in_flight": 1, "oldest_age_s": 0.5, "age_s": 0.1,
    }  # fmt: skip
    nats = {"up": False, "since_s": 7.0, "error": "nats://h:1: refused"}
    said = {"load": {"running": 1}, "queue": queue, "servers": {"nats": nats}}
    probe = ProbeServer("127.0.0.1", lambda: (True, {}), lambda: said)
    await probe.start()
    fake = FakeDecode("decode-1", model="m", max_model_len=512)
    silent = FakeDecode("decode-2", model="m", max_model_len=512)
    fake.record = msgspec.structs.replace(fake.record, http=probe.url, pid=os.getpid())
    silent.record = msgspec.structs.replace(silent.record, http="http://127.0.0.1:1")
    try:
        async with workers(served, fake, silent) as http:
            status = (
                await soon(
                    http, "/pullfill/status", lambda a: a.json()["workers"][0]["state"] == "ready"
                )
            ).json()
            assert status["queue"] == queue
            assert status["servers"]["nats"] == nats
            assert status["servers"]["etcd"]["up"] is True
            assert 0 <= status["workers_age_s"] < PATIENCE_S
            first, second = status["workers"]
            assert 0 <= first.pop("age_s") < PATIENCE_S
            promised = {
                "instance_id": "decode-1",
                "role": "decode",
                "state": "ready",
                "model": "m",
                "host": "127.0.0.1",
                "pid": os.getpid(),
                "http": probe.url,
                "restarts": 0,
                "load": {"running": 1},
                "routing": {"load": None, "load_age_s": None, "prefix": {"state": "none"}},
                "troubles": ["NATS unreachable for 7 s: nats://h:1: refused"],
            }
            assert first | promised == first
            assert (second["instance_id"], second["state"]) == ("decode-2", "lost")
            down = "NATS unreachable for 7 s: nats://h:1: refused"
            ready = (await soon(http, "/ready", lambda a: down in a.json()["reasons"])).json()
            assert ready["degraded"] is True
            assert any("no prefill worker" in reason for reason in ready["reasons"])
            text = (await soon(http, "/metrics", lambda a: '"decode-1"' in a.text)).text
            families = {f.name: f for f in text_string_to_metric_families(text)}
            assert "vllm:num_requests_running" in families
            assert "pullfill_frontend_in_flight" in families
            owners = {s.labels.get("instance_id") for s in families["python_info"].samples}
            assert owners == {None, "decode-1"}
    finally:
        await probe.stop()


async def test_an_output_that_vllm_cannot_take_costs_only_open_requests(served: Served) -> None:
    fake = FakeDecode("decode-1", model="m", max_model_len=512, hold=True)
    async with workers(served, fake), served.client() as client:
        call = asyncio.create_task(client.completions.create(model="m", prompt="abc"))
        await until(lambda: bool(fake.added))
        # Logprobs nobody asked for trip an assertion in vLLM's output task.
        arrays = [["<i8", [1, 1], 8], ["<f4", [1, 1], 4], ["<i8", [1], 8]]
        logprobs = [[d, shape, msgspec.msgpack.Ext(3, bytes(n))] for d, shape, n in arrays]
        output = Output(fake.added[0].request_id, [75], new_logprobs=logprobs)
        poison = Outputs(outputs=[output], timestamp=1.0)
        fake.send_raw(b"OUT", msgspec.msgpack.encode(poison))
        with pytest.raises(openai.InternalServerError):
            await asyncio.wait_for(call, PATIENCE_S)
        fake.hold = False
        done = await client.completions.create(model="m", prompt="abc", max_tokens=2)
        assert len(done.choices[0].text) == 2
