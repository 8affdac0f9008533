"""Bodies that vLLM would check for seconds are refused. Long prompts and tools are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pullfill.frontend.admission import MOST_COMMAS, MOST_VALUES, why_too_much

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MANY = MOST_VALUES + 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [1] * MANY}),
        (CHAT, {"messages": [{}] * MANY}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "q"}] * MANY}]}),
        (CHAT, {"messages": [{"prompt": [[1]]}] * MANY}),
        (TEXT, {"prompt": [1, *["a"] * MANY]}),
        (TEXT, {"prompt": [[1], *[["a"]] * MANY]}),
        (TEXT, {"prompt": [1.5] * MANY}),
        (TEXT, {"prompt": "p", "stop": [1] * MANY}),
        (TEXT, {"prompt": "p", "echo": ["a"] * MANY}),
        (TEXT, {"prompt": "p", "logit_bias": {str(n): "x" for n in range(MANY)}}),
        (TEXT, {str(n): 1 for n in range(MANY)}),
        (TEXT, [[]] * MANY),
    ],
)
def test_too_many_values(path: str, body: Any) -> None:
    assert "send it in parts" in why_too_much(path, json.dumps(body).encode())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": [1] * 8 * MANY}),
        (TEXT, {"prompt": ["a, [b], {c}"] * MANY}),
        (TEXT, {"prompt": [[1, 2]] * MANY}),
        (TEXT, {"prompt": "{[,]}" * MANY}),
        (TEXT, {"prompt": "p", "stop": ["a"] * MANY, "bad_words": ["b"] * MANY}),
        (TEXT, {"prompt": "p", "logit_bias": {str(n): 1.0 for n in range(MANY)}}),
        ("/inference/v1/generate", {"sampling_params": {"allowed_token_ids": [1] * MANY}}),
        (CHAT, {"messages": [{"role": "user", "content": "a, b, c"}] * (MOST_VALUES // 4)}),
        ("/v1/completions/derender", {"logprobs": [{"a": 1}] * MANY}),
    ],
)
def test_tokens_prompts_and_texts_do_not_count(path: str, body: Any) -> None:
    assert why_too_much(path, json.dumps(body).encode()) == ""


def test_what_only_python_reads_counts_too() -> None:
    body = json.dumps({"messages": [1] * MANY, "x": float("nan")}).encode()
    assert b"NaN" in body
    assert why_too_much(CHAT, body)


def test_no_body_is_read_for_long() -> None:
    assert "commas" in why_too_much(TEXT, b"," * (MOST_COMMAS + 1))


@pytest.mark.parametrize("body", [b"", b"nonsense", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_cannot_be_read_is_left_to_vllm(body: bytes) -> None:
    assert why_too_much(CHAT, body) == ""
