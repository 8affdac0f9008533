"""What an OpenAI client sees: everything vLLM's own server does, with remote prefill behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import web
from tests.support.checkpoint import tiny_checkpoint
from tests.support.cluster import FLAGS, MODEL, Cluster, stock_vllm, until
from tests.support.prompts import random_prompt

_GROWS = frozenset({
    "arguments", "content", "delta", "partial_json", "reasoning", "text", "thinking",
})  # fmt: skip
"""Texts of which each event of a stream brings a piece."""
_OWN = frozenset({
    "cache_creation_input_tokens", "cache_read_input_tokens", "call_id", "created", "created_at",
    "id", "input_tokens_details", "item_id", "kv_transfer_params", "obfuscation",
    "previous_response_id", "prompt_tokens_details", "sequence_number", "signature",
    "system_fingerprint",
})  # fmt: skip
"""What two servers never say alike: names, times, and what was cached."""
_NEAR = 1e-3
"""Log probabilities are this near to each other."""


def whole(answer: httpx.Response) -> tuple[str, dict[str, Any]]:
    """Return the id of an answer, and all that it says. Of a stream: its events merged."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        said: dict[str, Any] = answer.json()
        return said["id"], said
    events = [json.loads(x[6:]) for x in answer.text.splitlines() if x.startswith("data: {")]
    merged: dict[str, Any] = {}
    for event in events:
        _merge(merged, {event["type"]: event} if "type" in event else event)
    first = events[0]
    return first.get("id") or (first.get("response") or first.get("message"))["id"], merged


def _merge(into: dict[str, Any], event: dict[str, Any]) -> None:
    for key, value in event.items():
        old = into.get(key)
        if value is None:
            into.setdefault(key, None)
        elif isinstance(value, dict):
            into[key] = old or {}
            _merge(into[key], value)
        elif isinstance(value, list) and all(isinstance(x, dict) and "index" in x for x in value):
            rows = into[key] = old or []
            for row in value:
                found = [r for r in rows if r["index"] == row["index"]]
                if not found:
                    rows += (found := [{"index": row["index"]}])
                _merge(found[0], row)
            rows.sort(key=lambda row: row["index"])
        elif isinstance(value, list) or (isinstance(value, str) and key in _GROWS):
            into[key] = value if old is None else old + value
        else:
            into[key] = value


def differs(ours: Any, theirs: Any, at: str = "answer") -> str:
    """Return where and how two answers differ. Empty: they say the same."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = (ours.keys() | theirs.keys()) - _OWN
        pairs = [(f"{at}.{key}", ours.get(key), theirs.get(key)) for key in sorted(keys)]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(f"{at}[{i}]", *both) for i, both in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, float) and isinstance(theirs, float):
        return "" if abs(ours - theirs) < _NEAR else f"{at}: {ours} is not {theirs}"
    else:
        return "" if ours == theirs else f"{at}: {ours!r} is not {theirs!r}"
    return next((why for name, one, other in pairs if (why := differs(one, other, name))), "")


pytestmark = pytest.mark.engine

LONG = "The quick brown fox jumps over the lazy dog. " * 30
TEXT = LONG[:360]
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, BATCH = "/v1/messages", "/v1/chat/completions/batch"
VOCABULARY = json.loads((tiny_checkpoint() / "tokenizer.json").read_text())["model"]["vocab"]
NO_SPACES = {str(i): -100 for token, i in VOCABULARY.items() if set(token) & set("ĠĊĉč")}
"""A bias. A schema allows spaces without end, and this model likes them."""
ODD = list(range(1, 384, 2))
PLAIN = [i for token, i in VOCABULARY.items() if token.isascii() and token.isalpha()]
"""Tokens that are letters. Others may be a part of a character: then the text_offset of a stream
depends on how many tokens came in one event."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DAY = {
    "type": "object",
    "properties": {"day": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["day"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "parameters": DAY}
TOOLS = [{"type": "function", "function": WEATHER}]
STRICT_TOOLS = [{"type": "function", "function": WEATHER | {"strict": True}}]
TOOL = {"name": "weather", "input_schema": DAY}
CALL = r'<tool_call>\{"name": "weather", "arguments": \{"day": [0-9]\}\}</tool_call>'
NAMED = {"type": "function", "function": {"name": "weather"}}
OFTEN = {"temperature": 1.0, "seed": 5}
FREE = {"ignore_eos": True, "return_token_ids": True}
THOUGHT = "Here is my thought process: [a-z]{5} Here is my response: [a-z]{5}"
STREAM = {"stream": True}
ONE = {"tools": TOOLS, "structured_outputs": {"regex": CALL}, "max_tokens": 80}
TWO = ONE | {"structured_outputs": {"regex": CALL + CALL}, "max_tokens": 160}
FORCED = {
    "tools": STRICT_TOOLS, "tool_choice": NAMED, "logit_bias": NO_SPACES, "max_tokens": 120
}  # fmt: skip
REQUIRED = FORCED | {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
STRICT = {"type": "json_schema", "json_schema": {"name": "d", "schema": DAY, "strict": True}}
STOP = {"stop": ["e", "a", "1", "T"], "max_tokens": 200}
TOKENS = {"return_token_ids": True}
ECHO = {"echo": True, "logprobs": 2}


QUICK, THREE, STOPPED, CUT = "quick brown", '"index": 2', '"stop"', '"length"'
CALLED, CALLED_TWICE, DAY_SAID = '"weather"', '"weather".*"weather"', r'\\"day\\": ?\d'
SAID = r'"(output|content)": \[{'
Row = tuple[str, dict[str, Any], str]
ROWS: dict[str, Row] = {
    "n": (COMPLETIONS, {"n": 3, **OFTEN, **FREE}, THREE),
    "n stream": (COMPLETIONS, {"n": 3, **OFTEN, **STREAM}, THREE),
    "n chat": (CHAT, {"n": 3, **OFTEN}, THREE),
    "best_of": (COMPLETIONS, {"best_of": 3, **OFTEN}, ""),
    "prompts": (
        COMPLETIONS, {"prompt": [random_prompt(n, seed=20) for n in (50, 100, 600)], **FREE}, THREE
    ),
    "echo": (COMPLETIONS, {"echo": True}, QUICK),
    "logprobs": (COMPLETIONS, {"logprobs": 3, **FREE}, r'"token_logprobs": \[-'),
    "logprobs chat": (CHAT, {"logprobs": True, "top_logprobs": 2}, r'"top_logprobs": \[{'),
    "logprobs stream": (COMPLETIONS, {"logprobs": 3, **STREAM}, r'"token_logprobs": \[-'),
    "chat stream": (
        CHAT, {"stream_options": {"include_usage": True}, **STREAM}, r'"prompt_tokens": \d{3}'
    ),
    "seed": (CHAT, {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 11, **FREE}, ""),
    "stop": (CHAT, STOP, STOPPED),
    "stop stream": (COMPLETIONS, STOP | STREAM, STOPPED),
    "min_tokens": (
        COMPLETIONS, {"min_tokens": 9, "max_tokens": 40, "stop_token_ids": ODD, **TOKENS},
        r'"completion_tokens": [1-3]\d',
    ),
    "bad_words": (COMPLETIONS, {"bad_words": list(LETTERS), "max_tokens": 40, **TOKENS}, ""),
    "priority": (COMPLETIONS, {"priority": 3}, ""),
    "truncation": (COMPLETIONS, {"truncate_prompt_tokens": 200}, '"prompt_tokens": 200'),
    "schema": (
        CHAT, {"response_format": STRICT, "logit_bias": NO_SPACES, "max_tokens": 40}, DAY_SAID
    ),
    "schema stream": (
        COMPLETIONS, {"structured_outputs": {"json": DAY}, "logit_bias": NO_SPACES, **STREAM},
        DAY_SAID,
    ),
    "regex": (
        COMPLETIONS, {"structured_outputs": {"regex": "[a-c]{6}-[0-9]{4}"}, "max_tokens": 20},
        '"[a-c]{6}-[0-9]{4}"',
    ),
    "tools": (CHAT, ONE, CALLED),
    "tools stream": (CHAT, ONE | STREAM, CALLED),
    "tools truncated": (CHAT, ONE | {"max_tokens": 30}, CUT),
    "tools truncated stream": (CHAT, ONE | {"max_tokens": 30} | STREAM, CUT),
    "tools parallel": (CHAT, TWO, CALLED_TWICE),
    "tools parallel stream": (CHAT, TWO | STREAM, CALLED_TWICE),
    "tool forced": (CHAT, FORCED, CALLED),
    "tool forced stream": (CHAT, FORCED | STREAM, CALLED),
    # With vLLM 0.31 one engine goes on after the call, until it is cut.
    "tool required": (CHAT, REQUIRED, r'weather\\?"'),
    "reasoning": (
        CHAT, {"structured_outputs": {"regex": THOUGHT}, "max_tokens": 80},
        '"reasoning": " ?[a-z]{5} ?"',
    ),
    "responses": (RESPONSES, {}, SAID),
    "responses next": (
        RESPONSES, {"previous_response_id": "responses"}, r'"input_tokens": [5-9]\d\d'
    ),
    "responses stream": (RESPONSES, STREAM, '"response.(in)?complete'),
    "responses truncation": (RESPONSES, {"truncation": "auto"}, SAID),
    "messages": (MESSAGES, {}, SAID),
    "messages stream": (MESSAGES, STREAM, '"content_block_delta"'),
    "messages tools": (MESSAGES, {"tools": [TOOL]}, SAID),
    "batch": (
        BATCH, {"messages": [[{"role": "user", "content": f"{i}{TEXT}"}] for i in range(3)]}, THREE
    ),
    "echo logprobs": (COMPLETIONS, ECHO, QUICK),
    "echo logprobs stream": (
        COMPLETIONS, {"n": 3, "allowed_token_ids": PLAIN, **ECHO, **OFTEN, **STREAM}, THREE
    ),
}  # fmt: skip
"""A request by its name, and what its answer has, as a regex. What one engine answers must have it,
and pullfill's answer must be the same."""
SECOND = ("reasoning", "responses", "responses next")
"""Rows for a frontend that has a reasoning parser and stores responses."""
LOCAL = ("echo logprobs", "echo logprobs stream")
"""Rows whose decode worker must compute all of the prompt."""


def body_of(name: str, path: str, more: dict[str, Any]) -> dict[str, Any]:
    """A request with a prompt of its own, so that no cache has it."""
    prompt = f"{name}: {TEXT}"
    said = {
        COMPLETIONS: {"prompt": prompt, "max_tokens": 12},
        RESPONSES: {"input": prompt, "max_output_tokens": 12},
    }.get(path, {"messages": [{"role": "user", "content": prompt}], "max_tokens": 12})
    return {"model": MODEL, "temperature": 0, **said, **more}


@dataclass
class Both:
    """The shared cluster and one stock engine. `ask` asks both.

    second: the address of a second frontend, for the rows in SECOND.
    ids: of the answers so far."""

    cluster: Cluster
    stock: str
    second: str
    ids: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def ask(self, name: str, row: Row) -> list[dict[str, Any]]:
        path, more, _ = row
        told = []
        ours = self.second if name in SECOND else self.cluster.frontend_url
        for number, url in enumerate((ours, self.stock)):
            body = body_of(name, path, more)
            if before := more.get("previous_response_id"):
                body["previous_response_id"] = self.ids[before][number]
            if number and name == "echo logprobs stream":
                del body["stream"]  # vLLM's own stream often fails
            told.append(whole(web.post(f"{url}{path}", json=body)))
        self.ids[name] = tuple(request_id for request_id, _ in told)
        return [said for _, said in told]

    def path_of(self, request_id: str) -> str:
        url = f"{self.cluster.frontend_url}/pullfill/requests/{request_id}"
        # The record of an answer comes after a stop string has ended the answer.
        until(lambda: web.get(url).status_code == 200, 10.0, "the record is there")
        return str(web.get(url).json()["path"])


@pytest.fixture(scope="module")
def both(
    shared_cluster: Cluster, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    cluster, url = shared_cluster, shared_cluster.frontend_url
    # No reasoning parser: vLLM then applies a structured output only after the end of a thought.
    # One step for each prompt: on CPU vLLM dies of a seed and a prompt in two steps.
    flags = (
        *FLAGS, "--enable-auto-tool-choice", "--tool-call-parser=hermes",
        "--enable-prompt-tokens-details", "--max-num-batched-tokens=2048",
    )  # fmt: skip
    where, env = tmp_path_factory.mktemp("stock"), {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    how: dict[str, Any] = {"connector": False, "flags": flags, "env": env}
    with stock_vllm(where, model_path, **how) as (stock,):
        cluster.set_router(policy="always_remote", max_queue_wait_s=3600)
        frontend = cluster.launch("frontend", "--reasoning-parser=granite", env=env)
        second, cluster.frontend_url = cluster.frontend_url, url
        try:
            until(lambda: web.ready(second), 120.0, "the frontend is ready")
            stock.ready()
            yield Both(cluster, stock.url, second)
        finally:
            cluster.workers.remove(frontend)
            assert frontend.stop() == 0
    cluster.assert_clean()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.essential
def test_the_answer_is_that_of_one_engine(both: Both, name: str) -> None:
    row = ROWS[name]
    ours, theirs = both.ask(name, row)
    for _ in range(4 if name in ("tools truncated stream", "logprobs stream") else 0):
        # What vLLM tells of an unfinished call, and where the parts of a character begin, depends
        # on how many tokens come at once. On a busy machine that differs from answer to answer.
        if not differs(ours, theirs):
            break
        ours, theirs = both.ask(name, row)
    if name == "reasoning":  # no parser of the stock engine has split its answer
        message = theirs["choices"][0]["message"]
        _, _, rest = message["content"].partition("Here is my thought process:")
        message["reasoning"], _, message["content"] = rest.partition("Here is my response:")
        ours["usage"].pop("completion_tokens_details")
    if name == "echo logprobs stream":
        said = ("finish_reason", "index", "logprobs", "text")
        ours, theirs = (
            {"choices": [{key: choice[key] for key in said} for choice in answer["choices"]]}
            for answer in (ours, theirs)
        )
    assert re.search(row[2], json.dumps(theirs)), theirs
    assert differs(ours, theirs) == ""
    assert both.path_of(both.ids[name][0]) == ("local" if name in LOCAL else "remote")


@pytest.mark.essential
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


@pytest.mark.essential
def test_disconnect_aborts_at_the_worker(cluster: Cluster) -> None:
    def running() -> int:
        rows = cluster.full_status()["workers"]
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
        first = next(iter(stream))
        until(lambda: running() == 1, 10.0, "its worker has told of it")
        stream.close()
        until(lambda: running() == 0, 10.0, "the request is aborted")
        until(lambda: cluster.explain(first.id)["state"] == "cancelled", 10.0, "it is told")
    finally:
        decode.arm("")


@pytest.mark.essential
def test_live_ready_status(cluster: Cluster) -> None:
    assert web.get(f"{cluster.frontend_url}/live").status_code == 200
    assert web.get(f"{cluster.frontend_url}/is_paused").status_code == 404, "vLLM's, of one engine"
    aborted = web.post(f"{cluster.frontend_url}/abort_requests", json={"request_ids": ["none"]})
    assert aborted.json() == {"status": "aborted", "aborted": 1}
    assert web.ready(cluster.frontend_url)["ready"] is True
    # A server without a core for a second counts as away for as long.
    until(lambda: web.ready(cluster.frontend_url).get("degraded") is False, 10, "not degraded")
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
