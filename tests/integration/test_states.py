"""Remote prefills of a model with Mamba-2 layers and a prefix cache: which states are handed over.

vLLM's CPU kernel of Mamba-2 fails at the first prompt if there is a prefix cache. So the model is a
mock (tests/support/recurrent.py) over vLLM's own scheduler, block tables and cache configuration of
Falcon-H1. tests/integration/test_models.py has the real kernels: Falcon-H1 without a prefix cache,
and Qwen3-Next with and without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import prompts
from tests.support.cluster import Cluster
from tests.support.prompts import random_prompt
from tests.support.recurrent import answer_to
from tests.support.zoo import ZOO

pytestmark = pytest.mark.engine

MOCK = (
    "--distributed-executor-backend=tests.support.recurrent.RecurrentExecutor",
    "--enable-prefix-caching",
    "--max-num-batched-tokens=256",
)
BLOCK = 64
"""vLLM makes a block of KV at least as large as a state."""
COUNT = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    path = ZOO["Falcon-H1 (Mamba-2)"].checkpoint()
    workers = (("decode", *MOCK), ("prefill", *MOCK))
    with Cluster(tmp_path_factory.mktemp("states"), path, lease_ttl_s=10) as cluster:
        yield cluster.start(*workers, "frontend", policy="always_remote")
        assert not cluster.log_errors()


def ask(cluster: Cluster, prompt: list[int], count: int = COUNT) -> dict[str, Any]:
    """Check the answer. Returns how it was made."""
    answer = prompts.ask(cluster, prompt, count, logprobs=None)
    told = cluster.explain(answer.request_id)
    assert answer.tokens == answer_to(prompt, count), told
    return told


def blocks_written(cluster: Cluster, told: dict[str, Any]) -> float:
    """How many blocks of KV and states the prefill worker wrote."""
    (record,) = cluster.records("decode").values()
    return told["kv_bytes"] / (record.compat.page_bytes * record.compat.num_layers)


@pytest.mark.parametrize(("blocks", "beyond"), [(1, -1), (1, 1), (4, 2), (9, 0)])
@pytest.mark.essential
def test_kv_of_all_blocks_and_one_state_are_written(
    cluster: Cluster, blocks: int, beyond: int
) -> None:
    """The state is that before the last token of the prompt, wherever a block or a step ends."""
    prompt = random_prompt(blocks * BLOCK + beyond, seed=beyond)
    told = ask(cluster, prompt, BLOCK + 2)
    assert told["path"] == "remote"
    assert blocks_written(cluster, told) == -(-(len(prompt) - 1) // BLOCK) + 1


def test_the_state_at_the_end_of_a_hit_is_read(cluster: Cluster) -> None:
    """Only the decode worker has it. The prefill worker computes on from it."""
    hit, more = 5 * BLOCK, 400
    cluster.set_router(policy="always_local")
    head = random_prompt(hit + 1, seed=hit + more)
    assert ask(cluster, head)["path"] == "local"
    cluster.set_router(policy="always_remote")
    read = cluster.counter("pullfill_kv_read_bytes_total")
    prompt = head[:hit] + random_prompt(more + 1, seed=more)
    told = ask(cluster, prompt)
    assert (told["path"], told["prefix_hit_tokens"]) == ("remote", hit)
    assert blocks_written(cluster, told) == -(-more // BLOCK) + 1
    (record,) = cluster.records("decode").values()
    read = cluster.counter("pullfill_kv_read_bytes_total") - read
    assert read == (hit // BLOCK + 1) * record.compat.page_bytes * record.compat.num_layers
