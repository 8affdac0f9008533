"""Rows about how much of the KV writing a real prefill hides behind its computing.

A cluster of its own, as `pullfill up` starts it, with a model that is nearly all KV cache: 16
layers of 32 KV heads, 512 KiB per token, so that writing a chunk takes long against waking a
thread. Prompts of several chunks and of one are prefilled remotely, in turn, one at a time. From
`pullfill explain`: the tail of the long ones (last chunk computed to commit) against the KV write
of the short ones, which is one chunk's, with nothing computing beside it.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live import BenchError, Live, running, wait_for
from benchmarks.machine import OtherLoad
from benchmarks.report import Row, median, row, versus
from pullfill.demo.recipe import Recipe
from tests.support.checkpoint import tiny_checkpoint

RECIPE = Recipe(
    hidden=64, layers=16, heads=32, kv_heads=32, head_dim=128, intermediate=64, vocab=384,
    init_range=0.2, seed=7,
)  # fmt: skip
CHUNK, CHUNKS = 128, 5
"""Tokens computed in one step, and steps per prompt."""
FLAGS = (
    "--served-model-name=overlap",
    "--dtype=float32",
    "--max-model-len=1024",
    f"--max-num-batched-tokens={CHUNK}",
    "--max-num-seqs=4",
    "--enforce-eager",
    f"--kv-cache-memory-bytes={1 << 30}",
)


def rows(prompts: int, quiet: OtherLoad) -> list[Row]:
    """Start the cluster, prefill `prompts` prompts remotely, compare."""
    model = tiny_checkpoint(recipe=RECIPE)
    with tempfile.TemporaryDirectory(prefix="pullfill-bench-") as directory:
        with running(Path(directory) / "state", "--model", str(model), *FLAGS) as live:
            live.configure(policy="always_remote")
            wait_for(live.linked, 60.0, "a prefill worker pulls")
            with quiet.window(live.pids()):
                long, short = _ask(live, prompts)
    return overlap_rows(long, short)


def overlap_rows(long: list[dict[str, Any]], short: list[dict[str, Any]]) -> list[Row]:
    """From explain records. Raises BenchError when a prompt was not prefilled remotely."""
    for record in (*long, *short):
        if record["path"] != "remote":
            raise BenchError(f"a prompt was not prefilled remotely: {record}")

    def middle(records: list[dict[str, Any]], stage: str) -> float:
        return median([float(record["timings_ms"][stage]) for record in records])

    nbytes, where = median([record["kv_bytes"] for record in short]), f"prompt of {CHUNKS} chunks"
    one = middle(short, "kv_write")
    return [
        row("one chunk's KV", nbytes / (1 << 20), "MiB"),
        row("write of one chunk", nbytes / one / 1e6, "GB/s"),
        row(f"{where}: computing", middle(long, "prefill"), "ms"),
        row(f"{where}: writing, overlapped", middle(long, "kv_write"), "ms"),
        versus(f"{where}: last computed to commit", middle(long, "tail"), "ms",
               "write of one chunk", one, at_most=1.3),
    ]  # fmt: skip


def _ask(live: Live, prompts: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Records of the long prompts and of the short ones."""
    rng = random.Random(5)
    records: dict[int, list[dict[str, Any]]] = {CHUNKS: [], 1: []}
    with httpx.Client(base_url=live.url, timeout=120.0) as http:
        for number in range(-1, prompts):  # the first ones warm up
            for chunks, kept in records.items():
                prompt = [rng.randrange(32, RECIPE.vocab) for _ in range(CHUNK * chunks)]
                record = _explained(http, prompt)
                if number >= 0:
                    kept.append(record)
                time.sleep(0.05)
    return records[CHUNKS], records[1]


def _explained(http: httpx.Client, prompt: list[int]) -> dict[str, Any]:
    body = {"model": "overlap", "prompt": prompt, "max_tokens": 1}
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    found: dict[str, Any] = wait_for(
        lambda: http.get(f"/pullfill/requests/{answer['id']}").raise_for_status().json(),
        5.0,
        "a record of the request",
        0.02,
    )
    return found
