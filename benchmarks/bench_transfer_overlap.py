"""Rows about how much of the KV writing a real prefill hides behind its computing.

A cluster of its own, as `pullfill up` starts it, with a model that is nearly all KV cache: 16
layers of 32 KV heads, 512 KiB per token, so that writing a chunk takes long against waking a
thread. Prompts of several chunks are prefilled remotely one at a time; what `pullfill explain`
tells about each is compared: the tail (last chunk computed to commit) and the mean time to write
one chunk.
"""

from __future__ import annotations

import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.live import CLI, BenchError, Live, running, wait_for
from benchmarks.machine import Quiet
from benchmarks.report import Row, median, row, versus
from pullfill.engine.demo_recipe import Recipe
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


def rows(prompts: int, quiet: Quiet) -> list[Row]:
    """Start the cluster, prefill `prompts` prompts remotely, compare."""
    model = tiny_checkpoint(recipe=RECIPE)
    with tempfile.TemporaryDirectory(prefix="pullfill-bench-") as directory:
        with running(Path(directory) / "state", "--model", str(model), *FLAGS) as live:
            config = ["config", "set", "router.policy", "always_remote"]
            subprocess.run(
                [*CLI, *config, "--state-dir", str(live.state_dir)], check=True, capture_output=True
            )
            wait_for(live.linked, 60.0, "a prefill worker pulls")
            with quiet.window(live.pids()):
                records = _ask(live, prompts)
    return overlap_rows(records)


def overlap_rows(records: list[dict[str, Any]]) -> list[Row]:
    """Raises BenchError when no prompt was prefilled remotely."""
    remote = [r["timings_ms"] for r in records if r["path"] == "remote"]
    if not remote:
        raise BenchError(f"no prompt was prefilled remotely: {records[-1:]}")
    tail = median([t["tail"] for t in remote])
    one = median([t["kv_write"] / CHUNKS for t in remote])
    nbytes = median([r["kv_bytes"] for r in records if r["path"] == "remote"]) / CHUNKS
    where = f"prompt of {CHUNKS} chunks"
    return [
        row(f"{where}: prefilled remotely", len(remote), f"of {len(records)}"),
        row(f"{where}: computing", median([t["prefill"] for t in remote]), "ms"),
        row(f"{where}: one chunk's KV", nbytes / (1 << 20), "MiB"),
        versus(f"{where}: last computed to commit", tail, "ms", "write of one chunk", one,
               at_most=1.3),
    ]  # fmt: skip


def _ask(live: Live, prompts: int) -> list[dict[str, Any]]:
    rng, records = random.Random(5), []
    with httpx.Client(base_url=live.url, timeout=120.0) as http:
        for number in range(-2, prompts):  # the first two warm up
            prompt = [rng.randrange(32, RECIPE.vocab) for _ in range(CHUNK * CHUNKS)]
            body = {"model": "overlap", "prompt": prompt, "max_tokens": 1}
            answer = http.post("/v1/completions", json=body).raise_for_status().json()
            record = wait_for(
                lambda answer=answer: (
                    http.get(f"/pullfill/requests/{answer['id']}").raise_for_status().json()
                ),
                5.0,
                "a record of the request",
                0.02,
            )
            if number >= 0:
                records.append(record)
            time.sleep(0.05)
    return records
