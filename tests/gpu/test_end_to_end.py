"""Both workers on one GPU: tokens after a remote prefill equal those of one plain engine.

Workers are started, not forked: CUDA does not survive a fork."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.oracle import Oracle
from tests.support.prompts import ask, random_prompt, truth

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]

BACKEND = "TRITON_ATTN"
"""It computes in float32, as tokens are compared."""
FLAGS = (f"--attention-backend={BACKEND}", "--gpu-memory-utilization=0.2")
STEPS = 6


def test_a_pair_without_a_model_writes_over_cuda_ipc(tmp_path: Path, model_path: Path) -> None:
    """Everything but the model: a failure here is none of vLLM's kernels."""
    mock = ("--distributed-executor-backend", "pullfill.engine.mock.executor.MockExecutor")
    cluster = Cluster(tmp_path / "mock", model_path, forked=False)
    try:
        cluster.start_servers()
        cluster.launch("decode", *mock)
        cluster.launch("prefill", *mock)
        cluster.launch("frontend")
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(policy="always_remote")
        answer = ask(cluster, random_prompt(700, seed=1), STEPS)
        told = cluster.explain(answer.request_id)
        assert (told["path"], told["remote_tokens"]) == ("remote", 699), told
        written = cluster.counter("pullfill_kv_write_bytes_total", transport="cuda_ipc")
        assert written >= told["kv_bytes"] > 0
        cluster.assert_clean()
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def gpu_cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("gpu")
    cluster = Cluster(directory, model_path, kv_mib=256, forked=False)
    try:
        cluster.start_servers()
        cluster.launch("decode", *FLAGS)
        cluster.launch("prefill", *FLAGS)
        cluster.launch("frontend")
        cluster.wait_ready(*cluster.workers, within_s=300.0)
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def gpu_oracle(model_path: Path) -> Iterator[Oracle]:
    with Oracle(model_path, gpu_memory_utilization=0.2, attention_backend=BACKEND) as engine:
        yield engine


def test_equal_tokens_over_cuda_ipc(gpu_cluster: Cluster, gpu_oracle: Oracle) -> None:
    gpu_cluster.set_router(policy="always_remote")
    prompts = [random_prompt(n, seed=1) for n in (2, 32, 33, 64, 200, 513, 1025, 2000)]
    answers = [ask(gpu_cluster, prompt, STEPS) for prompt in prompts]
    told = [gpu_cluster.explain(answer.request_id) for answer in answers]
    assert [t["path"] for t in told] == ["remote"] * len(prompts), told
    expected = truth(gpu_oracle, prompts, STEPS)
    for prompt, answer, (tokens, _) in zip(prompts, answers, expected, strict=True):
        assert answer.tokens == tokens, f"prompt of {len(prompt)} tokens"
    written = gpu_cluster.counter("pullfill_kv_write_bytes_total", transport="cuda_ipc")
    assert written >= sum(t["kv_bytes"] for t in told) > 0
    gpu_cluster.assert_clean()


def test_a_killed_prefill_worker_costs_an_answer_nothing(
    gpu_cluster: Cluster, gpu_oracle: Oracle
) -> None:
    """Killed holding its fence, with copies just queued or about to be."""
    gpu_cluster.set_router(policy="always_remote")
    (victim,) = gpu_cluster.of("prefill")
    victim.arm("cuda_ipc.write.batch=kill@2")
    prompt = random_prompt(1500, seed=2)
    answer = ask(gpu_cluster, prompt, STEPS)
    assert answer.tokens == truth(gpu_oracle, [prompt], STEPS)[0][0]
    assert victim.process.wait(20) != 0
    again = gpu_cluster.launch("prefill", *FLAGS)
    gpu_cluster.wait_ready(again, within_s=300.0)
    assert ask(gpu_cluster, prompt, STEPS).tokens == answer.tokens
    gpu_cluster.assert_clean()
