"""vLLM's own KV offloading beside ours: hits of it are local hits, and answers stay the same.

The KV cache holds fewer tokens than the conversations have. So their next turns find their KV
offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.cluster import BLOCK, Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import (
    Answer,
    ask,
    ask_all,
    assert_right,
    forget_decode_prefixes,
    going_away,
    random_prompt,
)
from tests.support.zoo import ZOO

pytestmark = pytest.mark.engine

FLAGS = ("--max-model-len=2048", "--kv-offloading-size=0.0625")  # GiB
MEMORY, RANKS, WINDOWS = "memory", "a decode worker of two ranks", "windows"
STEPS = 6
TOLERANCE = 1e-4
TALKS = 6
ROUTER: dict[str, object] = {
    "policy": "conditional", "max_local_prefill_length": 256, "max_remote_kv_fraction": 1.0,
    "max_queue_wait_s": 3600,
}  # fmt: skip


@dataclass
class Served:
    kind: str
    cluster: Cluster
    oracle: Oracle

    def check(self, prompts: list[list[int]], at_once: int = 3) -> list[Answer]:
        """Ask. The answers must be those of one plain engine."""
        answers = ask_all(self.cluster, prompts, STEPS, at_once)
        assert_right(self.oracle, prompts, answers, STEPS, TOLERANCE)
        return answers

    def loaded(self, role: str) -> float:
        """Return how many tokens the workers of a role have loaded."""
        return self.cluster.counter("pullfill_kv_offload_tokens_total", role=role)


@pytest.fixture(
    scope="module",
    params=[
        MEMORY,
        *(pytest.param(kind, marks=pytest.mark.long) for kind in (RANKS, WINDOWS)),
    ],
)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, oracle: Oracle
) -> Iterator[Served]:
    """Workers whose KV cache holds less than all conversations."""
    kind, directory = request.param, tmp_path_factory.mktemp("offloading")
    model = ZOO["Gemma 3" if kind == WINDOWS else "Llama"]
    plain = Oracle(model.checkpoint(), block_size=BLOCK) if kind == WINDOWS else nullcontext(oracle)
    ranks = ["--tensor-parallel-size=2", f"--kv-cache-memory-bytes={2 << 20}"]
    decode = ("decode", *FLAGS, *(ranks if kind == RANKS else ()))
    whole = Cluster(directory, model.checkpoint(), kv_mib=4, lease_ttl_s=10)
    with plain as own, whole as cluster:
        cluster.start(decode, ("prefill", *FLAGS), ("frontend", *FLAGS))
        cluster.set_router(**ROUTER)
        yield Served(kind, cluster, own)
        assert not cluster.log_errors()


@pytest.mark.essential
def test_turns_that_the_cache_has_lost_are_loaded(served: Served) -> None:
    cluster = served.cluster
    talks = [random_prompt(700 + 7 * n, seed=20) for n in range(TALKS)]
    first = served.check(talks)
    assert {cluster.explain(a.request_id)["path"] for a in first} == {"remote"}

    talks = [t + a.tokens + random_prompt(60, seed=21) for t, a in zip(talks, first, strict=True)]
    second = served.check(talks, at_once=1)
    told = [cluster.explain(a.request_id) for a in second]
    assert {(t["path"], t["reason"]) for t in told} == {("local", "prefix_hit")}
    assert sum(t["offloaded_tokens"] > 0 for t in told) >= TALKS // 2
    for answer, one in zip(second, told, strict=True):
        assert one["prefix_hit_tokens"] >= 700 // BLOCK * BLOCK
        assert answer.cached_tokens == one["prefix_hit_tokens"]

    # A long rest goes to a prefill worker, which reads the loaded part of the hit.
    talks = [t + a.tokens + random_prompt(500, seed=22) for t, a in zip(talks, second, strict=True)]
    third = served.check(talks)
    told = [cluster.explain(a.request_id) for a in third]
    assert {t["path"] for t in told} == {"remote"}
    both = [t for t in told if t["offloaded_tokens"]]
    assert both
    for one in both:
        assert one["remote_tokens"] == one["prompt_tokens"] - 1 - one["prefix_hit_tokens"]
    assert served.loaded("decode") >= sum(t["offloaded_tokens"] for t in told)
    for direction in ("load", "store"):
        assert cluster.counter("pullfill_kv_offload_bytes_total", direction=direction) > 0
    cluster.assert_clean()

    if served.kind == MEMORY:
        # The decode worker forgets all. The prefill worker finds its own part offloaded.
        before = served.loaded("prefill")
        forget_decode_prefixes(cluster, offloaded=True)
        again = served.check(talks)
        assert {cluster.explain(a.request_id)["prefix_hit_tokens"] for a in again} == {0}
        assert served.loaded("prefill") > before

    # The prefill worker dies. Half of the KV cache does not hold one of these prompts.
    with going_away(cluster, talks[0] + random_prompt(300, seed=23)):
        pass
    cluster.of("prefill")[0].arm("prefill.before_commit=kill@1")
    served.check([talk + random_prompt(300, seed=24) for talk in talks[:3]])
    assert cluster.of("prefill") == []
    cluster.assert_clean()
    assert ask(cluster, talks[1], STEPS).tokens


@pytest.mark.essential
def test_workers_with_both_sides_offload(
    tmp_path_factory: pytest.TempPathFactory, model_path: Path, oracle: Oracle
) -> None:
    """Each of them prefills for the other. One engine has one tier for both of its sides."""
    directory = tmp_path_factory.mktemp("both")
    with Cluster(directory, model_path, kv_mib=6, lease_ttl_s=10) as cluster:
        cluster.start(("worker", *FLAGS), ("worker", *FLAGS), "frontend")
        # If they hold all blocks of both workers, neither waits for the other one's blocks.
        cluster.set_router(**ROUTER, itl_ms=10_000)
        served = Served(MEMORY, cluster, oracle)
        talks = [random_prompt(500 + 7 * n, seed=30) for n in range(TALKS)]
        for turn, more in enumerate((60, 400, 60, 300)):
            answers = served.check(talks)
            rest = [random_prompt(more, seed=31 + 10 * turn + n) for n in range(TALKS)]
            talks = [t + a.tokens + r for t, a, r in zip(talks, answers, rest, strict=True)]
        served.check(talks, at_once=6)
        # Two of these prompts fill a worker's blocks, so that it has none for the other's jobs.
        cluster.set_router(policy="always_remote")
        served.check([random_prompt(1500, seed=70 + n) for n in range(12)], at_once=12)
        # The caches have lost the talks. Each talk passes both workers now: one has offloaded it.
        before = served.loaded("decode") + served.loaded("prefill")
        served.check(talks)
        assert served.loaded("decode") + served.loaded("prefill") > before
        for cause in ("timeout", "claim_timeout"):
            assert not cluster.counter("pullfill_fallback_total", cause=cause)
        assert cluster.counter("pullfill_decision_total", path="remote") >= TALKS
        cluster.assert_clean()
        assert not cluster.log_errors()
