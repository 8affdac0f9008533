"""Workers that split the model differently: prefill TP=1 to decode TP=2, the other way round, and
pipeline stages to tensor-parallel ranks.

Real ranks: vLLM's own processes on CPU, each with its part of the KV heads. The answers must be
those of one plain engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from pullfill.transfer.shm.files import PREFIX, shm_dir
from tests.support.cluster import BLOCK, Cluster, Worker, until
from tests.support.load import Load
from tests.support.oracle import Oracle
from tests.support.outages import Asked, undisturbed
from tests.support.prompts import Answer, ask, ask_all, assert_right, random_prompt

pytestmark = pytest.mark.engine

STEPS = 6
TOLERANCE = 1e-4
"""Ranks add up their shares in another order than one engine does."""
LENGTHS = (2, 31, 33, 64, 65, 129, 500, 513, 1100)


def vllm_segments() -> set[Path]:
    return set(Path("/dev/shm").glob("vllm_dist_*"))


@pytest.fixture(scope="module")
def frontend(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    before = vllm_segments()
    with Cluster(tmp_path_factory.mktemp("parallel"), model_path, kv_mib=32) as cluster:
        cluster.start_servers()
        cluster.launch("frontend")
        yield cluster
    for left in vllm_segments() - before:  # vLLM's own, of ranks that were killed
        left.unlink(missing_ok=True)


@dataclass(frozen=True)
class Pair:
    """What serves now."""

    cluster: Cluster
    decode: Worker
    prefill: Worker
    split: list[Worker]
    """Those of two ranks."""


TENSOR = ("--tensor-parallel-size=2",)
# vLLM's later pipeline stages need its warm-up, which it leaves out on a CPU when it runs eagerly
# with a given size of the KV cache. Warming up what is not compiled takes no time.
PIPELINE = ("--pipeline-parallel-size=2", "--no-enforce-eager")
NO_COMPILER = {"TORCHDYNAMO_DISABLE": "1", "VLLM_USE_AOT_COMPILE": "0"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(((), TENSOR), id="prefill1-decode2"),
        pytest.param((TENSOR, ()), id="prefill2-decode1", marks=pytest.mark.long),
        pytest.param((PIPELINE, TENSOR), id="stages2-decode2", marks=pytest.mark.long),
    ],
)
def workers(frontend: Cluster, request: pytest.FixtureRequest) -> Iterator[Pair]:
    for_prefill, for_decode = request.param
    decode = frontend.launch("decode", *for_decode)
    prefill = frontend.launch("prefill", *for_prefill, env=NO_COMPILER)
    try:
        frontend.wait_ready(*frontend.workers)
        split = [w for w, flags in ((decode, for_decode), (prefill, for_prefill)) if flags]
        yield Pair(frontend, decode, prefill, split)
    finally:
        for worker in (decode, prefill):
            worker.kill()
            frontend.workers.remove(worker)


@pytest.fixture
def cluster(workers: Pair) -> Iterator[Cluster]:
    workers.cluster.set_router(policy="always_remote")
    yield workers.cluster
    workers.cluster.assert_clean()


def check(answers: list[Answer], prompts: list[list[int]], oracle: Oracle) -> None:
    assert_right(oracle, prompts, answers, STEPS, TOLERANCE)


def ranks_of(worker: Worker) -> list[int]:
    """Processes of its ranks."""
    found = []
    for one in psutil.Process(worker.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if not any("resource_tracker" in word for word in one.cmdline()):
                found.append(one.pid)
    return found


@pytest.mark.essential
def test_tokens_are_those_of_one_engine(cluster: Cluster, oracle: Oracle) -> None:
    def asked(turn: int) -> Asked:
        prompts = [random_prompt(n, seed=31 + 100 * turn) for n in LENGTHS]
        return prompts, ask_all(cluster, prompts, STEPS, at_once=4)

    prompts, answers = undisturbed(cluster, asked)
    check(answers, prompts, oracle)
    for prompt, answer in zip(prompts, answers, strict=True):
        told = cluster.explain(answer.request_id)
        assert (told["path"], told["fallback"], told["attempts"]) == ("remote", None, 1)
        assert told["kv_bytes"] > 0
        assert told["remote_tokens"] == len(prompt) - 1
    # The prefix is now on both sides; what follows reads it or hits it, and writes the rest.
    cluster.set_router(policy="always_local")
    heads = [random_prompt(n, seed=32) for n in (72, 600)]
    check(ask_all(cluster, heads, STEPS), heads, oracle)
    cluster.set_router(policy="always_remote")
    read = cluster.counter("pullfill_kv_read_bytes_total")
    turns = [head + random_prompt(300, seed=33) for head in heads]
    answers = [ask(cluster, turn, STEPS) for turn in turns]
    check(answers, turns, oracle)
    for head, answer in zip(heads, answers, strict=True):
        told = cluster.explain(answer.request_id)
        assert told["path"] == "remote"
        assert told["prefix_hit_tokens"] == len(head) // BLOCK * BLOCK
    assert cluster.counter("pullfill_kv_read_bytes_total") > read


# Last: it ends the workers.


@pytest.mark.essential
def test_a_dead_rank_ends_its_worker_and_a_dead_worker_its_ranks(
    workers: Pair, oracle: Oracle
) -> None:
    """A rank is killed while requests are under way on its worker. None of them fails."""
    cluster = workers.cluster
    cluster.set_router(policy="always_remote")
    processes = [pid for worker in workers.split for pid in ranks_of(worker)]
    spare = cluster.launch("decode")
    try:
        cluster.wait_ready(spare)
        with Load(cluster, threads=4, lengths=(40, 900, 1400), max_tokens=40, seed=34) as load:
            for worker in workers.split:
                load.more(4)
                worker.arm("engine.step=sleep:0.01")
                until(lambda worker=worker: busy(cluster, worker), 30, "it has work")
                for rank in ranks_of(worker):  # as a drain or Ctrl-C does, which the worker minds
                    os.kill(rank, signal.SIGTERM)
                    os.kill(rank, signal.SIGINT)
                load.more(4)
                assert worker.alive, worker.tail()
                os.kill(ranks_of(worker)[1], signal.SIGKILL)
                assert worker.wait(30) != 0, worker.tail()
                assert not list(shm_dir().glob(f"{PREFIX}{worker.instance_id}-*.kv"))
                load.more(5)
        load.check(oracle)
        workers.decode.kill()
        until(lambda: not any(Path(f"/proc/{p}").exists() for p in processes), 20, "no rank left")
        cluster.assert_clean()
    finally:
        spare.kill()
        cluster.workers.remove(spare)


def busy(cluster: Cluster, worker: Worker) -> bool:
    load = cluster.load_of(worker)
    return bool(load.get("requests" if worker.role == "decode" else "jobs"))
