"""Prompts of random tokens, and asking a cluster for greedy continuations of them."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import web
from tests.support.cluster import MODEL, Cluster
from tests.support.oracle import Oracle

if TYPE_CHECKING:
    import openai

FIRST_TOKEN, LAST_TOKEN = 10, 250
"""Ordinary byte tokens of the tiny checkpoint."""


def random_prompt(length: int, seed: int) -> list[int]:
    """`length` ordinary tokens, the same for the same arguments."""
    rng = random.Random(f"{length}/{seed}")
    return [rng.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length)]


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of one prompt. logprobs[i] belongs to tokens[i]."""

    request_id: str
    tokens: list[int]
    logprobs: list[float]
    cached_tokens: int


def ask(
    cluster: Cluster,
    prompt: Sequence[int],
    max_tokens: int = 6,
    client: openai.OpenAI | None = None,
    model: str = MODEL,
    **sampling: object,
) -> Answer:
    """One completion over HTTP. model: or the name of an adapter. sampling: more parameters."""
    client = client or cluster.client()
    result = client.completions.create(
        model=model,
        prompt=list(prompt),
        max_tokens=max_tokens,
        temperature=0,
        logprobs=1,
        extra_body={"return_token_ids": True, "ignore_eos": True, **sampling},
    )
    choice = result.choices[0]
    details = result.usage.prompt_tokens_details if result.usage else None
    tokens: list[int] = choice.token_ids  # type: ignore[attr-defined]
    return Answer(
        result.id,
        list(tokens),
        list(choice.logprobs.token_logprobs or []) if choice.logprobs else [],
        (details.cached_tokens or 0) if details else 0,
    )


def ask_all(
    cluster: Cluster, prompts: Sequence[Sequence[int]], max_tokens: int = 6, at_once: int = 8
) -> list[Answer]:
    """Ask all prompts, `at_once` at a time. Returns the answers in the prompts' order."""
    client = cluster.client()
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda p: ask(cluster, p, max_tokens, client), prompts))


@contextmanager
def going_away(cluster: Cluster, prompt: list[int]) -> Iterator[None]:
    """A request whose client goes away at the end of the block, whatever was answered by then."""
    client = http.client.HTTPConnection(cluster.frontend_url.removeprefix("http://"))
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4})
    client.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    try:
        yield
    finally:
        client.close()


def forget_decode_prefixes(cluster: Cluster, *, offloaded: bool = False) -> None:
    """Empty the decode workers' prefix caches. The prefill workers keep theirs.

    offloaded: also what vLLM's own KV offloading has."""
    url = f"{cluster.frontend_url}/reset_prefix_cache?reset_external={offloaded}"
    web.post(url).raise_for_status()


def assert_right(
    oracle: Oracle,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Answer],
    max_tokens: int = 6,
    tolerance: float | None = None,
    **how: Any,
) -> None:
    """Each answer of `ask` has the tokens of the aggregated engine.

    tolerance: also its log probabilities, with this difference at most.
    how: more arguments of `truth`."""
    expected = truth(oracle, prompts, max_tokens, **how)
    for prompt, answer, (tokens, logprobs) in zip(prompts, answers, expected, strict=True):
        what = f"prompt of {len(prompt)} tokens"
        assert answer.tokens == tokens, what
        if tolerance is not None:
            assert answer.logprobs == pytest.approx(logprobs, abs=tolerance), what


def truth(
    oracle: Oracle,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    ends: Sequence[Sequence[int]] = (),
    **sampling: object,
) -> list[tuple[list[int], list[float]]]:
    """(tokens, their log probabilities) of each prompt by the aggregated engine, as `ask` asks.

    ends: of steps, as for `Oracle.generate`."""
    answers = oracle.generate(
        prompts, max_tokens, logprobs=1, ends=ends, ignore_eos=True, **sampling
    )
    return [
        (a.token_ids, [step[t] for step, t in zip(a.logprobs or [], a.token_ids, strict=True)])
        for a in answers
    ]
