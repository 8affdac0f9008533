"""A wire that carries 20 MB/s between a decode and a prefill worker keeps long prompts local.

Workers on the mock backend: their KV is large and their computation quick, so that the wire
decides. Everything else is real.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import MOCK
from tests.support.hosts import Hosts, SpreadCluster, why_not
from tests.support.prompts import ask, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

KV = '"layers": 4, "kv_heads": 4, "head_size": 256'
"""16 KiB for each token."""
TOKENS_PER_S = 16_000
RATE = 20e6
LONG = 3500
"""Tokens: 2.9 s of writing at RATE, 0.2 s of computation. A busy machine computes more slowly."""
SHORT = 700
"""0.6 s of writing at RATE: goes out all the same, and measures."""


@pytest.fixture(scope="module")
def cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpreadCluster]:
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(["servers", "front", "decode0", "prefill0"], mtu=60_000)
    config = '{"mock": {%s, "prefill_tokens_per_s": %d}}'
    with SpreadCluster(tmp_path_factory.mktemp("slow"), model_path, hosts) as cluster:
        cluster.kv_mib = 256
        cluster.start_servers()
        for role, speed in (("decode", 0), ("prefill", TOKENS_PER_S)):
            flags = (*MOCK, "--additional-config", config % (KV, speed))
            cluster.launch_on(f"{role}0", role, *flags)
        cluster.launch_on("front", "frontend")
        cluster.wait_ready(*cluster.workers)
        # `cost` would keep the short prompts here that measure the link.
        cluster.set_router(policy="conditional")
        yield cluster


def measure(cluster: SpreadCluster, seed: int) -> None:
    """Send short prompts until earlier measurements of the link do not count any more."""
    for i in range(8):
        assert decided(cluster, seed + i, SHORT)["path"] == "remote"


def decided(cluster: SpreadCluster, seed: int, length: int = LONG) -> dict[str, Any]:
    """Send a prompt and return its record."""
    answer = ask(cluster, random_prompt(length, seed=seed), 1, logprobs=None)
    return cluster.explain(answer.request_id)


@pytest.mark.essential
def test_a_slow_wire_keeps_long_prompts_here_and_explain_says_why(cluster: SpreadCluster) -> None:
    there, back = (cluster.hosts.wire(*pair) for pair in (
        ("prefill0", "decode0"), ("decode0", "prefill0"),
    ))  # fmt: skip
    measure(cluster, seed=100)
    told = decided(cluster, seed=1)
    assert (told["path"], told["fallback"]) == ("remote", None), told
    kv_bytes = told["kv_bytes"]
    there.rate = back.rate = RATE
    measure(cluster, seed=200)
    told = decided(cluster, seed=2)
    assert (told["path"], told["reason"]) == ("local", "slow_link"), told
    assert there.delayed > 0
    assert back.delayed > 0
    expected = told["expected_s"]
    assert 0.9 * kv_bytes / RATE < expected["kv_write"] < 3 * kv_bytes / RATE
    assert expected["kv_write"] > 3 * expected["prefill"] > 0
    cluster.hosts.wires.heal()
    measure(cluster, seed=300)
    told = decided(cluster, seed=3)
    assert (told["path"], told["fallback"]) == ("remote", None), told
    cluster.assert_clean()
