"""Workers come by being launched and leave by being drained, under load and without a failure."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster, pullfill, until
from tests.support.load import Load
from tests.support.oracle import Oracle

pytestmark = pytest.mark.engine


@pytest.mark.essential
def test_second_prefill_joins_by_hand_and_leaves_by_lease_revocation(
    cluster: Cluster, oracle: Oracle
) -> None:
    with Load(cluster, seed=1000) as load:
        second = cluster.add("prefill")
        until(lambda: second.instance_id in load.prefill_instances(), 30, "it takes work")
        done_before = len(load.done)
        cluster.revoke_lease(second)
        assert second.process.wait(30) == 0
        until(lambda: len(load.done) > done_before + 6, 30, "load goes on")
    load.check(oracle)
    load.check_fallbacks()


@pytest.mark.essential
def test_second_decode_joins_by_hand_and_is_drained_by_command(
    cluster: Cluster, oracle: Oracle
) -> None:
    with Load(cluster, seed=2000) as load:
        second = cluster.add("decode")
        until(lambda: second.instance_id in load.decode_instances(), 30, "it takes work")
        drained = pullfill(cluster, "drain", second.instance_id, "--wait", "--timeout", "30")
        assert drained.returncode == 0, drained.stdout + drained.stderr
        assert second.process.wait(10) == 0
        done_before = len(load.done)
        until(lambda: len(load.done) > done_before + 3, 30, "load goes on")
    load.check(oracle)
