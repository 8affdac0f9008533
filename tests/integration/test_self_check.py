"""The self-check of a pair that agrees."""

from __future__ import annotations

import msgspec
import pytest

from pullfill.registry import keys
from pullfill.wire import SelfCheck
from tests.support.cluster import Cluster
from tests.support.outages import Asked, undisturbed
from tests.support.prompts import ask, random_prompt


@pytest.mark.engine
def test_a_pair_that_agrees_goes_remote_and_no_counter_of_requests_moves(cluster: Cluster) -> None:
    prefix = keys.self_checks_prefix(cluster.namespace)
    kept = cluster.etcd.ctl("get", "--prefix", prefix, "--print-value-only").split()
    (result,) = (msgspec.json.decode(line, type=SelfCheck) for line in kept)
    assert result.passed
    assert result.kv_difference is not None
    assert result.logprob_difference is not None
    (decode,) = cluster.of("decode")
    assert cluster.load_of(decode)["self_check"] == "passed"
    assert not cluster.counter("pullfill_decision_total", reason="self_check")

    def asked(turn: int) -> Asked:
        prompt = random_prompt(700, seed=71 + 100 * turn)
        return [prompt], [ask(cluster, prompt)]

    _, (answer,) = undisturbed(cluster, asked)
    assert cluster.explain(answer.request_id)["path"] == "remote"
