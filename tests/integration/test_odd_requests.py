"""Requests that once got a 500, ended an engine or held it up. Each stays here with its answer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from tests.support.checkpoint import TINY
from tests.support.cluster import MODEL, Cluster
from tests.support.odd import message_of, send, unharmed, wrong_with
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine

COMPLETIONS = "/v1/completions"
LOOP = {"grammar": "root ::= root"}
GROWING_REGEX = "((((.{0,9}){0,9}){0,9}){0,9}){0,9}"
SLOW_REGEX = "((((((.{0,9}){0,9}){0,9}){0,9}){0,9}){0,9}){0,9}"
NO_TEXT = "no text matches it"

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "half a pair in a chat": (
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]},
        "half of a surrogate pair",
    ),
    "a grammar without an end": (COMPLETIONS, {"structured_outputs": LOOP}, NO_TEXT),
    "the same in a stream": (COMPLETIONS, {"structured_outputs": LOOP, "stream": True}, NO_TEXT),
    "a schema that means itself": (
        COMPLETIONS, {"structured_outputs": {"json": {"$ref": "#"}}}, NO_TEXT,
    ),
    "a schema that passes the check and does not compile": (
        COMPLETIONS,
        {"structured_outputs": {"json": {"type": "array", "minItems": 10**6}}},
        "tructured output",  # it does not compile, or (vLLM 0.33) needs another backend
    ),
    "transfer parameters that are no object": (
        COMPLETIONS, {"vllm_xargs": {"kv_transfer_params": "x"}}, "kv_transfer_params",
    ),
    "a regex whose masks take seconds": (
        COMPLETIONS, {"structured_outputs": {"regex": SLOW_REGEX}}, "too complex",
    ),
    "a regex whose masks take longer and longer": (
        COMPLETIONS,
        {"structured_outputs": {"regex": GROWING_REGEX}, "max_tokens": 20, "ignore_eos": True},
        "too complex",
    ),
    "many choices": (
        COMPLETIONS,
        {"structured_outputs": {"choice": [f"choice number {i}" for i in range(20_000)]}},
        "at most 2000",
    ),
    "many stop strings": (
        COMPLETIONS, {"stop": [f"end {i}" for i in range(100_000)]}, "'max_length': 4",
    ),
    "many bad words": (
        COMPLETIONS, {"bad_words": [f"word {i}" for i in range(100_000)]}, "max number",
    ),
    "many choices of an answer": (COMPLETIONS, {"n": 16_000}, "n must be at most 128"),
    "a number that no wire can carry": (COMPLETIONS, {"top_k": 10**30}, "cannot be sent"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.essential
def test_a_request_that_cannot_be_served_gets_400_and_a_reason(
    cluster: Cluster, oracle: Oracle, case: str
) -> None:
    path, body, words = REFUSED[case]
    with unharmed(cluster, oracle):
        given: dict[str, Any] = {"prompt": "hello", "max_tokens": 3, "temperature": 1.0, **body}
        if path != COMPLETIONS:
            given = {**body, "max_tokens": 3}
        answer = send(cluster, path, given)
        assert wrong_with(answer) == ""
        assert answer.status_code == (200 if body.get("stream") else 400), answer.text
        assert words in message_of(answer)


def test_a_bias_for_every_token_of_the_vocabulary_is_served(
    cluster: Cluster, oracle: Oracle
) -> None:
    with unharmed(cluster, oracle):
        bias = {str(token): token % 100 for token in range(TINY.vocab)}
        answer = send(
            cluster, COMPLETIONS, {"prompt": "hello", "max_tokens": 3, "logit_bias": bias}
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("point", ["frontend.submit", "decode.intake"])
@pytest.mark.essential
def test_a_bug_while_a_request_is_taken_in_does_not_look_like_a_bad_request(
    cluster: Cluster, oracle: Oracle, point: str
) -> None:
    (worker,) = cluster.of(point.partition(".")[0])
    body = {"prompt": "hello", "max_tokens": 3}
    with unharmed(cluster, oracle):
        worker.arm(f"{point}=error:ouch")
        try:
            answer = send(cluster, COMPLETIONS, body)
        finally:
            worker.arm("")
        assert answer.status_code == 500, answer.text
        assert "FailpointError: ouch" in message_of(answer)
        assert "not a mistake in the request" in message_of(answer)
        assert "FailpointError: ouch" in worker.tail(), "the log has the traceback"
        assert send(cluster, COMPLETIONS, body).status_code == 200


@pytest.mark.essential
def test_a_grammar_that_takes_seconds_does_not_stop_others(cluster: Cluster) -> None:
    """Its one mask takes most of the time of its request. Another stream goes on meanwhile."""
    odd = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": SLOW_REGEX}}

    def timed() -> tuple[int, float]:
        started = time.monotonic()
        return send(cluster, COMPLETIONS, odd).status_code, time.monotonic() - started

    with (
        cluster.client().completions.create(
            model=MODEL, prompt="hello", max_tokens=3000, stream=True,
            extra_body={"ignore_eos": True},
        ) as stream,
        ThreadPoolExecutor(1) as pool,
    ):  # fmt: skip
        tokens = iter(stream)
        for _ in range(20):
            next(tokens)
        asked, times = pool.submit(timed), [time.monotonic()]
        while not asked.done():
            next(tokens)
            times.append(time.monotonic())
    status, took = asked.result()
    assert status == 400
    assert max(b - a for a, b in pairwise(times)) < took / 2
