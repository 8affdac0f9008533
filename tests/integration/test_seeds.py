"""Seeded requests: one seed gives the same tokens whatever way the prompt is prefilled.

The truth is a plain engine that computes the whole prompt in one step. Without our worker class
(`pullfill/engine/cpu_worker.py`) the first chunk of a seeded prompt ends an engine on a CPU.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import forget_decode_prefixes, random_prompt, sample, sampled

pytestmark = pytest.mark.engine

LONG = 1600
"""More than three chunks of 512 tokens, and less than the plain engine's step of 2048."""


@pytest.mark.parametrize("policy", ["always_local", "always_remote"])
@pytest.mark.essential
def test_a_seed_gives_the_tokens_of_a_prompt_in_one_step(
    cluster: Cluster, oracle: Oracle, policy: str
) -> None:
    pids = [w.pid for w in cluster.workers if w.alive]
    prompt = random_prompt(LONG, seed=70)
    cluster.set_router(policy=policy)
    forget_decode_prefixes(cluster)
    assert sample(cluster, prompt) == sampled(oracle, [prompt])[0]
    more = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2**40}
    forget_decode_prefixes(cluster)
    assert sample(cluster, prompt, **more) == sampled(oracle, [prompt], **more)[0]
    assert [w.pid for w in cluster.workers if w.alive] == pids


def test_seeds_side_by_side_do_not_disturb_each_other(cluster: Cluster, oracle: Oracle) -> None:
    """Chunks of one prompt run in the steps in which others decode: only the one whose token is
    dropped is rewound."""
    cluster.set_router(policy="always_local")
    prompts = [random_prompt(n, seed=71) for n in (40, 700, LONG, 1100, 90, 1900)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda p: sample(cluster, p, 40), prompts))
    assert got == sampled(oracle, prompts, 40)
