"""Both workers on one GPU, over cuda_ipc: tokens after a remote prefill equal those of one plain
engine, whatever was cached on either side, and whatever happens to the prefill worker."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.checked import checked
from tests.support.cluster import BLOCK, MODEL, Cluster, until
from tests.support.gpu_pairs import STEPS, GpuPair, gpu_pair, plain_engine
from tests.support.oracle import Oracle
from tests.support.prompts import (
    Answer,
    ask,
    ask_all,
    forget_decode_prefixes,
    going_away,
    random_prompt,
    truth,
)

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]

TRANSPORT = "cuda_ipc"
IN_WRITE, IN_FLIGHT = "cuda_ipc.write.batch", "cuda_ipc.queued"
"""Holding the fence: before a batch is queued, and after."""


def test_a_pair_without_a_model_writes_over_cuda_ipc(tmp_path: Path, model_path: Path) -> None:
    """Everything but the model: a failure here is none of vLLM's kernels."""
    mock = ("--distributed-executor-backend", "pullfill.testing.mock_executor.MockExecutor")
    cluster = Cluster(tmp_path / "mock", model_path, forked=False)
    try:
        cluster.start_servers()
        cluster.launch("decode", *mock)
        cluster.launch("prefill", *mock)
        cluster.launch("frontend")
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_remote")
        # Without log probabilities: nobody computes them.
        prompt = random_prompt(700, seed=1)
        answer = cluster.client().completions.create(model=MODEL, prompt=prompt, max_tokens=STEPS)
        told = cluster.explain(answer.id)
        assert (told["path"], told["remote_tokens"]) == ("remote", 699), told
        written = cluster.counter("pullfill_kv_write_bytes_total", transport=TRANSPORT)
        assert written >= told["kv_bytes"] > 0
        cluster.assert_clean()
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def shared(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuPair]:
    # Development routes: a test empties the decode worker's prefix cache through them.
    env = {"frontend": {"VLLM_SERVER_DEV_MODE": "1"}}
    with gpu_pair(tmp_path_factory.mktemp("gpu"), model_path, env=env) as pair:
        yield pair


@pytest.fixture
def gpu_cluster(shared: GpuPair) -> GpuPair:
    shared.refresh(remote_timeout_s=30)
    return shared


@pytest.fixture(scope="module")
def gpu_oracle(model_path: Path) -> Iterator[Oracle]:
    with plain_engine(model_path) as engine:
        yield engine


def check(answers: list[Answer], prompts: list[list[int]], oracle: Oracle) -> None:
    expected = truth(oracle, prompts, STEPS)
    for prompt, answer, (tokens, _) in zip(prompts, answers, expected, strict=True):
        assert answer.tokens == tokens, f"prompt of {len(prompt)} tokens"


def test_equal_tokens_over_cuda_ipc(gpu_cluster: GpuPair, gpu_oracle: Oracle) -> None:
    prompts = [random_prompt(n, seed=1) for n in (2, 32, 33, 64, 200, 513, 1025, 2000)]
    answers = [ask(gpu_cluster, prompt, STEPS) for prompt in prompts]
    told = [gpu_cluster.explain(answer.request_id) for answer in answers]
    assert [t["path"] for t in told] == ["remote"] * len(prompts), told
    check(answers, prompts, gpu_oracle)
    written = gpu_cluster.counter("pullfill_kv_write_bytes_total", transport=TRANSPORT)
    assert written >= sum(t["kv_bytes"] for t in told) > 0
    gpu_cluster.assert_clean()


def test_a_prefix_that_only_the_decode_worker_has_is_read(
    gpu_cluster: GpuPair, gpu_oracle: Oracle
) -> None:
    gpu_cluster.set_router(policy="always_local")
    heads = [random_prompt(n, seed=2) for n in (32, 72, 256, 600)]
    check(ask_all(gpu_cluster, heads, STEPS), heads, gpu_oracle)
    gpu_cluster.set_router(policy="always_remote")
    before = gpu_cluster.counter("pullfill_kv_read_bytes_total", transport=TRANSPORT)
    prompts = [head + random_prompt(n, seed=3) for head in heads for n in (1, 17, 300)]
    answers = [ask(gpu_cluster, prompt, STEPS) for prompt in prompts]
    check(answers, prompts, gpu_oracle)
    for answer in answers:
        assert gpu_cluster.explain(answer.request_id)["prefix_hit_tokens"] >= BLOCK
    after = gpu_cluster.counter("pullfill_kv_read_bytes_total", transport=TRANSPORT)
    assert after > before
    gpu_cluster.assert_clean()


def test_a_prefix_that_only_the_prefill_worker_has_is_written(
    gpu_cluster: GpuPair, gpu_oracle: Oracle
) -> None:
    prompts = [random_prompt(n, seed=4) for n in (65, 257, 1200)]
    check(ask_all(gpu_cluster, prompts, STEPS), prompts, gpu_oracle)
    forget_decode_prefixes(gpu_cluster)
    again = [prompt + random_prompt(40, seed=5) for prompt in prompts]
    answers = ask_all(gpu_cluster, again, STEPS)
    check(answers, again, gpu_oracle)
    for prompt, answer in zip(again, answers, strict=True):
        told = gpu_cluster.explain(answer.request_id)
        assert (told["path"], told["remote_tokens"]) == ("remote", len(prompt) - 1)
    gpu_cluster.assert_clean()


def test_chunks_of_many_prompts_at_once(gpu_cluster: GpuPair, gpu_oracle: Oracle) -> None:
    """A step has 512 tokens, so a prompt comes in several writes, between those of others."""
    prompts = [random_prompt(n, seed=7) for n in (5, 90, 600, 1100, 250, 1700, 32, 801)] * 2
    check(ask_all(gpu_cluster, prompts, STEPS, at_once=16), prompts, gpu_oracle)
    gpu_cluster.assert_clean()


@pytest.mark.parametrize(("point", "seed"), [(IN_WRITE, 100), (IN_FLIGHT, 200)])
def test_a_killed_prefill_worker_costs_an_answer_nothing(
    point: str, seed: int, gpu_cluster: GpuPair, gpu_oracle: Oracle
) -> None:
    """Killed holding its fence, with copies about to be queued or in flight."""
    gpu_cluster.kill_prefill_at(f"{point}=kill@2", gpu_oracle, seed)


@pytest.mark.parametrize(("point", "seed"), [(IN_WRITE, 100), (IN_FLIGHT, 200)])
def test_a_stopped_prefill_worker_holds_its_blocks_and_nobody_waits(
    point: str, seed: int, gpu_cluster: GpuPair, gpu_oracle: Oracle
) -> None:
    zombie = gpu_cluster.prefill
    late = dict.fromkeys(("revoked", "write"), (0, 1))
    with checked(gpu_cluster, gpu_oracle, fallbacks={"timeout": 1}, stale=late) as check:
        gpu_cluster.measure_pace(check, seed)
        gpu_cluster.set_router(remote_timeout_s=1.5)
        zombie.arm(f"{point}=stop@2")
        told = check.told(check.ask(random_prompt(1800, seed=seed + 1)))
        assert (told["path"], told["fallback"]) == ("local", "timeout")
        assert gpu_cluster.counter("pullfill_quarantined_blocks") > 0, "time is no proof"
        # Others compute in the meantime, and keep every byte of theirs.
        gpu_cluster.set_router(policy="always_local")
        for number in range(4):
            check.ask(random_prompt(1500, seed=seed + 10 + number), steps=24)
        zombie.signal(signal.SIGCONT)
        until(lambda: not gpu_cluster.counter("pullfill_quarantined_blocks"), 10, "proved quiet")


def test_a_client_that_leaves_revokes_a_write_under_way(
    gpu_cluster: GpuPair, gpu_oracle: Oracle
) -> None:
    worker = gpu_cluster.prefill
    late = dict.fromkeys(("revoked", "write"), (0, 1))
    with checked(gpu_cluster, gpu_oracle, cancelled=1, stale=late):
        worker.arm(f"{IN_FLIGHT}=stop@2")
        with going_away(gpu_cluster, random_prompt(1500, seed=300)):
            until(lambda: worker.stopped, 20, "stopped with copies in flight")
        until(lambda: gpu_cluster.counter("pullfill_quarantined_blocks"), 10, "in quarantine")
        worker.signal(signal.SIGCONT)
        until(lambda: not gpu_cluster.counter("pullfill_quarantined_blocks"), 10, "proved quiet")
