"""Faults in the middle of a handoff (docs/failure-modes.md): no wrong token, nothing left behind.

Row numbers are those of the fault matrix.
"""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.cluster import Cluster, until
from tests.support.load import Load
from tests.support.oracle import Oracle
from tests.support.prompts import ask, random_prompt, truth

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 6


@pytest.mark.parametrize(
    ("row", "failpoint"),
    [
        (1, "prefill.before_claim=kill"),
        (2, "shm.write.batch=kill@2"),
        (3, "prefill.before_commit=kill"),
        (4, "prefill.before_ack=kill"),
    ],
)
def test_prefill_dies_at(row: int, failpoint: str, cluster: Cluster, oracle: Oracle) -> None:
    """The only prefill worker dies; the request is served all the same."""
    victim = cluster.launch("prefill", failpoints=failpoint)
    cluster.wait_ready(victim)
    fallbacks = cluster.counter("pullfill_fallback_total")
    prompt = random_prompt(1500, seed=7000 + row)
    answer = ask(cluster, prompt, STEPS)
    assert answer.tokens == truth(oracle, [prompt], STEPS)[0][0]
    assert victim.process.wait(5) == -signal.SIGKILL
    told = cluster.explain(answer.request_id)
    if row == 4:  # after the commit: nothing to redo
        assert (told["path"], told["attempts"]) == ("remote", 1)
    else:
        assert told["path"] == "local"
        assert told["fallback"] is not None
        assert cluster.counter("pullfill_fallback_total") == fallbacks + 1
    # The message of the dead worker is redelivered and refused, or removed: the queue empties.
    cluster.wait_ready(cluster.launch("prefill"))
    cluster.assert_clean()
    again = random_prompt(700, seed=7100 + row)
    after = ask(cluster, again, STEPS)
    assert after.tokens == truth(oracle, [again], STEPS)[0][0]
    assert cluster.explain(after.request_id)["path"] == "remote"


def test_prefill_killed_under_load_with_another_alive(cluster: Cluster, oracle: Oracle) -> None:
    first, second = cluster.launch("prefill"), cluster.launch("prefill")
    cluster.wait_ready(first, second)
    with Load(cluster, threads=4, lengths=(900, 1400, 2000), seed=8000) as load:
        until(lambda: len(load.prefill_instances()) == 2, 30, "both work")
        first.kill()
        done = len(load.done)
        until(lambda: len(load.done) > done + 8, 60, "load goes on")
    load.check(oracle)


def test_row_5_zombie_writer(cluster: Cluster, oracle: Oracle) -> None:
    """A writer stopped inside a batch keeps its blocks quarantined; nobody waits for it, and
    when it wakes up not one byte of anybody else has changed."""
    cluster.set_router(remote_timeout_s=1.5)
    zombie = cluster.launch("prefill", failpoints="shm.write.batch=stop@3")
    cluster.wait_ready(zombie)
    prompt = random_prompt(1800, seed=8100)
    answer = ask(cluster, prompt, STEPS)
    assert answer.tokens == truth(oracle, [prompt], STEPS)[0][0]
    told = cluster.explain(answer.request_id)
    assert (told["path"], told["fallback"]) == ("local", "timeout")
    assert cluster.counter("pullfill_quarantined_blocks") > 0
    # Refill the pool: prompts of which each must keep its own KV through many steps.
    cluster.set_router(policy="always_local")
    with Load(cluster, threads=4, lengths=(1000, 1500), max_tokens=24, seed=8200) as load:
        time.sleep(2.0)
        assert cluster.counter("pullfill_quarantined_blocks") > 0, "time is no proof"
        zombie.signal(signal.SIGCONT)
        until(lambda: cluster.counter("pullfill_quarantined_blocks") == 0, 10, "proved quiet")
        done = len(load.done)
        until(lambda: len(load.done) > done + 6, 60, "load goes on")
    load.check(oracle)
    again = ask(cluster, prompt, STEPS)
    assert again.tokens == answer.tokens


def test_row_6_and_7_abort(cluster: Cluster) -> None:
    """Clients go away while their prompts are queued or being written: all blocks come back."""
    worker = cluster.launch("prefill", failpoints="prefill.before_write=sleep:0.5")
    cluster.wait_ready(worker)
    client = cluster.client()
    for seed in range(6):
        with pytest.raises(Exception, match="timed out"):
            client.with_options(timeout=0.4).completions.create(
                model="tiny", prompt=random_prompt(1500, seed=8300 + seed), max_tokens=4
            )
    cluster.assert_clean()
