"""`router.policy = cost`: real engines are measured, and answers stay what they are."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.answers import ask_for
from tests.support.cluster import Cluster, until
from tests.support.oracle import Oracle
from tests.support.outages import Asked, undisturbed
from tests.support.prompts import Answer, ask_all, assert_right, random_prompt

pytestmark = pytest.mark.engine

STEPS = 4
REASONS = {"cost_remote", "cost_local", "cost_probe", "short_prompt", "long_prompt"}


def beside_streams(cluster: Cluster, prompts: list[list[int]]) -> tuple[list[Answer], float]:
    """Ask them while four long answers are streamed. Returns also how many tokens were made until
    the last answer was there."""
    streams = [ask_for(cluster, random_prompt(20, seed=s), 400) for s in range(900, 904)]
    until(lambda: running(cluster) == 4, 20, "the streams run")
    before = cluster.counter("vllm:generation_tokens_total")
    answers = ask_all(cluster, prompts, STEPS, at_once=2)
    made = cluster.counter("vllm:generation_tokens_total") - before
    assert all(stream.done.wait(60) and len(stream.tokens) == 400 for stream in streams)
    return answers, made


def running(cluster: Cluster) -> int:
    rows = cluster.full_status()["workers"]
    return sum(row["load"]["running"] for row in rows if row["role"] == "decode")


def explained(cluster: Cluster, answers: list[Answer]) -> list[dict[str, Any]]:
    return [cluster.explain(answer.request_id) for answer in answers]


@pytest.mark.essential
def test_predictions_and_outcomes_are_explained(cluster: Cluster, oracle: Oracle) -> None:
    cluster.set_router(policy="cost")

    def asked(turn: int) -> Asked:
        lengths = (100, 400, 900, 1500, 300, 700, 1900, 60)
        prompts = [random_prompt(n, seed=41 + 100 * turn) for n in lengths]
        return prompts, beside_streams(cluster, prompts)[0]

    prompts, answers = undisturbed(cluster, asked)
    assert_right(oracle, prompts, answers, STEPS)
    told = explained(cluster, answers)
    assert {one["reason"] for one in told} <= REASONS
    # The first prompts measure, so they have no predictions.
    last = told[-1]
    assert last["predicted_ms"]["local"] > 0
    assert last["predicted_ms"]["remote"] > 0
    assert all(one["outcome_ms"] > 0 for one in told)
    assert all((one["choice"] == "remote") == (one["path"] == "remote") for one in told)
    assert any(one["regret_ms"] is not None for one in told)


@pytest.mark.essential
def test_a_prompt_that_must_stay_is_computed_in_chunks(cluster: Cluster, oracle: Oracle) -> None:
    """A step without prompts keeps the target, and a step with a whole prompt does not."""
    made = 0.0

    def asked(turn: int) -> Asked:
        nonlocal made
        prompts = [random_prompt(n, seed=42 + 100 * turn) for n in (1500, 1700, 1900)]
        answers, made = beside_streams(cluster, prompts)
        return prompts, answers

    try:
        began = time.monotonic()
        ask_all(cluster, [random_prompt(20, seed=s) for s in range(910, 914)], 200)
        step_ms = 1000.0 * (time.monotonic() - began) / 200  # of four streams
        cluster.set_router(policy="cost", max_prefill_queue_size=0, itl_ms=3 * step_ms)
        prompts, answers = undisturbed(cluster, asked)
        assert_right(oracle, prompts, answers, STEPS)
        told = explained(cluster, answers)
        assert [one["reason"] for one in told] == ["queue_full"] * 3
        # Each prompt in one step would leave the streams 15 steps with those of the answers.
        # Streams that a busy machine keeps from their target have no vote for a while. Then 88
        # tokens were seen, so it is no tighter.
        assert made > 4 * 18
    finally:
        cluster.set_router(max_prefill_queue_size=64, itl_ms=50)
