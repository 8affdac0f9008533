"""The real frontend process (vLLM's app) over fake decode workers and a real etcd, by HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import msgspec
import pytest
from vllm import __version__

from tests.support.fake_vllm import Output, Outputs
from tests.support.frontend_http import PAGE, PATIENCE_S, Served, workers
from tests.support.frontend_rig import FakeDecode
from tests.support.late import Late
from tests.support.waiting import patience, soon

openai: Any = Late("openai")


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
    [("/v1/messages", {}), *(("/v1/responses", more) for more in ({}, {"background": True}))],
)
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
        assert time.monotonic() - lost_at < patience(5.0)
        last = json.loads(events[-1])
        error = last["response"]["error"] if path == "/v1/responses" else last["error"]
        assert "decode-1 was lost" in error["message"]
        if path == "/v1/messages":
            assert last["type"] == "error"
        else:
            assert (last["type"], error["code"]) == ("response.failed", "server_error")
            assert last["response"]["status"] == "failed"
            assert last["sequence_number"] == len(events) - 1


async def test_a_response_in_the_background_fails_and_says_why(served: Served) -> None:
    """vLLM leaves it queued for ever."""
    fake = FakeDecode("decode-1", model="m", max_model_len=512, hold=True)
    async with workers(served, fake) as http:
        body = {"model": "m", "background": True, **STREAMS["/v1/responses"]}
        asked = (await http.post("/v1/responses", json=body)).json()
        assert asked["status"] == "queued"
        await soon(lambda: bool(fake.added))
        await asyncio.to_thread(fake.die)

        async def stored() -> dict[str, Any]:
            return (await http.get(f"/v1/responses/{asked['id']}")).json()  # type: ignore[no-any-return]

        told = await soon(stored, good=lambda found: found["status"] == "failed")
        assert "decode-1 was lost" in told["error"]["message"]


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
            await soon(lambda fake=fake: bool(fake.added))
            await asyncio.to_thread(fake.die)
            text = (await call).text
            told = text.split("data: ")[-2] if stream else text
            errors.append(json.loads(told)["error"])
    assert all("decode-1 was lost" in error["message"] for error in errors[1:])
    assert {(e["code"], e["param"]) for e in errors} == {(503, None)}
    # vLLM 0.31 calls every failed answer so.
    by_vllm = "InternalServerError" if __version__.startswith("0.31") else "ServiceUnavailableError"
    assert [e["type"] for e in errors] == ["ServiceUnavailableError", by_vllm, by_vllm]


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


async def test_an_output_that_vllm_cannot_take_costs_only_open_requests(served: Served) -> None:
    fake = FakeDecode("decode-1", model="m", max_model_len=512, hold=True)
    async with workers(served, fake), served.client() as client:
        call = asyncio.create_task(client.completions.create(model="m", prompt="abc"))
        await soon(lambda: bool(fake.added))
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
