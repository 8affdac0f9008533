"""Workers and frontends die, leave or are replaced while requests run (docs/failure-modes.md)."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from pullfill.runtime.lifecycle import STEP_FAILED
from tests.support import web
from tests.support.answers import ask_for
from tests.support.checked import MANY, STEPS, Checked, checked
from tests.support.cluster import BLOCK, Cluster, Worker, until
from tests.support.etcd import free_ports
from tests.support.oracle import Oracle
from tests.support.prompts import (
    ask,
    assert_right,
    forget_decode_prefixes,
    random_prompt,
    truth,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SLOW = "engine.step=sleep:0.02"
"""4000 tokens take more than a minute, so a request that ends sooner was ended by the test."""


def turn_to(check: Checked, worker: Worker) -> None:
    """Two decode workers take turns: until the next request goes to this one."""

    def other_had_it() -> bool:
        told = check.told(check.ask([20]))
        return bool(told["decode_instance"] != worker.instance_id)

    until(other_had_it, 10, "its turn")


def streams_on(client: openai.OpenAI, count: int, max_tokens: int) -> list[Any]:
    """Open streams, each with its first token out."""
    streams = [
        client.completions.create(
            model="tiny", prompt=f"stream {i}", max_tokens=max_tokens, stream=True,
            extra_body={"ignore_eos": True},
        )
        for i in range(count)
    ]  # fmt: skip
    for stream in streams:
        next(iter(stream))
    return streams


@pytest.mark.essential
def test_row_8_decode_dies_with_jobs_outstanding(paired: Cluster, oracle: Oracle) -> None:
    """Prefill workers drop the jobs of a dead decode worker; the queue empties by itself, and
    its requests, of which no token was out, are served by the other worker."""
    victim = paired.add("decode")
    (slow,) = paired.of("prefill")
    with checked(paired, oracle) as check:
        slow.arm("prefill.before_write=sleep:0.3")
        with check.load(threads=6, lengths=(1500, 1900), seed=12_000) as load:
            until(lambda: paired.load_of(victim)["open_jobs"], 30, "it has work")
            victim.kill()
            load.more(5)


@pytest.mark.long
@pytest.mark.essential
def test_row_10_decode_restarts_under_the_same_address(paired: Cluster, oracle: Oracle) -> None:
    """A writer stopped in the memory of a decode worker that is killed and started again, with the
    same name and address: what it goes on to write and to say reaches nothing of the new one."""
    cluster = paired
    (writer,) = cluster.of("prefill")
    (port,) = free_ports(1)
    flags = ("--instance-id=decode-again", f"--control-port={port}")
    old = cluster.add("decode", *flags)
    with (
        checked(cluster, oracle, fallbacks={"prefill_lost": 1}, stale={"claim": (1, 2)}) as check,
        ThreadPoolExecutor(1) as pool,
    ):
        turn_to(check, old)
        writer.arm("shm.write.batch=stop@2")
        answer = pool.submit(check.ask, random_prompt(1500, seed=12_100))
        until(lambda: writer.stopped, 10, "stopped in a write")
        assert cluster.load_of(old)["open_jobs"] == 1
        old.kill()
        new = cluster.launch("decode", *flags)
        told = check.told(answer.result(60))  # sent again, to the other decode worker
        assert told["decode_instance"] == cluster.of("decode")[0].instance_id
        until(lambda: cluster.seen([new]), 60, "the new one is ready")
        memory = new.kv_digest()
        writer.arm("")
        writer.signal(signal.SIGCONT)
        until(cluster.linked, 20, "connected to the new one")
        cluster.assert_clean()
        assert new.kv_digest() == memory


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.long)])
@pytest.mark.essential
def test_row_11_engine_dies_inside_a_worker(role: str, paired: Cluster, oracle: Oracle) -> None:
    """The process ends without its engine, and others serve. It revokes its lease, which would
    otherwise last for a minute. A decode worker revokes what is being written to it."""
    victim = paired.add(role, "--lease-ttl=60")
    assert victim.instance_id in paired.records(role)
    with checked(paired, oracle, stale={"claim": (0, 3), "write": (0, 3)}) as check:
        with check.load(threads=3, lengths=(600, 900), max_tokens=1, seed=12_500) as load:
            victim.arm("engine.step=error:the engine broke@30")
            victim.ends(STEP_FAILED, 60)
            assert victim.instance_id not in paired.records(role)
            load.more(5)
        assert "the engine broke" in victim.log.read_text()


@pytest.mark.essential
def test_row_16_etcd_down_shorter_than_the_ttl(paired: Cluster, oracle: Oracle) -> None:
    """Nobody registers again: that would be a new incarnation, and never the old one again."""
    before = paired.incarnations()
    assert len(before) == 2
    with checked(paired, oracle) as check:
        with check.load(threads=2, seed=13_000) as load:
            paired.etcd.pause()
            # Longer than a keep-alive's interval, a third of the TTL, and shorter than the TTL.
            paused = time.monotonic()
            until(lambda: time.monotonic() > paused + paired.lease_ttl_s * 0.4, 30, "a pause")
            paired.etcd.resume()
            load.more(7)
        assert paired.incarnations() == before


@pytest.mark.essential
def test_row_19_no_prefill_worker_then_one_again(paired: Cluster, oracle: Oracle) -> None:
    """Local at once and by decision, not by waiting for anything; then remote again.

    A job that was committed within the last 5 ms may not be acked yet: the next prefill worker gets
    it again, and its claim is refused."""
    lost, late = {"prefill_lost": (0, 2)}, {"claim": (0, 2)}
    with checked(paired, oracle, fallbacks=lost, stale=late) as check:
        with check.load(threads=2, seed=13_100) as load:
            load.more(4)
            paired.of("prefill")[0].kill()
            until(lambda: web.ready(paired.frontend_url)["degraded"], 10, "told")
            done = load.more(7)
        assert {check.told(a)["path"] for _, a in load.done[done + 2 :]} == {"local"}
        paired.add("prefill")


@pytest.mark.essential
def test_row_20_lease_revoked_mid_write(paired: Cluster, oracle: Oracle) -> None:
    """A drain: what was granted is finished, the process exits with 0."""
    (worker,) = paired.of("prefill")
    with checked(paired, oracle) as check, ThreadPoolExecutor(1) as pool:
        worker.arm("prefill.before_write=hold@1")
        answer = pool.submit(check.ask, random_prompt(1900, seed=13_200))
        until(lambda: paired.load_of(worker)["jobs"], 10, "it was claimed")
        paired.revoke_lease(worker)
        until(lambda: "lease revoked: draining" in worker.log.read_text(), 10, "it drains")
        worker.arm("")
        worker.ends(0, 30)
        told = check.told(answer.result(30))
        assert (told["path"], told["attempts"]) == ("remote", 1)
        assert told["prefill_instance"] == worker.instance_id


@pytest.mark.essential
def test_row_21_sigterm_finishes_running_streams(paired: Cluster, oracle: Oracle) -> None:
    """The draining worker finishes its answers. None is continued elsewhere."""
    leaving = paired.add("decode")
    prompts = [random_prompt(60, seed=13_300 + i) for i in range(2)]
    continued = "pullfill_frontend_migrated_total"
    with checked(paired, oracle):
        elsewhere = paired.counter(continued)
        leaving.arm("engine.step=sleep:0.1")
        answers = [ask_for(paired, prompt, 50) for prompt in prompts]
        until(lambda: all(a.tokens for a in answers), 20, "they are under way")
        assert paired.load_of(leaving)["requests"] == 1
        leaving.signal(signal.SIGTERM)
        until(lambda: "draining" in leaving.log.read_text(), 10, "it drains")
        assert not all(a.done.is_set() for a in answers)
        assert all(a.done.wait(60) for a in answers)
        assert [a.error for a in answers] == ["", ""]
        assert [a.tokens for a in answers] == [t for t, _ in truth(oracle, prompts, 50)]
        leaving.ends(0, 20)
        assert paired.counter(continued) == elsewhere


@pytest.mark.long
@pytest.mark.essential
def test_row_21_second_sigterm_forces(paired: Cluster, oracle: Oracle) -> None:
    if "decode" in paired.stock:
        pytest.skip("vLLM hears the first SIGTERM only, and ends within --shutdown-timeout")
    victim = paired.add("decode")
    with checked(paired, oracle):
        victim.arm(SLOW)
        streams = streams_on(paired.client(), 2, 4000)
        victim.signal(signal.SIGTERM)
        until(lambda: "SIGTERM: draining" in victim.log.read_text(), 10, "it drains")
        time.sleep(0.5)
        assert victim.alive, "the first one lets its streams finish"
        assert "migrating" not in victim.log.read_text()
        victim.signal(signal.SIGTERM)
        victim.ends(0, 10)
        assert "migrating 1 unfinished requests" in victim.log.read_text()
        for stream in streams:
            stream.close()


@pytest.mark.long
@pytest.mark.essential
def test_row_22_rolling_restart_under_load(paired: Cluster, oracle: Oracle) -> None:
    """Every worker is replaced, one after another; no request fails."""
    with checked(paired, oracle) as check, check.load(threads=3, seed=14_000) as load:
        for old in [*paired.of("prefill"), *paired.of("decode")]:
            paired.add(old.role)
            assert old.stop() == 0
            load.more(4)
    assert len(load.seen("decode_instance")) == 2


@pytest.mark.essential
def test_row_23_different_hits_on_both_sides(paired: Cluster, oracle: Oracle) -> None:
    prompt = random_prompt(1000, seed=2300)
    with checked(paired, oracle) as check:
        check.ask(prompt[:700])  # both sides know 700 tokens
        forget_decode_prefixes(paired)
        paired.set_router(policy="always_local")
        answer = ask(paired, prompt[:300], STEPS)  # the decode worker knows 300
        assert_right(oracle, [prompt[:300]], [answer], STEPS)
        paired.set_router(policy="always_remote")
        told = check.told(check.ask(prompt))
        assert (told["path"], told["prefix_hit_tokens"]) == ("remote", 300 // BLOCK * BLOCK)


@pytest.mark.long
@pytest.mark.essential
def test_row_26_frontend_dies_with_streams_open(paired: Cluster, oracle: Oracle) -> None:
    """The decode worker aborts the requests of a frontend that is gone; blocks come back."""
    survivor = paired.frontend_url
    second = paired.launch("frontend")
    doomed, paired.frontend_url = paired.frontend_url, survivor
    until(lambda: web.ready(doomed), 60, "the second frontend is ready")
    (decode,) = paired.of("decode")
    with checked(paired, oracle) as check, check.load(threads=1, seed=14_500):
        decode.arm(SLOW)
        client = openai.OpenAI(base_url=f"{doomed}/v1", api_key="none", max_retries=0)
        streams = streams_on(client, 3, 4000)
        second.kill()
        for stream in streams:
            with pytest.raises(openai.APIConnectionError):
                list(stream)
            stream.close()
        client.close()
        until(lambda: "aborting 3 requests" in decode.log.read_text(), 20, "they are aborted")
    decode.arm("")


@pytest.fixture(scope="module")
def small(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Barely more KV memory than one longest prompt: requests are preempted all the time."""
    with Cluster(tmp_path_factory.mktemp("small"), model_path, kv_mib=7) as cluster:
        yield cluster.start(policy="always_remote")


@pytest.mark.essential
def test_row_27_preemption_while_remote_prefills_are_outstanding(
    small: Cluster, oracle: Oracle
) -> None:
    with checked(small, oracle, fallbacks={"prefill_failed": (0, MANY)}) as check:
        options = {"threads": 8, "lengths": (500, 900, 1300), "max_tokens": 150, "seed": 15_000}
        with check.load(**options) as load:
            load.more(3, 120)
            # Not before prompts meet at the worker, which on a busy machine come one by one.
            until(lambda: small.counter("vllm:num_preemptions_total"), 60, "one is preempted")
