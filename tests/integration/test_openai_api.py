"""What an OpenAI client sees: everything vLLM's own server does, with remote prefill behind it."""

from __future__ import annotations

import json

import openai
import pytest

from tests.support import web
from tests.support.cluster import MODEL, Cluster, until
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt, truth

pytestmark = pytest.mark.engine

LONG = "The quick brown fox jumps over the lazy dog. " * 30


def test_models(cluster: Cluster) -> None:
    assert [m.id for m in cluster.client().models.list()] == [MODEL]


def test_completion_echo_logprobs_and_batch(cluster: Cluster, oracle: Oracle) -> None:
    client = cluster.client()
    echoed = client.completions.create(
        model=MODEL, prompt="hello there", max_tokens=3, temperature=0, echo=True, logprobs=2
    )
    assert echoed.choices[0].text.startswith("hello there")
    logprobs = echoed.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) > 3
    assert logprobs.token_logprobs[0] is None  # nothing predicts the first token
    prompts = [random_prompt(n, seed=20) for n in (5, 40, 600)]
    batch = client.completions.create(
        model=MODEL,
        prompt=prompts,
        max_tokens=4,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    want = [tokens for tokens, _ in truth(oracle, prompts, 4)]
    got = [c.token_ids for c in sorted(batch.choices, key=lambda c: c.index)]  # type: ignore[attr-defined]
    assert got == want


def test_chat_stream_equals_chat(cluster: Cluster) -> None:
    client = cluster.client()
    messages = [{"role": "user", "content": LONG}]
    whole = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=20,
        temperature=0,  # type: ignore[arg-type]
    )
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert whole.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 1000
    assert cluster.explain(whole.id)["path"] == "remote"


def test_messages_count_a_remote_prompt_like_a_local_one(cluster: Cluster) -> None:
    """Anthropic's usage: tokens read from the prefix cache, and tokens that it has now."""
    usages = []
    for policy, first in (("always_remote", "y"), ("always_local", "z")):
        cluster.set_router(policy=policy)
        messages = [{"role": "user", "content": first + LONG}]
        body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "messages": messages}
        url = f"{cluster.frontend_url}/v1/messages"
        twice = [web.post(url, json=body).json() for _ in range(2)]
        told = cluster.explain(twice[0]["id"])
        assert told["path"] == policy.removeprefix("always_")
        usages.append([answer["usage"] for answer in twice])
    remote, local = usages
    assert remote == local
    assert remote[0]["cache_creation_input_tokens"] > 1000
    assert remote[1]["cache_read_input_tokens"] > 1000


def test_n_choices_and_stop_strings(cluster: Cluster) -> None:
    client = cluster.client()
    many = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": LONG}],
        max_tokens=8,
        n=3,
        temperature=1.0,
        seed=5,
    )
    assert [c.index for c in many.choices] == [0, 1, 2]
    free = client.completions.create(model=MODEL, prompt=LONG, max_tokens=24, temperature=0)
    text = free.choices[0].text
    stop = text[6:8]
    cut = client.completions.create(
        model=MODEL, prompt=LONG, max_tokens=24, temperature=0, stop=[stop]
    )
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == text[: text.index(stop)]


def test_json_schema(cluster: Cluster) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = cluster.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": LONG}],
        max_tokens=60,
        temperature=0,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    )
    content = answer.choices[0].message.content
    assert content is not None
    if answer.choices[0].finish_reason == "stop":
        assert set(json.loads(content)) == {"ok"}
    else:
        assert content.lstrip().startswith("{")


def test_required_tool_call(cluster: Cluster) -> None:
    answer = cluster.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather?"}],
        max_tokens=120,
        temperature=0,
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "weather",
                    "parameters": {
                        "type": "object",
                        "properties": {"day": {"type": "integer", "minimum": 0, "maximum": 9}},
                        "required": ["day"],
                        "additionalProperties": False,
                    },
                },
            }
        ],
        tool_choice={"type": "function", "function": {"name": "weather"}},
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert calls[0].function.name == "weather"  # type: ignore[union-attr]


def test_responses_and_tokenize(cluster: Cluster) -> None:
    answer = cluster.client().responses.create(
        model=MODEL, input=LONG, max_output_tokens=8, temperature=0
    )
    assert answer.output
    url = cluster.frontend_url
    tokens = web.post(f"{url}/tokenize", json={"model": MODEL, "prompt": "abc"}).json()["tokens"]
    back = web.post(f"{url}/detokenize", json={"model": MODEL, "tokens": tokens}).json()
    assert "abc" in back["prompt"]


def test_disconnect_aborts_at_the_worker(cluster: Cluster) -> None:
    def running() -> int:
        rows = cluster.rows().values()
        return sum(row["load"]["requests"] for row in rows if row["role"] == "decode")

    (decode,) = cluster.of("decode")
    decode.arm("engine.step=sleep:0.02")  # left alone, the answer takes a minute
    try:
        stream = cluster.client().completions.create(
            model=MODEL,
            prompt=random_prompt(600, seed=21),
            max_tokens=3000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        assert running() == 1
        stream.close()
        until(lambda: running() == 0, 10.0, "the request is aborted")
    finally:
        decode.arm("")


def test_client_cannot_pass_transfer_params(cluster: Cluster) -> None:
    answer = cluster.client().completions.create(
        model=MODEL,
        prompt=random_prompt(600, seed=22),
        max_tokens=2,
        extra_body={"kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": [1]}},
    )
    assert answer.choices[0].finish_reason == "length"
    assert getattr(answer, "kv_transfer_params", None) is None


def test_bad_input_is_told_clearly(cluster: Cluster) -> None:
    client = cluster.client()
    with pytest.raises(openai.BadRequestError, match=r"4096.*5000|5000.*4096") as too_long:
        client.completions.create(model=MODEL, prompt=random_prompt(5000, seed=23), max_tokens=4)
    assert too_long.value.status_code == 400
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.completions.create(model="nope", prompt="x")
    malformed = web.post(
        f"{cluster.frontend_url}/v1/completions",
        content=b"{not json",
        headers={"content-type": "application/json"},
    )
    assert malformed.status_code == 400
    missing = web.get(f"{cluster.frontend_url}/pullfill/requests/cmpl-unknown")
    assert missing.status_code == 404
    assert "cmpl-unknown" in missing.text


def test_live_ready_status(cluster: Cluster) -> None:
    assert web.get(f"{cluster.frontend_url}/live").status_code == 200
    ready = web.get(f"{cluster.frontend_url}/ready").json()
    assert ready["ready"] is True

    def well() -> bool:  # a server without a core for a second counts as away for as long
        found = web.get(f"{cluster.frontend_url}/ready").json()
        return found["degraded"] is False

    until(well, 10, "not degraded")
    status = cluster.full_status()
    assert {w["role"] for w in status["workers"]} == {"decode", "prefill"}
    assert all(w["state"] == "ready" for w in status["workers"])
    assert set(status["queue"]) == {
        "depth_jobs", "depth_tokens", "in_flight", "oldest_age_s", "age_s",
    }  # fmt: skip
    assert {name: server["up"] for name, server in status["servers"].items()} == {
        "nats": True,
        "etcd": True,
    }
