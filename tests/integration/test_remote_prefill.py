"""Tokens and log probabilities after a remote prefill equal those of one aggregated engine."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pullfill.transfer.shm.files import PREFIX, shm_dir
from tests.support.checkpoint import TINY, tiny_checkpoint
from tests.support.cluster import BLOCK, Cluster
from tests.support.oracle import Oracle
from tests.support.outages import Asked, undisturbed
from tests.support.prompts import (
    Answer,
    ask,
    ask_all,
    assert_right,
    forget_decode_prefixes,
    random_prompt,
)

pytestmark = pytest.mark.engine

LENGTHS = [
    1, 2, 3, 16, 31, 32, 33, 34, 48, 63, 64, 65, 66, 95, 96, 97, 98, 127, 128, 129, 130, 200, 255,
    256, 257, 258, 400, 511, 512, 513, 514, 700, 1023, 1024, 1025, 1026, 1500, 1999, 2000,
]  # fmt: skip
STEPS = 6
TOLERANCE = 1e-5


def check(answers: list[Answer], prompts: list[list[int]], oracle: Oracle) -> None:
    assert_right(oracle, prompts, answers, STEPS, TOLERANCE)


def paths(cluster: Cluster, answers: list[Answer]) -> list[str]:
    return [cluster.explain(a.request_id)["path"] for a in answers]


@pytest.mark.essential
def test_cold_prompts_of_every_length(cluster: Cluster, oracle: Oracle) -> None:
    prompts: list[list[int]] = []
    answers: list[Answer] = []
    for length in LENGTHS:

        def asked(turn: int, length: int = length) -> Asked:
            prompt = random_prompt(length, seed=1 + 100 * turn)
            return [prompt], [ask(cluster, prompt, STEPS)]

        (prompt,), (answer,) = undisturbed(cluster, asked)
        prompts.append(prompt)
        answers.append(answer)
    check(answers, prompts, oracle)
    # One token is computed where it is sampled; everything longer went away and came back.
    assert paths(cluster, answers) == ["local"] + ["remote"] * (len(LENGTHS) - 1)
    for prompt, answer in zip(prompts, answers, strict=True):
        told = cluster.explain(answer.request_id)
        assert told["prompt_tokens"] == len(prompt)
        assert answer.cached_tokens == 0, "remotely computed tokens are no cache hit"
        if told["path"] == "remote":
            assert told["remote_tokens"] == len(prompt) - 1
            assert told["kv_bytes"] > 0
            assert told["fallback"] is None
            assert told["attempts"] == 1


@pytest.mark.parametrize("left", [1, 2, 3])
@pytest.mark.essential
def test_a_prompt_that_leaves_few_tokens_of_the_context(
    left: int, cluster: Cluster, oracle: Oracle
) -> None:
    """The workers and the oracle have room for 4096 tokens. One token is always asked for."""

    def asked(turn: int) -> Asked:
        prompt = random_prompt(4096 - left, seed=7 + 100 * turn)
        return [prompt], [ask(cluster, prompt, left)]

    (prompt,), (answer,) = undisturbed(cluster, asked)
    assert_right(oracle, [prompt], [answer], left)
    told = cluster.explain(answer.request_id)
    assert (told["path"], told["fallback"], told["remote_tokens"]) == ("remote", None, 4095 - left)


@pytest.mark.essential
def test_every_process_listens_on_loopback_only(cluster: Cluster) -> None:
    """Nobody has given `--host`."""
    for worker in cluster.workers:
        sockets = psutil.Process(worker.pid).net_connections("tcp")
        heard = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
        assert heard == {"127.0.0.1"}, worker.role


@pytest.mark.essential
def test_only_the_user_reads_shared_kv_memory(cluster: Cluster) -> None:
    for worker in cluster.of("decode"):
        files = list(shm_dir().glob(f"{PREFIX}{worker.instance_id}*"))
        assert {file.suffix for file in files} == {".kv", ".fence"}
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


def test_workers_publish_how_their_kv_is_stored(cluster: Cluster) -> None:
    """Looked up in vLLM's own layers: a name that vLLM changes would leave `none` here."""
    for role in ("decode", "prefill"):
        for record in cluster.records(role).values():
            assert record.compat is not None
            assert (record.compat.attention, record.compat.kv_scales) == ("CPU_ATTN", "1")


@pytest.mark.essential
def test_prefix_hit_on_decode_is_read_by_the_prefill_worker(
    cluster: Cluster, oracle: Oracle
) -> None:
    cluster.set_router(policy="always_local")
    heads = [random_prompt(n, seed=2) for n in (32, 72, 256, 600)]
    check(ask_all(cluster, heads, STEPS), heads, oracle)
    cluster.set_router(policy="always_remote")
    read_before = cluster.counter("pullfill_kv_read_bytes_total")
    prompts = [head + random_prompt(n, seed=3) for head in heads for n in (1, 2, 17, 300)]
    answers = [ask(cluster, p, STEPS) for p in prompts]
    check(answers, prompts, oracle)
    for prompt, answer in zip(prompts, answers, strict=True):
        told = cluster.explain(answer.request_id)
        assert told["prefix_hit_tokens"] >= BLOCK
        assert answer.cached_tokens == told["prefix_hit_tokens"]
        if told["path"] == "remote":
            assert told["remote_tokens"] == len(prompt) - 1 - told["prefix_hit_tokens"]
    assert "remote" in paths(cluster, answers)
    assert cluster.counter("pullfill_kv_read_bytes_total") > read_before


def test_prefix_hit_on_prefill_only_is_written_too(cluster: Cluster, oracle: Oracle) -> None:
    def first(turn: int) -> Asked:
        prompts = [random_prompt(n, seed=4 + 100 * turn) for n in (65, 96, 257, 513, 1200)]
        return prompts, ask_all(cluster, prompts, STEPS)

    def second(turn: int) -> Asked:
        forget_decode_prefixes(cluster)
        again = [p + random_prompt(40, seed=5 + 100 * turn) for p in prompts]
        return again, ask_all(cluster, again, STEPS)

    prompts, answers = undisturbed(cluster, first)
    check(answers, prompts, oracle)
    again, answers = undisturbed(cluster, second)
    check(answers, again, oracle)
    for prompt, answer in zip(again, answers, strict=True):
        told = cluster.explain(answer.request_id)
        assert told["path"] == "remote"
        assert told["prefix_hit_tokens"] == 0
        assert told["remote_tokens"] == len(prompt) - 1


@pytest.mark.essential
def test_batched_and_chunked(cluster: Cluster, oracle: Oracle) -> None:
    prompts = [random_prompt(n, seed=7) for n in (5, 90, 600, 1100, 250, 1700, 32, 801)] * 2
    answers = ask_all(cluster, prompts, STEPS, at_once=16)
    check(answers, prompts, oracle)


@pytest.mark.essential
def test_next_turn_is_local_and_cached(cluster: Cluster, oracle: Oracle) -> None:
    cluster.set_router(policy="conditional", max_local_prefill_length=256)

    def asked(turn: int) -> Asked:
        first = random_prompt(900, seed=8 + 100 * turn)
        return [first], [ask(cluster, first, STEPS)]

    (first,), (answer,) = undisturbed(cluster, asked)
    assert cluster.explain(answer.request_id)["path"] == "remote"
    turn = first + answer.tokens + random_prompt(30, seed=9)
    second = ask(cluster, turn, STEPS)
    check([second], [turn], oracle)
    told = cluster.explain(second.request_id)
    assert (told["path"], told["reason"]) == ("local", "prefix_hit")
    assert second.cached_tokens >= 0.95 * len(first)


@pytest.mark.essential
def test_every_decision_has_its_reason(cluster: Cluster) -> None:
    before = cluster.counter("pullfill_decision_total", path="local", reason="policy_always_local")
    cluster.set_router(policy="always_local")
    answer = ask(cluster, random_prompt(700, seed=10))
    assert cluster.explain(answer.request_id)["reason"] == "policy_always_local"
    after = cluster.counter("pullfill_decision_total", path="local", reason="policy_always_local")
    assert after == before + 1
    cluster.set_router(policy="conditional", max_local_prefill_length=512)
    reasons = [
        cluster.explain(ask(cluster, random_prompt(700, seed=seed)).request_id)["reason"]
        for seed in range(11, 16)
    ]
    # A prefill worker that a busy machine stops for a second does not count as pulling.
    assert set(reasons) - {"no_prefill_worker"} == {"long_prompt"}
    short = random_prompt(100, seed=11)
    assert cluster.explain(ask(cluster, short).request_id)["reason"] == "short_prompt"
    (decode,) = cluster.of("decode")
    assert cluster.load_of(decode)["self_check"] == "passed"
    assert not cluster.counter("pullfill_decision_total", reason="self_check"), "not a request"


@pytest.mark.long
def test_a_prompt_of_32k_tokens(tmp_path: Path) -> None:
    long = tiny_checkpoint(recipe=replace(TINY, max_positions=34_000))
    prompt = random_prompt(32_768, seed=8)
    roles = ("decode", "prefill", "frontend")
    with Cluster(tmp_path, long, kv_mib=128) as cluster:  # half may wait for prefill workers
        cluster.start(*((role, "--max-model-len=33000") for role in roles))
        answer = ask(cluster, prompt, STEPS)
        told = cluster.explain(answer.request_id)
        cluster.assert_clean()
    assert (told["path"], told["reason"], told["fallback"]) == ("remote", "long_prompt", None)
    assert told["remote_tokens"] == 32_767
    with Oracle(long, max_model_len=33_000) as oracle:
        assert_right(oracle, [prompt], [answer], STEPS)
