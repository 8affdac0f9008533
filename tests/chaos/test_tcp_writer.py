"""Fault rows 2 and 5 of the writer, over tcp: the decode worker receives, so no block waits for a
prefill worker that is stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.checked import checked
from tests.support.cluster import Cluster, Worker, until
from tests.support.oracle import Oracle
from tests.support.prompts import random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def writer(cluster: Cluster) -> Iterator[Worker]:
    """The only prefill worker, as if on another host."""
    worker = cluster.launch("prefill", "--transports", "tcp")
    cluster.wait_ready(worker)
    yield worker
    worker.kill()


def test_a_stopped_writer_keeps_no_blocks(cluster: Cluster, writer: Worker, oracle: Oracle) -> None:
    stale = {"revoked": (0, 1), "write": (0, 1)}  # whichever it meets first
    with checked(cluster, oracle, fallbacks={"timeout": 1}, stale=stale) as check:
        cluster.set_router(remote_timeout_s=4.0)  # the writer must get there before
        writer.arm("stream.write.batch=stop@1")
        prompt = random_prompt(1800, seed=9600)
        told = check.told(check.ask(prompt))
        assert (told["path"], told["fallback"]) == ("local", "timeout")
        until(lambda: not cluster.counter("pullfill_quarantined_blocks"), 10, "proved quiet")
        assert writer.stopped, "it had no part in the proof"
        cluster.set_router(policy="always_local")
        with check.load(threads=4, lengths=(1000, 1500), max_tokens=24, seed=9610) as load:
            until(lambda: len(load.done) > 3, 60, "the pool is used")
            writer.signal(signal.SIGCONT)
            done = len(load.done)
            until(lambda: len(load.done) > done + 6, 60, "load goes on")
        check.ask(prompt)


def test_a_killed_writer_keeps_no_blocks(cluster: Cluster, writer: Worker, oracle: Oracle) -> None:
    with checked(cluster, oracle, fallbacks={"prefill_lost": 1}) as check:
        writer.arm("stream.write.batch=kill@1")
        told = check.told(check.ask(random_prompt(1500, seed=9620)))
        assert writer.process.wait(5) == -signal.SIGKILL
        assert (told["path"], told["fallback"]) == ("local", "prefill_lost")
        cluster.wait_ready(cluster.launch("prefill"))
