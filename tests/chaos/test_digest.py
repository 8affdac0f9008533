"""Digests of written KV with real engines: equal when nothing happened, and seen when it did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checked import STEPS, checked
from tests.support.cluster import BLOCK, Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import ask, forget_decode_prefixes, random_prompt, truth

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def digested(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A decode worker that checks every block, and a prefill worker."""
    cluster = Cluster(tmp_path_factory.mktemp("digest"), model_path)
    try:
        cluster.start_servers()
        cluster.launch("decode", "--kv-digest", "full")
        cluster.launch("prefill")
        cluster.launch("frontend", env={"VLLM_SERVER_DEV_MODE": "1"})  # /reset_prefix_cache
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_remote", remote_timeout_s=30)
        yield cluster
    finally:
        cluster.stop()


def compared(cluster: Cluster, result: str) -> float:
    return cluster.counter("pullfill_kv_digest_total", result=result)


def test_row_24_a_corrupted_byte_is_noticed_and_recomputed(
    digested: Cluster, oracle: Oracle
) -> None:
    """One byte of the second write; nothing else runs, so the engine sleeps until the verdict."""
    (decode,), (prefill,) = digested.of("decode"), digested.of("prefill")
    matched = compared(digested, "match")  # the self-check of the two workers
    with checked(digested, oracle, fallbacks={"digest_mismatch": 1}) as check:
        prefill.arm("shm.write.corrupt=corrupt@2")
        told = check.told(check.ask(random_prompt(1500, seed=2400)))
        assert (told["path"], told["fallback"]) == ("local", "digest_mismatch")
        assert (told["attempts"], told["prefill_instance"]) == (1, prefill.instance_id)
        assert (compared(digested, "match"), compared(digested, "mismatch")) == (matched, 1)
    assert compared(digested, "match") > matched, "the next one is remote, checked and well"
    (line,) = [x for x in decode.log.read_text().splitlines() if "1 of 47 checked blocks" in x]
    assert "digest_mismatch" in line
    assert prefill.instance_id in line


@pytest.mark.essential
def test_row_23_equal_digests_with_different_hits_on_both_sides(
    digested: Cluster, oracle: Oracle
) -> None:
    prompt = random_prompt(1000, seed=2300)
    before = {result: compared(digested, result) for result in ("match", "mismatch")}
    with checked(digested, oracle) as check:
        check.ask(prompt[:700])  # both sides know 700 tokens
        forget_decode_prefixes(digested)
        digested.set_router(policy="always_local")
        answer = ask(digested, prompt[:300], STEPS)  # the decode worker knows 300
        assert answer.tokens == truth(oracle, [prompt[:300]], STEPS)[0][0]
        digested.set_router(policy="always_remote")
        told = check.told(check.ask(prompt))
        assert (told["path"], told["prefix_hit_tokens"]) == ("remote", 300 // BLOCK * BLOCK)
        assert compared(digested, "match") == before["match"] + 2, "both handoffs are checked"
    assert compared(digested, "mismatch") == before["mismatch"]
