"""What `pullfill up` decides so that the user need not: engine flags, environment, placement.

Flags given by the user come after these on the command line, and the last one wins.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pullfill.deploy import accelerator

DEMO = "demo"

DEMO_FLAGS = (
    "--served-model-name=demo",
    "--dtype=float32",
    "--max-model-len=4096",
    "--max-num-batched-tokens=1024",
    "--max-num-seqs=32",
    "--enforce-eager",
)
"""For the demo model exact arithmetic and a quick start matter. It is small enough to be slow."""

CPU_FLAGS = {
    # A prefill worker maps its own cache and that of each decode worker: below 0.9 GB with both.
    DEMO: (f"--kv-cache-memory-bytes={64 << 20}",),
    "other": ("--enforce-eager", f"--kv-cache-memory-bytes={1 << 30}"),
}

PREFILL_CHUNK = 1024
"""Tokens in one step of a prefill worker on CPU, unless the user says. Larger steps compute no
faster there; but prompts that wait together share one, and the first ends with the last."""

_DECIDE_STEPS = frozenset(
    """
    config enable-chunked-prefill max-num-batched-tokens max-num-seqs performance-mode
    """.split()
)
"""Who gives one of these may have chosen the size of steps, or leaves it to vLLM, which must then
choose (without chunked prefill a whole prompt must fit). A file's flags would lose against ours."""

GPU_MEMORY_SHARE = 0.88
"""Share of a GPU's memory that vLLM takes, divided by the workers on that GPU."""

KV_BYTES = "kv-cache-memory-bytes"

FRONTEND_ONLY = frozenset(
    """
    allow-credentials allowed-headers allowed-methods allowed-origins
    anthropic-disabled-thinking-effort api-key chat-template chat-template-content-format
    cohere-format cohere-is-reasoning-model default-chat-template-kwargs
    disable-access-log-for-endpoints disable-fastapi-docs disable-uvicorn-access-log
    enable-auto-tool-choice enable-force-include-usage enable-log-deltas enable-log-outputs
    enable-log-requests enable-offline-docs enable-per-request-metrics
    enable-prompt-tokens-details enable-request-id-headers enable-server-load-tracking
    enable-ssl-refresh enable-tokenizer-info-endpoint exclude-tools-when-tool-choice-none
    fingerprint-mode fingerprint-value h11-max-header-count h11-max-incomplete-event-size
    log-error-stack lora-modules max-log-len middleware response-role return-tokens-as-token-ids
    root-path sse-keep-alive-interval ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-ciphers
    ssl-keyfile tokens-only tool-call-parser tool-parser-plugin tool-server tool-strict-level
    trust-request-chat-template trust-request-mm-kwargs uvicorn-log-level
    """.split()
)
"""vLLM flags of its API server. Workers have none, so they do not get them."""


def group_flags(arguments: Sequence[str]) -> list[list[str]]:
    """Each flag with its values: ["--a", "1", "--b"] -> [["--a", "1"], ["--b"]].

    Raises ValueError for a value that no flag precedes.
    """
    groups: list[list[str]] = []
    for argument in arguments:
        if argument.startswith("-") and not _is_number(argument):
            groups.append([argument])
        elif groups and "=" not in groups[-1][0]:
            groups[-1].append(argument)
        else:
            raise ValueError(argument)
    return groups


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def flag_name(flag: str) -> str:
    """`--no-a_b=1` -> `a-b`."""
    return flag.split("=", 1)[0].lstrip("-").replace("_", "-").removeprefix("no-")


def worker_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without those that only an API server understands."""
    kept = (g for g in group_flags(arguments) if flag_name(g[0]) not in FRONTEND_ONLY)
    return [part for group in kept for part in group]


def engine_flags(model: str, *, gpus: int, workers: int) -> list[str]:
    """Return the default vLLM flags.

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

    On CPU each worker gets cores of its own: to share cores with another worker costs more than
    more threads bring.

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
    free = tuple(core for core in cores if core not in taken)
    if not taken or free:
        return free if taken else ()
    return tuple(dict.fromkeys(core for place in workers[:decode] for core in place.cores))


def worker_env(
    base: Mapping[str, str], placement: Placement, *, local_model: bool
) -> dict[str, str]:
    """Return the environment of a worker or frontend. Variables that the user has set stay.

    On GPUs a worker sees only its own devices.
    """
    env = dict(base)
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    env.setdefault("PYTHONUNBUFFERED", "1")
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
    """Cores this process may run on."""
    return sorted(os.sched_getaffinity(0))
