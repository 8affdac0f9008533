"""Workers on the mock backend: everything but the model is real, so requests go the whole way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pullfill.testing.mock_model import MockSettings
from tests.support.cluster import BLOCK, MODEL, Cluster
from tests.support.prompts import random_prompt

pytestmark = pytest.mark.engine

MOCK = ("--distributed-executor-backend", "pullfill.testing.mock_executor.MockExecutor")


def ask(cluster: Cluster, prompt: list[int], count: int) -> tuple[list[int], dict[str, Any]]:
    """(tokens, how the request was served)."""
    answer = cluster.client().completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=count,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return list(tokens), cluster.explain(answer.id)


@pytest.mark.parametrize(
    ("kinds", "shape"),
    [
        pytest.param("FullAttention", {}, id="one group"),
        pytest.param(
            "1xFullAttention 1xSlidingWindow(4000) 1xSlidingWindow(4000)",
            {"layers": 3, "windows": 2, "window": 4000},
            id="three groups",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_mock_pair_serves_remote_prefills(
    tmp_path: Path, model_path: Path, kinds: str, shape: dict[str, int]
) -> None:
    def settings(**more: float) -> str:
        return f"--additional-config={json.dumps({'mock': {**shape, **more}})}"

    cluster = Cluster(tmp_path / "mock", model_path)
    try:
        cluster.start_servers()
        cluster.launch("decode", *MOCK, settings())
        cluster.launch("prefill", *MOCK, settings(step_s=0.002))
        cluster.launch("frontend")
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_remote")
        (record,) = cluster.records("decode").values()
        assert record.compat is not None
        assert record.compat.kv_groups == kinds
        head = random_prompt(20 * BLOCK + 3, seed=1)
        tokens, told = ask(cluster, head, 5)
        assert tokens == [MockSettings().token] * 5
        assert (told["path"], told["remote_tokens"]) == ("remote", len(head) - 1)
        assert told["kv_bytes"] > 0
        more = head + random_prompt(700, seed=2)
        tokens, told = ask(cluster, more, 2)
        assert len(tokens) == 2
        assert told["prefix_hit_tokens"] == 20 * BLOCK, "whole blocks of what was asked before"
        assert told["path"] == "remote"
        cluster.assert_clean()
    finally:
        cluster.stop()
