"""Workers and frontends die, leave or are replaced while requests run.

Row numbers are those of the fault matrix (docs/failure-modes.md).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.cluster import Cluster, until
from tests.support.load import Load
from tests.support.oracle import Oracle
from tests.support.prompts import ask, random_prompt, truth

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 6


def _end_of(stream: Any) -> tuple[str | None, float]:
    """(error message, None if it ended well; seconds until it ended)."""
    began = time.monotonic()
    try:
        reasons = [c.choices[0].finish_reason for c in stream if c.choices]
    except openai.APIError as exc:
        return str(exc), time.monotonic() - began
    assert reasons[-1] == "length"
    return None, time.monotonic() - began


def test_row_9_decode_dies_mid_stream_another_lives(cluster: Cluster, oracle: Oracle) -> None:
    """Its streams end with an error that names it; everybody else's go on untouched."""
    cluster.wait_ready(cluster.launch("prefill"))
    victim = cluster.launch("decode")
    cluster.wait_ready(victim)
    client = cluster.client()
    # Before the load: requests take turns, so each worker has one of the two.
    streams = [
        client.completions.create(
            model="tiny", prompt=f"stream {i}", max_tokens=2000, stream=True,
            extra_body={"ignore_eos": True},
        )
        for i in range(2)
    ]  # fmt: skip
    for stream in streams:
        next(iter(stream))
    with Load(cluster, threads=2, lengths=(40, 600), seed=11_000) as load:
        victim.kill()
        with ThreadPoolExecutor(2) as pool:
            ends = list(pool.map(_end_of, streams))
        ((said, after_s),) = [(e, t) for e, t in ends if e is not None]
        assert victim.instance_id in said
        assert after_s < 6
        done = len(load.done)
        until(lambda: len(load.done) > done + 4, 60, "load goes on")
    # A request whose tokens were already out on the dead worker may fail, and says why.
    assert all(victim.instance_id in f for f in load.failures), load.failures
    load.failures.clear()
    load.check(oracle)


def test_row_8_decode_dies_with_jobs_outstanding(cluster: Cluster, oracle: Oracle) -> None:
    """Prefill workers drop the jobs of a dead decode worker; the queue empties by itself."""
    slow = cluster.launch("prefill", failpoints="prefill.before_write=sleep:0.3")
    cluster.wait_ready(slow)
    victim = cluster.launch("decode")
    cluster.wait_ready(victim)
    with Load(cluster, threads=6, lengths=(1500, 1900), seed=12_000) as load:
        until(lambda: victim.instance_id in load.decode_instances(), 30, "it has work")
        victim.kill()
        done = len(load.done)
        until(lambda: len(load.done) > done + 4, 60, "load goes on")
    load.check(oracle)  # no token of theirs was out: all were sent to the other worker


def test_row_11_engine_dies_inside_a_worker(cluster: Cluster, oracle: Oracle) -> None:
    """The process does not linger without its engine: it leaves, and others serve."""
    cluster.wait_ready(cluster.launch("prefill"))
    victim = cluster.launch("decode", failpoints="engine.step=error:the engine broke@30")
    cluster.wait_ready(victim)
    with Load(cluster, threads=3, lengths=(600, 900), max_tokens=1, seed=12_500) as load:
        assert victim.process.wait(60) == 1
        done = len(load.done)
        until(lambda: len(load.done) > done + 4, 60, "load goes on")
    assert "the engine broke" in victim.log.read_text()
    load.check(oracle)  # one token each: whatever was lost had none out, and was sent again
    gone = {w["instance_id"] for w in cluster.status()["workers"]}
    assert victim.instance_id not in gone, "its lease is revoked, not left to expire"


def test_row_16_etcd_down_shorter_than_the_ttl(cluster: Cluster, oracle: Oracle) -> None:
    worker = cluster.launch("prefill")
    cluster.wait_ready(worker)
    before = {w["instance_id"] for w in cluster.status()["workers"]}
    with Load(cluster, threads=2, seed=13_000) as load:
        cluster.etcd.pause()
        time.sleep(cluster.lease_ttl_s * 0.4)
        cluster.etcd.resume()
        time.sleep(1.5)
    load.check(oracle)
    assert {w["instance_id"] for w in cluster.status()["workers"]} == before
    assert "registered again" not in worker.log.read_text()


def test_row_21_second_sigterm_forces(cluster: Cluster) -> None:
    victim = cluster.launch("decode")
    cluster.wait_ready(victim)
    client = cluster.client()
    streams = [
        client.completions.create(
            model="tiny", prompt=f"long {i}", max_tokens=4000, stream=True,
            extra_body={"ignore_eos": True},
        )
        for i in range(2)
    ]  # fmt: skip
    for stream in streams:
        next(iter(stream))
    victim.signal(signal.SIGTERM)
    time.sleep(0.5)
    assert victim.alive, "the first one lets its streams finish"
    victim.signal(signal.SIGTERM)
    victim.process.wait(10)
    for stream in streams:
        stream.close()


def test_row_22_rolling_restart_under_load(cluster: Cluster, oracle: Oracle) -> None:
    """Every worker is replaced, one after another; no request fails."""
    cluster.wait_ready(cluster.launch("prefill"))
    with Load(cluster, threads=3, seed=14_000) as load:
        for old in [*cluster.of("prefill"), *cluster.of("decode")]:
            cluster.wait_ready(cluster.launch(old.role))
            assert old.stop() == 0
            done = len(load.done)
            until(lambda: len(load.done) > done + 3, 60, "load goes on")  # noqa: B023
    load.check(oracle)
    assert len(load.decode_instances()) == 2


def test_row_26_frontend_dies_with_streams_open(cluster: Cluster) -> None:
    """The decode worker aborts the requests of a frontend that is gone; blocks come back."""
    survivor = cluster.frontend_url
    second = cluster.launch("frontend")
    doomed, cluster.frontend_url = cluster.frontend_url, survivor
    until(lambda: _ready(doomed), 60, "the second frontend is ready")
    client = openai.OpenAI(base_url=f"{doomed}/v1", api_key="none", max_retries=0)
    streams = [
        client.completions.create(
            model="tiny", prompt=f"orphan {i}", max_tokens=4000, stream=True,
            extra_body={"ignore_eos": True},
        )
        for i in range(3)
    ]  # fmt: skip
    for stream in streams:
        next(iter(stream))
    second.kill()
    for stream in streams:
        with pytest.raises(Exception, match=r".+"):
            list(stream)
        stream.close()
    client.close()
    cluster.assert_clean(within_s=15)


def _ready(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def small(model_path: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Barely more KV memory than one longest prompt: requests are preempted all the time."""
    cluster = Cluster(tmp_path / "small", model_path, kv_mib=7)
    try:
        cluster.start()
        cluster.set_router(policy="always_remote")
        yield cluster
        cluster.assert_clean()
    finally:
        cluster.stop()


def test_row_27_preemption_while_remote_prefills_are_outstanding(
    small: Cluster, oracle: Oracle
) -> None:
    with Load(small, threads=8, lengths=(500, 900, 1300), max_tokens=150, seed=15_000) as load:
        until(lambda: len(load.done) > 24, 120, "requests are answered")
    load.check(oracle, at_least=24)
    assert small.counter("vllm:num_preemptions_total") > 0, "nothing was preempted"
    one = random_prompt(900, seed=15_999)
    assert ask(small, one, STEPS).tokens == truth(oracle, [one], STEPS)[0][0]
