"""The systems that the serving benchmark compares: one model, one set of flags, two cores.

`SYSTEMS[NAME].launch(FOLDER)` starts one and ends all of it. Its note says what a reader of the
figures must know about how it was set up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.live import BenchError
from benchmarks.serving import model
from benchmarks.serving.contract import Kind, Launcher, Running, System
from benchmarks.serving.systems_pullfill import cluster
from benchmarks.serving.systems_vllm import Cores, api_server
from pullfill.deploy.defaults import usable_cores

FLAGS = (
    f"--served-model-name={model.NAME}",
    f"--dtype={model.DTYPE}",
    "--enforce-eager",
    "--max-model-len=8192",
    "--max-num-seqs=64",
    "--block-size=128",
    f"--kv-cache-memory-bytes={512 << 20}",
    "--enable-prefix-caching",
    "--enable-prompt-tokens-details",
)
"""Of every engine of every system. Block size: what vLLM takes on a CPU."""


def two_cores() -> tuple[int, int]:
    """The cores of every system: the first two that we may use. Raises BenchError."""
    cores = usable_cores()
    if len(cores) < 2:
        raise BenchError("the serving benchmark needs two cores")
    return cores[0], cores[1]


@contextmanager
def _aggregated(name: str, extra: tuple[str, ...], base: Path) -> Iterator[Running]:
    both = two_cores()
    begin = time.monotonic()
    directory = model.model_directory()
    with api_server("vllm", directory, base, [*FLAGS, *extra], Cores(both, both)) as server:
        yield Running(
            name=name,
            urls=dict.fromkeys(Kind, server.url),
            model=model.NAME,
            pids={server.pid: "vllm"},
            ready_s=time.monotonic() - begin,
            logs=base,
        )


def _pullfill(name: str, policy: str, decode: int, prefill: int) -> Launcher:
    def launch(base: Path) -> AbstractContextManager[Running]:
        return cluster(name, policy, decode, prefill, FLAGS, base)

    return launch


def _systems() -> Iterator[System]:
    yield System(
        "agg",
        "one vLLM API server on both cores, two compute threads, vLLM's default chunk (2048)",
        partial(_aggregated, "agg", ()),
        aggregated=True,
    )
    yield System(
        "agg-chunk256",
        "as agg, with --max-num-batched-tokens 256",
        partial(_aggregated, "agg-chunk256", ("--max-num-batched-tokens=256",)),
        aggregated=True,
    )
    for policy in ("conditional", "always_remote", "always_local"):
        name = "pullfill-1p1d" + ("" if policy == "conditional" else f"-{policy}")
        yield System(
            name,
            f"`pullfill up` with one decode and one prefill worker, policy {policy}",
            _pullfill(name, policy, 1, 1),
            ours=True,
        )
    yield System(
        "pullfill-2p1d",
        "`pullfill up` with one decode and two prefill workers, policy conditional",
        _pullfill("pullfill-2p1d", "conditional", 1, 2),
        ours=True,
    )


SYSTEMS: dict[str, System] = {system.name: system for system in _systems()}
