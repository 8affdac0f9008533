"""Requests that once got a 500, ended an engine or held it up. Each stays here with its answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.odd import message_of, send, unharmed, wrong_with
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine

COMPLETIONS = "/v1/completions"
HALF = "\ud800"
LOOP = {"grammar": "root ::= root"}
NO_TEXT = "no text matches it"
PAIR = "half of a surrogate pair"

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "half a pair as a bad word": (COMPLETIONS, {"bad_words": [HALF]}, PAIR),
    "half a pair as a stop string": (COMPLETIONS, {"stop": [HALF]}, PAIR),
    "half a pair in a prompt": (COMPLETIONS, {"prompt": HALF}, PAIR),
    "half a pair in a chat": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}, PAIR,
    ),
    "half a pair in a schema": (
        COMPLETIONS, {"structured_outputs": {"json": {"const": HALF}}}, PAIR,
    ),
    "a grammar without an end": (COMPLETIONS, {"structured_outputs": LOOP}, NO_TEXT),
    "the same in a stream": (COMPLETIONS, {"structured_outputs": LOOP, "stream": True}, NO_TEXT),
    "the same, three choices": (COMPLETIONS, {"structured_outputs": LOOP, "n": 3}, NO_TEXT),
    "a schema that means itself": (
        COMPLETIONS, {"structured_outputs": {"json": {"$ref": "#"}}}, NO_TEXT,
    ),
    "a schema that passes the check and does not compile": (
        COMPLETIONS,
        {"structured_outputs": {"json": {"type": "array", "minItems": 10**6}}},
        "does not compile",
    ),
    "transfer parameters that are no object": (
        COMPLETIONS, {"vllm_xargs": {"kv_transfer_params": "x"}}, "kv_transfer_params",
    ),
    "a number that no wire can carry": (COMPLETIONS, {"top_k": 10**30}, "cannot be sent"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_that_cannot_be_served_gets_400_and_a_reason(
    cluster: Cluster, oracle: Oracle, case: str
) -> None:
    path, body, words = REFUSED[case]
    with unharmed(cluster, oracle):
        given = {"prompt": "hello", "max_tokens": 3, "temperature": 1.0, **body}
        if "messages" in given:
            del given["prompt"]
        answer = send(cluster, path, given)
        assert wrong_with(answer) == ""
        assert answer.status_code == (200 if body.get("stream") else 400), answer.text
        assert words in message_of(answer)
