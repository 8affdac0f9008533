"""Workers with real vLLM on GPUs: tokens after a remote prefill equal those of one plain engine,
whatever was cached on either side, and whatever happens to the prefill worker. Over cuda_ipc both
are on one GPU. Over nccl each has its own; on one GPU it needs NCCL 2.30 (docs/operations.md)."""

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
from tests.support.prompts import ask, ask_all, assert_right, random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.slow]

POINTS = {
    "cuda_ipc": ("cuda_ipc.write.batch={}@2", "gpu.queued={}@2"),
    "nccl": ("stream.write.batch={}@1", "nccl.ready={}@1"),
}
"""Of the prefill worker. cuda_ipc, holding the fence: before a batch is queued, and after. nccl:
before a batch is announced, and when the owner's kernel waits for it."""


def placed() -> dict[str, dict[str, str]]:
    """Environment by role for nccl: a GPU each where there are two."""
    if (count := gpu_count()) < 2:
        shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        return {"decode": shared, "prefill": shared}
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return {
        role: {"CUDA_VISIBLE_DEVICES": name}
        for role, name in zip(("decode", "prefill"), names, strict=False)
    }


@pytest.fixture(scope="module", params=sorted(POINTS))
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "nccl":
        kind = make_kind()
        if (reason := kind.why_not()) is not None:
            pytest.skip(reason)
        if gpu_count() < 2 and kind.version() < 23000:
            pytest.skip("one GPU, and this NCCL is older than 2.30: it allows one rank on each")
    return name


@pytest.fixture(scope="module")
def shared(
    transport: str, model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuPair]:
    env = placed() if transport == "nccl" else {}
    directory = tmp_path_factory.mktemp(transport)
    with gpu_pair(directory, model_path, "--transports", transport, env=env) as pair:
        yield pair


@pytest.fixture
def pair(shared: GpuPair) -> GpuPair:
    """One prefill worker, everything prefilled remotely, nothing left of earlier tests."""
    if not shared.of("prefill"):
        shared.add("prefill")
    shared.set_router(policy="always_remote", remote_timeout_s=60)
    shared.assert_clean()
    return shared


@pytest.fixture(scope="module")
def plain(model_path: Path) -> Iterator[Oracle]:
    with plain_engine(model_path) as engine:
        yield engine


def test_equal_tokens(pair: GpuPair, plain: Oracle, transport: str) -> None:
    """One after the other, then many at once: a step has 512 tokens, so a prompt comes in several
    writes, between those of others."""
    prompts = [random_prompt(n, seed=1) for n in (2, 32, 33, 64, 200, 513, 1025, 2000)]
    answers = [ask(pair, prompt, STEPS) for prompt in prompts]
    told = [pair.explain(answer.request_id) for answer in answers]
    assert {(t["path"], t["transport"]) for t in told} == {("remote", transport)}, told
    written = pair.counter("pullfill_kv_write_bytes_total", transport=transport)
    assert written >= sum(t["kv_bytes"] for t in told) > 0
    more = [random_prompt(n, seed=7) for n in (5, 90, 600, 1100, 250, 1700, 32, 801)] * 2
    answers += ask_all(pair, more, STEPS, at_once=16)
    assert_right(plain, prompts + more, answers, STEPS)
    pair.assert_clean()


def test_a_prefix_that_only_the_decode_worker_has_is_read(
    pair: GpuPair, plain: Oracle, transport: str
) -> None:
    pair.set_router(policy="always_local")
    heads = [random_prompt(n, seed=2) for n in (32, 72, 256, 600)]
    assert_right(plain, heads, ask_all(pair, heads, STEPS), STEPS)
    pair.set_router(policy="always_remote")
    before = pair.counter("pullfill_kv_read_bytes_total", transport=transport)
    prompts = [head + random_prompt(n, seed=3) for head in heads for n in (1, 17, 300)]
    answers = [ask(pair, prompt, STEPS) for prompt in prompts]
    assert_right(plain, prompts, answers, STEPS)
    for answer in answers:
        assert pair.explain(answer.request_id)["prefix_hit_tokens"] >= BLOCK
    assert pair.counter("pullfill_kv_read_bytes_total", transport=transport) > before
    pair.assert_clean()


@pytest.mark.parametrize("point", [0, 1])
def test_a_killed_prefill_worker_costs_an_answer_nothing(
    pair: GpuPair, plain: Oracle, transport: str, point: int
) -> None:
    victim = pair.prefill
    with checked(pair, plain, fallbacks={"prefill_lost": 1}) as check:
        victim.arm(POINTS[transport][point].format("kill"))
        told = check.told(check.ask(random_prompt(1500, seed=100 * (point + 1))))
        assert victim.process.wait(20.0) == -signal.SIGKILL
        assert (told["path"], told["fallback"]) == ("local", "prefill_lost")
        pair.add("prefill")


@pytest.mark.parametrize("point", [0, 1])
def test_nobody_waits_for_a_stopped_prefill_worker(
    pair: GpuPair, plain: Oracle, transport: str, point: int
) -> None:
    """Over cuda_ipc it holds its blocks. Over nccl the decode worker ends its own receive, on the
    GPU too, and proves it quiet."""
    zombie, seed = pair.prefill, 300 * (point + 1)
    late = dict.fromkeys(("revoked", "write"), (0, 1))
    with checked(pair, plain, fallbacks={"timeout": 1}, stale=late) as check:
        # So the connection is there, and the pace is a current one. A step in which it was stopped
        # counts as slow. The deadlines of its next jobs may then come later than the decode worker
        # goes on without a silent prefill worker.
        for number in range(8):
            check.ask(random_prompt(2000, seed=seed + 50 + number))
        pair.set_router(remote_timeout_s=1.5)
        zombie.arm(POINTS[transport][point].format("stop"))
        told = check.told(check.ask(random_prompt(1800, seed=seed)))
        assert (told["path"], told["fallback"]) == ("local", "timeout")
        if transport == "cuda_ipc":
            assert pair.counter("pullfill_quarantined_blocks") > 0, "time is no proof"
        else:
            until(lambda: not pair.counter("pullfill_quarantined_blocks"), 20, "proved quiet")
        assert zombie.stopped, "it had no part in the proof"
        pair.set_router(policy="always_local")
        for number in range(4):  # others compute meanwhile, and keep every byte
            check.ask(random_prompt(1500, seed=seed + 10 + number), steps=24)
        zombie.signal(signal.SIGCONT)
        until(lambda: not pair.counter("pullfill_quarantined_blocks"), 10, "proved quiet")
        pair.set_router(policy="always_remote", remote_timeout_s=60)
