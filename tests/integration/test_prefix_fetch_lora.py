"""Prefixes of LoRA adapters are read from another decode worker, over TCP, and never mixed up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import BLOCK, MODEL, Cluster
from tests.support.lora import lora_adapter
from tests.support.prefix_events import BlocksOf
from tests.support.prompts import Answer, ask, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.long]

FLAGS = ("--enable-lora", "--max-lora-rank=8", "--max-loras=2")
NAMES = ("red", "blue")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    adapters = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        lora_adapter(adapters / name, model_path, seed)
    decode = ("decode", *FLAGS, "--transports", "tcp")
    modules = [f"{name}={adapters / name}" for name in NAMES]
    frontend = ("frontend", *FLAGS, "--lora-modules", *modules)
    with Cluster(tmp_path_factory.mktemp("fetch-lora"), model_path) as made:
        yield made.start(decode, decode, frontend, min_fetch_tokens=2 * BLOCK)


def told(cluster: Cluster, prompt: list[int], model: str) -> tuple[Answer, dict[str, Any]]:
    blocks = BlocksOf(cluster)
    answer = ask(cluster, prompt, model=model)
    explained = cluster.explain(answer.request_id)
    blocks.wait(explained["decode_instance"])
    return answer, explained


def test_each_adapter_has_prefixes_of_its_own(cluster: Cluster) -> None:
    for model in (*NAMES, MODEL):  # both workers load both adapters
        for _ in range(2):
            ask(cluster, random_prompt(3, seed=1), model=model)
    prompt = random_prompt(600, seed=2)
    first, before = told(cluster, prompt, "red")
    again, after = told(cluster, prompt, "red")
    assert before["fetch"] is None
    assert (after["fetch"], after["fetched_from"]) == ("fetched", before["decode_instance"])
    assert after["fetched_tokens"] >= 0.8 * len(prompt)
    assert after["transport"] == "tcp"
    assert again.tokens == first.tokens
    assert again.logprobs == pytest.approx(first.logprobs, abs=TOLERANCE)
    for model in ("blue", MODEL):
        other, explained = told(cluster, prompt, model)
        assert (explained["fetch"], explained["prefix_hit_tokens"]) == (None, 0)
        assert other.logprobs != pytest.approx(first.logprobs, abs=TOLERANCE)
    cluster.assert_clean()
