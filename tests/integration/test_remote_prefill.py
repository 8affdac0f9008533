"""Tokens and log probabilities after a remote prefill equal those of one aggregated engine, with
seeds and over other transports too."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 1.0, "seed": 7}
LONG = 1600
"""More than three chunks of 512 tokens, and less than the plain engine's step of 2048. Without
`pullfill/engine/cpu_worker.py` the first chunk of a seeded prompt ends an engine on a CPU."""


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
    for worker in [one for one in cluster.workers if one.alive]:
        sockets = psutil.Process(worker.pid).net_connections("tcp")
        heard = {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
        assert heard == {"127.0.0.1"}, worker.role


@pytest.mark.essential
def test_only_the_user_reads_shared_kv_memory(cluster: Cluster) -> None:
    for worker in cluster.of("decode"):
        files = list(shm_dir().glob(f"{PREFIX}{worker.instance_id}*"))
        assert {file.suffix for file in files} == {".kv", ".fence"}
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}


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


# ------------------------------------------------------------------ seeds


@pytest.mark.parametrize("policy", ["always_local", "always_remote"])
@pytest.mark.essential
def test_a_seed_gives_the_tokens_of_a_prompt_in_one_step(
    cluster: Cluster, oracle: Oracle, policy: str
) -> None:
    pids = [w.pid for w in cluster.workers if w.alive]
    prompt = random_prompt(LONG, seed=70)
    cluster.set_router(policy=policy)
    more = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2**40}
    for how in (SAMPLED, SAMPLED | more):
        forget_decode_prefixes(cluster)
        assert_right(oracle, [prompt], [ask(cluster, prompt, 8, **how)], 8, **how)
    assert [w.pid for w in cluster.workers if w.alive] == pids


def test_seeds_side_by_side_do_not_disturb_each_other(cluster: Cluster, oracle: Oracle) -> None:
    """Chunks of one prompt run in the steps in which others decode: only the one whose token is
    dropped is rewound."""
    cluster.set_router(policy="always_local")
    prompts = [random_prompt(n, seed=71) for n in (40, 700, LONG, 1100, 90, 1900)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda p: ask(cluster, p, 40, **SAMPLED), prompts))
    for prompt, answer in zip(prompts, got, strict=True):
        # Of up to 2048 tokens, one prompt at a time runs in one step of the plain engine.
        assert_right(oracle, [prompt], [answer], 40, **SAMPLED)


# ------------------------------------------------------------------ transports


@pytest.mark.parametrize(
    "name",
    [
        "tcp",
        pytest.param(
            "nixl",
            marks=pytest.mark.skipif(
                find_spec("nixl") is None, reason="nixl is not installed (make install-nixl)"
            ),
        ),
    ],
)
@pytest.mark.essential
def test_tokens_over_other_transports_equal_the_oracle(
    cluster: Cluster, oracle: Oracle, name: str
) -> None:
    """The prefill worker of the cluster writes over shm. Another is told to use this one only."""
    head = random_prompt(300, seed=9100)
    ask(cluster, head, STEPS)  # a prefix that the other worker has to read, as it computed none
    other = cluster.add("prefill", "--transports", name)
    over: dict[str, list[dict[str, Any]]] = {"shm": [], name: []}
    try:
        for round_ in range(60):  # on a busy machine one worker may get few of them
            prompts = [random_prompt(n, seed=9200 + round_) for n in (33, 256, 1500)]
            prompts += [head + random_prompt(n, seed=9300 + round_) for n in (5, 700)]
            answers = ask_all(cluster, prompts, STEPS, at_once=4)
            assert_right(oracle, prompts, answers, STEPS)
            for answer in answers:
                told = cluster.explain(answer.request_id)
                over[told["transport"]].append(told)
            read = cluster.counter("pullfill_kv_read_bytes_total", transport=name)
            if round_ and len(over[name]) >= 4 and read:
                break
        assert len(over[name]) >= 4, "both workers get their share"
        assert read > 0, "it gets a prompt with the prefix, too"
        assert {told["prefill_instance"] for told in over[name]} == {other.instance_id}
        assert cluster.counter("pullfill_kv_write_bytes_total", transport=name) > 0
    finally:
        other.stop()
    for told in over[name]:
        better = dict(reason.split(": ", 1) for reason in told["why_not_better"])
        assert "--transports" in better["shm"]
        assert next(iter(better)) == "cuda_ipc"
    for told in over["shm"]:
        assert [reason.split(": ")[0] for reason in told["why_not_better"]] == ["cuda_ipc"]


# ------------------------------------------------------------------ a long prompt


@pytest.mark.long
def test_a_prompt_of_32k_tokens(tmp_path: Path) -> None:
    long = tiny_checkpoint(recipe=replace(TINY, max_positions=34_000))
    prompt = random_prompt(32_768, seed=8)
    roles = ("decode", "prefill", "frontend")
    with Cluster(tmp_path, long, kv_mib=128) as cluster:  # half may wait for prefill workers
        cluster.start(*((role, "--max-model-len=33000") for role in roles))
        patient = cluster.client().with_options(timeout=240.0)  # a minute on two idle cores
        answer = ask(cluster, prompt, STEPS, patient)
        told = cluster.explain(answer.request_id)
        cluster.assert_clean()
    assert (told["path"], told["reason"], told["fallback"]) == ("remote", "cost_probe", None)
    assert told["remote_tokens"] == 32_767
    with Oracle(long, max_model_len=33_000) as oracle:
        assert_right(oracle, [prompt], [answer], STEPS)
