"""How much 8,000-token prompts slow 16 running streams down when both workers share one GPU.

These are the parts `serving` and `slices` of `make bench-gpu`.

The model has the shape of Llama 8B and random weights. Windows of load, one after the other:

  alone    the streams only
  copies   the streams, and another process that copies 1 GiB five times a second
  local    the streams, and a long prompt every two seconds, prefilled by the decode worker
  remote   the same, prefilled by the prefill worker and written over cuda_ipc

Processes that share a GPU without MPS take turns on it: while one runs, the kernels of the other
wait. `slices` measures how long: it times a small kernel in this process while another process
keeps the GPU busy. So a remote prefill also delays the streams here, because they wait for their
turn. A local prefill delays them because their decode steps also compute a part of the prompt.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.live import BenchError, running, wait_for
from benchmarks.report import Row, median, percentile, row, versus
from benchmarks.serving import model, stats
from benchmarks.serving.contract import Kind, Running
from benchmarks.serving.systems_pullfill import set_policy
from benchmarks.serving.window import Window, explain, measure
from benchmarks.serving.workloads import Longs, Prompts, interference

STREAMS, LONG = 16, Longs(8000, 2.0)
COPY_SHARE, ITL_BESIDE_COPIES = 0.02, 1.1
"""Targets. The KV copy of a remote prompt may take at most this share of its prefill time, and the
ITL p99 of `copies` may be at most this many times that of `alone`."""
GIB = 4, 4096, 1, 64 << 10
"""Layers, blocks, heads and page bytes of the KV memory that `copies` copies: 1 GiB."""
WINDOWS = {
    "alone": ("always_local", None),
    "copies": ("always_local", None),
    "local": ("always_local", LONG),
    "remote": ("always_remote", LONG),
}
LONGS = "local", "remote"
"""Windows with long prompts."""
FLAGS = (
    f"--served-model-name={model.NAME}",
    "--load-format=dummy",
    "--dtype=bfloat16",
    "--max-model-len=16384",
    "--max-num-seqs=32",
    "--max-num-batched-tokens=8192",
    "--gpu-memory-utilization=0.4",
    f"--kv-cache-memory-bytes={8 << 30}",
    # Graphs for decode steps and no torch.compile: full speed after a start of seconds.
    "--compilation-config="
    '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8,16,24,32]}',
)
_STALL = 10.0
"""A kernel counts as stalled if it takes more than this many times its median time alone. It has
then waited for its process's turn on the GPU."""


def shape_of_8b(base: Path) -> Path:
    """Make a checkpoint without weights, for `--load-format=dummy`. Returns its directory.

    Its vocabulary is the small one of the serving benchmark's model."""
    recipe = replace(
        model.RECIPE, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
        intermediate=14336, max_positions=32768,
    )  # fmt: skip
    made = base / "shape-of-8b"
    shutil.copytree(
        model.model_directory(), made, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    (made / "config.json").write_text(json.dumps(recipe.hf_config()))
    return made


def serving_rows(base: Path, seconds: float) -> Iterator[Row]:
    """Run all windows and yield their rows. Raises BenchError as `rows_of` does.

    seconds: length of each window."""
    told = ["--model", str(shape_of_8b(base)), *FLAGS]
    with running(base / "cluster", *told) as live:
        wait_for(live.linked, 60.0, "the prefill worker is connected to the decode worker")
        system = Running("gpu", live.url, model.NAME, live.pids(), 0.0)
        windows = {}
        for repeat in range(2):  # the first turn warms up
            for label, (policy, longs) in WINDOWS.items():
                set_policy(live, policy)
                length = seconds if repeat else min(seconds, 8.0)
                prompts = Prompts(model.plain_tokens(), label, repeat)
                with copies(base) if label == "copies" and repeat else ExitStack():
                    load = interference(prompts, length, longs, STREAMS)
                    windows[label] = measure(system, "gpu", label, repeat, load)
                explain(windows[label], live.url)
    yield from rows_of(windows)


def rows_of(windows: dict[str, Window]) -> Iterator[Row]:
    """Yield the rows of the measured windows.

    Raises BenchError if an answer failed, or if a long prompt was not prefilled where its window
    says."""
    itl = {label: [1e3 * gap for gap in window.gaps()] for label, window in windows.items()}
    alone = percentile(itl["alone"], 0.99)
    yield row(f"ITL p50 of {STREAMS} streams alone", percentile(itl["alone"], 0.5), "ms")
    for label, window in windows.items():
        if failed := stats.failed(window.answers):
            raise BenchError(f"{label}: {len(failed)} answers failed: {failed[0].error}")
        if label != "alone":
            limit = ITL_BESIDE_COPIES if label == "copies" else None
            name = f"ITL p99 of {STREAMS} streams, {label}"
            p99 = percentile(itl[label], 0.99)
            yield versus(name, p99, "ms", "alone", alone, at_most=limit)
    late = {label: median(stats.ttfts(windows[label].answers, Kind.LONG)) for label in LONGS}
    name = f"TTFT of {LONG.tokens} tokens, remote"
    yield versus(name, 1e3 * late["remote"], "ms", "local", 1e3 * late["local"])
    stages = [stages_of(windows[label], label) for label in LONGS][-1]
    written, computed = (sum(s[name] for s in stages) for name in ("kv_write", "prefill"))
    yield row("KV copy of a remote prompt", written / len(stages), "ms")
    share = written / computed
    yield row("KV copy as a share of the prefill", share, "of 1", at_most=COPY_SHARE)


def stages_of(window: Window, path: str) -> list[dict[str, float]]:
    """Return the stage times, in ms, of each long prompt of the window.

    path: `local` or `remote`. Raises BenchError if a long prompt was prefilled on another path, or
    if no long prompt has a record."""
    longs = {a.request_id for a in window.answers if a.ask.kind is Kind.LONG}
    told: list[dict[str, Any]] = [window.explained[i] for i in longs if i in window.explained]
    if not told or {record["path"] for record in told} != {path}:
        raise BenchError(f"long prompts of the {path} window: {[r['path'] for r in told]}")
    return [record["timings_ms"] for record in told]


@contextmanager
def copies(base: Path) -> Iterator[None]:
    """Copy 1 GiB of GPU memory from one process to another, five times a second."""
    from tests.support.gpu_programs import GpuProgram

    path = base / "descriptor"
    with GpuProgram("owner", base, *GIB) as owner:
        path.write_text(owner.greeting)
        token = owner.open()
        with GpuProgram("writer", path, 7) as writer:
            writer.tell("beat", token)
            yield
            owner.revoke(token)
            if (said := writer.answer()) != "fenced":
                raise BenchError(f"the process that copies beside the streams: {said}")


def slice_rows(seconds: float) -> Iterator[Row]:
    """Measure how long a small kernel waits while another process computes on the same GPU."""
    usual = median(kernel_times(1.0))
    with burning():
        beside = kernel_times(seconds)
    stalls = [took for took in beside if took > _STALL * usual]
    yield row("a small kernel alone", 1e3 * usual, "ms")
    if stalls:
        yield row("its wait for another process's turn", 1e3 * median(stalls), "ms")
    yield row("share of the time that it waits", sum(stalls) / sum(beside), "of 1")


def kernel_times(seconds: float) -> list[float]:
    """Run small kernels one after the other for `seconds`. Returns the seconds each took."""
    import torch

    small, found = torch.zeros(1024, device="cuda:0"), []
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        small += 1.0
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return found


@contextmanager
def burning() -> Iterator[None]:
    """Keep the first GPU busy in the `with` block: a child process runs `burn`."""
    command = [sys.executable, "-m", "benchmarks.gpu_serving"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            if child.stdout.readline().strip() != b"burning":
                raise BenchError("the process that keeps the GPU busy did not start")
            yield
        finally:
            child.kill()


def burn() -> None:
    """Multiply large matrices on the first GPU, without a pause, until killed.

    Prints `burning` once the GPU is busy."""
    import torch

    one = torch.zeros(4096, 4096, dtype=torch.bfloat16, device="cuda:0")
    events = [torch.cuda.Event() for _ in range(4)]
    for turn in range(1 << 60):
        events[turn % 4].synchronize()  # at most four turns are queued
        for _ in range(8):
            torch.mm(one, one)
        events[turn % 4].record()
        if turn == 4:
            print("burning", flush=True)


if __name__ == "__main__":
    burn()
