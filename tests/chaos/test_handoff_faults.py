"""Faults in the middle of a handoff (docs/failure-modes.md): no wrong token, nothing left over."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.checked import Bound, checked
from tests.support.cluster import Cluster, Worker, until
from tests.support.oracle import Oracle
from tests.support.prompts import going_away, random_prompt
from tests.support.pulls import granted, in_time, until_full
from tests.support.waiting import patience

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Bounds = dict[str, Bound]


def only_prefill(cluster: Cluster) -> Worker:
    (worker,) = cluster.of("prefill")
    return worker


def dies_at(
    failpoint: str, cluster: Cluster, oracle: Oracle, seed: int, fallbacks: Bounds, stale: Bounds
) -> dict[str, Any]:
    """The only prefill worker dies there with one request of its; a new one comes. What is told
    of the request."""
    victim = only_prefill(cluster)
    with checked(cluster, oracle, fallbacks=fallbacks, stale=stale) as check:
        victim.arm(failpoint)
        answer = check.ask(random_prompt(1500, seed=seed))
        victim.ends(-signal.SIGKILL, 5)
        # The dead worker's message is redelivered to it and refused, or it was removed.
        cluster.add("prefill")
    return check.told(answer)


@pytest.mark.essential
def test_row_1_prefill_dies_before_its_claim(paired: Cluster, oracle: Oracle) -> None:
    told = dies_at("prefill.before_claim=kill", paired, oracle, 7001, {"prefill_lost": 1}, {})
    assert (told["path"], told["attempts"]) == ("local", 0)


@pytest.mark.essential
def test_row_2_prefill_dies_mid_write(paired: Cluster, oracle: Oracle) -> None:
    told = dies_at("shm.write.batch=kill@2", paired, oracle, 7002, {"prefill_lost": 1}, {})
    assert (told["path"], told["fallback"], told["attempts"]) == ("local", "prefill_lost", 1)


@pytest.mark.essential
def test_row_3_prefill_dies_before_its_commit(paired: Cluster, oracle: Oracle) -> None:
    told = dies_at("prefill.before_commit=kill", paired, oracle, 7003, {"prefill_lost": 1}, {})
    assert (told["path"], told["attempts"]) == ("local", 1)


@pytest.mark.essential
def test_row_4_prefill_dies_before_its_ack(paired: Cluster, oracle: Oracle) -> None:
    """Computed once: the redelivery is refused at its claim."""
    told = dies_at("prefill.before_ack=kill", paired, oracle, 7004, {}, {"claim": 1})
    assert (told["path"], told["attempts"]) == ("remote", 1)


@pytest.mark.parametrize(
    ("leaves", "hit"),
    [pytest.param("timeout", 0, marks=pytest.mark.long), ("timeout", 900), ("abort", 0)],
)
@pytest.mark.essential
def test_row_5_zombie_writer(leaves: str, hit: int, paired: Cluster, oracle: Oracle) -> None:
    """A writer stopped inside a batch keeps its blocks quarantined; nobody waits for it, and
    when it wakes up not one byte of anybody else has changed. With a prefix hit, too, the prompt
    is computed in other blocks than the writer's."""
    cluster, zombie = paired, only_prefill(paired)
    timed_out = leaves == "timeout"
    with checked(
        cluster,
        oracle,
        fallbacks={"timeout": 1} if timed_out else {},
        stale={"revoked": (0, 1), "write": (0, 1)},  # whichever it meets first, or its own deadline
        cancelled=0 if timed_out else 1,
    ) as check:
        prompt = random_prompt(1800 + hit, seed=8100 + timed_out + hit)
        if hit:
            cluster.set_router(policy="always_local")
            check.ask(prompt[:hit])
        # The writer has until its deadline to come to its stop. That is before 5 s of silence end
        # its connection.
        cluster.set_router(policy="always_remote", remote_timeout_s=4 if timed_out else 30)
        zombie.arm("shm.write.batch=stop@3")
        if timed_out:
            told = check.told(check.ask(prompt))
            assert (told["path"], told["fallback"]) == ("local", "timeout")
            assert (told["prefix_hit_tokens"] > 0) == (hit > 0)
        else:
            with going_away(cluster, prompt):
                until(lambda: zombie.stopped, 10, "stopped in a write")
        until(lambda: cluster.counter("pullfill_quarantined_blocks"), 10, "in quarantine")
        # Refill the pool: prompts of which each must keep its own KV through many steps.
        cluster.set_router(policy="always_local")
        with check.load(threads=4, lengths=(1000, 1500), max_tokens=24, seed=8200) as load:
            load.more(4)
            assert cluster.counter("pullfill_quarantined_blocks") > 0, "time is no proof"
            zombie.signal(signal.SIGCONT)
            until(lambda: cluster.counter("pullfill_quarantined_blocks") == 0, 10, "proved quiet")
            load.more(7)
        check.ask(prompt)


@pytest.mark.essential
def test_row_5_nobody_waits_for_a_stopped_writer(paired: Cluster, oracle: Oracle) -> None:
    """Another worker could take the job. Its writer is given up as silent and keeps its blocks. The
    request goes on locally, before its deadline and before the writer wakes up."""
    first, second = only_prefill(paired), paired.launch("prefill")
    paired.wait_ready(first, second)
    late: Bounds = dict.fromkeys(("revoked", "write", "claim"), (0, 1))
    with checked(paired, oracle, fallbacks={"quarantined": 1}, stale=late) as check:
        paired.set_router(policy="always_remote", remote_timeout_s=30)
        for worker in (first, second):
            worker.arm("shm.write.batch=stop@2")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(check.ask, random_prompt(1500, seed=8230))
            until(lambda: first.stopped or second.stopped, 10, "stopped in a write")
            zombie, other = (first, second) if first.stopped else (second, first)
            other.arm("")
            told = check.told(answer.result(60))
        assert (told["path"], told["fallback"], told["attempts"]) == ("local", "quarantined", 1)
        assert paired.counter("pullfill_quarantined_blocks") > 0, "time is no proof"
        zombie.signal(signal.SIGCONT)
        until(lambda: not paired.counter("pullfill_quarantined_blocks"), 10, "proved quiet")


@pytest.mark.essential
def test_row_5_late_commit_is_refused(paired: Cluster, oracle: Oracle) -> None:
    """Stopped between its last write and its commit, a writer holds no fence: its blocks are free
    again at once, and what it says later counts for nothing."""
    zombie = only_prefill(paired)
    with checked(
        paired, oracle, fallbacks={"timeout": 1}, stale={"commit": 1, "revoked": 1}
    ) as check:
        # Long enough for a loaded machine, and so short that the decode worker does not end the
        # connection for 5 s of silence: then it would hear of no late commit.
        paired.set_router(remote_timeout_s=3)
        zombie.arm("prefill.before_commit=stop")
        told = check.told(check.ask(random_prompt(900, seed=8250)))
        assert zombie.stopped, "it was too slow to come to its commit"
        assert (told["path"], told["fallback"]) == ("local", "timeout")
        assert paired.counter("pullfill_quarantined_blocks") == 0
        zombie.signal(signal.SIGCONT)
        until(lambda: check.stale().get("commit"), 10, "its late commit has come")


@pytest.mark.essential
def test_row_6_abort_while_queued(paired: Cluster, oracle: Oracle) -> None:
    """The job is deleted; nobody computes it."""
    worker = only_prefill(paired)
    with checked(paired, oracle, cancelled=6) as check:
        in_time(paired)
        before, held = paired.load_of(worker)["completed"], granted(paired)
        # Two prompts fill the worker's budget of tokens: what comes after them stays in the queue.
        worker.arm("prefill.before_write=hold@1")
        with check.load(threads=2, lengths=(2100,), seed=8300) as load:
            until_full(paired, held, 2)
            with ExitStack() as clients:
                for seed in range(6):
                    prompt = random_prompt(1500, seed=8310 + seed)
                    clients.enter_context(going_away(paired, prompt))
                until(lambda: paired.status()["queue"]["depth_jobs"] == 8, 10, "all are queued")
                assert paired.load_of(worker)["jobs"] == 2
            until(lambda: paired.status()["queue"]["depth_jobs"] <= 2, 10, "deleted")
            worker.arm("")
        until(lambda: not paired.load_of(worker)["jobs"], 10, "idle")
        assert paired.load_of(worker)["completed"] - before == len(load.done)


@pytest.mark.essential
def test_row_7_abort_mid_write(paired: Cluster, oracle: Oracle) -> None:
    """Quarantined while its writer may write; released as soon as that is over."""
    worker = only_prefill(paired)
    with checked(paired, oracle, cancelled=1, stale={"revoked": (0, 1), "write": (0, 1)}):
        worker.arm("shm.write.batch=stop@2")
        with going_away(paired, random_prompt(1500, seed=8400)):
            until(lambda: worker.stopped, 10, "stopped in a write")
        until(lambda: paired.counter("pullfill_quarantined_blocks"), 10, "in quarantine")
        time.sleep(0.5)
        assert paired.counter("pullfill_quarantined_blocks") > 0, "time is no proof"
        worker.signal(signal.SIGCONT)
        began = time.monotonic()
        until(lambda: not paired.counter("pullfill_quarantined_blocks"), 10, "released")
        assert time.monotonic() - began < patience(2), (
            "1 s is promised; a scrape may take up to another"
        )


@pytest.mark.essential
def test_row_12_duplicate_delivery(paired: Cluster, oracle: Oracle) -> None:
    """No heartbeat, and a prefill longer than `ack_wait`: the queue gives the job to another
    worker. The first one is alive, so the job stays with it; the other one is told so. The first
    one drains meanwhile, since a worker that still pulls may get the redelivery itself."""
    first, second = only_prefill(paired), paired.launch("prefill")
    paired.wait_ready(first, second)
    with checked(paired, oracle) as check:
        for worker in (first, second):  # whoever gets it first is the slow one
            worker.arm("prefill.heartbeat=error;prefill.before_write=hold@1")
        refused = paired.counter("pullfill_claim_total", result="in_progress")
        with check.load(threads=1, lengths=(1500,), seed=8500) as load:
            until(lambda: holders(paired, first, second), 10, "one of them has it")
            (slow,) = holders(paired, first, second)
            (second if slow is first else first).arm("")
            slow.signal(signal.SIGTERM)
            until(
                lambda: paired.counter("pullfill_claim_total", result="in_progress") > refused,
                30,
                "the other one is told",
            )
            slow.arm("")
            until(lambda: load.done, 30, "answered")
            told = check.told(load.done[0][1])
        slow.ends(0, 20)
        assert (told["path"], told["attempts"]) == ("remote", 1)
        assert told["prefill_instance"] == slow.instance_id


def holders(cluster: Cluster, *workers: Worker) -> list[Worker]:
    return [w for w in workers if cluster.load_of(w)["jobs"]]
