"""A real cluster: the frontend knows which blocks its decode workers have cached, and their load.

Every message that ends a batch of events says how many blocks the worker holds, and their hashes
xored. A replica that differs leaves the state `warm`. So equal counts and `warm` mean equal sets.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import BLOCK, Cluster, Worker, until
from tests.support.prompts import ask_all, forget_decode_prefixes, random_prompt

pytestmark = pytest.mark.engine

STEPS = 6
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}  # to empty a prefix cache


@pytest.fixture(scope="module")
def cluster(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("prefix"), model_path, kv_mib=8)
    try:
        cluster.start_servers()
        cluster.launch("decode")
        cluster.launch("prefill")
        cluster.launch("frontend", env=DEVELOPMENT)
        cluster.wait_ready(*cluster.workers)
        cluster.set_router(max_local_prefill_length=256, max_queue_wait_s=3600)
        yield cluster
        assert not cluster.log_errors()
    finally:
        cluster.stop()


def row(cluster: Cluster, worker: Worker) -> dict[str, Any]:
    return cluster.rows(worker).get(worker.pid, {})


def agreed(cluster: Cluster, worker: Worker) -> int:
    """Wait until the frontend knows the worker's blocks. Returns their number."""

    def equal() -> bool:
        now = row(cluster, worker)
        known, own = now["routing"]["prefix"], now["load"].get("prefix", {})
        return known["state"] == "warm" and known["blocks"] == own.get("blocks")

    until(equal, 20, "the frontend knows the blocks")
    assert cluster.counter("pullfill_prefix_gaps_total", what="differences") == 0
    return int(row(cluster, worker)["routing"]["prefix"]["blocks"])


def test_blocks_of_local_and_remote_prompts_evicted_and_forgotten(cluster: Cluster) -> None:
    (decode,) = cluster.of("decode")
    checked = "the self-check, whose prompts are cached too"
    until(lambda: row(cluster, decode)["load"].get("self_check") == "passed", 20, checked)
    before = agreed(cluster, decode)
    prompts = [random_prompt(length, seed=31) for length in (100, 600, 250, 700)]
    answers = ask_all(cluster, prompts, STEPS)
    paths = {cluster.explain(answer.request_id)["path"] for answer in answers}
    assert paths == {"local", "remote"}
    # The KV of the last token of an answer is never computed.
    expected = before + sum((len(prompt) + STEPS - 1) // BLOCK for prompt in prompts)
    until(lambda: agreed(cluster, decode) == expected, 10, f"{expected} blocks")

    room = row(cluster, decode)["load"]["kv_blocks"]
    needed = room * BLOCK // 500 + 3
    ask_all(cluster, [random_prompt(500, seed=40 + i) for i in range(needed)], STEPS)
    full = agreed(cluster, decode)
    assert room // 2 < full < needed * (500 // BLOCK)
    assert full <= room

    forget_decode_prefixes(cluster)
    until(lambda: agreed(cluster, decode) == 0, 10, "an empty prefix cache")


@pytest.mark.essential
def test_a_frontend_that_starts_again_is_told_all_blocks(cluster: Cluster) -> None:
    (decode,) = cluster.of("decode")
    expected = agreed(cluster, decode) + 6 * ((300 + STEPS - 1) // BLOCK)
    ask_all(cluster, [random_prompt(300, seed=i) for i in range(6)], STEPS)
    until(lambda: agreed(cluster, decode) == expected, 10, f"{expected} blocks")
    before = expected
    (frontend,) = cluster.of("frontend")
    frontend.stop()
    again = cluster.launch("frontend", env=DEVELOPMENT)
    cluster.wait_ready(again)
    assert agreed(cluster, decode) == before
    assert cluster.counter("pullfill_prefix_index_blocks") == before
    assert cluster.counter("pullfill_prefix_missing_workers") == 0


def test_the_load_is_told_while_requests_run_and_after(cluster: Cluster) -> None:
    (decode,) = cluster.of("decode")
    decode.arm("engine.step=sleep:1")
    prompts = [random_prompt(200, seed=60 + i) for i in range(3)]
    stream = cluster.client().completions.create(
        model="tiny", prompt=prompts, max_tokens=STEPS, stream=True, extra_body={"ignore_eos": True}
    )
    until(lambda: row(cluster, decode)["routing"]["load"]["running"] == 3, 20, "three run")
    load = row(cluster, decode)["routing"]["load"]
    assert load["active_blocks"] >= 3 * (200 // BLOCK)
    decode.arm("")
    for _ in stream:
        pass
    until(lambda: row(cluster, decode)["routing"]["load"]["running"] == 0, 10, "none runs")
    load = row(cluster, decode)["routing"]["load"]
    assert (load["waiting"], load["uncached_tokens_queued"], load["active_blocks"]) == (0, 0, 0)
    assert load["free_blocks"] == row(cluster, decode)["load"]["kv_blocks"]
