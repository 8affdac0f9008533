"""Workers on two GPUs whose KV goes over NCCL: tokens after a remote prefill equal those of one
plain engine, whatever was cached on either side, and whatever happens to the prefill worker. On one
GPU this needs NCCL 2.30 (docs/operations.md)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pullfill.deploy.accelerator import gpu_count
from pullfill.transfer.nccl.nccl_backend import make_kind
from tests.support.checked import checked
from tests.support.cluster import BLOCK, until
from tests.support.gpu_pairs import STEPS, GpuPair, gpu_pair, plain_engine
from tests.support.oracle import Oracle
from tests.support.prompts import ask, ask_all, random_prompt, truth

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]

ASKED, WAITED_FOR = "stream.write.batch", "nccl.ready"
"""Before the batch is announced, and when the owner's kernel waits for it."""
QUIET_S = 20.0


def placed() -> dict[str, dict[str, str]]:
    """Environment by role: a GPU each where there are two."""
    if (count := gpu_count()) < 2:
        shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return {"decode": shared, "prefill": shared}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return {
        role: {"CUDA_VISIBLE_DEVICES": name}
        for role, name in zip(("decode", "prefill"), names, strict=False)
    }


@pytest.fixture(scope="module")
def shared(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuPair]:
    kind = make_kind()
    if (reason := kind.why_not()) is not None:
        pytest.skip(reason)
    if gpu_count() < 2 and kind.version() < 23000:
        pytest.skip("one GPU, and this NCCL is older than 2.30: it allows one rank on each")
    directory = tmp_path_factory.mktemp("nccl")
    with gpu_pair(directory, model_path, "--transports", "nccl", env=placed()) as pair:
        yield pair


@pytest.fixture
def pair(shared: GpuPair) -> GpuPair:
    shared.refresh(remote_timeout_s=60)
    return shared


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Iterator[Oracle]:
    with plain_engine(model_path) as engine:
        yield engine


def test_equal_tokens_over_nccl(pair: GpuPair, plain: Oracle) -> None:
    """One after the other, then many at once in chunks of 512 tokens."""
    prompts = [random_prompt(n, seed=31) for n in (2, 32, 33, 64, 200, 513, 1025, 2000)]
    answers = [ask(pair, prompt, STEPS) for prompt in prompts]
    more = [random_prompt(n, seed=32) for n in (5, 90, 600, 1100, 250, 1700, 32, 801)] * 2
    answers += ask_all(pair, more, STEPS, at_once=16)
    told = [pair.explain(answer.request_id) for answer in answers]
    assert {(t["path"], t["transport"]) for t in told[: len(prompts)]} == {("remote", "nccl")}
    for answer, (tokens, _) in zip(answers, truth(plain, prompts + more, STEPS), strict=True):
        assert answer.tokens == tokens
    assert pair.counter("pullfill_kv_write_bytes_total", transport="nccl") > 0
    pair.assert_clean()


def test_a_prefix_that_only_the_decode_worker_has_is_read(pair: GpuPair, plain: Oracle) -> None:
    pair.set_router(policy="always_local")
    heads = [random_prompt(n, seed=33) for n in (32, 72, 600)]
    ask_all(pair, heads, STEPS)
    pair.set_router(policy="always_remote")
    before = pair.counter("pullfill_kv_read_bytes_total", transport="nccl")
    prompts = [head + random_prompt(n, seed=34) for head in heads for n in (17, 300)]
    answers = [ask(pair, prompt, STEPS) for prompt in prompts]
    for answer, (tokens, _) in zip(answers, truth(plain, prompts, STEPS), strict=True):
        assert answer.tokens == tokens
        assert pair.explain(answer.request_id)["prefix_hit_tokens"] >= BLOCK
    assert pair.counter("pullfill_kv_read_bytes_total", transport="nccl") > before
    pair.assert_clean()


@pytest.mark.parametrize(("point", "seed"), [(ASKED, 400), (WAITED_FOR, 500)])
def test_a_killed_prefill_worker_costs_an_answer_nothing(
    pair: GpuPair, plain: Oracle, point: str, seed: int
) -> None:
    pair.kill_prefill_at(f"{point}=kill@1", plain, seed)


@pytest.mark.parametrize(("point", "seed"), [(ASKED, 600), (WAITED_FOR, 700)])
def test_a_stopped_prefill_worker_holds_no_blocks(
    pair: GpuPair, plain: Oracle, point: str, seed: int
) -> None:
    """The decode worker ends its own receive, on the GPU too, and proves it quiet."""
    zombie = pair.prefill
    late = dict.fromkeys(("revoked", "write"), (0, 1))
    with checked(pair, plain, fallbacks={"timeout": 1}, stale=late) as check:
        pair.measure_pace(check, seed)  # and the communicator is there
        pair.set_router(remote_timeout_s=1.5)
        zombie.arm(f"{point}=stop@1")
        told = check.told(check.ask(random_prompt(1800, seed=seed)))
        assert (told["path"], told["fallback"]) == ("local", "timeout")
        until(lambda: not pair.counter("pullfill_quarantined_blocks"), QUIET_S, "proved quiet")
        assert zombie.stopped, "it had no part in the proof"
        pair.set_router(policy="always_local")
        for number in range(4):  # others compute in those blocks, and keep every byte
            check.ask(random_prompt(1500, seed=seed + 10 + number), steps=24)
        zombie.signal(signal.SIGCONT)
        pair.set_router(policy="always_remote", remote_timeout_s=60)
