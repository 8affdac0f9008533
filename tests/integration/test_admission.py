"""Which prompts go remote over a slow link, and which deadlines they get: mock engines.

Everything but the model is real. A proxy between the two workers forwards 64 KiB at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_mock_engine import MOCK, ask
from tests.support.cluster import Cluster
from tests.support.etcd import free_ports
from tests.support.prompts import random_prompt
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.engine, pytest.mark.long]

TOKENS_PER_S = 2000
# 16 KiB of KV for each block of 32 tokens.
MODEL = f'{{"mock": {{"prefill_tokens_per_s": {TOKENS_PER_S}, "head_size": 64}}}}'
LOCAL = '{"mock": {"head_size": 64}}'


@pytest.fixture(scope="module")
def slow(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """(cluster, the proxy in front of the decode worker's KV port)."""
    (port,) = free_ports(1)
    cluster = Cluster(tmp_path_factory.mktemp("admission"), model_path)
    with Proxy(("127.0.0.1", port)) as proxy:
        try:
            cluster.start_servers()
            cluster.launch(
                "decode", *MOCK, "--additional-config", LOCAL, "--transports", "tcp",
                "--kv-port", str(port), "--advertise-kv", proxy.address,
            )  # fmt: skip
            cluster.launch("prefill", *MOCK, "--additional-config", MODEL, "--transports", "tcp")
            cluster.launch("frontend")
            cluster.wait_ready(*cluster.workers)
            yield cluster, proxy
        finally:
            cluster.stop()


def measure(cluster: Cluster, proxy: Proxy, delay_s: float, seed: int) -> None:
    """Send short prompts until earlier measurements of the link hardly count."""
    proxy.delay(delay_s)
    cluster.set_router(
        policy="always_remote", remote_timeout_s=30, claim_timeout_s=30, max_remote_kv_fraction=1
    )
    for i in range(6):
        assert ask(cluster, random_prompt(200, seed=seed + i), 1)[1]["path"] == "remote"


def test_a_burst_waits_as_long_as_is_accepted_and_the_rest_stays_here(slow: Any) -> None:
    cluster, proxy = slow
    measure(cluster, proxy, 0.0, seed=100)
    claim_s = 1.0
    cluster.set_router(claim_timeout_s=claim_s, remote_timeout_s=2 * claim_s, max_queue_wait_s=3)
    prompts = [random_prompt(1500, seed=i) for i in range(12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        told = [told for _, told in pool.map(lambda p: ask(cluster, p, 1), prompts)]
    reasons = Counter(t["reason"] for t in told)
    assert set(reasons) == {"policy_always_remote", "queue_wait"}, reasons
    assert [t["fallback"] for t in told] == [None] * len(told), "none waits and then starts again"
    for t in told:
        assert (t["expected_s"]["queue"] > 3) == (t["reason"] == "queue_wait"), t
    waits = [t["timings_ms"]["queue"] for t in told if t["path"] == "remote"]
    assert max(waits) > 1e3 * claim_s, "it was expected, so it had the time"
    cluster.assert_clean()


def test_a_slow_link_gets_its_time_until_it_is_not_worth_it(slow: Any) -> None:
    cluster, proxy = slow
    timeout_s = 1.0
    measure(cluster, proxy, 0.03, seed=200)
    cluster.set_router(remote_timeout_s=timeout_s, claim_timeout_s=timeout_s)
    _, told = ask(cluster, random_prompt(3500, seed=2), 1)
    assert (told["path"], told["fallback"]) == ("remote", None), told
    assert told["timings_ms"]["kv_write"] > 1e3 * timeout_s, "it took longer than the setting says"
    measure(cluster, proxy, 0.12, seed=300)
    _, told = ask(cluster, random_prompt(3500, seed=3), 1)
    assert (told["path"], told["reason"], told["fallback"]) == ("local", "slow_link", None), told
    assert told["expected_s"]["kv_write"] > 3 * told["expected_s"]["prefill"]
    _, told = ask(cluster, random_prompt(200, seed=4), 1)
    assert told["path"] == "remote", "short prompts go on measuring"
    cluster.assert_clean()
