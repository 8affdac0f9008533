"""What real workers tell the planner and autoscalers, with no prefill worker and with one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import MODEL, Cluster, pullfill, until
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def alone(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A decode worker and a frontend. The first test starts without a prefill worker."""
    with Cluster(tmp_path_factory.mktemp("alone"), model_path) as cluster:
        yield cluster.start("decode", "frontend")


def plan(cluster: Cluster) -> dict[str, Any]:
    done = pullfill(cluster, "plan", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def ask(cluster: Cluster, seed: int, tokens: int = 600) -> str:
    answer = cluster.client().completions.create(
        model=MODEL, prompt=random_prompt(tokens, seed), max_tokens=2, temperature=0
    )
    return str(answer.id)


def backlog(cluster: Cluster) -> float:
    return cluster.counter("pullfill_backlog_seconds", role="decode")


@pytest.mark.long
def test_an_autoscaler_sees_demand_without_a_prefill_worker_and_none_left_with_one(
    alone: Cluster,
) -> None:
    alone.set_router(max_local_prefill_length=256)
    ask(alone, 1, tokens=100)
    assert backlog(alone) == 0, "a short prompt wants no prefill worker"
    idle = plan(alone)
    assert (idle["prefill"]["now"], idle["prefill"]["right"], idle["backlog_s"]) == (0, 0, 0)
    assert idle["decode"]["right"] == 1

    for seed in range(2, 5):
        assert alone.explain(ask(alone, seed))["reason"] == "no_prefill_worker"
    assert backlog(alone) > 0
    assert alone.counter("pullfill_prefill_demand", role="decode") > 0
    wanted = plan(alone)
    assert wanted["prefill"]["right"] == 1
    assert wanted["missed"] == 1.0
    assert "long prompts were computed by decode workers" in wanted["prefill"]["why"]

    alone.wait_ready(alone.launch("prefill"))
    until(lambda: backlog(alone) == 0, 30, "the backlog is gone")
    assert alone.explain(ask(alone, 9))["path"] == "remote"
    until(lambda: backlog(alone) == 0, 30, "the job is done")
    served = plan(alone)
    assert (served["prefill"]["now"], served["prefill"]["right"]) == (1, 1), "it is in use"
    assert served["missed"] < 1.0


@pytest.mark.long
def test_streams_are_pressure(alone: Cluster) -> None:
    before = alone.counter("pullfill_decode_pressure", role="decode")
    alone.set_router(itl_ms=0.1)
    ask(alone, 21, tokens=20)
    alone.client().completions.create(
        model=MODEL, prompt=random_prompt(20, 2), max_tokens=64, temperature=0,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert alone.counter("pullfill_decode_pressure", role="decode") > before
    assert alone.load_of(alone.of("decode")[0])["demand"]["streams"] > 0
