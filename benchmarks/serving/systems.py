"""The systems that the serving benchmark compares: one model, one set of flags, two cores.

`SYSTEMS[NAME].launch(FOLDER)` starts one and ends all of it. Its note says what a reader of the
figures must know about how it was set up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.live import BenchError
from benchmarks.serving import model
from benchmarks.serving.contract import Launcher, Name, Running, System
from benchmarks.serving.systems_pairs import nixl, round_robin
from benchmarks.serving.systems_pullfill import cluster
from benchmarks.serving.systems_vllm import Cores, api_server
from pullfill.deploy.plan import usable_cores

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

Pair = Callable[[str, tuple[int, int], Sequence[str], Path], AbstractContextManager[Running]]
"""Starts a system of two engines: (name, a core for each, flags, folder)."""


def two_cores() -> tuple[int, int]:
    """The cores of every system: the first two that we may use. Raises BenchError."""
    cores = usable_cores()
    if len(cores) < 2:
        raise BenchError("the serving benchmark needs two cores")
    return cores[0], cores[1]


@contextmanager
def _single(name: str, count: int, extra: tuple[str, ...], base: Path) -> Iterator[Running]:
    """One server on so many cores."""
    cores = two_cores()[:count]
    begin = time.monotonic()
    directory, flags = model.model_directory(), [*FLAGS, *extra]
    with api_server("vllm", directory, base, flags, Cores(cores, cores)) as server:
        yield Running(
            name=name,
            url=server.url,
            model=model.NAME,
            pids={server.pid: "vllm"},
            ready_s=time.monotonic() - begin,
        )


def _on_two_cores(start: Pair, name: str) -> Launcher:
    return lambda base: start(name, two_cores(), FLAGS, base)


_TWO_THREADS = "two threads of compute (OMP_NUM_THREADS=2, not bound)"
_ONE_PROCESS = "engine core and worker in one process (VLLM_ENABLE_V1_MULTIPROCESSING=0)"


def _systems() -> Iterator[System]:
    yield System(
        Name.AGGREGATED,
        f"one vLLM API server on both cores, {_TWO_THREADS}, {_ONE_PROCESS}; vLLM's own chunk "
        "(2048 tokens)",
        partial(_single, Name.AGGREGATED, 2, ()),
        aggregated=True,
    )
    yield System(
        Name.AGGREGATED_256,
        "the same with --max-num-batched-tokens 256",
        partial(_single, Name.AGGREGATED_256, 2, ("--max-num-batched-tokens=256",)),
        aggregated=True,
    )
    yield System(
        Name.ROUND_ROBIN,
        f"two vLLM API servers, all of each on a core of its own, one thread of compute each, "
        f"{_ONE_PROCESS}; a minimal asyncio proxy, on either core, sends requests to them in turn",
        _on_two_cores(round_robin, Name.ROUND_ROBIN),
        aggregated=True,
    )
    yield System(
        Name.NIXL,
        "vLLM's NixlConnector over UCX shared memory: a decode engine on one core, a prefill "
        f"engine on the other, one thread of compute each, {_ONE_PROCESS}; each API server beside "
        "its engine, a minimal proxy, which does what vLLM's example of one does, beside the "
        "prefill engine. NIXL moves its engine's threads to the last core: they were put back, and "
        "with them the thread of each that never sleeps",
        _on_two_cores(nixl, Name.NIXL),
    )
    yield System(
        Name.PULLFILL,
        "`pullfill up` as it places everything by itself, one decode and one prefill worker, "
        "policy conditional",
        lambda base: cluster(Name.PULLFILL, "conditional", 1, 1, FLAGS, base),
        ours=True,
    )
    yield System(
        Name.ONE_CORE,
        "orientation: one plain vLLM API server, all of it on one core, one thread of compute, "
        f"{_ONE_PROCESS}",
        partial(_single, Name.ONE_CORE, 1, ()),
    )


SYSTEMS: dict[str, System] = {system.name: system for system in _systems()}
