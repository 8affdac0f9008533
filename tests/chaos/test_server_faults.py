"""etcd or NATS stopped or killed: serving goes on, and everything heals."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.support.cluster import Cluster, until
from tests.support.load import Load
from tests.support.oracle import Oracle

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def with_prefill(cluster: Cluster) -> Cluster:
    cluster.wait_ready(cluster.launch("prefill"))
    return cluster


def remote_again(cluster: Cluster, oracle: Oracle, seed: int) -> None:
    def one() -> bool:
        with Load(cluster, threads=1, lengths=(700,), seed=seed + int(time.time() * 10)) as load:
            time.sleep(0.5)
        load.check(oracle, at_least=1)
        return "remote" in load.paths()

    until(one, 30, "remote prefill works again")


def test_row_17_etcd_down_longer_than_the_ttl(with_prefill: Cluster, oracle: Oracle) -> None:
    cluster = with_prefill
    with Load(cluster, threads=2, seed=9000) as load:
        cluster.etcd.pause()
        time.sleep(3 * cluster.lease_ttl_s)
        cluster.etcd.resume()
        time.sleep(2)
    load.check(oracle)
    assert all(w.alive for w in cluster.workers if w.role in ("decode", "frontend"))
    remote_again(cluster, oracle, 9100)


def test_row_17_etcd_killed_and_back_empty(with_prefill: Cluster, oracle: Oracle) -> None:
    cluster = with_prefill
    with Load(cluster, threads=2, seed=9200) as load:
        cluster.etcd.restart(empty=True)
        time.sleep(2 * cluster.lease_ttl_s)
    load.check(oracle)
    cluster.set_router(policy="always_remote")  # the settings went with the data
    remote_again(cluster, oracle, 9300)


def test_row_14_nats_killed_and_restarted(with_prefill: Cluster, oracle: Oracle) -> None:
    cluster = with_prefill
    with Load(cluster, threads=2, seed=9400) as load:
        until(lambda: len(load.done) > 3, 30, "load runs")
        cluster.nats.kill()
        done = len(load.done)
        until(lambda: len(load.done) > done + 6, 60, "served without NATS")
        asyncio.run(cluster.nats.start())
        time.sleep(2)
    load.check(oracle)
    remote_again(cluster, oracle, 9500)


def test_row_15_nats_hangs(with_prefill: Cluster, oracle: Oracle) -> None:
    cluster = with_prefill
    with Load(cluster, threads=2, seed=9600) as load:
        until(lambda: len(load.done) > 3, 30, "load runs")
        cluster.nats.pause()
        done = len(load.done)
        until(lambda: len(load.done) > done + 6, 60, "served while NATS hangs")
        cluster.nats.resume()
        time.sleep(2)
    load.check(oracle)
    remote_again(cluster, oracle, 9700)
