"""Every transport gives the same tokens. The shared cluster's own prefill worker writes over shm;
another one here is told to use tcp only, as if it were on another host."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import ask, ask_all, assert_right, random_prompt

pytestmark = pytest.mark.engine

STEPS = 6


@pytest.mark.parametrize(
    "name",
    [
        "tcp",
        pytest.param(
            "nixl",
            marks=pytest.mark.skipif(
                find_spec("nixl") is None, reason="nixl is not installed (make install-nixl)"
            ),
        ),
    ],
)
@pytest.mark.essential
def test_tokens_over_other_transports_equal_the_oracle(
    cluster: Cluster, oracle: Oracle, name: str
) -> None:
    head = random_prompt(300, seed=9100)
    ask(cluster, head, STEPS)  # a prefix that the other worker has to read, as it computed none
    other = cluster.add("prefill", "--transports", name)
    over: dict[str, list[dict[str, Any]]] = {"shm": [], name: []}
    try:
        for round_ in range(60):  # on a busy machine one worker may get few of them
            prompts = [random_prompt(n, seed=9200 + round_) for n in (33, 256, 1500)]
            prompts += [head + random_prompt(n, seed=9300 + round_) for n in (5, 700)]
            answers = ask_all(cluster, prompts, STEPS, at_once=4)
            assert_right(oracle, prompts, answers, STEPS)
            for answer in answers:
                told = cluster.explain(answer.request_id)
                over[told["transport"]].append(told)
            read = cluster.counter("pullfill_kv_read_bytes_total", transport=name)
            if round_ and len(over[name]) >= 4 and read:
                break
        assert len(over[name]) >= 4, "both workers get their share"
        assert read > 0, "it gets a prompt with the prefix, too"
        assert {told["prefill_instance"] for told in over[name]} == {other.instance_id}
        assert cluster.counter("pullfill_kv_write_bytes_total", transport=name) > 0
    finally:
        other.stop()
    for told in over[name]:
        better = dict(reason.split(": ", 1) for reason in told["why_not_better"])
        assert "--transports" in better["shm"]
        assert next(iter(better)) == "cuda_ipc"
    for told in over["shm"]:
        assert [reason.split(": ")[0] for reason in told["why_not_better"]] == ["cuda_ipc"]
