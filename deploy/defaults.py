"""What `pullfill up` decides so that the user need not: engine flags, environment, placement.

Flags given by the user come after these on the command line, and the last one wins.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pullfill.deploy import accelerator
from pullfill.deploy.vllm_flags import flag_name, group_flags

DEMO = "demo"

# For the demo model exact arithmetic and a quick start matter. It is small enough to be slow.
DEMO_FLAGS = (
    "--served-model-name=demo",
    "--dtype=float32",
    "--max-model-len=4096",
    "--max-num-batched-tokens=1024",
    "--max-num-seqs=32",
    "--enforce-eager",
)

CPU_FLAGS = {
    # A prefill worker maps its own cache and that of each decode worker: below 0.9 GB with both.
    DEMO: (f"--kv-cache-memory-bytes={64 << 20}",),
    "other": ("--enforce-eager", f"--kv-cache-memory-bytes={1 << 30}"),
}

PREFILL_CHUNK = 1024
"""Tokens in one step of a prefill worker on CPU, unless the user says."""
# Larger steps compute no faster there. But prompts that wait together share a step, so the first
# would end with the last.

_DECIDE_STEPS = frozenset(
    """
    config enable-chunked-prefill max-num-batched-tokens max-num-seqs performance-mode
    """.split()
)
"""vLLM flags that choose the size of a step, or leave it to vLLM. Then we do not choose it."""

GPU_MEMORY_SHARE = 0.88
"""Share of a GPU's memory that vLLM takes, divided by the workers on that GPU."""

KV_BYTES = "kv-cache-memory-bytes"


def engine_flags(model: str, *, gpus: int, workers: int) -> list[str]:
    """Return the default vLLM flags of every process.

    model: as the user typed it.
    workers: number of decode and prefill workers."""
    flags: list[str] = list(DEMO_FLAGS) if model == DEMO else []
    if not gpus:
        return flags + list(CPU_FLAGS[DEMO if model == DEMO else "other"])
    # vLLM refuses to start unless this share is free, also if the KV cache's size is given.
    share = GPU_MEMORY_SHARE / max(1, math.ceil(workers / gpus))
    flags.append(f"--gpu-memory-utilization={share:.3f}")
    return [*flags, f"--{KV_BYTES}={1 << 30}"] if model == DEMO else flags


def role_flags(role: str, arguments: Sequence[str], *, gpus: int) -> list[str]:
    """Return the flags that a worker of this role puts before those it was given."""
    if role != "prefill" or gpus:
        return []
    if any(flag_name(group[0]) in _DECIDE_STEPS for group in group_flags(arguments)):
        return []
    return [f"--max-num-batched-tokens={PREFILL_CHUNK}"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one worker runs.

    cores: CPU cores. Empty: any. The worker's ranks share them.
    gpus: indices among the GPUs that this process may use.
    ranks: number of processes that compute."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    ranks: int = 1


def place(
    ranks: Sequence[int], *, cores: Sequence[int], gpus: int, pin: bool, one_core: bool
) -> list[Placement]:
    """Return a placement for each worker.

    On GPUs each rank gets a GPU of its own. Workers of one rank share GPUs if there are too few.
    On CPU each worker gets cores of its own.

    ranks: TP x PP of each worker.
    one_core: give each rank one core only, for a small model.
    """
    if gpus:
        firsts = [sum(ranks[:index]) for index in range(len(ranks))]
        return [
            Placement(
                gpus=tuple(index % gpus for index in range(first, first + count)), ranks=count
            )
            for first, count in zip(firsts, ranks, strict=True)
        ]
    if not pin or len(cores) < 2 or not ranks:
        return [Placement(ranks=count) for count in ranks]
    # To share cores with another worker costs more than more threads bring.
    share = 1 if one_core else max(1, len(cores) // sum(ranks))
    places: list[Placement] = []
    start = 0
    for count in ranks:
        width = min(share * count, len(cores))
        if start + width > len(cores):
            start = 0
        places.append(Placement(cores=tuple(cores[start : start + width]), ranks=count))
        start += width
    return places


def starts_after(places: Sequence[Placement]) -> list[int | None]:
    """For each worker, return the index of the worker that must be ready before it starts, or None.

    vLLM sizes its KV cache by what the GPU's memory lost while it loaded its model. Of two workers
    that load on one GPU at the same time, each would count the other's memory as its own.
    """
    last: dict[int, int] = {}
    before: list[int | None] = []
    for index, place in enumerate(places):
        before.append(max((last[gpu] for gpu in place.gpus if gpu in last), default=None))
        last.update(dict.fromkeys(place.gpus, index))
    return before


def other_cores(workers: Sequence[Placement], decode: int, cores: Sequence[int]) -> tuple[int, ...]:
    """Return the cores for frontends: those that no worker is pinned to, else the decode workers'.

    Empty: any, since no worker is pinned.

    workers: where each worker runs, first the decode workers.
    decode: the number of decode workers.
    """
    # A frontend works for each decoded token. On a decode worker's core it slows only the answers
    # that it serves. On a prefill worker's core it would slow every prompt that waits.
    taken = {core for place in workers for core in place.cores}
    if not taken:
        return ()
    free = tuple(core for core in cores if core not in taken)
    return free or tuple(dict.fromkeys(core for place in workers[:decode] for core in place.cores))


def worker_env(
    base: Mapping[str, str], placement: Placement, *, local_model: bool
) -> dict[str, str]:
    """Return the environment of a worker or frontend. Variables that the user has set stay.

    On GPUs a worker sees only its own devices.
    """
    ours = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    env = {**ours, **base}
    if local_model:
        env.setdefault("HF_HUB_OFFLINE", "1")
    if placement.gpus:
        visible = accelerator.visible(base)
        names = [visible[gpu] if visible else str(gpu) for gpu in placement.gpus]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    if placement.cores:
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        env.setdefault("OMP_NUM_THREADS", str(max(1, len(placement.cores) // placement.ranks)))
    return env


def usable_cores() -> list[int]:
    """Return the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))
